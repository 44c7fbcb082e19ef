"""Config keys, rules and key-table rows that families with the gated delta rule share.

The module does not import jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.huggingface import Key, Row
from maxpipe.models.layers.gated_delta import GatedDelta
from maxpipe.models.layers.mlp import RMSNorm


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class GatedDeltaConfig:
    """Config keys of layers with the gated delta rule."""

    linear_num_key_heads: int = field(default=16, metadata=renamed_from("num_key_heads"))
    """Number of query and key heads in delta-rule layers."""
    linear_num_value_heads: int = field(default=32, metadata=renamed_from("num_value_heads"))
    """Number of value heads in delta-rule layers, a multiple of `linear_num_key_heads`. Each value
    head has a separate state."""
    linear_key_head_dim: int = field(default=128, metadata=renamed_from("key_size"))
    """Dimension of a query or key head in delta-rule layers."""
    linear_value_head_dim: int = field(default=128, metadata=renamed_from("value_size"))
    """Dimension of a value head in delta-rule layers."""
    linear_conv_kernel_dim: int = field(default=4, metadata=renamed_from("kernel"))
    """Width in tokens of the convolution over queries, keys and values, including the current
    token."""
    gdn_chunk_size: int = field(default=64, metadata=renamed_from("chunk"))
    """Number of tokens per chunk of the delta rule, a power of two. Larger chunks lead to larger
    matmuls but more FLOPs. The chunk size affects results only through rounding."""


BOUNDS = (
    Bound("linear_num_key_heads", 16, 1, axis="kv_heads"),
    Bound("linear_num_value_heads", 32, 1, axis="heads"),
    Bound("linear_key_head_dim", 128, 1, axis="head_dim"),
    Bound("linear_value_head_dim", 128, 1, axis="head_dim"),
    Bound("linear_conv_kernel_dim", 4, 2, 64),
    Bound("gdn_chunk_size", 64, 1, 1024),
)
"""Allowed ranges of the keys in `GatedDeltaConfig`."""


def gated_delta(
    config: ModelConfig, own: GatedDeltaConfig, epsilon: float, **options: Any
) -> GatedDelta:
    """Return the sublayer. `epsilon` is that of the output norm, and `options` are additional
    fields of `GatedDelta`.
    """
    return GatedDelta(
        config.d_model,
        own.linear_num_key_heads,
        own.linear_num_value_heads,
        own.linear_key_head_dim,
        own.linear_value_head_dim,
        own.linear_conv_kernel_dim,
        RMSNorm(own.linear_value_head_dim, epsilon),
        family.residual_gain(config),
        own.gdn_chunk_size,
        **options,
    )


def rules(config: ModelConfig, own: GatedDeltaConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys of `GatedDeltaConfig`."""
    section = f"model.{config.family}"
    if own.linear_num_value_heads % own.linear_num_key_heads:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.linear_num_value_heads",
            f"must be a multiple of {section}.linear_num_key_heads "
            f"({own.linear_num_key_heads}), because every key head serves the same number of "
            "value heads.",
            f"Set {section}.linear_num_value_heads={2 * own.linear_num_key_heads}.",
        )
    yield from family.chunk_rule(section, "gdn_chunk_size", own.gdn_chunk_size)


def rows(section: str, **defaults: Any) -> tuple[Row, ...]:
    """Return the key-table rows for the sizes.

    `section` is the name of the family's config section. `defaults` replaces the defaults of
    Qwen3-Next in transformers.
    """
    values: dict[str, Any] = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    return tuple(
        Key(name, f"{section}.{name}", default) for name, default in (values | defaults).items()
    )
