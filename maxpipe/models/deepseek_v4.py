"""DeepSeek-V4: attention to compressed entries, experts selected by token ID, hyper-connections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import family, moe, moe_base
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.deepseek_v4_folder import HUGGINGFACE
from maxpipe.models.family import Family, own_keys
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.compressed_attention import (
    INDEX_TOKENS,
    CompressedAttention,
    Compression,
    EntryIndexer,
)
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.hyper_connections import HyperConnection, StreamHead
from maxpipe.models.layers.indexer import IndexerStage
from maxpipe.models.layers.mlp import MLP, ClampedSilu, RMSNorm
from maxpipe.models.moe import RouterConfig
from maxpipe.models.spec import Branch, LayerType, Model

WINDOW, SPARSE, HEAVY = "W", "S", "H"
_ATTENTION = {WINDOW: "window", SPARSE: "sparse", HEAVY: "heavy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV4Config(RouterConfig):
    """Keys that only DeepSeek-V4 models use. `model.num_kv_heads` is 1."""

    attention_pattern: str = "WWSH"
    """Attention type of each layer, one letter per layer. `W`: the sliding window only. `S`: also
    compressed entries of earlier tokens, which an indexer selects. `H`: also all entries of a
    higher compression. The last two letters repeat for the following layers."""
    sliding_window: int = 128
    """Attention window of all layers in tokens, including the query token."""
    sparse_compress_rate: int = 4
    """Number of tokens per compressed entry in `S` layers. Each entry also contains the same number
    of preceding tokens."""
    heavy_compress_rate: int = 128
    """Number of tokens per compressed entry in `H` layers."""
    q_lora_rank: int = 1024
    """Dimension of each token's query latent. Attention queries and index queries are projected
    from this latent."""
    qk_rope_head_dim: int = 64
    """Number of RoPE dims at the end of each head, of each compressed entry, and of index heads."""
    o_groups: int = 8
    """Number of groups of heads with separate output projections. Must divide `model.num_heads`."""
    o_lora_rank: int = 1024
    """Dimension of the projected output of each group of heads."""
    compress_rope_theta: float = 160000.0
    """RoPE base of `S` and `H` layers. `W` layers use `model.rope_theta`."""
    rope_factor: float = 1.0
    """Ratio of the extended context length to the original context length (YaRN), in `S` and `H`
    layers. Queries and keys are not scaled. 1 disables the scaling."""
    original_max_position_embeddings: int = 65536
    """Original context length in tokens. Ignored unless `rope_factor` is above 1."""
    index_topk: int = 512
    """Maximum number of compressed entries that a query token attends to in `S` layers."""
    num_index_heads: int = 64
    """Number of index heads. The index score of an entry is the weighted sum over these heads of
    the rectified products of index queries and the entry's index key."""
    index_head_dim: int = 128
    """Dimension of an index query and of an index key. Must be at least `qk_rope_head_dim`."""
    indexer_stage: IndexerStage = "sparse"
    """Training stage of the indexer. `dense`: attention uses all entries, and only the indexer is
    trained. `sparse`: attention uses the selected entries, and all parameters are trained.
    Evaluation and generation also use this setting."""
    indexer_loss_weight: float = 1.0
    """Coefficient of the indexer's loss, the KL divergence of its distribution over entries from
    the attention distribution, per target token and layer. The loss has gradients for the indexer
    only, and other losses have no gradients for the indexer. 0 omits the loss."""
    num_hash_layers: int = 3
    """Number of leading layers in which a constant table selects the experts of each token ID. The
    router only weights these experts."""
    swiglu_limit: float = 10.0
    """Clamp limit for the activations of experts and of the shared expert. Gates are clamped from
    above, and the up projections to the range from `-swiglu_limit` to `swiglu_limit`."""
    num_residual_streams: int = 4
    """Number of residual streams that hyper-connections mix."""
    sinkhorn_iterations: int = 20
    """Number of Sinkhorn iterations with which the mixing matrices are normalized."""
    hyper_connection_epsilon: float = 1e-6
    """Epsilon added to the coefficients of hyper-connections and to the sums of the Sinkhorn
    iterations."""


INDEXER = ("*.attention.index_*",)
"""Name patterns of the indexer's parameters."""


def letters(pattern: str, layers: int) -> str:
    """Return the attention type of each layer."""
    repeated = pattern[-2:]
    more = max(0, layers - len(pattern))
    return (pattern + repeated * (-(-more // len(repeated))))[:layers]


def describe(config: ModelConfig) -> Model:
    """Return a model with a layer type for each type of attention and of routing."""
    own = own_keys(config, DeepseekV4Config)
    norm = RMSNorm(config.d_model, config.norm_epsilon, scales_in_float32=True)
    sizes = (config.d_model, own.num_residual_streams, config.norm_epsilon)
    sizes += (own.hyper_connection_epsilon,)
    connection = HyperConnection(*sizes, own.sinkhorn_iterations)
    types: dict[str, LayerType] = {}
    layers = []
    for number, letter in enumerate(letters(own.attention_pattern, config.num_layers)):
        is_hashed = number < own.num_hash_layers
        name = f"{_ATTENTION[letter]}_{'hash' if is_hashed else 'experts'}"
        layers.append(name)
        if name not in types:
            parts = {
                "attention": _attention(config, letter),
                "experts": _experts(config, is_hashed=is_hashed),
            }
            types[name] = LayerType(
                tuple(
                    Branch(of, part, norm, dropout=config.dropout, connection=connection)
                    for of, part in parts.items()
                )
            )
    ends = family.ends(
        config, norm, num_streams=own.num_residual_streams, stream_head=StreamHead(*sizes)
    )
    tokens = float(own.index_topk * own.sparse_compress_rate)
    values = {INDEX_TOKENS: family.same_everywhere(config, tokens)}
    return Model(types, tuple(layers), ends, values)


def _attention(config: ModelConfig, letter: str) -> CompressedAttention:
    own = own_keys(config, DeepseekV4Config)
    rope = Rope(config.rope_theta, rotary_dims=own.qk_rope_head_dim)
    compression = None
    if letter != WINDOW:
        rope = replace(
            rope,
            theta=own.compress_rope_theta,
            factor=own.rope_factor,
            scaling="yarn",
            original_tokens=own.original_max_position_embeddings,
        )
        compression = Compression(own.heavy_compress_rate, overlaps=False)
    if letter == SPARSE:
        indexer = EntryIndexer(
            own.num_index_heads,
            own.index_head_dim,
            own.index_topk,
            own.indexer_stage,
            own.indexer_loss_weight,
        )
        compression = Compression(own.sparse_compress_rate, overlaps=True, indexer=indexer)
    return CompressedAttention(
        config.d_model,
        config.num_heads,
        config.head_dim,
        own.q_lora_rank,
        own.o_groups,
        own.o_lora_rank,
        own.sliding_window,
        family.residual_gain(config),
        config.attention,
        rope,
        config.norm_epsilon,
        compression,
    )


def _experts(config: ModelConfig, *, is_hashed: bool) -> Experts:
    own = own_keys(config, DeepseekV4Config)
    gate = ClampedSilu(1.0, own.swiglu_limit, offset=0.0)
    width = moe_base.expert_width(config, own)
    shared = MLP(config.d_model, width, family.residual_gain(config), function=gate)
    experts = moe.routed_experts(config, own, shared=shared, function=gate)
    if not is_hashed:
        return experts
    return replace(experts, hash_vocabulary=config.vocab_size, expert_bias_update_rate=None)


def trained(config: ModelConfig) -> Sequence[str]:
    """Return the name patterns of the only trained parameters, or nothing if all are trained."""
    own = own_keys(config, DeepseekV4Config)
    return INDEXER if own.indexer_stage == "dense" else ()


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own, section = own_keys(config, DeepseekV4Config), f"model.{config.family}"
    yield from _pattern_rules(config, own)
    yield from moe.router_rules(config, own)
    if config.num_kv_heads != 1:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.num_kv_heads",
            f"must be 1 with model.family={config.family}, because all heads share one key.",
            "Set model.num_kv_heads=1.",
        )
    if config.num_heads % own.o_groups:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.o_groups",
            f"must divide model.num_heads ({config.num_heads}), because all groups have the same "
            "number of heads.",
            f"Set {section}.o_groups=1.",
        )
    smallest = min(config.head_dim, own.index_head_dim)
    if own.qk_rope_head_dim % 2 or own.qk_rope_head_dim > smallest:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.qk_rope_head_dim",
            f"must be even and at most {smallest}, the smaller of model.head_dim and "
            f"{section}.index_head_dim, because the last dims of a head are rotated, in pairs.",
            f"Set {section}.qk_rope_head_dim={max(2, smallest // 2 * 2)}, or use larger heads.",
        )


def _pattern_rules(config: ModelConfig, own: DeepseekV4Config) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the types of the layers."""
    section = f"model.{config.family}"
    key, pattern = f"{section}.attention_pattern", own.attention_pattern
    if not pattern or not {*pattern} <= {*_ATTENTION}:
        kept = "".join(letter for letter in pattern if letter in _ATTENTION)
        yield RuleViolation(
            Code.CFG_VALUE,
            key,
            "must consist of the letters W (window), S (sparse) and H (heavily compressed).",
            f"Set {key}='{kept or 'WWSH'}'.",
        )
        return
    if len(pattern) > config.num_layers:
        yield RuleViolation(
            Code.MODEL_SIZES,
            key,
            f"must have at most model.num_layers ({config.num_layers}) letters, but has "
            f"{len(pattern)}.",
            f"Set model.num_layers={len(pattern)}.",
        )
    if own.num_hash_layers > config.num_layers:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.num_hash_layers",
            f"must be at most model.num_layers ({config.num_layers}).",
            f"Set {section}.num_hash_layers={config.num_layers}.",
        )
    if own.indexer_stage != "dense":
        return
    if SPARSE not in letters(pattern, config.num_layers):
        yield RuleViolation(
            Code.CFG_VALUE,
            f"{section}.indexer_stage",
            "must be sparse if no layer has an indexer, because the dense stage trains only "
            "indexers.",
            f"Set {section}.indexer_stage=sparse, or add S to {key}.",
        )
    elif not own.indexer_loss_weight:
        yield RuleViolation(
            Code.CFG_VALUE,
            f"{section}.indexer_loss_weight",
            f"must be greater than 0 with {section}.indexer_stage=dense, because this loss trains "
            "the indexer and all other parameters are frozen.",
            f"Set {section}.indexer_loss_weight=1, or {section}.indexer_stage=sparse.",
        )


BOUNDS = (
    *moe.ROUTER_BOUNDS,
    Bound("sliding_window", 128, 1, 2**31 - 1, "token counts are int32 on devices"),
    Bound("sparse_compress_rate", 4, 1, 2**16),
    Bound("heavy_compress_rate", 128, 1, 2**16),
    Bound("q_lora_rank", 1024, 1, axis="latent"),
    Bound("qk_rope_head_dim", 64, 2, axis="head_dim"),
    Bound("o_groups", 8, 1, axis="heads"),
    Bound("o_lora_rank", 1024, 1, axis="latent"),
    Bound("compress_rope_theta", 160000.0, 0, LARGEST, "0 has no rotation angles", False),
    Bound("rope_factor", 1.0, 1, 1e6, "1 disables the scaling"),
    Bound("original_max_position_embeddings", 65536, 1),
    Bound("index_topk", 512, 1),
    Bound("num_index_heads", 64, 1, axis="heads"),
    Bound("index_head_dim", 128, 2, axis="head_dim"),
    Bound("indexer_loss_weight", 1.0, 0, LARGEST, "0 omits the loss"),
    Bound("num_hash_layers", 3, 0),
    Bound("swiglu_limit", 10.0, 0, LARGEST, "gates clamped to 0 have no gradient", False),
    Bound("num_residual_streams", 4, 2, 64),
    Bound("sinkhorn_iterations", 20, 1, 1000),
    Bound("hyper_connection_epsilon", 1e-6, 0, 1, "0 omits the epsilon"),
)
"""Allowed ranges of the keys in `DeepseekV4Config`."""

FAMILY = Family(
    "deepseek_v4",
    DeepseekV4Config,
    describe,
    bounds=BOUNDS,
    rules=_rules,
    trained=trained,
    metric_parts=(Experts, CompressedAttention),
    huggingface=(HUGGINGFACE,),
)
