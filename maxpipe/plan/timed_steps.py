"""Steps of a run that are timed on the devices here, and what calibration reads from them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.config.check import check
from maxpipe.config.schema import Config, PipelineConfig
from maxpipe.hardware import Hardware
from maxpipe.parallel.axes import MeshConfig
from maxpipe.plan.compile import build_steps
from maxpipe.plan.cost import cost
from maxpipe.plan.sizes import Sizes, schedule_of
from maxpipe.schedule.catalog import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from maxpipe.step.step import Steps

Tree = Any
LAYERS = 2
"""Layers of a chunk that is timed."""
SECONDS = 2.0
"""Seconds for which each program is called repeatedly; medians count."""


def medians(calls: Sequence[Callable[[], Tree]], seconds: float) -> list[float]:
    """Median seconds of each call, interleaved so that disturbances hit all alike."""
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


def on_ring(mesh: MeshConfig, count: int) -> MeshConfig:
    """The mesh with `count` stages and nothing else."""
    names = [field.name for field in dataclasses.fields(mesh)]
    sizes = {name: 1 for name in names if name.startswith(("ici_", "dcn_"))}
    return dataclasses.replace(mesh, **sizes | {"ici_stage": count})


def split(config: Config, hardware: Hardware, devices: Sequence[Any]) -> Hardware:
    """With `split_cost` and `ring_cost`: what the rest of the model does not explain of split
    layers, and of the same layers in rings.

    Of steps that differ by their number of layers alone, for each number of devices that this
    model's layers can be split over. Where there is none, both are as they were.
    """
    splits, ring_costs = [], []
    for count in range(2, len(devices) + 1):
        if len(devices) % count:
            continue
        pairs = [
            _of_two_depths(count, in_rings, config, len(devices)) for in_rings in (False, True)
        ]
        if any(check(run, {}) for pair in pairs for run in pair):
            continue
        calls = [step_of(build_steps(run, devices)) for pair in pairs for run in pair]
        few, many, few_in_rings, many_in_rings = medians(calls, len(calls) * SECONDS)
        plain, in_rings = many - few, many_in_rings - few_in_rings
        found = _explained("split_cost", plain, hardware, partial(_between, pairs[0]))
        splits.append(found)
        costly = dataclasses.replace(hardware, split_cost=max(0.0, found))
        longer = partial(_longer_in_rings, pairs)
        ring_costs.append(_explained("ring_cost", in_rings - plain, costly, longer))
    if not splits:
        return hardware
    names = {"split_cost": splits, "ring_cost": ring_costs}
    means = {name: max(0.0, statistics.mean(found)) for name, found in names.items()}
    return dataclasses.replace(hardware, **means)


def _explained(
    name: str, measured: float, hardware: Hardware, predicted: Callable[[Hardware], float]
) -> float:
    """The value of a figure with which as many seconds are predicted, which grow evenly with it.

    As it was where they do not depend on it: traffic takes longer than all that it hides.
    """
    none, one = (predicted(dataclasses.replace(hardware, **{name: each})) for each in (0.0, 1.0))
    return (measured - none) / (one - none) if one > none else getattr(hardware, name)


Pair = tuple[Config, Config]
"""Runs that differ by their number of layers alone."""


def _longer_in_rings(pairs: Sequence[Pair], hardware: Hardware) -> float:
    plain, in_rings = (_between(pair, hardware) for pair in pairs)
    return in_rings - plain


def _between(pair: Pair, hardware: Hardware) -> float:
    """Predicted seconds between steps of two numbers of layers."""
    figures = dataclasses.replace(hardware, tick_us=0.0)
    few, many = (cost(Sizes(run), schedule_of(run), figures).seconds for run in pair)
    return many - few


def _of_two_depths(split: int, in_rings: bool, config: Config, num_devices: int) -> Pair:
    """Few layers split over `split` devices, with as many tokens on each as one has elsewhere."""
    train = dataclasses.replace(config.train, batch_size=Sizes(config).rows * num_devices)
    mesh = dataclasses.replace(
        on_ring(config.mesh, 1),
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


def tick(config: Config, hardware: Hardware, devices: Sequence[Any]) -> float:
    """Seconds of a tick beyond the cost model's prediction.

    Of steps of many ticks, one of each kind, it is what the rest of the model does not explain:
    devices that share cores wait for each other longer than for an empty collective, in a tick's
    layers and in the loss head that all stages share.
    """
    still = dataclasses.replace(hardware, tick_us=0.0)
    calls, predicted, ticks = [], 0.0, 0
    for repeats in (1, LAYERS):
        run = _in_chunks(repeats, config, len(devices))
        schedule = schedule_of(run)
        calls.append(step_of(build_steps(run, devices)))
        predicted += cost(Sizes(run), schedule, still).seconds
        ticks += schedule.num_ticks
    return max(0.0, sum(medians(calls, len(calls) * SECONDS)) - predicted) / ticks


def _in_chunks(repeats: int, config: Config, stages: int) -> Config:
    """A ring of all devices with LAYERS each in `repeats` chunks; a microbatch for each device."""
    model = dataclasses.replace(config.model, num_layers=LAYERS * stages)
    train = dataclasses.replace(config.train, batch_size=Sizes(config).rows * stages)
    schedule = ONE_FORWARD_ONE_BACKWARD if repeats == 1 else INTERLEAVED
    pipeline = PipelineConfig(schedule=schedule, repeats=repeats, microbatches=stages)
    mesh = on_ring(config.mesh, stages)
    return dataclasses.replace(config, model=model, train=train, pipeline=pipeline, mesh=mesh)


def step_of(steps: Steps) -> Callable[[], Tree]:
    """The train step on synthetic data, to be called repeatedly."""
    rows, tokens = steps.shape
    keys = jax.random.split(jax.random.key(0), 2)
    vocabulary = steps.partition.decoder.config.vocab_size
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
