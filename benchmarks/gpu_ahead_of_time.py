"""Compare the GPU memory that `maxpipe plan` predicts with the memory that XLA reports.

    python benchmarks/gpu_ahead_of_time.py            # prints the table
    python benchmarks/gpu_ahead_of_time.py --write    # and writes gpu_ahead_of_time.md

For each row, `maxpipe compile` compiles the real train step for GPUs ahead of time
(`pip install '.[gpu-aot]'`), and `maxpipe plan` predicts its memory. No GPU is used. The script
runs for five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GIB = 2**30
PIPELINED = "train.batch_size=64 train.sequence_length=4096 pipeline.microbatches=8"
ROWS = [
    ("quickstart", "h100:8", 1, "runtime.platform=auto"),
    ("llama3-1b", "h100:8", 1, "mesh.ici_fsdp=8 train.batch_size=8 train.sequence_length=8192"),
    ("llama3-8b", "h100:8", 1, "mesh.ici_fsdp=8 train.batch_size=8 train.sequence_length=4096"),
    (
        *("llama3-8b", "h100:8", 1),
        "mesh.ici_fsdp=8 train.batch_size=8 train.sequence_length=8192 pipeline.remat=names",
    ),
    (
        *("llama3-8b", "h100:8", 1),
        "mesh.ici_fsdp=8 train.batch_size=8 train.sequence_length=2048 pipeline.remat=none",
    ),
    (
        *("llama3-8b", "h100:8", 1),
        "mesh.ici_stage=4 mesh.ici_fsdp=2 train.batch_size=16 train.sequence_length=2048 "
        "pipeline.microbatches=8 pipeline.weight_gather=step",
    ),
    ("llama3-8b", "h100:8", 2, f"mesh.dcn_stage=2 mesh.ici_fsdp=8 pipeline.repeats=2 {PIPELINED}"),
    (
        *("llama3-8b", "h100:8", 2),
        f"mesh.dcn_stage=2 mesh.ici_fsdp=8 pipeline.repeats=2 pipeline.weight_gather=window "
        f"{PIPELINED}",
    ),
    (
        *("llama3-70b", "h100:8", 8),
        "mesh.dcn_stage=8 mesh.ici_fsdp=8 train.batch_size=128 train.sequence_length=4096 "
        "pipeline.microbatches=16",
    ),
    (
        *("mixtral-8x7b", "h200:8", 4),
        "mesh.dcn_stage=4 mesh.ici_fsdp=8 train.batch_size=128 train.sequence_length=4096 "
        "pipeline.microbatches=8 pipeline.schedule=zb_h1",
    ),
]
HEAD = """\
# Predicted memory compared with XLA for GPUs

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/gpu_ahead_of_time.py --write`, with {versions}. No GPU was used, and no kernel
was timed (docs/guides/plan.md lists the consequences). Sizes are in GiB. The columns "arguments"
and "temp" (temporaries) are reported by the compiler, and "predicted" is the total predicted by
`maxpipe plan`.

| run | attention | arguments | arguments + temp | predicted | ratio | compiled in |
|---|---|---|---|---|---|---|
"""


def reported(command: str, row: tuple[str, str, int, str]) -> dict[str, Any]:
    model, topology, slices, keys = row
    steps = [] if model == "quickstart" else ["train.steps=10"]
    arguments = [model, *steps, *keys.split(), "--topology", topology, "--slices", str(slices)]
    found = subprocess.run(
        [sys.executable, "-m", "maxpipe", command, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(found.stderr)
    return json.loads(found.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines, versions = [], ""
    for row in ROWS:
        model, topology, slices, keys = row
        stated, predicted = reported("compile", row), reported("plan", row)
        used = {name: each for name, each in stated["versions"].items() if name != "jaxlib"}
        versions = ", ".join(f"{name} {each}" for name, each in used.items())
        most, total = stated["total_bytes"] / GIB, predicted["total_bytes"] / GIB
        times = f" x {slices}" if slices > 1 else ""
        name = f"{model} {topology}{times}: {keys}"
        lines.append(
            f"| {name} | {stated['attention']} | {stated['argument_bytes'] / GIB:.2f} | {most:.2f} "
            f"| {total:.2f} | {total / most:.3f} | {stated['compile_seconds']:.0f} s |"
        )
        print(lines[-1], flush=True)
    if options.write:
        text = HEAD.format(versions=versions) + "\n".join(lines) + "\n"
        (ROOT / "benchmarks" / "gpu_ahead_of_time.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
