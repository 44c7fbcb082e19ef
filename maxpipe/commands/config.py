"""`maxpipe config`, `maxpipe configs` and `maxpipe init`: inspect, copy and create configs."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.commands.parser import Commands, add_inputs, count, read_config, subcommands
from maxpipe.errors import Code, ConfigError, ExitCode, StorageError
from maxpipe.io import redact
from maxpipe.io.files import UnsafeFileError, expand_path
from maxpipe.io.formatting import capitalize_first

if TYPE_CHECKING:
    from maxpipe.config.config_files import BundledConfig

_OVERWRITE = "--overwrite"


def _config_print(options: argparse.Namespace) -> int:
    from maxpipe.config import render

    loaded = redact.redact_value(read_config(options.inputs))
    print(render.print_config(loaded, origin=options.origin), end="")
    return ExitCode.DONE


def _config_explain(options: argparse.Namespace) -> int:
    from maxpipe.config import render

    print(render.explain(options.key), end="")
    return ExitCode.DONE


def _config_schema(options: argparse.Namespace) -> int:
    import json

    from maxpipe.config import render

    print(json.dumps(render.json_schema(), indent=2))
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Add the `config` command."""
    about = "print config values, and explain config keys"
    parser = commands.add_parser("config", help=about, description=f"{capitalize_first(about)}.")
    actions = subcommands(parser)

    show = actions.add_parser(
        "print",
        help="print the full config that results from the files and overrides",
        description="Print every config value, including defaults, after running all checks that\n"
        "do not require devices.",
        epilog="example: maxpipe config print quickstart train.steps=100 --origin",
    )
    add_inputs(show)
    show.add_argument("--origin", action="store_true", help="also print where each value is set")
    show.set_defaults(command=_config_print)

    explain = actions.add_parser(
        "explain",
        help="explain a key or section",
        description="Print the type, default, allowed values and description of a key. For a\n"
        "section, print its keys. Without an argument, print all sections.",
        epilog="example: maxpipe config explain pipeline.schedule",
    )
    explain.add_argument("key", nargs="?", default="", metavar="KEY", help="section.key or section")
    explain.set_defaults(command=_config_explain)

    schema = actions.add_parser("schema", help="print a JSON schema for editors")
    schema.set_defaults(command=_config_schema)

    _add_peers(actions)
    parser.command_names = tuple(actions.choices)


def _add_peers(actions: Commands) -> None:
    """Add the commands that convert configs of other trainers."""
    rows = (
        ("MaxText", "a model file or run config of MaxText (YAML)", "steps=1000"),
        ("torchtitan", "a job config of torchtitan (TOML)", "training.steps=1000"),
    )
    for peer, source, override in rows:
        command = f"from-{peer.lower()}"
        convert = actions.add_parser(
            command,
            help=f"convert a config of {peer}",
            description=f"Convert {source} to a config of maxpipe. The command reports every\n"
            f"key of the file: converted, different in meaning, without an equivalent, or at a\n"
            f"default of {peer} that needs no setting. A model that maxpipe does not have is an\n"
            "error.",
            epilog=f"example: maxpipe config {command} FILE {override} --devices 8 --out run.yml",
        )
        convert.add_argument("file", metavar="FILE", help=source)
        about = f"overrides of {peer}'s keys, such as {override}, or of maxpipe's keys, such as "
        about += f"train.batch_size=8; a name that both have is {peer}'s"
        convert.add_argument("overrides", nargs="*", metavar="key=value", default=(), help=about)
        convert.add_argument(
            "--devices",
            type=count,
            metavar="N",
            help="number of devices of the run, which determines the batch size (default: the "
            "fewest that the mesh allows)",
        )
        about = "config file to write (default: standard output)"
        convert.add_argument("--out", metavar="FILE", help=about)
        convert.add_argument(_OVERWRITE, action="store_true", help="replace an existing file")
        convert.set_defaults(command=_config_from_peer, peer=peer)


def _config_from_peer(options: argparse.Namespace) -> int:
    from maxpipe.config.migration import maxtext, torchtitan

    file = expand_path(options.file, "command line: FILE")
    path = None if options.out is None else _printable_path(options.out, "command line: --out")
    convert = (maxtext if options.peer == maxtext.NAME else torchtitan).convert
    found = convert(str(file), options.overrides, options.devices)
    found.load()  # raises ConfigError if the settings violate a rule
    text = found.render()
    if path:
        _write(path, text, overwrite=options.overwrite)
    else:
        print(text, end="")
    lines = [line for title, entries in found.report() for line in (title, *entries)]
    for line in (*lines, found.summary()):
        print(redact.redact_for_terminal(line), file=sys.stderr)
    if path:
        print(f"wrote {path}", file=sys.stderr)
        print(f"check it: maxpipe plan {shlex.quote(str(path))}", file=sys.stderr)
    return ExitCode.DONE


FIRST_RUN = "run.yml"


def _list(options: argparse.Namespace) -> int:
    from maxpipe.config import config_files

    rows = [(c.name, c.kind, c.summary) for c in config_files.bundled_configs().values()]
    names, kinds = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, kind, about in rows:
        print(f"{name:{names}}  {kind:{kinds}}  {about}")
    print("\nTrain a run:                        maxpipe train quickstart")
    print("Train a model with your run config: maxpipe train llama3-8b my-run.yml")
    print("Fine-tune model base/ on chats.jsonl: maxpipe train llama3-8b-sft")
    return ExitCode.DONE


def _show(options: argparse.Namespace) -> int:
    print(_find_bundled(options.name).text, end="")
    return ExitCode.DONE


def _copy(options: argparse.Namespace) -> int:
    from maxpipe.config import config_files

    config = _find_bundled(options.name)
    file = f"{config.name}{config_files.SUFFIX}"
    path = _printable_path(options.file or file, "command line: FILE")
    if os.path.isdir(path):
        path /= file
    _write(path, config.text, overwrite=options.overwrite)
    print(f"wrote {path}")
    if config.kind != "model":
        print(f"train it: {_train(path)}")
    else:
        print(f"train it with your run config: {_train(path)} my-run.yml")
    return ExitCode.DONE


def _init(options: argparse.Namespace) -> int:
    from maxpipe.config.render import render_first_config
    from maxpipe.config.rules import folder_name

    folder = _printable_path(options.folder, "command line: DIR")
    path = folder / FIRST_RUN
    name = folder_name(os.path.basename(os.path.abspath(folder)))
    if os.path.exists(folder) and not os.path.isdir(folder):
        rule = "must be a folder or a new path, but is a file."
        raise ConfigError.one(
            Code.CLI_OUTPUT, "command line: DIR", folder, rule, f"Name {folder}-run."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    _write(path, render_first_config(name, _train(path)), overwrite=False)
    print(f"wrote {path}")
    print(f"check it: maxpipe doctor {shlex.quote(str(path))}")
    print(f"train it: {_train(path)}")
    return ExitCode.DONE


def _printable_path(given: str, where: str) -> Path:
    if not given or not given.isprintable():
        rule = "must be a non-empty path of printable characters."
        raise ConfigError.one(Code.CLI_VALUE, where, ascii(given), rule, "Specify another path.")
    return expand_path(given, where)


def _train(path: Path) -> str:
    """Return the train command, quoted for a shell."""
    return f"maxpipe train {shlex.quote(str(path))}"


def _find_bundled(name: str) -> BundledConfig:
    from maxpipe.config import config_files
    from maxpipe.config.rules import did_you_mean

    known = config_files.bundled_configs()
    if found := known.get(name.removesuffix(config_files.SUFFIX)):
        return found
    guess = did_you_mean(Path(name).stem.lower(), known)
    rule = f"is not a bundled config: the bundled configs are {', '.join(known)}."
    action = f"Did you mean {guess}?" if guess else "See `maxpipe configs list`."
    raise ConfigError.one(
        Code.CFG_FILE, f"command line: {name or 'an empty argument'}", None, rule, action
    )


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    from maxpipe.config.config_files import SUFFIX, SUFFIXES

    if path.suffix not in SUFFIXES:
        rule = f"must end in {' or '.join(SUFFIXES)}, like all config files."
        raise ConfigError.one(
            Code.CLI_OUTPUT, "command line: FILE", path, rule, f"Write {path}{SUFFIX}."
        )
    try:
        if overwrite and path.exists() and not path.is_file():
            raise UnsafeFileError(errno.EINVAL, "it is not a regular file", str(path))
        # With `overwrite`, symlinks are replaced rather than written to.
        target = path.with_name(f".{path.name}.{secrets.token_hex(8)}") if overwrite else path
        with open(target, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
                if overwrite:
                    os.replace(target, path)
            except BaseException:  # leave no partial file after Ctrl-C or on a full disk
                target.unlink()
                raise
    except FileExistsError as error:
        another = path.with_name(f"{path.stem}-2{path.suffix}")
        action = f"Specify another file, such as {another}, or add {_OVERWRITE}."
        if path.name == FIRST_RUN:
            action = f"Train it with `{_train(path)}`, or specify another folder."
        raise ConfigError.one(
            Code.CLI_OUTPUT, f"{path}", None, "already exists.", action
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError.unwritable(path, error, "Specify a writable path.")


def add_configs(commands: Commands) -> None:
    """Add the `configs` and `init` commands."""
    about = "list, show and copy the bundled configs"
    parser = commands.add_parser(
        "configs",
        help=about,
        description=f"{capitalize_first(about)}: models, and runs that train\n"
        "without changes. Every command that accepts a config file also accepts these names.",
    )
    actions = subcommands(parser)
    listed = actions.add_parser("list", help="list the bundled configs")
    listed.set_defaults(command=_list)
    show = actions.add_parser("show", help="print a bundled config")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(command=_show)
    copy = actions.add_parser(
        "copy",
        help="copy a bundled config for editing",
        description="Copy a bundled config to the current folder or to FILE. The command fails if\n"
        "the file exists, unless --overwrite is set.",
        epilog="example: maxpipe configs copy quickstart my-run.yml",
    )
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("file", metavar="FILE", nargs="?", default="")
    copy.add_argument(_OVERWRITE, action="store_true", help="replace an existing file")
    copy.set_defaults(command=_copy)
    parser.command_names = tuple(actions.choices)

    init = commands.add_parser(
        "init",
        help="write a commented starter config",
        description=f"Write DIR/{FIRST_RUN}, the config of a small model that trains in minutes\n"
        "on a CPU. Every key has a comment. Edit the file for your own run.",
        epilog="example: maxpipe init first && maxpipe train first/run.yml",
    )
    init.add_argument("folder", metavar="DIR")
    init.set_defaults(command=_init)
