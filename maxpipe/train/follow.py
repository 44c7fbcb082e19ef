"""Parameters that a step moves without a gradient, by what the layers have reported of it.

Statistics are sums over all rows, in the form in which parameters are stacked: the update is entry
by entry, and the same under every mesh, schedule and number of microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from maxpipe.model.spec import Follows, Model
from maxpipe.train.guard import unless_bad

Tree = Any


def followed(
    model: Model,
    params: Tree,
    statistics: Mapping[str, Mapping[str, Mapping[str, Array]]],
    taken: Bool[Array, ""] | bool,
) -> Tree:
    """The parameters after a step, with those that follow statistics moved if it is taken.

    `statistics` are by place (`layers` and `outside`), kind and name.
    """
    found = dict(params)
    for place, kinds in statistics.items():
        layers = dict(found.get(place, {}))
        for kind, reported in kinds.items():
            for (part, name), how in model.kinds[kind].follows.items():
                old, own = layers[kind][part][name], layers[kind][part]
                new = unless_bad(taken, moved(old, reported[how.statistic], how), old)
                layers[kind] = layers[kind] | {part: own | {name: new}}
        if layers:
            found[place] = layers
    return found


def moved(
    param: Float[Array, "*layers E"], statistic: Float[Array, "*layers E"], how: Follows
) -> Float[Array, "*layers E"]:
    """Each entry up where the statistic is below its mean, down where it is above.

    In padding of a stack, whose statistics are 0, nothing moves.
    """
    mean = statistic.mean(-1, keepdims=True)
    return param + how.rate * jnp.sign(mean - statistic).astype(param.dtype)
