"""`maxpipe profile`: print how a profiled step spent its time, and the measured bubble."""

from __future__ import annotations

import argparse
from pathlib import Path

from maxpipe.commands.parser import CHECKPOINT, Commands, count, write_file
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.formatting import capitalize_first


def add(commands: Commands) -> None:
    """Add the `profile` command."""
    about = "print how a profiled step of a run spent its time, and the measured bubble"
    parser = commands.add_parser(
        "profile",
        help=about,
        description=f"{capitalize_first(about)}.\n"
        "A run writes profiles at the steps in profile.at, and after SIGUSR1.",
        epilog="example: maxpipe profile runs/quickstart@100",
    )
    parser.add_argument(
        "profile",
        metavar=CHECKPOINT,
        help="run, or RUN@STEP with the first step of a profile (default: the newest profile)",
    )
    parser.add_argument(
        "--top",
        type=count,
        metavar="COUNT",
        default=10,
        help="print this number of the longest operations (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--svg", metavar="FILE", help="write the planned and measured timeline")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write both timelines as a trace for ui.perfetto.dev"
    )
    parser.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    import json

    from maxpipe.profiles import draw, results
    from maxpipe.profiles.capture import read_capture

    found = results.analyze(read_capture(_folder(options.profile)))
    timeline, bubble = found.timeline, found.bubble
    for option in ("svg", "perfetto"):
        path = getattr(options, option)
        if path is None:
            continue
        if timeline is None or bubble is None:
            rule = f"cannot be written: {found.reason}."
            action = f"Leave out --{option}."
            raise ConfigError.one(
                Code.CLI_CONFLICT, f"command line: --{option}", path, rule, action
            )
        text = (
            draw.draw_timeline(timeline, bubble).svg()
            if option == "svg"
            else draw.perfetto(timeline, bubble)
        )
        write_file(path, f"--{option}", lambda file, text=text: file.write_text(text))
    if options.json:
        print(json.dumps(found.to_json(options.top), indent=2))
    else:
        print(redact.redact_for_terminal("\n".join(found.lines(options.top))))
    return ExitCode.DONE


def _folder(text: str) -> Path:
    """Return the folder of a profile.

    Raises:
        ConfigError: the run has no profile, or none that starts at the given step.
    """
    from maxpipe.checkpoint.address import parse_address
    from maxpipe.checkpoint.run_copy import folder_of_records
    from maxpipe.profiles.capture import profiled_steps, step_folder

    address = parse_address(text)
    run_dir = folder_of_records(address.run_dir)
    steps = profiled_steps(run_dir)
    where = f"command line: {text}"
    if not steps:
        rule = "has no profile."
        action = "Set profile.at=[100] and start the run again, or send SIGUSR1 to a running run."
        raise ConfigError.one(Code.CLI_VALUE, where, None, rule, action)
    if address.step in (None, "newest"):
        return step_folder(run_dir, steps[-1])
    if address.step not in steps:
        listed = ", ".join(map(str, steps))
        rule = f"names a step without a profile; profiles start at: {listed}."
        raise ConfigError.one(
            Code.CLI_VALUE, where, None, rule, f"Give {address.run_dir}@{steps[-1]}."
        )
    return step_folder(run_dir, int(address.step))
