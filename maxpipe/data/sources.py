"""Where documents come from: random access to the texts of a corpus by number.

A source is a sequence: asking twice for document i gives the same text, in any
thread and any process. Tokens, splits, order and batches are not its concern;
`packing.py` is the next step.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import logging
import os
import re
import sysconfig
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from maxpipe.boundary.files import opened
from maxpipe.boundary.typed import parse
from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.inputs import broken_link
from maxpipe.config.rules import did_you_mean
from maxpipe.errors import ConfigError
from maxpipe.words import counted

_LOG = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
_EDGE_BYTES = 1 << 16
_SYNTHETIC_DOCUMENTS = 8192
_SYNTHETIC_WORDS = 1024
_TFDS_NAME = re.compile(r"[A-Za-z]\w*(/[\w+.-]+)?(:\d+\.\d+\.\d+)?")
_MAX_DEPTH = 256
"""Deepest nesting of brackets in a document's JSON."""
_ANYTHING: Any = Any
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
# Tests hold text that is broken on purpose, the others are not part of the library.
_CORPUS_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


class Source(Protocol):
    """A random-access sequence of documents."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...

    def fingerprint(self) -> str:
        """Digest of what identifies the content cheaply: names, sizes, counts, edges of files."""
        ...


Moved = Callable[[], object]
"""Called by a long pass over the data whenever a part of it is done."""


class Progress:
    """Log lines, a few seconds apart, while a long pass over the data runs."""

    def __init__(self, task: str, total: int, moved: Moved | None = None):
        self._task = task
        self._total = total
        self._moved = moved
        self._next = time.monotonic() + _PROGRESS_SECONDS

    def update(self, done: int) -> None:
        if self._moved is not None:
            self._moved()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_SECONDS
            percent = 100 * done / max(1, self._total)
            _LOG.info("%s: %.1f %% of %d", self._task, percent, self._total)


def open_source(config: SourceConfig, seed: int, moved: Moved | None = None) -> Source:
    """The source that `data.source` names. `seed` is read by `synthetic` only.

    Raises:
        ConfigError: a path that is missing, empty or not readable as `data.source`.
    """
    match config.source:
        case "corpus":
            return _open_corpus()
        case "text":
            return FileSource("text", find_files(config.path, ()))
        case "jsonl":
            return JsonLinesSource(find_files(config.path, (".jsonl",)), config.field, moved)
        case "arrayrecord":
            files = find_files(config.path, (".array_record", ".arrayrecord"))
            return ArrayRecordSource(files, config.field)
        case "tfds":
            return TfdsSource(config.path, config.tfds_dir, config.field)
        case "synthetic":
            return SyntheticSource(seed)


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


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source. `name` does not depend on where the data folder is."""

    name: str
    path: str
    size_bytes: int


class FileSource:
    """One document per file."""

    def __init__(self, name: str, files: Sequence[File], *, errors: str = "strict"):
        self.name = name
        self._files = [file for file in files if file.size_bytes > 0]
        self._errors = errors
        if not self._files:
            raise ConfigError.one(
                "data.path",
                os.path.commonpath([file.path for file in files]),
                f"must hold text: {counted(len(files), 'file')} with nothing inside.",
                "Set data.path to a folder with text, or data.source=corpus.",
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> str:
        path = self._files[index].path
        try:
            with open(opened(path), "rb") as stream:
                raw = stream.read()
        except OSError as error:
            raise _unreadable(path, error) from error
        return _decode(raw, path, self._errors)

    def fingerprint(self) -> str:
        return _digest((file.name, file.size_bytes) for file in self._files)


class JsonLinesSource:
    """One document per line. Holds where lines start, not what is in them."""

    name = "jsonl"

    def __init__(self, files: Sequence[File], field: str, moved: Moved | None = None):
        self._files = files
        self._field = field
        for file in files:
            if file.path.endswith(_COMPRESSED):
                raise ConfigError.one(
                    "data.path",
                    file.path,
                    "must not be compressed: a compressed file cannot be read from the middle.",
                    "Unpack it and set data.path to the unpacked file.",
                )
        self._starts = [_line_starts(file, moved) for file in files]
        # Document numbers at which each file ends.
        self._ends = np.cumsum([len(starts) for starts in self._starts])
        if not len(self):
            raise ConfigError.one(
                "data.path",
                files[0].path,
                "must hold JSON objects, one per line: "
                f"{counted(len(files), 'file')} without lines.",
                "Set data.path to a file with lines, or data.source=corpus.",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str:
        which = int(np.searchsorted(self._ends, index, side="right"))
        starts = self._starts[which]
        start = int(starts[index - int(self._ends[which])])
        path = self._files[which].path
        try:
            with open(opened(path), "rb") as stream:
                stream.seek(start)
                line = stream.readline()
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            return _field_of(parse(line, _ANYTHING, most_depth=_MAX_DEPTH), self._field, path)
        except ValueError as error:
            raise ConfigError.one(
                f"{path}:{_line_number(path, start)}",
                _shortened(line),
                f"must be a JSON object: {error}.",
                "Correct or remove the line.",
            ) from error
        except ConfigError as error:
            where = f"{path}:{_line_number(path, start)}"
            problem = error.problems[0]
            raise ConfigError.one(where, problem.given, problem.rule, problem.action) from None

    def fingerprint(self) -> str:
        return _digest(
            [self._field, *((f.name, f.size_bytes, _edges(f.path)) for f in self._files)]
        )


class ArrayRecordSource:
    """One document per record: JSON objects if the first record is one, else UTF-8 text."""

    name = "arrayrecord"

    def __init__(self, files: Sequence[File], field: str):
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        self._files = files
        self._field = field
        path = files[0].path
        try:
            self._records = ArrayRecordDataSource([file.path for file in files])
            if not len(self._records):
                raise ValueError("it has no records")
            first = self._records[0]
        except Exception as error:  # its reader has another class for each fault
            raise ConfigError.one(
                "data.path",
                path if len(files) == 1 else f"{path} and {len(files) - 1} more",
                f"must be ArrayRecord files with records: {_shortened(str(error))}.",
                "Set data.source=text or data.source=jsonl if the files are of that kind.",
            ) from error
        self._json = _is_json_object(first)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> str:
        raw = self._records[index]
        where = f"data.path: record {index}"
        if not self._json:
            return _decode(raw, where)
        try:
            record = parse(raw, _ANYTHING, most_depth=_MAX_DEPTH)
        except ValueError as error:
            raise ConfigError.one(
                where,
                _shortened(raw),
                f"must be a JSON object like record 0: {error}.",
                "Write all records as JSON objects, or all as text.",
            ) from error
        return _field_of(record, self._field, where)

    def fingerprint(self) -> str:
        kind = self._field if self._json else ""
        return _digest(
            [kind, len(self), *((f.name, f.size_bytes, _edges(f.path)) for f in self._files)]
        )


class TfdsSource:
    """The `train` split of a dataset that was prepared as ArrayRecord. Needs no TensorFlow."""

    name = "tfds"

    def __init__(self, dataset: str, folder: str, field: str):
        self._dataset = dataset
        self._field = field
        if not dataset:
            raise ConfigError.one(
                "data.path",
                '""',
                "must name a dataset.",
                "Set data.path, e.g. data.path=c4/en:3.1.0.",
            )
        if not _TFDS_NAME.fullmatch(dataset):
            raise ConfigError.one(
                "data.path",
                dataset,
                "must be name, name:version or name/config:version: a name with a namespace, such "
                "as huggingface:, would load code from the network.",
                "Set data.path, e.g. data.path=c4/en:3.1.0.",
            )
        tfds = _import_tfds()
        try:
            self._examples: Any = tfds.data_source(
                dataset,
                split="train",
                data_dir=os.path.expanduser(folder) or None,
                download=False,
                try_gcs=False,
            )
        except Exception as error:  # tfds reports a missing dataset in many ways
            raise _not_prepared(tfds, dataset, folder, error) from error
        if not len(self._examples):
            raise ConfigError.one(
                "data.path", dataset, "must have examples in its train split.", "Prepare it again."
            )

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> str:
        return _field_of(self._examples[index], self._field, f"{self._dataset}: example {index}")

    def fingerprint(self) -> str:
        info = self._examples.dataset_info
        split = info.splits["train"]
        return _digest([info.full_name, self._field, split.num_bytes, *split.shard_lengths])


def _not_prepared(tfds: Any, dataset: str, folder: str, error: Exception) -> ConfigError:
    place = folder or "the tfds default folder"
    rule = f"must be prepared as ArrayRecord in {place} with a train split: "
    name = re.split("[/:]", dataset)[0]
    known = tfds.list_builders(with_community_datasets=False)
    if name not in known:
        guess = did_you_mean(name, known)
        action = (
            f"Set data.path={guess}, if that is meant."
            if guess
            else "Correct the name, or data.tfds_dir."
        )
        rule += f"there is none, and tfds has no script that makes a dataset {name}."
        return ConfigError.one("data.path", dataset, rule, action)
    # Reading needs neither package; most scripts that make a dataset need both.
    code = f"import tensorflow_datasets as tfds; tfds.builder({dataset!r}, "
    code += f"data_dir={os.path.expanduser(folder) or None!r}, file_format='array_record')"
    return ConfigError.one(
        "data.path",
        dataset,
        rule + _shortened(str(error)),
        "Run once: pip install tensorflow importlib_resources, then "
        f'python -c "{code}.download_and_prepare()"',
    )


class SyntheticSource:
    """Documents of made-up words, some frequent and most rare, made when they are asked for."""

    name = "synthetic"

    def __init__(self, seed: int, num_documents: int = _SYNTHETIC_DOCUMENTS):
        self._seed = seed % (1 << 64)
        self._num_documents = num_documents
        letters = _random_bits(self._seed, num_documents, 16 * _SYNTHETIC_WORDS).reshape(-1, 16)
        self._words = [
            (row[1 : 2 + row[0] % 10] % 26 + ord("a")).astype(np.uint8).tobytes().decode()
            for row in letters
        ]
        share = np.cumsum(1 / np.arange(1, _SYNTHETIC_WORDS + 1))
        self._shares = share / share[-1]

    def __len__(self) -> int:
        return self._num_documents

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < self._num_documents:
            raise IndexError(index)
        bits = _random_bits(self._seed, index, 1024)
        draws = bits[: 16 + int(bits[-1] % 1008)] / 2.0**64
        words = np.minimum(np.searchsorted(self._shares, draws), _SYNTHETIC_WORDS - 1)
        return " ".join(self._words[word] for word in words)

    def fingerprint(self) -> str:
        return _digest([self._seed, self._num_documents])


def _random_bits(seed: int, stream: int, count: int) -> np.ndarray:
    # numpy guarantees a bit generator's raw output across versions, but not its distributions.
    return np.random.PCG64([seed, stream]).random_raw(count)


def _open_corpus() -> FileSource:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _CORPUS_SKIPPED_FOLDERS]
        # The build's variables differ between machines with the same Python.
        files += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise ConfigError.one(
            "data.source",
            "corpus",
            f"needs the source files of Python's standard library, and {root} has none.",
            "Set data.source=text and data.path to a folder with text.",
        )
    return FileSource("corpus", _describe(files, root), errors="replace")


def find_files(path: str, suffixes: tuple[str, ...]) -> list[File]:
    """The files of a file, folder or glob pattern. `suffixes` narrows a folder, not a pattern."""
    if not path:
        raise ConfigError.one(
            "data.path", '""', "must name a file, a folder or a glob pattern.", "Set data.path."
        )
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return _describe([expanded], os.path.dirname(expanded))
    if os.path.isdir(expanded):
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(expanded)
            for name in names
            if not name.startswith(".") and (not suffixes or any(s in name for s in suffixes))
        ]
        what = f"a folder with {' or '.join(suffixes)} files" if suffixes else "a folder with files"
    else:
        found = [name for name in glob.glob(expanded, recursive=True) if os.path.isfile(name)]
        what = "a file, a folder or a glob pattern that matches files"
    if not found:
        other = broken_link(expanded) or (
            "" if os.path.isdir(expanded) or not os.path.exists(expanded) else "no regular file"
        )
        but = f"it is {other}" if other else f"from {os.getcwd()} it gives 0 files"
        raise ConfigError.one(
            "data.path",
            path,
            f"must be {what}; {but}.",
            "Set data.path to a path that exists, or data.source=corpus to run without one.",
        )
    if os.path.isdir(expanded):
        return _describe(found, expanded)
    return _describe(found, os.path.commonpath([os.path.dirname(name) for name in found]))


def _describe(paths: Iterable[str], root: str) -> list[File]:
    files = []
    for path in paths:
        try:
            size_bytes = os.path.getsize(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        files.append(File(os.path.relpath(path, root or "."), path, size_bytes))
    return sorted(files, key=lambda file: file.name)


def _line_starts(file: File, moved: Moved | None) -> np.ndarray:
    """Byte offsets of the lines that are not blank; a byte-order mark is part of none."""
    progress = Progress(f"finding lines of {file.name} (bytes)", file.size_bytes, moved)
    starts = array("q")
    offset = 0
    try:
        with open(opened(file.path), "rb") as stream:
            for line in stream:
                text = line if offset else line.removeprefix(codecs.BOM_UTF8)
                offset += len(line)
                if text and not text.isspace():
                    starts.append(offset - len(text))
                if len(starts) % 4096 == 0:
                    progress.update(offset)
        progress.update(offset)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    return np.array(starts, dtype=np.int64)


def _line_number(path: str, offset: int) -> int:
    """Counted only for an error message: the index does not keep blank lines."""
    number = 1
    with open(opened(path), "rb") as stream:
        for line in stream:
            offset -= len(line)
            if offset < 0:
                break
            number += 1
    return number


def _field_of(record: object, field: str, where: str) -> str:
    """The text of one field of a JSON object or tfds example."""
    if not isinstance(record, dict):
        raise ConfigError.one(
            where,
            _shortened(str(record)),
            f"must be a JSON object with a field {field}; it is of type {type(record).__name__}.",
            'Write each document as {"text": "..."}.',
        )
    value = record.get(field)
    if isinstance(value, bytes):
        return _decode(value, where)
    if isinstance(value, str):
        # A JSON string may hold half of a surrogate pair, which no encoder takes.
        return value.encode("utf-8", "replace").decode()
    texts = [name for name, other in record.items() if isinstance(other, (str, bytes))]
    found = f"is of type {type(value).__name__}" if field in record else "is missing"
    raise ConfigError.one(
        where,
        f"fields {', '.join(map(str, record)) or 'none'}",
        f"must have text in data.field ({field}), which {found}.",
        f"Set data.field={texts[0]}." if texts else "Add a text field to every record.",
    )


def _decode(raw: bytes, where: str, errors: str = "strict") -> str:
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ConfigError.one(
            where,
            f"byte 0x{raw[error.start]:02x} at offset {error.start}",
            "must be UTF-8 text.",
            "Convert it to UTF-8, or leave it out of data.path with a glob pattern.",
        ) from error


def _is_json_object(raw: bytes) -> bool:
    try:
        return isinstance(parse(raw, _ANYTHING, most_depth=_MAX_DEPTH), dict)
    except ValueError:
        return False


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ConfigError.one(
            "data.source",
            "tfds",
            f"needs the package tensorflow_datasets: {error}.",
            "Run: pip install tensorflow-datasets",
        ) from error
    return tensorflow_datasets


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError.one(
        "data.path",
        path,
        f"must be readable: {error.strerror or error}.",
        "Restore the file or its permissions, or set data.path to another one.",
    )


def _shortened(text: str | bytes, limit: int = 120) -> str:
    line = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _edges(path: str) -> str:
    """Digest of a file's first and last bytes, which tells files of one size apart."""
    with open(opened(path), "rb") as stream:
        head = stream.read(_EDGE_BYTES)
        stream.seek(max(len(head), os.path.getsize(path) - _EDGE_BYTES))
        return hashlib.sha256(head + stream.read()).hexdigest()


def _digest(parts: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()
