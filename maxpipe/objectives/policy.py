"""The GRPO objective: a clipped policy gradient with an estimate of the KL divergence.

Sources: arXiv:2402.03300 for GRPO's loss and its estimate of the KL divergence; DAPO
(arXiv:2503.14476) for the separate upper bound of the ratio.

`advantages` compares the rewards within each group of completions, without JAX.
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
"""Value of `old_logp` that marks on-policy tokens; log-probabilities are never positive. The
current weights sampled these tokens, so their ratio is exactly 1."""


@dataclass(frozen=True)
class Policy(Objective):
    """Policy-gradient loss per token. Batches have two arrays `[B, T]`: `old_logp`
    (log-probabilities at sampling time, or `ON_POLICY`) and `advantages`.
    """

    clip: float
    clip_ratio_high: float
    temperature: float = 1.0

    report_names: ClassVar[tuple[str, ...]] = ("entropy", "clipped")

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """Log-probabilities of the sampled tokens."""
        return (LogProbSpec("targets", self.temperature),)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Arrays with one value per token."""
        return {name: BatchArraySpec((), jnp.float32) for name in ("old_logp", "advantages")}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return each token's loss; the metrics are the entropy estimate and a clipping flag."""
        (logp,), old, gain = scores, inputs["old_logp"], inputs["advantages"]
        ratio = jnp.exp(logp - jnp.where(old > 0, lax.stop_gradient(logp), old))
        low, high = 1 - self.clip, 1 + self.clip_ratio_high
        kept = jnp.minimum(ratio * gain, jnp.clip(ratio, low, high) * gain)
        is_clipped = ((gain > 0) & (ratio > high)) | ((gain < 0) & (ratio < low))
        return -kept, (-logp, is_clipped.astype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class KlPolicyGradient(Policy):
    """A policy loss with a KL term; batches also have the reference model's log-probabilities."""

    kl: float

    report_names: ClassVar[tuple[str, ...]] = (*Policy.report_names, "kl")

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Arrays with one value per token."""
        return {**super().batch_arrays, "reference_logp": BatchArraySpec((), jnp.float32)}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the loss of each token; the metrics also contain the KL divergence."""
        lost, reports = super().__call__(scores, inputs)
        apart = kl_estimate(scores[0], inputs["reference_logp"])
        return lost + self.kl * apart, (*reports, apart)


def kl_estimate(logp: Float[Array, "B T"], reference: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return an unbiased, non-negative estimate of the KL divergence (Schulman's k3)."""
    return jnp.expm1(reference - logp) - (reference - logp)


def advantages(rewards: np.ndarray, scale: Literal["std", "mean"]) -> np.ndarray:
    """Return float64 `[groups, members]`: each reward minus the mean of its group.

    With `std`, the result is divided by the group's standard deviation. If all rewards of a group
    are equal, its advantages are exactly 0, because the group contains no preference.
    """
    rewards = np.asarray(rewards, np.float64)
    flat = rewards.min(axis=1, keepdims=True) == rewards.max(axis=1, keepdims=True)
    gain = np.where(flat, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    if scale == "mean":
        return gain
    return gain / np.where(flat, 1.0, rewards.std(axis=1, keepdims=True))
