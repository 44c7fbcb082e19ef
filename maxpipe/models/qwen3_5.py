"""Qwen3.5: the gated delta rule in most layers, full attention in every fourth layer, and MLPs.

The models can have a vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from maxpipe.errors import RuleViolation
from maxpipe.models import family, huggingface, qwen3_next, qwen_vision
from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Ours,
    Row,
    Tensor,
    Theirs,
    UnsupportedError,
    Whole,
)
from maxpipe.models.qwen3_next import HybridConfig
from maxpipe.models.qwen_vision import QwenVisionConfig
from maxpipe.models.spec import Model, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35Config(HybridConfig, QwenVisionConfig):
    """Keys that only dense Qwen3.5 models use. `model.num_heads`, `num_kv_heads` and `head_dim`
    apply to the layers with attention.
    """


def describe(config: ModelConfig) -> Model:
    """Return a model with the layer types `delta` and `full`, or only one of the two."""
    return with_images(config, "mlp", family.mlp(config))


def with_images(config: ModelConfig, name: str, part: Part) -> Model:
    """Return a model whose layers combine the delta rule or full attention with `part`, and that
    has a vision tower if the config has one. `name` is the name of the branch with `part`.
    """
    sections = own_keys(config, QwenVisionConfig).mrope_section
    tower = qwen_vision.vision_tower(config)
    return qwen3_next.hybrid(config, name, part, fused=False, sections=sections, vision=tower)


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for dense models."""
    yield from qwen3_next.rules(config)
    yield from qwen_vision.rules(config)


def keys(section: str) -> tuple[Row, ...]:
    """Return the key-table rows that the dense models and the models with experts share."""
    mrope = Key("mrope_section", f"{section}.mrope_section", lambda _: [11, 11, 10])
    return (
        *qwen3_next.keys(section, ignored=("mrope_interleaved",), rotary=(mrope,)),
        Fixed("attn_output_gate", (True,), True),
        Fixed("output_gate_type", ("swish", None)),
        _MtpLayer(f"{section}.full_attention_interval"),
        Fixed("mtp_use_dedicated_embeddings", (False,), False),
        Kept("mamba_ssm_dtype"),
    )


@dataclass(frozen=True)
class _MtpLayer:
    """Key-table row for the number of multi-token prediction layers, which have full attention."""

    interval: str
    """maxpipe key for the interval between layers with full attention."""
    names = ("mtp_num_hidden_layers",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of multi-token prediction heads and their architecture."""
        count = theirs.get(self.names[0])
        count = 0 if count is None else count
        if count != 0:
            self._check(self.names[0], count, ours)
        return {"mtp_heads": count, "mtp_kind": "layer" if count else "projection"}

    def write(self, ours: Ours) -> Theirs:
        """Return the number of multi-token prediction layers; 0 for projection heads."""
        count = ours["mtp_heads"] if ours["mtp_kind"] == "layer" else 0
        if count:
            self._check("model.mtp_heads", count, ours)
        return {self.names[0]: count}

    def _check(self, key: str, count: int, ours: Ours) -> None:
        if count != 1:
            raise UnsupportedError(key, count, "must be 0 or 1.")
        if ours["num_layers"] % ours[self.interval]:
            rule = "must be 0 unless the last layer has full attention."
            raise UnsupportedError(key, count, rule)


MTP_TENSORS = (
    Tensor("embedding_norm.scale", "mtp.pre_fc_norm_embedding.weight", "d -> d"),
    Tensor("hidden_norm.scale", "mtp.pre_fc_norm_hidden.weight", "d -> d"),
    Tensor("projection", "mtp.fc.weight", "e d -> d e"),
    Tensor("norm.scale", "mtp.norm.weight", "d -> d"),
)
"""Tensor-table rows for the multi-token prediction layer, which transformers ignores."""


def mtp_layer(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the rows of the transformer layer in a multi-token prediction layer."""
    prefix = "model.layers."
    return tuple(
        replace(row, theirs=row.theirs.replace(prefix, "mtp.layers."))
        for row in tensors
        if row.theirs.startswith(prefix)
    )


def whole(architecture: str, model_type: str) -> Whole:
    """Return the multimodal model, which adds a vision tower. Its `model_type` is also the name of
    the family.
    """
    table = qwen_vision.vision_table(model_type, f"{model_type}_vision")
    others = ("model.visual.*", "visual.*")
    return Whole(architecture, "text_config", model_type, others, vision=table)


_TENSORS = qwen3_next.tensors(qwen3_next.SEPARATE, *huggingface.MLP)

_HUGGINGFACE = HuggingFace(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    keys=(
        *huggingface.sizes(width=4096, heads=16, kv_heads=4, head_dim=256, mlp=12288, vocab=248320),
        *keys("qwen3_5"),
    ),
    tensors=_TENSORS,
    mtp_tensors=MTP_TENSORS,
    mtp_layer_tensors=mtp_layer(_TENSORS),
    containers=(whole("Qwen3_5ForConditionalGeneration", "qwen3_5"),),
)

FAMILY = Family(
    "qwen3_5",
    Qwen35Config,
    describe,
    bounds=(*qwen3_next.BOUNDS, *qwen_vision.bounds()),
    rules=rules,
    huggingface=(_HUGGINGFACE,),
)
