"""Compare greedy decoding with transformers on the same CPU, in tokens per second.

    ORACLE=.../bin/python python benchmarks/decode.py           # prints the table
    ORACLE=.../bin/python python benchmarks/decode.py --write   # and writes decode.md

`ORACLE` is a Python interpreter with torch and transformers, as for `make test-oracle`. This
interpreter creates a model folder with random weights, which both programs load, and generates
tokens on request. Both programs use float32, a KV cache and the same cores. `--cores` defaults to
one, because two alternating multithreaded programs would mostly measure other load on the machine.
Repetitions alternate, and a ratio is computed from the times of each pair. The two programs must
generate the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxpipe.io.formatting import pluralize

ROWS, PROMPT, MORE = 8, 32, 128
REPEATS = 5
SEED = 3
ORACLE = Path(__file__).with_name("decode_oracle.py")
PREAMBLE = f"""\
# Greedy decoding compared with transformers on a CPU

`ORACLE=.../bin/python python benchmarks/decode.py --write`. Both programs generate {MORE} new
tokens for each of {ROWS} prompts of {PROMPT} tokens. Decoding is greedy, in float32, with a KV
cache, on CORES. Results are medians of {REPEATS} alternating repetitions, and times include
prefilling the prompts. Both programs generated the same tokens.

"""


@dataclass(frozen=True)
class Shape:
    """Model sizes, named as in Llama's config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.num_hidden_layers} layers, width {self.hidden_size}, {self.vocab_size} ids"


SHAPES = [Shape(256, 6, 8, 4, 704, 4096), Shape(512, 8, 8, 4, 1408, 16384)]


@contextmanager
def peer(python: str, shape: Shape, folder: Path) -> Iterator[Callable[[], tuple[float, Any]]]:
    """Start a transformers process, and yield a function that returns (seconds, token ids)."""
    task = {
        "config": {**vars(shape), "max_position_embeddings": 2 * (PROMPT + MORE)},
        "folder": str(folder),
        "seed": SEED,
        "prompts": prompts(shape).tolist(),
        "more": MORE,
    }
    command = [python, str(ORACLE), json.dumps(task)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def generate() -> tuple[float, Any]:
        asked.write("generate\n")
        asked.flush()
        answer = json.loads(answers.readline())
        return answer["seconds"], np.array(answer["tokens"])

    try:
        assert answers.readline() == "ready\n", "transformers did not start"
        yield generate
    finally:
        asked.close()
        process.wait()


def prompts(shape: Shape) -> np.ndarray:
    return np.random.default_rng(SEED).integers(2, shape.vocab_size, (ROWS, PROMPT))


def ours(folder: Path, shape: Shape) -> Callable[[], tuple[float, Any]]:
    """Load the folder in maxpipe, and return a function that returns (seconds, token ids)."""
    from maxpipe.generation.decoding import DecodeShape, Sampling
    from maxpipe.generation.load_model import open_model

    inputs = [
        "tokenizer.kind=bytes",
        "tokenizer.path=",
        "model.compute_dtype=float32",
        "model.param_dtype=float32",
    ]
    opened, greedy = open_model(folder, inputs), Sampling(temperature=0.0)
    decoding, params = opened.load_decode_engine(lambda text: None, greedy, seed=0)
    ids, size = prompts(shape).tolist(), DecodeShape(ROWS, PROMPT, MORE)

    def generate() -> tuple[float, Any]:
        start = time.perf_counter()
        steps = [tokens for tokens, _ in decoding.run(params, ids, range(ROWS), size)]
        return time.perf_counter() - start, np.stack(steps, axis=1)

    return generate


def measured(python: str, shape: Shape) -> str:
    """Measure one model size and return its table row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        with peer(python, shape, folder) as theirs:
            mine = ours(folder, shape)
            found = [(mine(), theirs()) for _ in range(REPEATS + 1)][
                1:
            ]  # the first run includes compilation
    for (_, wanted), (_, tokens) in found:
        assert (wanted == tokens).all(), "maxpipe and transformers generate different tokens"
    rates = [ROWS * MORE / statistics.median(each[at][0] for each in found) for at in (0, 1)]
    ratio = statistics.median(theirs[0] / mine[0] for mine, theirs in found)
    return f"| {shape} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    python = os.environ.get("ORACLE") or sys.executable
    head = ["model", "maxpipe tokens/s", "transformers tokens/s", "ratio"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for shape in SHAPES:
        lines.append(measured(python, shape))
        print(lines[-1], file=sys.stderr)
    page = "\n".join([*lines, ""])
    print(page)
    preamble = PREAMBLE.replace("CORES", pluralize(options.cores, "core"))
    if options.write:
        Path(__file__).with_suffix(".md").write_text(preamble + page, encoding="utf-8")


if __name__ == "__main__":
    main()
