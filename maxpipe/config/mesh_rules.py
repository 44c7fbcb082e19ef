"""Rules for mesh axes, for the dimensions that they shard, and for replicated weights.

Rules that depend on the available devices are checked when the mesh is built. The module does not
import jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxpipe.config.keys import FAMILY, KEYS
from maxpipe.config.rules import (
    BATCH_AXES,
    BOUNDS,
    applies_to_family,
    axis_keys,
    axis_size,
    batch_shards,
    did_you_mean,
    format_value,
    rule,
    value_of,
)
from maxpipe.config.schema import Config
from maxpipe.errors import Problem, RuleViolation
from maxpipe.io.formatting import format_divisors, round_up
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.gated_delta import GatedDelta
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.registry import describe
from maxpipe.models.spec import Param, Part
from maxpipe.parallel.axes import (
    ALLOWED_AXIS_RULES,
    DEFAULT_AXIS_RULES,
    LOGICAL_AXES,
    MESH_AXES,
    axis_table,
)

_MODEL_KEYS = tuple(key for key in KEYS if key.startswith("model."))


def _parts(config: Config) -> Iterator[Part]:
    """Yield the parts of all layer types."""
    for kind in describe(config.model).layer_types.values():
        yield from kind.parts.values()


def has_experts(config: Config) -> bool:
    """Whether any layer has experts, which the expert axis shards."""
    return any(isinstance(part, Experts) for part in _parts(config))


def has_sequential_layers(config: Config) -> bool:
    """Whether a part other than attention depends on other tokens of the sequence.

    Such parts need all tokens of a sequence on one device.
    """
    delta = any(isinstance(part, GatedDelta) for part in _parts(config))
    return delta or bool(config.model.mtp_heads)


def _add_axis_size_rule(key: str) -> None:
    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        size = value_of(config, key)
        if size < 1 and size != -1:
            yield RuleViolation(
                key, "must be at least 1, or -1 for the remaining devices.", f"Set {key}=1."
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
                key,
                f"is the second -1 among mesh.{link}_* ({first} is -1): only one axis can use the "
                "remaining devices.",
                f"Set {key}=1, or to the size of the axis.",
            )


_add_single_inferred_axis_rule("ici")
_add_single_inferred_axis_rule("dcn")


@rule(*axis_keys("expert"), *_MODEL_KEYS)
def _experts_divide(config: Config) -> Iterator[RuleViolation]:
    size = axis_size(config.mesh, "expert") or 1
    key = next((key for key in axis_keys("expert") if value_of(config, key) != 1), "")
    if size == 1:
        return
    if not has_experts(config):
        yield RuleViolation(
            key,
            f"must be 1: layers of {FAMILY} = {config.model.family} have no experts.",
            f"Set {key}=1, and use the devices for mesh.ici_fsdp or mesh.ici_tensor.",
        )


@rule(*axis_keys("context"), "train.sequence_length")
def _context_divides_sequence_length(config: Config) -> Iterator[RuleViolation]:
    size, tokens = axis_size(config.mesh, "context") or 1, config.train.sequence_length
    if size > 1 and tokens % (2 * size):
        yield RuleViolation(
            "train.sequence_length",
            f"must be a multiple of 2 x context ({size}) = {2 * size}: to balance the load, each "
            "device computes an early and a late piece of a sequence.",
            f"Set train.sequence_length={round_up(tokens, 2 * size)}, or the context size to 1.",
        )


@rule(*axis_keys("context"), *_MODEL_KEYS)
def _context_is_supported_by_layers(config: Config) -> Iterator[RuleViolation]:
    if (axis_size(config.mesh, "context") or 1) == 1:
        return
    key = next(key for key in axis_keys("context") if value_of(config, key) != 1)
    if any(isinstance(part, GatedDelta) for part in _parts(config)):
        yield RuleViolation(
            key,
            f"must be 1 with {FAMILY} = {config.model.family}: its linear attention needs all "
            "tokens of a sequence on one device.",
            f"Set {key}=1, and use the devices for mesh.ici_fsdp or mesh.ici_tensor.",
        )
    if config.model.mtp_heads:
        yield RuleViolation(
            key,
            f"must be 1 with model.mtp_heads = {config.model.mtp_heads}: the predicted tokens "
            "would be on other devices.",
            f"Set {key}=1, or model.mtp_heads=0.",
        )


@rule("train.sequence_length", "mesh.sequence_parallel", *axis_keys("context", "tensor"))
def _tokens_divide(config: Config) -> Iterator[RuleViolation]:
    tokens, mesh = config.train.sequence_length, config.mesh
    context, tensor = axis_size(mesh, "context") or 1, axis_size(mesh, "tensor") or 1
    if mesh.sequence_parallel and tokens % (context * tensor):
        # With a context axis, the sequence length must also be a multiple of 2 x context.
        more = round_up(tokens, math.lcm(context * tensor, 2 * context if context > 1 else 1))
        sizes = f"context ({context}) x tensor ({tensor})" if context > 1 else f"tensor ({tensor})"
        yield RuleViolation(
            "train.sequence_length",
            f"must be a multiple of {sizes} with mesh.sequence_parallel=true: tokens are sharded "
            "evenly between matmuls.",
            f"Set train.sequence_length={more}, or mesh.sequence_parallel=false.",
        )


@rule("mesh.collective_matmul", "mesh.sequence_parallel")
def _collective_matmul_needs_sequence_parallel(config: Config) -> Iterator[RuleViolation]:
    if config.mesh.collective_matmul and not config.mesh.sequence_parallel:
        yield RuleViolation(
            "mesh.collective_matmul",
            "requires mesh.sequence_parallel=true: without sharded tokens nothing is gathered for "
            "a matmul.",
            "Set mesh.sequence_parallel=true, or mesh.collective_matmul=false.",
        )


@rule("mesh.collective_matmul", "pipeline.idle", *axis_keys("stage", "tensor"))
def _collective_matmul_needs_idle_compute(config: Config) -> Iterator[RuleViolation]:
    mesh = config.mesh
    alone = axis_size(mesh, "stage") == 1 or axis_size(mesh, "tensor") == 1
    if mesh.collective_matmul and config.pipeline.idle == "skip" and not alone:
        yield RuleViolation(
            "mesh.collective_matmul",
            "requires pipeline.idle=compute with more than one stage: stages that skip a slot "
            "would not join the collective, and the others would wait forever.",
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
                key,
                "cannot be changed: the pipeline determines it."
                if owned
                else f"is not a logical axis with a rule: {', '.join(ALLOWED_AXIS_RULES)}.",
                "Set mesh.axis_rules={} for the default table"
                f"{f', or rename {name} to {guess}' if guess and not owned else ''}.",
            )
        elif tuple(axes) not in ALLOWED_AXIS_RULES[name]:
            allowed = [format_value(list(choice)) for choice in ALLOWED_AXIS_RULES[name]]
            yield RuleViolation(
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
            "mesh.axis_rules.head_dim",
            f"must be [] if {' and '.join(split)} is sharded over tensor: a weight with both "
            "dimensions can use a mesh axis only once.",
            "Set mesh.axis_rules.head_dim=[].",
        )


@rule("mesh.context_attention", *axis_keys("context", "tensor"), *_MODEL_KEYS)
def _heads_divide_over_context(config: Config) -> Iterator[RuleViolation]:
    context, tensor = (axis_size(config.mesh, axis) or 1 for axis in ("context", "tensor"))
    if config.mesh.context_attention != "heads" or context == 1:
        return
    model = config.model
    is_latent = any(isinstance(part, LatentAttention) for part in _parts(config))
    keys = ("num_heads",) if is_latent else ("num_heads", "num_kv_heads")
    for key in keys:
        if (size := getattr(model, key)) % (context * tensor):
            yield RuleViolation(
                "mesh.context_attention",
                f"requires model.{key} ({size}) to be a multiple of context ({context}) x tensor "
                f"({tensor}): each device computes full sequences of the same number of heads.",
                "Set mesh.context_attention=gather.",
            )


@rule("mesh.context_attention", "pipeline.idle", *axis_keys("context", "stage"))
def _ring_attention_needs_idle_compute(config: Config) -> Iterator[RuleViolation]:
    context, stages = (axis_size(config.mesh, axis) for axis in ("context", "stage"))
    rings = config.mesh.context_attention == "ring" and context != 1
    if rings and stages != 1 and config.pipeline.idle != "compute":
        yield RuleViolation(
            "pipeline.idle",
            "must be compute with mesh.context_attention=ring and several stages: devices exchange "
            "keys in each layer, and would wait forever for a stage with fewer layers.",
            "Set pipeline.idle=compute, or mesh.context_attention=gather.",
        )


@rule("model.attention", "mesh.context_attention", *axis_keys("context"))
def _ring_attention_needs_blockwise(config: Config) -> Iterator[RuleViolation]:
    rings = config.mesh.context_attention == "ring" and axis_size(config.mesh, "context") != 1
    if rings and config.model.attention not in ("auto", "blockwise"):
        yield RuleViolation(
            "model.attention",
            "must be blockwise or auto with mesh.context_attention=ring: scores are computed in "
            "blocks as keys arrive from other devices.",
            "Set model.attention=blockwise, or mesh.context_attention=gather.",
        )


_WEIGHT_AXES = tuple(axis for axis in MESH_AXES if axis not in ("stage", "data"))
"""Mesh axes that can shard weights."""


_NONE: Mapping[str, str] = {}


def _sizes_over(config: Config, logical: str) -> dict[str, int]:
    """Return the sizes of the mesh axes that shard a logical axis. Unknown sizes count as 1."""
    axes = axis_table(config.mesh)[logical]
    return {axis: axis_size(config.mesh, axis) or 1 for axis in axes}


def _add_divisibility_rule(logical: str, key: str, partners: Mapping[str, str] = _NONE) -> None:
    """Add a rule that the value of `key` must be divisible by the sizes of the mesh axes that shard
    it.

    `partners` maps other keys to their logical axes. The suggested value is also a multiple of the
    values that are suggested for violations of these keys.
    """

    @rule(key, *partners, "mesh.axis_rules", *axis_keys(*_WEIGHT_AXES))
    def find(config: Config) -> Iterator[RuleViolation]:
        if not applies_to_family(config, key):
            return
        sizes = _sizes_over(config, logical)
        shards, axes = math.prod(sizes.values()), [axis for axis in sizes if sizes[axis] > 1]
        size = value_of(config, key)
        if size % shards:
            others = (
                round_up(value_of(config, partner), math.prod(_sizes_over(config, axis).values()))
                for partner, axis in partners.items()
            )
            factor, rest = math.lcm(shards, *others), shards // sizes[axes[0]]
            whole = f", or mesh.axis_rules.{logical}=[] to replicate it"
            whole *= () in ALLOWED_AXIS_RULES.get(logical, ())
            smaller = f", or the {axes[0]} size to {format_divisors(size // rest)}" * (
                size % rest == 0
            )
            yield RuleViolation(
                key,
                f"must be a multiple of the {' x '.join(axes)} size ({shards}): mesh.axis_rules "
                f"shards {logical} over it.",
                f"Set {key}={round_up(size, factor)}{whole}{smaller}.",
            )


_add_divisibility_rule("embed", "model.d_model")


@rule("mesh.axis_rules", *axis_keys(*_WEIGHT_AXES), *_MODEL_KEYS)
def _rows_of_experts_split_evenly(config: Config) -> Iterator[RuleViolation]:
    size = config.model.d_model
    ways = {name: _sizes_over(config, name) for name in ("embed", "expert_embed")}
    shards = {name: math.prod(sizes.values()) for name, sizes in ways.items()}
    is_read = has_experts(config)
    # If model.d_model is not divisible for other weights, another rule reports it.
    if is_read and size % shards["embed"] == 0 and size % shards["expert_embed"]:
        axes = [axis for axis, count in ways["expert_embed"].items() if count > 1]
        yield RuleViolation(
            "model.d_model",
            f"must be a multiple of the {' x '.join(axes)} size ({shards['expert_embed']}): "
            "mesh.axis_rules shards expert_embed, the rows of each expert's weights, over it.",
            f"Set model.d_model={round_up(size, math.lcm(*shards.values()))}, or "
            "mesh.axis_rules.expert_embed=[] to replicate them.",
        )


_add_divisibility_rule("heads", "model.num_heads", {"model.num_kv_heads": "kv_heads"})
_add_divisibility_rule("kv_heads", "model.num_kv_heads")
_add_divisibility_rule("head_dim", "model.head_dim")
_add_divisibility_rule("mlp", "model.d_mlp")
for _bound in BOUNDS.values():
    if _bound.axis:
        _add_divisibility_rule(_bound.axis, _bound.key)


@rule("eval.batch_size", *axis_keys(*BATCH_AXES))
def _eval_batch_divides(config: Config) -> Iterator[RuleViolation]:
    size = config.eval.batch_size
    shards, sizes = batch_shards(config.mesh)
    if size % shards:
        yield RuleViolation(
            "eval.batch_size",
            f"must be a multiple of {' x '.join(sizes)} = {shards}: each device gets the same "
            "number of sequences.",
            f"Set eval.batch_size={round_up(size, shards)}, or 0 to use train.batch_size.",
        )


LIMIT = "mesh.max_replicated_bytes"
_SHARDS = ("fsdp", "expert", "context")
"""Axes over which the default table shards every large weight. Some weights are also sharded over
tensor and stage; the data axis never shards weights."""
_BYTES = {"float32": 4, "bfloat16": 2}


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
