"""What is learned: a loss of the log-probabilities that a network gives to tokens.

An objective says which log-probabilities it reads of each token, and is a plain function of these
few numbers. The loss head finds them where the vocabulary is divided over devices, and brings their
cotangents back to the logits: an objective knows neither stages nor shards.
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
    """Log-probabilities of tokens, `log softmax(logits / temperature)`, float32."""

    ids: str
    """The array of a batch that says which tokens, int `[B, T]` or `[B, T, K]`."""
    temperature: float = 1.0


class BatchArraySpec(NamedTuple):
    """An array of a batch that an objective needs, beside those that all batches have."""

    shape: tuple[int, ...]
    """Of each token, or of each row."""
    dtype: Any
    per_sequence: bool = False


class Objective(ABC):
    """A loss by token or by segment.

    By token it is called with scores of the shape of what is read, and returns losses `[B, T]`;
    each counts as often as `loss_mask` says. By segment it is called with sums over the tokens of
    each segment, weighted by `loss_mask`, `[B, S]`, and returns losses `[B, N]`: S is `by_segment`
    times N, and segment s of a row is the one whose tokens have the number s + 1. Reports have the
    shape of losses. The step divides sums by that of `normaliser` over the batch.
    """

    segments_per_loss: ClassVar[int] = 0
    """Segments of one loss. 0: losses are of tokens."""
    normaliser: ClassVar[str] = "loss_mask"
    """The array of a batch that says how often each loss counts, `[B, T]` or `[B, N]`."""
    report_names: ClassVar[tuple[str, ...]] = ()
    """Names of what is returned beside losses."""

    @property
    def log_prob_specs(self) -> tuple[LogProbSpec, ...]:
        """What it is given of each token."""
        return (LogProbSpec("targets"),)

    @property
    def batch_arrays(self) -> Mapping[str, BatchArraySpec]:
        """What a batch has for it."""
        return {}

    @property
    def eval_objective(self) -> Objective:
        """What documents for evaluation are measured by."""
        return self

    @abstractmethod
    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """(scores, `arrays` of a microbatch and what `reads` names) -> losses, reports."""


class CrossEntropy(Objective):
    """Of the next token: what pretraining and supervised fine-tuning minimise."""

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Nats of each token."""
        del inputs
        return -scores[0], ()


def segment_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int
) -> Float[Array, "B S"]:
    """Sums over the tokens of segments 1 to `count`."""
    return jnp.einsum("bt,bts->bs", values, _segment_one_hot(segment_ids, count))


def broadcast_segments(
    values: Float[Array, "B S"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """To each token the value of its segment, 0 to those of none: the transpose of the sums."""
    return jnp.einsum("bs,bts->bt", values, _segment_one_hot(segment_ids, values.shape[1]))


def _segment_one_hot(segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B T S"]:
    return (segment_ids[..., None] == jnp.arange(1, count + 1)).astype(jnp.float32)


def reference_loss(
    objective: Objective, logits: Float[Array, "B T V"], batch: Mapping[str, Array]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The mean loss and reports of whole logits: what every pipelined run is held against."""
    mask = jnp.asarray(batch["loss_mask"], jnp.float32)
    weight = jnp.asarray(batch[objective.normaliser], jnp.float32)
    scores = tuple(
        _reference_log_probs(logits, batch[each.ids], each.temperature)
        for each in objective.log_prob_specs
    )
    if objective.segments_per_loss:
        ids, count = batch["segment_ids"], objective.segments_per_loss * weight.shape[1]
        scores = tuple(segment_sums(score * mask, ids, count) for score in scores)
    lost, reports = objective(scores, batch)
    total = jnp.maximum(weight.sum(), 1.0)
    means = [(each * weight).sum() / total for each in (lost, *reports)]
    return means[0], dict(zip(objective.report_names, means[1:], strict=True))


def _reference_log_probs(logits: Array, ids: Array, temperature: float) -> Array:
    scores = jax.nn.log_softmax(logits / temperature)
    if ids.ndim == 3:
        return jnp.take_along_axis(scores, ids, axis=-1)
    return jnp.take_along_axis(scores, ids[..., None], axis=-1)[..., 0]
