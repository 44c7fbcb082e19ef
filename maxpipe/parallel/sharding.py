"""Partition specs and batch sharding from the table of logical axes in `axes`.

Model code names what a dim means ("heads", "mlp"); `axes` says over which mesh
axes that is split, and only this module makes jax specs of it.

Types that carry shardings: `mesh.shard_mode=explicit`.

In such a mesh jax knows at trace time how each array is divided, and refuses an operation whose
result it would have to guess. Here are the few ways to say it; in an automatic mesh they do
nothing. Inside the pipeline's per-device program all explicit axes are manual: nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxpipe.errors import ConfigError
from maxpipe.parallel.axes import MeshConfig, axis_table_with_sequence
from maxpipe.parallel.mesh import BATCH_AXES, FSDP, STAGE

Tree = Any


def explicit_axes() -> tuple[str, ...]:
    """Axes of the mesh of the program that is traced whose shardings types carry."""
    return tuple(jax.sharding.get_abstract_mesh().explicit_axes)


def auto_sharded(run: Callable[..., Tree], specs: Tree) -> Callable[..., Tree]:
    """`run` with shardings that the compiler chooses, but for those of its results.

    For what has no one answer in types: dims that are joined or cut, entries picked by index, and
    arrays made of nothing. `specs` are of whole results, in their form or a prefix of it.
    """
    axes = explicit_axes()
    if not axes:
        return run
    wanted = jax.tree.map(lambda spec: restrict_spec(spec, axes), specs, is_leaf=_is_spec)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=wanted)


def reshard_explicit(tree: Tree, specs: Tree) -> Tree:
    """Arrays, divided over the explicit axes as the specs of the same form say."""
    if not (axes := explicit_axes()):
        return tree
    return jax.tree.map(
        lambda leaf, spec: jax.sharding.reshard(leaf, restrict_spec(spec, axes)), tree, specs
    )


def reshard(tree: Tree, specs: Tree) -> Tree:
    """Arrays divided as the specs of the same form say, whatever the axes of the mesh are."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1:
        return tree
    if mesh.explicit_axes:
        return reshard_explicit(tree, specs)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def reshard_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """The array, divided over the explicit axes as another one of its shape is."""
    if not explicit_axes():
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding.spec)


def trace_on_mesh(mesh: Mesh, run: Callable[..., Tree]) -> Callable[..., Tree]:
    """`run`, traced for this mesh: of arrays in a jitted function's arguments alone jax would not
    know in which one to place a result.
    """

    def traced(*arguments: Any) -> Tree:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(*arguments)

    return traced


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same devices under automatic axes, for programs that leave all shardings to jax."""
    if not mesh.abstract_mesh.explicit_axes:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def rebind_mesh(mesh: Mesh, tree: Tree) -> Tree:
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


STACKED_AXES = ("repeat", "stage", "layer")
"""Logical axes in front of a parameter that is stacked over layers."""


@dataclass(frozen=True)
class AxisRules:
    """Logical axis -> mesh axes, as a hashable value that model code can hold."""

    table: tuple[tuple[str, tuple[str, ...]], ...]
    context_attention: str = "auto"
    """How tokens attend to those on other devices: `mesh.context_attention`."""
    collective_matmul: bool = False
    """Whether tokens travel to matmuls, and sums from them, part by part: `sequence`."""
    flattens_tokens: bool = False
    """Whether products with matrices have rows and tokens as one dim: `sequence`."""

    @classmethod
    def from_config(cls, config: MeshConfig) -> AxisRules:
        """The default table with the changes of `mesh.axis_rules`."""
        table = {**axis_table_with_sequence(config), "stage": (STAGE,)}
        return cls(tuple(table.items()), config.context_attention, config.collective_matmul)

    def for_platform(self, platform: str) -> AxisRules:
        """For programs that are trained with on devices of a platform, as jax names it."""
        return replace(self, flattens_tokens=platform == "cpu")

    def spec(self, logical: Sequence[str | None], where: str = "a tensor") -> PartitionSpec:
        """Partition of a tensor whose dims have these logical axes.

        Raises:
            ConfigError: two dims would be on the same mesh axis.
        """
        table = dict(self.table)
        owner: dict[str, str] = {}
        dims: list[tuple[str, ...]] = []
        for name in logical:
            axes = table.get(name, ()) if name else ()
            for axis in axes:
                if axis in owner:
                    raise ConfigError.one(
                        "mesh.axis_rules",
                        f"{name}: [{', '.join(axes)}]",
                        f"{where} has dims {owner[axis]!r} and {name!r} on one mesh axis, "
                        f"{axis!r}: a mesh axis can shard one dim of a tensor.",
                        f"Set mesh.axis_rules.{name}=[], or move {owner[axis]!r} elsewhere.",
                    )
                owner[axis] = str(name)
            dims.append(axes)
        return PartitionSpec(*(_spec_entry(axes) for axes in dims))


def _spec_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one dim in a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def restrict_spec(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The spec with only these mesh axes."""
    return PartitionSpec(
        *(_spec_entry([axis for axis in entry_axes(entry) if axis in axes]) for entry in spec)
    )


def fsdp_dim(spec: PartitionSpec) -> int | None:
    """The dim that is sharded over fsdp, and maybe over more axes beside it, if any."""
    return next((dim for dim, entry in enumerate(spec) if FSDP in entry_axes(entry)), None)


BATCH_SPEC = PartitionSpec(BATCH_AXES)
"""Of every array of a batch: rows over the batch axes, the same for all stages."""


def sequences_by_process(sharding: NamedSharding, num_rows: int) -> dict[int, np.ndarray]:
    """Numbers of the rows of a batch that each process' devices hold, ascending."""
    found: dict[int, list[np.ndarray]] = {}
    for device, index in sharding.devices_indices_map((num_rows,)).items():
        found.setdefault(device.process_index, []).append(np.arange(num_rows)[index])
    return {process: np.unique(np.concatenate(rows)) for process, rows in found.items()}


def local_sequences(sharding: NamedSharding, num_rows: int) -> np.ndarray:
    """Numbers of the rows of a batch that this process' devices hold, ascending."""
    return sequences_by_process(sharding, num_rows)[jax.process_index()]


def make_global_batch(
    host: Mapping[str, np.ndarray], rows: np.ndarray, num_rows: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Global arrays `[num_rows, ...]` from the rows that this process holds."""

    def place(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "only this process' devices are asked for"
            wanted = np.arange(num_rows)[index[0]]
            return array[np.searchsorted(rows, wanted)]

        return jax.make_array_from_callback((num_rows, *array.shape[1:]), sharding, part)

    return {name: place(array) for name, array in host.items()}


def reshard_batch(arrays: Mapping[str, jax.Array], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Arrays `[B, ...]` of another mesh, split over the rows alone, on the mesh of `sharding`.

    Each process takes the rows that its devices need from those that they hold, which must be
    enough of them. Of several processes they go by way of the host.
    """
    if jax.process_count() == 1:
        return jax.device_put(dict(arrays), dict.fromkeys(arrays, sharding))
    found: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        parts = {shard.index[0].indices(len(array))[0]: shard for shard in array.addressable_shards}
        mine = [np.asarray(parts[first].data) for first in sorted(parts)]
        assert isinstance(array.sharding, NamedSharding)
        rows = local_sequences(array.sharding, len(array))
        found |= make_global_batch({name: np.concatenate(mine)}, rows, len(array), sharding)
    return found


def constrain(x: jax.Array, logical: Sequence[str | None], rules: AxisRules) -> jax.Array:
    """Ask for the table's placement on the automatic axes; a no-op without such axes.

    Inside the pipeline's per-device program the manual axes are already fixed, so only the
    automatic ones (tensor, context, expert) are named. In a program that is automatic throughout,
    dims without a name stay as they are: rows are split over the batch axes there.
    """
    automatic = auto_axes()
    if not automatic:
        return x
    spec = rules.spec(logical)
    dims: list[Any] = [
        _spec_entry([axis for axis in entry_axes(entry) if axis in automatic]) for entry in spec
    ]
    if not automatic.isdisjoint(BATCH_AXES):
        dims = [PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in dims]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*dims))


def shard_embeddings_by_batch(x: jax.Array, rules: AxisRules) -> jax.Array:
    """Rows of an embedding table `[B, T, D]`, split over the batch axes along B and not along D.

    They come split along D as the table is. Of axes that go over to B, and context, which does not,
    XLA makes a copy of everything on each device; one after the other, an all-to-all and an
    all-gather. A no-op but in programs that are automatic throughout, over such axes.
    """
    automatic, (entry,) = auto_axes(), rules.spec(("embed",))
    rest = tuple(axis for axis in entry_axes(entry) if axis in automatic and axis not in BATCH_AXES)
    if not rest or automatic.isdisjoint(BATCH_AXES):
        return x
    for dim in (rest, None):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES, None, dim))
    return x


def auto_axes() -> set[str]:
    """Mesh axes of more than one device that are left to the compiler here."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis in mesh.auto_axes if mesh.shape[axis] > 1}
