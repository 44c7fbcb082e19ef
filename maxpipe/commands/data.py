"""`maxpipe data`: prepare and verify token files, and inspect training data and mixtures."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from maxpipe.commands.data_inspect import (
    DATA_HELP,
    RUN_HELP,
    add_inspect,
    batch_of_step,
    expand_data_files,
    open_datasets,
    resolve_run_inputs,
    step_number,
)
from maxpipe.commands.parser import (
    DATA_PREFIX,
    Commands,
    add_inputs,
    count,
    read_config,
    read_data_config,
    subcommands,
)
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import expand_path, url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.telemetry.console import ProgressBar

if TYPE_CHECKING:
    from maxpipe.config.sections.data import DataConfig
    from maxpipe.data.loader import Loader


def _mixture(options: argparse.Namespace) -> int:
    from maxpipe.config.check import check_length
    from maxpipe.config.sections.train import total_steps

    inputs, folder = resolve_run_inputs(options.inputs)
    loaded = read_config(inputs)
    config = loaded.config
    check_length(config, loaded.origins)
    if not config.data.mixture:
        rule = "must have a source: without a mixture, all sequences come from data.source."
        action = "Set data.mixture.NAME.source and data.mixture.NAME.path for every source."
        raise ConfigError.one(Code.DATA_MIXTURE, "data.mixture", None, rule, action)
    datasets = open_datasets(config, folder)
    try:
        train, steps = datasets.train, total_steps(config.train)
        report: dict[str, Any] = {"stages": mixture_stage_table(train)}
        report["sources"] = source_table(train, min(steps, train.last_batch))
        if options.step is not None:
            batch = batch_of_step(folder, options.step)
            report["step"] = {"step": options.step, **sequence_sources(train, batch)}
    finally:
        datasets.close()
    print(
        json.dumps(report, indent=2)
        if options.json
        else redact.redact_for_terminal("\n".join(_page(report)))
    )
    return ExitCode.DONE


def mixture_stage_table(train: Loader) -> list[dict[str, Any]]:
    """Return the first step and the source weights of every mixture stage. The first sequences of
    that step may still belong to the previous stage. If the last stage has no weights, all sources
    are exhausted at its first step.
    """
    assert train.stream.mixture is not None
    table = []
    for stage in train.stream.mixture.stages:
        total = sum(stage.quotas)
        shares = [quota / total if total else 0.0 for quota in stage.quotas]
        first = train.ramp.num_batches(stage.first + 1)
        named = dict(zip(train.sources, shares, strict=True)) if total else {}
        table.append({"first_step": first, "first_sample": stage.first, "shares": named})
    return table


def source_table(train: Loader, steps: float) -> list[dict[str, Any]]:
    """Return the number of samples and epochs read from each source in `steps` steps."""
    samples = train.stream.samples_before(train.ramp.sequences_before(int(steps)))
    return [
        {
            "source": part.name,
            "sequences": len(part.sequences),
            "samples": samples[part.name],
            "epochs": samples[part.name] / len(part.sequences),
        }
        for part in train.stream.parts
    ]


def sequence_sources(train: Loader, batch: int) -> dict[str, Any]:
    """Return the source and the sequence index for every row of a batch."""
    rows = [
        {"source": row.source, "sequence": row.sequence} for row in train.sequence_origins(batch)
    ]
    return {"batch": batch, "rows": rows}


def _page(report: dict[str, Any]) -> Iterator[str]:
    for stage in report["stages"]:
        shares = ", ".join(f"{name} {share:.2%}" for name, share in stage["shares"].items())
        yield f"from step {stage['first_step']}: {shares or 'no data: all sources are exhausted'}"
    width = max(len(source["source"]) for source in report["sources"])
    for source in report["sources"]:
        samples, sequences = (pluralize(source[key], key[:-1]) for key in ("samples", "sequences"))
        yield f"{source['source']:{width}}  {samples} of {sequences}, {source['epochs']:.2f} epochs"
    if "step" not in report:
        return
    step = report["step"]
    numbers = Counter(row["source"] for row in step["rows"])
    parts = ", ".join(f"{name} {numbers[name]}" for name in sorted(numbers))
    yield f"step {step['step']}: batch {step['batch']}, sequences by source: {parts or 'none'}"
    for number, row in enumerate(step["rows"]):
        yield f"row {number}: sequence {row['sequence']} of {row['source']}"


def add_mixture(actions: Commands) -> None:
    """Add the `data mixture` command."""
    mixture = actions.add_parser(
        "mixture",
        help="print a run's mixture weights, and the source of each sequence in a given step",
        description="Print the weight and the number of epochs of every source in a mixture.\n"
        "With --step, also print the source and sequence index of every row of the batch. The\n"
        "output does not depend on the number of processes. For a run, the output reflects all\n"
        "changes to the mixture weights.",
        epilog="examples:\n  maxpipe data mixture my-run.yml --step 100000\n"
        "  maxpipe data mixture runs/my-run --json",
    )
    add_inputs(mixture, "RUN|", RUN_HELP)
    mixture.add_argument(
        "--step",
        type=step_number,
        default=None,
        metavar="K",
        help="also print the sources of step K",
    )
    mixture.add_argument("--json", action="store_true", help="print one JSON object")
    mixture.set_defaults(command=_mixture)


_OUT = "command line: --out"


def _prepare(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.storage import runs_folder
    from maxpipe.config.sections.data import all_sources
    from maxpipe.data.mixture import seed_of
    from maxpipe.data.prepared.prepare import PrepareJob, prepare
    from maxpipe.data.sources import wrap_section_errors

    config = read_data_config(expand_data_files(options.inputs)).config
    if url_scheme(options.out):
        rule = "must be a local folder, because files are written while documents are read."
        action = "Specify a local folder, then copy it to the bucket with `gcloud storage "
        raise ConfigError.one(Code.CLI_OUTPUT, _OUT, options.out, rule, f"{action}cp -r`.")
    if not options.out:
        rule = "must name a folder, but is empty."
        raise ConfigError.one(Code.CLI_OUTPUT, _OUT, '""', rule, "Add --out tokens.")
    if config.data.max_images_per_sequence:
        rule = "must be 0 to prepare documents: prepared folders contain no images."
        action = "Train on the records themselves, or set data.max_images_per_sequence=0."
        raise ConfigError.one(
            Code.MODEL_IMAGES,
            "data.max_images_per_sequence",
            config.data.max_images_per_sequence,
            rule,
            action,
        )
    name = _source_to_prepare(config.data, options.source)
    plan = PrepareJob(
        data=all_sources(config.data)[name],
        tokenizer=config.tokenizer,
        seed=seed_of(name, config.run.seed),
        folder=expand_path(options.out, _OUT),
        cache_dir=str(runs_folder(config.run) / ".index"),
        workers=options.workers,
        shard_tokens=options.shard_tokens,
    )
    progress = ProgressBar()
    try:
        with wrap_section_errors(name):
            summary = prepare(plan, progress.report)
    finally:
        progress.close()
    print(redact.redact_for_terminal(summary))
    return ExitCode.DONE


def _source_to_prepare(data: DataConfig, given: str | None) -> str:
    from maxpipe.config.sections.data import validation_sets

    names = [*sorted(data.mixture), *validation_sets(data)]
    where, known = "command line: --source", ", ".join(names)
    if given is None and data.mixture:
        rule = f"must be one of {known}: every source needs a separate folder."
        raise ConfigError.one(
            Code.CLI_VALUE, where, given, rule, f"Add --source {min(data.mixture)}."
        )
    if given is not None and given not in names:
        rule = f"must be one of {known}." if known else "has no effect without data.mixture."
        raise ConfigError.one(
            Code.CLI_VALUE, where, given, rule, "Specify a source, or leave out --source."
        )
    return given or ""


_MOST_DAMAGE = 10
"""Maximum number of damaged files that `data verify` lists."""


def _verify(options: argparse.Namespace) -> int:
    from maxpipe.data.prepared.prepare import verify

    progress = ProgressBar(" MiB")
    try:
        result = verify(options.folder, progress.report)
    finally:
        progress.close()
    for line in result.damage[:_MOST_DAMAGE]:
        print(redact.redact_for_terminal(line), file=sys.stderr)
    if (more := len(result.damage) - _MOST_DAMAGE) > 0:
        print(f"and {pluralize(more, 'more damaged file')}", file=sys.stderr)
    print(redact.redact_for_terminal(result.summary))
    return ExitCode.STORAGE if result.damage else ExitCode.DONE


def add(commands: Commands) -> None:
    """Add the `data` command."""
    parser = commands.add_parser(
        "data",
        help="prepare and verify token files, and inspect training data",
        description="Prepare and verify token files, and inspect the training data of a config,\n"
        "run or file.",
    )
    actions = subcommands(parser)
    _add_prepare(actions)
    _add_verify(actions)
    add_inspect(actions)
    add_mixture(actions)
    parser.command_names = tuple(actions.choices)


def _add_prepare(actions: Commands) -> None:
    prepare = actions.add_parser(
        "prepare",
        help="tokenize all documents once, in parallel processes",
        description="Tokenize the documents selected by data.* with the tokenizer selected by\n"
        "tokenizer.*, in parallel processes, and write a folder for data.source=tokens. If the\n"
        "command is interrupted, run it again to resume. The files do not depend on the number of\n"
        "processes.",
        epilog="example: maxpipe data prepare my-run.yml '*.jsonl' --out tokens\n"
        "then:    maxpipe train my-run.yml data.source=tokens data.path=tokens",
    )
    add_inputs(prepare, DATA_PREFIX, DATA_HELP)
    prepare.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    prepare.add_argument(
        "--source", metavar="NAME", help="data.mixture source to prepare, or validation.NAME"
    )
    prepare.add_argument(
        "--workers",
        type=count,
        default=None,
        metavar="N",
        help="number of processes (default: one per core)",
    )
    prepare.add_argument(
        "--shard-tokens",
        type=count,
        default=1 << 27,
        metavar="N",
        help="tokens per shard; every shard has one .bin file (default: 134217728)",
    )
    prepare.set_defaults(command=_prepare)


def _add_verify(actions: Commands) -> None:
    verify = actions.add_parser(
        "verify",
        help="verify every byte of a folder of prepared data",
        description="Read every file in a folder written by `maxpipe data prepare`, and verify\n"
        "its checksums. The exit code is 74 if a file is damaged.",
        epilog="example: maxpipe data verify tokens",
    )
    about = "prepared folder, or a path in a store such as s3://BUCKET/PATH"
    verify.add_argument("folder", metavar="DIR", help=about)
    verify.set_defaults(command=_verify)
