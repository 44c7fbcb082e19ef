"""From a whole config to the steps of its run: what training and compiling ahead share."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from maxpipe.config.check import total_steps
from maxpipe.config.schema import Config
from maxpipe.sharding import AxisRules
from maxpipe.train.step import Steps, partition


def steps_of(config: Config, mesh: Mesh, byte_lengths: np.ndarray) -> Steps:
    """The steps that a config describes on a mesh; see `partition`."""
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
    )
