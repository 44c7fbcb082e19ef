"""Array sizes of a run on one device: shards, sequences, layers, parameters and activations.

Activation sizes come from the declarations of the model's layer types. This module also computes
how many keys and values devices exchange. This module does not import jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from maxpipe.config.schema import Config, PipelineConfig
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
from maxpipe.models.layers.attention import Attention
from maxpipe.models.layers.experts import Experts
from maxpipe.models.registry import describe
from maxpipe.models.resolve_auto import resolved
from maxpipe.models.spec import Dims, Held, LayerType, Model, Param, Part, Products, Scores
from maxpipe.optim.state_spec import BYTES
from maxpipe.parallel.axes import ContextAttention
from maxpipe.planner.shards import BatchShard, MeshShards, with_shards
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.table import Schedule, balance_layers

# A search evaluates the same layer partitions many times.
_balanced_partition = lru_cache(maxsize=256)(balance_layers)


@dataclass(frozen=True)
class LayerCounts:
    """Number of layers of each type in the chunks, the prologue and the MTP heads."""

    model: Model
    described: Model
    """The model spec, with the expert capacity of one device."""
    pipeline: PipelineConfig
    stages: int
    sequence_tokens: int
    """Number of tokens in a full sequence."""

    @cached_property
    def partition(self) -> tuple[int, ...]:
        """Return the number of layers in each chunk."""
        pipeline = self.pipeline
        if pipeline.layers_per_chunk:
            return tuple(pipeline.layers_per_chunk)
        costs = layer_costs(self.described, self.sequence_tokens)[pipeline.prologue_layers :]
        return _balanced_partition(costs, self.stages * pipeline.repeats)

    @cached_property
    def chunks(self) -> tuple[Counter[str], ...]:
        """Return the number of layers of each type in each chunk."""
        ends = accumulate(self.partition, initial=self.pipeline.prologue_layers)
        return tuple(Counter(self.model.layers[start:end]) for start, end in pairwise(ends))

    @cached_property
    def prologue(self) -> Counter[str]:
        """Return the number of prologue layers of each type."""
        return Counter(self.model.layers[: self.pipeline.prologue_layers])

    @cached_property
    def pipelined(self) -> Counter[str]:
        """Return the number of pipelined layers of each type."""
        return sum(self.chunks, Counter())

    @cached_property
    def chunk_slots(self) -> Mapping[str, int]:
        """Return L for each layer type: the maximum number of layers of that type in any chunk."""
        return {kind: max(chunk[kind] for chunk in self.chunks) for kind in self.pipelined}

    @cached_property
    def slots(self) -> Mapping[str, int]:
        """Return the number of layers of each type that a stage stores, including padding."""
        return {kind: self.pipeline.repeats * length for kind, length in self.chunk_slots.items()}

    @cached_property
    def most_common(self) -> str:
        """Return the most common layer type."""
        return Counter(self.model.layers).most_common(1)[0][0]

    @property
    def mtp_heads(self) -> int:
        """Return the number of multi-token prediction heads."""
        mtp = self.model.ends.mtp
        return 0 if mtp is None else mtp.num_heads

    @property
    def mtp(self) -> Mapping[str, int]:
        """Return the number of multi-token prediction layers, keyed by layer type."""
        heads = self.model.ends.mtp_layers
        return {} if heads is None else {heads.layer_type_name: heads.num_heads}


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts on one device."""

    model: Model
    mesh: MeshShards
    layers: LayerCounts
    trained_only: bool
    """Whether counts exclude frozen parameters."""

    def includes(self, param: Param) -> bool:
        """Return whether parameter counts include this parameter."""
        return param.trainable or not self.trained_only

    def layer_elements(self, kind: str, *, whole: bool = False) -> int:
        """Return the number of parameters of one layer on one device."""
        return self._layer_elements[kind][whole]

    @cached_property
    def _layer_elements(self) -> Mapping[str, tuple[int, int]]:
        def elements(kind: LayerType, whole: bool) -> int:
            params = filter(self.includes, kind.params.values())
            return sum(self.mesh.elements(param.dims, whole=whole) for param in params)

        return {
            name: (elements(kind, False), elements(kind, True))
            for name, kind in self.model.layer_types.items()
        }

    def computed_elements(self, kind: str, *, only_owned: bool = False) -> float:
        """Return the number of a layer's parameters that are applied to each token. With
        `only_owned`, count only the parameters that are sharded over the expert axis.

        Experts sharded over an axis process the tokens of all devices along that axis. The count
        per local token is therefore the same as if the device held all experts.
        """
        params = counted(self.model.layer_types[kind])
        return sum(
            share
            * self.mesh.elements(params[name].dims, whole=True)
            * self.mesh.shards(self.mesh.owned_over(params[name].dims))
            for name, share in computed_share(self.model.layer_types[kind]).items()
            if self.includes(params[name])
            if not only_owned or self.mesh.owned_over(params[name].dims)
        )

    def kernel_elements(self, kind: str) -> int:
        """Return the number of a layer's gathered parameters that custom kernels of experts
        multiply.
        """
        layer_type = self.model.layer_types[kind]
        return sum(
            self.mesh.elements(param.dims, whole=True)
            for (part, name), param in counted(layer_type).items()
            if isinstance(experts := layer_type.parts[part], Experts) and experts.grouped
            if experts.backend not in ("loop", "ragged_dot")
            if name in ("gate", "up", "down") and self.includes(param)
        )

    def elements(self, layers: Mapping[str, int], *, whole: bool = False) -> int:
        """Return the number of parameters, given the number of layers of each type."""
        return sum(count * self.layer_elements(kind, whole=whole) for kind, count in layers.items())

    def stage_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters in a stage's pipelined layers, including padding."""
        return self.elements(self.layers.slots, whole=whole)

    def chunk_elements(self) -> int:
        """Return the number of gathered parameters in a chunk with L layers of each type."""
        return self.elements(self.layers.chunk_slots, whole=True)

    def prologue_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters in the prologue layers."""
        return self.elements(self.layers.prologue, whole=whole)

    @cached_property
    def transposed_elements(self) -> int:
        """Return the number of parameters in a stage that are gathered along a dimension other than
        the first.
        """
        return sum(
            count * self.mesh.elements(param.dims)
            for kind, count in self.layers.slots.items()
            for param in self.model.layer_types[kind].params.values()
            if self.includes(param) and self.mesh.gathered_over(param.dims[1:])
        )

    def embedding_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters in the embedding table."""
        return self._table_elements("embedding", whole)

    def head_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters in the output projection, which may be tied."""
        return self._table_elements("embedding" if self.model.ends.head is None else "head", whole)

    def _table_elements(self, name: str, whole: bool) -> int:
        param = self.model.ends.params[name,]
        padded = self.mesh.padded(param.dims)
        return self.mesh.elements(padded, whole=whole) if self.includes(param) else 0

    @property
    def vocabulary(self) -> int:
        """Return the number of logits per token on one device."""
        dims = self.mesh.padded(self.model.ends.embedding.dims)
        return self.mesh.elements(tuple(dim for dim in dims if dim[1] == "vocab"), whole=True)

    @property
    def norm_elements(self) -> int:
        """Return the number of parameters in the final norm."""
        return self._end_elements("final_norm", whole=False)

    def mtp_elements(self, *, whole: bool = False) -> int:
        """Return the number of MTP parameters, excluding the output projection."""
        return self._end_elements("ahead", whole=whole)

    def vision_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters in the vision tower and its projector."""
        return self._end_elements("vision", whole=whole)

    def mtp_matrix_elements(self) -> int:
        """Return the number of parameters in gathered MTP matrices that are not part of a layer."""
        return sum(
            self.mesh.elements(param.dims, whole=True)
            for name, param in self.model.ends.params.items()
            if name in matrices_ahead(self.model) and self.includes(param)
        )

    def _end_elements(self, first: str, *, whole: bool) -> int:
        return sum(
            self.mesh.elements(param.dims, whole=whole)
            for (name, *_), param in self.model.ends.params.items()
            if name == first and self.includes(param)
        )


class ContextMethod(NamedTuple):
    """Method by which an attention operation exchanges keys and values along the context axis."""

    share: float = 0.0
    """Fraction of the local keys and values that a device sends to all other devices at the same
    time."""
    remote: float = 0.0
    """Size of the keys and values received from other devices, in addition to the size of the local
    keys and values, as a multiple of the latter."""
    exchange_size: int = 1
    """Number of adjacent devices that exchange tokens for heads."""
    ring_size: int = 1
    """Number of devices that pass keys and values around a ring."""


TPU_LANES = 128
"""Number of lanes of a TPU vector register. The last dim of an array in memory is padded to a
multiple of this number, and attention requires that the head dim is last."""
BETWEEN_MATMULS = frozenset({"embed", "norm", "latent"})
"""Logical axes of activations between tensor-parallel matmuls."""


@dataclass(frozen=True)
class ActivationSizes:
    """Activation sizes of one microbatch on one device."""

    config: Config
    model: Model
    mesh: MeshShards
    batch: BatchShard
    lanes: int = 0
    """Number to whose multiples the head dim of attention arrays is padded; 0 disables padding."""

    @cached_property
    def itemsize(self) -> int:
        """Return the size in bytes of one element in the compute dtype."""
        return BYTES[self.config.model.compute_dtype]

    @property
    def hidden(self) -> int:
        """Return the number of elements on one device in the residual stream `[B, T, D]`."""
        return self.whole_hidden // self.mesh.token_shards

    @property
    def whole_hidden(self) -> int:
        """Return the number of elements in the residual stream after its tokens are gathered for a
        matmul.
        """
        return self.batch.tokens * self.config.model.d_model

    @property
    def stream(self) -> int:
        """Return the number of elements on one device in the input of a layer: the residual stream
        and the arrays that layers pass to later layers.
        """
        return self.batch.tokens * self.model.stream_width // self.mesh.token_shards

    def elements(self, dims: Dims) -> int:
        """Return the number of elements in an activation with the given dims per token.

        The fsdp axis shards tokens, not the dims of a token.
        """
        count = self.batch.tokens
        if {logical for _, logical in dims} <= BETWEEN_MATMULS:
            count //= self.mesh.token_shards
        for size, logical in dims:
            count *= -(-size // self.mesh.tensor_shards(logical))
        return count

    def named_bytes(self, kind: str, names: Iterable[str]) -> int:
        """Return the total size in bytes of a layer's saved activations with the given names."""
        layer_type = self.model.layer_types[kind]
        names = frozenset(names).difference(
            *(_outputs(layer_type, *product) for product in _unread_products(layer_type))
        )
        arrays = ((self.itemsize, layer_type.activations), (4, layer_type.saved_with))
        return sum(
            width * self._stored_elements(dims[name])
            for width, dims in arrays
            for name in names & {*dims}
        )

    def _stored_elements(self, dims: Dims) -> int:
        """Return the number of elements in memory of an activation, including padding."""
        if self.lanes and dims in self._attention_dims:
            size, logical = dims[-1]
            dims = (*dims[:-1], (-(-size // self.lanes) * self.lanes, logical))
        return self.elements(dims)

    @cached_property
    def _attention_dims(self) -> frozenset[Dims]:
        """Return the dims of all keys, values and outputs of attention."""
        parts = (part for _, kind in self._kinds for part in kind.parts.values())
        return frozenset(
            dims
            for part in parts
            for scores in part.operations
            if isinstance(scores, Scores)
            for dims in (*scores.keys, scores.mixed)
        )

    def scores(self, part: Part) -> int:
        """Return the number of query-key pairs for which scores are computed, summed over all
        heads.
        """
        return sum(
            self.batch.microbatch_size
            * self._scored_pairs(scores)
            * -(-scores.heads // self.mesh.tensor_shards(scores.axis))
            for scores in part.operations
            if isinstance(scores, Scores)
        )

    def _scored_pairs(self, scores: Scores) -> int:
        """Return the mean number of query-key pairs per head and sequence on one device.

        Plain attention skips future tokens only if queries and keys cover the same tokens.
        """
        tokens, exchange = self.config.train.sequence_length, self.context_method(scores)
        in_blocks = scores.storage == "block"
        context = self.mesh.axes["context"]
        if exchange.share and not in_blocks:
            before = exchange.share if exchange.share < 1 else 2 * context - 1
            return 2 * round(self.batch.contiguous_tokens**2 * (1 + before))
        return scored_pairs(tokens, by_blocks=in_blocks) // context

    def context_method(self, scores: Scores) -> ContextMethod:
        """Return the method by which attention exchanges keys and values with other devices."""
        context = self.mesh.axes["context"]
        if context == 1:
            return ContextMethod()
        method = ContextAttention.from_config(self.config.mesh, self.mesh.axes)
        kv_heads, logical = scores.keys[0][0]
        size, ring = (
            find(scores.heads, kv_heads) for find in (method.exchange_size, method.ring_size)
        )
        if size > 1:
            shards = self.mesh.tensor_shards(scores.axis) // self.mesh.tensor_shards(logical)
            copies = method.exchanged_kv_heads(scores.heads, kv_heads) / (kv_heads * shards)
            return ContextMethod(remote=copies - 1.0, exchange_size=size, ring_size=ring)
        if ring > 1:
            return ContextMethod(ring_size=ring)
        windows = map(int, self.model.values[scores.window]) if scores.window else ()
        block = self.batch.contiguous_tokens
        before = tokens_before(windows, block)
        if before < block:
            return ContextMethod(before / block, before / block)
        return ContextMethod(1.0, context - 1.0)

    def remote_key_elements(self, part: Part) -> float:
        """Return the number of key and value elements received from other devices."""
        return sum(
            self.context_method(scores).remote * sum(map(self.elements, scores.keys))
            for scores in part.operations
            if isinstance(scores, Scores)
        )

    def products(self, part: Part) -> float:
        """Return the multiply-adds in activation-activation matmuls, excluding attention scores."""
        return self.batch.tokens * sum(
            products.computed * -(-products.heads // self.mesh.tensor_shards(products.axis))
            for products in part.operations
            if isinstance(products, Products)
        )

    def shared_pairs(self, part: Part) -> int:
        """Return the number of query-key pairs in an array without a dim of heads."""
        pairs = (self._scored_pairs(each) for each in part.operations if isinstance(each, Scores))
        return self.batch.microbatch_size * max(pairs, default=0)

    def stored_scores(self, part: Part) -> int:
        """Return the number of attention scores that are stored in memory."""
        count, tokens = 0, self.config.train.sequence_length
        for scores in part.operations:
            if isinstance(scores, Scores):
                heads = -(-scores.heads // self.mesh.tensor_shards(scores.axis))
                count += {
                    "scores": heads * self._scored_pairs(scores),
                    "mask": tokens**2 // self.mesh.axes["context"],
                    "block": heads * even_blocks(tokens) ** 2,
                    "none": 0,
                }[scores.storage]
        return self.batch.microbatch_size * count

    def declared_bytes(self, part: Part, held: Held, *, padded: bool = True) -> float:
        """Return the size in bytes of the arrays that a sublayer declares in `held`."""
        size, mesh = self.itemsize, self.mesh
        tokens = self.config.train.sequence_length

        def elements(arrays: Iterable[tuple[float, Dims]]) -> float:
            count = self._stored_elements if padded else self.elements
            return sum(copies * count(dims) for copies, dims in arrays)

        narrow, wide, other = held.pairs
        num_bytes = (wide * 4 + narrow * size + other) * self.stored_scores(part)
        narrow, wide, other = held.shared_pairs
        num_bytes += (wide * 4 + narrow * size + other) * self.shared_pairs(part)
        num_bytes += 4 * held.selections * self.batch.selection_words
        for width, arrays in ((size, held.compute_dtype), (4, held.float32), (1, held.one_byte)):
            num_bytes += width * elements(arrays)
        num_bytes += size * elements(held.blocks) * scored_keys(tokens) / tokens
        num_bytes += size * elements(held.documents) * packed_documents(tokens)
        for width, dims in ((size, held.token_independent), (4, held.float32_token_independent)):
            num_bytes += width * sum(mesh.elements(each, whole=True) for each in dims)
        return num_bytes

    @cached_property
    def saved_names(self) -> frozenset[str]:
        """Return the names of activations saved for a layer's backward pass, in device or host
        memory.
        """
        pipeline = self.config.pipeline
        names = (*pipeline.saved_names, *pipeline.offloaded_names)
        return frozenset(activations(names, self.config.model))

    def saves_all(self, part: Part) -> bool:
        """Return whether all named activations of a sublayer are saved for its backward pass."""
        remat = self.config.pipeline.remat
        return remat == "none" or (remat == "names" and self.saved_names >= {*part.activations})

    def unsaved_elements(self, kind: str) -> float:
        """Return the parameters per token whose matmuls a backward pass repeats, because
        `pipeline.saved_names` excludes their outputs.
        """
        layer_type, mesh = self.model.layer_types[kind], self.mesh
        elements = 0.0
        for part, name in self.repeated_matmuls(kind):
            if _outputs(layer_type, part, name):
                dims = counted(layer_type)[part, name].dims
                owners = mesh.shards(mesh.owned_over(dims))
                share = computed_share(layer_type)[part, name]
                elements += share * mesh.elements(dims, whole=True) * owners
        return elements

    def repeated_matmuls(self, kind: str) -> list[tuple[str, str]]:
        """Return the (sublayer, name) of each parameter whose matmul in the forward pass is
        repeated by the backward pass of a layer.
        """
        layer_type, remat = self.model.layer_types[kind], self.config.pipeline.remat
        if remat == "none":
            return []
        unread = _unread_products(layer_type)
        saved = self.saved_names if remat == "names" else frozenset()

        def is_saved(key: tuple[str, str]) -> bool:
            outputs = _outputs(layer_type, *key)
            return bool(outputs) and outputs <= saved

        return [
            key for key in computed_share(layer_type) if key not in unread and not is_saved(key)
        ]

    def saved_bytes(self, kind: str) -> tuple[float, float]:
        """Return the (device, host) bytes saved per layer, or per chunk with `remat=chunk`."""
        return self._saved_bytes[kind]

    @cached_property
    def _saved_bytes(self) -> Mapping[str, tuple[float, float]]:
        pipeline, stream = self.config.pipeline, self.itemsize * self.stream
        if pipeline.remat == "none":
            return {name: (self._residual_bytes(kind), 0.0) for name, kind in self._kinds}
        if pipeline.remat != "names":
            return {name: (stream, 0.0) for name, _ in self._kinds}
        offloaded = set(activations(pipeline.offloaded_names, self.config.model))
        saved = self.saved_names - offloaded
        return {
            name: (
                stream + self.named_bytes(name, saved),
                self.named_bytes(name, offloaded),
            )
            for name, _ in self._kinds
        }

    @property
    def _kinds(self) -> Iterable[tuple[str, LayerType]]:
        return self.model.layer_types.items()

    def _residual_bytes(self, kind: LayerType) -> float:
        """Return the total size in bytes of a layer's residuals."""
        parts = kind.parts.values()
        num_bytes = sum(self.declared_bytes(part, part.residuals) for part in parts)
        num_bytes += self.declared_bytes(kind.branches[0].part, residuals_of_changes(kind))
        num_bytes += self.itemsize * sum(map(self.remote_key_elements, parts))
        num_bytes -= self.itemsize * self.hidden * _shared_arrays(kind, {*kind.parts})
        return num_bytes + kind.num_masks * self.hidden

    def report_bytes(self, layers: Mapping[str, int]) -> float:
        """Return the bytes of losses and statistics, given the number of layers of each type."""
        kinds = {name: self.model.layer_types[name] for name in layers}
        scalars = len({loss for kind in kinds.values() for loss in kind.losses})
        entries = sum(
            layers[name] * math.prod(size for size, _ in dims)
            for name, kind in kinds.items()
            for dims in kind.statistics.values()
        )
        return 4.0 * (scalars + entries)

    def deferred_bytes(self, kind: str) -> float:
        """Return the size in bytes of the arrays that a layer saves for deferred weight
        gradients.
        """
        return self._deferred_bytes[kind]

    @cached_property
    def _deferred_bytes(self) -> Mapping[str, float]:
        recomputed, size = self.config.pipeline.remat != "none", self.itemsize
        saved = self.saved_names if self.config.pipeline.remat == "names" else frozenset()

        def num_bytes(kind: LayerType) -> float:
            trained = {part for (part, _), param in kind.params.items() if param.trainable}
            total = 0.0
            for branch in kind.branches:
                for name, part in branch.parts.items():
                    if name in trained:
                        is_read = bool(branch.post_norm or branch.connection)
                        normed = part is branch.part and is_read
                        held = part.deferred(recomputed=recomputed, normed=normed)
                        total += self.declared_bytes(part, held)
                if recomputed and branch.name not in trained and trained & {*branch.parts}:
                    total += size * self.hidden  # the cotangent of the norm's output
            last = kind.branches[-1]
            is_unread = recomputed and last.name in trained and not _reads_last_output(kind)
            if is_unread and isinstance(last.part, Attention):
                total += self.declared_bytes(last.part, last.part.deferred_if_unread(saved))
            shared = _shared_arrays(kind, trained, cotangents=not recomputed)
            total -= size * self.hidden * shared
            if recomputed and trained:
                total += (size * kind.num_residual_arrays + kind.num_masks) * self.hidden
                streams = self.model.ends.num_streams
                total += size * streams * self.hidden * (streams > 1)  # the layer's input
            if kind.adapters:  # some adapters save these gradients themselves
                trainable = (param.dims for param in kind.params.values() if param.trainable)
                total += size * sum(self.mesh.elements(dims, whole=True) for dims in trainable)
            return total

        return {name: num_bytes(kind) for name, kind in self._kinds}


def _shared_arrays(layer_type: LayerType, names: set[str], *, cotangents: bool = False) -> int:
    """Return the number of arrays that two of the named branches both declare: their common input
    and, if `cotangents` is set, the cotangent of their outputs, unless dropout changes it.
    """
    count = 0
    for pair in pairwise(layer_type.branches):
        if pair[1].shares_input and {branch.name for branch in pair} <= names:
            count += 1 + (cotangents and not any(branch.dropout for branch in pair))
    return count


def _outputs(layer_type: LayerType, part: str, name: str) -> set[str]:
    """Return the named activations that the matmul of a parameter computes."""
    names = {name, f"expert_{name}", f"attention_{name}", f"{part}_{name}"}
    if name.endswith("_up"):  # of latents: `key_value_up` computes `key` and `value`
        names |= {*name.split("_")[:-1]}
    return names & {*layer_type.parts[part].activations}


def _reads_last_output(layer_type: LayerType) -> bool:
    """Return whether the backward pass reads the output of a layer's last sublayer, because a norm
    or a scale is applied to it.
    """
    last = layer_type.branches[-1]
    return bool(last.post_norm or last.sum_norm or last.connection or layer_type.output_scale)


def _unread_products(layer_type: LayerType) -> set[tuple[str, str]]:
    """Return the parameters whose matmuls compute the output of the last branch. A layer's backward
    pass does not read this output, unless a norm, a scale or a routing weight is applied to it.
    """
    last = layer_type.branches[-1]
    if _reads_last_output(layer_type):
        return set()
    if not isinstance(last.part, Experts):
        return {(last.name, "out"), (last.name, "down")}
    return set() if "shared_weight" in last.part.params else {(last.name, "shared_down")}


@dataclass(frozen=True)
class Sizes:
    """Array sizes of a run with a resolved mesh, grouped by category."""

    config: Config
    platform: str = ""
    """JAX platform of the devices; empty if no array size depends on the platform."""

    def on_platform(self, platform: str) -> Sizes:
        """Return the sizes for a platform and its attention backend."""
        if platform == self.platform:
            return self
        config = self.config
        method = ContextAttention.from_config(config.mesh, self.mesh.axes)
        model = resolved(config.model, platform, config.train.sequence_length, method)
        return replace(self, config=replace(config, model=model), platform=platform)

    @cached_property
    def mesh(self) -> MeshShards:
        """Return the shards of arrays on the mesh."""
        return MeshShards(self.config.mesh)

    @cached_property
    def batch(self) -> BatchShard:
        """Return the sequences and tokens on one device."""
        return BatchShard(self.config, self.mesh)

    @cached_property
    def model(self) -> Model:
        """Return the config's model spec, with the expert capacity and tokens of one device."""
        described = describe(self.config.model)
        if not self.mesh.nontrivial_axes(("expert", "context")):
            return described
        whole, shards = self.config.train.sequence_length, self.mesh.axes["expert"]
        return with_shards(
            described, shards, self.batch.microbatch_size, self.batch.tokens_per_sequence, whole
        )

    @cached_property
    def layers(self) -> LayerCounts:
        """Return the number of layers of each type."""
        return LayerCounts(
            self.model,
            describe(self.config.model),
            self.config.pipeline,
            self.mesh.stages,
            self.config.train.sequence_length,
        )

    @cached_property
    def params(self) -> ParameterCounts:
        """Return the parameter counts, including frozen parameters."""
        return ParameterCounts(self.model, self.mesh, self.layers, trained_only=False)

    @cached_property
    def trained(self) -> ParameterCounts:
        """Return the counts of trained parameters, for gradients and optimizer state."""
        return replace(self.params, trained_only=True)

    @cached_property
    def activations(self) -> ActivationSizes:
        """Return the activation sizes of one microbatch."""
        lanes = TPU_LANES if self.platform == "tpu" else 0
        return ActivationSizes(self.config, self.model, self.mesh, self.batch, lanes)


def build_schedule(config: Config) -> Schedule:
    """Return the schedule table of a config with a resolved mesh."""
    pipeline = config.pipeline
    return make_schedule(
        pipeline.schedule,
        stages=Sizes(config).mesh.stages,
        repeats=pipeline.repeats,
        microbatches=pipeline.microbatches,
        group=pipeline.group,
        delayed=pipeline.delayed_forwarding,
    )
