"""Parse JSON from files and other processes into checked types.

Supported types are `int`, `float`, `str`, `bool`, `None`, `Any`, `Literal`, `list[T]`, `tuple[A,
B]`, `dict[str, T]`, unions of these, and a `TypedDict` for objects with known keys. Integers must
fit into 64 bits, and floats must be finite unless the type is `AnyFloat`. Keys that a `TypedDict`
does not declare are kept, because a newer release may have written them.

The module also defines the metadata of config fields (former names and legacy values), and JSON
with a checksum that detects corruption.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")

AnyFloat = Annotated[float, "any"]
"""A float that may be NaN or infinite, such as a loss."""

MAX_DEPTH = 32
"""Maximum nesting depth of brackets. Files that maxpipe writes have fewer than ten levels."""

_MAX_INT = 2**63
_MAX_DIGITS = 308
"""Maximum number of digits of an integer that can be converted to a float."""
_STRIDE = 30
_DIGITS = re.compile(rf"[0-9]{{{_MAX_DIGITS // _STRIDE}}}")
"""Pattern that detects long integers by examining only every 30th character of the input. Searching
all characters would be slower than parsing the JSON.
"""
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def parse_json(text: str | bytes, kind: type[T], *, most_depth: int = MAX_DEPTH) -> T:
    """Parse JSON text as a value of type `kind`.

    Raises:
        ValueError: the text is not valid JSON, is nested deeper than `most_depth`, or does not have
            type `kind`.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # UnicodeDecodeError is a ValueError
    depth = _depth(text)
    if depth > most_depth:
        raise ValueError(
            f"it has {depth} levels of nested brackets, more than the limit of {most_depth}"
        )
    # Calling `_parse_int` for every number is slow, so it is used only if the text may contain a
    # long integer. Python's own limit on digits is configurable and therefore not reliable.
    may_be_long = _DIGITS.search(text[::_STRIDE])
    value = json.loads(text, parse_int=_parse_int) if may_be_long else json.loads(text)
    return check_type(value, kind)


def _parse_int(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(
            f"it contains an integer of {len(digits.lstrip('-')):,} digits, {digits[:12]}..., but "
            f"at most {_MAX_DIGITS} digits are supported"
        )
    return int(digits)


def check_type(value: object, kind: type[T]) -> T:
    """Return the value after checking that its type is `kind`.

    Raises:
        ValueError: the value does not have this type; the message names its position in the JSON.
    """
    _check(value, kind, "it")
    return value  # type: ignore[return-value]


def to_dataclass(value: object, kind: type[T]) -> T:
    """Return an object of JSON as a dataclass. Fields can be lists of dataclasses. Other
    keys are ignored.

    Raises:
        ValueError: a field is missing, or a value does not have the type of its field.
    """
    items, hints = _require_type(dict, value, "it", "an object"), get_type_hints(kind)
    own: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(kind)):  # type: ignore[arg-type]
        if name not in items:
            raise ValueError(f"it lacks {name}")
        of, args = hints[name], get_args(hints[name])
        if get_origin(of) is list and dataclasses.is_dataclass(args[0]):
            entries = _require_type(list, items[name], name, "a list")
            entry_kind: Any = args[0]
            own[name] = [to_dataclass(entry, entry_kind) for entry in entries]
        else:
            _check(items[name], of, name)
            own[name] = items[name]
    return kind(**own)


def _depth(text: str) -> int:
    """Return the nesting depth of brackets outside strings, without recursion."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match[0][0]
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket != '"':
            depth -= 1
    return deepest


def _check(value: object, kind: Any, where: str) -> None:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin is Annotated:
        if "any" in args[1:] and type(value) is float:
            return
        _check(value, args[0], where)
    elif origin in (Required, NotRequired):
        _check(value, args[0], where)
    elif origin in (Union, types.UnionType):
        _check_union(value, args, where)
    elif origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in args):
            raise ValueError(f"{where} must be {' or '.join(map(repr, args))}")
    elif is_typeddict(kind):
        _check_object(value, kind, where)
    elif origin is dict:
        for name, item in _require_type(dict, value, where, "an object").items():
            _check(item, args[1], _child_path(where, name))
    elif origin is list:
        for number, item in enumerate(_require_type(list, value, where, "a list")):
            _check(item, args[0], f"{where}[{number}]")
    elif origin is tuple:
        items = _require_type(list, value, where, "a list")
        if len(items) != len(args):
            raise ValueError(f"{where} must have {len(args)} entries, but has {len(items)}")
        for number, (item, of) in enumerate(zip(items, args, strict=True)):
            _check(item, of, f"{where}[{number}]")
    else:
        _check_scalar(value, kind, where)


def _check_union(value: object, kinds: tuple[Any, ...], where: str) -> None:
    failures: list[str] = []
    for kind in kinds:
        try:
            return _check(value, kind, where)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError(" or ".join(failures))


def _check_object(value: object, kind: Any, where: str) -> None:
    items = _require_type(dict, value, where, "an object")
    keys, required = _keys(kind)
    if missing := sorted(required - items.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, of in keys.items():
        if name in items:
            _check(items[name], of, _child_path(where, name))


@functools.cache
def _keys(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a TypedDict's keys, and the set of required keys."""
    keys = get_type_hints(kind, include_extras=True)
    # Python's `__required_keys__` ignores `NotRequired` in string annotations.
    required = frozenset(
        name
        for name, of in keys.items()
        if get_origin(of) is Required
        or (name in kind.__required_keys__ and get_origin(of) is not NotRequired)
    )
    return keys, required


def _check_scalar(value: object, kind: Any, where: str) -> None:
    if kind in (None, types.NoneType):
        if value is not None:
            raise ValueError(f"{where} must be null")
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number if kind is float else type(value) is kind):
        raise ValueError(f"{where} must be {_TYPE_NAMES[kind]}")
    if isinstance(value, int) and abs(value) >= _MAX_INT:
        raise ValueError(f"{where} must be below 2**63")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite")


def _require_type(kind: type[T], value: object, where: str, name: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {name}")
    return value


def _child_path(where: str, name: object) -> str:
    text = str(name)[:80]
    return text if where == "it" else f"{where}.{text}"


def renamed_from(
    *names: str, values: Mapping[str, Any] | Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Return the metadata of a renamed field: its former names, and a map from former to current
    values.

    A former name without a dot refers to a key in the same section. If `values` is a function, it
    converts any value, and returns current values unchanged.
    """
    return {"was": names, "values": values}


def legacy_value(value: Any) -> dict[str, Any]:
    """Return field metadata with the value to assume for runs saved before the key existed."""
    return {"before": value}


def dump_checksummed(content: Mapping[str, Any], *, indent: int | None = 1) -> str:
    """Serialize the content as JSON with a checksum. If `indent` is None, the JSON is a single
    line.
    """
    return json.dumps({**content, "sha256": _digest(content)}, indent=indent)


def parse_checksummed(text: str | bytes, kind: type[T]) -> T:
    """Parse text written by `dump_checksummed`.

    Raises:
        ValueError: the text is invalid or does not match its checksum.
    """
    content = parse_json(text, dict[str, Any])
    if content.pop("sha256", None) != _digest(content):
        raise ValueError("its content does not match its checksum")
    return parse_json(text, kind)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
