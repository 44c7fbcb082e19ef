"""What a config means for one device: shards, rows, chunks and their bytes. No jax.

The model's parameters and the activations of a layer are listed here as shapes with logical axes;
tests hold them against the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from maxpipe.config.pipeline_rules import activations
from maxpipe.config.schema import Config, ModelConfig
from maxpipe.model.count import scored_pairs
from maxpipe.parallel.axes import MESH_AXES, axis_table
from maxpipe.schedule.balance import balanced_cut
from maxpipe.schedule.catalog import build
from maxpipe.schedule.table import Schedule

Dims = tuple[tuple[int, str], ...]
"""Sizes of an array's dims and their logical axes."""
BYTES = {"float32": 4, "bfloat16": 2}


def layer_weights(model: ModelConfig) -> dict[str, Dims]:
    """One layer's parameters."""
    embed, mlp, size = (model.d_model, "embed"), (model.d_mlp, "mlp"), model.head_size
    heads, kv = (model.num_heads, "heads"), (model.num_kv_heads, "kv_heads")
    head_size, norm = (size, "head_size"), (model.d_model, "norm")
    return {
        "query": (embed, heads, head_size),
        "key": (embed, kv, head_size),
        "value": (embed, kv, head_size),
        "out": (heads, head_size, embed),
        "gate": (embed, mlp),
        "up": (embed, mlp),
        "down": (mlp, embed),
        "attention_norm": (norm,),
        "mlp_norm": (norm,),
    }


@dataclass(frozen=True)
class Sizes:
    """Numbers of a run whose mesh is resolved."""

    config: Config

    # The mesh.

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """Total size of each mesh axis."""
        mesh = self.config.mesh
        return {
            axis: getattr(mesh, f"ici_{axis}") * getattr(mesh, f"dcn_{axis}") for axis in MESH_AXES
        }

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.axes.values())

    @property
    def num_slices(self) -> int:
        """Slices of the mesh."""
        return math.prod(getattr(self.config.mesh, f"dcn_{axis}") for axis in MESH_AXES)

    @property
    def stages(self) -> int:
        """P."""
        return self.axes["stage"]

    @property
    def fsdp(self) -> int:
        """Shards of parameters."""
        return self.axes["fsdp"]

    @property
    def tensor(self) -> int:
        """Shards of heads and MLP."""
        return self.axes["tensor"]

    @property
    def repeats(self) -> int:
        """R."""
        return self.config.pipeline.repeats

    @property
    def microbatches(self) -> int:
        """M."""
        return self.config.pipeline.microbatches

    @property
    def rows(self) -> int:
        """B: rows of a microbatch on one device."""
        return max(1, self.rows_per_device // self.microbatches)

    @property
    def rows_per_device(self) -> int:
        """Rows of a step on one device."""
        return self.config.train.batch_size // (self.axes["data"] * self.fsdp)

    @property
    def tokens(self) -> int:
        """B * T: tokens of a microbatch on one device."""
        return self.rows * self.config.train.sequence_length

    # The stack.

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """Layers of each chunk."""
        pipeline, model = self.config.pipeline, self.config.model
        layers = model.num_layers - pipeline.layers_outside
        return tuple(pipeline.cut) or balanced_cut([1.0] * layers, self.stages * self.repeats)

    @property
    def layers_per_chunk(self) -> int:
        """L."""
        return max(self.cut)

    @property
    def layer_slots(self) -> int:
        """Layers that a stage holds, padding included."""
        return self.repeats * self.layers_per_chunk

    # Parameters.

    @cached_property
    def _table(self) -> Mapping[str, tuple[str, ...]]:
        return axis_table(self.config.mesh)

    def elements(self, dims: Dims, *, whole: bool = False) -> int:
        """Of an array's shard on one device; `whole`: gathered over fsdp."""
        count = 1
        for size, logical in dims:
            axes = [axis for axis in self._table.get(logical, ()) if not (whole and axis == "fsdp")]
            count *= -(-size // math.prod(self.axes[axis] for axis in axes))
        return count

    def layer_elements(self, *, whole: bool = False) -> int:
        """Parameters of one layer on one device."""
        weights = layer_weights(self.config.model).values()
        return sum(self.elements(dims, whole=whole) for dims in weights)

    def matrix_elements(self, *, whole: bool = False) -> int:
        """Of the table `[V, D]`; rows are padded to divide their shards."""
        model = self.config.model
        shards = math.prod(self.axes[axis] for axis in self._table["vocab"])
        padded = -(-model.vocab_size // shards) * shards
        return self.elements(((padded, "vocab"), (model.d_model, "embed")), whole=whole)

    @property
    def splits_columns(self) -> bool:
        """Whether each device along fsdp looks up its own columns of the embedding."""
        return "fsdp" in self._table["embed"]

    @property
    def num_matrices(self) -> int:
        """Embedding, and head if it is one of its own."""
        return 1 if self.config.model.tied_embeddings else 2

    @property
    def shard_elements(self) -> int:
        """Parameters on one device."""
        model, outside = self.config.model, self.config.pipeline.layers_outside
        layers = (self.layer_slots + outside) * self.layer_elements()
        return layers + self.num_matrices * self.matrix_elements() + model.d_model

    # Activations of one layer, in elements, of a microbatch on one device.

    @property
    def activation(self) -> int:
        """What a stage hands to the next `[B, T, D]`."""
        return self.tokens * self.config.model.d_model

    @cached_property
    def _named(self) -> Mapping[str, int]:
        model = self.config.model
        query = self.tokens * -(-model.num_heads // self._share("heads")) * model.head_size
        key = self.tokens * -(-model.num_kv_heads // self._share("kv_heads")) * model.head_size
        hidden = self.tokens * -(-model.d_mlp // self._share("mlp"))
        return {
            "query": query,
            "key": key,
            "value": key,
            "context": query,
            "attention_out": self.activation,
            "gate": hidden,
            "up": hidden,
        }

    def _share(self, logical: str) -> int:
        """Devices over which activations with this axis are split."""
        return math.prod(self.axes[axis] for axis in self._table[logical] if axis == "tensor")

    def named(self, names: Iterable[str]) -> int:
        """Activations by name."""
        return sum(self._named[name] for name in names)

    @cached_property
    def scores(self) -> int:
        """Pairs of query and key that plain attention scores, of all heads."""
        heads = -(-self.config.model.num_heads // self._share("heads"))
        return self.rows * heads * scored_pairs(self.config.train.sequence_length)

    @property
    def held_scores(self) -> int:
        """Of `scores`, those that stand in memory: a fused kernel reads a mask, for all heads."""
        if self.config.model.attention == "xla":
            return self.scores
        return self.rows * self.config.train.sequence_length**2

    @property
    def keeps_hidden(self) -> bool:
        """Whether the MLP's hidden activations are kept for a layer's backward."""
        pipeline = self.config.pipeline
        kept = activations([*pipeline.saved_names, *pipeline.offloaded_names], self.config.model)
        return pipeline.remat == "none" or (pipeline.remat == "names" and "gate" in kept)

    def kept_bytes(self) -> tuple[float, float]:
        """(on the device, on the host) kept by one layer, or by a chunk with `chunk`."""
        pipeline, size = self.config.pipeline, BYTES[self.config.model.compute_dtype]
        if pipeline.remat == "names":
            offloaded = set(activations(pipeline.offloaded_names, self.config.model))
            saved = set(activations(pipeline.saved_names, self.config.model)) - offloaded
            here = self.activation + self.named(saved)
            return size * here, size * self.named(offloaded)
        if pipeline.remat == "none":
            return self._residual_bytes(), 0.0
        return size * self.activation, 0.0

    def _residual_bytes(self) -> float:
        """All that a layer's differentiation keeps: as listed by tracing it."""
        size, tokens = BYTES[self.config.model.compute_dtype], self.tokens
        model = self.config.model
        heads, scores = -(-model.num_heads // self._share("heads")), self.held_scores
        # In float32: four inputs of norms, their statistics, angles, statistics of the softmax.
        wide = 4 * self.activation + tokens * (4 + 2 * model.head_size + 2 * heads)
        named = self._named
        narrow = 4 * self.activation + 3 * named["gate"] + 2 * named["key"] + 2 * named["query"]
        return 4 * wide + size * narrow + scores * (1 + 4 + size)

    def deferred_bytes(self) -> float:
        """What one layer's weight gradients wait for."""
        size, named = BYTES[self.config.model.compute_dtype], self._named
        both = 2 * (named["query"] + named["key"])
        norms = 2 * self.config.model.d_model
        if self.config.pipeline.remat == "none":
            return size * (8 * self.activation + 3 * named["gate"] + both)
        return size * (5 * self.activation + 4 * named["gate"] + both + norms)


def schedule_of(config: Config) -> Schedule:
    """The table of a config whose mesh is resolved."""
    pipeline = config.pipeline
    return build(
        pipeline.schedule,
        stages=Sizes(config).stages,
        repeats=pipeline.repeats,
        microbatches=pipeline.microbatches,
        group=pipeline.group,
        delayed=pipeline.delayed_forwarding,
    )
