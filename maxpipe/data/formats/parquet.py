"""Reader for Parquet files, which reads row groups with pyarrow.

The module also contains helpers for other Arrow-based formats.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from maxpipe.data.formats.files import (
    File,
    check_size,
    digest,
    identities,
    open_file,
    wrap_read_errors,
)
from maxpipe.data.formats.record_text import BadRecord, check_length, shorten
from maxpipe.data.formats.source import Heartbeat, Progress, Record, place_of
from maxpipe.errors import ConfigError
from maxpipe.io.formatting import pluralize


def import_pyarrow(source: str) -> Any:
    """Return the pyarrow package; raise ConfigError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        rule = f"requires the package pyarrow: {error}."
        action = "Run: pip install 'maxpipe[parquet]'"
        raise ConfigError.one("data.source", source, rule, action) from error
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
    """Return a row as Python values; raise BadRecord for invalid or large values."""
    from pyarrow import ChunkedArray
    from pyarrow.types import is_nested

    row_table = table.slice(row, 1)
    for column in row_table.columns:
        # Any other column has a single value, which is already in memory.
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
    """Estimate the bytes of the values as Python objects, where repeated texts are not shared."""
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
"""Maximum size of a row group in bytes. Only the columns that are read are counted."""
_SLOW_GROUP_BYTES = 1 << 26
_VALUE_BYTES = 8
"""Minimum size of a value in memory in bytes, regardless of its compression in the file."""


class ParquetRows:
    """Source with one document per row. Only the required row groups and columns are read."""

    name = "parquet"

    def __init__(self, files: Sequence[File], columns: list[str], moved: Heartbeat | None = None):
        import_pyarrow(self.name)
        self.files = files
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[int, int, bool], Any] = OrderedDict()
        counts: list[list[int]] = []
        largest = 0
        progress = Progress("reading parquet metadata (files)", len(files), moved)
        for number, file in enumerate(files):
            with self._open_file(file) as content:
                about = content.metadata
                counts.append([about.row_group(i).num_rows for i in range(about.num_row_groups)])
                if min(counts[-1], default=0) < 0 or sum(counts[-1]) != about.num_rows:
                    raise ValueError(
                        f"{sum(counts[-1])} rows do not match the {about.num_rows} of the metadata"
                    )
                some = columns_to_read(columns, content.schema_arrow.names)
                groups = [about.row_group(i) for i in range(about.num_row_groups)]
                largest = max([largest, *(_size(content.schema, group, some) for group in groups)])
            progress.update(number + 1)
        self._group_ends = [np.cumsum(count, dtype=np.int64) for count in counts]
        self._ends = np.cumsum([sum(count) for count in counts], dtype=np.int64)
        if not len(self):
            rule = f"must contain rows: {pluralize(len(files), 'file')} without rows."
            action = "Set data.path to files with rows."
            raise ConfigError.one("data.path", files[0].path, rule, action)
        if largest > _SLOW_GROUP_BYTES:
            _LOG.warning(
                "%s has row groups of %d MiB, and each document needs its full row group: "
                "write smaller row groups to make random reads faster",
                files[0].path,
                largest >> 20,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_cached": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        which, row = place_of(self._ends, index)
        group, row = place_of(self._group_ends[which], row)
        return row_of(self._group(which, group, columns), row)

    def _group(self, which: int, group: int, columns: list[str] | None) -> Any:
        key = (which, group, columns is None)
        # The lock ensures that several threads that need the same row group read it only once.
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
            table = self._cached[key] = self._read_group(self.files[which], group, columns)
            size = sum(group.nbytes for group in self._cached.values())
            while size > _CACHED_BYTES and len(self._cached) > 1:
                size -= self._cached.popitem(last=False)[1].nbytes
            return table

    def _read_group(self, file: File, group: int, columns: list[str] | None) -> Any:
        with self._open_file(file) as content:
            about = content.metadata.row_group(group)
            some = columns_to_read(columns, content.schema_arrow.names)
            where = f"{file.path}: row group {group}"
            if (size := _size(content.schema, about, some)) > MAX_GROUP_BYTES:
                raise _too_large_error(where, about.num_rows, f"the columns need {size}")
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
                how = "delta-encoded texts in lists may need more"
                raise _too_large_error(where, about.num_rows, how)
            if table.num_rows != about.num_rows:
                raise ValueError(
                    f"{table.num_rows} rows do not match the {about.num_rows} of the metadata"
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
                    where or "data.path",
                    None if where else file.path,
                    f"must be a complete Parquet file: {shorten(str(error))}.",
                    "Copy the file again from an intact source, or remove it from data.path.",
                ) from error

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
    """Estimate the memory of a row group in bytes. Repeated texts are counted once."""
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
    """Return how many rows fit in memory per read; 0 if delta-encoded texts in lists may not fit.

    With delta encoding, a prefix shared by consecutive texts is stored only once in the file. In
    memory, the prefix is repeated.
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
    """Return a row group that is read `rows` rows at a time, checking the total size."""
    import pyarrow

    parts, size = [], 0
    for part in content.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
        parts.append(part)
        size += part.nbytes
        if size > MAX_GROUP_BYTES:
            num_rows = content.metadata.row_group(group).num_rows
            raise _too_large_error(where, num_rows, f"the first {sum(map(len, parts))} need {size}")
    return pyarrow.Table.from_batches(parts)


def _too_large_error(where: str, num_rows: int, how: str) -> ConfigError:
    rule = f"must fit in {MAX_GROUP_BYTES} bytes of memory; {how}."
    action = "Write the file again with smaller row groups (row_group_size=10000)."
    return ConfigError.one(where, f"{num_rows} rows", rule, action)


def _dictionaries(group: Any, columns: list[str] | None) -> list[str]:
    """Return the text columns that are dictionary-encoded in the file and also in memory.

    Without dictionary encoding, a few bytes of a file could expand to a long text repeated in a
    million rows.
    """
    return [
        chunk.path_in_schema
        for chunk in _chunks(group, columns)
        if chunk.physical_type == "BYTE_ARRAY"
        and any("DICTIONARY" in encoding for encoding in chunk.encodings)
        and not any("DELTA" in encoding for encoding in chunk.encodings)
    ]
