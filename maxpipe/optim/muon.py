"""Muon updates, which orthogonalize matrices. The computation is distributed over devices.

Each device holds a shard of every matrix in its layers. All-to-alls over the axes that shard the
matrices give each device a subset of complete matrices. The device orthogonalizes these matrices,
and the inverse all-to-alls restore the shards. Over an axis of n devices, a device with a shard of
B bytes sends 2 B (n - 1) / n bytes in total if n divides the number of matrices.

Source: Keller Jordan's Muon (the Newton-Schulz iteration and its coefficients). The update is
scaled by 0.2 times the square root of the longer side, which matches the magnitude of AdamW's
updates (arXiv:2502.16982). Dion (arXiv:2504.05295) and other variants of Muon also distribute
matrices over devices.
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

from maxpipe.models.param_names import KeyPath

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of the update's entries, for full-rank matrices."""
MAX_SINGULAR_VALUE = 2.0
"""Upper bound on the singular values of an orthogonalized matrix, and therefore on its entries."""


class Matrices(NamedTuple):
    """Layout of the matrices contained in an array."""

    inputs: tuple[int, ...]
    """Dims that form the rows of a matrix."""
    outputs: tuple[int, ...]
    """Dims that form the columns of a matrix. All other dims are batch dims."""
    spec: PartitionSpec

    def axes(self, dims: tuple[int, ...]) -> tuple[str, ...]:
        """Return the mesh axes that shard these dims."""
        entries = (*self.spec, *(None,) * (max(dims) + 1 - len(self.spec)))
        axes = (entries[dim] for dim in dims)
        return tuple(a for e in axes if e for a in (e if isinstance(e, tuple) else (e,)))


def update_scale(rows: int, columns: int) -> float:
    """Return the factor by which an orthogonalized matrix is multiplied to obtain an update."""
    return UPDATE_RMS * math.sqrt(max(rows, columns))


def orthogonalize(x: Float[Array, "I O"]) -> Float[Array, "I O"]:
    """Return a matrix with the same singular vectors, and with singular values of about 0.7 to 1.2.

    A zero matrix is returned unchanged. `x` should have no more rows than columns; otherwise, the
    matmuls are larger than necessary.
    """
    # Divide by the largest entry first, so that squares neither overflow nor underflow in float32.
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
    """Orthogonalize and scale each matrix of the arrays.

    Args:
        arrays: float32 update directions, whose shapes `declared` describes.
        declared: layout and sharding of the matrices in each array.
        mesh: device mesh.
    """

    def on_device(shards: dict[KeyPath, Array]) -> dict[KeyPath, Array]:
        # Matrices of the same shape are exchanged together; their number is padded to a multiple of
        # the number of devices.
        groups: dict[tuple[object, ...], list[_Flat]] = defaultdict(list)
        for path, shard in shards.items():
            flat = _Flat.from_shard(path, shard, declared[path], mesh)
            groups[(flat.matrices.shape[1:], flat.axes)].append(flat)
        return {
            path: x for group in groups.values() for path, x in _orthogonalize_group(group, mesh)
        }

    if mesh.size == 1 or not arrays:
        return on_device(dict(arrays))
    specs = {path: declared[path].spec for path in arrays}
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return run(dict(arrays))


class _Flat(NamedTuple):
    """A shard as a batch of matrices, transposed if there are fewer columns than rows."""

    path: KeyPath
    matrices: Float[Array, "K i o"]
    axes: tuple[tuple[str, ...], tuple[str, ...]]
    """Mesh axes that shard the rows, and mesh axes that shard the columns."""
    shape: tuple[int, ...]
    """Shape of the shard."""
    order: tuple[int, ...]
    """Order of the shard's dims: batch dims, rows, columns."""
    is_transposed: bool

    @classmethod
    def from_shard(cls, path: KeyPath, shard: Array, matrices: Matrices, mesh: Mesh) -> _Flat:
        """Convert a shard to a batch of matrices.

        If several dims form the rows or the columns, their order can differ between devices. The
        result is unaffected, because the entries of the singular vectors are permuted in the same
        way.
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
        """Convert the matrices back to the shard's shape."""
        x = x.swapaxes(1, 2) if self.is_transposed else x
        x = x.reshape([self.shape[dim] for dim in self.order])
        return x.transpose(sorted(range(x.ndim), key=self.order.__getitem__))


def _orthogonalize_group(group: Sequence[_Flat], mesh: Mesh) -> Iterator[tuple[KeyPath, Array]]:
    axes = group[0].axes
    x = jnp.concatenate([update.matrices for update in group])
    count, ways = len(x), math.prod(_ways(mesh, axis) for axis in axes)
    x = jnp.pad(x, ((0, -count % ways), (0, 0), (0, 0)))
    split = [(over, dim) for over, dim in zip(axes, (1, 2), strict=True) if _ways(mesh, over) > 1]
    for over, dim in split:
        x = _deal_matrices(x, over, dim, _ways(mesh, over))
    # Process one matrix at a time, in place, so that only one matrix needs temporary memory.
    x = update_scale(*x.shape[1:]) * lax.fori_loop(0, len(x), _orthogonalize_at, x)
    for over, dim in reversed(split):
        x = _return_matrices(x, over, dim, _ways(mesh, over))
    start = 0
    for update in group:
        end = start + len(update.matrices)
        yield update.path, update.back(x[start:end])
        start = end


def _orthogonalize_at(number: Int[Array, ""], x: Float[Array, "K I O"]) -> Float[Array, "K I O"]:
    matrix = orthogonalize(lax.dynamic_index_in_dim(x, number, keepdims=False))
    return lax.dynamic_update_index_in_dim(x, matrix, number, 0)


def _deal_matrices(x: Array, axes: tuple[str, ...], dim: int, ways: int) -> Array:
    """Gather the shards of each matrix, along `dim`, on one device.

    The all-to-all splits and concatenates a separate leading dim. The CPU backend fails if one dim
    is split and another is concatenated, because the shards have different layouts.
    """
    x = x.reshape(ways, -1, *x.shape[1:])
    x = lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _return_matrices(x: Array, axes: tuple[str, ...], dim: int, ways: int) -> Array:
    """Restore the shards; the inverse of `_deal_matrices`."""
    x = jnp.moveaxis(x.reshape(*x.shape[:dim], ways, -1, *x.shape[dim + 1 :]), dim, 0)
    x = lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    return x.reshape(-1, *x.shape[2:])


def _ways(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
