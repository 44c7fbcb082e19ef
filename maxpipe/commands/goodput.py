"""`maxpipe goodput`: the use of a run's time."""

from __future__ import annotations

import argparse

from maxpipe.commands.parser import Commands, add_address
from maxpipe.errors import ExitCode
from maxpipe.io import redact
from maxpipe.io.text import sentence


def add(commands: Commands) -> None:
    """Adds the command."""
    about = "show the share of a run's time that went into steps that count"
    parser = commands.add_parser(
        "goodput",
        help=about,
        description=f"{sentence(about)}, over all its restarts, and where the rest went.",
        epilog="example: maxpipe goodput runs/quickstart",
    )
    add_address(parser, step=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_goodput)


def _goodput(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import whole_run
    from maxpipe.telemetry import goodput

    found = goodput.read(whole_run(options.run).run_dir)
    if options.json:
        import json

        print(json.dumps(goodput.facts(found), indent=2))
    else:
        print(redact.shown(goodput.page(found)))
    return ExitCode.DONE
