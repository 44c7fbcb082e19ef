"""A model's parameters as tensors of a Hugging Face folder, by the family's table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from maxpipe.model.huggingface import HuggingFace, Tensor
from maxpipe.model.spec import Model, Param

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Form:
    """How the dims of an array of ours lie in a tensor of theirs, and which is in its name."""

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]

    @cached_property
    def named(self) -> str:
        """The dim that counts tensors; empty if there is none."""
        rest = {*self.ours} - {each for group in self.theirs for each in group}
        assert len(rest) <= 1, f"{self} leaves out several dims"
        return next(iter(rest), "")

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The other ones of ours."""
        return tuple(each for each in self.ours if each != self.named)

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor, by the sizes of our dims."""
        size = dict(zip(self.ours, sizes, strict=True))
        return tuple(math.prod(size[each] for each in group) for group in self.theirs)

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """An array of ours, without the dim in the name."""
        size = dict(zip(self.kept, array.shape, strict=True))
        flat = [each for group in self.theirs for each in group]
        turned = array.transpose([self.kept.index(each) for each in flat])
        return turned.reshape([math.prod(size[each] for each in group) for group in self.theirs])

    def to_ours(self, tensor: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """The way back; `sizes` are those of all our dims."""
        size = dict(zip(self.ours, sizes, strict=True))
        flat = [each for group in self.theirs for each in group]
        split = tensor.reshape([size[each] for each in flat])
        return split.transpose([flat.index(each) for each in self.kept])


@lru_cache
def form_of(text: str) -> Form:
    """Of `d n h -> (n h) d`."""
    left, _, right = text.partition("->")
    groups = re.findall(r"\(([^)]*)\)|(\S+)", right)
    return Form(tuple(left.split()), tuple(tuple((a or b).split()) for a, b in groups))


class Lane(NamedTuple):
    """Of a tensor's last dim each `every`-th entry, from `number` on."""

    number: int = 0
    every: int = 1

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """These entries, a view."""
        return tensor[..., self.number :: self.every]


class Piece(NamedTuple):
    """Rows of a tensor of theirs, which are one part of a parameter of ours."""

    tensor: str
    first: int
    """The first of the tensor's rows."""
    shape: tuple[int, ...]
    """Of these rows."""
    at: Index
    """Of the parameter as it is in checkpoints."""
    form: Form
    sizes: tuple[int, ...]
    """Of the parameter's dims, layers left out."""
    lane: Lane = Lane()

    @property
    def lead(self) -> int:
        """The dim of the parameter that is the outer one of these rows."""
        return self.form.ours.index(self.form.theirs[0][0])

    @property
    def lead_kept(self) -> int:
        """The same among the dims of an array of ours without that in the name."""
        return self.form.kept.index(self.form.ours[self.lead])

    def rows(self, part: slice) -> tuple[int, int]:
        """From, to: where that part of the lead dim is."""
        each = self.shape[0] // self.sizes[self.lead]
        return self.first + part.start * each, self.first + part.stop * each

    def to_ours(self, rows: np.ndarray, part: slice) -> np.ndarray:
        """The tensor's rows of that part of the lead dim, in the order of our dims."""
        sizes = list(self.sizes)
        sizes[self.lead] = part.stop - part.start
        return self.form.to_ours(self.lane.of(rows), tuple(sizes))

    def tensor_shape(self, rows: int) -> tuple[int, ...]:
        """Of the tensor, of which as many rows are known; all of them if lanes share them."""
        if self.lane.every > 1:
            return (*self.shape[:-1], self.shape[-1] * self.lane.every)
        return (rows, *self.shape[1:])


@dataclass(frozen=True)
class Mapped:
    """Both sides of a model."""

    pieces: Mapping[str, tuple[Piece, ...]]
    """By our name, as in checkpoints."""
    shapes: Mapping[str, tuple[int, ...]]
    """By our name, layers of a kind stacked."""
    params: Mapping[str, Param]
    """By our name, without the layers' dim."""
    tensors: Mapping[str, tuple[int, ...]]
    """Shapes by their name, in network order."""


def mapped(model: Model, table: HuggingFace, most: int | None = None) -> Mapped:
    """The parameters of a model, but for heads that predict further ahead, which no table has.

    Raises:
        ValueError: it has more than `most` tensors.
    """
    rows = {row.ours: row for row in table.tensors}
    assert len(rows) == len(table.tensors), f"{table.architecture} maps a parameter twice"
    pieces: dict[str, list[Piece]] = {}
    params: dict[str, Param] = {}
    lanes = Counter(row.theirs for row in table.tensors if row.interleaved)
    sizes: dict[str, int] = {}  # rows or lanes of a tensor that are taken
    found: dict[str, tuple[int, ...]] = {}
    for name, param, row, layer, place in _in_network_order(model, rows):
        params[name] = param
        for piece in _pieces(param, row, layer, place, sizes, lanes[row.theirs]):
            pieces.setdefault(name, []).append(piece)
            found[piece.tensor] = piece.tensor_shape(sizes[piece.tensor])
            if most is not None and len(found) > most:
                raise ValueError(f"it has more than {most} tensors")
    counts = {kind: model.layers.count(kind) for kind in model.kinds}
    shapes = {
        name: (counts[_kind_of(name, model)], *param.shape)
        if name.startswith(_LAYERS)
        else param.shape
        for name, param in params.items()
    }
    return Mapped({name: tuple(each) for name, each in pieces.items()}, shapes, params, found)


_LAYERS = "layers."


def _in_network_order(
    model: Model, rows: Mapping[str, Tensor]
) -> Iterator[tuple[str, Param, Tensor, int, int]]:
    """(our name, parameter, row, layer, its place among those of its kind)."""
    several = len(set(model.layers)) > 1
    ends = {".".join(name): param for name, param in model.ends.params.items()}
    yield "embedding", ends.pop("embedding"), rows["embedding"], 0, -1
    places = dict.fromkeys(model.kinds, 0)
    # By rows of the table, so that parts of one tensor come in its order.
    for layer, kind in enumerate(model.layers):
        place, places[kind] = places[kind], places[kind] + 1
        left = {".".join(key): param for key, param in model.kinds[kind].params.items()}
        for name, row in rows.items():
            if (param := left.pop(name, None)) is not None:
                yield (
                    f"{_LAYERS}{kind}.{name}" if several else f"{_LAYERS}{name}",
                    param,
                    row,
                    layer,
                    place,
                )
        assert not left, f"the table lacks {', '.join(left)}"
    for name, param in ends.items():
        if not name.startswith("ahead."):
            yield name, param, rows[name], 0, -1


def _kind_of(name: str, model: Model) -> str:
    kinds = [*dict.fromkeys(model.layers)]
    return name.split(".")[1] if len(kinds) > 1 else kinds[0]


def _pieces(
    param: Param, row: Tensor, layer: int, place: int, taken: dict[str, int], lanes: int
) -> Iterator[Piece]:
    form = form_of(row.dims)
    shape = form.shape(param.shape)
    stacked: Index = () if place < 0 else (place,)
    at = form.ours.index(form.named) if form.named else -1
    for number in range(param.shape[at]) if form.named else (0,):
        name = row.theirs.format(layer=layer, expert=number)
        index = [slice(None)] * len(param.shape)
        whole: Index = (
            (*stacked, *index[:at], number, *index[at + 1 :]) if form.named else (*stacked, *index)
        )
        first = taken.get(name, 0)
        taken[name] = first + (1 if lanes else shape[0])
        start, lane = (0, Lane(first, lanes)) if lanes else (first, Lane())
        yield Piece(name, start, shape, whole, form, param.shape, lane)


def part_of(piece: Piece, region: tuple[range, ...]) -> tuple[Index, tuple[slice, ...]] | None:
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


def slab(both: Mapped, name: str, most: int) -> tuple[int, ...]:
    """The shape of parts of a parameter that read whole rows of tensors, few of them at a time.

    A part has at most `most` elements, unless a single row has more.
    """
    shape, piece = both.shapes[name], both.pieces[name][0]
    counting, lead = _divisible(shape, piece)
    found = [1 if dim in counting else size for dim, size in enumerate(shape)]
    rows = max(1, most * shape[lead] // math.prod(found))  # of the lead dim
    found[lead] = -(-shape[lead] // -(-shape[lead] // rows))  # in parts of nearly one size
    for dim in reversed(counting):
        found[dim] = max(1, min(shape[dim], most // math.prod(found)))
    return tuple(found)


def readable(both: Mapped, name: str, chunk: Sequence[int]) -> tuple[int, ...]:
    """The shape of parts of whole rows of tensors that reads each chunk of a parameter once."""
    shape = both.shapes[name]
    counting, lead = _divisible(shape, both.pieces[name][0])
    return tuple(
        chunk[dim] if dim in counting or dim == lead else size for dim, size in enumerate(shape)
    )


def _divisible(shape: tuple[int, ...], piece: Piece) -> tuple[list[int], int]:
    """The dims that count tensors, and the outer one of a tensor's rows."""
    counting = [dim for dim, index in enumerate(piece.at) if isinstance(index, int)]
    return counting, len(shape) - len(piece.sizes) + piece.lead


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Parameters of all tensors."""
    return sum(map(math.prod, shapes.values()))
