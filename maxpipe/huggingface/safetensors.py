"""Safetensors files: validated reading and incremental writing.

The custom reader reads a tensor into a single array. The numpy interface of the `safetensors`
package lacks bfloat16. The reader also rejects headers with duplicate names or gaps between
tensors, because folders come from untrusted sources.

Source of the format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxpipe.errors import ConfigError
from maxpipe.io.files import open_regular
from maxpipe.io.typed_json import parse_json

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of weights, keyed by their name in files."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64},
    **{"I64": 64, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()},
}
"""Number of bits per element, for every dtype of the format."""

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # limit of the format
_MAX_DIMS = 16
"""Maximum number of dims of a tensor. Weights of published models have at most 6 dims."""
_METADATA = "__metadata__"
_ALIGNMENT = 8


class TensorEntry(NamedTuple):
    """Location of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte, counted from the end of the header."""
    end: int


class SafetensorsReader:
    """Reader of one file. Each read opens the file, because a folder may have hundreds of files."""

    def __init__(self, path: Path):
        """Read and check the header.

        Raises:
            ConfigError: the file is not a valid safetensors file.
        """
        self.path = path
        try:
            self._start, self.entries = _header(path)
        except (OSError, ValueError, RecursionError) as error:
            raise damaged_file_error(
                path, getattr(error, "strerror", None) or str(error)
            ) from error

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        row_shape: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """Read a tensor or a range of its rows.

        Rows are entries of the first dim. With a `row_shape`, leading dims are merged into one row
        dim.

        Raises:
            ConfigError: the file ends too early or cannot be read.
        """
        entry = self.entries[name]
        dtype, shape, begin = DTYPES[entry.dtype], entry.shape, entry.begin
        if rows is not None:
            row_shape = shape[1:] if row_shape is None else row_shape
            begin += rows[0] * math.prod(row_shape) * dtype.itemsize
            shape = (rows[1] - rows[0], *row_shape)
        array = np.empty(shape, dtype)
        buffer = _bytes(array)
        try:
            with open(open_regular(self.path), "rb", buffering=0) as stream:
                stream.seek(self._start + begin)
                done = 0
                while done < len(buffer) and (count := stream.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise damaged_file_error(self.path, error.strerror or str(error)) from error
        if done < len(buffer):
            raise damaged_file_error(self.path, f"ends inside the tensor {quote_name(name)}")
        return array


def damaged_file_error(path: Path, reason: str) -> ConfigError:
    """Return the error for an invalid file."""
    return ConfigError.one(
        str(path),
        None,
        f"cannot be used as a safetensors file: {reason}.",
        "Copy the file again from its source, and compare sizes or digests.",
    )


def quote_name(name: str) -> str:
    """Return a tensor's name for messages, quoted and truncated."""
    return repr(name if len(name) <= 100 else f"{name[:97]}...")


def _header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    with open(open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(_LENGTH.size)
        if len(first) < _LENGTH.size:
            raise ValueError(f"the file has {size} bytes, fewer than a header")
        (length,) = _LENGTH.unpack(first)
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"the header size is {length:,} bytes, but the limit is 100 million")
        if length > size - _LENGTH.size:
            raise ValueError(f"the header size is {length:,} bytes, but the file has {size:,}")
        text = stream.read(length)
    start = _LENGTH.size + length
    parse_json(text, dict[str, Any])  # enforces limits; the next line detects duplicate names
    content = json.loads(text, object_pairs_hook=_unique)
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{_METADATA} is not an object")
    entries = {name: _entry(name, value) for name, value in content.items()}
    _check_places(entries, size - start)
    return start, entries


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the header has {quote_name(name)} twice")
        content[name] = value
    return content


def _entry(name: str, value: Any) -> TensorEntry:
    def refuse(reason: str) -> ValueError:
        return ValueError(f"the header entry of {quote_name(name)} {reason}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refuse(f"has the unknown type {quote_name(str(dtype))}")
    if isinstance(shape, list) and len(shape) > _MAX_DIMS:
        raise refuse(f"has {len(shape):,} dims, but at most {_MAX_DIMS} are allowed")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise refuse("must have lists of integers from 0 to 2**63 - 1 as shape and offsets")
    begin, end = offsets
    bits = _BITS[dtype]
    for size in sorted(shape):  # zero sizes come first
        bits *= size
        if bits >= 2**66:
            raise refuse(f"has a shape of more than 2**63 bytes, {shape}")
    if 8 * (end - begin) != bits:
        raise refuse(f"has {end - begin} bytes, but {dtype} {shape} needs {bits / 8:g}")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_places(entries: Mapping[str, TensorEntry], size: int) -> None:
    """Check that tensors fill the file without overlaps or gaps, and do not extend past its end."""
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != place:
            words = "overlaps the previous tensor" if entry.begin < place else "follows a gap"
            raise ValueError(f"the tensor {quote_name(name)} {words}")
        place = entry.end
    if place != size:
        words = "is longer" if size > place else "ends too early"
        raise ValueError(f"the file {words}: tensors need {place:,} bytes, but it has {size:,}")


class SafetensorsWriter:
    """Writer of one file with known names, dtypes and shapes. Rows can be written in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]):
        """Create the file at full size.

        Raises:
            OSError: there is not enough space.
        """
        place = 0
        header: dict[str, Any] = {_METADATA: {"format": "pt"}}
        self._entries: dict[str, TensorEntry] = {}
        for name, (dtype, shape) in tensors.items():
            end = place + math.prod(shape) * dtype.itemsize
            self._entries[name] = TensorEntry(_NAMES[dtype], shape, place, end)
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = _LENGTH.size + len(text)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Allocate the file, so that a full disk is detected before any computation.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self._start + place)
            else:
                os.ftruncate(self._file, self._start + place)
            _write(self._file, _LENGTH.pack(len(text)) + text, 0)
        except BaseException:
            os.close(self._file)
            raise

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor."""
        return DTYPES[self._entries[name].dtype]

    def write(
        self, name: str, values: np.ndarray, row: int = 0, number: int = 0, every: int = 1
    ) -> None:
        """Write rows of a tensor, starting with `row`.

        `number` and `every` select interleaved entries of the last dim.

        Raises:
            OSError: the rows cannot be written.
        """
        entry = self._entries[name]
        dtype = DTYPES[entry.dtype]
        *most, last = values.shape
        shape = (*most, last * every)
        assert values.dtype == dtype and shape[1:] == entry.shape[1:]
        place = self._start + entry.begin + row * math.prod(shape[1:]) * dtype.itemsize
        if every > 1:
            # The other interleaved entries may already have been written.
            rows = np.empty(shape, dtype)
            _read(self._file, _bytes(rows), place)
            rows[..., number::every] = values
            values = rows
        data = _bytes(np.ascontiguousarray(values))
        assert place + len(data) <= self._start + entry.end
        _write(self._file, data, place)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _read(file: int, view: memoryview, place: int) -> None:
    while view:
        data = os.pread(file, len(view), place)
        if not data:
            raise OSError(errno.EIO, "the file was truncated")
        view[: len(data)] = data
        view, place = view[len(data) :], place + len(data)


def _write(file: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, place)
        view, place = view[count:], place + count
