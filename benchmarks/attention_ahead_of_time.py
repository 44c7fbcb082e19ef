"""Compare a train step's compiled memory and cycles with plain and with splash attention.

    python benchmarks/attention_ahead_of_time.py          # prints the table
    python benchmarks/attention_ahead_of_time.py --write  # and writes attention_ahead_of_time.md

The programs are those of `tpu_ahead_of_time.py`, compiled without a TPU. Each of the eight programs
compiles in a few minutes. Results are cached in `--cache`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from tpu_ahead_of_time import TOPOLOGY, Mode, result

from maxpipe.nn.attention.splash import attention_block_size

ROWS = [
    (Mode("step", "full"), 16),
    (Mode("step", "names"), 16),
    (Mode("step", "full", tokens=8192, kv_heads=8), 8),
    (Mode("iteration", "full"), 16),
]
"""Programs as (mode, microbatches). Long sequences use 8 key/value heads, as in Llama 3."""


def hidden_share(tokens: int) -> float:
    """Return the fraction of masked query-key pairs in the blocks that kernels compute."""
    size = attention_block_size(tokens, 128)
    count = tokens // size
    return 1 - (tokens + 1) * tokens / (count * (count + 1) * size**2)


def table(cache: Path) -> str:
    """Return the Markdown table."""
    head = ["mode", "T", "key/value heads", "M", "attention", "temporary GiB", "peak GiB"]
    head += ["Gcycles", "kernel Gcycles", "Gcycles by needed pairs", "TFLOP"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for mode, count in ROWS:
        for attention in ("xla", "splash"):
            found = result(replace(mode, attention=attention), count, cache)
            if found is None:
                continue
            cells = [f"{mode.weight_gather}, {mode.remat}", mode.tokens, mode.kv_heads, count]
            cells += [attention, f"{found['temporary']:.2f}", f"{found['peak']:.2f}"]
            kernels = found["kernel_gigacycles"]
            needed = found["gigacycles"] - kernels * hidden_share(mode.tokens)
            cells += [f"{found['gigacycles']:.2f}", f"{kernels:.2f}", f"{needed:.2f}"]
            cells += [f"{found['teraflops']:.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


PREAMBLE = f"""\
# TPU compiler estimates for splash attention

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/attention_ahead_of_time.py --write`. No TPU was used. The full train step of
an 8B-class model with AdamW was compiled for {TOPOLOGY} as 4 stages x 8 fsdp shards, interleaved
with 2 repeats. Each microbatch has one sequence per device. Cycles are the compiler's estimates
along the busiest stages, without synchronous collectives. The compiler has no estimate for custom
kernels. Matmuls in kernels are counted at the rate of `kernel_efficiency`. The column "Gcycles"
counts all query-key pairs in the blocks that kernels compute. The column "Gcycles by needed pairs"
counts only the pairs that causal attention needs.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    cache = Path(tempfile.gettempdir()) / "maxpipe-ahead-of-time"
    parser.add_argument("--cache", type=Path, default=cache)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    page = table(options.cache)
    print(page)
    if options.write:
        target = Path(__file__).with_suffix(".md")
        target.write_text(PREAMBLE + page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
