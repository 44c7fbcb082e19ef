"""Limit on how much a tokenizer can expand a text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer, check_growth, growth
from maxpipe.errors import ConfigError


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def regex(pattern: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}


def charsmap(text: bytes) -> dict[str, Any]:
    raw = (4).to_bytes(4, "little") + b"trie" + text
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


PREPEND = {"type": "Prepend", "prepend": "\u2581"}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 1),
        ([{"type": "NFKC"}, {"type": "Lowercase"}], 1),
        ([PREPEND, replace(" ", "\u2581")], 2),  # Llama 2, Gemma
        ([regex(" {2,}", "\u2581")], 2),  # XLM-R
        ([replace("``", '"'), replace("''", '"')], 1),  # ALBERT
        ([replace("\n", "<newline>"), replace("\t", "<tab>"), replace(" ", "<s>")], 9),
        ([replace("ab", "abcd")], 2),
        ([replace("a", "b" * 10), replace("b", "c" * 10)], 100),
        ([replace("b", "c" * 10), replace("a", "b" * 10)], 10),
        ([replace("a", "a" * 10)] * 6, 1e6),
        ([replace("a", "A" * 10), {"type": "Lowercase"}] * 6, 1e6),
        ([charsmap(b"ab\0" + b"x" * 640 + b"\0")], 10),
        ([charsmap(b"ab\0")], 1),
    ],
)
def test_growth_is_maximum_expansion_per_character(
    steps: list[dict[str, Any]], expected: float
) -> None:
    assert growth(steps) == expected


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_check_growth_rejects_excessive_expansion(part: str) -> None:
    steps = {"type": "Sequence", f"{part}s": [replace("a", "a" * 10)] * 6}
    with pytest.raises(ValueError, match=rf"the {part} can expand text by a factor of 1e\+06"):
        check_growth({part: steps})
    check_growth({part: {"type": "Sequence", f"{part}s": [replace("a", "a" * 10)]}})
    check_growth({part: None})


def test_growth_rejects_thousands_of_steps() -> None:
    with pytest.raises(ValueError, match="5,000 steps"):
        growth([PREPEND] * 5000)


def test_tokenizer_file_with_excessive_growth_is_rejected(tmp_path: Path) -> None:
    steps = {"type": "Sequence", "normalizers": [replace("a", "a" * 10)] * 6}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE"}, "normalizer": steps}))
    with pytest.raises(
        ConfigError, match="expand text by a factor of 1e\\+06; at most 64"
    ) as caught:
        HuggingFaceTokenizer(str(path))
    assert str(path) in str(caught.value)
