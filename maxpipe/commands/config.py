"""`maxpipe config`: print, explain and document configs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from maxpipe.commands.parser import Commands, add_inputs, read_config, subcommands
from maxpipe.errors import ConfigError, ExitCode, StorageError
from maxpipe.io import redact
from maxpipe.io.text import sentence

_DOCS_FILE = Path("docs/config.md")


def _config_print(options: argparse.Namespace) -> int:
    from maxpipe.config import render

    loaded = redact.within(read_config(options.inputs))
    print(render.print_config(loaded, origin=options.origin), end="")
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
            action = "Run it where the project's files can be written."
            raise StorageError.unwritable(_DOCS_FILE, error, action) from error
    return ExitCode.DONE


def add(commands: Commands) -> None:
    """Adds the command."""
    about = "print, explain and document config values"
    parser = commands.add_parser("config", help=about, description=f"{sentence(about)}.")
    actions = subcommands(parser)

    show = actions.add_parser(
        "print",
        help="print the whole config that files and overrides give",
        description="Print every value of the config that files and overrides give, defaults\n"
        "included, after all checks that need no devices.",
        epilog="example: maxpipe config print quickstart train.steps=100 --origin",
    )
    add_inputs(show)
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
