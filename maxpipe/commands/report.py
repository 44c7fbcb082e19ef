"""`maxpipe report`: write an HTML page with the records of runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from functools import partial
from pathlib import Path

from maxpipe.commands.parser import RUN, Commands, check_place, count, write_file
from maxpipe.errors import Code, ConfigError, ExitCode, StorageError
from maxpipe.io import files, redact
from maxpipe.io.formatting import capitalize_first

_PAUSE_FACTOR = 4.0


def add(commands: Commands) -> None:
    """Add the `report` command."""
    about = "write an HTML page with curves, timelines, events and configs of runs"
    parser = commands.add_parser(
        "report",
        help=about,
        description=f"{capitalize_first(about)}.\n"
        "The page is one file that needs no network. Several runs are compared.",
        epilog="examples:\n  maxpipe report quickstart --out report.html\n"
        "  maxpipe report base wide --out compare.html --watch",
    )
    parser.add_argument(
        "run",
        metavar=RUN,
        nargs="+",
        help="run folder, name of a run in runs/, or a URL such as s3://BUCKET/PATH",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="report.html",
        help="file to write (default: report.html)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="write the page repeatedly until all runs have ended; the page reloads itself",
    )
    parser.add_argument(
        "--every",
        type=count,
        metavar="SECONDS",
        default=30,
        help="with --watch, time between two versions of the page (default: 30)",
    )
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    out = options.out
    if Path(out).suffix not in (".html", ".htm"):
        name = str(Path(out).with_suffix(".html")) if Path(out).suffix == ".HTML" else f"{out}.html"
        if not out or Path(out).is_dir():
            name = os.path.join(out, "report.html")
        rule, action = "must end in .html.", f"Write --out {name}."
        raise ConfigError.one(Code.CLI_OUTPUT, "command line: --out", out, rule, action)
    check_place(out, "--out")
    start = time.monotonic()
    running = _write(options)
    print(f"wrote {out}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while options.watch and running:
            # Reading long runs takes seconds, and must not occupy a processor all the time.
            time.sleep(max(options.every, _PAUSE_FACTOR * (time.monotonic() - start)))
            start = time.monotonic()
            try:
                running = _write(options)
            except StorageError as error:  # such as a short outage of a bucket, or a full disk
                line = redact.redact_for_terminal(f"warning: {error}\n  The page is kept.")
                print(line, file=sys.stderr, flush=True)
    return ExitCode.DONE


def _write(options: argparse.Namespace) -> bool:
    """Write the page, and return whether a run may write more records."""
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.checkpoint.run_copy import folder_of_records
    from maxpipe.report import page
    from maxpipe.telemetry.console import ProgressBar

    runs = {}
    with contextlib.closing(ProgressBar(" MiB")) as progress:
        for text in options.run:
            address = parse_run_address(text).run_dir
            run_dir = Path(folder_of_records(address)).absolute()
            name = Path(address).absolute().name  # the copy of a bucket has another name
            while name in runs and runs[name]["folder"] != str(run_dir):
                name += "'"  # runs of the same name in several folders
            runs[name] = page.read_run(run_dir, name, progress.report)
    found = [*runs.values()]
    running = any(map(page.is_running, found))
    text = page.render(found, options.every if options.watch and running else 0)
    write_file(options.out, "--out", partial(files.write, content=text))
    return running
