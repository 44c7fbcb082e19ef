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

from maxpipe.models.spec import Follows, Model
from maxpipe.nn.decoder import AHEAD
from maxpipe.optim.guard import unless_bad
from maxpipe.parallel.explicit import divided_like

Tree = Any


def followed(
    model: Model,
    params: Tree,
    statistics: Mapping[str, Mapping[str, Any]],
    taken: Bool[Array, ""] | bool,
) -> Tree:
    """The parameters after a step, with those that follow statistics moved if it is taken.

    `statistics` are by place (`layers` and `outside`), kind and name; those of layers ahead by
    name, under `ahead`.
    """
    found = dict(params)

    def move(layers: Tree, follows: Mapping[tuple[str, str], Follows], reported: Tree) -> Tree:
        for (part, name), how in follows.items():
            old, own = layers[part][name], layers[part]
            new = unless_bad(taken, moved(old, reported[how.statistic], how), old)
            layers = layers | {part: own | {name: new}}
        return layers

    for place, kinds in statistics.items():
        if place == AHEAD:
            heads = found[place]
            found[place] = heads | {"layer": move(heads["layer"], model.ends.follows, kinds)}
            continue
        layers = dict(found.get(place, {}))
        for kind, reported in kinds.items():
            layers[kind] = move(layers[kind], model.kinds[kind].follows, reported)
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
    # Each device has the statistics of all experts, and of the parameter maybe only its own.
    direction = divided_like(jnp.sign(mean - statistic), param)
    return param + how.rate * direction.astype(param.dtype)
