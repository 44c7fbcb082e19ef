"""Measure fault-tolerance costs: monitoring, the update guard, checkpoints and resume.

    python benchmarks/reliability.py            # prints the table
    python benchmarks/reliability.py --write    # and writes reliability.md

The model has 100 M parameters and runs on the CPU. The host work of a step is timed separately,
over many repetitions. The cost of the guard, which skips updates that are not finite, depends on
the parameter count but not on the token count. Short steps with and without the guard alternate,
and the reported cost is the median difference within pairs. The time to the first batch is measured
for a run that resumes after few steps and for one that resumes after many steps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from etils import epath

from maxpipe.checkpoint import manifest
from maxpipe.checkpoint.digests import digest_array
from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.config.load import from_dict
from maxpipe.config.schema import Config
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.data.loader import build_loaders
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.coordinator import Timeouts
from maxpipe.distributed.phases import DATA, LOOP, STEP, Phases
from maxpipe.models.count import num_params
from maxpipe.models.registry import describe
from maxpipe.planner.compile import build_steps
from maxpipe.planner.rerank import build_synthetic_step, median_seconds
from maxpipe.step.step import Steps
from maxpipe.telemetry.writers import EventLog

ROUNDS, PAIRS = 3, 60
FAR = (10, 10_000_000)
"""Steps from which a run is resumed."""
HEADS = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "compute_dtype": "float32"}
CONFIG = {
    "model": {"num_layers": 12, "d_model": 768, "d_mlp": 2048, "vocab_size": 10240, **HEADS},
    "train": {"batch_size": 4, "sequence_length": 512, "steps": 1},
}
SHORT = {"batch_size": 1, "sequence_length": 64, "steps": 1}


def host_seconds(folder: Path) -> float:
    """Return the seconds per step that the host spends on monitoring and on 0.1 event records."""
    phases, events = Phases(), EventLog(folder)
    with ControlChannel(phases, Timeouts()) as link, phases.enter(LOOP):

        def step() -> None:
            with phases.enter(DATA):
                pass
            phases.progress(1)
            with phases.enter(STEP):
                pass
            link.should_stop()

        each = _per_call(step, 20_000)
        record = _per_call(lambda: events.write("time", step=1, seconds=phases.take_seconds()), 200)
    return each + record / 10  # log.every


def _per_call(call: Callable[[], object], number: int) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - start) / number)
    return statistics.median(times)


def seconds_of_guard(config: Config) -> float:
    """Return the time in seconds that the guard adds to a step."""
    device = jax.devices()[:1]
    with (
        patch("maxpipe.step.step.check_step", lambda _config, _mesh, state, *_: (np.True_, state)),
        patch("maxpipe.optim.update.select_update", lambda _taken, new, _old: new),
        patch("maxpipe.optim.update.select_update", lambda _taken, new, _old: new),
    ):
        without = build_synthetic_step(build_steps(config, device))
        jax.block_until_ready(without())
    guarded = build_synthetic_step(build_steps(config, device))
    jax.block_until_ready(guarded())
    added = []
    for turn in range(PAIRS):  # each program runs first in half of the pairs
        if turn % 2:
            seconds = _taken(guarded)
            added.append(seconds - _taken(without))
        else:
            seconds = _taken(without)
            added.append(_taken(guarded) - seconds)
    return statistics.median(added)


def _taken(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def first_batches(config: Config) -> list[float]:
    """Return the time in seconds to the first batch after resuming at each step in `FAR`."""
    seconds, train = [], config.train
    sizes = {"batch_size": train.batch_size, "sequence_length": train.sequence_length}
    with contextlib.closing(build_loaders(config.data, config.tokenizer, seed=0, **sizes)) as data:
        for step in FAR * ROUNDS:
            start = time.perf_counter()
            with data.train.batches(step) as batches:
                next(batches)
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[place :: len(FAR)]) for place in range(len(FAR))]


def seconds_of_saves(steps: Steps, folder: Path) -> tuple[float, float, Digesting]:
    """Return the blocking time, total time and digest times of a checkpoint save in seconds.

    The blocking time includes copying the state.
    """
    state = steps.init()
    jax.block_until_ready(steps.to_saved(state))
    whole: list[float] = []
    blocking: list[float] = []

    copies: list[Any] = []

    def copied() -> Any:
        copies[:] = [steps.to_saved(state)]
        return copies[0]

    with CheckpointManager(folder, CheckpointConfig(keep=1)) as checkpoints:
        for number in range(1, ROUNDS + 1):
            start = time.perf_counter()
            checkpoints.save(number, copied, {"run": {}}, {"step": number})
            jax.block_until_ready(copies)  # the next step must wait for these copies
            blocking.append(time.perf_counter() - start)
            checkpoints.wait()
            whole.append(time.perf_counter() - start)
        digesting = _digesting(copies[0], checkpoints.durable / ROUNDS)
    return statistics.median(blocking), statistics.median(whole), digesting


@dataclass(frozen=True)
class Digesting:
    """Single-threaded time in seconds of each digest method on the same arrays."""

    in_memory: float
    sha256: float
    files: float
    decoded: float
    num_bytes: int

    def row(self, what: str, seconds: float) -> str:
        """Return the table row for one digest method."""
        return f"| {what}, {self.num_bytes / seconds / 1e9:.2f} GB/s | {seconds:.2f} | |"


def _digesting(state: Any, step: epath.Path) -> Digesting:
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    calls = (
        lambda: [digest_array(array) for array in arrays],
        lambda: [hashlib.sha256(array).digest() for array in arrays],
        lambda: manifest.verify_files(step, ROUNDS),
        lambda: manifest.compute_stored_digests(step),
    )
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seconds in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return Digesting(*map(statistics.median, taken), sum(array.nbytes for array in arrays))


def table() -> str:
    """Return the page content below the preamble."""
    config = from_dict(CONFIG)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = host_seconds(folder)
        blocking, whole, digests = seconds_of_saves(build_steps(config, jax.devices()[:1]), folder)
    (step,) = median_seconds([build_synthetic_step(build_steps(config, jax.devices()[:1]))], 0.0)
    guard = seconds_of_guard(from_dict(CONFIG | {"train": SHORT}))
    near, far = first_batches(config)
    everything = host + max(0.0, guard)
    return "\n".join(
        [
            f"The model has {num_params(describe(config.model)) / 1e6:.0f} M parameters, and a "
            f"step of {config.train.batch_size * config.train.sequence_length:,} tokens runs in "
            f"{step:.2f} s. The guard is measured with steps of {SHORT['sequence_length']} tokens.",
            "",
            "| operation | seconds | relative to a step |",
            "|---|---|---|",
            f"| monitoring and event log, per step | {host:.6f} | {host / step:.4%} |",
            f"| guard against non-finite values, per step | {guard:.6f} | {guard / step:.3%} |",
            f"| total per step | {everything:.6f} | {everything / step:.3%} |",
            f"| blocking part of a save | {blocking:.3f} | {blocking / step:.1%} |",
            f"| complete save with verification against memory | {whole:.2f} | |",
            digests.row("digests of arrays in memory, one thread", digests.in_memory),
            digests.row("SHA-256 of the same arrays, one thread", digests.sha256),
            digests.row("SHA-256 of the checkpoint files", digests.files),
            digests.row("decoding of the checkpoint and its digests", digests.decoded),
            f"| first batch on resume after {FAR[0]:,} steps | {near:.3f} | |",
            f"| first batch on resume after {FAR[1]:,} steps | {far:.3f} | |",
            "",
        ]
    )


PREAMBLE = """\
# Cost of fault tolerance

`python benchmarks/reliability.py --write`, on two CPU cores.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    page = table()
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page, encoding="utf-8")


if __name__ == "__main__":
    main()
