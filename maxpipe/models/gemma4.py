"""Gemma 4: windows in most layers, larger heads in global layers, and experts next to the MLP."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import family, gemma4_vision, huggingface, moe_base
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.gemma4_vision import Gemma4VisionConfig
from maxpipe.models.huggingface import (
    FULL,
    WINDOWED,
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Only,
    Ours,
    Rotary,
    Tensor,
    Theirs,
    UnsupportedError,
    Whole,
)
from maxpipe.models.layers.attention import Attention, Rope
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import LayerScalar, RMSNorm
from maxpipe.models.layers.per_layer_input import EMBEDDING, PerLayerInput
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.spec import Branch, LayerType, Model


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(MixtureConfig, Gemma4VisionConfig):
    """Keys that only Gemma 4 models use. `model.num_kv_heads` and `model.head_dim` apply to local
    layers. Gemma 4 always ties the output projection to the embedding table.
    """

    sliding_window: int = 1024
    """Attention window of local layers in tokens, including the query token."""
    sliding_window_pattern: int = 6
    """Interval between global layers, which attend to all tokens. With interval n, every n-th layer
    and the last layer are global, and all others are local."""
    local_rope_theta: float = 10000.0
    """Base of the rotary embedding frequencies (RoPE theta) in local layers. Global layers use
    `model.rope_theta`."""
    global_head_dim: int = 512
    """Dimension of one attention head in global layers. Must be even."""
    num_global_kv_heads: int = 0
    """Number of key/value heads in global layers. Must divide `model.num_heads`. If 0,
    `model.num_kv_heads` is used."""
    global_rotary_dim: int = 0
    """Number of dims of each head that are rotated in global layers. Must be even. The pairs with
    the highest frequencies are rotated (proportional RoPE). If 0, all dims are rotated."""
    rope_factor: float = 1.0
    """Factor that multiplies all rotary wavelengths in global layers. 1 disables the scaling."""
    attention_k_eq_v: bool = False
    """Use the projected keys as values in global layers, which then have no value projection."""
    final_logit_softcapping: float = 30.0
    """Soft cap on the logits: `cap * tanh(logits / cap)`. 0 disables the cap."""
    num_kv_shared_layers: int = 0
    """Number of layers, counted from the last, that have no key and value projections. They use the
    keys and values of the last preceding layer that has projections and attends to the same tokens
    (local or global)."""
    use_double_wide_mlp: bool = False
    """Double the hidden width of the MLP in layers without key and value projections."""
    hidden_size_per_layer_input: int = 0
    """Dimension of the token embedding that each layer adds to the residual stream (per-layer
    embeddings). Every layer has a separate embedding table. If 0, layers have no embeddings."""
    vocab_size_per_layer_input: int = 0
    """Number of rows of each layer's embedding table, at least `model.vocab_size`. If 0,
    `model.vocab_size` is used."""
    num_experts: int = 0
    """Number of experts in each layer. The experts are added to the MLP, which processes all
    tokens. If 0, layers have no experts, and all other keys for experts are ignored."""


_LOCAL, _GLOBAL, _FIRST, _SHARED = "local", "global", "first", "_shared"


def describe(config: ModelConfig) -> Model:
    """Return a model with up to five layer types.

    These are `local` and `global`, `local_shared` and `global_shared` for layers without key and
    value projections, and `first` for the first layer of a model with per-layer embeddings.
    """
    own = own_keys(config, Gemma4Config)
    norm = _norm(config, config.d_model)
    ends = family.ends(
        config,
        norm,
        embed_scale=config.d_model**0.5,
        final_logit_softcapping=own.final_logit_softcapping,
        vision=gemma4_vision.vision_tower(config),
    )
    layers = _layers(config, own)
    layer_types: dict[str, LayerType] = {}
    carried: dict[str, int] = {}
    for number, name in enumerate(layers):
        if name in layer_types:
            continue
        is_global = _are_global(config.num_layers, own)[number]
        is_shared, is_first = name.endswith(_SHARED), name == _FIRST
        mixing = _attention(config, own, is_global=is_global, is_shared=is_shared)
        sublayers = [
            Branch("attention", mixing, norm, norm, config.dropout),
            *_feed_forward(config, own, norm, is_shared=is_shared),
        ]
        parts: list[Attention | PerLayerInput] = [mixing]
        if own.hidden_size_per_layer_input:
            parts.append(_per_layer_input(config, own, is_first=is_first))
            sublayers.append(Branch("per_layer", parts[-1], None, norm, config.dropout))
        for part in parts:
            carried |= {
                key: math.prod(size for size, _ in dims) for key, dims in part.carried.items()
            }
        layer_types[name] = LayerType(
            tuple(sublayers),
            output_scale=LayerScalar(),
            input_stored_as=EMBEDDING if is_first else "",
        )
    window = family.same_everywhere(config, own.sliding_window)
    return Model(layer_types, layers, ends, {"window": window}, carried)


def _layers(config: ModelConfig, own: Gemma4Config) -> tuple[str, ...]:
    """Return the type of each layer."""
    layers = [_GLOBAL if each else _LOCAL for each in _are_global(config.num_layers, own)]
    for number in range(config.num_layers - own.num_kv_shared_layers, config.num_layers):
        layers[number] += _SHARED
    if own.hidden_size_per_layer_input:
        layers[0] = _FIRST
    return tuple(layers)


def _are_global(num_layers: int, own: Gemma4Config) -> list[bool]:
    """Return whether each layer is global. As in transformers, the last layer always is."""
    last = num_layers - 1
    return [n == last or not (n + 1) % own.sliding_window_pattern for n in range(num_layers)]


def _norm(config: ModelConfig, size: int, **options: Any) -> RMSNorm:
    return RMSNorm(size, config.norm_epsilon, scales_in_float32=True, **options)


def _attention(
    config: ModelConfig, own: Gemma4Config, *, is_global: bool, is_shared: bool
) -> Attention:
    """Return the attention sublayer of a layer type."""
    options: dict[str, Any] = {"window": "window"}
    if own.num_vision_layers and own.bidirectional_images:
        options["image_tokens"] = own.max_soft_tokens
    rope = Rope(own.local_rope_theta)
    if is_global:
        sizes = {"num_kv_heads": own.num_global_kv_heads or config.num_kv_heads}
        config = replace(config, head_dim=own.global_head_dim, **sizes)
        options = {"values_are_keys": own.attention_k_eq_v}
        pairs = own.global_rotary_dim // 2
        rope = Rope(config.rope_theta, own.rope_factor, rotated_pairs=pairs)
    if own.num_kv_shared_layers:
        # Later layers replace the stored arrays, so that the last layer with projections remains.
        prefix = _GLOBAL if is_global else _LOCAL
        options["shared_from" if is_shared else "stored_as"] = prefix
    return family.attention(
        config,
        rope,
        scale=1.0,
        head_norm=_norm(config, config.head_dim),
        value_norm=_norm(config, config.head_dim, scaled=False),
        **options,
    )


def _feed_forward(
    config: ModelConfig, own: Gemma4Config, norm: RMSNorm, *, is_shared: bool
) -> tuple[Branch, ...]:
    """Return the branch of the MLP and, if there are experts, their branch."""
    mlp = family.mlp(config, function="gelu")
    if own.use_double_wide_mlp and is_shared:
        mlp = replace(mlp, d_mlp=2 * mlp.d_mlp)
    if not own.num_experts:
        return (Branch("mlp", mlp, norm, norm, config.dropout),)
    routed = moe_base.experts(config, own, function="gelu", input_norm=norm, expert_scaled=True)
    # The experts normalize their input themselves, because the router has a separate norm.
    experts = Branch("experts", routed, None, norm, config.dropout, sum_norm=norm)
    return Branch("dense", mlp, norm, norm), experts


def _per_layer_input(config: ModelConfig, own: Gemma4Config, *, is_first: bool) -> PerLayerInput:
    size = own.hidden_size_per_layer_input
    return PerLayerInput(
        config.d_model,
        size,
        own.vocab_size_per_layer_input or config.vocab_size,
        family.residual_gain(config),
        _norm(config, size),
        is_first,
        own.image_token_id if own.num_vision_layers else None,
        own.per_layer_pad_token_id,
    )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Gemma4Config)
    yield from family.embeddings_are_tied(config)
    yield from gemma4_vision.rules(config)
    if own.num_experts:
        yield from moe_base.moe_rules(config, own)
    if own.num_global_kv_heads and config.num_heads % own.num_global_kv_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma4.num_global_kv_heads",
            f"must divide model.num_heads ({config.num_heads}), because each key/value head serves "
            "the same number of query heads.",
            "Set model.gemma4.num_global_kv_heads=0 to use model.num_kv_heads.",
        )
    if own.global_head_dim % 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma4.global_head_dim",
            "must be even, because dims are rotated in pairs.",
            f"Set model.gemma4.global_head_dim={own.global_head_dim + 1}.",
        )
    if own.global_rotary_dim > own.global_head_dim or own.global_rotary_dim % 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma4.global_rotary_dim",
            f"must be even and at most model.gemma4.global_head_dim ({own.global_head_dim}), "
            "because dims are rotated in pairs.",
            "Set model.gemma4.global_rotary_dim=0 to rotate all dims.",
        )
    if own.num_kv_shared_layers:
        are_global = _are_global(config.num_layers, own)
        first = config.num_layers - own.num_kv_shared_layers
        if first < 1 or {*are_global[:first]} != {*are_global}:
            most = config.num_layers - max(are_global.index(each) + 1 for each in {*are_global})
            yield RuleViolation(
                Code.MODEL_SIZES,
                "model.gemma4.num_kv_shared_layers",
                f"must be at most {most}, because shared layers use the keys and values of a "
                "preceding layer that attends to the same tokens (local or global).",
                f"Set model.gemma4.num_kv_shared_layers={most}.",
            )
    if 0 < own.vocab_size_per_layer_input < config.vocab_size:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.gemma4.vocab_size_per_layer_input",
            f"must be at least model.vocab_size ({config.vocab_size}), because every token has an "
            "embedding in each layer.",
            "Set model.gemma4.vocab_size_per_layer_input=0 to use model.vocab_size.",
        )
    carries = own.num_kv_shared_layers or own.hidden_size_per_layer_input
    if carries and config.mtp_heads and config.mtp_kind == "layer":
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "model.mtp_kind",
            "must be projection if Gemma 4 layers use arrays of earlier layers "
            "(model.gemma4.num_kv_shared_layers or hidden_size_per_layer_input), because a "
            "multi-token prediction layer does not receive these arrays.",
            "Set model.mtp_kind=projection.",
        )


# Hugging Face format.


@dataclass(frozen=True)
class _LayerTypes:
    """Key-table row for `layer_types`."""

    names = ("layer_types",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the interval between global layers."""
        key, count, types = (
            "gemma4.sliding_window_pattern",
            ours["num_layers"],
            theirs.get(*self.names),
        )
        if types is None:
            return {key: 6}
        if isinstance(types, list) and len(types) == count and {*types} <= {FULL, WINDOWED}:
            interval = types.index(FULL) + 1 if FULL in types else count
            # transformers replaces the type of the last layer.
            if [*types[:-1], FULL] == self._types(count, interval):
                return {key: interval}
        rule = f"must list {count} layers, where every n-th is {FULL!r} and the others are "
        raise UnsupportedError(*self.names, types, f"{rule}{WINDOWED!r}.")

    def write(self, ours: Ours) -> Theirs:
        """Return the type of each layer."""
        interval = ours["gemma4.sliding_window_pattern"]
        return {"layer_types": self._types(ours["num_layers"], interval)}

    def _types(self, count: int, interval: int) -> list[str]:
        own = Gemma4Config(sliding_window_pattern=interval)
        return [FULL if each else WINDOWED for each in _are_global(count, own)]


_SIZES = ("gemma4.global_head_dim", "gemma4.num_global_kv_heads")


@dataclass(frozen=True)
class _GlobalSizes:
    """Key-table row for the head dim and the number of key/value heads of global layers.

    Published configs have separate keys. Current releases of transformers write the values of each
    layer that differ from those of local layers.
    """

    names = ("global_head_dim", "num_global_key_value_heads", huggingface.PER_LAYER)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        layers = theirs.get(huggingface.PER_LAYER)
        if layers is None:
            head_dim = theirs.get("global_head_dim", 512)
            kv_heads = theirs.get("num_global_key_value_heads")
            if not ours["gemma4.attention_k_eq_v"]:
                kv_heads = None  # ignored by transformers
            return dict(zip(_SIZES, (head_dim, kv_heads or 0), strict=True))
        local = {"head_dim": ours["head_dim"], "num_key_value_heads": ours["num_kv_heads"]}
        own = Gemma4Config(sliding_window_pattern=ours["gemma4.sliding_window_pattern"])
        wanted: dict[str, Any] = {}
        known = isinstance(layers, dict) and all(re.fullmatch("[0-9]{1,9}", key) for key in layers)
        by_number = {int(number): sizes for number, sizes in layers.items()} if known else {}
        for number, is_global in enumerate(_are_global(ours["num_layers"], own)):
            found = by_number.get(number) or {}
            if not isinstance(found, dict) or found.keys() - local.keys():
                known = False
                break
            found = {**local, **found}
            wanted = wanted or (found if is_global else {})
            known = known and found == (wanted if is_global else local)
        if not known:
            rule = (
                "must set the same head_dim and num_key_value_heads in all layers with "
                f"{FULL!r}, and nothing in other layers."
            )
            raise UnsupportedError(huggingface.PER_LAYER, layers, rule)
        kv_heads = wanted["num_key_value_heads"]
        kv_heads = 0 if kv_heads == local["num_key_value_heads"] else kv_heads
        return dict(zip(_SIZES, (wanted["head_dim"], kv_heads), strict=True))

    def write(self, ours: Ours) -> Theirs:
        """Return the keys of published configs. If key/value heads differ although keys are not
        used as values, these keys have no effect, so the sizes of each layer are returned.
        """
        head_dim, kv_heads = (ours[name] for name in _SIZES)
        written = {"global_head_dim": head_dim, "num_global_key_value_heads": kv_heads or None}
        if not kv_heads or ours["gemma4.attention_k_eq_v"]:
            return written
        own = Gemma4Config(sliding_window_pattern=ours["gemma4.sliding_window_pattern"])
        each = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        are_global = enumerate(_are_global(ours["num_layers"], own))
        return {huggingface.PER_LAYER: {str(n): each for n, is_global in are_global if is_global}}


@dataclass(frozen=True)
class _Experts:
    """Key-table row for the keys of experts, which apply if `enable_moe_block` is true."""

    names = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
    ours = ("gemma4.num_experts", "gemma4.top_k", "gemma4.d_expert")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        if not huggingface.a_flag(theirs, "enable_moe_block"):
            return {"gemma4.num_experts": 0}
        for name in self.names[1:]:
            if theirs.get(name) is None:
                raise UnsupportedError(name, None, "is required if enable_moe_block is true.")
        return {mine: theirs[name] for mine, name in zip(self.ours, self.names[1:], strict=True)}

    def write(self, ours: Ours) -> Theirs:
        if not ours["gemma4.num_experts"]:
            return {"enable_moe_block": False} | dict.fromkeys(self.names[1:])
        sizes = [ours[name] for name in self.ours]
        sizes[-1] = sizes[-1] or ours["d_mlp"]
        return {"enable_moe_block": True} | dict(zip(self.names[1:], sizes, strict=True))


@dataclass(frozen=True)
class _RotatedShare:
    """Key-table row for `partial_rotary_factor`, the fraction of rotated dims in global layers."""

    names = ("partial_rotary_factor",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of rotated dims. All dims are rotated if the key is absent."""
        share, head = theirs.get("partial_rotary_factor", 1.0), ours["gemma4.global_head_dim"]
        if type(share) not in (int, float) or not 0 < share <= 1:
            rule = "must be greater than 0 and at most 1."
            raise UnsupportedError("partial_rotary_factor", share, rule)
        if not (pairs := int(share * head // 2)):
            rule = f"must rotate at least one pair of the {head} dims of a head."
            raise UnsupportedError("partial_rotary_factor", share, rule)
        return {"gemma4.global_rotary_dim": 0 if 2 * pairs == head else 2 * pairs}

    def write(self, ours: Ours) -> Theirs:
        """Return a fraction that yields the same number of rotated dims in transformers."""
        head = ours["gemma4.global_head_dim"]
        size = ours["gemma4.global_rotary_dim"] or head
        share = size / head
        # The quotient may be rounded down, and transformers rounds down again.
        return {"partial_rotary_factor": share if share * head >= size else (size + 0.5) / head}


@dataclass(frozen=True)
class _SharedLayers(Key):
    """Key-table row for shared layers of `Gemma4ForCausalLM`."""

    def write(self, ours: Ours) -> Theirs:
        """Check that the layers have embeddings, without which the forward pass of transformers
        5.24 fails in shared layers.
        """
        if (count := ours[self.ours]) and not ours["gemma4.hidden_size_per_layer_input"]:
            rule = "must be 0 if model.gemma4.hidden_size_per_layer_input is 0."
            raise UnsupportedError(f"model.{self.ours}", count, rule)
        return super().write(ours)


_LAYER, _PER_LAYER_TABLE = "model.layers.{layer}.", "model.embed_tokens_per_layer.weight"
_EXPERTS, _ROUTER = _LAYER + "experts.", _LAYER + "router."

_TENSORS = (
    *huggingface.ENDS,
    *huggingface.SANDWICH,
    *huggingface.ATTENTION,
    *huggingface.HEAD_NORMS,
    *huggingface.MLP,
    Tensor("output.scale", _LAYER + "layer_scalar", "d -> d"),
    # In models with experts, the MLP is called `dense` and is followed by another norm.
    *(replace(row, ours=row.ours.replace("mlp", "dense")) for row in huggingface.MLP),
    *huggingface.norms(
        dense_norm="pre_feedforward_layernorm",
        dense_after_norm="post_feedforward_layernorm_1",
        experts_after_norm="post_feedforward_layernorm_2",
        experts_sum_norm="post_feedforward_layernorm",
    ),
    Tensor("per_layer.table", _PER_LAYER_TABLE, "v p -> v p", is_column_block=True),
    Tensor("per_layer.project", "model.per_layer_model_projection.weight", "d p -> p d"),
    Tensor("per_layer.scale", "model.per_layer_projection_norm.weight", "p -> p"),
    Tensor("per_layer.gate", _LAYER + "per_layer_input_gate.weight", "d p -> p d"),
    Tensor("per_layer.out", _LAYER + "per_layer_projection.weight", "p d -> d p"),
    *huggingface.norms(per_layer_after_norm="post_per_layer_input_norm"),
    Tensor("experts.input_norm", _LAYER + "pre_feedforward_layernorm_2.weight", "d -> d"),
    Tensor("experts.router", _ROUTER + "proj.weight", "d e -> e d"),
    Tensor("experts.router_norm", _ROUTER + "scale", "d -> d"),
    Tensor("experts.expert_scale", _ROUTER + "per_expert_scale", "e -> e"),
    Tensor("experts.gate", _EXPERTS + "gate_up_proj", "d e f -> f d"),
    Tensor("experts.up", _EXPERTS + "gate_up_proj", "d e f -> f d"),
    Tensor("experts.down", _EXPERTS + "down_proj", "e f d -> d f"),
)


def _keys(sliding_window: int, *others: huggingface.Row) -> tuple[huggingface.Row, ...]:
    """Return the rows of one transformers class, given its default window and the rows for shared
    layers, per-layer embeddings and experts.
    """
    return (
        *huggingface.sizes(
            layers=30,
            width=2304,
            heads=8,
            kv_heads=4,
            head_dim=256,
            mlp=9216,
            vocab=262144,
            tied=True,
        ),
        Key("sliding_window", "gemma4.sliding_window", sliding_window),
        _LayerTypes(),
        Key("attention_k_eq_v", "gemma4.attention_k_eq_v", False),
        _GlobalSizes(),
        Rotary(
            "rope_theta",
            1e6,
            {"proportional": (_RotatedShare(), Key("factor", "gemma4.rope_factor", 1.0))},
            unscaled={"gemma4.global_rotary_dim": 0, "gemma4.rope_factor": 1.0},
            select_type=lambda ours: "proportional",
            layers=FULL,
            defaults={"rope_type": "proportional", "partial_rotary_factor": 0.25},
            has_legacy_keys=False,
        ),
        Rotary(
            "gemma4.local_rope_theta",
            10000.0,
            {},
            unscaled={},
            layers=WINDOWED,
            has_legacy_keys=False,
        ),
        huggingface.OrNone("final_logit_softcapping", "gemma4.final_logit_softcapping", 0.0),
        Key("use_double_wide_mlp", "gemma4.use_double_wide_mlp", False),
        *others,
        Fixed("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        Fixed("attention_bias", (False,), False),
        # `vision` affects only the tokens of images.
        Fixed("use_bidirectional_attention", (None, "vision")),
        Kept("use_bidirectional_attention"),
    )


_HUGGINGFACE = HuggingFace(
    "Gemma4ForCausalLM",
    "gemma4_text",
    keys=_keys(
        512,
        _SharedLayers("num_kv_shared_layers", "gemma4.num_kv_shared_layers", 0),
        _Experts(),
        Key("hidden_size_per_layer_input", "gemma4.hidden_size_per_layer_input", 256),
        Key(
            "vocab_size_per_layer_input",
            "gemma4.vocab_size_per_layer_input",
            262144,
            zero_means="vocab_size",
        ),
    ),
    tensors=_TENSORS,
    # Published models contain these tensors also for layers that use shared keys and values.
    superfluous=tuple(f"*.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")),
    containers=(
        Whole(
            "Gemma4ForConditionalGeneration",
            "text_config",
            "gemma4",
            other_tensors=(
                *("model.vision_tower.*", "model.audio_tower.*"),
                *("model.embed_vision.*", "model.embed_audio.*"),
            ),
            vision=gemma4_vision.TABLE,
        ),
    ),
)

# The language model of the 12B size. `Gemma4ForCausalLM` computes the same logits, so exports have
# this class only if `Gemma4ForCausalLM` does not support the model.
_UNIFIED = replace(
    _HUGGINGFACE,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    keys=_keys(
        1024,
        Key("num_kv_shared_layers", "gemma4.num_kv_shared_layers", 0),
        Fixed("enable_moe_block", (None, False)),
        Fixed("hidden_size_per_layer_input", (None, 0)),
        Only("gemma4.num_experts", 0),
        Only("gemma4.hidden_size_per_layer_input", 0),
        Only("gemma4.vocab_size_per_layer_input", 0),
    ),
    containers=(
        Whole(
            "Gemma4UnifiedForConditionalGeneration",
            "text_config",
            "gemma4_unified",
            other_tensors=(
                "model.vision_embedder.*",
                "model.embed_vision.*",
                "model.embed_audio.*",
            ),
        ),
    ),
)


FAMILY = Family(
    "gemma4",
    Gemma4Config,
    describe,
    bounds=(
        Bound("sliding_window", 1024, 1, 2**31 - 1, "token counts are int32 on devices"),
        Bound("sliding_window_pattern", 6, 1),
        Bound("local_rope_theta", 10000.0, 1, LARGEST, "the value must fit in float32", False),
        Bound("global_head_dim", 512, 2, axis="head_dim"),
        Bound("num_global_kv_heads", 4, 0, why="0 uses model.num_kv_heads", axis="kv_heads"),
        Bound("global_rotary_dim", 128, 0, why="0 rotates all dims"),
        Bound(
            "rope_factor", 1.0, 1, LARGEST, "multiplies RoPE wavelengths; 1 disables the scaling"
        ),
        Bound("final_logit_softcapping", 30.0, 0, LARGEST, "0 disables the cap"),
        Bound("num_kv_shared_layers", 20, 0),
        Bound(
            "hidden_size_per_layer_input",
            256,
            0,
            why="0 adds no embeddings to layers",
            axis="embed",
        ),
        Bound("vocab_size_per_layer_input", 262144, 0, why="0 uses model.vocab_size"),
        Bound("num_experts", 128, 0, why="0 adds no experts", axis="experts"),
        *(bound for bound in moe_base.MOE_BOUNDS if bound.key != "num_experts"),
        *gemma4_vision.BOUNDS,
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE, _UNIFIED),
)
