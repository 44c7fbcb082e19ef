"""Count the layers and the parameters of one device; does not import jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from maxpipe.config.schema import PipelineConfig
from maxpipe.models.count import computed_share, counted, layer_costs, matrices_ahead
from maxpipe.models.spec import LayerType, Model, Param
from maxpipe.plan.shards import MeshShards
from maxpipe.schedule.table import balance_layers

# A search evaluates the same layer partitions many times.
_balanced_partition = lru_cache(maxsize=256)(balance_layers)


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of layers, by layer type, in the parts of a pipeline."""

    model: Model
    described: Model
    """The model with the expert capacity of one device."""
    pipeline: PipelineConfig
    stages: int
    sequence_tokens: int
    """Number of tokens in a complete sequence."""

    @cached_property
    def partition(self) -> tuple[int, ...]:
        """Number of layers in each chunk."""
        pipeline = self.pipeline
        if pipeline.layers_per_chunk:
            return tuple(pipeline.layers_per_chunk)
        costs = layer_costs(self.described, self.sequence_tokens)[pipeline.prologue_layers :]
        return _balanced_partition(costs, self.stages * pipeline.repeats)

    @cached_property
    def chunks(self) -> tuple[Counter[str], ...]:
        """Number of layers of each type in each chunk."""
        ends = accumulate(self.partition, initial=self.pipeline.prologue_layers)
        return tuple(Counter(self.model.layers[start:end]) for start, end in pairwise(ends))

    @cached_property
    def prologue(self) -> Counter[str]:
        """Number of prologue layers of each type."""
        return Counter(self.model.layers[: self.pipeline.prologue_layers])

    @cached_property
    def pipelined(self) -> Counter[str]:
        """Number of pipelined layers of each type."""
        return sum(self.chunks, Counter())

    @cached_property
    def chunk_slots(self) -> Mapping[str, int]:
        """L for each layer type: the maximum number of such layers in any chunk."""
        return {kind: max(chunk[kind] for chunk in self.chunks) for kind in self.pipelined}

    @cached_property
    def slots(self) -> Mapping[str, int]:
        """Number of layers of each type that a stage stores, including padding."""
        return {kind: self.pipeline.repeats * length for kind, length in self.chunk_slots.items()}

    @cached_property
    def most_common(self) -> str:
        """The most common layer type."""
        return Counter(self.model.layers).most_common(1)[0][0]

    @property
    def mtp_heads(self) -> int:
        """Number of multi-token prediction heads."""
        mtp = self.model.ends.mtp
        return 0 if mtp is None else mtp.num_heads

    @property
    def mtp(self) -> Mapping[str, int]:
        """Number of multi-token prediction layers, keyed by layer type."""
        heads = self.model.ends.mtp_layers
        return {} if heads is None else {heads.layer_type_name: heads.num_heads}


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters on one device."""

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

    def computed_elements(self, kind: str) -> float:
        """Return the number of gathered parameters of one layer that process each token.

        Experts that are sharded over an axis process the tokens of all devices along the axis. Per
        local token, the count is the same as if the device had all experts.
        """
        params = counted(self.model.layer_types[kind])
        return sum(
            share
            * self.mesh.elements(params[name].dims, whole=True)
            * self.mesh.shards(self.mesh.owned_over(params[name].dims))
            for name, share in computed_share(self.model.layer_types[kind]).items()
            if self.includes(params[name])
        )

    def elements(self, layers: Mapping[str, int], *, whole: bool = False) -> int:
        """Return the number of parameters of the given numbers of layers by type."""
        return sum(count * self.layer_elements(kind, whole=whole) for kind, count in layers.items())

    def stage_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of a stage's pipelined layers, including padding."""
        return self.elements(self.layers.slots, whole=whole)

    def chunk_elements(self) -> int:
        """Return the number of gathered parameters of the largest chunk, counted per layer type."""
        return self.elements(self.layers.chunk_slots, whole=True)

    def prologue_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of the prologue layers."""
        return self.elements(self.layers.prologue, whole=whole)

    @cached_property
    def transposed_elements(self) -> int:
        """Number of parameters of a stage that are gathered along a dimension after the first."""
        return sum(
            count * self.mesh.elements(param.dims)
            for kind, count in self.layers.slots.items()
            for param in self.model.layer_types[kind].params.values()
            if self.includes(param) and self.mesh.gathered_over(param.dims[1:])
        )

    def embedding_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of the embedding table."""
        return self._table_elements("embedding", whole)

    def head_elements(self, *, whole: bool = False) -> int:
        """Return the number of parameters of the output projection, which may be tied."""
        return self._table_elements("embedding" if self.model.ends.head is None else "head", whole)

    def _table_elements(self, name: str, whole: bool) -> int:
        param = self.model.ends.params[name,]
        padded = self.mesh.padded(param.dims)
        return self.mesh.elements(padded, whole=whole) if self.includes(param) else 0

    @property
    def vocabulary(self) -> int:
        """Number of logits per token on one device."""
        dims = self.mesh.padded(self.model.ends.embedding.dims)
        return self.mesh.elements(tuple(dim for dim in dims if dim[1] == "vocab"), whole=True)

    @property
    def norm_elements(self) -> int:
        """Number of parameters of the final norm."""
        return self._end_elements("final_norm", whole=False)

    def mtp_elements(self, *, whole: bool = False) -> int:
        """Return the number of MTP parameters, excluding the output projection."""
        return self._end_elements("ahead", whole=whole)

    def mtp_matrix_elements(self) -> int:
        """Return the number of parameters in gathered MTP matrices that are not in layers."""
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
