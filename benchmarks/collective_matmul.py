"""Sums over tensor, split tokens and rings, by the TPU compiler, without a TPU.

    python benchmarks/collective_matmul.py          # prints the table
    python benchmarks/collective_matmul.py --write  # and writes collective_matmul.md

The train step of an 8B-class model (32 layers, 8 key/value heads) is compiled for 32 chips
(v5p:2x4x4) by libtpu on this machine (`pip install '.[tpu]'`); nothing runs on a TPU. Each program
compiles in a process of its own, some minutes each.
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
"""fsdp, tensor and tokens of a sequence."""
SWITCHES = {
    "sums": {},
    "split tokens": {"sequence_parallel": True},
    "rings": {"sequence_parallel": True, "collective_matmul": True},
}
LINK_BYTES_PER_CYCLE = 2 * 90e9 / 1.75e9
"""Both ways along one axis of a v5p torus, for the time of traffic that nothing hides."""
GIB = 2**30


def compile_one(fsdp: int, tensor: int, tokens: int, switches: dict[str, bool]) -> dict[str, Any]:
    """Compiles and reads one program. Runs in a process of its own."""
    from maxpipe.plan import topology

    target = topology.parse_topology(TOPOLOGY)
    topology.prepare(target)

    from maxpipe.config.load import from_dict
    from maxpipe.plan.compile import build_steps, profile_step
    from maxpipe.plan.memory import predict_memory
    from maxpipe.plan.sizes import Sizes, build_schedule

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
                "attention": "xla",  # whose matmuls have estimates of cycles, as kernels have not
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
    """A line of the table."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
    sent = " | ".join(f"{found['sent'].get(kind, 0.0):.1f}" for kind in kinds)
    numbers = (f"{found[key]:.2f}" for key in ("stage", "gigacycles", "exposed"))
    memory = (f"{found[key]:.1f}" for key in ("temporary", "peak", "predicted"))
    return f"| {name} | {sent} | {' | '.join(numbers)} | {' | '.join(memory)} |"


def main() -> None:
    """Compiles what is not named and prints the table."""
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


PAGE = """# Split tokens and rings over tensor

`python benchmarks/collective_matmul.py --write`: a train step of an 8B-class model (Llama-3-8B
shape, M = 16, interleaved, 2 repeats, `remat=full`, `idle=compute`), compiled for 32 v5p chips.
The first four columns are GiB that a device sends along tensor in a step, by kind; then those of
messages between stages. `Gcycles` are the compiler's estimates of everything but collectives, along
the busiest stages; `exposed` is the traffic along tensor at 180 GB/s, less the cycles between its
start and its end: an estimate, as the compiler has none. `predicted` is the peak by `maxpipe plan`.
Nothing ran on a TPU.

{table}
Rows: `sums` is tensor parallelism as it is by default; `split tokens` is
`mesh.sequence_parallel=true`; `rings` is that and `mesh.collective_matmul=true`.
"""

if __name__ == "__main__":
    main()
