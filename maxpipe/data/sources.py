"""Sources of documents, which provide random access to the texts of a corpus by index.

Reading document i always returns the same text, in any thread and process. Each file format has a
module in `formats/`. `documents.py` handles tokens; other modules handle splits, order and batches.

Sources refer to config keys as keys of `data`. In error messages, this module replaces `data` with
the section of the source: `data.mixture.NAME` or `data.validation.NAME`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from typing import Literal

from maxpipe.config.sections.data import section_of
from maxpipe.config.sections.source import SourceConfig, paths_of
from maxpipe.data.formats.array_records import ArrayRecords, TfdsExamples
from maxpipe.data.formats.digests import Digests
from maxpipe.data.formats.files import File, find_files
from maxpipe.data.formats.folder_cache import FolderCache
from maxpipe.data.formats.lines import JsonLines
from maxpipe.data.formats.parquet import ParquetRows
from maxpipe.data.formats.record_text import TextExtractor
from maxpipe.data.formats.saved_dataset import SavedDataset, is_saved_dataset
from maxpipe.data.formats.source import (
    Heartbeat,
    Progress,
    Record,
    Records,
    RecordSource,
    Source,
    UnreadableRecord,
)
from maxpipe.data.formats.text import SyntheticRecords, TextFiles, open_stdlib_corpus
from maxpipe.errors import ConfigError, Problem, StorageError

__all__ = [
    "File",
    "Heartbeat",
    "Progress",
    "Record",
    "Source",
    "UnreadableRecord",
    "find_files",
    "infer_source",
    "open_source",
]

SourceKind = Literal["text", "jsonl", "parquet", "arrayrecord", "huggingface", "tokens", "megatron"]
"""Values of `data.source` that can be inferred from file names."""


def open_source(
    config: SourceConfig,
    seed: int,
    moved: Heartbeat | None = None,
    *,
    cache_dir: str | None = None,
    keep: bool = True,
) -> Source:
    """Open the source selected by `data.source`. Only the source `synthetic` uses `seed`.

    `cache_dir` stores unpacked copies of compressed files and line offsets of large files. Without
    `keep`, new copies and offsets are removed when the process exits.

    Raises:
        ConfigError: a path is missing or empty, or its files cannot be read as `data.source`.
        StorageError: the disk space is not sufficient to unpack a file.
    """
    text = TextExtractor(config.text_field, config.template)
    cache, digests = FolderCache(cache_dir, keep=keep), Digests(cache_dir, keep=keep)
    records = _open_records(config, seed, text, cache, digests, moved)
    skipped = config.max_bad_records if config.bad_records == "skip" else 0
    return RecordSource(records, text, skipped, digests)


def _open_records(
    config: SourceConfig,
    seed: int,
    text: TextExtractor,
    cache: FolderCache,
    digests: Digests,
    moved: Heartbeat | None,
) -> Records:
    paths = config.path if config.path or not config.paths else config.paths
    match config.source:
        case "corpus":
            return open_stdlib_corpus()
        case "text":
            return TextFiles("text", find_files(paths, ()))
        case "jsonl":
            files = find_files(paths, (".jsonl",))
            return JsonLines(files, cache, digests, config.max_decompressed_bytes, moved)
        case "parquet":
            return ParquetRows(find_files(paths, (".parquet",)), text.columns, moved)
        case "arrayrecord":
            return ArrayRecords(find_files(paths, (".array_record", ".arrayrecord")))
        case "huggingface":
            return SavedDataset(paths_of(config))
        case "tfds":
            return TfdsExamples(config.path, config.tfds_dir)
        case "synthetic":
            return SyntheticRecords(seed)
        case "tokens" | "megatron":
            raise ConfigError.one(
                "data.source",
                config.source,
                "must be a source of text here: this source contains token ids.",
                "Set data.source and data.path to the original text.",
            )


ENDINGS: dict[str, SourceKind] = {".jsonl": "jsonl", ".parquet": "parquet", ".array": "arrayrecord"}
"""Maps parts of file names to the source that reads such files. All other files are text."""


def _kind_of(name: str) -> SourceKind:
    for part, kind in ENDINGS.items():
        if part in name:
            return kind
    return "text"


def infer_source(path: str, where: str) -> SourceKind:
    """Infer `data.source` from file names. `where` identifies the path in messages.

    Raises:
        ConfigError: a path matches no files, or files of several formats.
    """
    if is_saved_dataset(path):
        return "huggingface"
    if os.path.isfile(os.path.join(os.path.expanduser(path), "manifest.json")):
        return "tokens"
    if path.endswith((".idx", ".bin")) and os.path.isfile(os.path.expanduser(path[:-4]) + ".idx"):
        return "megatron"
    try:
        names = [os.path.basename(file.path) for file in find_files(path, ())]
    except ConfigError as error:
        action = "Set an existing file, folder or pattern."
        problems = [replace(each, where=where, action=action) for each in error.problems]
        raise ConfigError(problems) from None
    kinds: set[SourceKind] = {_kind_of(name) for name in names}
    if len(kinds) == 1:
        return kinds.pop()
    rule = f"must contain files of one format: found {' and '.join(sorted(kinds))}."
    action = f"Select files with a pattern such as '{os.path.join(path, '*.jsonl')}'."
    raise ConfigError.one(where, path, rule, action)


_KEYS = re.compile(rf"\bdata\.({'|'.join(each.name for each in fields(SourceConfig))})\b")


@contextlib.contextmanager
def wrap_section_errors(name: str) -> Iterator[None]:
    """Replace keys of `data` in errors with keys of the source's config section."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        problems = [
            Problem(*(_qualify_keys(name, text) for text in astuple(p))) for p in error.problems
        ]
        raise ConfigError(problems) from error
    except StorageError as error:
        if not name:
            raise
        raise StorageError(_qualify_keys(name, str(error))) from error


def _qualify_keys(name: str, text: str) -> str:
    return _KEYS.sub(rf"{section_of(name)}.\1", text)
