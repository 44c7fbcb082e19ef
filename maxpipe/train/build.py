"""From a whole config to its steps and batches: what training, evaluation and `compile` share."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxpipe.config.check import total_steps
from maxpipe.config.schema import Config
from maxpipe.data.loader import Batch, Batches, Loader
from maxpipe.parallel.sharding import AxisRules, local_rows, place_rows
from maxpipe.train.objectives import objective_of
from maxpipe.train.partition import partition
from maxpipe.train.step import Steps


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
