"""Digests of arrays that do not depend on how these are split over devices and processes.

An array's digest is a sum modulo 2**64 over its elements: the bits of each as a number, times
a key for each dimension that belongs to the element's index in it. The keys are odd, so one
changed element always changes the sum; other changes, exchanged rows or blocks among them, go
unnoticed with a chance of 2**-32 at worst (two flipped signs) and about 2**-60 otherwise. The
sums of disjoint parts add up to that of the whole, on whatever device they are computed. It is
no protection against forgery. numpy computes it two or three times as fast as SHA-256, and lets
other threads run meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

_MODULO = 2**64
_BLOCK = 1 << 18
"""Elements at a time: more would leave the processor's cache, fewer wait more often for other
threads."""
_SHORT = 64
"""Rows with fewer elements would be too many calls: several are taken as one."""
# Of numbers that are not finite, all bits of the exponent are set.
_EXPONENTS = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
}


class ArrayEntry(TypedDict):
    """A whole array, as it is listed in JSON; the digest has 16 hexadecimal digits."""

    dtype: str
    shape: list[int]
    digest: str


class PartEntry(ArrayEntry):
    """A part of one: how many of its elements, and how many of these are NaN or infinite."""

    elements: int
    non_finite: int


@dataclass(slots=True)
class ArrayDigest:
    """Of the parts of one array that were added so far."""

    dtype: str
    shape: tuple[int, ...]
    value: int = 0
    elements: int = 0
    non_finite: int = 0

    def add(self, part: np.ndarray, start: Sequence[int] = ()) -> None:
        """Add a part whose first element has the index `start`, by default all zeros."""
        first = tuple(start) or (0,) * part.ndim
        assert str(part.dtype) == self.dtype and part.ndim == len(self.shape) == len(first)
        self.elements += part.size
        self.non_finite += num_non_finite(part)
        self.value = (self.value + _sum(*_words(part, first))) % _MODULO

    def merge(self, other: ArrayDigest) -> None:
        """Add the parts of another sum of the same array."""
        assert (self.dtype, self.shape) == (other.dtype, other.shape)
        self.value = (self.value + other.value) % _MODULO
        self.elements += other.elements
        self.non_finite += other.non_finite

    @property
    def is_complete(self) -> bool:
        """Whether as many elements were added as the array has."""
        return self.elements == math.prod(self.shape)

    def entry(self) -> ArrayEntry:
        """Of a whole array."""
        return {"dtype": self.dtype, "shape": list(self.shape), "digest": f"{self.value:016x}"}

    def part_entry(self) -> PartEntry:
        """Of a part."""
        return {**self.entry(), "elements": self.elements, "non_finite": self.non_finite}

    @classmethod
    def from_entry(cls, entry: ArrayEntry) -> ArrayDigest:
        """Of a whole array, as it was listed.

        Raises:
            ValueError: the digest is no number.
        """
        shape = tuple(entry["shape"])
        return cls(entry["dtype"], shape, int(entry["digest"], 16), math.prod(shape))

    @classmethod
    def from_part_entry(cls, entry: PartEntry) -> ArrayDigest:
        """Of a part, as it was listed. Raises as `of_entry`."""
        found = cls.from_entry(entry)
        found.elements, found.non_finite = entry["elements"], entry["non_finite"]
        return found


def num_non_finite(array: np.ndarray) -> int:
    """How many of its numbers are NaN or infinite; 0 of types that have neither."""
    if array.dtype == np.float64:
        return array.size - int(np.count_nonzero(np.isfinite(array)))
    if (exponent := _EXPONENTS.get(str(array.dtype))) is None:
        return 0
    words, found = np.ascontiguousarray(array).reshape(-1).view(exponent.dtype), 0
    for begin in range(0, words.size, _BLOCK):
        block = words[begin : begin + _BLOCK] & exponent
        found += int(np.count_nonzero(block == exponent))
    return found


def digest_array(array: np.ndarray) -> ArrayDigest:
    """The sum of a whole array."""
    found = ArrayDigest(str(array.dtype), array.shape)
    found.add(array)
    return found


def diff_digests(
    expected: Mapping[str, ArrayDigest], found: Mapping[str, ArrayDigest]
) -> list[str]:
    """One line for each array, by name, that is not what it was, or that only one side has."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"array {name} is missing")
        elif name not in expected:
            lines.append(f"array {name} was never saved")
        else:
            before, now = expected[name], found[name]
            if (before.dtype, before.shape) != (now.dtype, now.shape):
                lines.append(
                    f"array {name} is {now.dtype} {_size(now)}, not the {before.dtype} "
                    f"{_size(before)} that was saved"
                )
            elif before.value != now.value or before.elements != now.elements:
                lines.append(f"array {name} has other content than was saved")
    return lines


def describe_non_finite(sums: Mapping[str, ArrayDigest]) -> list[str]:
    """One line for each array, by name, that holds NaN or infinity."""
    return [
        f"array {name} holds {one.non_finite:,} values that are NaN or infinite"
        for name, one in sorted(sums.items())
        if one.non_finite
    ]


def merge_digests(parts: Iterable[Mapping[str, ArrayDigest]]) -> dict[str, ArrayDigest]:
    """The sums of several holders of parts.

    Raises:
        ValueError: they differ in an array's type or shape, or what they hold is not the whole.
    """
    total: dict[str, ArrayDigest] = {}
    for part in parts:
        for name, one in part.items():
            mine = total.setdefault(name, ArrayDigest(one.dtype, one.shape))
            if (mine.dtype, mine.shape) != (one.dtype, one.shape):
                raise ValueError(f"processes differ in the type or shape of {name}")
            mine.merge(one)
    for name, one in total.items():
        if not one.is_complete:
            count = math.prod(one.shape)
            raise ValueError(f"{one.elements:,} of {count:,} elements of {name} were digested")
    return total


def _size(one: ArrayDigest) -> str:
    return " x ".join(map(str, one.shape)) or "scalar"


def _words(part: np.ndarray, start: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """An element's bits as one unsigned number of at most 32 bits, or along one more dimension.

    With 64 bits in one number, two flipped signs would go unnoticed.
    """
    part = np.ascontiguousarray(part).reshape(part.shape)
    size = part.dtype.itemsize
    if size <= 4:
        return part.view(f"u{size}"), start
    words = part.reshape(-1).view(np.uint32).reshape(*part.shape, size // 4)
    return words, (*start, 0)


def _sum(words: np.ndarray, start: tuple[int, ...]) -> int:
    if not words.size:
        return 0
    shape = words.shape
    # The last dimensions that fit a block together have one key for each of their elements.
    split, inner = len(shape), 1
    while split and inner * shape[split - 1] <= _BLOCK:
        split -= 1
        inner *= shape[split]
    row = _keys(split, shape[split:], start[split:])
    wide = np.empty(min(_BLOCK, words.size), np.uint64)
    if not split:
        return _dot(words.reshape(1, -1), np.ones(1, np.uint64), row, wide)
    axis, size = split - 1, shape[split - 1]
    outer = _keys(0, shape[:axis], start[:axis])
    lines = words.reshape(outer.size, size * inner)
    step, total = max(1, _BLOCK // inner), 0
    for begin in range(0, size, step):
        end = min(begin + step, size)
        along, keys = _axis_keys(axis, start[axis] + begin, start[axis] + end), row
        if inner < _SHORT:
            along, keys = np.ones(1, np.uint64), np.multiply.outer(along, row).reshape(-1)
        for line, key in zip(lines, outer, strict=True):
            part = line[begin * inner : end * inner].reshape(along.size, -1)
            total += _dot(part, along, keys, wide) * int(key)
    return total


def _dot(words: np.ndarray, along: np.ndarray, row: np.ndarray, wide: np.ndarray) -> int:
    """Of a matrix with the keys of both of its dims; `wide` is memory to work in.

    einsum multiplies 64-bit integers several at a time, dot one by one.
    """
    wide = wide[: words.size].reshape(words.shape)
    np.copyto(wide, words)
    return int(np.einsum("i,i->", np.einsum("ij,j->i", wide, row), along))


def _keys(axis: int, sizes: Sequence[int], start: Sequence[int]) -> np.ndarray:
    """Products of the keys of some dimensions, from `axis` on, flat."""
    keys = np.ones(1, np.uint64)
    for number, (size, first) in enumerate(zip(sizes, start, strict=True)):
        along = _axis_keys(axis + number, first, first + size)
        keys = np.multiply.outer(keys, along).reshape(-1)
    return keys


@functools.lru_cache(maxsize=64)
def _axis_keys(axis: int, begin: int, end: int) -> np.ndarray:
    """One dimension's keys of the indices from `begin` to before `end`: splitmix64, made odd."""
    bits = np.arange(begin, end, dtype=np.uint64) + np.uint64(((axis + 1) << 48) + 1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits | np.uint64(1)
