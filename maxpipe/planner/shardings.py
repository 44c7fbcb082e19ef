"""Compute the sharding, size and replication of every parameter and activation, without jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxpipe.config.schema import Config
from maxpipe.io.formatting import pluralize
from maxpipe.models.spec import Dims, Param
from maxpipe.optim.state_spec import BYTES
from maxpipe.parallel.axes import MESH_AXES, axis_table, axis_table_with_sequence
from maxpipe.planner.memory_terms import gib, optimizer_bytes
from maxpipe.planner.sizes import BETWEEN_MATMULS, Sizes

STACK = ("repeat", "stage", "layer")
"""Leading logical axes of parameters in pipelined layers. Parameters of prologue layers have only
the last of the listed axes."""
BATCH, TOKENS = "batch", "tokens"


@dataclass(frozen=True)
class ArraySharding:
    """Sharding of one array."""

    name: str
    axes: tuple[str, ...]
    """Logical axis of each dimension."""
    spec: tuple[tuple[str, ...], ...]
    """Mesh axes that shard each dimension, as in a `PartitionSpec`."""
    shape: tuple[int, ...]
    """Global shape, including vocabulary and chunk padding."""
    shard: tuple[int, ...]
    """Shape of the shard on one device."""
    num_bytes: int
    """Size in bytes of the shard on one device."""
    replicated: tuple[str, ...]
    """Mesh axes along which the array is replicated."""
    copies: int
    """Number of devices that hold the same shard."""
    frozen: bool = False
    """Whether the array is a frozen parameter, which has no optimizer state."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON-compatible data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Shardings:
    """Shardings of all arrays in a run."""

    mesh: dict[str, int]
    """Mesh axes with more than one device."""
    parameters: tuple[ArraySharding, ...]
    optimizer_bytes: int
    """Size in bytes of the optimizer state on one device."""
    activations: tuple[ArraySharding, ...]
    """Activations of one layer for one microbatch, on the stage that runs the layer."""

    @property
    def state_bytes(self) -> int:
        """Return the total bytes of parameters and optimizer state on one device."""
        return sum(array.num_bytes for array in self.parameters) + self.optimizer_bytes

    def to_json(self) -> dict[str, Any]:
        """Return JSON-compatible data, including totals."""
        return dataclasses.asdict(self) | {"state_bytes": self.state_bytes}


def compute_shardings(config: Config) -> Shardings:
    """Compute the shardings for a config with a resolved mesh."""
    sizes = Sizes(config)
    on = _Mesh(sizes)
    return Shardings(
        {axis: size for axis, size in sizes.mesh.axes.items() if size > 1},
        tuple(_parameters(on)),
        int(optimizer_bytes(sizes)),
        tuple(_activations(on)),
    )


@dataclass(frozen=True)
class _Mesh:
    sizes: Sizes

    def place(
        self, name: str, dims: Dims, spec: Sequence[tuple[str, ...]], dtype: str, ignored: str = ""
    ) -> ArraySharding:
        """Return the sharding of an array. Replicas along the axis `ignored` are not counted."""
        size = self.sizes.mesh.axes
        shard = tuple(
            -(-length // math.prod(size[axis] for axis in axes))
            for (length, _), axes in zip(dims, spec, strict=True)
        )
        used = {axis for axes in spec for axis in axes} | {ignored}
        same = tuple(axis for axis in MESH_AXES if size[axis] > 1 and axis not in used)
        return ArraySharding(
            name,
            tuple(logical for _, logical in dims),
            tuple(spec),
            tuple(length for length, _ in dims),
            shard,
            math.prod(shard) * BYTES[dtype],
            same,
            math.prod(size[axis] for axis in same),
        )


def _parameters(on: _Mesh) -> Iterator[ArraySharding]:
    sizes, model = on.sizes, on.sizes.model
    dtype = sizes.config.model.param_dtype
    table = axis_table(sizes.config.mesh) | {"stage": ("stage",)}

    def parameter(name: str, param: Param, stacked: Dims = ()) -> ArraySharding:
        dims = (*stacked, *sizes.mesh.padded(param.dims))
        placed = on.place(
            name, dims, [table.get(logical, ()) for _, logical in dims], param.own_dtype or dtype
        )
        return dataclasses.replace(placed, frozen=not param.trainable)

    def of_end(first: str) -> Iterator[ArraySharding]:
        for name, param in model.ends.params.items():
            if name[0] == first:
                yield parameter(".".join(name), param)

    yield from of_end("embedding")
    for kind, count in sizes.layers.prologue.items():
        for (part, name), each in model.layer_types[kind].params.items():
            yield parameter(f"outside.{kind}.{part}.{name}", each, ((count, STACK[-1]),))
    for kind, length in sizes.layers.chunk_slots.items():
        lengths = (sizes.config.pipeline.repeats, sizes.mesh.stages, length)
        for (part, name), each in model.layer_types[kind].params.items():
            stacked = tuple(zip(lengths, STACK, strict=True))
            yield parameter(f"layers.{kind}.{part}.{name}", each, stacked)
    for first in ("final_norm", "head", "ahead", "vision"):
        yield from of_end(first)


def _activations(on: _Mesh) -> Iterator[ArraySharding]:
    sizes, config = on.sizes, on.sizes.config
    table = axis_table_with_sequence(config.mesh)
    rows = sizes.batch.microbatch_size * math.prod(sizes.mesh.axes[axis] for axis in table[BATCH])
    tokens: Dims = ((rows, BATCH), (config.train.sequence_length, TOKENS))

    def activation(name: str, dims: Dims) -> ArraySharding:
        between = {logical for _, logical in dims} <= BETWEEN_MATMULS
        # Dims of activations are sharded only over the tensor axis, because fsdp shards the batch.
        spec = [
            tuple(axis for axis in table.get(logical, ()) if axis == "tensor")
            for _, logical in dims
        ]
        tokens_over = ("context", *(table["sequence"] if between else ()))
        whole = [table[BATCH], tokens_over, *spec]
        dtype = config.model.compute_dtype
        return on.place(name, (*tokens, *dims), whole, dtype, ignored="stage")

    yield activation("residual stream", ((config.model.d_model, "embed"),))
    for kind, layer_type in sizes.model.layer_types.items():
        for name, dims in layer_type.activations.items():
            yield activation(f"{kind}.{name}", dims)


# Text.


def format_shardings(found: Shardings) -> str:
    """Format shardings for a terminal."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items()) or "one device"
    lines = [
        mesh,
        "",
        f"parameters; {gib(found.state_bytes)} per device including optimizer state",
        *_table(found.mesh, found.parameters),
        "",
        "activations of one microbatch on its stage",
        *_table(found.mesh, found.activations),
    ]
    return "\n".join(lines)


def _table(mesh: Mapping[str, int], rows: Sequence[ArraySharding]) -> list[str]:
    """Return the lines of a table. Axes with a single device are omitted."""
    head = ("name", "axes", "sharded over", "shape", "shard", "bytes", "replicated over")
    cells = [
        (
            array.name + " (frozen)" * array.frozen,
            ", ".join(array.axes),
            ", ".join("+".join(filter(mesh.__contains__, axes)) or "-" for axes in array.spec),
            _shape(array.shape),
            _shape(array.shard),
            gib(array.num_bytes),
            f"{' x '.join(array.replicated)}: {pluralize(array.copies, 'device')}"
            if array.copies > 1
            else "-",
        )
        for array in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *cells)
    ]


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
