"""Layer metrics, and updates of parameters from the statistics that layers report.

Some parameters, such as load-balancing biases, are updated from statistics, without a gradient.
Statistics are sums over all sequences, stacked like the parameters. The update is elementwise, so
it does not depend on the mesh, the schedule or the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from maxpipe.models.spec import Follows, Model
from maxpipe.nn.decoder import MTP
from maxpipe.optim.guard import select_update
from maxpipe.parallel.sharding import reshard_like

Tree = Any


def compute_layer_metrics(
    model: Model,
    losses: Mapping[str, Float[Array, ""]],
    statistics: Mapping[str, Mapping[str, Array]],
) -> dict[str, Float[Array, ""]]:
    """Return the layer metrics, keyed by tag.

    `losses` are per target token, summed over layers. `statistics` are arrays `[layers of the type,
    ...]`, keyed by layer type and name. MTP layers are included, with their shifted targets.
    """
    metrics: dict[str, Array] = {}
    for tag, summary in model.metrics.items():
        if summary.take == "mean":
            layers = sum(summary.of in model.layer_types[kind].losses for kind in model.all_layers)
            if layers:
                metrics[tag] = losses[summary.of] / layers
            continue
        arrays = [values[summary.of] for values in statistics.values() if summary.of in values]
        largest = summary.take == "largest"
        extremes = [_extreme_per_layer(array, largest=largest) for array in arrays]
        metrics[tag] = (jnp.max if largest else jnp.min)(jnp.concatenate(extremes))
    return metrics


def _extreme_per_layer(array: Float[Array, "L ..."], *, largest: bool) -> Float[Array, " L"]:
    """Return each layer's largest or smallest entry, divided by the mean; 0 if the mean is 0."""
    entries = jax.lax.reshape(array, (len(array), array[0].size))
    extreme = (entries.max if largest else entries.min)(axis=1)
    mean = entries.mean(axis=1)
    return jnp.where(mean == 0, 0.0, extreme / jnp.where(mean == 0, 1.0, mean))


def apply_balance_updates(
    model: Model,
    params: Tree,
    statistics: Mapping[str, Mapping[str, Any]],
    taken: Bool[Array, ""] | bool,
) -> Tree:
    """Update the parameters that follow statistics, unless the step is skipped.

    `statistics` are keyed by place (`layers`, `outside`), layer type and name. Those of MTP layers
    are under `ahead`, keyed by name only.
    """
    updated = dict(params)

    def update(layers: Tree, follows: Mapping[tuple[str, str], Follows], reported: Tree) -> Tree:
        for (part, name), rule in follows.items():
            old = layers[part][name]
            new = select_update(taken, balance_step(old, reported[rule.statistic], rule), old)
            layers = layers | {part: layers[part] | {name: new}}
        return layers

    for place, reports in statistics.items():
        if place == MTP:
            layer = update(updated[MTP]["layer"], model.ends.balance_updates, reports)
            updated[MTP] = updated[MTP] | {"layer": layer}
            continue
        layers = dict(updated.get(place, {}))
        for layer_type, reported in reports.items():
            follows = model.layer_types[layer_type].balance_updates
            layers[layer_type] = update(layers[layer_type], follows, reported)
        if layers:
            updated[place] = layers
    return updated


def balance_step(
    param: Float[Array, "*layers E"], statistic: Float[Array, "*layers E"], rule: Follows
) -> Float[Array, "*layers E"]:
    """Increase entries whose statistic is below the mean; decrease entries above the mean.

    Padding entries of a stack have statistics of 0 and do not change.
    """
    mean = statistic.mean(-1, keepdims=True)
    # Every device has the statistics of all experts, but the parameter may be sharded over experts.
    direction = reshard_like(jnp.sign(mean - statistic), param)
    return param + rule.rate * direction.astype(param.dtype)
