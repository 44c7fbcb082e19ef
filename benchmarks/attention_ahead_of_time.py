"""Memory and cycles of a train step with plain and with splash attention, from the TPU compiler.

    python benchmarks/attention_ahead_of_time.py          # prints the table
    python benchmarks/attention_ahead_of_time.py --write  # and writes attention_ahead_of_time.md

As `tpu_ahead_of_time.py`, whose programs these are; nothing runs on a TPU. Each of the eight takes
a few minutes to compile, and is kept in `--cache`.
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
"""(mode, microbatches). The long sequences are those of Llama 3, with its 8 key/value heads."""


def hidden_share(tokens: int) -> float:
    """Of the pairs of query and key that kernels compute in whole blocks, those that are hidden."""
    size = attention_block_size(tokens, 128)
    count = tokens // size
    return 1 - (tokens + 1) * tokens / (count * (count + 1) * size**2)


def table(cache: Path) -> str:
    """The benchmark page."""
    head = ["mode", "T", "key/value heads", "M", "attention", "temporary GiB", "peak GiB"]
    head += ["Gcycles", "of them kernels", "Gcycles by needed pairs", "TFLOP"]
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
# Attention in kernels by the TPU compiler's own numbers

`python benchmarks/attention_ahead_of_time.py --write`. Nothing ran on a TPU. 8B-class model, full
train step with AdamW, compiled for {TOPOLOGY} as 4 stages x 8 fsdp shards, interleaved with 2
repeats, one sequence per device and microbatch. Cycles are the compiler's estimates along the
busiest stages, without synchronous collectives. It has none for kernels: their products, of whole
blocks as they compute them, are counted at half of the peak, which is an assumption; and beside
them only those of pairs of query and key that causal attention needs.

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
