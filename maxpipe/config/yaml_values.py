"""Read YAML files and overrides, and convert strings to values of their declared types.

The YAML reader rejects aliases, tags, deep nesting and large documents. A scalar is kept as a
string until the schema determines its type; YAML's type inference is not used. `read_items` reads
the items of list keys, such as the phases of `optim.lr_phases`.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from maxpipe.config.config_files import ConfigFile, broken_link, missing_file_action
from maxpipe.config.rules import EXAMPLES, ITEM, did_you_mean, field_name
from maxpipe.config.schema import ITEM_KEYS, ITEM_SECTIONS, names_in, without_none
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io.files import read
from maxpipe.io.formatting import format_nested

MAX_DEPTH = 8
MAX_VALUES = 20_000
"""Maximum number of keys and values in a document. PyYAML takes about 50 us per key or value."""
MAX_KEY = 1000
"""Maximum length of a key in characters."""


_NO_ALIASES = "anchors and aliases are not supported"


class _Loader(yaml.SafeLoader):
    """YAML loader that accepts only nested mappings, lists and scalars, within size limits."""

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            self.reject(_NO_ALIASES, event)
        if tag := getattr(event, "tag", None):
            self.reject(f"tags such as {tag[:80]} are not supported", event)
        if self.depth > MAX_DEPTH:
            self.reject(f"nested deeper than {MAX_DEPTH}", event)
        self.count += 1
        if self.count > MAX_VALUES:
            rule = f"more than {MAX_VALUES:,} keys and values are not supported"
            self.reject(f"{rule}; use a glob pattern to list many files", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        is_key = isinstance(parent, yaml.MappingNode) and index is None
        if is_key and isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_KEY:
            self.reject(f"a key has {len(node.value):,} characters (limit: {MAX_KEY:,})", event)
        self.depth -= 1
        return node

    def reject(self, problem: str, event: yaml.Event) -> typing.NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def compose(text: str) -> yaml.Node | None:
    """Parse a YAML string into a node tree.

    Raises:
        yaml.YAMLError: the string is not valid YAML, or exceeds a limit.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def load_yaml(text: str | bytes) -> Any:
    """Parse a YAML string into Python values, with scalar types inferred by YAML.

    Raises:
        yaml.YAMLError: the string is not valid YAML, or exceeds a limit.
        ValueError: a number or a date cannot be represented.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except OverflowError as error:  # a number in base 60
        raise ValueError(f"a number is too large: {error}") from error
    finally:
        loader.dispose()


NAME_FORM = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Pattern of valid user-defined names in a config. These names are part of metric tags."""

Raw = str | None | list["Raw"] | dict[str, "Raw"]
"""Value before type conversion: scalars are strings, and None is YAML's null."""


def find_invalid_text(text: str) -> tuple[str, str] | None:
    """Return the violated rule and the suggested action if a string is not a valid config value;
    otherwise, return None.
    """
    if "${" in text:
        return "contains `${`, but variables are not expanded.", "Write the value itself."
    if "\0" in text:
        return "contains a NUL character, which is invalid.", "Remove the NUL character."
    if text.lstrip("\\") == "???":
        return "is OmegaConf's marker for a missing value.", "Write the value itself."
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not Unicode text.", "Encode the value as UTF-8."
    return None


def texts(raw: Raw) -> Iterator[str]:
    """Yield all strings in a nested value."""
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
    """Raised for an integer that is too large; the message contains the limit."""


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
        # Python raises an error for integers with thousands of digits.
        value = int(text) if len(digits[1]) < 100 else 2**63
    else:
        number = _read_float(raw)
        value = int(number)
        if value != number:
            raise ValueError(text)
        if 2**53 <= abs(value) < 2**63:
            rule = "floats of 2**53 or more are inexact."
            raise TooLargeError(f"must be an integer without a decimal point or exponent: {rule}")
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
    """Return the value unchanged; OmegaConf checks the types of strings, choices and mappings."""
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
"""Maps types to parsers, which raise ValueError or OverflowError for invalid values."""


MAX_FILE_BYTES = 1 << 20


def read_file(file: ConfigFile, problems: list[Problem]) -> yaml.MappingNode | None:
    """Return the top-level YAML mapping of a file. If the file is invalid, record an error and
    return None.
    """
    arg, path = file.origin, file.path
    try:
        root = compose(text := _read_text(path))
    except OSError as error:
        action = missing_file_action(path) if not os.path.lexists(path) else "Use a readable file."
        what = broken_link(path)
        reason = f"cannot be read: {f'it is {what}' if what else error.strerror or error}."
        problems.append(Problem(Code.CFG_FILE, arg, "", reason, action))
    except ConfigError as error:
        problems += error.problems
    except yaml.YAMLError as error:
        problems.append(syntax_problem(arg, error))
    else:
        if not text.strip():
            rule = "is empty, perhaps because the disk was full."
            problems.append(
                Problem(Code.CFG_YAML, arg, "", rule, "Write the file again, or leave it out.")
            )
            return None
        if root is None or raw_of(root) is None:
            return yaml.MappingNode("", [])
        if isinstance(root, yaml.MappingNode):
            return root
        rule = "must contain sections, such as `model:`, with keys below them."
        action = "See `maxpipe configs show quickstart` for an example."
        problems.append(Problem(Code.CFG_YAML, arg, format_raw(raw_of(root)), rule, action))
    return None


def _read_text(path: Path) -> str:
    content = read(path, MAX_FILE_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError.one(
            Code.CFG_YAML,
            str(path),
            None,
            f"is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}.",
            "Save the file as UTF-8.",
        ) from None


_UNQUOTED_PATTERN = re.compile(r"""(?<![^\s\[,:{])\*[^\s,\]}"']+""")
"""A name pattern such as `*.gate`, which YAML reads as an alias unless it is in quotes."""


def syntax_problem(
    place: str, error: yaml.YAMLError, override: str = "", example: str = ""
) -> Problem:
    """Return an error message for a string that is not valid YAML. If the string is the value of an
    `override`, `example` is a valid override of the same key.
    """
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    what = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    if what and what.startswith("but "):
        what = f"{getattr(error, 'context', '')}, {what}"
    what = what or str(getattr(error, "reason", "unexpected end of input"))
    line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    return Problem(
        Code.CFG_YAML,
        f"{place}{line}",
        "",
        f"is not supported YAML: {what}.",
        _syntax_action(error, override, example),
    )


def _syntax_action(error: yaml.YAMLError, override: str, example: str) -> str:
    is_alias = isinstance(error, yaml.MarkedYAMLError) and (
        error.problem == _NO_ALIASES or "alias" in (error.context or "")
    )
    if is_alias and _UNQUOTED_PATTERN.search(override):
        quoted = _UNQUOTED_PATTERN.sub(r'"\g<0>"', override)
        return f"Write '{quoted}': text that begins with * needs quotes."
    if is_alias:
        return 'Put text that begins with * in quotes, such as "*.gate".'
    if example:
        return f"Write the value as in '{example}'."
    return "Write sections with `key: value` lines below them, indented by two spaces."


def entries(
    mapping: yaml.MappingNode, file: str, prefix: str, problems: list[Problem]
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield (key, line number, value) for each entry of a mapping, and record an error for each
    duplicate key. `file` is empty for an override.
    """
    first: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in first:
            problems.append(
                Problem(
                    Code.CFG_YAML,
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
    """Convert a YAML node to nested lists, dicts and strings, without type conversion."""
    if isinstance(node, yaml.SequenceNode):
        return [raw_of(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {
            key.value if isinstance(key, yaml.ScalarNode) else "?": raw_of(value)
            for key, value in node.value
        }
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def to_raw(value: Any, depth: int = 32) -> Raw:
    """Convert a Python value to nested lists, dicts and strings, as if read from a config file.

    Raises:
        ValueError: the value is nested deeper than `depth`.
    """
    if isinstance(value, Mapping | list | tuple):
        if not depth:
            raise ValueError("nested too deeply")
        if isinstance(value, Mapping):
            return {str(key): to_raw(item, depth - 1) for key, item in value.items()}
        return [to_raw(item, depth - 1) for item in value]
    try:
        text = str(value)
    except ValueError:  # an integer with thousands of digits
        return "an integer that is too large"
    return None if value is None else text.lower() if isinstance(value, bool) else text


def find_duplicates(
    node: yaml.Node, file: str, path: str, problems: list[Problem], depth: int = 2
) -> None:
    """Record an error for each duplicate key in a mapping or in a list of mappings."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            find_duplicates(item, file, f"{path}[{number}]", problems, depth)
    elif isinstance(node, yaml.MappingNode) and depth:
        for name, _, value in entries(node, file, f"{path}.", problems):
            find_duplicates(value, file, f"{path}.{name}", problems, depth - 1)


def to_yaml_line(value: Any) -> str:
    """Format a value as one line of YAML that follows its key in a config file."""
    flow: Any = {"default_flow_style": True, "width": math.inf, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **flow)
    text = text.removesuffix("\n").removesuffix("\n...")
    if not text.isprintable():
        # YAML folds line breaks in plain scalars, including U+0085 and U+2028: escape them.
        text = yaml.safe_dump(value, default_style='"', **flow)
    return text.removesuffix("\n")


def format_raw(raw: Raw) -> str:
    """Format an unparsed value for a message, truncated to 60 characters."""
    if raw is None:
        return "null"
    text = "''" if raw == "" else raw if isinstance(raw, str) else format_nested(raw)
    text = " ".join(text.split()) if isinstance(raw, str) and raw.strip() else text
    return text if len(text) <= 60 else f"{text[:57]}..."


class ItemError(ValueError):
    """Raised for an invalid list item, or an invalid field of an item."""

    def __init__(self, key: str, raw: Raw, rule: str = "", action: str = "", hint: Any = None):
        super().__init__(rule)
        self.key, self.raw, self.rule, self.action, self.hint = key, raw, rule, action, hint
        """`key` is the item or field, such as `optim.lr_phases[1].steps`. An empty `rule` means
        that the value does not have the type `hint`."""


def read_items(raw: Raw, key: str) -> list[Any]:
    """Parse the value of a list key into its items.

    Raises:
        ItemError: an item or a field is invalid.
    """
    if not isinstance(raw, list):
        raise ItemError(key, raw, "must be a list of mappings.", _list_action(key))
    return [_read_item(item, key, f"{key}[{number}]") for number, item in enumerate(raw)]


def _list_action(key: str) -> str:
    return f'Set {key}=[], or items such as "{key}={EXAMPLES[key]}".'


def _read_item(raw: Raw, key: str, place: str) -> Any:
    declared, names = ITEM_SECTIONS[f"{key}{ITEM}"], names_in(f"{key}{ITEM}")
    if not isinstance(raw, dict):
        rule = f"must be a mapping with the fields {', '.join(names)}."
        raise ItemError(place, raw, rule, _list_action(key))
    for name, value in raw.items():
        if name not in names:
            guess = did_you_mean(name, names)
            action = f"Did you mean {guess}? " if guess else ""
            rule = f"is not a field of {key}."
            raise ItemError(
                f"{place}.{name}", value, rule, f"{action}Its fields are {', '.join(names)}."
            )
    values = {}
    for field in dataclasses.fields(declared):
        name = field_name(field)
        if name in raw:
            hint = ITEM_KEYS[f"{key}{ITEM}.{name}"]
            values[field.name] = _read_field(raw[name], hint, f"{place}.{name}")
        elif field.default is dataclasses.MISSING:
            action = f'Add `{name}: ...`, as in "{key}={EXAMPLES[key]}".'
            raise ItemError(place, raw, f"requires the field {name}.", action)
    return declared(**values)


def _read_field(raw: Raw, hint: Any, place: str) -> Any:
    if raw is None and without_none(hint) is not hint:
        return None
    hint = without_none(hint)
    if typing.get_origin(hint) is dict:
        if not isinstance(raw, dict):
            action = f"Write `{place.rpartition('.')[2]}: {{web: 0.9, code: 0.1}}`."
            raise ItemError(place, raw, "must be a mapping of names to numbers.", action)
        return {
            _name(name, place): _read_field(value, float, f"{place}.{name}")
            for name, value in raw.items()
        }
    try:
        value = READERS.get(hint, read_unchanged)(raw)
    except (ValueError, OverflowError):
        raise ItemError(place, raw, hint=hint) from None
    is_choice = typing.get_origin(hint) is Literal
    if (is_choice and value not in typing.get_args(hint)) or (
        hint is str and not isinstance(raw, str)
    ):
        raise ItemError(place, raw, hint=hint)
    return value


def _name(name: str, place: str) -> str:
    if not NAME_FORM.fullmatch(name):
        rule = "must have names of at most 64 letters, digits, `_` and `-`."
        raise ItemError(place, name, rule, "Use the name of a source in data.mixture.")
    return name
