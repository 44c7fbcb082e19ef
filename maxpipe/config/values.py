"""Text of a config file or override to a value of the type that the schema declares."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

NAME_FORM = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Of what the user names in a config: it becomes part of metrics' tags."""

Raw = str | None | list["Raw"] | dict[str, "Raw"]
"""A value before the schema gave it a type: scalars are text, None is YAML's null."""


def refused(text: str) -> tuple[str, str] | None:
    """(rule, action) for text that is refused in every value."""
    if "${" in text:
        return "holds `${`: nothing is substituted in a value.", "Write the value itself."
    if "\0" in text:
        return "holds a NUL character, which no path may.", "Write the value without it."
    if text.lstrip("\\") == "???":
        return "stands for a missing value.", "Write the value itself."
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not Unicode text.", "Write the value in UTF-8."
    return None


def texts(raw: Raw) -> Iterator[str]:
    """All text in a value."""
    if isinstance(raw, str):
        yield raw
    elif isinstance(raw, list):
        for item in raw:
            yield from texts(item)
    elif isinstance(raw, dict):
        for name, item in raw.items():
            yield name
            yield from texts(item)


class TooLargeError(ValueError):
    """An integer that cannot be taken as it is written; the message is the rule."""


_THOUSANDS = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
"""Letters after a number, to their powers of ten: `10k`, `1.5M`."""


def _read_int(raw: Raw) -> int:
    text = _scalar(raw)
    if parts := re.fullmatch(r"([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)([kKmMgGbBtT])", text):
        scaled = decimal.Decimal(parts[1]).scaleb(_THOUSANDS[parts[2].lower()])
        if scaled != scaled.to_integral_value():
            raise ValueError(text)
        raw = text = str(int(scaled))
    if digits := re.fullmatch(r"[+-]?0*([0-9]+(_[0-9]+)*)", text):
        # Python refuses to read thousands of digits.
        value = int(text) if len(digits[1]) < 100 else 2**63
    else:
        number = _read_float(raw)
        value = int(number)
        if value != number:
            raise ValueError(text)
        if 2**53 <= abs(value) < 2**63:
            rule = "with a point or an exponent it is not exact from 2**53 on."
            raise TooLargeError(f"must be an integer with all its digits: {rule}")
    if not -(2**63) <= value < 2**63:
        raise TooLargeError("must be an integer of 64 bits, from -2**63 to 2**63 - 1.")
    return value


def _read_float(raw: Raw) -> float:
    text = _scalar(raw)
    value = float(text)
    if not text.isascii() or not math.isfinite(value):
        raise ValueError(text)
    return value


def _read_bool(raw: Raw) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    try:
        return words[_scalar(raw).lower()]
    except KeyError as error:
        raise ValueError(raw) from error


def _scalar(raw: Raw) -> str:
    if not isinstance(raw, str):
        raise ValueError(raw)
    return raw.strip()


def as_is(raw: Raw) -> Raw:
    """Strings, choices and mappings, whose types OmegaConf checks."""
    return raw


def _each(read: Callable[[Raw], Any]) -> Callable[[Raw], list[Any]]:
    def read_list(raw: Raw) -> list[Any]:
        if not isinstance(raw, list):
            raise ValueError(raw)
        return [read(item) for item in raw]

    return read_list


READERS: dict[Any, Callable[[Raw], Any]] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    list[int]: _each(_read_int),
    list[float]: _each(_read_float),
}
"""Parsers by type; they raise ValueError or OverflowError."""
