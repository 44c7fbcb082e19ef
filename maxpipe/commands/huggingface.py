"""`maxpipe import` and `maxpipe export`: convert between Hugging Face folders and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

from maxpipe.commands.parser import Commands, add_address, add_ema_option, number
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.telemetry.console import ProgressBar, print_line

if TYPE_CHECKING:
    from maxpipe.checkpoint.address import Address

_TYPES = ("float32", "bfloat16", "float16")


def _import(options: argparse.Namespace) -> int:
    from maxpipe.distributed import runtime

    runtime.use_cpu_only()
    from maxpipe.huggingface.import_ import import_folder
    from maxpipe.huggingface.upcycle import UpcycleOptions, import_upcycled
    from maxpipe.maxtext.import_ import PREFIX, import_checkpoint

    _check_import(options)
    with contextlib.closing(ProgressBar(" MB")) as progress:
        files = (options.folder.removeprefix(PREFIX), options.out, print_line, progress.report)
        if options.folder.startswith(PREFIX):
            import_checkpoint(*files, config=options.config, rope=options.rope)
        elif options.upcycle:
            inputs = (*filter(None, [options.config]), *options.inputs)
            scale, ratio = options.router_scale, options.drop_ratio
            import_upcycled(*files, UpcycleOptions(inputs, scale, ratio))
        else:
            import_folder(*files, images=options.images)
    return ExitCode.DONE


def _check_import(options: argparse.Namespace) -> None:
    """Check that the options of an import can be combined.

    Raises:
        ConfigError: an option requires another kind of import, or is out of range.
    """
    from maxpipe.maxtext.import_ import PREFIX

    def error(option: str, value: object, rule: str, action: str) -> ConfigError:
        given = None if value is None else str(value)
        return ConfigError.one(Code.CLI_CONFLICT, f"command line: {option}", given, rule, action)

    if unknown := [each for each in options.inputs if each.startswith("-")]:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    is_maxtext = options.folder.startswith(PREFIX)
    if is_maxtext and options.upcycle:
        rule = "requires a Hugging Face folder with a dense model."
        raise error("--upcycle", None, rule, "Omit --upcycle, or use a Hugging Face folder.")
    if options.images and (is_maxtext or options.upcycle):
        rule = "requires a Hugging Face folder, without --upcycle."
        raise error("--images", None, rule, "Omit --images.")
    of_maxtext = {"--config": options.config, "--rope": options.rope != "auto"}
    if options.upcycle:
        del of_maxtext["--config"]
    for option, given in of_maxtext.items():
        if given and not is_maxtext:
            rule = f"requires a checkpoint of MaxText: {PREFIX}DIR."
            action = f"Leave {option} out, or write {PREFIX}{options.folder}."
            raise error(option, None, rule, action)
    of_upcycling = {
        **dict.fromkeys(options.inputs, True),
        "--router-scale": options.router_scale != 1,
        "--drop-ratio": options.drop_ratio != 0,
    }
    for option, given in of_upcycling.items():
        if given and not options.upcycle:
            rule = "requires --upcycle: other imports read the config of the folder."
            action = f"Omit {option}, add --upcycle, or pass config keys to `maxpipe train`."
            raise error(option, None, rule, action)
    for each in options.inputs:
        if "=" in each and not each.startswith(("model.", "model=", "run.seed=")):
            rule = "must be a key of the section model, or run.seed: an import reads no other keys."
            raise error(each, None, rule, "Pass this key to `maxpipe train`.")
    if not 1e-6 <= options.router_scale <= 1e6:
        rule = "must be from 1e-6 to 1e6: equal router logits select the same experts, and large "
        rule += "logits overflow."
        raise error("--router-scale", options.router_scale, rule, "Use --router-scale 1.")
    if not 0 <= options.drop_ratio <= 1:
        rule = "must be from 0 to 1."
        raise error("--drop-ratio", options.drop_ratio, rule, "Use --drop-ratio 0.5.")


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
    _add_import(commands)
    _add_export(commands)


def _add_import(commands: Commands) -> None:
    incoming = commands.add_parser(
        "import",
        help="convert a Hugging Face folder, or a checkpoint of MaxText, to a checkpoint",
        description="Convert a Hugging Face folder (config.json and safetensors files) to a\n"
        "checkpoint. Also write config.yml, the config of a run that starts from the imported\n"
        "weights, and copy the tokenizer and generation files. The command reads no pickle\n"
        "files and downloads no files (see `maxpipe fetch`). To start a run without conversion,\n"
        "set checkpoint.restore_from=hf:DIR.\n\n"
        "maxtext:DIR converts a checkpoint of MaxText (Orbax) with a Llama, Mistral, Mixtral,\n"
        "Qwen2, Qwen3, Gemma 2 or Gemma 3 model, with scanned or unscanned layers.\n\n"
        "--upcycle converts a dense Hugging Face folder to a mixture of experts: config files and\n"
        "model.key=value overrides define the experts, and all other keys have the values of the\n"
        "folder.",
        epilog="example: maxpipe import ~/models/Llama-3.2-1B --out runs/llama\n"
        "         maxpipe train runs/llama/config.yml data.source=text data.path='*.txt'\n"
        "           train.steps=100\n"
        "         maxpipe import ~/models/Llama-3.2-1B --out runs/moe --upcycle model.family=moe\n"
        "           model.moe.num_dense_layers=0 model.moe.num_experts=8 model.moe.top_k=2",
    )
    about = "Hugging Face folder, or maxtext: and the folder of a checkpoint of MaxText"
    incoming.add_argument("folder", metavar="DIR", help=about)
    incoming.add_argument(
        "inputs",
        nargs="*",
        metavar="FILE|model.key=value",
        help="with --upcycle: config of the mixture of experts; only the section model and "
        "run.seed are read",
    )
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
    incoming.add_argument(
        "--images",
        action="store_true",
        help="also import the vision tower of the model, to train and generate with images",
    )
    incoming.add_argument(
        "--upcycle",
        action="store_true",
        help="initialize the experts of a mixture of experts from the MLPs of a dense model",
    )
    incoming.add_argument(
        "--router-scale",
        type=number,
        default=1.0,
        metavar="X",
        help="with --upcycle: factor that multiplies the initial router weights (default: 1)",
    )
    incoming.add_argument(
        "--drop-ratio",
        type=number,
        default=0.0,
        metavar="X",
        help="with --upcycle: fraction of each expert's hidden dims that is initialized at random, "
        "as in Drop-Upcycling (default: 0)",
    )
    incoming.set_defaults(command=_import)


def _add_export(commands: Commands) -> None:
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
