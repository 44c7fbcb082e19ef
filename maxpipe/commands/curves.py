"""`maxpipe curves`: the curves of runs as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxpipe.commands.parser import RUN, Commands, write_file
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io.text import sentence


def _curves(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import whole_run
    from maxpipe.io import files
    from maxpipe.telemetry import curves

    paths = _paths(options, curves.FORMS)
    tags = [tag.strip() for tag in options.tags.split(",") if tag.strip()]
    if not tags:
        rule = "must name a number of metrics.jsonl."
        raise ConfigError.one("command line: --tags", options.tags, rule, "Take train/loss.")
    found = {}
    for given in options.run:
        run_dir = whole_run(given).run_dir
        found[Path(run_dir).absolute().name] = curves.read(run_dir, tags)
    drawn = curves.picture(found)
    for option, kind, path in paths:
        if kind == ".png":
            write_file(path, option, drawn.png)
        else:
            write_file(path, option, lambda target: files.write(target, drawn.svg()))
        print(f"wrote {path}")
    return ExitCode.DONE


def _paths(options: argparse.Namespace, forms: Sequence[str]) -> list[tuple[str, str, Path]]:
    """Return option, ending and file of each picture."""
    found = []
    if options.out is not None:
        path = Path(options.out)
        if path.suffix not in forms:
            rule = f"must end in {' or '.join(forms)}."
            raise ConfigError.one("command line: --out", options.out, rule, "Write curves.svg.")
        found.append(("--out", path.suffix, path))
    for kind in ("svg", "png"):
        if (name := getattr(options, kind)) is not None:
            found.append((f"--{kind}", f".{kind}", Path(name)))
    if not found:
        rule = "names no file for the picture."
        raise ConfigError.one("command line", None, rule, "Add --out curves.svg.")
    return found


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
    parser.add_argument("--out", metavar="FILE", help="write FILE.svg or FILE.png")
    parser.add_argument("--svg", metavar="FILE", help="write a picture for browsers and documents")
    parser.add_argument("--png", metavar="FILE", help="write the same picture as pixels")
    parser.set_defaults(command=_curves)
