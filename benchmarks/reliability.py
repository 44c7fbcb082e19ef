"""What being watched costs a step: phases, link, ledger, guard; how long a save blocks; resuming.

    python benchmarks/reliability.py            # prints the table
    python benchmarks/reliability.py --write    # and writes reliability.md

A model of 100 M parameters on the CPU. What the host does beside a step is timed alone, many times
over. What the guard adds has to do with parameters, not tokens: short steps with and without it
run in turn, and the median of the pairs' differences counts. The first batch is that of a run
which goes on after few steps, or after very many.
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

from maxpipe.checkpoint import contents, manifest
from maxpipe.checkpoint.digests import digest_array
from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.config.load import from_dict
from maxpipe.config.schema import CheckpointConfig, Config
from maxpipe.data.loader import build_loaders
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.coordinator import Timeouts
from maxpipe.distributed.phases import DATA, LOOP, STEP, Phases
from maxpipe.models.count import num_params
from maxpipe.models.registry import describe
from maxpipe.plan.compile import build_steps
from maxpipe.plan.rerank import build_synthetic_step, median_seconds
from maxpipe.step.step import Steps
from maxpipe.telemetry.writers import EventLog

ROUNDS, PAIRS = 3, 60
FAR = (10, 10_000_000)
"""Steps after which a run goes on."""
HEADS = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "compute_dtype": "float32"}
CONFIG = {
    "model": {"num_layers": 12, "d_model": 768, "d_mlp": 2048, "vocab_size": 10240, **HEADS},
    "train": {"batch_size": 4, "sequence_length": 512, "steps": 1},
}
SHORT = {"batch_size": 1, "sequence_length": 64, "steps": 1}


def host_seconds(folder: Path) -> float:
    """Of a step: phases entered and left, the link asked, a tenth of a ledger's record."""
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
    """What the guard adds to a step."""
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
    for turn in range(PAIRS):  # each comes first as often as second
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
    """Seconds to the first batch of a run that goes on after each of `FAR`."""
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
    """Of the part of a save that blocks, the copy of the state included, and of the whole save;
    and what its digests take.
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
            jax.block_until_ready(copies)  # the next step waits for it
            blocking.append(time.perf_counter() - start)
            checkpoints.wait()
            whole.append(time.perf_counter() - start)
        digesting = _digesting(copies[0], checkpoints.durable / ROUNDS)
    return statistics.median(blocking), statistics.median(whole), digesting


@dataclass(frozen=True)
class Digesting:
    """Seconds on one thread, in turn, of the same arrays."""

    in_memory: float
    sha256: float
    files: float
    decoded: float
    num_bytes: int

    def row(self, what: str, seconds: float) -> str:
        """A line of the table."""
        return f"| {what}, {self.num_bytes / seconds / 1e9:.2f} GB/s | {seconds:.2f} | |"


def _digesting(state: Any, step: epath.Path) -> Digesting:
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    calls = (
        lambda: [digest_array(array) for array in arrays],
        lambda: [hashlib.sha256(array).digest() for array in arrays],
        lambda: manifest.verify_files(step, ROUNDS),
        lambda: contents.compute_stored_digests(step),
    )
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seconds in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return Digesting(*map(statistics.median, taken), sum(array.nbytes for array in arrays))


def table() -> str:
    """The page's body."""
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
            f"{num_params(describe(config.model)) / 1e6:.0f} M parameters, a step of "
            f"{config.train.batch_size * config.train.sequence_length:,} tokens in {step:.2f} s. "
            f"What the guard adds is measured with steps of {SHORT['sequence_length']} tokens.",
            "",
            "| what | seconds | of a step |",
            "|---|---|---|",
            f"| phases, link and ledger, in each step | {host:.6f} | {host / step:.4%} |",
            f"| the guard against bad numbers, in each step | {guard:.6f} | {guard / step:.3%} |",
            f"| together | {everything:.6f} | {everything / step:.3%} |",
            f"| a save, blocking part | {blocking:.3f} | {blocking / step:.1%} |",
            f"| a save, until it is on disk and was compared with memory | {whole:.2f} | |",
            digests.row("digests of the arrays in memory, one thread", digests.in_memory),
            digests.row("SHA-256 of the same arrays, one thread", digests.sha256),
            digests.row("SHA-256 of the step's files", digests.files),
            digests.row("decoding the step and digests of that", digests.decoded),
            f"| first batch of a run that goes on after {FAR[0]:,} steps | {near:.3f} | |",
            f"| the same after {FAR[1]:,} steps | {far:.3f} | |",
            "",
        ]
    )


PREAMBLE = """\
# What it costs to be safe

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
