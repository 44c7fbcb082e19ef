"""Limit on the CPU time that a tokenizer spends on one text."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.documents import build_index
from maxpipe.data.sources import open_source
from maxpipe.data.tokenizers import files
from maxpipe.data.tokenizers.byte_bpe import PUBLISHED
from maxpipe.data.tokenizers.huggingface import HuggingFaceTokenizer
from maxpipe.errors import ConfigError

EXPONENTIAL = "(a|aa)+$"
SLOW = ("a" * 27 + "!") * 20
"""Each repetition takes 0.1 s; no match reaches the retry limit of the regex engine."""


def regex(pattern: str) -> dict[str, str]:
    return {"Regex": pattern}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": regex(pattern), "behavior": "Isolated", "invert": False}


def replace(pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": regex(pattern), "content": "b"}


def bpe() -> dict[str, Any]:
    vocab = {each: i for i, each in enumerate(["</s>", *map(chr, range(32, 127))])}
    return {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "</s>"}


def word_pieces(longest: int) -> dict[str, Any]:
    vocab = {"</s>": 0, "a": 1, "##a": 2, "##b": 3, "[UNK]": 4}
    return {
        "type": "WordPiece",
        "vocab": vocab,
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": longest,
    }


def write(folder: Path, **parts: Any) -> str:
    end = {"id": 0, "content": "</s>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole = {"version": "1.0", "added_tokens": [end], "model": bpe(), **parts}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return str(path)


@pytest.fixture
def short_time_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(files, "SECONDS", 0.2)
    monkeypatch.setattr(files, "_SINGLE_TEXT_SECONDS", 0.2)
    yield
    for each in threading.enumerate():  # abandoned threads would use CPU time of the next test
        if each.name == "tokenizer":
            each.join()


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": split(EXPONENTIAL)},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(EXPONENTIAL)]}},
        {"normalizer": replace(EXPONENTIAL)},
        {"normalizer": {"type": "Sequence", "normalizers": [replace(EXPONENTIAL)]}},
        {"model": word_pieces(1_000_000)},
    ],
)
def test_slow_encode_is_rejected(
    tmp_path: Path, short_time_limit: None, parts: dict[str, Any]
) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path, **parts))
    text = "a" * 3500 if "model" in parts else SLOW
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        tokenizer.encode(text)
    assert time.monotonic() - begin < 20
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "exceeds the limit of" in str(caught.value)
    assert f"{len(text)} characters starting with 'aaaaaaa" in str(caught.value)


@pytest.mark.parametrize("way", ["encode_chat", "encode_chat_offsets"])
def test_slow_encode_chat_is_rejected(tmp_path: Path, short_time_limit: None, way: str) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path, pre_tokenizer=split(EXPONENTIAL)))
    with pytest.raises(ConfigError, match="of CPU time, for 560 characters"):
        getattr(tokenizer, way)(SLOW)


def test_encode_batch_names_slow_text(tmp_path: Path, short_time_limit: None) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path, pre_tokenizer=split(EXPONENTIAL)))
    with pytest.raises(ConfigError, match="of CPU time, for 563 characters"):
        tokenizer.encode_batch(["one", "two", "aa " + SLOW, "three"])


def test_count_names_text_that_fails_in_library(tmp_path: Path) -> None:
    """The regex engine gives up after 0.15 s, long before the time limit."""
    tokenizer = HuggingFaceTokenizer(write(tmp_path, pre_tokenizer=split("(a+)+$")))
    with pytest.raises(ConfigError, match="retry-limit-in-match over, for 42 characters") as caught:
        tokenizer.count(["one", "b" + "a" * 40 + "!"])
    assert "starting with 'baaaa" in str(caught.value)


def test_slow_record_is_named(tmp_path: Path, short_time_limit: None) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path, pre_tokenizer=split(EXPONENTIAL)))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": each}) + "\n" for each in ("one", SLOW, "two")))
    source = open_source(SourceConfig(source="jsonl", path=str(data)), 0)
    with pytest.raises(ConfigError) as caught:
        build_index(source, tokenizer, None)
    assert f"for {source.where(1)}, 560 characters" in str(caught.value)


def test_slow_decoder_is_rejected(tmp_path: Path, short_time_limit: None) -> None:
    steps = {"type": "Sequence", "decoders": [{"type": "Fuse"}, replace(EXPONENTIAL)]}
    tokenizer = HuggingFaceTokenizer(write(tmp_path, decoder=steps))
    with pytest.raises(ConfigError, match=r"exceeds the limit of 0\.2 s of CPU time"):
        tokenizer.decode(tokenizer.encode(SLOW))
    assert tokenizer.decode(tokenizer.encode("caa")) == "cb"


def test_time_limit_does_not_change_ids(tmp_path: Path) -> None:
    """The second pattern has the same matches but is not on the list of safe patterns."""
    texts = ["Hello  wor1d's end\n\n ", "", "a", " x" * 1000]
    (tmp_path / "other").mkdir()
    plain = HuggingFaceTokenizer(write(tmp_path, pre_tokenizer=split(PUBLISHED[0])))
    other = HuggingFaceTokenizer(
        write(tmp_path / "other", pre_tokenizer=split(f"(?:{PUBLISHED[0]})"))
    )
    assert not plain._is_slow
    assert other._is_slow
    for text, ids in zip(texts, plain.encode_batch(texts), strict=True):
        assert other.encode(text).tolist() == ids.tolist()
        assert other.encode_chat(text).tolist() == plain.encode_chat(text).tolist()
        assert (other.encode_chat_offsets(text)[1] == plain.encode_chat_offsets(text)[1]).all()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (None, False),
        ({"type": "ByteLevel"}, False),
        (split(PUBLISHED[1]), False),
        (split("a"), True),
        (word_pieces(100), False),
        (word_pieces(1000), True),
    ],
)
def test_needs_limit(part: Any, expected: bool) -> None:
    assert files.needs_limit(part) is expected


def test_time_limit_counts_cpu_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is suspended or waits for a CPU does not use up its limit."""
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    assert files.run_with_time_limit(lambda: time.sleep(0.5) or 7, seconds=0.2) == 7


def test_slow_tokenizer_show_exits_with_error(tmp_path: Path) -> None:
    path = write(tmp_path, pre_tokenizer=split(EXPONENTIAL))
    program = (
        "import sys\n"
        "from maxpipe.data.tokenizers import files\n"
        "files.SECONDS = 0.2\n"
        "from maxpipe.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["tokenizer", "show", path, "--text", SLOW]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"tokenizer.path = {path}  [MP-TOK-001]\n")
    assert "remove the offending text" in result.stderr
