"""Rows of whole documents: how full they are, and what planning them takes.

    python benchmarks/packing.py           # prints the tables
    python benchmarks/packing.py --write   # and writes packing.md

Lengths are drawn, as those of web pages are distributed (log-normal, median 403 tokens, mean 829),
or are those of the files of Python's library in bytes. Each plan is made in a process of its own;
time is processor time of one core, memory the process's peak less what it was before the plan.
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
PACKINGS = ("cut", "first_fit", "best_fit", "pad")
DOCUMENTS = 10_000_000
SECONDS = 60
"""The most that a plan of all of them may take."""

MEASURED = """
import json, resource, sys, time
import numpy as np
from maxpipe.data.sequences import Packer
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
if packing == "cut":
    starts = np.cumsum(lengths[order]) - lengths[order]
    # The rows of the first and of the last token that has a target of its document.
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
        f"| {title} | tokens of a row | rows | fewest | places with a target | documents torn | "
        "seconds | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tokens in all_tokens:
        for packing in PACKINGS:
            found = measured(name, packing, tokens)
            assert found["seconds"] < SECONDS, found
            fewest = f"{found['fewest']:,}" if packing != "cut" else ""
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
    page += table("Python's library", "library", (2048, 32768))
    print("\n".join(page))
    if options.write:
        PAGE.write_text("\n".join(page), encoding="utf-8")


PREAMBLE = f"""\
# Packing

`python benchmarks/packing.py --write`: rows of {DOCUMENTS:,} documents of log-normal lengths
(median 403 tokens, mean 829), and of the files of Python's library in bytes, on one core; a plan
may take {SECONDS} s. *Fewest* are the rows that the tokens would fill without a gap: no packing of
whole documents has less. *Torn* are documents in two rows or more that one would hold.
"""

if __name__ == "__main__":
    main()
