"""`maxpipe checkpoints`: what a run has saved, whether it is intact, and what of it stays."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from maxpipe import redact
from maxpipe.commands.parser import Commands, integer, number, subcommands
from maxpipe.errors import ConfigError, ExitCode, StorageError
from maxpipe.files import full

if TYPE_CHECKING:
    from maxpipe.checkpoint.retention import Rules

DIFFERENT = 1
"""Exit code of `diff --exit-code`, as that of `config docs --check`."""


def _print(lines: Iterable[str]) -> int:
    try:
        for line in lines:
            print(redact.shown(line))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(
            f"{error.filename or 'checkpoints'}: cannot be used\n"
            f"  {error.strerror or error}.\n"
            "  Try again when the storage answers, as a user who may read and write there."
        ) from error
    return ExitCode.DONE


def _list(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect

    _use_no_devices()
    return _print(inspect.listed(options.run_dir, _rules(options.run_dir)))


def _show(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect

    _use_no_devices()
    return _print(inspect.shown(options.run_dir, options.step))


def _verify(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect

    _use_no_devices()
    return _print(inspect.verified(options.run_dir, options.step))


def _prune(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.retention import Rules

    _use_no_devices()
    given = {name: getattr(options, name) for name in Rules.__slots__}
    for name, value in given.items():
        if value is not None and not value >= 0:
            option = "--keep" if name == "newest" else f"--keep-{name.replace('_', '-')}"
            raise ConfigError.one(
                f"command line: {option}", value, "must be at least 0.", f"Leave {option} out."
            )
    if any(value is not None for value in given.values()):
        if given["newest"] is None:
            given["newest"] = 1
        rules = Rules(**{name: value or 0 for name, value in given.items()})
    else:
        rules = _rules(options.run_dir)
    if rules is None:
        raise ConfigError.one(
            os.path.join(options.run_dir, "config.yml"),
            None,
            "cannot be used, and it has the rules.",
            "Give the rules: --keep 3, for instance.",
        )
    lines = inspect.pruned(
        options.run_dir, rules, dry_run=options.dry_run, elsewhere=options.elsewhere
    )
    return _print(lines)


def _diff(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect

    _use_no_devices()
    lines = inspect.compared(_run_and_step(options.first), _run_and_step(options.second))
    _print(lines or ["same"])
    return DIFFERENT if lines and options.exit_code else ExitCode.DONE


def _use_no_devices() -> None:
    from maxpipe import runtime

    runtime.use_no_devices()


def _rules(run_dir: str) -> Rules | None:
    """Those of the run's own config, if it can be read. A bucket holds none."""
    from maxpipe.checkpoint.place import in_bucket
    from maxpipe.checkpoint.retention import Rules
    from maxpipe.config.load import load

    if in_bucket(run_dir):
        return None
    path = full(run_dir) / "config.yml"
    try:
        return Rules.of(load([str(path)]).config.checkpoint)
    except ConfigError:
        return None


def _run_and_step(text: str) -> tuple[str, int | None]:
    """`RUN_DIR@STEP`; without a step the newest."""
    if found := re.fullmatch(r"(.+)@([0-9]+)", text):
        return found[1], int(found[2])
    return text, None


def add(commands: Commands) -> None:
    """Adds the command."""
    about = "list, inspect, verify, compare and delete the checkpoints of a run"
    parser = commands.add_parser("checkpoints", help=about, description=f"{about.capitalize()}.")
    actions = subcommands(parser)

    listed = actions.add_parser("list", help="checkpoints of a run folder")
    _add_run(listed)
    listed.set_defaults(command=_list)

    show = actions.add_parser("show", help="content of one checkpoint")
    _add_run(show)
    _add_step(show, "by default the newest")
    show.set_defaults(command=_show)

    verify = actions.add_parser(
        "verify",
        help="compare every byte with what was saved",
        description="Read every file and compare it with the manifest, written when it was saved.\n"
        "Exits with 74 when a checkpoint is damaged; one without a manifest is unknown.",
        epilog="example: maxpipe checkpoints verify runs/quickstart",
    )
    _add_run(verify)
    _add_step(verify, "by default all")
    verify.set_defaults(command=_verify)
    _add_prune(actions)

    diff = actions.add_parser(
        "diff",
        help="what differs between two checkpoints",
        description="Compare two checkpoints: arrays, config, data position. Prints `same`, or a\n"
        "line for each difference. Without a step the newest of that run is taken.",
        epilog="example: maxpipe checkpoints diff runs/a@100 runs/b@100",
    )
    diff.add_argument("first", metavar="RUN_DIR[@STEP]", help="one checkpoint")
    diff.add_argument("second", metavar="RUN_DIR[@STEP]", help="another one")
    diff.add_argument("--exit-code", action="store_true", help="exit with 1 when they differ")
    diff.set_defaults(command=_diff)
    parser.command_names = tuple(actions.choices)


def _add_prune(actions: Commands) -> None:
    prune = actions.add_parser(
        "prune",
        help="delete what no rule keeps",
        description="Delete the checkpoints that no rule keeps. The rules are those of the run's\n"
        "config.yml, or the given ones. The newest checkpoint that verifies always stays, and so\n"
        "does what was found damaged.",
        epilog="example: maxpipe checkpoints prune runs/quickstart --keep 2 --dry-run",
    )
    _add_run(prune)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    prune.add_argument(
        "--elsewhere",
        action="store_true",
        help="delete also where checkpoint.dir of the run's config.yml, or a link, leads",
    )
    for option, name, kind, words in (
        ("--keep", "newest", integer, "the newest so many; 1 if only other rules are given"),
        ("--keep-every-steps", "every_steps", integer, "those whose step this number divides"),
        ("--keep-every-hours", "every_hours", number, "the first in each period of so many hours"),
        ("--keep-best", "best", integer, "so many with the smallest evaluation loss"),
    ):
        prune.add_argument(
            option, dest=name, type=kind, metavar="NUMBER", help=f"rule: keep {words}"
        )
    prune.set_defaults(command=_prune)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run, or gs://...")


def _add_step(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--step", type=integer, metavar="NUMBER", help=words)
