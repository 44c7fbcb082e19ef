"""The gated MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from maxpipe.model.modules.part import Context, Output, PartModule
from maxpipe.model.parts import mlp
from maxpipe.parallel.sequence import TokenSplit
from maxpipe.parallel.sharding import AxisRules, constrain

_FUNCTIONS = {"silu": jax.nn.silu, "gelu": partial(jax.nn.gelu, approximate=True)}


def gated(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    function: mlp.Gate,
    weights: Float[Array, "*rows"] | None = None,
    *,
    in_8_bits: bool = False,
) -> Float[Array, "*rows F"]:
    """`function(gate) * up` or its like, weighted, written to memory once for all matmuls.

    Left alone, XLA for TPU puts this and its derivative into each matmul of the backward
    pass as a producer that is computed again and again: a tenth of a layer's cycles. Where matmuls
    are `in_8_bits` it writes what it rounds, and looks for the largest numbers where it makes them.
    """
    return _written(function, in_8_bits, gate, up, *(() if weights is None else (weights,)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _written(function: mlp.Gate, in_8_bits: bool, *arrays: Array) -> Array:
    del in_8_bits
    return _gated(function, *arrays)


def _gated(function: mlp.Gate, gate: Array, up: Array, weights: Array | None = None) -> Array:
    if isinstance(function, mlp.ClampedSilu):
        found = _clamped(function, gate, up)
    else:
        found = _FUNCTIONS[function](gate) * up
    return found if weights is None else found * weights[..., None]


def _clamped(function: mlp.ClampedSilu, gate: Array, up: Array) -> Array:
    gate = jnp.minimum(gate, function.limit)
    up = jnp.clip(up, -function.limit, function.limit)
    return gate * jax.nn.sigmoid(function.slope * gate) * (up + 1)


def _gated_forward(
    function: mlp.Gate, in_8_bits: bool, *arrays: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _barrier(_gated(function, *arrays), in_8_bits), arrays


def _gated_backward(
    function: mlp.Gate, in_8_bits: bool, saved: tuple[Array, ...], cotangent: Array
) -> tuple[Array, ...]:
    _, vjp = jax.vjp(partial(_gated, function), *saved)
    return _barrier(vjp(_barrier(cotangent, in_8_bits)), in_8_bits)


def _barrier(tree: Any, in_8_bits: bool) -> Any:
    return tree if in_8_bits else jax.lax.optimization_barrier(tree)


_written.defvjp(_gated_forward, _gated_backward)


def gated_mlp(
    x: Float[Array, "B T D"],
    module: PartModule,
    function: mlp.Gate,
    split: TokenSplit,
    prefix: str = "",
) -> Float[Array, "B T D"]:
    """`(f(x W_gate) * (x W_up)) W_down` with the parameters of `module` that begin so."""
    gate, up, down = (
        getattr(module, f"{prefix}{name}")[...].astype(x.dtype) for name in ("gate", "up", "down")
    )
    gate, up = split.into(x, (gate, up), (_INTO, _INTO))
    gate, up = checkpoint_name(gate, f"{prefix}gate"), checkpoint_name(up, f"{prefix}up")
    hidden = gated(gate, up, function, in_8_bits=split.low is not None)
    hidden = constrain(hidden, (None, None, "mlp"), split.rules)
    return split.out_of(hidden, down, _INTO[::-1])


_INTO = ("embed", "mlp")
"""Logical axes of the projections into a gated MLP; of that out of it, the other way round."""


class GatedMLP(PartModule):
    """SwiGLU or GEGLU (arXiv:2002.05202)."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, part: mlp.GatedMLP, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> Output:
        """`[B, T, D] -> [B, T, D]`."""
        return Output(gated_mlp(x, self, self.part.function, context.split(self.rules)))
