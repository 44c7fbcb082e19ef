"""Distillation: a student learns a teacher's next-token probabilities.

The teacher's log-probabilities are known for its K most likely tokens, and all other tokens form
one bucket. The loss is the divergence between two distributions over K + 1 buckets. If K is the
vocabulary size, the loss is the divergence between the full distributions.

Source: Hinton et al. (arXiv:1503.02531) multiply the loss by temperature^2, so that gradients do
not shrink at high temperatures. The reverse direction follows MiniLLM (arXiv:2306.08543).
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
"""Batch arrays `[B, T, K]`: the ids of the teacher's most likely tokens, in descending order of
probability, and their float32 log-probabilities at `temperature`."""

_LEAST = 2.0**-22
"""Minimum probability of the bucket of all other tokens, which is the accuracy of float32 sums."""

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Distill(Objective):
    """Weighted sum of the divergence from a teacher and the cross entropy of the text."""

    direction: Direction
    """`forward`: KL(teacher | student). `reverse`: KL(student | teacher)."""
    temperature: float
    top_k: int
    weight: float
    """Weight of the divergence; the weight of the cross entropy is 1 - `weight`."""

    report_names: ClassVar[tuple[str, ...]] = ("cross_entropy", "divergence")

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """Student log-probabilities of the target tokens and of the teacher's tokens."""
        return LogProbSpec("targets"), LogProbSpec(TEACHER_IDS, self.temperature)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Teacher ids and log-probabilities of each token."""
        shape = (self.top_k,)
        return {
            TEACHER_IDS: BatchArraySpec(shape, jnp.int32),
            TEACHER_LOGPROBS: BatchArraySpec(shape, jnp.float32),
        }

    @property
    def eval_objective(self) -> Objective:
        """Cross entropy, because evaluation documents have no teacher logits."""
        return CrossEntropy()

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the loss of each token in nats; the metrics are cross entropy and divergence."""
        found, student = scores
        divergence = kl_divergence(student, inputs[TEACHER_LOGPROBS], self.direction)
        divergence, entropy = self.temperature**2 * divergence, -found
        lost = self.weight * divergence + (1.0 - self.weight) * entropy
        return lost, (entropy, divergence)


def kl_divergence(
    student: Float[Array, "*tokens K"], teacher: Float[Array, "*tokens K"], direction: Direction
) -> Float[Array, "*tokens"]:
    """Return the KL divergence over K + 1 buckets, given log-probabilities of the same K tokens."""
    student, teacher = append_remainder(student), append_remainder(teacher)
    given, other = (teacher, student) if direction == "forward" else (student, teacher)
    return (jnp.exp(given) * (given - other)).sum(axis=-1)


def append_remainder(scores: Float[Array, "*tokens K"]) -> Float[Array, "*tokens buckets"]:
    """Append the log-probability of all other tokens."""
    total = jnp.minimum(jax.nn.logsumexp(scores, axis=-1), -_LEAST)
    return jnp.concatenate([scores, log1mexp(total)[..., None]], axis=-1)


def log1mexp(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return log(1 - exp(x)) for x < 0, accurate for all magnitudes of x (Maechler, 2012)."""
    is_near = x > -np.log(2.0)
    # Both branches are computed for all entries, so both need inputs with finite values and
    # gradients.
    near = jnp.log(-jnp.expm1(jnp.where(is_near, x, -1.0)))
    return jnp.where(is_near, near, jnp.log1p(-jnp.exp(jnp.where(is_near, -1.0, x))))
