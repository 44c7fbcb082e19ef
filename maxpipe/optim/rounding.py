"""Stochastic rounding to bfloat16, with the same bits under every layout.

A number is rounded up with the probability that makes the mean of the result the number. What is
drawn follows from the seed, the step, the array's name, the layer and the entry's place in it:
neither meshes nor padding change it.

Source: stochastic rounding in training, arXiv:1502.02551; the integer mixing is that of
"lowbias32", whose bits pass the usual tests of avalanche.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int


def mixed(x: Array) -> Array:
    """Each number of a uint32 array by one that looks drawn, all different."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def draws(
    seed: int,
    name: str,
    step: Int[Array, ""],
    layers: np.ndarray | Array | None,
    sizes: Sequence[int],
    shape: Sequence[int],
) -> Array:
    """A uint32 draw for each entry of an array of this shape.

    Args:
        seed: the run's.
        name: of the array, in words that no layout changes.
        step: number of updates.
        layers: int array with the shape of the stacked dims in front: which layer is there. None:
            there are none.
        sizes: of the dims behind them, without padding: they number the entries of a layer.
        shape: of the whole array.
    """
    base = zlib.crc32(f"{seed} {name}".encode())
    key = mixed(jnp.uint32(base) + mixed(step.astype(jnp.uint32)))
    stacked = 0 if layers is None else layers.ndim
    if layers is not None:
        numbers = jnp.asarray(layers.astype(np.uint32).reshape(*layers.shape, *(1,) * len(sizes)))
        key = mixed(key ^ mixed(numbers + jnp.uint32(1)))
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(sizes))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, stacked + dim)
        place += along * jnp.uint32(stride % 2**32)
        stride *= sizes[dim]
    return mixed(place ^ key)


def rounded(x: Array, drawn: Array) -> Array:
    """Float32 numbers in bfloat16, up or down by the upper half of what is drawn for each.

    What is exact in bfloat16 stays, and so do infinities and NaN.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + (drawn >> 16)) & jnp.uint32(0xFFFF0000)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), found, x).astype(jnp.bfloat16)
