"""What the keys of a source say, in a form that is easier to read: paths and templates."""

from __future__ import annotations

import re

from maxpipe.config.data_schema import SourceConfig

COLUMNS = ("jsonl", "parquet", "arrayrecord", "tfds", "huggingface")
"""Sources whose records have columns, or may."""
FILES = ("text", "jsonl", "parquet", "arrayrecord", "huggingface")
"""Sources that read files, by their paths."""

ONE_PATH = ("tfds", "tokens", "megatron")
"""Sources of one path, or name."""

_TEMPLATE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]|\\[nt\\]")
_ESCAPES = {"{{": "{", "}}": "}", r"\n": "\n", r"\t": "\t", "\\\\": "\\"}


def paths_of(config: SourceConfig) -> list[str]:
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
