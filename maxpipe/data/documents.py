"""Documents as token ids, addressed by number, and the index of their lengths.

`Documents` is what sequences are cut from. `EncodedDocuments` encodes texts when they are asked
for; one pass over all of them, kept on disk, knows how long each is. Splits, order and sequences
are not their concern; `packing.py` is the next step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from maxpipe.data import kept
from maxpipe.data.sources import Moved, Progress, Source
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import StorageError

_LOG = logging.getLogger(__name__)

_CACHED_BYTES = 256 << 20
_PASS_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document with its begin and end ids."""

    ids: np.ndarray
    """Unsigned integers [tokens]."""
    trained: np.ndarray | None = None
    """bool [tokens]: whether a token counts in the loss as a target; None where all do."""


class Documents(Protocol):
    """Token ids by a document's number; the same each time, in any thread and process."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: tokens of each, begin and end included."""
        ...

    @property
    def pad_id(self) -> int: ...

    def __getitem__(self, document: int) -> Encoded: ...


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
        return unigram_entropy(self.byte_counts)


def unigram_entropy(byte_counts: np.ndarray) -> float:
    """That of text with these numbers of each byte."""
    counts = byte_counts[byte_counts > 0]
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
        shapes = {"lengths": (len(source),), "byte_counts": (256,)}
        if (cached := kept.load(path, shapes)) is not None:
            return DocumentIndex(**cached)
    index = _read_all(source, tokenizer, moved)
    if path is not None and keep:
        kept.save(path, {"lengths": index.lengths, "byte_counts": index.byte_counts})
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


class EncodedDocuments:
    """Token ids of documents with begin and end; keeps those read last. Safe in threads."""

    def __init__(self, source: Source, tokenizer: Tokenizer, index: DocumentIndex):
        self.tokenizer = tokenizer
        self.lengths = index.lengths
        self._source = source
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._cached: OrderedDict[int, Encoded] = OrderedDict()
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

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    def __getitem__(self, document: int) -> Encoded:
        with self._lock:
            if document in self._cached:
                self._cached.move_to_end(document)
                return self._cached[document]
        # Outside the lock: two threads may encode the same document, none waits for another.
        found = self._encode(document)
        with self._lock:
            if document not in self._cached:
                self._cached[document] = found
                self._cached_bytes += found.ids.nbytes
            while self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
                self._cached_bytes -= self._cached.popitem(last=False)[1].ids.nbytes
        return found

    def _encode(self, document: int) -> Encoded:
        tokenizer = self.tokenizer
        ids = tokenizer.encode(self._source[document])
        if len(ids) + 2 != self.lengths[document]:
            raise StorageError(
                f"data.path: document {document} of {self._source.name}\n"
                f"  has {len(ids)} tokens; it had {self.lengths[document] - 2} when it was "
                "indexed, and documents must not change.\n"
                "  Restore the document, or start a new run with the changed one."
            )
        whole = np.concatenate([[tokenizer.begin_id], ids, [tokenizer.end_id]])
        return Encoded(whole.astype(self._dtype))
