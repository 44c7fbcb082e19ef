"""Config keys, rules and key-table rows that families with Mamba-2 layers share, without jax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

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

    attention_layers: list[int] = field(default_factory=list, hash=False)  # lists are not hashable
    """Zero-based indices of the layers with attention. All other layers use Mamba-2."""
    num_ssm_heads: int = 64
    """Number of heads in Mamba-2 layers. Each head has a separate state."""
    ssm_head_dim: int = 64
    """Dimension of a head in Mamba-2 layers."""
    num_ssm_groups: int = 1
    """Number of groups of heads in Mamba-2 layers. The heads of a group have common keys and
    queries, and their output is normalized together. Must divide `num_ssm_heads`."""
    ssm_state_dim: int = 128
    """Dimension of the keys and queries in Mamba-2 layers. A state has `ssm_state_dim` x
    `ssm_head_dim` entries."""
    ssm_conv_width: int = 4
    """Width in tokens of the convolution in Mamba-2 layers, including the current token."""
    ssm_conv_bias: bool = True
    """Add a bias to each channel of the convolution."""
    ssm_chunk: int = 256
    """Number of tokens per chunk of Mamba-2, a power of two. Larger chunks lead to larger matmuls
    but more FLOPs. The chunk size affects results only through rounding."""


BOUNDS = (
    Bound("num_ssm_heads", 64, 1, axis="heads"),
    Bound("ssm_head_dim", 64, 1, axis="head_dim"),
    Bound("num_ssm_groups", 1, 1),
    Bound("ssm_state_dim", 128, 1),
    Bound("ssm_conv_width", 4, 2, 64),
    Bound("ssm_chunk", 256, 1, 1024),
)
"""Allowed ranges of the keys in `Mamba2Config`."""


def mamba2(config: ModelConfig, own: Mamba2Config) -> Mamba2:
    """Return the Mamba-2 sublayer."""
    width = own.num_ssm_heads * own.ssm_head_dim // own.num_ssm_groups
    return Mamba2(
        config.d_model,
        own.num_ssm_heads,
        own.ssm_head_dim,
        own.num_ssm_groups,
        own.ssm_state_dim,
        own.ssm_conv_width,
        own.ssm_conv_bias,
        RMSNorm(width, config.norm_epsilon),
        family.residual_gain(config),
        own.ssm_chunk,
    )


def rules(config: ModelConfig, own: Mamba2Config) -> Iterator[RuleViolation]:
    """Yield violations of the rules for the keys of `Mamba2Config`."""
    section, count = f"model.{config.family}", config.num_layers
    if wrong := [layer for layer in own.attention_layers if not 0 <= layer < count]:
        left = [layer for layer in own.attention_layers if layer not in wrong]
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.attention_layers",
            f"must contain layer indices from 0 to {count - 1}, but contains {wrong[0]}.",
            f"Set {section}.attention_layers=[{','.join(map(str, left))}].",
        )
    if own.num_ssm_heads % own.num_ssm_groups:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.num_ssm_groups",
            f"must divide {section}.num_ssm_heads ({own.num_ssm_heads}).",
            f"Set {section}.num_ssm_groups={math.gcd(own.num_ssm_heads, own.num_ssm_groups)}.",
        )
    if own.ssm_chunk & (own.ssm_chunk - 1):
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.ssm_chunk",
            "must be a power of two.",
            f"Set {section}.ssm_chunk={1 << own.ssm_chunk.bit_length() - 1}.",
        )


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
