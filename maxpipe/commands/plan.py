"""`maxpipe plan` and `maxpipe compile`: memory and time of a run, before it is launched."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from maxpipe.commands.parser import (
    Commands,
    add_inputs,
    check_place,
    count,
    read_config,
    write_file,
)
from maxpipe.commands.progress import PhaseProgress, ProgressBar
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import expand_path

if TYPE_CHECKING:
    from pathlib import Path

    from maxpipe.config.load import LoadedConfig
    from maxpipe.config.schema import Config
    from maxpipe.plan.search import Candidate
    from maxpipe.plan.topology import Topology

SEARCH_ONLY_OPTIONS = ("compile", "measure", "fix", "write")
"""Options for the results of a search."""
DRAWINGS = (".svg", ".png")
"""Kinds of files that --draw writes."""


def add(commands: Commands) -> None:
    """Adds both commands."""
    _add_plan(commands)
    _add_compile(commands)


def _compile(options: argparse.Namespace) -> int:
    from maxpipe.plan import topology

    loaded = read_config(options.inputs)
    target = topology.parse_topology(options.topology, options.slices or 1)
    folder = _folder(options, loaded)
    given = _compiler_options(options)
    with PhaseProgress("compile") as progress:
        progress.begin("starting jax")
        topology.prepare(target)
        from maxpipe.plan.compile import compile_step
        from maxpipe.plan.report import format_compile_report

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
    """Where the step is kept, if it is."""
    if options.save is None:
        return None
    from maxpipe.config.training_checks import check_length

    where = "command line: --save"
    folder = expand_path(options.save, where)
    check_length(loaded.config, loaded.origins)
    if loaded.config.train.batch_ramp:
        rule = "keeps one train step, and with train.batch_ramp there is one for each size."
        raise ConfigError.one(where, folder, rule, "Leave out --save, or set train.batch_ramp=[].")
    return folder


def _compiler_options(options: argparse.Namespace) -> dict[str, str]:
    """As given with --xla, to see what they do: a run has its own."""
    where = "command line: --xla"
    if options.xla and options.save is not None:
        rule = "is for a look at what an option does: a saved step has those of a run."
        raise ConfigError.one(where, options.xla, rule, "Leave out --xla, or --save.")
    found = {}
    for each in options.xla:
        name, equals, value = each.partition("=")
        if not (name and equals):
            rule = "must be NAME=VALUE; without a value the compiler's default counts."
            raise ConfigError.one(where, each, rule, f"Write --xla {name or 'NAME'}=VALUE.")
        # jax takes these only as Python writes them.
        found[name] = value.title() if value in ("true", "false") else value
    return found


def _plan(options: argparse.Namespace) -> int:
    _check_options(options)
    loaded = read_config(options.inputs)
    if options.calibrate:
        return _calibrate(loaded)
    target = _target(options, loaded.config)
    if options.search:
        return _search(options, loaded, target)
    if options.shardings:
        return _shardings(options, loaded, target)
    return _forecast(options, loaded, target)


def _target(options: argparse.Namespace, config: Config) -> Topology:
    """The named devices; without a name those of this machine."""
    from maxpipe.plan import topology

    if options.topology is not None:
        return topology.parse_topology(options.topology, options.slices or 1)
    if options.devices is not None:
        return topology.local_topology(config.runtime, options.devices, options.devices)
    return topology.local_topology(config.runtime, config.mesh.cpu_devices)


def _check_options(options: argparse.Namespace) -> None:
    """Refuses options that would have no effect."""
    unread = [
        ("slices", options.topology is None, "counts slices of a --topology", "Add --topology."),
        (
            "measure",
            options.topology is not None,
            "runs on devices that are here",
            "Add --devices.",
        ),
        *(
            (name, not options.search, "is read by a search only", "Add --search.")
            for name in SEARCH_ONLY_OPTIONS
        ),
        ("shardings", options.search, "shows one layout, not those of a search", "Leave it out."),
        ("draw", options.shardings, "draws a prediction, not shardings", "Leave it out."),
    ]
    if options.calibrate:
        rule, action = "is not read while devices are measured", "Leave it out."
        unread = [
            (name, True, rule, action)
            for name in ("search", "shardings", "json", "draw", "slices", *SEARCH_ONLY_OPTIONS)
        ]
    for name, ignored, rule, action in unread:
        if ignored and getattr(options, name):
            raise ConfigError.one(f"command line: --{name}", None, f"{rule}.", action)
    if options.draw is not None and not options.draw.endswith(DRAWINGS):
        rule, action = f"must end in {' or '.join(DRAWINGS)}.", f"Write --draw {options.draw}.svg."
        raise ConfigError.one("command line: --draw", options.draw, rule, action)
    for name in ("draw", "write"):  # what they hold may take minutes
        if (path := getattr(options, name)) is not None:
            check_place(path, f"--{name}")


def _forecast(options: argparse.Namespace, loaded: LoadedConfig, target: Topology) -> int:
    from maxpipe.plan import forecast, report

    layout = forecast.forecast_layout(loaded, target)
    _warn_replicated_weights(layout.config)
    _draw(options, layout, target)
    values, nearest = forecast.forecast_values(layout, target)
    if options.json:
        import json

        print(json.dumps(values, indent=2))
    else:
        print(report.format_plan(values, nearest))
    return ExitCode.DONE


def _shardings(options: argparse.Namespace, loaded: LoadedConfig, target: Topology) -> int:
    from maxpipe.plan import shardings, topology

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
    """Of large weights that a rule of the user keeps whole."""
    from maxpipe.config.replicated_weights import replication_warnings

    for each in replication_warnings(config):
        print(redact.redact_for_terminal(f"warning: {each.line}"), file=sys.stderr, flush=True)


def _draw(options: argparse.Namespace, candidate: Candidate, target: Topology) -> None:
    if options.draw is not None:
        from maxpipe.plan import report

        write_file(
            options.draw, "--draw", lambda path: report.write(candidate, target.hardware, path)
        )


def _search(options: argparse.Namespace, loaded: LoadedConfig, target: Topology) -> int:
    from maxpipe.config.load import to_yaml
    from maxpipe.plan import forecast, report, topology
    from maxpipe.plan.rerank import CANDIDATES
    from maxpipe.plan.search import NUM_RESULTS

    fixed = forecast.parse_fixed_keys(loaded, options.fix)
    present = topology.local_devices(target) if options.measure else ()
    keep = (
        max(CANDIDATES, options.measure)
        if options.measure
        else max(NUM_RESULTS, options.compile or 0)
    )
    with contextlib.closing(ProgressBar(" layouts")) as progress:
        found = forecast.best_layouts(loaded.config, target, fixed, keep, report=progress.report)
    if not options.json:
        print(report.format_search(found, target.hardware), flush=True)
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    compiled, measured = [], []
    if options.compile:
        topology.prepare(target)
        from maxpipe.plan.rerank import rerank_by_compiler

        with PhaseProgress("compile") as phases:
            compiled = rerank_by_compiler(found.best[: options.compile], target, tell, phases.begin)
    elif options.measure:
        from maxpipe.plan.rerank import rerank_by_measurement

        measured = rerank_by_measurement(found.best, options.measure, present, tell)
    checked = [*compiled, *measured]
    if options.json:
        import json

        values = report.search_values(found, target.hardware, compiled, measured)
        print(json.dumps(values, indent=2))
    elif checked:
        print(report.format_ranking(checked, ran=bool(options.measure)))
    if checked and not checked[0].fits:
        rule = f"found that none of the {len(checked)} best layouts fits."
        raise ConfigError.one("command line: --search", None, rule, "Check more of them.")
    best = checked[0].candidate if checked else found.best[0]
    _draw(options, best, target)
    if options.write is not None:
        text = to_yaml(redact.redact_value(best.config))
        write_file(options.write, "--write", lambda path: path.write_text(text, encoding="utf-8"))
        print(f"wrote {options.write}", file=sys.stderr if options.json else sys.stdout)
    return ExitCode.DONE


def _calibrate(loaded: LoadedConfig) -> int:
    from maxpipe.hardware import save_measured
    from maxpipe.plan import report
    from maxpipe.plan.calibrate import calibrate_here

    before, after, found = calibrate_here(loaded)
    print(report.format_calibration(found, before, after))
    print(f"wrote {save_measured(after)}: plans use it from now on; delete it to undo that")
    return ExitCode.DONE


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory, traffic and step time, or search for the best layout",
        description="Predict what a run takes on a topology, from its config alone: memory of a\n"
        "device term by term, bubble, traffic, step time. With --search, rank the legal layouts.",
        epilog="examples:\n  maxpipe plan llama3-8b --topology h100:8 mesh.ici_fsdp=8\n"
        "  maxpipe plan run.yml --topology v5p:4x4x4\n"
        "  maxpipe plan run.yml --topology v5p:8x8x8 --slices 2 --search "
        "--fix mesh.dcn_stage=2 --write best.yml\n"
        "  maxpipe plan run.yml --topology v5p:4x4x4 --shardings\n"
        "  maxpipe plan run.yml --calibrate\n"
        "  maxpipe plan run.yml --devices 8 --search --measure 5",
    )
    add_inputs(parser)
    where = parser.add_mutually_exclusive_group()
    _add_topology(parser, where)
    where.add_argument(
        "--devices",
        type=count,
        metavar="N",
        help="plan for N devices like those of this machine (default: the devices of this machine)",
    )
    where.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the devices of this machine with this config's layers; plans use it then",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--search", action="store_true", help="rank the layouts of this topology")
    parser.add_argument(
        "--shardings",
        action="store_true",
        help="show how parameters and activations are split over the mesh, and what is replicated",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--compile",
        type=count,
        metavar="N",
        help="of a search, compile the N best and rank them again",
    )
    again.add_argument(
        "--measure",
        type=count,
        metavar="N",
        help="of a search, run N on the --devices, each chosen by what ran before, and rank "
        "them by that",
    )
    parser.add_argument(
        "--fix",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="a key that a search keeps",
    )
    parser.add_argument("--write", metavar="FILE", help="write the best layout's config there")
    parser.add_argument(
        "--draw",
        metavar="FILE",
        help="draw memory and timeline, of a search the best layout's; .svg or .png by the name",
    )
    parser.set_defaults(command=_plan)


def _add_topology(
    parser: argparse.ArgumentParser, where: argparse._ArgumentGroup, *, required: bool = False
) -> None:
    where.add_argument(
        "--topology",
        metavar="KIND:SIZE",
        help="kind of device and size of one slice: v5p:4x4x4, v6e:16x16, h100:8, cpu:8",
        required=required,
    )
    parser.add_argument(
        "--slices",
        type=count,
        metavar="N",
        help="slices, joined by the data-centre network; 1 by default",
    )


def _add_compile(commands: Commands) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile the train step for devices that need not be there",
        description="Compile the real train step for a topology and say what the compiler knows:\n"
        "memory, operations, collectives and what they hide behind. TPU programs need libtpu\n"
        "(pip install 'maxpipe[tpu]') and no TPU, those for NVIDIA GPUs jax's CUDA plugin\n"
        "(pip install 'maxpipe[gpu-aot]') and no GPU.",
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
        help="list the N largest entries of the program, by estimated cycles times executions",
    )
    parser.add_argument(
        "--xla",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="options of the compiler to try in place of a run's; NAME= for its default",
    )
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        help="keep the compiled step there; `train` loads it with runtime.compiled_step=FOLDER",
    )
    parser.set_defaults(command=_compile)
