"""Partition specs and batch sharding, derived from the table of logical axes in `axes`.

Model code gives dims logical names ("heads", "mlp"). `axes` defines the mesh axes over which a dim
with such a name is sharded. Only this module converts logical names to JAX partition specs.

With `mesh.shard_mode=explicit`, array types include shardings: JAX tracks at trace time how each
array is sharded, and ambiguous operations raise an error. Functions in this module resolve the
ambiguity, and have no effect on a mesh with auto axes. Inside the pipeline's per-device program,
all explicit axes become manual, so the mode has no effect there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxpipe.errors import Code, ConfigError
from maxpipe.parallel.axes import ContextAttention, MeshConfig, axis_table_with_sequence
from maxpipe.parallel.mesh import BATCH_AXES, FSDP, STAGE

Tree = Any


def explicit_axes() -> tuple[str, ...]:
    """Return the explicit axes of the current abstract mesh."""
    return tuple(jax.sharding.get_abstract_mesh().explicit_axes)


def auto_sharded(run: Callable[..., Tree], specs: Tree) -> Callable[..., Tree]:
    """Return a version of `run` in which the compiler chooses all shardings except the output
    shardings.

    This is needed for operations whose output sharding is ambiguous with explicit axes: reshapes,
    indexing and newly created arrays. `specs` is a tree of output PartitionSpecs, or a prefix of
    that tree.
    """
    axes = explicit_axes()
    if not axes:
        return run
    wanted = jax.tree.map(lambda spec: restrict_spec(spec, axes), specs, is_leaf=_is_spec)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=wanted)


def reshard_explicit(tree: Tree, specs: Tree) -> Tree:
    """Reshard arrays over the explicit axes, given a tree of specs with the same structure."""
    if not (axes := explicit_axes()):
        return tree
    return jax.tree.map(
        lambda leaf, spec: jax.sharding.reshard(leaf, restrict_spec(spec, axes)), tree, specs
    )


def reshard(tree: Tree, specs: Tree) -> Tree:
    """Reshard arrays over axes of any type, given a tree of specs with the same structure."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1:
        return tree
    if mesh.explicit_axes:
        return reshard_explicit(tree, specs)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def reshard_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Reshard an array over the explicit axes to match another array of the same shape."""
    if not explicit_axes():
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding.spec)


def trace_on_mesh(mesh: Mesh, run: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return `run` wrapped so that it is traced under this mesh. If no argument is on the mesh, JAX
    cannot infer the mesh of the outputs.
    """

    def traced(*arguments: Any) -> Tree:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(*arguments)

    return traced


def auto_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices with auto axes, for which the compiler chooses
    shardings.
    """
    if not mesh.abstract_mesh.explicit_axes:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def rebind_mesh(mesh: Mesh, tree: Tree) -> Tree:
    """Return the same arrays on another mesh of the same devices, without copying."""

    def seen(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        if array.sharding.mesh == mesh:
            return array
        sharding = NamedSharding(mesh, array.sharding.spec, memory_kind=array.sharding.memory_kind)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    return jax.tree.map(seen, tree)


def with_shardings(abstract: Tree, shardings: Tree) -> Tree:
    """Return `ShapeDtypeStruct`s with these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )


def is_on_host(x: jax.Array) -> bool:
    """Return whether an array is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Move arrays that are in host memory to device memory."""
    move = lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x  # noqa: E731
    return jax.tree.map(move, tree)


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


STACKED_AXES = ("repeat", "stage", "layer")
"""Logical axes of the leading dims in a parameter that is stacked over layers."""


@dataclass(frozen=True)
class AxisRules:
    """Table that maps logical axes to mesh axes, as a hashable object for model code."""

    table: tuple[tuple[str, tuple[str, ...]], ...]
    context_attention: ContextAttention = ContextAttention()  # noqa: RUF009  frozen
    """Communication method for attention over the context axis, without the sizes of axes."""
    collective_matmul: bool = False
    """Whether all-gathers and reduce-scatters of tokens run as a ring that overlaps with
    matmuls."""
    flattens_tokens: bool = False
    """Whether matmuls flatten sequences and tokens into one dim."""

    @classmethod
    def from_config(cls, config: MeshConfig) -> AxisRules:
        """Return the rules of a mesh config, including the overrides in `mesh.axis_rules`."""
        table = {**axis_table_with_sequence(config), "stage": (STAGE,)}
        return cls(
            tuple(table.items()), ContextAttention.from_config(config), config.collective_matmul
        )

    def for_platform(self, platform: str) -> AxisRules:
        """Return the rules for training on a platform, such as `cpu` or `tpu`."""
        return replace(self, flattens_tokens=platform == "cpu")

    def spec(self, logical: Sequence[str | None], where: str = "a tensor") -> PartitionSpec:
        """Return the partition spec of a tensor whose dims have these logical axes.

        Raises:
            ConfigError: two dims would be sharded over the same mesh axis.
        """
        table = dict(self.table)
        owner: dict[str, str] = {}
        dims: list[tuple[str, ...]] = []
        for name in logical:
            axes = table.get(name, ()) if name else ()
            for axis in axes:
                if axis in owner:
                    raise ConfigError.one(
                        Code.MESH_AXIS_RULE,
                        "mesh.axis_rules",
                        f"{name}: [{', '.join(axes)}]",
                        f"{where} has dims {owner[axis]!r} and {name!r} on the same mesh axis "
                        f"{axis!r}, but a mesh axis can shard only one dim of a tensor.",
                        f"Set mesh.axis_rules.{name}=[], or change the rule of {owner[axis]!r}.",
                    )
                owner[axis] = str(name)
            dims.append(axes)
        return PartitionSpec(*(_spec_entry(axes) for axes in dims))


def _spec_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes named in the spec entry of one dim."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def restrict_spec(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Return the spec with only the given mesh axes."""
    return PartitionSpec(
        *(_spec_entry([axis for axis in entry_axes(entry) if axis in axes]) for entry in spec)
    )


def fsdp_dim(spec: PartitionSpec) -> int | None:
    """Return the index of the dim that is sharded over fsdp, possibly along with other axes, or
    None.
    """
    return next((dim for dim, entry in enumerate(spec) if FSDP in entry_axes(entry)), None)


BATCH_SPEC = PartitionSpec(BATCH_AXES)
"""PartitionSpec of every batch array: sequences are sharded over the batch axes and replicated on
all stages."""


def sequences_by_process(sharding: NamedSharding, num_rows: int) -> dict[int, np.ndarray]:
    """Map each process to the sorted indices of the sequences on its devices."""
    rows_by_process: dict[int, list[np.ndarray]] = {}
    for device, index in sharding.devices_indices_map((num_rows,)).items():
        rows_by_process.setdefault(device.process_index, []).append(np.arange(num_rows)[index])
    return {process: np.unique(np.concatenate(rows)) for process, rows in rows_by_process.items()}


def local_sequences(sharding: NamedSharding, num_rows: int) -> np.ndarray:
    """Return the sorted indices of the batch sequences on this process's devices."""
    return sequences_by_process(sharding, num_rows)[jax.process_index()]


def make_global_batch(
    host: Mapping[str, np.ndarray], rows: np.ndarray, num_rows: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Return global arrays `[num_rows, ...]` from the sequences that this process holds."""

    def place(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "jax must request local shards only"
            wanted = np.arange(num_rows)[index[0]]
            return array[np.searchsorted(rows, wanted)]

        return jax.make_array_from_callback((num_rows, *array.shape[1:]), sharding, part)

    return {name: place(array) for name, array in host.items()}


def reshard_batch(arrays: Mapping[str, jax.Array], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Move arrays `[B, ...]`, which are sharded over sequences only, to the mesh of `sharding`.

    The devices of each process must already hold all sequences that they need. If there are several
    processes, the arrays are copied through host memory.
    """
    if jax.process_count() == 1:
        return jax.device_put(dict(arrays), dict.fromkeys(arrays, sharding))
    global_batch: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        parts = {shard.index[0].indices(len(array))[0]: shard for shard in array.addressable_shards}
        local_parts = [np.asarray(parts[first].data) for first in sorted(parts)]
        assert isinstance(array.sharding, NamedSharding)
        rows = local_sequences(array.sharding, len(array))
        global_batch |= make_global_batch(
            {name: np.concatenate(local_parts)}, rows, len(array), sharding
        )
    return global_batch


def constrain(x: jax.Array, logical: Sequence[str | None], rules: AxisRules) -> jax.Array:
    """Constrain an array to the table's sharding over the auto axes, if any.

    Inside the pipeline's per-device program, only the auto axes are constrained. If the batch axes
    are auto axes, dims without a name remain unconstrained, because sequences are sharded over the
    batch axes.
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
    """Reshard embeddings `[B, T, D]` from dim D, which is sharded in the table, to dim B.

    The batch axes move from D to B, and the context axis is removed. XLA would replicate the array
    to perform both changes at once; two constraints result in an all-to-all and an all-gather. This
    function is a no-op unless these axes are auto axes.
    """
    automatic, (entry,) = auto_axes(), rules.spec(("embed",))
    other_axes = tuple(
        axis for axis in entry_axes(entry) if axis in automatic and axis not in BATCH_AXES
    )
    if not other_axes or automatic.isdisjoint(BATCH_AXES):
        return x
    for dim in (other_axes, None):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES, None, dim))
    return x


def auto_axes() -> set[str]:
    """Return the auto axes of the current mesh that have more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis in mesh.auto_axes if mesh.shape[axis] > 1}
