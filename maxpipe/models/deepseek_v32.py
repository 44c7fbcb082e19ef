"""DeepSeek-V3.2 (arXiv:2512.02556): latent attention to the keys that an indexer selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import deepseek, family, huggingface, moe
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.deepseek import DeepseekConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Key,
    Ours,
    Row,
    Tensor,
    Theirs,
    UnsupportedError,
)
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.indexer import INDEX_TOPK, Indexer, IndexerStage
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV32Config(DeepseekConfig):
    """Keys that only DeepSeek-V3.2 models use. `model.head_dim` is the query/key head dim,
    including the RoPE dims.
    """

    q_lora_rank: int = 1536
    """Dimension of each token's query latent. Attention queries and index queries are projected
    from this latent."""
    index_topk: int = 2048
    """Maximum number of keys that a query token attends to: the keys with the largest index scores.
    If scores are equal, earlier keys are preferred."""
    num_index_heads: int = 64
    """Number of index heads. The index score of a key is the weighted sum over these heads of the
    rectified products of index queries and the index key."""
    index_head_dim: int = 128
    """Dimension of an index query and of an index key. Must be at least `qk_rope_head_dim`, because
    the first dims are RoPE dims."""
    indexer_stage: IndexerStage = "sparse"
    """Training stage of the indexer. `dense`: attention uses all keys, and only the indexer is
    trained, so that its softmax over all keys approaches the mean attention distribution of all
    heads. `sparse`: attention uses the selected keys, all parameters are trained, and both
    distributions cover the selected keys. Evaluation and generation also use this setting."""
    indexer_loss_weight: float = 1.0
    """Coefficient of the indexer's loss, a KL divergence per target token and layer. The loss has
    gradients for the indexer only, and other losses have no gradients for the indexer. 0 omits the
    loss, so the indexer is not trained."""


INDEXER = ("*.attention.index_*",)
"""Name patterns of the indexer's parameters."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only `experts`."""
    return sparse_model(config, interleaved=False)


def sparse_model(config: ModelConfig, *, interleaved: bool) -> Model:
    """Return a model whose attention has an indexer. `interleaved` selects the order of the
    indexer's RoPE dims.
    """
    own = own_keys(config, DeepseekV32Config)
    indexer = Indexer(
        config.d_model,
        own.q_lora_rank,
        own.num_index_heads,
        own.index_head_dim,
        own.qk_rope_head_dim,
        interleaved,
        own.index_topk,
        own.indexer_stage,
        own.indexer_loss_weight,
    )
    model = moe.layered(config, deepseek.latent_attention(config, indexer))
    if not indexer.is_sparse:
        return model
    return replace(model, values={INDEX_TOPK: family.same_everywhere(config, own.index_topk)})


def trained(config: ModelConfig) -> Sequence[str]:
    """Return the name patterns of the only trained parameters, or nothing if all are trained."""
    return INDEXER if own_keys(config, DeepseekV32Config).indexer_stage == "dense" else ()


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys in the family's section."""
    own, section = own_keys(config, DeepseekV32Config), f"model.{config.family}"
    yield from deepseek.rules(config)
    if own.index_head_dim < own.qk_rope_head_dim:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.index_head_dim",
            f"must be at least {section}.qk_rope_head_dim ({own.qk_rope_head_dim}), because the "
            "first dims of index queries and index keys are RoPE dims.",
            f"Set {section}.index_head_dim={own.qk_rope_head_dim}.",
        )
    if own.indexer_stage == "dense" and not own.indexer_loss_weight:
        yield RuleViolation(
            Code.CFG_VALUE,
            f"{section}.indexer_loss_weight",
            f"must be greater than 0 with {section}.indexer_stage=dense, because this loss trains "
            "the indexer and all other parameters are frozen.",
            f"Set {section}.indexer_loss_weight=1, or {section}.indexer_stage=sparse.",
        )


# Hugging Face folders.


@dataclass(frozen=True)
class MlpLayerTypes:
    """Key-table row for the MLP type of each layer: leading dense layers, then experts."""

    section: str

    @property
    def names(self) -> tuple[str, ...]:
        return ("mlp_layer_types",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of dense layers, if the key has a value."""
        types = theirs.get(self.names[0])
        if types is None:
            return {}
        dense = types.count("dense") if isinstance(types, list) else 0
        has_all = isinstance(types, list) and len(types) == ours["num_layers"]
        if not has_all or types != self._types(dense, len(types)):
            rule = "must list dense layers first and sparse layers last."
            raise UnsupportedError(self.names[0], types, rule)
        return {f"{self.section}.num_dense_layers": dense}

    def write(self, ours: Ours) -> Theirs:
        dense = ours[f"{self.section}.num_dense_layers"]
        return {self.names[0]: self._types(dense, ours["num_layers"])}

    @staticmethod
    def _types(dense: int, layers: int) -> list[str]:
        return ["dense"] * dense + ["sparse"] * (layers - dense)


@dataclass(frozen=True)
class SameInAllLayers:
    """Key-table row for a list with one entry per layer, for which only one value is supported."""

    theirs: str
    value: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the entries of the list."""
        entries, layers = theirs.get(self.theirs), ours["num_layers"]
        if entries is None:
            return {}
        has_all = isinstance(entries, list) and len(entries) == layers
        if not has_all or any(entry != self.value for entry in entries):
            rule = f"must be null or {self.value!r} for each of the {layers} layers."
            raise UnsupportedError(self.theirs, entries, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return an empty dict, because the value is the default."""
        return {}


def sparse_keys(
    section: str,
    *sizes: Row,
    query_rank: int,
    index_heads: int,
    groups: int,
    groups_per_token: int,
    unrotated: int,
    value_size: int,
) -> tuple[Row, ...]:
    """Return the key-table rows of models with an indexer. `sizes` and the keyword arguments are
    the defaults of one transformers class.
    """
    return (
        *deepseek.latent_keys(
            section,
            *sizes,
            dense=3,
            shared=1,
            width=2048,
            scale=2.5,
            unrotated=unrotated,
            value_size=value_size,
            query_rank=Key("q_lora_rank", f"{section}.q_lora_rank", query_rank),
        ),
        *deepseek.router_keys(section, 256, groups, groups_per_token),
        MlpLayerTypes(section),
        Key("index_topk", f"{section}.index_topk", 2048),
        Key("index_n_heads", f"{section}.num_index_heads", index_heads),
        Key("index_head_dim", f"{section}.index_head_dim", 128),
        SameInAllLayers("layer_types", "indexed_attention"),
        Fixed("mlp_bias", (False,), False),
        Fixed("rope_interleave", (True,), True),
        deepseek.MtpLayers(),
    )


_INDEXER = "model.layers.{layer}.self_attn.indexer."

TENSORS = (
    *deepseek.TENSORS,
    Tensor("attention.index_query", f"{_INDEXER}wq_b.weight", "r n h -> (n h) r"),
    Tensor("attention.index_key", f"{_INDEXER}wk.weight", "d h -> h d"),
    Tensor("attention.index_key_norm", f"{_INDEXER}k_norm.weight", "h -> h"),
    Tensor("attention.index_key_norm_bias", f"{_INDEXER}k_norm.bias", "h -> h"),
    Tensor("attention.index_weights", f"{_INDEXER}weights_proj.weight", "d n -> n d"),
)
"""Tensor-table rows of a model without multi-token prediction layers."""

_HUGGINGFACE = HuggingFace(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    keys=(
        *sparse_keys(
            "deepseek_v32",
            *huggingface.sizes(layers=61, width=7168, heads=128, mlp=18432, vocab=129280),
            query_rank=1536,
            index_heads=64,
            groups=8,
            groups_per_token=4,
            unrotated=128,
            value_size=128,
        ),
        Fixed("indexer_rope_interleave", (None, False)),
    ),
    duplicate_keys=deepseek.DUPLICATE_KEYS,
    tensors=TENSORS,
    mtp_tensors=deepseek.MTP_TENSORS,
    copies=deepseek.MTP_COPIES,
)

BOUNDS = (
    *(bound for bound in deepseek.BOUNDS if bound.key != "q_lora_rank"),
    Bound("q_lora_rank", 1536, 1, axis="latent"),
    Bound("index_topk", 2048, 1),
    Bound("num_index_heads", 64, 1, axis="heads"),
    Bound("index_head_dim", 128, 2, axis="head_dim"),
    Bound("indexer_loss_weight", 1.0, 0, LARGEST, "0 omits the loss"),
)
"""Allowed ranges of the keys in `DeepseekV32Config`."""

FAMILY = Family(
    "deepseek_v32",
    DeepseekV32Config,
    describe,
    bounds=BOUNDS,
    rules=rules,
    trained=trained,
    metric_parts=(Experts, LatentAttention),
    huggingface=(_HUGGINGFACE,),
)
