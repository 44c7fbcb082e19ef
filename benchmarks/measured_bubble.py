"""Compare the measured bubble of schedules with their tables.

    python benchmarks/measured_bubble.py            # prints the table
    python benchmarks/measured_bubble.py --write    # and writes benchmarks/measured_bubble.md

Each schedule trains the same model on 8 virtual CPU devices, as 4 stages x fsdp 2. Profiles of
several rounds give the range of the measured bubble.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.io.formatting import format_duration
from maxpipe.models.config import ModelConfig
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.profiles.bubble import unit_seconds
from maxpipe.profiles.results import Results
from maxpipe.step.build import build_steps
from maxpipe.train.profiler import profile_steps

MODEL = ModelConfig(
    num_layers=8,
    d_model=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    d_mlp=1024,
    vocab_size=512,
    compute_dtype="float32",
)
STAGES, FSDP, MICROBATCHES, TOKENS = 4, 2, 8, 256
STEPS = 2
"""Number of steps in a profile."""


@dataclass(frozen=True)
class Choice:
    """A schedule, which is one row of the table."""

    schedule: str
    repeats: int
    remat: str = "full"


CHOICES = (
    Choice("1f1b", 1),
    Choice("interleaved", 2),
    Choice("zb_h1", 1, "names"),
    Choice("zb_v", 2, "names"),
    Choice("zb_v", 2),
)


def profiles(choice: Choice, rounds: int) -> list[Results]:
    """Return the results of one profile per round."""
    sizes = MeshConfig(ici_stage=STAGES, ici_fsdp=FSDP)
    steps = build_steps(
        build_mesh(sizes, jax.devices()),
        model=MODEL,
        pipeline=PipelineConfig(
            schedule=choice.schedule,
            repeats=choice.repeats,
            microbatches=MICROBATCHES,
            weight_gather="step",
            remat=choice.remat,  # type: ignore[arg-type]
        ),
        optim=OptimConfig(),
        train=TrainConfig(batch_size=MICROBATCHES * FSDP, sequence_length=TOKENS),
        total_steps=100,
        rules=AxisRules.from_config(sizes),
        seed=0,
        byte_lengths=np.ones(MODEL.vocab_size, np.int32),
    )
    program, state = steps.compile_train(), steps.init()
    batch = {
        name: jax.device_put(np.ones(like.shape, like.dtype), like.sharding)
        for name, like in steps.abstract_batch().items()
    }

    def run() -> None:
        nonlocal state
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)

    run()
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(profile_steps(Path(folder), steps, program, run, STEPS))
    return found


def row(choice: Choice, found: list[Results]) -> str:
    """Return the row of a schedule in the table."""
    bubbles = [each.bubble for each in found if each.bubble is not None]
    timelines = [each.timeline for each in found if each.timeline is not None]

    def median(values: Any) -> float:
        return statistics.median(values)

    measured = sorted(bubble.measured for bubble in bubbles)
    costs = ", ".join(
        f"{kind} {format_duration(median(unit_seconds(each, kind) for each in timelines))}"
        for kind in timelines[0].work
    )
    causes = sorted({cause.kind for bubble in bubbles for cause in bubble.causes})
    cells = (
        f"{choice.schedule}, remat={choice.remat}",
        f"{bubbles[0].planned:.1%}",
        f"{median(bubble.planned_with_costs for bubble in bubbles):.1%}",
        f"{median(measured):.1%} ({measured[0]:.1%} to {measured[-1]:.1%})",
        f"{median(bubble.wall_idle for bubble in bubbles):.0%}",
        costs,
        ", ".join(causes) or "none",
    )
    return f"| {' | '.join(cells)} |"


def table(rounds: int) -> str:
    head = (
        "schedule",
        "planned",
        "planned with the measured slot durations",
        "measured (range)",
        "wall time without operations",
        "slot durations",
        "causes",
    )
    lines = [
        f"Model: {MODEL.num_layers} layers, D {MODEL.d_model}, F {MODEL.d_mlp}, T {TOKENS}, "
        f"float32; {STAGES} stages x fsdp {FSDP}, {MICROBATCHES} microbatches. Medians of "
        f"{rounds} profiles of {STEPS} steps.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    lines += [row(choice, profiles(choice, rounds)) for choice in CHOICES]
    return "\n".join(lines) + "\n"


NOTES = """
- **planned** is the bubble of the schedule table, with equally long F, I and W slots.
- **planned with the measured slot durations** is the bubble of the same table on equal stages. All
  stages wait for the slowest slot of a mixed tick, so zero-bubble schedules lose time if input
  gradients take longer than weight gradients. With `remat=full`, the input gradients also recompute
  the layer.
- **measured** places the typical duration of each operation on its stage into the ticks. The 8
  devices share 2 cores, so wall time is not a measure of the bubble: the column *wall time without
  operations* contains waits for a core.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/measured_bubble.md")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES * FSDP)
    text = table(options.rounds)
    print(text)
    if options.write:
        header = (
            "# Measured bubble compared with the table\n\n"
            f"`python benchmarks/measured_bubble.py --write`, {time.strftime('%Y-%m-%d')}, "
            f"jax {jax.__version__}, {STAGES * FSDP} virtual CPU devices, 2 cores.\n\n"
        )
        Path(__file__).with_suffix(".md").write_text(header + text + NOTES)


if __name__ == "__main__":
    main()
