"""Training objectives: loss functions of the log-probabilities that a network assigns to tokens.

An objective declares which log-probabilities it needs for each token, and is a pure function of
these log-probabilities. The loss head computes the log-probabilities with a sharded vocabulary and
propagates their cotangents to the logits. Objectives are therefore independent of stages and
shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

Scores = tuple[Array, ...]


class LogProbSpec(NamedTuple):
    """Float32 log-probabilities of tokens: `log softmax(logits / temperature)`."""

    ids: str
    """Name of the batch array that contains the token IDs, int `[B, T]` or `[B, T, K]`."""
    temperature: float = 1.0


class BatchArraySpec(NamedTuple):
    """A batch array that an objective needs in addition to the standard batch arrays."""

    shape: tuple[int, ...]
    """Shape per token, or per sequence if `per_sequence` is set."""
    dtype: Any
    per_sequence: bool = False


class Objective(ABC):
    """A loss function per token or per segment.

    A per-token objective receives scores with the shape of the IDs and returns losses `[B, T]`,
    which are weighted by `loss_mask`. A per-segment objective receives sums over the tokens of
    each segment `[B, S]`, weighted by `loss_mask`, and returns losses `[B, N]`. S is
    `segments_per_loss` times N, and segment s contains the tokens with segment ID s + 1. Metrics
    have the same shape as the losses. The step divides the summed losses and each summed metric by
    the sum of the `normaliser` array over the batch.
    """

    segments_per_loss: ClassVar[int] = 0
    """Number of segments that each loss depends on. If 0, losses are per token."""
    normaliser: ClassVar[str] = "loss_mask"
    """Name of the batch array that contains the weight of each loss, `[B, T]` or `[B, N]`."""
    report_names: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics, in the order in which they are returned after the losses."""

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """Return the specs of the log-probabilities that the objective uses for each token."""
        return (LogProbSpec("targets"),)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """Return the specs of the batch arrays that the objective needs, keyed by name."""
        return {}

    @property
    def eval_objective(self) -> Objective:
        """Return the objective used to evaluate held-out documents."""
        return self

    @abstractmethod
    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return (losses, metrics). `inputs` contains `batch_arrays` and the IDs of
        `log_prob_specs`.
        """


class CrossEntropy(Objective):
    """Next-token cross entropy, for pre-training and supervised fine-tuning."""

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the loss of each token, in nats."""
        del inputs
        return -scores[0], ()


def segment_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int
) -> Float[Array, "B S"]:
    """Return the sums over the tokens of each of the segments 1 to `count`."""
    return jnp.einsum("bt,bts->bs", values, _segment_one_hot(segment_ids, count))


def broadcast_segments(
    values: Float[Array, "B S"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the entry of each token's segment, or 0 for tokens without a segment; the transpose of
    `segment_sums`.
    """
    return jnp.einsum("bs,bts->bt", values, _segment_one_hot(segment_ids, values.shape[1]))


def _segment_one_hot(segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B T S"]:
    return (segment_ids[..., None] == jnp.arange(1, count + 1)).astype(jnp.float32)


def reference_loss(
    objective: Objective, logits: Float[Array, "B T V"], batch: Mapping[str, Array]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the mean loss and metrics for unsharded logits, as a reference for pipelined runs."""
    mask = jnp.asarray(batch["loss_mask"], jnp.float32)
    weight = jnp.asarray(batch[objective.normaliser], jnp.float32)
    scores = tuple(
        _reference_log_probs(logits, batch[spec.ids], spec.temperature)
        for spec in objective.log_prob_specs
    )
    if objective.segments_per_loss:
        ids, count = batch["segment_ids"], objective.segments_per_loss * weight.shape[1]
        scores = tuple(segment_sums(score * mask, ids, count) for score in scores)
    lost, reports = objective(scores, batch)
    total = jnp.maximum(weight.sum(), 1.0)
    means = [(value * weight).sum() / total for value in (lost, *reports)]
    return means[0], dict(zip(objective.report_names, means[1:], strict=True))


def _reference_log_probs(logits: Array, ids: Array, temperature: float) -> Array:
    scores = jax.nn.log_softmax(logits / temperature)
    if ids.ndim == 3:
        return jnp.take_along_axis(scores, ids, axis=-1)
    return jnp.take_along_axis(scores, ids[..., None], axis=-1)[..., 0]
