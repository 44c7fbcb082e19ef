"""`maxpipe explain`: print the cause of an error code and ways out."""

from __future__ import annotations

import argparse
import functools
import textwrap
from pathlib import Path
from typing import NamedTuple

import maxpipe
from maxpipe.commands.parser import Commands
from maxpipe.errors import Code, ConfigError, ExitCode

_WIDTH = 100
AREAS = {
    "CFG": "config files and overrides",
    "CLI": "command line",
    "MESH": "device mesh",
    "SCHED": "pipeline schedules",
    "MODEL": "model",
    "MEM": "memory",
    "DATA": "data",
    "TOK": "tokenizers and chat templates",
    "GEN": "generation",
    "POST": "post-training",
    "CKPT": "checkpoints",
    "RUN": "runs",
    "NET": "several processes",
    "ENV": "installation",
    "HF": "Hugging Face folders",
    "MT": "MaxText checkpoints",
    "LAUNCH": "launchers",
    "PLAN": "planner",
    "PLUG": "plug-ins",
    "API": "Python API",
    "IO": "files",
}
"""Maps the area of a code to its name, in the order in which areas are listed."""


class CodeEntry(NamedTuple):
    """The explanation of an error code."""

    code: Code
    title: str
    cause: str
    ways: tuple[str, ...]
    exit_codes: tuple[int, ...]
    """Exit codes of the exceptions that carry the code."""

    @property
    def area(self) -> str:
        """Return the area of the code, such as `MEM`."""
        return self.code.split("-")[1]


@functools.cache
def code_entries() -> dict[Code, CodeEntry]:
    """Return the entries of `error_codes.yml`, in the order of the file."""
    import yaml  # slow to import

    text = (Path(maxpipe.__file__).parent / "error_codes.yml").read_text(encoding="utf-8")
    table = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
    return {
        Code(code): CodeEntry(
            Code(code), entry["title"], entry["cause"], tuple(entry["ways"]), tuple(entry["exit"])
        )
        for code, entry in table.items()
    }


def _find(text: str) -> CodeEntry:
    """Return the entry of a code, which may be lower-case, lack `MP-` or have brackets.

    Raises:
        ConfigError: the text is not a code.
    """
    name = text.strip("[]").upper()
    for candidate in (name, f"MP-{name}"):
        if candidate in list(Code):
            return code_entries()[Code(candidate)]
    if name.isdecimal() and (same := [code for code in Code if code.endswith(f"-{name:0>3}")]):
        raise ConfigError.one(
            Code.CLI_VALUE,
            f"command line: {text}",
            None,
            f"is the number of {len(same)} codes: {', '.join(same)}.",
            f"Add the area: `maxpipe explain {same[0]}`.",
        )
    from maxpipe.config.rules import did_you_mean

    guess = did_you_mean(name if name.startswith("MP-") else f"MP-{name}", Code)
    raise ConfigError.one(
        Code.CLI_VALUE,
        f"command line: {text or 'an empty argument'}",
        None,
        "is not an error code, such as MP-MEM-001.",
        f"Did you mean `maxpipe explain {guess}`?" if guess else "List all: `maxpipe explain`.",
    )


def _format(entry: CodeEntry) -> str:
    """Format an entry for a terminal."""

    def wrapped(label: str, text: str) -> str:
        return textwrap.fill(text, _WIDTH, initial_indent=f"{label:10}", subsequent_indent=" " * 10)

    codes = " or ".join(map(str, entry.exit_codes))
    lines = [f"{entry.code}: {entry.title}", wrapped("cause", entry.cause)]
    lines += [wrapped("ways out" if way is entry.ways[0] else "", way) for way in entry.ways]
    return "\n".join([*lines, wrapped("exit code", codes)])


def _explain(options: argparse.Namespace) -> int:
    entries = [_find(options.code)] if options.code is not None else [*code_entries().values()]
    if options.json:
        import json

        values = [{**entry._asdict(), "area": entry.area} for entry in entries]
        print(json.dumps(values if options.code is None else values[0], indent=2))
    elif options.code is not None:
        print(_format(entries[0]))
    else:
        for area, name in AREAS.items():
            print(f"{name}:")
            print("\n".join(f"  {e.code:14}  {e.title}" for e in entries if e.area == area))
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Add the `explain` command."""
    parser = commands.add_parser(
        "explain",
        help="print the cause of an error code, such as MP-MEM-001, and ways out",
        description="Print the cause of an error code, and ways out. A message contains its\n"
        "code in brackets at the end of the first line. Without a code, list all codes.",
        epilog="examples:\n  maxpipe explain MP-MEM-001\n  maxpipe explain mem-001 --json",
    )
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="the code in an error message, in any case"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command=_explain)
