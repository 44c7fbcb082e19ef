"""Streamed text: characters split over tokens, and stop strings split over chunks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from maxpipe.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from maxpipe.generation.completions import CompletionText, IncrementalDetokenizer, StopStringMatcher

TEXT = "Zwölf 漢字 🎉\n𝄞 né"
BYTES = ByteTokenizer()


def pieces(tokenizer: Tokenizer, ids: Any, prompt: tuple[int, ...] = ()) -> tuple[list[str], str]:
    """Return the text emitted for each token, and the flushed remainder."""
    stream = IncrementalDetokenizer(tokenizer, prompt)
    return [stream.add(int(token)) for token in ids], stream.flush()


def test_multibyte_characters_are_emitted_when_complete() -> None:
    found, rest = pieces(BYTES, TEXT.encode())
    assert "".join(found) == TEXT and rest == "" and "\ufffd" not in "".join(found)
    assert [piece for piece in found if piece] == list(TEXT)


def test_incomplete_character_is_replaced_only_at_end() -> None:
    found, rest = pieces(BYTES, "a🎉".encode()[:-1])
    assert found == ["a", "", "", ""] and rest == "\ufffd"


def test_invalid_bytes_do_not_delay_following_text() -> None:
    found, rest = pieces(BYTES, b"\xff" * 9 + b"ok")
    assert "".join(found) == "\ufffd" * 9 + "ok" and rest == ""
    assert "".join(found[:9]) == "\ufffd" * 6  # the last three bytes might still form one character


def test_control_tokens_have_no_text() -> None:
    found, rest = pieces(BYTES, [BYTES.begin_id, 97, BYTES.pad_id, 98, BYTES.end_id])
    assert found == ["", "a", "", "b", ""] and rest == ""


@pytest.fixture
def spaced(tmp_path: Path) -> HuggingFaceTokenizer:
    """Words with a leading space, which the decoder strips from the first word, and all bytes."""
    words = ["<unk>", "</s>", "▁one", "▁two", *(f"<0x{byte:02X}>" for byte in range(256))]
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {
        "type": "BPE",
        "vocab": {word: i for i, word in enumerate(words)},
        "merges": [],
        "unk_token": "<unk>",
        "byte_fallback": True,
    }
    end = {"id": 1, "content": "</s>", "special": True, "single_word": False}
    end |= {"lstrip": False, "rstrip": False, "normalized": False}
    whole = {"version": "1.0", "added_tokens": [end], "model": model}
    whole |= {"decoder": {"type": "Sequence", "decoders": steps}}
    whole |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    whole |= {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    return HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))


def test_space_between_prompt_and_completion_is_kept(spaced: HuggingFaceTokenizer) -> None:
    one, two, first = 2, 3, 4
    found, _ = pieces(spaced, [two, one, two, two, one, two], (one,))
    assert "".join(found) == " two one two two one two"
    ids = [one, *(first + byte for byte in "漢é".encode()), two]
    found, rest = pieces(spaced, ids, (one,))
    assert "".join(found) == " one漢é two" and rest == ""
    assert found[1:3] == ["", ""] and found[3] == "漢"
    whole = [first + byte for byte in "漢字é".encode()]
    for cut in (3, 6):  # the prompt ends in bytes
        found, _ = pieces(spaced, whole[cut:], tuple(whole[:cut]))
        assert "".join(found) == "漢字é"[cut // 3 :]
    found, _ = pieces(spaced, [two, 1, two], (one,))
    assert "".join(found) == " two two"


def stopped(text: str, stops: list[str], cuts: tuple[int, ...]) -> tuple[str, bool]:
    """Feed text in chunks that end at the cuts; return the output and whether it stopped."""
    reader, found = StopStringMatcher(stops), ""
    for start, end in itertools.pairwise((0, *cuts, len(text))):
        found += reader.add(text[start:end])
        if reader.matched:
            return found, True
    return found + reader.flush(), False


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("abcabd!x", ["abd"], ("abc", True)),
        ("aaab!", ["aab"], ("a", True)),
        ("one. Two", ["Two", "e."], ("on", True)),
        ("xEND", ["EN", "xEND"], ("", True)),
        ("no stop he", ["here"], ("no stop he", False)),
    ],
)
def test_stop_strings_match_across_any_chunk_boundaries(
    text: str, stops: list[str], wanted: tuple[str, bool]
) -> None:
    for count in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), count):
            found = stopped(text, stops, cuts)
            # A shorter stop string may be complete before a longer one that begins earlier.
            if "EN" in stops:
                assert found in (("x", True), wanted)
            else:
                assert found == wanted


def test_text_ends_before_multibyte_stop_string() -> None:
    row = CompletionText(BYTES, [], ["字🎉"])
    ids = "漢字🎉 more".encode()
    given = []
    for token in ids:
        given.append(row.add(token))
        if row.stopped:
            break
    assert "".join(given) == row.text == "漢" and row.end() == ""
    assert len(given) == len("漢字🎉".encode())


def test_withheld_text_is_flushed_at_end() -> None:
    row = CompletionText(BYTES, [], ["stop"])
    assert [row.add(token) for token in b"a sto"] == ["a", " ", "", "", ""]
    assert row.end() == "sto" and row.text == "a sto"
