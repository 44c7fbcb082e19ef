"""Value ranges and rules for the keys of section `model`, declared in `maxpipe/models`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from maxpipe.config.rules import (
    DROPS_EVERYTHING,
    MAX_FINDINGS,
    MAX_INT32,
    add_ranges,
    applies_to_family,
    axis_keys,
    axis_size,
    did_you_mean,
    format_value,
    rule,
    value_of,
)
from maxpipe.config.sections.tokenizer import BYTES_VOCABULARY
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import format_divisors, round_up
from maxpipe.models.adapters import dim_of_scales
from maxpipe.models.config import (
    LARGEST,
    SMALLEST,
    Bound,
    ModelConfig,
    num_unquantized_layers,
)
from maxpipe.models.family import Family
from maxpipe.models.layers.attention import Attention
from maxpipe.models.layers.compressed_attention import CompressedAttention
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.param_names import declared, suggestions, trained, without_match
from maxpipe.models.registry import FAMILIES, describe
from maxpipe.models.resolve_auto import has_ring
from maxpipe.models.spec import Part
from maxpipe.parallel.axes import (
    ALLOWED_AXIS_RULES,
    BLOCK_SIZES,
    MESH_AXES,
    QUANTIZATION_BLOCK,
    ContextAttention,
    axis_table,
)

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

FAMILY = "model.family"
_FILLED = ("own", "adapter")
"""Fields of `ModelConfig` that hold other sections instead of keys of section `model`."""


def family_section(family: str) -> str:
    """Return the name of a model family's config section."""
    return f"model.{family}"


MODEL_KEYS = (
    *(f"model.{field.name}" for field in fields(ModelConfig) if field.name not in _FILLED),
    *(
        f"{family_section(name)}.{field.name}"
        for name, family in FAMILIES.items()
        for field in fields(family.section)
    ),
)
"""Full keys of section `model`, including the family-specific keys of all model families."""


add_ranges(
    Bound("model.num_layers", 1, 1, 2048, "plans and layer partitions enumerate all layers"),
    *(Bound(f"model.{name}", 1, 1) for name in ("d_model", "num_heads", "num_kv_heads", "d_mlp")),
    Bound("model.head_dim", 2, 2),
    Bound("model.vocab_size", BYTES_VOCABULARY, 2, MAX_INT32, "token ids are int32"),
    Bound("model.mtp_heads", 2, 0),
    Bound("model.mtp_loss_weight", 0.3, 0, LARGEST, "the value must fit in float32"),
    Bound(
        "model.rope_theta",
        10000.0,
        1,
        LARGEST,
        "the value must fit in float32",
        low_is_inside=False,
    ),
    Bound("model.norm_epsilon", 1e-5, SMALLEST, LARGEST, "0 would allow a division by 0"),
    Bound("model.matmul_unquantized_layers", 1, -1, why="-1 selects the number"),
    Bound("model.dropout", 0.1, 0, 1, DROPS_EVERYTHING, high_is_inside=False),
)


@rule("model.num_heads", "model.num_kv_heads")
def _heads_share_kv_heads(config: Config) -> Iterator[RuleViolation]:
    heads, kv_heads = config.model.num_heads, config.model.num_kv_heads
    if heads % kv_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.num_heads",
            f"must be a multiple of model.num_kv_heads ({kv_heads}): query heads share "
            "key/value heads evenly.",
            f"Set model.num_heads={round_up(heads, kv_heads)}, or model.num_kv_heads to "
            f"{format_divisors(heads)}.",
        )


@rule("model.head_dim")
def _head_size_is_even(config: Config) -> Iterator[RuleViolation]:
    size = config.model.head_dim
    if size % 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.head_dim",
            "must be even: rotary embeddings rotate pairs of dimensions.",
            f"Set model.head_dim={size + 1}.",
        )


@rule(
    *("model.attention", "model.compute_dtype", "model.head_dim"),
    *("runtime.platform", "train.sequence_length"),
)
def _cudnn_runs_there(config: Config) -> Iterator[RuleViolation]:
    if config.model.attention != "cudnn":
        return
    if config.runtime.platform in ("cpu", "tpu"):
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "model.attention",
            f"requires an NVIDIA GPU, but runtime.platform is {config.runtime.platform}.",
            "Set model.attention=xla.",
        )
    if config.model.compute_dtype == "float32":
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "model.compute_dtype",
            "must be bfloat16 with model.attention=cudnn, which has no float32 kernel.",
            "Set model.compute_dtype=bfloat16, or model.attention=xla.",
        )
    if (tokens := config.train.sequence_length) % 2:
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "train.sequence_length",
            "must be even with model.attention=cudnn, whose backward pass requires even lengths.",
            f"Set train.sequence_length={tokens + 1}, or model.attention=xla.",
        )
    if (size := config.model.head_dim) % 8 or size > 256:
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "model.head_dim",
            "must be a multiple of 8 and at most 256 with model.attention=cudnn.",
            "Set model.attention=xla.",
        )


@rule(*MODEL_KEYS, is_first=True)  # `describe` fails for configs that this rule rejects
def _family_rules(config: Config) -> Iterator[RuleViolation]:
    yield from FAMILIES[config.model.family].rules(config.model)


@rule(*MODEL_KEYS)
def _attention_backend_supports_model(config: Config) -> Iterator[RuleViolation]:
    section = family_section(config.model.family)
    parts = [
        part for kind in describe(config.model).layer_types.values() for part in kind.parts.values()
    ]
    mixing = [
        part
        for part in parts
        if isinstance(part, Attention | LatentAttention | CompressedAttention)
    ]
    options = {option for part in mixing for option in part.unsupported}
    for option in sorted(options):
        own = {field.name for field in fields(FAMILIES[config.model.family].section)}
        key = f"{section}.{option}" if option in own else FAMILY
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "model.attention",
            f"does not support {option.replace('_', ' ')}, which {key} = "
            f"{format_value(value_of(config, key))} "
            "requires.",
            "Set model.attention=xla.",
        )


@rule("model.mtp_heads", "train.sequence_length")
def _mtp_fits_sequence_length(config: Config) -> Iterator[RuleViolation]:
    heads, tokens = config.model.mtp_heads, config.train.sequence_length
    if heads >= tokens:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.mtp_heads",
            f"must be less than train.sequence_length ({tokens}): no sequence has target tokens "
            "that far ahead.",
            f"Set model.mtp_heads={tokens - 1}, or increase train.sequence_length.",
        )


@rule("model.vocab_size", "tokenizer.kind")
def _vocabulary_holds_bytes(config: Config) -> Iterator[RuleViolation]:
    if config.tokenizer.kind == "bytes" and config.model.vocab_size < BYTES_VOCABULARY:
        yield RuleViolation(
            Code.TOK_VOCABULARY,
            "model.vocab_size",
            f"must be at least {BYTES_VOCABULARY} with tokenizer.kind=bytes: 256 bytes and "
            "three control ids.",
            f"Set model.vocab_size={BYTES_VOCABULARY}.",
        )


def layer_parts(config: Config) -> Iterator[Part]:
    """Yield the sublayers of all layer types, such as attention and MLP."""
    for kind in describe(config.model).layer_types.values():
        yield from kind.parts.values()


def has_experts(config: Config) -> bool:
    """Return True if any layer has experts, which can be sharded over the expert axis."""
    return any(isinstance(part, Experts) for part in layer_parts(config))


RING_KEYS = (
    *("mesh.context_attention", "mesh.ulysses_size", *axis_keys("context", "tensor")),
    *MODEL_KEYS,
)
"""Keys that `uses_ring` reads."""


@rule(*RING_KEYS)
def _ring_attention_needs_blockwise(config: Config) -> Iterator[RuleViolation]:
    if uses_ring(config) and config.model.attention not in ("auto", "blockwise"):
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "model.attention",
            f"must be blockwise or auto with mesh.context_attention="
            f"{config.mesh.context_attention}: attention scores are computed block by block as "
            "keys arrive from other devices.",
            "Set model.attention=blockwise, or mesh.context_attention=all_gather.",
        )


def uses_ring(config: Config) -> bool:
    """Return True if the config selects attention that passes keys and values around a ring. A
    context axis of unknown size is assumed to have several devices.
    """
    context, tensor = (axis_size(config.mesh, axis) for axis in ("context", "tensor"))
    if context is None or tensor is None:
        return config.mesh.context_attention in ("ring", "ulysses_ring") and context != 1
    method = ContextAttention.from_config(config.mesh, {"context": context, "tensor": tensor})
    return has_ring(config.model, method)


_WEIGHT_AXES = tuple(axis for axis in MESH_AXES if axis not in ("stage", "data"))
"""Mesh axes that can shard weights."""


_NONE: Mapping[str, str] = {}


def _sizes_over(config: Config, logical: str) -> dict[str, int]:
    """Return the sizes of the mesh axes that shard a logical axis. Axes of unknown size are assumed
    to have size 1.
    """
    axes = axis_table(config.mesh)[logical]
    return {axis: axis_size(config.mesh, axis) or 1 for axis in axes}


def _add_divisibility_rule(logical: str, key: str, partners: Mapping[str, str] = _NONE) -> None:
    """Add a rule that the value of `key` must be divisible by the total size of the mesh axes that
    shard it.

    `partners` maps other keys to their logical axes. The suggested value is also a multiple of the
    values suggested for these keys.
    """
    read = MODEL_KEYS if logical == "kv_heads" else (key,)

    @rule(*read, *partners, "mesh.axis_rules", *axis_keys(*_WEIGHT_AXES))
    def find(config: Config) -> Iterator[RuleViolation]:
        if not applies_to_family(config, key) or _is_replicated(config, logical):
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
                Code.CFG_SIZES,
                key,
                f"must be a multiple of the {' x '.join(axes)} size ({shards}): mesh.axis_rules "
                f"shards {logical} over it.",
                f"Set {key}={round_up(size, factor)}{whole}{smaller}.",
            )


def _is_replicated(config: Config, logical: str) -> bool:
    """Return whether no array of the model has this axis: compressed attention has one replicated
    key/value head.
    """
    return logical == "kv_heads" and any(
        isinstance(part, CompressedAttention) for part in layer_parts(config)
    )


_add_divisibility_rule("embed", "model.d_model")


@rule("mesh.axis_rules", *axis_keys(*_WEIGHT_AXES), *MODEL_KEYS)
def _rows_of_experts_split_evenly(config: Config) -> Iterator[RuleViolation]:
    size = config.model.d_model
    ways = {name: _sizes_over(config, name) for name in ("embed", "expert_embed")}
    shards = {name: math.prod(sizes.values()) for name, sizes in ways.items()}
    is_read = has_experts(config)
    # If d_model does not divide evenly over the axes of `embed`, another rule reports it.
    if is_read and size % shards["embed"] == 0 and size % shards["expert_embed"]:
        axes = [axis for axis, count in ways["expert_embed"].items() if count > 1]
        yield RuleViolation(
            Code.CFG_SIZES,
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


def add_family_rules(family: Family) -> None:
    """Add the value ranges of a family's keys, and the rules for keys that the mesh shards."""
    for bound in family.bounds:
        bound = bound._replace(key=f"{family_section(family.name)}.{bound.key}")
        add_ranges(bound)
        for axis in bound.axis.split():
            _add_divisibility_rule(axis, bound.key)


for _family in FAMILIES.values():
    add_family_rules(_family)


_KEY = "model.frozen"


@rule(*MODEL_KEYS)
def _frozen_parameters_exist(config: Config) -> Iterator[RuleViolation]:
    patterns, model = config.model.frozen, describe(config.model)
    wrong = without_match(model, patterns)
    others = [each for each in patterns if each not in wrong]
    for pattern in wrong[:MAX_FINDINGS]:
        guess = did_you_mean(pattern, suggestions(model))
        yield RuleViolation(
            Code.MODEL_PARAMS,
            _KEY,
            f"contains {pattern!r}, which matches none of the parameters: "
            f"{', '.join(declared(model))}.",
            f"Set {_KEY}=[{','.join([*others, *filter(None, [guess])])}].",
        )


@rule(*MODEL_KEYS, "adapter.rank")
def _something_is_trained(config: Config) -> Iterator[RuleViolation]:
    model = describe(config.model)
    wanted = config.adapter.rank and not any(kind.adapters for kind in model.layer_types.values())
    if trained(model) or wanted:
        return
    if config.adapter.rank:
        yield RuleViolation(
            Code.MODEL_PARAMS,
            _KEY,
            "freezes all adapters, in addition to the base model, which is always frozen.",
            f"Set {_KEY}=[], or '{_KEY}=[\"*_lora_a\"]' to train only the second factor of "
            "adapters.",
        )
    else:
        yield RuleViolation(
            Code.MODEL_PARAMS,
            _KEY,
            "freezes every parameter, so nothing would be trained.",
            f"Set {_KEY}=[layers.*] to train only embedding, final norm and output projection, "
            f"or {_KEY}=[] to train all parameters.",
        )


_LONGEST_SUM = (2**31 - 1) // 127**2
"""Maximum number of int8 products whose sum always fits in 32 bits."""


@rule("model.matmul", "model.matmul_scales", "model.d_mlp")
def _int8_sums_fit(config: Config) -> Iterator[RuleViolation]:
    model = config.model
    if model.matmul != "int8" or model.matmul_scales == "block":
        return
    if model.d_mlp > _LONGEST_SUM:
        rule = f"must be at most {_LONGEST_SUM} with model.matmul=int8, which sums in 32 bits."
        yield RuleViolation(Code.MODEL_MATMUL, "model.d_mlp", rule, "Set model.matmul=fp8.")


@rule(
    "model.matmul",
    "model.matmul_scales",
    "model.matmul_weight_gradients",
    "train.sequence_length",
    *axis_keys("context"),
)
def _int8_weight_gradient_sums_fit(config: Config) -> Iterator[RuleViolation]:
    model, tokens = config.model, config.train.sequence_length
    if model.matmul_weight_gradients == "default" or model.matmul != "int8":
        return
    tokens //= max(1, axis_size(config.mesh, "context") or 1)
    if model.matmul_scales != "block" and tokens > _LONGEST_SUM:
        rule = (
            f"sums over {tokens} tokens per device, but a 32-bit sum can hold at most "
            f"{_LONGEST_SUM} products of 8-bit integers."
        )
        action = "Set model.matmul_weight_gradients=default."
        yield RuleViolation(Code.MODEL_MATMUL, "model.matmul_weight_gradients", rule, action)


@rule(
    "mesh.sequence_parallel", *axis_keys("tensor", "context"), *MODEL_KEYS, "train.sequence_length"
)
def _scale_blocks_are_not_sharded(config: Config) -> Iterator[RuleViolation]:
    """Reject meshes that split a quantization block, because the loss would then depend on the
    mesh.
    """
    model, mesh, tokens = config.model, config.mesh, config.train.sequence_length
    if model.matmul not in ("int8", "fp8") or model.matmul_scales != "block":
        return
    dims = {
        size
        for param in declared(describe(model)).values()
        for size, axis in param.dims
        if axis == "mlp"
    }
    shards = axis_size(mesh, "tensor") or 1 if mesh.sequence_parallel else 1
    cut = [(size, f"columns of an MLP ({size})", "tensor", shards) for size in sorted(dims)]
    if model.matmul_weight_gradients == "same":
        shards = axis_size(mesh, "context") or 1
        pieces = 2 * shards if shards > 1 else 1  # an early and a late chunk per device
        cut.append((tokens, f"tokens ({tokens})", "context", pieces))
    for size, words, axis, pieces in cut:
        block = math.gcd(size, QUANTIZATION_BLOCK)
        if size % (pieces * block):
            yield RuleViolation(
                Code.MODEL_MATMUL,
                "model.matmul_scales",
                f"uses one scale per block of {block} {words}; {pieces} shards over mesh axis "
                f"{axis} would split such a block, so the loss would depend on the mesh.",
                "Set model.matmul_scales=channel, or a mesh that does not split blocks.",
            )


@rule("model.matmul", "model.matmul_scales")
def _block_scaled_formats_define_scales(config: Config) -> Iterator[RuleViolation]:
    if config.model.matmul in BLOCK_SIZES and config.model.matmul_scales != "channel":
        yield RuleViolation(
            Code.MODEL_MATMUL,
            "model.matmul_scales",
            f"has no effect with model.matmul={config.model.matmul}, which defines its own scales.",
            "Set model.matmul_scales=channel.",
        )


@rule(
    *("mesh.sequence_parallel", "mesh.axis_rules", "train.sequence_length"),
    *axis_keys(*_WEIGHT_AXES),
    *MODEL_KEYS,
)
def _scaled_blocks_fit(config: Config) -> Iterator[RuleViolation]:
    """Require that every shard of a contracted dim consists of complete blocks."""
    model, mesh = config.model, config.mesh
    if model.matmul not in BLOCK_SIZES:
        return
    block = BLOCK_SIZES[model.matmul]
    table, tensor_sizes = axis_table(mesh), {"tensor": axis_size(mesh, "tensor") or 1}
    has_quantized_base = model.adapter and model.adapter.base_quantization != "default"
    # A base in 8 or 4 bits is multiplied in the shapes that it has without adapters.
    for name, param in declared(describe(replace(model, adapter=None))).items():
        if "ahead" in param.axes:  # MTP layers have the sizes of the last layer
            continue
        is_expert = param.expert_dim >= 0
        if not is_expert and (
            not param.num_contracted_dims or (model.matmul_parts == "mlp" and param.is_of_heads)
        ):
            continue
        dims = [dim for number, dim in enumerate(param.dims) if number != param.expert_dim]
        # Only weights that are quantized before they are gathered are quantized in shards.
        is_held = has_quantized_base and dim_of_scales(param) is not None
        is_gathered = is_expert or is_held or mesh.sequence_parallel
        for size, logical in (dims[(param.num_contracted_dims or param.linear) - 1], dims[-1]):
            sizes = tensor_sizes if is_gathered else _sizes_over(config, logical)
            shards = math.prod(sizes.get(axis, 1) for axis in table[logical])
            if size % (shards * block):
                text = f"dim {logical} of {name} ({size})"
                yield _incomplete_blocks(text, shards, block)
                return
    parts = layer_parts(config)
    latent = (part for part in parts if isinstance(part, LatentAttention | CompressedAttention))
    for part in latent if model.matmul_parts == "all" else ():
        for name, size in part.quantized_dims.items():
            if size % block:
                yield _incomplete_blocks(f"{name} ({size})", 1, block)
                return
    context, tensor = axis_size(mesh, "context") or 1, tensor_sizes["tensor"]
    # Context parallelism assigns an early and a late chunk to each device.
    pieces = context * math.lcm(2 if context > 1 else 1, tensor if mesh.sequence_parallel else 1)
    tokens = config.train.sequence_length
    if model.matmul_weight_gradients == "same" and tokens % (pieces * block):
        text = f"train.sequence_length ({tokens})"
        yield _incomplete_blocks(text, pieces, block)


@rule("model.matmul", *MODEL_KEYS)
def _nvfp4_has_no_experts(config: Config) -> Iterator[RuleViolation]:
    if config.model.matmul == "nvfp4" and has_experts(config):
        yield RuleViolation(
            Code.MODEL_MATMUL,
            "model.matmul",
            "does not support models with experts.",
            "Set model.matmul=mxfp8.",
        )


@rule("model.matmul_unquantized_layers", "model.num_layers", "model.matmul")
def _unquantized_layers_exist(config: Config) -> Iterator[RuleViolation]:
    key, model = "model.matmul_unquantized_layers", config.model
    layers, setting = model.num_layers, model.matmul_unquantized_layers
    if setting > layers:
        yield RuleViolation(
            Code.MODEL_MATMUL,
            key,
            f"must be at most model.num_layers ({layers}).",
            f"Set {key}={layers} or less.",
        )
    elif model.matmul != "default" and (
        num_unquantized_layers(setting, model.matmul, layers) == layers
    ):
        yield RuleViolation(
            Code.MODEL_MATMUL,
            key,
            f"selects all layers ({layers}), so model.matmul={model.matmul} has no effect.",
            f"Set {key}={layers - 1}{' or less' if layers > 1 else ''}, or model.matmul=default.",
        )


def _incomplete_blocks(dim: str, shards: int, block: int) -> RuleViolation:
    split = f": each of its {shards} shards consists of complete blocks" if shards > 1 else ""
    return RuleViolation(
        Code.MODEL_MATMUL,
        "model.matmul",
        f"uses one scale per {block} numbers, so {dim} must be a multiple of "
        f"{shards * block}{split}.",
        f"Set model.matmul=fp8, or change the size to a multiple of {shards * block}.",
    )


_SPLASH_BLOCK = 128
"""Minimum block size in tokens. Query and key block sizes must be multiples of this value."""


@rule("model.attention", "runtime.platform", "train.sequence_length", *axis_keys("context"))
def _splash_runs_there(config: Config) -> Iterator[RuleViolation]:
    if config.model.attention != "splash":
        return
    if config.runtime.platform in ("cpu", "cuda"):
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "model.attention",
            f"requires a TPU, but runtime.platform is {config.runtime.platform}.",
            "Set model.attention=xla.",
        )
    shards, tokens = axis_size(config.mesh, "context") or 1, config.train.sequence_length
    pieces = 2 * shards if shards > 1 else 1  # an early and a late chunk per device
    if tokens % (pieces * _SPLASH_BLOCK):
        each = f" in each of a sequence's {pieces} chunks" if pieces > 1 else ""
        yield RuleViolation(
            Code.MODEL_ATTENTION,
            "train.sequence_length",
            f"must be a multiple of {pieces * _SPLASH_BLOCK} with model.attention=splash, whose "
            f"kernels use blocks of {_SPLASH_BLOCK} tokens{each}.",
            f"Set train.sequence_length={round_up(tokens, pieces * _SPLASH_BLOCK)}, or "
            "model.attention=xla.",
        )


@rule(*MODEL_KEYS, "train.sequence_length", *axis_keys("context"))
def _chunks_divide_tokens(config: Config) -> Iterator[RuleViolation]:
    parts = (part for part in layer_parts(config) if isinstance(part, Experts))
    chunks = max((part.all_to_all_chunks for part in parts), default=1)
    tokens = config.train.sequence_length // (axis_size(config.mesh, "context") or 1)
    if tokens % chunks:
        key = f"model.{config.model.family}.all_to_all_chunks"
        largest = max(count for count in range(1, chunks) if tokens % count == 0)
        yield RuleViolation(
            Code.MODEL_SIZES,
            key,
            f"must divide the {tokens} tokens of a sequence on one device.",
            f"Set {key}={largest}.",
        )
