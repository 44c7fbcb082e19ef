"""Calibrate the hardware parameters of the cost model on the local devices.

A layer's forward pass, input gradient and weight gradient are timed in pipeline-engine slots, first
on all devices at once and then on a single device. Stage-to-stage messages, gathers, reductions and
all-to-alls are timed over all devices. The overheads of tensor sharding, collective matmuls and
ticks are fitted to the remaining difference between measured and predicted step times.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config.load import LoadedConfig
from maxpipe.config.schema import Config
from maxpipe.errors import Code, ConfigError
from maxpipe.hardware import Hardware, measured_file, published_hardware
from maxpipe.io.formatting import pluralize
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.collectives import (
    all_gather,
    all_to_all,
    manual_axes_of,
    mark_varying,
    reduce_scatter,
    ring_shift,
)
from maxpipe.parallel.mesh import STAGE, build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.remat import Remat
from maxpipe.pipeline.slots import LayerSlots, SlotRow
from maxpipe.pipeline.weights import REPLICATED, LayerWeights
from maxpipe.planner import rerank
from maxpipe.planner.cost_model import CostModel
from maxpipe.planner.rerank import LAYERS, median_seconds, ring_mesh_config
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.topology import local_topology, resolve_config
from maxpipe.schedule.table import Ring
from maxpipe.step.build import make_remat_policy

Tree = Any
TimedProgram = tuple[Callable[..., Tree], tuple[Tree, ...]]
"""A per-device program and all of its arguments except the loop count."""
PROGRAMS: tuple[tuple[str, Remat], ...] = (
    ("F", "full"),
    ("FI", "full"),
    ("FIW", "full"),
    ("FB", "full"),
    ("FB", "names"),
    ("FB", "none"),
)
"""Sequences of pipeline slots to time, each with the remat mode that it uses."""
SIZED_PROGRAM = PROGRAMS[4]
"""Sequence of pipeline slots to time at several microbatch sizes."""
SIZES = (0.25, 0.5, 1, 2)
"""Microbatch sizes to time, as multiples of the microbatch size in the config."""
LOOP_COUNTS, LAYER_LOOP_COUNTS = (2, 10), (1, 5)
"""Loop counts of the timed programs. The difference between the times measured at the two loop
counts excludes the call overhead."""
FRESH_ROW, FRESH_ROWS = 2**16, (16, 272)
"""Number of float32 elements per row, and row counts of the two buffers whose allocation is timed
(4 and 68 MiB)."""
NUM_STREAMED_PARAMS = 2**25
"""Number of parameters in the timed update. Including moments and gradients, the parameters occupy
512 MiB, which exceeds the caches. This is the number per device, or the total over all devices if
the devices share the memory of one machine."""
_MAX_MEMORY_SHARE = 0.9
"""Maximum fraction of a layer's time that can be attributed to memory traffic."""
_CONTENTION_THRESHOLD = 1.5
"""Slowdown above which devices are assumed to share cores."""


@dataclass(frozen=True)
class Measurements:
    """Measured times in seconds on one device while all devices are busy."""

    forward: float
    """Forward time of one layer for one microbatch."""
    input_grad: float
    weight_grad: float
    names_recomputed: float
    """Recomputation time in a backward pass with `pipeline.remat=names`."""
    forward_alone: float
    """Forward time of one layer while the other devices are idle."""
    deferred: float = 0.0
    """Additional time of a backward pass that is split into two slots (input and weight gradients),
    compared with a single slot. `input_grad` and `weight_grad` include this time."""
    none_recomputed: float = 0.0
    """Time to write and read back all saved activations with `pipeline.remat=none`."""
    by_size: tuple[tuple[float, float], ...] = ()
    """Pair of measurements for each microbatch size: the memory traffic of a forward pass in bytes,
    and the time of a layer's forward and backward passes in seconds per sequence."""
    hop: float = 0.0
    """Time to send one microbatch's activation to the next device."""
    gather: float = 0.0
    """Time to all-gather the weights of one layer over all devices."""
    scatter: float = 0.0
    """Time to reduce-scatter the gradient of one layer over all devices."""
    exchange: float = 0.0
    """Time of an all-to-all of an array as large as a stage-to-stage message."""
    tokens: float = 0.0
    """Half the time of a token all-gather followed by a reduce-scatter."""
    latency: float = 0.0
    """Latency of a collective, measured on an array with few elements."""
    fresh: float = 0.0
    """Time to allocate temporary memory, in seconds per byte."""
    streamed: float = 0.0
    """Time to update the parameters, in seconds per byte read or written."""


def calibrate_here(loaded: LoadedConfig) -> tuple[Hardware, Hardware, Measurements]:
    """Calibrate the local devices. Return the published parameters, the fitted parameters and the
    measurements.

    Raises:
        ConfigError: the config does not match the devices, or the device type is unknown.
    """
    config = loaded.config
    target = local_topology(config.runtime, config.mesh.cpu_devices)
    devices = jax.devices()
    published = published_hardware()[target.hardware.topology]
    measured_file(published.topology)  # check that the file is writable before the long measurement
    return published, *calibrate(resolve_config(loaded, target), published, devices)


def calibrate(
    config: Config, hardware: Hardware, devices: Sequence[Any]
) -> tuple[Hardware, Measurements]:
    """Return the fitted hardware parameters and the measurements.

    Args:
        config: config with a resolved mesh; its layers and microbatch size are timed.
        hardware: published parameters; peak FLOP/s and memory capacity are kept unchanged.
        devices: devices to calibrate, all of the same type.
    """
    sizes = Sizes(config).on_platform(devices[0].platform)
    found = measure(sizes, devices)
    figures = fit_hardware(found, sizes, hardware, len(devices))
    figures = rerank.fit_split_costs(config, figures, devices)
    tick = rerank.measure_tick(config, figures, devices)
    return dataclasses.replace(figures, tick_us=1e6 * tick), found


def fit_hardware(
    found: Measurements, sizes: Sizes, hardware: Hardware, num_devices: int
) -> Hardware:
    """Return hardware parameters for which the cost model reproduces the measurements."""
    contention = found.forward / found.forward_alone
    shared_by = num_devices / contention if contention > _CONTENTION_THRESHOLD else 0.0
    by_size: dict[str, float] = {}
    if len(found.by_size) > 1:
        flat = fit_hardware(dataclasses.replace(found, by_size=()), sizes, hardware, num_devices)
        by_size = _fit_size_figures(
            found.by_size, [_predict_row_seconds(each, flat) for each in _sizes(sizes)]
        )
    # All times below are for one layer, at the microbatch size that minimizes the time per token.
    sized = dataclasses.replace(hardware, **by_size)
    scale = 1 / CostModel(sizes, sized).most_common_layer.size_factor
    layer = ("forward", "input_grad", "weight_grad", "deferred", "forward_alone")
    again = ("names_recomputed", "none_recomputed")
    times = {name: scale * getattr(found, name) for name in (*layer, *again)}
    found = dataclasses.replace(found, **times)
    # The measured time of a layer includes its custom kernels.
    known = dataclasses.replace(hardware, shared_by=shared_by, measured="now")
    if found.streamed:
        rate = CostModel(sizes, known).contention / found.streamed / 1e9
        known = dataclasses.replace(known, memory_gb_per_second=rate)
    memory = _memory_rate(found, sizes, known)
    endless = dataclasses.replace(memory, matmul_efficiency=1e12)
    through_memory = _memory_seconds(CostModel(sizes, endless))
    matmuls = found.forward_alone - through_memory
    sums = scale * CostModel(sizes, endless).most_common_layer.accumulation / found.forward_alone
    at_peak = dataclasses.replace(memory, matmul_efficiency=1.0, memory_gb_per_second=math.inf)
    figures: dict[str, Any] = {
        "matmul_efficiency": CostModel(sizes, at_peak).most_common_layer.matmul_seconds / matmuls,
        "memory_gb_per_second": memory.memory_gb_per_second,
        "input_grad_cost": found.input_grad / found.forward,
        "weight_grad_cost": found.weight_grad / found.forward - sums,
        "deferred_cost": found.deferred / found.forward,
        "names_recomputed": found.names_recomputed / found.forward,
        "none_recomputed": found.none_recomputed / found.forward,
        **by_size,
        "shared_by": shared_by,
        "fresh_gb_per_second": 0.0,
        "measured": f"{datetime.date.today():%Y-%m-%d}, {pluralize(num_devices, 'device')}, "
        f"{platform.node()}",
    }
    if shared_by:
        figures["fresh_gb_per_second"] = 1 / found.fresh / 1e9
    if num_devices > 1:
        size = sizes.activations.itemsize
        whole = sizes.params.layer_elements(sizes.layers.most_common, whole=True)
        weights = whole * (1 - 1 / num_devices)
        moved = (
            (found.hop, size * sizes.activations.stream),
            (found.gather, size * weights),
            (found.scatter, 4 * weights),
        )
        # If a transfer is as fast as an almost empty collective, bandwidth cannot be measured.
        rates = [
            sent / (seconds - found.latency)
            for seconds, sent in moved
            if seconds > 1.5 * found.latency
        ]
        figures["latency_us"] = found.latency * 1e6
        if rates:
            rate = statistics.harmonic_mean(rates)
            figures["link_gb_per_second"] = rate / hardware.ways / 1e9
            figures["exchange_rate"] = _exchange_rate(found, sizes, hardware, num_devices, rate)
            figures["tokens_rate"] = _tokens_rate(found, sizes, hardware, num_devices, rate)
    return dataclasses.replace(hardware, **figures)


def _fit_size_figures(
    measured: Sequence[tuple[float, float]], predicted: Sequence[float]
) -> dict[str, float]:
    """Fit the ratio of measured to predicted time per token as a function of microbatch size.

    The prediction already includes the per-microbatch cost of reading weights and accumulating
    gradients.
    """
    ratios = [(size, taken / flat) for (size, taken), flat in zip(measured, predicted, strict=True)]
    fastest, least = min(ratios, key=itemgetter(1))
    slopes = [
        (size > fastest, (seconds / least - 1) / abs(math.log2(size / fastest)))
        for size, seconds in ratios
        if size != fastest
    ]
    above, below = ([slope for up, slope in slopes if up is side] for side in (True, False))
    return {
        "fastest_mib": fastest / 2**20,
        "growth_above": statistics.mean(above) if above else 0.0,
        "growth_below": statistics.mean(below) if below else 0.0,
    }


def _predict_row_seconds(sizes: Sizes, figures: Hardware) -> float:
    """Return the predicted time of `SIZED_PROGRAM` in seconds per sequence."""
    kinds, remat = SIZED_PROGRAM
    pipeline = dataclasses.replace(sizes.config.pipeline, remat=remat, weight_gather="step")
    config = dataclasses.replace(sizes.config, pipeline=pipeline)
    model = CostModel(dataclasses.replace(sizes, config=config), figures)
    slots = sum(map(model.most_common_layer.slot, kinds))
    return model.contention * slots / sizes.batch.microbatch_size


def _exchange_rate(
    found: Measurements, sizes: Sizes, hardware: Hardware, num_devices: int, rate: float
) -> float:
    """Return the all-to-all bandwidth divided by the bandwidth `rate`, or the published ratio if
    the all-to-all bandwidth cannot be measured.
    """
    if found.exchange <= 1.5 * found.latency:
        return hardware.exchange_rate
    sent = sizes.activations.itemsize * sizes.activations.hidden * (1 - 1 / num_devices)
    return hardware.hops(num_devices) * sent / (found.exchange - found.latency) / rate


def _tokens_rate(
    found: Measurements, sizes: Sizes, hardware: Hardware, num_devices: int, rate: float
) -> float:
    """Return the token-collective bandwidth divided by the bandwidth `rate`, or the published ratio
    if the token-collective bandwidth cannot be measured.
    """
    if found.tokens <= 1.5 * found.latency:
        return hardware.tokens_rate
    share = math.prod(_token_shard(sizes, num_devices))
    sent = sizes.activations.itemsize * share * (num_devices - 1)
    return sent / (found.tokens - found.latency) / rate


def _memory_rate(found: Measurements, sizes: Sizes, hardware: Hardware) -> Hardware:
    """Return the hardware parameters, raising the memory bandwidth if the published value is too
    low.

    Small layers fit in caches. If predicted memory traffic would account for almost all of the
    measured time, memory bandwidth and matmul rate are increased by the same factor.
    """
    weights = found.forward_alone * found.weight_grad / found.forward
    model = CostModel(sizes, hardware).most_common_layer
    endless = CostModel(
        sizes, dataclasses.replace(hardware, matmul_efficiency=1e12)
    ).most_common_layer
    most = _MAX_MEMORY_SHARE * found.forward_alone
    if endless.seconds <= most and endless.accumulation <= _MAX_MEMORY_SHARE * weights:
        return hardware
    both = hardware.weight_grad_cost * model.seconds + model.accumulation
    factor = max(model.seconds / found.forward_alone, both / weights)
    rate = factor * hardware.memory_gb_per_second
    return dataclasses.replace(hardware, memory_gb_per_second=rate)


def _memory_seconds(endless: CostModel) -> float:
    """Return the time in seconds of a layer's memory traffic, assuming infinitely fast matmuls."""
    return (
        endless.most_common_layer.score_seconds
        if endless.overlaps
        else endless.most_common_layer.seconds
    )


def measure(sizes: Sizes, devices: Sequence[Any]) -> Measurements:
    """Time the layers and, on several devices, the collectives.

    Raises:
        ConfigError: the measured times vary too much because the machine is busy.
    """
    config = sizes.config
    together, alone = _ring(config, devices), _ring(config, devices[:1])
    of_sizes, sequences = _sizes(sizes), sizes.batch.microbatch_size
    others = [other for other in of_sizes if other.batch.microbatch_size != sequences]
    runs = [(sizes, *program) for program in PROGRAMS] + [
        (other, *SIZED_PROGRAM) for other in others
    ]
    taken = _layers(runs, together)
    forward, and_inputs, in_halves, whole, named, kept = taken[: len(PROGRAMS)]
    input_grad = and_inputs - forward - _recomputed_share(sizes) * forward
    times = {
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": in_halves - and_inputs,
        "forward_alone": _layers(runs[:1], alone)[0] if len(devices) > 1 else forward,
        "streamed": _time_update(together),
    }
    deferred = max(0.0, in_halves - whole)
    plain = forward + input_grad + times["weight_grad"] - deferred
    if len(devices) > 1:
        dtype, count = jnp.dtype(config.model.compute_dtype), len(devices)
        message = jnp.zeros((sizes.activations.stream,), dtype)
        elements = sizes.params.layer_elements(sizes.layers.most_common, whole=True)
        weights = jnp.zeros((-(-elements // count) * count,), dtype)
        split = jnp.zeros(_token_shard(sizes, count), dtype)
        times |= {
            "hop": _time_collective(together, message, lambda x, _: ring_shift(x, STAGE, 1, count)),
            "gather": _time_collective(together, weights[: weights.size // count], _gather),
            "scatter": _time_collective(together, weights.astype(jnp.float32), _reduce_scatter),
            "exchange": _time_collective(
                together, message[: message.size // count * count], _all_to_all
            ),
            "tokens": _time_collective(together, split, _gather_and_scatter) / 2,
            "latency": _time_collective(
                together, message[:8], lambda x, _: ring_shift(x, STAGE, 1, count)
            ),
            "fresh": _time_allocation(together),
        }
    for name, seconds in times.items():
        if seconds <= 0:
            raise ConfigError.one(
                Code.PLAN_CALIBRATION,
                "command line: --calibrate",
                None,
                f"measured a negative time for {name}, because timings on this machine are too "
                "noisy.",
                "Repeat the measurement while no other programs are running.",
            )
    # The following values are differences of differences, so a value near 0 can be measured as
    # negative.
    more = {
        "names_recomputed": max(0.0, named - plain),
        "none_recomputed": max(0.0, kept - plain),
        "deferred": deferred,
    }
    rows = [other.batch.microbatch_size for other in others]
    of_rows = {sequences: named} | dict(zip(rows, taken[len(PROGRAMS) :], strict=True))
    by_size = tuple(
        (
            CostModel(sized, published_hardware()["cpu"]).most_common_layer.moved_bytes,
            of_rows[sized.batch.microbatch_size] / sized.batch.microbatch_size,
        )
        for sized in of_sizes
    )
    return Measurements(**times, **more, by_size=by_size)


def _sizes(sizes: Sizes) -> list[Sizes]:
    """Return the run's array sizes for each microbatch size to time, in ascending order."""
    scaled_sizes = []
    for rows in sorted({max(1, int(share * sizes.batch.microbatch_size)) for share in SIZES}):
        scaled = sizes.config.train.batch_size * rows // sizes.batch.microbatch_size
        train = dataclasses.replace(sizes.config.train, batch_size=scaled)
        config = dataclasses.replace(sizes.config, train=train)
        scaled_sizes.append(dataclasses.replace(sizes, config=config))
    return scaled_sizes


def _recomputed_share(sizes: Sizes) -> float:
    """Return the fraction of a forward pass that a backward pass recomputes with `remat=full`."""
    pipeline = dataclasses.replace(sizes.config.pipeline, remat="full")
    full = dataclasses.replace(sizes, config=dataclasses.replace(sizes.config, pipeline=pipeline))
    layer = CostModel(full, published_hardware()["cpu"]).most_common_layer
    return layer.recompute_seconds / layer.forward


def _ring(config: Config, devices: Sequence[Any]) -> Mesh:
    return build_mesh(ring_mesh_config(config.mesh, len(devices)), devices)


# Programs.


def _layers(runs: Sequence[tuple[Sizes, str, Remat]], mesh: Mesh) -> list[float]:
    """Return the time of one layer in seconds, for every program in `PROGRAMS`."""
    programs = [_layer(*run, mesh) for run in runs]
    return [seconds / LAYERS for seconds in _seconds(mesh, programs, LAYER_LOOP_COUNTS)]


def _layer(sizes: Sizes, kinds: str, remat: Remat, mesh: Mesh) -> TimedProgram:
    config = sizes.config
    rules = AxisRules.from_config(config.mesh).for_platform(mesh.devices.flat[0].platform)
    decoder = Decoder(config.model, rules)
    dtype = jnp.dtype(config.model.compute_dtype)
    kind = Counter(decoder.model.layers).most_common(1)[0][0]
    init = jax.jit(lambda key: decoder.init_layers(kind, key, jnp.arange(LAYERS)))
    weights = {kind: jax.tree.map(lambda leaf: leaf.astype(dtype), init(jax.random.key(0)))}
    held = LayerWeights("step", jax.tree.map(lambda _: REPLICATED, weights[kind]), dtype)
    layout = LayerLayout(Ring(1, 1), (LAYERS,), layer_types=(kind,) * LAYERS)
    pipeline = dataclasses.replace(config.pipeline, offloaded_names=[], remat=remat)
    shape = (sizes.batch.microbatch_size, config.train.sequence_length)
    inputs = {
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
        "example_ids": jnp.arange(shape[0]),
        "tokens": jnp.zeros(shape, jnp.int32),
    }

    def run(weights: Tree, x: jax.Array, inputs: Tree, turns: jax.Array) -> Tree:
        keep = make_remat_policy(pipeline, config.model)
        layers = {kind: decoder.layer(kind)}
        slots = LayerSlots(
            layers, layout, {kind: held}, keep, "skip", None, uses_weight_window=False
        )
        weights, x, inputs, zero = mark_varying((weights, x, inputs, jnp.int32(0)))
        row = SlotRow(*(zero,) * (len(SlotRow._fields) - 1))
        seeds = dict.fromkeys(decoder.model.losses, mark_varying(jnp.float32(1)))
        work = slots.work(row, jax.tree.map(lambda leaf: leaf[None], inputs), seeds)
        halves = "I" in kinds
        pieces = slots.differentiate_layers(weights, x, inputs, seeds, halves=halves)
        stash = slots.empty_stash(pieces, 1, x)
        deferred = slots.empty_deferred(pieces, 1) if halves else {}

        def body(_: Any, carry: Tree) -> Tree:
            x, cotangent, stash, deferred, totals, reports = carry
            x, stash, reports = slots.forward_and_save(pieces, weights, work, x, stash, reports)
            if "B" in kinds:
                cotangent, totals = slots.backward(pieces, weights, work, cotangent, stash, totals)
            if "I" in kinds:
                cotangent, deferred = slots.input_grad(pieces, weights, work, x, stash, deferred)
            if "W" in kinds:
                totals = slots.weight_grad(pieces, work, deferred, totals)
            return x, cotangent, stash, deferred, totals, reports

        totals = {kind: held.zeros(weights[kind])}
        start = (x, x, stash, deferred, totals, slots.empty_reports(pieces))
        return jax.tree.map(jnp.sum, lax.fori_loop(0, turns, body, start))

    width = decoder.model.stream_width
    x = 0.01 * jax.random.normal(jax.random.key(1), (*shape, width), dtype)
    return run, (weights, x, inputs)


def _time_collective(
    mesh: Mesh, x: jax.Array, move: Callable[[jax.Array, jax.Array], jax.Array]
) -> float:
    """Return the time in seconds of a collective that preserves the shape of `x`."""

    def run(x: jax.Array, turns: jax.Array) -> jax.Array:
        return lax.fori_loop(
            0, turns, lambda turn, x: mark_varying(move(x, turn)), mark_varying(x)
        ).sum()

    return _seconds(mesh, [(run, (x,))])[0]


def _gather(shard: jax.Array, turn: jax.Array) -> jax.Array:
    whole = all_gather(shard, STAGE, 0)
    return lax.dynamic_slice_in_dim(whole, turn, len(shard))


def _all_to_all(x: jax.Array, turn: jax.Array) -> jax.Array:
    del turn
    return all_to_all(x, STAGE, 0, 0)


def _token_shard(sizes: Sizes, shards: int) -> tuple[int, int, int]:
    """Return the shape `[B, T, D]` of one shard of a microbatch whose tokens are sharded."""
    tokens = sizes.config.train.sequence_length
    return sizes.batch.microbatch_size, max(1, tokens // shards), sizes.config.model.d_model


def _gather_and_scatter(share: jax.Array, turn: jax.Array) -> jax.Array:
    del turn
    whole = lax.all_gather(share, STAGE, axis=1, tiled=True)
    # Move tokens to the first dimension, reduce, and move them back, as layers do.
    part = reduce_scatter(jnp.moveaxis(whole, 1, 0), STAGE, 0)
    return jnp.moveaxis(part, 0, 1)


def _reduce_scatter(whole: jax.Array, turn: jax.Array) -> jax.Array:
    part = reduce_scatter(whole, STAGE, 0)
    return lax.dynamic_update_slice_in_dim(whole, part, turn, 0)


def _time_update(mesh: Mesh) -> float:
    """Return the time to update the parameters, in seconds per byte of memory traffic."""

    def run(parameters: jax.Array, gradients: jax.Array, turns: jax.Array) -> jax.Array:
        def body(_: Any, state: Tree) -> Tree:
            parameters, first, second = state
            first = 0.9 * first + 0.1 * gradients
            second = 0.9 * second + 0.1 * gradients * gradients
            return parameters - 1e-3 * first * lax.rsqrt(1 + second), first, second

        state = mark_varying((parameters, gradients, gradients))
        return lax.fori_loop(0, turns, body, state)[0].sum()

    on_cpus = mesh.devices.flat[0].platform == "cpu"
    count = NUM_STREAMED_PARAMS // (mesh.size if on_cpus else 1)
    zeros, ones = jnp.zeros((count,), jnp.float32), jnp.ones((count,), jnp.float32)
    moved = 4 * (3 + 1 + 3) * count
    return _seconds(mesh, [(run, (zeros, ones))], LAYER_LOOP_COUNTS)[0] / moved


def _time_allocation(mesh: Mesh) -> float:
    """Return the time, in seconds per byte, to zero a temporary buffer and write to part of it."""

    def run(num_rows: int, turns: jax.Array) -> jax.Array:
        buffer = mark_varying(jnp.zeros((num_rows, FRESH_ROW), jnp.float32))
        row = mark_varying(jnp.ones((1, FRESH_ROW), jnp.float32))

        def body(turn: jax.Array, buffer: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(buffer, row * turn, turn, 0)

        return lax.fori_loop(0, turns, body, buffer)[turns]

    with jax.set_mesh(mesh):
        programs = [_program(mesh, partial(run, num_rows)) for num_rows in FRESH_ROWS]
        few, many = median_seconds(
            [partial(each, jnp.int32(2)) for each in programs], rerank.PROGRAM_SECONDS
        )
    return (many - few) / (4 * FRESH_ROW * (FRESH_ROWS[1] - FRESH_ROWS[0]))


def _seconds(
    mesh: Mesh, runs: Sequence[TimedProgram], turns: tuple[int, int] = LOOP_COUNTS
) -> list[float]:
    """Return each program's time per loop iteration, in seconds. The last argument of each program
    is the loop count.
    """
    with jax.set_mesh(mesh):
        calls = [
            partial(program, *arguments, jnp.int32(count))
            for program, arguments in [(_program(mesh, run), given) for run, given in runs]
            for count in turns
        ]
        taken = median_seconds(calls, len(runs) * rerank.PROGRAM_SECONDS)
    return [
        (many - few) / (turns[1] - turns[0])
        for few, many in zip(taken[::2], taken[1::2], strict=True)
    ]


def _program(mesh: Mesh, run: Callable[..., Tree]) -> Callable[..., Tree]:
    """Compile a function that runs on all devices of the mesh at the same time."""

    def on_each(*given: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf[None], run(*given))

    if not (axes := manual_axes_of(mesh)):
        return jax.jit(on_each)
    everywhere = PartitionSpec()
    return jax.jit(
        jax.shard_map(
            on_each,
            mesh=mesh,
            axis_names=set(axes),
            in_specs=everywhere,
            out_specs=PartitionSpec(STAGE),
        )
    )
