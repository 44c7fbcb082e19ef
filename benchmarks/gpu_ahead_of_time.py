"""Compare the GPU memory that `maxpipe plan` predicts with the memory that XLA reports.

    python benchmarks/gpu_ahead_of_time.py            # prints the table
    python benchmarks/gpu_ahead_of_time.py --write    # and writes gpu_ahead_of_time.md
    python benchmarks/gpu_ahead_of_time.py --only 70b # only rows whose name contains 70b

If `--write` is combined with `--only`, the page keeps the compiler results of all other rows.

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
    (
        *("olmo3-7b", "h100:8", 1),
        "mesh.ici_fsdp=8 train.batch_size=8 train.sequence_length=4096 pipeline.remat=names",
    ),
    (
        *("smollm3-3b", "h100:8", 1),
        "mesh.ici_stage=4 mesh.ici_fsdp=2 train.batch_size=32 train.sequence_length=4096 "
        "pipeline.microbatches=8 pipeline.repeats=3",
    ),
    (
        *("ministral3-8b", "h100:8", 1),
        "mesh.ici_fsdp=8 train.batch_size=8 train.sequence_length=16384 pipeline.remat=full",
    ),
    (
        *("llama4-scout-109b-a17b", "h100:8", 4),
        "model.num_layers=16 mesh.dcn_stage=4 mesh.ici_fsdp=8 train.batch_size=64 "
        "train.sequence_length=4096 pipeline.microbatches=8 pipeline.schedule=zb_h1",
    ),
    (
        *("gemma4-26b-a4b", "h100:8", 2),
        "mesh.dcn_fsdp=2 mesh.ici_expert=8 train.batch_size=16 train.sequence_length=4096",
    ),
    (
        *("gemma4-e4b", "h100:8", 1),
        "mesh.ici_stage=2 mesh.ici_fsdp=4 train.batch_size=32 train.sequence_length=4096 "
        "pipeline.microbatches=4",
    ),
    (
        *("qwen3.5-9b", "h100:8", 2),
        "mesh.dcn_stage=2 mesh.ici_fsdp=8 pipeline.repeats=2 train.batch_size=64 "
        "train.sequence_length=2048 pipeline.microbatches=8 pipeline.remat=names",
    ),
    (
        *("qwen3.5-35b-a3b", "h100:8", 4),
        "mesh.dcn_fsdp=4 mesh.ici_expert=8 train.batch_size=32 train.sequence_length=4096",
    ),
    (
        *("qwen3.5-122b-a10b", "h100:8", 4),
        "model.num_layers=16 mesh.dcn_stage=4 mesh.ici_fsdp=8 train.batch_size=64 "
        "train.sequence_length=2048 pipeline.microbatches=8 pipeline.schedule=1f1b",
    ),
    (
        *("glm4.5-air-106b-a12b", "h100:8", 4),
        "model.num_layers=9 mesh.dcn_fsdp=4 mesh.ici_expert=8 train.batch_size=32 "
        "train.sequence_length=4096 pipeline.remat=full",
    ),
    (
        *("minimax-m2-230b-a10b", "h100:8", 4),
        "model.num_layers=8 mesh.dcn_stage=2 mesh.dcn_fsdp=2 mesh.ici_fsdp=8 train.batch_size=128 "
        "train.sequence_length=2048 pipeline.microbatches=8 pipeline.weight_gather=window "
        "pipeline.repeats=4",
    ),
    (
        *("kimi-k2-1t-a32b", "h100:8", 8),
        "model.num_layers=3 mesh.dcn_fsdp=8 mesh.ici_expert=8 train.batch_size=64 "
        "train.sequence_length=2048",
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


def name_of(row: tuple[str, str, int, str]) -> str:
    model, topology, slices, keys = row
    times = f" x {slices}" if slices > 1 else ""
    return f"{model} {topology}{times}: {keys}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="compile only rows whose name contains TEXT"
    )
    options = parser.parse_args()
    if not any(options.only in name_of(row) for row in ROWS):
        parser.error(f"--only {options.only}: no row has this text in its name")
    target = Path(__file__).with_suffix(".md")
    cells = [line.strip("| ").split(" | ") for line in target.read_text("utf-8").splitlines()]
    written = {name: values for name, *values in cells if values}
    lines, versions = [], ""
    for row in ROWS:
        name, ratios = name_of(row), {}
        if options.only in name:
            stated = reported("compile", row)
            used = {
                key: each
                for key, each in stated["versions"].items()
                if key not in ("jaxlib", "libtpu")
            }
            versions = ", ".join(f"{key} {each}" for key, each in used.items())
            sizes = stated["argument_bytes"] / GIB, stated["total_bytes"] / GIB
            attention, seconds = stated["attention"], f"{stated['compile_seconds']:.0f} s"
        elif name in written:
            attention, arguments, most, predicted, ratio, seconds = written[name]
            sizes = float(arguments), float(most)
            ratios = {predicted: ratio}  # more precise than the rounded sizes
        else:
            continue
        total = reported("plan", row)["total_bytes"] / GIB
        ratio = ratios.get(f"{total:.2f}", f"{total / sizes[1]:.3f}")
        lines.append(
            f"| {name} | {attention} | {sizes[0]:.2f} | {sizes[1]:.2f} "
            f"| {total:.2f} | {ratio} | {seconds} |"
        )
        print(lines[-1], flush=True)
    if options.write:
        text = HEAD.format(versions=versions) + "\n".join(lines) + "\n"
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
