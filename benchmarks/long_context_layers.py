"""Compare the cycles of recurrent layers and of sparse attention with those of attention, and
those of hyper-connections with and without kernels.

    python benchmarks/long_context_layers.py            # prints the tables
    python benchmarks/long_context_layers.py --write    # and writes long_context_layers.md

Each program is the forward and backward pass of one sublayer on one v5p chip, compiled without a
TPU. The script requires libtpu (`pip install '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
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


PLAIN = "hyper-connection in plain JAX"


def stream_layers() -> dict[str, Callable[[], Any]]:
    """Return functions that declare the hyper-connection of DeepSeek-V4-Flash."""
    from maxpipe.models.layers.hyper_connections import HyperConnection

    connection = HyperConnection(4096, 4, 1e-6, 1e-6, 20)
    return {PLAIN: lambda: connection, "hyper-connection": lambda: connection}


@dataclass(frozen=True)
class Sublayer:
    """A sublayer for one sequence on one chip. Methods require that libtpu is configured."""

    name: str
    tokens: int

    @cached_property
    def target(self) -> Any:
        """Return the topology, and prepare its compiler."""
        from maxpipe.planner import topology

        target = topology.parse_topology(CHIP)
        topology.prepare(target)
        return target

    @cached_property
    def devices(self) -> Any:
        """Return the devices of the topology."""
        from maxpipe.planner import topology

        return topology.topology_devices(self.target)

    def array(self, shape: tuple[int, ...], dtype: Any = "bfloat16") -> Any:
        """Return the shape of an array on the chip."""
        import jax

        mesh = jax.sharding.Mesh(self.devices[:1], ("data",))
        whole = jax.NamedSharding(mesh, jax.P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def lower(self) -> Any:
        """Trace the forward and backward pass."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from maxpipe.models.layers.hyper_connections import HyperConnection
        from maxpipe.nn import stream_backends
        from maxpipe.nn.block import sublayer_module
        from maxpipe.nn.module import LayerContext
        from maxpipe.parallel.axes import MeshConfig
        from maxpipe.parallel.sharding import AxisRules

        part = (recurrent_layers() | sparse_layers() | stream_layers())[self.name]()
        is_connection = isinstance(part, HyperConnection)
        if self.name == PLAIN:
            stream_backends.select_shards = lambda *_: None
        rules = AxisRules.from_config(MeshConfig())

        def run(params: Any, x: Any, cotangent: Any, ids: Any, loss_mask: Any) -> Any:
            def apply(params: Any, x: Any) -> Any:
                module = sublayer_module(part)(part, rules)
                for key, value in params.items():
                    setattr(module, key, nnx.Param(value))
                if is_connection:  # the branch returns its input
                    h, z = module.read(x)
                    return module.write(x, h, z), jnp.zeros(())
                inputs = {"segment_ids": ids, "positions": ids, "loss_mask": loss_mask}
                output = module(x, LayerContext(inputs, jnp.asarray(0)))
                return output.x, sum(output.losses.values())

            (out, loss), pull = jax.vjp(apply, params, x)
            return out, pull((cotangent, jnp.ones_like(loss, jnp.float32)))

        params = {
            key: self.array(param.shape, param.own_dtype or "bfloat16")
            for key, param in part.params.items()
        }
        width = part.d_model * (part.num_streams if is_connection else 1)
        x = self.array((1, self.tokens, width))
        ids, loss_mask = (self.array((1, self.tokens), dtype) for dtype in ("int32", "float32"))
        with jax.set_mesh(x.sharding.mesh):
            return jax.jit(run).lower(params, x, x, ids, loss_mask)

    def cycles(self) -> float:
        """Return the cycles of the compiled program, without recurrence kernels."""
        from maxpipe.distributed.runtime import compiler_options
        from maxpipe.planner.hlo_parser import parse_hlo
        from maxpipe.planner.hlo_profile import profile_program
        from maxpipe.planner.instruction_costs import all_cycles

        options = compiler_options("tpu", self.devices[0].device_kind)
        compiled = self.lower().compile(options)
        profile = profile_program(parse_hlo(compiled.as_text() or ""))
        entries = [e for e in profile.entries if not e.instruction.name.startswith("recurrence_")]
        return all_cycles(replace(profile, entries=entries), self.target.hardware)

    def scan_cycles(self) -> float:
        """Return the cycles of recurrence kernels from their instruction schedules.

        The kernels are compiled without the other operations, because the compiler would write the
        schedules of all of them.
        """
        import jax

        from maxpipe.nn import convolution_kernel, recurrent_kernels

        calls: list[tuple[Any, Any]] = []

        def record(kernel: Any) -> Any:
            def run(layout: Any, *arrays: Any, **options: Any) -> Any:
                shapes = jax.tree.map(lambda x: self.array(x.shape, x.dtype), arrays)
                calls.append((partial(kernel, layout, **options), shapes))
                return kernel(layout, *arrays, **options)

            return run

        folder = tempfile.TemporaryDirectory()
        write_schedules(Path(folder.name))
        for module in (convolution_kernel, recurrent_kernels):
            for name in ("forward", "backward"):
                setattr(module, name, record(getattr(module, name)))
        self.lower()
        for kernel, shapes in calls:
            with jax.set_mesh(jax.tree.leaves(shapes)[0].sharding.mesh):
                jax.jit(kernel).lower(*shapes).compile()
        kernels = KernelSchedule.read_all(Path(folder.name), RECURRENCE)
        hardware = self.target.hardware
        return sum(recurrence_cycles(kernel, hardware, num_cores=2) for kernel in kernels)


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
    """Return the cycles of a sublayer. Programs are compiled in new processes."""

    def run(option: str) -> float:
        command = [sys.executable, __file__, option, json.dumps([name, tokens])]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(found.stdout.splitlines()[-1])

    return run("--program") + run("--scans")


def projections() -> str:
    """Return a sentence with the cycles of the projections of each recurrent layer."""
    from maxpipe.planner.topology import parse_topology

    hardware = parse_topology(CHIP).hardware
    per_cycle = hardware.flops / hardware.clock_ghz / 1e9
    parts = []
    for name, declare in recurrent_layers().items():
        part = declare()
        weights = getattr(part, "projections", ("query", "key", "value", "out"))
        count = sum(math.prod(part.params[weight].shape) for weight in weights)
        flops = 6 * RECURRENT_TOKENS[0] * count
        parts.append(f"{name} {flops / per_cycle / 1e6:.1f}")
    return PROJECTIONS.format(RECURRENT_TOKENS[0], ", ".join(parts))


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
state of 128. The number of grid steps of a kernel is proportional to T, and their schedule does not
depend on T.

"""

PROJECTIONS = """
Projections alone need the following Mcycles at T = {:,} and at the peak rate:
{}.
"""

SPARSE = """
## Sparse attention

The layers are those of DeepSeek-V3.2 with an eighth of the 128 heads and of the 64 index heads, as
on a chip of a tensor axis of 8. Query tokens select 2048 keys. The cycles depend on the number of
different keys that a block of 32 query tokens selects; the table assumes 4096. Exchanges over the
tensor axis are not included. Dense attention uses kernels. Sparse attention uses kernels for the
selection, for attention to the selected keys and to add their gradients. XLA gathers the keys and
computes the gradients of the index scores.

"""


STREAMS = """
## Residual streams

A hyper-connection of DeepSeek-V4-Flash reads and updates 4 residual streams of 4096 entries, with
20 Sinkhorn iterations. A layer has two hyper-connections. Cycles of the kernels are the lengths of
their instruction schedules or the time of their transfers, whichever is longer.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--scans", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        print(json.dumps(Sublayer(*json.loads(options.program)).cycles()))
        return
    if options.scans:
        print(json.dumps(Sublayer(*json.loads(options.scans)).scan_cycles()))
        return
    page = PREAMBLE + RECURRENT + rows(recurrent_layers(), RECURRENT_TOKENS)
    page += projections()
    page += SPARSE + rows(sparse_layers(), SPARSE_TOKENS)
    page += STREAMS + rows(stream_layers(), RECURRENT_TOKENS[:1])
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
