"""`maxpipe schedule`: draw, compare, import and export pipeline schedules without jax."""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.commands.parser import Commands, add_inputs, count, integer, read_config, write_file
from maxpipe.errors import Code, ConfigError, ExitCode

if TYPE_CHECKING:
    from maxpipe.api.schedule import Schedule
    from maxpipe.schedule.table import Costs


def _schedule(options: argparse.Namespace) -> int:
    from maxpipe.api.schedule import Schedule, default_repeats
    from maxpipe.schedule import draw
    from maxpipe.schedule.catalog import check_num_forwards
    from maxpipe.schedule.table import Costs

    names, sizes = _schedule_names_and_sizes(options)
    if sizes["group"] and not any(_reads_group(name) for name in names):
        raise ConfigError.one(
            Code.CLI_CONFLICT,
            "command line: --group",
            sizes["group"],
            f"applies only to the schedule interleaved, but the schedule is {', '.join(names)}.",
            "Leave out --group, or run `maxpipe schedule interleaved`.",
        )
    costs = Costs(*(options.costs or ()))
    shape = (sizes[each] for each in ("stages", "repeats", "microbatches"))
    check_num_forwards("command line", *shape)
    schedules = []
    for name in names:
        own = dict(sizes)
        if not _reads_group(name):
            own["group"] = 0
        if options.compare is not None:
            own["repeats"] = default_repeats(name) or sizes["repeats"]
        schedules.append(Schedule.named(name, **own))
    if options.compare is not None:
        written = _write_drawings(options, schedules, costs)
        print(
            draw.comparison_table(schedules, costs),
            *(f"wrote {path}" for path in written),
            sep="\n",
        )
    elif _drawings(options):
        written = _write_drawings(options, schedules, costs)
        print(draw.summary(schedules[0], costs), *(f"wrote {path}" for path in written), sep="\n")
    else:
        print(schedules[0].text(costs, width=shutil.get_terminal_size().columns))
    return ExitCode.DONE


_DRAWINGS = {
    "svg": "a diagram as SVG",
    "png": "a diagram as PNG",
    "csv": "the actions as CSV, which can be read back as a schedule with file:FILE",
    "perfetto": "a trace for ui.perfetto.dev",
}


_ENDINGS = {".svg": "svg", ".png": "png", ".csv": "csv", ".json": "perfetto"}
"""Output format of `--out`, keyed by file suffix."""


def _drawings(options: argparse.Namespace) -> dict[str, Path]:
    """Return the output file for every requested format."""
    asked = {kind: getattr(options, kind) for kind in _DRAWINGS}
    found = {kind: Path(path) for kind, path in asked.items() if path is not None}
    if options.out is None:
        return found
    where, kind = "command line: --out", _ENDINGS.get(Path(options.out).suffix)
    if kind is None:
        rule = f"must end in {', '.join(_ENDINGS)}."
        raise ConfigError.one(
            Code.CLI_OUTPUT, where, options.out, rule, "Write --out schedule.svg."
        )
    if kind in found:
        rule = f"writes the same format as --{kind}."
        raise ConfigError.one(
            Code.CLI_CONFLICT, where, options.out, rule, f"Remove --out or --{kind}."
        )
    return found | {kind: Path(options.out)}


def _write_drawings(
    options: argparse.Namespace, schedules: Sequence[Schedule], costs: Costs
) -> list[Path]:
    """Write the requested files. CSV and Perfetto files contain only the first schedule."""
    from maxpipe.schedule import pictures

    schedule = schedules[0]
    writers: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: pictures.draw_schedules(schedules, costs).save(path, ".svg"),
        "png": lambda path: pictures.draw_schedules(schedules, costs).save(path, ".png"),
        "csv": lambda path: path.write_text(schedule.csv(), encoding="utf-8"),
        "perfetto": lambda path: path.write_text(
            pictures.perfetto_trace(schedule, costs), encoding="utf-8"
        ),
    }
    drawings = _drawings(options)
    for kind, path in drawings.items():
        write_file(path, f"--{kind}", writers[kind])
    return list(drawings.values())


def _schedule_names_and_sizes(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return schedule names and sizes from the options, else from a config, else from small
    defaults.
    """
    from maxpipe.config.config_files import find_config
    from maxpipe.schedule.catalog import FILE_PREFIX, INTERLEAVED, SCHEDULES

    inputs = list(options.inputs)
    named = bool(inputs) and (inputs[0] in SCHEDULES or inputs[0].startswith(FILE_PREFIX))
    names = [inputs.pop(0)] if named else []
    if options.compare is not None:
        _check_compare_options(options, names)
        names = [name.strip() for name in options.compare.split(",")]
        for name in names:
            if name not in SCHEDULES and not name.startswith(FILE_PREFIX):
                raise _unknown_schedule(f"command line: --compare {name}", name)
    elif inputs and re.fullmatch(r"\w+|[^=]*\.csv", inputs[0]) and not find_config(inputs[0]):
        raise _unknown_schedule(f"command line: {inputs[0]}", inputs[0])
    if inputs:
        names, sizes = _sizes_of_config(options, inputs, names)
    else:
        names = names or [INTERLEAVED]
        sizes = _example_sizes(names)
    given = {key: getattr(options, key) for key in sizes if getattr(options, key) is not None}
    return names, sizes | given


def _unknown_schedule(where: str, name: str) -> ConfigError:
    from maxpipe.config import config_files
    from maxpipe.config.foreign_keys import value_action
    from maxpipe.config.rules import did_you_mean
    from maxpipe.schedule.catalog import FILE_PREFIX, INTERLEAVED, SCHEDULES

    rule = f"is not a schedule: the schedules are {', '.join(SCHEDULES)} and {FILE_PREFIX}PATH."
    found = value_action("pipeline.schedule", name, SCHEDULES).removeprefix(
        "Set pipeline.schedule="
    )
    guess = found.rstrip(".")
    if found and guess not in SCHEDULES:  # several schedule names match
        return ConfigError.one(Code.SCHED_NAME, where, None, rule, f"Write {found}")
    if name.endswith(".csv"):
        guess = f"{FILE_PREFIX}{name}"
    elif not guess and "--" not in where:
        guess = did_you_mean(name, config_files.bundled_configs())
    elif not name:
        guess = INTERLEAVED
    action = (
        f"Did you mean `maxpipe schedule {guess}`?" if guess else "See `maxpipe schedule --help`."
    )
    return ConfigError.one(Code.SCHED_NAME, where, None, rule, action)


def _check_compare_options(options: argparse.Namespace, names: list[str]) -> None:
    """Reject a schedule name or a single-schedule output format if `--compare` is set."""
    others = [f"{names[0]} also names a schedule"] if names else []
    single = [kind for kind in _drawings(options) if kind not in ("svg", "png")]
    others += [f"--{kind} writes one schedule" for kind in single]
    if others:
        rule = f"compares the schedules in its list, but {others[0]}."
        action = f"Leave out --compare or {others[0].split()[0]}."
        raise ConfigError.one(
            Code.CLI_CONFLICT, "command line: --compare", options.compare, rule, action
        )


def _sizes_of_config(
    options: argparse.Namespace, inputs: list[str], names: list[str]
) -> tuple[list[str], dict[str, Any]]:
    from maxpipe.config.rules import axis_size

    config = read_config(inputs).config
    names = names or [config.pipeline.schedule]
    stages = axis_size(config.mesh, "stage") or options.stages
    if stages is None:
        raise ConfigError.one(
            Code.CLI_USAGE,
            "mesh.ici_stage",
            config.mesh.ici_stage,
            "depends on the number of devices, which this command does not detect.",
            "Set --stages to the number of stages.",
        )
    return names, {
        "stages": stages,
        "repeats": config.pipeline.repeats,
        "microbatches": config.pipeline.microbatches,
        "group": config.pipeline.group if any(map(_reads_group, names)) else 0,
        "delayed": config.pipeline.delayed_forwarding,
    }


def _example_sizes(names: list[str]) -> dict[str, Any]:
    """Return default sizes, or the stages and microbatches of a schedule file if one is given."""
    from maxpipe.api.schedule import default_repeats
    from maxpipe.schedule.catalog import FILE_PREFIX
    from maxpipe.schedule.orders import read_orders

    sizes: dict[str, Any] = {"stages": 4, "repeats": 2, "microbatches": 8, "group": 0}
    sizes["delayed"] = False
    if len(names) == 1:
        sizes["repeats"] = default_repeats(names[0]) or 2
    for name in names:
        if name.startswith(FILE_PREFIX):
            ring, orders = read_orders(Path(name.removeprefix(FILE_PREFIX)))
            microbatches = 1 + max(action.microbatch for order in orders for action in order)
            sizes |= {"stages": ring.num_stages, "microbatches": microbatches}
            break
    return sizes


def _reads_group(name: str) -> bool:
    from maxpipe.schedule.catalog import SCHEDULES

    return name in SCHEDULES and SCHEDULES[name].uses_group


def _costs(text: str) -> tuple[float, ...]:
    try:
        costs = tuple(float(part) for part in text.split(","))
    except ValueError:
        costs = ()
    if len(costs) != 3 or not all(0 < cost < math.inf for cost in costs):
        message = f"{text} must be three positive numbers, such as 1,1,1.5"
        raise argparse.ArgumentTypeError(message)
    return costs


def add(commands: Commands) -> None:
    """Add the `schedule` command."""
    parser = commands.add_parser(
        "schedule",
        help="draw and compare pipeline schedules",
        description="Draw a pipeline schedule as text. The schedule is selected by name, CSV\n"
        "file or config. With --out, --svg, --png, --csv or --perfetto, write files instead.\n"
        "With --compare, print a table of several schedules; --svg and --png then draw all of\n"
        "them.",
        epilog="examples:\n  maxpipe schedule 1f1b --stages 4 --microbatches 8\n"
        "  maxpipe schedule zb_v --costs 1,1,1.2 --svg zb_v.svg --csv zb_v.csv\n"
        "  maxpipe schedule file:zb_v.csv\n"
        "  maxpipe schedule --compare 1f1b,interleaved,zb_v --stages 8 --microbatches 32\n"
        "  maxpipe schedule quickstart pipeline.repeats=2",
    )
    add_inputs(
        parser,
        "NAME|file:PATH|",
        "schedule name, or file:PATH for a schedule in CSV format (default: interleaved); ",
    )
    for option, about in (
        ("stages", "number of pipeline stages"),
        ("repeats", "number of circular repeats: passes of a microbatch through each stage"),
        ("microbatches", "number of microbatches per step"),
        ("group", "microbatches per group of the interleaved schedule; 0: the number of stages"),
    ):
        kind = integer if option == "group" else count
        parser.add_argument(f"--{option}", type=kind, metavar="NUMBER", help=about)
    parser.add_argument(
        "--delayed",
        action="store_true",
        default=None,
        help="allow each message one extra tick, to overlap communication with compute",
    )
    parser.add_argument(
        "--costs",
        type=_costs,
        metavar="F,I,W",
        help="relative times of forward pass, input gradient and weight gradient (default: 1,1,1)",
    )
    parser.add_argument(
        "--compare",
        metavar="NAME,NAME,...",
        help="print a table of these schedules; --repeats applies only to schedules that accept "
        "any number of repeats",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write an .svg, .png or .csv file, or a .json file for Perfetto",
    )
    for kind, about in _DRAWINGS.items():
        parser.add_argument(f"--{kind}", metavar="FILE", help=f"write {about}")
    parser.set_defaults(command=_schedule)
