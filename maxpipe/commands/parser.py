"""Argument parser, argument types and output-file handling shared by all commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import files, redact

INPUTS_HELP = (
    "config files or names of bundled configs (`maxpipe configs list`), merged left to right, "
    "then section.key=value overrides; `--config FILE` is the same as FILE"
)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as `ConfigError`."""

    def __init__(self, *args, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **options)
        self.command_names: tuple[str, ...] = ()
        # The innermost parser, which belongs to the command, overrides the value set by outer
        # parsers.
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        see = f"See `{self.prog} --help`."
        choice = re.search(r"invalid choice: '(.*?)' \(", message)
        if choice and self.command_names:
            from maxpipe.config.foreign_keys import match_command

            guess = match_command(choice[1], self.command_names)
            rule = f"is not a command: the commands are {', '.join(self.command_names)}."
            action = guess.action or see
            action = f"Did you mean `{self.prog} {guess.name}`?" if guess.name else action
            raise ConfigError.one(
                Code.CLI_USAGE, f"command line: {self.prog} {choice[1]}", None, rule, action
            )
        if "arguments are required: COMMAND" in message:
            message = f"a command is required: {', '.join(self.command_names)}"
        raise ConfigError.one(
            Code.CLI_USAGE, f"command line: {self.prog}", None, f"{message}.", see
        )

    def reject_unknown(self, unknown: Sequence[str]) -> None:
        """Reject the first unknown option that resembles one of this command's options.

        Raises:
            ConfigError: an unknown option resembles a known option; the message suggests the known
            option.
        """
        from maxpipe.config.rules import did_you_mean

        known = [each for each in self._option_string_actions if each.startswith("--")]
        known.remove("--help")
        for option in unknown:
            name, _, value = option.partition("=")
            kind = f"--{Path(value).suffix.removeprefix('.')}"
            # The common prefix "--" would make short names appear similar.
            close = did_you_mean(name.lstrip("-"), [each.lstrip("-") for each in known])
            guess = f"--{close}" if close and not self._is_key(name) else ""
            guess = next(
                (each for each in known if _normalize_option(each) == _normalize_option(name)),
                guess,
            )
            guess = kind if name in _OUTPUTS and kind in known else guess
            if guess:
                where, rule = f"command line: {name}", f"is not an option of `{self.prog}`."
                action = f"Write {f'{guess} {value}'.rstrip()}."
                raise ConfigError.one(Code.CLI_USAGE, where, value or None, rule, action)

    def _is_key(self, option: str) -> bool:
        """Return whether the option is a config key and this command accepts overrides."""
        from maxpipe.config.foreign_keys import match_exact_key
        from maxpipe.config.schema import KEYS

        takes = any(action.dest == "inputs" for action in self._actions)
        return takes and match_exact_key(option.lstrip("-").split("."), KEYS) is not None

    def expand_config_option(self, argv: Sequence[str]) -> list[str]:
        """Replace `--config FILE` with FILE if this command accepts config files."""
        takes = any(action.dest == "inputs" for action in self._actions)
        if not takes or "--config" in self._option_string_actions:
            return list(argv)
        parts = list(argv)
        for place, argument in enumerate(parts):
            if argument.startswith("--config="):
                parts[place] = argument.removeprefix("--config=")
        return [
            each
            for place, each in enumerate(parts)
            if each != "--config" or place + 1 == len(parts)
        ]

    def join_option_values(self, argv: Sequence[str]) -> list[str]:
        """Replace `--option value` with `--option=value` for unknown options."""
        parts: list[str] = []
        for argument in argv:
            before = parts[-1] if parts else ""
            is_value = not argument.startswith("-") and not re.search(r"=|\.ya?ml$", argument)
            if (
                is_value
                and re.fullmatch(r"--?[a-zA-Z][^=]*", before)
                and (before not in self._option_string_actions)
            ):
                parts[-1] = f"{before}={argument}"
            else:
                parts.append(argument)
        return parts


def _normalize_option(option: str) -> str:
    """Return the option name in lower case, without hyphens or underscores."""
    return re.sub("[-_]", "", option).lower()


_OUTPUTS = ("--write", "--output", "--out", "--save", "--file", "-o")
"""Names of output options in other programs, which users may type by mistake. If the command has an
option for the given file's suffix, such as `--svg`, the error suggests that option."""

if TYPE_CHECKING:
    from maxpipe.config.load import LoadedConfig

    Commands = argparse._SubParsersAction[Parser]
else:  # argparse's class has no type parameters at run time
    Commands = argparse._SubParsersAction


def subcommands(parser: Parser) -> Commands:
    """Add subcommands to a parser."""
    return parser.add_subparsers(
        metavar="COMMAND", dest="command_name", required=True, parser_class=Parser
    )


def add_inputs(parser: argparse.ArgumentParser, first: str = "", about: str = "") -> None:
    """Add the config arguments. `first` and `about` are the metavar and the help text of an
    alternative first argument.
    """
    parser.add_argument(
        "inputs", nargs="*", metavar=f"{first}FILE|section.key=value", help=about + INPUTS_HELP
    )


def read_config(
    inputs: Sequence[str],
    *,
    to_train: bool = False,
    saved: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Load the config given by the arguments, with defaults from `saved`. Print warnings to stderr.

    Raises:
        ConfigError: the config is not valid. The error lists every problem.
    """
    from maxpipe.api.config import load_config
    from maxpipe.config.load import load

    loaded = load(inputs, saved) if saved else load_config(*inputs, to_train=to_train)
    print_notes(loaded)
    for each in loaded.warnings:
        print(redact.redact_for_terminal(f"warning: {each.line}"), file=sys.stderr, flush=True)
    return loaded


def print_notes(loaded: LoadedConfig) -> None:
    """Print notes to stderr, for example about which of several files determines the model."""
    for note in loaded.notes:
        print(redact.redact_for_terminal(note), file=sys.stderr, flush=True)


def read_data_config(inputs: Sequence[str]) -> LoadedConfig:
    """Load the config for a command that only reads documents, so that model and steps are
    optional.

    Raises:
        ConfigError: the config is not valid. The error lists every problem.
    """
    from maxpipe.config.load import PLACEHOLDER_MODEL

    return read_config(inputs, saved={"model": PLACEHOLDER_MODEL, "train": {"steps": 1}})


RUN, CHECKPOINT, STEP = "RUN", "RUN[@STEP]", "RUN@STEP"
"""Metavars of arguments that `maxpipe.checkpoint.address` parses."""
RUN_OR_FILE = "RUN|FILE"
"""Metavar of an argument that names a config or a run."""
DATA_PREFIX = "DATA|"
"""Metavar prefix for inputs that may be data files in place of a config."""


def add_address(
    parser: argparse.ArgumentParser,
    name: str = "",
    *,
    step: bool = True,
    needed: bool = False,
    about: str = "",
) -> None:
    """Add an argument for a run, or for a checkpoint if `step` is set.

    If `needed` is set, the address must include a step.
    """
    shown = CHECKPOINT if step else RUN
    if step:
        about = about or "RUN@STEP, RUN@newest, RUN@best, or the path of a checkpoint folder"
    parser.add_argument(
        name or ("checkpoint" if step else "run"),
        metavar=STEP if needed else shown,
        help=about or "run folder, name of a run in runs/, or a URL such as s3://BUCKET/PATH",
    )


def add_ema_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the EMA parameters."""
    parser.add_argument(
        "--average",
        action="store_true",
        help="use the EMA parameters (for runs with optim.ema_decay)",
    )


def integer(text: str) -> int:
    """Parse an integer argument."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not an integer") from None


def count(text: str) -> int:
    """Parse an integer that must be at least 1."""
    found = integer(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text} is below the minimum of 1")
    return found


def port(text: str) -> int:
    """Parse a TCP port; 0 selects a free port."""
    found = integer(text)
    if not 0 <= found < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 0 to 65535")
    return found


def number(text: str) -> float:
    """Parse a float argument."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def check_place(path: str | Path, option: str) -> None:
    """Check that `write_file` can write the file, before its content is computed."""
    _check_outside(path, option)
    try:
        files.check_can_write(path)
    except OSError as error:
        raise _unwritable(path, option, error) from error


def write_file(path: str | Path, option: str, writer: Callable[[Path], object]) -> None:
    """Write the output file that a command-line option names."""
    _check_outside(path, option)
    try:
        writer(Path(path))
    except OSError as error:
        raise _unwritable(path, option, error) from error


def _check_outside(path: str | Path, option: str) -> None:
    from maxpipe.checkpoint.address import check_outside_checkpoints

    check_outside_checkpoints(path, f"command line: {option}")


def _unwritable(path: str | Path, option: str, error: OSError) -> StorageError:
    return StorageError(
        Code.IO_UNWRITABLE,
        f"command line: {option} = {path}\n"
        f"  cannot be written: {error.strerror or error}.\n"
        "  Specify a file in an existing, writable folder.",
    )
