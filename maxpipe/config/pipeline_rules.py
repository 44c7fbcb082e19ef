"""Rules for the layer partition and the pipeline schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from maxpipe.config.foreign_keys import value_action
from maxpipe.config.keys import KEYS
from maxpipe.config.rules import (
    BATCH_AXES,
    RULES,
    axis_keys,
    axis_size,
    batch_shards,
    did_you_mean,
    rule,
)
from maxpipe.config.schema import Config
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.errors import RuleViolation
from maxpipe.io.formatting import format_divisors, pluralize, round_up
from maxpipe.models.config import ModelConfig
from maxpipe.models.registry import describe
from maxpipe.schedule.catalog import (
    CIRCULAR,
    FILE_PREFIX,
    INTERLEAVED,
    MAX_FORWARDS,
    SCHEDULES,
    repeats_rule,
)


def activations(names: Iterable[str], model: ModelConfig) -> tuple[str, ...]:
    """Return the activations of the model that the names and presets select, without duplicates."""
    known = describe(model).activations
    return tuple(dict.fromkeys(each for name in names for each in known[name]))


@rule("pipeline.schedule")
def _schedule_is_known(config: Config) -> Iterator[RuleViolation]:
    name = config.pipeline.schedule
    if name not in SCHEDULES and not name.startswith(FILE_PREFIX):
        yield RuleViolation(
            "pipeline.schedule",
            f"must be one of {', '.join(SCHEDULES)}, or {FILE_PREFIX}PATH.",
            value_action("pipeline.schedule", name, SCHEDULES)
            or f"Set pipeline.schedule={INTERLEAVED}.",
        )


@rule("pipeline.repeats", "pipeline.schedule")
def _repeats_fit_the_schedule(config: Config) -> Iterator[RuleViolation]:
    spec = SCHEDULES.get(config.pipeline.schedule)
    if spec and spec.repeats and spec.repeats != config.pipeline.repeats:
        free = CIRCULAR if spec.repeats == 1 else INTERLEAVED
        yield RuleViolation(
            "pipeline.repeats",
            repeats_rule(config.pipeline.schedule, spec),
            f"Set pipeline.schedule={free}, or pipeline.repeats={spec.repeats}.",
        )


@rule("pipeline.delayed_forwarding", "pipeline.schedule")
def _schedule_uses_delayed_forwarding(config: Config) -> Iterator[RuleViolation]:
    schedule = config.pipeline.schedule
    readers = [name for name, spec in SCHEDULES.items() if spec.supports_delay]
    if config.pipeline.delayed_forwarding and schedule in SCHEDULES and schedule not in readers:
        yield RuleViolation(
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
        "pipeline.layers_per_chunk",
        f"must be {chunks} integers of at least 1 (stages x repeats) with the sum {wanted}: the "
        f"list has {len(cut)} with the sum {sum(cut)}.",
        "Set pipeline.layers_per_chunk=[] to divide layers evenly.",
    )


def _names_are_known(key: str) -> None:
    @rule(key, *(each for each in KEYS if each.startswith("model.")))
    def find(config: Config) -> Iterator[RuleViolation]:
        choices = describe(config.model).activations
        presets = [name for name, found in choices.items() if name not in found]
        single = [name for name in choices if name not in presets]
        for name in getattr(config.pipeline, key.removeprefix("pipeline.")):
            if name not in choices:
                guess = did_you_mean(name, choices) or "matmuls"
                yield RuleViolation(
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
        f"{repeats}), but model.num_layers is {layers}: each chunk has at least one layer."
    )
    more = f"model.num_layers={stages * repeats} or more"
    if layers >= stages:
        yield RuleViolation(
            "pipeline.repeats", rule, f"Set pipeline.repeats={layers // stages}, or {more}."
        )
    else:
        fewer = f"or at most {pluralize(layers, 'stage')} with pipeline.repeats=1"
        yield RuleViolation("mesh.ici_stage", rule, f"Set {more}, {fewer}.")


@rule("pipeline.prologue_layers", "pipeline.repeats", "model.num_layers", *axis_keys("stage"))
def _prologue_leaves_a_layer_per_chunk(config: Config) -> Iterator[RuleViolation]:
    stages = axis_size(config.mesh, "stage")
    layers, repeats = config.model.num_layers, config.pipeline.repeats
    most = layers - (stages or 1) * repeats
    if stages is None or not 0 <= most < config.pipeline.prologue_layers:
        return
    yield RuleViolation(
        "pipeline.prologue_layers",
        f"must be at most {most} = model.num_layers ({layers}) - stages ({stages}) x repeats "
        f"({repeats}): each chunk has at least one layer.",
        f"Set pipeline.prologue_layers={layers % (stages * repeats)} for chunks of equal size.",
    )


def _reads_group(schedule: str) -> bool:
    return schedule in SCHEDULES and SCHEDULES[schedule].uses_group


@rule("pipeline.group", "pipeline.schedule")
def _group_is_read(config: Config) -> Iterator[RuleViolation]:
    schedule = config.pipeline.schedule
    if config.pipeline.group and not _reads_group(schedule):
        yield RuleViolation(
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
        "pipeline.group",
        f"must be 0, or between {known} and the microbatches ({microbatches}): a smaller group "
        "would stall the pipeline.",
        "Set pipeline.group=0 for the default, the number of stages.",
    )


@rule("pipeline.microbatches", "pipeline.repeats", *axis_keys("stage"))
def _schedule_has_an_end(config: Config) -> Iterator[RuleViolation]:
    repeats, microbatches = config.pipeline.repeats, config.pipeline.microbatches
    stages = axis_size(config.mesh, "stage") or 1
    if (count := stages * repeats * microbatches) <= MAX_FORWARDS:
        return
    most = MAX_FORWARDS // (stages * repeats)
    # Any divisor of the given number of microbatches also divides the batch size.
    fewer = next((n for n in range(most, 0, -1) if microbatches % n == 0), 1)
    yield RuleViolation(
        "pipeline.microbatches",
        f"results in {count:,} forwards with stages ({stages}) x repeats ({repeats}); a schedule "
        f"has at most {MAX_FORWARDS:,}.",
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
        "train.batch_size",
        f"must be a multiple of {' x '.join(sizes)} = {microbatches * shards}: each device gets "
        "the same number of sequences of each microbatch.",
        f"{action}.",
    )


_MICROBATCHES = "pipeline.microbatches"
_MICROBATCH_RULES = [each for each in RULES if _MICROBATCHES in each.keys]
"""Rules that smaller batches of the ramp must also satisfy, because they have fewer
microbatches."""


@rule("train.batch_ramp", *{key: None for each in _MICROBATCH_RULES for key in each.keys})
def _ramp_has_whole_microbatches(config: Config) -> Iterator[RuleViolation]:
    key, train, pipeline = "train.batch_ramp", config.train, config.pipeline
    if train.batch_size % pipeline.microbatches:
        return
    each, stages = train.batch_size // pipeline.microbatches, BatchRamp.from_config(train).stages
    more = train.batch_size // math.gcd(each, *(rows for rows, _ in stages))
    for rows, _ in stages:
        if rows >= train.batch_size:
            continue  # another rule reports this batch size
        if rows % each:
            larger = round_up(rows, each)
            take = f"Use {larger}" if larger < train.batch_size else f"Leave {rows} out"
            yield RuleViolation(
                key,
                f"must have batch sizes that are multiples of {each}, the size of a microbatch "
                f"(train.batch_size ({train.batch_size}) / {_MICROBATCHES} "
                f"({pipeline.microbatches})), but {rows} is not.",
                f"{take}, or set {_MICROBATCHES}={more}.",
            )
            continue
        fewer = replace(
            config,
            train=replace(train, batch_size=rows),
            pipeline=replace(pipeline, microbatches=rows // each),
        )
        for finding in (found for one in _MICROBATCH_RULES for found in one.find(fewer)):
            text = f"has a batch size of {rows}, with which {finding.key} {finding.rule}"
            yield RuleViolation(key, text, f"Leave {rows} out, or: {finding.action}")
