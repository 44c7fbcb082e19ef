"""The `maxpipe` command: arguments in, exit code out.

Imports of the work stand inside the commands, so that `--help`, `config` and
`schedule` start without jax.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import maxpipe
from maxpipe.errors import ConfigError, ExitCode, MaxpipeError, StorageError

_INPUTS_HELP = "config files, merged left to right, then section.key=value overrides"
_DOCS_FILE = Path("docs/config.md")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except MaxpipeError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough. Python would complain once more when
        # it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.DONE)
    except Exception:
        traceback.print_exc()
        print(
            f"maxpipe {maxpipe.__version__}: this is a bug in maxpipe. The lines above say where.",
            file=sys.stderr,
        )
        return int(ExitCode.BUG)


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


def _config_print(options: argparse.Namespace) -> int:
    from maxpipe.config import load, render

    print(render.print_config(load.load(options.inputs), origin=options.origin), end="")
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


def _config_docs(options: argparse.Namespace) -> int:
    from maxpipe.config import render

    text = render.markdown()
    if not _DOCS_FILE.parent.is_dir():
        raise ConfigError.one(
            f"{Path.cwd()}",
            None,
            f"has no folder {_DOCS_FILE.parent}/, in which this command writes {_DOCS_FILE.name}.",
            "Run it in the root of a checkout of maxpipe.",
        )
    if options.check:
        if not _DOCS_FILE.is_file() or _DOCS_FILE.read_text(encoding="utf-8") != text:
            print(f"{_DOCS_FILE} is stale. Run `maxpipe config docs`.", file=sys.stderr)
            return 1
    else:
        try:
            _DOCS_FILE.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{_DOCS_FILE}: cannot be written: {error.strerror}.") from error
    return ExitCode.DONE


def _schedule(options: argparse.Namespace) -> int:
    name, sizes = _schedule_sizes(options)
    if sizes["group"] and name != "interleaved":
        raise ConfigError.one(
            "command line: --group",
            sizes["group"],
            f"is read by the schedule interleaved only, and the schedule is {name}.",
            "Leave out --group, or draw `maxpipe schedule interleaved`.",
        )
    from maxpipe.pipeline import draw, schedule

    placed = schedule.build(
        name,
        stages=sizes["stages"],
        repeats=sizes["repeats"],
        microbatches=sizes["microbatches"],
        group=sizes["group"],
    )
    print(draw.text(placed, width=shutil.get_terminal_size().columns))
    return ExitCode.DONE


def _schedule_sizes(options: argparse.Namespace) -> tuple[str, dict[str, int]]:
    """Name and sizes of the schedule: options, then files, then an example that fits a screen."""
    from typing import get_args

    from maxpipe.config.check import did_you_mean
    from maxpipe.config.schema import ScheduleName

    inputs = list(options.inputs)
    names = get_args(ScheduleName)
    name = inputs.pop(0) if inputs and inputs[0] in names else None
    if inputs and re.fullmatch(r"\w+", inputs[0]):
        guess = did_you_mean(inputs[0], names) or "interleaved"
        rule = f"is not a schedule: the schedules are {', '.join(names)}."
        action = f"Did you mean `maxpipe schedule {guess}`?"
        raise ConfigError.one(f"command line: {inputs[0]}", None, rule, action)
    if inputs:
        from maxpipe.config.check import axis_size
        from maxpipe.config.load import load

        config = load(inputs).config
        name = name or config.pipeline.schedule
        stages = axis_size(config.mesh, "stage") or options.stages
        if stages is None:
            raise ConfigError.one(
                "mesh.ici_stage",
                config.mesh.ici_stage,
                "depends on the number of devices, which are not looked at here.",
                "Add --stages with the number of stages.",
            )
        sizes = {key: getattr(config.pipeline, key) for key in ("repeats", "microbatches", "group")}
        sizes |= {"stages": stages, "group": sizes["group"] if name == "interleaved" else 0}
    else:
        name = name or "interleaved"
        repeats = 1 if name in ("gpipe", "1f1b") else 2
        sizes = {"stages": 4, "repeats": repeats, "microbatches": 8, "group": 0}
    given = {key: getattr(options, key) for key in sizes if getattr(options, key) is not None}
    return name, sizes | given


def _checkpoints_list(options: argparse.Namespace) -> int:
    from maxpipe import checkpoint

    checkpoint.print_list(options.run_dir)
    return ExitCode.DONE


def _checkpoints_show(options: argparse.Namespace) -> int:
    from maxpipe import checkpoint

    checkpoint.print_show(options.run_dir, options.step)
    return ExitCode.DONE


# Arguments.


class _Parser(argparse.ArgumentParser):
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


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not an integer") from None


def _parser() -> _Parser:
    parser = _Parser(
        prog="maxpipe",
        description="Train decoder language models through a circular pipeline, on JAX.",
        epilog="Exit codes: 0 done, 2 mistake in the config or command line, 70 bug in maxpipe,\n"
        "71 hang, 74 storage or checkpoint, 75 stopped and saved: start again to resume.",
    )
    parser.add_argument("--version", action="version", version=f"maxpipe {maxpipe.__version__}")
    commands = _commands(parser)

    train = commands.add_parser(
        "train",
        help="train, or resume, the run that files and overrides describe",
        description="Train the run that files and overrides describe. A run whose folder has a\n"
        "checkpoint resumes there.",
        epilog="example: maxpipe train configs/quickstart.yml train.steps=100",
    )
    train.add_argument("inputs", nargs="*", metavar="FILE|section.key=value", help=_INPUTS_HELP)
    train.set_defaults(command=_train)

    _add_config(commands)
    _add_schedule(commands)
    _add_checkpoints(commands)
    parser.command_names = tuple(commands.choices)
    return parser


def _commands(parser: _Parser) -> argparse._SubParsersAction[_Parser]:
    return parser.add_subparsers(
        metavar="COMMAND", dest="command_name", required=True, parser_class=_Parser
    )


def _add_config(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "print, explain and document config values"
    parser = commands.add_parser("config", help=about, description=f"{about.capitalize()}.")
    actions = _commands(parser)

    show = actions.add_parser(
        "print",
        help="print the whole config that files and overrides give",
        description="Print every value of the config that files and overrides give, defaults\n"
        "included, after all checks that need no devices.",
        epilog="example: maxpipe config print configs/quickstart.yml train.steps=100 --origin",
    )
    show.add_argument("inputs", nargs="*", metavar="FILE|section.key=value", help=_INPUTS_HELP)
    show.add_argument("--origin", action="store_true", help="say where each value comes from")
    show.set_defaults(command=_config_print)

    explain = actions.add_parser(
        "explain",
        help="type, default and meaning of a key or section",
        description="Print type, default, allowed values and meaning of a key, the keys of a\n"
        "section, or the sections.",
        epilog="example: maxpipe config explain pipeline.schedule",
    )
    explain.add_argument("key", nargs="?", default="", metavar="KEY", help="section.key or section")
    explain.set_defaults(command=_config_explain)

    schema = actions.add_parser("schema", help="print a JSON schema, for editors")
    schema.set_defaults(command=_config_schema)

    docs = actions.add_parser("docs", help=f"write {_DOCS_FILE} of a checkout")
    docs.add_argument("--check", action="store_true", help="only compare; exit with 1 when stale")
    docs.set_defaults(command=_config_docs)
    parser.command_names = tuple(actions.choices)


def _add_schedule(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "schedule",
        help="draw a pipeline schedule",
        description="Draw a pipeline schedule: by name, or the one that files and overrides give.",
        epilog="examples:\n  maxpipe schedule 1f1b --stages 4 --microbatches 8\n"
        "  maxpipe schedule configs/quickstart.yml pipeline.repeats=2",
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="NAME|FILE|section.key=value",
        help=f"name of a schedule, by default interleaved; {_INPUTS_HELP}",
    )
    for option, about in (
        ("stages", "pipeline stages"),
        ("repeats", "visits of a microbatch to each stage"),
        ("microbatches", "pieces of the batch"),
        ("group", "microbatches run back to back (interleaved); 0: the number of stages"),
    ):
        parser.add_argument(f"--{option}", type=_integer, metavar="NUMBER", help=about)
    parser.set_defaults(command=_schedule)


def _add_checkpoints(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "list and inspect the checkpoints of a run"
    parser = commands.add_parser("checkpoints", help=about, description=f"{about.capitalize()}.")
    actions = _commands(parser)

    listed = actions.add_parser("list", help="checkpoints of a run folder")
    listed.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    listed.set_defaults(command=_checkpoints_list)

    show = actions.add_parser("show", help="content of one checkpoint")
    show.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    show.add_argument("--step", type=_integer, metavar="NUMBER", help="by default the newest")
    show.set_defaults(command=_checkpoints_show)
    parser.command_names = tuple(actions.choices)
