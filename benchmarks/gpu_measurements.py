"""Measurement functions of gpu_checklist.py, which run in the child process of a row.

Each function is a generator that imports packages, yields once, and only then uses the GPU and
yields its results.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_step
from gpu_step import GIB

TIMED = 10
PEAK = "peak_bytes_in_use"
TINY = [
    *("model.d_model=64", "model.d_mlp=128", "model.vocab_size=512", "model.num_layers=2"),
    *("model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16"),
    *("train.sequence_length=128", "runtime.platform=cpu"),
]
EXPERTS = {"d_model": 2048, "d_expert": 768, "num_experts": 128, "per_token": 8}
DELTA = {"d_model": 2048, "key_heads": 16, "value_heads": 32, "size": 128, "kernel": 4}
DECODE_KEYS = ("train.steps=1", "train.batch_size=8", "train.sequence_length=4096")
DECODE = {"prompt": 128, "more": 128, "repeats": 3}


def train_step(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure maxpipe's train step."""
    import jax  # noqa: F401

    import maxpipe.planner.compile
    import maxpipe.planner.search  # noqa: F401

    yield {}
    tiny = TINY if options["tiny"] else []
    row = gpu_step.Row("", (*options["keys"], *tiny), model=options["model"])
    yield gpu_step.ours(row, [], options.get("kernels", 0), options.get("xla", {}))


def torch_step(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure PyTorch's train step with the first of the given batch sizes that fits in memory."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    import maxpipe.models.registry  # noqa: F401

    transformers.LlamaForCausalLM  # noqa: B018  transformers imports a model on first access
    yield {}
    for batch in options["batches"]:
        tiny = TINY if options["tiny"] else []
        keys = (*options["keys"], *tiny, f"train.batch_size={batch}")
        row = gpu_step.Row("", keys, torch="causal", model=options["model"])
        try:
            found = gpu_step.with_torch(row, [], 0 if options["tiny"] else 20)
        except torch.OutOfMemoryError as error:
            print(f"batch {batch}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            yield found | {"batch": batch}
            return
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


def experts(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the forward and backward pass of an MoE layer and of a dense layer."""
    import jax
    import jax.numpy as jnp

    from maxpipe.models.layers import experts, mlp
    from maxpipe.nn.experts import Experts
    from maxpipe.nn.mlp import MLP

    yield {}
    size = experts_size(options["tiny"])
    x = normal(1, (size["rows"], size["tokens"], size["d_model"]))
    for form in options["forms"]:
        own: dict[str, Any] = {"dispatch": "grouped"} if form == "grouped" else {}
        own |= {"capacity": 1.25} if form == "capacity" else {}
        own |= {"dispatch": "grouped", "backend": "loop"} if form == "loop" else {}
        names = ("d_model", "d_expert", "num_experts", "per_token")
        part: Any = experts.Experts(*(size[name] for name in names), 1.0, 0.0, **own)
        if form == "dense":
            part = mlp.MLP(size["d_model"], size["per_token"] * size["d_expert"], 1.0)
        kind = MLP if form == "dense" else Experts
        yield {"form": form, **measured_layer(part, kind, x)}
    n, width = size["rows"] * size["tokens"] * size["per_token"], size["d_model"]
    rows = normal(2, (n, width))
    weights = normal(3, (size["num_experts"], width, size["d_expert"])) * width**-0.5
    sizes = jnp.full(size["num_experts"], n // size["num_experts"], jnp.int32)
    product = jax.jit(jax.lax.ragged_dot).lower(rows, weights, sizes)
    for option in ("", "fusion", "grouped_gemm"):
        chosen = {f"xla_gpu_experimental_use_ragged_dot_{option}": True} if option else {}
        try:
            run = partial(product.compile(chosen), rows, weights, sizes)
            found = timed_calls(lambda run=run: jax.block_until_ready(run()))
        except jax.errors.JaxRuntimeError as error:
            print(f"ragged_dot {option}: {str(error)[:300]}", file=sys.stderr, flush=True)
        else:
            yield {"form": f"jax.lax.ragged_dot, {option or 'default'}, one product", **found}


TILES = [
    (128, 64, 256, 8, 3),
    (128, 64, 256, 8, 4),
    (128, 64, 128, 4, 3),
    (128, 64, 128, 8, 4),
    (128, 32, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (64, 64, 256, 4, 3),
    (256, 64, 128, 8, 3),
]
"""Tile sizes, warps and stages of the Triton kernels. For weight gradients, the first size is the
number of contracted rows.
"""


def expert_tiles(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the grouped matmuls of an MoE layer for each entry of `TILES`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxpipe.nn.expert_backends import triton

    yield {}
    size = experts_size(options["tiny"])
    num_experts, width, inner = (size[name] for name in ("num_experts", "d_model", "d_expert"))
    n = size["rows"] * size["tokens"] * size["per_token"]
    shares = np.random.default_rng(0).dirichlet(np.full(num_experts, 20.0))  # unequal loads
    sizes = jnp.asarray(np.random.default_rng(1).multinomial(n, shares), jnp.int32)
    rows, cotangents = normal(2, (n, width)), normal(3, (n, inner))
    weights = normal(4, (width, num_experts, inner)) * width**-0.5
    forward = partial(triton.grouped_matmul, dim=1, transposed=False)
    backward = partial(triton.grouped_matmul, dim=1, transposed=True)
    outer = partial(triton.grouped_outer, dim=1)
    kinds = {
        "forward": (forward, ([rows], [weights], sizes)),
        "input gradient": (backward, ([cotangents], [weights], sizes)),
        "weight gradient": (outer, (rows, cotangents, sizes)),
    }
    interpret = {"interpret": True} if options["tiny"] else {}
    for name, (kernel, arguments) in kinds.items():
        for tiles in TILES[:1] if options["tiny"] else [None, *TILES]:
            given = None if tiles is None else triton.Tiles(*tiles)
            run = jax.jit(partial(kernel, tiles=given, **interpret))
            try:
                found = timed_calls(lambda run=run, a=arguments: jax.block_until_ready(run(*a)))
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # too much shared memory
                print(f"{name}, {tiles}: {str(error)[:200]}", file=sys.stderr, flush=True)
                continue
            tflops = 2 * n * width * inner / found["seconds"] / 1e12
            yield {"form": f"{name}, tiles {tiles or 'default'}", "tflops": tflops, **found}


def experts_size(tiny: bool) -> dict[str, int]:
    """Return the MoE layer sizes and the input shape."""
    if tiny:
        small = {"d_model": 128, "d_expert": 128, "num_experts": 8, "per_token": 2}
        return small | {"rows": 2, "tokens": 128}
    return EXPERTS | {"rows": 4, "tokens": 4096}


def normal(seed: int, shape: Sequence[int]) -> Any:
    """Return a normally distributed bfloat16 array."""
    import jax

    return jax.random.normal(jax.random.key(seed), shape, "bfloat16")


def forward_and_backward(part: Any, kind: Any, x: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return a jitted function that computes a scalar loss and its gradients, and its arguments."""
    import jax
    import jax.numpy as jnp

    from maxpipe.nn.decoder import init_params
    from maxpipe.nn.module import LayerContext
    from maxpipe.parallel.axes import MeshConfig
    from maxpipe.parallel.mesh import build_mesh
    from maxpipe.parallel.sharding import AxisRules

    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    jax.set_mesh(mesh)
    rules = AxisRules.from_config(MeshConfig())
    named = {(name,): param for name, param in part.params.items()}
    weights = {
        name: leaf
        for (name,), leaf in init_params(named, jax.random.key(0), jnp.dtype("bfloat16")).items()
    }
    ids = jnp.ones(x.shape[:2], jnp.int32)
    places = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])

    def run(weights: Any, x: Any) -> Any:
        module = kind(part, rules)
        for name, weight in weights.items():
            getattr(module, name)[...] = weight
        context = LayerContext({"segment_ids": ids, "positions": places}, jnp.int32(0))
        out = module(x, context).x
        # A plain sum as the loss would make all cotangents equal.
        return (out.astype(jnp.float32) ** 2).mean()

    body = jax.shard_map(
        jax.value_and_grad(run, (0, 1)),
        mesh=mesh,
        in_specs=(jax.P(), jax.P()),
        out_specs=jax.P(),
        axis_names={"data"},
        check_vma=False,
    )
    return jax.jit(body), (weights, x)


def measured_layer(part: Any, kind: Any, x: Any) -> dict[str, Any]:
    """Measure time, memory and the slowest kernels of the forward and backward pass."""
    import jax

    run, arguments = forward_and_backward(part, kind, x)
    compiled = run.lower(*arguments).compile()
    found = timed_calls(lambda: jax.block_until_ready(compiled(*arguments)))
    return found | {
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "bytes": (jax.devices()[0].memory_stats() or {}).get(PEAK, 0),
        "kernels": gpu_step.most_time(lambda: float(compiled(*arguments)[0]), 15),
    }


def timed_calls(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the median, minimum and maximum time per call in seconds."""
    seconds = []
    for _ in range(gpu_step.WARM_UP + TIMED):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    timed = seconds[gpu_step.WARM_UP :]
    return {"seconds": statistics.median(timed), "spread": [min(timed), max(timed)]}


def torch_experts(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the layers of `experts` in PyTorch, with and without `torch.compile`."""
    import torch  # pyright: ignore[reportMissingImports]

    from maxpipe.models.layers import experts  # noqa: F401

    yield {}
    size, device = experts_size(options["tiny"]), torch_device()
    torch.manual_seed(0)
    width, inner, count = size["d_model"], size["d_expert"], size["num_experts"]
    k = size["per_token"]
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def weight(*shape: int, by: int) -> Any:
        found = torch.randn(*shape, device=device, dtype=torch.bfloat16) * by**-0.5
        return found.requires_grad_()

    def moe(x: Any, router: Any, up: Any, down: Any) -> Any:
        flat = x.reshape(-1, width)
        shares, places = (flat @ router).float().softmax(-1).topk(k, dim=-1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        order = places.reshape(-1).argsort(stable=True)
        ends = torch.bincount(places.reshape(-1), minlength=count).cumsum(0).to(torch.int32)
        gate, value = grouped(flat[order // k], up, offs=ends).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * value * shares.reshape(-1)[order, None]
        rows = grouped(hidden, down, offs=ends)
        out = torch.empty_like(rows).index_copy(
            0, order, rows
        )  # restore the order before the sort by expert
        return out.reshape(-1, k, width).sum(1).reshape(x.shape)

    def dense(x: Any, up: Any, down: Any) -> Any:
        gate, value = (x @ up).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * value) @ down

    shape = (size["rows"], size["tokens"], width)
    x = torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()
    layers = {
        "dense": (dense, [weight(width, 2 * k * inner, by=width)], k * inner),
        "grouped": (moe, [weight(width, count, by=width)], inner),
    }
    for form, (layer, weights, hidden) in layers.items():
        if form == "grouped":
            weights += [weight(count, width, 2 * inner, by=width)]
            weights += [weight(count, inner, width, by=inner)]
        else:
            weights += [weight(hidden, width, by=hidden)]
        for name, compiled in (("torch.compile", torch.compile(layer)), ("eager", layer)):
            run = partial(torch_gradients, compiled, x, weights)
            try:
                found = timed_calls(run)
            except Exception as error:  # continue with the next variant
                print(f"{form}, {name}: {error}", file=sys.stderr, flush=True)
                continue
            kernels = gpu_step.torch_kernels(run, 15) if device == "cuda" else []
            yield found | {"form": f"{form}, {name}", "bytes": torch_peak(), "kernels": kernels}


def torch_device() -> str:
    """Return the PyTorch device type, `cuda` or `cpu`."""
    import torch  # pyright: ignore[reportMissingImports]

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_peak() -> int:
    """Return the peak GPU memory allocated by PyTorch in bytes."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def torch_gradients(layer: Callable[..., Any], x: Any, weights: Sequence[Any]) -> float:
    """Run the forward and backward pass, and wait until both have finished."""
    import torch  # pyright: ignore[reportMissingImports]

    loss = (layer(x, *weights).float() ** 2).mean()
    torch.autograd.grad(loss, [x, *weights])
    return loss.item() if torch_device() == "cpu" else torch.cuda.synchronize() or 0.0


def delta(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the forward and backward pass of a gated delta layer."""

    from maxpipe.models.layers import gated_delta
    from maxpipe.models.layers.mlp import RMSNorm
    from maxpipe.nn.gated_delta import GatedDelta

    yield {}
    size = delta_size(options["tiny"])
    part = gated_delta.GatedDelta(
        size["d_model"],
        size["key_heads"],
        size["value_heads"],
        size["size"],
        size["size"],
        size["kernel"],
        RMSNorm(size["size"], 1e-6),
        1.0,
        64,
    )
    x = normal(1, (size["rows"], size["tokens"], size["d_model"]))
    yield {"form": "maxpipe", **measured_layer(part, GatedDelta, x)}


def delta_size(tiny: bool) -> dict[str, int]:
    """Return the gated delta layer sizes and the input shape."""
    if tiny:
        small = {"d_model": 64, "key_heads": 2, "value_heads": 4, "size": 16, "kernel": 4}
        return small | {"rows": 2, "tokens": 128}
    return DELTA | {"rows": 2, "tokens": 4096}


def torch_delta(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the gated delta layer of transformers without the `fla` kernels."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3NextConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_next import (  # pyright: ignore[reportMissingImports]
        modeling_qwen3_next,
    )

    yield {}
    size, device = delta_size(options["tiny"]), torch_device()
    config = Qwen3NextConfig(
        hidden_size=size["d_model"],
        linear_num_key_heads=size["key_heads"],
        linear_num_value_heads=size["value_heads"],
        linear_key_head_dim=size["size"],
        linear_value_head_dim=size["size"],
        linear_conv_kernel_dim=size["kernel"],
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    torch.manual_seed(0)
    layer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0).to(device, torch.bfloat16)
    shape = (size["rows"], size["tokens"], size["d_model"])
    x = torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()
    parameters = list(layer.parameters())

    def run(x: Any, *_: Any) -> Any:
        return layer(hidden_states=x)

    found = timed_calls(lambda: torch_gradients(run, x, parameters))
    yield found | {"form": "transformers, eager", "bytes": torch_peak()}


def decode(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure maxpipe's greedy decoding with random bfloat16 weights."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxpipe.config.load import load
    from maxpipe.generation.decoding import DecodeShape, Sampling
    from maxpipe.generation.pipeline_decoding import build_decode_engine, decode_param_layout
    from maxpipe.planner import topology
    from maxpipe.planner.compile import build_steps

    yield {}
    keys = [*DECODE_KEYS, "model.param_dtype=bfloat16", *(TINY if options["tiny"] else ())]
    loaded = load(["llama3-8b", *keys])
    target = topology.local_topology(loaded.config.runtime, 1)
    config = topology.resolve_config(loaded, target)
    parts = decode_param_layout(build_steps(config, jax.devices()).partition)
    decoder, key = parts.decoder, jax.random.key(0)
    (kind,) = decoder.model.kinds
    layer = jax.jit(lambda key: decoder.init_layer(kind, key))
    params = jax.jit(decoder.init_outer)(key)
    keys_of_layers = jax.random.split(key, config.model.num_layers)
    params["layers"] = [jax.block_until_ready(layer(each)) for each in keys_of_layers]
    jax.block_until_ready(params)
    engine = build_decode_engine(parts, Sampling(temperature=0.0), 0)
    prompt, more = DECODE["prompt"], 8 if options["tiny"] else DECODE["more"]
    for batch in options["batches"]:
        ids = np.random.default_rng(0).integers(2, config.model.vocab_size, (batch, prompt))
        size, calls = DecodeShape(batch, prompt, more), []
        for _ in range(1 + DECODE["repeats"]):
            times = [time.perf_counter()]
            for _tokens, _ in engine.run(params, ids.tolist(), range(batch), size):
                times.append(time.perf_counter())
            calls.append(times)
        used = (jax.devices()[0].memory_stats() or {}).get(PEAK, 0)
        lowest = 2 * jnp.size(params["head"]) + 2 * sum(
            leaf.size for leaf in jax.tree.leaves(params["layers"])
        )
        device = jax.devices()[0].device_kind
        yield decoded(calls[1:], batch) | {"bytes": used, "weights": lowest, "device": device}


def decoded(calls: Sequence[Sequence[float]], batch: int) -> dict[str, Any]:
    """Return decoding rates, given each call's start time followed by the time of each token."""
    tokens = len(calls[0]) - 1
    whole = statistics.median(times[-1] - times[0] for times in calls)
    one = statistics.median((times[-1] - times[2]) / (tokens - 2) for times in calls)
    first = statistics.median(times[1] - times[0] for times in calls)
    return {
        "batch": batch,
        "tokens_per_second": batch * tokens / whole,
        "seconds_per_token": one,
        "first_seconds": first,
        "calls": [times[-1] - times[0] for times in calls],
    }


def torch_decode(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure transformers `generate` with a static cache and a compiled decode step."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    from maxpipe.config.load import load

    transformers.LlamaForCausalLM  # noqa: B018
    yield {}
    model = load(["llama3-8b", *DECODE_KEYS, *(TINY if options["tiny"] else ())]).config.model
    device = torch_device()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    network = gpu_step.torch_llama(model, device, 8192).eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0

    class Clock(transformers.LogitsProcessor):
        """Records the time at which each token is generated."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return scores

    for batch in options["batches"]:
        shape = (batch, DECODE["prompt"])
        ids = torch.randint(2, model.vocab_size, shape, device=device)
        calls = []
        for number in range(2 + DECODE["repeats"]):
            times = [time.perf_counter()]
            with torch.no_grad():
                network.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=8 if options["tiny"] else DECODE["more"],
                    do_sample=False,
                    cache_implementation="static",
                    logits_processor=transformers.LogitsProcessorList([Clock()]),
                )
            if device == "cuda":
                torch.cuda.synchronize()
            calls.append([*times[:1], *times[2:], time.perf_counter()])
            print(f"batch {batch}, call {number}: {calls[-1][-1] - times[0]:.2f} s")
        yield decoded(calls[2:], batch) | {"bytes": torch_peak()}


def whole_run(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare an uninterrupted run with a run that is interrupted by Ctrl-C and resumed."""
    yield {}
    shared = Path("/dev/shm")
    parent = shared if shared.is_dir() and shutil.disk_usage(shared).free > 60 * GIB else None
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield from stopped_and_resumed(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stopped_and_resumed(folder: Path, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of `whole_run`, with run folders created in `folder`."""
    steps, stop = (12, 5) if options["tiny"] else (100, 50)
    # The byte tokenizer has 259 ids. A larger vocabulary would require the model's own tokenizer.
    keys = ["tokenizer.kind=bytes", "model.vocab_size=259", "data.source=corpus"]
    keys += [f"run.dir={folder}", f"train.steps={steps}", "log.every=1", "checkpoint.keep=1"]
    keys += ["train.batch_size=4", "train.sequence_length=2048"]
    keys += [*TINY, "model.vocab_size=259"] if options["tiny"] else []
    command = [sys.executable, "-m", "maxpipe", "train", "llama3-1b", *keys]
    took: dict[str, float] = {}
    codes: dict[str, int] = {}

    def call(name: str, *more: str, until: int = 0) -> str:
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command, *more] if name != "generate" else list(more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if until and re.match(rf"step +{until}/", line):
                process.send_signal(signal.SIGINT)
                until = 0
        codes[name], took[name] = process.wait(), time.perf_counter() - start
        print(f"--- {name}: {took[name]:.1f} s, exit code {codes[name]}", file=sys.stderr)
        print("".join([*lines[:16], "...\n", *lines[-8:]]), file=sys.stderr, flush=True)
        return "".join(lines)

    call("stopped", "run.name=stopped", until=stop)
    yield {"part": "stopped", "codes": codes, "seconds_of": took}
    call("resumed", "run.name=stopped")
    yield {"part": "resumed", "codes": codes, "seconds_of": took}
    address = str(folder / "stopped")
    generate = [sys.executable, "-m", "maxpipe", "generate", address, "--prompt", "import "]
    text = call("generate", *generate, "--max-tokens", "32", "--temperature", "0")
    yield {"part": "generate", "codes": codes, "seconds_of": took, "text": text[-200:]}
    call("whole", "run.name=whole", "checkpoint.every=1000")
    losses = {name: losses_of(folder / name) for name in ("whole", "stopped")}
    same = [losses["whole"][at] == losses["stopped"].get(at) for at in sorted(losses["whole"])]
    yield {
        "part": "compared",
        "codes": codes,
        "seconds_of": took,
        "steps": len(same),
        "same": sum(same),
        "first_difference": same.index(False) + 1 if False in same else 0,
        "last": [losses[name].get(steps) for name in losses],
    }


def losses_of(folder: Path) -> dict[int, float]:
    """Return the training loss of each step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


WORK: dict[str, Callable[[dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "train_step": train_step,
    "torch_step": torch_step,
    "experts": experts,
    "expert_tiles": expert_tiles,
    "torch_experts": torch_experts,
    "delta": delta,
    "torch_delta": torch_delta,
    "decode": decode,
    "torch_decode": torch_decode,
    "whole_run": whole_run,
}
