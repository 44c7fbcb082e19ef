"""Rotary positions in only some dims of each head, with YaRN for longer contexts.

Families that support these methods share one set of config keys and one row of the Hugging Face key
table. The module does not import jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family, huggingface
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.family import own_keys
from maxpipe.models.huggingface import Kept, Key, Only, Ours, Rotary, Row, Theirs, UnsupportedError
from maxpipe.models.layers.attention import Rope


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class PartialRopeConfig:
    """Config keys for partial RoPE and its scaling to longer contexts."""

    rotary_dim: int = field(default=0, metadata=renamed_from("rope_size"))
    """Number of leading dims of each attention head that are rotated. Must be even. If 0, all dims
    are rotated."""
    rope_factor: float = field(default=1.0, metadata=renamed_from("rope_scaling"))
    """Ratio of the extended context length to the original context length (YaRN). 1 disables the
    scaling."""
    original_max_position_embeddings: int = field(
        default=262144, metadata=renamed_from("rope_original_tokens")
    )
    """Original context length in tokens. Ignored unless `rope_factor` is above 1."""


BOUNDS = (
    Bound("rotary_dim", 0, 0, why="0 rotates all entries"),
    Bound("rope_factor", 1.0, 1, LARGEST, "1 disables the scaling"),
    Bound("original_max_position_embeddings", 262144, 1),
)
"""Allowed ranges of the keys in `PartialRopeConfig`."""


def rope(config: ModelConfig) -> Rope:
    """Return the rotary positions configured by these keys."""
    own = own_keys(config, PartialRopeConfig)
    scaled = family.yarn(config.rope_theta, own.rope_factor, own.original_max_position_embeddings)
    return replace(scaled, rotary_dims=own.rotary_dim)


def rules(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield a violation if the number of rotated dims is invalid."""
    own, key = own_keys(config, PartialRopeConfig), f"model.{config.family}.rotary_dim"
    if own.rotary_dim > config.head_dim or own.rotary_dim % 2:
        yield RuleViolation(
            Code.MODEL_SIZES,
            key,
            f"must be even and at most model.head_dim ({config.head_dim}), because dims are "
            "rotated in pairs.",
            f"Set {key}=0 to rotate all dims.",
        )


@dataclass(frozen=True)
class _Share:
    """Key-table row for `partial_rotary_factor`, the fraction of rotated dims per head."""

    ours: str
    """maxpipe key for the number of rotated dims."""
    default: float
    """Value that transformers uses if `config.json` lacks the key."""
    count: str = ""
    """`config.json` key with the number of rotated dims, which transformers reads if the fraction
    is absent."""
    nested: bool = False
    """Whether this row handles the key in `rope_parameters`, which takes precedence."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("partial_rotary_factor", *([self.count] if self.count else []))

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of rotated dims."""
        if self.nested:
            return {}
        head = ours["head_dim"]
        name, stated = self.names[0], theirs.get(self.names[0])
        if stated is None and self.count and theirs.get(self.count) is not None:
            name, stated = self.count, theirs[self.count]
        factor = self.default if stated is None else stated
        if type(factor) not in (int, float) or not isinstance(head, int):
            raise UnsupportedError(name, factor, "must be a number.")
        most = 1 if name == self.names[0] else head
        if not 0 < factor <= most:
            raise UnsupportedError(name, factor, f"must be greater than 0 and at most {most}.")
        if (size := int(head * (factor / most))) < 2 or size % 2:
            rule = (
                f"must rotate a positive even number of the {head} dims of a head, but rotates "
                f"{size}."
            )
            raise UnsupportedError(name, factor, rule)
        return {self.ours: size}

    def write(self, ours: Ours) -> Theirs:
        """Return a fraction that yields the same number of rotated dims in transformers."""
        head = ours["head_dim"]
        size = ours[self.ours] or head
        factor = size / head
        if int(head * factor) < size:
            factor = math.nextafter(factor, 1.0)
        count = {self.count: size} if self.count and not self.nested else {}
        return {"partial_rotary_factor": factor, **count}


def table_rows(
    family: str,
    share: float,
    *,
    count: str = "",
    theta: float = 10000.0,
    ignored: tuple[str, ...] = (),
    more: tuple[Row, ...] = (),
) -> tuple[Row, ...]:
    """Return the rotary-position rows of a family's key table.

    `share`, `count` and `theta` are the default of `partial_rotary_factor`, the name of the key
    with the number of rotated dims, and the default of `rope_theta` in transformers. `ignored`
    lists rotary parameters that do not affect the logits, and `more` are rows for others.
    """
    size, scaling = f"{family}.rotary_dim", f"{family}.rope_factor"
    inner = (_Share(size, share, nested=True), *map(Kept, ignored))
    original = "original_max_position_embeddings"
    yarn = (Key("factor", scaling), Key(original, f"{family}.{original}"), *huggingface.YARN)
    return (
        _Share(size, share, count),
        Rotary(
            "rope_theta",
            theta,
            {"default": (*inner, Only(scaling, 1.0)), "yarn": (*inner, *yarn)},
            unscaled={},
            always=more,
            select_type=lambda ours: "default" if ours[scaling] == 1 else "yarn",
        ),
    )
