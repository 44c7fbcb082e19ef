"""Table-driven schedules against the circular pipeline differentiated through its scan.

    python benchmarks/schedules.py            # prints the table
    python benchmarks/schedules.py --write    # and writes benchmarks/schedules.md

One process, 8 virtual CPU devices, one model. Steps of all programs run in turn, so that
whatever else the machine does hits all of them; times are medians of ratios, memory and
collectives are the compiler's own numbers.
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
from circular_autodiff import loss as circular_loss

from maxpipe.config.schema import MeshConfig, ModelConfig, OptimConfig, PipelineConfig, TrainConfig
from maxpipe.mesh import build_mesh
from maxpipe.sharding import AxisRules
from maxpipe.train.step import Steps, partition

MODEL = ModelConfig(
    num_layers=8,
    d_model=256,
    num_heads=4,
    num_kv_heads=4,
    head_size=64,
    d_mlp=1024,
    vocab_size=512,
    compute_dtype="float32",
)
STAGES, FSDP, REPEATS, TOKENS, ROWS_PER_MICROBATCH = 4, 2, 2, 256, 2
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
REFERENCE = "circular, autodiff through the scan"


@dataclass
class Program:
    """One compiled gradient computation and its inputs."""

    name: str
    run: Callable[[], Any]
    temp_bytes: int
    collectives: dict[str, int]
    bubble: float


def steps_for(schedule: str, weight_gather: str, microbatches: int) -> Steps:
    sizes = MeshConfig(ici_stage=STAGES, ici_fsdp=FSDP)
    mesh = build_mesh(sizes, jax.devices())
    return partition(
        mesh,
        model=MODEL,
        pipeline=PipelineConfig(
            schedule=schedule,  # type: ignore[arg-type]
            repeats=REPEATS if schedule != "gpipe" else 1,
            microbatches=microbatches,
            weight_gather=weight_gather,  # type: ignore[arg-type]
        ),
        optim=OptimConfig(),
        train=TrainConfig(batch_size=microbatches * ROWS_PER_MICROBATCH, sequence_length=TOKENS),
        total_steps=1,
        rules=AxisRules.from_config(sizes),
        seed=0,
        byte_lengths=np.ones(MODEL.vocab_size, np.int32),
    )


def program(name: str, schedule: str, weight_gather: str, microbatches: int) -> Program:
    steps = steps_for(schedule, weight_gather, microbatches)
    parts = steps.partition
    if name == REFERENCE:
        loss = partial(circular_loss, parts.decoder, parts.layout, parts.mesh, microbatches)
        function = jax.value_and_grad(loss)
    else:
        run = steps.engine.value_and_grad(steps.train_schedule)
        function = lambda params, batch: run(params, batch, None)  # noqa: E731
    params, batch = steps.init().params, _batch(steps)
    out = (None, steps.state_sharding.params)
    with jax.set_mesh(parts.mesh):
        compiled = jax.jit(function, out_shardings=out).lower(params, batch).compile()
    text = compiled.as_text() or ""
    return Program(
        name,
        lambda: jax.block_until_ready(compiled(params, batch)),
        compiled.memory_analysis().temp_size_in_bytes,
        {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES},
        steps.train_schedule.idle_fraction(),
    )


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


def measure(programs: list[Program], rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU time of each program relative to the reference of its round."""
    for each in programs:
        each.run()
    ratios: dict[str, list[tuple[float, float]]] = {each.name: [] for each in programs}
    for _ in range(rounds):
        spent = {}
        for each in programs:
            wall, cpu = time.perf_counter(), time.process_time()
            each.run()
            spent[each.name] = (time.perf_counter() - wall, time.process_time() - cpu)
        base = spent[REFERENCE]
        for name, (wall, cpu) in spent.items():
            ratios[name].append((wall / base[0], cpu / base[1]))
    medians = {}
    for name, pairs in ratios.items():
        wall, cpu = zip(*pairs, strict=True)
        medians[name] = (statistics.median(wall), statistics.median(cpu))
    return medians


def agree(programs: list[Program]) -> float:
    """Largest difference of any gradient from the reference, relative to the leaf's maximum."""
    _, wanted = programs[0].run()
    worst = 0.0
    for each in programs[1:]:
        _, found = each.run()
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


def tables(rounds: int) -> str:
    choices = [(REFERENCE, "circular", "iteration")] + [
        (f"{schedule}, gather per {gather}", schedule, gather)
        for schedule in ("circular", "1f1b", "interleaved", "breadth_first")
        for gather in ("iteration", "step")
        if not (schedule != "interleaved" and gather == "step")
    ]
    programs = [program(*choice, 8) for choice in choices]
    error = agree(programs)
    medians = measure(programs, rounds)
    lines = [
        f"Model: {MODEL.num_layers} layers, D {MODEL.d_model}, F {MODEL.d_mlp}, "
        f"{MODEL.num_heads} heads, T {TOKENS}, V {MODEL.vocab_size}, float32; stages {STAGES} x "
        f"fsdp {FSDP}, {REPEATS} repeats, {ROWS_PER_MICROBATCH} sequences per microbatch.",
        "",
        f"M = 8. Times relative to the first row (medians of {rounds} rounds); collectives are "
        f"counted in the program text. Gradients differ by at most {error:.1e} of a leaf's "
        "maximum.",
        "",
        "| program | wall time | CPU time | temp MiB | bubble | " + " | ".join(COLLECTIVES) + " |",
        "|---" * (5 + len(COLLECTIVES)) + "|",
    ]
    for each in programs:
        wall, cpu = medians[each.name]
        counts = " | ".join(str(each.collectives[kind]) for kind in COLLECTIVES)
        lines.append(
            f"| {each.name} | {wall:.2f} | {cpu:.2f} | {each.temp_bytes / 2**20:.1f} | "
            f"{100 * each.bubble:.1f}% | {counts} |"
        )
    lines += ["", "Temporary MiB by number of microbatches of the same size:", ""]
    counts = (8, 16, 32, 64)
    lines.append("| program | " + " | ".join(f"M = {m}" for m in counts) + " |")
    lines.append("|---" * (1 + len(counts)) + "|")
    for choice in [choices[0], *choices[-3:]]:
        sizes = [program(*choice, count).temp_bytes / 2**20 for count in counts]
        lines.append(f"| {choice[0]} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |")
    lines += [
        "",
        "The reference's scan saves its whole carry in every tick, the wrap-around store of all "
        "microbatches included: hence its growth.",
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
            "# Schedules against autodiff through the scan\n\n"
            f"`python benchmarks/schedules.py --write`, {time.strftime('%Y-%m-%d')}, "
            f"jax {jax.__version__}, {STAGES * FSDP} virtual CPU devices.\n\n"
        )
        Path(__file__).with_suffix(".md").write_text(header + text)


if __name__ == "__main__":
    main()
