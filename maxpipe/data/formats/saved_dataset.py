"""Reader for Hugging Face datasets written by `save_to_disk`.

The `datasets` package is not required.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from maxpipe.data.formats.files import File, digest, identities, read, stat_files, wrap_read_errors
from maxpipe.data.formats.parquet import columns_to_read, import_pyarrow, row_of
from maxpipe.data.formats.record_text import BadRecord, shorten
from maxpipe.data.formats.source import Record, place_of
from maxpipe.errors import ConfigError
from maxpipe.io import files as boundary
from maxpipe.io.files import url_scheme
from maxpipe.io.typed_json import parse_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SPLIT = "train"
_MAX_STATE_BYTES = 1 << 22
_MAX_METADATA_BYTES = 1 << 26
_CACHED_BYTES = 1 << 28
_MARK = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
"""Message types in an Arrow stream."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream."""


class _DataFile(TypedDict):
    filename: str


class _State(TypedDict):
    _data_files: list[_DataFile]
    _indices_data_files: NotRequired[list[_DataFile] | None]


class _Splits(TypedDict):
    splits: list[str]


class SavedDataset:
    """Source with one document per row. For a dataset with splits, the `train` split is read.

    Files are read without mmap: if a file is truncated later, an error is raised. With mmap, the
    process would be killed by a signal.
    """

    name = "huggingface"

    def __init__(self, paths: Sequence[str]):
        import_pyarrow(self.name)
        self.files = [file for path in paths for file in _data_files(path)]
        self._lock = threading.Lock()
        self._cached: OrderedDict[int, Any] = OrderedDict()
        self._batches: list[_Batch] = []
        for number, file in enumerate(self.files):
            self._batches += _batches(number, file)
        rows = [batch.num_rows for batch in self._batches]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._batch_files = np.array([part.file for part in self._batches], np.int64)
        if not sum(rows):
            rule = "must contain rows; the dataset is empty."
            raise ConfigError.one("data.path", paths[0], rule, "Save the dataset again.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_cached": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        import pyarrow

        which, row = place_of(self._ends, index)
        batch = self._batch(which)
        if some := columns_to_read(columns, batch.schema.names):
            batch = batch.select(some)
        try:
            batch.slice(row, 1).validate(full=True)
        except pyarrow.ArrowInvalid as error:
            raise BadRecord(
                "", f"must be a valid row: {shorten(str(error))}.", "Save the dataset again."
            ) from error
        return row_of(batch, row)

    def _batch(self, which: int) -> Any:
        # The lock ensures that several threads that need the same batch read it only once.
        with self._lock:
            if which not in self._cached:
                batch = self._batches[which]
                self._cached[which] = batch.read(self.files[batch.file])
                size = sum(self._batches[number].size_bytes for number in self._cached)
                while size > _CACHED_BYTES and len(self._cached) > 1:
                    size -= self._batches[self._cached.popitem(last=False)[0]].size_bytes
            self._cached.move_to_end(which)
            return self._cached[which]

    def where(self, index: int) -> str:
        which, row = place_of(self._ends, index)
        number = int(self._batch_files[which])
        first = int(np.searchsorted(self._batch_files, number))
        before = int(self._ends[which - 1] if which else 0)
        begin = int(self._ends[first - 1] if first else 0)
        return f"{self.files[number].path}: row {before - begin + row}"

    def fingerprint(self, chosen: str) -> str:
        return digest([chosen, len(self), *identities(self.files)])


def is_saved_dataset(path: str) -> bool:
    """Return whether a folder contains a dataset written by `save_to_disk`."""
    folder = os.path.expanduser(path)
    return any(os.path.isfile(os.path.join(folder, name)) for name in (_STATE, _SPLITS))


def _data_files(path: str) -> list[File]:
    if url_scheme(path):
        rule = "must be in a file system with data.source=huggingface."
        action = "Copy the folder to a disk, or mount the bucket as a folder."
        raise ConfigError.one("data.path", path, rule, action)
    folder = os.path.expanduser(path)
    if os.path.isfile(os.path.join(folder, _SPLITS)):
        splits = _read(folder, _SPLITS, _Splits)["splits"]
        if _SPLIT not in splits:
            there = f" (found {', '.join(splits[:8])})" if splits else ""
            action = f"Set data.path to a split folder, such as {os.path.join(path, *splits[:1])}."
            raise ConfigError.one("data.path", path, f"must have a split {_SPLIT}{there}.", action)
        folder = os.path.join(folder, _SPLIT)
    if not os.path.isfile(os.path.join(folder, _STATE)):
        rule = f"must be a folder written by save_to_disk of `datasets`, with {_STATE}: the "
        rule += "Hugging Face hub is not read."
        action = 'Save it once: python -c "import datasets; '
        action += "datasets.load_dataset('NAME').save_to_disk('DIR')\", then set data.path=DIR."
        raise ConfigError.one("data.path", path, rule, action)
    state = _read(folder, _STATE, _State)
    if state.get("_indices_data_files"):
        rule = "must contain its rows, not a selection by index."
        action = "Save the dataset again:  dataset.flatten_indices().save_to_disk('DIR')."
        raise ConfigError.one("data.path", path, rule, action)
    names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        if name != os.path.basename(name) or not name.endswith(".arrow"):
            rule = "must list Arrow files in this folder."
            action = "Save the dataset again."
            raise ConfigError.one(os.path.join(folder, _STATE), shorten(name), rule, action)
    return [file for name in names for file in stat_files([os.path.join(folder, name)], folder)]


def _read(folder: str, name: str, kind: Any) -> Any:
    path = os.path.join(folder, name)
    try:
        with wrap_read_errors(path):
            return parse_json(boundary.read(path, _MAX_STATE_BYTES), kind)
    except ValueError as error:
        rule = f"must be a file of save_to_disk: {error}."
        raise ConfigError.one("data.path", path, rule, "Save the dataset again.") from error


class _Batch(NamedTuple):
    """Position of a record batch in a file. Messages are stored as (first byte, end)."""

    file: int
    num_rows: int
    needed: tuple[tuple[int, int], ...]
    """Messages that contain the schema and the dictionaries."""
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Size of the batch in bytes, excluding the schema and the dictionaries."""
        return self.stop - self.start

    def read(self, file: File) -> Any:
        """Return the batch; raise ConfigError if it cannot be read."""
        import pyarrow

        parts = [read(file, *ends) for ends in (*self.needed, (self.start, self.stop))]
        try:
            with pyarrow.ipc.open_stream(pyarrow.py_buffer(b"".join([*parts, _END]))) as reader:
                batch = reader.read_next_batch()
            batch.schema.names  # noqa: B018  raises UnicodeDecodeError if a name is not UTF-8
            if batch.num_rows != self.num_rows:
                raise ValueError(f"a batch has {batch.num_rows} rows instead of {self.num_rows}")
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise _incomplete_file_error(file, error) from error
        return batch


def _batches(number: int, file: File) -> list[_Batch]:
    import pyarrow

    batches: list[_Batch] = []
    needed: list[tuple[int, int]] = []
    with wrap_read_errors(file.path):
        os.close(boundary.open_regular(file.path))  # raises unless the path is a regular file
    try:
        if read(file, max(0, file.size_bytes - len(_END))) != _END:
            raise ValueError("the file is truncated")
        for kind, start, stop, num_rows, is_compressed in _messages(file):
            if is_compressed:
                raise ValueError("compressed batches do not support random access")
            if kind == _RECORDS:
                batches.append(_Batch(number, num_rows, tuple(needed), start, stop))
            elif (kind == _SCHEMA) != (not needed):
                raise ValueError("the file must begin with one schema")
            else:
                needed.append((start, stop))
        if not needed:
            raise ValueError("the file has no schema")
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, struct.error) as error:
        raise _incomplete_file_error(file, error) from error
    return batches


def _incomplete_file_error(file: File, error: Exception) -> ConfigError:
    rule = f"must be a complete file of a saved dataset: {shorten(str(error))}."
    action = "Copy the file again from an intact source, or save the dataset again."
    return ConfigError.one("data.path", file.path, rule, action)


def _messages(file: File) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield (type, first byte, end, rows, is compressed) for each message in an Arrow stream.

    A message consists of a marker, the size of the metadata, the metadata as a flatbuffer, and a
    body.
    """
    at = 0
    while at < file.size_bytes - len(_END):
        mark, size = struct.unpack("<Ii", read(file, at, at + 8))
        if mark != _MARK or not 0 < size <= _MAX_METADATA_BYTES:
            raise ValueError(f"byte {at} is not the beginning of a message")
        message = _Table.root(read(file, at + 8, at + 8 + size))
        kind, body = message.number(1, "<B"), message.number(3, "<q")
        stop = at + 8 + size + body
        if kind not in (_SCHEMA, _DICTIONARY, _RECORDS) or not at < stop <= file.size_bytes:
            raise ValueError(f"byte {at} is not the start of a message")
        header = message.table(2)
        batch = header.table(1) if kind == _DICTIONARY else header
        is_compressed = kind != _SCHEMA and batch.has(3)
        num_rows = header.number(0, "<q") if kind == _RECORDS else 0
        if num_rows < 0:
            raise ValueError(f"a batch at byte {at} has {num_rows} rows")
        yield kind, at, stop, num_rows, is_compressed
        at = stop


class _Table(NamedTuple):
    """Flatbuffer table. An offset table gives the positions of its fields."""

    raw: bytes
    at: int

    @classmethod
    def root(cls, raw: bytes) -> _Table:
        return cls(raw, _unpacked("<I", raw, 0))

    def _place(self, field: int) -> int:
        """Return the position of a field, or 0 if the field is not stored because it has its
        default value.
        """
        offsets = self.at - _unpacked("<i", self.raw, self.at)
        slot = 4 + 2 * field
        if slot >= _unpacked("<H", self.raw, offsets):
            return 0
        offset = _unpacked("<H", self.raw, offsets + slot)
        return self.at + offset if offset else 0

    def has(self, field: int) -> bool:
        return self._place(field) > 0

    def number(self, field: int, kind: str) -> int:
        place = self._place(field)
        return _unpacked(kind, self.raw, place) if place else 0

    def table(self, field: int) -> _Table:
        place = self._place(field)
        return _Table(self.raw, place + _unpacked("<I", self.raw, place))


def _unpacked(kind: str, raw: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("the metadata cannot be read")
    return struct.unpack_from(kind, raw, at)[0]
