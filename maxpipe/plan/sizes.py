"""Compute the sizes of arrays on one device: shards, sequences, chunks and their bytes.

Parameter and activation sizes come from the declarations of the model's layer types. The module
also computes how many keys, values and expert tokens are exchanged between devices. It does not
import jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from maxpipe.config.schema import Config
from maxpipe.config.sections.pipeline import activations
from maxpipe.models.adapters import residuals_of_changes
from maxpipe.models.count import (
    computed_share,
    counted,
    even_blocks,
    layer_costs,
    matrices_ahead,
    packed_documents,
    scored_keys,
    scored_pairs,
    tokens_before,
)
from maxpipe.models.layers.experts import Experts
from maxpipe.models.registry import describe
from maxpipe.models.resolve_auto import Divided, resolved
from maxpipe.models.spec import Dims, Held, Kind, Model, Param, Part, Products, Scores
from maxpipe.optim.state_spec import BYTES
from maxpipe.parallel.axes import MESH_AXES, MeshConfig, axis_table_with_sequence, exchanges_heads
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.table import Schedule, balance_layers


class ContextMethod(NamedTuple):
    """Method by which one attention operation exchanges keys and values along the context axis."""

    method: Literal["own", "heads", "ring", "near", "gather"]
    """Name of the method. `own` means no exchange, because a device has all tokens of its
    sequences."""
    share: float = 0.0
    """Fraction of a device's keys and values that the device sends to all other devices at once."""
    remote: float = 0.0
    """Size of the keys and values received from other devices, as a multiple of the local keys and
    values."""


def choose_context_method(
    mesh: MeshConfig, model: Model, scores: Scores, context: int, tensor: int, run: int
) -> ContextMethod:
    """Choose the exchange method for an attention layer with blocks of `run` contiguous tokens."""
    if context == 1:
        return ContextMethod("own")
    kv_heads = scores.keys[0][0][0]
    if exchanges_heads(mesh.context_attention, scores.heads, kv_heads, context, tensor):
        return ContextMethod("heads")
    if mesh.context_attention == "ring":
        return ContextMethod("ring")
    windows = map(int, model.values[scores.window]) if scores.window else ()
    before = tokens_before(windows, run)
    if before < run:
        return ContextMethod("near", before / run, before / run)
    return ContextMethod("gather", 1.0, context - 1.0)


@lru_cache(maxsize=64)
def with_expert_shards(model: Model, shards: int, rows: int, tokens: int, whole: int) -> Model:
    """Return the model with its experts sharded over `shards` devices.

    Every device has `tokens` of the `whole` tokens in each of `rows` sequences. Calls with equal
    arguments return the same object, because later computations are cached by object.
    """

    def divided(part: Part) -> Part:
        return part.with_shards(shards, rows, tokens, whole) if isinstance(part, Experts) else part

    return model.map_parts(divided)


BETWEEN_MATMULS = frozenset({"embed", "norm", "latent"})
"""Logical axes of activations between tensor-parallel matmuls."""


@dataclass(frozen=True)
class Sizes:
    """Array sizes of a run whose mesh is resolved."""

    config: Config
    trained_only: bool = False
    """Whether parameter counts exclude frozen parameters."""
    platform: str = ""
    """The JAX platform of the devices; empty if no size depends on the platform."""

    def on_platform(self, platform: str) -> Sizes:
        """Return the sizes for a platform and its attention backend."""
        if platform == self.platform:
            return self
        config = self.config
        tokens, divided = config.train.sequence_length, Divided.from_mesh(config.mesh, self.axes)
        model = resolved(config.model, platform, tokens, divided)
        return replace(self, config=replace(config, model=model), platform=platform)

    # The mesh.

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """Sizes of the mesh axes across all slices."""
        mesh = self.config.mesh
        return {
            axis: getattr(mesh, f"ici_{axis}") * getattr(mesh, f"dcn_{axis}") for axis in MESH_AXES
        }

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.axes.values())

    @property
    def num_slices(self) -> int:
        """Number of slices in the mesh."""
        return math.prod(getattr(self.config.mesh, f"dcn_{axis}") for axis in MESH_AXES)

    def nontrivial_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Filter the given axes to those with more than one device, in mesh order."""
        named = {*axes}
        return tuple(axis for axis in MESH_AXES if axis in named and self.axes[axis] > 1)

    def shards(self, axes: Iterable[str]) -> int:
        """Return the product of the sizes of these axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def ring_share(self, axes: Iterable[str]) -> float:
        """Return the fraction of an array that each device sends in a ring gather or scatter."""
        return 1.0 - 1.0 / self.shards(axes)

    @property
    def stages(self) -> int:
        """P: number of pipeline stages."""
        return self.axes["stage"]

    @property
    def fsdp(self) -> int:
        """Size of the fsdp axis."""
        return self.axes["fsdp"]

    @property
    def tensor(self) -> int:
        """Size of the tensor axis."""
        return self.axes["tensor"]

    @property
    def repeats(self) -> int:
        """R: number of circular repeats."""
        return self.config.pipeline.repeats

    @property
    def microbatches(self) -> int:
        """M: number of microbatches per step."""
        return self.config.pipeline.microbatches

    @property
    def microbatch_size(self) -> int:
        """B: number of sequences per microbatch on one device."""
        return max(1, self.batch_per_device // self.microbatches)

    @property
    def batch_per_device(self) -> int:
        """Number of sequences per step on one device."""
        shards = self.shards(self._table["batch"])
        return self.config.train.batch_size // shards

    @property
    def tokens(self) -> int:
        """B * T: number of tokens per microbatch on one device."""
        return self.microbatch_size * self.tokens_per_sequence

    @property
    def tokens_per_sequence(self) -> int:
        """T: number of tokens per sequence on one device."""
        return self.config.train.sequence_length // self.axes["context"]

    @property
    def contiguous_tokens(self) -> int:
        """Length of a contiguous block of tokens of one sequence on one device."""
        return self.tokens_per_sequence // (2 if self.axes["context"] > 1 else 1)

    # Layers.

    @cached_property
    def model(self) -> Model:
        """The model of the config, with the expert capacity of one device."""
        found = describe(self.config.model)
        if not self.nontrivial_axes(("expert", "context")):
            return found
        whole, shards = self.config.train.sequence_length, self.axes["expert"]
        return with_expert_shards(
            found, shards, self.microbatch_size, self.tokens_per_sequence, whole
        )

    @cached_property
    def layer_partition(self) -> tuple[int, ...]:
        """Number of layers in each chunk."""
        pipeline, tokens = self.config.pipeline, self.config.train.sequence_length
        costs = layer_costs(describe(self.config.model), tokens)[pipeline.prologue_layers :]
        return tuple(pipeline.layers_per_chunk) or _balanced_partition(
            costs, self.stages * self.repeats
        )

    @cached_property
    def chunks(self) -> tuple[Counter[str], ...]:
        """Number of layers of each type in each chunk."""
        found, start = [], self.config.pipeline.prologue_layers
        for length in self.layer_partition:
            found.append(Counter(self.model.layers[start : start + length]))
            start += length
        return tuple(found)

    @cached_property
    def prologue_layers(self) -> Counter[str]:
        """Number of prologue layers of each type."""
        return Counter(self.model.layers[: self.config.pipeline.prologue_layers])

    @cached_property
    def ring_layers(self) -> Counter[str]:
        """Number of pipelined layers of each type."""
        return sum(self.chunks, Counter())

    @cached_property
    def chunk_layer_slots(self) -> Mapping[str, int]:
        """L, keyed by layer type: the maximum number of such layers in any chunk."""
        return {kind: max(chunk[kind] for chunk in self.chunks) for kind in self.ring_layers}

    @cached_property
    def layer_slots(self) -> Mapping[str, int]:
        """Number of layers of each type that a stage stores, including padding."""
        return {kind: self.repeats * length for kind, length in self.chunk_layer_slots.items()}

    @cached_property
    def most_common_layer_type(self) -> str:
        """The most common layer type."""
        return Counter(self.model.layers).most_common(1)[0][0]

    # Parameters.

    @cached_property
    def trained(self) -> Sizes:
        """The sizes with only trained parameters, for gradients and optimizer state."""
        return replace(self, trained_only=True)

    def includes(self, param: Param) -> bool:
        """Return whether parameter counts include this parameter."""
        return param.trainable or not self.trained_only

    @cached_property
    def _table(self) -> Mapping[str, tuple[str, ...]]:
        return axis_table_with_sequence(self.config.mesh)

    def elements(self, dims: Dims, *, whole: bool = False) -> int:
        """Return the number of elements in one device's shard of an array.

        With `whole`, the array is gathered over fsdp and the other axes that shard the same
        dimension.
        """
        count = 1
        for size, logical in dims:
            count *= -(-size // self._axis_shards.get(logical, (1, 1))[whole])
        return count

    @cached_property
    def _axis_shards(self) -> Mapping[str, tuple[int, int]]:
        """Number of shards of each logical axis, as (stored, gathered for use)."""
        ways = {logical: self.shards(axes) for logical, axes in self._table.items()}
        return {
            logical: (count, 1 if "fsdp" in self._table[logical] else count)
            for logical, count in ways.items()
        }

    def gathered_over(self, dims: Dims) -> tuple[str, ...]:
        """Return the axes over which a parameter is gathered for use.

        These are fsdp and the other axes that shard the same dimension, as in
        `pipeline.weights.WeightSharding.axes`.
        """
        split = (self._table.get(logical, ()) for _, logical in dims)
        return self.nontrivial_axes(next((axes for axes in split if "fsdp" in axes), ()))

    def owned_over(self, dims: Dims) -> tuple[str, ...]:
        """Return the token axes over which a parameter remains sharded while it is used."""
        split = {axis for _, logical in dims for axis in self._table.get(logical, ())}
        return self.nontrivial_axes((split & {*self.token_axes}) - {*self.gathered_over(dims)})

    def reduced_over(self, dims: Dims) -> tuple[str, ...]:
        """Return the axes over which a gradient is summed at the end of a step."""
        settled = {*self.gathered_over(dims), *self.owned_over(dims)}
        return self.nontrivial_axes({*self.token_axes} - settled)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes along which devices have different tokens."""
        return (*self._table["batch"], "context")

    def layer_elements(self, kind: str, *, whole: bool = False) -> int:
        """Return the number of parameters of one layer on one device."""
        return self._layer_elements[kind][whole]

    @cached_property
    def _layer_elements(self) -> Mapping[str, tuple[int, int]]:
        def elements(kind: Kind, whole: bool) -> int:
            counted = filter(self.includes, kind.params.values())
            return sum(self.elements(each.dims, whole=whole) for each in counted)

        return {
            name: (elements(kind, False), elements(kind, True))
            for name, kind in self.model.layer_types.items()
        }

    def computed_elements(self, kind: str) -> float:
        """Return the number of gathered parameters of one layer that process each token.

        Experts that are sharded over an axis process the tokens of all devices along the axis. Per
        local token, the count is the same as if the device had all experts.
        """
        params = counted(self.model.layer_types[kind])
        return sum(
            share
            * self.elements(params[name].dims, whole=True)
            * self.shards(self.owned_over(params[name].dims))
            for name, share in computed_share(self.model.layer_types[kind]).items()
            if self.includes(params[name])
        )

    def stage_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of a stage's pipelined layers, including padding."""
        return sum(
            count * self.layer_elements(kind, whole=whole)
            for kind, count in self.layer_slots.items()
        )

    @cached_property
    def transposed_elements(self) -> int:
        """Number of parameters of a stage that are gathered along a dimension after the first."""

        def turned(kind: Kind) -> int:
            counted = (each.dims for each in kind.params.values() if self.includes(each))
            behind = (dims for dims in counted if self.gathered_over(dims[1:]))
            return sum(map(self.elements, behind))

        return sum(
            count * turned(self.model.layer_types[kind]) for kind, count in self.layer_slots.items()
        )

    def chunk_elements(self) -> int:
        """Return the number of gathered parameters of the largest chunk, counted per layer type."""
        return sum(
            count * self.layer_elements(kind, whole=True)
            for kind, count in self.chunk_layer_slots.items()
        )

    def prologue_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of the prologue layers."""
        return sum(
            count * self.layer_elements(kind, whole=whole)
            for kind, count in self.prologue_layers.items()
        )

    def padded(self, dims: Dims) -> Dims:
        """Return the dimensions of a table, with the vocabulary padded to a multiple of its
        shards.
        """
        shards = self.shards(self._table["vocab"])
        return tuple(
            (-(-size // shards) * shards if logical == "vocab" else size, logical)
            for size, logical in dims
        )

    def embedding_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of the embedding table."""
        return self._table_elements("embedding", whole)

    def head_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of the output projection, which may be tied."""
        return self._table_elements("embedding" if self.model.ends.head is None else "head", whole)

    def _table_elements(self, name: str, whole: bool) -> int:
        param = self.model.ends.params[name,]
        return self.elements(self.padded(param.dims), whole=whole) if self.includes(param) else 0

    @property
    def vocabulary(self) -> int:
        """Number of logits per token on one device."""
        dims = self.padded(self.model.ends.embedding.dims)
        return self.elements(tuple(each for each in dims if each[1] == "vocab"), whole=True)

    def divides(self, axes: Mapping[str, int]) -> bool:
        """Return whether mesh axes of these sizes divide the parameters of all layers evenly."""
        return all(
            size % math.prod(axes.get(axis, 1) for axis in self._table.get(logical, ())) == 0
            for kind in self.model.layer_types.values()
            for each in kind.params.values()
            for size, logical in each.dims
        )

    @property
    def splits_columns(self) -> bool:
        """Whether fsdp shards the columns of the embedding table."""
        return "fsdp" in self._table["embed"]

    @property
    def norm_elements(self) -> int:
        """Number of parameters of the final norm."""
        return self._end_elements("final_norm", whole=False)

    @property
    def mtp_heads(self) -> int:
        """Number of multi-token prediction heads."""
        ahead = self.model.ends.mtp
        return 0 if ahead is None else ahead.num_heads

    @property
    def mtp_layers(self) -> Mapping[str, int]:
        """Number of multi-token prediction layers, keyed by layer type."""
        heads = self.model.ends.mtp_layers
        return {} if heads is None else {heads.layer_type_name: heads.num_heads}

    def mtp_elements(self, *, whole: bool = False) -> int:
        """Return the number of MTP parameters, excluding the output projection."""
        return self._end_elements("ahead", whole=whole)

    def mtp_matrix_elements(self) -> int:
        """Return the number of parameters in gathered MTP matrices outside layers, applied to each
        token.
        """
        return sum(
            self.elements(param.dims, whole=True)
            for name, param in self.model.ends.params.items()
            if name in matrices_ahead(self.model) and self.includes(param)
        )

    def _end_elements(self, first: str, *, whole: bool) -> int:
        """Return the number of embedding and head parameters in the group `first`."""
        return sum(
            self.elements(param.dims, whole=whole)
            for (name, *_), param in self.model.ends.params.items()
            if name == first and self.includes(param)
        )

    # Activations of one microbatch on one device, in elements.

    @property
    def activation(self) -> int:
        """Size of the activation `[B, T, D]` between stages on one device, in elements."""
        return self.whole_activation // self.token_shards

    @property
    def whole_activation(self) -> int:
        """Size of this activation with unsharded tokens, as used by matmuls."""
        return self.tokens * self.config.model.d_model

    @property
    def token_shards(self) -> int:
        """Number of devices over which tokens are sharded between the matmuls of a layer."""
        return self.shards(self._table["sequence"])

    def activation_elements(self, dims: Dims) -> int:
        """Return the number of elements of an activation with these dimensions per token.

        The fsdp axis shards tokens, not these dimensions.
        """
        count = self.tokens
        if {logical for _, logical in dims} <= BETWEEN_MATMULS:
            count //= self.token_shards
        for size, logical in dims:
            count *= -(-size // self.share(logical))
        return count

    def share(self, logical: str) -> int:
        """Return the number of devices over which activations with this logical axis are
        sharded.
        """
        axes = self._table.get(logical, ())
        return self.shards({*axes} & {"tensor"})

    def named_bytes(self, kind: str, names: Iterable[str]) -> int:
        """Return the total size in bytes of a layer's saved activations with these names."""
        narrow, wide = (
            self.model.layer_types[kind].activations,
            self.model.layer_types[kind].saved_with,
        )
        size, found = BYTES[self.config.model.compute_dtype], frozenset(names)
        both = ((size, narrow), (4, wide))
        return sum(
            width * self.activation_elements(dims[name])
            for width, dims in both
            for name in found & {*dims}
        )

    def scores(self, part: Part) -> int:
        """Return the number of query-key pairs with attention scores, summed over all heads."""
        return sum(
            self.microbatch_size
            * self._scored_pairs(each)
            * -(-each.heads // self.share(each.axis))
            for each in part.operations
            if isinstance(each, Scores)
        )

    def _scored_pairs(self, scores: Scores) -> int:
        """Return the number of query-key pairs per sequence, device and head, averaged over heads.

        Plain attention skips future tokens only if queries and keys come from the same tokens.
        """
        tokens, found = self.config.train.sequence_length, self.context_method(scores)
        in_blocks = scores.storage == "block"
        context = self.axes["context"]
        if found.method in ("gather", "near") and not in_blocks:
            before = found.remote if found.method == "near" else 2 * context - 1
            return 2 * round(self.contiguous_tokens**2 * (1 + before))
        return scored_pairs(tokens, by_blocks=in_blocks) // context

    def context_method(self, scores: Scores) -> ContextMethod:
        """Return the method by which attention exchanges keys and values with other devices."""
        sizes = self.axes["context"], self.tensor, self.contiguous_tokens
        return choose_context_method(self.config.mesh, self.model, scores, *sizes)

    def remote_key_elements(self, part: Part) -> float:
        """Return the number of key and value elements received from other devices."""
        return sum(
            self.context_method(each).remote * sum(map(self.activation_elements, each.keys))
            for each in part.operations
            if isinstance(each, Scores)
        )

    def products(self, part: Part) -> float:
        """Return the number of multiply-adds between activations, excluding attention scores."""
        return self.tokens * sum(
            each.computed * -(-each.heads // self.share(each.axis))
            for each in part.operations
            if isinstance(each, Products)
        )

    def stored_scores(self, part: Part) -> int:
        """Return the number of attention scores that are stored in memory."""
        found, tokens = 0, self.config.train.sequence_length
        for each in part.operations:
            if isinstance(each, Scores):
                heads = -(-each.heads // self.share(each.axis))
                found += {
                    "scores": heads * self._scored_pairs(each),
                    "mask": tokens**2 // self.axes["context"],
                    "block": heads * even_blocks(tokens) ** 2,
                }[each.storage]
        return self.microbatch_size * found

    def declared_bytes(self, part: Part, held: Held) -> float:
        """Return the total size in bytes of the arrays that a layer part declares in `held`."""
        size = BYTES[self.config.model.compute_dtype]
        narrow, wide, other = held.pairs
        found = (wide * 4 + narrow * size + other) * self.stored_scores(part)
        for width, arrays in ((size, held.compute_dtype), (4, held.float32), (1, held.one_byte)):
            found += width * sum(copies * self.activation_elements(dims) for copies, dims in arrays)
        tokens = self.config.train.sequence_length
        in_blocks = sum(copies * self.activation_elements(dims) for copies, dims in held.blocks)
        found += size * in_blocks * scored_keys(tokens) / tokens
        in_documents = sum(
            copies * self.activation_elements(dims) for copies, dims in held.documents
        )
        found += size * in_documents * packed_documents(tokens)
        found += size * sum(self.elements(dims, whole=True) for dims in held.token_independent)
        return found + 4 * sum(
            self.elements(dims, whole=True) for dims in held.float32_token_independent
        )

    @cached_property
    def saved_activation_names(self) -> frozenset[str]:
        """Names of activations saved for a layer's backward pass, in device or host memory."""
        pipeline = self.config.pipeline
        return frozenset(self._activations(*pipeline.saved_names, *pipeline.offloaded_names))

    def _activations(self, *names: str) -> tuple[str, ...]:
        return activations(names, self.config.model)

    def saves_all(self, part: Part) -> bool:
        """Return whether all named activations of a layer part are saved for its backward pass."""
        remat = self.config.pipeline.remat
        return remat == "none" or (
            remat == "names" and self.saved_activation_names >= {*part.activations}
        )

    def saved_activation_bytes(self, kind: str) -> tuple[float, float]:
        """Return the (device, host) bytes saved per layer, or per chunk with `remat=chunk`."""
        return self._saved_activation_bytes[kind]

    @cached_property
    def _saved_activation_bytes(self) -> Mapping[str, tuple[float, float]]:
        pipeline, size = self.config.pipeline, BYTES[self.config.model.compute_dtype]
        if pipeline.remat == "none":
            return {name: (self._residual_bytes(kind), 0.0) for name, kind in self._kinds}
        if pipeline.remat != "names":
            return {name: (size * self.activation, 0.0) for name, _ in self._kinds}
        offloaded = set(self._activations(*pipeline.offloaded_names))
        saved = self.saved_activation_names - offloaded
        return {
            name: (
                size * self.activation + self.named_bytes(name, saved),
                self.named_bytes(name, offloaded),
            )
            for name, _ in self._kinds
        }

    @property
    def _kinds(self) -> Iterable[tuple[str, Kind]]:
        return self.model.layer_types.items()

    def _residual_bytes(self, kind: Kind) -> float:
        """Return the total size of a layer's residuals in bytes."""
        parts, size = kind.parts.values(), BYTES[self.config.model.compute_dtype]
        declared = sum(self.declared_bytes(part, part.residuals) for part in parts)
        declared += self.declared_bytes(kind.branches[0].part, residuals_of_changes(kind))
        return (
            declared
            + size * sum(map(self.remote_key_elements, parts))
            + kind.num_masks * self.activation
        )

    def report_bytes(self, layers: Mapping[str, int]) -> float:
        """Return the size in bytes of the losses and statistics of the given numbers of layers by
        type.
        """
        kinds = {name: self.model.layer_types[name] for name in layers}
        scalars = len({loss for kind in kinds.values() for loss in kind.losses})
        entries = sum(
            layers[name] * math.prod(size for size, _ in dims)
            for name, kind in kinds.items()
            for dims in kind.statistics.values()
        )
        return 4.0 * (scalars + entries)

    def deferred_bytes(self, kind: str) -> float:
        """Return the size in bytes of the arrays that one layer saves for deferred weight
        gradients.
        """
        return self._deferred_bytes[kind]

    @cached_property
    def _deferred_bytes(self) -> Mapping[str, float]:
        recomputed = self.config.pipeline.remat != "none"
        size = BYTES[self.config.model.compute_dtype]

        def waiting(kind: Kind) -> float:
            trained = {part for (part, _), param in kind.params.items() if param.trainable}
            found = 0.0
            for branch in kind.branches:
                for name, part in branch.parts.items():
                    if name in trained:
                        normed = part is branch.part and branch.post_norm is not None
                        held = part.deferred(recomputed=recomputed, normed=normed)
                        found += self.declared_bytes(part, held)
                if recomputed and branch.name not in trained and trained & {*branch.parts}:
                    found += size * self.activation  # the cotangent of the norm output
            if recomputed and trained:
                found += (size * kind.num_streams + kind.num_masks) * self.activation
            if kind.adapters:  # some adapters save the gradients themselves
                params = filter(self.trained.includes, kind.params.values())
                found += size * sum(self.elements(each.dims, whole=True) for each in params)
            return found

        return {name: waiting(kind) for name, kind in self._kinds}


# A search evaluates the same layer partitions many times.
_balanced_partition = lru_cache(maxsize=256)(balance_layers)


def build_schedule(config: Config) -> Schedule:
    """Return the schedule table of a config whose mesh is resolved."""
    pipeline = config.pipeline
    return make_schedule(
        pipeline.schedule,
        stages=Sizes(config).stages,
        repeats=pipeline.repeats,
        microbatches=pipeline.microbatches,
        group=pipeline.group,
        delayed=pipeline.delayed_forwarding,
    )
