"""Compare students that are trained with and without a teacher for the same number of steps.

    python benchmarks/distill.py           # prints the table
    python benchmarks/distill.py --write   # and writes distill.md and distill.json

`scripts/pictures.py` draws docs/pictures/distill.svg from distill.json.

The teacher is trained once. Each kind of student is trained with three seeds, which determine the
initial parameters and the document order. All computations are in float32 on one virtual device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
CURVES = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)
STEPS = 120
COMMON = f"""
data: {{source: corpus}}
train: {{steps: {STEPS}, batch_size: 8, sequence_length: 64}}
optim: {{learning_rate: 5.0e-3, warmup_steps: 10}}
eval: {{every: 20, batches: 16, batch_size: 64}}
log: {{every: 20, trackers: []}}
runtime: {{platform: cpu}}
"""
TEACHER = """
model: {num_layers: 4, d_model: 96, num_heads: 4, num_kv_heads: 2, head_dim: 24, d_mlp: 256,
        vocab_size: 259, compute_dtype: float32}
train: {steps: 800, batch_size: 16}
eval: {every: 200}
run: {seed: 7}
"""
STUDENT = """
model: {num_layers: 2, d_model: 32, num_heads: 2, num_kv_heads: 1, head_dim: 16, d_mlp: 96,
        vocab_size: 259, compute_dtype: float32}
"""
TAUGHT = "train.objective=distill distill.teacher=teacher@newest distill.top_k=32 "
RUNS = {
    "alone": "",
    "taught": TAUGHT + "distill.weight=0.9",
    "warm": TAUGHT + "distill.weight=0.9 distill.temperature=2",
    "reverse": TAUGHT + "distill.weight=0.9 distill.direction=reverse",
}
WORDS = {
    "alone": "cross entropy only",
    "taught": "forward KL, weight 0.9",
    "warm": "forward KL, weight 0.9, temperature 2",
    "reverse": "reverse KL, weight 0.9",
}


def maxpipe(folder: Path, *arguments: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "maxpipe", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        sys.exit(ran.stdout + ran.stderr)


def curve(run: Path) -> list[tuple[int, float]]:
    """Return the step and the loss of each evaluation of a run, in nats per token."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(each["step"], each["eval/loss"]) for each in records if "eval/loss" in each]


def loss(run: Path) -> float:
    """Return the loss of a run's last evaluation, in nats per token."""
    return curve(run)[-1][1]


def measured(folder: Path, names: list[str]) -> dict[str, list[float]]:
    """Return the teacher's loss, and each training method's loss for every seed."""
    for name, text in (("common", COMMON), ("teacher", TEACHER), ("student", STUDENT)):
        (folder / f"{name}.yml").write_text(text)
    maxpipe(folder, "train", "common.yml", "teacher.yml", "run.name=teacher")
    found = {"teacher": [loss(folder / "runs" / "teacher")]}
    for name in names:
        found[name] = []
        for seed in SEEDS:
            run, keys = f"{name}-{seed}", RUNS[name].split()
            given = (f"run.name={run}", f"run.seed={seed}", *keys)
            maxpipe(folder, "train", "common.yml", "student.yml", *given)
            found[name].append(loss(folder / "runs" / run))
    return found


def curves_of(folder: Path) -> str:
    """Return the evaluation losses of all students, as JSON with one entry per run."""
    runs = sorted((folder / "runs").glob("*-[0-9]"))
    shown = {run.name: {"eval/loss": curve(run)} for run in runs}
    return json.dumps(shown, separators=(",", ":")) + "\n"


def page(found: dict[str, list[float]]) -> str:
    lines = [
        "# Distillation",
        "",
        "`python benchmarks/distill.py --write`. The table shows losses on held-out documents for",
        f"three seeds, in nats per byte. Students are trained for {STEPS} steps of 8 x 64 tokens",
        "on the text of the quickstart config. The teacher has 11 times as many parameters and was",
        "trained for 800 steps of 16 x 64 tokens.",
        f"The loss of the teacher is {found['teacher'][0]:.3f}.",
        "",
        "| student | seed 0 | seed 1 | seed 2 | mean | improvement |",
        "|---|---|---|---|---|---|",
    ]
    alone = found["alone"]
    for name, values in found.items():
        if name == "teacher":
            continue
        mean, less = sum(values) / len(values), [a - b for a, b in zip(alone, values, strict=True)]
        told = "" if name == "alone" else f"{min(less):.3f} to {max(less):.3f}"
        cells = [WORDS[name], *(f"{each:.3f}" for each in values), f"{mean:.3f}", told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=RUNS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = page(measured(folder, options.only))
        print(text)
        if options.write:
            PAGE.write_text(text)
            CURVES.write_text(curves_of(folder))


if __name__ == "__main__":
    main()
