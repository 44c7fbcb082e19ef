"""Measure the cost of layer statistics per training step on a CPU.

    python benchmarks/layer_stats.py            # prints the table
    python benchmarks/layer_stats.py --write    # and writes layer_stats.md

Each round times one step without statistics and one step of every kind with statistics, in
alternating order. All steps continue the same training state.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxpipe.config.sections.layer_stats import LayerStatsConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.models.config import ModelConfig
from maxpipe.models.count import num_params
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.step.build import build_steps
from maxpipe.step.layer_statistics import summarize
from maxpipe.step.step import LAYER_STATS, Steps

EVERY = 10
ROWS, TOKENS = 4, 256
MODEL = ModelConfig(
    num_layers=12,
    d_model=768,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    d_mlp=2048,
    vocab_size=9984,
    compute_dtype="float32",
)
KINDS = {
    "parameters, gradients, updates": LayerStatsConfig(every=EVERY, activations=False),
    "and activations (default)": LayerStatsConfig(every=EVERY),
    "and histograms": LayerStatsConfig(every=EVERY, histograms=True),
}

PREAMBLE = """\
# Cost of layer statistics

`python benchmarks/layer_stats.py --write`, {date}, {machine}, jax {jax}.
A Llama with {params:.0f} M parameters in float32 is trained on {rows} sequences of {tokens} tokens
per step, on one device with 2 microbatches. Each round times one step without statistics and one
step of each kind, alternately.
The table lists medians of {rounds} rounds, in elapsed time and in CPU time of the process. The
column "difference" is the median of the differences of elapsed time within a round, and "per step"
is this difference divided by `layer_stats.every={every}` and by the elapsed time of a step without
statistics. "CPU per step" is the same figure in CPU time.

With `layer_stats.every=0`, no second train step is compiled, and the train step is the same program
as before. The only additional work per step is a comparison on the host.

"""


class Times(NamedTuple):
    """Seconds of the steps of one kind, one entry per round."""

    elapsed: list[float]
    cpu: list[float]


def build() -> Steps:
    """Return the train step of the measured model."""
    mesh = MeshConfig()
    return build_steps(
        build_mesh(mesh, jax.devices()[:1]),
        model=MODEL,
        pipeline=PipelineConfig(microbatches=2),
        optim=OptimConfig(learning_rate=1e-4, warmup_steps=2),
        train=TrainConfig(batch_size=ROWS, sequence_length=TOKENS),
        total_steps=1000,
        rules=AxisRules.from_config(mesh),
        seed=0,
        byte_lengths=np.ones(MODEL.vocab_size, np.int32),
    )


def make_batch(steps: Steps) -> Any:
    """Return a batch of random tokens."""
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, (ROWS, TOKENS + 1), np.int32)
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": np.ones((ROWS, TOKENS), np.int32),
        "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)),
        "loss_mask": np.ones((ROWS, TOKENS), np.float32),
        "example_ids": np.arange(ROWS, dtype=np.int32),
    }
    return jax.device_put(batch, steps.batch_sharding)


def measure(rounds: int, *, histograms: bool) -> tuple[dict[str, Times], dict[str, int]]:
    """Return the times of each kind of step, and its temporary memory in bytes."""
    steps, state = build(), build().init()
    batch, model = make_batch(steps), steps.param_layout.decoder.model
    programs = {"none": steps.compile_train()}
    for name, config in KINDS.items():
        if config.histograms and not histograms:
            continue
        programs[name] = steps.with_layer_statistics(config).compile_train()
    times = {name: Times([], []) for name in programs}
    for number in range(rounds + 1):
        order = list(programs) if number % 2 else list(reversed(programs))
        for name in order:
            start, cpu = time.perf_counter(), time.process_time()
            state, metrics = programs[name](state, batch)
            jax.block_until_ready((state, metrics))
            if LAYER_STATS in metrics:
                summarize(model, metrics[LAYER_STATS])
            if number:  # the first round warms up caches
                times[name].cpu.append(time.process_time() - cpu)
                times[name].elapsed.append(time.perf_counter() - start)
        seconds = {name: round(t.elapsed[-1], 3) for name, t in times.items() if t.elapsed}
        print(number, seconds, flush=True)
    memory = {
        name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()
    }
    return times, memory


def difference(seconds: list[float], plain: list[float]) -> float:
    """Return the median difference within a round, which excludes slow changes of the machine."""
    return statistics.median(own - other for own, other in zip(seconds, plain, strict=True))


def table(times: dict[str, Times], memory: dict[str, int]) -> str:
    """Return the Markdown table of medians."""
    heads = ("statistics", "seconds of a step", "difference", "per step", "CPU per step")
    lines = [f"| {' | '.join(heads)} | temporary memory (MiB) |", "|---" * 6 + "|"]
    plain = times["none"]
    for name, own in times.items():
        more = difference(own.elapsed, plain.elapsed)
        share = more / statistics.median(plain.elapsed) / EVERY
        cpu = difference(own.cpu, plain.cpu) / statistics.median(plain.cpu) / EVERY
        cells = (name, f"{statistics.median(own.elapsed):.3f}", f"{more:.3f}")
        cells += (f"{share:.2%}", f"{cpu:.2%}", f"{memory[name] / 2**20:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def host_seconds() -> float:
    """Return the time of the comparison that decides whether a step records statistics."""
    every, count = LayerStatsConfig().every, 1_000_000
    start = time.perf_counter()
    for step in range(count):
        if every and step % every == 0:
            raise AssertionError
    return (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--histograms", action="store_true", help="also measure histograms")
    options = parser.parse_args()
    times, memory = measure(options.rounds, histograms=options.histograms)
    plain = statistics.median(times["none"].elapsed)
    off = host_seconds()
    page = table(times, memory)
    page += f"\n\nWith `layer_stats.every=0`, the comparison needs {off * 1e9:.0f} ns per step, "
    page += f"which is {100 * off / plain:.7f}% of a step.\n"
    print(page)
    if options.write:
        facts = PREAMBLE.format(
            date=datetime.now(UTC).date(),
            machine=f"{platform.machine()} CPU with {jax.local_device_count()} device",
            jax=jax.__version__,
            params=num_params(build().param_layout.decoder.model) / 1e6,
            rows=ROWS,
            tokens=TOKENS,
            rounds=options.rounds,
            every=EVERY,
        )
        Path(__file__).with_suffix(".md").write_text(facts + page, encoding="utf-8")


if __name__ == "__main__":
    main()
