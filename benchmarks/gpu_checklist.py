"""Benchmark one NVIDIA GPU: train steps, MoE, gated delta rule, decoding and a complete run.

    python benchmarks/gpu_checklist.py --out results.jsonl       # runs every row
    python benchmarks/gpu_checklist.py --only '^step' --out ...  # rows whose name matches
    python benchmarks/gpu_checklist.py --tiny --out ...          # small sizes, also on a CPU
    python benchmarks/gpu_checklist.py --write results.jsonl     # tables of gpu_checklist.md

The script requires a GPU, JAX's CUDA plugin, torch and transformers, and runs for fifteen minutes.
Each row runs in a separate process with a time limit, and each result is written to the file
immediately. While a row runs, the process of the next row imports its packages, and then waits for
a signal before it uses the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_measurements import WORK
from gpu_step import GIB

ROOT = Path(__file__).parents[1]
SHORT = ("train.batch_size=4", "train.sequence_length=4096", "train.steps=1000")
LONG = ("train.batch_size=2", "train.sequence_length=8192", "train.steps=1000")
LARGE = ("train.batch_size=8", *SHORT[1:])
LAYERS = ("model.num_layers=8",)
NAMES = ("pipeline.remat=names",)
FP8 = ("model.matmul=fp8", "model.matmul_weight_gradients=same")
MOE = (*SHORT, *NAMES, "model.num_layers=2")
XLA = {
    "no Triton matmuls": {"xla_gpu_enable_triton_gemm": False},
    "latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "fusion autotuner": {"xla_gpu_experimental_enable_fusion_autotuner": True},
    "cuDNN matmul fusions": {"xla_gpu_cudnn_gemm_fusion_level": 2},
    "multi-output Triton fusions": {"xla_gpu_unsupported_enable_triton_multi_output_fusion": True},
}


@dataclass(frozen=True)
class Row:
    """A benchmark row, measured in a separate process."""

    name: str
    work: str
    """Name of the measurement function, a key of `gpu_measurements.WORK`."""
    options: dict[str, Any]
    limit: int
    """Time limit in seconds."""


def step_row(
    name: str, *keys: str, model: str = "llama3-8b", limit: int = 80, **options: Any
) -> Row:
    """Return a row that measures maxpipe's train step."""
    return Row(f"step: {name}", "train_step", {"model": model, "keys": keys, **options}, limit)


def torch_step_row(name: str, *keys: str, batches: Sequence[int]) -> Row:
    """Return a row that measures PyTorch's train step, with the first of `batches` that fits."""
    options = {"model": "llama3-8b", "keys": keys, "batches": list(batches)}
    return Row(f"step: {name}", "torch_step", options, 110)


ROWS = [
    step_row("maxpipe, T 4096, names", *SHORT, *LAYERS, *NAMES, kernels=30),
    torch_step_row("torch.compile, T 4096", *SHORT, *LAYERS, batches=(4, 2)),
    step_row("maxpipe, T 8192, names", *LONG, *LAYERS, *NAMES),
    torch_step_row("torch.compile, T 8192", *LONG, *LAYERS, batches=(2, 1)),
    step_row("maxpipe, T 4096, none", *SHORT, *LAYERS, "pipeline.remat=none"),
    Row("experts: maxpipe", "experts", {"forms": ["dense", "grouped", "capacity"]}, 90),
    Row("experts: torch", "torch_experts", {}, 60),
    Row("experts: tiles of the kernels", "expert_tiles", {}, 90),
    step_row("maxpipe, 30B-A3B, 2 layers", *MOE, model="qwen3-30b-a3b"),
    Row("decode: maxpipe", "decode", {"batches": [1, 32, 128]}, 110),
    Row("decode: transformers", "torch_decode", {"batches": [32, 1, 128]}, 170),
    step_row("maxpipe, T 4096, batch 8, names", *LARGE, *LAYERS, *NAMES),
    Row("run: train, stop, resume, generate", "whole_run", {}, 230),
    step_row("maxpipe, T 4096, fp8", *SHORT, *LAYERS, *NAMES, *FP8, kernels=20, limit=300),
    step_row(
        "maxpipe, T 4096, fp8 of MLPs",
        *(*SHORT, *LAYERS, *NAMES, *FP8, "model.matmul_parts=mlp"),
        limit=300,
    ),
    Row("delta: maxpipe", "delta", {}, 60),
    Row("delta: transformers", "torch_delta", {}, 60),
    *(
        step_row(f"maxpipe, T 4096, {name}", *SHORT, *LAYERS, *NAMES, xla=options)
        for name, options in XLA.items()
    ),
]


# Functions that run in the child process of a row.


def run_row(text: str) -> None:
    """Import packages, wait for a line on standard input, then print each result."""
    task = json.loads(text)
    results = WORK[task["work"]](task["options"])
    next(results)
    print("ready", flush=True)
    sys.stdin.readline()
    for found in results:
        print(json.dumps(found), flush=True)


# Functions that run in the parent process.


def start(row: Row, tiny: bool) -> subprocess.Popen[str]:
    """Start the child process of a row, which waits for a signal before it uses the GPU."""
    task = asdict(row) | {"options": row.options | {"tiny": tiny}}
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    memory["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return subprocess.Popen(
        [sys.executable, __file__, "--row", json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=memory | os.environ,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """Kill a process and all its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def results_of(process: subprocess.Popen[str], limit: int) -> Iterator[dict[str, Any]]:
    """Start a process's measurement and yield its results; kill it after `limit` seconds."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(limit, stop, [process])
    timer.start()
    begun = time.perf_counter()
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    except BrokenPipeError:
        pass
    finally:
        timer.cancel()
        stop(process)
    code, seconds = process.wait(), time.perf_counter() - begun
    yield {"code": code, "row_seconds": round(seconds, 1)}


def run_all(rows: Sequence[Row], out: Path, tiny: bool) -> None:
    """Run all rows and append their results to a file."""
    began, waiting = time.perf_counter(), start(rows[0], tiny)
    with out.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            process, following = waiting, rows[number + 1 : number + 2]
            assert process.stdout is not None
            ready = any(line == "ready\n" for line in process.stdout)
            waiting = start(following[0], tiny) if following else process
            print(f"[{time.perf_counter() - began:.0f} s] {row.name}", flush=True)
            try:
                results = results_of(process, row.limit * (5 if tiny else 1))
                for found in results if ready else [{"code": "not started"}]:
                    file.write(json.dumps({"row": row.name, **found}) + "\n")
                    file.flush()
                    shown = {name: each for name, each in found.items() if name not in LENGTHY}
                    print(f"    {json.dumps(shown)}", flush=True)
            except SystemExit:
                stop(process)
                stop(waiting)
                raise


LENGTHY = ("kernels", "losses", "calls", "versions", "device", "spread")


# Functions that write the page.


def table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    names = heads.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gib(found: dict[str, Any], name: str) -> str:
    """Return a size in GiB, or an empty string if the size is missing."""
    return f"{found[name] / GIB:.2f}" if found.get(name) else ""


def step_cells(found: dict[str, Any]) -> list[str]:
    """Return the table cells for a train step."""
    seconds, used = found["seconds"], found["bytes"]
    predicted = found.get("predicted_bytes", 0) / used
    return [
        found["row"].partition(": ")[2],
        f"{found['tokens']:,}",
        f"{seconds * 1e3:.1f}",
        f"{found['tokens'] / seconds:,.0f}",
        f"{found['flops'] / seconds / found['peak']:.1%}",
        *(gib(found, name) for name in ("bytes", "stated_bytes", "predicted_bytes")),
        f"{predicted:.3f}" if predicted else "",
        f"{found['compile_seconds']:.0f} s",
    ]


def layer_cells(found: dict[str, Any]) -> list[str]:
    """Return the table cells for the forward and backward pass of a layer."""
    low, high = (f"{seconds * 1e3:.2f}" for seconds in found["spread"])
    kind, by = found["row"].split(": ")
    name = f"{kind}, {by}: {found['form']}"
    return [name, f"{found['seconds'] * 1e3:.2f}", f"{low} to {high}"]


def decode_cells(found: dict[str, Any]) -> list[str]:
    """Return the table cells for a decoding measurement."""
    milliseconds = [f"{found[name] * 1e3:.2f}" for name in ("seconds_per_token", "first_seconds")]
    rate = f"{found['tokens_per_second']:,.0f}"
    return [found["row"].partition(": ")[2], str(found["batch"]), rate, *milliseconds]


def write_page(results: Sequence[dict[str, Any]]) -> None:
    """Replace the tables in gpu_checklist.md, which are delimited by pairs of HTML comments."""
    measured = [found for found in results if "seconds" in found or "seconds_per_token" in found]
    failed = [[found["row"]] for found in results if found.get("code", 0) != 0]
    tables = {
        "steps": table(STEP_HEADS, [step_cells(found) for found in measured if "tokens" in found]),
        "layers": table(LAYER_HEADS, [layer_cells(found) for found in measured if "form" in found]),
        "decoding": table(
            DECODE_HEADS,
            [decode_cells(found) for found in measured if "seconds_per_token" in found],
        ),
        "failed": table("row", failed),
    }
    path = Path(__file__).with_suffix(".md")
    text = path.read_text(encoding="utf-8")
    for name, block in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"\n<!-- /{name} -->")
        assert begin and end, f"gpu_checklist.md has no block {name}"
        text = before + begin + block + end + after
    path.write_text(text, encoding="utf-8")


STEP_HEADS = "step, tokens, ms, tokens/s, MFU, GiB used, stated, predicted, predicted / used, "
STEP_HEADS += "compiled in"
LAYER_HEADS = "layer, ms, range of ten"
DECODE_HEADS = "program, sequences, tokens/s, ms per token, ms to the first token"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_checklist.jsonl"), metavar="FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="names of rows")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    parser.add_argument("--write", type=Path, nargs="+", metavar="FILE", help="results to write")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        run_row(options.row)
        return
    if options.write:
        lines = [line for path in options.write for line in path.read_text().splitlines()]
        write_page([json.loads(line) for line in lines])
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    rows = [row for row in ROWS if re.search(options.only, row.name)]
    run_all(rows, options.out, options.tiny)


if __name__ == "__main__":
    main()
