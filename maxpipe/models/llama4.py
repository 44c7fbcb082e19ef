"""Llama 4: chunked attention, layers without rotary positions, and experts in some layers.

The routing weight of an expert multiplies its input, and a shared expert processes all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import family, huggingface, moe_base, rope_config, rotary_layers
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Key,
    OrNone,
    Ours,
    Tensor,
    Theirs,
    UnsupportedError,
    Whole,
)
from maxpipe.models.layers.attention import QueryScaling
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import MLP, RMSNorm, ScaledInput
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.rotary_layers import RotaryLayers, rotary_flags
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama4Config(MixtureConfig, RopeConfig):
    """Keys that only Llama 4 models use. Layers with experts also have a shared expert of the same
    width.
    """

    moe_layer_interval: int = 1
    """Interval between layers with experts. With interval n, every n-th layer has experts and all
    others have one MLP of width `model.d_mlp`."""
    no_rope_layer_interval: int = 4
    """Interval between layers without rotary positions (NoPE). With interval n, every n-th layer
    has none. If 0, all layers have rotary positions."""
    attention_chunk_size: int = 8192
    """Number of tokens per attention chunk in layers with rotary positions. Each document is
    divided into chunks, and a token attends only to tokens of its chunk. Layers without rotary
    positions attend to all tokens. If 0, all layers do."""
    use_qk_norm: bool = True
    """Normalize queries and keys in layers with rotary positions, without a learned scale."""
    attn_scale: float = 0.1
    """Strength of the scaling of queries by position in layers without rotary positions. A query at
    position p is multiplied by `1 + attn_scale * log(1 + floor((p + 1) / floor_scale))`. 0 disables
    the scaling."""
    floor_scale: int = 8192
    """Number of tokens after which queries are first scaled. Ignored if `attn_scale` is 0."""
    top_k: int = 1
    """Number of experts selected per token. The experts with the largest router logits are
    selected."""
    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = "llama3"
    """RoPE scaling method. `llama3` scales only wavelengths that are long relative to the original
    context. `yarn` does this with a linear ramp. `linear` multiplies all wavelengths by
    `rope_factor`. `dynamic` (NTK) increases the base for sequences longer than
    `original_max_position_embeddings`. `longrope` multiplies each wavelength by a separate
    factor."""
    original_max_position_embeddings: int = 8192
    """Original context length in tokens. Ignored unless `rope_factor` is above 1 or `rope_type` is
    `longrope`."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only `experts`."""
    own = own_keys(config, Llama4Config)
    flags = rotary_flags(config.num_layers, own.no_rope_layer_interval)
    rope = replace(rope_config.rope(config, own), enabled="has_rope", interleaved=True)
    norm = RMSNorm(config.head_dim, config.norm_epsilon, scaled=False)
    chunked = bool(own.attention_chunk_size)
    attention = family.attention(
        config,
        rope,
        window="window" if chunked else "",
        chunked=chunked,
        rotary_norm=norm if own.use_qk_norm else None,
        query_scaling=QueryScaling("query_scale", own.floor_scale, 1) if own.attn_scale else None,
    )
    width = moe_base.expert_width(config, own)
    experts = moe_base.experts(
        config,
        own,
        scores="sigmoid",
        normalised=False,
        function=ScaledInput("silu"),
        shared=MLP(config.d_model, width, family.residual_gain(config)),
    )
    values = {"has_rope": tuple(map(float, flags))}
    if chunked:
        values["window"] = tuple(float(own.attention_chunk_size * flag) for flag in flags)
    if own.attn_scale:
        values["query_scale"] = tuple(own.attn_scale * (1 - flag) for flag in flags)
    return moe_base.moe_model(config, attention, experts, _dense(config, own), values=values)


def _dense(config: ModelConfig, own: Llama4Config) -> list[bool]:
    """Return one flag per layer: true if the layer has an MLP instead of experts."""
    return [layer % own.moe_layer_interval != 0 for layer in range(1, config.num_layers + 1)]


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Llama4Config)
    yield from moe_base.moe_rules(config, own)
    yield from rope_config.rules(config, own)
    if own.moe_layer_interval > config.num_layers:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.llama4.moe_layer_interval",
            f"must be at most model.num_layers ({config.num_layers}), because at least one layer "
            "must have experts.",
            "Set model.llama4.moe_layer_interval=1.",
        )


@dataclass(frozen=True)
class _ExpertLayers:
    """Key-table row for `moe_layers` and `interleave_moe_layer_step`."""

    ours = "llama4.moe_layer_interval"
    names = ("moe_layers", "interleave_moe_layer_step")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the interval between layers with experts, computed from the list of layers if
        there is one.
        """
        layers, interval = (theirs.get(name) for name in self.names)
        if layers is None:
            return {self.ours: 1 if interval is None else interval}
        if isinstance(layers, list) and layers and type(layers[0]) is int and layers[0] >= 0:
            interval = layers[0] + 1
            if layers == self._layers(ours["num_layers"], interval):
                return {self.ours: interval}
        rule = "must list the index of every n-th layer, starting with n - 1."
        raise UnsupportedError(self.names[0], layers, rule)

    def restated(self, theirs: Theirs) -> tuple[str, Any] | None:
        """Return the key and value of an interval that contradicts the list, or None."""
        layers, interval = (theirs.get(name) for name in self.names)
        if not isinstance(layers, list) or not layers or type(interval) is not int or interval < 1:
            return None
        is_same = type(layers[0]) is int and layers[0] + 1 == interval
        return None if is_same else (self.names[1], interval)

    def write(self, ours: Ours) -> Theirs:
        """Return both keys."""
        interval = ours[self.ours]
        layers = self._layers(ours["num_layers"], interval)
        return dict(zip(self.names, (layers, interval), strict=True))

    def _layers(self, count: int, interval: int) -> list[int]:
        return [*range(interval - 1, count, interval)]


@dataclass(frozen=True)
class _Chunks:
    """Key-table row for `layer_types`, which the layers with rotary positions determine."""

    names = ("layer_types",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check that exactly the layers with rotary positions have chunks."""
        types = theirs.get(self.names[0])
        if types is not None and types != (wanted := self._types(ours)):
            rule = f"must be {wanted} with these values of attention_chunk_size and no_rope_layers."
            raise UnsupportedError(self.names[0], types, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the type of each layer."""
        return {self.names[0]: self._types(ours)}

    def _types(self, ours: Ours) -> list[str]:
        flags = rotary_flags(ours["num_layers"], ours["llama4.no_rope_layer_interval"])
        chunked = bool(ours["llama4.attention_chunk_size"])
        return ["chunked_attention" if flag and chunked else huggingface.FULL for flag in flags]


@dataclass(frozen=True)
class _Temperature:
    """Key-table row for `attn_scale`, and for the key that disables the scaling of queries."""

    ours = "llama4.attn_scale"
    names = ("attn_scale", "attn_temperature_tuning")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the strength of the scaling, or 0 if the scaling is disabled."""
        scale = theirs.get(self.names[0])
        if not huggingface.a_flag(theirs, self.names[1], True):
            return {self.ours: 0.0}
        return {self.ours: 0.1 if scale is None else scale}

    def write(self, ours: Ours) -> Theirs:
        """Return both keys."""
        return dict(zip(self.names, (ours[self.ours], ours[self.ours] != 0), strict=True))


_MLP = "model.layers.{layer}.feed_forward."


def _gated(part: str, prefix: str, module: str) -> tuple[Tensor, ...]:
    """Return tensor-table rows for a gated MLP."""
    return tuple(
        Tensor(f"{part}.{prefix}{name}", f"{_MLP}{module}{name}_proj.weight", dims)
        for name, dims in (("gate", "d f -> f d"), ("up", "d f -> f d"), ("down", "f d -> d f"))
    )


_HUGGINGFACE = HuggingFace(
    "Llama4ForCausalLM",
    "llama4_text",
    keys=(
        *huggingface.sizes(
            layers=48,
            width=5120,
            heads=40,
            kv_heads=8,
            head_dim=128,
            mlp=16384,
            vocab=202048,
            epsilon=1e-5,
            mlp_key="intermediate_size_mlp",
        ),
        Key("intermediate_size", "llama4.d_expert", 8192, zero_means="d_mlp"),
        Key("num_local_experts", "llama4.num_experts", 16),
        Key("num_experts_per_tok", "llama4.top_k", 1),
        _ExpertLayers(),
        RotaryLayers("llama4.no_rope_layer_interval"),
        OrNone("attention_chunk_size", "llama4.attention_chunk_size", 8192),
        _Chunks(),
        Key("use_qk_norm", "llama4.use_qk_norm", True),
        _Temperature(),
        Key("floor_scale", "llama4.floor_scale", 8192),
        rope_config.row("llama4", 131072, 500000.0),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        *huggingface.BALANCED,
    ),
    tensors=(
        *huggingface.ENDS,
        *huggingface.NORMED,
        *huggingface.norms(experts_norm="post_attention_layernorm"),
        *huggingface.ATTENTION,
        *_gated("mlp", "", ""),
        *_gated("experts", "shared_", "shared_expert."),
        Tensor("experts.router", f"{_MLP}router.weight", "d e -> e d"),
        Tensor(
            "experts.gate", f"{_MLP}experts.gate_up_proj", "d e f -> e d f", is_column_block=True
        ),
        Tensor("experts.up", f"{_MLP}experts.gate_up_proj", "d e f -> e d f", is_column_block=True),
        Tensor("experts.down", f"{_MLP}experts.down_proj", "e f d -> e f d"),
    ),
    containers=(
        Whole(
            "Llama4ForConditionalGeneration",
            "text_config",
            "llama4",
            other_tensors=(
                *("vision_model.*", "model.vision_model.*"),
                *("multi_modal_projector.*", "model.multi_modal_projector.*"),
            ),
        ),
    ),
)

FAMILY = Family(
    "llama4",
    Llama4Config,
    describe,
    bounds=(
        *moe_base.MOE_BOUNDS,
        *rope_config.BOUNDS,
        rotary_layers.BOUND,
        Bound("moe_layer_interval", 1, 1),
        Bound("attention_chunk_size", 8192, 0, 2**31 - 1, "token counts are int32 on devices"),
        Bound("attn_scale", 0.1, 0, LARGEST, "0 disables the scaling of queries"),
        Bound("floor_scale", 8192, 1, 2**31 - 1, "token counts are int32 on devices"),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
