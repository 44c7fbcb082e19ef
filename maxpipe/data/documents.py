"""Tokenized documents with random access by index, and the index of document lengths.

Sequences are built from `Documents`. `EncodedDocuments` tokenizes documents on demand. The document
lengths are computed in one pass over all documents, and are cached on disk. `packing.py` splits,
shuffles and packs documents into sequences.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol

import numpy as np

from maxpipe.data.formats import disk_cache
from maxpipe.data.formats.files import digest
from maxpipe.data.formats.source import track_read
from maxpipe.data.sources import Heartbeat, Progress, Source
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.files import wrap_text_errors
from maxpipe.errors import Code, StorageError

_LOG = logging.getLogger(__name__)

_CACHED_BYTES = 256 << 20
_PASS_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """Token ids of one document, including BOS and EOS."""

    ids: np.ndarray
    """Token ids as unsigned integers [tokens]."""
    trained: np.ndarray | None = None
    """bool [tokens]: loss mask, true for the tokens that are trained on; None if all are."""
    second_half_start: int = 0
    """Index of the first token in the second half of a preference pair; 0 for other documents."""
    marks: int = 0
    """Bit flags that record how the document was changed, for statistics; see `pairs.py` and
    `chat.py`.
    """
    unread: tuple[str, ...] = ()
    """Keys of the record that neither maxpipe nor the chat template reads."""
    images: np.ndarray | None = None
    """Images or patches uint8 [n, ...]; None if the document has none."""
    image_tokens_left: np.ndarray | None = None
    """int32 [tokens]: see `maxpipe.data.images.IMAGE_TOKENS_LEFT`; None without images."""
    image_grids: np.ndarray | None = None
    """int32 [n, 2]: see `maxpipe.data.images.IMAGE_GRIDS`; None for images of one size."""
    rotary_positions: np.ndarray | None = None
    """int32 [tokens, 3]: see `maxpipe.data.images.ROTARY_POSITIONS`; None if the model has no 3-D
    positions."""
    image_digest: bytes = b""
    """Digest of the encoded images; empty without images."""

    @property
    def num_bytes(self) -> int:
        """Return the memory that the token IDs and the images need."""
        return self.ids.nbytes + (0 if self.images is None else self.images.nbytes)

    @property
    def num_images(self) -> int:
        return 0 if self.images is None else len(self.images)


class Documents(Protocol):
    """Token ids of documents, with access by index. Every read, in any thread or process, returns
    the same ids.
    """

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: number of tokens of each document, including BOS and EOS."""
        ...

    @property
    def pad_id(self) -> int: ...

    def __getitem__(self, document: int) -> EncodedDocument: ...

    def where(self, document: int) -> str:
        """Return, for messages, a document's file and the document's position in this file."""
        ...


@dataclass(frozen=True, slots=True)
class DocumentIndex:
    """Index of all documents, computed in one pass.

    `lengths` int64 [documents] is the number of tokens of each document, including BOS and EOS.
    `byte_counts` int64 [256] is the byte histogram of all text. `trained` int64 [documents] is the
    number of tokens in each document that are trained on, or None if all tokens are.
    """

    lengths: np.ndarray
    byte_counts: np.ndarray
    trained: np.ndarray | None = None
    unreadable: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64: indices of documents that are empty because their records could not be read."""
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64 [documents]: digest of each plain-text document, or of each conversation's token ids.
    """
    marks: np.ndarray | None = None
    """uint8 [documents]: `EncodedDocument.marks` of each conversation or preference pair."""
    masks: np.ndarray | None = None
    """uint64 [documents]: `mask_digest` of each conversation; None for plain text."""
    first_targets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [documents]: for conversations, the index of the first token that is trained on and has
    a preceding token, or 0 if there is none.
    """
    unread_keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.str_))
    """str: record keys that no setting reads."""
    unread_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64: number of records that contain each key of `unread_keys`."""
    days: np.ndarray = field(default_factory=lambda: np.zeros(0, np.str_))
    """str: the current date that the chat template renders, if any."""
    images: np.ndarray | None = None
    """int64 [documents]: number of images of each conversation, or None without images."""

    @property
    def day(self) -> str:
        """Current date that the chat template renders; empty if it renders no date."""
        return str(self.days[0]) if len(self.days) else ""

    @property
    def unread(self) -> dict[str, int]:
        """Number of records that contain each unread key."""
        return dict(zip(self.unread_keys.tolist(), self.unread_counts.tolist(), strict=True))

    @property
    def unigram_entropy(self) -> float:
        """Unigram entropy, in nats per byte, of the text in all documents."""
        return entropy(self.byte_counts)


def digest_of(raw: bytes) -> int:
    """Return an 8-byte BLAKE2b digest of UTF-8 text as an integer."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def mask_digest(trained: np.ndarray) -> int:
    """Return an 8-byte BLAKE2b digest of a loss mask, bool [tokens], as an integer."""
    return digest_of(np.packbits(trained).tobytes())


def entropy(counts: np.ndarray) -> float:
    """Return the entropy, in nats, of the distribution that a histogram describes."""
    counts = counts[counts > 0]
    shares = counts / counts.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum()))  # avoids -0.0 for a single value


def build_index(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: str | None,
    moved: Heartbeat | None = None,
    *,
    keep: bool = True,
) -> DocumentIndex:
    """Load the index of a source from `cache_dir`, or build it by reading every document.

    If `keep` is true, a newly built index is saved in `cache_dir`. The index does not depend on the
    seed, the split or the sequence length.
    """
    content = source.content(moved)
    index = load_or_build_index(
        [3, source.fingerprint(), content, tokenizer.fingerprint(), len(source)],
        len(source),
        cache_dir,
        lambda moved: verify_unchanged(source, moved, _index_texts(source, tokenizer, moved)),
        keep=keep,
        moved=moved,
        task=f"indexing documents of {source.name}",
    )
    for document in index.unreadable.tolist():
        # Reading the record counts it as unreadable, and raises an error if the limit is exceeded.
        source[document]
    return index


def verify_unchanged(
    source: Source, moved: Heartbeat | None, index: DocumentIndex
) -> DocumentIndex:
    """Return `index`; raise ConfigError if a file changed while its documents were read."""
    source.check_unchanged(moved)
    return index


def load_or_build_index(
    key: Sequence[object],
    num_documents: int,
    cache_dir: str | None,
    read: Callable[[Heartbeat | None], DocumentIndex],
    *,
    keep: bool,
    moved: Heartbeat | None,
    task: str,
) -> DocumentIndex:
    """Return the cached index for `key` (JSON values), or call `read` if it is not cached.

    See `build_index`.
    """
    if cache_dir is None:
        return read(moved)
    name = digest(key)[:32]
    return disk_cache.load_or_compute(
        os.path.join(os.path.expanduser(cache_dir), f"index-{name}.npz"),
        lambda arrays: _index_of(arrays, num_documents),
        read,
        lambda index: {
            part.name: array
            for part in fields(index)
            if (array := getattr(index, part.name)) is not None
        },
        disk_cache.CacheMessages(
            task, "reading all documents again", "all documents will be read on the next start"
        ),
        keep=keep,
        moved=moved,
    )


def _index_texts(source: Source, tokenizer: Tokenizer, moved: Heartbeat | None) -> DocumentIndex:
    lengths = np.zeros(len(source), np.int64)
    digests = np.zeros(len(source), np.uint64)
    byte_counts = np.zeros(256, np.int64)
    progress = Progress(f"indexing documents of {source.name}", len(source), moved)
    texts: list[str] = []
    characters = 0
    for i in range(len(source)):
        with track_read(partial(source.where, i)):
            text = source[i]
        texts.append(text)
        characters += len(text)
        raw = text.encode()
        digests[i] = digest_of(raw)
        byte_counts += np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
        if characters >= _PASS_CHARACTERS or i + 1 == len(source):
            first = i + 1 - len(texts)
            with wrap_text_errors(lambda number, first=first: source.where(first + number)):
                lengths[first : i + 1] = tokenizer.count(texts)
            texts, characters = [], 0
            progress.update(i + 1)
    unreadable = np.array(source.unreadable, np.int64)
    return DocumentIndex(lengths + 2, byte_counts, unreadable=unreadable, digests=digests)


def _index_of(arrays: Mapping[str, np.ndarray], num_documents: int) -> DocumentIndex:
    lengths, counts, unreadable = (arrays[k] for k in ("lengths", "byte_counts", "unreadable"))
    digests, trained = arrays["digests"], arrays.get("trained")
    marks, masks = arrays.get("marks"), arrays.get("masks")
    index = DocumentIndex(lengths, counts, trained, unreadable, digests, marks, masks)
    if "unread_keys" in arrays:  # earlier releases stored unread keys for conversations only
        names = ("first_targets", "unread_keys", "unread_counts")
        index = replace(index, **{name: arrays[name] for name in names})
    if "days" in arrays:  # earlier releases did not store the date
        index = replace(index, days=arrays["days"])
        if index.day:
            datetime.date.fromisoformat(index.day)
    index = replace(index, images=arrays.get("images"))
    shapes = {
        array.shape
        for array in (lengths, trained, digests, marks, masks, index.images)
        if array is not None
    }
    if shapes != {(num_documents,)} or index.byte_counts.shape != (256,):
        raise ValueError("arrays with an unexpected shape")
    return index


class EncodedDocuments:
    """Token ids of documents, with a cache of recently used documents. Thread-safe."""

    def __init__(self, source: Source, tokenizer: Tokenizer, index: DocumentIndex):
        self.tokenizer = tokenizer
        self.lengths = index.lengths
        self._source, self._digests = source, index.digests
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._cached: OrderedDict[int, EncodedDocument] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        largest = int(index.lengths.argmax())
        if index.lengths[largest] * self._dtype.itemsize > _CACHED_BYTES:
            _LOG.warning(
                "document %d of %s is too large to cache (%d tokens) and is encoded again in every "
                "sequence: split the document to speed up reading",
                largest,
                source.name,
                index.lengths[largest],
            )

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    def __getitem__(self, document: int) -> EncodedDocument:
        with self._lock:
            if document in self._cached:
                self._cached.move_to_end(document)
                return self._cached[document]
        # Encoding runs outside the lock: two threads may encode the same document, but neither
        # waits for the other.
        encoded = self._encode(document)
        with self._lock:
            if document not in self._cached:
                self._cached[document] = encoded
                self._cached_bytes += encoded.num_bytes
            while self._cached_bytes > _CACHED_BYTES and len(self._cached) > 1:
                self._cached_bytes -= self._cached.popitem(last=False)[1].num_bytes
        return encoded

    def where(self, document: int) -> str:
        return self._source.where(document)

    def _encode(self, document: int) -> EncodedDocument:
        encoded = self._read(document)
        if len(encoded.ids) != self.lengths[document]:
            raise self._changed_error(
                document, f"{len(encoded.ids)} tokens instead of {self.lengths[document]}"
            )
        return replace(encoded, ids=encoded.ids.astype(self._dtype))

    def _changed_error(self, document: int, what: str = "different content") -> StorageError:
        return StorageError(
            Code.DATA_CHANGED,
            f"{self._source.where(document)}: the file has changed\n"
            f"  document {document} of {self._source.name} has {what}; documents must not "
            "change after they are indexed.\n"
            "  Restore the file, or start a new run with the changed file.",
        )

    def _read(self, document: int) -> EncodedDocument:
        tokenizer, text = self.tokenizer, self._source[document]
        if digest_of(text.encode()) != self._digests[document]:
            raise self._changed_error(document)
        with wrap_text_errors(lambda _: self._source.where(document)):
            ids = tokenizer.encode(text)
        return EncodedDocument(np.concatenate([[tokenizer.begin_id], ids, [tokenizer.end_id]]))
