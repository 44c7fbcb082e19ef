"""MiniMax M2: joint query and key norms, partial RoPE, and experts with biased routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, moe_base, partial_rope
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Ours,
    Tensor,
    Theirs,
    Twice,
    UnsupportedError,
)
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.partial_rope import PartialRopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimaxM2Config(MixtureConfig, PartialRopeConfig):
    """Keys that only MiniMax M2 models use. Every layer has experts, which are selected by sigmoid
    scores plus biases. The biases balance expert loads and have no gradient.
    """

    expert_bias_update_rate: float = 0.001
    """Step size of the expert bias update. The bias increases for experts that received fewer
    tokens than the mean, and decreases for the others. 0 keeps biases constant."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, MinimaxM2Config)
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    attention = family.attention(config, partial_rope.rope(config), head_norm=norm, joint_norm=True)
    routed = moe_base.experts(
        config, own, scores="sigmoid", expert_bias_update_rate=own.expert_bias_update_rate
    )
    return moe_base.moe_model(config, attention, routed)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from moe_base.moe_rules(config, own_keys(config, MinimaxM2Config))
    yield from partial_rope.rules(config)


@dataclass(frozen=True)
class _AttentionTypes:
    """Key-table row for `attn_type_list`, which must select full attention in every layer."""

    names = ("attn_type_list",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check that every layer has full attention."""
        types = theirs.get(self.names[0])
        if types is not None and types != (count := [1] * ours["num_layers"]):
            rule = f"must list {len(count)} ones, because linear attention is not supported."
            raise UnsupportedError(self.names[0], types, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Omit the key, because full attention is the default."""
        return {}


_MOE = "model.layers.{layer}.block_sparse_moe."

_HUGGINGFACE = HuggingFace(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    keys=(
        *huggingface.sizes(
            layers=62, width=3072, heads=48, kv_heads=8, head_dim=128, mlp=1536, vocab=200064
        ),
        Key("intermediate_size", "minimax_m2.d_expert", 1536, zero_means="d_mlp"),
        Key("num_local_experts", "minimax_m2.num_experts", 256, also="num_experts"),
        Key("num_experts_per_tok", "minimax_m2.top_k", 8),
        *partial_rope.table_rows("minimax_m2", 1.0, count="rotary_dim", theta=5e6),
        _AttentionTypes(),
        Fixed("scoring_func", ("sigmoid",), "sigmoid"),
        Fixed("use_routing_bias", (True,), True),
        Fixed("use_qk_norm", (True,), True),
        Fixed("qk_norm_type", ("per_layer",), "per_layer"),
        Fixed("shared_intermediate_size", (0,), 0),
        Fixed("sliding_window", (None,)),
        Fixed("hidden_act", ("silu",), "silu"),
        *map(Kept, ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")),
        Kept("mlp_intermediate_size"),
        *huggingface.BALANCED,
    ),
    duplicate_keys=(Twice("num_experts", "num_local_experts"),),
    tensors=(
        *huggingface.ENDS,
        *huggingface.norms(
            attention_norm="input_layernorm", experts_norm="post_attention_layernorm"
        ),
        *huggingface.ATTENTION,
        *huggingface.JOINT_NORMS,
        *huggingface.experts("block_sparse_moe", router="gate", gate="w1", up="w3", down="w2"),
        Tensor("experts.router_bias", f"{_MOE}e_score_correction_bias", "e -> e"),
    ),
)

FAMILY = Family(
    "minimax_m2",
    MinimaxM2Config,
    describe,
    bounds=(
        *moe_base.MOE_BOUNDS,
        *partial_rope.BOUNDS,
        Bound("expert_bias_update_rate", 0.001, 0, 1, "0 keeps biases constant"),
    ),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
