"""Compare table-driven schedules with a circular autodiff pipeline and with no pipeline.

    python benchmarks/schedules.py            # prints the table
    python benchmarks/schedules.py --write    # and writes benchmarks/schedules.md

All programs run in one process with 8 virtual CPU devices and the same model. Their steps
alternate, so that other load on the machine affects all programs. Times are medians of ratios to a
reference program. Memory and collectives are read from the compiled programs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from references import circular_loss, sharded_loss

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.models.config import ModelConfig
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.engine import StepGradients
from maxpipe.step.build import build_steps
from maxpipe.step.step import Steps

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
STAGES, FSDP, REPEATS, TOKENS, ROWS_PER_MICROBATCH = 4, 2, 2, 256, 2
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
REFERENCE = "circular, autodiff through the scan"
NO_PIPELINE = "no pipeline, fsdp 8, autodiff"


@dataclass(frozen=True)
class Choice:
    """A program, which is one row of the table."""

    name: str
    schedule: str = "interleaved"
    gather: str = "iteration"
    remat: str = "full"
    repeats: int = REPEATS
    group: int = 0

    @property
    def stages(self) -> int:
        return 1 if self.name == NO_PIPELINE else STAGES


CHOICES = [
    Choice(REFERENCE, "circular"),
    Choice(NO_PIPELINE, repeats=1),
    *(
        Choice(f"{schedule}, gather per iteration", schedule)
        for schedule in ("circular", "breadth_first", "interleaved")
    ),
    Choice("1f1b, one repeat, gather per iteration", "1f1b", repeats=1),
    Choice("interleaved, gather per step", gather="step"),
    Choice("interleaved, gather per step, activations saved by name", gather="step", remat="names"),
    Choice("zb_v, gather per step, activations saved by name", "zb_v", "step", "names"),
    Choice("zb_h1, gather per step, activations saved by name", "zb_h1", "step", "names", 1),
]
GPIPE = Choice("gpipe, one repeat, gather per iteration", "gpipe", repeats=1)
GROWING = [CHOICES[0], GPIPE, CHOICES[3], CHOICES[4], CHOICES[6], CHOICES[8]]


@dataclass
class Program:
    """A compiled gradient computation and its inputs."""

    name: str
    run: Callable[[], Any]
    layout: Any
    temp_bytes: int
    collectives: dict[str, int]
    bubble: float


def steps_for(choice: Choice, microbatches: int) -> Steps:
    sizes = MeshConfig(ici_stage=choice.stages, ici_fsdp=STAGES * FSDP // choice.stages)
    mesh = build_mesh(sizes, jax.devices())
    return build_steps(
        mesh,
        model=MODEL,
        pipeline=PipelineConfig(
            schedule=choice.schedule,
            repeats=choice.repeats,
            microbatches=microbatches if choice.stages > 1 else 1,
            group=choice.group,
            weight_gather=choice.gather,  # type: ignore[arg-type]
            remat=choice.remat,  # type: ignore[arg-type]
        ),
        optim=OptimConfig(),
        train=TrainConfig(batch_size=microbatches * ROWS_PER_MICROBATCH, sequence_length=TOKENS),
        total_steps=1,
        rules=AxisRules.from_config(sizes),
        seed=0,
        byte_lengths=np.ones(MODEL.vocab_size, np.int32),
    )


def program(choice: Choice, microbatches: int) -> Program:
    steps = steps_for(choice, microbatches)
    parts = steps.param_layout
    if choice.name == REFERENCE:
        loss = partial(circular_loss, parts.decoder, parts.layout, parts.mesh, microbatches)
        function = jax.value_and_grad(loss)
    elif choice.name == NO_PIPELINE:
        function = jax.value_and_grad(partial(sharded_loss, parts.decoder, parts.mesh, parts.specs))
    else:
        run = steps.engine.value_and_grad(steps.train_schedule)
        function = partial(_loss_and_gradients, run)
    params, batch = steps.init().params, _batch(steps)
    out = (None, steps.state_sharding.params)
    with jax.set_mesh(parts.mesh):
        compiled = jax.jit(function, out_shardings=out).lower(params, batch).compile()
    text = compiled.as_text() or ""
    return Program(
        choice.name,
        lambda: jax.block_until_ready(compiled(params, batch)),
        parts,
        compiled.memory_analysis().temp_size_in_bytes,
        {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES},
        steps.train_schedule.idle_fraction(),
    )


def _loss_and_gradients(
    run: Callable[..., StepGradients], params: Any, batch: dict[str, jax.Array]
) -> tuple[jax.Array, Any]:
    found = run(params, batch, None)
    return found.loss, found.gradients


def _batch(steps: Steps) -> dict[str, jax.Array]:
    rows, tokens = steps.shape
    ids = jax.random.randint(jax.random.key(1), (rows, tokens + 1), 0, MODEL.vocab_size)
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": jnp.ones((rows, tokens), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(tokens), (rows, tokens)),
        "loss_mask": jnp.ones((rows, tokens), jnp.float32),
        "example_ids": jnp.arange(rows),
    }
    return jax.device_put(batch, steps.batch_sharding)


def measure(programs: list[Program], rounds: int) -> dict[str, dict[str, float]]:
    """Return median wall and CPU times relative to the two reference programs in each round."""
    for each in programs:
        each.run()
    ratios: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in programs}
    for _ in range(rounds):
        spent = {}
        for each in programs:
            wall, cpu = time.perf_counter(), time.process_time()
            each.run()
            spent[each.name] = (time.perf_counter() - wall, time.process_time() - cpu)
        circular, sharded = spent[REFERENCE], spent[NO_PIPELINE]
        for name, (wall, cpu) in spent.items():
            ratios[name].append((wall / circular[0], cpu / circular[1], cpu / sharded[1]))
    return {
        name: dict(
            zip(("wall", "cpu", "cpu_sharded"), map(statistics.median, zip(*found)), strict=True)  # noqa: B905
        )
        for name, found in ratios.items()
    }


def agree(programs: list[Program]) -> float:
    """Return the largest gradient error, relative to the maximum of the reference gradient."""
    wanted = jax.jit(programs[0].layout.unstack)(programs[0].run()[1])
    worst = 0.0
    for each in programs[1:]:
        found = jax.jit(each.layout.unstack)(each.run()[1])
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


def tables(rounds: int) -> str:
    programs = [program(choice, 8) for choice in CHOICES]
    error = agree(programs)
    medians = measure(programs, rounds)
    reference = programs[0].temp_bytes
    lines = [
        f"Model: {MODEL.num_layers} layers, D {MODEL.d_model}, F {MODEL.d_mlp}, "
        f"{MODEL.num_heads} heads, T {TOKENS}, V {MODEL.vocab_size}, float32. The mesh is {STAGES} "
        f"stages x fsdp {FSDP}, with {REPEATS} repeats unless stated otherwise and "
        f"{ROWS_PER_MICROBATCH} sequences per microbatch. Each program computes the loss and the "
        "gradients.",
        "",
        f"M = 8. Times are medians of {rounds} rounds, relative to the first row. The column "
        "'CPU time / fsdp 8' is relative to the second row. Collectives are counted in the program "
        f"text. Gradients differ by at most {error:.1e} of the largest entry in their array.",
        "",
        "| program | wall time | CPU time | CPU time / fsdp 8 | temp MiB | temp ratio | bubble | "
        + " | ".join(COLLECTIVES)
        + " |",
        "|---" * (7 + len(COLLECTIVES)) + "|",
    ]
    for each in programs:
        found = medians[each.name]
        counts = " | ".join(str(each.collectives[kind]) for kind in COLLECTIVES)
        bubble = "-" if each.name == NO_PIPELINE else f"{100 * each.bubble:.1f}%"
        lines.append(
            f"| {each.name} | {found['wall']:.2f} | {found['cpu']:.2f} | "
            f"{found['cpu_sharded']:.2f} | {each.temp_bytes / 2**20:.1f} | "
            f"{each.temp_bytes / reference:.2f} | {bubble} | {counts} |"
        )
    lines += ["", "Temporary memory in MiB for M microbatches of the same size:", ""]
    counts = (8, 16, 32, 64)
    lines.append("| program | " + " | ".join(f"M = {m}" for m in counts) + " |")
    lines.append("|---" * (1 + len(counts)) + "|")
    for choice in GROWING:
        sizes = [program(choice, count).temp_bytes / 2**20 for count in counts]
        lines.append(f"| {choice.name} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |")
    lines += [
        "",
        "The scan of the reference saves its full carry in every tick, including the wrap-around "
        "buffer of all microbatches. Its memory therefore grows with M. The CPU devices share two "
        "cores, so an idle stage costs no time. The times therefore compare the amount of "
        "computation, not bubbles.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write benchmarks/schedules.md")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES * FSDP)
    text = tables(options.rounds)
    print(text)
    if options.write:
        header = (
            "# Schedules compared with autodiff through the scan\n\n"
            f"`python benchmarks/schedules.py --write`, {time.strftime('%Y-%m-%d')}, "
            f"jax {jax.__version__}, {STAGES * FSDP} virtual CPU devices.\n\n"
        )
        Path(__file__).with_suffix(".md").write_text(header + text)


if __name__ == "__main__":
    main()
