"""Layout of adapters in PEFT folders: the tensors of each adapted matrix, and their names.

PEFT adapts complete tensors of a transformers module. transformers stacks the matrices of all
experts in one tensor, and fuses some matrices that are separate here, such as the gate and up
projections of experts. The adapter of a fused tensor has the sum of the ranks of its matrices: the
first factors are concatenated, and the second factor is block-diagonal.

Sources: https://huggingface.co/docs/peft/developer_guides/checkpoint, and `ParamWrapper` of peft
0.21 for stacked tensors (`target_parameters`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from maxpipe.config.peft_settings import CONFIG as CONFIG
from maxpipe.config.peft_settings import WEIGHTS as WEIGHTS
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface.mapping import TensorMapping, map_tensors
from maxpipe.huggingface.tensor_layouts import adapt_table
from maxpipe.models.adapters import DOWN, LENGTH, UP, without_adapters
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.param_names import names_in_layers
from maxpipe.models.spec import LayerType, Model

PREFIX = "base_model.model."
SUFFIXES = {DOWN: "lora_A.weight", UP: "lora_B.weight", LENGTH: "lora_magnitude_vector"}
_WEIGHT = ".weight"
_STACKED_EXPERTS = (
    *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    *("mixer.experts.up_proj", "mixer.experts.down_proj"),
)
"""Tensors of the experts in transformers 5, for the families whose checkpoints have separate
tensors for each expert."""
_RENAMED = ("gate", "gate_proj", "up_proj", "down_proj")
"""Names that PEFT replaces in `target_modules` of models with stacked experts, even if they belong
to an MLP without experts. PEFT keeps these names in `target_parameters`."""


class MatrixLocation(NamedTuple):
    """Layer type that contains a weight matrix, and the matrix's (sublayer, name) in the layer."""

    layer_type: LayerType
    key: tuple[str, str]


def matrix_locations(model: Model) -> dict[str, MatrixLocation]:
    """Return the layer type and key of each layer weight except adapters, by checkpoint name."""
    return {
        name: MatrixLocation(layer_type, key)
        for type_name, layer_type in model.layer_types.items()
        for key, name in names_in_layers(model, type_name).items()
        if key in layer_type.declared
    }


class MatrixPart(NamedTuple):
    """The part of a tensor that stores one adapted matrix of a layer, for all its experts."""

    name: str
    """Checkpoint name of the matrix."""
    place: MatrixLocation
    layer: int
    """Index of the layer within its layer type."""
    expert: int | None
    """Index of the only expert in the tensor; None for all experts, or without experts."""
    inputs: tuple[int, ...]
    """Contracted dims of the matrix without its expert dim, in the order of the tensor."""
    outputs: tuple[int, ...]
    """The other dims of the matrix without its expert dim, in the order of the tensor."""
    input_index: np.ndarray
    """Indices of the matrix in the tensor's input dim."""
    output_index: np.ndarray

    def matrices(self, factor: np.ndarray, end: str) -> np.ndarray:
        """Convert a factor to the order of the tensor: A to `[E, K, r]` and B to `[E, r, N]`, with
        E = 1 for a single matrix.
        """
        at = self.place.layer_type.adapters[self.place.key].expert_dim
        factor = np.moveaxis(factor, at, 0) if at >= 0 else factor[None]
        factor = factor if self.expert is None else factor[self.expert : self.expert + 1]
        if end == DOWN:
            order = [0, *(1 + dim for dim in self.inputs), factor.ndim - 1]
            return factor.transpose(order).reshape(len(factor), -1, factor.shape[-1])
        order = [0, 1, *(2 + dim - len(self.inputs) for dim in self.outputs)]
        return factor.transpose(order).reshape(*factor.shape[:2], -1)

    def to_param(self, matrices: np.ndarray, end: str) -> np.ndarray:
        """Convert a factor to the dims of its parameter; the inverse of `matrices`.

        The expert dim has the experts of the tensor only.
        """
        sublayer, own = self.place.key
        at = self.place.layer_type.adapters[self.place.key].expert_dim
        dims = self.place.layer_type.params[sublayer, own + end].dims
        sizes = [size for n, (size, _) in enumerate(dims) if n != at]
        count, num_inputs = len(matrices), len(self.inputs)
        if end == DOWN:
            split = [sizes[dim] for dim in self.inputs]
            order = [0, *(1 + self.inputs.index(dim) for dim in range(num_inputs)), num_inputs + 1]
            factor = matrices.reshape(count, *split, -1).transpose(order)
        else:
            split = [sizes[1 + dim - num_inputs] for dim in self.outputs]
            order = [0, 1, *(2 + self.outputs.index(dim) for dim in sorted(self.outputs))]
            factor = matrices.reshape(*matrices.shape[:2], *split).transpose(order)
        return np.moveaxis(factor, 0, at) if at >= 0 else factor[0]


@dataclass(frozen=True)
class AdaptedTensor:
    """A tensor of the base model for which PEFT has one adapter."""

    tensor: str
    num_experts: int
    """Number of experts whose matrices the tensor stacks; 0 for a matrix."""
    sizes: tuple[int, int]
    """Sizes of the tensor's input dim and output dim."""
    parts: tuple[MatrixPart, ...]
    is_reversed: bool
    """Whether PEFT interprets the tensor's input dim as its output dim."""
    is_parameter: bool
    """Whether `target_parameters` of PEFT's config contains the tensor, instead of
    `target_modules`."""
    num_wrappers: int = 0
    """Number of adapters that PEFT adds later to other tensors of the same module."""

    @property
    def module(self) -> str:
        """Return the name of the module that contains the tensor."""
        return self.tensor.rpartition(".")[0]

    @property
    def target(self) -> str:
        """Return the tensor's full name in `target_modules` or `target_parameters`."""
        return self.tensor if self.is_parameter else self.tensor.removesuffix(_WEIGHT)

    def key(self, end: str) -> str:
        """Return the name of one factor in the adapter's weight file."""
        return f"{PREFIX}{self.module}{'.base_layer' * self.num_wrappers}.{SUFFIXES[end]}"

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of PEFT's tensors of an adapter with the given rank."""
        first, second = reversed(self.sizes) if self.is_reversed else self.sizes
        rows = rank * max(self.num_experts, 1)
        return {DOWN: (rows, first), UP: (second, rows), LENGTH: (second,)}

    def to_peft(self, factors: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return PEFT's tensors of the adapter, given the factors of each part by suffix."""
        rank = factors[0][DOWN].shape[-1]
        whole, count = rank * len(factors), max(self.num_experts, 1)
        down = np.zeros((count, self.sizes[0], whole), factors[0][DOWN].dtype)
        up = np.zeros((count, whole, self.sizes[1]), factors[0][UP].dtype)
        for number, (part, own) in enumerate(zip(self.parts, factors, strict=True)):
            ranks = slice(number * rank, (number + 1) * rank)
            down[:, part.input_index, ranks] = part.matrices(own[DOWN], DOWN)
            up[:, ranks, part.output_index] = part.matrices(own[UP], UP)
        first, second = down.transpose(0, 2, 1), up.transpose(0, 2, 1)
        if self.is_reversed:
            first, second = up, down
        tensors: dict[str, np.ndarray] = {
            DOWN: first.reshape(count * whole, -1),
            UP: second.transpose(1, 2, 0).reshape(-1, whole * count),
        }
        if LENGTH in factors[0]:
            ((part, own),) = zip(self.parts, factors, strict=True)
            order = [dim - len(part.inputs) for dim in part.outputs]
            tensors[LENGTH] = np.ravel(np.transpose(own[LENGTH], order))
        return tensors

    def from_peft(
        self, tensors: Mapping[str, np.ndarray], rank: int
    ) -> list[dict[str, np.ndarray]] | None:
        """Return the factors of each part, of the part's layer (and expert), given PEFT's tensors.

        The result is None if the update of the tensor is not a sum of updates of the parts with
        this rank. The inverse of `to_peft`.
        """
        count = max(self.num_experts, 1)
        whole = len(tensors[DOWN]) // count
        first = tensors[DOWN].reshape(count, whole, -1)
        second = tensors[UP].reshape(-1, whole, count).transpose(2, 0, 1)
        down, up = first.transpose(0, 2, 1), second.transpose(0, 2, 1)
        if self.is_reversed:
            down, up = second, first
        down_rest, up_rest, factors = down.copy(), up.copy(), []
        for number, part in enumerate(self.parts):
            ranks = slice(number * rank, (number + 1) * rank) if whole > rank else slice(None)
            own_down, own_up = down[:, part.input_index, ranks], up[:, ranks, part.output_index]
            down_rest[:, part.input_index, ranks] = 0
            up_rest[:, ranks, part.output_index] = 0
            own = {DOWN: part.to_param(own_down, DOWN), UP: part.to_param(own_up, UP)}
            if LENGTH in tensors:
                sizes = [own[UP].shape[1 + dim - len(part.inputs)] for dim in part.outputs]
                order = [part.outputs.index(dim) for dim in sorted(part.outputs)]
                own[LENGTH] = np.transpose(tensors[LENGTH].reshape(sizes), order)
            factors.append(own)
        return None if up_rest.any() or down_rest.any() else factors


def adapted_tensors(
    model: Model, table: HuggingFace, *, stacked: bool = True
) -> tuple[list[AdaptedTensor], list[str]]:
    """Return the tensors with adapters in layer order, and the names of all tensors.

    `model` includes the adapters. If `stacked` is set, the experts of a layer are stacked, as in
    transformers 5. Otherwise, each expert has separate tensors, as in published checkpoints.

    Raises:
        ConfigError: PEFT does not support an adapter.
    """
    rows = (replace(row, theirs=table.module_name(row.theirs)) for row in table.tensors)
    table = replace(table, tensors=tuple(rows), modules=())
    per_expert = any("{expert}" in row.theirs for row in table.tensors)
    if per_expert and stacked:
        names = [f"model.layers.0.{name}" for name in _STACKED_EXPERTS]
        table = adapt_table(table, names)
    both = map_tensors(without_adapters(model), table)
    pieces: dict[str, list[_Piece]] = {}
    for name, place in matrix_locations(model).items():
        if place.key in place.layer_type.adapters:
            for piece in _pieces(name, place, both):
                pieces.setdefault(piece.tensor, []).append(piece)
    shares = Counter(
        tensor for slices in both.slices.values() for tensor in {piece.tensor for piece in slices}
    )
    tensors = [
        _adapted(
            *(tensor, pieces[tensor], shape, table),
            is_shared=shares[tensor] > 1,
            may_rename=per_expert and stacked,
        )
        for tensor, shape in both.tensors.items()
        if tensor in pieces
    ]
    # PEFT wraps a module once for each adapted parameter, in the order of the parameters.
    modules = Counter(each.module for each in tensors)
    for number, each in enumerate(tensors):
        modules[each.module] -= 1
        tensors[number] = replace(each, num_wrappers=modules[each.module])
    return tensors, list(both.tensors)


class _Piece(NamedTuple):
    """Place of one adapted matrix in a tensor."""

    tensor: str
    part: MatrixPart
    is_input_first: bool
    """Whether the matrix's input dim is the first dim in the tensor, apart from the expert dim."""


def _pieces(name: str, place: MatrixLocation, both: TensorMapping) -> Iterator[_Piece]:
    """Yield the places of a parameter's matrices: one for each layer, or one for each layer and
    expert if experts have separate tensors.
    """
    adapter, previous = place.layer_type.adapters[place.key], ""
    for piece in both.slices[name]:
        if piece.tensor == previous:
            continue  # the slice of the next expert in the same tensor
        previous, (layer, *index), form = piece.tensor, piece.at, piece.axis_mapping
        own = [dim for n, dim in enumerate(form.param_dims) if n != adapter.expert_dim]
        expert = index[adapter.expert_dim] if adapter.expert_dim >= 0 else None
        groups = [tuple(map(own.index, group)) for group in form.hf_dims if {*group} & {*own}]
        contracted = set(range(adapter.num_contracted_dims))
        if len(groups) != 2 or contracted not in map(set, groups):
            raise _unsupported(name, piece.tensor, "is not stored as one matrix per matmul")
        sizes = [size for n, size in enumerate(piece.sizes) if n != adapter.expert_dim]
        rows, columns = (np.arange(math.prod(sizes[dim] for dim in group)) for group in groups)
        lane = piece.interleave
        if lane.is_block:
            columns = lane.number * len(columns) + columns
        elif lane.every > 1 and lane.dim == -1:
            columns = lane.number + lane.every * columns
        elif lane.every > 1:
            rows = lane.number + lane.every * rows
        else:
            rows = piece.first + rows
        is_input_first = contracted == {*groups[0]}
        (inputs, outputs), (first, second) = groups, (rows, columns)
        if not is_input_first:
            (outputs, inputs), (second, first) = groups, (rows, columns)
        expert = expert if isinstance(expert, int) and not piece.stacked else None
        assert isinstance(layer, int)
        part = MatrixPart(name, place, layer, expert, inputs, outputs, first, second)
        yield _Piece(piece.tensor, part, is_input_first)


def _adapted(
    tensor: str,
    pieces: Sequence[_Piece],
    shape: tuple[int, ...],
    table: HuggingFace,
    *,
    is_shared: bool,
    may_rename: bool,
) -> AdaptedTensor:
    (*stack, rows, columns) = shape
    parts, is_input_first = tuple(piece.part for piece in pieces), pieces[0].is_input_first
    first = parts[0]
    sublayer, own = first.place.key
    is_scaled = (sublayer, own + LENGTH) in first.place.layer_type.stored
    if is_scaled and is_shared:
        raise _unsupported(first.name, tensor, "has DoRA magnitudes and shares its tensor")
    if tensor.removesuffix(_WEIGHT).rpartition(".")[2] in table.modules_without_peft:
        raise _unsupported(first.name, tensor, "is in a module that PEFT does not adapt")
    is_renamed = may_rename and tensor.removesuffix(_WEIGHT).rpartition(".")[2] in _RENAMED
    return AdaptedTensor(
        tensor,
        stack[0] if stack else 0,
        (rows, columns) if is_input_first else (columns, rows),
        parts,
        is_reversed=is_input_first != (bool(stack) and table.has_transposed_experts),
        is_parameter=bool(stack) or (is_renamed and not is_scaled),
    )


def _unsupported(name: str, tensor: str, why: str) -> ConfigError:
    return ConfigError.one(
        Code.HF_EXPORT,
        "command line: --adapter",
        None,
        f"{name} has an adapter with no equivalent in PEFT: the matrix {why} ({tensor}).",
        "Omit --adapter to export the merged model.",
    )


def target_names(targets: Sequence[str], tensors: Sequence[str]) -> dict[str, str]:
    """Return a short name for each adapted module or tensor, as in PEFT's config: the shortest part
    after the layer index that no module without an adapter has. If there is none, the result is the
    full name.
    """
    every = {each.removesuffix(_WEIGHT) for each in tensors} | {*tensors}
    own, names = {*targets}, dict[str, str]()
    for target in targets:
        below = re.sub(r"^model\.layers\.\d+\.", "", target).split(".")
        ends = [".".join(below[n:]) for n in reversed(range(len(below)))]
        names[target] = target
        for end in ends:
            if {each for each in every if each.endswith(f".{end}")} <= own:
                names[target] = end
                break
    return names
