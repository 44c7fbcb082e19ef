"""`maxpipe checkpoints`: list, verify, compare and delete the checkpoints of a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from maxpipe.commands.parser import Commands, add_address, integer, number, subcommands
from maxpipe.errors import Code, ConfigError, ExitCode, StorageError
from maxpipe.io.files import expand_path
from maxpipe.io.formatting import capitalize_first
from maxpipe.telemetry.console import print_line

if TYPE_CHECKING:
    from maxpipe.checkpoint.retention import RetentionRules

DIFFERENT = 1
"""Exit code of `diff --exit-code` if the checkpoints differ."""


def _print(lines: Iterable[str]) -> int:
    remaining = iter(lines)
    while True:
        with _storage_errors():  # handles storage errors only, not errors on stdout
            line = next(remaining, None)
        if line is None:
            return ExitCode.DONE
        print_line(line)


def _print_json(values: Callable[[], Mapping[str, Any]]) -> int:
    with _storage_errors():
        content = values()
    print(json.dumps(content, indent=2))
    return ExitCode.DONE


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            Code.CKPT_STORAGE,
            f"{error.filename or 'checkpoints'}: cannot be read or written\n"
            f"  {error.strerror or error}.\n"
            "  Check that the storage is available and that you have read and write access.",
        ) from error


def _list(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse_run_address

    _use_cpu_only()
    run = parse_run_address(options.run)
    if options.json:
        return _print_json(lambda: inspect.list_checkpoints(run, _rules(run.run_dir)))
    return _print(inspect.format_checkpoint_list(run, _rules(run.run_dir)))


def _print_report(options: argparse.Namespace) -> int:
    """Run the action `show` or `verify`."""
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse_address

    _use_cpu_only()
    report = getattr(inspect, options.report)
    return _print(report(parse_address(options.checkpoint)))


def _best(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.checkpoint.retention import BestMetric
    from maxpipe.config.sections.eval import best_mode_of

    _use_cpu_only()
    run, better = parse_run_address(options.run), None
    if options.metric is not None:
        mode = options.mode or best_mode_of(options.metric)
        better = BestMetric(options.metric, mode == "max")
    elif options.mode is not None:
        rule = (
            "requires --metric: without --metric, checkpoints are ranked by "
            "checkpoint.best_metric and checkpoint.best_mode."
        )
        raise ConfigError.one(
            Code.CLI_CONFLICT, "command line: --mode", options.mode, rule, "Leave out --mode."
        )

    def best() -> dict[str, Any]:
        address, step, metric, value = inspect.find_best_checkpoint(run, better)
        return {"checkpoint": address, "step": step, "metric": metric, "value": value}

    if options.json:
        return _print_json(best)
    return _print("{checkpoint}  {metric} {value:.6g}".format(**row) for row in [best()])


def _delete(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse_address

    _use_cpu_only()
    lines = inspect.delete_checkpoint(
        parse_address(options.checkpoint), force=options.force, elsewhere=options.elsewhere
    )
    return _print(lines)


def _prune(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.checkpoint.retention import RetentionRules
    from maxpipe.config.config_files import CONFIG_FILE

    _use_cpu_only()
    run_dir = parse_run_address(options.run).run_dir
    given = {name: getattr(options, name) for name in RetentionRules.__slots__ if name != "better"}
    for name, value in given.items():
        if value is not None and not value >= 0:
            option = "--keep" if name == "newest" else f"--keep-{name.replace('_', '-')}"
            raise ConfigError.one(
                Code.CLI_VALUE,
                f"command line: {option}",
                value,
                "must be at least 0.",
                f"Leave out {option}.",
            )
    if any(value is not None for value in given.values()):
        if given["newest"] is None:
            given["newest"] = 1
        better = inspect.best_metric_of_run(run_dir)
        rules = RetentionRules(**{name: value or 0 for name, value in given.items()}, better=better)
    else:
        rules = _rules(run_dir)
    if rules is None:
        raise ConfigError.one(
            Code.RUN_RECORDS,
            os.path.join(run_dir, CONFIG_FILE),
            None,
            "contains the retention rules, but cannot be read.",
            "Add a rule, such as --keep 3.",
        )
    lines = inspect.prune_checkpoints(
        run_dir, rules, dry_run=options.dry_run, elsewhere=options.elsewhere
    )
    return _print(lines)


def _diff(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint import inspect
    from maxpipe.checkpoint.address import parse_address

    _use_cpu_only()
    with _storage_errors():
        lines = inspect.diff_checkpoints(
            parse_address(options.first), parse_address(options.second)
        )
    _print(lines or ["same"])
    return DIFFERENT if lines and options.exit_code else ExitCode.DONE


def _use_cpu_only() -> None:
    from maxpipe.distributed import runtime

    runtime.use_cpu_only()


def _rules(run_dir: str) -> RetentionRules | None:
    """Return the retention rules in the run's config, or None if the config cannot be read."""
    from maxpipe.checkpoint.retention import RetentionRules
    from maxpipe.checkpoint.storage import in_bucket
    from maxpipe.config.config_files import CONFIG_FILE
    from maxpipe.config.load import load_storage_settings

    if in_bucket(run_dir):
        return None
    path = expand_path(run_dir) / CONFIG_FILE
    try:
        return RetentionRules.of(load_storage_settings(str(path)).checkpoint)
    except ConfigError:
        return None


def add(commands: Commands) -> None:
    """Add the `checkpoints` command."""
    about = "list, inspect, verify, compare and delete the checkpoints of a run"
    parser = commands.add_parser(
        "checkpoints",
        help=about,
        description=f"{capitalize_first(about)}. RUN is a run folder,\n"
        "the name of a run in runs/, or a URL such as s3://BUCKET/PATH. A checkpoint is\n"
        "RUN@STEP, RUN@newest, RUN@best (by checkpoint.best_metric), or the path of a checkpoint\n"
        "folder.",
    )
    actions = subcommands(parser)

    listed = actions.add_parser("list", help="list the checkpoints of a run")
    add_address(listed, step=False)
    listed.add_argument("--json", action="store_true", help="print one JSON object")
    listed.set_defaults(command=_list)

    show = actions.add_parser("show", help="describe one checkpoint (default: the newest)")
    add_address(show)
    show.set_defaults(command=_print_report, report="describe_checkpoint")

    verify = actions.add_parser(
        "verify",
        help="verify every byte of a checkpoint",
        description="Read every file of a checkpoint, and compare it with its checksum in the\n"
        "manifest. Without a step, verify all checkpoints of the run. The exit code is 74 if a\n"
        "checkpoint is damaged. A checkpoint without a manifest is reported as unknown.",
        epilog="example: maxpipe checkpoints verify quickstart@120",
    )
    add_address(verify)
    verify.set_defaults(command=_print_report, report="verify_checkpoints")
    _add_prune(actions)
    _add_delete(actions)

    diff = actions.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare the arrays, configs and data positions of two checkpoints. Print\n"
        "`same`, or one line per difference. Without a step, the newest checkpoint of the run is\n"
        "used.",
        epilog="example: maxpipe checkpoints diff runs/a@100 runs/b@100",
    )
    add_address(diff, "first", about="first checkpoint")
    add_address(diff, "second", about="second checkpoint")
    diff.add_argument(
        "--exit-code", action="store_true", help="exit with code 1 if the checkpoints differ"
    )
    diff.set_defaults(command=_diff)
    _add_best(actions)
    parser.command_names = tuple(actions.choices)


def _add_best(actions: Commands) -> None:
    best = actions.add_parser(
        "best",
        help="print the checkpoint with the best evaluation metric",
        description="Print RUN@STEP and the metric value of the best checkpoint, ranked by the\n"
        "run's checkpoint.best_metric. Only checkpoints of evaluated steps are considered.",
        epilog="example: maxpipe checkpoints best quickstart --metric eval/nats_per_byte",
    )
    add_address(best, step=False)
    best.add_argument("--metric", metavar="NAME", help="rank the checkpoints by another metric")
    best.add_argument(
        "--mode",
        choices=("min", "max"),
        help="whether the smallest or largest value of --metric is best (default: max for\n"
        "accuracy, accuracy_by_bytes, margin, reward_chosen and nats_rejected, otherwise min)",
    )
    best.add_argument("--json", action="store_true", help="print one JSON object")
    best.set_defaults(command=_best)


def _add_elsewhere(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="also delete checkpoints outside the run folder (in checkpoint.dir, or via a symlink)",
    )


def _add_delete(actions: Commands) -> None:
    delete = actions.add_parser(
        "delete",
        help="delete one checkpoint",
        description="Delete one checkpoint. The command fails if a run is using the folder or,\n"
        "unless --force is set, if the checkpoint is the newest intact one.",
        epilog="example: maxpipe checkpoints delete quickstart@120",
    )
    add_address(delete, step=True, needed=True)
    delete.add_argument(
        "--force", action="store_true", help="also delete the newest intact checkpoint"
    )
    _add_elsewhere(delete)
    delete.set_defaults(command=_delete)


def _add_prune(actions: Commands) -> None:
    prune = actions.add_parser(
        "prune",
        help="delete checkpoints that no retention rule keeps",
        description="Delete checkpoints that no retention rule keeps. Options replace the rules\n"
        "in the run's config.yml. The newest intact checkpoint and damaged checkpoints are always\n"
        "kept.",
        epilog="example: maxpipe checkpoints prune runs/quickstart --keep 2 --dry-run",
    )
    add_address(prune, step=False)
    prune.add_argument(
        "--dry-run", action="store_true", help="only print the checkpoints that would be deleted"
    )
    _add_elsewhere(prune)
    for option, name, kind, words in (
        (
            "--keep",
            "newest",
            integer,
            "the newest NUMBER checkpoints (default: 1 if other rules are set)",
        ),
        ("--keep-every-steps", "every_steps", integer, "checkpoints at steps divisible by NUMBER"),
        (
            "--keep-every-hours",
            "every_hours",
            number,
            "the first checkpoint in every NUMBER-hour period",
        ),
        ("--keep-best", "best", integer, "the NUMBER checkpoints with the best evaluation metric"),
    ):
        prune.add_argument(option, dest=name, type=kind, metavar="NUMBER", help=f"keep {words}")
    prune.set_defaults(command=_prune)
