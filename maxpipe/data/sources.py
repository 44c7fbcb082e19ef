"""Where documents come from: random access to the texts of a corpus by number.

A source is a sequence: asking twice for document i gives the same text, in any
thread and any process. Each format has a module in `formats/`. Tokens, splits, order
and batches are not its concern; `documents.py` is the next step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

from maxpipe.config.schema import DataConfig
from maxpipe.data.formats.array_records import ArrayRecords
from maxpipe.data.formats.files import File, find_files
from maxpipe.data.formats.json_lines import JsonLines
from maxpipe.data.formats.source import Moved, Progress, Record, Records, RecordSource, Source
from maxpipe.data.formats.synthetic import SyntheticRecords
from maxpipe.data.formats.text import TextFiles, open_corpus
from maxpipe.data.formats.text_of import TextOf
from maxpipe.data.formats.tfds import TfdsExamples
from maxpipe.errors import ConfigError

__all__ = [
    "File",
    "Moved",
    "Progress",
    "Record",
    "Source",
    "find_files",
    "open_source",
    "source_of",
]


def open_source(config: DataConfig, seed: int, moved: Moved | None = None) -> Source:
    """The source that `data.source` names. `seed` is read by `synthetic` only.

    Raises:
        ConfigError: a path that is missing, empty or not readable as `data.source`.
    """
    return RecordSource(_open_records(config, seed, moved), TextOf(config.field))


def _open_records(config: DataConfig, seed: int, moved: Moved | None) -> Records:
    match config.source:
        case "corpus":
            return open_corpus()
        case "text":
            return TextFiles("text", find_files(config.path, ()))
        case "jsonl":
            return JsonLines(find_files(config.path, (".jsonl",)), moved)
        case "arrayrecord":
            return ArrayRecords(find_files(config.path, (".array_record", ".arrayrecord")))
        case "tfds":
            return TfdsExamples(config.path, config.tfds_dir)
        case "synthetic":
            return SyntheticRecords(seed)
        case "tokens" | "megatron":
            raise ConfigError.one(
                "data.source",
                config.source,
                "must be a source of text here: it holds ids of tokens.",
                "Set data.source and data.path to the text that they were made of.",
            )


def source_of(path: str, where: str) -> Literal["text", "jsonl", "arrayrecord"]:
    """The `data.source` of files by their names; `where` names what gave the path.

    Raises:
        ConfigError: a path without files, or with files of several kinds.
    """
    try:
        names = [os.path.basename(file.path) for file in find_files(path, ())]
    except ConfigError as error:
        action = "Name a file, a folder or a pattern that is there."
        problems = [replace(each, where=where, action=action) for each in error.problems]
        raise ConfigError(problems) from None
    kinds = {
        "jsonl" if ".jsonl" in name else "arrayrecord" if ".array" in name else "text"
        for name in names
    }
    if len(kinds) == 1:
        found = kinds.pop()
        return found  # type: ignore[return-value]
    rule = f"must hold files of one kind: it has {' and '.join(sorted(kinds))}."
    action = f"Name them by a pattern such as '{os.path.join(path, '*.jsonl')}'."
    raise ConfigError.one(where, path, rule, action)
