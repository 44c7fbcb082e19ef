"""Collectives over the manual axes of the per-device program, and context-parallel sequences.

Axes with a single device are omitted from the program, because their collectives would be no-ops
and some compilers fail on them. Callers specify axes by name and need not know their sizes.
`with_layout` fixes the memory layout of an array on TPUs.

With context parallelism, the tokens of a sequence are sharded over the context axis. The sequence
is divided into 2C chunks, where C is the number of devices along the axis. Device c holds the
chunks c and 2C - 1 - c. Later tokens attend to more tokens than earlier tokens, so this zig-zag
order balances the work between devices (as in Llama 3, arXiv:2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Int

from maxpipe.parallel.mesh import BATCH_AXES, CONTEXT, MANUAL_AXES, TOKEN_AXES
from maxpipe.parallel.sharding import auto_axes, restrict_spec


def mark_varying(tree: Any) -> Any:
    """Mark every leaf as varying over all manual axes.

    Inside the per-device program, JAX tracks the axes over which each array is replicated. Autodiff
    would sum the gradient of a replicated array over devices, and a conditional on the stage index
    would silently give wrong results (jax#40823). Marking arrays as varying avoids these sums and
    wrong results.
    """

    def mark(leaf: jax.Array) -> jax.Array:
        kind: Any = jax.typeof(leaf)
        # JAX 0.10 has `vma`; newer releases renamed the attribute.
        known = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
        manual = jax.sharding.get_abstract_mesh().manual_axes
        missing = tuple(a for a in MANUAL_AXES if a in manual and a not in known)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def map_shards(
    run: Callable[..., Any], in_specs: Any, out_specs: Any, *, states_types: bool = False
) -> Callable[..., Any]:
    """Return `run` mapped over the shards of all axes that are not yet manual.

    The specs refer to these axes by name. Kernels need this function, because a Mosaic call
    requires all axes to be manual, including axes of size 1. A kernel declares no varying axes, so
    the type checks for varying axes are disabled inside `run`, and the results of `run` are marked
    as varying. The returned function must not be differentiated, because the marks would become
    sums over devices. If `run` declares varying axes, set `states_types` to enable the checks.
    """
    mesh = jax.sharding.get_abstract_mesh()
    remaining_axes = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
    if not remaining_axes:
        return run
    inside = jax.shard_map(
        run,
        axis_names=remaining_axes,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=states_types,
    )
    return lambda *arguments: mark_varying(inside(*arguments))


def map_batch_shards(run: Callable[[Any, Any], Any], rows: Any, shared: Any) -> Any:
    """Call `run(rows, shared)` on each device's shard of sequences; `shared` is replicated.

    Sequences are indexed by the first dim. Inside the pipeline's program, arrays are already
    per-device shards.
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in auto_axes())
    if not axes:
        return run(rows, shared)
    spec = PartitionSpec(axes)
    return jax.shard_map(
        run, axis_names=set(axes), in_specs=(spec, PartitionSpec()), out_specs=spec
    )(rows, shared)


def sum_count(count: jax.Array, axes: Sequence[str] = TOKEN_AXES) -> jax.Array:
    """Sum a count over the axes that shard tokens, without propagating gradients.

    If all axes are auto axes, the count already covers all sequences.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in axes if axis in manual)
    count = lax.stop_gradient(count)
    return mark_varying(lax.psum(count, axes)) if axes else count


LANES = 128
"""Number of lanes in a TPU vector register. The lanes hold elements of the last dim."""


def manual_axes_of(mesh: Mesh) -> tuple[str, ...]:
    """Return the manual axes of the per-device program."""
    return tuple(axis for axis in MANUAL_AXES if mesh.shape[axis] > 1)


def _manual_axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    named = (axes,) if isinstance(axes, str) else axes
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in named if axis in manual)


def map_auto_axes(
    run: Callable[[jax.Array], jax.Array], entries: Sequence[Any]
) -> Callable[[jax.Array], jax.Array]:
    """Return `run` mapped over the shards of the auto axes, in addition to the manual axes.

    `entries` lists the auto axes of each dim, in the format of a PartitionSpec. Without this
    function, XLA's partitioner keeps such a dim sharded in all-reduces and permutes, but gathers
    the dim before an all-gather or reduce-scatter along another dim. If the tensor axis has size 4,
    the gather would need four times as much traffic and memory.
    """
    mesh = jax.sharding.get_abstract_mesh()
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in entries if axes]
    divided = {axis for axes in named for axis in axes if mesh.shape[axis] > 1}
    if not divided:
        return run
    spec = restrict_spec(PartitionSpec(*entries), tuple(divided))
    return jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=divided)


def axis_index(axis: str) -> jax.Array:
    """Return this device's index along the axis."""
    return lax.axis_index(axis) if _manual_axes(axis) else jnp.int32(0)


def axis_size(axes: str | Sequence[str]) -> int:
    """Return the number of devices along the axes."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in _manual_axes(axes))


def sum_over(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """Return the sum over all devices along these axes, replicated on each of them."""
    present = _manual_axes(axes)
    return _sum_in_float32(lambda x: lax.psum(x, present), x) if present else x


def _sum_in_float32(add: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Use float32 on CPU, because XLA for CPU aborts on bfloat16 sums if there is an auto axis."""
    if x.dtype != jnp.bfloat16:
        return add(x)
    wide = lambda x: add(x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
    return lax.platform_dependent(x, cpu=wide, default=add)


def max_over(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """Return the maximum over all devices along these axes, replicated on each of them."""
    present = _manual_axes(axes)
    return lax.pmax(x, present) if present else x


class Maximum(NamedTuple):
    """Statistic of a layer that is combined over tokens by its maximum instead of by its sum."""

    value: Array


Statistic = Array | Maximum
"""Statistic that a layer reports for its tokens: a sum, or a `Maximum`."""


def empty_statistic(like: Any, *leading: int) -> Statistic:
    """Return the float32 statistic of no tokens, with the shape of `like` after leading dims."""
    if isinstance(like, Maximum):
        return Maximum(jnp.full((*leading, *like.value.shape), -jnp.inf, jnp.float32))
    return jnp.zeros((*leading, *like.shape), jnp.float32)


def add_statistic(total: Statistic, found: Any, index: Array, counts: Array | None) -> Statistic:
    """Return the totals `[n, ...]` with the statistic of more tokens added at `index`, unless
    `counts` is false.
    """
    if isinstance(total, Maximum):
        found, combine, nothing = found.value, jnp.maximum, -jnp.inf
        return Maximum(_combine_at(total.value, found, index, counts, combine, nothing))
    return _combine_at(total, found, index, counts, jnp.add, 0)


def _combine_at(
    total: Array,
    found: Array,
    index: Array,
    counts: Array | None,
    combine: Callable[[Array, Array], Array],
    nothing: float,
) -> Array:
    found = found.astype(jnp.float32)
    found = found if counts is None else jnp.where(counts, found, nothing)
    old = lax.dynamic_index_in_dim(total, index, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, combine(old, found), index, 0)


def reduce_statistic(statistic: Statistic, axes: str | Sequence[str]) -> Statistic:
    """Return the statistic of the tokens of all devices along these axes."""
    if isinstance(statistic, Maximum):
        return Maximum(max_over(statistic.value, axes))
    return sum_over(statistic, axes)


def map_statistics(run: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `run` to each statistic of a tree."""
    return jax.tree.map(run, tree, *others, is_leaf=lambda node: isinstance(node, Maximum))


def broadcast_from(x: jax.Array, axis: str, position: int | jax.Array) -> jax.Array:
    """Broadcast the array from the device at `position` to all devices along the axis."""
    return sum_over(jnp.where(axis_index(axis) == position, x, 0), axis)


def all_gather(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """Return the shards concatenated along `dim`."""
    present = _manual_axes(axes)
    if not present:
        return x
    if x.dtype == jnp.bfloat16 and _is_cpu_program():
        return _all_gather_bfloat16_on_cpu(x, present, dim)
    return _all_gather(x, present, dim)


def _all_gather(x: jax.Array, present: tuple[str, ...], dim: int) -> jax.Array:
    if not dim or not _is_cpu_program():
        return lax.all_gather(x, present, axis=dim, tiled=True)
    # XLA for CPU gathers along the first dim and transposes the result for other dims.
    gathered = lax.all_gather(jnp.moveaxis(x, dim, 0), present, axis=0, tiled=True)
    return jnp.moveaxis(gathered, 0, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather_bfloat16_on_cpu(x: jax.Array, present: tuple[str, ...], dim: int) -> jax.Array:
    """Gather as in `_all_gather`, but sum the gradient in float32: see `_sum_in_float32`."""
    return _all_gather(x, present, dim)


_all_gather_bfloat16_on_cpu.defvjp(
    lambda x, present, dim: (_all_gather(x, present, dim), None),
    lambda present, dim, _, gradient: (reduce_scatter(gradient, present, dim),),
)


def _is_cpu_program() -> bool:
    """Return whether the program being traced targets CPUs. Unlike `lax.platform_dependent`, a
    decision at trace time adds nothing to programs for other devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "cpu"


def reduce_scatter(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """Sum over the axes, and return this device's shard of the sum along `dim`."""
    present = _manual_axes(axes)
    if not present:
        return x
    add = partial(lax.psum_scatter, axis_name=present, tiled=True)
    if dim and _is_cpu_program():  # XLA for CPU would transpose the result, as in `all_gather`
        first = jnp.moveaxis(x, dim, 0)
        return jnp.moveaxis(_sum_in_float32(partial(add, scatter_dimension=0), first), 0, dim)
    # XLA for TPU replaces some reduce-scatters with all-reduces, which doubles the traffic. This
    # affects arrays with dims of size 1, with several leading dims, or with a last dim whose shard
    # size is not a multiple of the number of lanes.
    size = x.shape[dim] // axis_size(present)
    own = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    after = [size for size in x.shape[dim + 1 :] if size > 1]
    if not after and size % LANES and math.prod(own) % LANES == 0:
        first = (size, *x.shape[:dim], *x.shape[dim + 1 :])
        compact = jnp.moveaxis(x, dim, 0).reshape(-1, LANES)
        scattered = _sum_in_float32(partial(add, scatter_dimension=0), compact).reshape(first)
        return jnp.moveaxis(scattered, 0, dim)
    before = [math.prod(x.shape[:dim])] if math.prod(x.shape[:dim]) > 1 else []
    compact = x.reshape(*before, x.shape[dim], *after)
    return _sum_in_float32(partial(add, scatter_dimension=len(before)), compact).reshape(own)


def all_to_all(
    x: jax.Array, axes: str | Sequence[str], split: int, join: int, size: int = 0
) -> jax.Array:
    """Send each device its chunk along `split`, and concatenate the received chunks along
    `join`.

    If `size` is set, groups of `size` adjacent devices along the axes exchange their chunks.
    """
    present, count = _manual_axes(axes), axis_size(axes)
    if not present or size == 1:
        return x
    groups = None
    if size and size < count:
        groups = [list(range(first, first + size)) for first in range(0, count, size)]
    return lax.all_to_all(x, present, split, join, tiled=True, axis_index_groups=groups)


def ring_shift(x: jax.Array, axis: str, step: int, size: int) -> jax.Array:
    """Return the array of the device that is `step` positions earlier in the ring of `size`
    devices.
    """
    if not _manual_axes(axis):
        return x
    return lax.ppermute(x, axis, [(place, (place + step) % size) for place in range(size)])


def with_layout(value: Array, order: Sequence[int]) -> Array:
    """Return the array; on TPUs, also fix the order of its dims in memory, from major to minor."""
    layout = Layout(tuple(order))
    return lax.platform_dependent(
        value, tpu=lambda value: with_layout_constraint(value, layout), default=lambda value: value
    )


# --- sequences sharded over the context axis ----------------------------------

FULL_SEGMENT_IDS = "row_segment_ids"
"""Key of the microbatch array `[B, S]` with the segment IDs of the full sequences, which exists
only if tokens are sharded.
"""
_PER_SEQUENCE_ARRAYS = ("example_ids", "source_ids")
"""Batch arrays without a token dim."""


def shard_tokens(batch: Mapping[str, Any], by_row: Sequence[str] = ()) -> Mapping[str, Any]:
    """Reduce a batch of full sequences to this device's tokens, and add the full sequences' segment
    IDs.

    `by_row` contains the names of additional arrays without a token dim.
    """
    if axis_size(CONTEXT) == 1:
        return batch
    whole = (*_PER_SEQUENCE_ARRAYS, *by_row)
    local = {name: local_shard(x, dim=1) for name, x in batch.items() if name not in whole}
    return {**batch, **local, FULL_SEGMENT_IDS: batch["segment_ids"]}


def num_chunks(group: int = 1) -> int:
    """Return the number of chunks in which groups of `group` adjacent devices divide sequences."""
    size = axis_size(CONTEXT)
    return 2 * size // group if group < size else 1


def local_positions(tokens: int, group: int = 1) -> Int[Array, " T"]:
    """Return the sequence positions of the `tokens` tokens held by this device, or by its group of
    `group` adjacent devices.
    """
    total = tokens * (axis_size(CONTEXT) // group)
    return local_shard(mark_varying(jnp.arange(total)), 0, group)


def contiguous_length(tokens: int) -> int:
    """Return the length in tokens of each contiguous chunk on this device."""
    return tokens if axis_size(CONTEXT) == 1 else tokens // 2


def local_starts(tokens: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the start positions of this device's two chunks, which hold `tokens` tokens in
    total.
    """
    return shard_starts(axis_index(CONTEXT), tokens)


def shard_starts(
    index: Int[Array, ""], tokens: int, group: int = 1
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the start positions of the two chunks of a group of `group` adjacent devices, which
    hold `tokens` tokens in total. `index` is the index of the group.
    """
    run = tokens // 2
    return index * run, (num_chunks(group) - 1 - index) * run


def full_sequence_length(inputs: Mapping[str, Any]) -> int:
    """Return the length in tokens (S) of a full sequence, given a microbatch's arrays."""
    return inputs.get(FULL_SEGMENT_IDS, inputs["positions"]).shape[1]


def gather_sequences(x: Array, dim: int) -> Array:
    """Gather all tokens of the sequences along `dim`, in sequence order."""
    return undo_zigzag(all_gather(x, CONTEXT, dim), dim)


def undo_zigzag(x: Array, dim: int, size: int = 0) -> Array:
    """Reorder the tokens of `size` adjacent devices from device order (zig-zag) to sequence order;
    0 means all devices.
    """
    size = size or axis_size(CONTEXT)
    if size == 1:
        return x
    pieces = x.reshape(*x.shape[:dim], size, 2, -1, *x.shape[dim + 1 :])
    first, last = (lax.index_in_dim(pieces, half, dim + 1, keepdims=False) for half in (0, 1))
    return jnp.concatenate([first, jnp.flip(last, dim)], axis=dim).reshape(x.shape)


def apply_zigzag(x: Array, dim: int, size: int) -> Array:
    """Reorder the tokens of `size` adjacent devices from sequence order to device order
    (zig-zag).
    """
    if size == 1:
        return x
    pieces = x.reshape(*x.shape[:dim], 2, size, -1, *x.shape[dim + 1 :])
    first, last = (lax.index_in_dim(pieces, half, dim, keepdims=False) for half in (0, 1))
    return jnp.stack([first, jnp.flip(last, dim)], axis=dim + 1).reshape(x.shape)


def local_shard(rows: Array, dim: int, group: int = 1) -> Array:
    """Return the two chunks of the full sequences that this device's group of `group` adjacent
    devices holds.
    """
    count, place = num_chunks(group), axis_index(CONTEXT) // group
    if count == 1:
        return rows
    pieces = rows.reshape(*rows.shape[:dim], count, -1, *rows.shape[dim + 1 :])
    places = jnp.stack([place, count - 1 - place])
    selected = jnp.take(pieces, places, axis=dim)
    return selected.reshape(*rows.shape[:dim], -1, *rows.shape[dim + 1 :])
