"""What the section `data` says, in a form that is easier to read: paths and templates."""

from __future__ import annotations

import re
from collections.abc import Iterator

from maxpipe.config.schema import DataConfig
from maxpipe.errors import Finding

COLUMNS = ("jsonl", "parquet", "arrayrecord", "tfds", "huggingface")
"""Sources whose records have columns, or may."""
FILES = ("text", "jsonl", "parquet", "arrayrecord", "huggingface")
"""Sources that read files, by their paths."""

ONE_PATH = ("tfds", "tokens", "megatron")
"""Sources of one path, or name."""

_TEMPLATE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]|\\[nt\\]")
_ESCAPES = {"{{": "{", "}}": "}", r"\n": "\n", r"\t": "\t", "\\\\": "\\"}


def paths_of(config: DataConfig) -> list[str]:
    """All paths of a source, in the order in which they are read."""
    return [config.path] if config.path else list(config.paths)


def template_pieces(template: str) -> list[tuple[str, str]]:
    r"""A template in pieces: fixed text, and the column that follows; the last piece has none.

    `{name}` stands for a column, `{{` and `}}` for braces, `\n` and `\t` for a line break and a
    tab.

    Raises:
        ValueError: a brace without counterpart, or a column without a name.
    """
    pieces, fixed, end = [], "", 0
    for found in _TEMPLATE.finditer(template):
        fixed += template[end : found.start()]
        end = found.end()
        if (name := found["name"]) is not None:
            if not name or name != name.strip():
                raise ValueError(f"{found[0]} names no column")
            pieces.append((fixed, name))
            fixed = ""
        elif found[0] in _ESCAPES:
            fixed += _ESCAPES[found[0]]
        else:
            raise ValueError(f"the {found[0]} at character {found.start() + 1} has no counterpart")
    return [*pieces, (fixed + template[end:], "")]


def data_findings(data: DataConfig) -> Iterator[Finding]:
    """What is wrong with paths and template."""
    if data.source in (*FILES, *ONE_PATH) and not paths_of(data):
        examples = {"tfds": "c4/en:3.1.0", "text": "data/*.txt", "huggingface": "saved"}
        examples |= {"tokens": "data/tokens", "megatron": "data/*.idx"}
        yield Finding(
            "data.path",
            f"must not be empty with data.source={data.source}.",
            f"Set data.path={examples.get(data.source, f'data/*.{data.source}')} (your own), or "
            "data.source=corpus.",
        )
    if data.paths and data.path:
        yield Finding(
            "data.paths",
            f"must be empty when data.path ({data.path}) is set: it takes the place of one path.",
            "Add that path to data.paths, and leave data.path out.",
        )
    if data.paths and data.source in ONE_PATH:
        yield Finding(
            "data.paths",
            f"is not read with data.source={data.source}, which has one path.",
            "Name it in data.path.",
        )
    if data.chat != "off" and data.unreadable == "skip":
        yield Finding(
            "data.unreadable",
            "must be stop with data.chat: a conversation without messages is not skipped.",
            "Set data.unreadable=stop, and correct or remove the records that it names.",
        )
    if data.template:
        yield from _template_findings(data)


def _template_findings(data: DataConfig) -> Iterator[Finding]:
    if data.source not in COLUMNS:
        yield Finding(
            "data.template",
            f"is not read with data.source={data.source}, whose documents have no columns.",
            f"Leave it out, or set data.source to one of {', '.join(COLUMNS)}.",
        )
    example = "Write columns in braces, such as data.template='{title}: {text}'"
    try:
        pieces = template_pieces(data.template)
    except ValueError as error:
        yield Finding("data.template", f"cannot be read: {error}.", f"{example}; {{{{ is a brace.")
        return
    if len(pieces) == 1:
        rule = "names no column: all documents would be the same."
        yield Finding("data.template", rule, f"{example}.")
