"""`maxpipe import` and `maxpipe export`: Hugging Face folders to checkpoints, and back."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

from maxpipe.commands.parser import Commands, add_address, add_average
from maxpipe.commands.progress import Progress, print_line
from maxpipe.errors import ExitCode

_TYPES = ("float32", "bfloat16", "float16")


def _import(options: argparse.Namespace) -> int:
    from maxpipe.processes import runtime

    runtime.use_no_devices()
    from maxpipe.exchange.incoming import import_folder

    with contextlib.closing(Progress(" MB")) as progress:
        import_folder(options.folder, options.out, print_line, progress.report)
    return ExitCode.DONE


def _export(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse

    address = dataclasses.replace(parse(options.checkpoint), average=options.average)
    from maxpipe.processes import runtime

    runtime.use_no_devices()
    from maxpipe.exchange.outgoing import export, export_adapters

    if options.adapter:
        export_adapters(address, options.out, options.dtype, print_line)
        return ExitCode.DONE
    with contextlib.closing(Progress(" MB")) as progress:
        export(address, options.out, options.dtype, print_line, report=progress.report)
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Adds both commands."""
    incoming = commands.add_parser(
        "import",
        help="make a checkpoint of a Hugging Face folder",
        description="Write a checkpoint with the weights of a Hugging Face folder: config.json\n"
        "and safetensors files. Beside it are config.yml, which starts a run from them, and the\n"
        "folder's tokenizer and generation files. Nothing is downloaded, and nothing pickled is\n"
        "read. checkpoint.restore_from=hf:DIR starts a run without this step.",
        epilog="example: maxpipe import ~/models/Llama-3.2-1B --out runs/llama\n"
        "         maxpipe train runs/llama/config.yml data.source=text data.path='*.txt'\n"
        "           train.steps=100",
    )
    incoming.add_argument("folder", metavar="DIR", help="the Hugging Face folder")
    incoming.add_argument(
        "--out", required=True, metavar="CKPT", help="folder to make; it must not exist"
    )
    incoming.set_defaults(command=_import)

    outgoing = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write the parameters of a checkpoint as a Hugging Face folder: config.json,\n"
        "safetensors files and the tokenizer's files. It does not depend on the mesh or the\n"
        "pipeline of the run, and the run may be training meanwhile. Adapters are merged with\n"
        "their base, or written alone.",
        epilog="example: maxpipe export quickstart@best --format hf exported --dtype bfloat16",
    )
    add_address(outgoing)
    add_average(outgoing)
    outgoing.add_argument("out", metavar="OUT", help="folder to make; it must not exist")
    outgoing.add_argument("--format", choices=("hf",), default="hf", help="hf: Hugging Face")
    outgoing.add_argument(
        "--adapter",
        action="store_true",
        help="adapters alone, in PEFT's format; without it they are merged with their base",
    )
    outgoing.add_argument(
        "--dtype",
        choices=_TYPES,
        help="type of the tensors; by default that in which they were imported, else that of the "
        "run's parameters",
    )
    outgoing.set_defaults(command=_export)
