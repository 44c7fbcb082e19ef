"""Muon's updates: matrices with all singular values near 1, computed where their shards are.

Each device has a shard of every matrix of its layers. All-to-alls over the axes that divide the
matrices give each device whole ones, as many as fall to it; it orthogonalises those, and the way
back is the same. Nothing is gathered on all devices: over an axis of n devices a shard of B bytes
sends 2 (n - 1) / n B in all, where the number of matrices divides by n.

Source: Newton-Schulz iteration and its coefficients are Keller Jordan's Muon; the factor of the
update, 0.2 times the root of the longer side, which gives it the size of AdamW's, is that of
arXiv:2502.16982. Matrices that are dealt out to devices are in "Dion" (arXiv:2504.05295) and other
distributed Muons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from maxpipe.io.tree import KeyPath

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root of the mean square of an update's entries, for matrices of full rank."""
MAX_SINGULAR_VALUE = 2.0
"""Above what any singular value, and with it any entry, of an orthogonalised matrix is."""


class Matrices(NamedTuple):
    """An array that holds matrices."""

    inputs: tuple[int, ...]
    """Dims that make up a matrix' rows,"""
    outputs: tuple[int, ...]
    """and its columns; the others number matrices."""
    spec: PartitionSpec

    def axes(self, dims: tuple[int, ...]) -> tuple[str, ...]:
        """Mesh axes that divide these dims."""
        entries = (*self.spec, *(None,) * (max(dims) + 1 - len(self.spec)))
        found = (entries[dim] for dim in dims)
        return tuple(a for e in found if e for a in (e if isinstance(e, tuple) else (e,)))


def update_scale(rows: int, columns: int) -> float:
    """Of an orthogonalised matrix, to make it an update."""
    return UPDATE_RMS * math.sqrt(max(rows, columns))


def orthogonalize(x: Float[Array, "I O"]) -> Float[Array, "I O"]:
    """The matrix with the singular vectors of this one, and singular values from about 0.7 to 1.2.

    Of a matrix of zeros, zeros. I is at most O, or the products are larger than they need be.
    """
    # First by the largest entry: squares of small and of large numbers stay within float32.
    x = x / jnp.maximum(jnp.abs(x).max(), 1e-30)
    x = x / jnp.maximum(jnp.linalg.norm(x), 1e-30)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def compute_updates(
    arrays: Mapping[KeyPath, Array], declared: Mapping[KeyPath, Matrices], mesh: Mesh
) -> dict[KeyPath, Array]:
    """Each matrix of the arrays orthogonalised and scaled.

    Args:
        arrays: directions of the updates, float32, in any shape that `declared` describes.
        declared: of each array where its matrices are and how it is divided.
        mesh: of the devices.
    """

    def on_device(shards: dict[KeyPath, Array]) -> dict[KeyPath, Array]:
        # Matrices that are alike travel together: their number has to divide by that of devices.
        groups: dict[tuple[object, ...], list[_Flat]] = defaultdict(list)
        for path, shard in shards.items():
            found = _Flat.from_shard(path, shard, declared[path], mesh)
            groups[(found.matrices.shape[1:], found.axes)].append(found)
        return {
            path: x for group in groups.values() for path, x in _orthogonalize_group(group, mesh)
        }

    if mesh.size == 1 or not arrays:
        return on_device(dict(arrays))
    specs = {path: declared[path].spec for path in arrays}
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return run(dict(arrays))


class _Flat(NamedTuple):
    """A shard as matrices, the shorter side of whole ones being their rows."""

    path: KeyPath
    matrices: Float[Array, "K i o"]
    axes: tuple[tuple[str, ...], tuple[str, ...]]
    """Mesh axes that divide rows, and columns."""
    shape: tuple[int, ...]
    """Of the shard."""
    order: tuple[int, ...]
    """Its dims: those that number matrices, rows, columns."""
    is_transposed: bool

    @classmethod
    def from_shard(cls, path: KeyPath, shard: Array, matrices: Matrices, mesh: Mesh) -> _Flat:
        """The way there. Where several dims make up a side, devices may order its entries as they
        like: the singular vectors' entries have the same order.
        """
        inputs, outputs, _ = matrices
        others = tuple(dim for dim in range(shard.ndim) if dim not in inputs + outputs)
        order = (*others, *inputs, *outputs)
        sides = [math.prod(shard.shape[dim] for dim in dims) for dims in (inputs, outputs)]
        x = shard.transpose(order).reshape(-1, *sides)
        rows, columns = matrices.axes(inputs), matrices.axes(outputs)
        if sides[0] * _ways(mesh, rows) > sides[1] * _ways(mesh, columns):
            return cls(path, x.swapaxes(1, 2), (columns, rows), shard.shape, order, True)
        return cls(path, x, (rows, columns), shard.shape, order, False)

    def back(self, x: Float[Array, "K i o"]) -> Array:
        """Matrices of this form -> the shard's."""
        x = x.swapaxes(1, 2) if self.is_transposed else x
        x = x.reshape([self.shape[dim] for dim in self.order])
        return x.transpose(sorted(range(x.ndim), key=self.order.__getitem__))


def _orthogonalize_group(group: Sequence[_Flat], mesh: Mesh) -> Iterator[tuple[KeyPath, Array]]:
    axes = group[0].axes
    x = jnp.concatenate([each.matrices for each in group])
    count, ways = len(x), math.prod(_ways(mesh, each) for each in axes)
    x = jnp.pad(x, ((0, -count % ways), (0, 0), (0, 0)))
    split = [(over, dim) for over, dim in zip(axes, (1, 2), strict=True) if _ways(mesh, over) > 1]
    for over, dim in split:
        x = _deal_matrices(x, over, dim, _ways(mesh, over))
    # One after the other, in its place: what the iteration needs is there once.
    x = update_scale(*x.shape[1:]) * lax.fori_loop(0, len(x), _orthogonalize_at, x)
    for over, dim in reversed(split):
        x = _return_matrices(x, over, dim, _ways(mesh, over))
    start = 0
    for each in group:
        end = start + len(each.matrices)
        yield each.path, each.back(x[start:end])
        start = end


def _orthogonalize_at(number: Int[Array, ""], x: Float[Array, "K I O"]) -> Float[Array, "K I O"]:
    found = orthogonalize(lax.dynamic_index_in_dim(x, number, keepdims=False))
    return lax.dynamic_update_index_in_dim(x, found, number, 0)


def _deal_matrices(x: Array, axes: tuple[str, ...], dim: int, ways: int) -> Array:
    """Of each matrix all parts along a dim, on the one device it falls to.

    The exchange is along a dim of its own: XLA for CPU fails where it cuts one dim and joins
    another, as it gives the pieces different layouts.
    """
    x = x.reshape(ways, -1, *x.shape[1:])
    x = lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _return_matrices(x: Array, axes: tuple[str, ...], dim: int, ways: int) -> Array:
    """The way back."""
    x = jnp.moveaxis(x.reshape(*x.shape[:dim], ways, -1, *x.shape[dim + 1 :]), dim, 0)
    x = lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    return x.reshape(-1, *x.shape[2:])


def _ways(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
