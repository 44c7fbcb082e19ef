"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with optional partial rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface, rope_config
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Ours,
    Rotary,
    Theirs,
    UnsupportedError,
)
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Phi3Config:
    """Keys that only Phi-3 and Phi-4 models use."""

    sliding_window: int = field(default=0, metadata=renamed_from("window"))
    """Attention window in tokens, including the query token. If 0, all layers attend to all
    tokens."""
    rope_size: int = 0
    """Number of leading dims of each head that are rotated. Must be even. If 0, all dims are
    rotated."""
    rope_short_factor: list[float] = field(
        default_factory=list, hash=False, metadata=renamed_from("rope_short")
    )  # lists are not hashable
    """Scaling factors for the RoPE wavelengths, used for short sequences (LongRoPE,
    arXiv:2402.13753); one per rotated pair of dims. The factors apply to sequences of at most
    `model.phi3.original_max_position_embeddings` tokens. An empty list means that all factors are
    1."""
    rope_long_factor: list[float] = field(
        default_factory=list, hash=False, metadata=renamed_from("rope_long")
    )
    """Scaling factors for the RoPE wavelengths, used for long sequences; one per rotated pair of
    dims. These factors apply to sequences longer than
    `model.phi3.original_max_position_embeddings`, and to generation with a larger cache."""
    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Ratio of the extended context length to the original context length. The rotated dims are
    multiplied by `sqrt(1 + log(rope_factor) / log(original_max_position_embeddings))`."""
    original_max_position_embeddings: int = field(
        default=4096, metadata=renamed_from("rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `model.phi3.rope_factor` is above 1 or
    `rope_short_factor` or `rope_long_factor` is set."""


def describe(config: ModelConfig) -> Model:
    """Return a model with one layer type."""
    own = own_keys(config, Phi3Config)
    rope = rope_config.longrope(
        config.rope_theta,
        own.rope_factor,
        own.original_max_position_embeddings,
        own.rope_short_factor,
        own.rope_long_factor,
        turned=own.rope_size,
    )
    attention = family.attention(config, rope, window="window" * bool(own.sliding_window))
    values = (
        {"window": family.same_everywhere(config, own.sliding_window)} if own.sliding_window else {}
    )
    return family.alike(
        config, attention, RMSNorm(config.d_model, config.norm_epsilon), values=values
    )


def _rules(config: ModelConfig) -> Iterator[RuleViolation]:
    own = own_keys(config, Phi3Config)
    size = own.rope_size or config.head_dim
    if own.rope_size > config.head_dim or own.rope_size % 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.phi3.rope_size",
            f"must be even and at most model.head_dim ({config.head_dim}), because dims are "
            "rotated in pairs.",
            "Set model.phi3.rope_size=0 to rotate all dims.",
        )
        return
    yield from rope_config.factor_rules(
        "model.phi3", own.rope_short_factor, own.rope_long_factor, size
    )


@dataclass(frozen=True)
class _Turned:
    """Key-table row for `partial_rotary_factor`, the fraction of rotated dims per head."""

    inside: bool = False
    """Whether the key is one of the rotary parameters. If true, the key is read but not written."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("partial_rotary_factor",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of rotated dims."""
        share = theirs.get("partial_rotary_factor")
        if share is None:
            return {} if self.inside else {"phi3.rope_size": 0}
        return {"phi3.rope_size": 0 if share == 1 else int(ours["head_dim"] * share)}

    def write(self, ours: Ours) -> Theirs:
        """Return the fraction that yields the same number of rotated dims in transformers."""
        if self.inside:
            return {}
        size, all_of_it = ours["phi3.rope_size"], ours["head_dim"]
        share = (size or all_of_it) / all_of_it
        if int(all_of_it * share) != (size or all_of_it):
            rule = (
                "must be a number of rotated dims that transformers can represent as a fraction of "
                f"{all_of_it}."
            )
            raise UnsupportedError("model.phi3.rope_size", size, rule)
        return {"partial_rotary_factor": share}


def _chosen(ours: Ours) -> str:
    if ours["phi3.rope_short_factor"]:
        return "longrope"
    if ours["phi3.rope_factor"] != 1:
        rule = (
            "must be 1 unless model.phi3.rope_short_factor or model.phi3.rope_long_factor is set."
        )
        raise UnsupportedError("model.phi3.rope_factor", ours["phi3.rope_factor"], rule)
    return "default"


_LONG = (
    Key("short_factor", "phi3.rope_short_factor"),
    Key("long_factor", "phi3.rope_long_factor"),
    Fixed("attention_factor", (None,)),
    _Turned(inside=True),
)
_TYPES = ("longrope", "su", "yarn")
"""Names that different transformers releases use for the same `rope_type`."""

_HUGGINGFACE = HuggingFace(
    "Phi3ForCausalLM",
    "phi3",
    keys=(
        *huggingface.sizes(width=3072, mlp=8192, vocab=32064, epsilon=1e-5),
        huggingface.OrNone("sliding_window", "phi3.sliding_window", 0),
        _Turned(),
        Rotary(
            "rope_theta",
            10000.0,
            {"default": (_Turned(inside=True),), **dict.fromkeys(_TYPES, _LONG)},
            unscaled={
                "phi3.rope_short_factor": [],
                "phi3.rope_long_factor": [],
                "phi3.rope_factor": 1.0,
            },
            select_type=_chosen,
            default_max_positions=4096,
            default_original_positions=4096,
            legacy_type_key="type",
            top_level_keys=dict.fromkeys(
                _TYPES,
                (rope_config.Longest("phi3.rope_factor", "phi3.original_max_position_embeddings"),),
            ),
        ),
        Kept("original_max_position_embeddings"),
        Kept("embd_pdrop"),
        Kept("resid_pdrop"),
        Fixed("attention_bias", (False,), False),
        Fixed("hidden_act", ("silu",), "silu"),
    ),
    tensors=(*huggingface.ENDS, *huggingface.NORMED, *huggingface.FUSED),
)


FAMILY = Family(
    "phi3",
    Phi3Config,
    describe,
    bounds=(
        Bound(
            "sliding_window",
            0,
            0,
            2**31 - 1,
            "token counts are int32 on devices; 0 disables the window",
        ),
        Bound("rope_size", 0, 0, why="0 rotates all entries"),
        Bound("rope_factor", 1.0, 1, 1e6, "1 disables the scaling"),
        Bound("original_max_position_embeddings", 4096, 2),
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
