"""Steps of a run that are timed on the devices here, and what calibration reads from them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.config.check import check
from maxpipe.config.schema import Config, MeshConfig, PipelineConfig
from maxpipe.hardware import Hardware
from maxpipe.plan.compile import build_steps
from maxpipe.plan.cost import cost
from maxpipe.plan.sizes import Sizes, schedule_of
from maxpipe.schedule.catalog import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from maxpipe.train.step import Steps

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


def split_cost(config: Config, hardware: Hardware, devices: Sequence[Any]) -> float:
    """`Hardware.split_cost`: what the rest of the model does not explain of split layers.

    Of steps that differ by their number of layers alone, for each number of devices that this
    model's layers can be split over. Where there is none, as it was.
    """
    found = []
    for split in range(2, len(devices) + 1):
        if len(devices) % split:
            continue
        runs = [_of_depth(depth, split, config, len(devices)) for depth in (LAYERS, 3 * LAYERS)]
        if any(check(run, {}) for run in runs):
            continue
        calls = [step_of(build_steps(run, devices)) for run in runs]
        few, many = medians(calls, len(calls) * SECONDS)
        unsplit, all_split = (_of_layers(runs, hardware, share) for share in (0.0, 1.0))
        found.append((many - few - unsplit) / (all_split - unsplit))
    return max(0.0, statistics.mean(found)) if found else hardware.split_cost


def _of_layers(runs: Sequence[Config], hardware: Hardware, split_cost: float) -> float:
    """Predicted seconds between steps of two numbers of layers."""
    figures = dataclasses.replace(hardware, split_cost=split_cost, tick_us=0.0)
    few, many = (cost(Sizes(run), schedule_of(run), figures).seconds for run in runs)
    return many - few


def _of_depth(depth: int, split: int, config: Config, num_devices: int) -> Config:
    """Few layers split over `split` devices, with as many tokens on each as one has elsewhere."""
    model = dataclasses.replace(config.model, num_layers=depth)
    train = dataclasses.replace(config.train, batch_size=Sizes(config).rows * num_devices)
    mesh = dataclasses.replace(
        on_ring(config.mesh, 1),
        ici_fsdp=num_devices // split,
        ici_tensor=split,
        sequence_parallel=True,
    )
    pipeline = PipelineConfig(schedule=INTERLEAVED, remat="full")
    return dataclasses.replace(config, model=model, train=train, pipeline=pipeline, mesh=mesh)


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
