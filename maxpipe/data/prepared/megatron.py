"""Megatron token files (`NAME.bin` and `NAME.idx`) written by other tools.

These files contain neither digests nor the name of the tokenizer. The full index is therefore
checked when it is opened, and a document's token ids are checked when the document is read. A run
computes digests of the files before it uses them. `open_documents` also opens prepared folders.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.documents import EncodedDocument
from maxpipe.data.formats.digests import Digests
from maxpipe.data.formats.files import File, Stat, digest, file_changed_error, stat_files
from maxpipe.data.formats.source import Heartbeat, place_of
from maxpipe.data.prepared.manifest import (
    BIN,
    HEADER_BYTES,
    IDX,
    SPAN_DOCUMENTS,
    IndexLayout,
    content_metadata,
    parse,
)
from maxpipe.data.prepared.range_reader import RangeReader, open_range_reader
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.tokenizer import Tokenizer, check_token_ids
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import pluralize

_ENTRIES = 1 << 18
"""Number of index entries that are checked together."""
_SAMPLE = 64
_ATTEMPTS = 3
"""Number of attempts to read a range of a file that is modified during the read."""
_EDGE_BYTES = 1 << 16
_ACTION = "Create the pair of files again, or exclude it with a glob pattern in data.path."


@dataclass(frozen=True, slots=True)
class _IndexedFile:
    index: RangeReader
    ids: RangeReader
    layout: IndexLayout
    has_bounds: bool
    """Whether bounds in the index define the documents; otherwise each sequence is a document."""

    @property
    def num_documents(self) -> int:
        return self.layout.num_bounds - 1 if self.has_bounds else self.layout.num_sequences

    def bounds(self, first: int, stop: int) -> np.ndarray:
        """Return the first sequence of each document in `range(first, stop)`, int64 [documents]."""
        if not self.has_bounds:
            return np.arange(first, stop)
        return _table(self.index, self.layout.bounds_at, "<i8", first, stop)

    def offsets(self, sequences: np.ndarray) -> np.ndarray:
        """Return the number of ids before each of the sorted sequences, int64 [sequences]."""
        first, stop = int(sequences[0]), int(sequences[-1])
        size, layout = self.layout.dtype.itemsize, self.layout
        past_end = stop == layout.num_sequences
        pointers = _table(self.index, layout.pointers_at, "<i8", first, stop + (not past_end))
        if past_end:
            end = 0
            if stop:
                [last] = _table(self.index, layout.pointers_at, "<i8", stop - 1, stop)
                [length] = _table(self.index, layout.lengths_at, "<i4", stop - 1, stop)
                end = int(last) + int(length) * size
            pointers = np.concatenate([pointers, [end]])
        return pointers[sequences - first] // size


def _table(file: RangeReader, at: int, kind: str, first: int, stop: int) -> np.ndarray:
    size = np.dtype(kind).itemsize
    return np.frombuffer(file.read(at + size * first, at + size * stop), kind)


class _VerifiedFile:
    """Local file whose reads fail if the content no longer matches the first digest."""

    def __init__(self, ranges: RangeReader, file: File, digests: Digests):
        self.path, self.size = ranges.path, ranges.size
        self._ranges, self._file, self._digests = ranges, file, digests

    def read(self, start: int, stop: int) -> bytes:
        return self.read_with_stat(start, stop)[0]

    def read_with_stat(self, start: int, stop: int) -> tuple[bytes, Stat | None]:
        for _ in range(_ATTEMPTS):
            content, stat = self._ranges.read_with_stat(start, stop)
            if stat == self._digests.stat(self._file):
                return content, stat
            # The file was written to, possibly with the same content.
            self._digests.check([self._file])
        raise file_changed_error(self._file)


class MegatronDocuments:
    """Documents stored as pairs of Megatron index files and token-id files. BOS and EOS are added
    if the files do not contain them.

    If `digests` is set, local files without a known digest are hashed when opened, and a later
    change raises ConfigError.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        digests: Digests | None = None,
        moved: Heartbeat | None = None,
    ):
        self.pad_id = tokenizer.pad_id
        self._tokenizer = tokenizer
        self._content: Mapping[str, str] = {}
        names = _names(path)
        self._pairs = [_open(name) for name in names]
        if digests is not None and not url_scheme(path):
            root = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
            files = stat_files([name + end for name in names for end in (IDX, BIN)], root)
            self._content = digests.content(files, moved)
            by_path = {file.path: file for file in files}
            self._pairs = [
                replace(
                    pair,
                    index=_VerifiedFile(pair.index, by_path[pair.index.path], digests),
                    ids=_VerifiedFile(pair.ids, by_path[pair.ids.path], digests),
                )
                for pair in self._pairs
            ]
        self._starts = np.cumsum([0, *(pair.num_documents for pair in self._pairs)])
        self.num_documents = int(self._starts[-1])
        if not self.num_documents:
            rule = (
                f"must contain documents: found {pluralize(len(self._pairs), 'index')}, all empty."
            )
            raise ConfigError.one(
                Code.DATA_EMPTY, "data.path", path, rule, "Set data.path to other files."
            )
        for pair in self._pairs:
            _check_sequences(pair)
        self._added = 0, 0
        self._added = self._missing_ids()
        self.span_tokens = self._count()
        self.num_tokens = int(self.span_tokens.sum())

    def _missing_ids(self) -> tuple[int, int]:
        """Return how many BOS and EOS tokens to add, inferred from the first documents."""
        documents = [self._stored(number) for number in range(min(_SAMPLE, self.num_documents))]
        begin, end = self._tokenizer.begin_id, self._tokenizer.end_id
        kept = [ids for ids in documents if len(ids)]
        return (
            int(not any(ids[0] == begin for ids in kept)),
            int(not any(ids[-1] == end for ids in kept)),
        )

    @property
    def has_conversations(self) -> bool:
        """Always False, because the files contain no loss masks."""
        return False

    @property
    def remark(self) -> str:
        """Note about the BOS and EOS tokens that are added to the documents."""
        begin, end = self._added
        words = [name for name, added in (("BOS", begin), ("EOS", end)) if added]
        return f"{' and '.join(words)} added" if words else "BOS and EOS as stored"

    def _count(self) -> np.ndarray:
        """Return the number of tokens in each span, int64 [spans]."""
        parts = []
        for first in range(0, self.num_documents, _ENTRIES):
            lengths = self.lengths_between(first, min(first + _ENTRIES, self.num_documents))
            parts.append(np.add.reduceat(lengths, np.arange(0, len(lengths), SPAN_DOCUMENTS)))
        return np.concatenate(parts)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: number of tokens per document."""
        return self._lengths

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return self.lengths_between(0, self.num_documents)

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """Return the token counts, int64, of documents `first` to `stop` - 1."""
        low, high = np.searchsorted(self._starts, [first, stop - 1], side="right") - 1
        parts = []
        for number in range(low, high + 1):
            start, end = self._starts[number : number + 2].tolist()
            pair = self._pairs[number]
            bounds = pair.bounds(max(first, start) - start, min(stop, end) - start + 1)
            parts.append(np.diff(pair.offsets(bounds)))
        return np.concatenate(parts) + sum(self._added)

    def __getitem__(self, document: int) -> EncodedDocument:
        if not 0 <= document < self.num_documents:
            raise IndexError(document)
        ids = self._stored(document)
        front, behind = self._added
        parts = [[self._tokenizer.begin_id]] * front + [ids] + [[self._tokenizer.end_id]] * behind
        return EncodedDocument(np.concatenate(parts).astype(np.int32))

    def _stored(self, document: int) -> np.ndarray:
        number, inside = place_of(self._starts[1:], document)
        pair = self._pairs[number]
        size = pair.layout.dtype.itemsize
        begin, end = pair.offsets(pair.bounds(inside, inside + 2))[[0, -1]].tolist()
        ids = np.frombuffer(pair.ids.read(begin * size, end * size), pair.layout.dtype)
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < 0 or high >= self._tokenizer.vocab_size:
            rule = f"must have ids from 0 to {self._tokenizer.vocab_size - 1}, the range of the "
            rule += f"tokenizer: found {low if low < 0 else high}."
            action = "Set tokenizer.* to the tokenizer that encoded the files."
            raise ConfigError.one(
                Code.TOK_MISMATCH, f"{pair.ids.path}: document {inside}", None, rule, action
            )
        check_token_ids(f"{pair.ids.path}: document {inside}", ids, self._tokenizer)
        return ids

    def where(self, document: int) -> str:
        """Return the file that contains a document, and the document's index in this file."""
        number, inside = place_of(self._starts[1:], document)
        return f"{self._pairs[number].ids.path}: document {inside}"

    unreadable = 0

    byte_counts = None
    """Always None, because the files do not contain byte counts."""

    def metadata(self) -> Mapping[str, Any]:
        """Return digests of each file's name, size, first and last bytes and, if known, content."""
        parts: list[object] = [list(self._added)]
        for file in (file for pair in self._pairs for file in (pair.index, pair.ids)):
            edges = file.read(0, min(_EDGE_BYTES, file.size))
            edges += file.read(max(0, file.size - _EDGE_BYTES), file.size)
            parts.append(
                [os.path.basename(file.path), file.size, hashlib.sha256(edges).hexdigest()]
            )
        return {
            "source": "megatron",
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "source_digest": digest(parts),
            **content_metadata(self._content),
        }


def _names(path: str) -> list[str]:
    """Return the paths (without suffix) of a prefix, file, folder or glob pattern."""
    prefix = path if url_scheme(path) else os.path.expanduser(path)
    if prefix.endswith((BIN, IDX)) and not glob.has_magic(prefix):
        prefix = prefix[: -len(IDX)]
    if url_scheme(prefix) or os.path.exists(prefix + IDX):
        return [prefix]
    is_folder = os.path.isdir(prefix)
    pattern = os.path.join(glob.escape(prefix), f"*{IDX}") if is_folder else prefix
    names = {name[: -len(IDX)] for name in glob.glob(pattern) if name.endswith((BIN, IDX))}
    names |= {name for name in glob.glob(pattern) if os.path.exists(name + IDX)}
    if not names:
        rule = f"must be the prefix NAME of NAME{BIN} and NAME{IDX}, or a folder or pattern: "
        rule += f"0 files match in {os.getcwd()}."
        raise ConfigError.one(
            Code.DATA_MISSING, "data.path", path, rule, "Set data.path to files that exist."
        )
    return sorted(names)


def _open(name: str) -> _IndexedFile:
    try:
        index, ids = open_range_reader(name + IDX), open_range_reader(name + BIN)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        rule = f"must be a pair of files, {name + BIN} and {name + IDX}: a file is missing."
        raise ConfigError.one(
            Code.DATA_MISSING, "data.path", name, rule, "Set data.path to files that exist."
        ) from error
    try:
        layout = parse(index.read(0, min(index.size, HEADER_BYTES)), index.size)
    except ValueError as error:
        raise _index_error(
            index.path, f"must be a Megatron index of token ids: {error}."
        ) from error
    # Files written without document boundaries contain only the first bound.
    return _IndexedFile(index, ids, layout, layout.num_bounds > 1)


def _index_error(where: str, rule: str) -> ConfigError:
    return ConfigError.one(Code.DATA_DAMAGED, where, None, rule, _ACTION)


def _entry_ranges(count: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of index entries; consecutive ranges overlap by one entry."""
    for first in range(0, max(count - 1, 1), _ENTRIES):
        yield first, min(first + _ENTRIES + 1, count)


def _check_sequences(pair: _IndexedFile) -> None:
    layout, path, size = pair.layout, pair.index.path, pair.layout.dtype.itemsize
    if layout.num_sequences:
        expected = 0
        for first in range(0, layout.num_sequences, _ENTRIES):
            stop = min(first + _ENTRIES, layout.num_sequences)
            lengths = _table(pair.index, layout.lengths_at, "<i4", first, stop).astype(np.int64)
            pointers = _table(pair.index, layout.pointers_at, "<i8", first, stop)
            ends = expected + np.cumsum(lengths) * size
            if len(bad := np.flatnonzero(lengths < 0)):
                _raise_index_error(path, first + bad[0], f"has a length of {lengths[bad[0]]}")
            if len(bad := np.flatnonzero(pointers != ends - lengths * size)):
                begin = int(ends[bad[0]] - lengths[bad[0]] * size)
                _raise_index_error(
                    path, first + bad[0], f"begins at byte {pointers[bad[0]]}, not at {begin}"
                )
            if len(bad := np.flatnonzero(ends > pair.ids.size)):
                words = f"ends at byte {ends[bad[0]]} of {pair.ids.path}, which has "
                _raise_index_error(path, first + bad[0], f"{words}{pair.ids.size}")
            expected = int(ends[-1])
    if pair.has_bounds:
        _check_bounds(pair)


def _check_bounds(pair: _IndexedFile) -> None:
    layout, path = pair.layout, pair.index.path
    [last] = pair.bounds(layout.num_bounds - 1, layout.num_bounds)
    if last != layout.num_sequences:
        words = f"ends at sequence {last} of {layout.num_sequences}"
        _raise_index_error(path, layout.num_bounds - 2, words, "document")
    for first, stop in _entry_ranges(layout.num_bounds):
        bounds = pair.bounds(first, stop)
        # Bounds are compared with both limits, because a difference may overflow 64 bits.
        if len(bad := np.flatnonzero((bounds < 0) | (bounds > layout.num_sequences))):
            words = f"begins at sequence {bounds[bad[0]]} of {layout.num_sequences}"
            _raise_index_error(path, first + bad[0], words, "document")
        if len(bad := np.flatnonzero(np.diff(bounds) < 0)):
            words = f"begins after the next document, at sequence {bounds[bad[0]]}"
            _raise_index_error(path, first + bad[0], words, "document")
        if first == 0 and bounds[0]:
            _raise_index_error(path, 0, f"begins at sequence {bounds[0]}, not at 0", "document")


def _raise_index_error(path: str, number: Any, words: str, what: str = "sequence") -> None:
    raise _index_error(f"{path}: {what} {number}", f"must be consistent: the {what} {words}.")


IDS = ("tokens", "megatron")
"""Values of `data.source` for documents that are stored as token ids."""


def open_documents(
    config: SourceConfig,
    tokenizer: Tokenizer,
    digests: Digests | None = None,
    moved: Heartbeat | None = None,
) -> PreparedDocuments | MegatronDocuments:
    """Open documents that are stored as token ids of this tokenizer.

    `digests` stores the content digests of Megatron files; see `MegatronDocuments`.

    Raises:
        ConfigError: the files are missing, or were written with another tokenizer.
        StorageError: files are damaged or cannot be read.
    """
    if config.source == "megatron":
        return MegatronDocuments(config.path, tokenizer, digests, moved)
    return PreparedDocuments(config.path, tokenizer)
