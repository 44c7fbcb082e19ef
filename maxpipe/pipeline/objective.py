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


_TOKEN_ARRAYS = ("tokens", "targets", "segment_ids", "positions")


def find_objective_error(objective: Objective, shape: tuple[int, int]) -> str:
    """Return the rule that the result of an objective breaks, or an empty string.

    The objective is only traced, with a microbatch of `shape` `[B, T]` on a device. An exception
    of the objective is raised.
    """
    rows, length = shape
    # A transposed loss must have another shape.
    shape = (rows + 1, length) if rows == length else (rows, length)
    arrays: dict[str, jax.ShapeDtypeStruct] = {
        **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in _TOKEN_ARRAYS},
        "loss_mask": jax.ShapeDtypeStruct(shape, jnp.float32),
    }
    for name, spec in objective.batch_arrays.items():
        rank = 1 if spec.per_sequence else 2
        arrays[name] = jax.ShapeDtypeStruct((*shape[:rank], *spec.shape), spec.dtype)
    specs = objective.log_prob_specs
    if unknown := [spec.ids for spec in specs if spec.ids not in arrays]:
        return f"log_prob_specs reads {unknown[0]}, which is not an array of a batch."
    if objective.normaliser not in arrays:
        return f"normaliser is {objective.normaliser}, which is not an array of a batch."
    wanted, scores_of = shape, [arrays[spec.ids].shape for spec in specs]
    given = {spec.ids: arrays[spec.ids] for spec in specs}
    given |= {name: arrays[name] for name in objective.batch_arrays}
    if objective.segments_per_loss:
        wanted, given = arrays[objective.normaliser].shape, arrays
        segments = (shape[0], objective.segments_per_loss * wanted[1])
        scores_of = [segments] * len(specs)
    found = [""]

    def run(scores: Scores, inputs: Mapping[str, Array]) -> None:
        found[0] = _find_result_error(objective, objective(scores, inputs), wanted)

    scores = tuple(jax.ShapeDtypeStruct(each, jnp.float32) for each in scores_of)
    jax.eval_shape(run, scores, given)
    return found[0]


def _find_result_error(objective: Objective, result: Any, shape: tuple[int, ...]) -> str:
    """Return the rule that the traced result of an objective breaks, or an empty string."""
    if not isinstance(result, tuple) or len(result) != 2:
        returned = f"a tuple of {len(result)}" if isinstance(result, tuple) else _type_of(result)
        return f"must return a tuple (losses, metrics), but returned {returned}."
    losses, reports = result
    if error := _find_array_error(losses, "loss", shape):
        return error
    if losses.dtype != jnp.float32:
        return f"must return losses with dtype float32, but returned {losses.dtype.name}."
    if not isinstance(reports, tuple | list):
        return f"must return metrics as a tuple, but returned {_type_of(reports)}."
    if len(reports) != len(objective.report_names):
        names = ", ".join(map(str, objective.report_names)) or "none"
        return f"returned {len(reports)} metrics, but report_names lists {names}."
    for name, report in zip(objective.report_names, reports, strict=True):
        if error := _find_array_error(report, f"value of {name}", shape):
            return error
    return ""


def _find_array_error(value: Any, what: str, shape: tuple[int, ...]) -> str:
    wanted = f"must return one {what} per token, with the shape {list(shape)} of a microbatch"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return f"{wanted}, but returned {_type_of(value)}."
    if tuple(value.shape) != shape:
        return f"{wanted}, but returned the shape {list(value.shape)}."
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_):
        return f"{wanted}, but returned the dtype {value.dtype}."
    return ""


def _type_of(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


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
