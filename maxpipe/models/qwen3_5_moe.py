"""Qwen3.5 with experts: the gated delta rule, and full attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.errors import RuleViolation
from maxpipe.models import huggingface, qwen3_5, qwen3_next, qwen_vision
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family
from maxpipe.models.huggingface import Fixed, HuggingFace, Key
from maxpipe.models.layers.experts import Experts
from maxpipe.models.qwen3_next import HybridMoeConfig
from maxpipe.models.qwen_vision import QwenVisionConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35MoeConfig(HybridMoeConfig, QwenVisionConfig):
    """Keys that only Qwen3.5 models with experts use. `model.num_heads`, `num_kv_heads` and
    `head_dim` apply to the layers with attention. Every layer has experts.
    """


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `delta` and `full`, or only one of the two."""
    return qwen3_5.with_images(config, "experts", qwen3_next.experts(config))


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from qwen3_next.moe_rules(config)
    yield from qwen_vision.rules(config)


_TENSORS = qwen3_next.tensors(qwen3_next.SEPARATE, *qwen3_next.EXPERTS)

_SIZES = huggingface.sizes(
    layers=40, width=2048, heads=16, kv_heads=2, head_dim=256, mlp=512, vocab=248320
)

_HUGGINGFACE = HuggingFace(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    keys=(
        *(row for row in _SIZES if "intermediate_size" not in row.names),
        Key("moe_intermediate_size", "d_mlp", 512),
        *qwen3_5.keys("qwen3_5_moe"),
        *qwen3_next.expert_keys("qwen3_5_moe", 256, 8),
        Fixed("norm_topk_prob", (True,), True),
    ),
    tensors=_TENSORS,
    mtp_tensors=qwen3_5.MTP_TENSORS,
    mtp_layer_tensors=qwen3_5.mtp_layer(_TENSORS),
    containers=(qwen3_5.whole("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),),
)

FAMILY = Family(
    "qwen3_5_moe",
    Qwen35MoeConfig,
    describe,
    bounds=(*qwen3_next.MOE_BOUNDS, *qwen_vision.bounds()),
    rules=_rules,
    metric_parts=(Experts,),
    huggingface=(_HUGGINGFACE,),
)
