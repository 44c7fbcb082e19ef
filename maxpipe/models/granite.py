"""Granite 3: Llama with multipliers for embeddings, attention scores, branches and logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Key, Ours, Row, Theirs
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class MultiplierConfig:
    """Keys of the multipliers, which all Granite models use."""

    embedding_multiplier: float = field(default=1.0, metadata=renamed_from("embed_scale"))
    """Scalar that multiplies the embeddings."""
    attention_multiplier: float = field(default=0.0, metadata=renamed_from("score_scale"))
    """Scalar that multiplies the attention scores. If 0, `model.head_dim ** -0.5` is used."""
    residual_multiplier: float = field(default=1.0, metadata=renamed_from("branch_scale"))
    """Scalar that multiplies the attention and MLP outputs before they are added to the residual
    stream."""
    logit_divisor: float = 1.0
    """Scalar by which the logits are divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraniteConfig(MultiplierConfig, RopeConfig):
    """Keys that only Granite models use."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, GraniteConfig)
    rope = rope_config.rope(config, own)
    attention = family.attention(config, rope, scale=own.attention_multiplier or None)
    return family.alike(
        config,
        attention,
        RMSNorm(config.d_model, config.norm_epsilon),
        scale=own.residual_multiplier,
        embed_scale=own.embedding_multiplier,
        logit_scale=1.0 / own.logit_divisor,
    )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    return rope_config.rules(config, own_keys(config, GraniteConfig))


@dataclass(frozen=True)
class _Scores:
    """Key-table row for `attention_multiplier`, which `config.json` always contains."""

    ours: str
    """maxpipe key of the multiplier."""
    names = ("attention_multiplier",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the attention multiplier from `config.json`."""
        del ours
        multiplier = theirs.get("attention_multiplier")
        return {self.ours: 1.0 if multiplier is None else multiplier}

    def write(self, ours: Ours) -> Theirs:
        """Return the attention multiplier, even if the config derives it from the head size."""
        return {"attention_multiplier": ours[self.ours] or ours["head_dim"] ** -0.5}


def multiplier_rows(section: str) -> tuple[Row, ...]:
    """Return the key-table rows for the multipliers; `section` is the family's config section."""
    return (
        Key("embedding_multiplier", f"{section}.embedding_multiplier", 1.0),
        _Scores(f"{section}.attention_multiplier"),
        Key("residual_multiplier", f"{section}.residual_multiplier", 1.0),
        Key("logits_scaling", f"{section}.logit_divisor", 1.0),
    )


_HUGGINGFACE = HuggingFace(
    "GraniteForCausalLM",
    "granite",
    keys=(
        *huggingface.sizes(mlp=11008),
        *multiplier_rows("granite"),
        rope_config.row("granite", 2048),
        Fixed("hidden_act", ("silu",), "silu"),
        Fixed("attention_bias", (False,), False),
        Fixed("mlp_bias", (False,), False),
    ),
    tensors=huggingface.LLAMA,
)

MULTIPLIER_BOUNDS = (
    Bound(
        "embedding_multiplier", 12.0, 0, LARGEST, "embeddings scaled by 0 have no gradient", False
    ),
    Bound("attention_multiplier", 0.0, 0, LARGEST, "0 uses model.head_dim ** -0.5"),
    Bound("residual_multiplier", 0.22, 0, LARGEST, "branches scaled by 0 have no gradient", False),
    Bound("logit_divisor", 8.0, 0, LARGEST, "logits are divided by this number", False),
)
"""Allowed ranges of the keys in `MultiplierConfig`."""

FAMILY = Family(
    "granite",
    GraniteConfig,
    describe,
    bounds=(*MULTIPLIER_BOUNDS, *rope_config.BOUNDS),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
