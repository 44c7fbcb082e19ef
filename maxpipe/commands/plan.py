"""`maxpipe plan` and `maxpipe compile`: predict a run's memory use and step time before launch."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from maxpipe.commands.parser import (
    RUN,
    Commands,
    add_inputs,
    check_place,
    count,
    read_config,
    write_file,
)
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import expand_path
from maxpipe.telemetry.console import PhaseProgress, ProgressBar

if TYPE_CHECKING:
    from pathlib import Path

    from maxpipe.config.load import LoadedConfig
    from maxpipe.config.schema import Config
    from maxpipe.planner.search import Candidate
    from maxpipe.planner.topology import Topology

SEARCH_ONLY_OPTIONS = (
    *("compile", "measure", "fix", "write", "objective", "max-batch-size", "reports"),
)
"""Options that require `--search`."""
DRAWINGS = (".svg", ".png")
"""File suffixes that `--draw` and `--draw-timeline` support."""


def add(commands: Commands) -> None:
    """Add the `plan` and `compile` commands."""
    _add_plan(commands)
    _add_compile(commands)


def _compile(options: argparse.Namespace) -> int:
    from maxpipe.planner import topology

    loaded = read_config(options.inputs)
    target = topology.parse_topology(options.topology, options.slices or 1)
    folder = _folder(options, loaded)
    given = _compiler_options(options)
    with PhaseProgress("compile") as progress:
        progress.begin("starting jax")
        topology.prepare(target)
        from maxpipe.planner.compile import compile_step
        from maxpipe.planner.report import format_compile_report

        report = compile_step(loaded, target, folder, given, progress.begin)
    if options.json:
        import json

        print(json.dumps(report.to_json(), indent=2))
    else:
        print(format_compile_report(report, options.entries))
        if folder is not None:
            print(f"wrote {folder}: train with runtime.compiled_step={folder}")
    return ExitCode.DONE


def _folder(options: argparse.Namespace, loaded: LoadedConfig) -> Path | None:
    """Return the folder given with `--save`, or None."""
    if options.save is None:
        return None
    from maxpipe.config.check import check_length

    where = "command line: --save"
    folder = expand_path(options.save, where)
    check_length(loaded.config, loaded.origins)
    if loaded.config.train.batch_ramp:
        rule = "stores one train step, but train.batch_ramp requires one step per batch size."
        raise ConfigError.one(
            Code.RUN_COMPILED_STEP,
            where,
            folder,
            rule,
            "Leave out --save, or set train.batch_ramp=[].",
        )
    return folder


def _compiler_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the compiler options given with `--xla`."""
    where = "command line: --xla"
    if options.xla and options.save is not None:
        rule = "is only for experiments: a saved step must use the run's compiler options."
        raise ConfigError.one(
            Code.CLI_CONFLICT, where, options.xla, rule, "Leave out --xla or --save."
        )
    values = {}
    for option in options.xla:
        name, equals, value = option.partition("=")
        if not (name and equals):
            rule = "must be NAME=VALUE; an empty VALUE selects the compiler's default."
            raise ConfigError.one(
                Code.CLI_VALUE, where, option, rule, f"Write --xla {name or 'NAME'}=VALUE."
            )
        # jax accepts only `True` and `False` as booleans.
        values[name] = value.title() if value in ("true", "false") else value
    return values


def _plan(options: argparse.Namespace) -> int:
    _check_options(options)
    if options.against is not None:
        return _against(options)
    loaded = read_config(options.inputs)
    if options.calibrate:
        return _calibrate(loaded)
    target = _target(options, loaded.config)
    if options.search:
        return _search(options, loaded, target)
    if options.shardings:
        return _shardings(options, loaded, target)
    return _forecast(options, loaded, target)


def _against(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import parse_run_address
    from maxpipe.checkpoint.run_copy import folder_of_records
    from maxpipe.profiles import run_comparison

    run_dir = folder_of_records(parse_run_address(options.against).run_dir)
    found = run_comparison.compare_run(run_dir)
    if options.json:
        import json

        print(json.dumps(run_comparison.comparison_values(found), indent=2))
    else:
        print(redact.redact_for_terminal(run_comparison.format_comparison(found)))
    if options.calibrate:
        from maxpipe.hardware import save_measured

        path = save_measured(run_comparison.calibrated(found))
        print(f"wrote {path}: later plans use it; delete the file to undo the calibration")
    return ExitCode.DONE


def _target(options: argparse.Namespace, config: Config) -> Topology:
    """Return the topology selected by the options, or else the devices of this machine."""
    from maxpipe.api.plan import find_topology
    from maxpipe.planner import topology

    if options.measure:  # initialize jax
        return topology.local_topology(
            config.runtime, options.devices or config.mesh.cpu_devices, options.devices or 0
        )
    return find_topology(config, options.topology, options.slices or 1, options.devices)


def _check_options(options: argparse.Namespace) -> None:
    """Raise an error for options that would have no effect."""
    is_remote, is_single, out = options.topology is not None, not options.search, "Leave it out."
    unread = [
        ("slices", not is_remote, "requires --topology", "Add --topology."),
        ("measure", is_remote, "runs layouts on the devices of this machine", "Add --devices."),
        (
            "max-batch-size",
            options.objective != "mfu",
            "requires --objective=mfu, because a search for the shortest step does not change the "
            "batch size",
            "Add --objective=mfu.",
        ),
        ("reports", options.compile is None, "requires --compile", "Add --compile 3."),
        *((name, is_single, "requires --search", "Add --search.") for name in SEARCH_ONLY_OPTIONS),
        ("shardings", options.search, "shows one layout, but --search ranks several", out),
        *(
            (name, options.shardings, "draws a prediction, but --shardings computes none", out)
            for name in ("draw", "draw-timeline")
        ),
    ]
    if options.calibrate or options.against is not None:
        option = "--calibrate" if options.against is None else "--against"
        names = (
            "search",
            "shardings",
            "json",
            "draw",
            "draw-timeline",
            "slices",
            *SEARCH_ONLY_OPTIONS,
        )
        if options.against is not None:
            names = ("topology", "devices", *(name for name in names if name != "json"))
            if options.inputs:
                rule = "cannot be combined with --against, which uses the config of the run."
                where = f"command line: {options.inputs[0]}"
                raise ConfigError.one(Code.CLI_CONFLICT, where, None, rule, "Leave it out.")
        unread = [(name, True, f"has no effect with {option}", out) for name in names]
    for name, ignored, rule, action in unread:
        if ignored and getattr(options, name.replace("-", "_")):
            raise ConfigError.one(
                Code.CLI_CONFLICT, f"command line: --{name}", None, f"{rule}.", action
            )
    for option, path in _drawings(options):
        if not path.endswith(DRAWINGS):
            rule, action = f"must end in {' or '.join(DRAWINGS)}.", f"Write {option} {path}.svg."
            raise ConfigError.one(Code.CLI_OUTPUT, f"command line: {option}", path, rule, action)
    for option, path in [*_drawings(options), ("--write", options.write)]:
        if path is not None:  # computing the file content may take minutes
            check_place(path, option)


def _drawings(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (option, path) of every drawing that the command line requests."""
    named = (("--draw", options.draw), ("--draw-timeline", options.draw_timeline))
    return [(option, path) for option, path in named if path is not None]


def _forecast(options: argparse.Namespace, loaded: LoadedConfig, target: Topology) -> int:
    from maxpipe.api.plan import make_plan
    from maxpipe.planner.search import forecast_layout

    layout = forecast_layout(loaded, target)
    _warn_replicated_weights(layout.config)
    _draw(options, layout, target)
    plan = make_plan(layout, target)
    if options.json:
        import json

        print(json.dumps(plan.values, indent=2))
    else:
        print(plan.text())
    return ExitCode.DONE


def _shardings(options: argparse.Namespace, loaded: LoadedConfig, target: Topology) -> int:
    from maxpipe.planner import shardings, topology

    config = topology.resolve_config(loaded, target)
    _warn_replicated_weights(config)
    found = shardings.compute_shardings(config)
    if options.json:
        import json

        print(json.dumps(found.to_json(), indent=2))
    else:
        print(shardings.format_shardings(found))
    return ExitCode.DONE


def _warn_replicated_weights(config: Config) -> None:
    """Warn about large weights that are replicated because of a user-defined axis rule."""
    from maxpipe.config.sections.mesh import replication_warnings

    for warning in replication_warnings(config):
        print(redact.redact_for_terminal(f"warning: {warning.line}"), file=sys.stderr, flush=True)


def _draw(options: argparse.Namespace, candidate: Candidate, target: Topology) -> None:
    for option, path in _drawings(options):
        from maxpipe.planner import draw

        drawing = draw.draw_memory if option == "--draw" else draw.draw_timeline
        write_file(path, option, drawing(candidate, target.hardware).save)


def _search(options: argparse.Namespace, loaded: LoadedConfig, target: Topology) -> int:
    from maxpipe.config.load import to_yaml
    from maxpipe.planner import report, topology
    from maxpipe.planner.rerank import CANDIDATES
    from maxpipe.planner.search import NUM_RESULTS, best_layouts, parse_fixed_keys

    fixed, max_batch_size = parse_fixed_keys(loaded, options.fix), _max_batch_size(options, loaded)
    present = topology.local_devices(target) if options.measure else ()
    keep = max(NUM_RESULTS, options.compile or 0)
    if options.measure:
        keep = max(CANDIDATES, options.measure)
    with contextlib.closing(ProgressBar(" layouts")) as progress:
        found = best_layouts(
            loaded.config, target, fixed, keep, progress.report, max_batch_size=max_batch_size
        )
    if not options.json:
        print(report.format_search(found, target.hardware), flush=True)
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    compiled, measured = [], []
    if options.compile:
        topology.prepare(target)
        from maxpipe.planner.rerank import rerank_by_compiler

        with PhaseProgress("compile") as phases:
            compiled = rerank_by_compiler(
                found.best[: options.compile], target, tell, phases.begin, _reports(options)
            )
    elif options.measure:
        from maxpipe.planner.rerank import rerank_by_measurement

        measured = rerank_by_measurement(found.best, options.measure, present, tell)
    checked = [*compiled, *measured]
    if options.json:
        import json

        values = report.search_values(found, target.hardware, compiled, measured)
        print(json.dumps(values, indent=2))
    elif checked:
        print(report.format_ranking(checked, ran=bool(options.measure)))
    if checked and not checked[0].fits:
        rule = f"found that none of the {len(checked)} best layouts fits in memory."
        raise ConfigError.one(
            Code.PLAN_NO_LAYOUT, "command line: --search", None, rule, "Check more layouts."
        )
    best = checked[0].candidate if checked else found.best[0]
    _draw(options, best, target)
    if options.write is not None:
        text = to_yaml(redact.redact_value(best.config))
        write_file(options.write, "--write", lambda path: path.write_text(text, encoding="utf-8"))
        print(f"wrote {options.write}", file=sys.stderr if options.json else sys.stdout)
    return ExitCode.DONE


def _max_batch_size(options: argparse.Namespace, loaded: LoadedConfig) -> int | None:
    """Return the maximum batch size of the search, or None if it must not change the batch size."""
    from maxpipe.planner.search import BATCH_GROWTH

    if options.objective != "mfu":
        return None
    batch_size, limit = loaded.config.train.batch_size, options.max_batch_size
    if limit is not None and limit < batch_size:
        rule = f"must be at least train.batch_size, which is {batch_size}."
        action = f"Write --max-batch-size {batch_size}, or reduce train.batch_size."
        raise ConfigError.one(Code.CLI_VALUE, "command line: --max-batch-size", limit, rule, action)
    return limit or BATCH_GROWTH * batch_size


def _reports(options: argparse.Namespace) -> Path | None:
    """Return the folder of saved compile reports, which is created if it does not exist."""
    if options.reports is None:
        return None
    folder = expand_path(options.reports, "command line: --reports")
    write_file(str(folder), "--reports", lambda path: path.mkdir(parents=True, exist_ok=True))
    return folder


def _calibrate(loaded: LoadedConfig) -> int:
    from maxpipe.hardware import save_measured
    from maxpipe.planner import report
    from maxpipe.planner.calibrate import calibrate_here

    before, after, found = calibrate_here(loaded)
    print(report.format_calibration(found, before, after))
    print(
        f"wrote {save_measured(after)}: later plans use it; delete the file to undo the calibration"
    )
    return ExitCode.DONE


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory, traffic and step time, or search for the best layout",
        description="Predict the cost of a run from its config and a topology: memory per device\n"
        "by category, pipeline bubble, traffic and step time. With --search, rank the valid\n"
        "layouts.",
        epilog="examples:\n  maxpipe plan llama3-8b --topology h100:8 mesh.ici_fsdp=8\n"
        "  maxpipe plan run.yml --topology v5p:4x4x4\n"
        "  maxpipe plan run.yml --topology v5p:8x8x8 --slices 2 --search "
        "--fix mesh.dcn_stage=2 --write best.yml\n"
        "  maxpipe plan run.yml --topology v5p:4x4x4 --shardings\n"
        "  maxpipe plan run.yml --calibrate\n"
        "  maxpipe plan --against runs/first\n"
        "  maxpipe plan run.yml --devices 8 --search --measure 5",
    )
    add_inputs(parser)
    where = parser.add_mutually_exclusive_group()
    _add_topology(parser, where)
    where.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help="plan for N devices like those in this machine (default: the devices of this machine)",
    )
    where.add_argument(
        "--calibrate",
        action="store_true",
        help="time this config's layers on this machine, to calibrate later plans",
    )
    parser.add_argument(
        "--against",
        metavar=RUN,
        help="compare the forecast of a run with its measured time and memory; with --calibrate, "
        "later plans use the measured step time",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--search", action="store_true", help="rank the valid layouts for the topology"
    )
    parser.add_argument(
        "--shardings",
        action="store_true",
        help="print the sharding of parameters and activations, and all replicated arrays",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--compile",
        type=count,
        metavar="N",
        help="with --search, compile the N best layouts and rerank them",
    )
    again.add_argument(
        "--measure",
        type=count,
        metavar="N",
        help="with --search, run N layouts on the local devices and rank them by measured time; "
        "previous results determine the next layout to run",
    )
    parser.add_argument(
        "--objective",
        choices=("time", "mfu"),
        help="with --search, `time` ranks layouts by step time with train.batch_size sequences per "
        "step. `mfu` ranks them by model FLOPs utilization and also doubles the batch size up to "
        "--max-batch-size, which changes the loss curve (default: time)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=count,
        metavar="N",
        help="with --objective=mfu, maximum number of sequences per step (default: 4 times "
        "train.batch_size)",
    )
    parser.add_argument(
        "--reports",
        metavar="FOLDER",
        help="with --compile, save the compile reports to this folder, and reuse reports of the "
        "same layout, topology, source code and package versions",
    )
    parser.add_argument(
        "--fix",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="mesh and pipeline settings to keep fixed in --search",
    )
    parser.add_argument("--write", metavar="FILE", help="write the config of the best layout")
    parser.add_argument(
        "--draw",
        metavar="FILE",
        help="draw the memory use of the layout (with --search, of the best layout) to an .svg or "
        ".png file",
    )
    parser.add_argument(
        "--draw-timeline",
        metavar="FILE",
        help="draw the timeline of one step of the layout to an .svg or .png file",
    )
    parser.set_defaults(command=_plan)


def _add_topology(
    parser: argparse.ArgumentParser, where: argparse._ArgumentGroup, *, required: bool = False
) -> None:
    where.add_argument(
        "--topology",
        metavar="KIND:SIZE",
        help="device type and size of one slice, such as v5p:4x4x4, v6e:16x16, h100:8 or cpu:8",
        required=required,
    )
    parser.add_argument(
        "--slices",
        type=count,
        metavar="N",
        help="number of slices, connected by the data-center network (default: 1)",
    )


def _add_compile(commands: Commands) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile the train step for a topology, without the target devices",
        description="Compile the real train step for a topology, and print the compiler's report:\n"
        "memory, operations, collectives and their overlap with compute. Compiling for TPUs\n"
        "requires libtpu (pip install 'maxpipe[tpu]'), but no TPU. Compiling for NVIDIA GPUs\n"
        "requires jax's CUDA plugin (pip install 'maxpipe[gpu-aot]'), but no GPU.",
        epilog="examples:\n  maxpipe compile quickstart --topology cpu:8 "
        "mesh.ici_stage=4 mesh.ici_fsdp=2\n"
        "  maxpipe compile run.yml --topology v5p:4x4x4 --slices 2 mesh.dcn_stage=2\n"
        "  maxpipe compile run.yml --topology v5p:4x4x4 --entries 20",
    )
    add_inputs(parser)
    _add_topology(parser, parser.add_argument_group(), required=True)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--entries",
        type=count,
        default=0,
        metavar="N",
        help="list the N most expensive operations, by estimated cycles times number of "
        "executions (default: 0)",
    )
    parser.add_argument(
        "--xla",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="compiler options to try; they override the run's options, and an empty VALUE "
        "restores the compiler's default",
    )
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        help="save the compiled step, for `train` with runtime.compiled_step=FOLDER",
    )
    parser.set_defaults(command=_compile)
