"""Frozen matrices in few bits: numbers that share scales along one dim, and the way back.

`int8` has whole numbers and a scale for all of the dim. `nf4` has two numbers of 4 bits in a byte,
which stand for the quantiles of a normal distribution, and a scale for each 64 of the dim
(arXiv:2305.14314, section 3).
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jax import Array

_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What 4 bits stand for, as multiples of a block's largest number: table of the paper."""


def held(weight: Array, dtype: str, dim: int, blocks: int) -> tuple[Array, Array]:
    """A matrix' numbers in `int8`, or in 4 bits as `uint8`, and their scales in float32.

    `dim` is counted from the end (-1 is the last), and has `blocks` scales.
    """
    split = _split(weight.astype(jnp.float32), dim, blocks)
    most = jnp.abs(split).max(dim, keepdims=True)
    found = split / jnp.where(most == 0, 1.0, most)
    scales = jnp.squeeze(most, dim)
    if dtype == "int8":
        return jnp.round(found * 127).astype(jnp.int8).reshape(weight.shape), scales / 127
    middle = [(a + b) / 2 for a, b in itertools.pairwise(_LEVELS)]
    # A sum of comparisons: the number of levels below, without an array of all levels.
    below = ((found > each).astype(jnp.uint8) for each in middle)
    codes = sum(below, jnp.zeros(found.shape, jnp.uint8)).reshape(weight.shape)
    pairs = jnp.moveaxis(codes, dim, -1)
    pairs = pairs.reshape(*pairs.shape[:-1], -1, 2)
    return jnp.moveaxis(pairs[..., 0] | pairs[..., 1] << 4, -1, dim), scales


def restored(numbers: Array, scales: Array, dim: int, dtype: jnp.dtype) -> Array:
    """What they stand for."""
    if numbers.dtype == jnp.uint8:
        pairs = jnp.moveaxis(numbers, dim, -1)
        codes = jnp.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1)
        found = jnp.moveaxis(jnp.asarray(_LEVELS, jnp.float32)[codes], -1, dim)
    else:
        found = numbers.astype(jnp.float32)
    split = _split(found, dim, scales.shape[dim])
    return (split * jnp.expand_dims(scales, dim)).reshape(found.shape).astype(dtype)


def _split(weight: Array, dim: int, blocks: int) -> Array:
    """With the dim as two: blocks, and the numbers of one, which is then `dim`."""
    at = weight.ndim + dim
    size = weight.shape[at]
    return weight.reshape(*weight.shape[:at], blocks, size // blocks, *weight.shape[at + 1 :])
