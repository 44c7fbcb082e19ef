"""`maxpipe data show` and `data find`: the rows of a step as text that is safe for terminals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.data.datasets import build_datasets
from maxpipe.data.inspect_batch import TextSpan, inspect_sequence, iterate_text_spans
from maxpipe.data.tokenizer import ByteTokenizer
from tests.data.conversations import CHATML, CONVERSATIONS, write_records

SIZES = ("train.batch_size=4", "train.sequence_length=64", "pipeline.microbatches=1")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write documents, some with terminal control sequences; return CLI arguments."""
    monkeypatch.chdir(tmp_path)
    texts = [f"document {i} " * (1 + i * 5 % 11) for i in range(40)]
    texts[7::6] = ["\x1b]0;title\x07\x1b[31mred \u202egnp.exe\r\n\ttab \x9b5m"] * 6
    write_records(tmp_path / "a.jsonl", [{"text": each} for each in texts])
    inputs = ["quickstart", "data.source=jsonl", "data.path=a.jsonl", *SIZES]
    return [*inputs, "data.validation_fraction=0.1", "run.seed=5"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["data", *arguments]) == code
    found = capsys.readouterr()
    return found.out if not code else found.err


# --- pieces --------------------------------------------------------------------------------------


def spans_of(text: str, trained: str) -> list[tuple[str, bool]]:
    """Split the bytes of a text into spans; `trained` has a 1 for each trained byte."""
    ids = ByteTokenizer().encode(text)
    mask = np.array([each == "1" for each in trained])
    return [each[:2] for each in iterate_text_spans(ByteTokenizer(), ids, mask)]


def test_text_spans_split_where_mask_changes() -> None:
    assert spans_of("abcdef", "001100") == [("ab", False), ("cd", True), ("ef", False)]
    assert spans_of("abc", "111") == [("abc", True)]
    assert list(iterate_text_spans(ByteTokenizer(), np.zeros(0, int), np.zeros(0, bool))) == []


def test_text_spans_never_split_a_character() -> None:
    """A character belongs to the span of its last byte; an incomplete one is shown as U+FFFD."""
    assert spans_of("aéb", "0011") == [("a", False), ("éb", True)]
    ids = np.array([97, 0xC3, 257, 0xC3])
    found = list(iterate_text_spans(ByteTokenizer(), ids, np.ones(4, bool)))
    texts = [("a\ufffd", False), ("<end>", True), ("\ufffd", False)]
    assert found == [TextSpan(text, True, is_control) for text, is_control in texts]


def test_text_that_spells_control_token_is_not_control() -> None:
    ids = np.concatenate([[256], ByteTokenizer().encode("<end>"), [257]])
    found = list(iterate_text_spans(ByteTokenizer(), ids, np.append(False, np.ones(6, bool))))
    assert [each.is_control for each in found] == [True, False, True]
    assert [each.text for each in found] == ["<begin>", "<end>", "<end>"]


# --- rows ----------------------------------------------------------------------------------------


def test_inspected_rows_match_training_batches(run: list[str]) -> None:
    """Compares segments, mask and documents of many rows."""
    datasets = build_datasets(load(run).config, lambda: None)
    found, whole = datasets.train, 0
    tokenizer = datasets.tokenizer
    for batch in range(30):
        arrays = found.batch(batch)
        for row in range(4):
            seen = inspect_sequence(found, tokenizer, batch, row)
            assert seen.sequence == found.batch_contents(batch)["sequences"][row]
            assert {each.document for each in seen.segments} <= {
                *found.batch_contents(batch)["documents"]
            }
            mask = arrays["loss_mask"][row]
            assert sum(each.num_trained for each in seen.segments) == mask.sum()
            assert mask.sum() >= 40 or seen.num_padding > 20
            assert seen.num_padding == (arrays["segment_ids"][row] == 0).sum()
            for each in seen.segments:
                source = json.loads(Path("a.jsonl").read_text().splitlines()[each.document])
                inside = "".join(p.text for p in each.pieces if not p.is_control)
                assert inside in source["text"] and each.where == f"a.jsonl:{each.document + 1}"
                is_whole = each.num_tokens == each.document_tokens
                whole += is_whole
                assert not is_whole or inside == source["text"]
    assert whole > 20
    datasets.close()


def test_data_show_redirected_output(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints three rows without colors or control sequences."""
    out = printed(capsys, "show", *run)
    heads = [line for line in out.split("\n") if line.startswith("=== ")]
    assert [each[: each.index(":")] for each in heads] == [f"=== step 1 row {i}" for i in range(3)]
    assert "⟦<begin>⟧document" in out and "<end>" in out and "a.jsonl:" in out
    one = printed(capsys, "show", *run, "--step", "1", "--row", "1")
    assert one in out and one.count("=== ") == 1
    next_step = printed(capsys, "show", *run, "--row", "3", "-n", "2")
    assert "=== step 1 row 3" in next_step and "=== step 2 row 0" in next_step


def test_control_characters_are_escaped(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    everything = printed(capsys, "show", *run, "-n", "80")
    assert r"\x1b]0;title\x07\x1b[31mred \u202egnp.exe\r" in everything
    assert "\n\ttab \\x9b5m" in everything
    assert not [c for c in everything if not c.isprintable() and c not in "\n\t"]


def test_data_show_terminal_output(
    run: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = printed(capsys, "show", *run, "-n", "80")
    assert "\x1b[90m<begin>\x1b[0mdocument" in out and "\x1b[36m<end>\x1b[0m" in out
    assert r"\x1b[31mred" in out and "\x1b[31m" not in out and "⟦" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(capsys, "show", *run)


def test_data_show_validation_split(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints each validation document once and no padding rows."""
    out = printed(capsys, "show", *run, "--split", "validation", "-n", "1000")
    numbers = {line.split()[2] for line in out.split("\n") if line.startswith("--- document")}
    assert len(numbers) == 4
    nothing = [*run, "data.validation_fraction=0", "eval.batches=0"]
    error = printed(capsys, "show", *nothing, "--split", "validation", code=2)
    assert "data.validation_fraction" in error


def test_data_show_marks_untrained_conversation_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(CHATML)
    write_records(tmp_path / "a.jsonl", [{"messages": each} for each in CONVERSATIONS[:1] * 9])
    inputs = ["quickstart", "data.source=jsonl", "data.path=a.jsonl", "data.chat=messages"]
    inputs += ["data.chat_template=chat.jinja", "train.sequence_length=256"]
    out = printed(capsys, "show", *inputs, "-n", "1")
    asked = "⟦<|im_start|>user\nWhere is the station?<|im_end|>\n<|im_start|>assistant\n⟧"
    assert f"{asked}Behind the market, on the left.<|im_end|>⟦\n⟧" in out


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--row", "4"], "row = 4"),
        (["--row", "-1"], "minimum of 0"),
        (["--step", "0"], "minimum of 1"),
        (["--step", "100000000001"], "maximum of 100000000000"),
        (["--step", "9" * 40], "maximum of 100000000000"),
        (["--step", "70", "data.end=stop"], "would read batch 70, but the last batch is"),
    ],
)
def test_data_show_rejects_invalid_rows_and_steps(
    arguments: list[str], where: str, run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert where in printed(capsys, "show", *run, *arguments, code=2)


def test_data_show_accepts_maximum_step(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    last = ["--step", "100000000000", "--row", "3"]
    assert "=== step 100000000000 row 3: " in printed(capsys, "show", *run, *last)


# --- find ----------------------------------------------------------------------------------------


def test_data_find_names_files_and_lines(
    run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents are named as in events of bad steps, in row order."""
    first, *rest = run
    found: dict[str, Any] = json.loads(printed(capsys, "find", first, "6", "2", *rest, "--json"))
    datasets = build_datasets(load(run).config, lambda: None)
    place = datasets.train.sequence_origins(5)[2]
    datasets.close()
    assert found["batch"] == 5 and found["sequence"] == place.sequence
    assert [each["document"] for each in found["documents"]] == place.documents
    assert [each["where"] for each in found["documents"]] == [
        f"a.jsonl:{number + 1}" for number in place.documents
    ]
    assert sum(each["tokens"] for each in found["documents"]) >= 64
    text = printed(capsys, "find", first, "6", "2", *rest)
    assert all(each["where"] in text for each in found["documents"])


def test_data_find_uses_run_config_and_rollbacks(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses the run's config and accounts for batches skipped by rollbacks."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    config = printed_config(capsys, run)
    (folder / "config.yml").write_text(config)
    first, *rest = run
    wanted = json.loads(printed(capsys, "find", first, "9", "1", *rest, "--json"))
    for name in ("mine", "runs/mine", str(folder)):
        found = json.loads(printed(capsys, "find", name, "9", "1", "--json"))
        assert found == wanted
    for event in ("roll_back", "rollback"):  # the first name is from earlier releases
        (folder / "events.jsonl").write_text(f'{{"event": "{event}", "step": 5, "to": 2}}\n')
        found = json.loads(printed(capsys, "find", "mine", "6", "1", "--json"))
        assert found == wanted | {"step": 6}
    assert "=== step 6 row 1" in printed(capsys, "show", "mine", "--step", "6", "--row", "1")


def printed_config(capsys: pytest.CaptureFixture[str], inputs: list[str]) -> str:
    assert main(["config", "print", *inputs]) == 0
    return capsys.readouterr().out


def test_file_name_with_line_break_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file name cannot imitate the heading of another document."""
    name = "a\n--- document 7.txt"
    (tmp_path / name).write_text("some text " * 40)
    inputs = ["quickstart", "data.source=text", f"data.path={tmp_path}", f"run.dir={tmp_path}/runs"]
    inputs += ["data.validation_fraction=0", "eval.batches=0"]
    assert main(["data", "show", *inputs, "-n", "1"]) == 0
    assert main(["data", "find", *inputs[:1], "1", "0", *inputs[1:]]) == 0
    out = capsys.readouterr().out
    assert out.count("a\\n--- document 7.txt") == 2 and "\n--- document 7" not in out
