"""`maxpipe fetch`: download a model or a dataset from the Hugging Face Hub."""

from __future__ import annotations

import argparse
import contextlib

from maxpipe.commands.parser import Commands
from maxpipe.errors import ExitCode
from maxpipe.telemetry.console import ProgressBar, print_line


def _fetch(options: argparse.Namespace) -> int:
    from maxpipe.huggingface.hub import fetch

    try:
        with contextlib.closing(ProgressBar(" MB")) as progress:
            fetch(
                options.repository,
                options.out,
                options.include,
                say=print_line,
                report=progress.report,
            )
    except KeyboardInterrupt:
        print_line("interrupted; the same command continues the download")
        raise
    print_line(f"{options.out} is complete, and all digests match")
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Add the `fetch` command."""
    parser = commands.add_parser(
        "fetch",
        help="download a model or a dataset from the Hugging Face Hub",
        description="Download a model or a dataset from the Hugging Face Hub to a folder. For a\n"
        "model, the safetensors, config and tokenizer files are downloaded; for a dataset, the\n"
        "Parquet, JSON, CSV and text files. Code and pickle files are never downloaded. The\n"
        "revision is resolved to a commit, and every file is compared with the digest that the\n"
        "hub states; DIR/.fetch.json records both. The same command continues an interrupted\n"
        "download and checks a complete one. HF_TOKEN and HF_ENDPOINT are respected. No other\n"
        "command downloads files.",
        epilog="example: maxpipe fetch hf:Qwen/Qwen3-0.6B --out models/qwen3\n"
        "         maxpipe fetch hf:datasets/ORG/NAME@main --out texts --include 'en/*.parquet'\n"
        "requires: pip install 'maxpipe[hub]'",
    )
    about = "hf:ORG/NAME or hf:datasets/ORG/NAME, and @ with a branch, tag or commit"
    parser.add_argument("repository", metavar="REPOSITORY", help=f"{about} (default: @main)")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to create, or to continue"
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="download only files of these types whose path matches the glob pattern; may be "
        "repeated (default: the top folder of a model, all folders of a dataset)",
    )
    parser.set_defaults(command=_fetch)
