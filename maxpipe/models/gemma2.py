"""Gemma 2 (arXiv:2408.00118): alternating sliding windows, soft-capped scores and logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, layer_type_rows, rope_config
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import Fixed, HuggingFace, Kept, Key, Twice
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.rope_config import RopeConfig
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma2Config(RopeConfig):
    """Keys that only Gemma 2 models use. Gemma 2 always ties the output projection to the embedding
    table.
    """

    sliding_window: int = field(default=4096, metadata=renamed_from("window"))
    """Attention window in tokens, including the query token. The window applies to every other
    layer, starting with the first; the remaining layers attend to all tokens."""
    query_pre_attn_scalar: float = field(default=0.0, metadata=renamed_from("query_scale"))
    """Attention scores are divided by the square root of this value. If 0, `model.head_dim` is
    used."""
    attn_logit_softcapping: float = field(default=50.0, metadata=renamed_from("score_cap"))
    """Soft cap on the attention scores: `cap * tanh(scores / cap)`. 0 disables the cap."""
    final_logit_softcapping: float = field(default=30.0, metadata=renamed_from("logit_cap"))
    """Soft cap on the logits: `cap * tanh(logits / cap)`. 0 disables the cap."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type, whose attention window differs between layers."""
    own = own_keys(config, Gemma2Config)
    attention = family.attention(
        config,
        rope_config.rope(config, own),
        scale=(own.query_pre_attn_scalar or config.head_dim) ** -0.5,
        window="window",
        soft_cap=own.attn_logit_softcapping,
    )
    windows = tuple(
        float(own.sliding_window * (1 - layer % 2)) for layer in range(config.num_layers)
    )
    return family.alike(
        config,
        attention,
        RMSNorm(config.d_model, config.norm_epsilon, offset=1.0),
        after=True,
        function="gelu",
        values={"window": windows},
        embed_scale=config.d_model**0.5,
        final_logit_softcapping=own.final_logit_softcapping,
    )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    yield from family.embeddings_are_tied(config)
    yield from rope_config.rules(config, own_keys(config, Gemma2Config))


_HUGGINGFACE = HuggingFace(
    "Gemma2ForCausalLM",
    "gemma2",
    keys=(
        *huggingface.sizes(
            layers=26,
            width=2304,
            heads=8,
            kv_heads=4,
            head_dim=256,
            mlp=9216,
            vocab=256000,
            tied=True,
        ),
        Key("sliding_window", "gemma2.sliding_window", 4096),
        Key(
            "query_pre_attn_scalar",
            "gemma2.query_pre_attn_scalar",
            256,
            "head_dim",
            is_integer=True,
        ),
        huggingface.OrNone("attn_logit_softcapping", "gemma2.attn_logit_softcapping", 50.0),
        huggingface.OrNone("final_logit_softcapping", "gemma2.final_logit_softcapping", 30.0),
        rope_config.row("gemma2", 8192),
        layer_type_rows.LayerTypes((huggingface.WINDOWED, huggingface.FULL)),
        Fixed("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        Kept("hidden_act"),
        Fixed("attention_bias", (False,), False),
        Fixed("use_bidirectional_attention", (None, False)),
    ),
    duplicate_keys=(
        Twice("hidden_activation", "hidden_act", is_read=False, default="gelu_pytorch_tanh"),
    ),
    tensors=(
        *huggingface.ENDS,
        *huggingface.SANDWICH,
        *huggingface.ATTENTION,
        *huggingface.MLP,
    ),
)


FAMILY = Family(
    "gemma2",
    Gemma2Config,
    describe,
    bounds=(
        Bound("sliding_window", 4096, 1, 2**31 - 1, "token counts are int32 on devices"),
        Bound("query_pre_attn_scalar", 256.0, 0, LARGEST, "0 uses model.head_dim"),
        Bound("attn_logit_softcapping", 50.0, 0, LARGEST, "0 disables the cap"),
        Bound("final_logit_softcapping", 30.0, 0, LARGEST, "0 disables the cap"),
        *rope_config.BOUNDS,
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
