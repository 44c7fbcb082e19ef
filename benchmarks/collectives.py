"""Compare the collectives of compiled train steps with closed-form expressions.

    python benchmarks/collectives.py          # prints the table after a few minutes on CPUs
    python benchmarks/collectives.py --write  # and writes collectives.md

Each run combines a model with one or more mesh axes. Steps are compiled but never executed. The
bytes that a device sends are computed from the program that XLA compiles for up to 8 devices, with
loop trip counts from the schedule. The result is compared with the number of bytes that
`maxpipe.planner.traffic` predicts from model and mesh sizes alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from maxpipe.config.load import from_dict
from maxpipe.config.schema import Config
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.planner.compile import build_steps, profile_step
from maxpipe.planner.compile import collective_traffic as of_program
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.traffic import count_collectives, step_traffic

NUMBERS = 1100
"""Collectives of at most this many bytes per step (losses, statistics, norms) are omitted."""
DENSE = {
    "num_layers": 4,
    "d_model": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "d_mlp": 96,
    "vocab_size": 264,
    "compute_dtype": "float32",
    "attention": "blockwise",
}
EXPERTS = DENSE | {
    "family": "moe",
    "moe": {"num_experts": 8, "d_expert": 32, "num_dense_layers": 0},
}
WINDOWS = DENSE | {"family": "mistral", "mistral": {"window": 5}}


@dataclass(frozen=True)
class Run:
    """Mesh, model and pipeline settings of a run."""

    name: str
    mesh: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: DENSE)
    pipeline: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """Run config with two sequences of 32 tokens per device and microbatch."""
        mesh = {f"ici_{axis}" if axis in MESH_AXES else axis: n for axis, n in self.mesh.items()}
        pipeline = {"microbatches": 2 * self.mesh.get("stage", 1)} | self.pipeline
        shards = math.prod(self.mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
        rows = 2 * pipeline["microbatches"] * shards
        train = {"batch_size": rows, "sequence_length": 32, "steps": 1}
        return from_dict({"model": self.model, "mesh": mesh, "pipeline": pipeline, "train": train})


RUNS = [
    Run("data", {"data": 4}),
    Run("fsdp, gather per slot", {"fsdp": 4}),
    Run("fsdp, gather per step", {"fsdp": 4}, pipeline={"weight_gather": "step"}),
    Run("tensor, compiler all-reduces", {"tensor": 4}),
    Run("tensor, sequence parallel", {"tensor": 4, "sequence_parallel": True}),
    Run("stage, 1F1B", {"stage": 4}),
    Run("stage, interleaved", {"stage": 2}, pipeline={"repeats": 2}),
    Run("context, all_gather", {"context": 4, "context_attention": "all_gather"}),
    Run("context, ulysses", {"context": 4, "context_attention": "ulysses"}),
    Run("context, ring", {"context": 4, "context_attention": "ring"}),
    Run(
        "context, all_gather, window of 5",
        {"context": 2, "context_attention": "all_gather"},
        WINDOWS,
    ),
    Run("expert, buffers for all tokens", {"expert": 4}, EXPERTS),
    Run(
        "expert, all_to_all_capacity_factor 1.5",
        {"expert": 4},
        EXPERTS | {"moe": EXPERTS["moe"] | {"all_to_all_capacity_factor": 1.5}},
    ),
    Run(
        "expert, dispatch=dense",
        {"expert": 4},
        EXPERTS | {"moe": EXPERTS["moe"] | {"dispatch": "dense"}},
    ),
    Run("stage x context x fsdp", {"stage": 2, "context": 2, "fsdp": 2}),
    Run("stage x expert x fsdp", {"stage": 2, "expert": 2, "fsdp": 2}, EXPERTS),
    Run("expert x context x fsdp", {"expert": 2, "context": 2, "fsdp": 2}, EXPERTS),
]


def rows_of(run: Run) -> list[list[str]]:
    """Return the table rows of a run, one for each combination of axes with traffic."""
    config = run.config
    count = math.prod(getattr(config.mesh, f"ici_{axis}") for axis in MESH_AXES)
    steps = build_steps(config, jax.devices()[:count])
    profile, _ = profile_step(steps.compile_train().as_text(), steps, config.pipeline.weight_gather)
    found: dict[str, float] = defaultdict(float)
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for each in of_program(profile.collectives, steps.param_layout.mesh):
        if each.total_bytes > NUMBERS:
            found[each.axes] += each.total_bytes
            kinds[each.axes][each.kind] += each.count
    run_of = (
        Sizes(config).on_platform("cpu"),
        steps.train_schedule,
        float(config.pipeline.remat != "none"),
    )
    wanted = {axes: sent for (axes, _), sent in step_traffic(*run_of).items()}
    counts, rows = count_collectives(*run_of), []
    for axes in sorted(found.keys() | wanted.keys()):
        sent, form = found.get(axes, 0.0), wanted.get(axes, 0.0)
        count = sum(n for kind, n in kinds[axes].items() if kind != "all-reduce")
        listed = ", ".join(f"{n:.0f} {kind}" for kind, n in sorted(kinds[axes].items()))
        equal = count == counts.get(axes, 0.0) and abs(sent - form) <= NUMBERS
        numbers = [f"{count:.0f}", f"{counts.get(axes, 0.0):.0f}", f"{sent:,.0f}", f"{form:,.0f}"]
        rows.append([axes, listed, *numbers, "yes" if equal else "no"])
    return rows


def table() -> str:
    """Compile all runs and return the Markdown table."""
    head = [
        "run",
        "axes",
        "collectives",
        "without all-reduces",
        "closed form",
        "bytes sent",
        "closed form",
    ]
    head.append("equal")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for run in RUNS:
        print(f"compiling {run.name}", file=sys.stderr)
        for place, cells in enumerate(rows_of(run)):
            lines.append("| " + " | ".join(["" if place else run.name, *cells]) + " |")
    return "\n".join(lines)


PREAMBLE = """\
# Bytes sent per device and step, by mesh axis

> **Compiler report.** The bytes are those of the compiled program; nothing was timed.

`python benchmarks/collectives.py --write`. The model has 4 layers of width 64 in float32, with two
sequences of 32 tokens per device and microbatch. The model was compiled for CPUs. All counts are
exact, and no time was measured. The table lists the number of bytes that one device sends in a
step. All-gathers, reduce-scatters and all-reduces are counted as ring algorithms. Reductions of
losses and statistics smaller than 1100 bytes are omitted. The closed-form expressions are those of
`maxpipe plan`. The bytes of all-reduces are compared, but not the number of all-reduces, because
compilers merge them. Over the tensor axis, the compiler inserts the all-reduces. In the backward
pass, the compiler reduces the input gradient of each weight matrix separately. The closed-form
expression excludes the all-reduces of the embedding and the loss head. With sequence parallelism,
all other collectives are explicit in the program.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    page = table()
    print(page)
    if options.write:
        target = Path(__file__).with_suffix(".md")
        target.write_text(PREAMBLE + page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
