"""From a whole config to its steps and batches: what training, evaluation and `compile` share."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import maxpipe
from maxpipe.config.check import check, total_steps
from maxpipe.config.keys import flat, may_differ
from maxpipe.config.load import Loaded, to_dict
from maxpipe.config.schema import Config
from maxpipe.config.training import asks_teacher
from maxpipe.data.loader import Batch, Batches, Loader
from maxpipe.errors import ConfigError
from maxpipe.io import redact
from maxpipe.parallel.mesh import Device, divided, resolve
from maxpipe.parallel.sharding import AxisRules, local_rows, place_rows
from maxpipe.step.objectives import objective_of
from maxpipe.step.partition import partition
from maxpipe.step.step import Steps


def steps_of(
    config: Config, mesh: Mesh, byte_lengths: np.ndarray, *, num_sources: int | None = None
) -> Steps:
    """The steps that a config describes on a mesh; see `partition`.

    There is a sum for each source of the mixture, or for `num_sources`.
    """
    return partition(
        mesh,
        model=config.model,
        pipeline=config.pipeline,
        optim=config.optim,
        train=config.train,
        total_steps=total_steps(config.train),
        rules=AxisRules.from_config(config.mesh),
        seed=config.run.seed,
        byte_lengths=byte_lengths,
        guard=config.guard,
        num_sources=len(config.data.mixture) if num_sources is None else num_sources,
        objective=objective_of(config),
    )


def batches(sharding: NamedSharding, loader: Loader, start: int, stop: int) -> Batches:
    """Global batches of the steps from `start` to before `stop`, read ahead."""
    rows = {count: local_rows(sharding, count) for count in loader.ramp.sizes(start)}

    def placed(host: Batch, count: int) -> dict[str, jax.Array]:
        return place_rows(host, rows[count], count, sharding)

    return loader.batches(start, rows.__getitem__, stop_step=stop, made=placed)


def devices_of(config: Config) -> tuple[list[Device], list[Device]]:
    """Those of the student, and those of its teacher: the same, or others.

    Raises:
        ConfigError: there are not enough, or processes would have unlike ones.
    """
    count = config.distill.devices if asks_teacher(config) else 0
    return divided(jax.devices(), count, "distill.devices")


def fit_to_devices(loaded: Loaded) -> Loaded:
    """The config with the mesh's -1 resolved, and the rules that depend on it checked."""
    mesh = resolve(loaded.config.mesh, devices_of(loaded.config)[0])
    config = dataclasses.replace(loaded.config, mesh=mesh)
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    before = dataclasses.asdict(loaded.config.mesh)
    filled = frozenset(f"mesh.{name}" for name, size in before.items() if size == -1)
    return dataclasses.replace(loaded, config=config, filled=filled)


def shared_facts(config: Config) -> dict[str, str]:
    """Values that must be the same in all processes, by name."""
    facts = {"maxpipe": maxpipe.__version__, "jax": jax.__version__}
    for key, value in flat(to_dict(redact.within(config))).items():
        if not may_differ(key):
            facts[key] = json.dumps(value)
    return facts
