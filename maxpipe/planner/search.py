"""Enumerate valid layouts for a run, prune them by memory and rank them by predicted time.

A layout consists of mesh axes, stages, repeats, group, microbatches, schedule, weight gather mode
and remat mode, and on GPUs the number of chunks of an expert all-to-all. The layout does not affect
the loss curve. If the caller sets a maximum batch size, the search also tries larger batches, which
do affect the loss curve. Layouts are ranked by predicted time per sequence. With many microbatches,
step time and buffer sizes are extrapolated from two short schedule tables. The extrapolation is
exact for schedules with a periodic steady state. The best layouts are reevaluated with their full
schedule tables.

Sequences are sharded over the context axis only if the batch has fewer sequences than devices, or
if most other layouts do not fit in memory. If there are too many layouts to evaluate, layouts are
sampled and the best meshes are selected by successive halving (Jamieson and Talwalkar,
arXiv:1502.07943).

If no layout fits, this module suggests the smallest config changes that make a run fit in memory.
This module does not import jax.

Source: enumerating plans and ranking them with a cost model follows Alpa (arXiv:2201.12023).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from maxpipe.config.check import check
from maxpipe.config.load import LoadedConfig, parse_setting
from maxpipe.config.schema import KEYS, Config, default_of
from maxpipe.errors import Code, ConfigError
from maxpipe.hardware import USABLE_MEMORY_FRACTION, Hardware
from maxpipe.io.formatting import pluralize
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.planner.cost import Cost, predict_cost
from maxpipe.planner.memory import Memory, predict_memory
from maxpipe.planner.search_space import (
    TOKEN_SPLIT_KEYS,
    MeshLayouts,
    batch_sizes,
    chunks_key,
    context_sizes,
    mesh_layouts,
)
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.topology import Topology, resolve_config
from maxpipe.schedule.catalog import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD, make_schedule
from maxpipe.schedule.table import Schedule

MAX_EXHAUSTIVE = 20_000
"""Maximum number of layouts to evaluate exhaustively, which takes about a minute."""
SAMPLES_PER_MESH, HALVING = 12, 4
"""Initial number of samples per mesh, and the halving factor. Each round divides the number of
meshes, and multiplies the number of samples, by this factor."""
TIE = 0.005
"""Relative difference below which two predicted times per sequence count as equal."""
BATCH_GROWTH = 4
"""Default maximum batch size of a search for the highest MFU, as a multiple of
`train.batch_size`."""
NUM_RESULTS = 10
"""Default number of layouts to return and print."""

_LAYOUT = (
    "schedule",
    "repeats",
    "group",
    "microbatches",
    "prologue_layers",
    "weight_gather",
    "remat",
)
"""Keys of `pipeline` that define a layout."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted memory and step time."""

    config: Config
    schedule: Schedule
    memory: Memory
    cost: Cost
    varies_batch: bool = False
    """Whether the search selected the batch size."""

    @property
    def seconds_per_sequence(self) -> float:
        """Return the step time divided by the batch size, which determines the MFU."""
        return self.cost.seconds / self.config.train.batch_size

    @property
    def layout_keys(self) -> dict[str, Any]:
        """Return the config keys and values that define the layout."""
        mesh, pipeline = self.config.mesh, self.config.pipeline
        found: dict[str, Any] = {}
        if self.varies_batch:
            found["train.batch_size"] = self.config.train.batch_size
        for link, axis in itertools.product(("ici", "dcn"), MESH_AXES):
            size = getattr(mesh, f"{link}_{axis}")
            if size > 1:
                found[f"mesh.{link}_{axis}"] = size
        for name in TOKEN_SPLIT_KEYS:
            if getattr(mesh, name):
                found[f"mesh.{name}"] = True
        over_context = mesh.ici_context * mesh.dcn_context > 1
        if over_context and mesh.context_attention != default_of("mesh.context_attention"):
            found["mesh.context_attention"] = mesh.context_attention
            if mesh.context_attention == "ulysses_ring" and mesh.ulysses_size:
                found["mesh.ulysses_size"] = mesh.ulysses_size
        if pipeline.idle != default_of("pipeline.idle"):
            found["pipeline.idle"] = pipeline.idle
        for name in _LAYOUT:
            value = getattr(pipeline, name)
            if value not in (0, None):
                found[f"pipeline.{name}"] = value
        if pipeline.remat == "names" and pipeline.saved_names != default_of("pipeline.saved_names"):
            found["pipeline.saved_names"] = f"[{','.join(pipeline.saved_names)}]"
        if (key := chunks_key(self.config)) is not None:
            chunks = self.config.model.own.all_to_all_chunks
            if chunks != default_of(key):
                found[key] = chunks
        return found

    @property
    def overrides(self) -> str:
        """Return the layout as command-line overrides."""
        return " ".join(f"{key}={value}" for key, value in self.layout_keys.items())


ProgressCallback = Callable[[str, int, int], None]


def ignore_progress(task: str, done: int, total: int) -> None:
    """Do nothing; the default progress callback."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a layout search."""

    considered: int
    too_large: int
    """Number of evaluated layouts that do not fit in memory."""
    best: list[Candidate]
    computed: int
    """Number of evaluated layouts, including samples of meshes that were dropped later."""


def search(
    config: Config,
    hardware: Hardware,
    *,
    num_devices: int,
    num_slices: int = 1,
    fixed: Mapping[str, Any] | None = None,
    keep: int = NUM_RESULTS,
    report: ProgressCallback = ignore_progress,
    max_batch_size: int | None = None,
) -> SearchResult:
    """Return the layouts with the shortest predicted time per sequence.

    Args:
        config: config with the model, batch and optimizer; layout keys in it are ignored.
        hardware: hardware parameters of the devices.
        num_devices: total number of devices across all slices.
        num_slices: number of slices.
        fixed: keys of `mesh` and `pipeline` that must have the given values.
        keep: maximum number of layouts to return.
        report: progress callback, called with (task, done, total).
        max_batch_size: maximum global batch size. If it is set, the search also doubles
            `train.batch_size` up to this limit: more microbatches of the same size never reduce
            the MFU, so layouts are searched with the largest batch, and the best ones are
            reevaluated with fewer microbatches. If it is None, the batch size is not changed.

    Raises:
        ConfigError: no layout fits in memory, or no valid layout has the fixed values.
    """
    fixed, considered, computed, too_large = fixed or {}, 0, 0, 0
    config = _apply_fixed(config, fixed)
    sizes = batch_sizes(config, max_batch_size or config.train.batch_size)
    config = _with_batch_size(config, sizes[-1])
    contexts = context_sizes(config, num_devices // num_slices)
    passes = [contexts[:1], contexts[1:]]
    if config.train.batch_size < num_devices or "mesh.ici_context" in fixed:
        passes = [contexts]
    best: list[Candidate] = []
    for some in filter(None, passes):
        space = list(mesh_layouts(config, num_devices, num_slices, fixed, some, hardware.platform))
        found = _find_best(space, hardware, keep, report)
        considered, too_large = considered + found.considered, too_large + found.too_large
        computed += found.computed
        best = rank_candidates([*best, *found.best])[:keep]
        if best and found.too_large <= found.computed / 2:
            break
    if max_batch_size is not None:
        smaller = [other for each in best for other in _smaller_batches(each, sizes, hardware)]
        best = [
            dataclasses.replace(candidate, varies_batch=True)
            for candidate in rank_candidates([*best, *smaller])[:keep]
        ]
    if best:
        return SearchResult(considered, too_large, best, computed)
    devices = f"{pluralize(num_devices, 'device')} of {hardware.name}"
    if not considered:
        raise ConfigError.one(
            Code.PLAN_NO_LAYOUT,
            "command line: maxpipe plan --search",
            " ".join(f"{key}={value}" for key, value in fixed.items()) or None,
            f"found no valid layout on {devices}: axis sizes must divide the batch size, the "
            "sequence length and the model's parameters.",
            "Change the number of devices or train.batch_size, or remove a --fix.",
        )
    raise ConfigError.one(
        Code.PLAN_NO_LAYOUT,
        "command line: maxpipe plan --search",
        None,
        f"found no layout that fits in {hardware.memory_gib:g} GiB on {devices}; {computed} of "
        f"{considered} layouts were evaluated.",
        "Use more devices or a smaller train.sequence_length, or remove a --fix.",
    )


def _with_batch_size(config: Config, size: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=size))


def _smaller_batches(
    candidate: Candidate, sizes: Sequence[int], hardware: Hardware
) -> Iterator[Candidate]:
    """Yield a layout with smaller batches of microbatches of the same size, if it is valid and
    fits in memory.
    """
    for size in sizes:
        microbatches, remainder = divmod(
            candidate.config.pipeline.microbatches * size, candidate.config.train.batch_size
        )
        if remainder or not microbatches or size == candidate.config.train.batch_size:
            continue
        config = _with_batch_size(candidate.config, size)
        pipeline = dataclasses.replace(config.pipeline, microbatches=microbatches)
        config = dataclasses.replace(config, pipeline=pipeline)
        if not check(config, {}):
            smaller = evaluate(config, hardware)
            if smaller.memory.total <= USABLE_MEMORY_FRACTION * hardware.memory_bytes:
                yield smaller


def best_layouts(
    config: Config,
    topology: Topology,
    fixed: Mapping[str, Any],
    keep: int = NUM_RESULTS,
    report: ProgressCallback = ignore_progress,
    max_batch_size: int | None = None,
) -> SearchResult:
    """Return the `keep` fastest layouts of a config on a topology. For `report` and
    `max_batch_size`, see `search`.
    """
    return search(
        config,
        topology.hardware,
        num_devices=topology.num_devices,
        num_slices=topology.num_slices,
        fixed=fixed,
        keep=keep,
        report=report,
        max_batch_size=max_batch_size,
    )


def parse_fixed_keys(loaded: LoadedConfig, texts: Sequence[str]) -> dict[str, Any]:
    """Parse the `section.key=value` settings that a search must not change.

    Raises:
        ConfigError: a key is not in mesh or pipeline, or its value is invalid.
    """
    fixed = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in KEYS or key.partition(".")[0] not in ("mesh", "pipeline") or not value:
            raise ConfigError.one(
                Code.CLI_VALUE,
                "command line: --fix",
                text,
                "must be KEY=VALUE, where KEY is in mesh or pipeline.",
                "Write --fix mesh.ici_stage=4.",
            )
        _, fixed[key] = parse_setting(text)
        size_of_axis = key.startswith(("mesh.ici_", "mesh.dcn_"))
        if size_of_axis and fixed[key] < 1:
            rule = "must be a device count of at least 1."
            action = f"Write --fix {key}=2, or remove it to search over all values."
            raise ConfigError.one(Code.CLI_VALUE, f"command line: --fix {key}", value, rule, action)
    return fixed


def rank_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort layouts by predicted time per sequence. Times that differ by less than `TIE` are treated
    as equal, with the simplest layout first.
    """
    left = sorted(candidates, key=lambda candidate: candidate.seconds_per_sequence)
    complexities, ranked = [_complexity(candidate) for candidate in left], []
    while left:
        longest = left[0].seconds_per_sequence * (1 + TIE)
        num_tied = bisect.bisect_right(left, longest, key=lambda each: each.seconds_per_sequence)
        simplest = min(range(num_tied), key=complexities.__getitem__)
        ranked.append(left.pop(simplest))
        del complexities[simplest]
    return ranked


def _complexity(candidate: Candidate) -> tuple[int, ...]:
    """Return the layout's complexity: the batch size, the number of stages, the sizes of the axes
    that shard a layer, and the number of repeats.
    """
    axes, pipeline = Sizes(candidate.config).mesh.axes, candidate.config.pipeline
    sharded = (axes[name] for name in ("stage", "tensor", "context", "expert"))
    return (candidate.config.train.batch_size, *sharded, pipeline.repeats)


def _apply_fixed(config: Config, fixed: Mapping[str, Any]) -> Config:
    """Return the config with the fixed values, and defaults for keys that are never searched."""
    varied = {"pipeline": {"layers_per_chunk": [], "delayed_forwarding": False}}
    for section in ("mesh", "pipeline"):
        values = varied.get(section, {}) | {
            key.partition(".")[2]: value
            for key, value in fixed.items()
            if key.startswith(f"{section}.")
        }
        part = dataclasses.replace(getattr(config, section), **values)
        config = dataclasses.replace(config, **{section: part})
    return config


class _LayoutScore(NamedTuple):
    """Score of a layout: its time, or its memory use if no layout fits. Smaller is better."""

    seconds: float
    """Predicted time per sequence; infinite if the layout does not fit in memory."""
    num_bytes: float


def _score_layout(layout: Config, hardware: Hardware) -> _LayoutScore:
    """Return the score of a layout, extrapolated from short schedule tables."""
    short, long = short_schedules(layout)
    num_bytes = predict_memory(Sizes(layout), long or short, platform=hardware.platform).total
    fits = num_bytes <= USABLE_MEMORY_FRACTION * hardware.memory_bytes
    seconds = _seconds(layout, short, long, hardware) if fits else math.inf
    return _LayoutScore(seconds / layout.train.batch_size, num_bytes)


def _rank_layouts(
    spaces: Sequence[MeshLayouts], hardware: Hardware, report: ProgressCallback
) -> dict[tuple[int, int], _LayoutScore]:
    """Return scores keyed by (mesh index, layout index), best first; large search spaces are only
    sampled.
    """
    found: dict[tuple[int, int], _LayoutScore] = {}
    left, drawn, sampled = list(range(len(spaces))), random.Random(0), SAMPLES_PER_MESH

    def compute(task: str, chosen: Mapping[int, Collection[int]]) -> dict[int, _LayoutScore]:
        """Return, for every mesh, the best score among its selected layouts."""
        done, total = 0, sum(map(len, chosen.values()))
        for number, places in chosen.items():
            for place in places:
                report(task, done := done + 1, total)
                if (number, place) not in found:
                    found[number, place] = _score_layout(spaces[number].layout(place), hardware)
        return {number: min(found[number, each] for each in chosen[number]) for number in chosen}

    while len(left) > 1 and sum(len(spaces[number].pipelines) for number in left) > MAX_EXHAUSTIVE:
        places = {number: range(len(spaces[number].pipelines)) for number in left}
        best = compute(
            f"predicting samples of {pluralize(len(left), 'mesh')}",
            {n: drawn.sample(every, min(sampled, len(every))) for n, every in places.items()},
        )
        left = sorted(left, key=best.__getitem__)[: max(1, len(left) // HALVING)]
        sampled *= HALVING
    compute("predicting layouts", {n: range(len(spaces[n].pipelines)) for n in left})
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _find_best(
    spaces: Sequence[MeshLayouts], hardware: Hardware, keep: int, report: ProgressCallback
) -> SearchResult:
    """Return the `keep` fastest layouts that fit in memory."""
    ranked, best = _rank_layouts(spaces, hardware, report), []
    too_large = sum(math.isinf(score.seconds) for score in ranked.values())
    for number, place in ranked:
        if len(best) == keep or math.isinf(ranked[number, place].seconds):
            break
        layout = spaces[number].layout(place)
        if check(layout, {}):
            continue
        candidate = evaluate(layout, hardware)
        if candidate.memory.total <= USABLE_MEMORY_FRACTION * hardware.memory_bytes:
            best.append(candidate)
        else:
            too_large += 1
    considered = sum(len(space.pipelines) for space in spaces)
    return SearchResult(considered, too_large, best, len(ranked))


def evaluate(config: Config, hardware: Hardware) -> Candidate:
    """Predict the memory and step time of a layout from its full schedule table."""
    sizes, schedule = Sizes(config), build_schedule(config)
    held = predict_memory(sizes, schedule, platform=hardware.platform)
    return Candidate(config, schedule, held, predict_cost(sizes, schedule, hardware, held))


def forecast_layout(loaded: LoadedConfig, topology: Topology) -> Candidate:
    """Forecast the memory and step time of a config on a topology.

    Raises:
        ConfigError: the config does not match the topology.
    """
    return evaluate(resolve_config(loaded, topology), topology.hardware)


# Short schedule tables.


@cache
def _table(name: str, stages: int, repeats: int, microbatches: int, group: int) -> Schedule:
    return make_schedule(
        name, stages=stages, repeats=repeats, microbatches=microbatches, group=group
    )


def short_schedules(config: Config) -> tuple[Schedule, Schedule | None]:
    """Return the schedule table of a config, or two short tables for extrapolation."""
    pipeline, stages = config.pipeline, Sizes(config).mesh.stages
    turn = pipeline.group or stages
    if pipeline.microbatches <= 4 * turn:
        return _schedule_with(config, pipeline.microbatches), None
    return _schedule_with(config, 2 * turn), _schedule_with(config, 3 * turn)


def _schedule_with(config: Config, microbatches: int) -> Schedule:
    pipeline = config.pipeline
    return _table(
        pipeline.schedule, Sizes(config).mesh.stages, pipeline.repeats, microbatches, pipeline.group
    )


def _seconds(config: Config, short: Schedule, long: Schedule | None, hardware: Hardware) -> float:
    sizes = Sizes(config)
    few = predict_cost(_with_microbatches(config, sizes, short), short, hardware).seconds
    if long is None:
        return few
    more = predict_cost(_with_microbatches(config, sizes, long), long, hardware).seconds
    turns = (config.pipeline.microbatches - long.num_microbatches) / (
        long.num_microbatches - short.num_microbatches
    )
    return more + turns * (more - few)


def _with_microbatches(config: Config, sizes: Sizes, schedule: Schedule) -> Sizes:
    """Return the array sizes for the schedule's number of microbatches of the same size."""
    count = schedule.num_microbatches
    if count == config.pipeline.microbatches:
        return sizes
    rows = config.train.batch_size * count // config.pipeline.microbatches
    return Sizes(
        dataclasses.replace(
            config,
            pipeline=dataclasses.replace(config.pipeline, microbatches=count),
            train=dataclasses.replace(config.train, batch_size=rows),
        )
    )


def suggest_changes(candidate: Candidate, topology: Topology) -> list[str]:
    """Return single config changes, or pairs, that make the run fit in memory, fastest first."""
    limit, fitting = USABLE_MEMORY_FRACTION * topology.hardware.memory_bytes, []
    singles = list(_changes(candidate.config))
    for changes in (*([one] for one in singles), *_pairs(singles)):
        if fitting and len(changes) > 1:
            break
        config = candidate.config
        for section, values in changes:
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **values)}
            )
        if check(config, {}):
            continue
        try:
            other = evaluate(config, topology.hardware)
        except ConfigError:
            continue
        if other.memory.total <= min(limit, candidate.memory.total):
            text = " ".join(
                f"{section}.{key}={value}"
                for section, values in changes
                for key, value in values.items()
                if value != getattr(getattr(candidate.config, section), key)
            )
            fitting.append(
                (
                    other.cost.seconds,
                    f"{text}: {other.memory.total / 2**30:.1f} GiB, "
                    f"{other.cost.seconds:.3g} s per step",
                )
            )
    return [text for _, text in sorted(fitting)[:3]]


Change = tuple[str, dict[str, Any]]


def _changes(config: Config) -> Iterator[Change]:
    pipeline, mesh = config.pipeline, config.mesh
    for remat in ("names", "full", "chunk"):
        if remat != pipeline.remat:
            yield "pipeline", {"remat": remat, "offloaded_names": []}
    for gather in ("window", "iteration"):
        if gather != pipeline.weight_gather:
            yield "pipeline", {"weight_gather": gather}
    for factor in (2, 4, 8):
        yield "pipeline", {"microbatches": pipeline.microbatches * factor}
    if pipeline.schedule not in (INTERLEAVED, ONE_FORWARD_ONE_BACKWARD) and pipeline.repeats == 1:
        yield "pipeline", {"schedule": ONE_FORWARD_ONE_BACKWARD}
    if pipeline.group:
        yield "pipeline", {"group": 0}
    for taker in ("fsdp", "stage", "context", "expert"):
        for factor in (2, 4, 8):
            size = mesh.ici_data
            if size % factor == 0 and size >= factor:
                more = getattr(mesh, f"ici_{taker}") * factor
                yield "mesh", {"ici_data": size // factor, f"ici_{taker}": more}


def _pairs(singles: Sequence[Change]) -> Iterator[list[Change]]:
    for index, one in enumerate(singles):
        for other in singles[index + 1 :]:
            if one[0] != other[0] or not one[1].keys() & other[1].keys():
                yield [one, other]
