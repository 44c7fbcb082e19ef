"""Measure low-precision matmuls: losses over 500 steps, and cycles from the TPU compiler.

    python benchmarks/low_precision.py            # prints the tables
    python benchmarks/low_precision.py --write    # and writes benchmarks/low_precision.md
    python benchmarks/low_precision.py mxfp8      # prints the losses of the default and of mxfp8

Losses are from `maxpipe train` on virtual devices, with the model and data of the quickstart
config. Cycles are from train steps of four Llama-3-8B layers, which libtpu compiles on this machine
(`pip install '.[tpu]'`) without a TPU. Each training run and each compilation runs in a separate
process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

STEPS, EVERY, SHOWN = 500, 10, (50, 100, 200, 300, 400, 500)
SAME = "model.matmul_weight_gradients=same"
WAYS = {
    "default": (),
    "int8, channel": ("model.matmul=int8",),
    "int8, channel, same": ("model.matmul=int8", SAME),
    "int8, tensor": ("model.matmul=int8", "model.matmul_scales=tensor"),
    "fp8, channel": ("model.matmul=fp8",),
    "fp8, block, same": ("model.matmul=fp8", "model.matmul_scales=block", SAME),
    "mxfp8": ("model.matmul=mxfp8",),
    "mxfp8, same": ("model.matmul=mxfp8", SAME),
    "nvfp4, same": ("model.matmul=nvfp4", SAME),
    "nvfp4, same, rounding to nearest": ("model.matmul=nvfp4", SAME),
    "nvfp4, same, no transform": ("model.matmul=nvfp4", SAME),
}
PATCHES = {
    "nvfp4, same, rounding to nearest": (
        "from maxpipe.parallel import stochastic_rounding\n"
        "stochastic_rounding.uniform = lambda keys, shape, over=(): None\n"
    ),
    "nvfp4, same, no transform": (
        "from maxpipe.parallel import nvfp4\nnvfp4.hadamard_transform = lambda x: x\n"
    ),
}
"""Code that replaces one part of the nvfp4 recipe, which has no config key, before training."""
COMPILED: dict[str, tuple[str, ...]] = {
    "default": (),
    "int8": ("model.matmul=int8",),
    "int8, same": ("model.matmul=int8", SAME),
    "int8, same, mlp": ("model.matmul=int8", SAME, "model.matmul_parts=mlp"),
}
TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2")
CHIPS = ("model.num_layers=4", "mesh.ici_fsdp=4", "pipeline.microbatches=4", "train.steps=10")
CHIPS += ("train.batch_size=32", "train.sequence_length=4096", "pipeline.weight_gather=step")


def losses(keys: Sequence[str], patch: str = "") -> dict[int, float]:
    """Train a model and return the mean loss since the previous logged step, keyed by step.

    `patch` is Python code that runs before training.
    """
    code = f"{patch}import sys\nfrom maxpipe.__main__ import main\nsys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        given = [f"run.dir={folder}", f"train.steps={STEPS}", "train.batch_size=8"]
        given += ["pipeline.microbatches=4", "eval.every=0", "checkpoint.every=0", *keys]
        subprocess.run(
            [sys.executable, "-c", code, "train", "quickstart", *given],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = Path(folder, "quickstart/metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def cycles(topology: str, keys: Sequence[str]) -> tuple[float, float]:
    """Return the cycles of a step on one device, and of its layers (forward plus backward)."""
    call = [sys.executable, "-m", "maxpipe", "compile", "llama3-8b", "--json"]
    call += ["--topology", topology, *CHIPS, *keys]
    done = subprocess.run(call, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    return found["cycles"], sum(found["pieces"][name] for name in ("forward", "backward"))


def curves(names: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the loss table, for the default and `names`, or for all `WAYS`."""
    yield "| matmuls | " + " | ".join(f"step {step}" for step in SHOWN) + " | mean difference |"
    yield "|---|" + "---|" * (len(SHOWN) + 1)
    plain = losses(WAYS["default"])
    for name, keys in WAYS.items():
        if names and keys and name not in names:
            continue
        found = losses(keys, PATCHES.get(name, "")) if keys else plain
        differences = [found[step] - plain[step] for step in plain if step > STEPS // 2]
        cells = [f"{found[step]:.4f}" for step in SHOWN]
        mean = f"{statistics.mean(differences):+.4f}" if keys else "-"
        yield f"| {name} | " + " | ".join(cells) + f" | {mean} |"


def compiled() -> Iterator[str]:
    """Yield the lines of the cycle table."""
    heads = [f"{topology}, {what}" for topology in TOPOLOGIES for what in ("layers", "step")]
    yield "| matmuls | " + " | ".join(heads) + " |"
    yield "|---|" + "---|" * len(heads)
    plain: list[float] = []
    for name, keys in COMPILED.items():
        pairs = [cycles(topology, keys) for topology in TOPOLOGIES]
        found = [count for step, layers in pairs for count in (layers, step)]
        plain = plain or found
        cells = [f"{a / 1e9:.3f} ({a / b:.2f} x)" for a, b in zip(found, plain, strict=True)]
        yield f"| {name} | " + " | ".join(cells) + " |"


TEXT = """# Matmuls in 8 and 4 bits

> **Losses are measured on a CPU. Cycles and memory are compiler estimates.**

`python benchmarks/low_precision.py --write`.

The first table contains training losses of the quickstart's model, which has 8 layers. The default
uses float32 matmuls, and the other rows use 8-bit or 4-bit matmuls. Each run has {steps} steps of
8 x 128 tokens. Each loss is the mean over {every} steps. The last column is the mean difference
from the default over the second half of the run. The first column gives `model.matmul`,
`model.matmul_scales` and, if set, `model.matmul_weight_gradients`.

{curves}

The second table contains gigacycles of a step of four layers of Llama-3-8B, with 8192 tokens per
microbatch, according to the compiler's estimate. The attention kernel is counted at the rate of
`kernel_efficiency`. `layers` covers the forward and backward loops over layers, including
recomputation.
`step` also includes the embedding, the loss head and the optimizer.

{compiled}

The MLP benefits most, because a matmul of its width takes longer than the passes that quantize its
operands. The attention projections do not benefit, because they are only as wide as the model.
"""


def main() -> None:
    """Print the tables and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/low_precision.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows of the loss table to print")
    options = parser.parse_args()
    if unknown := {*options.names} - {*WAYS}:
        parser.error(f"unknown names: {unknown}; the names are {[*WAYS]}")
    if options.names:
        print("\n".join(curves(options.names)))
        return
    tables = {
        name: "\n".join(make()) for name, make in (("curves", curves), ("compiled", compiled))
    }
    text = TEXT.format(steps=STEPS, every=EVERY, **tables)
    print(text)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
