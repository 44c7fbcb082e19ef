"""Config keys, rules and key-table rows that families with Mamba-2 layers share, without jax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxpipe.errors import Code, RuleViolation
from maxpipe.models import family
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.huggingface import Fixed, Tensor
from maxpipe.models.layers.mamba2 import Mamba2
from maxpipe.models.layers.mlp import RMSNorm


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class Mamba2Config:
    """Config keys of Mamba-2 layers."""

    mamba_num_heads: int = 64
    """Number of heads in Mamba-2 layers. Each head has a separate state."""
    mamba_head_dim: int = 64
    """Dimension of a head in Mamba-2 layers."""
    mamba_num_groups: int = 1
    """Number of groups of heads in Mamba-2 layers. The heads of a group have common keys and
    queries, and their output is normalized together. Must divide `mamba_num_heads`."""
    mamba_state_dim: int = 128
    """Dimension of the keys and queries in Mamba-2 layers. A state has `mamba_state_dim` x
    `mamba_head_dim` entries."""
    mamba_conv_kernel_dim: int = 4
    """Width in tokens of the convolution in Mamba-2 layers, including the current token."""
    mamba_conv_bias: bool = True
    """Add a bias to each channel of the convolution."""
    mamba_chunk_size: int = 256
    """Number of tokens per chunk of Mamba-2, a power of two. Larger chunks lead to larger matmuls
    but more FLOPs. The chunk size affects results only through rounding."""


BOUNDS = (
    Bound("mamba_num_heads", 64, 1, axis="heads"),
    Bound("mamba_head_dim", 64, 1, axis="head_dim"),
    Bound("mamba_num_groups", 1, 1),
    Bound("mamba_state_dim", 128, 1),
    Bound("mamba_conv_kernel_dim", 4, 2, 64),
    Bound("mamba_chunk_size", 256, 1, 1024),
)
"""Allowed ranges of the keys in `Mamba2Config`."""


def mamba2(config: ModelConfig, own: Mamba2Config, **options: Any) -> Mamba2:
    """Return the Mamba-2 sublayer; `options` are additional fields of `Mamba2`."""
    width = own.mamba_num_heads * own.mamba_head_dim // own.mamba_num_groups
    options.setdefault("norm", RMSNorm(width, config.norm_epsilon))
    return Mamba2(
        config.d_model,
        own.mamba_num_heads,
        own.mamba_head_dim,
        own.mamba_num_groups,
        own.mamba_state_dim,
        own.mamba_conv_kernel_dim,
        own.mamba_conv_bias,
        out_gain=family.residual_gain(config),
        chunk=own.mamba_chunk_size,
        **options,
    )


def rules(config: ModelConfig, own: Mamba2Config) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys of `Mamba2Config`."""
    section, heads, groups = f"model.{config.family}", own.mamba_num_heads, own.mamba_num_groups
    if heads % groups:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.mamba_num_groups",
            f"must divide {section}.mamba_num_heads ({heads}).",
            f"Set {section}.mamba_num_groups={math.gcd(heads, groups)}.",
        )
    yield from family.chunk_rule(section, "mamba_chunk_size", own.mamba_chunk_size)


NO_TIME_LIMIT = Fixed(
    "time_step_limit", (None, [0.0, {"__float__": "Infinity"}], [0.0, math.inf], [0.0, "Infinity"])
)
"""Key-table row for the range to which time steps are clamped, in the notations of several
transformers releases. The only supported range is the default, all positive numbers."""


def tensors(prefix: str) -> tuple[Tensor, ...]:
    """Return the tensor-table rows of a Mamba-2 sublayer, whose tensor names start with `prefix`.

    transformers stores the gate, the values, the keys, the queries and the time steps in one
    matrix, and the convolutions of values, keys and queries in another.
    """
    joined, convolved = prefix + "in_proj.weight", prefix + "conv1d."
    return (
        Tensor("mamba.gate", joined, "d h p -> (h p) d"),
        Tensor("mamba.value", joined, "d h p -> (h p) d"),
        Tensor("mamba.key", joined, "d g n -> (g n) d"),
        Tensor("mamba.query", joined, "d g n -> (g n) d"),
        Tensor("mamba.time_step", joined, "d h -> h d"),
        Tensor("mamba.conv_value", convolved + "weight", "h p w -> (h p) () w"),
        Tensor("mamba.conv_key", convolved + "weight", "g n w -> (g n) () w"),
        Tensor("mamba.conv_query", convolved + "weight", "g n w -> (g n) () w"),
        Tensor("mamba.conv_value_bias", convolved + "bias", "h p -> (h p)"),
        Tensor("mamba.conv_key_bias", convolved + "bias", "g n -> (g n)"),
        Tensor("mamba.conv_query_bias", convolved + "bias", "g n -> (g n)"),
        Tensor("mamba.decay", prefix + "A_log", "h -> h"),
        Tensor("mamba.time_step_bias", prefix + "dt_bias", "h -> h"),
        Tensor("mamba.skip", prefix + "D", "h -> h"),
        Tensor("mamba.norm", prefix + "norm.weight", "h p -> (h p)"),
        Tensor("mamba.out", prefix + "out_proj.weight", "h p d -> d (h p)"),
    )
