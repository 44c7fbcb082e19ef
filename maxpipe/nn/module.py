"""Base class for modules, module contexts and outputs, and normalization layers."""

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
from maxpipe.nn.activation_statistics import ActivationRecorder
from maxpipe.parallel.collectives import Statistic
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules
from maxpipe.parallel.stochastic_rounding import TokenKeys


@dataclass(frozen=True)
class LayerContext:
    """Data that a layer receives in addition to its parameters and input."""

    inputs: Mapping[str, Any]
    """Integer arrays `segment_ids` and `positions` `[B, T]` and `example_ids` `[B]`, and in
    training `loss_mask` `[B, T]`."""
    index: Int[Array, ""]
    """Index of the layer in the network."""
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values that differ between layers, with one entry per layer."""
    cache: Any = None
    """Cache of earlier tokens, created by `empty_cache`, or None outside of decoding. A layer has a
    dict with the cache of each branch. A sublayer without a cache has an empty dict."""
    quantizer: MatmulQuantizer | None = None
    """Quantizer for matmuls with weights. If None, matmuls use the compute dtype."""
    carried: Mapping[str, Float[Array, "B T size"]] = field(default_factory=dict)
    """Arrays from earlier layers (`Model.carried`)."""
    max_abs: Float[Array, "B T 1"] | None = None
    """Largest activation magnitude of each input token. Set if matmuls use 8 bits and the preceding
    norm computes these magnitudes."""
    rounding_keys: TokenKeys | None = None
    """Keys of the tokens for the stochastic rounding of cotangents. If None, cotangents are rounded
    to the nearest."""
    recorder: ActivationRecorder | None = None
    """Recorder of activation statistics, or None in steps without layer statistics."""

    @property
    def has_token_scales(self) -> bool:
        """Return whether matmuls read the largest magnitude of each token."""
        return self.quantizer is not None and self.quantizer.has_token_scales

    def record(self, name: str, x: Float[Array, "B T *dims"]) -> None:
        """Record the statistics of an activation, if there is a recorder."""
        if self.recorder is not None:
            self.recorder.record(name, x)

    def number(self, number: Number) -> float | Float[Array, ""]:
        """Return `number`, or this layer's value if `number` is the name of a per-layer value."""
        if not isinstance(number, str):
            return number
        return jnp.asarray(self.values[number], jnp.float32)[self.index]

    def count(self, name: str) -> Int[Array, ""]:
        """Return this layer's entry of the per-layer value `name`, as an integer."""
        return jnp.asarray(self.values[name], jnp.int32)[self.index]

    def counts(self, name: str) -> tuple[int, ...]:
        """Return the distinct integers in the per-layer value `name`, in ascending order."""
        return tuple(sorted({int(value) for value in self.values[name]}))

    def split(self, rules: AxisRules, *, attention: bool = False) -> SequenceParallel:
        """Return the sequence-parallel sharding for attention sublayers or, by default, for other
        sublayers.

        Decoding does not shard tokens.
        """
        low = (
            None
            if attention and self.quantizer and not self.quantizer.attention
            else self.quantizer
        )
        return (
            SequenceParallel.from_rules(rules, low, self.rounding_keys)
            if self.cache is None
            else SequenceParallel(rules, quantizer=low)
        )


class Output(NamedTuple):
    """Output of a sublayer or a layer."""

    x: Float[Array, "B T D"]
    losses: Mapping[str, Float[Array, ""]] = {}
    """Float32 losses, summed over target tokens."""
    statistics: Mapping[str, Statistic] = {}
    """Statistics, which are sums or maxima over tokens, with gradients stopped."""
    cache: Any = None
    """Cache that includes the tokens of this step. Set only in decoding."""
    carried: Mapping[str, Float[Array, "B T size"]] = {}
    """Arrays for later layers (`Model.carried`)."""


class SpecModule(nnx.Module):
    """Module whose parameters are attributes with the names declared by the sublayer."""

    def __init__(self, part: Part):
        for name, param in part.params.items():
            setattr(self, name, nnx.Param(jnp.zeros(param.shape), axes=param.axes))

    @staticmethod
    def empty_cache(part: Any, rows: int, tokens: int, dtype: jnp.dtype) -> Any:
        """Return an empty cache for `tokens` tokens per sequence, or None if no cache is needed.

        The cache is a tree of arrays, whose dim 0 indexes sequences, and of scalar token counts. A
        sequence's entries can be replaced with the entries of a sequence from another cache if both
        caches hold the same number of tokens. Therefore, the slot of a token must depend only on
        the token count, as in a ring buffer.
        """
        del part, rows, tokens, dtype

    @staticmethod
    def cache_window(part: Any) -> str:
        """Return the name of the per-layer value that stores the number of visible tokens.

        This number includes the query token. The cache can omit older tokens. The name is empty if
        the cache must keep all tokens.
        """
        del part
        return ""

    @staticmethod
    def cache_axes(part: Any) -> Any:
        """Return the logical axes of each array in `empty_cache`."""
        del part


def make_quantizer(config: ModelConfig) -> MatmulQuantizer | None:
    """Return the quantizer for matmuls in 4 or 8 bits, or None if matmuls use the compute dtype."""
    if config.matmul == "default":
        return None
    own, everywhere = config.matmul_weight_gradients == "same", config.matmul_parts == "all"
    return MatmulQuantizer(config.matmul, config.matmul_scales, own, everywhere)


class RMSNorm(SpecModule):
    """Normalization by the root mean square (arXiv:1910.07467)."""

    scale: nnx.Param

    def __init__(self, part: mlp.RMSNorm):
        super().__init__(part)
        self.part = part

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Apply the norm, preserving the dtype."""
        return rms_norm(x, self.scale[...] if self.part.scaled else None, self.part)

    def max_abs(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims 1"]:
        """Return the largest float32 magnitude in each normalized token, with gradients stopped.

        The result is exact except for the rounding of normalized activations. XLA computes this
        maximum in the same pass as the mean square. Computing the maximum of the normalized
        activations instead would need another pass.
        """
        wide = scaled = x.astype(jnp.float32)
        if self.part.scaled:
            scaled = wide * (self.part.offset + self.scale[...].astype(jnp.float32))
        most = jnp.max(jnp.abs(scaled), axis=-1, keepdims=True)
        return lax.stop_gradient(most * _inverse_rms(wide, (-1,), self.part))


def rms_norm(
    x: Float[Array, "*dims"], scale: Float[Array, "*over"] | None, part: mlp.RMSNorm
) -> Float[Array, "*dims"]:
    """Normalize over as many trailing dims as the scale has, or over the last dim if there is no
    scale.

    Statistics are computed in float32. The multiplication by the scale is also in float32 if the
    released models do so (`RMSNorm.is_wide`).
    """
    wide = x.astype(jnp.float32)
    if scale is None:
        return (wide * _inverse_rms(wide, (-1,), part)).astype(x.dtype)
    normed = wide * _inverse_rms(wide, tuple(range(-scale.ndim, 0)), part)
    if part.is_wide:
        return (normed * (part.offset + scale.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def _inverse_rms(
    wide: Float[Array, "*dims"], over: tuple[int, ...], part: mlp.RMSNorm
) -> Float[Array, ...]:
    mean_square = jnp.mean(jnp.square(wide), axis=over, keepdims=True)
    return lax.rsqrt(mean_square + part.epsilon)


class LayerNorm(SpecModule):
    """Normalization by the mean and the standard deviation (arXiv:1607.06450)."""

    scale: nnx.Param
    bias: nnx.Param

    def __init__(self, part: mlp.LayerNorm):
        super().__init__(part)
        self.part = part

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Apply the norm in float32, preserving the dtype of the input."""
        bias = self.bias[...] if self.part.bias else None
        return layer_norm(x, self.scale[...], bias, self.part)


def layer_norm(
    x: Float[Array, "*dims D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    part: mlp.LayerNorm,
) -> Float[Array, "*dims D"]:
    """Normalize over the last dim in float32, preserving the dtype of the input."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(variance + part.epsilon) * scale.astype(jnp.float32)
    if bias is not None:
        normed = normed + bias.astype(jnp.float32)
    return normed.astype(x.dtype)


class LayerScalar(SpecModule):
    """Multiplication of a layer's output by a stored number, which has no gradient."""

    scale: nnx.Param

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Multiply, preserving the dtype."""
        return x * lax.stop_gradient(self.scale[...].astype(x.dtype))
