"""Compare blockwise with plain attention on one device, in the forward and backward pass.

    python benchmarks/attention.py            # prints the tables
    python benchmarks/attention.py --write    # and writes benchmarks/attention.md

Attention has 8 query heads and 4 key/value heads of size 64, in float32. Sequences contain packed
documents or a single document. In each round, all programs of a table row run once, so that other
load on the machine affects all of them. Ratios of wall time and of CPU time are relative to plain
attention in the same round, and medians over rounds are reported. CPU time excludes other
processes. Memory is the temporary memory of the compiled program, excluding arguments and results.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.nn.attention import blockwise, xla
from maxpipe.nn.attention.interface import AttentionBackend, Mask

HEADS, KV_HEADS, SIZE, TURNS = 8, 4, 64, 9
TOKENS = (128, 256, 512, 1024, 2048, 4096)
BLOCKS, TOKENS_OF_BLOCKS = (64, 128, 256, 512), (1024, 4096)
DOCUMENTS = (500, 0)
"""Average numbers of tokens per document. 0 means one document per sequence."""


def program(attend: AttentionBackend, tokens: int, document: int) -> tuple[Callable[[], None], int]:
    """Return a compiled loss and gradient function, and its temporary memory in bytes."""
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (1, tokens, HEADS, SIZE))
    key, value = (jax.random.normal(each, (1, tokens, KV_HEADS, SIZE)) for each in keys[1:])
    starts = np.random.default_rng(0).random((1, tokens)) < (1 / document if document else 0)
    segments = jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)

    def total(query: Any, key: Any, value: Any, segments: Any) -> Any:
        return (attend(query, key, value, Mask(segments)) ** 2).sum()

    given = query, key, value, segments
    compiled: Any = jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(*given).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*given))

    return run, compiled.memory_analysis().temp_size_in_bytes


class Found(NamedTuple):
    """Median results of one program, and its time ratios to the first program."""

    processor_ms: float
    processor_ratio: float
    clock_ratio: float
    mib: float


def side_by_side(
    attends: dict[str, AttentionBackend], tokens: int, document: int
) -> dict[str, Found]:
    """Run the attention functions alternately and return their results, keyed by name."""
    programs = {name: program(attend, tokens, document) for name, attend in attends.items()}
    clocks = (time.process_time, time.perf_counter)
    seconds: dict[str, list[list[float]]] = {name: [] for name in programs}
    for turn in range(TURNS + 1):
        for name, (run, _) in programs.items():
            start = [clock() for clock in clocks]
            run()
            if turn:  # the first round is a warm-up
                both = zip(clocks, start, strict=True)
                seconds[name].append([clock() - began for clock, began in both])
    first = np.array(next(iter(seconds.values())))
    found = {}
    for name, (_, size) in programs.items():
        own = np.array(seconds[name])
        processor, clock = np.median(own / first, axis=0)
        milliseconds = 1e3 * float(np.median(own[:, 0]))
        found[name] = Found(milliseconds, float(processor), float(clock), size / 2**20)
    return found


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/attention.md")
    options = parser.parse_args()
    lengths = []
    for tokens, document in itertools.product(TOKENS, DOCUMENTS):
        attends: dict[str, AttentionBackend] = {"xla": xla.attend, "blockwise": blockwise.attend}
        plain, own = side_by_side(attends, tokens, document).values()
        lengths.append(
            (
                *(f"{tokens}", f"{document or 'one'}"),
                *(f"{plain.processor_ms:.1f} ms", f"{own.processor_ms:.1f} ms"),
                *(f"{own.processor_ratio:.2f}", f"{own.clock_ratio:.2f}"),
                *(f"{plain.mib:.1f} MiB", f"{own.mib:.1f} MiB"),
            )
        )
        print(*lengths[-1], flush=True)
    sizes = []
    for tokens in TOKENS_OF_BLOCKS:
        attends = {"xla": xla.attend}
        for block in BLOCKS:
            attends[f"{block}"] = partial(blockwise.attend, block=block)
        for name, own in list(side_by_side(attends, tokens, 0).items())[1:]:
            ratios = f"{own.processor_ratio:.2f}", f"{own.clock_ratio:.2f}"
            sizes.append((f"{tokens}", name, *ratios, f"{own.mib:.1f} MiB"))
            print(*sizes[-1], flush=True)
    device = jax.devices()[0].device_kind
    text = "\n\n".join(
        [
            "# Blockwise attention",
            f"`python benchmarks/attention.py --write`, JAX {jax.__version__} on {device}. The "
            f"benchmark runs the forward and backward pass in float32 with {HEADS} query heads and "
            f"{KV_HEADS} key/value heads of size {SIZE}. `blockwise` and `xla` run alternately, "
            "and a ratio is the time of `blockwise` divided by the time of `xla`. Times and ratios "
            "are in processor time over all cores unless stated otherwise. The document column is "
            "the average number of tokens per document. Memory is the temporary memory that the "
            "compiler reports.",
            table(
                (
                    *("tokens", "document", "xla", "blockwise", "ratio", "wall time ratio"),
                    *("memory, xla", "memory, blockwise"),
                ),
                lengths,
            ),
            "This table shows the same ratios by block size, with one document per sequence:",
            table(("tokens", "block", "ratio", "wall time ratio", "memory"), sizes),
        ]
    )
    if options.write:
        Path(__file__).with_suffix(".md").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
