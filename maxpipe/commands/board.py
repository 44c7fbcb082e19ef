"""`maxpipe board`, `maxpipe curves` and `maxpipe goodput`: show the metrics of runs.

`board` starts TensorBoard, `curves` plots metrics, and `goodput` prints a wall-time breakdown.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from maxpipe.commands.parser import RUN, Commands, add_address, count, port, write_file
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.formatting import capitalize_first

_POLL_SECONDS = 2.0


def link(folder: Path, links: Path) -> int:
    """Create a symlink to the event files of each run in `folder`, and return the number of runs.

    `folder` may itself be a run. TensorBoard names a run after the folder that contains its event
    files, which is always called `tensorboard`. Each symlink therefore has the name of the run.
    A symlink to each profile is shown by TensorBoard's profile plugin, if it is installed.
    """
    from maxpipe.config.config_files import PROFILES_FOLDER, TENSORBOARD_FOLDER

    is_run = (folder / TENSORBOARD_FOLDER).is_dir()
    runs = [folder.absolute()] if is_run else sorted(folder.iterdir())
    runs = [run for run in runs if (run / TENSORBOARD_FOLDER).is_dir()]
    for run in runs:
        with contextlib.suppress(FileExistsError):
            events = (run / TENSORBOARD_FOLDER).absolute()
            (links / run.name).symlink_to(events, target_is_directory=True)
        for profile in (run / PROFILES_FOLDER).glob("step_*"):
            step = profile.name.removeprefix("step_").lstrip("0")
            with contextlib.suppress(FileExistsError):
                (links / f"{run.name}@{step}").symlink_to(profile.absolute(), True)
    return len(runs)


def _board(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import run_names
    from maxpipe.checkpoint.run_copy import folder_of_records
    from maxpipe.checkpoint.storage import in_bucket
    from maxpipe.config.sections.run import RunConfig

    folder, runs = Path(folder_of_records(options.folder)), RunConfig().dir
    if not folder.is_dir() and options.folder in run_names(runs):
        folder = Path(runs, options.folder)
    if not folder.is_dir():
        rule = "is not a folder of runs."
        action = "Specify the run.dir folder of your runs, or a run that has started."
        raise ConfigError.one(Code.CLI_VALUE, f"command line: {options.folder}", None, rule, action)
    with tempfile.TemporaryDirectory(prefix="maxpipe-board-") as name:
        links = Path(name)
        if not link(folder, links):
            if in_bucket(options.folder):  # the records of later runs would not be downloaded
                rule = "contains no run with records for TensorBoard."
                action = "Specify the run.dir of your runs, or a run that has started."
                where = f"command line: {options.folder}"
                raise ConfigError.one(Code.CLI_VALUE, where, None, rule, action)
            print(f"no runs in {folder} yet: runs will appear when they start")
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
        rule = f"exited with code {code}; its output is above."
        raise ConfigError.one(
            Code.CLI_OUTPUT, "tensorboard", None, rule, "If the port is in use, set another --port."
        )
    return ExitCode.DONE


def _start_tensorboard(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a TensorBoard process that ignores Ctrl-C.

    A terminal sends Ctrl-C to every foreground process, which would make TensorBoard print a
    traceback. Child processes inherit the set of ignored signals.
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
            with contextlib.suppress(OSError):  # the folder may have been moved
                link(folder, links)


def _exit_on_signal(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def add(commands: Commands) -> None:
    """Add the `board` command."""
    parser = commands.add_parser(
        "board",
        help="start TensorBoard for a folder of runs",
        description="Start TensorBoard for a folder of runs, or for one run. Runs that start\n"
        "later are added automatically. Ctrl-C stops TensorBoard; the exit code is then 0.",
        epilog="example: maxpipe board runs --port 6007",
    )
    parser.add_argument(
        "folder",
        metavar="RUNS",
        nargs="?",
        default="runs",
        help="a folder of runs, or a run (default: runs)",
    )
    parser.add_argument(
        "--port",
        type=port,
        metavar="NUMBER",
        default=6006,
        help="port to listen on; 0 selects a free port (default: 6006)",
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        default="localhost",
        help="host name or IP address to listen on (default: localhost)",
    )
    parser.set_defaults(command=_board)


def _curves(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.checkpoint.run_copy import folder_of_records
    from maxpipe.telemetry import curves

    paths = _paths(options, curves.FORMS)
    tags = [tag.strip() for tag in options.tags.split(",") if tag.strip()]
    if not tags:
        rule = "must name a metric in metrics.jsonl."
        raise ConfigError.one(
            Code.CLI_VALUE, "command line: --tags", options.tags, rule, "Use train/loss."
        )
    runs, units = {}, {}
    for run in options.run:
        run_dir = folder_of_records(parse_run_address(run).run_dir)
        runs[Path(run_dir).absolute().name] = curves.read(run_dir, tags)
        units |= curves.loss_units(run_dir)
    style = curves.Style(smooth=options.smooth, band=options.band, units=units)
    drawn = curves.draw_curves(runs, style)
    for option, suffix, path in paths:
        write_file(path, option, partial(drawn.save, suffix=suffix))
        print(f"wrote {path}")
    return ExitCode.DONE


def _paths(options: argparse.Namespace, forms: Sequence[str]) -> list[tuple[str, str, Path]]:
    """Return (option, suffix, path) for every output file."""
    paths = []
    if options.out is not None:
        path = Path(options.out)
        if path.suffix not in forms:
            rule = f"must end in {' or '.join(forms)}."
            raise ConfigError.one(
                Code.CLI_OUTPUT, "command line: --out", options.out, rule, "Write curves.svg."
            )
        paths.append(("--out", path.suffix, path))
    for kind in ("svg", "png"):
        if (name := getattr(options, kind)) is not None:
            paths.append((f"--{kind}", f".{kind}", Path(name)))
    if not paths:
        rule = "must name an output file."
        raise ConfigError.one(Code.CLI_OUTPUT, "command line", None, rule, "Add --out curves.svg.")
    return paths


def add_curves(commands: Commands) -> None:
    """Add the `curves` command."""
    about = "plot metrics of one or more runs over steps"
    parser = commands.add_parser(
        "curves",
        help=about,
        description=f"{capitalize_first(about)}, as SVG or PNG. Tags\n"
        "with the same last component, such as train/loss and eval/loss, share a panel.",
        epilog="example: maxpipe curves quickstart --tags train/loss,eval/loss --out loss.svg",
    )
    parser.add_argument("run", metavar=RUN, nargs="+", help="run folder, or name of a run in runs/")
    parser.add_argument(
        "--tags",
        default="train/loss,eval/loss",
        metavar="TAG,...",
        help="metrics in metrics.jsonl to plot (default: train/loss,eval/loss)",
    )
    parser.add_argument(
        "--smooth",
        type=count,
        metavar="COUNT",
        default=1,
        help="plot means of this number of records, over the records in a faint color (default: 1)",
    )
    parser.add_argument(
        "--band",
        action="store_true",
        help="plot runs whose names differ only in a final number, such as base-0 and base-1, as "
        "their mean and range",
    )
    parser.add_argument("--out", metavar="FILE", help="write the plot to an .svg or .png file")
    parser.add_argument("--svg", metavar="FILE", help="write the plot as SVG")
    parser.add_argument("--png", metavar="FILE", help="write the plot as PNG")
    parser.set_defaults(command=_curves)


def add_goodput(commands: Commands) -> None:
    """Add the `goodput` command."""
    about = "print the fraction of a run's wall time spent on productive steps"
    parser = commands.add_parser(
        "goodput",
        help=about,
        description=f"{capitalize_first(about)},\n"
        "across all restarts, and the time lost to each cause.",
        epilog="example: maxpipe goodput runs/quickstart",
    )
    add_address(parser, step=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_goodput)


def _goodput(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.checkpoint.run_copy import folder_of_records
    from maxpipe.telemetry import goodput

    found = goodput.read_goodput(folder_of_records(parse_run_address(options.run).run_dir))
    if options.json:
        import json

        print(json.dumps(goodput.goodput_to_dict(found), indent=2))
    else:
        print(redact.redact_for_terminal(goodput.format_goodput(found)))
    return ExitCode.DONE
