"""The text of a record: of one column, checked to be text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.boundary.typed import parse

_MAX_DEPTH = 256
"""Deepest nesting of brackets in a document's JSON."""
_ANYTHING: Any = Any
_SHOWN = 120


class BadRecord(Exception):
    """A record whose content is at fault: the source that reads it says where it is."""

    def __init__(self, given: str, rule: str, action: str):
        super().__init__(rule)
        self.given, self.rule, self.action = given, rule, action


@dataclass(frozen=True, slots=True)
class TextOf:
    """The text of records: themselves if they are text, else what is in the column `field`."""

    field: str = "text"

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.field]

    @property
    def chosen(self) -> str:
        """Part of a source's fingerprint."""
        return self.field

    def __call__(self, record: object) -> str:
        """The text.

        Raises:
            BadRecord: it has no such column, or another type there.
        """
        if isinstance(record, str):
            return record
        if not isinstance(record, Mapping):
            raise BadRecord(
                shortened(str(record)),
                f"must be a JSON object with a field {self.field}; it is of type "
                f"{type(record).__name__}.",
                'Write each document as {"text": "..."}.',
            )
        value = record.get(self.field)
        if isinstance(value, bytes):
            return decoded(value)
        if isinstance(value, str):
            # A JSON string may hold half of a surrogate pair, which no encoder takes.
            return value.encode("utf-8", "replace").decode()
        texts = [name for name, other in record.items() if isinstance(other, (str, bytes))]
        found = f"is of type {type(value).__name__}" if self.field in record else "is missing"
        raise BadRecord(
            f"fields {', '.join(map(str, record)) or 'none'}",
            f"must have text in data.field ({self.field}), which {found}.",
            f"Set data.field={texts[0]}." if texts else "Add a text field to every record.",
        )


def from_json(raw: bytes) -> Any:
    """The value of a document's JSON.

    Raises:
        ValueError: it is not JSON, or nests too deep.
    """
    return parse(raw, _ANYTHING, most_depth=_MAX_DEPTH)


def decoded(raw: bytes, errors: str = "strict") -> str:
    """UTF-8 as text.

    Raises:
        BadRecord: it is not UTF-8.
    """
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise BadRecord(
            f"byte 0x{raw[error.start]:02x} at offset {error.start}",
            "must be UTF-8 text.",
            "Convert it to UTF-8, or leave it out of data.path with a glob pattern.",
        ) from error


def shortened(text: str | bytes, limit: int = _SHOWN) -> str:
    """In one line of at most `limit` characters."""
    if isinstance(text, bytes):
        text = text[: 8 * limit].decode("utf-8", "replace")
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
