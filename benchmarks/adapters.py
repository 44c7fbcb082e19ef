"""Report compiled memory and FLOPs of Llama 3 8B with adapters on eight TPU v5e chips.

    python benchmarks/adapters.py            # prints the table
    python benchmarks/adapters.py --write    # and writes adapters.md

`maxpipe compile` compiles each train step with libtpu (`pip install '.[tpu]'`), without a TPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from predicted_memory import CACHE, GIB, ROOT, Row, _maxpipe, compiled

LAYOUT = (
    "ici_stage=2 ici_fsdp=4 repeats=2 microbatches=8 batch_size=32 sequence_length=2048 "
    "model.param_dtype=bfloat16"
)
RANK = "adapter.rank=16"
RUNS = {
    "all parameters": "",
    "LoRA": RANK,
    "DoRA": f"{RANK} adapter.kind=dora",
    "LoRA, base in int8": f"{RANK} adapter.base_quantization=int8",
    "LoRA, base in nf4": f"{RANK} adapter.base_quantization=nf4",
}

PREAMBLE = f"""\
# Adapters of Llama 3 8B

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/adapters.py --write`. No TPU was used. libtpu compiles
`maxpipe compile llama3-8b --topology v5e:2x4` ahead of time, with `{LAYOUT}`. Adapters have rank 16
and are applied to all attention and MLP projections. Sizes are in GiB per device. The column
"state" is the size of parameters and optimizer state, and "gradients" is the size of the float32
accumulators. Both columns are predicted by `maxpipe plan`. The columns "arguments" (the state and a
batch) and "peak" are reported by the compiler. TFLOP counts are those of the compiled program on
one device.

"""


def table(cache: Path) -> str:
    """Return the page content below the preamble."""
    head = ["trained", "parameters", "state", "gradients", "arguments", "peak"]
    head += ["predicted peak", "TFLOP of a step"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, keys in RUNS.items():
        row = Row("llama3-8b", "v5e:2x4", 1, f"{LAYOUT} {keys}".strip())
        if (report := compiled(row, cache)) is None:
            continue
        plan: Any = json.loads(subprocess.check_output(_maxpipe("plan", row), cwd=ROOT))
        terms = plan["terms"]
        sizes = [terms["state"], terms.get("gradients", 0.0), report["argument_bytes"]]
        sizes += [report["peak_bytes"], plan["total_bytes"]]
        numbers = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        flops = f"{report['flops'] / 1e12:.1f}"
        lines.append(f"| {name} | {plan['trained_parameters'] / 1e6:.0f} M | {numbers} | {flops} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    page = table(options.cache)
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
