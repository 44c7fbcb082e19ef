"""`maxpipe data`: documents as token ids, prepared in advance and checked; what a model reads."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from maxpipe.commands.data_files import DATA_HELP, with_data_files
from maxpipe.commands.data_look import add_look
from maxpipe.commands.data_mixture import add_mixture
from maxpipe.commands.parser import (
    OF_DATA,
    Commands,
    add_inputs,
    count,
    read_data_config,
    subcommands,
)
from maxpipe.commands.progress import Progress
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import full, scheme
from maxpipe.io.text import counted

if TYPE_CHECKING:
    from maxpipe.config.data_schema import DataConfig

_OUT = "command line: --out"


def _prepare(options: argparse.Namespace) -> int:
    from maxpipe.config.data import all_sources
    from maxpipe.data.prepared.prepare import Plan, prepare
    from maxpipe.data.sections import in_section
    from maxpipe.data.stream import seed_of

    config = read_data_config(with_data_files(options.inputs)).config
    if scheme(options.out):
        rule = "must be a folder on this machine: files are written as documents are read."
        action = "Name a folder here, and copy it to the bucket afterwards, with `gcloud storage "
        raise ConfigError.one(_OUT, options.out, rule, f"{action}cp -r`.")
    if not options.out:
        rule = "must name a folder: it is empty."
        raise ConfigError.one(_OUT, '""', rule, "Give --out tokens.")
    name = _chosen(config.data, options.source)
    plan = Plan(
        data=all_sources(config.data)[name],
        tokenizer=config.tokenizer,
        seed=seed_of(name, config.run.seed),
        folder=full(options.out, _OUT),
        cache_dir=str(full(config.run.dir, "run.dir") / ".index"),
        workers=options.workers,
        shard_tokens=options.shard_tokens,
    )
    progress = Progress()
    try:
        with in_section(name):
            done = prepare(plan, progress.report)
    finally:
        progress.close()
    print(redact.shown(done))
    return ExitCode.DONE


def _chosen(data: DataConfig, given: str | None) -> str:
    """The name of the source that is prepared; empty without a mixture."""
    from maxpipe.config.data import validation_sets

    names = [*sorted(data.mixture), *validation_sets(data)]
    where, known = "command line: --source", ", ".join(names)
    if given is None and data.mixture:
        rule = f"must name one source of {known}: each gets its own folder."
        raise ConfigError.one(where, given, rule, f"Add --source {min(data.mixture)}.")
    if given is not None and given not in names:
        rule = f"must be one of {known}." if known else "has no effect without data.mixture."
        raise ConfigError.one(where, given, rule, "Give one of them, or leave it out.")
    return given or ""


_MOST_DAMAGE = 10
"""Damaged files that `data verify` names; the rest is a count."""


def _verify(options: argparse.Namespace) -> int:
    from maxpipe.data.prepared.verify import verify

    progress = Progress(" MiB")
    try:
        found = verify(options.folder, progress.report)
    finally:
        progress.close()
    for line in found.damage[:_MOST_DAMAGE]:
        print(redact.shown(line), file=sys.stderr)
    if (more := len(found.damage) - _MOST_DAMAGE) > 0:
        print(f"and {counted(more, 'more damaged file')}", file=sys.stderr)
    print(redact.shown(found.summary))
    return ExitCode.STORAGE if found.damage else ExitCode.DONE


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "data",
        help="turn documents into token files, check these, and see what a model reads",
        description="Turn documents into files of token ids and check these; see what a model\n"
        "reads, and where it comes from.",
    )
    actions = subcommands(parser)
    _add_prepare(actions)
    _add_verify(actions)
    add_look(actions)
    add_mixture(actions)
    parser.command_names = tuple(actions.choices)


def _add_prepare(actions: Commands) -> None:
    prepare = actions.add_parser(
        "prepare",
        help="tokenize all documents once, in parallel processes",
        description="Tokenize the documents that data.* and tokenizer.* describe, in parallel\n"
        "processes, into a folder for data.source=tokens. After a stop the same command goes on;\n"
        "the files are the same, whatever the number of processes.",
        epilog="example: maxpipe data prepare my-run.yml '*.jsonl' --out tokens\n"
        "then:    maxpipe train my-run.yml data.source=tokens data.path=tokens",
    )
    add_inputs(prepare, OF_DATA, DATA_HELP)
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    prepare.add_argument(
        "--source",
        metavar="NAME",
        help="which source of data.mixture to prepare, or validation.NAME",
    )
    prepare.add_argument(
        "--workers", type=count, default=None, metavar="N", help="processes; default one per core"
    )
    prepare.add_argument(
        "--shard-tokens",
        type=count,
        default=1 << 27,
        metavar="N",
        help="tokens after which a new pair of files begins; default 134217728",
    )
    prepare.set_defaults(command=_prepare)


def _add_verify(actions: Commands) -> None:
    verify = actions.add_parser(
        "verify",
        help="read every byte of a prepared folder, and compare it with what was written",
        description="Read every byte of a folder that `maxpipe data prepare` wrote, and compare\n"
        "it with the digests that were taken then. Ends with 74 if a byte differs.",
        epilog="example: maxpipe data verify tokens",
    )
    verify.add_argument("folder", metavar="DIR", help="the folder, or gs://BUCKET/PATH")
    verify.set_defaults(command=_verify)
