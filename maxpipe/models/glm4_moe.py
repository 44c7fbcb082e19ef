"""GLM-4.5, GLM-4.6 and GLM-4.7 (arXiv:2508.06471): partial RoPE, experts with biased routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import deepseek, family, huggingface, moe, partial_rope
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import HuggingFace, Kept, Key
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.moe import RoutedConfig
from maxpipe.models.partial_rope import PartialRopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4MoeConfig(RoutedConfig, PartialRopeConfig):
    """Keys that only GLM-4.5, GLM-4.6 and GLM-4.7 models use."""

    attention_bias: bool = False
    """Add biases to the query, key and value projections."""
    use_qk_norm: bool = False
    """Normalize each query and key head before RoPE."""


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only `experts`."""
    own = own_keys(config, Glm4MoeConfig)
    attention = family.attention(
        config,
        partial_rope.rope(config),
        head_norm=RMSNorm(config.head_dim, config.norm_epsilon) if own.use_qk_norm else None,
        biased=("query", "key", "value") if own.attention_bias else (),
    )
    return moe.layered(config, attention)


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from moe.rules(config)
    yield from partial_rope.rules(config)


_HUGGINGFACE = HuggingFace(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    keys=(
        *huggingface.sizes(
            layers=46, width=4096, heads=96, kv_heads=8, mlp=10944, vocab=151552, epsilon=1e-5
        ),
        Key("attention_bias", "glm4_moe.attention_bias", False),
        Key("use_qk_norm", "glm4_moe.use_qk_norm", False),
        *partial_rope.table_rows("glm4_moe", 0.5),
        *deepseek.layer_keys("glm4_moe", dense=1, shared=1, width=1408, scale=1.0),
        *deepseek.router_keys("glm4_moe", experts=128, groups=1, groups_per_token=1),
        deepseek.MtpLayers(),
        Kept("output_router_logits"),
    ),
    duplicate_keys=deepseek.DUPLICATE_KEYS,
    tensors=(
        *deepseek.LAYER_TENSORS,
        *huggingface.ATTENTION,
        *huggingface.BIASES,
        *huggingface.HEAD_NORMS,
    ),
    mtp_tensors=deepseek.MTP_TENSORS,
    copies=deepseek.MTP_COPIES,
)

FAMILY = Family(
    "glm4_moe",
    Glm4MoeConfig,
    describe,
    bounds=(*moe.BOUNDS, *partial_rope.BOUNDS),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
