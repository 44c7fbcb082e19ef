"""The text of a record: of one column or of a template over several, checked to be text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxpipe.config.data import template_pieces
from maxpipe.data.formats.record_keys import (
    chat_settings,
    has_words,
    template_of_fields,
    text_fields,
    text_template,
)
from maxpipe.io.typed import parse

_MAX_DEPTH = 256
"""Deepest nesting of brackets in a document's JSON."""
_ANYTHING: Any = Any
_SHOWN = 120
MOST_RECORD_BYTES = 1 << 28
"""The largest record: a document is held as a whole, as text and as tokens."""


class BadRecord(Exception):
    """A record whose content is at fault: the source that reads it says where it is."""

    def __init__(self, given: str, rule: str, action: str):
        super().__init__(rule)
        self.given, self.rule, self.action = given, rule, action


_MISSING = object()


class TextOf:
    """The text of records: themselves if they are text, else a column's or a template's."""

    def __init__(self, field: str = "text", template: str = ""):
        self._field = field
        self._template = template
        self._pieces = template_pieces(template)

    @property
    def columns(self) -> list[str]:
        """The columns that are read; a dot leads into one with columns of its own."""
        return [name for _, name in self._pieces if name] if self._template else [self._field]

    @property
    def chosen(self) -> str:
        """Part of a source's fingerprint."""
        return f"template {self._template}" if self._template else self._field

    def __call__(self, record: str | Mapping[str, Any]) -> str:
        """The text.

        Raises:
            BadRecord: it has no such column, or another type there.
        """
        if isinstance(record, str):
            return record
        if self._template:
            parts, size = [], 0
            for fixed, name in self._pieces:
                parts += fixed, _filled(record, name) if name else ""
                size += len(parts[-2]) + len(parts[-1])
                check_length(size)  # a column may be there many times
            return "".join(parts)
        value = value_of(record, self._field)
        if isinstance(value, (str, bytes)):
            return _text(value)
        raise self._no_text(record, value)

    def _no_text(self, record: Mapping[str, Any], value: object) -> BadRecord:
        found = "is missing" if value is _MISSING else f"is of type {type(value).__name__}"
        rule = f"must have text in data.field ({self._field}), which {found}."
        return BadRecord(_fields(record), rule, _to_read(record))


def _to_read(record: Mapping[str, Any]) -> str:
    """The action that reads a record without the field of its text."""
    chat, template = chat_settings(record), text_template(record)
    actions = [f"{chat} to render conversations with a chat template"] if chat else []
    if template:
        actions.append(f"data.template={shlex.quote(template)} to train all of it as text")
    if actions:
        return f"Set {', or '.join(actions)}."
    texts = text_fields(record)
    useful = [name for name in texts if has_words(str(value_of(record, name)))] or texts
    names = [name for name in record if name in useful]
    if len(names) > 1 and (template := template_of_fields(names)):
        both = f"data.field={shlex.quote(texts[0])}, or data.template={shlex.quote(template)}"
        return f"Set {both} to read several fields."
    if texts:
        return f"Set data.field={shlex.quote(texts[0])}."
    if isinstance(record.get("prompt"), list | tuple):
        return "Set grpo.prompts to the file if its records are prompts of train.objective=grpo."
    return "Add a text field to every record."


def joined(record: Mapping[str, Any], template: str, key: str) -> str:
    """The text of the template that `key` sets, without lines whose columns are empty.

    A column that is null or missing is empty.

    Raises:
        BadRecord: the record lacks all of them, or has another type there.
    """
    pieces = template_pieces(template)
    names = [name for _, name in pieces if name]
    if all(_is_absent(value_of(record, name)) for name in names):
        rule = f"must have one of the columns {', '.join(names)} of {key}."
        raise BadRecord(_fields(record), rule, f"Correct {key}, or add a column to the record.")
    lines, values = [""], [list[str]()]
    for fixed, name in pieces:
        first, *others = fixed.split("\n")
        lines[-1] += first
        lines += others
        values += [list[str]() for _ in others]
        if name:
            is_empty = _is_absent(value_of(record, name))
            values[-1].append("" if is_empty else _filled(record, name, key))
            lines[-1] += values[-1][-1]
        check_length(sum(map(len, lines)))
    kept = [line for line, of in zip(lines, values, strict=True) if not of or any(of)]
    text = "\n".join(kept)
    return text if len(kept) == len(lines) else text.strip("\n")


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """A column's value, that of `a.b` in the column `a` if there is none of the whole name."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return value_of(inner, rest) if dot and isinstance(inner, Mapping) else _MISSING


def _filled(record: Mapping[str, Any], name: str, key: str = "data.template") -> str:
    value = value_of(record, name)
    if isinstance(value, (str, bytes)):
        return _text(value)
    if isinstance(value, (bool, int, float, np.generic)):
        return str(value)
    found = "is missing" if value is _MISSING else f"is of type {type(value).__name__}"
    raise BadRecord(
        _fields(record),
        f"must have text or a number in the column {name} of {key}, which {found}.",
        f"Correct {key}, or add the column to every record.",
    )


def _is_absent(value: object) -> bool:
    return value is None or value is _MISSING


def _fields(record: Mapping[str, Any]) -> str:
    return shortened(f"fields {', '.join(map(str, record)) or 'none'}")


def _text(value: str | bytes) -> str:
    check_length(len(value))
    if isinstance(value, bytes):
        return decoded(value)
    # A JSON string may hold half of a surrogate pair, which no encoder takes.
    return value.encode("utf-8", "replace").decode()


def check_length(size_bytes: int) -> None:
    """Checks that a record is not larger than documents may be.

    Raises:
        BadRecord: it is.
    """
    if size_bytes > MOST_RECORD_BYTES:
        raise BadRecord(
            f"{size_bytes} bytes",
            f"must be at most {MOST_RECORD_BYTES} bytes long: it is held in memory as a whole.",
            "Cut the document into several.",
        )


def from_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a record.

    Raises:
        ValueError: it is not JSON, nests too deep, or is no object.
    """
    value = parse(raw, _ANYTHING, most_depth=_MAX_DEPTH)
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}")
    return value


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
