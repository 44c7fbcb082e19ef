"""A mixture of experts: dense layers in front, then layers that send tokens to a few experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.errors import Finding
from maxpipe.model.families import formats, generic
from maxpipe.model.huggingface import Fixed, HuggingFace, Kept, Key, Only, Rotary
from maxpipe.model.parts.attention import Rope
from maxpipe.model.parts.experts import Experts
from maxpipe.model.parts.mlp import GatedMLP
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Branch, Family, Kind, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Keys of mixtures of experts only."""

    num_experts: int = 8
    """Experts of a layer."""
    top_k: int = 2
    """Experts that a token is sent to: those to which the router gives the largest probabilities.
    """
    num_dense_layers: int = 1
    """Layers in front that have one MLP of width `model.d_mlp` instead of experts."""
    d_expert: int = 0
    """Hidden width of one expert. 0 takes `model.d_mlp`."""
    num_shared_experts: int = 0
    """Experts beside those, of the same width, that all tokens pass through."""
    capacity_factor: float = 0.0
    """Tokens of a sequence for which an expert has room, as a multiple of an even share: 1.25 is
    common. The others lose this expert, second choices first; when text is generated none does. 0:
    for all, nothing is lost."""
    dispatch: Literal["auto", "all", "grouped"] = "auto"
    """How tokens get to their experts without a capacity: `grouped` sorts them by expert and
    computes those that they are sent to, with a kernel on TPUs and in blocks of rows elsewhere.
    `all` computes all experts for all tokens, and much that is not used. `auto` is `grouped` if
    there are at least twice as many experts as a token is sent to."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router's logits become: probabilities that compete, or scores that do not."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    balance_weight: float = 0.01
    """Coefficient of the balance loss, which is 1 when experts get equally many tokens of each
    sequence; the objective has it once for each layer with experts. 0 only records it."""
    z_weight: float = 0.0
    """Coefficient of the router's z-loss, the mean square of the logarithm of its partition
    function: keeps logits small. 0 only records it."""
    normalised_weights: bool = True
    """Divide the scores of a token's experts by their sum, so that its weights add up to 1."""


def describe(config: ModelConfig) -> Model:
    """Two kinds of layers, `dense` and `experts`; without dense layers one."""
    own = own_keys(config, MoeConfig)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    width, gain = own.d_expert or config.d_mlp, generic.residual_gain(config)
    experts = Experts(
        config.d_model,
        width,
        own.num_experts,
        own.top_k,
        gain,
        own.balance_weight,
        own.z_weight,
        own.capacity_factor,
        own.scores,
        own.weight_scale,
        GatedMLP(config.d_model, own.num_shared_experts * width, gain)
        if own.num_shared_experts
        else None,
        own.normalised_weights,
        dispatch=own.dispatch,
    )
    branches = {
        "dense": Branch("mlp", generic.gated_mlp(config), norm, dropout=config.dropout),
        "experts": Branch("experts", experts, norm, dropout=config.dropout),
    }
    attention = generic.attention(config, Rope(config.rope_theta))
    mixing = Branch("attention", attention, norm, dropout=config.dropout)
    num_routed = config.num_layers - own.num_dense_layers
    layers = ("dense",) * own.num_dense_layers + ("experts",) * num_routed
    kinds = {name: Kind((mixing, branches[name])) for name in dict.fromkeys(layers)}
    return Model(kinds, layers, generic.ends(config, norm))


def _rules(config: ModelConfig) -> Iterator[Finding]:
    own = own_keys(config, MoeConfig)
    if own.top_k > own.num_experts:
        yield Finding(
            "model.moe.top_k",
            f"is more than model.moe.num_experts ({own.num_experts}): a token is sent to different "
            "experts.",
            f"Set model.moe.top_k={min(2, own.num_experts)}.",
        )
    if own.capacity_factor and own.dispatch != "auto":
        yield Finding(
            "model.moe.dispatch",
            f"has no meaning with model.moe.capacity_factor={own.capacity_factor:g}: tokens pass "
            "through the experts that have room for them.",
            "Set model.moe.dispatch=auto, or model.moe.capacity_factor=0 for experts that have "
            "room for all.",
        )
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
        # Training only, and of another definition than ours.
        *map(Kept, ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")),
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
        Bound("num_experts", 8, 1, axis="experts"),
        Bound("top_k", 2, 1),
        Bound("num_dense_layers", 1, 0),
        Bound("d_expert", 0, 0, why="0 takes model.d_mlp", axis="mlp"),
        Bound("num_shared_experts", 0, 0),
        Bound("capacity_factor", 1.25, 0, LARGEST, "0 drops no token"),
        Bound("weight_scale", 1.0, 0, LARGEST, "experts with a weight of 0 train nothing", False),
        Bound("z_weight", 0.001, 0, LARGEST, "0 only records the z-loss"),
        Bound("balance_weight", 0.01, 0, LARGEST, "0 only records the balance loss"),
    ),
    rules=_rules,
    reporting=(Experts,),
    huggingface=(_MIXTRAL,),
)
