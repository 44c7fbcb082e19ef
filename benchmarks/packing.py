"""Measure sequence packing: its efficiency, and the time and memory to compute a packing plan.

    python benchmarks/packing.py           # prints the tables
    python benchmarks/packing.py --write   # and writes packing.md

In the first dataset, document lengths are sampled from a log-normal distribution (median 403
tokens, mean 829). In the second dataset, they are the file sizes in bytes of the Python standard
library. Each plan is computed in a separate process. Time is CPU time on one core, and memory is
the increase in the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
PACKINGS = ("concatenate", "first_fit", "best_fit", "pad")
DOCUMENTS = 10_000_000
SECONDS = 60
"""Maximum time in seconds for planning all documents."""

MEASURED = """
import json, resource, sys, time
import numpy as np
from maxpipe.data.packing import Packer
from maxpipe.data.statistics import _DocumentLengths
name, packing, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
if name == "library":
    import sysconfig
    from pathlib import Path
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [each for each in files if "site-packages" not in each.parts]
    lengths = np.array([each.stat().st_size + 2 for each in files])
else:
    lengths = np.exp(np.random.default_rng(0).normal(6, 1.2, int(name))).astype(np.int64) + 2
order = np.random.default_rng(1).permutation(len(lengths))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, start = peak(), time.process_time()
found = Packer(packing, tokens)(_DocumentLengths(lengths), order)
seconds, memory = time.process_time() - start, peak() - before
short = lengths <= tokens + 1
torn = 0
if packing == "concatenate":
    starts = np.cumsum(lengths[order]) - lengths[order]
    # Compare the sequences of the first and of the last token with a target.
    apart = starts // tokens != (starts + lengths[order] - 2) // tokens
    torn = int((apart & short[order]).sum())
targets = lengths - 1
fewest = -(-(targets.sum() - (-targets // tokens).sum()) // (tokens + 1))
print(json.dumps({"seconds": seconds, "memory": memory, "rows": len(found), "fewest": int(fewest),
                  "torn": torn / short.sum(),
                  "efficiency": found.num_targets / (len(found) * tokens)}))
"""


def measured(name: str, packing: str, tokens: int) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, name, packing, str(tokens)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    return json.loads(ran.stdout)


def table(title: str, name: str, all_tokens: tuple[int, ...]) -> list[str]:
    rows = [
        f"| {title} | sequence length | sequences | lower bound | efficiency | documents split | "
        "seconds | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tokens in all_tokens:
        for packing in PACKINGS:
            found = measured(name, packing, tokens)
            assert found["seconds"] < SECONDS, found
            fewest = f"{found['fewest']:,}" if packing != "concatenate" else ""
            rows.append(
                f"| `{packing}` | {tokens:,} | {found['rows']:,} | {fewest} | "
                f"{found['efficiency']:.2%} | {found['torn']:.1%} | {found['seconds']:.1f} | "
                f"{found['memory'] / 1e6:.0f} |"
            )
    return [*rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    page = [PREAMBLE]
    page += table(f"{DOCUMENTS:,} documents", str(DOCUMENTS), (2048, 8192))
    page += table("Python standard library", "library", (2048, 32768))
    print("\n".join(page))
    if options.write:
        PAGE.write_text("\n".join(page), encoding="utf-8")


PREAMBLE = f"""\
# Sequence packing

`python benchmarks/packing.py --write`, on one core. The first table packs {DOCUMENTS:,} documents
with log-normal lengths (median 403 tokens, mean 829). The second table packs the files of the
Python standard library, with one token per byte. The time limit for a plan is {SECONDS} s. The
lower bound is the number of sequences that the tokens would fill without gaps. Packing without
splitting documents can never use fewer sequences. Efficiency is the fraction of positions that have
a target. *Documents split* is the fraction of documents that would fit in one sequence but are
split across two or more.
"""

if __name__ == "__main__":
    main()
