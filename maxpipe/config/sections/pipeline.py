"""Config section `pipeline`: layer partition, schedule and saved activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from maxpipe.config.foreign_keys import value_action
from maxpipe.config.rules import (
    BATCH_AXES,
    RULES,
    add_ranges,
    axis_keys,
    axis_size,
    batch_shards,
    did_you_mean,
    rule,
)
from maxpipe.config.sections.model import MODEL_KEYS, RING_KEYS, uses_ring
from maxpipe.config.sections.train import BatchRamp
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import format_divisors, pluralize, round_up
from maxpipe.io.typed_json import legacy_value, renamed_from
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.registry import describe

# Schedule modules import numpy, which shell completion does not need, so functions import them
# lazily.
if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Partition of the layers into pipeline chunks, and the schedule that runs them."""

    schedule: str = "interleaved"
    """Pipeline schedule. The command `maxpipe schedule` draws a schedule. Schedules with unsplit
    backward passes are `gpipe`, `circular`, `breadth_first`, `1f1b` and `interleaved`. The memory
    use of `1f1b` and `interleaved` does not depend on the number of microbatches. `gpipe` and
    `1f1b` have one repeat, and `interleaved` is 1F1B with any number of repeats. Schedules with
    split backward passes are `zb_h1` and `zb_h2`, and, with two repeats in a V-shaped placement,
    `zb_v`, `v_half`, `v_min` and `dualpipe_v`. Schedules with split backward passes are efficient
    only with little recomputation: set `pipeline.remat` to `names` or `none`. `file:PATH` runs the
    schedule defined in a CSV file."""
    microbatches: int = 1
    """Number of microbatches per batch. With a single stage, this is the number of gradient
    accumulation steps."""
    repeats: int = 1
    """Circular repeats: number of chunks per stage (virtual stages in Megatron). More repeats
    reduce the pipeline bubble but increase the number of messages between stages."""
    group: int = 0
    """Number of consecutive microbatches that a stage runs before it switches to the next repeat. 0
    selects the number of stages, which minimizes memory use. Ignored unless `pipeline.schedule` is
    `interleaved`."""
    delayed_forwarding: bool = False
    """Give each message one extra tick, so that communication overlaps with compute. The extra
    ticks double the pipeline bubble. Supported only by `gpipe` and `circular`; the 1F1B schedules
    overlap communication without extra ticks."""
    layers_per_chunk: list[int] = field(default_factory=list, metadata=renamed_from("cut"))
    """Layer partition: the number of layers in each chunk, as a list of stages x repeats integers
    in model order. If empty, layers are divided as evenly as possible."""
    prologue_layers: int = field(default=0, metadata=renamed_from("layers_outside"))
    """Number of prologue layers: the first layers of the model, which run outside the pipeline. All
    stages run the prologue layers at the same time, each on a different microbatch. Use prologue
    layers if the number of layers is not divisible by the number of chunks. Every stage stores the
    weights of the prologue layers."""
    weight_gather: Literal["iteration", "window", "step"] = field(
        default="iteration", metadata=renamed_from(values={"visit": "window"})
    )
    """How often weights that are sharded over fsdp are all-gathered. `iteration`: for every layer
    in every forward and backward pass (least memory). `window`: each time a stage switches to
    another chunk, so that the microbatches of one `pipeline.group` share an all-gather; each stage
    keeps a prefetch window of gathered chunks in memory. `step`: once per step (least
    communication)."""
    remat: Literal["full", "chunk", "names", "none"] = "full"
    """Activations saved for the backward pass. `full`: the input of each layer; each layer is
    recomputed once. `chunk`: the input of each chunk; each layer is recomputed twice (least
    memory). `names`: the input of each layer and the activations in `pipeline.saved_names`. `none`:
    all activations; nothing is recomputed."""
    saved_names: list[str] = field(default_factory=lambda: ["matmuls"])
    """Activations saved with `pipeline.remat=names`. `matmuls` saves the outputs of all matmuls;
    `attention` and `mlp` save only the matmul outputs of the attention or MLP sublayer. You can
    also list the names of activations: `query`, `key`, `value`, `context`, `attention_out`, `gate`,
    `up`, and activations specific to the model family."""
    offloaded_names: list[str] = field(default_factory=list)
    """Activations that `pipeline.remat=names` offloads to host memory. Accepts the names and
    presets of `pipeline.saved_names`."""
    idle: Literal["skip", "compute"] = "skip"
    """Behavior of a stage in an empty slot of the schedule. `skip` branches around the computation.
    `compute` runs the computation on zeros and discards the result, so that all stages have the
    same control flow."""
    offload_weights: bool = False
    """Offload the weight matrices of the pipelined layers to host memory, including frozen
    matrices. Each layer's shard is copied to the device before it is gathered, and the optimizer
    updates one layer at a time. Results are bitwise identical to training without offloading.
    Requires `pipeline.weight_gather=iteration`."""
    loss_block_tokens: int = field(default=-1, metadata=legacy_value(0))
    """Block size for computing logits and loss: the number of microbatch tokens per device whose
    logits are computed at once. 0 computes all logits of a microbatch at once. -1 selects blocks of
    2048 tokens if the logits exceed 512 MiB, as with long sequences or few stages, and is otherwise
    equivalent to 0. The block size affects memory use, but changes the loss only by rounding
    errors."""


add_ranges(
    Bound("pipeline.microbatches", 1, 1),
    Bound("pipeline.repeats", 1, 1),
    Bound("pipeline.group", 0, 0, why="0 selects the number of stages"),
    Bound("pipeline.prologue_layers", 0, 0),
    Bound("pipeline.loss_block_tokens", -1, -1, why="-1 uses blocks if the logits are large"),
)


@rule(*RING_KEYS, "pipeline.idle", *axis_keys("stage"))
def _ring_attention_needs_idle_compute(config: Config) -> Iterator[RuleViolation]:
    several = axis_size(config.mesh, "stage") != 1
    if several and config.pipeline.idle != "compute" and uses_ring(config):
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "pipeline.idle",
            f"must be compute with mesh.context_attention={config.mesh.context_attention} and "
            "several stages: devices exchange keys in each layer, and would wait forever for a "
            "stage that has fewer layers.",
            "Set pipeline.idle=compute, or mesh.context_attention=all_gather.",
        )


@rule("pipeline.offload_weights", "pipeline.weight_gather")
def _offloaded_weights_are_gathered_per_layer(config: Config) -> Iterator[RuleViolation]:
    pipeline = config.pipeline
    if pipeline.offload_weights and pipeline.weight_gather != "iteration":
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "pipeline.offload_weights",
            f"must be false with pipeline.weight_gather={pipeline.weight_gather}, which stores the "
            "gathered weights of several layers on the device.",
            "Set pipeline.offload_weights=false, or pipeline.weight_gather=iteration.",
        )


def activations(names: Iterable[str], model: ModelConfig) -> tuple[str, ...]:
    """Return the model activations that are selected by the names and presets, without
    duplicates.
    """
    known = describe(model).activations
    return tuple(dict.fromkeys(activation for name in names for activation in known[name]))


@rule("pipeline.schedule")
def _schedule_is_known(config: Config) -> Iterator[RuleViolation]:
    from maxpipe.schedule.catalog import FILE_PREFIX, INTERLEAVED, SCHEDULES

    name = config.pipeline.schedule
    if name not in SCHEDULES and not name.startswith(FILE_PREFIX):
        yield RuleViolation(
            Code.SCHED_NAME,
            "pipeline.schedule",
            f"must be one of {', '.join(SCHEDULES)}, or {FILE_PREFIX}PATH.",
            value_action("pipeline.schedule", name, SCHEDULES)
            or f"Set pipeline.schedule={INTERLEAVED}.",
        )


@rule("pipeline.repeats", "pipeline.schedule")
def _repeats_fit_the_schedule(config: Config) -> Iterator[RuleViolation]:
    from maxpipe.schedule.catalog import CIRCULAR, GPIPE, INTERLEAVED, SCHEDULES, repeats_rule

    spec = SCHEDULES.get(config.pipeline.schedule)
    if spec and spec.repeats and spec.repeats != config.pipeline.repeats:
        free = CIRCULAR if config.pipeline.schedule == GPIPE else INTERLEAVED
        yield RuleViolation(
            Code.SCHED_SIZES,
            "pipeline.repeats",
            repeats_rule(config.pipeline.schedule, spec),
            f"Set pipeline.schedule={free}, or pipeline.repeats={spec.repeats}.",
        )


@rule("pipeline.delayed_forwarding", "pipeline.schedule")
def _schedule_uses_delayed_forwarding(config: Config) -> Iterator[RuleViolation]:
    from maxpipe.schedule.catalog import FILE_PREFIX, SCHEDULES

    schedule = config.pipeline.schedule
    readers = [name for name, spec in SCHEDULES.items() if spec.supports_delay]
    if config.pipeline.delayed_forwarding and schedule in SCHEDULES and schedule not in readers:
        yield RuleViolation(
            Code.SCHED_SIZES,
            "pipeline.delayed_forwarding",
            f"is only supported by pipeline.schedule {', '.join(readers)} and {FILE_PREFIX}PATH, "
            f"but the schedule is {schedule}.",
            "Set pipeline.delayed_forwarding=false.",
        )


@rule(
    "pipeline.layers_per_chunk",
    "pipeline.prologue_layers",
    "pipeline.repeats",
    "model.num_layers",
    *axis_keys("stage"),
)
def _layers_per_chunk_sum_matches(config: Config) -> Iterator[RuleViolation]:
    cut, outside = config.pipeline.layers_per_chunk, config.pipeline.prologue_layers
    layers = config.model.num_layers - outside
    if not cut:
        return
    stages = axis_size(config.mesh, "stage")
    chunks = config.pipeline.repeats * stages if stages else len(cut)
    if len(cut) == chunks and sum(cut) == layers and min(cut) >= 1:
        return
    wanted = f"model.num_layers ({config.model.num_layers})"
    if outside:
        wanted += f" - pipeline.prologue_layers ({outside}) = {layers}"
    yield RuleViolation(
        Code.SCHED_SIZES,
        "pipeline.layers_per_chunk",
        f"must be {chunks} (stages x repeats) positive integers that sum to {wanted}; got "
        f"{len(cut)} that sum to {sum(cut)}.",
        "Set pipeline.layers_per_chunk=[] to divide layers evenly.",
    )


def _names_are_known(key: str) -> None:
    @rule(key, *MODEL_KEYS)
    def find(config: Config) -> Iterator[RuleViolation]:
        choices = describe(config.model).activations
        presets = [name for name, found in choices.items() if name not in found]
        single = [name for name in choices if name not in presets]
        for name in getattr(config.pipeline, key.removeprefix("pipeline.")):
            if name not in choices:
                guess = did_you_mean(name, choices) or "matmuls"
                yield RuleViolation(
                    Code.CFG_VALUE,
                    key,
                    f"contains {name!r}, which is neither an activation of this model "
                    f"({', '.join(single)}) nor a preset ({', '.join(presets)}).",
                    f"Set {key}=[{guess}].",
                )


_names_are_known("pipeline.saved_names")


_names_are_known("pipeline.offloaded_names")


@rule("pipeline.offloaded_names", "pipeline.remat")
def _offloaded_names_are_read(config: Config) -> Iterator[RuleViolation]:
    if config.pipeline.offloaded_names and config.pipeline.remat != "names":
        yield RuleViolation(
            Code.CFG_IGNORED,
            "pipeline.offloaded_names",
            f"requires pipeline.remat=names, but pipeline.remat is {config.pipeline.remat}.",
            "Set pipeline.offloaded_names=[], or pipeline.remat=names.",
        )


@rule("pipeline.repeats", "model.num_layers", *axis_keys("stage"))
def _each_chunk_has_a_layer(config: Config) -> Iterator[RuleViolation]:
    stages = axis_size(config.mesh, "stage")
    layers, repeats = config.model.num_layers, config.pipeline.repeats
    if stages is None or stages * repeats <= layers:
        return
    rule = (
        f"requires at least {pluralize(stages * repeats, 'layer')} (stages {stages} x repeats "
        f"{repeats}), but model.num_layers is {layers}: each chunk needs at least one layer."
    )
    more = f"model.num_layers={stages * repeats} or more"
    if layers >= stages:
        yield RuleViolation(
            Code.SCHED_SIZES,
            "pipeline.repeats",
            rule,
            f"Set pipeline.repeats={layers // stages}, or {more}.",
        )
    else:
        fewer = f"or at most {pluralize(layers, 'stage')} with pipeline.repeats=1"
        yield RuleViolation(Code.SCHED_SIZES, "mesh.ici_stage", rule, f"Set {more}, {fewer}.")


@rule("pipeline.prologue_layers", "pipeline.repeats", "model.num_layers", *axis_keys("stage"))
def _prologue_leaves_a_layer_per_chunk(config: Config) -> Iterator[RuleViolation]:
    stages = axis_size(config.mesh, "stage")
    layers, repeats = config.model.num_layers, config.pipeline.repeats
    most = layers - (stages or 1) * repeats
    if stages is None or not 0 <= most < config.pipeline.prologue_layers:
        return
    yield RuleViolation(
        Code.SCHED_SIZES,
        "pipeline.prologue_layers",
        f"must be at most {most} = model.num_layers ({layers}) - stages ({stages}) x repeats "
        f"({repeats}): each chunk needs at least one layer.",
        f"Set pipeline.prologue_layers={layers % (stages * repeats)} for chunks of equal size.",
    )


def _reads_group(schedule: str) -> bool:
    from maxpipe.schedule.catalog import SCHEDULES

    return schedule in SCHEDULES and SCHEDULES[schedule].uses_group


@rule("pipeline.group", "pipeline.schedule")
def _group_is_read(config: Config) -> Iterator[RuleViolation]:
    from maxpipe.schedule.catalog import INTERLEAVED

    schedule = config.pipeline.schedule
    if config.pipeline.group and not _reads_group(schedule):
        yield RuleViolation(
            Code.SCHED_SIZES,
            "pipeline.group",
            f"is only supported by pipeline.schedule={INTERLEAVED}, but the schedule is "
            f"{schedule}.",
            f"Set pipeline.group=0, or pipeline.schedule={INTERLEAVED}.",
        )


@rule("pipeline.group", "pipeline.schedule", "pipeline.microbatches", *axis_keys("stage"))
def _group_is_in_range(config: Config) -> Iterator[RuleViolation]:
    group, microbatches = config.pipeline.group, config.pipeline.microbatches
    stages = axis_size(config.mesh, "stage")
    low = min(stages or 1, microbatches)
    if not _reads_group(config.pipeline.schedule) or not group or low <= group <= microbatches:
        return
    known = f"the stages ({stages})" if stages else "1"
    yield RuleViolation(
        Code.SCHED_SIZES,
        "pipeline.group",
        f"must be 0, or between {known} and the microbatches ({microbatches}): a smaller group "
        "would stall the pipeline.",
        "Set pipeline.group=0 for the default, the number of stages.",
    )


@rule("pipeline.microbatches", "pipeline.repeats", *axis_keys("stage"))
def _schedule_has_an_end(config: Config) -> Iterator[RuleViolation]:
    from maxpipe.schedule.catalog import MAX_FORWARDS

    repeats, microbatches = config.pipeline.repeats, config.pipeline.microbatches
    stages = axis_size(config.mesh, "stage") or 1
    if (count := stages * repeats * microbatches) <= MAX_FORWARDS:
        return
    most = MAX_FORWARDS // (stages * repeats)
    # Any divisor of the given number of microbatches also divides the batch size.
    fewer = next((n for n in range(most, 0, -1) if microbatches % n == 0), 1)
    yield RuleViolation(
        Code.SCHED_SIZES,
        "pipeline.microbatches",
        f"results in {count:,} forward slots with stages ({stages}) x repeats ({repeats}), but a "
        f"schedule can have at most {MAX_FORWARDS:,}.",
        f"Set pipeline.microbatches={fewer}.",
    )


@rule("train.batch_size", "pipeline.microbatches", *axis_keys(*BATCH_AXES))
def _batch_divides(config: Config) -> Iterator[RuleViolation]:
    batch, microbatches = config.train.batch_size, config.pipeline.microbatches
    shards, sizes = batch_shards(config.mesh)
    if batch % (microbatches * shards) == 0:
        return
    sizes = [f"pipeline.microbatches ({microbatches})", *sizes]
    action = f"Set train.batch_size={round_up(batch, microbatches * shards)}"
    if batch % shards == 0:
        action += f", or pipeline.microbatches to {format_divisors(batch // shards)}"
    yield RuleViolation(
        Code.CFG_SIZES,
        "train.batch_size",
        f"must be a multiple of {' x '.join(sizes)} = {microbatches * shards}: each device gets "
        "the same number of sequences of each microbatch.",
        f"{action}.",
    )


_MICROBATCHES = "pipeline.microbatches"


_MICROBATCH_RULES = [reader for reader in RULES if _MICROBATCHES in reader.keys]
"""Rules that are also checked for the smaller batches of `train.batch_ramp`, which have fewer
microbatches."""


@rule("train.batch_ramp", *{key: None for reader in _MICROBATCH_RULES for key in reader.keys})
def _ramp_has_whole_microbatches(config: Config) -> Iterator[RuleViolation]:
    key, train, pipeline = "train.batch_ramp", config.train, config.pipeline
    if train.batch_size % pipeline.microbatches:
        return
    microbatch = train.batch_size // pipeline.microbatches
    stages = BatchRamp.from_config(train).stages
    more = train.batch_size // math.gcd(microbatch, *(rows for rows, _ in stages))
    for rows, _ in stages:
        if rows >= train.batch_size:
            continue  # another rule reports this batch size
        if rows % microbatch:
            larger = round_up(rows, microbatch)
            take = f"Use {larger}" if larger < train.batch_size else f"Leave {rows} out"
            yield RuleViolation(
                Code.CFG_SIZES,
                key,
                f"must have batch sizes that are multiples of {microbatch}, the microbatch size "
                f"(train.batch_size ({train.batch_size}) / {_MICROBATCHES} "
                f"({pipeline.microbatches})), but {rows} is not.",
                f"{take}, or set {_MICROBATCHES}={more}.",
            )
            continue
        fewer = replace(
            config,
            train=replace(train, batch_size=rows),
            pipeline=replace(pipeline, microbatches=rows // microbatch),
        )
        for finding in (f for reader in _MICROBATCH_RULES for f in reader.find(fewer)):
            text = f"has a batch size of {rows}, for which {finding.key} {finding.rule}"
            yield RuleViolation(finding.code, key, text, f"Leave {rows} out, or: {finding.action}")
