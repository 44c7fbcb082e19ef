"""Write the generated pages of docs/: config keys, commands, models and the module map.

    python scripts/reference_pages.py           # write the pages
    python scripts/reference_pages.py --check   # write nothing; fail if a page is stale

A test of the suite makes the same comparison (tests/test_reference_pages.py).
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxpipe.cli import command_line_parser
from maxpipe.config import render
from maxpipe.config.config_files import BundledConfig, bundled_configs
from maxpipe.config.key_problems import type_name
from maxpipe.config.load import load
from maxpipe.config.rules import BOUNDS
from maxpipe.config.schema import (
    ALL_KEYS,
    ITEM_SECTIONS,
    NAMED_SECTIONS,
    SECTIONS,
    default_of,
    names_in,
    section_of,
)
from maxpipe.io.formatting import format_count
from maxpipe.models import count
from maxpipe.models.registry import FAMILIES, describe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG_FOLDER = DOCS / "reference" / "config"
_MODELS_TITLE = "Supported models"
_NOTICE = "<!-- Written by scripts/reference_pages.py: run `make docs`. -->"
SEE_ALSO: Mapping[str, tuple[str, ...]] = {
    "run": ("guides/checkpoints.md",),
    "model": ("reference/models.md", "concepts/model.md"),
    "mesh": ("guides/plan.md", "concepts/engine.md"),
    "pipeline": ("concepts/schedules.md", "concepts/engine.md", "guides/write_a_schedule.md"),
    "train": ("tutorials/first_run.md",),
    "optim": ("decisions/0027-optimizers.md",),
    "adapter": ("tutorials/adapters.md",),
    "grpo": ("tutorials/grpo.md",),
    "data": (
        "guides/data/sources.md",
        "guides/data/conversations.md",
        "guides/data/mixtures.md",
    ),
    "tokenizer": ("guides/data/tokenizers.md",),
    "distill": ("tutorials/distill.md",),
    "checkpoint": ("guides/checkpoints.md",),
    "guard": ("decisions/0012-bad-steps.md",),
    "eval": ("guides/eval.md",),
    "preference": ("tutorials/preferences.md",),
    "log": ("reference/metrics.md", "reference/run_folder.md"),
    "layer_stats": ("guides/layer_statistics.md",),
    "runtime": ("concepts/processes.md",),
    "launch": ("guides/launch.md",),
}
"""Maps each top-level section to pages that explain its keys."""


def pages() -> dict[Path, str]:
    """Return the text of each generated page, keyed by path."""
    configs = {CONFIG_FOLDER / "README.md": _config_index()}
    configs |= {CONFIG_FOLDER / f"{section}.md": _config_page(section) for section in SECTIONS}
    return configs | {
        DOCS / "reference" / "cli.md": _cli_page(),
        DOCS / "reference" / "models.md": _models_page(),
        DOCS / "contributing" / "module_map.md": _module_map(),
    }


def stale_pages() -> list[Path]:
    """Return the generated pages whose files differ or are missing, and files to remove."""
    current = pages()
    stale = [
        path
        for path, text in current.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    return [*stale, *(path for path in CONFIG_FOLDER.glob("*") if path not in current)]


def _page(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}", "", _NOTICE, "", *lines, ""])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(*header: str) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]


# Config keys.


def _config_index() -> str:
    docs = render.field_docs()
    rows = [f"| [`{name}`]({name}.md) | {_escaped(docs[name])} |" for name in SECTIONS]
    return _page(
        "Config reference",
        "A config consists of YAML files, merged left to right, and `section.key=value` overrides:",
        "```",
        "maxpipe config print quickstart train.steps=100 --origin   # every value and its origin",
        "maxpipe config explain train.steps                         # one entry of these pages",
        "```",
        "Each section has a page:",
        "",
        *_table("section", "contents"),
        *rows,
    )


def _config_page(section: str) -> str:
    lines = [_escaped(render.field_docs()[section]), "", *_key_table(section)]
    for inner in (*NAMED_SECTIONS, *ITEM_SECTIONS):
        if section_of(inner) == section:
            lines += ["", f"## {inner}", "", _escaped(render.field_docs()[inner]), ""]
            lines += _key_table(inner)
    if section == "mesh":
        lines += ["", "## Logical axes", "", "`mesh.axis_rules` changes this table:", ""]
        lines += _table("logical axis", "sharded over", "may be set to")
        lines += [f"| `{name}` | {axes} | {may} |" for name, axes, may in render.axis_rows()]
    lines += ["", "## See also", "", *(f"- {link}" for link in _see_also(section, lines))]
    return _page(f"`{section}`", *lines)


def _key_table(section: str) -> list[str]:
    lines = _table("key", "type", "default", "meaning")
    for name in names_in(section):
        key = f"{section}.{name}"
        kind = type_name(ALL_KEYS[key])
        if key in BOUNDS:
            kind += f", {str(BOUNDS[key]).partition(':')[0]}"
        default = render.default_text(key).removeprefix("default ")
        is_word = default in ("required", "empty") or default_of(key) is None
        cell = default if is_word else f"`{default}`"
        lines.append(f"| `{name}` | {kind} | {cell} | {_escaped(render.field_docs()[key])} |")
    return lines


def _see_also(section: str, lines: list[str]) -> Iterator[str]:
    """Yield links to the guides of a section, its subsections, and the sections that it names."""
    for page in SEE_ALSO.get(section, ()):
        yield f"[{_title(page)}](../../{page})"
    text = "\n".join(lines)
    outer, _, inner = section.partition(".")
    named = {name for name in SECTIONS if re.search(rf"`{re.escape(name)}\.\w+", text)}
    named |= {name for name in SECTIONS if name.startswith(f"{section}.")}
    named |= {outer} if inner else set()
    yield from (f"[`{name}`]({name}.md)" for name in SECTIONS if name in named - {section})


def _title(page: str) -> str:
    if page == "reference/models.md":
        return _MODELS_TITLE
    return (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


# Commands.


def _cli_page() -> str:
    parser = command_line_parser()
    commands = [*_commands(parser)]
    index = [
        f"| [`{each.prog}`](#{_slug(each.prog)}) | {_escaped(about)} |" for each, about in commands
    ]
    lines = [
        f"{parser.description} `maxpipe COMMAND --help` prints the entry of one command.",
        "",
        *_table("command", "purpose"),
        *index,
        "",
        *(line for each, about in commands for line in _command(each, about)),
    ]
    return _page("Command line", *lines[:-1])


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield (parser, help) for each command without subcommands, in the order of `--help`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                if any(isinstance(a, argparse._SubParsersAction) for a in inner._actions):
                    yield from _commands(inner)
                else:
                    yield inner, about[name]


def _command(parser: argparse.ArgumentParser, about: str) -> Iterator[str]:
    yield from (f"## {parser.prog}", "")
    description = parser.description or f"{about[:1].upper()}{about[1:]}."
    yield from (_escaped(" ".join(description.split())), "")
    actions = [each for each in parser._actions if each.dest != "help"]
    has_options = any(each.option_strings for each in actions)
    usage = [parser.prog, *(_invocation(each) for each in actions if not each.option_strings)]
    yield from ("```text", " ".join([*usage, *["[OPTION ...]"] * has_options]), "```", "")
    if actions:
        yield from _table("argument or option", "meaning", "default")
    for action in actions:
        shown = _invocation(action)
        text = re.sub(r" ?\(default: [^)]*\)", "", action.help or "") % {"default": action.default}
        yield f"| `{_escaped(shown)}` | {_escaped(text)} | {_default(action)} |"
    if actions:
        yield ""
    if examples := re.findall(r"^(?:examples?:)?\s*(maxpipe .*)$", parser.epilog or "", re.M):
        yield from ("```", *examples, "```", "")


def _invocation(action: argparse.Action) -> str:
    metavar = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    values = {None: "%s", "?": "[%s]", "*": "[%s ...]", "+": "%s ...", 0: ""}.get(
        action.nargs, "%s"
    )
    shown = values % metavar if "%s" in values else values
    return f"{', '.join(action.option_strings)} {shown}".strip()


def _default(action: argparse.Action) -> str:
    written = re.search(r"\(default: ([^)]*)\)", action.help or "")
    if written:
        return _escaped(written[1])
    is_plain = (
        action.default not in (None, False, True, "", argparse.SUPPRESS) and action.default != []
    )
    if action.option_strings:
        return f"`{action.default}`" if is_plain else ""
    return "" if action.nargs in ("?", "*") else "required"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# Models.


def _models_page() -> str:
    families = [
        f"| `{name}` | {_escaped(_summary(DOCS.parent / 'maxpipe' / 'models' / f'{name}.py'))} "
        f"| [keys](config/model.{name}.md) |"
        for name in FAMILIES
    ]
    rows = [
        _model_row(config)
        for config in bundled_configs().values()
        if config.kind == "model" and not config.name.startswith("tiny")
    ]
    return _page(
        _MODELS_TITLE,
        "A family defines the layers of a model, and `model.family` selects it. The weights of all",
        "these families can be imported and exported",
        "([Hugging Face folders](../guides/huggingface.md)).",
        "",
        *_table("family", "architecture", "config keys"),
        *families,
        "",
        "## Bundled configs",
        "",
        "`maxpipe train NAME my-run.yml` trains a model of one of these sizes with your run",
        "config. `maxpipe plan` counts the same numbers of parameters from the config. A model",
        "without a bundled config needs a file with its `model` section, which `maxpipe import`",
        "writes from a `config.json`.",
        "",
        *_table("name", "family", "layers", "width", "parameters", "active per token", "source"),
        *rows,
    )


def _model_row(config: BundledConfig) -> str:
    given = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=tokenizer.json"]
    model = load([config.name, *given]).config.model
    spec = describe(model)
    params, active = count.num_params(spec), count.active_params(spec)
    comment = " ".join(re.findall(r"^# ?(.*)$", config.text, re.MULTILINE))
    source = re.search(r"Source: (.+?)(?:; the report .*?)?\. (?=[A-Z])", comment)
    assert source, f"{config.path} has no sentence that begins with Source:"
    shown = "" if active == params else format_count(active)
    return (
        f"| `{config.name}` | `{model.family}` | {model.num_layers} | {model.d_model:,} | "
        f"{format_count(params)} | {shown} | {_linked(source[1])} |"
    )


def _linked(source: str) -> str:
    """Return the source with a link to each paper."""
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)


# Modules.


def _module_map() -> str:
    package = ROOT / "maxpipe"
    lines = [
        "The first sentence of each module, by folder. [CONTRIBUTING.md](../../CONTRIBUTING.md)",
        "lists the folders in the order in which they may import each other.",
    ]
    folders = {path.parent for path in package.rglob("*.py")}
    for folder in sorted(folders, key=lambda path: path.as_posix()):
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if modules:
            lines += ["", f"## {folder.relative_to(ROOT)}", "", *_table("module", "purpose")]
        for path in modules:
            link = f"../../{path.relative_to(ROOT)}"
            lines.append(f"| [`{path.name}`]({link}) | {_escaped(_summary(path))} |")
    return _page("Module map", *lines)


def _summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def write_pages() -> None:
    """Write the stale pages, and remove pages of sections that no longer exist."""
    current = pages()
    for path in stale_pages():
        if path in current:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(current[path], encoding="utf-8")
        else:
            path.unlink()


def main() -> int:
    """Write the pages, or list the stale pages if `--check` is set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; list stale pages")
    if not parser.parse_args().check:
        write_pages()
        return 0
    stale = stale_pages()
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale: run `make docs`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
