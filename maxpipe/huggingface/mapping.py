"""A model's parameters as tensors of a Hugging Face folder, by the family's table.

Copies between arrays whose dims lie in memory in different orders, block by block.

numpy copies such arrays along one of the two orders, with a cache miss for each element of the
other: 0.2 GB/s for a matrix of bfloat16, and 1.6 GB/s in blocks that fit the cache.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from maxpipe.models.huggingface import HuggingFace, Tensor
from maxpipe.models.spec import Kind, LayersAhead, Model, Param

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class AxisMapping:
    """How the dims of an array of ours lie in a tensor of theirs, and which is in its name."""

    param_dims: tuple[str, ...]
    hf_dims: tuple[tuple[str, ...], ...]

    @cached_property
    def index_dim(self) -> str:
        """The dim that counts tensors; empty if there is none."""
        rest = {*self.param_dims} - {each for group in self.hf_dims for each in group}
        assert len(rest) <= 1, f"{self} leaves out several dims"
        return next(iter(rest), "")

    @cached_property
    def remaining_dims(self) -> tuple[str, ...]:
        """The other ones of ours."""
        return tuple(each for each in self.param_dims if each != self.index_dim)

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor, by the sizes of our dims."""
        size = dict(zip(self.param_dims, sizes, strict=True))
        return tuple(math.prod(size[each] for each in group) for group in self.hf_dims)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """An array of ours, without the dim in the name."""
        size = dict(zip(self.remaining_dims, array.shape, strict=True))
        flat = [each for group in self.hf_dims for each in group]
        turned = array.transpose([self.remaining_dims.index(each) for each in flat])
        return turned.reshape([math.prod(size[each] for each in group) for group in self.hf_dims])

    def to_param(self, tensor: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """The way back; `sizes` are those of all our dims."""
        size = dict(zip(self.param_dims, sizes, strict=True))
        flat = [each for group in self.hf_dims for each in group]
        split = tensor.reshape([size[each] for each in flat])
        return split.transpose([flat.index(each) for each in self.remaining_dims])


@lru_cache
def parse_axis_mapping(text: str) -> AxisMapping:
    """Of `d n h -> (n h) d`."""
    left, _, right = text.partition("->")
    groups = re.findall(r"\(([^)]*)\)|(\S+)", right)
    return AxisMapping(tuple(left.split()), tuple(tuple((a or b).split()) for a, b in groups))


class InterleavedSlice(NamedTuple):
    """Of a tensor's last dim each `every`-th entry, from `number` on."""

    number: int = 0
    every: int = 1

    def take(self, tensor: np.ndarray) -> np.ndarray:
        """These entries, a view."""
        return tensor[..., self.number :: self.every]


class TensorSlice(NamedTuple):
    """Rows of a tensor of theirs, which are one part of a parameter of ours."""

    tensor: str
    first: int
    """The first of the tensor's rows."""
    shape: tuple[int, ...]
    """Of these rows."""
    at: Index
    """Of the parameter as it is in checkpoints."""
    axis_mapping: AxisMapping
    sizes: tuple[int, ...]
    """Of the parameter's dims, layers left out."""
    interleave: InterleavedSlice = InterleavedSlice()
    stacked: int = 0
    """How many blocks of rows the tensor has along a leading dim of its own; 0 without that dim."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one of the tensor's rows."""
        return (*self.shape[1:-1], self.shape[-1] * self.interleave.every) if self.shape[1:] else ()

    @property
    def outer_dim(self) -> int:
        """The dim of the parameter that is the outer one of these rows."""
        return self.axis_mapping.param_dims.index(
            next(each for group in self.axis_mapping.hf_dims for each in group)
        )

    @property
    def is_divisible(self) -> bool:
        """Whether parts of that dim are rows of their own: a matrix with one row has none."""
        return bool(self.axis_mapping.hf_dims[0])

    @property
    def outer_remaining_dim(self) -> int:
        """The same among the dims of an array of ours without that in the name."""
        return self.axis_mapping.remaining_dims.index(self.axis_mapping.param_dims[self.outer_dim])

    def rows(self, part: slice) -> tuple[int, int]:
        """From, to: where that part of the lead dim is, or all if it has no rows of its own."""
        if not self.is_divisible:
            return self.first, self.first + self.shape[0]
        each = self.shape[0] // self.sizes[self.outer_dim]
        return self.first + part.start * each, self.first + part.stop * each

    def to_param(self, rows: np.ndarray, part: slice) -> np.ndarray:
        """The tensor's rows of that part of the lead dim, in the order of our dims."""
        sizes = list(self.sizes)
        sizes[self.outer_dim] = part.stop - part.start
        return self.axis_mapping.to_param(self.interleave.take(rows), tuple(sizes))

    def tensor_shape(self, rows: int) -> tuple[int, ...]:
        """Of the tensor, of which as many rows are known; all of them if lanes share them."""
        if self.stacked:
            return (self.stacked, rows, *self.shape[1:])
        if self.interleave.every > 1:
            return (*self.shape[:-1], self.shape[-1] * self.interleave.every)
        return (rows, *self.shape[1:])


@dataclass(frozen=True)
class TensorMapping:
    """Both sides of a model."""

    slices: Mapping[str, tuple[TensorSlice, ...]]
    """By our name, as in checkpoints."""
    shapes: Mapping[str, tuple[int, ...]]
    """By our name, layers of a kind stacked."""
    params: Mapping[str, Param]
    """By our name, without the layers' dim."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes by their name, in network order, copies included."""
    copied_slices: Mapping[str, tuple[TensorSlice, ...]]
    """By our name pieces that the tensors have once more; an import may lack them."""

    @property
    def originals(self) -> Mapping[str, str]:
        """Each tensor that is a copy, and the one that it is a copy of."""
        return {
            piece.tensor: self.slices[name][0].tensor
            for name, pieces in self.copied_slices.items()
            for piece in pieces
        }


_MAX_SLICES = 100_000
"""Of a parameter: layers, times experts."""


def map_tensors(model: Model, table: HuggingFace, most: int | None = None) -> TensorMapping:
    """The parameters of a model, but for heads that predict further ahead and are not in the table.

    Raises:
        ValueError: it has more than `most` tensors.
    """
    names = {row.ours for row in table.tensors}
    assert len(names) == len(table.tensors), f"{table.architecture} maps a parameter twice"
    pieces: dict[str, list[TensorSlice]] = {}
    params: dict[str, Param] = {}
    lanes = Counter(row.theirs for row in table.tensors if row.interleaved)
    sizes: dict[str, int] = {}  # rows or lanes of a tensor, or of a block of it, that are taken
    blocks = _blocks(model, table)
    found: dict[str, tuple[int, ...]] = {}
    stacks: dict[str, int] = {}
    for name, param, row, layer, place in _in_network_order(model, table):
        params[name] = param
        if place >= 0:
            stacks[name] = place + 1
        for piece in _iter_slices(param, row, layer, place, sizes, lanes[row.theirs], blocks):
            pieces.setdefault(name, []).append(piece)
            if most is not None and (count := len(pieces[name])) > _MAX_SLICES:
                raise ValueError(f"one parameter is in more than {count} matrices")
            found[piece.tensor] = piece.tensor_shape(sizes[piece.tensor])
            if most is not None and len(found) > most:
                raise ValueError(f"it has more than {most} tensors")
    shapes = {
        name: (*([stacks[name]] if name in stacks else []), *param.shape)
        for name, param in params.items()
    }
    copies = {name: tuple(each) for name, each in _copied_slices(model, table, pieces).items()}
    found |= {piece.tensor: piece.shape for each in copies.values() for piece in each}
    pieces_of = {name: tuple(each) for name, each in pieces.items()}
    return TensorMapping(pieces_of, shapes, params, found, copies)


def _blocks(model: Model, table: HuggingFace) -> Counter[str]:
    """Rows of one block of each tensor that stacks blocks along a leading dim."""
    found: Counter[str] = Counter()
    if any(_is_stacked(row) for row in table.tensors):
        for _, param, row, layer, _ in _in_network_order(model, table):
            if _is_stacked(row):
                found[row.theirs.format(layer=layer)] += parse_axis_mapping(row.dims).shape(
                    param.shape
                )[0]
    return found


def _is_stacked(row: Tensor) -> bool:
    """Whether the dim that other layouts have in the name is a leading one of the tensor."""
    return bool(parse_axis_mapping(row.dims).index_dim) and "{expert}" not in row.theirs


_LAYERS, _MTP_PREFIX = "layers.", "ahead."


def _mtp_layers(model: Model, table: HuggingFace) -> LayersAhead | None:
    """Heads ahead that the table has."""
    return model.ends.mtp_layers if table.mtp_tensors else None


def _copied_slices(
    model: Model, table: HuggingFace, pieces: Mapping[str, Sequence[TensorSlice]]
) -> dict[str, list[TensorSlice]]:
    """Copies by our name; of a tied table those of both its uses."""
    found: dict[str, list[TensorSlice]] = {}
    heads = _mtp_layers(model, table)
    for number in range(heads.num_heads if heads else 0):
        for name, theirs in table.copies:
            of = name if name in pieces else _EMBEDDING
            (original,) = pieces[of]
            layer = len(model.layers) + number
            found.setdefault(of, []).append(original._replace(tensor=theirs.format(layer=layer)))
    return found


_EMBEDDING = "embedding"


def _in_network_order(
    model: Model, table: HuggingFace
) -> Iterator[tuple[str, Param, Tensor, int, int]]:
    """(our name, parameter, row, layer, its place among those of its kind)."""
    rows = {row.ours: row for row in table.tensors}
    several = len(set(model.layers)) > 1
    ends = {".".join(name): param for name, param in model.ends.params.items()}
    yield _EMBEDDING, ends.pop(_EMBEDDING), rows[_EMBEDDING], 0, -1
    places = dict.fromkeys(model.layer_types, 0)
    for layer, kind in enumerate(model.layers):
        place, places[kind] = places[kind], places[kind] + 1
        prefix = f"{_LAYERS}{kind}." if several else _LAYERS
        for name, param, row in _of_layer(model.layer_types[kind], rows):
            yield f"{prefix}{name}", param, row, layer, place
    if (heads := _mtp_layers(model, table)) is not None:
        for place in range(heads.num_heads):
            layer = len(model.layers) + place
            for row in table.mtp_tensors:
                yield (
                    f"{_MTP_PREFIX}{row.ours}",
                    heads.params_of_one[tuple(row.ours.split("."))],
                    row,
                    layer,
                    place,
                )
            for name, param, row in _of_layer(heads.kind, rows):
                yield f"{_MTP_PREFIX}layer.{name}", param, row, layer, place
    for name, param in ends.items():
        if not name.startswith(_MTP_PREFIX):
            yield name, param, rows[name], 0, -1


def _of_layer(kind: Kind, rows: Mapping[str, Tensor]) -> Iterator[tuple[str, Param, Tensor]]:
    """(name, parameter, row), by rows of the table, so that parts of a tensor come in its order."""
    left = {".".join(key): param for key, param in kind.params.items()}
    for name, row in rows.items():
        if (param := left.pop(name, None)) is not None:
            yield name, param, row
    assert not left, f"the table lacks {', '.join(left)}"


def _iter_slices(
    param: Param,
    row: Tensor,
    layer: int,
    place: int,
    taken: dict[str, int],
    lanes: int,
    blocks: Mapping[str, int],
) -> Iterator[TensorSlice]:
    form = parse_axis_mapping(row.dims)
    shape = form.shape(param.shape)
    stacked: Index = () if place < 0 else (place,)
    at = form.param_dims.index(form.index_dim) if form.index_dim else -1
    count = param.shape[at] if form.index_dim else 1
    in_block = taken.get(row.theirs.format(layer=layer), 0) if _is_stacked(row) else 0
    for number in range(count):
        name = row.theirs.format(layer=layer, expert=number)
        index = [slice(None)] * len(param.shape)
        whole: Index = (
            (*stacked, *index[:at], number, *index[at + 1 :])
            if form.index_dim
            else (*stacked, *index)
        )
        if name in blocks:
            taken[name] = in_block + shape[0]
            first = number * blocks[name] + in_block
            yield TensorSlice(name, first, shape, whole, form, param.shape, stacked=count)
            continue
        first = taken.get(name, 0)
        taken[name] = first + (1 if lanes else shape[0])
        start, lane = (0, InterleavedSlice(first, lanes)) if lanes else (first, InterleavedSlice())
        yield TensorSlice(name, start, shape, whole, form, param.shape, lane)


def intersect(
    piece: TensorSlice, region: tuple[range, ...]
) -> tuple[Index, tuple[slice, ...]] | None:
    """(where in an array of that region, which part of the piece's array of ours); None: nowhere.

    A region has for each dim of the parameter the indices that are wanted.
    """
    inside: list[int | slice] = []
    taken: list[slice] = []
    for index, wanted in zip(piece.at, region, strict=True):
        if isinstance(index, int):
            if index not in wanted:
                return None
            inside.append(index - wanted.start)
        else:
            inside.append(slice(None))
            taken.append(slice(wanted.start, wanted.stop))
    return tuple(inside), tuple(taken)


def import_slab_shape(both: TensorMapping, name: str, most: int) -> tuple[int, ...]:
    """The shape of parts of a parameter that read whole rows of tensors, few of them at a time.

    A part has at most `most` elements, unless a single row has more.
    """
    shape, piece = both.shapes[name], both.slices[name][0]
    counting, lead = _divisible(shape, piece)
    found = [1 if dim in counting else size for dim, size in enumerate(shape)]
    rows = max(1, most * shape[lead] // math.prod(found))  # of the lead dim
    if piece.is_divisible:
        found[lead] = -(-shape[lead] // -(-shape[lead] // rows))  # in parts of nearly one size
    for dim in reversed(counting):
        found[dim] = max(1, min(shape[dim], most // math.prod(found)))
    return tuple(found)


def export_slab_shape(both: TensorMapping, name: str, chunk: Sequence[int]) -> tuple[int, ...]:
    """The shape of parts of whole rows of tensors that reads each chunk of a parameter once."""
    shape, piece = both.shapes[name], both.slices[name][0]
    counting, lead = _divisible(shape, piece)
    return tuple(
        chunk[dim] if dim in counting or (dim == lead and piece.is_divisible) else size
        for dim, size in enumerate(shape)
    )


def _divisible(shape: tuple[int, ...], piece: TensorSlice) -> tuple[list[int], int]:
    """The dims that count tensors, and the outer one of a tensor's rows."""
    counting = [dim for dim, index in enumerate(piece.at) if isinstance(index, int)]
    return counting, len(shape) - len(piece.sizes) + piece.outer_dim


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Parameters of all tensors."""
    return sum(map(math.prod, shapes.values()))


_BLOCK = 256
"""Elements of a block along both of its dims."""


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, both of one shape, cast to the target's type."""
    assert target.shape == source.shape
    if target.dtype == source.dtype:
        # Plain numbers: of other types numpy keeps other threads waiting.
        plain = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(plain), source.view(plain)
    target, source = _merge_contiguous_dims(target, source)
    fast = _fastest(target), _fastest(source)
    if fast[0] == fast[1]:
        np.copyto(target, source, casting="unsafe")
        return
    target, source = np.moveaxis(target, fast, (-1, -2)), np.moveaxis(source, fast, (-1, -2))
    for outer in np.ndindex(target.shape[:-2]):
        _transpose(target[outer], source[outer].T)


def _transpose(target: np.ndarray, source: np.ndarray) -> None:
    """The transposed `source`; in both the last dim is the one that is dense in memory."""
    for row in range(0, source.shape[0], _BLOCK):
        for column in range(0, source.shape[1], _BLOCK):
            block = source[row : row + _BLOCK, column : column + _BLOCK].astype(target.dtype)
            target[column : column + _BLOCK, row : row + _BLOCK] = block.T


def _merge_contiguous_dims(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with the dims in one that lie behind each other in both, and at least two."""
    sizes: list[int] = []
    steps: list[tuple[int, int]] = []
    for size, *step in zip(target.shape, target.strides, source.strides, strict=True):
        if size == 1:
            continue
        if sizes and all(last == size * each for last, each in zip(steps[-1], step, strict=True)):
            sizes[-1] *= size
            steps[-1] = (step[0], step[1])
        else:
            sizes.append(size)
            steps.append((step[0], step[1]))
    sizes = [1] * (2 - len(sizes)) + sizes
    return target.reshape(sizes), source.reshape(sizes)


def _fastest(array: np.ndarray) -> int:
    """The dim whose elements are nearest in memory."""
    return min(range(array.ndim), key=lambda dim: (array.shape[dim] == 1, array.strides[dim]))
