"""`maxpipe curves`: the curves of runs as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from maxpipe.commands.parser import RUN, Commands, write_file
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.words import sentence


def _curves(options: argparse.Namespace) -> int:
    from maxpipe.boundary import files
    from maxpipe.checkpoint.address import whole_run
    from maxpipe.telemetry import curves

    path = Path(options.out)
    if path.suffix not in curves.FORMS:
        rule = f"must end in {' or '.join(curves.FORMS)}."
        raise ConfigError.one("command line: --out", options.out, rule, "Write curves.svg.")
    tags = [tag.strip() for tag in options.tags.split(",") if tag.strip()]
    if not tags:
        rule = "must name a number of metrics.jsonl."
        raise ConfigError.one("command line: --tags", options.tags, rule, "Take train/loss.")
    found = {}
    for given in options.run:
        run_dir = whole_run(given).run_dir
        found[Path(run_dir).absolute().name] = curves.read(run_dir, tags)
    drawn = curves.picture(found)
    if path.suffix == ".png":
        write_file(path, "--out", drawn.png)
    else:
        write_file(path, "--out", lambda target: files.write(target, drawn.svg()))
    print(f"wrote {path}")
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Adds the command."""
    about = "draw numbers of runs by step"
    parser = commands.add_parser(
        "curves",
        help=about,
        description=f"{sentence(about)}, as SVG or PNG. Tags that end alike share a panel.",
        epilog="example: maxpipe curves quickstart --tags train/loss,eval/loss --out loss.svg",
    )
    parser.add_argument(
        "run", metavar=RUN, nargs="+", help="folder of a run, or its name below runs/"
    )
    parser.add_argument(
        "--tags",
        default="train/loss,eval/loss",
        metavar="TAG,...",
        help="numbers of metrics.jsonl (train/loss,eval/loss)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="FILE.svg or FILE.png")
    parser.set_defaults(command=_curves)
