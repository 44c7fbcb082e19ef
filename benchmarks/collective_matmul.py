"""Compare tensor and sequence parallelism by the TPU compiler's estimates, without a TPU.

    python benchmarks/collective_matmul.py          # prints the table
    python benchmarks/collective_matmul.py --write  # and writes collective_matmul.md

libtpu compiles the train step of an 8B-class model (32 layers, 8 key/value heads) for 32 chips
(v5p:2x4x4) on this machine (`pip install '.[tpu]'`). Each program is compiled in a separate
process, which runs for several minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TOPOLOGY, STAGES, MICROBATCHES = "v5p:2x4x4", 4, 16
SHAPES = ((1, 8, 2048), (2, 4, 8192))
"""Compiled cases, as (fsdp axis size, tensor axis size, sequence length)."""
SWITCHES = {
    "all-reduce": {},
    "sequence parallel": {"sequence_parallel": True},
    "rings": {"sequence_parallel": True, "collective_matmul": True},
}
LINK_BYTES_PER_CYCLE = 2 * 90e9 / 1.75e9
"""Bidirectional bandwidth of one v5p torus axis, from which exposed traffic time is computed."""
GIB = 2**30


def compile_one(fsdp: int, tensor: int, tokens: int, switches: dict[str, bool]) -> dict[str, Any]:
    """Compile and profile one program. This function runs in a separate process."""
    from maxpipe.planner import topology

    target = topology.parse_topology(TOPOLOGY)
    topology.prepare(target)

    from maxpipe.config.load import from_dict
    from maxpipe.planner.compile import build_steps, profile_step
    from maxpipe.planner.memory import predict_memory
    from maxpipe.planner.sizes import Sizes, build_schedule

    config = from_dict(
        {
            "model": {
                "num_layers": 32,
                "d_model": 4096,
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_dim": 128,
                "d_mlp": 14336,
                "vocab_size": 128256,
                "attention": "xla",  # the compiler has no cycle estimates for kernels
            },
            "mesh": {"ici_stage": STAGES, "ici_fsdp": fsdp, "ici_tensor": tensor} | switches,
            "pipeline": {"microbatches": MICROBATCHES, "repeats": 2, "idle": "compute"},
            "train": {"batch_size": MICROBATCHES * fsdp, "sequence_length": tokens, "steps": 10},
        }
    )
    steps = build_steps(config, topology.topology_devices(target))
    compiled = steps.compile_train()
    held = compiled.memory_analysis()
    average, busiest = profile_step(compiled.as_text(), steps, "iteration")
    sent: dict[str, float] = defaultdict(float)
    exposed = 0.0
    for each in average.collectives:
        if len(each.group) == tensor and each.stride == 1:
            sent[each.kind] += each.total_bytes / GIB
            cycles = each.num_bytes / LINK_BYTES_PER_CYCLE
            exposed += each.count * max(0.0, cycles - each.cycles_between)
    predicted = predict_memory(Sizes(config), build_schedule(config), platform="tpu")
    return {
        "sent": sent,
        "stage": average.bytes_moved("collective-permute", group_size=STAGES) / GIB
        if tensor != STAGES
        else sum(
            each.total_bytes / GIB
            for each in average.collectives
            if each.region == "send" and each.kind == "collective-permute"
        ),
        "gigacycles": busiest.cycles / 1e9,
        "exposed": exposed / 1e9,
        "temporary": held.temp_size_in_bytes / GIB,
        "peak": held.peak_memory_in_bytes / GIB,
        "predicted": predicted.total / GIB,
    }


def row(name: str, found: dict[str, Any]) -> str:
    """Return the table row for one compiled program."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
    sent = " | ".join(f"{found['sent'].get(kind, 0.0):.1f}" for kind in kinds)
    numbers = (f"{found[key]:.2f}" for key in ("stage", "gigacycles", "exposed"))
    memory = (f"{found[key]:.1f}" for key in ("temporary", "peak", "predicted"))
    return f"| {name} | {sent} | {' | '.join(numbers)} | {' | '.join(memory)} |"


def main() -> None:
    """Compile all programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(compile_one(*json.loads(given.one))))
        return
    kinds = "all-reduce | all-gather | reduce-scatter | permute"
    head = f"| {kinds} | stage GiB | Gcycles | exposed Gcycles | temp GiB | peak GiB | predicted |"
    lines = []
    for fsdp, tensor, tokens in SHAPES:
        mesh = f"stage {STAGES} x " + (f"fsdp {fsdp} x " if fsdp > 1 else "") + f"tensor {tensor}"
        lines += ["", f"| {mesh}, T = {tokens} {head}", "|" + "---|" * 11]
        for name, switches in SWITCHES.items():
            task = json.dumps([fsdp, tensor, tokens, switches])
            command = [sys.executable, __file__, "--one", task]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                sys.exit(f"{mesh}, {name}: {ended.stderr[-2000:]}")
            lines.append(row(name, json.loads(ended.stdout.splitlines()[-1])))
            print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines).strip() + "\n"
    print(text)
    if given.write:
        page = Path(__file__).with_suffix(".md")
        page.write_text(PAGE.format(table=text), encoding="utf-8")


PAGE = """# Sequence parallelism and ring matmuls over the tensor axis

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/collective_matmul.py --write`. The train step of an 8B-class model was compiled
for 32 v5p chips (Llama-3-8B shape, M = 16, interleaved, 2 repeats, `remat=full`, `idle=compute`).
No TPU was used. The first four columns show the data that a device sends over the tensor axis in a
step, in GiB, for each type of collective. `stage GiB` is the size of the messages between stages.
`Gcycles` are the compiler's estimates along the busiest stages, without collectives. The compiler
has no estimate for collectives. `exposed Gcycles` is the time of the tensor traffic at 180 GB/s,
minus the cycles between the start and the end of each collective. `predicted` is the peak memory
that `maxpipe plan` predicts.

{table}
The row `all-reduce` is tensor parallelism with default settings. `sequence parallel` sets
`mesh.sequence_parallel=true`. `rings` also sets `mesh.collective_matmul=true`.
"""

if __name__ == "__main__":
    main()
