"""Reader for prepared folders on disk or in a bucket, and windowed shuffling.

Opening a folder reads only the manifest and the span totals, not the indexes of the shards. Each
block of a file is compared with its CRC when the block is first read.

If a source has too many documents for a full shuffle, spans of consecutive documents are shuffled
in an order that depends on the seed. Some spans are held out for validation. The remaining spans
are assigned to windows in shuffled order. Documents and sequences are shuffled within a window, and
each epoch reads the windows in a different order. Only the span totals and the document lengths of
recently read windows are kept in memory. With `data.packing=concatenate`, the number of sequences
per window follows from the span totals; otherwise all lengths are read once.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from maxpipe.data.documents import EncodedDocument
from maxpipe.data.formats.source import place_of
from maxpipe.data.packing import DOCUMENT_ORDER, Packer, Permutation, Sequences
from maxpipe.data.prepared.manifest import (
    BIN,
    CONTENT_KEY,
    CRC_FILE,
    HEADER_BYTES,
    IDX,
    MASK_FILE,
    META,
    META_FILE,
    SPAN_DOCUMENTS,
    SPANS,
    FileEntry,
    Manifest,
    ShardEntry,
    checksummed_suffixes,
    content_metadata,
    has_masks,
    parse,
    read_manifest,
    shard_name,
)
from maxpipe.data.prepared.range_reader import (
    BLOCK_BYTES,
    ChecksummedReader,
    PieceCache,
    damaged_error,
    join_path,
    open_range_reader,
)
from maxpipe.data.sources import Heartbeat, Progress
from maxpipe.data.tokenizer import Tokenizer, check_token_ids, suggest_tokenizer_action
from maxpipe.errors import Code, ConfigError
from maxpipe.io.files import url_scheme


class Shard:
    """Shard of consecutive documents, whose files are opened on first use."""

    def __init__(self, folder: str, number: int, entry: ShardEntry, kept: PieceCache | None):
        self.entry = entry
        self._folder, self._number, self._piece_cache = folder, number, kept

    def _path(self, suffix: str) -> str:
        return join_path(self._folder, shard_name(self._number, suffix))

    @functools.cached_property
    def files(self) -> dict[str, ChecksummedReader]:
        """Maps the suffixes of files with CRCs to their readers."""
        entries = self.entry["files"]
        names = checksummed_suffixes(MASK_FILE in entries)
        crcs = np.frombuffer(read_verified(self._path(CRC_FILE), entries[CRC_FILE]), "<u4")
        sizes = [entries[suffix]["bytes"] for suffix in names]
        ends = np.cumsum([-(-size // BLOCK_BYTES) for size in sizes])
        if len(crcs) != ends[-1]:
            raise damaged_error(
                self._path(CRC_FILE), f"the file has {len(crcs)} CRCs for {ends[-1]} blocks"
            )
        parts = np.split(crcs, ends[:-1])
        return {
            suffix: ChecksummedReader(
                open_range_reader(self._path(suffix)), size, part, self._piece_cache
            )
            for suffix, size, part in zip(names, sizes, parts, strict=True)
        }

    @functools.cached_property
    def layout(self) -> Any:
        """Layout of the index, checked against the manifest."""
        index = self.files[IDX]
        try:
            layout = parse(index.read(0, min(HEADER_BYTES, index.size)), index.size)
        except ValueError as error:
            raise damaged_error(index.path, str(error)) from error
        if layout.num_sequences != self.entry["documents"]:
            raise damaged_error(index.path, f"the index has {layout.num_sequences} documents")
        if self.entry["tokens"] * layout.dtype.itemsize != self.entry["files"][BIN]["bytes"]:
            raise damaged_error(index.path, f"the index has ids of {layout.dtype.itemsize} bytes")
        return layout

    def lengths(self, first: int, stop: int) -> np.ndarray:
        """Return the token counts, int64, of documents `first` to `stop` - 1."""
        at = self.layout.lengths_at
        raw = self.files[IDX].read(at + 4 * first, at + 4 * stop)
        return np.frombuffer(raw, "<i4").astype(np.int64)

    def read(self, document: int) -> EncodedDocument:
        """Return the token ids and the loss mask of a document."""
        begin, stop = self._place(document)
        size, files = self.layout.dtype.itemsize, self.files
        ids = np.frombuffer(files[BIN].read(begin, stop), self.layout.dtype)
        if MASK_FILE not in files:
            return EncodedDocument(ids)
        front, first = begin // size, begin // size // 8
        raw = files[MASK_FILE].read(first, -(-(stop // size) // 8))
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        at = front - 8 * first
        return EncodedDocument(ids, bits[at : at + len(ids)].astype(bool))

    def _place(self, document: int) -> tuple[int, int]:
        at = self.layout.pointers_at + 8 * document
        is_last = document + 1 == self.entry["documents"]
        raw = self.files[IDX].read(at, at + (8 if is_last else 16))
        begin, *end = np.frombuffer(raw, "<i8").tolist()
        stop, size = end[0] if end else self.files[BIN].size, self.layout.dtype.itemsize
        if not 0 <= begin <= stop <= self.files[BIN].size or begin % size or stop % size:
            raise damaged_error(
                self.files[IDX].path,
                f"document {document} has the invalid byte range {begin} to {stop}",
            )
        return begin, stop

    def meta(self, first: int, stop: int) -> np.ndarray:
        """Return the `META` entries of documents `first` to `stop` - 1."""
        raw = self.files[META_FILE].read(META.itemsize * first, META.itemsize * stop)
        return np.frombuffer(raw, META)


def read_verified(path: str, entry: FileEntry) -> bytes:
    """Return the content of a small file; raise StorageError if its digest does not match."""
    file = open_range_reader(path)
    if file.size != entry["bytes"]:
        raise damaged_error(path, f"the file has {file.size} bytes instead of {entry['bytes']}")
    content = file.read(0, file.size)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise damaged_error(path, "the checksum does not match")
    return content


class PreparedDocuments:
    """Documents in a folder written by `maxpipe data prepare`, in stored order."""

    def __init__(self, folder: str, tokenizer: Tokenizer):
        self.manifest = read_manifest(folder)
        _check_tokenizer(folder, self.manifest, tokenizer)
        self.pad_id = tokenizer.pad_id
        self._tokenizer = tokenizer
        self.num_documents = self.manifest["documents"]
        self.num_tokens = self.manifest["tokens"]
        self._folder = folder
        kept = PieceCache() if url_scheme(folder) else None
        shards = self.manifest["shards"]
        self._shards = [Shard(folder, number, shard, kept) for number, shard in enumerate(shards)]
        self._starts = np.cumsum([0, *(shard["documents"] for shard in shards)])
        self.span_tokens = self._read_spans()

    def _read_spans(self) -> np.ndarray:
        path = join_path(self._folder, SPANS)
        starts = np.frombuffer(read_verified(path, self.manifest["spans"]), "<i8")
        fits = (
            len(starts) == -(-self.num_documents // SPAN_DOCUMENTS) + 1
            and starts[-1] == self.num_tokens
        )
        spans = np.diff(starts)
        if not fits or starts[0] or spans.min() < 0:
            raise damaged_error(path, "the file does not match the manifest")
        return spans

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: number of tokens per document. Reads all indexes."""
        return self._lengths

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return self.lengths_between(0, self.num_documents)

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """Return the token counts, int64, of documents `first` to `stop` - 1."""
        return self._concatenate_shards(first, stop, lambda shard, a, b: shard.lengths(a, b))

    def meta(self, first: int, stop: int) -> np.ndarray:
        """Return the `META` entries of documents `first` to `stop` - 1."""
        return self._concatenate_shards(first, stop, lambda shard, a, b: shard.meta(a, b))

    def digests(self, first: int, stop: int) -> np.ndarray:
        """Return the digests, uint64, of documents `first` to `stop` - 1."""
        return self.meta(first, stop)["digest"]

    def _concatenate_shards(self, first: int, stop: int, read: Any) -> np.ndarray:
        low, high = np.searchsorted(self._starts, [first, stop - 1], side="right") - 1
        parts = []
        for number in range(low, high + 1):
            start, end = self._starts[number : number + 2].tolist()
            parts.append(
                read(self._shards[number], max(first, start) - start, min(stop, end) - start)
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __getitem__(self, document: int) -> EncodedDocument:
        if not 0 <= document < self.num_documents:
            raise IndexError(document)
        number, inside = place_of(self._starts[1:], document)
        encoded = self._shards[number].read(inside)
        low, high = int(encoded.ids.min(initial=0)), int(encoded.ids.max(initial=0))
        if low < 0 or high >= self._tokenizer.vocab_size:
            path = join_path(self._folder, shard_name(number, BIN))
            raise damaged_error(
                path, f"document {inside} has the invalid id {low if low < 0 else high}"
            )
        if high >= self._tokenizer.embedding_rows:
            path = join_path(self._folder, shard_name(number, BIN))
            check_token_ids(f"{path}: document {inside}", encoded.ids, self._tokenizer)
        return encoded

    def where(self, document: int) -> str:
        """Return the shard that contains a document, and the document's index in the source."""
        number, _ = place_of(self._starts[1:], document)
        path = join_path(self._folder, shard_name(number, BIN))
        return f"{path}: document {document} of {self.manifest['source']['name']}"

    @property
    def has_conversations(self) -> bool:
        """Whether the documents are conversations with loss masks."""
        return has_masks(self.manifest)

    @property
    def remark(self) -> str:
        """Short description of the documents and their source."""
        what = "conversations of " if self.has_conversations else ""
        return f"prepared from {what}{self.manifest['source']['name']}"

    @property
    def unreadable(self) -> int:
        """Number of documents that are empty because their records could not be read."""
        return sum(shard["unreadable"] for shard in self.manifest["shards"])

    @property
    def unread(self) -> dict[str, int]:
        """Maps unread keys to the number of conversations that contain the key."""
        return sum_shard_notes(self.manifest["shards"])[0]

    @property
    def marks(self) -> dict[int, int]:
        """Maps marks to the number of conversations with the mark; see `EncodedDocument.marks`."""
        return sum_shard_notes(self.manifest["shards"])[1]

    @property
    def byte_counts(self) -> np.ndarray:
        """int64 [256]: histogram of the UTF-8 bytes in the text."""
        return np.array(self.manifest["byte_counts"], np.int64)

    def metadata(self) -> Mapping[str, Any]:
        """Return metadata of the original source, so that a run can switch to prepared data."""
        source = self.manifest["source"]
        chat = {"chat": source["chat"]} if "chat" in source else {}
        return {
            "source": source["name"],
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "source_digest": source["fingerprint"],
            **content_metadata(source.get(CONTENT_KEY, {})),
            **chat,
        }


def sum_shard_notes(shards: Iterable[ShardEntry]) -> tuple[dict[str, int], dict[int, int]]:
    """Return the total number of conversations for each unread key and for each mark."""
    unread, marks = Counter[str](), Counter[int]()
    for shard in shards:
        unread.update(shard.get("unread", {}))
        for combined, count in shard.get("marks", {}).items():
            marks.update({1 << bit: count for bit in range(8) if int(combined) >> bit & 1})
    return dict(unread), dict(marks)


def _check_tokenizer(folder: str, manifest: Manifest, tokenizer: Tokenizer) -> None:
    stored = manifest["tokenizer"]
    if stored["fingerprint"] == tokenizer.fingerprint():
        return
    path = f" tokenizer.path={stored['path']}" if stored["path"] else ""
    named = f"tokenizer.kind={stored['kind']}{path}"
    raise ConfigError.one(
        Code.TOK_MISMATCH,
        "data.path",
        folder,
        f"contains token ids from a tokenizer other than tokenizer.*: {named} with "
        f"{stored['vocab_size']} ids and fingerprint {stored['fingerprint'][:12]}; tokenizer.* has "
        f"{tokenizer.vocab_size} ids and fingerprint {tokenizer.fingerprint()[:12]}.",
        suggest_tokenizer_action(
            tokenizer,
            stored["fingerprint"],
            f"Set {named}, or prepare the documents again with this tokenizer.",
        ),
    )


WINDOW_SPANS = 1024
"""Number of spans per window; a window has about a million documents. A source that fits in one
window is fully shuffled, into the same order as if its documents were read as text.
"""

_CACHED_WINDOWS = 4


class TokenFiles(Protocol):
    """Documents that are stored in files of token ids."""

    num_documents: int
    num_tokens: int
    pad_id: int
    span_tokens: np.ndarray
    """int64 [spans]: number of tokens in each span of `SPAN_DOCUMENTS` documents."""

    @property
    def lengths(self) -> np.ndarray: ...

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """Return the token counts, int64, of documents `first` to `stop` - 1."""
        ...

    def __getitem__(self, document: int) -> EncodedDocument: ...

    def where(self, document: int) -> str: ...


def needs_windows(documents: TokenFiles) -> bool:
    """Return whether the source has too many documents for a full shuffle."""
    return len(documents.span_tokens) > WINDOW_SPANS


def split_spans(
    documents: TokenFiles, split: Literal["validation", "train", "all"], fraction: float, seed: int
) -> np.ndarray:
    """Return the span indices of a split, in shuffled order unless the split is `all`.

    If the fraction is above 0, at least one span is held out.
    """
    count = len(documents.span_tokens)
    if split == "all":
        return np.arange(count)
    order = Permutation(count, seed, DOCUMENT_ORDER)(np.arange(count))
    held_out = min(max(round(fraction * count), 1), count - 1) if fraction > 0 else 0
    return order[:held_out] if split == "validation" else order[held_out:]


class _DocumentWindow:
    def __init__(self, documents: TokenFiles, spans: np.ndarray):
        self._documents = documents
        self.pad_id = documents.pad_id
        edges = [
            (SPAN_DOCUMENTS * s, min(SPAN_DOCUMENTS * (s + 1), documents.num_documents))
            for s in spans.tolist()
        ]
        self.numbers = np.concatenate([np.arange(*edge) for edge in edges])
        self.lengths = np.concatenate([documents.lengths_between(*edge) for edge in edges])

    def __getitem__(self, document: int) -> EncodedDocument:
        return self._documents[int(self.numbers[document])]

    def where(self, document: int) -> str:
        return self._documents.where(int(self.numbers[document]))


class _WindowCounts(NamedTuple):
    """Numbers of sequences and targets in each window, int64 [windows]."""

    sequences: np.ndarray
    targets: np.ndarray


class WindowedSequences:
    """Sequences that are shuffled and packed per window of documents; see `Sequences`."""

    def __init__(self, documents: TokenFiles, spans: np.ndarray, packer: Packer, seed: int | None):
        self.sequence_length = packer.sequence_length
        self._documents, self._packer, self._seed = documents, packer, seed
        self._spans = np.split(spans, range(WINDOW_SPANS, len(spans), WINDOW_SPANS))
        self._windows: OrderedDict[int, tuple[_DocumentWindow, Sequences]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_tokens = int(documents.span_tokens[spans].sum())
        # Span totals count the full documents, so they do not apply if document lengths are
        # limited.
        is_limited = getattr(documents, "is_length_limited", False)
        uses_totals = packer.packing == "concatenate" and not is_limited
        counts = self._count_concatenated() if uses_totals else self._count_packed(spans)
        self.num_targets = int(counts.targets.sum())
        self._counts = counts.sequences
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])

    def _count_concatenated(self) -> _WindowCounts:
        """Compute the numbers of sequences and targets from the span totals. Every document must
        have at least one token.
        """
        tokens = np.array([self._documents.span_tokens[span].sum() for span in self._spans])
        counts = SPAN_DOCUMENTS * np.ones(len(self._documents.span_tokens), np.int64)
        counts[-1] += self._documents.num_documents - counts.sum()
        documents = np.array([counts[span].sum() for span in self._spans])
        sequences = -(-np.maximum(tokens - 1, 0) // self.sequence_length)
        return _WindowCounts(sequences, np.maximum(tokens - documents, 0))

    def _count_packed(self, spans: np.ndarray) -> _WindowCounts:
        def make(moved: Heartbeat | None) -> _WindowCounts:
            counts = []
            progress = Progress("packing windows", len(self._spans), moved)
            for number in range(len(self._spans)):
                window = self._window(number)[1]
                counts.append((len(window), window.num_targets))
                progress.update(number + 1)
            return _WindowCounts(*np.array(counts, np.int64).T)

        def of(arrays: Mapping[str, np.ndarray]) -> _WindowCounts:
            counts = _WindowCounts(**{name: arrays[name] for name in _WindowCounts._fields})
            if {count.shape for count in counts} != {(len(self._spans),)}:
                raise ValueError("arrays with an unexpected shape")
            return counts

        digest = hashlib.sha256()
        for part in (spans, self._documents.span_tokens):
            digest.update(np.ascontiguousarray(part, "<i8").data)
        facts = [self._documents.num_documents, self._seed, WINDOW_SPANS, digest.hexdigest()]
        return self._packer.load_or_compute("rows", facts, of, make)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number, inside = self._place(index)
        return self._window(number)[1][inside]

    def padding(self) -> dict[str, np.ndarray]:
        return self._window(0)[1].padding()

    def documents(self, index: int) -> list[int]:
        number, inside = self._place(index)
        window, packed = self._window(number)
        return window.numbers[packed.documents(inside)].tolist()

    def where(self, document: int) -> str:
        return self._documents.where(document)

    def size(self, document: int) -> int:
        return int(self._documents.lengths_between(document, document + 1)[0])

    def epoch_permutation(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return a permutation that shuffles the windows, and the sequences in each window."""
        return functools.partial(self._shuffle, key)

    def _shuffle(self, key: tuple[int, ...], places: np.ndarray) -> np.ndarray:
        count = len(self._counts)
        visits = Permutation(count, *key, count)(np.arange(count))
        ends = np.cumsum(self._counts[visits])
        shuffled = np.empty_like(places)
        at = np.searchsorted(ends, places, side="right")
        for visit in np.unique(at):
            here, window = at == visit, int(visits[visit])
            size = int(self._counts[window])
            order = Permutation(size, *key, count, window)
            shuffled[here] = self._starts[window] + order(places[here] - (ends[visit] - size))
        return shuffled

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return place_of(self._starts[1:], index)

    def _window(self, number: int) -> tuple[_DocumentWindow, Sequences]:
        # the lock prevents other threads that need this window from repeating the work
        with self._lock:
            if number not in self._windows:
                window = _DocumentWindow(self._documents, self._spans[number])
                order = np.arange(len(window.lengths))
                if self._seed is not None:
                    order = Permutation(len(order), self._seed, DOCUMENT_ORDER, number)(order)
                self._windows[number] = window, self._packer(window, order)
                while len(self._windows) > _CACHED_WINDOWS:
                    self._windows.popitem(last=False)
            self._windows.move_to_end(number)
            return self._windows[number]
