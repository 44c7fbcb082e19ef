"""GLM-5 and GLM-5.1 (arXiv:2602.15763): sparse latent attention and experts with biased routing."""

from __future__ import annotations

from dataclasses import dataclass

from maxpipe.models import deepseek, deepseek_v32, huggingface
from maxpipe.models.config import ModelConfig
from maxpipe.models.deepseek_v32 import DeepseekV32Config, SameInAllLayers
from maxpipe.models.family import Family
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """Keys that only GLM-5 and GLM-5.1 models use. `model.head_dim` is the query/key head dim,
    including the RoPE dims.
    """


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `dense` and `experts`, or only `experts`."""
    return deepseek_v32.sparse_model(config, interleaved=True)


_HUGGINGFACE = HuggingFace(
    "GlmMoeDsaForCausalLM",
    "glm_moe_dsa",
    keys=(
        *deepseek_v32.sparse_keys(
            "glm_moe_dsa",
            *huggingface.sizes(
                layers=78, width=6144, heads=64, mlp=12288, vocab=154880, epsilon=1e-5
            ),
            query_rank=2048,
            index_heads=32,
            groups=1,
            groups_per_token=1,
            unrotated=192,
            value_size=256,
        ),
        Fixed("indexer_rope_interleave", (True,), True),
        SameInAllLayers("indexer_types", "full"),
        Fixed("index_topk_freq", (1,), 1),
        Fixed("index_topk_pattern", (None,)),
        Kept("index_skip_topk_offset"),
    ),
    duplicate_keys=deepseek.DUPLICATE_KEYS,
    tensors=deepseek_v32.TENSORS,
    mtp_tensors=deepseek.MTP_TENSORS,
    copies=deepseek.MTP_COPIES,
)

FAMILY = Family(
    "glm_moe_dsa",
    GlmMoeDsaConfig,
    describe,
    bounds=deepseek_v32.BOUNDS,
    rules=deepseek_v32.rules,
    trained=deepseek_v32.trained,
    metric_parts=(Experts, LatentAttention),
    huggingface=(_HUGGINGFACE,),
)
