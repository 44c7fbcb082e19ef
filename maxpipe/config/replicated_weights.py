"""Detection of large replicated weights. The module does not import jax."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxpipe.config.keys import KEYS
from maxpipe.config.rules import axis_keys, axis_size, format_value, rule
from maxpipe.config.schema import Config
from maxpipe.errors import Problem, RuleViolation
from maxpipe.models.registry import describe
from maxpipe.models.spec import Param
from maxpipe.parallel.axes import DEFAULT_AXIS_RULES, MESH_AXES, axis_table

LIMIT = "mesh.max_replicated_bytes"
_SHARDS = ("fsdp", "expert", "context")
"""Axes over which the default table shards every large weight. Some weights are also sharded over
tensor and stage; the data axis never shards weights."""
_BYTES = {"float32": 4, "bfloat16": 2}
_MODEL_KEYS = tuple(key for key in KEYS if key.startswith("model."))


@dataclass(frozen=True)
class ReplicatedWeight:
    """A weight that is replicated over several devices, summed over the layers of a stage."""

    name: str
    num_bytes: int
    """Size in bytes per device."""
    axes: Mapping[str, int]
    """Sizes of the mesh axes over which the weight is replicated; all are larger than 1."""
    logical_axis: str
    """Logical axis of the weight that the default table shards over one of these mesh axes, or an
    empty string."""
    is_intended: bool
    """Whether a user-defined axis rule replicates the weight, or shards it over only some of the
    axes."""

    @property
    def description(self) -> str:
        """Description of the replicated weight for messages."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        return f"all {math.prod(self.axes.values())} devices along {axes} store the same copy"


def find_replicated_weights(config: Config) -> Iterator[ReplicatedWeight]:
    """Yield weights larger than `mesh.max_replicated_bytes`. Axes of unknown size count as 1."""
    sizes = {axis: axis_size(config.mesh, axis) or 1 for axis in MESH_AXES}
    shards = [axis for axis in _SHARDS if sizes[axis] > 1]
    limit = config.mesh.max_replicated_bytes
    if not shards or not limit:
        return
    rules, table = config.mesh.axis_rules, axis_table(config.mesh)
    for name, param, count in _weights(config, sizes["stage"]):
        divided = {axis for logical in param.axes for axis in table.get(logical, ())}
        over = {axis: sizes[axis] for axis in shards if axis not in divided}
        split = math.prod(sizes[axis] for axis in divided)
        size = count * math.prod(param.shape) * _BYTES[config.model.param_dtype] // split
        if not over or size <= limit:
            continue
        moved = [
            logical
            for logical in param.axes
            if logical in rules and not over.keys().isdisjoint(DEFAULT_AXIS_RULES[logical])
        ]
        is_meant = not divided.isdisjoint(shards) or any(not rules[each] for each in moved)
        yield ReplicatedWeight(name, size, over, next(iter(moved), ""), is_meant)


def _weights(config: Config, stages: int) -> Iterator[tuple[str, Param, int]]:
    """Yield (name, parameter, minimum number of layers per device that have the parameter), in
    network order.
    """
    model, outside = describe(config.model), config.pipeline.prologue_layers
    for path, param in model.ends.params.items():
        yield ".".join(path), param, 1
    for place, layers, share in (
        ("outside", model.layers[:outside], 1),
        ("layers", model.layers[outside:], stages),
    ):
        for kind, count in Counter(layers).items():
            for path, param in model.layer_types[kind].params.items():
                yield ".".join((place, kind, *path)), param, -(-count // share)


@rule(LIMIT, "mesh.axis_rules", "pipeline.prologue_layers", *axis_keys(*MESH_AXES), *_MODEL_KEYS)
def _large_weights_are_divided(config: Config) -> Iterator[RuleViolation]:
    found = [each for each in find_replicated_weights(config) if not each.is_intended]
    for logical in dict.fromkeys(each.logical_axis for each in found):
        largest = max(
            (each for each in found if each.logical_axis == logical),
            key=lambda each: each.num_bytes,
        )
        key = f"mesh.axis_rules.{logical}" if logical else LIMIT
        default = format_value(list(DEFAULT_AXIS_RULES.get(logical, ()))).replace(" ", "")
        yield RuleViolation(
            key,
            f"replicates {largest.name} ({largest.num_bytes:,} bytes): "
            f"{largest.description}. This "
            f"exceeds {LIMIT} ({config.mesh.max_replicated_bytes:,}), and no rule [] allows it.",
            f"Set {key}={default if logical else largest.num_bytes}"
            + (f", or {LIMIT}=0 for no limit." if logical else ", or 0 for no limit."),
        )


def replication_warnings(config: Config) -> Iterator[Problem]:
    """Yield warnings about user-defined axis rules that replicate large weights."""
    found = [
        each for each in find_replicated_weights(config) if each.is_intended and each.logical_axis
    ]
    for logical in dict.fromkeys(each.logical_axis for each in found):
        mine = [each for each in found if each.logical_axis == logical]
        largest = max(mine, key=lambda each: each.num_bytes)
        more = f", and {len(mine) - 1} more weights" if len(mine) > 1 else ""
        yield Problem(
            f"mesh.axis_rules.{logical}",
            format_value(list(config.mesh.axis_rules[logical])),
            f"replicates {largest.name} ({largest.num_bytes:,} bytes per device{more}): "
            f"{largest.description}. Moments and gradients are also replicated.",
            f"If this is intended, set {LIMIT}=0 to silence the warning; otherwise remove the "
            "rule.",
        )
