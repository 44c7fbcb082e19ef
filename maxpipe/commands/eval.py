"""`maxpipe eval`: the loss of a checkpoint on text."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from maxpipe.commands.parser import Commands, add_address, add_inputs
from maxpipe.errors import ExitCode
from maxpipe.words import counted

if TYPE_CHECKING:
    from maxpipe.train.evaluation import Report


def _eval(options: argparse.Namespace) -> int:
    import json

    from maxpipe.checkpoint.address import parse

    address = parse(options.checkpoint)
    from maxpipe.train.evaluation import evaluate_checkpoint

    found = evaluate_checkpoint(address, options.inputs, options.split, _say)
    if found is not None:
        print(json.dumps(found, indent=2) if options.json else _page(found))
    return ExitCode.DONE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _page(found: Report) -> str:
    documents = "all documents" if found["split"] == "all" else f"{found['split']} documents"
    return "\n".join(
        (
            f"checkpoint  {found['checkpoint']}",
            f"data        {found['source']}, {documents}, {found['batches']} of "
            f"{counted(found['all_batches'], 'batch')}, {found['tokens']:,} tokens",
            f"mesh        {found['mesh']}",
            f"loss        {found['nats_per_token']:.6f} nats per token",
            f"            {found['nats_per_byte']:.6f} nats per byte",
            f"perplexity  {found['perplexity']:.6g}",
        )
    )


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "eval",
        help="loss of a checkpoint on the run's validation documents, or on any text",
        description="Print the loss of a checkpoint in nats per token and per byte, and its\n"
        "perplexity. The config is the one that the checkpoint was saved with, changed by files\n"
        "and overrides: mesh and pipeline to run it under another layout, data.* for other\n"
        "documents (all of them count then), eval.batches for more or fewer batches (0 is all),\n"
        "eval.batch_size. Nothing is written, and the run may be training meanwhile.",
        epilog="examples:\n  maxpipe eval quickstart\n"
        "  maxpipe eval runs/quickstart@best eval.batches=0 --json\n"
        "  maxpipe eval quickstart@120 data.source=text data.path='book/*.txt'",
    )
    add_address(parser)
    add_inputs(parser)
    parser.add_argument(
        "--split",
        choices=("validation", "train", "all"),
        help="which documents; by default validation, or all when data.* names other documents",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_eval)
