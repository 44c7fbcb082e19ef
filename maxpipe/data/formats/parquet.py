"""Readers for Arrow-based formats: Parquet files, and Hugging Face datasets from `save_to_disk`.

pyarrow reads the row groups of Parquet files. The `datasets` package is not required.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from maxpipe.data.formats.files import (
    File,
    check_size,
    digest,
    identities,
    open_file,
    read,
    stat_files,
    wrap_read_errors,
)
from maxpipe.data.formats.record_text import BadRecord, check_length, shorten
from maxpipe.data.formats.source import Heartbeat, Progress, Record, place_of
from maxpipe.errors import Code, ConfigError
from maxpipe.io import files as boundary
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json


def import_pyarrow(source: str) -> Any:
    """Return the pyarrow package; raise ConfigError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        rule = f"requires the package pyarrow: {error}."
        action = "Run: pip install 'maxpipe[parquet]'"
        raise ConfigError.one(Code.ENV_PACKAGE, "data.source", source, rule, action) from error
    return pyarrow


def columns_to_read(columns: list[str] | None, names: list[str]) -> list[str] | None:
    """Return the columns to read from a file, or None for all columns. All columns are read if a
    requested column is missing.

    The error about the missing column then lists all columns of the record. `a.b` refers to field
    `b` of column `a`.
    """
    if columns is None:
        return None
    needed = [column if column in names else column.partition(".")[0] for column in columns]
    return sorted(set(needed)) if set(needed) <= set(names) else None


def row_of(table: Any, row: int) -> Mapping[str, Any]:
    """Return a row as Python values; raise BadRecord for invalid or oversized values."""
    from pyarrow import ChunkedArray
    from pyarrow.types import is_nested

    row_table = table.slice(row, 1)
    for column in row_table.columns:
        # Columns of other types have a single value per row, which is already in memory.
        if is_nested(column.type):
            chunks = column.chunks if isinstance(column, ChunkedArray) else [column]
            check_length(sum(map(_value_bytes, chunks)))
    try:
        return row_table.to_pylist()[0]
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        rule = "must be UTF-8 text."
        action = "Write the column again as UTF-8, or remove the record."
        raise BadRecord(f"byte 0x{byte:02x} at offset {error.start}", rule, action) from error
    # for example, a date outside Python's range
    except (ValueError, OverflowError, ArithmeticError) as error:
        raise BadRecord(
            "", f"must have values that Python can represent: {error}.", "Write the record again."
        ) from error


def _value_bytes(array: Any) -> int:
    """Estimate the size in bytes of the values as Python objects, counting equal strings
    separately.
    """
    import pyarrow.compute as pc
    from pyarrow import types

    compute: Any = pc  # pyarrow creates these functions at import

    kind = array.type
    if types.is_dictionary(kind):
        values = array.dictionary
        if not _is_text(values.type):
            return _VALUE_BYTES * len(array)
        sizes = compute.binary_length(values).take(array.indices)
        return (compute.sum(sizes).as_py() or 0) + _VALUE_BYTES * len(array)
    if types.is_struct(kind):
        return sum(_value_bytes(part) for part in array.flatten())
    if types.is_nested(kind) and hasattr(array, "flatten"):
        return _VALUE_BYTES * len(array) + _value_bytes(array.flatten())
    if _is_text(kind):
        return compute.sum(compute.binary_length(array)).as_py() or 0
    return max(array.nbytes, _VALUE_BYTES * len(array))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


_LOG = logging.getLogger(__name__)

_CACHED_BYTES = 1 << 28
MAX_GROUP_BYTES = 1 << 30
"""Maximum size of a row group in bytes. Columns that are not read do not count."""
_SLOW_GROUP_BYTES = 1 << 26
_VALUE_BYTES = 8
"""Minimum size in bytes of a value in memory, regardless of its compression in the file."""


class _Cache:
    """Cache of recently used values, with at most `_CACHED_BYTES`. A pickled cache is empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __reduce__(self) -> tuple[type[_Cache], tuple[()]]:
        return _Cache, ()

    def get(self, key: Hashable, read: Callable[[], tuple[Any, int]]) -> Any:
        """Return the cached value for a key, or call `read` to get the value and its size."""
        # The lock ensures that several threads that need the same value read it only once.
        with self._lock:
            if key not in self._values:
                self._values[key] = read()
                size = sum(size for _, size in self._values.values())
                while size > _CACHED_BYTES and len(self._values) > 1:
                    size -= self._values.popitem(last=False)[1][1]
            self._values.move_to_end(key)
            return self._values[key][0]


class ParquetRows:
    """Source with one document per row. Only the required row groups and columns are read."""

    name = "parquet"

    def __init__(self, files: Sequence[File], columns: list[str], moved: Heartbeat | None = None):
        import_pyarrow(self.name)
        self.files = files
        self._cache = _Cache()
        counts: list[list[int]] = []
        largest = 0
        progress = Progress("reading parquet metadata (files)", len(files), moved)
        for number, file in enumerate(files):
            with self._open_file(file) as content:
                about = content.metadata
                counts.append([about.row_group(i).num_rows for i in range(about.num_row_groups)])
                if min(counts[-1], default=0) < 0 or sum(counts[-1]) != about.num_rows:
                    raise ValueError(
                        f"{sum(counts[-1])} rows, but the metadata declares {about.num_rows}"
                    )
                some = columns_to_read(columns, content.schema_arrow.names)
                groups = [about.row_group(i) for i in range(about.num_row_groups)]
                largest = max([largest, *(_size(content.schema, group, some) for group in groups)])
            progress.update(number + 1)
        self._group_ends = [np.cumsum(count, dtype=np.int64) for count in counts]
        self._ends = np.cumsum([sum(count) for count in counts], dtype=np.int64)
        if not len(self):
            rule = f"must contain rows, but none were found in {pluralize(len(files), 'file')}."
            action = "Set data.path to files with rows."
            raise ConfigError.one(Code.DATA_EMPTY, "data.path", files[0].path, rule, action)
        if largest > _SLOW_GROUP_BYTES:
            _LOG.warning(
                "%s has row groups of %d MiB, and reading a document requires its full row "
                "group: write smaller row groups to speed up random reads",
                files[0].path,
                largest >> 20,
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        which, row = place_of(self._ends, index)
        group, row = place_of(self._group_ends[which], row)
        return row_of(self._group(which, group, columns), row)

    def _group(self, which: int, group: int, columns: list[str] | None) -> Any:
        def read() -> tuple[Any, int]:
            table = self._read_group(self.files[which], group, columns)
            return table, table.nbytes

        return self._cache.get((which, group, columns is None), read)

    def _read_group(self, file: File, group: int, columns: list[str] | None) -> Any:
        with self._open_file(file) as content:
            about = content.metadata.row_group(group)
            some = columns_to_read(columns, content.schema_arrow.names)
            where = f"{file.path}: row group {group}"
            if (size := _size(content.schema, about, some)) > MAX_GROUP_BYTES:
                raise _too_large_error(where, about.num_rows, f"the columns need {size} bytes")
            texts, most_rows = (
                _dictionaries(about, some),
                _rows_per_read(content.schema, about, some),
            )
        with self._open_file(file, where, read_dictionary=texts) as content:
            if most_rows >= about.num_rows:
                table = content.read_row_group(group, columns=some)
            elif most_rows:
                table = _read_in_parts(content, where, group, some, most_rows)
            else:
                how = "delta-encoded strings in lists may need more memory"
                raise _too_large_error(where, about.num_rows, how)
            if table.num_rows != about.num_rows:
                raise ValueError(
                    f"{table.num_rows} rows, but the metadata declares {about.num_rows}"
                )
            return table

    @contextmanager
    def _open_file(self, file: File, where: str = "", **options: Any) -> Iterator[Any]:
        import pyarrow
        from pyarrow import parquet

        with wrap_read_errors(file.path):
            content = open_file(file)
        with content:
            check_size(file, content.seek(0, 2))
            try:
                yield parquet.ParquetFile(content, page_checksum_verification=True, **options)
            except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
                raise ConfigError.one(
                    Code.DATA_DAMAGED,
                    where or "data.path",
                    None if where else file.path,
                    f"must be a complete Parquet file: {shorten(str(error))}.",
                    "Copy the file again from an intact source, or remove it from data.path.",
                ) from error

    def file_of(self, index: int) -> File:
        """Return the file that contains a record."""
        return self.files[place_of(self._ends, index)[0]]

    def where(self, index: int) -> str:
        which, row = place_of(self._ends, index)
        return f"{self.files[which].path}: row {row}"

    def fingerprint(self, chosen: str) -> str:
        return digest([chosen, len(self), *identities(self.files)])


def _chunks(group: Any, columns: list[str] | None) -> Iterator[Any]:
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = chunk.path_in_schema
        if columns is None or any(
            path == column or path.startswith(f"{column}.") for column in columns
        ):
            yield chunk


def _size(schema: Any, group: Any, columns: list[str] | None) -> int:
    """Estimate the memory that a row group needs, in bytes. Repeated strings are counted once."""
    widths = {schema.column(i).path: schema.column(i).length for i in range(len(schema))}
    return sum(
        # Repeated fixed-length values are expanded in memory, even if the file stores them once.
        max(
            chunk.total_uncompressed_size,
            chunk.num_values * max(_VALUE_BYTES, widths[chunk.path_in_schema]),
        )
        for chunk in _chunks(group, columns)
    )


def _rows_per_read(schema: Any, group: Any, columns: list[str] | None) -> int:
    """Return the number of rows that fit in memory in one read; 0 if delta-encoded strings in lists
    may not fit.

    With delta encoding, a prefix shared by consecutive strings is stored only once in the file. In
    memory, every string repeats the prefix.
    """
    rows = group.num_rows
    repeats = {
        schema.column(i).path: schema.column(i).max_repetition_level > 0 for i in range(len(schema))
    }
    for chunk in _chunks(group, columns):
        if "DELTA_BYTE_ARRAY" not in chunk.encodings:
            continue
        longest = max(1, chunk.total_uncompressed_size)
        if not repeats[chunk.path_in_schema]:
            rows = min(rows, max(1, MAX_GROUP_BYTES // longest))
        elif chunk.num_values * longest > MAX_GROUP_BYTES:
            return 0
    return rows


def _read_in_parts(
    content: Any, where: str, group: int, columns: list[str] | None, rows: int
) -> Any:
    """Read a row group in batches of `rows` rows, and check the total size."""
    import pyarrow

    parts, size = [], 0
    for part in content.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
        parts.append(part)
        size += part.nbytes
        if size > MAX_GROUP_BYTES:
            num_rows = content.metadata.row_group(group).num_rows
            raise _too_large_error(
                where, num_rows, f"the first {sum(map(len, parts))} need {size} bytes"
            )
    return pyarrow.Table.from_batches(parts)


def _too_large_error(where: str, num_rows: int, how: str) -> ConfigError:
    rule = f"must fit in {MAX_GROUP_BYTES} bytes of memory; {how}."
    action = "Write the file again with smaller row groups (row_group_size=10000)."
    return ConfigError.one(Code.DATA_RECORD, where, f"{num_rows} rows", rule, action)


def _dictionaries(group: Any, columns: list[str] | None) -> list[str]:
    """Return the text columns that are dictionary-encoded in the file and also in memory.

    Without dictionary encoding, a few bytes of a file could expand to a long string repeated in a
    million rows.
    """
    return [
        chunk.path_in_schema
        for chunk in _chunks(group, columns)
        if chunk.physical_type == "BYTE_ARRAY"
        and any("DICTIONARY" in encoding for encoding in chunk.encodings)
        and not any("DELTA" in encoding for encoding in chunk.encodings)
    ]


# --- folders of `save_to_disk` ------------------------------------------------

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SPLIT = "train"
_MAX_STATE_BYTES = 1 << 22
_MAX_METADATA_BYTES = 1 << 26
_MARK = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
"""Message types in an Arrow stream."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Bytes that mark the end of an Arrow stream."""


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
        self._cache = _Cache()
        self._batches: list[_Batch] = []
        for number, file in enumerate(self.files):
            self._batches += _batches(number, file)
        rows = [batch.num_rows for batch in self._batches]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._batch_files = np.array([part.file for part in self._batches], np.int64)
        if not sum(rows):
            rule = "must contain rows; the dataset is empty."
            raise ConfigError.one(
                Code.DATA_EMPTY, "data.path", paths[0], rule, "Save the dataset again."
            )

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
        batch = self._batches[which]
        return self._cache.get(
            which, lambda: (batch.read(self.files[batch.file]), batch.size_bytes)
        )

    def file_of(self, index: int) -> File:
        """Return the file that contains a record."""
        return self.files[int(self._batch_files[place_of(self._ends, index)[0]])]

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
        raise ConfigError.one(Code.DATA_FORMAT, "data.path", path, rule, action)
    folder = os.path.expanduser(path)
    if os.path.isfile(os.path.join(folder, _SPLITS)):
        splits = _read(folder, _SPLITS, _Splits)["splits"]
        if _SPLIT not in splits:
            there = f" (found {', '.join(splits[:8])})" if splits else ""
            action = f"Set data.path to a split folder, such as {os.path.join(path, *splits[:1])}."
            raise ConfigError.one(
                Code.DATA_FORMAT, "data.path", path, f"must have a split {_SPLIT}{there}.", action
            )
        folder = os.path.join(folder, _SPLIT)
    if not os.path.isfile(os.path.join(folder, _STATE)):
        rule = f"must be a folder written by save_to_disk of `datasets`, with {_STATE}. Files of "
        rule += "the Hugging Face Hub are in another format."
        action = "Run `maxpipe fetch hf:datasets/NAME --out DIR`, and set data.source=parquet (or "
        action += "jsonl) data.path=DIR; or save the dataset with save_to_disk."
        raise ConfigError.one(Code.DATA_FORMAT, "data.path", path, rule, action)
    state = _read(folder, _STATE, _State)
    if state.get("_indices_data_files"):
        rule = "must contain the rows, not only the indices of selected rows."
        action = "Save the dataset again:  dataset.flatten_indices().save_to_disk('DIR')."
        raise ConfigError.one(Code.DATA_FORMAT, "data.path", path, rule, action)
    names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        if name != os.path.basename(name) or not name.endswith(".arrow"):
            rule = "must list Arrow files in this folder."
            action = "Save the dataset again."
            raise ConfigError.one(
                Code.DATA_DAMAGED, os.path.join(folder, _STATE), shorten(name), rule, action
            )
    return [file for name in names for file in stat_files([os.path.join(folder, name)], folder)]


def _read(folder: str, name: str, kind: Any) -> Any:
    path = os.path.join(folder, name)
    try:
        with wrap_read_errors(path):
            return parse_json(boundary.read(path, _MAX_STATE_BYTES), kind)
    except ValueError as error:
        rule = f"must be a file written by save_to_disk: {error}."
        raise ConfigError.one(
            Code.DATA_DAMAGED, "data.path", path, rule, "Save the dataset again."
        ) from error


class _Batch(NamedTuple):
    """Position of a record batch in a file. A message is a byte range (start, exclusive end)."""

    file: int
    num_rows: int
    needed: tuple[tuple[int, int], ...]
    """Byte ranges of the messages that contain the schema and the dictionaries."""
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
        os.close(boundary.open_regular(file.path))  # raises an error unless the file is regular
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
    return ConfigError.one(Code.DATA_DAMAGED, "data.path", file.path, rule, action)


def _messages(file: File) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield (type, start offset, end offset, row count, is_compressed) for each Arrow message.

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
    """Flatbuffer table. An offset table contains the positions of the table's fields."""

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
