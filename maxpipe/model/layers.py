"""Building blocks of the decoder: parameters with logical axes, norm, MLP, dropout.

A parameter states its logical axes where it is made; only `maxpipe.parallel.sharding` knows
what they mean on a mesh. Nothing here knows about stages or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.schema import ModelConfig
from maxpipe.parallel.sharding import AxisRules, constrain


def weight(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    axes: Sequence[str],
    *,
    fan_in: int,
    dtype: str,
    gain: float = 1.0,
) -> nnx.Param:
    """A matrix drawn from a bell curve of variance `gain**2 / fan_in`."""
    values = bell_curve(rngs.params(), shape, gain * fan_in**-0.5)
    return nnx.Param(values.astype(jnp.dtype(dtype)), axes=tuple(axes))


def bell_curve(key: jax.Array, shape: Sequence[int], stddev: float) -> jax.Array:
    """Float32 draws of mean 0, within 3.5 standard deviations.

    The sum of four uniform 16-bit integers. Integer sums and one multiplication are exact on
    every device and however the array is sharded, which the usual inverse error function is
    not: the same seed gives the same bits under every layout.
    """
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    halves = (bits & 0xFFFF) + (bits >> 16)
    centred = (halves[0] + halves[1]).astype(jnp.int32) - 2 * 0xFFFF
    return centred.astype(jnp.float32) * (stddev * (4 * (2**32 - 1) / 12) ** -0.5)


def residual_gain(config: ModelConfig) -> float:
    """Gain of projections that write to the residual stream: keeps its variance near one."""
    return (2 * config.num_layers) ** -0.5


class RMSNorm(nnx.Module):
    """Scales by the root mean square, in float32 (arXiv:1910.07467)."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(
            jnp.ones((config.d_model,), jnp.dtype(config.param_dtype)), axes=("norm",)
        )
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., D] -> [..., D]`, same dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype)


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`, written to memory once for all matmuls that read it.

    Left alone, XLA for TPU puts this and its derivative into each matmul of the backward
    pass as a producer that is computed again and again: a tenth of a layer's cycles.
    """
    return _gated(gate, up)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gated_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return jax.lax.optimization_barrier(_gated(gate, up)), (gate, up)


def _gated_backward(
    saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, vjp = jax.vjp(_gated, *saved)
    return jax.lax.optimization_barrier(vjp(jax.lax.optimization_barrier(cotangent)))


gated.defvjp(_gated_forward, _gated_backward)


class GatedMLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202): `(silu(x W_gate) * (x W_up)) W_down`."""

    def __init__(self, config: ModelConfig, rules: AxisRules, rngs: nnx.Rngs):
        d, f, dtype = config.d_model, config.d_mlp, config.param_dtype
        self.gate = weight(rngs, (d, f), ("embed", "mlp"), fan_in=d, dtype=dtype)
        self.up = weight(rngs, (d, f), ("embed", "mlp"), fan_in=d, dtype=dtype)
        self.down = weight(
            rngs, (f, d), ("mlp", "embed"), fan_in=f, dtype=dtype, gain=residual_gain(config)
        )
        self.rules = rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D] -> [B, T, D]`."""
        gate = jnp.einsum("btd,df->btf", x, self.gate[...].astype(x.dtype))
        up = jnp.einsum("btd,df->btf", x, self.up[...].astype(x.dtype))
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        hidden = constrain(gated(gate, up), (None, None, "mlp"), self.rules)
        return jnp.einsum("btf,fd->btd", hidden, self.down[...].astype(x.dtype))


def dropout(x: jax.Array, rate: float, keys: jax.Array) -> jax.Array:
    """Zeros a fraction `rate` of `x [B, T, D]`, with one key per example `[B]`.

    A key per example makes the mask independent of how the batch is cut or sharded.
    """
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
