"""Checkpoints and locks in S3, tested with moto's server on 127.0.0.1."""

from __future__ import annotations

import json
import platform
from typing import Any
from urllib.parse import unquote

import pytest

from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.lock import FILE, RunLock
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager, open_run
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import StorageError
from maxpipe.io import array_store
from tests.checkpoint.cases import abstract, put, tree
from tests.errors import raises
from tests.s3 import KEY, SECRET, Store
from tests.waiting import wait_until

Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture
RUN = "s3://bucket/runs/a"
FOLDER = f"bucket/runs/a/{CHECKPOINTS_FOLDER}"


@pytest.fixture
def saved(s3: Store) -> str:
    """A run with steps 3 and 6."""
    return save(RUN, 3, 6)


def save(run_dir: str, *steps: int, **keys: Any) -> str:
    with CheckpointManager(run_dir, CheckpointConfig(**keys)) as checkpoints:
        for step in steps:
            put(checkpoints, step)
    return run_dir


def newest(run_dir: str, **options: Any) -> int | None:
    with CheckpointManager(run_dir, **options) as checkpoints:
        found = checkpoints.restore_newest(abstract())
        assert found is None or tree_digest(found.state) == tree_digest(tree(found.step))
        return found and found.step


def steps(s3: Store) -> set[str]:
    return {name.partition("/")[0] for name in s3.names(FOLDER)}


def test_restore_returns_saved_state(saved: str, s3: Store) -> None:
    with open_run(saved) as checkpoints:
        assert checkpoints.steps() == [3, 6]
        for step in (3, 6):
            assert tree_digest(checkpoints.restore(step).state) == tree_digest(tree(step))
    assert newest(saved) == 6
    assert steps(s3) == {"3", "6"} and "6/manifest.json" in s3.names(FOLDER)
    save(saved, 9, keep=2)
    assert steps(s3) == {"6", "9"}


def test_flipped_bit_falls_back_to_previous_step(saved: str, s3: Store, caplog: Logs) -> None:
    [name, *_] = sorted(n for n in s3.names(FOLDER) if n.startswith("6/state/d/"))
    content = s3.filesystem.cat_file(f"{FOLDER}/{name}")
    s3.filesystem.pipe_file(f"{FOLDER}/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    assert newest(saved) == 3
    assert steps(s3) == {"3", "6.corrupt"} and "renamed 6.corrupt" in caplog.text


def test_unfinished_save_is_removed(saved: str, s3: Store, caplog: Logs) -> None:
    for name in ("manifest.json", "commit_success.txt"):
        s3.filesystem.rm_file(f"{FOLDER}/6/{name}")
    with open_run(saved) as checkpoints:
        assert checkpoints.steps() == [3]
    assert newest(saved) == 3 and steps(s3) == {"3"}


def test_commands_verify_and_list(saved: str, capsys: Capture) -> None:
    assert main(["checkpoints", "verify", saved]) == 0
    assert main(["checkpoints", "list", saved]) == 0
    assert main(["checkpoints", "prune", saved, "--keep", "1"]) == 0
    assert main(["checkpoints", "list", saved, "--json"]) == 0
    assert '"step": 3' not in capsys.readouterr().out.splitlines()[-1]


def test_server_errors_are_repeated(s3: Store) -> None:
    left = {"GET": 2, "PUT": 2, "HEAD": 1}

    def fail(handler: Any) -> bool:
        if left.get(handler.command, 0) == 0:
            return False
        left[handler.command] -= 1
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.send_header("Retry-After", "1")
        handler.end_headers()
        return True

    s3.fault = fail
    save(RUN, 3)
    assert not any(left.values())
    assert newest(RUN) == 3


@pytest.mark.parametrize("command", ["PUT", "GET"])
def test_outage_ends_a_save_or_a_restore(
    command: str, saved: str, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run can be resumed after the outage."""
    monkeypatch.setitem(array_store.RETRIES, "max_retries", 1)

    def fail(handler: Any) -> bool:
        if handler.command != command or "/state/" not in unquote(handler.path):
            return False
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    s3.fault = fail
    with raises(StorageError, RUN, names=["503"]):
        save(RUN, 9, retries=0) if command == "PUT" else newest(RUN)
    s3.fault = lambda handler: False
    assert newest(RUN) == 6
    save(RUN, 9)
    assert newest(RUN) == 9


def test_refused_requests_are_reported_without_secrets(saved: str, s3: Store) -> None:
    def refuse(handler: Any) -> bool:
        body = f"<Error><Code>AccessDenied</Code><Message>{KEY}</Message></Error>".encode()
        handler.send_response(403)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)
        return True

    s3.fault = refuse
    with raises(StorageError, f"{RUN}/{CHECKPOINTS_FOLDER}") as caught:
        CheckpointManager(RUN)
    assert "AccessDenied" in str(caught.value) or "ermission" in str(caught.value)
    assert main(["checkpoints", "list", RUN]) == 74
    assert SECRET not in str(caught.value)


def test_reason_on_the_second_line_of_an_error_is_reported(s3: Store, capsys: Capture) -> None:
    assert main(["checkpoints", "list", "s3://Not_a_bucket!/runs/a"]) == 74
    assert "Invalid bucket name" in capsys.readouterr().err


def test_second_run_cannot_take_the_lock(s3: Store) -> None:
    with RunLock(RUN):
        assert f"runs/a/{FILE}" in s3.names("bucket")
        with raises(StorageError, RUN, suggests="run.name"), RunLock(RUN):
            pass
    assert not s3.names("bucket")


def test_lock_is_acquired_and_released_if_every_first_response_is_lost(s3: Store) -> None:
    known: set[str] = set()

    def is_first(handler: Any) -> bool:
        request = f"{handler.command} {handler.path}"
        return request not in known and not known.add(request)

    s3.lost = is_first
    with RunLock(RUN) as held:
        assert held.check_held()
    assert any(name.startswith("PUT") and "claim-" in name for name in known)
    assert not s3.names("bucket")


def test_lock_of_a_dead_run_is_taken_over_if_responses_are_lost(s3: Store) -> None:
    from maxpipe.checkpoint import lock

    dead = {"token": "dead", "pid": 2**22, "host": platform.node(), "process_start": "1"}
    dead |= {"namespace": lock._namespace()}
    s3.filesystem.pipe_file(f"{RUN}/{FILE}", json.dumps(dead).encode())
    known: set[str] = set()
    s3.lost = lambda handler: handler.path not in known and not known.add(handler.path)
    with RunLock(RUN) as held:
        assert "that process is dead" in held.note
    assert not s3.names("bucket")


def test_heartbeat_of_another_host_is_visible(s3: Store) -> None:
    from maxpipe.checkpoint import lock

    with RunLock(RUN, beat_seconds=0.2) as held:
        first = lock._heartbeat_stamp(held.path)
        assert first[0] > 1e9
        wait_until(lambda: lock._heartbeat_stamp(held.path) != first)
