"""Distillation: a student learns the probabilities that a teacher gives to each next token.

Of these the teacher's K most likely tokens are known, and all others together are one bucket: the
loss is the divergence of two distributions over K + 1 buckets. With K of the whole vocabulary it is
that of the whole distributions.

Source: Hinton et al. (arXiv:1503.02531), whose gradients are multiplied by temperature^2 so that
they do not shrink with it; the reverse direction is that of MiniLLM (arXiv:2306.08543).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from maxpipe.pipeline.objective import BatchArraySpec, CrossEntropy, LogProbSpec, Objective, Scores

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Arrays of a batch `[B, T, K]`: the teacher's most likely tokens, the most likely first, and the
logarithms of their probabilities at the temperature, float32."""

_LEAST = 2.0**-22
"""The least probability of the bucket of all other tokens: sums of K float32 are no more exact."""

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Distill(Objective):
    """A divergence from a teacher, mixed with the cross entropy of the text."""

    direction: Direction
    """`forward`: of the student from the teacher's distribution, KL(teacher | student). `reverse`:
    KL(student | teacher)."""
    temperature: float
    top_k: int
    weight: float
    """Of the divergence; the cross entropy has the rest of 1."""

    report_names: ClassVar[tuple[str, ...]] = ("cross_entropy", "divergence")

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """The student's log-probabilities of the text, and of the teacher's tokens."""
        return LogProbSpec("targets"), LogProbSpec(TEACHER_IDS, self.temperature)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """What the teacher says of each token."""
        shape = (self.top_k,)
        return {
            TEACHER_IDS: BatchArraySpec(shape, jnp.int32),
            TEACHER_LOGPROBS: BatchArraySpec(shape, jnp.float32),
        }

    @property
    def eval_objective(self) -> Objective:
        """The cross entropy: no teacher says anything of documents for evaluation."""
        return CrossEntropy()

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Nats of each token; the cross entropy and the divergence of which they are the mean."""
        found, student = scores
        divergence = kl_divergence(student, inputs[TEACHER_LOGPROBS], self.direction)
        divergence, entropy = self.temperature**2 * divergence, -found
        lost = self.weight * divergence + (1.0 - self.weight) * entropy
        return lost, (entropy, divergence)


def kl_divergence(
    student: Float[Array, "*tokens K"], teacher: Float[Array, "*tokens K"], direction: Direction
) -> Float[Array, "*tokens"]:
    """KL over K + 1 buckets, from log-probabilities of the same K tokens."""
    student, teacher = append_remainder(student), append_remainder(teacher)
    given, other = (teacher, student) if direction == "forward" else (student, teacher)
    return (jnp.exp(given) * (given - other)).sum(axis=-1)


def append_remainder(scores: Float[Array, "*tokens K"]) -> Float[Array, "*tokens buckets"]:
    """The same, and the logarithm of what is left of 1."""
    total = jnp.minimum(jax.nn.logsumexp(scores, axis=-1), -_LEAST)
    return jnp.concatenate([scores, log1mexp(total)[..., None]], axis=-1)


def log1mexp(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """log(1 - exp(x)) of numbers below 0, exact near 0 and far from it (Maechler, 2012)."""
    is_near = x > -np.log(2.0)
    # Both are computed everywhere: each gets numbers that it and its gradient are finite for.
    near = jnp.log(-jnp.expm1(jnp.where(is_near, x, -1.0)))
    return jnp.where(is_near, near, jnp.log1p(-jnp.exp(jnp.where(is_near, -1.0, x))))
