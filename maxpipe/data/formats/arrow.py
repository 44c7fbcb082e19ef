"""pyarrow, where it is installed, and what formats that it reads share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxpipe.data.formats.text_of import BadRecord
from maxpipe.errors import ConfigError


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
        BadRecord: it holds text that is no text.
    """
    try:
        return table.slice(row, 1).to_pylist()[0]
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
