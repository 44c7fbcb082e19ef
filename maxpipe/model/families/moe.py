"""A mixture of experts: dense layers in front, then layers that send tokens to a few experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.config.bounds import LARGEST, Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.errors import Finding
from maxpipe.model.families import generic
from maxpipe.model.parts.attention import Rope
from maxpipe.model.parts.experts import Experts
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Branch, Family, Kind, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Keys of mixtures of experts only. All experts are computed for all tokens."""

    num_experts: int = 8
    """Experts of a layer."""
    top_k: int = 2
    """Experts that a token is sent to: those to which the router gives the largest probabilities.
    """
    num_dense_layers: int = 1
    """Layers in front that have one MLP of width `model.d_mlp` instead of experts."""
    d_expert: int = 0
    """Hidden width of one expert. 0 takes `model.d_mlp`."""
    balance_weight: float = 0.01
    """Coefficient of the balance loss, which is 1 when experts get equally many tokens of each
    sequence; the objective has it once for each layer with experts. 0 only records it."""
    normalised_weights: bool = True
    """Divide the probabilities of a token's experts by their sum, so that its weights add up to
    1."""


def describe(config: ModelConfig) -> Model:
    """Two kinds of layers, `dense` and `experts`; without dense layers one."""
    own = own_keys(config, MoeConfig)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    experts = Experts(
        config.d_model,
        own.d_expert or config.d_mlp,
        own.num_experts,
        own.top_k,
        generic.residual_gain(config),
        own.balance_weight,
        own.normalised_weights,
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
    if own.num_dense_layers >= config.num_layers:
        yield Finding(
            "model.moe.num_dense_layers",
            f"must be less than model.num_layers ({config.num_layers}): the layers behind them "
            "have the experts.",
            f"Set model.moe.num_dense_layers={min(1, config.num_layers - 1)}, or "
            "model.family=llama for a model without experts.",
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
        Bound("balance_weight", 0.01, 0, LARGEST, "0 only records the balance loss"),
    ),
    rules=_rules,
    reporting=(Experts,),
)
