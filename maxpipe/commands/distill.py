"""`maxpipe distill`: what a teacher says of a run's rows, prepared in advance."""

from __future__ import annotations

import argparse

from maxpipe.commands.parser import Commands, add_inputs, count, read_config, subcommands
from maxpipe.commands.progress import ProgressBar
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import expand_path, url_scheme

_OUT = "command line: --out"


def _prepare(options: argparse.Namespace) -> int:
    loaded = read_config(options.inputs, to_train=True)
    if url_scheme(options.out):
        rule = "must be a folder on this machine: files are written as rows are computed."
        action = "Name a folder here, and copy it to the bucket afterwards, with `gcloud storage "
        raise ConfigError.one(_OUT, options.out, rule, f"{action}cp -r`.")
    if loaded.config.train.objective != "distill" or loaded.config.distill.teacher_logits:
        rule = "must be distill, with distill.teacher: it names the model that is asked."
        action = (
            "Set train.objective=distill and distill.teacher=RUN@newest, and no "
            "distill.teacher_logits"
        )
        raise ConfigError.one("train.objective", loaded.config.train.objective, rule, f"{action}.")
    from maxpipe.posttrain.prepare_teacher_logits import prepare_teacher_logits

    progress = ProgressBar()
    try:
        folder, size = expand_path(options.out, _OUT), options.shard_bytes
        done = prepare_teacher_logits(loaded, folder, progress.report, shard_bytes=size)
    finally:
        progress.close()
    print(redact.redact_for_terminal(done))
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "distill",
        help="store what a teacher says of a run's rows",
        description="Store what the teacher of a run with train.objective=distill says of the\n"
        "rows that it trains on.",
    )
    actions = subcommands(parser)
    prepare = actions.add_parser(
        "prepare",
        help="ask the teacher of all rows once, and store its answers",
        description="Ask the teacher that distill.teacher names of all rows that a run trains\n"
        "on, once, and store its distill.top_k most likely tokens at each place in a folder for\n"
        "distill.teacher_logits. After a stop the same command goes on; the files are the same.",
        epilog="example: maxpipe distill prepare my-run.yml --out answers\n"
        "then:    maxpipe train my-run.yml distill.teacher='' distill.teacher_logits=answers",
    )
    add_inputs(prepare)
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    prepare.add_argument(
        "--shard-bytes",
        type=count,
        default=1 << 27,
        metavar="N",
        help="size of a file, at least one row; default 134217728",
    )
    prepare.set_defaults(command=_prepare)
    parser.command_names = tuple(actions.choices)
