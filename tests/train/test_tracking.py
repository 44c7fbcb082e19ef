"""Runs with experiment trackers and alerts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxpipe.errors import Code
from maxpipe.io.redact import REDACTED
from maxpipe.train.tracking import git_state
from tests.errors import assert_error
from tests.telemetry.trackers.stub import Server, recorded, served, write_plugin
from tests.train.runs import Run, Start, ledger, wait_for

ARGUMENTS = (
    *("mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1", "log.every=1"),
    *("plugins.allow_code=true", "log.trackers=[stub]", "tracker.exit_timeout_seconds=20"),
)

PERMISSION = "alerts.allow_code=true"


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as server:
        yield server


@pytest.fixture
def arguments(tmp_path: Path, server: Server) -> list[str]:
    """Arguments of a run whose records are sent to the server."""
    (tmp_path / "url").write_text(server.url)
    plugin = write_plugin(tmp_path)
    return [*ARGUMENTS, f"run.dir={tmp_path}", f"plugins.modules=[{plugin}]"]


def assert_delivered(server: Server, folder: Path) -> None:
    found = server.values()
    assert found and {step: found[step] for step in recorded(folder)} == recorded(folder)


def test_tracker_of_a_plugin_receives_a_run(
    tiny: Path, run: Run, tmp_path: Path, server: Server, arguments: list[str]
):
    artifacts = "tracker.artifacts=[config,plan,schedule,checkpoints]"
    secret = "tracker.mlflow_uri=http://user:hunter2hunter2@127.0.0.1:1"
    run("train", tiny, *arguments, artifacts, secret, "train.steps=8")
    assert_delivered(server, tmp_path / "run")
    [opened] = server.contents("open")
    assert opened["config"]["train.steps"] == 8
    texts = dict(server.contents("artifact"))
    assert sorted(texts) == ["config.yml", "forecast.json", "schedule.svg"]
    assert texts["forecast.json"] == (tmp_path / "run/forecast.json").read_text()
    assert "allow_code: false" in texts["config.yml"] and "</svg>" in texts["schedule.svg"]
    assert [step for step, _, _ in server.contents("checkpoint")] == [4, 8]
    assert server.contents("close") == [True]
    assert REDACTED in texts["config.yml"] and "hunter2" not in json.dumps(server.calls)


def test_killed_run_resumes_its_tracker_run(
    tiny: Path, run: Run, start: Start, tmp_path: Path, server: Server, arguments: list[str]
):
    arguments = [*arguments, "train.steps=96"]
    killed = start("train", tiny, *arguments)
    wait_for(killed, "step 9/96")
    deadline = time.monotonic() + 60
    while not server.contents("open") and time.monotonic() < deadline:
        time.sleep(0.01)  # the process of the client starts in parallel with the run
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert killed.stdout is not None
    killed.stdout.close()
    run("train", tiny, *arguments)
    first, *_, last = server.contents("open")
    assert first["key"] == last["key"]
    assert_delivered(server, tmp_path / "run")
    assert server.contents("close")[-1] is True


@pytest.mark.parametrize("mode", ["hang", "500", "down"])
def test_a_broken_tracker_does_not_stop_a_run(
    mode: str, tiny: Path, run: Run, tmp_path: Path, server: Server, arguments: list[str]
):
    """The run ends in time, reports the undelivered records, and sends them when it runs again."""
    server.mode = "ok" if mode == "down" else mode
    if mode == "down":
        (tmp_path / "url").write_text("http://127.0.0.1:1")
    limited = [*arguments, "tracker.exit_timeout_seconds=1", "train.steps=8"]
    begin = time.monotonic()
    output = run("train", tiny, *limited)
    assert "done: 8 steps" in output
    assert "tracker stub: 8 records of metrics.jsonl not delivered" in output
    assert time.monotonic() - begin < 60
    assert [e["records"] for e in ledger(tmp_path / "run", "tracker_undelivered")] == [8]
    server.mode = "ok"
    (tmp_path / "url").write_text(server.url)
    output = run("train", tiny, *arguments, "train.steps=8")
    assert "not delivered" not in output
    assert_delivered(server, tmp_path / "run")


def test_alerts_of_a_run(tiny: Path, run: Run, tmp_path: Path):
    out = tmp_path / "alert.json"
    command = f"alerts.command=[/bin/sh, -c, 'cat > {out}']"
    alerts = ["alerts.rules.low.metric=train/loss", "alerts.rules.low.condition=above"]
    alerts += ["alerts.actions=[console, event, command]", command]
    base = [*ARGUMENTS[:4], f"run.dir={tmp_path}", "log.trackers=[]", "train.steps=4"]
    error = run("train", tiny, *base, *alerts, code=2)
    assert_error(
        error, "alerts.command", names=["alerts.allow_code=true"], code=Code.PLUG_NOT_ALLOWED
    )
    output = run("train", tiny, *base, *alerts, "alerts.allow_code=true")
    assert "warning: alert low: train/loss = " in output
    [event] = ledger(tmp_path / "run", "alert")
    assert event["name"] == "low" and event["step"] == 1 and event["condition"] == "above 0"
    assert json.loads(out.read_text())["metric"] == "train/loss"
    assert "allow_code: true" not in (tmp_path / "run" / "config.yml").read_text()


def test_permission_of_a_run_folder_is_ignored(tiny: Path, run: Run, tmp_path: Path):
    """A config.yml that another person wrote cannot run a command."""
    base = [*ARGUMENTS[:4], f"run.dir={tmp_path}", "log.trackers=[]", "train.steps=4"]
    run("train", tiny, *base)
    path = tmp_path / "run" / "config.yml"
    text = path.read_text().replace("  command: []", "  command: [touch, /tmp/x]")
    permitted = "  allow_code: true\n  timeout_seconds"
    path.write_text(text.replace("  allow_code: false\n  timeout_seconds", permitted))
    assert "allow_code: true" in path.read_text()
    error = run("train", path, code=2)
    assert_error(
        error, "alerts.command", names=["alerts.allow_code=true"], code=Code.PLUG_NOT_ALLOWED
    )


@pytest.mark.parametrize(
    ("arguments", "key", "names", "action", "code"),
    [
        (
            ["log.trackers=[wandb]"],
            "log.trackers",
            ["requires the package wandb"],
            "pip install 'maxpipe[wandb]'",
            Code.ENV_PACKAGE,
        ),
        (
            ["alerts.rules.a.metric=train/los"],
            "alerts.rules.a.metric",
            ["is not a metric of a run"],
            "alerts.rules.a.metric=train/loss",
            Code.CFG_VALUE,
        ),
    ],
)
def test_mistakes_are_found_before_the_run(
    arguments: list[str],
    key: str,
    names: list[str],
    action: str,
    code: Code,
    tiny: Path,
    run: Run,
    tmp_path: Path,
):
    error = run("train", tiny, f"run.dir={tmp_path}", *arguments, code=2)
    assert_error(error, key, names=names, suggests=action, code=code)
    assert not (tmp_path / "run").exists()


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [each for each in os.environ if each.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(str(tmp_path)) == {}
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init")
    (repository / "file").write_text("a")
    git(repository, "add", "file")
    git(repository, "commit", "-m", "first")
    state = git_state(str(repository))
    assert len(state["git_commit"]) == 40 and state["git_dirty"] == "false"
    (repository / "untracked").touch()
    assert git_state(str(repository))["git_dirty"] == "false"
    (repository / "file").write_text("b")
    assert git_state(str(repository))["git_dirty"] == "true"
