"""What modules share: parameters as a part declares them, their context, and what they return.

Normalisation over the model's width, or over a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.models.config import ModelConfig
from maxpipe.models.layers import mlp
from maxpipe.models.spec import Number, Part
from maxpipe.parallel.quantized_matmul import MatmulQuantizer
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules


@dataclass(frozen=True)
class LayerContext:
    """What a layer knows besides its parameters and its input."""

    inputs: Mapping[str, Any]
    """`segment_ids` and `positions` int `[B, T]`, `example_ids` int `[B]`, and in training
    `loss_mask` `[B, T]`."""
    index: Int[Array, ""]
    """The layer's number in the network."""
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers in which layers differ, for each layer."""
    cache: Any = None
    """Of earlier tokens, when decoding: what its one part that keeps some has made of
    `empty_cache`."""
    quantizer: MatmulQuantizer | None = None
    """How products with weights are computed, if not in compute type."""
    max_abs: Float[Array, "B T 1"] | None = None
    """The largest number of each token that a part is given, where products are in 8 bits and the
    norm in front of it knows."""

    def number(self, number: Number) -> float | Float[Array, ""]:
        """The number, or this layer's where layers differ."""
        if not isinstance(number, str):
            return number
        return jnp.asarray(self.values[number], jnp.float32)[self.index]

    def count(self, name: str) -> Int[Array, ""]:
        """This layer's value, a whole number."""
        return jnp.asarray(self.values[name], jnp.int32)[self.index]

    def counts(self, name: str) -> tuple[int, ...]:
        """The numbers that a value has in any layer, in ascending order."""
        return tuple(sorted({int(value) for value in self.values[name]}))

    def split(self, rules: AxisRules, *, attention: bool = False) -> SequenceParallel:
        """How tokens are split between matmuls, those of `attention` or others.

        In decoding they are not.
        """
        low = (
            None
            if attention and self.quantizer and not self.quantizer.attention
            else self.quantizer
        )
        return (
            SequenceParallel.from_rules(rules, low)
            if self.cache is None
            else SequenceParallel(rules, quantizer=low)
        )


class Output(NamedTuple):
    """What a part, or a layer, returns."""

    x: Float[Array, "B T D"]
    losses: Mapping[str, Float[Array, ""]] = {}
    """Float32 sums over target tokens."""
    statistics: Mapping[str, Array] = {}
    """Sums over tokens; nothing is differentiated through them."""
    cache: Any = None
    """With this step's tokens, when decoding."""


class SpecModule(nnx.Module):
    """A module with the parameters of a part, as attributes of the names that it declares."""

    def __init__(self, part: Part):
        for name, param in part.params.items():
            setattr(self, name, nnx.Param(jnp.zeros(param.shape), axes=param.axes))

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Room for what a layer keeps of `tokens` tokens in each row; None if it keeps nothing.

        A tree of arrays with rows in dim 0, and of scalars, which count tokens. A row of another
        cache may take the place of one of its rows when both have counted to the same number: what
        goes where must follow from that number, as in a ring.
        """
        del part, rows, tokens, dtype

    @staticmethod
    def cache_window(part: Any) -> str:
        """The per-layer value that says how many tokens a token looks back at, itself included, if
        a cache that lacks older ones will do; empty if not.
        """
        del part
        return ""

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Logical axes of each array in `empty_cache`."""
        del part


def make_quantizer(config: ModelConfig) -> MatmulQuantizer | None:
    """Returns the 8-bit form of matmuls, or None where they are in the compute type."""
    if config.matmul == "default":
        return None
    own, everywhere = config.matmul_weight_gradients == "same", config.matmul_parts == "all"
    return MatmulQuantizer(config.matmul, config.matmul_scales, own, everywhere)


class RMSNorm(SpecModule):
    """Scales by the root mean square (arXiv:1910.07467)."""

    scale: nnx.Param

    def __init__(self, part: mlp.RMSNorm):
        super().__init__(part)
        self.part = part

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Same dtype."""
        return rms_norm(x, self.scale[...], self.part)

    def max_abs(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims 1"]:
        """Of what it makes of each token, float32, up to how that is rounded; not differentiated.

        XLA finds it in the pass that finds the mean square, and would need one more for the result.
        """
        wide, scale = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        scaled = wide * ((self.part.offset or 0.0) + scale)
        most = jnp.max(jnp.abs(scaled), axis=-1, keepdims=True)
        return lax.stop_gradient(most * _inverse_rms(wide, (-1,), self.part))


def rms_norm(
    x: Float[Array, "*dims"], scale: Float[Array, "*over"], part: mlp.RMSNorm
) -> Float[Array, "*dims"]:
    """Over as many of the last dims as the scale has.

    Measured in float32. With an offset it is scaled there, too, as released models do.
    """
    wide, over = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    normed = wide * _inverse_rms(wide, over, part)
    if part.offset:
        return (normed * (part.offset + scale.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def _inverse_rms(
    wide: Float[Array, "*dims"], over: tuple[int, ...], part: mlp.RMSNorm
) -> Float[Array, ...]:
    mean_square = jnp.mean(jnp.square(wide), axis=over, keepdims=True)
    return lax.rsqrt(mean_square + part.epsilon)


class LayerNorm(SpecModule):
    """Subtracts the mean, and scales by the standard deviation (arXiv:1607.06450)."""

    scale: nnx.Param
    bias: nnx.Param

    def __init__(self, part: mlp.LayerNorm):
        super().__init__(part)
        self.part = part

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Same dtype; measured, scaled and shifted in float32."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normed = centred * lax.rsqrt(variance + self.part.epsilon)
        normed = normed * self.scale[...].astype(jnp.float32)
        if self.part.bias:
            normed = normed + self.bias[...].astype(jnp.float32)
        return normed.astype(x.dtype)
