"""Numbers of what layers return besides their output, as their parts declare them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from maxpipe.models.spec import Model


def summarised(
    model: Model,
    losses: Mapping[str, Float[Array, ""]],
    statistics: Mapping[str, Mapping[str, Array]],
) -> dict[str, Float[Array, ""]]:
    """The numbers by tag.

    `losses` are sums over layers, for each target token; `statistics` are by kind and name arrays
    `[layers of the kind, ...]`. Layers of heads ahead count as others do, for their own targets.
    """
    found: dict[str, Array] = {}
    for tag, summary in model.summaries.items():
        if summary.take == "mean":
            layers = sum(summary.of in model.kinds[kind].losses for kind in model.all_layers)
            if layers:
                found[tag] = losses[summary.of] / layers
            continue
        arrays = [each[summary.of] for each in statistics.values() if summary.of in each]
        largest = summary.take == "largest"
        extremes = [_of_each_layer(array, largest=largest) for array in arrays]
        found[tag] = (jnp.max if largest else jnp.min)(jnp.concatenate(extremes))
    return found


def _of_each_layer(array: Float[Array, "L ..."], *, largest: bool) -> Float[Array, " L"]:
    """A layer's largest or smallest entry as a multiple of their mean; 0 where all are 0."""
    entries = jax.lax.reshape(array, (len(array), array[0].size))
    extreme = (entries.max if largest else entries.min)(axis=1)
    mean = entries.mean(axis=1)
    return jnp.where(mean == 0, 0.0, extreme / jnp.where(mean == 0, 1.0, mean))
