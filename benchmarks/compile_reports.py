"""Print `maxpipe compile` reports for large runs, with the compile time and host memory.

    python benchmarks/compile_reports.py            # prints the reports
    python benchmarks/compile_reports.py --write    # and writes compile_reports.md

The runs are also rows of `predicted_memory.py`, and the two scripts share cached compilations.
They require libtpu (`pip install ".[tpu]"`), but no TPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from predicted_memory import CACHE, GIB, ROWS, Row, compiled

from maxpipe.planner import report
from maxpipe.planner.compile import CompileReport

RUNS = {
    "8B on 32 chips": (
        "llama3-8b v5p:2x4x4:",
        "repeats=2 microbatches=16 batch_size=128",
        "h=2048",
    ),
    "405B on 512 chips": ("llama3-405b v5p:8x8x8:", "ici_stage=8 ici_fsdp=64 repeats=2", ""),
    "405B on 4096 chips": ("llama3-405b v5p:16x16x16:", "", ""),
    "405B on two slices of 512 chips, stages across dcn": ("llama3-405b v5p:8x8x8 x 2:", "", ""),
    "Kimi K2 on 1024 chips": ("kimi-k2-1t-a32b v5p:8x8x16:", "", ""),
}
"""(prefix, substring, suffix) of a row name in `predicted_memory.py`, keyed by page heading."""
PREAMBLE = """\
# Compile reports of large runs

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/compile_reports.py --write`, on two cores. No TPU was used.

"""


def row_of(start: str, middle: str, end: str) -> Row:
    """Return the only row whose name starts with `start`, contains `middle` and ends with `end`."""
    (found,) = [
        row
        for row in ROWS
        if row.name.startswith(start) and middle in row.name and row.name.endswith(end)
    ]
    return found


def page(name: str, row: Row, cache: Path) -> str:
    """Return Markdown with the command, its output, its run time and its host memory use."""
    values = compiled(row, cache)
    assert values is not None, f"{row.name} was not compiled"
    took = (
        f"{values['wall_seconds']:.0f} s and used {values['process_bytes'] / GIB:.1f} GiB of "
        "host memory"
    )
    command = " ".join(["maxpipe compile", *row.arguments])
    text = report.format_compile_report(CompileReport.from_json(values))
    return f"## {name}\n\n```\n{command}\n{text}\n```\nThe command ran for {took}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    pages = [page(name, row_of(*parts), options.cache) for name, parts in RUNS.items()]
    print("\n".join(pages))
    if options.write:
        text = PREAMBLE + "\n".join(pages)
        Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
