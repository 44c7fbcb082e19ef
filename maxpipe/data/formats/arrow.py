"""pyarrow, where it is installed, and what formats that it reads share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxpipe.data.formats.text_of import BadRecord, check_length
from maxpipe.errors import ConfigError

_VALUE_BYTES = 8
"""A value takes about as much at least."""


def import_pyarrow(source: str) -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError.one(
            "data.source",
            source,
            f"needs the package pyarrow: {error}.",
            "Run: pip install 'maxpipe[parquet]'",
        ) from error
    return pyarrow


def wanted(columns: list[str] | None, names: list[str]) -> list[str] | None:
    """The columns to read of those in a file, None for all: also where one is missing.

    The whole record then says in the error what there is. `a.b` is the part `b` of the column `a`.
    """
    if columns is None:
        return None
    found = [each if each in names else each.partition(".")[0] for each in columns]
    return sorted(set(found)) if set(found) <= set(names) else None


def row_of(table: Any, row: int) -> Mapping[str, Any]:
    """A row of an arrow table or batch as Python values.

    Raises:
        BadRecord: it holds text that is no text, or is too large.
    """
    from pyarrow import ChunkedArray
    from pyarrow.types import is_nested

    found = table.slice(row, 1)
    for column in found.columns:
        if is_nested(column.type):  # else it is one value, that is there
            chunks = column.chunks if isinstance(column, ChunkedArray) else [column]
            check_length(sum(map(_value_bytes, chunks)))
    try:
        return found.to_pylist()[0]
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadRecord(
            f"byte 0x{byte:02x} at offset {error.start}",
            "must be UTF-8 text.",
            "Write the column again as UTF-8, or leave the record out.",
        ) from error
    except (ValueError, OverflowError, ArithmeticError) as error:  # a date beyond Python's, say
        raise BadRecord(
            "", f"must be values that Python has: {error}.", "Write the record again."
        ) from error


def _value_bytes(array: Any) -> int:
    """The bytes of an array's values, about, written out: texts that repeat are held once in it."""
    import pyarrow.compute as pc
    from pyarrow import types

    compute: Any = pc  # its functions are made when it is imported

    kind = array.type
    if types.is_dictionary(kind):
        values = array.dictionary
        if not _is_text(values.type):
            return _VALUE_BYTES * len(array)
        sizes = compute.binary_length(values).take(array.indices)
        return (compute.sum(sizes).as_py() or 0) + _VALUE_BYTES * len(array)
    if types.is_struct(kind):
        return sum(_value_bytes(each) for each in array.flatten())
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
