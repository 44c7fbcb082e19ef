"""Compute the layer statistics of a train step, and summarize them per layer.

The train step returns arrays with one entry per layer of a type. The host converts these arrays to
one value per layer of the network, where MTP layers follow the network's layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from maxpipe.config.sections.layer_stats import LayerStatsConfig
from maxpipe.models.param_names import KeyPath, flatten, unflatten
from maxpipe.models.spec import Model
from maxpipe.nn.activation_statistics import (
    NUM_BINS,
    count_bins,
    histogram_edges,
    sum_squares,
)
from maxpipe.parallel.collectives import Maximum
from maxpipe.parallel.sharding import auto_sharded, to_device
from maxpipe.pipeline.engine import Engine
from maxpipe.pipeline.mtp import MTP, MtpLayerFns
from maxpipe.step.state import ParamLayout

Tree = Any


class LayerStatistics(NamedTuple):
    """Statistics of a step as arrays, replicated on all devices."""

    squares: dict[str, Tree]
    """Sums of squares of parameters (`param`), gradients (`grad`) and updates (`update`), in the
    tree structure of the trainable parameters, with layers `[n]` in model order."""
    histograms: dict[str, Tree]
    """Counts per histogram bin of parameters and gradients, as in `squares`; empty unless the
    config enables histograms."""
    activations: dict[str, dict[str, Any]]
    """Statistics that layers report, `[n, ...]`, keyed by layer type and name. Those of MTP layers
    are stored under `ahead`."""
    tokens: Any
    """Number of tokens in the batch, excluding padding."""


_NUM_STACKED = {"layers": 3, "outside": 1, MTP: 1}
"""Number of stacked dims of the parameters in each subtree; 0 for other parameters."""


def recording_engine(engine: Engine, parts: ParamLayout, config: LayerStatsConfig) -> Engine:
    """Return the engine whose layers also report statistics of their activations."""
    if not config.activations:
        return engine
    decoder = replace(parts.decoder, records_activations=True, records_histograms=config.histograms)
    network, mtp = engine.network, engine.network.mtp
    if isinstance(mtp, MtpLayerFns):
        mtp = mtp._replace(layer=decoder.mtp_layer)
    layers = {kind: decoder.layer(kind) for kind in network.layers}
    return replace(engine, network=replace(network, layers=layers, mtp=mtp))


def collect(
    parts: ParamLayout,
    config: LayerStatsConfig,
    batch: Tree,
    before: Tree,
    after: Tree,
    gradients: Tree,
    reported: Mapping[str, Mapping[str, Any]],
) -> LayerStatistics:
    """Return the statistics of a step.

    `before` and `after` are the trainable parameters before and after the update, in stacked form,
    and `gradients` their gradients. `reported` are the statistics that layers report.
    """

    def run(batch: Tree, before: Tree, after: Tree, gradients: Tree, reported: Tree) -> Tree:
        unstack = partial(parts.unstack, vocabulary={})
        updates = jax.tree.map(_difference, after, before)
        trees = {"param": before, "grad": gradients, "update": updates}
        squares = {name: unstack(_map_params(_sum_squares, tree)) for name, tree in trees.items()}
        histograms: dict[str, Tree] = {}
        if config.histograms:
            count = partial(_count_bins, parts.decoder.model)
            for name in ("param", "grad"):
                histograms[name] = unstack(_map_params(count, trees[name]))
        activations = {
            kind: dict(_finish_activations(statistics)) for kind, statistics in reported.items()
        }
        tokens = (batch["segment_ids"] > 0).sum().astype(jnp.float32)
        return LayerStatistics(squares, histograms, activations, tokens)

    # The barrier separates the statistics from the update, whose fusions must not change.
    before, after = to_device((before, after))
    arguments = lax.optimization_barrier((batch, before, after, gradients, reported))
    return auto_sharded(run, PartitionSpec())(*arguments)


def _difference(after: Array, before: Array) -> Array:
    return after.astype(jnp.float32) - before.astype(jnp.float32)


def _map_params(run: Callable[[KeyPath, Array], Array], tree: Tree) -> Tree:
    """Apply `run` to the path and the array of each parameter."""
    return unflatten({path: run(path, x) for path, x in flatten(tree).items()})


def _sum_squares(path: KeyPath, x: Array) -> Array:
    return sum_squares(x, _NUM_STACKED.get(path[0], 0))


def _count_bins(model: Model, path: KeyPath, x: Array) -> Array:
    """Return the histograms of a stacked parameter, without the padding of the vocabulary."""
    counts = count_bins(x, None, _NUM_STACKED.get(path[0], 0))
    if path in model.ends.params and path[0] != MTP:
        padding = x.size - math.prod(model.ends.params[path].shape)
        counts = counts.at[NUM_BINS // 2].add(-padding)
    return counts


def _finish_activations(statistics: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield the statistics of one layer type's activations; reduce units to a few numbers."""
    for name, statistic in statistics.items():
        values = statistic.value if isinstance(statistic, Maximum) else statistic
        if name.startswith("unit_max/"):
            yield f"dead_units/{name.partition('/')[2]}", (values == 0).mean(-1)
        else:
            yield name, values


# Conversion to one value per layer, on the host.

Values = list[Any]
"""List with one value per layer of the network, followed by the MTP layers; None if a layer has no
value."""


def summarize(model: Model, collected: LayerStatistics) -> dict[str, Any]:
    """Return the record of a step for `layers.jsonl`, without the step and the time.

    `layers` is the number of layers, including MTP layers. `values` maps names to one float per
    layer, or None for a layer without the value. `outside` maps names to the values of parameters
    outside the layers. `experts` contains one list per layer. `histograms` maps names to `edges`
    and to `counts` with one list per layer.
    """
    collected = jax.tree.map(np.asarray, collected)
    layers = _Layers(model)
    record: dict[str, Any] = {"layers": layers.count, "values": {}, "outside": {}, "experts": {}}
    _summarize_params(layers, collected, record)
    values: dict[str, Values] = record["values"]
    for place, statistics in collected.activations.items():
        found = statistics | _router_values(statistics)
        for name, numbers in found.items():
            measure, _, subject = name.partition("/")
            if measure == "mean_square":
                rms = np.sqrt(numbers / np.maximum(collected.tokens, 1.0))
                layers.put(values, f"activation_rms/{subject}", place, rms)
            elif measure == "max":
                layers.put(values, f"activation_max/{subject}", place, numbers)
            elif measure in ("dead_units", "router_load_max", "router_load_min", "dead_experts"):
                layers.put(values, name, place, numbers)
            elif name == "attention_logit":
                layers.put(values, "attention_logit_max", place, numbers)
            elif name in ("attention_entropy", "router_entropy"):
                counts = found["attention_queries" if "attention" in name else "router_tokens"]
                with np.errstate(invalid="ignore", divide="ignore"):
                    layers.put(values, name, place, numbers / counts)
            elif name == "load":
                shares = numbers / np.maximum(numbers.sum(-1, keepdims=True), 1.0)
                layers.put(record["experts"], "router_load", place, shares)
    histograms = _summarize_histograms(layers, collected)
    return record | ({"histograms": histograms} if histograms else {})


class _Layers:
    """Rows of the layers of each type, and of the MTP layers, in lists with one value per layer."""

    def __init__(self, model: Model):
        self.model, self.count = model, len(model.all_layers)
        self._rows = {
            kind: [row for row, other in enumerate(model.layers) if other == kind]
            for kind in model.layer_types
        }
        self._rows[MTP] = list(range(len(model.layers), self.count))

    def put(self, values: dict[str, Values], name: str, place: str, numbers: np.ndarray) -> None:
        """Store the values of one layer type, or of the MTP layers."""
        row_values = values.setdefault(name, [None] * self.count)
        for row, number in zip(self._rows[place], numbers.tolist(), strict=True):
            row_values[row] = number if isinstance(number, list) else _rounded(number)

    def params(self, tree: Tree) -> Iterator[tuple[str, str, np.ndarray, int]]:
        """Yield (name, place, numbers, size) of each parameter of a tree in model order.

        `place` is a layer type, `ahead`, or empty for parameters outside the layers. The size is
        the number of entries of one number.
        """
        model = self.model
        for path, numbers in flatten(tree).items():
            if path[0] == "layers":
                kind, *key = path[1:]
                size = math.prod(model.layer_types[kind].params[key[0], key[1]].shape)
                yield ".".join(key), kind, numbers, size
                continue
            size = math.prod(model.ends.params[path].shape)
            if path[0] != MTP:
                yield ".".join(path), "", numbers, size
                continue
            size //= len(numbers)
            if model.ends.mtp_layers is None:
                for head, number in enumerate(numbers, 1):
                    yield ".".join(("mtp", str(head), *path[1:])), "", number, size
            else:
                name = path[2:] if path[1] == "layer" else ("mtp", *path[1:])
                yield ".".join(name), MTP, numbers, size


def _rounded(number: float) -> float:
    """Return the number with the digits that float32 stores, for a short record."""
    return float(f"{number:.7g}")


def _summarize_params(layers: _Layers, collected: LayerStatistics, record: dict[str, Any]) -> None:
    """Add the norms and RMS of parameters, gradients and updates, and the update ratios."""

    def put(name: str, place: str, numbers: np.ndarray) -> None:
        if place:
            layers.put(record["values"], name, place, numbers)
        else:
            record["outside"][name] = _rounded(float(numbers))

    names = ("param", "grad", "update")
    for params in zip(*(layers.params(collected.squares[tree]) for tree in names), strict=True):
        for tree, (name, place, squares, size) in zip(names, params, strict=True):
            put(f"{tree}_norm/{name}", place, np.sqrt(squares))
            put(f"{tree}_rms/{name}", place, np.sqrt(squares / size))
        (name, place, before, _), (_, _, updates, _) = params[0], params[2]
        with np.errstate(invalid="ignore", divide="ignore"):
            put(f"update_ratio/{name}", place, np.sqrt(updates) / np.sqrt(before))


def _router_values(statistics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the largest and smallest load relative to the mean, and the fraction of unused
    experts.
    """
    if "load" not in statistics:
        return {}
    load = statistics["load"]
    mean = np.maximum(load.mean(-1), 1e-9)
    return {
        "router_load_max": load.max(-1) / mean,
        "router_load_min": load.min(-1) / mean,
        "dead_experts": (load == 0).mean(-1),
    }


def _summarize_histograms(layers: _Layers, collected: LayerStatistics) -> dict[str, Any]:
    """Return the histograms of parameters, gradients and activations. Outer bins that are empty in
    all layers are removed.
    """
    counts: dict[str, Values] = {}
    for tree, params in collected.histograms.items():
        for name, place, numbers, _ in layers.params(params):
            if place:
                layers.put(counts, f"{tree}/{name}", place, numbers)
            else:
                counts[f"{tree}/{name}"] = [numbers.tolist()]
    for place, statistics in collected.activations.items():
        for name, numbers in statistics.items():
            if name.startswith("histogram/"):
                layers.put(counts, f"activation/{name.partition('/')[2]}", place, numbers)
    edges, histograms = histogram_edges(), {}
    for name, rows in counts.items():
        used = np.flatnonzero(np.sum([row for row in rows if row is not None], axis=0))
        first, last = (used[0], used[-1] + 1) if used.size else (0, 1)
        histograms[name] = {
            "edges": edges[first : last + 1].tolist(),
            "counts": [row if row is None else row[first:last] for row in rows],
        }
    return histograms


def largest_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that summarize a record: extreme values, and the layers that have them."""
    metrics: dict[str, float] = {}

    def find(prefix: str, tag: str, layer_tag: str = "", *, smallest: bool = False) -> None:
        pairs = [
            (value, row)
            for name, row_values in record["values"].items()
            if name.startswith(prefix)
            for row, value in enumerate(row_values)
            if value is not None and math.isfinite(value)
        ]
        if pairs:
            metrics[tag], row = min(pairs) if smallest else max(pairs)
            if layer_tag:
                metrics[layer_tag] = float(row)

    find("activation_max/", "layers/activation_max", "layers/activation_max_layer")
    find("attention_logit_max", "layers/attention_logit_max")
    find("update_ratio/", "layers/update_ratio_max", "layers/update_ratio_max_layer")
    find("update_ratio/", "layers/update_ratio_min", smallest=True)
    return metrics
