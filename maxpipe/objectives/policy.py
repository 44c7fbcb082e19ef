"""The objective of GRPO: tokens of completions made more or less likely by their advantage.

Sources: GRPO's loss and its estimate of the divergence are those of arXiv:2402.03300, the separate
upper bound of the ratio is DAPO's (arXiv:2503.14476).

How much better a completion is than the others of its group. No jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from maxpipe.pipeline.objective import BatchArraySpec, LogProbSpec, Objective, Scores

ON_POLICY = 1.0
"""In place of a log-probability, which is never positive: that of the weights that are trained. So
the ratio is exactly 1 where they have drawn the token themselves."""


@dataclass(frozen=True)
class Policy(Objective):
    """Losses of tokens. A batch has `old_logp`, log-probabilities by the weights that have drawn
    the tokens, or `AS_THEY_ARE`, and `advantages`, both `[B, T]`.
    """

    clip: float
    clip_ratio_high: float
    temperature: float = 1.0

    report_names: ClassVar[tuple[str, ...]] = ("entropy", "clipped")

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """Of tokens that were drawn."""
        return (LogProbSpec("targets", self.temperature),)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Of each token."""
        return {name: BatchArraySpec((), jnp.float32) for name in ("old_logp", "advantages")}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Loss of each token; the entropy, estimated from what was drawn; whether it is clipped."""
        (logp,), old, gain = scores, inputs["old_logp"], inputs["advantages"]
        ratio = jnp.exp(logp - jnp.where(old > 0, lax.stop_gradient(logp), old))
        low, high = 1 - self.clip, 1 + self.clip_ratio_high
        kept = jnp.minimum(ratio * gain, jnp.clip(ratio, low, high) * gain)
        is_clipped = ((gain > 0) & (ratio > high)) | ((gain < 0) & (ratio < low))
        return -kept, (-logp, is_clipped.astype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class KlPolicyGradient(Policy):
    """The same, held near a reference: a batch has its log-probabilities, `reference_logp`."""

    kl: float

    report_names: ClassVar[tuple[str, ...]] = (*Policy.report_names, "kl")

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Of each token."""
        return {**super().batch_arrays, "reference_logp": BatchArraySpec((), jnp.float32)}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """The divergence is reported, too."""
        lost, reports = super().__call__(scores, inputs)
        apart = kl_estimate(scores[0], inputs["reference_logp"])
        return lost + self.kl * apart, (*reports, apart)


def kl_estimate(logp: Float[Array, "B T"], reference: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """An unbiased estimate of the KL divergence, never negative (k3 of Schulman's)."""
    return jnp.expm1(reference - logp) - (reference - logp)


def advantages(rewards: np.ndarray, scale: Literal["std", "mean"]) -> np.ndarray:
    """float64 `[groups, members]`: rewards minus their group's mean, with `std` by its deviation.

    A group whose rewards are all the same has exactly 0: it says nothing.
    """
    rewards = np.asarray(rewards, np.float64)
    flat = rewards.min(axis=1, keepdims=True) == rewards.max(axis=1, keepdims=True)
    gain = np.where(flat, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    if scale == "mean":
        return gain
    return gain / np.where(flat, 1.0, rewards.std(axis=1, keepdims=True))
