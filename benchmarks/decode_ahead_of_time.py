"""Report the compiled memory use of a 70B model's decode step on 32 TPU chips, without a TPU.

    python benchmarks/decode_ahead_of_time.py           # prints the table
    python benchmarks/decode_ahead_of_time.py --write   # and writes decode_ahead_of_time.md

libtpu compiles the bfloat16 decode step of `maxpipe generate llama3-70b` for v5e:4x8 on this
machine (`pip install '.[tpu]'`). The step's arguments are the parameters and the KV caches of all
sequences. Each program is compiled in a separate process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOPOLOGY, MODEL = "v5e:4x8", "llama3-70b"
ROWS, ROOM = 64, 4096
PROMPT = 2048
GIB = 2**30
MESHES = ["ici_stage=4 ici_tensor=8"]
PREAMBLE = f"""\
# Decoding step of a 70B model on 32 chips

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/decode_ahead_of_time.py --write`. No TPU was used. The table shows a
decoding step of `{MODEL}` in bfloat16 on {TOPOLOGY}. The step generates one token for each of
{ROWS} sequences, with KV caches for {ROOM} tokens per sequence. Sizes are in GiB per device. The
peak memory is reported by the compiler and includes arguments and outputs.

"""


def compile_one(mesh: str) -> dict[str, Any]:
    """Compile one program. This function runs in a separate process."""
    from maxpipe.planner import topology

    target = topology.parse_topology(TOPOLOGY)
    topology.prepare(target)

    import jax
    import numpy as np

    from maxpipe.config.load import load
    from maxpipe.generation.decoding import DecodeShape, Sampling, with_shardings
    from maxpipe.generation.pipeline_decoding import (
        build_decode_engine,
        decode_param_layout,
        decode_param_shardings,
        to_decode_params,
    )
    from maxpipe.parallel.mesh import build_mesh
    from maxpipe.step.build import steps_from_config

    given = [f"mesh.{each}" for each in mesh.split()]
    sizes = ["train.steps=1", "train.batch_size=512", f"train.sequence_length={ROOM}"]
    types = ["model.param_dtype=bfloat16", "model.compute_dtype=bfloat16"]
    tokenizer = ["tokenizer.kind=huggingface", "tokenizer.path=none"]
    config = load([MODEL, *given, *sizes, *types, *tokenizer]).config
    devices = topology.topology_devices(target)
    steps = steps_from_config(config, build_mesh(config.mesh, devices), np.zeros(0, np.int32))
    parts = decode_param_layout(steps.param_layout)
    key = jax.random.key(0)
    shapes = jax.eval_shape(lambda key: to_decode_params(parts, parts.decoder.init(key)), key)
    params = with_shardings(shapes, decode_param_shardings(parts))
    decoding = build_decode_engine(parts, Sampling(), 0)
    lowered = decoding.lower_step(params, DecodeShape(ROWS, PROMPT, ROOM - PROMPT))
    start = time.perf_counter()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes / GIB,
        "temporary": memory.temp_size_in_bytes / GIB,
        "peak": memory.peak_memory_in_bytes / GIB,
        "memory": target.hardware.memory_gib,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_one(options.one)))
        return
    head = ["mesh", "arguments", "temporary", "peak", "device memory", "compiled in"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for mesh in MESHES:
        command = [sys.executable, __file__, "--one", mesh]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(printed.splitlines()[-1])
        cells = [f"{found[name]:.2f}" for name in ("arguments", "temporary", "peak", "memory")]
        named = mesh.replace(" ", " x ").replace("ici_", "").replace("=", " ")
        lines.append(f"| {named} | {' | '.join(cells)} | {found['seconds']:.0f} s |")
        print(lines[-1], file=sys.stderr)
    page = "\n".join([*lines, ""])
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page, encoding="utf-8")


if __name__ == "__main__":
    main()
