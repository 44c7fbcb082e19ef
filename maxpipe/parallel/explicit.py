"""Types that carry shardings: `mesh.shard_mode=explicit`.

In such a mesh jax knows at trace time how each array is divided, and refuses an operation whose
result it would have to guess. Here are the few ways to say it; in an automatic mesh they do
nothing. Inside the pipeline's per-device program all explicit axes are manual: nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxpipe.parallel.sharding import restrict

Tree = Any


def explicit_axes() -> tuple[str, ...]:
    """Axes of the mesh of the program that is traced whose shardings types carry."""
    return tuple(jax.sharding.get_abstract_mesh().explicit_axes)


def left_to_compiler(run: Callable[..., Tree], specs: Tree) -> Callable[..., Tree]:
    """`run` with shardings that the compiler chooses, but for those of its results.

    For what has no one answer in types: dims that are joined or cut, entries picked by index, and
    arrays made of nothing. `specs` are of whole results, in their form or a prefix of it.
    """
    axes = explicit_axes()
    if not axes:
        return run
    wanted = jax.tree.map(lambda spec: restrict(spec, axes), specs, is_leaf=_is_spec)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=wanted)


def divided(tree: Tree, specs: Tree) -> Tree:
    """Arrays, divided over the explicit axes as the specs of the same form say."""
    if not (axes := explicit_axes()):
        return tree
    return jax.tree.map(
        lambda leaf, spec: jax.sharding.reshard(leaf, restrict(spec, axes)), tree, specs
    )


def placed(tree: Tree, specs: Tree) -> Tree:
    """Arrays divided as the specs of the same form say, whatever the axes of the mesh are."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1:
        return tree
    if mesh.explicit_axes:
        return divided(tree, specs)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def divided_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """The array, divided over the explicit axes as another one of its shape is."""
    if not explicit_axes():
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding.spec)


def on_mesh(mesh: Mesh, run: Callable[..., Tree]) -> Callable[..., Tree]:
    """`run`, traced for this mesh: of arrays in a jitted function's arguments alone jax would not
    know in which one to place a result.
    """

    def traced(*arguments: Any) -> Tree:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(*arguments)

    return traced


def automatic(mesh: Mesh) -> Mesh:
    """The same devices under automatic axes, for programs that leave all shardings to jax."""
    if not mesh.abstract_mesh.explicit_axes:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def placed_on(mesh: Mesh, tree: Tree) -> Tree:
    """The same arrays, not copied, seen as arrays of a mesh of the same devices."""

    def seen(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        if array.sharding.mesh == mesh:
            return array
        sharding = NamedSharding(mesh, array.sharding.spec, memory_kind=array.sharding.memory_kind)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    return jax.tree.map(seen, tree)


def with_shardings(abstract: Tree, shardings: Tree) -> Tree:
    """Shapes and types together with shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
