"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama, of whose heads a part may turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from maxpipe.config.bounds import Bound
from maxpipe.config.schema import ModelConfig
from maxpipe.errors import Finding
from maxpipe.model.families import generic
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
    rope_stretch: list[float] = field(default_factory=list, hash=False)  # a list has no hash
    """Factor of the wavelength of each pair (LongRoPE, arXiv:2402.13753): the short or the long
    factors of a released model, as contexts are. Empty: 1."""
    rope_scaling: float = 1.0
    """Longest context of such a model as a multiple of its original one: what turns is made longer
    by `sqrt(1 + log(rope_scaling) / log(rope_original_tokens))`."""
    rope_original_tokens: int = 4096
    """Length of the original context. Read when `model.phi3.rope_scaling` is not 1."""


def describe(config: ModelConfig) -> Model:
    """One kind of layer."""
    own = own_keys(config, Phi3Config)
    gained = math.log(own.rope_scaling) / math.log(own.rope_original_tokens)
    rope = Rope(
        config.rope_theta,
        turned=own.rope_size,
        stretch=tuple(own.rope_stretch),
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
    elif own.rope_stretch and len(own.rope_stretch) != size // 2:
        yield Finding(
            "model.phi3.rope_stretch",
            f"has {len(own.rope_stretch)} factors, and {size} entries of a head turn: there is one "
            "for each pair.",
            f"Give {size // 2} factors, or model.phi3.rope_stretch=[].",
        )
    elif any(not 0 < each < math.inf for each in own.rope_stretch):
        yield Finding(
            "model.phi3.rope_stretch",
            "has a factor that is not a positive number.",
            "Give positive factors, or model.phi3.rope_stretch=[].",
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
)
