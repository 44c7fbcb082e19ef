"""`maxpipe curves`: one number of several runs over their steps, drawn."""

from __future__ import annotations

import argparse
from pathlib import Path

from maxpipe.commands.parser import Commands, write_file
from maxpipe.errors import ExitCode


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "curves",
        help="draw a number of several runs over their steps",
        description="Draw a number that runs have written, such as eval/loss, over their steps,\n"
        "a curve for each run. docs/metrics.md explains the numbers.",
        epilog="example: maxpipe curves alone taught --tag eval/loss --svg curves.svg",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or name")
    parser.add_argument("--tag", default="train/loss", help="the number; default train/loss")
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--svg", metavar="FILE", help="write an SVG")
    files.add_argument("--png", metavar="FILE", help="write a PNG")
    parser.set_defaults(command=_curves)


def _curves(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import whole_run
    from maxpipe.telemetry import curves

    folders = [Path(whole_run(each).run_dir) for each in options.runs]
    found = {folder.name: curves.read(folder, options.tag) for folder in folders}
    canvas = curves.picture(found, options.tag)
    if options.svg:
        svg = canvas.svg()
        write_file(options.svg, "--svg", lambda path: path.write_text(svg, encoding="utf-8"))
    else:
        write_file(options.png, "--png", canvas.png)
    return ExitCode.DONE
