"""Data sources, which provide random access to the documents of a corpus by index.

Reading document i always returns the same text, in any thread and process. Each file format has a
module in `formats/`. `documents.py` handles tokens; other modules handle splits, order and batches.

Errors of a source refer to config keys in the section `data`. This module replaces `data` in the
messages with the section of the source: `data.mixture.NAME` or `data.validation.NAME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np

from maxpipe.config.sections.data import section_of
from maxpipe.config.sections.source import SOURCES, SourceConfig, paths_of
from maxpipe.data.formats.array_records import ArrayRecords, TfdsExamples
from maxpipe.data.formats.digests import Digests
from maxpipe.data.formats.disk_cache import FolderCache
from maxpipe.data.formats.files import File, common_folder, digest, find_files, read, stat_files
from maxpipe.data.formats.lines import JsonLines
from maxpipe.data.formats.parquet import ParquetRows, SavedDataset, is_saved_dataset
from maxpipe.data.formats.record_text import TextExtractor, check_length, decode_utf8
from maxpipe.data.formats.source import (
    Heartbeat,
    Progress,
    Record,
    Records,
    RecordSource,
    Source,
    UnreadableRecord,
)
from maxpipe.errors import Code, ConfigError, Problem, StorageError
from maxpipe.io.formatting import pluralize

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

    `cache_dir` stores unpacked copies of compressed files and line offsets of large files. If
    `keep` is false, new copies and offsets are removed when the process exits.

    Raises:
        ConfigError: a path is missing or empty, or its files do not have the format of
            `data.source`.
        StorageError: there is not enough disk space to unpack a file.
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
        case name if name in SOURCES:
            files = find_files(paths, ()) if paths else []
            return PluginRecords(name, files, seed)
        case _:  # tokens and megatron
            rule = "must be a text source for this command: this source contains token ids."
            action = "Set data.source and data.path to the original text."
            raise ConfigError.one(Code.DATA_FORMAT, "data.source", config.source, rule, action)


ENDINGS: dict[str, SourceKind] = {".jsonl": "jsonl", ".parquet": "parquet", ".array": "arrayrecord"}
"""Maps substrings of file names to the source that reads such files. All other files are text."""


def _kind_of(name: str) -> SourceKind:
    for part, kind in ENDINGS.items():
        if part in name:
            return kind
    return "text"


def infer_source(path: str, where: str) -> SourceKind:
    """Infer `data.source` from file names; raise ConfigError if the formats differ."""
    if is_saved_dataset(path):
        return "huggingface"
    if os.path.isfile(os.path.join(os.path.expanduser(path), "manifest.json")):
        return "tokens"
    if path.endswith((".idx", ".bin")) and os.path.isfile(os.path.expanduser(path[:-4]) + ".idx"):
        return "megatron"
    try:
        names = [os.path.basename(file.path) for file in find_files(path, ())]
    except ConfigError as error:
        action = "Set data.path to an existing file, folder or glob pattern."
        problems = [replace(problem, where=where, action=action) for problem in error.problems]
        raise ConfigError(problems) from None
    kinds: set[SourceKind] = {_kind_of(name) for name in names}
    if len(kinds) == 1:
        return kinds.pop()
    rule = f"must contain files of one format: found {' and '.join(sorted(kinds))}."
    action = f"Select files with a pattern such as '{os.path.join(path, '*.jsonl')}'."
    raise ConfigError.one(Code.DATA_FORMAT, where, path, rule, action)


_KEYS = re.compile(rf"\bdata\.({'|'.join(field.name for field in fields(SourceConfig))})\b")


@contextlib.contextmanager
def wrap_section_errors(name: str) -> Iterator[None]:
    """Replace keys of `data` in errors with keys of the source's config section."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        problems = [
            Problem(p.code, *(_qualify_keys(name, text) for text in p.texts))
            for p in error.problems
        ]
        raise ConfigError(problems) from error
    except StorageError as error:
        if not name:
            raise
        raise StorageError(error.code, _qualify_keys(name, error.message)) from error


def _qualify_keys(name: str, text: str) -> str:
    return _KEYS.sub(rf"{section_of(name)}.\1", text)


# Test folders intentionally contain invalid text, and the other folders are not part of the
# library.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class TextFiles:
    """Source in which each text file is one document."""

    def __init__(self, name: str, files: Sequence[File], *, errors: str = "strict"):
        self.name = name
        self.files = [file for file in files if file.size_bytes > 0]
        self._errors = errors
        if not self.files:
            rule = f"must contain text: found {pluralize(len(files), 'file')}, all empty."
            action = "Set data.path to a folder with text, or data.source=corpus."
            raise ConfigError.one(Code.DATA_EMPTY, "data.path", common_folder(files), rule, action)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, columns: list[str] | None = None) -> str:
        file = self.files[index]
        check_length(file.size_bytes)
        return decode_utf8(read(file), self._errors)

    def where(self, index: int) -> str:
        return self.files[index].path

    def fingerprint(self, chosen: str) -> str:
        return digest((file.name, file.size_bytes) for file in self.files)


def open_stdlib_corpus() -> TextFiles:
    """Return the source files of the Python standard library as documents."""
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        # Files with build variables differ between machines with the same Python version.
        files += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        rule = f"requires the source files of Python's standard library, but {root} has none."
        action = "Set data.source=text and data.path to a folder with text."
        raise ConfigError.one(Code.DATA_MISSING, "data.source", "corpus", rule, action)
    return TextFiles("corpus", stat_files(files, root), errors="replace")


class PluginRecords:
    """Documents of a data source from a plug-in."""

    def __init__(self, name: str, files: Sequence[File], seed: int):
        self.name, self.files = name, files
        self._seed = seed
        self._documents = SOURCES[name]([file.path for file in files], seed)
        if isinstance(self._documents, str | bytes | Mapping) or not all(
            hasattr(self._documents, each) for each in ("__len__", "__getitem__")
        ):
            rule = "must be a sequence of documents, with a length and an index: the plug-in "
            rule += f"returned {type(self._documents).__name__}."
            action = "Return a list of documents from the plug-in."
            raise ConfigError.one(Code.PLUG_FAILED, "data.source", name, rule, action)
        if not len(self._documents):
            rule = "must have documents: the plug-in returned none."
            action = "Correct the plug-in, or set data.path to other files."
            raise ConfigError.one(Code.PLUG_FAILED, "data.source", name, rule, action)

    def __len__(self) -> int:
        return len(self._documents)

    def read(self, index: int, columns: list[str] | None = None) -> Record:
        document = self._documents[index]
        if not isinstance(document, str | Mapping):
            rule = f"is of type {type(document).__name__}: a plug-in must return text or a mapping."
            raise ConfigError.one(
                Code.PLUG_FAILED, self.where(index), None, rule, "Correct the plug-in."
            )
        if isinstance(document, str):
            check_length(len(document))
        return document

    def where(self, index: int) -> str:
        return f"{self.name}: document {index}"

    def fingerprint(self, chosen: str) -> str:
        """Return a digest of the files, the seed, the number of documents, and the first and last
        document.
        """
        ends = [json.dumps(self.read(index), default=str) for index in (0, len(self) - 1)]
        return digest(
            [
                *((file.name, file.size_bytes) for file in self.files),
                *(chosen, self._seed, len(self), *ends),
            ]
        )


_DOCUMENTS = 8192
_WORDS = 1024


class SyntheticRecords:
    """Synthetic documents for benchmarks: random words with Zipf frequencies."""

    name = "synthetic"
    files = ()

    def __init__(self, seed: int, num_documents: int = _DOCUMENTS):
        self._seed = seed % (1 << 64)
        self._num_documents = num_documents
        letters = _random_bits(self._seed, num_documents, 16 * _WORDS).reshape(-1, 16)
        self._words = [
            (row[1 : 2 + row[0] % 10] % 26 + ord("a")).astype(np.uint8).tobytes().decode()
            for row in letters
        ]
        share = np.cumsum(1 / np.arange(1, _WORDS + 1))
        self._shares = share / share[-1]

    def __len__(self) -> int:
        return self._num_documents

    def read(self, index: int, columns: list[str] | None = None) -> str:
        if not 0 <= index < self._num_documents:
            raise IndexError(index)
        bits = _random_bits(self._seed, index, 1024)
        draws = bits[: 16 + int(bits[-1] % 1008)] / 2.0**64
        words = np.minimum(np.searchsorted(self._shares, draws), _WORDS - 1)
        return " ".join(self._words[word] for word in words)

    def where(self, index: int) -> str:
        return f"synthetic: document {index}"

    def fingerprint(self, chosen: str) -> str:
        return digest([self._seed, self._num_documents])


def _random_bits(seed: int, stream: int, count: int) -> np.ndarray:
    # numpy guarantees that the raw output of bit generators is stable across versions. numpy does
    # not guarantee the same for distributions.
    return np.random.PCG64([seed, stream]).random_raw(count)
