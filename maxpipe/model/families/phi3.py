"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama, of whose heads a part may turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.config.bounds import Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.errors import Finding
from maxpipe.model.families import formats, generic
from maxpipe.model.huggingface import Fixed, HuggingFace, Kept, Only, Rotary
from maxpipe.model.parts.attention import Rope
from maxpipe.model.parts.norm import RMSNorm
from maxpipe.model.spec import Family, Model, own_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Phi3Config:
    """Keys of Phi-3 and Phi-4 models only."""

    window: int = 0
    """Tokens that a query sees, itself included. 0: all."""
    rope_size: int = 0
    """Entries of a head that turn, the first ones. Even. 0: all."""
    rope_short: list[float] = field(default_factory=list, hash=False)  # a list has no hash
    """Factor of the wavelength of each pair (LongRoPE, arXiv:2402.13753) in sequences of at most
    `model.phi3.rope_original_tokens`. Empty: 1."""
    rope_long: list[float] = field(default_factory=list, hash=False)
    """The same in longer sequences. When text is generated: in more room than that."""
    rope_scaling: float = 1.0
    """Longest context of such a model as a multiple of its original one: what turns is made longer
    by `sqrt(1 + log(rope_scaling) / log(rope_original_tokens))`."""
    rope_original_tokens: int = 4096
    """Length of the original context. Read when `model.phi3.rope_scaling` is not 1, or there are
    factors."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    own = own_keys(config, Phi3Config)
    gained = math.log(own.rope_scaling) / math.log(own.rope_original_tokens)
    rope = Rope(
        config.rope_theta,
        original_tokens=own.rope_original_tokens,
        turned=own.rope_size,
        stretch=tuple(own.rope_short),
        stretch_beyond=tuple(own.rope_long),
        length=math.sqrt(1.0 + gained),
    )
    attention = generic.attention(config, rope, window="window" * bool(own.window))
    values = {"window": generic.same_everywhere(config, own.window)} if own.window else {}
    return generic.alike(
        config, attention, RMSNorm(config.d_model, config.norm_epsilon), values=values
    )


def _rules(config: ModelConfig) -> Iterator[Finding]:
    own = own_keys(config, Phi3Config)
    size = own.rope_size or config.head_size
    if own.rope_size > config.head_size or own.rope_size % 2:
        yield Finding(
            "model.phi3.rope_size",
            f"must be even and at most model.head_size ({config.head_size}): pairs of a head's "
            "entries turn.",
            "Set model.phi3.rope_size=0 to turn all.",
        )
        return
    if bool(own.rope_short) != bool(own.rope_long):
        there, missing = ("short", "long") if own.rope_short else ("long", "short")
        yield Finding(
            f"model.phi3.rope_{there}",
            f"is there without model.phi3.rope_{missing}.",
            f"Set both, or model.phi3.rope_{there}=[].",
        )
    for name, factors in (("rope_short", own.rope_short), ("rope_long", own.rope_long)):
        if factors and (len(factors) != size // 2 or min(factors) <= 0):
            yield Finding(
                f"model.phi3.{name}",
                f"must be {size // 2} positive factors, one for each pair of the {size} entries of "
                f"a head that turn, and has {len(factors)}.",
                f"Give {size // 2}, or set model.phi3.rope_short=[] and model.phi3.rope_long=[].",
            )


_ALL_TURN = Fixed("partial_rotary_factor", (1.0, 1), 1.0)

_HUGGINGFACE = HuggingFace(
    "Phi3ForCausalLM",
    "phi3",
    keys=(
        *formats.sizes(width=3072, mlp=8192, vocab=32064, epsilon=1e-5),
        formats.OrNone("sliding_window", "phi3.window", 0),
        Rotary("rope_theta", 10000.0, {"default": (_ALL_TURN,)}, unscaled={}),
        Only("phi3.rope_size", 0),
        Only("phi3.rope_short", []),
        Only("phi3.rope_long", []),
        Only("phi3.rope_scaling", 1.0),
        _ALL_TURN,
        Kept("original_max_position_embeddings"),
        Kept("embd_pdrop"),
        Kept("resid_pdrop"),
        Fixed("attention_bias", (False,), False),
        Fixed("hidden_act", ("silu",), "silu"),
    ),
    tensors=(*formats.ENDS, *formats.NORMED, *formats.FUSED),
)


FAMILY = Family(
    "phi3",
    Phi3Config,
    describe,
    bounds=(
        Bound("window", 0, 0, 2**31 - 1, "devices count tokens in int32, 0 sees all"),
        Bound("rope_size", 0, 0, why="0 turns all"),
        Bound("rope_scaling", 1.0, 1, 1e6, "1 is the original context"),
        Bound("rope_original_tokens", 4096, 2),
    ),
    rules=_rules,
    huggingface=(_HUGGINGFACE,),
)
