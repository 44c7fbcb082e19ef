"""Pieces of a program that are written for one device, in whatever program they stand.

Collectives of the per-device program, over those of its axes that have more than one device.

An axis of size one stays out of the program: its collectives would be no-ops that
compilers have tripped over. Callers name axes and need not know their sizes.

Arrays whose place in a TPU's memory is said, and not left to the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from maxpipe.parallel.mesh import BATCH_AXES, MANUAL_AXES, TOKEN_AXES
from maxpipe.parallel.sharding import auto_axes, restrict_spec


def mark_varying(tree: Any) -> Any:
    """Marks every leaf as possibly different on each device.

    Inside the per-device program jax tracks over which axes a value is the same. A value that
    is the same everywhere gets its gradient summed over devices behind our back, and makes a
    conditional on the stage index silently wrong (jax#40823); a varying one does neither.
    """

    def mark(leaf: jax.Array) -> jax.Array:
        kind: Any = jax.typeof(leaf)
        # jax 0.10 has `vma`; later releases moved it.
        known = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
        manual = jax.sharding.get_abstract_mesh().manual_axes
        missing = tuple(a for a in MANUAL_AXES if a in manual and a not in known)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def map_shards(
    run: Callable[..., Any], in_specs: Any, out_specs: Any, *, states_types: bool = False
) -> Callable[..., Any]:
    """`run` on each device's shards over all axes that are not manual yet; specs name only those.

    What kernels need: a Mosaic call must see every axis as manual, those of size 1, too, and states
    nothing of what varies, so that nothing is checked inside. Results are marked as varying. Not to
    be differentiated: the marks would become sums over devices. `states_types`: what is called
    states what varies, and rules for its gradients that are used inside compare that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rest = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
    if not rest:
        return run
    inside = jax.shard_map(
        run, axis_names=rest, in_specs=in_specs, out_specs=out_specs, check_vma=states_types
    )
    return lambda *arguments: mark_varying(inside(*arguments))


def map_batch_shards(run: Callable[[Any, Any], Any], rows: Any, shared: Any) -> Any:
    """`run(rows, shared)` on each device's rows of the batch, and on all of what they share.

    Rows are the first dim. In the pipeline's program a device has its own rows anyway.
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in auto_axes())
    if not axes:
        return run(rows, shared)
    mine = PartitionSpec(axes)
    return jax.shard_map(
        run, axis_names=set(axes), in_specs=(mine, PartitionSpec()), out_specs=mine
    )(rows, shared)


def sum_count(count: jax.Array, axes: Sequence[str] = TOKEN_AXES) -> jax.Array:
    """The sum of a count over devices that have other tokens; nothing is differentiated here.

    In a program that is automatic throughout a count is that of all rows already.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in axes if axis in manual)
    count = lax.stop_gradient(count)
    return mark_varying(lax.psum(count, axes)) if axes else count


LANES = 128
"""Elements of the last dim in a register of a TPU."""


def manual_axes_of(mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the program is written per device."""
    return tuple(axis for axis in MANUAL_AXES if mesh.shape[axis] > 1)


def _manual_axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    named = (axes,) if isinstance(axes, str) else axes
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in named if axis in manual)


def map_auto_axes(
    run: Callable[[jax.Array], jax.Array], entries: Sequence[Any]
) -> Callable[[jax.Array], jax.Array]:
    """`run` on each device's shard over the automatic axes, too.

    `entries` name those axes for each dim of the array, as a PartitionSpec does. XLA's partitioner
    keeps such a dim divided through sums and permutes, but puts it together before it gathers or
    scatters another one: with tensor 4 that is four times the traffic, and memory.
    """
    mesh = jax.sharding.get_abstract_mesh()
    named = [axes if isinstance(axes, tuple) else (axes,) for axes in entries if axes]
    divided = {axis for axes in named for axis in axes if mesh.shape[axis] > 1}
    if not divided:
        return run
    spec = restrict_spec(PartitionSpec(*entries), tuple(divided))
    return jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=divided)


def axis_index(axis: str) -> jax.Array:
    """This device's position on the axis."""
    return lax.axis_index(axis) if _manual_axes(axis) else jnp.int32(0)


def axis_size(axes: str | Sequence[str]) -> int:
    """Number of devices along the axes."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in _manual_axes(axes))


def sum_over(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """The sum over all devices of these axes, the same on each."""
    present = _manual_axes(axes)
    return _sum_in_float32(lambda x: lax.psum(x, present), x) if present else x


def _sum_in_float32(add: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The sum, on CPUs in float32: XLA aborts there on bfloat16 beside an automatic axis."""
    if x.dtype != jnp.bfloat16:
        return add(x)
    wide = lambda x: add(x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
    return lax.platform_dependent(x, cpu=wide, default=add)


def max_over(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """The maximum over all devices of these axes, the same on each."""
    present = _manual_axes(axes)
    return lax.pmax(x, present) if present else x


def broadcast_from(x: jax.Array, axis: str, position: int | jax.Array) -> jax.Array:
    """The value of the device at `position` of the axis, on all of them."""
    return sum_over(jnp.where(axis_index(axis) == position, x, 0), axis)


def all_gather(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """Shards along `dim` put together."""
    present = _manual_axes(axes)
    if not present:
        return x
    if not dim or not _is_cpu_program():
        return lax.all_gather(x, present, axis=dim, tiled=True)
    # XLA for CPU gathers along the first dim, and puts the whole into another order for others.
    found = lax.all_gather(jnp.moveaxis(x, dim, 0), present, axis=0, tiled=True)
    return jnp.moveaxis(found, 0, dim)


def _is_cpu_program() -> bool:
    """Whether the program that is traced is for CPUs. Unlike a choice while it is lowered, one that
    is made here leaves no trace in programs for other devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "cpu"


def reduce_scatter(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """This device's shard along `dim` of the sum over the axes."""
    present = _manual_axes(axes)
    if not present:
        return x
    add = partial(lax.psum_scatter, axis_name=present, tiled=True)
    if dim and _is_cpu_program():  # as above
        first = jnp.moveaxis(x, dim, 0)
        return jnp.moveaxis(_sum_in_float32(partial(add, scatter_dimension=0), first), 0, dim)
    # XLA for TPU makes all-reduces, twice the traffic, of those with dims of one entry, with
    # several dims in front, or along a last dim in shards that are not whole registers.
    size = x.shape[dim] // axis_size(present)
    own = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    after = [size for size in x.shape[dim + 1 :] if size > 1]
    if not after and size % LANES and math.prod(own) % LANES == 0:
        first = (size, *x.shape[:dim], *x.shape[dim + 1 :])
        compact = jnp.moveaxis(x, dim, 0).reshape(-1, LANES)
        found = _sum_in_float32(partial(add, scatter_dimension=0), compact).reshape(first)
        return jnp.moveaxis(found, 0, dim)
    before = [math.prod(x.shape[:dim])] if math.prod(x.shape[:dim]) > 1 else []
    compact = x.reshape(*before, x.shape[dim], *after)
    return _sum_in_float32(partial(add, scatter_dimension=len(before)), compact).reshape(own)


def all_to_all(x: jax.Array, axes: str | Sequence[str], split: int, join: int) -> jax.Array:
    """To each device of the axes its part along `split`; what arrives is joined along `join`."""
    present = _manual_axes(axes)
    return lax.all_to_all(x, present, split, join, tiled=True) if present else x


def ring_shift(x: jax.Array, axis: str, step: int, size: int) -> jax.Array:
    """The value of the device `step` positions before, around the ring of `size`."""
    if not _manual_axes(axis):
        return x
    return lax.ppermute(x, axis, [(place, (place + step) % size) for place in range(size)])


def with_layout(value: Array, order: Sequence[int]) -> Array:
    """The value, on TPUs laid out with its dims in this order, from major to minor."""
    layout = Layout(tuple(order))
    return lax.platform_dependent(
        value, tpu=lambda value: with_layout_constraint(value, layout), default=lambda value: value
    )
