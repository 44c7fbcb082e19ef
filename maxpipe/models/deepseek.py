"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention and experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, moe, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Only,
    Ours,
    Rotary,
    Row,
    Tensor,
    Theirs,
    Twice,
    UnsupportedError,
    Whole,
)
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.indexer import Indexer
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.moe import RoutedConfig
from maxpipe.models.spec import Model

_EPSILON = 1e-6
"""Epsilon of the RMSNorms on the latents. As in the released code, this epsilon is independent of
`model.norm_epsilon`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(RoutedConfig):
    """Config keys of families with latent attention and experts."""

    kv_lora_rank: int = field(default=512, metadata=renamed_from("kv_rank"))
    """Dimension of each token's key-value latent. The keys and values of all heads are projections
    of this latent. During decoding, the cache stores only the latent and the RoPE dims of the
    key."""
    q_lora_rank: int = field(default=0, metadata=renamed_from("query_rank"))
    """Dimension of each token's query latent. If 0, queries are projected directly from the layer's
    input."""
    qk_rope_head_dim: int = field(default=64, metadata=renamed_from("rope_size"))
    """Number of RoPE dims, which are the last dims of each query and key head. Must be even. All
    heads share the RoPE dims of a key."""
    v_head_dim: int = field(default=128, metadata=renamed_from("value_size"))
    """Dimension of a value head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekConfig(LatentConfig):
    """Keys that only DeepSeek models use. `model.head_dim` is the query/key head dim, including the
    RoPE dims.
    """

    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Ratio of the extended context length to the original context length (YaRN). 1 disables the
    scaling."""
    original_max_position_embeddings: int = field(
        default=4096, metadata=renamed_from("rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `model.deepseek.rope_factor` is above
    1."""
    rope_beta_fast: float = 0.0
    """Dims that complete at least this many rotations within the original context are not scaled by
    YaRN (`beta_fast`). Must be at least 1. If 0, the published value of DeepSeek is used, which is
    32."""
    mscale: float = 0.0
    """YaRN scale of the RoPE dims. The RoPE dims are multiplied by `1 + 0.1 mscale
    log(rope_factor)` and divided by `1 + 0.1 mscale_all_dim log(rope_factor)`. If `mscale` or
    `mscale_all_dim` is 0, the RoPE dims are multiplied by `1 + 0.1 log(rope_factor)`."""
    mscale_all_dim: float = 0.0
    """YaRN scale of the attention scores. The scores are multiplied by the square of `1 + 0.1
    mscale_all_dim log(rope_factor)`."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only `experts`."""
    return moe.layered(config, latent_attention(config))


def latent_attention(config: ModelConfig, indexer: Indexer | None = None) -> LatentAttention:
    """Return latent attention for a family whose section extends `DeepseekConfig`."""
    own = own_keys(config, DeepseekConfig)

    def longer(mscale: float) -> float:
        return 1.0 + 0.1 * mscale * math.log(own.rope_factor)

    both = own.mscale and own.mscale_all_dim
    rope = Rope(
        config.rope_theta,
        own.rope_factor,
        "yarn",
        own.original_max_position_embeddings,
        rotary_dims=own.qk_rope_head_dim,
        attention_factor=longer(own.mscale) / longer(own.mscale_all_dim) if both else longer(1.0),
        fast=own.rope_beta_fast,
    )
    return with_rope(config, rope, longer(own.mscale_all_dim) ** 2, indexer)


def with_rope(
    config: ModelConfig, rope: Rope, scale: float = 1.0, indexer: Indexer | None = None
) -> LatentAttention:
    """Return latent attention for a family whose section extends `LatentConfig`. `scale` multiplies
    the attention scores, in addition to the usual scaling by the head dim.
    """
    own = own_keys(config, LatentConfig)
    return LatentAttention(
        config.d_model,
        config.num_heads,
        config.head_dim,
        own.v_head_dim,
        own.kv_lora_rank,
        own.q_lora_rank,
        family.residual_gain(config),
        config.attention,
        rope,
        config.head_dim**-0.5 * scale,
        _EPSILON,
        indexer,
    )


def latent_rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys in `LatentConfig`."""
    own, section = own_keys(config, LatentConfig), f"model.{config.family}"
    yield from moe.rules(config)
    if config.num_kv_heads != config.num_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.num_kv_heads",
            f"must be model.num_heads ({config.num_heads}) with model.family={config.family}, "
            "because each head has separate keys and values.",
            f"Set model.num_kv_heads={config.num_heads}.",
        )
    if own.qk_rope_head_dim % 2 or own.qk_rope_head_dim >= config.head_dim:
        largest = max(2, (config.head_dim - 1) // 2 * 2)
        valid = min(largest, max(2, own.qk_rope_head_dim // 2 * 2))
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.qk_rope_head_dim",
            f"must be even and less than model.head_dim ({config.head_dim}), because the last dims "
            "of a key are common to all heads and consist of pairs.",
            f"Set {section}.qk_rope_head_dim={valid}, or use a larger model.head_dim.",
        )


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys in the family's section."""
    own, section = own_keys(config, DeepseekConfig), f"model.{config.family}"
    yield from latent_rules(config)
    if 0 < own.rope_beta_fast < 1:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.rope_beta_fast",
            "must be 0 or at least 1, because dims that complete fewer than 1 rotation are scaled "
            "by the full factor.",
            f"Set {section}.rope_beta_fast=0 to use the value of DeepSeek.",
        )


# Hugging Face folders.


@dataclass(frozen=True)
class HeadSizes:
    """Key-table row for the numbers of unrotated and rotated dims in each query and key head.

    The first two keys determine the values of the others.
    """

    section: str
    """Name of the family's config section."""
    unrotated: int = 128
    """Default number of unrotated dims in transformers."""
    reads_head_dim: bool = True
    """Whether transformers requires that `head_dim` equals `qk_rope_head_dim`."""

    @property
    def names(self) -> tuple[str, ...]:
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "head_dim")
        return names if self.reads_head_dim else names[:3]

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the head dim and the number of RoPE dims."""
        unrotated = theirs.get(self.names[0], self.unrotated)
        turned = theirs.get(self.names[1], 64)
        for name, size in zip(self.names[2:], (unrotated + turned, turned), strict=False):
            if name in theirs and theirs[name] != size:
                raise UnsupportedError(
                    name, theirs[name], f"must be {size} to match the other keys."
                )
        return {"head_dim": unrotated + turned, f"{self.section}.qk_rope_head_dim": turned}

    def write(self, ours: Ours) -> Theirs:
        turned = ours[f"{self.section}.qk_rope_head_dim"]
        return {self.names[0]: ours["head_dim"] - turned, self.names[1]: turned}


@dataclass(frozen=True)
class _GroupsOfV2:
    """Key-table row for the expert groups of DeepSeek V2, which `topk_method` enables."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("topk_method", "n_group", "topk_group")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of expert groups and the number of groups selected per token; both are
        1 if `topk_method` is `greedy`.
        """
        method = theirs.get(self.names[0]) or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            rule = "must be 'greedy' or 'group_limited_greedy': other values are not supported."
            raise UnsupportedError(self.names[0], method, rule)
        counts = [1, 1] if method == "greedy" else [theirs.get(name) for name in self.names[1:]]
        if None in counts:
            raise UnsupportedError(
                self.names[1], None, "is required with expert groups, and so is topk_group."
            )
        names = ("deepseek.num_expert_groups", "deepseek.expert_groups_per_token")
        return dict(zip(names, counts, strict=True))

    def write(self, ours: Ours) -> Theirs:
        """Return the `config.json` keys; `topk_method` depends on the number of groups."""
        counts = ours["deepseek.num_expert_groups"], ours["deepseek.expert_groups_per_token"]
        method = "greedy" if counts[0] == 1 else "group_limited_greedy"
        return dict(zip(self.names, (method, *counts), strict=True))


@dataclass(frozen=True)
class SharedExperts(Key):
    """Key-table row for the number of shared experts; transformers requires at least one."""

    def write(self, ours: Ours) -> Theirs:
        if not ours[self.ours]:
            raise UnsupportedError(f"model.{self.ours}", 0, "must be at least 1.")
        return super().write(ours)


@dataclass(frozen=True)
class MtpLayers:
    """Key-table row for the number of multi-token prediction layers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of the key in published folders and its name in transformers."""
        return ("num_nextn_predict_layers", "num_mtp_layers")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of multi-token prediction heads and their architecture."""
        values = (theirs.get(name) for name in self.names)
        count = next((value for value in values if value is not None), 0)
        return {"mtp_heads": count, "mtp_kind": "layer" if count else "projection"}

    def write(self, ours: Ours) -> Theirs:
        """Return the number of multi-token prediction layers; 0 for projection heads."""
        count = ours["mtp_heads"] if ours["mtp_kind"] == "layer" else 0
        return dict.fromkeys(self.names, count)


def _yarn(section: str) -> tuple[Row, ...]:
    return (
        Key("factor", f"{section}.rope_factor"),
        Key("original_max_position_embeddings", f"{section}.original_max_position_embeddings"),
        Key("mscale", f"{section}.mscale", 0.0),
        Key("mscale_all_dim", f"{section}.mscale_all_dim", 0.0),
        Fixed("attention_factor", (None,)),
        rope_config.Turns("beta_fast", f"{section}.rope_beta_fast", 32.0),
        Fixed("beta_slow", (1, 1.0), 1),
    )


def layer_keys(section: str, dense: int, shared: int, width: int, scale: float) -> tuple[Row, ...]:
    """Return the key-table rows for dense layers and experts; the numbers are the defaults of a
    transformers class. `section` is the name of the family's config section.
    """
    return (
        Key("first_k_dense_replace", f"{section}.num_dense_layers", dense),
        Key("moe_intermediate_size", f"{section}.d_expert", width, zero_means="d_mlp"),
        SharedExperts("n_shared_experts", f"{section}.num_shared_experts", shared),
        Key("routed_scaling_factor", f"{section}.routed_scaling_factor", scale),
        Fixed("hidden_act", ("silu",), "silu"),
    )


def router_keys(section: str, experts: int, groups: int, groups_per_token: int) -> tuple[Row, ...]:
    """Return the key-table rows for the router of DeepSeek V3, with sigmoid scores and biases."""
    return (
        Key("n_routed_experts", f"{section}.num_experts", experts, also="num_local_experts"),
        Key("num_experts_per_tok", f"{section}.top_k", 8),
        Key("n_group", f"{section}.num_expert_groups", groups),
        Key("topk_group", f"{section}.expert_groups_per_token", groups_per_token),
        Only(f"{section}.group_scores", "top2"),
        Fixed("topk_method", ("noaux_tc",), "noaux_tc"),
        Fixed("scoring_func", ("sigmoid",), "sigmoid"),
        Only(f"{section}.score_func", "sigmoid"),
        Key("norm_topk_prob", f"{section}.norm_topk_prob", True),
        Only(f"{section}.expert_bias", True),
    )


def latent_keys(
    section: str,
    *sizes: Row,
    dense: int,
    shared: int,
    width: int,
    scale: float,
    unrotated: int = 128,
    value_size: int = 128,
    query_rank: Row | None = None,
) -> tuple[Row, ...]:
    """Return the key-table rows shared by all transformers classes with latent attention. `sizes`
    and the keyword arguments are the defaults of one transformers class.
    """
    rank = huggingface.OrNone("q_lora_rank", f"{section}.q_lora_rank", 1536)
    return (
        *(row for row in sizes if "head_dim" not in row.names),
        HeadSizes(section, unrotated),
        Key("v_head_dim", f"{section}.v_head_dim", value_size),
        Key("kv_lora_rank", f"{section}.kv_lora_rank", 512),
        query_rank or rank,
        Rotary(
            "rope_theta",
            10000.0,
            {"yarn": _yarn(section)},
            unscaled={f"{section}.rope_factor": 1.0, f"{section}.rope_beta_fast": 0.0},
            select_type=lambda ours: "default" if ours[f"{section}.rope_factor"] == 1 else "yarn",
        ),
        *layer_keys(section, dense, shared, width, scale),
        Fixed("moe_layer_freq", (1,), 1),
        Fixed("attention_bias", (False,), False),
        *map(Kept, ("ep_size", "aux_loss_alpha", "seq_aux", "output_router_logits")),
    )


_LAYER = "model.layers.{layer}."
_ATTENTION, _SHARED = f"{_LAYER}self_attn.", f"{_LAYER}mlp.shared_experts."

LAYER_TENSORS = (
    *huggingface.ENDS,
    *huggingface.NORMED,
    *huggingface.norms(experts_norm="post_attention_layernorm"),
    *huggingface.MLP,
    *huggingface.experts("mlp", router="gate", gate="gate_proj", up="up_proj", down="down_proj"),
    Tensor("experts.router_bias", f"{_LAYER}mlp.gate.e_score_correction_bias", "e -> e"),
    Tensor("experts.shared_gate", f"{_SHARED}gate_proj.weight", "d f -> f d"),
    Tensor("experts.shared_up", f"{_SHARED}up_proj.weight", "d f -> f d"),
    Tensor("experts.shared_down", f"{_SHARED}down_proj.weight", "f d -> d f"),
)
"""Tensor-table rows for everything except attention."""

MTP_TENSORS = (
    Tensor("embedding_norm.scale", f"{_LAYER}enorm.weight", "d -> d"),
    Tensor("hidden_norm.scale", f"{_LAYER}hnorm.weight", "d -> d"),
    Tensor("projection", f"{_LAYER}eh_proj.weight", "e d -> d e"),
    Tensor("norm.scale", f"{_LAYER}shared_head.norm.weight", "d -> d"),
)
"""Tensor-table rows for multi-token prediction layers."""

MTP_COPIES = (
    ("embedding", f"{_LAYER}embed_tokens.weight"),
    ("head", f"{_LAYER}shared_head.head.weight"),
)
"""Parameters and tensors that each multi-token prediction layer duplicates."""

DUPLICATE_KEYS = (
    Twice("num_local_experts", "n_routed_experts"),
    Twice("num_nextn_predict_layers", "num_mtp_layers"),
)
"""Pairs of `config.json` keys with the same meaning."""

ATTENTION_TENSORS = (
    Tensor("attention.query", f"{_ATTENTION}q_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.query_down", f"{_ATTENTION}q_a_proj.weight", "d r -> r d"),
    Tensor("attention.query_norm", f"{_ATTENTION}q_a_layernorm.weight", "r -> r"),
    Tensor("attention.query_up", f"{_ATTENTION}q_b_proj.weight", "r n h -> (n h) r"),
    Tensor("attention.key_value_down", f"{_ATTENTION}kv_a_proj_with_mqa.weight", "d r -> r d"),
    Tensor("attention.rope_key", f"{_ATTENTION}kv_a_proj_with_mqa.weight", "d h -> h d"),
    Tensor("attention.key_value_norm", f"{_ATTENTION}kv_a_layernorm.weight", "r -> r"),
    Tensor("attention.key_value_up", f"{_ATTENTION}kv_b_proj.weight", "r n h -> (n h) r"),
    huggingface.ATTENTION[-1],
)
"""Tensor-table rows for latent attention."""

TENSORS = (*LAYER_TENSORS, *ATTENTION_TENSORS)
"""Tensor-table rows of a model without multi-token prediction layers."""

_KIMI_VISION = (
    *("vision_tower.*", "model.vision_tower.*"),
    *("mm_projector.*", "multi_modal_projector.*", "model.multi_modal_projector.*"),
)
"""Name patterns of the tensors in Kimi K2.5 and K2.6 that do not belong to the language model."""

_V2 = HuggingFace(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    keys=(
        *latent_keys(
            "deepseek",
            *huggingface.sizes(mlp=11008, vocab=102400),
            dense=0,
            shared=2,
            width=1407,
            scale=1.0,
        ),
        Key("n_routed_experts", "deepseek.num_experts", 64, also="num_experts"),
        Key("num_experts_per_tok", "deepseek.top_k"),
        _GroupsOfV2(),
        Only("deepseek.group_scores", "max"),
        Fixed("scoring_func", ("softmax",), "softmax"),
        Only("deepseek.score_func", "softmax"),
        Fixed("norm_topk_prob", (False,), False),
        Only("deepseek.norm_topk_prob", False),
        Only("deepseek.expert_bias", False),
        Fixed("mlp_bias", (False,), False),
    ),
    duplicate_keys=(
        Twice("num_experts", "n_routed_experts"),
        Twice("qk_rope_head_dim", "head_dim", is_read=False, default=64),
    ),
    tensors=TENSORS,
)

_V3 = HuggingFace(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    keys=(
        *latent_keys(
            "deepseek",
            *huggingface.sizes(layers=61, width=7168, heads=128, mlp=18432, vocab=129280),
            dense=3,
            shared=1,
            width=2048,
            scale=2.5,
        ),
        *router_keys("deepseek", 256, 8, 4),
        Fixed("rope_interleave", (True,), True),
        MtpLayers(),
    ),
    duplicate_keys=DUPLICATE_KEYS,
    tensors=TENSORS,
    mtp_tensors=MTP_TENSORS,
    copies=MTP_COPIES,
    containers=tuple(
        Whole(name, "text_config", "kimi_k25", other_tensors=_KIMI_VISION)
        for name in ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration")
    ),
)

LATENT_BOUNDS = (
    *moe.BOUNDS,
    Bound("kv_lora_rank", 512, 1, axis="latent"),
    Bound("q_lora_rank", 0, 0, why="if 0, queries are projected from the input", axis="latent"),
    Bound("qk_rope_head_dim", 64, 2, axis="head_dim"),
    Bound("v_head_dim", 128, 1, axis="head_dim"),
)
"""Allowed ranges of the keys in `LatentConfig`."""

BOUNDS = (
    *LATENT_BOUNDS,
    Bound("rope_factor", 1.0, 1, 1e6, "1 disables the scaling"),
    Bound("original_max_position_embeddings", 4096, 1),
    Bound("rope_beta_fast", 0.0, 0, LARGEST, "0 uses 32"),
    Bound("mscale", 1.0, 0, 1e6, "0 uses 1"),
    Bound("mscale_all_dim", 0.0, 0, 1e6, "0 disables score scaling"),
)
"""Allowed ranges of the keys in `DeepseekConfig`."""

FAMILY = Family(
    "deepseek",
    DeepseekConfig,
    describe,
    bounds=BOUNDS,
    rules=rules,
    metric_parts=(Experts,),
    huggingface=(_V2, _V3),
)
