"""`maxpipe distill`: precompute teacher logits for the sequences of a run."""

from __future__ import annotations

import argparse
import contextlib

from maxpipe.commands.parser import Commands, add_inputs, count, read_config, subcommands
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import expand_path, url_scheme
from maxpipe.telemetry.console import ProgressBar

_OUT = "command line: --out"


def _prepare(options: argparse.Namespace) -> int:
    loaded = read_config(options.inputs, to_train=True)
    if url_scheme(options.out):
        rule = "must be a local folder, because shards are written while logits are computed."
        action = "Specify a local folder, then copy it to the bucket with `gcloud storage "
        raise ConfigError.one(Code.CLI_OUTPUT, _OUT, options.out, rule, f"{action}cp -r`.")
    if loaded.config.train.objective != "distill" or loaded.config.distill.teacher_logits:
        rule = "must be distill, with a model in distill.teacher."
        action = "Set train.objective=distill and distill.teacher=RUN@newest, and leave out "
        action += "distill.teacher_logits."
        raise ConfigError.one(
            Code.POST_TEACHER, "train.objective", loaded.config.train.objective, rule, action
        )
    from maxpipe.posttrain.distill import prepare_teacher_logits

    folder, size = expand_path(options.out, _OUT), options.shard_bytes
    with contextlib.closing(ProgressBar()) as progress:
        summary = prepare_teacher_logits(loaded, folder, progress.report, shard_bytes=size)
    print(redact.redact_for_terminal(summary))
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Add the `distill` command."""
    parser = commands.add_parser(
        "distill",
        help="precompute teacher logits",
        description="Precompute the teacher logits of a run with train.objective=distill.",
    )
    actions = subcommands(parser)
    prepare = actions.add_parser(
        "prepare",
        help="store the teacher's top-k logits for every training sequence",
        description="Run the teacher model (distill.teacher) once on every training sequence of\n"
        "a run. At every position, store the logits of the distill.top_k most likely tokens.\n"
        "Write a folder for distill.teacher_logits. If the command is interrupted, run it again\n"
        "to resume; the resulting files are the same.",
        epilog="example: maxpipe distill prepare my-run.yml --out logits\n"
        "then:    maxpipe train my-run.yml distill.teacher='' distill.teacher_logits=logits",
    )
    add_inputs(prepare)
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    prepare.add_argument(
        "--shard-bytes",
        type=count,
        default=1 << 27,
        metavar="N",
        help="maximum shard size in bytes; a shard contains at least one sequence "
        "(default: 134217728)",
    )
    prepare.set_defaults(command=_prepare)
    parser.command_names = tuple(actions.choices)
