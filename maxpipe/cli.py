"""The `maxpipe` command: arguments in, exit code out.

Imports of the work stand inside the commands, so that `--help`, `config` and
`schedule` start without jax.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import maxpipe
from maxpipe import redact
from maxpipe.commands import checkpoints, config, doctor, goodput, launch, plan, schedule
from maxpipe.commands.parser import Parser, add_inputs, subcommands
from maxpipe.errors import ExitCode, MaxpipeError, out_of_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except MaxpipeError as error:
        print(_shown(error), file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough. Python would complain once more when
        # it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.DONE)
    except MemoryError as error:
        print(_shown(out_of_memory(error)), file=sys.stderr)
        return int(ExitCode.CONFIG)
    except Exception:
        print(redact.text(traceback.format_exc()), end="", file=sys.stderr)
        print(
            f"maxpipe {maxpipe.__version__}: this is a bug in maxpipe. The lines above say where.",
            file=sys.stderr,
        )
        return int(ExitCode.BUG)


def _shown(error: MaxpipeError) -> str:
    """The message without secrets, and without characters that a terminal would obey."""
    text = redact.text(str(error))
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def _run(argv: list[str]) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if hasattr(options, "inputs"):
        # argparse stops filling a list of positionals at the first option; `load` sorts out
        # what is a file, an override or neither.
        options.inputs += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options.command(options)


# Commands.


def _train(options: argparse.Namespace) -> int:
    from maxpipe.config.load import load

    loaded = load(options.inputs)
    from maxpipe.train.loop import train

    return train(loaded)


# Arguments.


def _parser() -> Parser:
    parser = Parser(
        prog="maxpipe",
        description="Train decoder language models through a circular pipeline, on JAX.",
        epilog="Exit codes: 0 done, 2 mistake in the config or command line, or numbers that went\n"
        "bad: change something first, 70 bug in maxpipe, 71 hang, 74 storage, checkpoint or\n"
        "device memory, 75 stopped and saved: start again to resume.",
    )
    parser.add_argument("--version", action="version", version=f"maxpipe {maxpipe.__version__}")
    commands = subcommands(parser)

    train = commands.add_parser(
        "train",
        help="train, or resume, the run that files and overrides describe",
        description="Train the run that files and overrides describe. A run whose folder has a\n"
        "checkpoint resumes there.",
        epilog="example: maxpipe train configs/quickstart.yml train.steps=100",
    )
    add_inputs(train)
    train.set_defaults(command=_train)

    launch.add(commands)
    plan.add(commands)
    config.add(commands)
    schedule.add(commands)
    checkpoints.add(commands)
    goodput.add(commands)
    doctor.add(commands)
    parser.command_names = tuple(commands.choices)
    return parser
