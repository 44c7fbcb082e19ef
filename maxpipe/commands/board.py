"""`maxpipe board`: TensorBoard on a folder of runs, each under its own name.

`maxpipe curves`: the curves of runs as a picture.

`maxpipe goodput`: the use of a run's time.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from maxpipe.commands.parser import RUN, Commands, add_address, port, write_file
from maxpipe.config.bundled_configs import TENSORBOARD_FOLDER
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.formatting import capitalize_first

_POLL_SECONDS = 2.0


def link(folder: Path, links: Path) -> int:
    """Links to the event files of every run in the folder, or of the run that it is.

    TensorBoard names a run by the path of its files, and these are in `<run>/tensorboard`.

    Returns:
        The number of runs.
    """
    found = 0
    for name, events in _runs(folder):
        found += 1
        with contextlib.suppress(FileExistsError):
            (links / name).symlink_to(events.absolute(), target_is_directory=True)
    return found


def _runs(folder: Path) -> Iterator[tuple[str, Path]]:
    if (folder / TENSORBOARD_FOLDER).is_dir():
        yield folder.absolute().name, folder / TENSORBOARD_FOLDER
        return
    for path in sorted(folder.iterdir()):
        if (path / TENSORBOARD_FOLDER).is_dir():
            yield path.name, path / TENSORBOARD_FOLDER


def _board(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import run_names
    from maxpipe.config.schema import RunConfig

    folder, runs = Path(options.folder), RunConfig().dir
    if not folder.is_dir() and options.folder in run_names(runs):
        folder = Path(runs, options.folder)
    if not folder.is_dir():
        rule = "is no folder of runs."
        action = "Name run.dir of your runs, or one run; its folder is made when it starts."
        raise ConfigError.one(f"command line: {options.folder}", None, rule, action)
    with tempfile.TemporaryDirectory(prefix="maxpipe-board-") as name:
        links = Path(name)
        if not link(folder, links):
            print(f"no runs in {folder} yet: they will be shown once they are there")
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", name]
        command += ["--port", str(options.port), "--host", options.host]
        signal.signal(signal.SIGTERM, _exit_on_signal)
        with _start_tensorboard(command) as process:
            try:
                code = _watch(process, folder, links)
            except KeyboardInterrupt:
                return ExitCode.DONE
            finally:
                process.terminate()
    if code:
        rule = f"ended with exit code {code}; what it printed is above."
        raise ConfigError.one("tensorboard", None, rule, "Set another --port, if it is in use.")
    return ExitCode.DONE


def _start_tensorboard(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that ignores Ctrl-C, since an ignored signal stays ignored at an exec.

    The terminal tells every process of its foreground; this one would print a traceback.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(command)
    finally:
        signal.signal(signal.SIGINT, before)


def _watch(process: subprocess.Popen[bytes], folder: Path, links: Path) -> int:
    while True:
        try:
            return process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):  # the folder may be moved meanwhile
                link(folder, links)


def _exit_on_signal(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "board",
        help="TensorBoard on a folder of runs, each under its own name",
        description="Start TensorBoard on a folder of runs, or on one run. Runs that begin later\n"
        "are shown, too. Ctrl-C ends it with exit code 0.",
        epilog="example: maxpipe board runs --port 6007",
    )
    parser.add_argument(
        "folder", metavar="RUNS", nargs="?", default="runs", help="a folder of runs, or a run"
    )
    parser.add_argument(
        "--port",
        type=port,
        metavar="NUMBER",
        default=6006,
        help="port to listen on, from 0 to 65535; 0 takes a free one (default: 6006)",
    )
    parser.add_argument("--host", metavar="NAME", default="localhost", help="address to listen on")
    parser.set_defaults(command=_board)


def _curves(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.io import files
    from maxpipe.telemetry import curves

    paths = _paths(options, curves.FORMS)
    tags = [tag.strip() for tag in options.tags.split(",") if tag.strip()]
    if not tags:
        rule = "must name a number of metrics.jsonl."
        raise ConfigError.one("command line: --tags", options.tags, rule, "Take train/loss.")
    found = {}
    for given in options.run:
        run_dir = parse_run_address(given).run_dir
        found[Path(run_dir).absolute().name] = curves.read(run_dir, tags)
    drawn = curves.draw_curves(found)
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


def add_curves(commands: Commands) -> None:
    """Adds the command."""
    about = "draw numbers of runs by step"
    parser = commands.add_parser(
        "curves",
        help=about,
        description=f"{capitalize_first(about)}, as SVG or PNG. Tags that end alike share a panel.",
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


def add_goodput(commands: Commands) -> None:
    """Adds the command."""
    about = "show the share of a run's time that went into steps that count"
    parser = commands.add_parser(
        "goodput",
        help=about,
        description=f"{capitalize_first(about)}, over all its restarts, and where the rest went.",
        epilog="example: maxpipe goodput runs/quickstart",
    )
    add_address(parser, step=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_goodput)


def _goodput(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.telemetry import curves

    found = curves.read_goodput(parse_run_address(options.run).run_dir)
    if options.json:
        import json

        print(json.dumps(curves.goodput_to_dict(found), indent=2))
    else:
        print(redact.redact_for_terminal(curves.format_goodput(found)))
    return ExitCode.DONE
