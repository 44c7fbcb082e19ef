"""Untrusted YAML is read in bounded time, or raises an error that names the limit."""

from __future__ import annotations

import time

import pytest
import yaml

from maxpipe.config import yaml_values
from maxpipe.config.yaml_values import compose, load_yaml

_LAUGHS = "a: &a [x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_scalars_load_with_yaml_types() -> None:
    text = "name: v5p\nrate: 2.5\ncount: 7\nnone: null\nlist: [1, two]\n"
    expected = {"name": "v5p", "rate": 2.5, "count": 7, "none": None, "list": [1, "two"]}
    assert load_yaml(text) == expected


BAD = {
    "anchors": (_LAUGHS, "anchors and aliases are not supported"),
    "alias": ("a: *b", "anchors and aliases are not supported"),
    "tag": ("a: !!python/object:os.system {}", "tags such as"),
    "a tag of a megabyte": (f"a: !{'x' * 1_000_000} 1", "tags such as !x"),
    "deep": ("[" * 10_000 + "]" * 10_000, "nested deeper than 8"),
    "never closed": ("[" * 200_000, "nested deeper than 8"),
    "deep mappings": ("{a: " * 10_000, "nested deeper than 8"),
    "100,000 entries": (f"a: [{'0,' * 100_000}]", "more than 20,000 keys and values"),
    "500,000 lists": ("- []\n" * 200_000, "more than 20,000 keys and values"),
    "a key of a megabyte": (f"a:\n  ? {'k' * 1_000_000}\n  : 1", "a key has 1,000,000 characters"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(50_000)), "more than 20,000 keys"),
}


@pytest.mark.parametrize("name", BAD)
def test_yaml_beyond_limits_is_rejected(name: str) -> None:
    text, reason = BAD[name]
    started = time.process_time()
    with pytest.raises(yaml.YAMLError, match=reason) as caught:
        compose(text)
    assert time.process_time() - started < 15
    assert len(str(caught.value)) < 1000


def test_limit_counts_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_values, "MAX_VALUES", 7)
    assert load_yaml("{a: [1, 2], b: }") == {"a": [1, 2], "b": None}
    with pytest.raises(yaml.YAMLError, match="more than 7 keys and values"):
        load_yaml("{a: [1, 2, 3], b: }")


@pytest.mark.parametrize("number", ["7" * 6000, "1:" + "59:" * 300 + "1.5"])
def test_oversized_numbers_raise_value_error(number: str) -> None:
    with pytest.raises(ValueError):
        load_yaml(f"a: {number}")
