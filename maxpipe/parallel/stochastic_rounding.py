"""Random numbers for stochastic rounding, as a function of the position in the global tensor.

A number depends on the step, the layer, the matmul, the example, the token's position and the
feature. It does not depend on the mesh, the schedule or the microbatch size, and is the same if a
layer is recomputed. `token_keys` has one key per token, from which a cheap integer hash derives the
number of each feature. Threefry would need several times as many operations.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Key, UInt32

from maxpipe.parallel.collectives import axis_index

TokenKeys = UInt32[Array, "B T"]
"""Key of each token of a matmul. It has the sharding of the tokens, and no feature dim."""

_STREAM = np.uint32(2**32 - 2)
"""Number folded into the layer's key. Example IDs, which dropout folds into the same key, are far
smaller, and adapters use another number.
"""
_GOLDEN = np.uint32(0x9E3779B9)
_BITS = 16
"""Number of random bits per rounded number."""


def token_keys(
    key: Key[Array, ""], example_ids: Int[Array, " B"], positions: Int[Array, " T"]
) -> TokenKeys:
    """Return the keys of a layer's tokens; `key` depends on the seed, the step and the layer."""
    own = jax.random.fold_in(key, _STREAM)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(own, example_ids)
    examples = jax.vmap(jax.random.bits)(keys)
    return _mix(examples[:, None] + positions.astype(jnp.uint32) * _GOLDEN)


def fold_in(keys: TokenKeys, number: int) -> TokenKeys:
    """Return keys that are independent of `keys` and of the keys for other numbers."""
    return _mix(keys + np.uint32((number + 1) * int(_GOLDEN) % 2**32))


def name_keys(keys: TokenKeys, *name: object) -> TokenKeys:
    """Return the keys of the matmul with this name."""
    return fold_in(keys, zlib.crc32(repr(name).encode()))


def uniform(
    keys: TokenKeys, shape: Sequence[int], over: Sequence[str] = ()
) -> Float[Array, "B T *dims"]:
    """Return float32 numbers between 0 and 1, both exclusive, for an array with this shape.

    Mesh axes in `over` shard the first of `dims`.
    """
    dims = shape[2:]
    assert len(over) <= 1
    features = lax.iota(jnp.uint32, math.prod(dims))
    for axis in over:
        features += axis_index(axis).astype(jnp.uint32) * np.uint32(math.prod(dims))
    keys = keys.reshape(*keys.shape, *[1] * len(dims))
    bits = _mix(_mix(features * _GOLDEN).reshape(dims) ^ keys)
    return ((bits >> (32 - _BITS)).astype(jnp.float32) + 0.5) * 2.0**-_BITS


def _mix(x: UInt32[Array, "*dims"]) -> UInt32[Array, "*dims"]:
    """Return a bijective hash in which each input bit changes about half of the output bits.

    The constants are those of `lowbias32` (github.com/skeeto/hash-prospector).
    """
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> 16)
