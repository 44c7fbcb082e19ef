"""References for tests of block-scaled formats: e4m3 numbers, and the matmul of scaled blocks."""

from __future__ import annotations

import math
from bisect import bisect_left

import jax
import jax.numpy as jnp


def decode_e4m3(code: int) -> float:
    """Return the number with this e4m3 code, in exact arithmetic."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    fraction = mantissa / 8 + (exponent > 0)
    return (-1) ** sign * fraction * 2.0 ** (max(exponent, 1) - 7)


POSITIVE_E4M3 = [decode_e4m3(code) for code in range(127)]
"""Finite e4m3 numbers from 0 to 448, in ascending order."""


def encode_e4m3(x: float) -> int:
    """Return the code of the nearest e4m3 number; ties go to even codes."""
    size = abs(x)
    high = min(bisect_left(POSITIVE_E4M3, size), 126)
    low = max(high - 1, 0)
    below, above = size - POSITIVE_E4M3[low], POSITIVE_E4M3[high] - size
    nearest = high if above < below or (above == below and high % 2 == 0) else low
    return nearest | (128 if math.copysign(1, x) < 0 else 0)


def scaled_matmul(a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
    """Compute the equivalent that the documentation of `jax.nn.scaled_matmul` defines."""
    left, right = (
        x.astype(jnp.float32)
        * jnp.repeat(scale.astype(jnp.float32), x.shape[-1] // scale.shape[-1], axis=-1)
        for x, scale in zip((a, b), scales, strict=True)
    )
    return jnp.einsum("bmk,bnk->bmn", left, right)
