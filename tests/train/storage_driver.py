"""Injects storage faults into real saves, resumes and prunes, many runs in one process.

    LD_PRELOAD=... STORAGE_FAULTS_ROOT=FOLDER python storage_driver.py FOLDER FIRST COUNT

runs the faults with indices FIRST to FIRST + COUNT - 1 below FOLDER and prints one JSON line for
each, in which `wrong` lists violated invariants. The index of a fault is its random seed.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import random
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.checkpoint import manager, storage
from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.lock import FILE as LOCK
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import CheckpointManager, open_run
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER
from maxpipe.cli import main
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import MaxpipeError

Tree = dict[str, Any]

STEPS, EVERY = 6, 2
CONFIG = CheckpointConfig(every=EVERY, keep=2, retries=1)

SILENT, FAILURES = ("flip", "cut", "lose"), ("eio", "enospc", "edquot", "estale")
ACTIONS = {
    "read": ("flip", "cut", *FAILURES),
    "write": (*SILENT, *FAILURES),
    "fsync": FAILURES,
    "rename": FAILURES,
    "open": FAILURES,
}
PHASES = ("save", "restore", "prune")
Calls = dict[tuple[str, str], int]
"""Number of calls by phase and kind, counted without faults."""


# A run, in which every step depends on every bit of the previous step.


def initial() -> Tree:
    values = np.random.default_rng(0)
    params = {"a": values.normal(size=(40, 8)).astype("f4"), "b": np.zeros((3, 8), "f4")}
    return {"step": np.int32(0), "params": params, "moments": {"a": params["a"] * 0}}


def advance(state: Tree, step: int) -> Tree:
    noise = np.random.default_rng(step)

    def moved(leaf: np.ndarray) -> np.ndarray:
        return (leaf * np.float32(0.9) + noise.normal(size=leaf.shape)).astype("f4")

    return {"step": np.int32(step)} | {
        name: jax.tree.map(moved, state[name]) for name in ("params", "moments")
    }


def expected() -> dict[int, str]:
    """Return the digests of the uninterrupted run by step."""
    state, found = initial(), {}
    for step in range(1, STEPS + 1):
        state = advance(state, step)
        found[step] = tree_digest(state)
    return found


def abstract() -> Tree:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=place), initial()
    )


def train(run_dir: Path, config: CheckpointConfig = CONFIG) -> str:
    """Start or resume the run and train to its end; return the digest of the final state."""
    with RunLock(run_dir) as lock, CheckpointManager(run_dir, config, locks=[lock]) as checkpoints:
        found = checkpoints.restore_newest(abstract())
        state = initial() if found is None else jax.tree.map(np.asarray, found.state)
        for step in range(int(state["step"]) + 1, STEPS + 1):
            state = advance(state, step)
            checkpoints.poll()
            if checkpoints.should_save(step):
                save(checkpoints, step, state)
        save(checkpoints, STEPS, state, last=True)
        return tree_digest(state)


def save(checkpoints: CheckpointManager, step: int, state: Tree, *, last: bool = False) -> None:
    arrays = jax.tree.map(jax.numpy.asarray, state)
    checkpoints.save(step, lambda: arrays, {}, {"step": step}, last=last)


# A fault.


class Case:
    """One fault in one operation of one run."""

    def __init__(self, number: int, folder: Path, template: Path, calls: Calls):
        chance = random.Random(number)
        self.number, self.phase = number, PHASES[number % len(PHASES)]
        kind = chance.choice([kind for kind in ACTIONS if calls[self.phase, kind]])
        first = chance.randint(1, calls[self.phase, kind])
        count = chance.choice([1, 1, 1, 3, 0])  # once, three times, all later calls
        self.plan = f"{kind} {chance.choice(ACTIONS[kind])} {first} {count} {number}"
        self.run_dir = folder / f"case-{number}" / "run"
        if self.phase != "save":
            shutil.copytree(template, self.run_dir)

    def run(self, uninterrupted: dict[int, str]) -> dict[str, Any]:
        """Inject the fault, resume without faults, and return the result as JSON values."""
        shim = ctypes.CDLL(None)
        assert shim.storage_faults_arm(self.plan.encode()) == 0
        code, words = self.attempt()
        done = shim.storage_faults_done()
        shim.storage_faults_arm(b"")
        wrong = list(self._violations(code, uninterrupted))
        if code == 70:
            wrong.append(f"a traceback: {words}")
        # A lock that could not be removed names this process, which still runs.
        (self.run_dir / LOCK).unlink(missing_ok=True)
        code_after, words_after = attempt(lambda: train(self.run_dir))
        if code_after != 0:
            wrong.append(f"the run cannot resume: {words_after}")
        else:
            wrong += (f"after resuming: {each}" for each in self._violations(0, uninterrupted))
        if not wrong:
            shutil.rmtree(self.run_dir.parent)
        return {
            "number": self.number,
            "phase": self.phase,
            "plan": self.plan,
            "done": done,
            "code": code,
            "words": words[-400:],
            "wrong": wrong,
        }

    def attempt(self) -> tuple[int, str]:
        if self.phase == "prune":
            arguments = ["checkpoints", "prune", str(self.run_dir), "--keep", "1"]
            return attempt(lambda: main(arguments))
        return attempt(lambda: train(self.run_dir))

    def _violations(self, code: int, uninterrupted: dict[int, str]) -> Iterator[str]:
        """Yield the violated invariants of the run folder."""
        if code == 0 and self.phase != "prune":
            yield from self._other_bits(STEPS, uninterrupted)
        folder = self.run_dir / CHECKPOINTS_FOLDER
        for path in folder.glob("*.*") if folder.is_dir() else ():
            step, _, kind = path.name.partition(".")
            if kind.startswith("corrupt") and is_good(path, int(step), uninterrupted):
                yield f"a good checkpoint was renamed {path.name}"
        if self.phase == "prune":
            kept = [step for step in (2, 4) if is_good(folder / str(step), step, uninterrupted)]
            if 4 not in kept:
                yield "the newest good checkpoint was deleted"

    def _other_bits(self, step: int, uninterrupted: dict[int, str]) -> Iterator[str]:
        if not is_good(self.run_dir / CHECKPOINTS_FOLDER / str(step), step, uninterrupted):
            yield f"exit code 0, but step {step} differs from the uninterrupted run"


def is_good(path: Path, step: int, uninterrupted: dict[int, str]) -> bool:
    """Return True if the checkpoint restores to the state of the uninterrupted run."""
    if not path.is_dir():
        return False
    run_dir = path.parent.parent / "looked at"
    shutil.copytree(path, run_dir / CHECKPOINTS_FOLDER / str(step))
    try:
        with open_run(run_dir) as checkpoints:
            return tree_digest(checkpoints.restore(step).state) == uninterrupted[step]
    except MaxpipeError:
        return False
    finally:
        shutil.rmtree(run_dir)


def attempt(what: Any) -> tuple[int, str]:
    """Return the exit code and the output, as the command would."""
    stream = io.StringIO()
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            result = what()
    except MaxpipeError as error:
        message = str(error)
        explained = len(message.splitlines()) >= 3
        return (int(error.exit_code), message) if explained else (70, f"not explained: {message}")
    except Exception:
        return 70, traceback.format_exc()
    return (result if isinstance(result, int) else 0), stream.getvalue()


def shorten_pauses() -> None:
    """Shorten the pauses between retries."""
    manager._FIRST_PAUSE_SECONDS = storage.PAUSE_SECONDS = 0.01


def run_cases(folder: Path, first: int, count: int) -> None:
    logging.getLogger("maxpipe").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    shorten_pauses()
    uninterrupted = expected()
    whole = folder / "template" / "run"
    assert train(whole, CheckpointConfig(every=EVERY, keep=10)) == uninterrupted[STEPS]
    shutil.rmtree(whole / CHECKPOINTS_FOLDER / str(STEPS))
    calls = count_calls(folder, whole)
    for number in range(first, first + count):
        print(json.dumps(Case(number, folder, whole, calls).run(uninterrupted)), flush=True)


def count_calls(folder: Path, template: Path) -> Calls:
    shim, calls = ctypes.CDLL(None), {(phase, kind): 1 for phase in PHASES for kind in ACTIONS}
    for number, phase in enumerate(PHASES):
        for kind in ACTIONS:
            case = Case(number, folder / kind, template, calls)
            shim.storage_faults_arm(f"{kind} note 1 0 0".encode())
            case.attempt()
            calls[phase, kind] = shim.storage_faults_done()
            shim.storage_faults_arm(b"")
            shutil.rmtree(folder / kind)
    return calls


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
