"""Runs whose folder is in S3: train, resume on another host, use, kill and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint import run_copy
from maxpipe.checkpoint.run_copy import RunCopy, download, folder_of_records
from maxpipe.checkpoint.storage import checkpoint_home, copy_folder, run_folder, url_of_copy
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.run import RunConfig
from maxpipe.errors import ConfigError, StorageError
from tests.errors import raises
from tests.s3 import KEY, SECRET, Store
from tests.waiting import wait_until

Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture
ROOT = Path(__file__).parents[2]
RUNS = "s3://bucket/runs"
RUN = f"{RUNS}/a"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))
    return tmp_path / "host"


def settings(*more: str) -> list[str]:
    return [
        str(ROOT / "configs/model/tiny.yml"),
        f"run.dir={RUNS}",
        "run.name=a",
        *("data.source=synthetic", "train.sequence_length=16", "train.batch_size=8"),
        *("mesh.cpu_devices=8", "mesh.ici_data=8"),
        *("checkpoint.every=2", "eval.every=0", "log.every=1", "runtime.platform=cpu"),
        *("runtime.compilation_cache=", "optim.warmup_steps=1"),
        *more,
    ]


def records(s3: Store) -> list[int]:
    text = s3.filesystem.cat_file(f"{RUN}/metrics.jsonl").decode()
    return [json.loads(line)["step"] for line in text.splitlines() if '"train/loss"' in line]


# --- the copy -----------------------------------------------------------------------------


def test_copy_and_bucket_name_each_other(cache: Path) -> None:
    folder = run_folder(RunConfig(dir=RUNS, name="a"))
    assert folder == cache / "maxpipe/runs/s3/bucket/runs/a" == copy_folder(RUN)
    assert url_of_copy(folder) == RUN == checkpoint_home(folder, CheckpointConfig())
    assert checkpoint_home(folder, CheckpointConfig(dir="gs://b")) == "gs://b/a"
    assert not url_of_copy("runs/a") and not url_of_copy(cache) and not url_of_copy(RUN)
    assert copy_folder("s3://b/../../x") == cache / "maxpipe/runs/s3/b/x"


def test_files_follow_the_run_to_another_host(
    s3: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copy_folder(RUN)
    first.mkdir(parents=True)
    with RunCopy(first):
        for name in ("metrics.jsonl", "tensorboard/events", "lock.json", ".secret-1", "x.partial"):
            (first / name).parent.mkdir(exist_ok=True)
            (first / name).write_text("one")
    assert s3.names("bucket/runs/a") == {"metrics.jsonl", "tensorboard/events", ".copy"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.with_name("other")))
    second = copy_folder(RUN)
    second.mkdir(parents=True)
    (second / "old").write_text("of an earlier run")
    with RunCopy(second):
        assert (second / "tensorboard/events").read_text() == "one"
        assert not (second / "old").exists() and not (second / "lock.json").exists()
        (second / "metrics.jsonl").write_text("two")
    (first / "metrics.jsonl").write_text("not uploaded, and replaced")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    download(first)
    assert (first / "metrics.jsonl").read_text() == "two"


def test_copy_that_was_uploaded_last_is_kept(s3: Store) -> None:
    folder = copy_folder(RUN)
    folder.mkdir(parents=True)
    with RunCopy(folder):
        (folder / "metrics.jsonl").write_text("one")
    (folder / "metrics.jsonl").write_text("one two")  # the run was killed before the upload
    with RunCopy(folder):
        assert (folder / "metrics.jsonl").read_text() == "one two"
    assert s3.filesystem.cat_file(f"{RUN}/metrics.jsonl") == b"one two"


def test_changed_files_are_uploaded_during_the_run(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_copy, "UPLOAD_SECONDS", 0.05)
    folder = copy_folder(RUN)
    folder.mkdir(parents=True)
    with RunCopy(folder):
        (folder / "events.jsonl").write_text("one")
        wait_until(lambda: "events.jsonl" in s3.names("bucket/runs/a"))
    held = [False]
    with RunCopy(folder, lambda: held[0]):
        (folder / "events.jsonl").write_text("the lock was lost")
    assert s3.filesystem.cat_file(f"{RUN}/events.jsonl") == b"one"


def test_readers_never_change_the_copy_of_a_run(
    s3: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.with_name("other")))
    other = copy_folder(RUN)
    other.mkdir(parents=True)
    with RunCopy(other):
        (other / "metrics.jsonl").write_text("one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    folder = copy_folder(RUN)
    folder.mkdir(parents=True)
    s3.fault = lambda handler: handler.command == "PUT" and refuse(handler)
    with RunCopy(folder):
        (folder / "metrics.jsonl").write_text("one two")
        read = Path(folder_of_records(RUN))
        assert read != folder and (read / "metrics.jsonl").read_text() == "one"
        assert (folder / "metrics.jsonl").read_text() == "one two"
        s3.fault = lambda handler: False
    assert Path(folder_of_records(f"{RUN}/"), "metrics.jsonl").read_text() == "one two"
    s3.filesystem.pipe_file(f"{RUN}/checkpoints/2/x", b"large")
    s3.filesystem.rm_file(f"{RUN}/metrics.jsonl")
    s3.filesystem.pipe_file(f"{RUNS}/b/config.yml", b"b")
    runs = Path(folder_of_records(RUNS))
    assert {str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()} == {
        "b/config.yml"
    }


def test_start_of_a_run_claims_the_bucket(s3: Store) -> None:
    folder = copy_folder(RUN)
    folder.mkdir(parents=True)
    with RunCopy(folder):
        assert s3.names("bucket/runs/a") == {".copy"}


@pytest.mark.parametrize("url", ["memory://bucket/run", "http://host/run", "foo://x"])
def test_records_of_other_stores_are_an_error(url: str) -> None:
    with pytest.raises(ConfigError):
        folder_of_records(url)


def refuse(handler: Any) -> bool:
    body = f"<Error><Code>AccessDenied</Code><Message>{KEY} {SECRET}</Message></Error>".encode()
    handler.send_response(403)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
    return True


def test_failed_upload_is_a_warning_and_failed_download_an_error(s3: Store, caplog: Logs) -> None:
    folder = copy_folder(RUN)
    folder.mkdir(parents=True)
    with RunCopy(folder):
        (folder / "events.jsonl").write_text("one")
        s3.fault = refuse
    assert len(caplog.records) == 1 and str(folder) in caplog.text
    with raises(StorageError, RUN, suggests="permissions"):
        download(folder)


def test_watched_report_survives_an_outage(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now = datetime.now(UTC).isoformat()
    event = json.dumps({"time": now, "uptime": 0.0, "event": "begin", "host": "x"})
    s3.filesystem.pipe_file(f"{RUN}/events.jsonl", f"{event}\n".encode())
    s3.filesystem.pipe_file(f"{RUN}/metrics.jsonl", b'{"step": 1, "train/loss": 1.0}\n{"step": 2')
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        s3.fault = refuse if len(pauses) == 1 else lambda handler: False
        if len(pauses) == 2:
            done = json.dumps({"time": now, "uptime": 1.0, "event": "done", "step": 1})
            s3.filesystem.pipe_file(f"{RUN}/events.jsonl", f"{event}\n{done}\n".encode())

    monkeypatch.setattr("maxpipe.commands.report.time.sleep", sleep)
    out = tmp_path / "report.html"
    assert main(["report", RUN, "--watch", "--out", str(out)]) == 0
    shown = capsys.readouterr().err
    assert len(pauses) == 2 and "The page is kept." in shown and SECRET not in shown
    assert '"refresh": 0' in out.read_text()


# --- the run ------------------------------------------------------------------------------


def test_run_resumes_on_another_host_and_is_used(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["train", *settings("train.steps=3")]) == 0
    found = s3.names("bucket/runs/a")
    assert {"config.yml", "metrics.jsonl", "events.jsonl", "checkpoints/3/manifest.json"} <= found
    assert "lock.json" not in found and records(s3) == [1, 2, 3]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert main(["train", *settings("train.steps=5")]) == 0
    assert records(s3) == [1, 2, 3, 4, 5]
    assert main(["checkpoints", "list", RUN]) == 0
    assert main(["checkpoints", "verify", RUN]) == 0
    assert main(["goodput", RUN]) == 0
    assert main(["plan", "--against", RUN]) == 0
    page = tmp_path / "report.html"
    assert main(["report", RUN, "--watch", "--out", str(page)]) == 0
    assert '"name": "a"' in page.read_text() and SECRET not in page.read_text()
    assert main(["curves", RUN, "--svg", str(tmp_path / "curves.svg")]) == 0
    assert main(["generate", RUN, "--prompt", "a", "--max-tokens", "2"]) == 0
    assert main(["export", f"{RUN}@newest", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100)
    assert main(["eval", RUN, "data.source=text", f"data.path={text}"]) == 0
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err and KEY not in shown.out + shown.err
    for name in ("config.yml", "events.jsonl"):
        content = s3.filesystem.cat_file(f"{RUN}/{name}").decode()
        assert SECRET not in content and KEY not in content


def test_killed_run_resumes(s3: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maxpipe", "train", *settings("train.steps=100000")]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "dead")}
    with subprocess.Popen(command, env=environment, cwd=ROOT) as process:
        done = lambda: any(n.endswith("4/manifest.json") for n in s3.names("bucket/runs/a"))  # noqa: E731
        wait_until(lambda: done() or process.poll() is not None, 120)
        process.send_signal(signal.SIGKILL)
    assert done()
    newest = max(
        int(name.split("/")[1])
        for name in s3.names("bucket/runs/a")
        if name.endswith("/manifest.json")
    )
    assert main(["train", *settings(f"train.steps={newest + 2}")]) == 0
    assert records(s3)[-1] == newest + 2
