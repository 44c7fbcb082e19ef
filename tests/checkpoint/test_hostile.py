"""Run folders with hostile content, which is either skipped or reported with a clear error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maxpipe import hardware
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, files, find_checkpoint_home
from maxpipe.cli import main
from maxpipe.errors import MaxpipeError
from maxpipe.launch.job import newest_step
from maxpipe.launch.local import ProcessLog
from maxpipe.telemetry import goodput
from maxpipe.telemetry.writers import EventLog, MetricWriter

Capture = pytest.CaptureFixture[str]

TIME = "2026-01-01T00:00:00Z"
DEEP = "[" * 20_000


def _texts() -> dict[str, bytes]:
    records = {
        "endless times": {"time": TIME, "event": "begin", "uptime": 1e308},
        "late": {"time": "9999-12-31T23:59:59-14:00", "event": "begin", "uptime": -1e300},
        "texts as numbers": {"time": TIME, "event": "start", "step": "9", "seconds": {"x": "1"}},
        "numbers as objects": {"time": 7, "event": [], "step": {}, "format": [], "files": 3},
        "lists": {"version": [1], "files": [{}], "sha256": 1, "facts": [], "config": [], "data": 0},
        "huge whole number": {"step": 10**4000, "format": 10**30, "time": TIME, "event": "time"},
        "control characters": {"\x1b]0;x\x07": "\x1b[31m\r\n\u202e", "event": "\x1b[2J"},
        "half of a pair": {"time": "\ud800", "event": "\udfff", "step": 1},
    }
    found = {name: json.dumps(record).encode() + b"\n" for name, record in records.items()}
    infinite = b'{"time": Infinity, "event": "begin", "uptime": NaN, "step": -Infinity, '
    infinite += b'"format": 2, "config": {}, "data": {}, "metrics": {"eval/loss": Infinity}}\n'
    return found | {
        "empty": b"",
        "binary": bytes(range(256)) * 40,
        "deep": DEEP.encode(),
        "deep objects": b'{"step":' * 20_000,
        "infinite": infinite,
        "many digits": b'{"step": ' + b"9" * 100_000 + b"}\n",
        "one long line": b"x" * (3 << 20),
        "yaml": b"run: {name: [" + b"{a: " * 2000 + b"\n\x1b[31m: 1\n",
    }


TEXTS = _texts()
ODD = ("pipe", "folder", "dangling link", "link to itself", "device", "gigantic")
HOSTILE = (*TEXTS, *ODD)
SOME = ("binary", "deep", "numbers as objects", "infinite", "control characters", "pipe")
"""Cases that once caused a traceback or a hang. The others run in `make test-faults` only."""
SOME_FIRST = [*SOME, *(pytest.param(k, marks=pytest.mark.faults) for k in HOSTILE if k not in SOME)]


def plant(path: Path, kind: str) -> None:
    """Replace a file with hostile content of this kind."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "gigantic":
        path.touch()
        os.truncate(path, 1 << 42)
    else:
        path.write_bytes(TEXTS[kind])


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"the call did not return within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(capsys: Capture, *arguments: object) -> str:
    """Return a command's output; it must end in time with a documented exit code, no traceback."""
    with at_most(60):
        code = main([str(each) for each in arguments])
    printed = "".join(capsys.readouterr())
    assert code in (0, 2, 74), printed
    assert "Traceback" not in printed
    assert all(each.isprintable() or each == "\n" for each in printed), repr(printed)[:400]
    return printed


@pytest.mark.fault("H1")
@pytest.mark.parametrize("kind", HOSTILE)
def test_goodput_on_hostile_event_logs(kind: str, tmp_path: Path, capsys: Capture):
    plant(tmp_path / "events.jsonl", kind)
    run(capsys, "goodput", tmp_path)
    run(capsys, "goodput", tmp_path, "--json")


@pytest.mark.fault("H1")
@pytest.mark.parametrize("kind", HOSTILE)
def test_commands_on_hostile_configs(kind: str, tmp_path: Path, capsys: Capture):
    path = tmp_path / "config.yml"
    plant(path, kind)
    run(capsys, "config", "print", path)
    run(capsys, "schedule", path)
    run(capsys, "schedule", f"file:{path}")
    run(capsys, "plan", path, "--topology", "v5p:2x2x1")
    with contextlib.suppress(MaxpipeError):
        find_checkpoint_home(tmp_path)


@pytest.mark.fault("H1")
@pytest.mark.parametrize("name", ["config.yml", "manifest.json", "facts/metadata"])
@pytest.mark.parametrize("kind", SOME_FIRST)
def test_commands_on_hostile_checkpoint_files(name: str, kind: str, copy: Path, capsys: Capture):
    plant(copy / name if name == "config.yml" else copy / CHECKPOINTS_FOLDER / "6" / name, kind)
    run(capsys, "checkpoints", "list", copy)
    run(capsys, "checkpoints", "verify", copy)
    run(capsys, "checkpoints", "show", copy, "--step", 6)
    run(capsys, "checkpoints", "diff", f"{copy}@3", f"{copy}@6")
    run(capsys, "checkpoints", "prune", copy, "--keep", 1)
    assert (copy / CHECKPOINTS_FOLDER / "3").is_dir() or name == "config.yml"


@pytest.mark.fault("H1")
@pytest.mark.parametrize("kind", ["empty", "deep", "binary", "pipe", "lists", "gigantic"])
def test_hostile_orbax_metadata_without_manifest(kind: str, copy: Path, capsys: Capture):
    """Without a manifest, orbax reads files that were not verified."""
    (copy / CHECKPOINTS_FOLDER / "6" / "manifest.json").unlink()
    (copy / CHECKPOINTS_FOLDER / "6" / "commit_success.txt").touch()
    plant(copy / CHECKPOINTS_FOLDER / "6" / "state" / "_METADATA", kind)
    run(capsys, "checkpoints", "show", copy)
    run(capsys, "checkpoints", "list", copy)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_verify_reports_gigantic_array_index(has_manifest: bool, copy: Path) -> None:
    """Without a size check, a failed allocation in tensorstore would abort the process."""
    step = copy / CHECKPOINTS_FOLDER / "6"
    if not has_manifest:
        (step / "manifest.json").unlink()
        (step / "commit_success.txt").touch()
    plant(step / "state" / "manifest.ocdbt", "gigantic")
    command = [sys.executable, "-m", "maxpipe", "checkpoints", "verify", str(copy)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode == 74, completed
    assert (
        "Traceback" not in completed.stderr
        and "state/manifest.ocdbt" in completed.stdout + completed.stderr
    )


@pytest.mark.fault("H1")
@pytest.mark.parametrize("kind", HOSTILE)
def test_start_survives_hostile_log_files(kind: str, tmp_path: Path):
    """Records may be lost or warned about, but nothing hangs or is written through a link."""
    plant(tmp_path / "metrics.jsonl", kind)
    plant(tmp_path / "events.jsonl", kind)
    with at_most(20):
        assert newest_step(tmp_path, "gs://bucket") in (None, 1)
        MetricWriter(tmp_path, tensorboard=False, resume_step=3).write(4, {"train/loss": 1.0})
        EventLog(tmp_path).write("begin")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.fault("H1")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_hardware_measurements_are_rejected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plant(tmp_path / "x.yml", kind)
    monkeypatch.setattr(hardware, "measured_folder", lambda: tmp_path)
    hardware.known_hardware.cache_clear()
    try:
        with at_most(20), pytest.raises(MaxpipeError):
            hardware.known_hardware()
    finally:
        hardware.known_hardware.cache_clear()


@pytest.mark.fault("H1")
@pytest.mark.parametrize("name", ["a" * 300, "a\nb\x1b[31m", "\udcff", "x" * 5000, ""])
def test_commands_on_hostile_folder_names(name: str, tmp_path: Path, capsys: Capture):
    for command in ("goodput", "checkpoints list", "checkpoints verify", "config print"):
        run(capsys, *command.split(), f"{tmp_path}/{name}")
    run(capsys, "config", "print", f"{tmp_path}/{name}.yml")


# --- writing and deleting ---------------------------------------------------------------------


@pytest.mark.fault("H2")
@pytest.mark.parametrize("kind", ["dangling link", "pipe", "link"])
def test_process_log_is_not_written_through_links_or_pipes(kind: str, tmp_path: Path):
    mine, log = tmp_path / "mine", tmp_path / "logs" / "process-0.log"
    mine.write_text("mine\n")
    log.parent.mkdir()
    if kind == "link":
        log.symlink_to(mine)
    else:
        plant(log, kind)
    with at_most(10), pytest.raises(MaxpipeError, match="process-0.log: cannot be written"):
        ProcessLog(log).open_attempt(1, "maxpipe train")
    assert mine.read_text() == "mine\n" and not (log.parent / "nowhere").exists()


def _by_config(own: Path, other: Path) -> None:
    shutil.rmtree(own / CHECKPOINTS_FOLDER)
    text = f"checkpoint: {{dir: {other.parent}}}\nrun: {{name: {other.name}}}\ntrain: {{steps: 1}}"
    tiny = Path(__file__).parents[2] / "configs/model/tiny.yml"
    (own / "config.yml").write_text(f"{tiny.read_text()}\n{text}\n")


def _by_link(own: Path, other: Path) -> None:
    shutil.rmtree(own / CHECKPOINTS_FOLDER)
    (own / CHECKPOINTS_FOLDER).symlink_to(other / CHECKPOINTS_FOLDER)


@pytest.mark.fault("H3")
@pytest.mark.parametrize("lead", [_by_config, _by_link])
def test_prune_of_redirected_checkpoints_requires_elsewhere(
    lead: Callable[[Path, Path], None], saved: Path, copy: Path, tmp_path: Path, capsys: Capture
):
    """A config or link in an untrusted run folder refers to the checkpoints of another run."""
    other = tmp_path / "other"
    shutil.copytree(saved, other)
    lead(copy, other)
    for dry in ([], ["--dry-run"]):
        output = run(capsys, "checkpoints", "prune", copy, "--keep", 1, *dry)
        assert f"are in {other / CHECKPOINTS_FOLDER}" in output and "--elsewhere" in output
    assert sorted(os.listdir(other / CHECKPOINTS_FOLDER)) == ["3", "6"]
    run(capsys, "checkpoints", "prune", copy, "--keep", 1, "--elsewhere")
    assert os.listdir(other / CHECKPOINTS_FOLDER) == ["6"]


@pytest.mark.fault("H3")
def test_prune_deletes_link_but_not_its_target(copy: Path, tmp_path: Path, capsys: Capture):
    outside = Path(shutil.copytree(copy / CHECKPOINTS_FOLDER / "3", tmp_path / "outside"))
    before = sorted(outside.rglob("*"))
    shutil.rmtree(copy / CHECKPOINTS_FOLDER / "3")
    (copy / CHECKPOINTS_FOLDER / "3").symlink_to(outside)
    run(capsys, "checkpoints", "prune", copy, "--keep", 1)
    assert sorted(outside.rglob("*")) == before
    assert os.listdir(copy / CHECKPOINTS_FOLDER) == ["6"]


@pytest.mark.fault("H1")
def test_cyclic_links_are_not_followed(copy: Path, capsys: Capture):
    """Following two links to their own folder would produce 2**40 paths."""
    for name in ("a", "b"):
        (copy / CHECKPOINTS_FOLDER / "6" / name).symlink_to(copy / CHECKPOINTS_FOLDER / "6")
    with at_most(10):
        assert len(files(copy / CHECKPOINTS_FOLDER / "6")) < 100  # type: ignore[arg-type]
        run(capsys, "checkpoints", "list", copy)


# --- goodput ----------------------------------------------------------------------------------


@pytest.mark.fault("H1")
def test_goodput_skips_malformed_records(tmp_path: Path):
    good = [
        {"event": "begin", "uptime": 0.0},
        {"event": "start", "uptime": 2.0, "step": 0, "seconds": {"compiling": 2.0}},
        {"event": "time", "uptime": 12.0, "step": 10, "seconds": {"step": 10.0}},
    ]
    lines = [json.dumps({"time": TIME} | record).encode() + b"\n" for record in good]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    expected = goodput.goodput_to_dict(goodput.read_goodput(tmp_path))
    bad = b"".join(text.rstrip(b"\n") + b"\n" for text in TEXTS.values())
    (tmp_path / "events.jsonl").write_bytes(bad.join(lines))
    assert goodput.goodput_to_dict(goodput.read_goodput(tmp_path)) == expected
    assert re.search(r"productive steps", goodput.format_goodput(goodput.read_goodput(tmp_path)))


def test_goodput_of_long_event_log_is_fast(tmp_path: Path):
    """The time used to be quadratic in the number of records."""
    with (tmp_path / "events.jsonl").open("w") as file:
        file.write(json.dumps({"time": TIME, "event": "begin", "uptime": 0.0}) + "\n")
        for step in range(1, 20_001):
            record = {"time": TIME, "event": "time", "step": step, "seconds": {"step": 1.0}}
            file.write(json.dumps(record) + "\n")
    with at_most(20):
        assert goodput.read_goodput(tmp_path).seconds[goodput.PRODUCTIVE] == 20_000
