"""`maxpipe eval`: the loss of a model on text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from maxpipe.commands.parser import Commands, add_address, add_inputs
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.words import counted

if TYPE_CHECKING:
    from maxpipe.train.evaluation import Report


def _eval(options: argparse.Namespace) -> int:
    from maxpipe.exchange.named import named

    model = named(options.checkpoint)
    inputs = [*options.inputs, *_documents(options)]
    from maxpipe.train.evaluation import evaluate_model

    found = evaluate_model(model, inputs, options.split, _say)
    if found is not None:
        print(json.dumps(found, indent=2) if options.json else _page(found))
    return ExitCode.DONE


def _documents(options: argparse.Namespace) -> list[str]:
    """The overrides that say to read the files of `--data`."""
    from maxpipe.config.documents import one_line
    from maxpipe.data.sources import source_of

    path, where = options.data, "command line: --data"
    if path is None:
        return []
    for each in options.inputs:
        if each.startswith(("data.source=", "data.path=")):
            rule = f"says which documents to take, and {each} says it, too."
            raise ConfigError.one(where, path, rule, "Leave one of them out.")
    source = source_of(path, where)
    return [f"data.source={source}", f"data.path={one_line(path)}"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _page(found: Report) -> str:
    documents = "all documents" if found["split"] == "all" else f"{found['split']} documents"
    return "\n".join(
        (
            f"checkpoint  {found['checkpoint']}",
            f"data        {found['source']}, {documents}, {found['batches']} of "
            f"{counted(found['all_batches'], 'batch')}, {found['tokens']:,} tokens",
            f"            in rows of {counted(found['sequence_length'], 'token')}",
            f"mesh        {found['mesh']}",
            f"loss        {found['nats_per_token']:.6f} nats per token",
            f"            {found['nats_per_byte']:.6f} nats per byte",
            f"            {found['bits_per_byte']:.6f} bits per byte",
            f"perplexity  {found['perplexity']:.6g}",
        )
    )


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "eval",
        help="loss of a model on its run's validation documents, or on any text",
        description="Print the loss of a checkpoint, or of a Hugging Face folder, in nats per\n"
        "token and per byte, its bits per byte and its perplexity. The config is the one that the\n"
        "checkpoint was saved with, changed by files and overrides: mesh and pipeline to run it\n"
        "under another layout, data.* or --data for other documents (all of them count then),\n"
        "eval.batches for more or fewer batches (0 is all), eval.batch_size. Nothing is written,\n"
        "and the run may be training meanwhile.",
        epilog="examples:\n  maxpipe eval quickstart\n"
        "  maxpipe eval runs/quickstart@best eval.batches=0 --json\n"
        "  maxpipe eval quickstart@120 --data 'book/*.txt'\n"
        "  maxpipe eval ~/models/Llama-3.2-1B --data articles.jsonl",
    )
    add_address(parser, about="a run, RUN@STEP, RUN@best, or a Hugging Face folder")
    add_inputs(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="text to take: a file, a folder or a pattern; *.jsonl are JSON lines, *.array_record\n"
        "records, and others plain text",
    )
    parser.add_argument(
        "--split",
        choices=("validation", "train", "all"),
        help="which documents; by default validation, or all when data.* names other documents",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_eval)
