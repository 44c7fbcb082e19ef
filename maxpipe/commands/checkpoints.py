"""`maxpipe checkpoints`: list, verify, compare and delete what a run has saved."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from maxpipe.boundary.files import full
from maxpipe.commands.parser import Commands, add_address, integer, number, subcommands
from maxpipe.commands.progress import print_line
from maxpipe.config.paths import CONFIG_FILE
from maxpipe.errors import ConfigError, ExitCode, StorageError
from maxpipe.words import sentence

if TYPE_CHECKING:
    from maxpipe.checkpoint.retention import Rules

DIFFERENT = 1
"""Exit code of `diff --exit-code`, as that of `config docs --check`."""


def _print(lines: Iterable[str]) -> int:
    remaining = iter(lines)
    while True:
        with _explained():  # of the storage, not of the output
            line = next(remaining, None)
        if line is None:
            return ExitCode.DONE
        print_line(line)


def _print_json(values: Callable[[], Mapping[str, Any]]) -> int:
    with _explained():
        found = values()
    print(json.dumps(found, indent=2))
    return ExitCode.DONE


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or 'checkpoints'}: cannot be used\n"
            f"  {error.strerror or error}.\n"
            "  Try again when the storage answers, as a user who may read and write there."
        ) from error


def _list(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import whole_run

    _use_no_devices()
    run = whole_run(options.run)
    if options.json:
        return _print_json(lambda: inspect.listing(run, _rules(run.run_dir)))
    return _print(inspect.listed(run, _rules(run.run_dir)))


def _show(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse

    _use_no_devices()
    return _print(inspect.shown(parse(options.checkpoint)))


def _verify(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse

    _use_no_devices()
    return _print(inspect.verified(parse(options.checkpoint)))


def _best(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import whole_run
    from maxpipe.checkpoint.retention import Better

    _use_no_devices()
    run, better = whole_run(options.run), None
    if options.metric is not None:
        better = Better(options.metric, options.largest)
    elif options.largest:
        rule = "goes with --metric: a run knows of its own metric which value is the best."
        raise ConfigError.one("command line: --largest", None, rule, "Leave --largest out.")

    def found() -> dict[str, Any]:
        address, step, metric, value = inspect.best_of(run, better)
        return {"checkpoint": address, "step": step, "metric": metric, "value": value}

    if options.json:
        return _print_json(found)
    return _print("{checkpoint}  {metric} {value:.6g}".format(**each) for each in [found()])


def _delete(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse

    _use_no_devices()
    lines = inspect.deleted(
        parse(options.checkpoint), force=options.force, elsewhere=options.elsewhere
    )
    return _print(lines)


def _prune(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import whole_run
    from maxpipe.checkpoint.retention import Rules

    _use_no_devices()
    run_dir = whole_run(options.run).run_dir
    given = {name: getattr(options, name) for name in Rules.__slots__ if name != "better"}
    for name, value in given.items():
        if value is not None and not value >= 0:
            option = "--keep" if name == "newest" else f"--keep-{name.replace('_', '-')}"
            raise ConfigError.one(
                f"command line: {option}", value, "must be at least 0.", f"Leave {option} out."
            )
    if any(value is not None for value in given.values()):
        if given["newest"] is None:
            given["newest"] = 1
        better = inspect.compared_by(run_dir)
        rules = Rules(**{name: value or 0 for name, value in given.items()}, better=better)
    else:
        rules = _rules(run_dir)
    if rules is None:
        raise ConfigError.one(
            os.path.join(run_dir, CONFIG_FILE),
            None,
            "cannot be used, and it has the rules.",
            "Give the rules: --keep 3, for instance.",
        )
    lines = inspect.pruned(run_dir, rules, dry_run=options.dry_run, elsewhere=options.elsewhere)
    return _print(lines)


def _diff(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse

    _use_no_devices()
    with _explained():
        lines = inspect.compared(parse(options.first), parse(options.second))
    _print(lines or ["same"])
    return DIFFERENT if lines and options.exit_code else ExitCode.DONE


def _use_no_devices() -> None:
    from maxpipe.processes import runtime

    runtime.use_no_devices()


def _rules(run_dir: str) -> Rules | None:
    """Those of the run's own config, if it can be read. A bucket holds none."""
    from maxpipe.checkpoint.retention import Rules
    from maxpipe.checkpoint.storage import in_bucket
    from maxpipe.config.load import load

    if in_bucket(run_dir):
        return None
    path = full(run_dir) / CONFIG_FILE
    try:
        return Rules.of(load([str(path)]).config.checkpoint)
    except ConfigError:
        return None


def add(commands: Commands) -> None:
    """Adds the command."""
    about = "list, inspect, verify, compare and delete the checkpoints of a run"
    parser = commands.add_parser(
        "checkpoints",
        help=about,
        description=f"{sentence(about)}. A run is named by its\n"
        "folder, by its name below runs/, or by gs://BUCKET/PATH; one of its checkpoints by\n"
        "RUN@STEP, RUN@newest, RUN@best (its checkpoint.best_metric), or the path to its folder.",
    )
    actions = subcommands(parser)

    listed = actions.add_parser("list", help="checkpoints of a run")
    add_address(listed, step=False)
    listed.add_argument("--json", action="store_true", help="print one JSON object")
    listed.set_defaults(command=_list)

    show = actions.add_parser("show", help="content of one checkpoint, by default the newest")
    add_address(show)
    show.set_defaults(command=_show)

    verify = actions.add_parser(
        "verify",
        help="compare every byte with what was saved",
        description="Read every file and compare it with the manifest, written when it was saved.\n"
        "Without a step all checkpoints are read. Exits with 74 when one is damaged; one without\n"
        "a manifest is unknown.",
        epilog="example: maxpipe checkpoints verify quickstart@120",
    )
    add_address(verify)
    verify.set_defaults(command=_verify)
    _add_prune(actions)
    _add_delete(actions)

    diff = actions.add_parser(
        "diff",
        help="what differs between two checkpoints",
        description="Compare two checkpoints: arrays, config, data position. Prints `same`, or a\n"
        "line for each difference. Without a step the newest of that run is taken.",
        epilog="example: maxpipe checkpoints diff runs/a@100 runs/b@100",
    )
    add_address(diff, "first", about="one checkpoint")
    add_address(diff, "second", about="another one")
    diff.add_argument("--exit-code", action="store_true", help="exit with 1 when they differ")
    diff.set_defaults(command=_diff)
    _add_best(actions)
    parser.command_names = tuple(actions.choices)


def _add_best(actions: Commands) -> None:
    best = actions.add_parser(
        "best",
        help="the checkpoint with the best evaluation",
        description="Print RUN@STEP of the checkpoint whose evaluation was the best by the run's\n"
        "checkpoint.best_metric, and its value. Only steps count that were evaluated when they\n"
        "were saved.",
        epilog="example: maxpipe checkpoints best quickstart --metric eval/nats_per_byte",
    )
    add_address(best, step=False)
    best.add_argument("--metric", metavar="NAME", help="another metric, smaller is better")
    best.add_argument("--largest", action="store_true", help="of that the largest is the best")
    best.add_argument("--json", action="store_true", help="print one JSON object")
    best.set_defaults(command=_best)


def _add_elsewhere(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="delete also where checkpoint.dir of the run's config.yml, or a link, leads",
    )


def _add_delete(actions: Commands) -> None:
    delete = actions.add_parser(
        "delete",
        help="delete one checkpoint",
        description="Delete one checkpoint. Refused while a run is using the folder, and for the\n"
        "newest checkpoint that is as it was saved.",
        epilog="example: maxpipe checkpoints delete quickstart@120",
    )
    add_address(delete, step=True, needed=True)
    delete.add_argument(
        "--force", action="store_true", help="delete the newest good checkpoint, too"
    )
    _add_elsewhere(delete)
    delete.set_defaults(command=_delete)


def _add_prune(actions: Commands) -> None:
    prune = actions.add_parser(
        "prune",
        help="delete what no rule keeps",
        description="Delete the checkpoints that no rule keeps. The rules are those of the run's\n"
        "config.yml, or the given ones. The newest checkpoint that verifies always stays, and so\n"
        "does what was found damaged.",
        epilog="example: maxpipe checkpoints prune runs/quickstart --keep 2 --dry-run",
    )
    add_address(prune, step=False)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    _add_elsewhere(prune)
    for option, name, kind, words in (
        ("--keep", "newest", integer, "this number of the newest; 1 if only other rules are given"),
        ("--keep-every-steps", "every_steps", integer, "those whose step this number divides"),
        (
            "--keep-every-hours",
            "every_hours",
            number,
            "the first in each period of this number of hours",
        ),
        ("--keep-best", "best", integer, "this number of the best by evaluation"),
    ):
        prune.add_argument(
            option, dest=name, type=kind, metavar="NUMBER", help=f"rule: keep {words}"
        )
    prune.set_defaults(command=_prune)
