"""Measure a train step on one NVIDIA GPU, and compare memory with `plan` and speed with PyTorch.

    python benchmarks/gpu_step.py                # prints the page
    python benchmarks/gpu_step.py --write        # and writes gpu_step.md
    python benchmarks/gpu_step.py --only names   # rows whose name matches the pattern
    python benchmarks/gpu_step.py --kernels 30   # and the 30 slowest kernels of each step

The script requires a GPU, JAX's CUDA plugin, torch and transformers, and runs for six minutes. Each
row runs in a separate process, which compiles the step, runs it a few times on random tokens and
reports the median time. maxpipe and PyTorch store parameters and moments in float32, use bfloat16
matmuls, clip gradients and update with AdamW. In both cases, MFU is based on the FLOPs of causal
attention over full sequences, including attention between documents.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GIB = 2**30
WARM_UP, STEPS = 3, 10
MODEL = "llama3-1b"
SIZE = ("train.batch_size=8", "train.sequence_length=4096", "train.steps=1000")


@dataclass(frozen=True)
class Row:
    """A table row: one measured train step."""

    name: str
    keys: tuple[str, ...] = ()
    """Config overrides of the row."""
    torch: str = ""
    """PyTorch attention: `causal`, `mask` (dense document mask) or `flex` (FlexAttention).

    If empty, maxpipe is measured instead of PyTorch."""
    documents: int = 1
    """Number of documents in each sequence."""
    model: str = MODEL
    """Name of the bundled model config."""


def kept(remat: str, **others: Any) -> Row:
    return Row(f"maxpipe, remat {remat}", (f"pipeline.remat={remat}",), **others)


ROWS = [
    kept("names"),
    kept("none"),
    kept("full"),
    Row("PyTorch, torch.compile", torch="causal"),
    kept("names", documents=5),
    Row("PyTorch, torch.compile, FlexAttention", torch="flex", documents=5),
    Row("PyTorch, torch.compile, a mask of all pairs", torch="mask", documents=5),
]


HEAD = """\
# A train step on one NVIDIA GPU

`python benchmarks/gpu_step.py --write`, {devices}, {versions}.

The table shows one train step of `{model}` with `{size}`. Times are medians of ten steps. Memory is
in GiB: "used" is the peak memory use of the process, "stated" is the memory that the compiler
reports, and "predicted" is the memory that `maxpipe plan` predicts.

"""
TAIL = """
The first PyTorch row has no document mask, so tokens can attend to other documents. The script also
has a row with a dense mask for all token pairs, which was not measured, because the GPU time ran
out.

A kernel that loads a bias element for every pair of tokens is half as fast as a kernel that
computes the mask itself ([decision 40](../docs/decisions/0040-segment-aware-gpu-attention.md)).
Before maxpipe selected the kernel at run time, the step with `names` took 615.8 ms (44.2% MFU) with
one document per sequence and 614.7 ms (44.3%) with five. The forward kernel also ran a second time
in the backward pass. PyTorch took 682.8 ms with the mask that transformers generates under
`torch.compile`.

The next table shows the time of the forward and backward pass of attention alone, for 8 sequences
of 4096 tokens with 32 query heads and 8 key/value heads of size 64. Values in parentheses are for 4
sequences with heads of size 128.

| kernel | ms |
|---|---|
| causal mask only | 5.2 (4.2) |
| dense bias for all token pairs | 8.6 (8.2) |

These times and the earlier step times were measured with a separate script. The working memory of
the kernel grows with the maximum number of documents, so the maximum is 8. With a maximum of 32,
the step with five documents used 60.56 GiB instead of 48.34 GiB, and took 488.1 ms.

The profiler divides the 521 ms of the step with `names` and one document as follows:

| kernels | ms |
|---|---|
| matmuls (cuBLAS and Triton, 715 to 820 TFLOP/s of the card's 989) | 324 |
| attention | 95 |
| copies of saved activations into and out of their buffers | 21 |
| loss head without its matmuls: maximum logit, sum, gradient | 16 |
| SiLU and elementwise products of the MLP, forward and backward | 19 |
| norms and residuals | 21 |
| update of parameters and moments, gradient norm | 12 |
| all other kernels: RoPE, dtype conversion of weights, accumulation of gradients | 8 |
| idle | 5 |

PyTorch's step uses the same matmuls and attention kernels, which account for 80% of the time. To
reach 1.1 times the speed of PyTorch, maxpipe would have to halve the remaining time. Three settings
changed the time by less than 1%: no command buffers, concurrent command buffers
(`xla_gpu_command_buffer_scheduling_mode=CONCURRENT`, 3 GiB more memory), and
`xla_gpu_experimental_enable_selective_memcpy_overlap`.
"""


# Functions that run in the child process of a row.


def tokens(rows: int, length: int, vocabulary: int) -> Any:
    """Return random token ids of shape `[rows, length + 1]`."""
    import numpy as np

    return np.random.default_rng(0).integers(0, vocabulary, (rows, length + 1), dtype=np.int32)


def segments(rows: int, length: int, documents: int) -> Any:
    """Return 1-based segment ids `[rows, length]` with random document boundaries."""
    import numpy as np

    cuts = np.random.default_rng(1).integers(1, length, (rows, documents - 1))
    return 1 + (np.arange(length)[:, None] >= cuts[:, None]).sum(2, dtype=np.int32)


def timed(step: Callable[[], float]) -> tuple[float, list[float]]:
    """Return the median step time in seconds, and the losses of all steps."""
    losses, seconds = [], []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:]), losses


def prepared(
    row: Row, size: list[str], xla: dict[str, str]
) -> tuple[Any, Callable[[], float], dict[str, Any]]:
    """Return maxpipe's compiled step, a function that runs the step once, and its metadata."""
    import jax
    import numpy as np

    from maxpipe.config.load import load
    from maxpipe.models.count import train_flops_per_token
    from maxpipe.models.registry import describe
    from maxpipe.planner import topology
    from maxpipe.planner.compile import build_steps
    from maxpipe.planner.search import evaluate

    loaded = load([row.model, *size, *row.keys])
    target = topology.local_topology(loaded.config.runtime, 1)
    config = topology.resolve_config(loaded, target)
    steps = build_steps(config, jax.devices())
    start = time.perf_counter()
    compiled = steps.lower_train().compile(steps.compiler_options | xla)
    compiling = time.perf_counter() - start
    rows, length = steps.shape
    ids = tokens(rows, length, config.model.vocab_size)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    numbers = segments(rows, length, row.documents)
    starts = np.where(np.diff(numbers, prepend=0, axis=1) > 0, places, 0)
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "segment_ids": numbers,
        "positions": (places - np.maximum.accumulate(starts, axis=1)).astype(np.int32),
        "loss_mask": np.ones(places.shape, np.float32),
        "example_ids": np.arange(rows, dtype=np.int32),
    }
    batch = jax.device_put(batch, steps.batch_sharding)
    state = steps.init()

    def step() -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        return float(metrics["train/loss"])

    stated = compiled.memory_analysis()
    held = stated.argument_size_in_bytes + stated.temp_size_in_bytes
    predicted = evaluate(config, target.hardware)
    facts = {
        "tokens": rows * length,
        "flops": train_flops_per_token(describe(config.model), length) * rows * length,
        "compile_seconds": compiling,
        "stated_bytes": held + stated.output_size_in_bytes - stated.alias_size_in_bytes,
        "predicted_bytes": predicted.memory.total,
        "predicted_seconds": predicted.cost.seconds,
        "device": jax.devices()[0].device_kind,
        "peak": target.hardware.flops,
        "versions": f"jax {jax.__version__}",
    }
    return compiled, step, facts


def ours(row: Row, size: list[str], kernels: int, xla: dict[str, str]) -> dict[str, Any]:
    """Measure maxpipe's train step and return the results."""
    import jax

    _, step, found = prepared(row, size, xla)
    seconds, losses = timed(step)
    used = jax.devices()[0].memory_stats() or {}
    found |= {"seconds": seconds, "losses": losses, "bytes": used.get("peak_bytes_in_use", 0)}
    if kernels:
        found["kernels"] = most_time(step, kernels)
    return found


def most_time(step: Callable[[], float], count: int) -> list[tuple[str, float, int]]:
    """Profile one step, and return (kernel, milliseconds, calls) for the slowest kernels."""
    import tempfile

    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        path = next(Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
    spent, calls = Counter[str](), Counter[str]()
    for plane in planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                spent[event.name] += event.duration_ns / 1e6
                calls[event.name] += 1
    return [(name, each, calls[name]) for name, each in spent.most_common(count)]


def torch_llama(model: Any, device: str, length: int, **options: Any) -> Any:
    """Return a randomly initialized transformers Llama with the sizes of a `ModelConfig`."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    config = transformers.LlamaConfig(
        hidden_size=model.d_model,
        intermediate_size=model.d_mlp,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.tied_embeddings,
        max_position_embeddings=length,
        **options,
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


def with_torch(row: Row, size: list[str], kernels: int) -> dict[str, Any]:
    """Measure a PyTorch train step of the transformers model and return the results."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    from maxpipe.config.load import load
    from maxpipe.hardware import hardware_of_device
    from maxpipe.models.count import train_flops_per_token
    from maxpipe.models.registry import describe

    config = load([row.model, *size, *row.keys]).config
    model, rows, length = config.model, config.train.batch_size, config.train.sequence_length
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = segments(rows, length, row.documents)
    attention = partial(_attention, row.torch, _mask(row.torch, numbers, device))
    transformers.AttentionInterface.register("measured", attention)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    network = torch_llama(model, device, length, use_cache=False, attn_implementation="measured")
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=device == "cuda")
    ids = torch.as_tensor(tokens(rows, length, model.vocab_size), device=device).long()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    parameters = list(network.parameters())
    run = torch.compile(network, fullgraph=True)

    def step() -> float:
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    start = time.perf_counter()
    step()
    compiling = time.perf_counter() - start
    seconds, losses = timed(step)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    known = hardware_of_device(
        name if device == "cpu" else f"NVIDIA {name.removeprefix('NVIDIA ')}"
    )
    assert known is not None, name
    found: dict[str, Any] = {
        "seconds": seconds,
        "losses": losses,
        "tokens": rows * length,
        "flops": train_flops_per_token(describe(model), length) * rows * length,
        "compile_seconds": compiling,
        "bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "device": name,
        "peak": known.flops,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    if kernels:
        found["kernels"] = torch_kernels(step, kernels)
    return found


def _mask(kind: str, numbers: Any, device: str) -> Any:
    """Return the attention mask in the attention backend's format, or None if causal."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        create_block_mask,
    )

    ids = torch.as_tensor(numbers, device=device)
    rows, length = ids.shape
    if kind == "mask":
        before = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return (ids[:, None, :, None] == ids[:, None, None]) & before
    if kind == "flex":
        return create_block_mask(
            lambda row, head, query, key: (query >= key) & (ids[row, query] == ids[row, key]),
            *(rows, None, length, length),
            device=device,
        )
    return None


def _attention(
    kind: str,
    mask: Any,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float,
    **others: Any,
) -> tuple[Any, None]:
    """Compute attention without the dense mask that transformers builds under `torch.compile`."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        flex_attention,
    )

    assert attention_mask is None
    # Autocast does not support FlexAttention, so cast to its dtype here.
    query, key, value = (each.to(torch.bfloat16) for each in (query, key, value))
    if kind == "flex":
        mixed = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    else:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
    return mixed.transpose(1, 2), None


def torch_kernels(step: Callable[[], float], count: int) -> list[tuple[str, float, int]]:
    import torch  # pyright: ignore[reportMissingImports]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    averages: Any = profile.key_averages()
    spent = sorted(
        ((each.key, each.device_time_total / 1e3, each.count) for each in averages),
        key=lambda each: -each[1],
    )
    return spent[:count]


def work(given: str) -> None:
    """Measure one row, given as JSON, and print the result as JSON."""
    asked = json.loads(given)
    row = Row(**asked["row"] | {"keys": tuple(asked["row"]["keys"])})
    gc.disable()
    if not row.torch:
        found = ours(row, asked["size"], asked["kernels"], asked["xla"])
    else:
        found = with_torch(row, asked["size"], asked["kernels"])
    print(json.dumps(found), flush=True)


# Functions that run in the parent process.


def measured(row: Row, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run a row in a separate process, and return its result, or None if the process fails."""
    xla = dict(each.split("=", 1) for each in options.xla)
    size = [*SIZE, *options.keys]
    asked = {"row": asdict(row), "size": size, "kernels": options.kernels, "xla": xla}
    print(f"{row.name}, {row.documents} a row", file=sys.stderr, flush=True)
    run = subprocess.run(
        [sys.executable, __file__, "--work", json.dumps(asked)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode:
        print(f"{row.name}: left out, see above", file=sys.stderr, flush=True)
        return None
    found = json.loads(run.stdout.strip().splitlines()[-1])
    for name, spent, calls in found.get("kernels", ()):
        print(f"    {spent:9.3f} ms {calls:5d} x {name[:150]}", file=sys.stderr, flush=True)
    return found


COLUMNS = (
    "documents a row, ms, tokens/s, MFU, GiB used, stated, predicted, predicted ms, compiled in"
)


def cells(row: Row, found: dict[str, Any]) -> list[str]:
    """Return the table cells for the result of one row."""
    seconds = found["seconds"]
    stated, predicted = (
        f"{found[name] / GIB:.2f}" if name in found else ""
        for name in ("stated_bytes", "predicted_bytes")
    )
    return [
        row.name,
        str(row.documents),
        f"{seconds * 1e3:.1f}",
        f"{found['tokens'] / seconds:,.0f}",
        f"{found['flops'] / seconds / found['peak']:.1%}",
        f"{found['bytes'] / GIB:.2f}",
        stated,
        predicted,
        f"{found['predicted_seconds'] * 1e3:.0f}" if "predicted_seconds" in found else "",
        f"{found['compile_seconds']:.0f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--kernels", type=int, default=0, metavar="COUNT")
    parser.add_argument("--xla", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    heads = ["step", *COLUMNS.split(", ")]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    print(*lines, sep="\n", flush=True)
    devices, versions = set[str](), set[str]()
    for row in ROWS:
        if re.search(options.only, row.name) and (found := measured(row, options)):
            lines.append("| " + " | ".join(cells(row, found)) + " |")
            print(lines[-1], flush=True)
            devices.add(found["device"])
            versions.add(found["versions"])
    if options.write:
        text = HEAD.format(
            devices=", ".join(sorted(devices)),
            versions=", ".join(sorted(versions)),
            model=MODEL,
            size=" ".join(SIZE),
        )
        page = ROOT / "benchmarks" / "gpu_step.md"
        page.write_text(text + "\n".join(lines) + "\n" + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()
