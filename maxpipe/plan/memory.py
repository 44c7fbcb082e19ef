"""Memory of one device, foretold from the config alone, term by term.

What the train step holds is counted: state, buffers of the table, sums of gradients. What it
needs besides at its fullest moment is a sum of arrays that are alive then; `benchmarks/`
holds the total against the peak that the compiler states. No jax.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.pipeline.table import Schedule
from maxpipe.plan.sizes import BYTES, Sizes

ARGUMENTS = ("state", "batch")
"""Terms that are there before the step starts; the others are temporary."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by term; the terms are those of `plan.advice`."""

    terms: dict[str, float]
    host: float
    """In host memory."""

    @property
    def arguments(self) -> float:
        """State and batch."""
        return sum(self.terms[name] for name in ARGUMENTS)

    @property
    def temporary(self) -> float:
        """Everything else."""
        return self.total - self.arguments

    @property
    def total(self) -> float:
        """All terms."""
        return sum(self.terms.values())

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Terms that count, the largest first."""
        ordered = sorted(self.terms.items(), key=lambda item: -item[1])
        return [(name, size) for name, size in ordered if size > 0.001 * self.total]


def memory(sizes: Sizes, schedule: Schedule, *, tpu: bool = True) -> Memory:
    """What the train step of a config takes."""
    terms = state(sizes) | buffers(sizes, schedule)
    terms |= _gathered(sizes)
    terms["copies"] = _copies(sizes) if tpu else 0.0
    terms |= _at_work(sizes, schedule)
    on_host = schedule.num_stash * sizes.layers_per_chunk * sizes.kept_bytes()[1]
    return Memory({name: size for name, size in terms.items() if size}, on_host)


def state(sizes: Sizes) -> dict[str, float]:
    """Arguments of the step."""
    model, train = sizes.config.model, sizes.config.train
    # Four arrays of ids and the mask, int32 and float32.
    batch = sizes.rows_per_device * (5 * 4 * train.sequence_length + 4)
    return {
        "state": 3.0 * BYTES[model.param_dtype] * sizes.shard_elements + 12,
        "batch": float(batch),
    }


def buffers(sizes: Sizes, schedule: Schedule) -> dict[str, float]:
    """What the loop over ticks carries, as the engine allocates it."""
    pipeline, model = sizes.config.pipeline, sizes.config.model
    size, length = BYTES[model.compute_dtype], sizes.layers_per_chunk
    message = float(size * sizes.activation)
    visits, by_visit = schedule.visits, _by_visit(sizes, schedule)
    kept = sizes.kept_bytes()[0]
    stash = schedule.num_stash * kept * (1 if pipeline.remat == "chunk" else length)
    found = {
        "inbox": schedule.num_inbox * message,
        "stash": stash,
        "sent": message * (1 if schedule.mixed else 2 if schedule.delayed else 1),
        "gradients": 4.0 * _gradient_elements(sizes, schedule),
        "deferred": 0.0,
        "window": 0.0,
        "partial": 0.0,
        "outside": 0.0,
    }
    if schedule.mixed:
        found["deferred"] = schedule.num_deferred * length * sizes.deferred_bytes()
    if by_visit:
        whole = sizes.layer_elements(whole=True) * length
        found["window"] = float(size * visits.num_window * whole)
        found["partial"] = 4.0 * visits.num_gradient * whole
    if outside := pipeline.layers_outside:
        layers = 1 if pipeline.remat == "chunk" else outside
        found["outside"] = schedule.outside.num_slots * (message + layers * kept)
    return found


def _by_visit(sizes: Sizes, schedule: Schedule) -> bool:
    return sizes.config.pipeline.weight_gather == "visit" and schedule.visits.num_window > 0


def _by_step(sizes: Sizes, schedule: Schedule) -> bool:
    mode = sizes.config.pipeline.weight_gather
    return mode == "step" or (mode == "visit" and not _by_visit(sizes, schedule))


def _gradient_elements(sizes: Sizes, schedule: Schedule) -> int:
    pipeline = sizes.config.pipeline
    once = pipeline.weight_gather != "iteration"
    by_column = sizes.splits_columns
    layers = sizes.layer_slots * sizes.layer_elements(whole=_by_step(sizes, schedule))
    layers += pipeline.layers_outside * sizes.layer_elements(whole=once)
    ends = sizes.matrix_elements(whole=not by_column) + sizes.matrix_elements(whole=once)
    return layers + ends + sizes.config.model.d_model


def _gathered(sizes: Sizes) -> dict[str, float]:
    """Whole weights that are held from start to end."""
    pipeline, size = sizes.config.pipeline, BYTES[sizes.config.model.compute_dtype]
    if pipeline.weight_gather == "iteration":
        return {"held": 0.0}
    elements = sizes.matrix_elements(whole=True)
    elements += pipeline.layers_outside * sizes.layer_elements(whole=True)
    if pipeline.weight_gather == "step":
        elements += sizes.layer_slots * sizes.layer_elements(whole=True)
    return {"held": float(size * elements)}


def _copies(sizes: Sizes) -> float:
    """Shards in compute type, which XLA for TPU keeps throughout the step."""
    pipeline, size = sizes.config.pipeline, BYTES[sizes.config.model.compute_dtype]
    elements = sizes.matrix_elements()  # what the embedding looks up
    if pipeline.remat != "chunk" and pipeline.weight_gather != "step":
        elements += sizes.layer_slots * sizes.layer_elements()
        if pipeline.weight_gather == "iteration":
            elements += sizes.matrix_elements()
    return float(size * elements)


WEIGHTS = {"iteration": 2.0, "visit": 0.8, "step": 0.8}
"""Copies in compute type of a layer's whole weights that its backward holds, gathered ones and
gradients together. Fitted, like the next three."""
SCORE_BYTES = 6.9
"""For each pair of query and key: scores of all blocks of attention in float32, and the gradient of
their probabilities."""
HIDDEN = 6.0
"""Copies of the MLP's hidden activations at the moment that its backward is at work."""
SUMMED = 1.2
"""Copies of whole activations that are on their way to be summed over tensor."""


def _at_work(sizes: Sizes, schedule: Schedule) -> dict[str, float]:
    """What is alive besides at the fullest moment: in a layer's backward or in the loss head."""
    model, pipeline = sizes.config.model, sizes.config.pipeline
    size, gathers = BYTES[model.compute_dtype], pipeline.weight_gather == "iteration"
    copies = WEIGHTS["step" if _by_step(sizes, schedule) else pipeline.weight_gather]
    attention = SCORE_BYTES / 2 * size * sizes.held_scores
    if sizes.tensor > 1:
        attention += SUMMED * size * sizes.activation
    layer = copies * size * sizes.layer_elements(whole=True)
    layer += max(attention, HIDDEN * size * sizes.named(("gate",)))
    if pipeline.remat == "chunk":
        layer += sizes.layers_per_chunk * size * sizes.activation
    # Logits in float32, the head's matrix, its gradient in float32.
    matrix = sizes.matrix_elements(whole=True)
    logits = 4.0 * sizes.tokens * (matrix // model.d_model) + (4 + size * gathers) * matrix
    return {"layer": layer} if layer >= logits else {"logits": logits}
