"""Megatron's index of a file of token ids: what it holds, and where.

magic, version, type of an id, number of sequences and of bounds       34 bytes
lengths    int32 [sequences]    ids of each
pointers   int64 [sequences]    byte of the .bin at which each begins
bounds     int64 [documents + 1]   the sequence at which each document begins, and the end
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BIN, IDX = ".bin", ".idx"

_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_OLD_MAGIC = b"TNTIDX\x00\x00"
# Their number of a type of ids; 6 and 7 are floats.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)


@dataclass(frozen=True, slots=True)
class Layout:
    """The type of the ids, and the tables of an index. `num_bounds` is documents + 1."""

    dtype: np.dtype
    num_sequences: int
    num_bounds: int

    @property
    def lengths_at(self) -> int:
        return HEADER_BYTES

    @property
    def pointers_at(self) -> int:
        return self.lengths_at + 4 * self.num_sequences

    @property
    def bounds_at(self) -> int:
        return self.pointers_at + 8 * self.num_sequences

    @property
    def end(self) -> int:
        return self.bounds_at + 8 * self.num_bounds


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest type of Megatron's that holds the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def parse(raw: bytes, size: int) -> Layout:
    """The layout that the first bytes of an index of `size` bytes describe.

    Raises:
        ValueError: it is no index, is cut, or is of a kind that is not read; the text says what.
    """
    if raw.startswith(_OLD_MAGIC):
        raise ValueError("it is of the kind before MMIDIDX, TNTIDX")
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC):
        raise ValueError(f"it has no header of {HEADER_BYTES} bytes that begins with MMIDIDX")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(raw[:HEADER_BYTES])
    if version != _VERSION:
        raise ValueError(f"it is of version {version}, and {_VERSION} is read")
    if code in _FLOATS:
        raise ValueError(f"its ids are floats, type {code}")
    if code not in _TYPES:
        raise ValueError(f"its ids are of the unknown type {code}")
    found = Layout(np.dtype(_TYPES[code]), num_sequences, num_bounds)
    # Indexes of several kinds of text have a byte more for each sequence, which is not read.
    if size not in (found.end, found.end + num_sequences):
        raise ValueError(
            f"it says {num_sequences} sequences and {num_bounds} bounds, which take {found.end} "
            f"bytes, and has {size}"
        )
    return found


def index_of(lengths: np.ndarray, dtype: np.dtype) -> Iterator[bytes]:
    """The parts of an index of documents of one sequence each; `lengths` int64 [documents]."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == dtype)
    yield _HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1)
    yield lengths.astype("<i4").tobytes()
    yield ((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()
