"""Compare the cycles of recurrent layers and of sparse attention with those of attention.

    python benchmarks/long_context_layers.py            # prints the tables
    python benchmarks/long_context_layers.py --write    # and writes long_context_layers.md

Each program is the forward and backward pass of one sublayer on one v5p chip, compiled without a
TPU. The script requires libtpu (`pip install '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_schedules import RECURRENCE, KernelSchedule, recurrence_cycles, write_schedules

CHIP = "v5p:2x2x1"
RECURRENT_TOKENS = (4096, 65_536)
SPARSE_TOKENS = (131_072,)
TENSOR = 8
"""Size of the tensor axis of the sparse attention layers. A chip has an eighth of the heads."""


def recurrent_layers() -> dict[str, Callable[[], Any]]:
    """Return functions that declare sublayers with 4096 entries per token."""
    from maxpipe.models.layers.attention import Attention, Rope
    from maxpipe.models.layers.gated_delta import GatedDelta
    from maxpipe.models.layers.kda import KimiDelta
    from maxpipe.models.layers.mamba2 import Mamba2
    from maxpipe.models.layers.mlp import RMSNorm

    width, norm = 4096, RMSNorm(128, 1e-6)
    return {
        "attention": lambda: Attention(width, 32, 8, 128, 1.0, "splash", Rope(1e4)),
        "gated delta rule": lambda: GatedDelta(width, 16, 32, 128, 128, 4, norm, 1.0),
        "Kimi delta attention": lambda: KimiDelta(width, 32, 128, 4, norm, 1.0),
        "Mamba-2": lambda: Mamba2(
            width, 128, 64, 8, 128, 4, conv_bias=True, norm=RMSNorm(8192, 1e-6), out_gain=1.0
        ),
    }


def sparse_layers() -> dict[str, Callable[[], Any]]:
    """Return functions that declare the attention of DeepSeek-V3.2, with an eighth of the heads."""
    from dataclasses import replace

    from maxpipe.models.layers.attention import Rope
    from maxpipe.models.layers.indexer import Indexer
    from maxpipe.models.layers.latent_attention import LatentAttention

    indexer = Indexer(7168, 1536, 64 // TENSOR, 128, 64, False, 2048, "sparse", 1.0)
    rope = Rope(1e4, rotary_dims=64)
    dense = LatentAttention(
        7168, 128 // TENSOR, 192, 128, 512, 1536, 1.0, "splash", rope, 0.07, 1e-6
    )
    return {
        "dense, splash": lambda: dense,
        "sparse, blockwise": lambda: replace(dense, backend="blockwise", indexer=indexer),
    }


def layer_cycles(name: str, tokens: int) -> float:
    """Return the cycles of a sublayer's forward and backward pass over one sequence."""
    from maxpipe.planner import topology

    folder = tempfile.TemporaryDirectory()
    write_schedules(Path(folder.name))
    target = topology.parse_topology(CHIP)
    topology.prepare(target)

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from maxpipe.distributed.runtime import compiler_options
    from maxpipe.nn.block import sublayer_module
    from maxpipe.nn.module import LayerContext
    from maxpipe.parallel.axes import MeshConfig
    from maxpipe.parallel.sharding import AxisRules
    from maxpipe.planner.hlo_parser import parse_hlo
    from maxpipe.planner.hlo_profile import profile_program
    from maxpipe.planner.instruction_costs import all_cycles

    part = (recurrent_layers() | sparse_layers())[name]()
    devices = topology.topology_devices(target)
    mesh = jax.sharding.Mesh(devices[:1], ("data",))
    whole = jax.NamedSharding(mesh, jax.P())
    rules = AxisRules.from_config(MeshConfig())

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def run(params: Any, x: Any, cotangent: Any, ids: Any, loss_mask: Any) -> Any:
        def apply(params: Any, x: Any) -> Any:
            module = sublayer_module(part)(part, rules)
            for key, value in params.items():
                setattr(module, key, nnx.Param(value))
            inputs = {"segment_ids": ids, "positions": ids, "loss_mask": loss_mask}
            output = module(x, LayerContext(inputs, jnp.asarray(0)))
            return output.x, sum(output.losses.values())

        (out, loss), pull = jax.vjp(apply, params, x)
        return out, pull((cotangent, jnp.ones_like(loss, jnp.float32)))

    params = {key: array(*param.shape) for key, param in part.params.items()}
    x, ids = array(1, tokens, part.d_model), array(1, tokens, dtype="int32")
    options = compiler_options("tpu", devices[0].device_kind)
    with jax.set_mesh(mesh):
        arguments = params, x, x, ids, array(1, tokens, dtype="float32")
        compiled = jax.jit(run).lower(*arguments).compile(options)
    profile = profile_program(parse_hlo(compiled.as_text() or ""))
    is_scan = [entry.instruction.name.startswith("recurrence_") for entry in profile.entries]
    others = [entry for entry, scan in zip(profile.entries, is_scan, strict=True) if not scan]
    kernels = KernelSchedule.read_all(Path(folder.name), RECURRENCE)
    scans = sum(recurrence_cycles(kernel, target.hardware, num_cores=2) for kernel in kernels)
    return all_cycles(replace(profile, entries=others), target.hardware) + scans


def rows(names: dict[str, Any], all_tokens: tuple[int, ...]) -> str:
    """Return a table with one row per sequence length, and ratios to the first layer."""
    first, *others = names
    heads = (f"{name}, Mcycles | ratio" for name in others)
    lines = [f"| T | {first}, Mcycles | {' | '.join(heads)} |"]
    lines.append("|---" * (2 + 2 * len(others)) + "|")
    for tokens in all_tokens:
        base = in_process(first, tokens)
        cells = [f"{tokens:,}", f"{base / 1e6:.1f}"]
        for name in others:
            found = in_process(name, tokens)
            cells += [f"{found / 1e6:.1f}", f"{found / base:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def in_process(name: str, tokens: int) -> float:
    """Run `layer_cycles` in a new process and return its result."""
    command = [sys.executable, __file__, "--one", json.dumps([name, tokens])]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


PREAMBLE = """\
# Layers for long sequences

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/long_context_layers.py --write`. No TPU was used. Each figure is the number of
cycles of the forward and backward pass of one sublayer, with its projections, for one sequence on
one v5p chip. Attention kernels are counted at the rates of
[kernel_schedules](kernel_schedules.md), kernels of recurrent layers at the number of their
scheduled instructions, and instructions without an estimate at the memory bandwidth.
"""

RECURRENT = """
## Recurrent layers

All layers have an input and output of 4096. Attention has 32 heads and 8 key/value heads of 128
dims. The delta rules have 32 heads of 128 dims. Mamba-2 has 128 heads of 64 dims, 8 groups and a
state of 128.

"""

SPARSE = """
## Sparse attention

The layers are those of DeepSeek-V3.2 with an eighth of the 128 heads and of the 64 index heads, as
on a chip of a tensor axis of 8. Query tokens select 2048 keys. The cycles depend on the number of
different keys that a block of 32 query tokens selects; the table assumes 4096. Exchanges over the
tensor axis are not included. Dense attention uses kernels, and sparse attention plain JAX. Sparse
attention at this length needs a kernel for the index scores and for the gathered keys.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(layer_cycles(*json.loads(options.one))))
        return
    page = PREAMBLE + RECURRENT + rows(recurrent_layers(), RECURRENT_TOKENS)
    page += SPARSE + rows(sparse_layers(), SPARSE_TOKENS)
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
