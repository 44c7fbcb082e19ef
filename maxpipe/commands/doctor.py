"""`maxpipe env` and `maxpipe doctor`: describe and check the environment."""

from __future__ import annotations

import argparse
from typing import Any

from maxpipe.commands.parser import Commands, add_inputs
from maxpipe.errors import ExitCode


def _env(options: argparse.Namespace) -> int:
    import json

    from maxpipe.diagnosis import doctor, environment

    found = environment.report() | {"devices": doctor.count_device_kinds()}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return ExitCode.DONE


def _lines(found: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, Any]] = []
    for name, value in found.items():
        if name == "devices" and isinstance(value, dict):
            value = ", ".join(f"{count} x {kind}" for kind, count in value.items())
        rows += value.items() if isinstance(value, dict) else [(name, value)]
    rows = [(name, " ".join(value) if isinstance(value, list) else value) for name, value in rows]
    return [f"{name:<20} {'-' if value in (None, '') else value}" for name, value in rows]


def _doctor(options: argparse.Namespace) -> int:
    import json

    from maxpipe.diagnosis import doctor

    checks = []
    for check in doctor.examine(options.inputs):
        checks.append(check)
        if not options.json:
            print(check, flush=True)
    if options.json:
        print(json.dumps(doctor.report(options.inputs, checks), indent=2))
    return ExitCode.DONE if doctor.all_passed(checks) else ExitCode.CONFIG


def add(commands: Commands) -> None:
    """Add the `env` and `doctor` commands."""
    env = commands.add_parser(
        "env",
        help="print versions, hardware, devices and environment variables for a bug report",
        description="Print versions, hardware, devices and relevant environment variables.\n"
        "Secrets are redacted.",
    )
    env.add_argument("--json", action="store_true", help="print one JSON object")
    env.set_defaults(command=_env)

    parser = commands.add_parser(
        "doctor",
        help="check that a run can train on this machine",
        description="Check versions, folders, data, tokenizer, clocks, devices, every collective\n"
        "along every mesh axis, and communication between two local processes. Print one line\n"
        "per check: ok, warning, or FAILED with a suggested action. Without a config, run only\n"
        "the checks that do not need one. The exit code is 2 if a check fails.",
        epilog="examples:\n  maxpipe doctor\n  maxpipe doctor quickstart --json",
    )
    add_inputs(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object without secrets, for a bug report",
    )
    parser.set_defaults(command=_doctor)
