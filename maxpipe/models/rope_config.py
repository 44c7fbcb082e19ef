"""RoPE scaling, as in published models, for contexts longer than those used in pre-training.

All families that support these methods share one set of config keys and one row of the Hugging Face
key table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.huggingface import Key, Only, Ours, Rotary, Row, Theirs, UnsupportedError
from maxpipe.models.layers.attention import Rope


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class RopeConfig:
    """Config keys for RoPE scaling to longer contexts."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = "yarn"
    """RoPE scaling method. `linear` multiplies all wavelengths by `rope_factor`. `dynamic` (NTK)
    increases the base for sequences longer than `original_max_position_embeddings`. `llama3` and
    `yarn` scale only wavelengths that are long relative to the original context. `longrope`
    multiplies each wavelength by a separate factor."""
    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Ratio of the extended context length to the original context length. 1 disables the scaling,
    except for `longrope`."""
    original_max_position_embeddings: int = field(
        default=32768, metadata=renamed_from("rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `rope_factor` is above 1 or `rope_type` is
    `longrope`."""
    rope_attention_factor: float = field(default=0.0, metadata=renamed_from("rope_length"))
    """Factor that multiplies the rotated queries and keys, for `yarn` and `longrope`. If 0, the
    value is computed from `rope_factor` using the formula in the paper."""
    rope_short_factor: list[float] = field(
        default_factory=list, hash=False, metadata=renamed_from("rope_short")
    )  # lists are not hashable
    """Scaling factors for the RoPE wavelengths, used for short sequences; one per rotated pair of
    dims. The factors apply to sequences of at most `original_max_position_embeddings` tokens.
    Ignored unless `rope_type` is `longrope`."""
    rope_long_factor: list[float] = field(
        default_factory=list, hash=False, metadata=renamed_from("rope_long")
    )
    """Scaling factors for the RoPE wavelengths, used for long sequences; one per rotated pair of
    dims. The factors apply to sequences longer than `original_max_position_embeddings`, and to
    generation with a larger cache. Ignored unless `rope_type` is `longrope`."""
    rope_beta_fast: float = field(default=0.0, metadata=renamed_from("rope_fast"))
    """Dimensions that complete at least this many rotations within the original context are not
    scaled (`beta_fast`, `high_freq_factor`). If 0, the published value is used: 4 for `llama3`,
    32 for `yarn`."""
    rope_beta_slow: float = field(default=0.0, metadata=renamed_from("rope_slow"))
    """Dimensions that complete at most this many rotations within the original context have their
    wavelength multiplied by the full `rope_factor` (`beta_slow`, `low_freq_factor`). If 0, the
    published value is used, which is 1."""
    rope_truncate: bool = field(default=True, metadata=renamed_from("rope_whole"))
    """Round the boundaries of the `yarn` ramp to integer pair indices (`truncate`)."""


BOUNDS = (
    Bound("rope_factor", 1.0, 1, LARGEST, "multiplies RoPE wavelengths; 1 disables the scaling"),
    Bound("original_max_position_embeddings", 8192, 2),
    Bound("rope_attention_factor", 0.0, 0, LARGEST, "if 0, the value from the paper is used"),
    Bound("rope_beta_fast", 0.0, 0, LARGEST, "if 0, the value from the paper is used"),
    Bound("rope_beta_slow", 0.0, 0, LARGEST, "if 0, the value from the paper is used"),
)
"""Allowed ranges of the keys in `RopeConfig`."""


def rope(config: ModelConfig, own: RopeConfig) -> Rope:
    """Return the rotary positions configured by these keys."""
    factor, tokens = own.rope_factor, own.original_max_position_embeddings
    if own.rope_type == "longrope":
        return longrope(
            config.rope_theta,
            factor,
            tokens,
            own.rope_short_factor,
            own.rope_long_factor,
            own.rope_attention_factor,
        )
    by_paper = 0.1 * math.log(factor) + 1.0 if own.rope_type == "yarn" else 1.0
    return Rope(
        config.rope_theta,
        factor,
        own.rope_type,
        tokens,
        attention_factor=own.rope_attention_factor or by_paper,
        truncate=own.rope_truncate,
        fast=own.rope_beta_fast,
        slow=own.rope_beta_slow,
    )


def longrope(
    theta: float,
    factor: float,
    tokens: int,
    short: Sequence[float],
    long: Sequence[float],
    length: float = 0.0,
    turned: int = 0,
) -> Rope:
    """Return LongRoPE positions with one factor per rotated pair of dims (arXiv:2402.13753).

    `factor` is the ratio of the context length to the original context length.
    """
    by_paper = math.sqrt(1.0 + math.log(factor) / math.log(tokens))
    return Rope(
        theta,
        original_tokens=tokens,
        rotary_dims=turned,
        stretch=tuple(short),
        stretch_beyond=tuple(long),
        attention_factor=length or by_paper,
    )


def rules(config: ModelConfig, own: RopeConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the RoPE keys."""
    section = f"model.{config.family}"
    fast = own.rope_beta_fast or {"llama3": 4.0, "yarn": 32.0}.get(own.rope_type, 32.0)
    slow, is_step = own.rope_beta_slow or 1.0, own.rope_type == "llama3"
    if slow > fast or (slow == fast and not is_step):
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.rope_beta_slow",
            f"must be {'at most' if is_step else 'less than'} {section}.rope_beta_fast ({fast:g}).",
            f"Set {section}.rope_beta_slow=0 and {section}.rope_beta_fast=0 to use the values "
            "from the paper.",
        )
    if own.rope_factor != 1 and not getattr(own, "rotary_positions", True):
        yield RuleViolation(
            Code.CFG_IGNORED,
            f"{section}.rope_factor",
            f"requires {section}.rotary_positions=true.",
            f"Set {section}.rope_factor=1, or {section}.rotary_positions=true.",
        )
    if own.rope_type == "longrope":
        yield from factor_rules(
            section, own.rope_short_factor, own.rope_long_factor, config.head_dim, True
        )
        return
    kind = f"requires {section}.rope_type=longrope, but rope_type is {own.rope_type}."
    for name in ("rope_short_factor", "rope_long_factor"):
        if getattr(own, name):
            yield RuleViolation(
                Code.CFG_IGNORED, f"{section}.{name}", kind, f"Set {section}.{name}=[]."
            )
    if own.rope_attention_factor and own.rope_type != "yarn":
        yield RuleViolation(
            Code.CFG_IGNORED,
            f"{section}.rope_attention_factor",
            f"requires {section}.rope_type=yarn or longrope, but rope_type is {own.rope_type}.",
            f"Set {section}.rope_attention_factor=0.",
        )
    if own.rope_type == "dynamic" and config.head_dim < 4:
        yield RuleViolation(
            Code.MODEL_SIZES,
            "model.head_dim",
            f"must be at least 4 with {section}.rope_type=dynamic, because its formula divides by "
            "head_dim - 2.",
            f"Set model.head_dim=4, or {section}.rope_type=linear.",
        )


def factor_rules(
    section: str, short: Sequence[float], long: Sequence[float], size: int, wanted: bool = False
) -> Iterator[RuleViolation]:
    """Yield a violation for each list of RoPE factors that does not contain one positive factor per
    pair of the `size` rotated dims.

    Empty lists are allowed unless `wanted` is set.
    """
    none = f"{section}.rope_short_factor=[] and {section}.rope_long_factor=[]"
    none = f"{section}.rope_type=yarn, {none}" if wanted else none
    for name, factors in (("rope_short_factor", short), ("rope_long_factor", long)):
        if len(factors) == size // 2 and min(factors) > 0:
            continue
        if wanted or short or long:
            yield RuleViolation(
                Code.MODEL_SIZES,
                f"{section}.{name}",
                f"must contain {size // 2} positive factors, one per pair of the {size} rotated "
                f"dims of a head, but contains {len(factors)}.",
                f"Set {size // 2} factors, or {none}.",
            )


# Key tables.


@dataclass(frozen=True)
class _Original:
    """Key-table row for `original_max_position_embeddings`, which in transformers defaults to
    `max_position_embeddings`.
    """

    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        return ("original_max_position_embeddings",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        for name in ("original_max_position_embeddings", "max_position_embeddings"):
            if theirs.get(name) is not None:
                return {self.ours: theirs[name]}
        raise UnsupportedError(
            "original_max_position_embeddings", None, "is missing and has no default."
        )

    def write(self, ours: Ours) -> Theirs:
        return {"original_max_position_embeddings": ours[self.ours]}


@dataclass(frozen=True)
class _Length:
    """Key-table row for `attention_factor`, or for the two keys that determine it
    (arXiv:2405.04434).
    """

    factor: str
    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        return ("attention_factor", "mscale", "mscale_all_dim")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the attention factor, or 0 if it equals the published value."""
        value, above, below = (theirs.get(name) for name in self.names)
        if value is None and above is not None and below is not None and above * below != 0:
            more = 0.1 * math.log(max(theirs.get("factor") or 1.0, 1.0))
            value = (above * more + 1.0) / (below * more + 1.0)
        return {self.ours: 0.0 if value is None else value}

    def write(self, ours: Ours) -> Theirs:
        """Return the attention factor unless it equals the published value."""
        return {"attention_factor": ours[self.ours]} if ours[self.ours] else {}


@dataclass(frozen=True)
class Longest:
    """Key-table row for the LongRoPE scaling factor, the ratio of the longest context to the
    original context.
    """

    factor: str
    original: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the keys that determine the scaling factor."""
        return ("factor", "original_max_position_embeddings", "max_position_embeddings")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the scaling factor and the original context length."""
        original = _Original(self.original).read(theirs, ours)
        factor = theirs.get("factor")
        if factor is None and theirs.get("max_position_embeddings") is None:
            raise UnsupportedError(
                "max_position_embeddings", None, "is missing and has no default."
            )
        if factor is None:
            factor = theirs["max_position_embeddings"] / original[self.original]
        return {**original, self.factor: max(factor, 1.0)}

    def write(self, ours: Ours) -> Theirs:
        """Return both context lengths; some transformers releases derive the factor from them."""
        original = ours[self.original]
        longest = round(original * ours[self.factor])
        if longest / original != ours[self.factor]:
            rule = f"must yield an integer number of tokens when multiplied by {original}."
            raise UnsupportedError(f"model.{self.factor}", ours[self.factor], rule)
        return {
            "original_max_position_embeddings": original,
            "max_position_embeddings": longest,
        }


@dataclass(frozen=True)
class _AttentionFactor(_Length):
    """Key-table row for the `attention_factor` of LongRoPE, which has no `mscale` keys."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("attention_factor",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the attention factor, or 0 if it equals the published value."""
        value = theirs.get("attention_factor")
        return {self.ours: 0.0 if value is None else value}


@dataclass(frozen=True)
class Turns:
    """Key-table row for a ramp boundary, given as a number of rotations. If maxpipe's value is 0,
    the published number is used.
    """

    theirs: str
    ours: str
    paper: float
    is_required: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of rotations, or 0 if it equals the published value.

        Raises:
            UnsupportedError: the key is required and missing.
        """
        if self.is_required and theirs.get(self.theirs) is None:
            raise UnsupportedError(
                self.theirs,
                None,
                "is required with rope_type = 'llama3'; transformers also requires it.",
                f"Set {self.theirs} to the published value, {self.paper} for Llama 3.1 to 3.3, "
                "next to rope_type in config.json.",
            )
        value = theirs.get(self.theirs)
        return {self.ours: 0.0 if value is None or value == self.paper else value}

    def write(self, ours: Ours) -> Theirs:
        """Return the number of rotations, even if it equals the published value, because the Llama
        class of transformers has no default.
        """
        return {self.theirs: ours[self.ours] or self.paper}


def row(
    family: str,
    longest: int,
    theta: float = 10000.0,
    *,
    layers: str = "",
    types: Sequence[str] = ("linear", "dynamic", "llama3", "yarn", "longrope"),
    more: tuple[Row, ...] = (),
    defaults: Theirs | None = None,
    enabled: str = "",
    always: tuple[Row, ...] = (),
) -> Row:
    """Return the rotary-position row of the table for model families that support every
    `RopeConfig` key.

    Args:
        family: name of the model family.
        longest: default of `max_position_embeddings` in transformers.
        theta: default of `rope_theta` in transformers.
        layers: layer type of the row, if `rope_parameters` has one entry per layer type.
        types: supported scaling types.
        more: rows for additional keys in `rope_parameters`, which all scaling types have. Exports
            then write a scaling type even if the factor is 1.
        defaults: rotary parameters that transformers uses if `config.json` has none.
        enabled: key that enables RoPE, if a RoPE base of null disables RoPE.
        always: rows for additional keys in `rope_parameters`, which exports always write.
    """
    kind, factor, length = (
        f"{family}.rope_{name}" for name in ("type", "factor", "attention_factor")
    )
    original = f"{family}.original_max_position_embeddings"
    short, long = (f"{family}.rope_{name}_factor" for name in ("short", "long"))
    none = (Only(short, []), Only(long, []))
    fast, slow, whole = (f"{family}.rope_{name}" for name in ("beta_fast", "beta_slow", "truncate"))
    paper = (Only(fast, 0.0), Only(slow, 0.0), Only(whole, True))
    plain = (Key("factor", factor), Only(length, 0.0), *none)
    scalings: dict[str, tuple[Row, ...]] = {
        "linear": (*plain, *paper),
        "dynamic": (*plain, *paper),
        "llama3": (
            *plain,
            _Original(original),
            Turns("low_freq_factor", slow, 1.0, True),
            Turns("high_freq_factor", fast, 4.0, True),
            Only(whole, True),
        ),
        "yarn": (
            Key("factor", factor),
            _Original(original),
            _Length(factor, length),
            Turns("beta_fast", fast, 32.0),
            Turns("beta_slow", slow, 1.0),
            Key("truncate", whole, True),
            *none,
        ),
        "longrope": (
            Key("short_factor", short),
            Key("long_factor", long),
            _Original(original),
            _AttentionFactor(factor, length),
            *paper,
        ),
    }
    return Rotary(
        "rope_theta",
        theta,
        {name: (Only(kind, name), *scalings[name], *more) for name in types},
        unscaled={factor: 1.0, length: 0.0, short: [], long: []}
        | {fast: 0.0, slow: 0.0, whole: True},
        default_max_positions=longest,
        select_type=lambda ours: (
            ours[kind]
            if more or ours[kind] == "longrope" or ours[factor] != 1 or ours[length]
            else "default"
        ),
        top_level_keys={
            name: rows
            for name, rows in {
                "dynamic": (Key("max_position_embeddings", original, longest),),
                "longrope": (Longest(factor, original),),
            }.items()
            if name in types
        },
        layers=layers,
        defaults=defaults or {},
        enabled=enabled,
        always=always,
    )
