"""A mixture of experts: dense layers in front, then layers that send tokens to a few experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.errors import Finding
from maxpipe.model.families import formats, generic, mixtures
from maxpipe.model.families.mixtures import MixtureConfig
from maxpipe.model.huggingface import Fixed, HuggingFace, Key, Only, Rotary
from maxpipe.model.parts.attention import Rope
from maxpipe.model.parts.experts import Experts
from maxpipe.model.parts.mlp import GatedMLP
from maxpipe.model.spec import Family, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(MixtureConfig):
    """Keys of mixtures of experts only."""

    num_dense_layers: int = 1
    """Layers in front that have one MLP of width `model.d_mlp` instead of experts."""
    num_shared_experts: int = 0
    """Experts beside those, of the same width, that all tokens pass through."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router's logits become: probabilities that compete, or scores that do not."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    normalised_weights: bool = True
    """Divide the scores of a token's experts by their sum, so that its weights add up to 1."""


def describe(config: ModelConfig) -> Model:
    """Two kinds of layers, `dense` and `experts`; without dense layers one."""
    own = own_keys(config, MoeConfig)
    shared = own.num_shared_experts * mixtures.width(config, own)
    experts = mixtures.experts(
        config,
        own,
        scores=own.scores,
        weight_scale=own.weight_scale,
        shared=GatedMLP(config.d_model, shared, generic.residual_gain(config)) if shared else None,
        normalised=own.normalised_weights,
    )
    attention = generic.attention(config, Rope(config.rope_theta))
    return mixtures.model(config, attention, experts, (True,) * own.num_dense_layers)


def _rules(config: ModelConfig) -> Iterator[Finding]:
    own = own_keys(config, MoeConfig)
    yield from mixtures.rules(config, own)
    if own.num_dense_layers >= config.num_layers:
        yield Finding(
            "model.moe.num_dense_layers",
            f"must be less than model.num_layers ({config.num_layers}): the layers behind them "
            "have the experts.",
            f"Set model.moe.num_dense_layers={min(1, config.num_layers - 1)}, or "
            "model.family=llama for a model without experts.",
        )


_MIXTRAL = HuggingFace(
    "MixtralForCausalLM",
    "mixtral",
    keys=(
        *formats.sizes(kv_heads=8, mlp=14336, epsilon=1e-5),
        Key("intermediate_size", "moe.d_expert", 14336, stands_for="d_mlp"),
        Key("num_local_experts", "moe.num_experts", 8),
        Key("num_experts_per_tok", "moe.top_k", 2),
        Only("moe.num_dense_layers", 0),
        Only("moe.num_shared_experts", 0),
        Only("moe.scores", "softmax"),
        Only("moe.weight_scale", 1.0),
        Only("moe.normalised_weights", True),
        Rotary("rope_theta", 1e6, {}, unscaled={}),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("sliding_window", (None,)),
        *formats.BALANCED,
    ),
    tensors=(
        *formats.ENDS,
        *formats.norms(attention_norm="input_layernorm", experts_norm="post_attention_layernorm"),
        *formats.ATTENTION,
        *formats.experts("block_sparse_moe", router="gate", gate="w1", up="w3", down="w2"),
    ),
)

FAMILY = Family(
    "moe",
    MoeConfig,
    describe,
    bounds=(
        *mixtures.BOUNDS,
        Bound("num_dense_layers", 1, 0),
        Bound("num_shared_experts", 0, 0),
        Bound("weight_scale", 1.0, 0, LARGEST, "experts with a weight of 0 train nothing", False),
    ),
    rules=_rules,
    reporting=(Experts,),
    huggingface=(_MIXTRAL,),
)
