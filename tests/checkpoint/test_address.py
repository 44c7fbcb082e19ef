"""Addresses of runs and checkpoints, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.checkpoint.address import Address, Step, parse_address, parse_run_address, run_names
from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.huggingface.output_folder import atomic_folder


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with runs `quick` and `slow`, and a folder that is not a run."""
    for name in ("quick", "slow"):
        (tmp_path / "runs" / name / "checkpoints" / "120").mkdir(parents=True)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(text: str) -> tuple[str, Step, str]:
    found = parse_address(text)
    assert found.given == text
    return found.run_dir, found.step, found.parent


def error_lines(text: str, where: str = "", runs: str = "") -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_address(text, where, runs)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("text", "run_dir", "step", "parent"),
    [
        ("quick", "runs/quick", None, ""),
        ("runs/quick", "runs/quick", None, ""),
        ("./runs/quick/", "runs/quick", None, ""),
        ("runs/empty", "runs/empty", None, ""),
        ("docs", "docs", None, ""),
        ("quick@120", "runs/quick", 120, ""),
        ("quick@7", "runs/quick", 7, ""),
        ("runs/quick@newest", "runs/quick", "newest", ""),
        ("quick@best", "runs/quick", "best", ""),
        ("runs/quick/checkpoints/120", "runs/quick", 120, "runs/quick"),
        ("runs/quick/checkpoints/120/", "runs/quick", 120, "runs/quick"),
        ("runs/quick/checkpoints/7", "runs/quick", 7, "runs/quick"),
        ("runs/quick/checkpoints", "runs/quick", None, "runs/quick"),
        ("runs/quick/checkpoints@best", "runs/quick", "best", "runs/quick"),
        ("gs://b/runs/a", "gs://b/runs/a", None, ""),
        ("gs://b/runs/a/", "gs://b/runs/a", None, ""),
        ("gs://b/runs/a@newest", "gs://b/runs/a", "newest", ""),
        ("gs://b/a/checkpoints/120/", "gs://b/a", 120, "gs://b/a"),
        ("gs://b/a/checkpoints@5", "gs://b/a", 5, "gs://b/a"),
        ("gs://b/a@c", "gs://b/a@c", None, ""),
    ],
)
def test_parse_address_of_runs_and_steps(text: str, run_dir: str, step: Step, parent: str):
    assert parse(text) == (run_dir, step, parent)


def test_address_relative_to_checkpoints_folder(workspace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workspace / "runs/quick/checkpoints")
    folder = str(workspace / "runs/quick")
    assert parse("120") == (folder, 120, folder)
    assert parse(".") == (folder, None, folder)
    assert parse("..") == ("..", None, "")


def test_run_name_containing_at_sign_is_ambiguous(workspace: Path):
    (workspace / "runs/quick@120/checkpoints").mkdir(parents=True)
    where, rule, action = error_lines("quick@120")
    assert where == "command line: quick@120  [MP-CKPT-009]"
    assert rule == "is ambiguous: both the folder runs/quick@120 and step 120 of runs/quick exist."
    for address, wanted in zip(
        action.removeprefix("Write ").removesuffix(".").split(" to select the folder, or "),
        [("runs/quick@120", "newest", ""), ("runs/quick", 120, "runs/quick")],
        strict=True,
    ):
        written = address.removesuffix(" to select the step")
        assert parse(written if "/" not in written else f"runs/{written}") == wanted
    assert parse("quick@120@7") == ("runs/quick@120", 7, "")
    assert parse("./runs/quick@120@best") == ("runs/quick@120", "best", "")
    (workspace / "runs/slow@x/checkpoints").mkdir(parents=True)
    assert parse("slow@x") == ("runs/slow@x", None, "")


def test_same_run_name_in_two_folders_is_ambiguous(workspace: Path):
    (workspace / "quick/checkpoints").mkdir(parents=True)
    _, rule, action = error_lines("quick@7")
    assert rule.startswith("is ambiguous: quick and runs/quick ")
    assert action == "Write ./quick or runs/quick."
    assert parse("./quick") == ("quick", None, "")
    (workspace / "empty").mkdir()
    assert parse("empty")[0] == "empty"
    (workspace / "slow").mkdir()  # not a run, so `runs/slow` is used
    assert parse("slow")[0] == "runs/slow"
    (workspace / "linked").symlink_to(workspace / "runs/slow")
    (workspace / "runs/linked").symlink_to(workspace / "runs/slow")
    assert parse("linked")[0] == "linked"


def test_run_named_checkpoints_or_with_numeric_name(workspace: Path):
    (workspace / "checkpoints/120/checkpoints/3").mkdir(parents=True)
    (workspace / "runs/checkpoints/checkpoints").mkdir(parents=True)
    assert parse("checkpoints/120") == ("checkpoints/120", None, "")
    assert parse("checkpoints/120/checkpoints/3") == ("checkpoints/120", 3, "checkpoints/120")
    assert parse("runs/checkpoints") == ("runs/checkpoints", None, "")


def test_unknown_run_suggests_similar_names(workspace: Path):
    where, rule, action = error_lines("quikc@120")
    assert where == "command line: quikc@120  [MP-CKPT-009]"
    assert rule.startswith("is not a run: ") and "runs/quikc" in rule
    assert action == "Did you mean quick?"
    assert error_lines("runs/slw")[2] == "Did you mean runs/slow?"
    assert error_lines("zzz")[2] == "The runs in runs are quick, slow."
    (workspace / "runs/refused/checkpoints").mkdir(parents=True)  # left by a failed start
    assert error_lines("zzz")[2] == "The runs in runs are quick, slow."
    assert error_lines("nowhere/zzz")[2].startswith("Give the folder of a run")
    where, _, action = error_lines("qick", "my.yml:3: checkpoint.restore_from", "runs")
    assert where == "my.yml:3: checkpoint.restore_from = qick  [MP-CKPT-009]"
    assert action == "Did you mean quick?"
    for number in range(20):
        (workspace / f"many/{number}/checkpoints/4").mkdir(parents=True)
    assert error_lines("zzz", "key", "many")[2].endswith(" and 12 more.")
    assert parse_address("17", "key", "many").run_dir == "many/17"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must name a run."),
        ("  ", "must name a run."),
        ("@5", "is not a run"),
        ("quick@", "must be RUN@STEP"),
        ("quick@oldest", "must be RUN@STEP"),
        ("quick@-1", "must be RUN@STEP"),
        ("quick@1.5", "must be RUN@STEP"),
        ("quick@" + "1" * 5000, "must be RUN@STEP"),
        ("quick@١", "must be RUN@STEP"),
        ("runs/quick/checkpoints/120@7", "names a step twice."),
        ("gs://b/a/checkpoints/120@7", "names a step twice."),
        ("quick\0", "must name a run."),
        ("x" * 5000, "is not a run"),
        ("~nobody-here/run", "home folder"),
        ("runs/quick/config.yml", "is a file"),
        ("s3://", "must contain a bucket name."),
        ("gs:///runs/a", "must contain a bucket name."),
        ("s3:/bucket/runs/a", "two slashes"),
        ("S3://bucket/runs/a", "lowercase"),
    ],
)
def test_invalid_addresses_are_rejected(text: str, rule: str, workspace: Path):
    (workspace / "runs/quick/config.yml").write_text("")
    assert rule in error_lines(text)[1]


def test_parse_run_address_rejects_steps():
    assert parse_run_address("quick").run_dir == "runs/quick"
    for text in ("quick@120", "runs/quick/checkpoints/120"):
        with pytest.raises(ConfigError, match=r"names a step.*\n  Give runs/quick\."):
            parse_run_address(text)


def test_address_at_other_step():
    assert parse_address("quick@120").address_at(7) == "runs/quick@7"
    assert Address("x", "runs/a", parent="/saved/a").address_at(7) == "/saved/a@7"
    assert run_names("nowhere") == []


@pytest.mark.parametrize(
    "command",
    [
        ("export", "quick", "OUT"),
        ("tokenizer", "train", "text.txt", "--vocab-size", "300", "--out", "OUT"),
        ("data", "prepare", "data.source=text", "data.path=text.txt", "--out", "OUT"),
        ("curves", "quick", "--out", "OUT.svg"),
    ],
)
def test_output_inside_checkpoints_folder_is_rejected(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "quick" / "checkpoints"
    for name in ("state", "facts"):
        (folder / "5" / name).mkdir(parents=True)
    (folder.parent / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    Path("text.txt").write_text("some words of a text\n" * 50)
    Path("link").symlink_to(folder)
    before = sorted(folder.rglob("*"))
    outs = ("runs/quick/checkpoints/x", "runs/quick/checkpoints/5/state/x", "link/x")
    for out in outs:
        given = [each.replace("OUT", out) for each in command]
        if command[0] == "export":
            with pytest.raises(ConfigError) as caught, atomic_folder(out, "command line: OUT"):
                pass
            message = str(caught.value)
        else:
            assert main(given) == 2
            message = capsys.readouterr().err
        assert f"must be outside {folder}, " in message, message
    assert sorted(folder.rglob("*")) == before
