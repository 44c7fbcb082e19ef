"""Compute the shards of arrays and of the batch on one device; does not import jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from maxpipe.config.schema import Config
from maxpipe.models.count import selection_words
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.recurrent import Recurrent
from maxpipe.models.spec import Dims, Model, Part
from maxpipe.parallel.axes import MESH_AXES, MeshConfig, axis_table_with_sequence


@dataclass(frozen=True)
class MeshShards:
    """Shards of arrays on a resolved mesh."""

    config: MeshConfig

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """Return the sizes of the mesh axes across all slices."""
        mesh = self.config
        return {
            axis: getattr(mesh, f"ici_{axis}") * getattr(mesh, f"dcn_{axis}") for axis in MESH_AXES
        }

    @property
    def num_devices(self) -> int:
        """Return the number of devices in the mesh."""
        return math.prod(self.axes.values())

    @property
    def num_slices(self) -> int:
        """Return the number of slices in the mesh."""
        return math.prod(getattr(self.config, f"dcn_{axis}") for axis in MESH_AXES)

    @cached_property
    def table(self) -> Mapping[str, tuple[str, ...]]:
        """Return the mesh axes that shard each logical axis, including the sequence axis."""
        return axis_table_with_sequence(self.config)

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages (P)."""
        return self.axes["stage"]

    @property
    def tensor(self) -> int:
        """Return the size of the tensor axis."""
        return self.axes["tensor"]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Return the axes along which devices hold different tokens."""
        return (*self.table["batch"], "context")

    @property
    def token_shards(self) -> int:
        """Return the number of devices over which tokens are sharded between the matmuls of a
        layer.
        """
        return self.shards(self.table["sequence"])

    def nontrivial_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the given axes that have more than one device, in mesh order."""
        named = {*axes}
        return tuple(axis for axis in MESH_AXES if axis in named and self.axes[axis] > 1)

    def shards(self, axes: Iterable[str]) -> int:
        """Return the product of the sizes of the given mesh axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def ring_share(self, axes: Iterable[str]) -> float:
        """Return the fraction of an array that each device sends in a ring all-gather or
        reduce-scatter.
        """
        return 1.0 - 1.0 / self.shards(axes)

    def elements(self, dims: Dims, *, whole: bool = False) -> int:
        """Return the number of elements in one device's shard of an array.

        If `whole` is set, the array is first gathered over fsdp and any other axes that shard the
        same dimension.
        """
        count = 1
        for size, logical in dims:
            count *= -(-size // self._axis_shards.get(logical, (1, 1))[whole])
        return count

    @cached_property
    def _axis_shards(self) -> Mapping[str, tuple[int, int]]:
        """Map each logical axis to its number of shards in stored arrays and in gathered arrays."""
        return {
            logical: (self.shards(axes), 1 if "fsdp" in axes else self.shards(axes))
            for logical, axes in self.table.items()
        }

    def gathered_over(self, dims: Dims) -> tuple[str, ...]:
        """Return the axes over which a parameter is gathered for use.

        The axes are fsdp and any others that shard the same dimension, as in
        `pipeline.weights.WeightSharding.axes`.
        """
        split = (self.table.get(logical, ()) for _, logical in dims)
        return self.nontrivial_axes(next((axes for axes in split if "fsdp" in axes), ()))

    def axes_of(self, dims: Dims) -> set[str]:
        """Return all axes that shard an array."""
        return {axis for _, logical in dims for axis in self.table.get(logical, ())}

    def owned_over(self, dims: Dims) -> tuple[str, ...]:
        """Return the token axes over which a parameter remains sharded while it is used."""
        split = self.axes_of(dims) & {*self.token_axes}
        return self.nontrivial_axes(split - {*self.gathered_over(dims)})

    def reduced_over(self, dims: Dims) -> tuple[str, ...]:
        """Return the axes over which a gradient is summed at the end of a step."""
        settled = {*self.gathered_over(dims), *self.owned_over(dims)}
        return self.nontrivial_axes({*self.token_axes} - settled)

    def padded(self, dims: Dims) -> Dims:
        """Return the dims with the vocabulary padded to a multiple of its number of shards."""
        shards = self.shards(self.table["vocab"])
        return tuple(
            (-(-size // shards) * shards if logical == "vocab" else size, logical)
            for size, logical in dims
        )

    @property
    def splits_columns(self) -> bool:
        """Return whether fsdp shards the columns of the embedding table."""
        return "fsdp" in self.table["embed"]

    def tensor_shards(self, logical: str) -> int:
        """Return the number of activation shards along a logical axis."""
        return self.tensor if "tensor" in self.table.get(logical, ()) else 1

    def divides(self, model: Model, axes: Mapping[str, int]) -> bool:
        """Return whether mesh axes of these sizes evenly divide the parameters of every layer."""
        return all(
            size % math.prod(axes.get(axis, 1) for axis in self.table.get(logical, ())) == 0
            for kind in model.layer_types.values()
            for param in kind.params.values()
            for size, logical in param.dims
        )


@dataclass(frozen=True)
class BatchShard:
    """Sequences and tokens on one device."""

    config: Config
    mesh: MeshShards

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per step (M)."""
        return self.config.pipeline.microbatches

    @property
    def microbatch_size(self) -> int:
        """Return the number of sequences per microbatch on one device (B)."""
        return max(1, self.per_device // self.microbatches)

    @property
    def per_device(self) -> int:
        """Return the number of sequences per step on one device."""
        return self.config.train.batch_size // self.mesh.shards(self.mesh.table["batch"])

    @property
    def tokens(self) -> int:
        """Return the number of tokens per microbatch on one device (B * T)."""
        return self.microbatch_size * self.tokens_per_sequence

    @property
    def tokens_per_sequence(self) -> int:
        """Return the number of tokens per sequence on one device (T)."""
        return self.config.train.sequence_length // self.mesh.axes["context"]

    @property
    def contiguous_tokens(self) -> int:
        """Return the length of each contiguous chunk of a sequence that one device holds."""
        return self.tokens_per_sequence // (2 if self.mesh.axes["context"] > 1 else 1)

    @property
    def selection_words(self) -> int:
        """Return the number of words that store the selections of sparse attention per
        microbatch.
        """
        words = selection_words(self.config.train.sequence_length, self.mesh.axes["context"])
        return self.microbatch_size * words


@lru_cache(maxsize=64)
def with_shards(model: Model, shards: int, rows: int, tokens: int, whole: int) -> Model:
    """Return the model with its experts sharded over `shards` devices, and sequences sharded over
    the context axis.

    Every device holds `tokens` of the `whole` tokens in each of `rows` sequences. Calls with equal
    arguments return the same object, so that results cached per object can be reused.
    """

    def divided(part: Part) -> Part:
        if isinstance(part, Recurrent) and tokens < whole:
            return part.with_shard(whole // tokens, tokens // 2)
        return part.with_shards(shards, rows, tokens, whole) if isinstance(part, Experts) else part

    return model.map_parts(divided)
