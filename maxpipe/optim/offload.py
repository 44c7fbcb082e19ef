"""Arrays in host memory, computed with on the device one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Int

Arrays = dict[str, Array]
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class LayerSlice(NamedTuple):
    """A part of arrays of which a dim is looped over."""

    place: Int[Array, ""] | int = 0
    """In it."""
    dim: int | None = None
    """None: the part is the whole."""

    def slice_of(self, x: Array) -> Array:
        """The part of an array, with all of its dims."""
        if self.dim is None or not x.ndim:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.place, 1, self.dim)

    def put(self, into: Array, part: Array) -> Array:
        """The array with this part in its place."""
        if self.dim is None or not into.ndim:
            return part
        return jax.lax.dynamic_update_slice_in_dim(into, part, self.place, self.dim)


ALL_LAYERS = LayerSlice()


def map_layers(
    run: Callable[[LayerSlice, Arrays], Mapping[str, Array]], arrays: Arrays, dim: int | None
) -> Arrays:
    """The arrays with what `run` makes of each layer's parts in their places.

    Of an array in host memory that is computed with, XLA brings all to the device, as early as it
    likes; in a loop that takes a slice of it along one dim (of two it cannot), it copies the slice.

    Args:
        run: (layer, its parts on the device) -> new parts by name, of their shapes and types.
            Scalars are handed on from turn to turn.
        arrays: by name, in either memory.
        dim: of all the arrays, one that no mesh axis divides; None: there is one turn.
    """

    def turn(number: Int[Array, ""] | int, have: Arrays) -> Arrays:
        layer, new = LayerSlice(number, dim), dict(have)
        parts = {name: layer.slice_of(x) for name, x in have.items()}
        # Directly behind the slice: what is between them is computed with all of the array.
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
