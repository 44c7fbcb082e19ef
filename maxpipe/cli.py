"""Parse the `maxpipe` command line, run the selected command, and return its exit code.

Commands import heavy modules lazily, so that `--help`, `config` and `schedule` do not import jax.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

import maxpipe
from maxpipe.commands import (
    board,
    checkpoints,
    completion,
    config,
    data,
    distill,
    doctor,
    eval,
    explain,
    fetch,
    generate,
    huggingface,
    launch,
    plan,
    profile,
    report,
    schedule,
    tokenizer,
)
from maxpipe.commands.parser import Parser, add_inputs, print_notes, subcommands
from maxpipe.errors import (
    Code,
    ExitCode,
    MaxpipeError,
    StorageError,
    format_exit_codes,
    out_of_memory_error,
)
from maxpipe.io import redact


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    redact.register_secrets(argv)
    _open_streams()
    try:
        return _flush_output(_run_and_report(argv))
    except SystemExit as leaving:  # argparse, after --help
        raise SystemExit(_flush_output(leaving.code)) from None


def _run_and_report(argv: list[str]) -> int:
    """Run the command, print errors, and return the exit code."""
    try:
        return _run(argv)
    except MaxpipeError as error:
        _complain(redact.redact_for_terminal(str(error)))
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return int(ExitCode.DONE)  # the reader, e.g. `head`, has closed the pipe
    except MemoryError as error:
        _complain(redact.redact_for_terminal(str(out_of_memory_error(error))))
        return int(ExitCode.CONFIG)
    except BaseException as error:  # Rust panics are not `Exception`s
        plugins = sys.modules.get("maxpipe.config.plugins")  # not imported for --help
        if problem := plugins and plugins.find_plugin_error(error):
            _complain(redact.redact_for_terminal(str(problem)))
            return int(problem.exit_code)
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, OSError) and (trouble := _flush_error(sys.stdout, "\n")):
            return _report_write_error(trouble)
        _complain(redact.redact_text(traceback.format_exc()).rstrip("\n"))
        _complain(
            f"maxpipe {maxpipe.__version__}: this is a bug in maxpipe. The traceback above shows "
            "where it occurred."
        )
        return int(ExitCode.BUG)


def _open_streams() -> None:
    """Reopen closed standard streams on /dev/null, so that other files cannot reuse their
    descriptors.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)


def _flush_error(stream: TextIO, text: str = "") -> Exception | None:
    """Write `text` and flush the stream. If that fails, return the exception."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        return error
    return None


def _report_write_error(trouble: Exception) -> int:
    text = (
        f"standard output: cannot be written\n  {getattr(trouble, 'strerror', None) or trouble}.\n"
        "  Free disk space, or redirect the output to another file."
    )
    error = StorageError(Code.IO_UNWRITABLE, text)
    _complain(str(error))
    return int(error.exit_code)


def _flush_output(code: object) -> Any:
    """Flush stdout and stderr, and return the exit code. Python would otherwise report a failed
    flush again at exit.
    """
    for stream in (sys.stdout, sys.stderr):
        if trouble := _flush_error(stream):
            _discard(stream)
            if stream is sys.stdout and not code and not isinstance(trouble, BrokenPipeError):
                code = _report_write_error(trouble)
    return code


def _discard(stream: TextIO) -> None:
    """Redirect the stream to /dev/null, and discard its buffered output."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _run(argv: list[str]) -> int:
    from maxpipe.api.arguments import running_command

    options = parse(argv)
    with running_command():
        return options.command(options)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options of a command line; `command` is the function that runs it.

    Raises:
        ConfigError: the command line is not valid.
    """
    parser = command_line_parser()
    options, rest = parser.parse_known_args(argv)
    if any(each.partition("=")[0] == "--config" for each in rest):
        argv = options.parser.expand_config_option(argv)
        options, rest = parser.parse_known_args(argv)
    if any(each.startswith("-") for each in rest):
        options, rest = parser.parse_known_args(options.parser.join_option_values(argv))
        options.parser.reject_unknown([each for each in rest if each.startswith("-")])
    # argparse ends a list of positional arguments at the first option, so arguments after an option
    # are appended here.
    if hasattr(options, "inputs"):
        options.inputs += rest  # `load` separates files from overrides, and rejects options
    elif hasattr(options, "overrides") and not any(each.startswith("-") for each in rest):
        options.overrides = [*options.overrides, *rest]
    elif rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


# Commands.


def _train(options: argparse.Namespace) -> int:
    from maxpipe.api.config import load_config

    loaded = load_config(*options.inputs, to_train=True)
    print_notes(loaded)
    from maxpipe.api.trainer import run_training

    run_training(loaded)
    if _flush_error(sys.stdout):  # the run succeeded even if stdout cannot be written to
        _discard(sys.stdout)
    return ExitCode.DONE


# Arguments.


def command_line_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="maxpipe",
        description="Train decoder language models with pipeline parallelism in JAX.",
        epilog=f"exit codes, and the action of a restart rule:\n{format_exit_codes()}\n\n"
        "`maxpipe explain CODE` explains the code in an error message, such as MP-MEM-001.",
    )
    parser.add_argument("--version", action="version", version=f"maxpipe {maxpipe.__version__}")
    commands = subcommands(parser)

    train = commands.add_parser(
        "train",
        help="train or resume a run",
        description="Train the run defined by config files and overrides. If the run folder\n"
        "contains a checkpoint, training resumes from it.",
        epilog="example: maxpipe train quickstart train.steps=100",
    )
    add_inputs(train)
    train.set_defaults(command=_train)

    launch.add(commands)
    plan.add(commands)
    config.add(commands)
    schedule.add(commands)
    checkpoints.add(commands)
    eval.add(commands)
    generate.add(commands)
    fetch.add(commands)
    huggingface.add(commands)
    board.add_goodput(commands)
    profile.add(commands)
    board.add_curves(commands)
    report.add(commands)
    board.add(commands)
    tokenizer.add(commands)
    data.add(commands)
    distill.add(commands)
    doctor.add(commands)
    explain.add(commands)
    config.add_configs(commands)
    completion.add(commands, parser)
    parser.command_names = tuple(commands.choices)
    return parser
