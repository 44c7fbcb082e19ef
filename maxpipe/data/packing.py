"""Documents to sequences of fixed length, addressed by number.

Owns the split into training and validation documents, their shuffled order, the
index of document lengths and the cutting of the token stream. Sequence i is made
from that index alone, so no earlier sequence has to be read first. It does not
know batches, epochs or processes; `loader.py` is the next step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import zipfile
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from maxpipe.boundary.files import opened
from maxpipe.data.sources import Moved, Progress, Source
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError, StorageError

_LOG = logging.getLogger(__name__)

_FEISTEL_ROUNDS = 8
_FEISTEL_BLOCK = 1 << 16
_CACHED_BYTES = 256 << 20
_PASS_CHARACTERS = 1 << 20
# First word of the keys of a permutation, so that no two uses share an order.
_DOCUMENT_ORDER = 0


class Permutation:
    """A seeded order of `range(size)`, computed per index in constant memory.

    The same in every version of every library: a position in a checkpoint names the
    same sequence for ever. It is a Feistel network over the next power of four,
    iterated until the result is inside the range.
    """

    def __init__(self, size: int, *key: int):
        half = max(1, -(-(max(size, 1) - 1).bit_length() // 2))
        self._size = size
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        entropy = [word % (1 << 64) for word in key]
        self._keys = np.random.SeedSequence(entropy).generate_state(_FEISTEL_ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        inside = indices.size == 0 or 0 <= indices.min() <= indices.max() < self._size
        assert inside, f"an index outside of range({self._size}) would walk for ever"
        # In blocks that fit the processor's cache: four times as fast for many indices.
        blocks = range(_FEISTEL_BLOCK, len(indices), _FEISTEL_BLOCK)
        return np.concatenate([self._walk(block) for block in np.split(indices, blocks)])

    def _walk(self, indices: np.ndarray) -> np.ndarray:
        values = self._rounds(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self._size)):
            values[outside] = self._rounds(values[outside])
        return values.astype(np.int64)

    def _rounds(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Spreads each bit of a uint64 over all others (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_documents(
    num_documents: int, validation_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled numbers of the training and of the validation documents.

    Raises:
        ConfigError: a fraction above 0 and fewer than two documents.
    """
    order = Permutation(num_documents, seed, _DOCUMENT_ORDER)(np.arange(num_documents))
    if validation_fraction <= 0:
        return order, order[:0]
    if num_documents < 2:
        raise ConfigError.one(
            "data.validation_fraction",
            validation_fraction,
            f"needs at least 2 documents, one to train on and one to evaluate: "
            f"data.path has {num_documents}.",
            "Set data.validation_fraction=0, or cut the text into more documents.",
        )
    num_validation = min(max(round(validation_fraction * num_documents), 1), num_documents - 1)
    return order[num_validation:], order[:num_validation]


@dataclass(frozen=True, slots=True)
class DocumentIndex:
    """The result of one pass over all documents.

    `lengths` int64 [documents] counts tokens with begin and end; `byte_counts` int64
    [256] counts the bytes of the text.
    """

    lengths: np.ndarray
    byte_counts: np.ndarray

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of a model that knows only how frequent each byte is."""
        counts = self.byte_counts[self.byte_counts > 0]
        shares = counts / counts.sum()
        return max(0.0, float(-(shares * np.log(shares)).sum()))  # of one letter it is not -0.0


def build_index(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: str | None,
    moved: Moved | None = None,
    *,
    keep: bool = True,
) -> DocumentIndex:
    """The index of a source: from `cache_dir` if it is there, else by reading every document.

    With `keep` it is written to `cache_dir`.

    The index does not depend on seed, split or sequence length.
    """
    path = None
    if cache_dir is not None:
        key = json.dumps([1, source.fingerprint(), tokenizer.fingerprint(), len(source)])
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        path = os.path.join(os.path.expanduser(cache_dir), f"index-{name}.npz")
        cached = _load_index(path, len(source))
        if cached is not None:
            return cached
    index = _read_all(source, tokenizer, moved)
    if path is not None and keep:
        _save_index(path, index)
    return index


def _read_all(source: Source, tokenizer: Tokenizer, moved: Moved | None) -> DocumentIndex:
    lengths = np.zeros(len(source), np.int64)
    byte_counts = np.zeros(256, np.int64)
    progress = Progress(f"indexing documents of {source.name}", len(source), moved)
    texts: list[str] = []
    characters = 0
    for i in range(len(source)):
        text = source[i]
        texts.append(text)
        characters += len(text)
        byte_counts += np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
        if characters >= _PASS_CHARACTERS or i + 1 == len(source):
            lengths[i + 1 - len(texts) : i + 1] = tokenizer.count(texts)
            texts, characters = [], 0
            progress.update(i + 1)
    return DocumentIndex(lengths + 2, byte_counts)


def _load_index(path: str, num_documents: int) -> DocumentIndex | None:
    try:
        # Opened here, because numpy leaves a damaged file open.
        with open(opened(path), "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            index = DocumentIndex(arrays["lengths"], arrays["byte_counts"])
        if index.lengths.shape != (num_documents,) or index.byte_counts.shape != (256,):
            raise ValueError("arrays of another shape")
        return index
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        _LOG.warning("%s cannot be used (%s): reading all documents again", path, error)
        return None


def _save_index(path: str, index: DocumentIndex) -> None:
    """Written to a temporary name and renamed, so that no process reads half a file."""
    folder = os.path.dirname(path)
    temporary = None
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as stream:
            temporary = stream.name
            np.savez(stream, lengths=index.lengths, byte_counts=index.byte_counts)
        os.replace(temporary, path)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): the next start reads all documents", path, error)
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


class EncodedDocuments:
    """Token ids of documents with begin and end; keeps those read last. Safe in threads."""

    def __init__(self, source: Source, tokenizer: Tokenizer, index: DocumentIndex):
        self.tokenizer = tokenizer
        self.lengths = index.lengths
        self._source = source
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._cached: OrderedDict[int, np.ndarray] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        largest = int(index.lengths.argmax())
        if index.lengths[largest] * self._dtype.itemsize > _CACHED_BYTES:
            _LOG.warning(
                "document %d of %s has %d tokens and is read whole for every sequence in it: "
                "reading is slow unless it is cut into several documents",
                largest,
                source.name,
                index.lengths[largest],
            )

    def __getitem__(self, document: int) -> np.ndarray:
        with self._lock:
            if document in self._cached:
                self._cached.move_to_end(document)
                return self._cached[document]
        # Outside the lock: two threads may encode the same document, none waits for another.
        ids = self._encode(document)
        with self._lock:
            if document not in self._cached:
                self._cached[document] = ids
                self._cached_bytes += ids.nbytes
            while self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
                self._cached_bytes -= self._cached.popitem(last=False)[1].nbytes
        return ids

    def _encode(self, document: int) -> np.ndarray:
        tokenizer = self.tokenizer
        ids = tokenizer.encode(self._source[document])
        if len(ids) + 2 != self.lengths[document]:
            raise StorageError(
                f"data.path: document {document} of {self._source.name}\n"
                f"  has {len(ids)} tokens; it had {self.lengths[document] - 2} when it was "
                "indexed, and documents must not change.\n"
                "  Restore the document, or start a new run with the changed one."
            )
        return np.concatenate([[tokenizer.begin_id], ids, [tokenizer.end_id]]).astype(self._dtype)


class PackedSequences:
    """Sequences of T tokens, cut from the concatenation of documents.

    Sequence i covers tokens i*T to i*T + T of the stream: T inputs and the same
    shifted by one as targets. The last one is padded.
    """

    def __init__(self, documents: EncodedDocuments, order: np.ndarray, sequence_length: int):
        self.sequence_length = sequence_length
        self._documents = documents
        self._order = order
        self._starts = np.concatenate([[0], np.cumsum(documents.lengths[order])])
        self.num_tokens = int(self._starts[-1])

    def __len__(self) -> int:
        # The last token of the stream is only ever a target: it starts no sequence.
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `segment_ids`, `positions` int32 [T], `loss_mask` float32 [T].

        `segment_ids` counts the documents of the sequence from 1, 0 is padding;
        `positions` counts from each document's first token in this sequence;
        `loss_mask` is 1 where token and target are of one document.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._cut(index)

    def padding(self) -> dict[str, np.ndarray]:
        """A sequence without text: it adds nothing to a loss."""
        return self._cut(len(self) + 1)

    def documents(self, index: int) -> list[int]:
        """Numbers of the documents that have a token in this sequence."""
        first = index * self.sequence_length
        last = min(first + self.sequence_length, self.num_tokens) - 1
        begin, end = np.searchsorted(self._starts, [first, last], side="right")
        return self._order[begin - 1 : end].tolist()

    def _cut(self, index: int) -> dict[str, np.ndarray]:
        length = self.sequence_length
        first = index * length
        last = min(first + length + 1, self.num_tokens)
        window = np.full(length + 1, self._documents.tokenizer.pad_id, np.int32)
        segments = np.zeros(length + 1, np.int32)
        positions = np.zeros(length + 1, np.int32)
        position = int(np.searchsorted(self._starts, first, side="right")) - 1
        at, segment = first, 1
        while at < last:
            ids = self._documents[int(self._order[position])]
            begin = int(self._starts[position])
            end = min(begin + len(ids), last)
            here = slice(at - first, end - first)
            window[here] = ids[at - begin : end - begin]
            segments[here] = segment
            positions[here] = np.arange(end - at)
            at, segment, position = end, segment + 1, position + 1
        same = (segments[:-1] == segments[1:]) & (segments[1:] > 0)
        return {
            "tokens": window[:-1],
            "targets": window[1:],
            "segment_ids": segments[:-1],
            "positions": positions[:-1],
            "loss_mask": same.astype(np.float32),
        }
