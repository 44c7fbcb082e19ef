"""What commands share: the parser that explains mistakes, kinds of arguments, files they write."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from maxpipe.errors import ConfigError, StorageError

INPUTS_HELP = "config files, merged left to right, then section.key=value overrides"


class Parser(argparse.ArgumentParser):
    """Reports mistakes as every other part of maxpipe does."""

    def __init__(self, *args, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **options)
        self.command_names: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        see = f"See `{self.prog} --help`."
        choice = re.search(r"invalid choice: '(.*?)' \(", message)
        if choice and self.command_names:
            from maxpipe.config.check import did_you_mean

            guess = did_you_mean(choice[1], self.command_names)
            rule = f"is not a command: the commands are {', '.join(self.command_names)}."
            action = f"Did you mean `{self.prog} {guess}`?" if guess else see
            raise ConfigError.one(f"command line: {self.prog} {choice[1]}", None, rule, action)
        if "arguments are required: COMMAND" in message:
            message = f"a command is required: {', '.join(self.command_names)}"
        raise ConfigError.one(f"command line: {self.prog}", None, f"{message}.", see)


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]
else:  # it has no parameter when it runs
    Commands = argparse._SubParsersAction


def subcommands(parser: Parser) -> Commands:
    """Where the commands of a command are added."""
    return parser.add_subparsers(
        metavar="COMMAND", dest="command_name", required=True, parser_class=Parser
    )


def add_inputs(parser: argparse.ArgumentParser, first: str = "", about: str = "") -> None:
    """The config of a command; `first` and `about` name what else may come before it."""
    parser.add_argument(
        "inputs", nargs="*", metavar=f"{first}FILE|section.key=value", help=about + INPUTS_HELP
    )


RUN, CHECKPOINT, STEP = "RUN", "RUN[@STEP]", "RUN@STEP"
"""How an argument is shown that `maxpipe.checkpoint.address` reads."""


def add_address(
    parser: argparse.ArgumentParser,
    name: str = "",
    *,
    step: bool = True,
    needed: bool = False,
    about: str = "",
) -> None:
    """A run, or with `step` one of its checkpoints; `needed` if the step has no default."""
    shown = CHECKPOINT if step else RUN
    if step:
        about = about or "RUN@STEP, RUN@newest, RUN@best, or the path to a checkpoint's folder"
    parser.add_argument(
        name or ("checkpoint" if step else "run"),
        metavar=STEP if needed else shown,
        help=about or "folder of a run, its name below runs/, or gs://...",
    )


def integer(text: str) -> int:
    """The type of an argument."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not an integer") from None


def count(text: str) -> int:
    """The type of an argument that is at least 1."""
    found = integer(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return found


def number(text: str) -> float:
    """The type of an argument."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def write_file(path: str | Path, option: str, writer: Callable[[Path], object]) -> None:
    """Writes the file that an option names."""
    try:
        writer(Path(path))
    except OSError as error:
        raise StorageError(
            f"command line: {option} = {path}\n"
            f"  cannot be written: {error.strerror or error}.\n"
            "  Name a file in a folder that exists and can be written."
        ) from error
