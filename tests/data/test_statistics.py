"""`maxpipe data stats`: counts compared with a plain loop, bounded memory, and output files."""

from __future__ import annotations

import collections
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.source import Packing
from maxpipe.data import statistics
from maxpipe.data.packing import Packer
from maxpipe.data.sources import open_source
from maxpipe.data.statistics import DuplicateCounter, Statistics, compute_statistics, measure_texts
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError
from tests.data.conversations import CHATML, CONVERSATIONS, write_records
from tests.data.texts import Texts

QUIET = lambda task, done, total: None  # noqa: E731


def stats_of(
    texts: list[str], sequence_length: int = 16, packing: Packing = "concatenate"
) -> Statistics:
    source, packer = Texts(texts), Packer(packing, sequence_length)
    return compute_statistics(
        "texts", measure_texts(source, ByteTokenizer()), len(texts), packer, QUIET
    )


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    made = ["".join(draw.choices("abé \n", k=draw.randrange(60))) for _ in range(count)]
    return [
        draw.choice(made[: i + 1]) if draw.random() < 0.2 else text for i, text in enumerate(made)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_statistics_match_plain_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_PASS_CHARACTERS", 100)
    made = texts(seed, 300)
    found = stats_of(made)
    lengths = [len(each.encode()) + 2 for each in made]
    assert found.lengths.tolist() == lengths and found.tokens == found.trained == sum(lengths)
    assert found.num_bytes == sum(len(each.encode()) for each in made)
    assert found.empty == sum(not each.strip() for each in made)
    again = [each for each, n in collections.Counter(made).items() for _ in range(n - 1)]
    assert found.duplicates == len(again) > 30
    assert found.duplicate_tokens == sum(len(each.encode()) + 2 for each in again)
    assert found.num_sequences == -(-(sum(lengths) - 1) // 16)
    bins = collections.Counter(length.bit_length() - 1 for length in lengths)
    assert {(a, b): n for a, b, n, _ in found.histogram() if n} == {
        (1 << i if i else 0, (2 << i) - 1): n for i, n in bins.items()
    }
    assert sum(row[3] for row in found.histogram()) == sum(lengths)
    assert found.quantiles()["0%"] == min(lengths) and found.quantiles()["100%"] == max(lengths)
    assert found.quantiles()["50%"] == sorted(lengths)[149]


def test_sequence_counts_match_packing() -> None:
    made = ["a" * length for length in (14, 3, 9, 1, 29, 0)]  # 16, 5, 11, 3, ... with BOS and EOS
    targets = 15 + 4 + 10 + 2 + 30 + 1
    for packing, rows in {"concatenate": 5, "first_fit": 5, "best_fit": 5, "pad": 7}.items():
        found = stats_of(made, packing=packing)  # type: ignore[arg-type]
        assert found.num_sequences == rows and found.efficiency == targets / (16 * rows)
        assert found.to_dict()["packing"] == packing
        assert found.to_dict()["longer_than_a_sequence"] == found.too_long == 1


def test_duplicates_are_estimated_in_bounded_memory() -> None:
    """40,000 distinct contents, each twice; the counter keeps at most 1000 digests."""
    contents, draw = DuplicateCounter(1000), random.Random(1)
    for digest in [draw.getrandbits(64) for _ in range(40_000)] * 2:
        contents.add(digest, 7)
        assert len(contents._digests) <= 1000
    repeated, tokens = contents.repeated()
    assert contents.shift == 7 and tokens == 7 * repeated
    # Four standard deviations of a Poisson count of about 312 contents.
    assert abs(repeated / 40_000 - 1) < 4 / np.sqrt(312)


def test_statistics_without_documents() -> None:
    found = stats_of([])
    assert found.tokens == found.num_sequences == found.duplicates == 0
    assert found.to_dict()["bytes_per_token"] is None and found.histogram() == []
    assert stats_of([""]).to_dict()["empty"] == 1


# --- the command ---------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["data", "stats", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write text files, one with invalid UTF-8 and one with U+FFFD; return CLI arguments."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate([b"one two three", b" \n", b"one two three", b"four \x1b[31m"]):
        (folder / f"{number}.txt").write_bytes(text)
    (folder / "4.txt").write_bytes(b"cut \xff off")
    (folder / "5.txt").write_text("a \ufffd b")
    return ["quickstart", "data.source=text", "data.path=texts", "train.sequence_length=16"]


def test_data_stats_json_output(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(printed(capsys, *run, "--json"))
    assert found["documents"] == 5 and found["unreadable"] == 1
    assert "4.txt" in found["first_unreadable"]
    assert found["empty"] == found["duplicates"] == found["with_replaced_bytes"] == 1
    assert found["tokens"] == 13 + 2 + 13 + 10 + 7 + 10 and found["bytes"] == 45
    assert found["sequences"] == 4 and found["packing_efficiency"] == round(50 / 64, 6)
    assert found["duplicate_tokens"] == 15


def test_stats_report_unreadable_records_if_skipped(
    run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """If skipped, they are empty documents in training and in a prepared folder."""
    found: dict[str, Any] = json.loads(printed(capsys, *run, "--json"))
    skip = [*run, "data.bad_records=skip"]
    assert json.loads(printed(capsys, *skip, "--json")) == found
    assert main(["data", "prepare", *skip, "--out", "tokens", "--workers", "1"]) == 0
    capsys.readouterr()
    tokens = [*run, "data.source=tokens", "data.path=tokens"]
    prepared = json.loads(printed(capsys, *tokens, "--json"))
    assert prepared["unreadable"] == 1 and prepared["documents"] == 6
    assert "unreadable  1, written as empty documents by prepare" in printed(capsys, *tokens)


def test_deleted_file_is_not_an_unreadable_record(
    run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_source(DataConfig(source="text", path="texts"), 0)
    Path("texts/3.txt").unlink()
    with pytest.raises(ConfigError, match=r"3\.txt .*\n  must be readable"):
        list(measure_texts(source, ByteTokenizer()))


def test_data_stats_text_output(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *run)
    assert "1 empty" in out and "unreadable  1" in out and "0.82 per token" in out
    assert "78.12%" in out and "#" in out
    assert all(each.isprintable() or each == "\n" for each in out)


def test_data_stats_html_output(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The page is self-contained and deterministic."""
    printed(capsys, *run, "--out", "a.html")
    page = Path("a.html").read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "78.12%" in page
    assert (
        "<script" not in page and page.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    )
    printed(capsys, *run, "--out", "b.html")
    assert Path("b.html").read_text() == page


def test_data_stats_png_output(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    printed(capsys, *run, "--out", "a.png")
    image = Image.open(io.BytesIO(Path("a.png").read_bytes()))
    assert image.size[0] == 2 * 760 and len(image.convert("RGB").getcolors(1 << 20) or ()) > 4


@pytest.mark.parametrize(("out", "code"), [("a.pdf", 2), ("nowhere/a.html", 74)])
def test_data_stats_rejects_invalid_output_path(
    out: str, code: int, run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "stats", *run, "--out", out]) == code
    assert "--out" in capsys.readouterr().err


def test_data_stats_of_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(CHATML)
    records: list[Any] = [{"messages": each} for each in [*CONVERSATIONS, CONVERSATIONS[0]]]
    write_records(tmp_path / "a.jsonl", [*records, {"messages": []}])
    inputs = ["quickstart", "data.source=jsonl", "data.path=a.jsonl", "data.chat=messages"]
    found = json.loads(printed(capsys, *inputs, "data.chat_template=chat.jinja", "--json"))
    assert found["documents"] == 5 and found["unreadable"] == found["duplicates"] == 1
    assert "a.jsonl:6" in found["first_unreadable"]
    assert 0 < found["tokens_trained"] < found["tokens"]
