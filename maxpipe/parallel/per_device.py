"""Pieces of a program that are written for one device, in whatever program they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.parallel.mesh import BATCH_AXES, MANUAL_AXES, TOKEN_AXES
from maxpipe.parallel.sharding import automatic_axes


def vary(tree: Any) -> Any:
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


def on_shards(
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
    return lambda *arguments: vary(inside(*arguments))


def on_rows_of_device(run: Callable[[Any, Any], Any], rows: Any, shared: Any) -> Any:
    """`run(rows, shared)` on each device's rows of the batch, and on all of what they share.

    Rows are the first dim. In the pipeline's program a device has its own rows anyway.
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in automatic_axes())
    if not axes:
        return run(rows, shared)
    mine = PartitionSpec(axes)
    return jax.shard_map(
        run, axis_names=set(axes), in_specs=(mine, PartitionSpec()), out_specs=mine
    )(rows, shared)


def over_devices(count: jax.Array, axes: Sequence[str] = TOKEN_AXES) -> jax.Array:
    """The sum of a count over devices that have other tokens; nothing is differentiated here.

    In a program that is automatic throughout a count is that of all rows already.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in axes if axis in manual)
    count = lax.stop_gradient(count)
    return vary(lax.psum(count, axes)) if axes else count
