"""Rerank the best layouts of a search based on compilation or on measurement.

Bayesian optimization chooses the next layout to measure. The log ratio of measured to predicted
time is modeled as a sum of normally distributed errors. The sum has a term shared by all layouts, a
term for each setting (`stage=2`, `remat=names`, microbatch size), and a term for each individual
layout. The prior mean is the forecast.

Source: Bayesian optimization with a lower confidence bound (Srinivas et al., arXiv:0912.3995).

The module also times steps on the local devices for the calibration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import maxpipe
from maxpipe.config.check import check
from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.schema import Config
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.errors import ConfigError
from maxpipe.hardware import Hardware
from maxpipe.io import files
from maxpipe.io.typed_json import parse_json
from maxpipe.parallel.axes import MeshConfig
from maxpipe.planner.compile import (
    CompileReport,
    build_steps,
    compile_step,
    ignore_phase,
    versions,
)
from maxpipe.planner.cost import predict_cost
from maxpipe.planner.memory_terms import is_out_of_device_memory
from maxpipe.planner.search import Candidate
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.topology import Topology
from maxpipe.schedule.catalog import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from maxpipe.step.step import Steps

Tree = Any
LAYERS = 2
"""Number of layers per chunk in timed steps."""
PROGRAM_SECONDS = 2.0
"""Time in seconds during which each program is called repeatedly, to measure its median time."""


def median_seconds(calls: Sequence[Callable[[], Tree]], seconds: float) -> list[float]:
    """Return the median time of each call in seconds.

    Calls are interleaved, so that noise affects all functions equally.
    """
    for call in calls:
        jax.block_until_ready(call())
    taken: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < 3:
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def ring_mesh_config(mesh: MeshConfig, count: int) -> MeshConfig:
    """Return a mesh config with `count` stages and size 1 for all other axes."""
    names = [field.name for field in dataclasses.fields(mesh)]
    sizes = {name: 1 for name in names if name.startswith(("ici_", "dcn_"))}
    return dataclasses.replace(mesh, **sizes | {"ici_stage": count})


def fit_split_costs(config: Config, hardware: Hardware, devices: Sequence[Any]) -> Hardware:
    """Fit `split_cost` and `ring_cost` to the measured times of steps with tensor-parallel layers.

    For every possible tensor-axis size, the time of a layer is the difference between steps that
    differ only in their number of layers. `split_cost` accounts for the remaining error of the cost
    model without collective matmuls. `ring_cost` accounts for the additional error with collective
    matmuls. The parameters are left unchanged if the model does not support tensor parallelism.
    """
    splits, ring_costs = [], []
    for count in range(2, len(devices) + 1):
        if len(devices) % count:
            continue
        pairs = [_depth_pair(count, in_rings, config, len(devices)) for in_rings in (False, True)]
        if any(check(run, {}) for pair in pairs for run in pair):
            continue
        calls = [build_synthetic_step(build_steps(run, devices)) for pair in pairs for run in pair]
        few, many, few_in_rings, many_in_rings = median_seconds(calls, len(calls) * PROGRAM_SECONDS)
        plain, in_rings = many - few, many_in_rings - few_in_rings
        found = _fit_figure("split_cost", plain, hardware, partial(_predict_difference, pairs[0]))
        splits.append(found)
        costly = dataclasses.replace(hardware, split_cost=max(0.0, found))
        longer = partial(_predict_ring_overhead, pairs)
        ring_costs.append(_fit_figure("ring_cost", in_rings - plain, costly, longer))
    if not splits:
        return hardware
    names = {"split_cost": splits, "ring_cost": ring_costs}
    means = {name: max(0.0, statistics.mean(found)) for name, found in names.items()}
    return dataclasses.replace(hardware, **means)


def _fit_figure(
    name: str, measured: float, hardware: Hardware, predicted: Callable[[Hardware], float]
) -> float:
    """Solve for the value of a hardware parameter at which the linear prediction equals `measured`.

    The parameter is left unchanged if the prediction does not depend on it, which happens when
    communication takes longer than the compute that overlaps with it.
    """
    zero, unit = (predicted(dataclasses.replace(hardware, **{name: at})) for at in (0.0, 1.0))
    return (measured - zero) / (unit - zero) if unit > zero else getattr(hardware, name)


Pair = tuple[Config, Config]
"""Two runs that differ only in the number of layers."""


def _predict_ring_overhead(pairs: Sequence[Pair], hardware: Hardware) -> float:
    plain, in_rings = (_predict_difference(pair, hardware) for pair in pairs)
    return in_rings - plain


def _predict_difference(pair: Pair, hardware: Hardware) -> float:
    """Return the predicted difference in step time, in seconds, between the two runs of a pair."""
    figures = dataclasses.replace(hardware, tick_us=0.0)
    few, many = (predict_cost(Sizes(run), build_schedule(run), figures).seconds for run in pair)
    return many - few


def _depth_pair(split: int, in_rings: bool, config: Config, num_devices: int) -> Pair:
    """Return two runs with few layers, tensor-axis size `split`, and the same tokens per device."""
    train = dataclasses.replace(
        config.train, batch_size=Sizes(config).batch.microbatch_size * num_devices
    )
    mesh = dataclasses.replace(
        ring_mesh_config(config.mesh, 1),
        ici_fsdp=num_devices // split,
        ici_tensor=split,
        sequence_parallel=True,
        collective_matmul=in_rings,
    )
    pipeline = PipelineConfig(schedule=INTERLEAVED, remat="full")
    run = dataclasses.replace(config, train=train, pipeline=pipeline, mesh=mesh)
    few, many = (
        dataclasses.replace(run, model=dataclasses.replace(config.model, num_layers=depth))
        for depth in (LAYERS, 3 * LAYERS)
    )
    return few, many


def measure_tick(config: Config, hardware: Hardware, devices: Sequence[Any]) -> float:
    """Return the overhead of a tick in seconds that the cost model does not otherwise predict.

    The overhead is fitted to two steps with many ticks: one with repeats and one without.
    On devices that share cores, ticks and the loss head wait longer for other devices than an empty
    collective would.
    """
    still = dataclasses.replace(hardware, tick_us=0.0)
    calls, predicted, ticks = [], 0.0, 0
    for repeats in (1, LAYERS):
        run = _chunked_config(repeats, config, len(devices))
        schedule = build_schedule(run)
        calls.append(build_synthetic_step(build_steps(run, devices)))
        predicted += predict_cost(Sizes(run), schedule, still).seconds
        ticks += schedule.num_ticks
    return max(0.0, sum(median_seconds(calls, len(calls) * PROGRAM_SECONDS)) - predicted) / ticks


def _chunked_config(repeats: int, config: Config, stages: int) -> Config:
    """Return a run with `LAYERS` layers per stage, and with one stage and one microbatch per
    device.
    """
    model = dataclasses.replace(config.model, num_layers=LAYERS * stages)
    train = dataclasses.replace(
        config.train, batch_size=Sizes(config).batch.microbatch_size * stages
    )
    schedule = ONE_FORWARD_ONE_BACKWARD if repeats == 1 else INTERLEAVED
    pipeline = PipelineConfig(schedule=schedule, repeats=repeats, microbatches=stages)
    mesh = ring_mesh_config(config.mesh, stages)
    return dataclasses.replace(config, model=model, train=train, pipeline=pipeline, mesh=mesh)


def build_synthetic_step(steps: Steps) -> Callable[[], Tree]:
    """Return a function that runs the train step on synthetic data."""
    rows, tokens = steps.shape
    keys = jax.random.split(jax.random.key(0), 2)
    vocabulary = steps.param_layout.decoder.config.vocab_size
    ids = [jax.random.randint(key, (rows, tokens), 0, vocabulary) for key in keys]
    batch = {
        "tokens": ids[0],
        "targets": ids[1],
        "segment_ids": jnp.ones((rows, tokens), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(tokens), (rows, tokens)),
        "loss_mask": jnp.ones((rows, tokens), jnp.float32),
        "example_ids": jnp.arange(rows),
    }
    batch = jax.device_put(batch, steps.batch_sharding)
    step, states = steps.compile_train(), [steps.init()]

    def run() -> Tree:
        state, metrics = step(states.pop(), batch)
        states.append(state)
        return metrics

    return run


CANDIDATES = 256
"""Number of candidates for measurement: the layouts with the shortest predicted step times."""
COMMON_ERROR = 3.0
"""Standard deviation of the prediction error shared by all layouts, which arises because devices
can be faster or slower than their published specifications."""
SETTING_ERROR = 0.03
"""Standard deviation of the prediction error for a single setting."""
LAYOUT_ERROR = 0.02
"""Standard deviation of the prediction error for a single layout."""
NOISE = 0.01
"""Standard deviation of the measurement error of a median time."""


def choose_next(candidates: Sequence[Candidate], ran: Mapping[int, float | None]) -> int:
    """Return the index of the candidate whose time per sequence has the smallest lower confidence
    bound.

    Args:
        candidates: all layouts, including those that were not measured.
        ran: measured times in seconds, keyed by candidate index. None marks a candidate that ran
            out of memory.
    """
    seconds = {index: taken for index, taken in ran.items() if taken is not None}
    mean, error = posterior_seconds(candidates, seconds)
    lowest = mean * np.exp(-error)
    lowest /= [candidate.config.train.batch_size for candidate in candidates]
    memory = np.array([candidate.memory.total for candidate in candidates])
    failed = [index for index, taken in ran.items() if taken is None]
    smaller = memory < memory[failed].min() if failed else np.ones(len(candidates), bool)
    smaller[list(ran)] = False
    if smaller.any():  # candidates that need more memory than a failed candidate would also fail
        lowest[~smaller] = np.inf
    lowest[list(ran)] = np.inf
    return int(lowest.argmin())


def posterior_seconds(
    candidates: Sequence[Candidate], ran: Mapping[int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior median times in seconds `[N]`, and the standard errors of the log times
    `[N]`.
    """
    predicted = np.array([candidate.cost.seconds for candidate in candidates])
    prior = (
        COMMON_ERROR**2
        + SETTING_ERROR**2 * _num_shared_settings(candidates)
        + LAYOUT_ERROR**2 * np.eye(len(candidates))
    )
    indices = list(ran)
    seen = prior[np.ix_(indices, indices)] + NOISE**2 * np.eye(len(indices))
    gain = np.linalg.solve(seen, prior[indices])
    off = np.log(np.array(list(ran.values())) / predicted[indices])
    left = prior.diagonal() - (gain * prior[indices]).sum(axis=0)
    return predicted * np.exp(off @ gain), np.sqrt(np.maximum(left, 0.0))


def _num_shared_settings(candidates: Sequence[Candidate]) -> np.ndarray:
    """Return the `[N, N]` matrix that counts the settings shared by two layouts."""
    settings = [_settings(layout) for layout in candidates]
    total = np.zeros((len(candidates),) * 2)
    for key in sorted({key for layout in settings for key in layout}):
        codes: dict[Any, int] = {}
        column = np.array([codes.setdefault(layout.get(key), len(codes)) for layout in settings])
        total += column[:, None] == column
    return total


def _settings(candidate: Candidate) -> dict[str, Any]:
    """Return the layout's keys and values, and its number of sequences per microbatch."""
    return {**candidate.layout_keys, "rows": Sizes(candidate.config).batch.microbatch_size}


MAX_REPORT_BYTES = 1 << 26
"""Maximum size of a saved compile report."""
MEASURED_SECONDS = 10.0
"""Time in seconds during which the step of a layout is run repeatedly. The step runs at least three
times."""


@dataclass(frozen=True)
class RankedCandidate:
    """A layout that was compiled or measured."""

    candidate: Candidate
    report: CompileReport | None = None
    """Compile report, or None if the layout was not compiled or does not fit in memory."""
    measured: float | None = None
    """Measured step time in seconds."""

    @property
    def fits(self) -> bool:
        """Return whether the layout fits in memory, according to the compiler or a measurement."""
        return self.measured is not None or (self.report is not None and self.report.fits)

    @property
    def compiled_seconds(self) -> float | None:
        """Return the compiler's step time in seconds: the estimated compute time plus the exposed
        time of collectives. The value is None if the compiler has no cycle estimates.
        """
        if self.report is None or not self.report.seconds:
            return None
        return self.report.seconds + self.report.exposed_seconds

    @property
    def seconds(self) -> float:
        """Return the step time in seconds: measured, else estimated by the compiler, else
        predicted.
        """
        known = self.measured if self.measured is not None else self.compiled_seconds
        return self.candidate.cost.seconds if known is None else known

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization at `seconds`."""
        return self.candidate.cost.mfu * self.candidate.cost.seconds / self.seconds


def rerank_by_compiler(
    best: Sequence[Candidate],
    topology: Topology,
    tell: Callable[[str], None],
    begin: Callable[[str], None] = ignore_phase,
    reports: Path | None = None,
) -> list[RankedCandidate]:
    """Compile each layout. Return the layouts sorted by time per sequence, with those that fit in
    memory first.

    Without cycle estimates (on GPUs), the layouts that fit keep their predicted order. `best`
    contains the best layouts of a search on this topology. `tell` is called with a line of text
    before each compilation, and `begin` with the name of each phase of a compilation. Reports are
    saved to the folder `reports` and read from there if the layout, the topology, the source code
    of maxpipe and the package versions are equal.
    """
    checked = []
    for number, candidate in enumerate(best, 1):
        tell(_line("compiling", number, len(best), candidate))
        try:
            report = _compile(candidate.config, topology, tell, begin, reports)
        except ConfigError as error:
            tell(str(error))
            report = None
        checked.append(RankedCandidate(candidate, report))
    return _ranked(checked)


def _compile(
    config: Config,
    topology: Topology,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
    reports: Path | None,
) -> CompileReport:
    """Return the saved report of a layout, or compile the layout and save its report."""
    if reports is None:
        return compile_step(LoadedConfig(config, {}), topology, None, None, begin)
    path = reports / _report_name(config, topology)
    # A missing or damaged report is replaced.
    with contextlib.suppress(OSError, ValueError):
        values = parse_json(files.read(path, MAX_REPORT_BYTES), dict[str, Any])
        return CompileReport.from_json(values)
    report = compile_step(LoadedConfig(config, {}), topology, None, None, begin)
    try:
        files.write(path, json.dumps(report.to_json(), indent=1))
    except OSError as error:
        tell(f"the compile report was not saved to {path}: {error.strerror or error}")
    return report


def _report_name(config: Config, topology: Topology) -> str:
    """Return the file name of a layout's compile report."""
    hardware = dataclasses.asdict(topology.hardware)
    metadata = [to_dict(config), topology.name, topology.num_slices, hardware, versions()]
    text = json.dumps([*metadata, _source_checksum()], sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@functools.cache
def _source_checksum() -> str:
    """Return a checksum of the source code of maxpipe, which can change without a new version."""
    checksum, package = hashlib.sha256(), Path(maxpipe.__file__).parent
    for path in sorted(package.rglob("*.py")):
        checksum.update(str(path.relative_to(package)).encode())
        checksum.update(path.read_bytes())
    return checksum.hexdigest()


def rerank_by_measurement(
    candidates: Sequence[Candidate], count: int, devices: Sequence[Any], tell: Callable[[str], None]
) -> list[RankedCandidate]:
    """Measure `count` layouts on synthetic data. Return the layouts sorted by time, with failures
    last. The layout with the best forecast is measured first. Each result updates the forecasts of
    similar layouts, and the updated forecasts determine the next layout to measure. `candidates`
    are the layouts found for the local `devices`, sorted by predicted time. `tell` is called with a
    line of text before each layout.
    """
    ran: dict[int, float | None] = {}
    count = min(count, len(candidates))
    while len(ran) < count:
        index = choose_next(candidates, ran)
        tell(_line("measuring", len(ran) + 1, count, candidates[index]))
        ran[index] = _measure_step(candidates[index], devices, tell)
    return _ranked(
        [RankedCandidate(candidates[index], measured=taken) for index, taken in ran.items()]
    )


def _measure_step(
    candidate: Candidate, devices: Sequence[Any], tell: Callable[[str], None]
) -> float | None:
    """Measure the step time in seconds. Return None if a device ran out of memory."""
    seconds = None
    try:
        step = build_synthetic_step(build_steps(candidate.config, devices))
        (seconds,) = median_seconds([step], MEASURED_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_device_memory(error):
            raise
        tell("this layout ran out of device memory")
    step = None  # free the memory used by parameters and optimizer state
    gc.collect()
    return seconds


def _line(doing: str, number: int, count: int, candidate: Candidate) -> str:
    return f"{doing} {number} of {count}: {candidate.overrides}"


def _ranked(checked: Sequence[RankedCandidate]) -> list[RankedCandidate]:
    """Sort layouts by MFU, with failures last. Without any measured or estimated times, keep the
    order, which already treats nearly equal predictions as ties.
    """
    is_timed = any((each.measured or each.compiled_seconds) is not None for each in checked)
    return sorted(checked, key=lambda each: (not each.fits, -each.mfu if is_timed else 0.0))
