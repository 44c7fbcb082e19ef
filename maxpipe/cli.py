"""The `maxpipe` command: arguments in, exit code out.

Imports of the work stand inside the commands, so that `--help`, `config` and
`schedule` start without jax.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import maxpipe
from maxpipe.errors import ConfigError, ExitCode, MaxpipeError, StorageError

if TYPE_CHECKING:
    from maxpipe.pipeline.table import Costs, Schedule

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


def _compile(options: argparse.Namespace) -> int:
    from maxpipe.config.load import load
    from maxpipe.plan import topology

    loaded = load(options.inputs)
    target = topology.parse(options.topology, options.slices)
    topology.prepare(target)
    from maxpipe.plan.compile import compile_step
    from maxpipe.plan.report import compiled

    folder = None if options.save is None else Path(options.save).expanduser()
    report = compile_step(loaded, target, folder)
    if options.json:
        import json

        print(json.dumps(report.to_json(), indent=2))
    else:
        print(compiled(report))
        if folder is not None:
            print(f"wrote {folder}: train with runtime.executable={folder}")
    return ExitCode.DONE


def _plan(options: argparse.Namespace) -> int:
    import json

    from maxpipe.config.load import load, to_yaml
    from maxpipe.plan import plan, report, topology

    loaded = load(options.inputs)
    target = topology.parse(options.topology, options.slices)
    if options.search:
        fixed = plan.fixed_keys(loaded, options.fix)
        found = plan.best_layouts(loaded.config, target, fixed)
        print(report.searched(found, target.hardware))
        if options.write is not None:
            Path(options.write).write_text(to_yaml(found.best[0].config), encoding="utf-8")
            print(f"wrote {options.write}")
        return ExitCode.DONE
    values, nearest = plan.forecast(loaded, target)
    print(json.dumps(values, indent=2) if options.json else report.planned(values, nearest))
    return ExitCode.DONE


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
    from maxpipe.pipeline import draw, schedule
    from maxpipe.pipeline.table import Costs

    names, sizes = _schedule_names_and_sizes(options)
    if sizes["group"] and "interleaved" not in names:
        raise ConfigError.one(
            "command line: --group",
            sizes["group"],
            f"is read by the schedule interleaved only, and the schedule is {', '.join(names)}.",
            "Leave out --group, or draw `maxpipe schedule interleaved`.",
        )
    costs = Costs(*(options.costs or ()))
    placed = []
    for name in names:
        own = dict(sizes)
        if name != "interleaved":
            own["group"] = 0
        if options.compare is not None:
            own["repeats"] = _only_repeats(name) or sizes["repeats"]
        placed.append(schedule.build(name, **own))
    if options.compare is not None:
        print(draw.comparison(placed, costs))
    elif _drawings(options):
        written = _write_drawings(options, placed[0], costs)
        print(draw.summary(placed[0], costs), *(f"wrote {path}" for path in written), sep="\n")
    else:
        print(draw.text(placed[0], costs, width=shutil.get_terminal_size().columns))
    return ExitCode.DONE


_DRAWINGS = {
    "svg": "a picture for browsers and documents",
    "png": "the same picture as pixels",
    "csv": "the actions, to edit or exchange; file:FILE is then a schedule",
    "perfetto": "a trace for ui.perfetto.dev",
}


def _drawings(options: argparse.Namespace) -> dict[str, Path]:
    """Kinds of drawings that are asked for, and their files."""
    asked = {kind: getattr(options, kind) for kind in _DRAWINGS}
    return {kind: Path(path) for kind, path in asked.items() if path is not None}


def _write_drawings(options: argparse.Namespace, placed: Schedule, costs: Costs) -> list[Path]:
    from maxpipe.pipeline import notation, pictures

    writers: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: path.write_text(pictures.svg(placed, costs), encoding="utf-8"),
        "png": lambda path: pictures.png(placed, path, costs),
        "csv": lambda path: path.write_text(notation.to_csv(placed), encoding="utf-8"),
        "perfetto": lambda path: path.write_text(
            pictures.perfetto(placed, costs), encoding="utf-8"
        ),
    }
    drawings = _drawings(options)
    for kind, path in drawings.items():
        try:
            writers[kind](path)
        except OSError as error:
            raise StorageError(
                f"command line: --{kind} = {path}\n"
                f"  cannot be written: {error.strerror or error}.\n"
                "  Name a file in a folder that exists and can be written."
            ) from error
    return list(drawings.values())


def _schedule_names_and_sizes(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Names and sizes of schedules: options, then files, then an example that fits a screen."""
    from maxpipe.pipeline.schedule import FILE_PREFIX, SCHEDULES

    inputs = list(options.inputs)
    named = bool(inputs) and (inputs[0] in SCHEDULES or inputs[0].startswith(FILE_PREFIX))
    names = [inputs.pop(0)] if named else []
    if options.compare is not None:
        _check_alone(options, names)
        names = [name.strip() for name in options.compare.split(",")]
        for name in names:
            if name not in SCHEDULES and not name.startswith(FILE_PREFIX):
                raise _unknown_schedule(f"command line: --compare {name}", name)
    elif inputs and re.fullmatch(r"\w+|[^=]*\.csv", inputs[0]):
        raise _unknown_schedule(f"command line: {inputs[0]}", inputs[0])
    if inputs:
        names, sizes = _sizes_of_config(options, inputs, names)
    else:
        names = names or ["interleaved"]
        sizes = _example_sizes(names)
    given = {key: getattr(options, key) for key in sizes if getattr(options, key) is not None}
    return names, sizes | given


def _unknown_schedule(where: str, name: str) -> ConfigError:
    from maxpipe.config.rules import did_you_mean
    from maxpipe.pipeline.schedule import FILE_PREFIX, SCHEDULES

    rule = f"is not a schedule: the schedules are {', '.join(SCHEDULES)} and {FILE_PREFIX}PATH."
    is_file = name.endswith(".csv")
    guess = f"{FILE_PREFIX}{name}" if is_file else did_you_mean(name, SCHEDULES) or "interleaved"
    return ConfigError.one(where, None, rule, f"Did you mean `maxpipe schedule {guess}`?")


def _check_alone(options: argparse.Namespace, names: list[str]) -> None:
    """`--compare` names the schedules and prints a table, nothing else."""
    others = [f"{names[0]} names a schedule too"] if names else []
    others += [f"--{kind} draws one schedule" for kind in _drawings(options)]
    if others:
        rule = f"prints a table of the schedules that it names, and {others[0]}."
        action = f"Leave out --compare or {others[0].split()[0]}."
        raise ConfigError.one("command line: --compare", options.compare, rule, action)


def _sizes_of_config(
    options: argparse.Namespace, inputs: list[str], names: list[str]
) -> tuple[list[str], dict[str, Any]]:
    from maxpipe.config.load import load
    from maxpipe.config.rules import axis_size

    config = load(inputs).config
    names = names or [config.pipeline.schedule]
    stages = axis_size(config.mesh, "stage") or options.stages
    if stages is None:
        raise ConfigError.one(
            "mesh.ici_stage",
            config.mesh.ici_stage,
            "depends on the number of devices, which are not looked at here.",
            "Add --stages with the number of stages.",
        )
    return names, {
        "stages": stages,
        "repeats": config.pipeline.repeats,
        "microbatches": config.pipeline.microbatches,
        "group": config.pipeline.group if "interleaved" in names else 0,
        "delayed": config.pipeline.delayed_forwarding,
    }


def _example_sizes(names: list[str]) -> dict[str, Any]:
    """Sizes for a first look, or those of a file."""
    from maxpipe.pipeline.notation import read_orders
    from maxpipe.pipeline.schedule import FILE_PREFIX

    sizes: dict[str, Any] = {"stages": 4, "repeats": 2, "microbatches": 8, "group": 0}
    sizes["delayed"] = False
    if len(names) == 1:
        sizes["repeats"] = 1 if names[0] == "1f1b" else _only_repeats(names[0]) or 2
    for name in names:
        if name.startswith(FILE_PREFIX):
            ring, orders = read_orders(Path(name.removeprefix(FILE_PREFIX)))
            count = 1 + max(action.microbatch for order in orders for action in order)
            sizes |= {"stages": ring.num_stages, "microbatches": count}
            break
    return sizes


def _only_repeats(name: str) -> int | None:
    """The one number of repeats that a schedule has, None where it can be chosen."""
    from maxpipe.pipeline.notation import read_orders
    from maxpipe.pipeline.schedule import FILE_PREFIX, SCHEDULES

    if name.startswith(FILE_PREFIX):
        return read_orders(Path(name.removeprefix(FILE_PREFIX)))[0].num_repeats
    return SCHEDULES[name].repeats


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


def _costs(text: str) -> tuple[float, ...]:
    try:
        costs = tuple(float(part) for part in text.split(","))
    except ValueError:
        costs = ()
    if len(costs) != 3 or not all(0 < cost < math.inf for cost in costs):
        message = f"{text} is not three positive numbers, such as 1,1,1.5"
        raise argparse.ArgumentTypeError(message)
    return costs


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

    _add_plan(commands)
    _add_compile(commands)
    _add_config(commands)
    _add_schedule(commands)
    _add_checkpoints(commands)
    parser.command_names = tuple(commands.choices)
    return parser


def _commands(parser: _Parser) -> argparse._SubParsersAction[_Parser]:
    return parser.add_subparsers(
        metavar="COMMAND", dest="command_name", required=True, parser_class=_Parser
    )


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="foretell memory, traffic and step time, or search for the best layout",
        description="Foretell what a run takes on a topology, from its config alone: memory of a\n"
        "device term by term, bubble, traffic, step time. With --search, rank every legal layout.",
        epilog="examples:\n  maxpipe plan run.yml --topology v5p:4x4x4\n"
        "  maxpipe plan run.yml --topology v5p:8x8x8 --slices 2 --search "
        "--fix mesh.dcn_stage=2 --write best.yml",
    )
    parser.add_argument("inputs", nargs="*", metavar="FILE|section.key=value", help=_INPUTS_HELP)
    _add_topology(parser, required=True)
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument("--search", action="store_true", help="rank the layouts of this topology")
    parser.add_argument(
        "--fix",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="what a search keeps",
    )
    parser.add_argument("--write", metavar="FILE", help="write the best layout's config there")
    parser.set_defaults(command=_plan)


def _add_topology(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--topology",
        required=required,
        metavar="KIND:SIZE",
        help="kind of device and size of one slice: v5p:4x4x4, v6e:16x16, h100:8, cpu:8",
    )
    parser.add_argument(
        "--slices",
        type=_integer,
        default=1,
        metavar="NUMBER",
        help="slices, joined by the data-centre network; 1 by default",
    )


def _add_compile(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile the train step for devices that need not be there",
        description="Compile the real train step for a topology and say what the compiler knows:\n"
        "memory, operations, collectives and what they hide behind. TPU programs need libtpu\n"
        "(pip install 'maxpipe[tpu]') and no TPU.",
        epilog="examples:\n  maxpipe compile configs/quickstart.yml --topology cpu:8 "
        "mesh.ici_stage=4 mesh.ici_fsdp=2\n"
        "  maxpipe compile run.yml --topology v5p:4x4x4 --slices 2 mesh.dcn_stage=2",
    )
    parser.add_argument("inputs", nargs="*", metavar="FILE|section.key=value", help=_INPUTS_HELP)
    _add_topology(parser, required=True)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        help="keep the compiled step there; `train` loads it with runtime.executable=FOLDER",
    )
    parser.set_defaults(command=_compile)


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
        help="draw and compare pipeline schedules",
        description="Draw a pipeline schedule as text: by name, from a CSV file, or the one that\n"
        "config files and overrides give. With --svg, --png, --csv or --perfetto, write it to\n"
        "files instead. With --compare, print a table of several.",
        epilog="examples:\n  maxpipe schedule 1f1b --stages 4 --microbatches 8\n"
        "  maxpipe schedule zb_v --costs 1,1,1.2 --svg zb_v.svg --csv zb_v.csv\n"
        "  maxpipe schedule file:zb_v.csv\n"
        "  maxpipe schedule --compare 1f1b,interleaved,zb_v --stages 8 --microbatches 32\n"
        "  maxpipe schedule configs/quickstart.yml pipeline.repeats=2",
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="NAME|file:PATH|FILE|section.key=value",
        help="name of a schedule, by default interleaved, or file: and the path of a schedule in "
        f"CSV; {_INPUTS_HELP}",
    )
    for option, about in (
        ("stages", "pipeline stages"),
        ("repeats", "visits of a microbatch to each stage"),
        ("microbatches", "pieces of the batch"),
        ("group", "microbatches run back to back (interleaved); 0: the number of stages"),
    ):
        parser.add_argument(f"--{option}", type=_integer, metavar="NUMBER", help=about)
    parser.add_argument(
        "--delayed",
        action="store_true",
        default=None,
        help="messages take two ticks, so that they can travel behind a whole tick of work",
    )
    parser.add_argument(
        "--costs",
        type=_costs,
        metavar="F,I,W",
        help="time of a forward, of an input gradient and of a weight gradient, in any unit; "
        "by default 1,1,1",
    )
    parser.add_argument(
        "--compare",
        metavar="NAME,NAME,...",
        help="print a table of these schedules; --repeats counts where it can be chosen",
    )
    for kind, about in _DRAWINGS.items():
        parser.add_argument(f"--{kind}", metavar="FILE", help=f"write {about}")
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
