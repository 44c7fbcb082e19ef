"""Helpers that start runs of several processes and read their output files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.manager import open_run
from maxpipe.distributed.coordinator import free_port

Run = Callable[..., str]
Start = Callable[..., subprocess.Popen[str]]

SAME = 1e-5  # float32, relative


# Processes.


@contextmanager
def start_processes(
    start: Start, *arguments: object, count: int, second: Sequence[object] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start all processes of a run, with overrides `second` for process 1; kill them on exit."""
    address = f"127.0.0.1:{free_port()}"
    shared = (*arguments, f"runtime.num_processes={count}", f"runtime.coordinator={address}")
    processes = [
        start("train", *shared, f"runtime.process_id={rank}", *(second if rank == 1 else ()))
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


start_pair = partial(start_processes, count=2)


def wait_for_outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all processes to exit; return their outputs."""
    return [process.communicate(timeout=240)[0] for process in processes]


def wait_for(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Read lines up to the first one that starts with `beginning`; return them."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if " ".join(line.split()).startswith(beginning):
            return lines
    raise AssertionError(f"{beginning!r} was never printed:\n{''.join(lines)}")


# Files.


def write_module(folder: Path, text: str) -> Path:
    """Write code that Python runs at startup if the folder is on its path; return the folder."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return folder


def shim_environment(shim: Path, root: Path, log: Path, plan: str = "") -> dict[str, str]:
    """Return variables that inject faults into calls below `root`; see `storage_faults.c`."""
    found = {"LD_PRELOAD": str(shim), "STORAGE_FAULTS_ROOT": str(root)}
    return found | {"STORAGE_FAULTS_LOG": str(log)} | ({"STORAGE_FAULTS": plan} if plan else {})


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of metrics.jsonl by step, without times; check that steps increase."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert all(datetime.fromisoformat(line.pop("time")).tzinfo == UTC for line in lines)
    return {line["step"]: line for line in lines}


def losses(folder: Path, tag: str = "train/loss") -> dict[int, float]:
    return {step: record[tag] for step, record in records(folder).items() if tag in record}


def ledger(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the records of events.jsonl, optionally of these kinds only."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in kinds or not kinds]


def events(folder: Path, *kinds: str) -> list[tuple[str, int]]:
    """Return kind and step of the records of events.jsonl."""
    return [(line["event"], line["step"]) for line in ledger(folder, *kinds)]


def saved_steps(folder: Path) -> list[int]:
    with open_run(folder) as checkpoints:
        return checkpoints.steps()


def saved(folder: Path, step: int | None = None) -> Any:
    """Restore a checkpoint, by default the newest."""
    with open_run(folder) as checkpoints:
        return checkpoints.restore(checkpoints.steps()[-1] if step is None else step)


def saved_digest(folder: Path, step: int | None = None) -> str:
    """Return a digest of a checkpoint's state and data position."""
    found = saved(folder, step)
    return tree_digest(found.state) + json.dumps(found.metadata.data, sort_keys=True)


def forget_after(folder: Path, step: int) -> None:
    """Delete the checkpoints after `step`."""
    for each in (folder / "checkpoints").iterdir():
        if int(each.name) > step:
            shutil.rmtree(each)


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and modification time of a folder and everything below it."""
    found = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


# Messages.


def is_explained(output: str) -> None:
    """Assert that the output ends with an error of three lines: location, rule, action."""
    assert "Traceback" not in output and "this is a bug" not in output
    *_, where, rule, action = output.rstrip("\n").splitlines()
    assert not where.startswith(" ")
    assert rule.startswith("  ") and action.startswith("  ") and action.endswith(".")
