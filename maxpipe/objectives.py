"""Fine-tuning losses as functions of log-probabilities: preference, policy and distillation losses.

*Preference losses* (DPO, IPO and ORPO) compare the log-probabilities of two responses. Pair i of a
sequence consists of segment 2i + 1 (the chosen response) and segment 2i + 2 (the rejected
response).
Sources: arXiv:2305.18290, arXiv:2310.12036 and arXiv:2403.07691 for the losses; TRL for the choice
between means and sums, and for the metric names.

The *GRPO objective* is a clipped policy gradient with an estimate of the KL divergence. Sources:
arXiv:2402.03300 for the GRPO loss and its estimate of the KL divergence; DAPO (arXiv:2503.14476)
for the separate upper clipping bound of the ratio. `advantages` normalizes rewards within each
group of completions, without JAX.

*Distillation*: a student learns a teacher's next-token probabilities. The teacher's
log-probabilities are given for the teacher's K most likely tokens, and all other tokens form one
bucket. The loss is the divergence between two distributions over K + 1 buckets. If K is the
vocabulary size, this is the divergence between the full distributions. Source: Hinton et al.
(arXiv:1503.02531) multiply the loss by temperature^2, so that gradients do not shrink at high
temperatures. The reverse direction follows MiniLLM (arXiv:2306.08543).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from maxpipe.config.sections.preference import PreferenceConfig
from maxpipe.data.packing import PAIRS, REFERENCE, RESPONSE_TOKENS
from maxpipe.pipeline.objective import BatchArraySpec, CrossEntropy, LogProbSpec, Objective, Scores

# --- a user's loss ----------------------------------------------------------------

LossFunction = Callable[[Array, Mapping[str, Array]], Array]
"""Function that maps (log-probabilities of the target tokens `[B, T]` in nats, batch arrays) to
losses `[B, T]`."""


@dataclass(frozen=True)
class TokenLoss(Objective):
    """Loss of each token as a function of the log-probability of its target."""

    function: LossFunction

    @property
    def eval_objective(self) -> Objective:
        """Return the cross-entropy objective, so that evaluation losses are in nats."""
        return CrossEntropy()

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the loss of each token."""
        return self.function(scores[0], inputs), ()


# --- preference losses --------------------------------------------------------

_CERTAIN = -1e-7
"""Largest log-probability used to compute odds; larger log-probabilities are clipped to it."""


class PairValues(NamedTuple):
    """Two values per pair: one for the chosen response and one for the rejected response."""

    chosen: Float[Array, "B N"]
    rejected: Float[Array, "B N"]

    @property
    def difference(self) -> Float[Array, "B N"]:
        """Return the chosen response's value minus the rejected response's value."""
        return self.chosen - self.rejected


@dataclass(frozen=True)
class Preference(Objective):
    """Base class for the preference losses; defines their batch arrays and metrics."""

    segments_per_loss: ClassVar[int] = 2
    normaliser: ClassVar[str] = PAIRS
    report_names: ClassVar[tuple[str, ...]] = (
        *("reward_chosen", "reward_rejected", "margin", "accuracy"),
        *("nats_chosen", "nats_rejected"),
    )
    needs_reference: ClassVar[bool] = True
    """Whether the loss needs log-probabilities under the initial weights."""
    most_pairs: int
    """Maximum number of pairs per sequence (N)."""
    by_length: bool
    """Whether the log-probability of a response is averaged over its tokens instead of summed."""

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Return the specs of the additional batch arrays: the pair weights, and each response's
        reference log-probability and token count.
        """
        by_row = partial(BatchArraySpec, dtype=jnp.float32, per_sequence=True)
        halves = by_row((2 * self.most_pairs,))
        return {PAIRS: by_row((self.most_pairs,)), REFERENCE: halves, RESPONSE_TOKENS: halves}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the loss and metrics of each pair `[B, N]`."""
        tokens = jnp.maximum(inputs[RESPONSE_TOKENS], 1.0)
        # Entries without a pair get a placeholder, so that no entry is infinite.
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
        """Return each pair's loss and rewards, given log-probabilities and their per-token
        means.
        """


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
    """Return the preference objective selected by a config section."""
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


# --- policy gradient ----------------------------------------------------------

ON_POLICY = 1.0
"""Value of `old_logp` that marks on-policy tokens; real log-probabilities are never positive. The
current weights sampled these tokens, so their probability ratio is exactly 1."""


@dataclass(frozen=True)
class Policy(Objective):
    """Policy-gradient loss per token. Batches contain two additional arrays `[B, T]`: `old_logp`
    (log-probabilities at sampling time, or `ON_POLICY`) and `advantages`.
    """

    clip: float
    clip_ratio_high: float
    temperature: float = 1.0

    report_names: ClassVar[tuple[str, ...]] = ("entropy", "clipped")

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """Return the spec that selects the sampled tokens' log-probabilities from the model
        outputs.
        """
        return (LogProbSpec("targets", self.temperature),)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Return the specs of the additional batch arrays, which have one entry per token."""
        return {name: BatchArraySpec((), jnp.float32) for name in ("old_logp", "advantages")}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return each token's loss; the metrics are an entropy estimate and a clipping flag."""
        (logp,), old, gain = scores, inputs["old_logp"], inputs["advantages"]
        ratio = jnp.exp(logp - jnp.where(old > 0, lax.stop_gradient(logp), old))
        low, high = 1 - self.clip, 1 + self.clip_ratio_high
        kept = jnp.minimum(ratio * gain, jnp.clip(ratio, low, high) * gain)
        is_clipped = ((gain > 0) & (ratio > high)) | ((gain < 0) & (ratio < low))
        return -kept, (-logp, is_clipped.astype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class KlPolicyGradient(Policy):
    """A policy loss with a KL term; batches also contain the reference model's
    log-probabilities.
    """

    kl: float

    report_names: ClassVar[tuple[str, ...]] = (*Policy.report_names, "kl")

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Return the specs of the additional batch arrays, which have one entry per token."""
        return {**super().batch_arrays, "reference_logp": BatchArraySpec((), jnp.float32)}

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return each token's loss; the metrics also contain the KL divergence."""
        lost, reports = super().__call__(scores, inputs)
        apart = kl_estimate(scores[0], inputs["reference_logp"])
        return lost + self.kl * apart, (*reports, apart)


def kl_estimate(logp: Float[Array, "B T"], reference: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return an unbiased, nonnegative estimate of the KL divergence (Schulman's k3)."""
    return jnp.expm1(reference - logp) - (reference - logp)


def advantages(rewards: np.ndarray, scale: Literal["std", "mean"]) -> np.ndarray:
    """Return float64 advantages `[groups, members]`: each reward minus the mean reward of its
    group.

    If `scale` is `std`, the result is divided by the standard deviation of the group. If all
    rewards in a group are equal, all advantages in the group are exactly 0, because the group
    expresses no preference.
    """
    rewards = np.asarray(rewards, np.float64)
    flat = rewards.min(axis=1, keepdims=True) == rewards.max(axis=1, keepdims=True)
    gain = np.where(flat, 0.0, rewards - rewards.mean(axis=1, keepdims=True))
    if scale == "mean":
        return gain
    return gain / np.where(flat, 1.0, rewards.std(axis=1, keepdims=True))


# --- distillation -------------------------------------------------------------

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Batch arrays `[B, T, K]`: the IDs of the teacher's most likely tokens, in descending order of
probability, and their float32 log-probabilities at `temperature`."""

_LEAST = 2.0**-22
"""Minimum probability of the bucket of all other tokens. This minimum is the accuracy of float32
sums."""

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Distill(Objective):
    """Weighted sum of the divergence from a teacher and the cross entropy of the target tokens."""

    direction: Direction
    """`forward`: KL(teacher | student). `reverse`: KL(student | teacher)."""
    temperature: float
    top_k: int
    weight: float
    """Weight of the divergence; the cross entropy has weight 1 - `weight`."""

    report_names: ClassVar[tuple[str, ...]] = ("cross_entropy", "divergence")

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """Return the specs that select the student's log-probabilities of the target tokens and of
        the teacher's most likely tokens.
        """
        return LogProbSpec("targets"), LogProbSpec(TEACHER_IDS, self.temperature)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Return the specs of the additional batch arrays: the teacher's token IDs and
        log-probabilities for each token.
        """
        shape = (self.top_k,)
        return {
            TEACHER_IDS: BatchArraySpec(shape, jnp.int32),
            TEACHER_LOGPROBS: BatchArraySpec(shape, jnp.float32),
        }

    @property
    def eval_objective(self) -> Objective:
        """Return the cross-entropy objective, because evaluation documents have no teacher
        logits.
        """
        return CrossEntropy()

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return each token's loss in nats; the metrics are the cross entropy and the
        divergence.
        """
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
    """Append the total log-probability of all other tokens."""
    total = jnp.minimum(jax.nn.logsumexp(scores, axis=-1), -_LEAST)
    return jnp.concatenate([scores, log1mexp(total)[..., None]], axis=-1)


def log1mexp(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return log(1 - exp(x)) for x < 0, accurate at all magnitudes of x (Maechler, 2012)."""
    is_near = x > -np.log(2.0)
    # Both branches are computed for all entries, so the inputs of both must have finite values and
    # gradients.
    near = jnp.log(-jnp.expm1(jnp.where(is_near, x, -1.0)))
    return jnp.where(is_near, near, jnp.log1p(-jnp.exp(jnp.where(is_near, -1.0, x))))
