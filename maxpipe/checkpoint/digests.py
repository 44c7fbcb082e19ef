"""Compute array digests that are independent of the sharding over devices and processes.

The digest is a sum over all elements, modulo 2**64. Every element contributes its bits as an
unsigned integer, multiplied by one key per dimension. The key depends on the element's index in
that dimension. All keys are odd, so a change of one element always changes the digest. Other
changes, such as swapped rows or blocks, remain undetected with probability about 2**-60, at worst
2**-32 (two flipped signs). The digests of disjoint shards add up to the digest of the full array.
The digest does not protect against forgery. numpy computes the digest two to three times faster
than SHA-256, and releases the GIL during the computation.
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
"""Number of elements per block. Larger blocks do not fit in the CPU cache. Smaller blocks wait for
the GIL more often."""
_SHORT = 64
"""Rows with fewer elements than this are merged, to limit the number of numpy calls."""
# In a non-finite value, all exponent bits are set.
_EXPONENTS = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F800000),
}


class ArrayEntry(TypedDict):
    """JSON entry of a full array. The digest has 16 hexadecimal digits."""

    dtype: str
    shape: list[int]
    digest: str


class PartEntry(ArrayEntry):
    """JSON entry of a shard, including the number of elements and of non-finite elements."""

    elements: int
    non_finite: int


@dataclass(slots=True)
class ArrayDigest:
    """The running digest of one array over the shards added so far."""

    dtype: str
    shape: tuple[int, ...]
    value: int = 0
    elements: int = 0
    non_finite: int = 0

    def add(self, part: np.ndarray, start: Sequence[int] = ()) -> None:
        """Add a shard whose first element is at index `start` (default: all zeros)."""
        first = tuple(start) or (0,) * part.ndim
        assert str(part.dtype) == self.dtype and part.ndim == len(self.shape) == len(first)
        self.elements += part.size
        self.non_finite += num_non_finite(part)
        self.value = (self.value + _sum(*_words(part, first))) % _MODULO

    def merge(self, other: ArrayDigest) -> None:
        """Add the shards of another digest of the same array."""
        assert (self.dtype, self.shape) == (other.dtype, other.shape)
        self.value = (self.value + other.value) % _MODULO
        self.elements += other.elements
        self.non_finite += other.non_finite

    @property
    def is_complete(self) -> bool:
        """Return whether the number of added elements equals the array size."""
        return self.elements == math.prod(self.shape)

    def entry(self) -> ArrayEntry:
        """Return the JSON entry of a full array."""
        return {"dtype": self.dtype, "shape": list(self.shape), "digest": f"{self.value:016x}"}

    def part_entry(self) -> PartEntry:
        """Return the JSON entry of a shard."""
        return {**self.entry(), "elements": self.elements, "non_finite": self.non_finite}

    @classmethod
    def from_entry(cls, entry: ArrayEntry) -> ArrayDigest:
        """Create the digest of a full array from its JSON entry.

        Raises:
            ValueError: the digest is not a hexadecimal number.
        """
        shape = tuple(entry["shape"])
        return cls(entry["dtype"], shape, int(entry["digest"], 16), math.prod(shape))

    @classmethod
    def from_part_entry(cls, entry: PartEntry) -> ArrayDigest:
        """Create the digest of a shard from its JSON entry; raises the errors of `from_entry`."""
        found = cls.from_entry(entry)
        found.elements, found.non_finite = entry["elements"], entry["non_finite"]
        return found


def num_non_finite(array: np.ndarray) -> int:
    """Return the number of NaN or infinite elements, or 0 for dtypes without such values."""
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
    """Return the digest of a full array."""
    found = ArrayDigest(str(array.dtype), array.shape)
    found.add(array)
    return found


def diff_digests(
    expected: Mapping[str, ArrayDigest], found: Mapping[str, ArrayDigest]
) -> list[str]:
    """Return one line for every array that changed or exists on one side only, sorted by name."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"array {name} is missing")
        elif name not in expected:
            lines.append(f"array {name} was not saved")
        else:
            before, now = expected[name], found[name]
            if (before.dtype, before.shape) != (now.dtype, now.shape):
                lines.append(
                    f"array {name} is {now.dtype} {_size(now)}, not the {before.dtype} "
                    f"{_size(before)} that was saved"
                )
            elif before.value != now.value or before.elements != now.elements:
                lines.append(f"array {name} differs from the saved content")
    return lines


def describe_non_finite(sums: Mapping[str, ArrayDigest]) -> list[str]:
    """Return one line for every array that contains NaN or infinity, sorted by name."""
    return [
        f"array {name} contains {one.non_finite:,} values that are NaN or infinite"
        for name, one in sorted(sums.items())
        if one.non_finite
    ]


def merge_digests(parts: Iterable[Mapping[str, ArrayDigest]]) -> dict[str, ArrayDigest]:
    """Merge the digests of several processes.

    Raises:
        ValueError: the dtypes or shapes of an array differ, or its shards do not cover the array.
    """
    total: dict[str, ArrayDigest] = {}
    for part in parts:
        for name, one in part.items():
            mine = total.setdefault(name, ArrayDigest(one.dtype, one.shape))
            if (mine.dtype, mine.shape) != (one.dtype, one.shape):
                raise ValueError(f"processes recorded different types or shapes of {name}")
            mine.merge(one)
    for name, one in total.items():
        if not one.is_complete:
            count = math.prod(one.shape)
            raise ValueError(f"digests cover {one.elements:,} of {count:,} elements of {name}")
    return total


def _size(one: ArrayDigest) -> str:
    return " x ".join(map(str, one.shape)) or "scalar"


def _words(part: np.ndarray, start: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the elements as unsigned integers of at most 32 bits.

    Larger elements are split along an additional last dimension, because two flipped signs would
    not be detected in 64-bit integers.
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
    # `row` has the product of the keys for each element of the trailing dimensions that fit in one
    # block.
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
    """Return the dot product of a matrix with the keys of its rows and columns.

    `wide` is scratch memory. For 64-bit integers, einsum uses vector instructions but dot does not.
    """
    wide = wide[: words.size].reshape(words.shape)
    np.copyto(wide, words)
    return int(np.einsum("i,i->", np.einsum("ij,j->i", wide, row), along))


def _keys(axis: int, sizes: Sequence[int], start: Sequence[int]) -> np.ndarray:
    """Return the flat outer product of the keys of consecutive dimensions, starting at `axis`."""
    keys = np.ones(1, np.uint64)
    for number, (size, first) in enumerate(zip(sizes, start, strict=True)):
        along = _axis_keys(axis + number, first, first + size)
        keys = np.multiply.outer(keys, along).reshape(-1)
    return keys


@functools.lru_cache(maxsize=64)
def _axis_keys(axis: int, begin: int, end: int) -> np.ndarray:
    """Return the keys for indices [begin, end) of one dimension: odd splitmix64 values."""
    bits = np.arange(begin, end, dtype=np.uint64) + np.uint64(((axis + 1) << 48) + 1)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits | np.uint64(1)
