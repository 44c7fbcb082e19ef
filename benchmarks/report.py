"""Measure how fast `maxpipe report` reads a run with a million records, and how fast a page opens.

    python benchmarks/report.py           # prints the table
    python benchmarks/report.py --write   # and writes report.md

The run has the given number of records with 12 metrics each. The page is opened three times in
headless Chromium. The time to open the page includes the start and the exit of Chromium, so it is
an upper bound. The script requires `chromium` on the PATH.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
TAGS = (
    *("train/loss", "train/grad_norm", "train/lr", "train/skipped", "train/tokens"),
    *("train/epochs", "perf/step_s", "perf/data_wait_s", "perf/tokens_per_s"),
    *("perf/tflops_per_device", "pipe/bubble_pct", "memory/host_bytes"),
)
OPENINGS = 3


def write_run(folder: Path, num_records: int) -> None:
    """Write `metrics.jsonl` of a run."""
    folder.mkdir()
    start, draw = datetime(2026, 1, 1, tzinfo=UTC), random.Random(0)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, num_records + 1):
            record: dict[str, object] = {"step": step}
            record["time"] = (start + timedelta(seconds=step)).isoformat(timespec="milliseconds")
            record |= {tag: draw.random() + 3e4 / (1e4 + step) for tag in TAGS}
            file.write(json.dumps(record) + "\n")


def open_page(page: Path, profile: Path) -> float:
    """Open the page in headless Chromium, and return the time in seconds.

    Raises:
        RuntimeError: the browser's console contains a message, or no chart is drawn.
    """
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", f"file://{page}"]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - start
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    if messages or "<h2" not in done.stdout:
        raise RuntimeError("\n".join(messages) or "the page is empty")
    return seconds


def main() -> int:
    """Print the table, and write the page with `--write`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, page = Path(name, "run"), Path(name, "report.html")
        write_run(folder, options.records)
        size = (folder / "metrics.jsonl").stat().st_size
        start = time.monotonic()
        command = [sys.executable, "-m", "maxpipe", "report", str(folder), "--out", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        write_seconds = time.monotonic() - start
        openings = [open_page(page, Path(name, f"profile-{n}")) for n in range(OPENINGS)]
        page_size = page.stat().st_size
    rows = [
        ("records x metrics", f"{options.records:,} x {len(TAGS)}"),
        ("metrics.jsonl", f"{size / 1e6:,.0f} MB"),
        ("page", f"{page_size / 1e6:,.1f} MB"),
        ("time to write the page", f"{write_seconds:.1f} s"),
        ("time to open the page, median of 3", f"{statistics.median(openings):.2f} s"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    print(table)
    if options.write:
        revision = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        text = [
            "# How fast is a report of a long run?",
            "",
            f"Measured on 2 CPU cores, {datetime.now(UTC):%Y-%m-%d}, revision {revision}: "
            "`python benchmarks/report.py --write`.",
            "",
            "| | |",
            "|---|---|",
            table,
            "",
            "Opening the page includes the start and the exit of headless Chromium. The console of",
            "the browser contains no message. Each curve has at most 20,000 points, with mean,",
            "minimum and maximum of consecutive records.",
            "",
        ]
        PAGE.write_text("\n".join(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
