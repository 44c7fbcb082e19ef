"""Value ranges and rules for the keys of section `mesh`, declared in `maxpipe/parallel/axes.py`.

Rules that depend on the available devices are checked when the mesh is built.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maxpipe.config.rules import (
    add_ranges,
    axis_keys,
    axis_size,
    did_you_mean,
    format_value,
    rule,
    value_of,
)
from maxpipe.config.sections.model import FAMILY, MODEL_KEYS, has_experts, layer_parts
from maxpipe.errors import Code, Problem, RuleViolation
from maxpipe.models.config import Bound
from maxpipe.models.layers.compressed_attention import CompressedAttention
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.registry import describe
from maxpipe.models.spec import Param
from maxpipe.parallel.axes import (
    ALLOWED_AXIS_RULES,
    DEFAULT_AXIS_RULES,
    LOGICAL_AXES,
    MESH_AXES,
    axis_table,
)

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

add_ranges(
    Bound("mesh.max_replicated_bytes", 2**27, 0, why="0 means no limit"),
    Bound("mesh.ulysses_size", 0, 0, why="0 selects the size"),
    Bound("mesh.cpu_devices", 1, 1, 4096, "each virtual device needs threads and memory"),
)


def _add_axis_size_rule(key: str) -> None:
    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        size = value_of(config, key)
        if size < 1 and size != -1:
            yield RuleViolation(
                Code.CFG_VALUE,
                key,
                "must be at least 1, or -1 for the remaining devices.",
                f"Set {key}=1.",
            )


for _key in (f"mesh.{_link}_{_axis}" for _link in ("ici", "dcn") for _axis in MESH_AXES):
    _add_axis_size_rule(_key)


def _add_single_inferred_axis_rule(link: str) -> None:
    keys = tuple(f"mesh.{link}_{axis}" for axis in MESH_AXES)

    @rule(*keys)
    def find(config: Config) -> Iterator[RuleViolation]:
        first, *others = [key for key in keys if value_of(config, key) == -1] or [""]
        for key in others:
            yield RuleViolation(
                Code.MESH_DEVICES,
                key,
                f"cannot also be -1 ({first} is -1): only one mesh.{link}_* axis can use the "
                "remaining devices.",
                f"Set {key}=1, or to the size of the axis.",
            )


_add_single_inferred_axis_rule("ici")


_add_single_inferred_axis_rule("dcn")


@rule(*axis_keys("expert"), *MODEL_KEYS)
def _experts_divide(config: Config) -> Iterator[RuleViolation]:
    size = axis_size(config.mesh, "expert") or 1
    key = next((key for key in axis_keys("expert") if value_of(config, key) != 1), "")
    if size == 1:
        return
    if not has_experts(config):
        yield RuleViolation(
            Code.MESH_UNSUPPORTED,
            key,
            f"must be 1: layers of {FAMILY} = {config.model.family} have no experts.",
            f"Set {key}=1, and use the devices for mesh.ici_fsdp or mesh.ici_tensor.",
        )


@rule(*axis_keys("context"), *MODEL_KEYS)
def _context_is_supported_by_layers(config: Config) -> Iterator[RuleViolation]:
    if (axis_size(config.mesh, "context") or 1) == 1:
        return
    key = next(key for key in axis_keys("context") if value_of(config, key) != 1)
    if any(isinstance(part, CompressedAttention) for part in layer_parts(config)):
        yield RuleViolation(
            Code.MESH_UNSUPPORTED,
            key,
            f"must be 1 with {FAMILY} = {config.model.family}: its attention needs all tokens of a "
            "window, and all compressed entries, on one device.",
            f"Set {key}=1, and use the devices for mesh.ici_fsdp or mesh.ici_tensor.",
        )
    parts = (part for part in layer_parts(config) if isinstance(part, LatentAttention))
    indexers = [part for part in parts if part.indexer is not None]
    if any(not part.is_sparse for part in indexers):
        yield RuleViolation(
            Code.MESH_UNSUPPORTED,
            key,
            "must be 1 with indexer_stage = dense: the loss of the indexer needs all tokens of a "
            "sequence on one device.",
            f"Set {key}=1, and use the devices for mesh.ici_fsdp or mesh.ici_tensor.",
        )
    elif indexers:
        for setting, value, method in (
            ("model.attention", config.model.attention, "blockwise"),
            ("mesh.context_attention", config.mesh.context_attention, "all_gather"),
        ):
            if value not in ("auto", method):
                yield RuleViolation(
                    Code.MESH_UNSUPPORTED,
                    setting,
                    f"must be auto or {method} with {key} > 1 and {FAMILY} = "
                    f"{config.model.family}, whose query tokens select from the keys of all "
                    "devices.",
                    f"Set {setting}={method}.",
                )
    if config.model.mtp_heads:
        yield RuleViolation(
            Code.MESH_UNSUPPORTED,
            key,
            f"must be 1 with model.mtp_heads = {config.model.mtp_heads}: some target "
            "tokens would be on other devices.",
            f"Set {key}=1, or model.mtp_heads=0.",
        )


@rule("mesh.collective_matmul", "mesh.sequence_parallel")
def _collective_matmul_needs_sequence_parallel(config: Config) -> Iterator[RuleViolation]:
    if config.mesh.collective_matmul and not config.mesh.sequence_parallel:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "mesh.collective_matmul",
            "requires mesh.sequence_parallel=true: without sharded tokens, there is no "
            "all-gather to overlap with matmuls.",
            "Set mesh.sequence_parallel=true, or mesh.collective_matmul=false.",
        )


@rule("mesh.collective_matmul", "pipeline.idle", *axis_keys("stage", "tensor"))
def _collective_matmul_needs_idle_compute(config: Config) -> Iterator[RuleViolation]:
    mesh = config.mesh
    alone = axis_size(mesh, "stage") == 1 or axis_size(mesh, "tensor") == 1
    if mesh.collective_matmul and config.pipeline.idle == "skip" and not alone:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "mesh.collective_matmul",
            "requires pipeline.idle=compute with more than one stage: a stage that skips a slot "
            "would not join the collective, and all other stages would wait forever.",
            "Set pipeline.idle=compute, or mesh.collective_matmul=false.",
        )


@rule("mesh.axis_rules")
def _axis_rules_are_known(config: Config) -> Iterator[RuleViolation]:
    for name, axes in config.mesh.axis_rules.items():
        key = f"mesh.axis_rules.{name}"
        if name not in ALLOWED_AXIS_RULES:
            guess = did_you_mean(name, ALLOWED_AXIS_RULES)
            owned = name in LOGICAL_AXES
            yield RuleViolation(
                Code.MESH_AXIS_RULE,
                key,
                "cannot be changed, because the pipeline determines the sharding of this axis."
                if owned
                else "is not one of the logical axes that have rules: "
                f"{', '.join(ALLOWED_AXIS_RULES)}.",
                "Set mesh.axis_rules={} to use the default table"
                f"{f', or rename {name} to {guess}' if guess and not owned else ''}.",
            )
        elif tuple(axes) not in ALLOWED_AXIS_RULES[name]:
            allowed = [format_value(list(choice)) for choice in ALLOWED_AXIS_RULES[name]]
            yield RuleViolation(
                Code.MESH_AXIS_RULE,
                key,
                f"must be {' or '.join(allowed)}.",
                f"Set {key}={format_value(list(DEFAULT_AXIS_RULES[name])).replace(' ', '')}.",
            )


@rule("mesh.axis_rules")
def _one_split_per_weight(config: Config) -> Iterator[RuleViolation]:
    rules = config.mesh.axis_rules
    table = axis_table(config.mesh)
    split = [name for name in ("heads", "kv_heads") if "tensor" in table[name]]
    if rules.get("head_dim") == ["tensor"] and split:
        yield RuleViolation(
            Code.MESH_AXIS_RULE,
            "mesh.axis_rules.head_dim",
            f"must be [] if {' and '.join(split)} is sharded over tensor: a mesh axis can shard "
            "only one dimension of a weight.",
            "Set mesh.axis_rules.head_dim=[].",
        )


@rule("mesh.context_attention", *axis_keys("context", "tensor"), *MODEL_KEYS)
def _heads_divide_over_context(config: Config) -> Iterator[RuleViolation]:
    context, tensor = (axis_size(config.mesh, axis) or 1 for axis in ("context", "tensor"))
    if config.mesh.context_attention != "ulysses" or context == 1:
        return
    heads = config.model.num_heads
    if heads % (context * tensor):
        yield RuleViolation(
            Code.CFG_SIZES,
            "mesh.context_attention",
            f"requires model.num_heads ({heads}) to be a multiple of context ({context}) x tensor "
            f"({tensor}): each device computes full sequences for an equal number of heads.",
            "Set mesh.context_attention=all_gather.",
        )


@rule("mesh.ulysses_size", "mesh.context_attention", *axis_keys("context", "tensor"), *MODEL_KEYS)
def _ulysses_size_divides(config: Config) -> Iterator[RuleViolation]:
    context, tensor = (axis_size(config.mesh, axis) or 1 for axis in ("context", "tensor"))
    size, heads = config.mesh.ulysses_size, config.model.num_heads
    if config.mesh.context_attention != "ulysses_ring" or context == 1 or not size:
        return
    largest = math.gcd(heads // tensor, context)
    others = f", or to another divisor of {largest}" if largest > 1 else ""
    action = f"Set mesh.ulysses_size={largest}{others}."
    if context % size:
        yield RuleViolation(
            Code.CFG_SIZES,
            "mesh.ulysses_size",
            f"must divide context ({context}): the other factor is the size of the ring.",
            action,
        )
    elif heads % (size * tensor):
        yield RuleViolation(
            Code.CFG_SIZES,
            "mesh.ulysses_size",
            f"must divide model.num_heads ({heads}) / tensor ({tensor}): each device of a group "
            "computes an equal number of heads.",
            action,
        )


LIMIT = "mesh.max_replicated_bytes"


_SHARDS = ("fsdp", "expert", "context")
"""Axes over which the default table shards every large weight. Some weights are also sharded over
tensor and stage; the data axis never shards weights."""


_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ReplicatedWeight:
    """Weight that is replicated across several devices, in all layers of a stage."""

    name: str
    num_bytes: int
    """Size in bytes per device, summed over the layers."""
    axes: Mapping[str, int]
    """Maps the mesh axes over which the weight is replicated to their sizes, all larger than 1."""
    logical_axis: str
    """Logical axis of the weight that the default table shards over one of these mesh axes, or an
    empty string."""
    is_intended: bool
    """Whether a user-defined axis rule replicates the weight, or shards it over only some of the
    axes."""

    @property
    def description(self) -> str:
        """Description of the devices that store identical copies of the weight, for messages."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        return f"all {math.prod(self.axes.values())} devices along {axes} store identical copies"


def find_replicated_weights(config: Config) -> Iterator[ReplicatedWeight]:
    """Yield replicated weights larger than `mesh.max_replicated_bytes`. Mesh axes of unknown size
    are assumed to have size 1.
    """
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
        is_meant = not divided.isdisjoint(shards) or any(not rules[name] for name in moved)
        yield ReplicatedWeight(name, size, over, next(iter(moved), ""), is_meant)


def _weights(config: Config, stages: int) -> Iterator[tuple[str, Param, int]]:
    """Yield the name of every parameter, the parameter, and the minimum number of layers per device
    that contain the parameter. Parameters outside layers are yielded first.
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


@rule(LIMIT, "mesh.axis_rules", "pipeline.prologue_layers", *axis_keys(*MESH_AXES), *MODEL_KEYS)
def _large_weights_are_divided(config: Config) -> Iterator[RuleViolation]:
    weights = [weight for weight in find_replicated_weights(config) if not weight.is_intended]
    for logical in dict.fromkeys(weight.logical_axis for weight in weights):
        largest = max(
            (weight for weight in weights if weight.logical_axis == logical),
            key=lambda weight: weight.num_bytes,
        )
        key = f"mesh.axis_rules.{logical}" if logical else LIMIT
        default = format_value(list(DEFAULT_AXIS_RULES.get(logical, ()))).replace(" ", "")
        yield RuleViolation(
            Code.MESH_REPLICATED,
            key,
            f"replicates {largest.name} ({largest.num_bytes:,} bytes): "
            f"{largest.description}. This exceeds {LIMIT} "
            f"({config.mesh.max_replicated_bytes:,}), and no axis rule is set to [] to allow it.",
            f"Set {key}={default if logical else largest.num_bytes}"
            + (f", or {LIMIT}=0 for no limit." if logical else ", or 0 for no limit."),
        )


def replication_warnings(config: Config) -> Iterator[Problem]:
    """Yield warnings about user-defined axis rules that replicate large weights."""
    weights = [
        weight
        for weight in find_replicated_weights(config)
        if weight.is_intended and weight.logical_axis
    ]
    for logical in dict.fromkeys(weight.logical_axis for weight in weights):
        group = [weight for weight in weights if weight.logical_axis == logical]
        largest = max(group, key=lambda weight: weight.num_bytes)
        more = f", and {len(group) - 1} more weights" if len(group) > 1 else ""
        yield Problem(
            Code.MESH_REPLICATED,
            f"mesh.axis_rules.{logical}",
            format_value(list(config.mesh.axis_rules[logical])),
            f"replicates {largest.name} ({largest.num_bytes:,} bytes per device{more}): "
            f"{largest.description}. The weight's moments and gradients are also replicated.",
            f"If this is intended, set {LIMIT}=0 to silence the warning; otherwise remove the "
            "rule.",
        )
