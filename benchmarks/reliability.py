"""What being watched costs a step: phases, link, ledger, guard; and how long a save blocks.

    python benchmarks/reliability.py            # prints the table
    python benchmarks/reliability.py --write    # and writes reliability.md

A model of 100 M parameters on the CPU. What the host does beside a step is timed alone, many times
over; the step and the blocking part of an asynchronous save after one another.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxpipe.checkpoint.manager import Checkpoints
from maxpipe.config.load import from_dict
from maxpipe.config.schema import CheckpointConfig
from maxpipe.hub import Limits
from maxpipe.link import Link
from maxpipe.model.count import num_params
from maxpipe.phases import DATA, LOOP, STEP, Phases
from maxpipe.plan.calibrate import medians, step_of
from maxpipe.plan.compile import build_steps
from maxpipe.telemetry import EventLog
from maxpipe.train.step import Steps

ROUNDS = 3
HEADS = {"num_heads": 12, "num_kv_heads": 12, "head_size": 64}
CONFIG = {
    "model": {"num_layers": 12, "d_model": 768, "d_mlp": 2048, "vocab_size": 10240, **HEADS},
    "train": {"batch_size": 8, "sequence_length": 512, "steps": 1},
}


def host_seconds(folder: Path) -> float:
    """Of a step: phases entered and left, the link asked, a tenth of a ledger's record."""
    phases, events = Phases(), EventLog(folder)
    with Link(phases, Limits()) as link, phases.enter(LOOP):

        def step() -> None:
            with phases.enter(DATA):
                pass
            phases.progress(1)
            with phases.enter(STEP):
                pass
            link.stops_here()

        each = _per_call(step, 20_000)
        record = _per_call(lambda: events.write("time", step=1, seconds=phases.take()), 200)
    return each + record / 10  # log.every


def _per_call(call: Callable[[], object], number: int) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - start) / number)
    return statistics.median(times)


def step_and_save(steps: Steps, folder: Path) -> tuple[float, float, float]:
    """Seconds of a step, of the part of a save that blocks, and of the whole save."""
    state = steps.init()
    saved = steps.to_saved(state)
    whole: list[float] = []
    blocking: list[float] = []
    step_seconds = medians([step_of(steps)], seconds=0.0)[0]
    with Checkpoints(folder, CheckpointConfig(keep=1)) as checkpoints:
        for number in range(1, ROUNDS + 1):
            start = time.perf_counter()
            checkpoints.save(number, lambda: saved, {"run": {}}, {"step": number})
            blocking.append(time.perf_counter() - start)
            checkpoints.wait()
            whole.append(time.perf_counter() - start)
    return step_seconds, statistics.median(blocking), statistics.median(whole)


def table() -> str:
    """The page's body."""
    config = from_dict(CONFIG)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = host_seconds(folder)
        steps = build_steps(config, jax.devices()[:1])
        step, blocking, whole = step_and_save(steps, folder)
    return "\n".join(
        [
            f"{num_params(config.model) / 1e6:.0f} M parameters, a step of {step:.2f} s.",
            "",
            "| what | seconds | of a step |",
            "|---|---|---|",
            f"| phases, link and ledger, in each step | {host:.6f} | {host / step:.4%} |",
            f"| a save, blocking part | {blocking:.3f} | {blocking / step:.1%} |",
            f"| a save, until it is on disk with its digests | {whole:.2f} | |",
            "",
        ]
    )


PREAMBLE = """\
# What it costs to be safe

`python benchmarks/reliability.py --write`, on two CPU cores. The guard against bad numbers is part
of the compiled step: see `tests/train/test_guard.py` for its memory.

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
