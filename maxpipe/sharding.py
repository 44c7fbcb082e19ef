"""The one table from logical axes to mesh axes, and what follows from it.

Model code names what a dimension means ("heads", "mlp"); this module knows on which
mesh axis that lies. Nothing else translates between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.check import DEFAULT_AXIS_RULES
from maxpipe.errors import ConfigError
from maxpipe.mesh import BATCH_AXES, FSDP, MANUAL_AXES, STAGE

STACK = ("repeat", "stage", "layer")
"""Logical axes in front of a parameter that is stacked over layers."""


@dataclass(frozen=True)
class AxisRules:
    """Logical axis -> mesh axes, as a hashable value that model code can hold."""

    table: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def from_config(cls, changes: Mapping[str, Sequence[str]]) -> AxisRules:
        """The default table with the changes of `mesh.axis_rules`."""
        merged = {**DEFAULT_AXIS_RULES, "stage": (STAGE,), **changes}
        return cls(tuple((logical, tuple(axes)) for logical, axes in merged.items()))

    def spec(self, logical: Sequence[str | None], where: str = "a tensor") -> PartitionSpec:
        """Partition of a tensor whose dims have these logical axes.

        Raises:
            ConfigError: two dims would lie on the same mesh axis.
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
        return PartitionSpec(*(_entry(axes) for axes in dims))


def _entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def manual_part(spec: PartitionSpec) -> PartitionSpec:
    """The spec with only the axes that the pipeline's program handles per device."""
    return PartitionSpec(
        *(_entry([axis for axis in _axes_of(entry) if axis in MANUAL_AXES]) for entry in spec)
    )


def fsdp_dim(spec: PartitionSpec) -> int | None:
    """The dim that is sharded over fsdp, if any."""
    return next((dim for dim, entry in enumerate(spec) if FSDP in _axes_of(entry)), None)


BATCH_SPEC = PartitionSpec(BATCH_AXES)
"""Of every array of a batch: rows over the batch axes, the same for all stages."""


def local_rows(sharding: NamedSharding, num_rows: int) -> np.ndarray:
    """Numbers of the rows of a batch that this process' devices hold, ascending."""
    indices = sharding.addressable_devices_indices_map((num_rows,)).values()
    return np.unique(np.concatenate([np.arange(num_rows)[index] for index in indices]))


def place_rows(
    host: Mapping[str, np.ndarray], rows: np.ndarray, num_rows: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Global arrays `[num_rows, ...]` from the rows that this process holds."""

    def place(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            wanted = np.arange(num_rows)[index[0]]
            return array[np.searchsorted(rows, wanted)]

        return jax.make_array_from_callback((num_rows, *array.shape[1:]), sharding, part)

    return {name: place(array) for name, array in host.items()}


def constrain(x: jax.Array, logical: Sequence[str | None], rules: AxisRules) -> jax.Array:
    """Ask for the table's placement on the automatic axes; a no-op without such axes.

    Inside the pipeline's per-device program the manual axes are already fixed, so only the
    automatic ones (tensor, context, expert) are named.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {axis for axis in mesh.auto_axes if mesh.shape[axis] > 1}
    if not automatic:
        return x
    spec = rules.spec(logical)
    dims = [_entry([axis for axis in _axes_of(entry) if axis in automatic]) for entry in spec]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*dims))


def vary(tree: Any, axes: Sequence[str] = MANUAL_AXES) -> Any:
    """Marks every leaf as possibly different on each device of these axes.

    Inside the per-device program jax tracks over which axes a value is the same. A value that
    is the same everywhere gets its gradient summed over devices behind our back, and makes a
    conditional on the stage index silently wrong; a varying one does neither.
    """

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in _varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def _varying_axes(x: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    # jax 0.10 has `vma`; later releases moved it.
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)
