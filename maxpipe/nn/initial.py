"""What parameters start from, as their declarations say."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from maxpipe.models.spec import Constant, Entries, Made, Normal, Param

_Name = TypeVar("_Name", bound=Hashable)


def initial(
    params: Mapping[_Name, Param], key: Key[Array, ""], dtype: jnp.dtype
) -> dict[_Name, Float[Array, "*dims"]]:
    """The parameters by name; the i-th that is drawn takes the key's i-th part.

    Those are left out that are made of others.
    """
    drawn = [name for name, param in params.items() if isinstance(param.init, Normal)]
    keys = {name: jax.random.fold_in(key, number) for number, name in enumerate(drawn)}
    return {
        name: _initial(param, keys.get(name), dtype)
        for name, param in params.items()
        if not isinstance(param.init, Made)
    }


def _initial(param: Param, key: Key[Array, ""] | None, dtype: jnp.dtype) -> Float[Array, "*dims"]:
    if isinstance(param.init, Constant):
        return jnp.full(param.shape, param.init.value, param.exact or dtype)
    if isinstance(param.init, Entries):
        return jnp.asarray(param.init.values, dtype)
    assert isinstance(param.init, Normal) and key is not None
    stddev = param.init.gain * param.init.fan_in**-0.5
    return normal_approximation(key, param.shape, stddev).astype(dtype)


def normal_approximation(
    key: Key[Array, ""], shape: Sequence[int], stddev: float
) -> Float[Array, "*dims"]:
    """Float32 draws of mean 0, within 3.5 standard deviations.

    The sum of four uniform 16-bit integers. Integer sums and one multiplication are exact on
    every device and however the array is sharded, which the usual inverse error function is
    not: the same seed gives the same bits under every layout.
    """
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    halves = (bits & 0xFFFF) + (bits >> 16)
    centred = (halves[0] + halves[1]).astype(jnp.int32) - 2 * 0xFFFF
    return centred.astype(jnp.float32) * (stddev * (4 * (2**32 - 1) / 12) ** -0.5)
