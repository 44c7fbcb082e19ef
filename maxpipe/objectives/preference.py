"""Preference losses (DPO, IPO and ORPO), as functions of the log-probabilities of two responses.

Pair i of a sequence consists of segment 2i + 1, the chosen response, and segment 2i + 2, the
rejected response.

Sources: arXiv:2305.18290, arXiv:2310.12036 and arXiv:2403.07691 for the losses; TRL for the use of
means and sums, and for the names of the metrics.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.config.sections.preference import PreferenceConfig
from maxpipe.data.packing import PAIRS, REFERENCE, RESPONSE_TOKENS
from maxpipe.pipeline.objective import BatchArraySpec, Objective, Scores

_CERTAIN = -1e-7
"""Largest log-probability used to compute odds; larger values are clipped."""


class PairValues(NamedTuple):
    """Values of the chosen and rejected response of each pair."""

    chosen: Float[Array, "B N"]
    rejected: Float[Array, "B N"]

    @property
    def difference(self) -> Float[Array, "B N"]:
        """Value of the chosen response minus that of the rejected response."""
        return self.chosen - self.rejected


@dataclass(frozen=True)
class Preference(Objective):
    """Base class of the preference losses, which defines their batch arrays and metrics."""

    segments_per_loss: ClassVar[int] = 2
    normaliser: ClassVar[str] = PAIRS
    report_names: ClassVar[tuple[str, ...]] = (
        *("reward_chosen", "reward_rejected", "margin", "accuracy"),
        *("nats_chosen", "nats_rejected"),
    )
    needs_reference: ClassVar[bool] = True
    """Whether the loss uses log-probabilities of the initial weights."""
    most_pairs: int
    """Maximum number of pairs per sequence (N)."""
    by_length: bool
    """Whether the log-probability of a response is the mean over its tokens instead of the sum."""

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Weights of the pairs; reference log-probability and number of tokens of each response."""
        by_row = partial(BatchArraySpec, dtype=jnp.float32, per_sequence=True)
        halves = by_row((2 * self.most_pairs,))
        return {PAIRS: by_row((self.most_pairs,)), REFERENCE: halves, RESPONSE_TOKENS: halves}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the losses and metrics of each pair `[B, N]`."""
        tokens = jnp.maximum(inputs[RESPONSE_TOKENS], 1.0)
        # Entries without a pair get a placeholder, so that no value is infinite.
        is_half = jnp.repeat(inputs[PAIRS], 2, axis=1) > 0
        means = _split_pairs(jnp.where(is_half, scores[0] / tokens, -1.0))
        of = _split_pairs(scores[0] / tokens if self.by_length else scores[0])
        reference = inputs[REFERENCE] / tokens if self.by_length else inputs[REFERENCE]
        lost, rewards = self.compute_loss(of, _split_pairs(reference), means)
        better = (rewards.chosen > rewards.rejected).astype(jnp.float32)
        reports = (*rewards, rewards.difference, better, -means.chosen, -means.rejected)
        return lost, jax.lax.stop_gradient(reports)

    @abstractmethod
    def compute_loss(
        self, policy: PairValues, reference: PairValues, means: PairValues
    ) -> tuple[Float[Array, "B N"], PairValues]:
        """Return (losses, rewards), given log-probabilities and their means per token."""


@dataclass(frozen=True)
class Dpo(Preference):
    """DPO: equation 7 of arXiv:2305.18290, with the label smoothing of arXiv:2306.15479."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def compute_loss(
        self, policy: PairValues, reference: PairValues, means: PairValues
    ) -> tuple[Float[Array, "B N"], PairValues]:
        """Return losses and rewards, as in `Preference.compute_loss`."""
        del means
        rewards = _rewards(self.beta, policy, reference)
        right = -jax.nn.log_sigmoid(rewards.difference)
        if not self.label_smoothing:
            return right, rewards
        wrong = -jax.nn.log_sigmoid(-rewards.difference)
        return (1 - self.label_smoothing) * right + self.label_smoothing * wrong, rewards


@dataclass(frozen=True)
class Ipo(Preference):
    """IPO: equation 17 of arXiv:2310.12036, where `beta` is tau."""

    beta: float = 0.1

    def compute_loss(
        self, policy: PairValues, reference: PairValues, means: PairValues
    ) -> tuple[Float[Array, "B N"], PairValues]:
        """Return losses and rewards, as in `Preference.compute_loss`."""
        del means
        gap = policy.difference - reference.difference
        return (gap - 1 / (2 * self.beta)) ** 2, _rewards(self.beta, policy, reference)


@dataclass(frozen=True)
class Orpo(Preference):
    """ORPO: equations 6 and 7 of arXiv:2403.07691, where `odds_weight` is lambda."""

    needs_reference: ClassVar[bool] = False
    odds_weight: float = 0.1

    def compute_loss(
        self, policy: PairValues, reference: PairValues, means: PairValues
    ) -> tuple[Float[Array, "B N"], PairValues]:
        """Return losses and rewards, as in `Preference.compute_loss`."""
        del policy, reference
        odds = PairValues(*(each - _log_complement(each) for each in means))
        lost = -means.chosen - self.odds_weight * jax.nn.log_sigmoid(odds.difference)
        return lost, PairValues(*(self.odds_weight * each for each in means))


def make_preference(config: PreferenceConfig, most_pairs: int) -> Preference:
    """Return the preference objective that a config section selects."""
    named = config.length_normalised
    by_length = config.loss != "dpo" if named == "auto" else named == "on"
    match config.loss:
        case "dpo":
            return Dpo(most_pairs, by_length, config.beta, config.label_smoothing)
        case "ipo":
            return Ipo(most_pairs, by_length, config.beta)
        case "orpo":
            return Orpo(most_pairs, by_length, config.odds_weight)


def _split_pairs(values: Float[Array, "B S"]) -> PairValues:
    return PairValues(values[:, ::2], values[:, 1::2])


def _rewards(beta: float, policy: PairValues, reference: PairValues) -> PairValues:
    pairs = zip(policy, reference, strict=True)
    return PairValues(*(beta * (mine - other) for mine, other in pairs))


def _log_complement(log_probability: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Return log(1 - p), given log(p)."""
    return jnp.log(-jnp.expm1(jnp.minimum(log_probability, _CERTAIN)))
