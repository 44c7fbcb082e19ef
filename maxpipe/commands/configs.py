"""`maxpipe configs` and `maxpipe init`: configs to list, copy and start from."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
from pathlib import Path

from maxpipe.boundary.files import full
from maxpipe.commands.parser import Commands, subcommands
from maxpipe.config import shipped
from maxpipe.errors import ConfigError, ExitCode, StorageError
from maxpipe.words import sentence

FIRST_RUN = "run.yml"
_OVERWRITE = "--overwrite"


def _list(options: argparse.Namespace) -> int:
    rows = [(each.name, each.kind, each.about) for each in shipped.configs().values()]
    names, kinds = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, kind, about in rows:
        print(f"{name:{names}}  {kind:{kinds}}  {about}")
    print("\nTrain a run: maxpipe train quickstart. A model merges with a run of yours:")
    print("maxpipe train llama3-8b my-run.yml")
    print("One for sft trains a model's folder, base, on chats.jsonl: maxpipe train llama3-8b-sft")
    return ExitCode.DONE


def _show(options: argparse.Namespace) -> int:
    print(_named(options.name).text, end="")
    return ExitCode.DONE


def _copy(options: argparse.Namespace) -> int:
    found = _named(options.name)
    path = _printable_path(options.file or f"{found.name}{shipped.SUFFIX}", "command line: FILE")
    if os.path.isdir(path):
        path /= f"{found.name}{shipped.SUFFIX}"
    _write(path, found.text, overwrite=options.overwrite)
    print(f"wrote {path}")
    if found.kind != "model":
        print(f"train it: {_train(path)}")
    else:
        print(f"train it with a run of yours: {_train(path)} my-run.yml")
    return ExitCode.DONE


def _init(options: argparse.Namespace) -> int:
    from maxpipe.config.first_run import text
    from maxpipe.config.rules import folder_name

    folder = _printable_path(options.folder, "command line: DIR")
    path = folder / FIRST_RUN
    name = folder_name(os.path.basename(os.path.abspath(folder)))
    if os.path.exists(folder) and not os.path.isdir(folder):
        rule = "is a file, and must be a folder, or free."
        raise ConfigError.one("command line: DIR", folder, rule, f"Name {folder}-run.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    _write(path, text(name, _train(path)), overwrite=False)
    print(f"wrote {path}")
    print(f"check it: maxpipe doctor {shlex.quote(str(path))}")
    print(f"train it: {_train(path)}")
    return ExitCode.DONE


def _printable_path(given: str, where: str) -> Path:
    """A path without characters that messages and comments would have to escape."""
    if not given or not given.isprintable():
        rule = "must be a path of characters that can be printed."
        raise ConfigError.one(where, ascii(given), rule, "Name another one.")
    return full(given, where)


def _train(path: Path) -> str:
    """The command line, quoted for a shell."""
    return f"maxpipe train {shlex.quote(str(path))}"


def _named(name: str) -> shipped.Shipped:
    from maxpipe.config.rules import did_you_mean

    known = shipped.configs()
    if found := known.get(name.removesuffix(shipped.SUFFIX)):
        return found
    guess = did_you_mean(Path(name).stem.lower(), known)
    rule = f"is not a config that maxpipe ships: they are {', '.join(known)}."
    action = f"Did you mean {guess}?" if guess else "See `maxpipe configs list`."
    raise ConfigError.one(f"command line: {name or 'an empty argument'}", None, rule, action)


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Writes a config that can be read back; an existing file stays unless `overwrite`."""
    from maxpipe.config.inputs import SUFFIXES

    if path.suffix not in SUFFIXES:
        rule = f"must end in {' or '.join(SUFFIXES)}, as config files do."
        raise ConfigError.one("command line: FILE", path, rule, f"Write {path}{shipped.SUFFIX}.")
    try:
        # A link, or a pipe without a reader, is replaced and not written to.
        target = path.with_name(f".{path.name}.{secrets.token_hex(8)}") if overwrite else path
        with open(target, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
                if overwrite:
                    os.replace(target, path)
            except BaseException:  # a full disk or Ctrl-C leaves no partial file
                target.unlink()
                raise
    except FileExistsError as error:
        another = path.with_name(f"{path.stem}-2{path.suffix}")
        action = f"Name another file, such as {another}, or add {_OVERWRITE}."
        if path.name == FIRST_RUN:
            action = f"Train it with `{_train(path)}`, or name another folder."
        raise ConfigError.one(f"{path}", None, "is there already.", action) from error
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError.unwritable(path, error, "Name a place that can be written.")


def add(commands: Commands) -> None:
    """Adds both commands."""
    about = "list, show and copy the configs that maxpipe ships"
    parser = commands.add_parser(
        "configs",
        help=about,
        description=f"{sentence(about)}: runs that train as they are, and\n"
        "models. Every command that takes a config file takes their names, too.",
    )
    actions = subcommands(parser)
    listed = actions.add_parser("list", help="name and content of each")
    listed.set_defaults(command=_list)
    show = actions.add_parser("show", help="print one")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(command=_show)
    copy = actions.add_parser(
        "copy",
        help="copy one, to change it",
        description="Copy a config into the current folder, or to FILE. What is there stays.",
        epilog="example: maxpipe configs copy quickstart my-run.yml",
    )
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("file", metavar="FILE", nargs="?", default="")
    copy.add_argument(_OVERWRITE, action="store_true", help="replace the file if it is there")
    copy.set_defaults(command=_copy)
    parser.command_names = tuple(actions.choices)

    init = commands.add_parser(
        "init",
        help="write a first run of your own, with comments",
        description=f"Write DIR/{FIRST_RUN}: a small model that trains in minutes on a CPU, with\n"
        "a comment for every key, to be changed into your own.",
        epilog="example: maxpipe init first && maxpipe train first/run.yml",
    )
    init.add_argument("folder", metavar="DIR")
    init.set_defaults(command=_init)
