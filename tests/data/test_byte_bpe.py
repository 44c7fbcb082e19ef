"""Fast path of byte-level BPE: returns the same token IDs as `tokenizers`, or None."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.data import train_tokenizer
from maxpipe.data.tokenizers.byte_bpe import LLAMA3, O200K, QWEN, ByteBpe
from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer
from tests.data.texts import Texts

WORDS = [
    "don't",
    "WE'LL",
    "they're",
    "naïve",
    "語",
    "123456",
    "３４",
    "½",
    "ſ",
    "\u212a",
    "e\u0301",
]
WORDS += ["😀", "\u200d", "\u3000", "\u0085", "x", "-->", "...", "\ufeff", "<|end_of_text|>"]
PIECES = [*WORDS, " ", "  ", "\n", "\r\n", "\t", "\n\n ", "the", " of", "ing", "\0", "<tool>"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)


def silent(*_: object) -> None:
    """Discard progress reports."""


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    """Train a tokenizer.json with a few hundred merges."""
    texts = [
        f"{one}{two} {one} the singing of {number}"
        for number, one in enumerate(WORDS)
        for two in PIECES
    ]
    content = train_tokenizer.train([Texts(texts)], "bpe", 700, silent)
    return json.loads(content)


Make = Callable[..., HuggingFaceTokenizer]


@pytest.fixture
def made(definition: dict[str, Any], tmp_path: Path) -> Make:
    """Return a function that changes the definition and opens the resulting tokenizer."""

    def make(change: Callable[[dict[str, Any]], object] = silent) -> HuggingFaceTokenizer:
        copy = json.loads(json.dumps(definition))
        change(copy)
        (tmp_path / "tokenizer.json").write_text(json.dumps(copy))
        return HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))

    return make


@pytest.fixture(scope="module")
def trained(
    definition: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> HuggingFaceTokenizer:
    """Open the unchanged tokenizer."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(json.dumps(definition))
    return HuggingFaceTokenizer(str(path))


def fast_path(tokenizer: HuggingFaceTokenizer) -> ByteBpe:
    """Return the fast path of the tokenizer, which must have one."""
    found = tokenizer._byte_bpe
    assert found is not None
    return found


@settings(max_examples=400)
@given(text=TEXTS)
def test_fast_path_ids_match_tokenizers(text: str, trained: HuggingFaceTokenizer) -> None:
    expected = trained.encode(text).tolist()
    found = fast_path(trained).encode(text)
    assert found is None or found.tolist() == expected
    batch = trained.encode_batch([text, "the"])
    assert batch[0].tolist() == expected


@pytest.mark.parametrize(
    "pattern",
    [LLAMA3, *(pytest.param(each, marks=pytest.mark.long) for each in (QWEN, O200K)), None],
)
def test_known_patterns_match_tokenizers(pattern: str | None, made: Make) -> None:
    def change(content: dict[str, Any]) -> None:
        split, byte_level = content["pre_tokenizer"]["pretokenizers"]
        if pattern is None:
            content["pre_tokenizer"] = {**byte_level, "use_regex": True}
        else:
            split["pattern"] = {"Regex": pattern}

    tokenizer = made(change)
    draw = np.random.default_rng(2)
    texts = ["".join(draw.choice(PIECES, 40)) for _ in range(200)]
    # Characters of many Unicode blocks next to letters, digits and spaces.
    texts += [f"a{chr(i)}b 1{chr(i)}2 {chr(i)} \n{chr(i)}" for i in range(0x80, 0x3000, 5)]
    taken = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist(), text
        taken += fast_path(tokenizer).encode(text) is not None
    assert taken > 0.9 * (len(texts) - 200)


def test_fast_path_skips_text_that_may_differ(made: Make) -> None:
    tokenizer = made(
        lambda content: content["added_tokens"].append(
            {**content["added_tokens"][0], "id": 9000, "content": "<tool>", "special": False}
        )
    )
    found = fast_path(tokenizer)
    for text in ("ſ", "\u212a", "\U000e0001", "a <tool> b", "x" * (1 << 19)):
        assert found.encode(text) is None
        assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text).tolist()
    assert tokenizer._tokenizer.token_to_id("<tool>") in tokenizer.encode_batch(["a <tool> b"])[0]
    assert found.encode("a < tool> b") is not None


def _unreachable(content: dict[str, Any]) -> None:
    """Add a three-byte token that is never produced: its last two bytes always merge first."""
    model = content["model"]
    second, third = model["merges"][0]
    model["vocab"] |= {f"q{second}": 8000, f"q{second}{third}": 8001}
    model["merges"] += [["q", second], [f"q{second}", third]]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "normalizer": lambda content: content.update(normalizer={"type": "NFC"}),
    "prefix": lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(
        add_prefix_space=True
    ),
    "pattern": lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(
        pattern={"Regex": r"\w+|\W"}
    ),
    "inverted": lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(invert=True),
    "dropout": lambda content: content["model"].update(dropout=0.5),
    "missing byte": lambda content: content["model"]["vocab"].pop("ÿ"),
    "unreachable": _unreachable,
    "order": lambda content: content["model"]["merges"].reverse(),
    "never merged": lambda content: (
        content["model"].update(ignore_merges=True),
        content["model"]["vocab"].update({"the of": 8000}),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unsupported_tokenizers_have_no_fast_path(change: str, made: Make) -> None:
    assert made()._byte_bpe is not None
    assert made(CHANGES[change])._byte_bpe is None
