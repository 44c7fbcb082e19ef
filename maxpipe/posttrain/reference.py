"""The reference of a run: the parameters that it began with, beside those that it trains.

Frozen parameters are the same in both and are there once. A checkpoint has a digest of the
reference and not the reference, which is read again from where the run began.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.errors import ConfigError
from maxpipe.pipeline.trainable import joined
from maxpipe.step.step import Steps

Tree = Any


class Reference:
    """Copies of the trained parameters, divided over devices as they are.

    `saved_digest` is that of a checkpoint, if the run goes on from one.

    Raises:
        ConfigError: these are not the parameters that the run has begun with.
    """

    def __init__(self, steps: Steps, params: Tree, saved_digest: str | None, where: str):
        mine = steps.partition.trained(params)
        self._copies = jax.tree.map(jnp.copy, mine)  # a step uses its own up
        self.digest = steps.digest(mine)
        if saved_digest not in (None, self.digest):
            raise ConfigError.one(
                where,
                None,
                "must lead to the weights that this run has begun with, which are the reference "
                "of grpo.kl: other weights are there now.",
                "Put them back, name the step that they are of with RUN@STEP, or set run.name to a "
                "new name.",
            )

    def of(self, params: Tree) -> Tree:
        """The parameters of the reference, `params` being those that are trained."""
        return joined(params, self._copies)
