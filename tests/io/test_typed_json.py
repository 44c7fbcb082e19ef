"""Untrusted JSON has the declared types, or raises an error that names the field."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.io.typed_json import AnyFloat, check_type, parse_json


class _File(TypedDict):
    bytes: int
    sha256: str


class _Record(TypedDict):
    step: int
    files: dict[str, _File]
    kind: NotRequired[Literal["a", "b"]]
    window: NotRequired[tuple[int, float] | None]
    losses: NotRequired[list[AnyFloat]]


GOOD: dict[str, Any] = {"step": 3, "files": {"x": {"bytes": 1, "sha256": "0"}}}


def test_valid_records_are_returned_unchanged() -> None:
    more = {"kind": "a", "window": [1, 2], "losses": [math.nan, 1.0, 2], "unknown": {}}
    for record in (GOOD, GOOD | more, GOOD | {"window": None}):
        again = parse_json(json.dumps(record), _Record)
        assert json.dumps(again) == json.dumps(record)
        assert check_type(record, _Record) is record


@pytest.mark.parametrize("sign", ["", "-"])
def test_integers_beyond_float_range_are_rejected(sign: str) -> None:
    for kind in (dict[str, Any], dict[str, int]):
        with pytest.raises(ValueError, match=r"an integer of 400 digits, -?7777.*at most 308"):
            parse_json(f'{{"a": {sign}{"7" * 400}}}', kind)
    assert parse_json(f'{{"a": {sign}{"7" * 308}}}', dict[str, Any]) == {"a": int(sign + "7" * 308)}
    for offset in range(32):
        with pytest.raises(ValueError, match="an integer of 309 digits"):
            parse_json(f'{" " * offset}{{"a": {sign}{"7" * 309}}}', dict[str, Any])
    text = "7" * 400
    assert parse_json(json.dumps({"a": text, "b": 5}), dict[str, Any]) == {"a": text, "b": 5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "3"}, "step must be an integer"),
        ({"step": True}, "step must be an integer"),
        ({"step": 3.0}, "step must be an integer"),
        ({"step": 2**63}, r"step must be below 2\*\*63"),
        ({"files": []}, "files must be an object"),
        ({"files": {"x": {"bytes": 1}}}, "files.x lacks sha256"),
        ({"files": {"x": {"bytes": None, "sha256": ""}}}, "files.x.bytes must be an integer"),
        ({"kind": "c"}, "kind must be 'a' or 'b'"),
        ({"window": [1]}, "window must have 2 entries, but has 1 or window must be null"),
        ({"window": [1, math.inf]}, r"window\[1\] must be finite"),
        ({"losses": {}}, "losses must be a list"),
        ({"losses": ["x"]}, r"losses\[0\] must be a number"),
    ],
)
def test_type_errors_name_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(json.dumps(GOOD | change), _Record)


@pytest.mark.parametrize("text", [b"\xff", "", "{", "[" * 10**6, '{"a":' * 10**6, "9" * 10**5, "]"])
def test_invalid_json_raises_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text, dict[str, Any])


@given(st.recursive(st.text(), lambda inner: st.lists(inner), max_leaves=30))
def test_depth_limit_ignores_brackets_in_strings(value: Any) -> None:
    def depth(value: Any) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    text = json.dumps([value])
    parse_json(text, list[Any], most_depth=depth([value]))
    with pytest.raises(ValueError, match="brackets"):
        parse_json(text, list[Any], most_depth=depth([value]) - 1)


@pytest.mark.parametrize("text", ['"' + '\\"' * 10**6, '"\\', '"[' * 10**6])
def test_hostile_strings_are_rejected_quickly(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(ValueError):
        parse_json(text, dict[str, Any])
    assert time.process_time() - begin < 5
