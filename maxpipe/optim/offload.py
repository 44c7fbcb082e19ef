"""Computation on arrays stored in host memory, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Int

Arrays = dict[str, Array]
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class LayerSlice(NamedTuple):
    """A slice of arrays along the dim that a loop iterates over."""

    place: Int[Array, ""] | int = 0
    """Index of the slice along the dim."""
    dim: int | None = None
    """Dim that the loop iterates over. None: the slice is the full array."""

    def slice_of(self, x: Array) -> Array:
        """Return the slice of an array, keeping all dims."""
        if self.dim is None or not x.ndim:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.place, 1, self.dim)

    def put(self, into: Array, part: Array) -> Array:
        """Return the array with this slice replaced by `part`."""
        if self.dim is None or not into.ndim:
            return part
        return jax.lax.dynamic_update_slice_in_dim(into, part, self.place, self.dim)


ALL_LAYERS = LayerSlice()


def map_layers(
    run: Callable[[LayerSlice, Arrays], Mapping[str, Array]], arrays: Arrays, dim: int | None
) -> Arrays:
    """Apply `run` to each layer's slices, and return the arrays with the new slices.

    If a computation uses an array in host memory, XLA may copy the full array to the device at any
    time. In a loop that slices the array along exactly one dim, XLA copies only the slice.

    Args:
        run: (layer, slices on the device) -> new slices keyed by name, of the same shapes and
            dtypes. Scalars are carried between iterations.
        arrays: arrays in host or device memory, keyed by name.
        dim: unsharded dim of all arrays to loop over. None: `run` is called once.
    """

    def turn(number: Int[Array, ""] | int, have: Arrays) -> Arrays:
        layer, new = LayerSlice(number, dim), dict(have)
        parts = {name: layer.slice_of(x) for name, x in have.items()}
        # Copy directly after slicing; an operation in between would run on the full array.
        parts = {
            name: jax.device_put(x, _DEVICE) if _is_on_host(x) else x for name, x in parts.items()
        }
        for name, part in run(layer, parts).items():
            into = have[name]
            new[name] = layer.put(into, jax.device_put(part, _HOST) if _is_on_host(into) else part)
        return new

    if dim is None:
        return turn(0, arrays)
    count = next(x.shape[dim] for x in arrays.values() if x.ndim)
    return jax.lax.fori_loop(0, count, turn, arrays)


def _is_on_host(x: Array) -> bool:
    return jax.typeof(x).memory_space == _HOST
