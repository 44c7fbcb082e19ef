"""What `maxpipe compile` says of large runs, and what compiling them takes on this machine.

    python benchmarks/compile_reports.py            # prints the reports
    python benchmarks/compile_reports.py --write    # and writes compile_reports.md
    python benchmarks/compile_reports.py --only 8b

Needs libtpu (`pip install ".[tpu]"`) and no TPU. Each command runs in a process of its own; its
wall time and the most memory that it held are measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = {
    "8B on 32 chips": "configs/model/llama3-8b.yml --topology v5p:2x4x4 train.steps=1000 "
    "train.batch_size=128 train.sequence_length=2048 mesh.ici_stage=4 mesh.ici_fsdp=8 "
    "pipeline.repeats=2 pipeline.microbatches=16",
    "405B on 512 chips": "configs/model/llama3-405b.yml --topology v5p:8x8x8 train.steps=1000 "
    "train.batch_size=1024 train.sequence_length=4096 mesh.ici_stage=8 mesh.ici_fsdp=64 "
    "pipeline.repeats=2 pipeline.microbatches=16",
    "405B on 4096 chips": "configs/model/llama3-405b.yml --topology v5p:16x16x16 "
    "train.steps=1000 train.batch_size=2048 train.sequence_length=8192 mesh.ici_stage=16 "
    "mesh.ici_fsdp=64 mesh.ici_tensor=4 pipeline.repeats=2 pipeline.microbatches=32",
    "405B on two slices of 512 chips, stages across dcn": "configs/model/llama3-405b.yml "
    "--topology v5p:8x8x8 --slices 2 train.steps=1000 train.batch_size=1024 "
    "train.sequence_length=4096 mesh.dcn_stage=2 mesh.ici_stage=8 mesh.ici_fsdp=64 "
    "pipeline.schedule=1f1b pipeline.microbatches=16",
}


def report(arguments: str) -> str:
    """The command, what it prints, and what it took."""
    start = time.monotonic()
    command = [sys.executable, "-m", "maxpipe", "compile", *arguments.split()]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    printed = run.stdout.read()
    _, status, used = os.wait4(run.pid, 0)
    if status:
        raise SystemExit(f"maxpipe compile {arguments} ended with {status}")
    took = f"{time.monotonic() - start:.0f} s, {used.ru_maxrss / 2**20:.1f} GiB of host memory"
    return f"```\nmaxpipe compile {arguments}\n{printed}```\nTook {took}.\n"


PREAMBLE = """\
# Large runs, compiled ahead of time

`python benchmarks/compile_reports.py --write`, on two cores. Nothing ran on a TPU.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs with this in their name")
    options = parser.parse_args()
    pages = []
    for name, arguments in RUNS.items():
        if options.only.lower() in name.lower():
            pages.append(f"## {name}\n\n{report(arguments)}")
            print(pages[-1], flush=True)
    if options.write:
        text = PREAMBLE + "\n".join(pages)
        Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
