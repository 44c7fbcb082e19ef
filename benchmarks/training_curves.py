"""Run the training examples of the tutorials, and store the metrics that their pictures show.

    python benchmarks/training_curves.py                 # all examples, about ten minutes
    python benchmarks/training_curves.py resume grpo     # some of them

The metrics are written to training_curves.json. `scripts/pictures.py` draws the pictures from this
file, so that drawing needs no training. The examples are the command blocks of the pages, run on
virtual CPU devices. `resume` trains the model of `RESUMED` twice: without interruption, and killed
with `kill -9` and started again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".json")
# example -> page, marker of its command blocks, run folder, metrics
PAGES = {
    "sft": ("finetune", "sft", "chat", ("train/loss", "eval/loss", "eval/sums/accuracy")),
    "grpo": ("grpo", "run", "rewarded", ("rollout/reward", "train/entropy")),
    "preferences": (
        "preferences",
        "run",
        "prefer",
        ("train/margin", "eval/margin", "train/loss", "eval/loss"),
    ),
}
RESUMED = """
model: {num_layers: 2, d_model: 64, num_heads: 4, num_kv_heads: 2, head_dim: 16, d_mlp: 256,
        vocab_size: 259, compute_dtype: float32}
data: {source: corpus}
train: {steps: 100, batch_size: 8, sequence_length: 64}
optim: {learning_rate: 5.0e-3, warmup_steps: 10}
checkpoint: {every: 20}
eval: {batches: 0}
log: {every: 1, trackers: []}
runtime: {platform: cpu}
"""
KILLED_AT = 50
Curves = dict[str, list[tuple[int, float]]]


def metrics(run: Path, tags: tuple[str, ...]) -> Curves:
    """Return the (step, value) pairs of each tag, rounded to six digits."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {
        tag: [(each["step"], float(f"{each[tag]:.6g}")) for each in records if tag in each]
        for tag in tags
    }


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}


def from_page(folder: Path, page: str, marker: str, run: str, tags: tuple[str, ...]) -> Curves:
    """Run the command blocks of a page, and return the metrics of one of its runs."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(rf"<!-- {marker} -->\n```\n(.*?)```", text, re.DOTALL):
        subprocess.run(["bash", "-euc", block], cwd=folder, env=environment(), check=True)
        if (folder / "runs" / run / "metrics.jsonl").exists():
            break  # later blocks use the trained model
    return metrics(folder / "runs" / run, tags)


def resumed(folder: Path) -> dict[str, Curves]:
    """Return the losses of an uninterrupted run, and of another run before and after a kill."""
    (folder / "small.yml").write_text(RESUMED)
    command = [sys.executable, "-m", "maxpipe", "train", "small.yml"]
    subprocess.run([*command, "run.name=whole"], cwd=folder, env=environment(), check=True)
    killed = folder / "runs" / "killed"
    process = subprocess.Popen([*command, "run.name=killed"], cwd=folder, env=environment())
    while not (killed / "metrics.jsonl").exists() or (
        metrics(killed, ("train/loss",))["train/loss"][-1:] < [(KILLED_AT, 0.0)]
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = metrics(killed, ("train/loss",))
    subprocess.run([*command, "run.name=killed"], cwd=folder, env=environment(), check=True)
    after = metrics(killed, ("train/loss",))
    return {"whole": metrics(folder / "runs" / "whole", ("train/loss",)), "before": before} | {
        "after": after
    }


def main() -> None:
    names = sys.argv[1:] or [*PAGES, "resume"]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name == "resume":
                found: object = resumed(Path(folder))
            else:
                found = {PAGES[name][2]: from_page(Path(folder), *PAGES[name])}
        stored = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
        stored[name] = found
        DATA.write_text(json.dumps(stored, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
