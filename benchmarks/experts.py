"""Compare the TPU compiler's cycle estimates for an MoE layer and a dense layer, without a TPU.

    python benchmarks/experts.py            # prints the table
    python benchmarks/experts.py --write    # and writes experts.md

The forward and backward passes of a layer are compiled for one v5p chip as the body of a loop. The
backward pass computes gradients of the input and of all weights. Each MoE implementation is
compared with a dense layer that has the same number of active parameters. The script requires
libtpu (`pip install '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import kernel_schedules

TOPOLOGY = "v5p:2x2x1"


@dataclass(frozen=True)
class Shape:
    """Layer sizes, and the number of tokens per device in a microbatch."""

    name: str
    d_model: int
    d_expert: int
    num_experts: int
    per_token: int
    tokens: int
    rows: int = 4


SHAPES = [
    Shape("Mixtral 8x7B", 4096, 14336, 8, 2, 8192),
    Shape("16 experts of 1024", 2048, 1024, 16, 2, 8192),
    Shape("16 experts of 1024, 4 x the tokens", 2048, 1024, 16, 2, 32768),
    Shape("Qwen3 30B-A3B", 2048, 768, 128, 8, 8192),
]
NO_EXPERTS = "no experts"
FORMS = (NO_EXPERTS, "grouped", "capacity", "dense")
CAPACITY = 1.25


def measure(shape: Shape, form: str) -> dict[str, Any]:
    """Compile one layer. This function runs in a separate process."""
    from maxpipe.planner import topology

    target = topology.parse_topology(TOPOLOGY)
    schedules = tempfile.TemporaryDirectory()
    if form == "grouped":
        kernel_schedules.write_schedules(Path(schedules.name))
    topology.prepare(target)

    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxpipe.distributed.runtime import compiler_options
    from maxpipe.models.layers import experts, mlp
    from maxpipe.nn.experts import Experts
    from maxpipe.nn.mlp import MLP
    from maxpipe.nn.module import LayerContext
    from maxpipe.parallel.axes import MeshConfig
    from maxpipe.parallel.mesh import build_mesh
    from maxpipe.parallel.sharding import AxisRules
    from maxpipe.planner.hlo_parser import parse_hlo
    from maxpipe.planner.hlo_profile import profile_program

    devices = topology.topology_devices(target)
    mesh = build_mesh(MeshConfig(ici_data=len(devices)), devices)
    rules = AxisRules.from_config(MeshConfig())
    options: dict[str, Any] = {"dispatch": form} if form in ("grouped", "dense") else {}
    options |= {"capacity": CAPACITY} if form == "capacity" else {}
    part: Any = experts.Experts(
        shape.d_model, shape.d_expert, shape.num_experts, shape.per_token, 1.0, 0.0, **options
    )
    if form == NO_EXPERTS:
        part = mlp.MLP(shape.d_model, shape.per_token * shape.d_expert, 1.0)
    spec = jax.P("data")

    def layer(weights: Any, x: Any, ids: Any) -> Any:
        module = (MLP if form == NO_EXPERTS else Experts)(part, rules)
        for name, weight in weights.items():
            getattr(module, name)[...] = weight
        inputs = {"segment_ids": ids, "positions": ids}
        return module(x, LayerContext(inputs, jnp.int32(0))).x

    def run(weights: Any, x: Any, ids: Any, turns: Any) -> Any:
        def turn(_: Any, carry: Any) -> Any:
            x, _ = carry
            y, pull = jax.vjp(lambda weights, x: layer(weights, x, ids), weights, x)
            gradients, x = pull(y)
            return x, gradients

        weights = jax.lax.pcast(weights, "data", to="varying")
        empty = jax.tree.map(jnp.zeros_like, weights)
        x, gradients = jax.lax.fori_loop(0, turns[0], turn, (x, empty))
        return x, jax.tree.map(lambda leaf: leaf[None], gradients)

    def shaped(dims: tuple[int, ...], kind: str, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind, sharding=jax.NamedSharding(mesh, where))

    rows = shape.rows * len(devices), shape.tokens // shape.rows
    arguments = (
        {name: shaped(param.shape, "bfloat16", jax.P()) for name, param in part.params.items()},
        shaped((*rows, shape.d_model), "bfloat16", spec),
        shaped(rows, "int32", spec),
        shaped((len(devices),), "int32", spec),
    )
    settings = compiler_options("tpu", devices[0].device_kind)
    with jax.set_mesh(mesh):
        body = jax.shard_map(
            run, in_specs=(jax.P(), spec, spec, spec), out_specs=spec, axis_names={"data"}
        )
        compiled = jax.jit(body).lower(*arguments).compile(settings)
    text = compiled.as_text() or ""
    module, calls = parse_hlo(text), kernel_schedules.count_calls(text)
    loops = [each for each in module.computations[module.entry].values() if each.opcode == "while"]
    found = profile_program(replace(module, entry=loops[-1].computation("body") or ""))
    gathered = sum(
        2 * np.prod(dims) * 2
        for computation in module.computations.values()
        for each in computation.values()
        if each.opcode == "fusion" and re.match(r"gather", each.name)
        for dims in [tuple(map(int, re.findall(r"\d+", each.shape.split("]")[0].split("[")[1])))]
    )
    hardware = target.hardware
    shares = np.full(shape.num_experts, 1 / shape.num_experts)
    num_rows = shape.tokens * shape.per_token
    sizes = np.random.default_rng(0).multinomial(num_rows, shares).astype(np.int32)
    return {
        "cycles": found.cycles,
        "kernels": sum(
            calls[kernel.name] * kernel_schedules.cycles(kernel, sizes, hardware, num_cores=2)
            for kernel in kernel_schedules.KernelSchedule.read_all(
                Path(schedules.name), kernel_schedules.GROUPED
            )
        ),
        "gathered": float(gathered) / (hardware.memory_gb_per_second * 1e9),
        "clock": hardware.clock_ghz * 1e9,
        "temporary": compiled.memory_analysis().temp_size_in_bytes / 2**20,
    }


def table() -> str:
    head = [
        "layer",
        "form",
        "Mcycles",
        "kernel Mcycles",
        "gather Mcycles",
        "relative to no experts",
    ]
    head.append("temp MiB")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for shape in SHAPES:
        found = {form: in_process(shape, form) for form in FORMS}
        baseline = found[NO_EXPERTS]
        for form, each in found.items():
            kernels = each["kernels"]
            gathers = each["gathered"] * each["clock"]
            total = each["cycles"] + kernels + gathers
            each["total"] = total
            numbers = [f"{number / 1e6:.2f}" for number in (total, kernels, gathers)]
            cells = [shape.name, form, *numbers, f"{total / baseline['total']:.2f}"]
            lines.append(f"| {' | '.join(cells)} | {each['temporary']:.0f} |")
            print(lines[-1], file=sys.stderr)
    return "\n".join([*lines, ""])


def in_process(shape: Shape, form: str) -> dict[str, Any]:
    """Run `measure` in a new process and return its result."""
    task = json.dumps({"shape": asdict(shape), "form": form})
    command = [sys.executable, __file__, "--one", task]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


LISTED = "\n".join(
    f"- {each.name}: D {each.d_model}, F {each.d_expert}, {each.per_token} of {each.num_experts} "
    f"experts, {each.tokens} tokens"
    for each in SHAPES
)
PREAMBLE = f"""\
# TPU compiler estimates for MoE layers

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/experts.py --write`. No TPU was used. The forward and backward pass of one
bfloat16 layer is compiled for one chip of {TOPOLOGY}. The backward pass computes the gradients of
the input and of all weights. The layer has no balance loss. The baseline is a dense layer whose
width equals the total width of the experts selected for one token. `grouped` and `dense` drop no
tokens. `capacity` has buffers for {CAPACITY} times the mean number of tokens per expert.

{LISTED}

Cycles are estimated by the compiler, which has no estimates for custom kernels and gathers. The
time of a kernel is computed from the compiler's instruction schedule (`kernel_schedules.py`): the
number of instructions in each code block of the kernel, times the number of times that the block
runs for tokens that are routed at random. The time of a multiplication is at least the time
that the matrix units need at their peak rate. The time of gathers is computed from the bytes that
they read and write, at the published memory bandwidth. Sorts are not included. Small experts have
two additional costs: the permutation of rows, and the activation function and sums, which a dense
layer fuses with its matmuls.

Alternatives and their results:

- *Megablox kernels.* On chips with two cores, the kernel divides column tiles between the cores. A
  single column tile, as for the width of 768 of Qwen3, left one core without work. The kernels of
  tokamax 0.0.12 have the same grid.
- *Sum over the rows of a token* by `sum`: XLA converted and reduced in separate passes, which
  needed 9.0 of 11.3 Mcycles outside of the kernels of Qwen3. Additions of the k choices need 0.6.
- *Row tiles of 64 rows* multiply fewer rows twice, but the matrix units then wait for weights: 876
  cycles instead of 768.
- *Tiles of the weight gradient that start at the first row of an expert* (aligned to 16 rows):
  10% fewer steps. For matmuls of rows, the tiles of two experts would write the same rows, so these
  kernels multiply a quarter or half of a tile at a boundary instead.
- *One kernel for both input gradients* (of the gate and the up projection), which sums in float32:
  one gather and one sum over rows less. One kernel for both weight gradients transposes the rows
  once: 2.05 instead of 2.23 Mcycles for Qwen3.

The layer of Qwen3 needs 1.61 times the cycles of a dense layer, and a factor of 1.4 (11.2 Mcycles)
is not within reach of these kernels. At the peak rate, the multiplications need 7.1 Mcycles. The
kernels need 9.1, because the 512 rows of an expert do not start and end at the boundaries of tiles.
Gathers need 1.4, and the activation function, the sums and the routing 2.4. Kernels that always
reach the peak rate would lead to a factor of 1.35. Kernels that also compute the activation
function could save up to 0.6 Mcycles of the 2.4 (not built).

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = json.loads(options.one)
        print(json.dumps(measure(Shape(**task["shape"]), task["form"])))
        return
    page = table()
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page, encoding="utf-8")


if __name__ == "__main__":
    main()
