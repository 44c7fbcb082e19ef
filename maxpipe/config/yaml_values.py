"""Read YAML files and overrides, and convert texts to values of their declared types.

A scalar remains text until the schema determines its type; YAML does not guess types.
"""

from __future__ import annotations

import decimal
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from maxpipe.config.config_files import ConfigFile, broken_link, missing_file_action
from maxpipe.errors import ConfigError, Problem
from maxpipe.io.files import read
from maxpipe.io.formatting import format_nested
from maxpipe.io.plain_yaml import compose

NAME_FORM = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Pattern of valid user-defined names in a config. These names become parts of metric tags."""

Raw = str | None | list["Raw"] | dict[str, "Raw"]
"""A value before type conversion: scalars are texts, and None is YAML's null."""


def find_invalid_text(text: str) -> tuple[str, str] | None:
    """Return (rule, action) if the text contains characters that no value may contain."""
    if "${" in text:
        return "contains `${`, but values have no substitution.", "Write the value itself."
    if "\0" in text:
        return "contains a NUL character, which is invalid.", "Write the value without it."
    if text.lstrip("\\") == "???":
        return "denotes a missing value.", "Write the value itself."
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not Unicode text.", "Write the value in UTF-8."
    return None


def texts(raw: Raw) -> Iterator[str]:
    """Yield all texts in a nested value."""
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
    """Raised for an integer that cannot be represented exactly; the message describes the rule."""


_THOUSANDS = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
"""Maps suffixes of numbers to powers of ten, as in `10k` or `1.5M`."""


def _read_int(raw: Raw) -> int:
    text = _scalar(raw)
    if parts := re.fullmatch(r"([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)([kKmMgGbBtT])", text):
        scaled = decimal.Decimal(parts[1]).scaleb(_THOUSANDS[parts[2].lower()])
        if scaled != scaled.to_integral_value():
            raise ValueError(text)
        raw = text = str(int(scaled))
    if digits := re.fullmatch(r"[+-]?0*([0-9]+(_[0-9]+)*)", text):
        # Python refuses to parse integers with thousands of digits.
        value = int(text) if len(digits[1]) < 100 else 2**63
    else:
        number = _read_float(raw)
        value = int(number)
        if value != number:
            raise ValueError(text)
        if 2**53 <= abs(value) < 2**63:
            rule = "floats are not exact from 2**53 on."
            raise TooLargeError(f"must be an integer without decimal point or exponent: {rule}")
    if not -(2**63) <= value < 2**63:
        raise TooLargeError("must be an integer from -2**63 to 2**63 - 1.")
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


def read_unchanged(raw: Raw) -> Raw:
    """Return the value unchanged. OmegaConf checks the types of strings, choices and mappings."""
    return raw


def _list_reader(read: Callable[[Raw], Any]) -> Callable[[Raw], list[Any]]:
    def read_list(raw: Raw) -> list[Any]:
        if not isinstance(raw, list):
            raise ValueError(raw)
        return [read(item) for item in raw]

    return read_list


READERS: dict[Any, Callable[[Raw], Any]] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    list[int]: _list_reader(_read_int),
    list[float]: _list_reader(_read_float),
}
"""Maps types to parsers, which raise ValueError or OverflowError."""


MAX_FILE_BYTES = 1 << 20


def read_file(file: ConfigFile, problems: list[Problem]) -> yaml.MappingNode | None:
    """Return the sections of a file. If the file is invalid, add a problem and return None."""
    arg, path = file.origin, file.path
    try:
        root = compose(text := _read_text(path))
    except OSError as error:
        action = missing_file_action(path) if not os.path.lexists(path) else "Give a readable file."
        what = broken_link(path)
        reason = f"cannot be read: {f'it is {what}' if what else error.strerror or error}."
        problems.append(Problem(arg, "", reason, action))
    except ConfigError as error:
        problems += error.problems
    except yaml.YAMLError as error:
        problems.append(syntax_problem(arg, error))
    else:
        if not text.strip():
            rule = "is empty, perhaps because the disk was full."
            problems.append(Problem(arg, "", rule, "Write the file again, or leave it out."))
            return None
        if root is None or raw_of(root) is None:
            return yaml.MappingNode("", [])
        if isinstance(root, yaml.MappingNode):
            return root
        rule = "must contain sections, such as `model:`, with keys below them."
        action = "See `maxpipe configs show quickstart` for an example."
        problems.append(Problem(arg, format_raw(raw_of(root)), rule, action))
    return None


def _read_text(path: Path) -> str:
    content = read(path, MAX_FILE_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.one(
            str(path),
            None,
            f"is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}.",
            "Save the file as UTF-8.",
        ) from None


def syntax_problem(place: str, error: yaml.YAMLError) -> Problem:
    """Return a problem for text that is not valid YAML."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    what = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    if what and what.startswith("but "):
        what = f"{getattr(error, 'context', '')}, {what}"
    what = what or str(getattr(error, "reason", "unexpected end of the text"))
    line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return Problem(
        f"{place}{line}",
        "",
        f"is not supported YAML: {what}.",
        "Write sections with `key: value` lines below them, indented by two spaces.",
    )


def entries(
    mapping: yaml.MappingNode, file: str, prefix: str, problems: list[Problem]
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield (key, line, value) for each entry of a mapping, and add a problem for each duplicate
    key. `file` is empty for an override.
    """
    first: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in first:
            problems.append(
                Problem(
                    f"{file}:{line}: {prefix}{key}" if file else f"command line: {prefix}{key}",
                    format_raw(raw_of(value)),
                    f"appears twice in this file, first on line {first[key]}."
                    if file
                    else "appears twice in this setting.",
                    "Keep one of them.",
                )
            )
            continue
        first[key] = line
        yield key, line, value


def raw_of(node: yaml.Node) -> Raw:
    """Return the texts of a node in their nested structure, without type conversion."""
    if isinstance(node, yaml.SequenceNode):
        return [raw_of(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {
            key.value if isinstance(key, yaml.ScalarNode) else "?": raw_of(value)
            for key, value in node.value
        }
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def find_duplicates(
    node: yaml.Node, file: str, path: str, problems: list[Problem], depth: int = 2
) -> None:
    """Add a problem for each duplicate key in a mapping, or in the mappings of a list."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            find_duplicates(item, file, f"{path}[{number}]", problems, depth)
    elif isinstance(node, yaml.MappingNode) and depth:
        for name, _, value in entries(node, file, f"{path}.", problems):
            find_duplicates(value, file, f"{path}.{name}", problems, depth - 1)


def to_yaml_line(value: Any) -> str:
    """Format a value as it appears after its key in a config file."""
    flow: Any = {"default_flow_style": True, "width": math.inf, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **flow)
    text = text.removesuffix("\n").removesuffix("\n...")
    if not text.isprintable():
        # YAML folds line breaks in plain text, including U+0085 and U+2028, so they are escaped.
        text = yaml.safe_dump(value, default_style='"', **flow)
    return text.removesuffix("\n")


def format_raw(raw: Raw) -> str:
    """Format a raw value as text for a message."""
    if raw is None:
        return "null"
    text = "''" if raw == "" else raw if isinstance(raw, str) else format_nested(raw)
    text = " ".join(text.split()) if isinstance(raw, str) and raw.strip() else text
    return text if len(text) <= 60 else f"{text[:57]}..."
