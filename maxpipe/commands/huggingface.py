"""`maxpipe import` and `maxpipe export`: convert between Hugging Face folders and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

from maxpipe.commands.parser import Commands, add_address, add_ema_option
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.telemetry.console import ProgressBar, print_line

if TYPE_CHECKING:
    from maxpipe.checkpoint.address import Address

_TYPES = ("float32", "bfloat16", "float16")


def _import(options: argparse.Namespace) -> int:
    from maxpipe.distributed import runtime

    runtime.use_cpu_only()
    from maxpipe.huggingface.import_ import import_folder
    from maxpipe.maxtext.import_ import PREFIX, import_checkpoint

    with contextlib.closing(ProgressBar(" MB")) as progress:
        if options.folder.startswith(PREFIX):
            folder = options.folder.removeprefix(PREFIX)
            files = (folder, options.out, print_line, progress.report)
            import_checkpoint(*files, config=options.config, rope=options.rope)
            return ExitCode.DONE
        for option, given in (("--config", options.config), ("--rope", options.rope != "auto")):
            if given:
                rule = f"requires a checkpoint of MaxText: {PREFIX}DIR."
                action = f"Leave {option} out, or write {PREFIX}{options.folder}."
                raise ConfigError.one(
                    Code.CLI_CONFLICT, f"command line: {option}", None, rule, action
                )
        import_folder(options.folder, options.out, print_line, progress.report)
    return ExitCode.DONE


def _export(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse_address

    address = dataclasses.replace(parse_address(options.checkpoint), average=options.average)
    from maxpipe.distributed import runtime

    for each in options.inputs:
        if not each.startswith("plugins."):
            rule = "cannot be changed by an export, which reads the config of the checkpoint."
            raise ConfigError.one(Code.CLI_CONFLICT, "command line", each, rule, "Leave it out.")
    runtime.use_cpu_only()
    from maxpipe.huggingface.export import export, export_adapters

    if options.adapter and options.quantize:
        rule = "cannot be combined with --adapter: PEFT adapters are not quantized."
        where = "command line: --quantize"
        raise ConfigError.one(Code.CLI_CONFLICT, where, options.quantize, rule, "Omit --quantize.")
    if options.add and not (options.adapter and options.name):
        rule = "requires --adapter and --name, the name of the first adapter."
        where = "command line: --add"
        raise ConfigError.one(Code.CLI_CONFLICT, where, options.add[0], rule, "Add both options.")
    if options.name and not options.adapter:
        rule = "requires --adapter: only PEFT adapters have names."
        where = "command line: --name"
        raise ConfigError.one(Code.CLI_CONFLICT, where, options.name, rule, "Add --adapter.")
    if options.adapter:
        addresses = _named_addresses(options, address) if options.name else address
        export_adapters(addresses, options.out, options.dtype, print_line, options.inputs)
        return ExitCode.DONE
    with contextlib.closing(ProgressBar(" MB")) as progress:
        export(
            address,
            options.out,
            options.dtype,
            print_line,
            report=progress.report,
            overrides=options.inputs,
            quantize=options.quantize is not None,
        )
    return ExitCode.DONE


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


def _named_addresses(options: argparse.Namespace, first: Address) -> dict[str, Address]:
    """Return the checkpoint of each adapter by name. PEFT forbids dots in names."""
    from maxpipe.checkpoint.address import parse_address

    addresses: dict[str, Address] = {}
    for option, text in (("--name", options.name), *(("--add", each) for each in options.add)):
        name, separator, checkpoint = text.partition("=")
        where = f"command line: {option}"
        if (option == "--add") != bool(separator and checkpoint):
            rule = "must be NAME=CKPT." if option == "--add" else "must be a name only."
            action = "For example, use --name sql --add chat=RUN@STEP."
            raise ConfigError.one(Code.CLI_VALUE, where, text, rule, action)
        if not _ADAPTER_NAME.fullmatch(name):
            rule = "must have a name of at most 64 letters, digits, `_` and `-`."
            raise ConfigError.one(Code.CLI_VALUE, where, text, rule, "Use another name.")
        if name.lower() in {each.lower() for each in addresses}:
            rule = f"repeats the name {name}, or differs from it only in its case."
            raise ConfigError.one(Code.CLI_VALUE, where, text, rule, "Use another name.")
        address = parse_address(checkpoint, where) if separator else first
        addresses[name] = dataclasses.replace(address, average=options.average)
    return addresses


def add(commands: Commands) -> None:
    """Add the `import` and `export` commands."""
    incoming = commands.add_parser(
        "import",
        help="convert a Hugging Face folder, or a checkpoint of MaxText, to a checkpoint",
        description="Convert a Hugging Face folder (config.json and safetensors files) to a\n"
        "checkpoint. Also write config.yml, the config of a run that starts from the imported\n"
        "weights, and copy the tokenizer and generation files. The command reads no pickle\n"
        "files and downloads no files (see `maxpipe fetch`). To start a run without conversion,\n"
        "set checkpoint.restore_from=hf:DIR.\n\n"
        "maxtext:DIR converts a checkpoint of MaxText (Orbax) with a Llama, Mistral, Mixtral,\n"
        "Qwen2, Qwen3, Gemma 2 or Gemma 3 model, with scanned or unscanned layers.",
        epilog="example: maxpipe import ~/models/Llama-3.2-1B --out runs/llama\n"
        "         maxpipe train runs/llama/config.yml data.source=text data.path='*.txt'\n"
        "           train.steps=100",
    )
    about = "Hugging Face folder, or maxtext: and the folder of a checkpoint of MaxText"
    incoming.add_argument("folder", metavar="DIR", help=about)
    incoming.add_argument(
        "--out", required=True, metavar="CKPT", help="folder to create; it must not exist"
    )
    incoming.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help="config of a MaxText checkpoint, in the format of maxpipe or MaxText (default: a "
        "config next to the checkpoint)",
    )
    incoming.add_argument(
        "--rope",
        choices=("auto", "interleaved", "split"),
        default="auto",
        help="storage of rotated pairs of dims in a MaxText checkpoint: adjacent, or in two halves "
        "(default: auto, interleaved for Llama 3.1 and YaRN)",
    )
    incoming.set_defaults(command=_import)

    outgoing = commands.add_parser(
        "export",
        help="convert a checkpoint to a Hugging Face folder",
        description="Convert the parameters of a checkpoint to a Hugging Face folder:\n"
        "config.json, safetensors files and tokenizer files. The result does not depend on the\n"
        "mesh or pipeline of the run, which may still be training. Adapters are merged into the\n"
        "base weights unless --adapter is set.",
        epilog="example: maxpipe export quickstart@best --format hf exported --dtype bfloat16",
    )
    add_address(outgoing)
    add_ema_option(outgoing)
    outgoing.add_argument("out", metavar="OUT", help="folder to create; it must not exist")
    outgoing.add_argument(
        "inputs",
        nargs="*",
        metavar="plugins.key=value",
        help="settings of plug-ins, such as plugins.allow_code=true",
    )
    outgoing.add_argument(
        "--format", choices=("hf",), default="hf", help="output format (default: hf, Hugging Face)"
    )
    outgoing.add_argument(
        "--adapter",
        action="store_true",
        help="write only the adapters, in PEFT format, instead of merging them",
    )
    outgoing.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="with --adapter: write the adapter to the folder OUT/NAME (default: OUT)",
    )
    outgoing.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME=CKPT",
        help="with --adapter and --name: also write the adapter of another checkpoint with the "
        "same base model to OUT/NAME; can be repeated",
    )
    outgoing.add_argument(
        "--dtype",
        choices=_TYPES,
        help="dtype of the exported tensors (default: their dtype when imported, or the dtype of "
        "the run's parameters)",
    )
    outgoing.add_argument(
        "--quantize",
        choices=("fp8",),
        help="write the weight matrices of all layers in FP8 with a scale per 128 x 128 block; "
        "--dtype applies to the other tensors (default: not quantized)",
    )
    outgoing.set_defaults(command=_export)
