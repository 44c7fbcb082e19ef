"""`maxpipe board`: TensorBoard on a folder of runs, each under its own name."""

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

from maxpipe.commands.parser import Commands, port
from maxpipe.config.paths import TENSORBOARD_FOLDER
from maxpipe.errors import ConfigError, ExitCode

_LOOK_SECONDS = 2.0


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
        signal.signal(signal.SIGTERM, _leave)
        with _started(command) as process:
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


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
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
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):  # the folder may be moved meanwhile
                link(folder, links)


def _leave(*_: object) -> NoReturn:
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
