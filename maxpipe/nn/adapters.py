"""Adapters of a layer: what their parameters start from, and weights as modules take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key as RandomKey

from maxpipe.models.low_rank import DOWN, LENGTH, SCALE, UP, Key, dim_of_scales, is_held
from maxpipe.models.spec import Kind
from maxpipe.nn.held import held, restored
from maxpipe.parallel.adapted import Adapted, column_norms

Params = dict[str, Any]
_STREAM = np.uint32(2**32 - 1)
"""Of dropout's randomness, beside the numbers of examples, which are far smaller."""


def completed(kind: Kind, found: Mapping[Key, Array]) -> dict[Key, Array]:
    """All parameters of layers from those that are drawn or read: the base's and factors.

    There may be dims of stacking in front. Lengths are those of the base as it is held, so that a
    new adapter changes nothing.
    """
    base, stored = dict(found), dict[Key, Array]()
    for key, weight in found.items():
        part, name = key
        if is_held(kind, key):
            numbers, scales = _held(kind, key, weight)
            stored[key], stored[part, name + SCALE] = numbers, scales
            base[key] = restored(numbers, scales, _dim(kind, key), weight.dtype)
    for (part, name), adapter in kind.adapters.items():
        if (length := (part, name + LENGTH)) in kind.stored:
            weight = base[part, name]
            first = weight.ndim - len(kind.declared[part, name].dims)
            norms = lambda one, summed=adapter.summed: column_norms(one, summed)  # noqa: E731
            for _ in range(first):
                norms = jax.vmap(norms)
            stored[length] = norms(weight)
    return {name: stored[name] if name in stored else found[name] for name in kind.params}


def held_and_back(kind: Kind, key: Key, weight: Array) -> Array:
    """What a matrix that is held in few bits stands for."""
    return restored(*_held(kind, key, weight), _dim(kind, key), weight.dtype)


def _held(kind: Kind, key: Key, weight: Array) -> tuple[Array, Array]:
    scales, dim = kind.stored[key[0], key[1] + SCALE], _dim(kind, key)
    return held(weight, kind.stored[key].exact, dim, scales.shape[dim])


def applied(
    kind: Kind,
    params: Params,
    dtype: jnp.dtype,
    inputs: Mapping[str, Array],
    key: RandomKey[Array, ""] | None,
) -> Params:
    """One layer's parameters by part and name, with weights as its modules take them.

    `key` is the layer's for dropout; None turns it off.
    """
    if not kind.stored:
        return params
    found = {
        part: {name: each for name, each in mine.items() if (part, name) in kind.declared}
        for part, mine in params.items()
    }
    for part, name in kind.declared:
        if is_held(kind, (part, name)):
            numbers, scales = params[part][name], params[part][name + SCALE]
            found[part][name] = restored(numbers, scales, _dim(kind, (part, name)), dtype)
    for number, ((part, name), adapter) in enumerate(kind.adapters.items()):
        keys = None
        if key is not None and adapter.dropout:
            own = jax.random.fold_in(jax.random.fold_in(key, _STREAM), number)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(own, inputs["example_ids"])
        mine = params[part]
        found[part][name] = Adapted(
            found[part][name],
            mine[name + DOWN],
            mine[name + UP],
            mine.get(name + LENGTH),
            keys,
            scale=adapter.scale,
            rate=adapter.dropout,
            summed=adapter.summed,
        )
    return found


def _dim(kind: Kind, key: Key) -> int:
    """Of a matrix that is held in few bits that of its scales, counted from the end."""
    declared = kind.declared[key]
    dim = dim_of_scales(declared)
    assert dim is not None
    return dim - len(declared.dims)
