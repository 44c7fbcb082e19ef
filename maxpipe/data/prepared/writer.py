"""Workers of `maxpipe data prepare`: encode documents and write checksummed shards."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from multiprocessing import parent_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict

import numpy as np

from maxpipe.config.sections.source import SourceConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.chat import ConversationEncoder, encode_and_count, expand_trained_messages
from maxpipe.data.documents import digest_of
from maxpipe.data.prepared.manifest import (
    BIN,
    CRC_FILE,
    IDX,
    MASK_FILE,
    META,
    META_FILE,
    FileEntry,
    ShardEntry,
    checksummed_suffixes,
    dtype_for,
    encode_index,
    shard_name,
)
from maxpipe.data.prepared.range_reader import BLOCK_BYTES
from maxpipe.data.sources import Source, open_source
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.data.tokenizers.files import wrap_text_errors
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io.files import open_regular

_MAX_DOCUMENT_TOKENS = (1 << 31) - 1
"""Maximum number of tokens per document that the index format supports."""


class DocumentBatch(NamedTuple):
    """Batch of consecutive encoded documents."""

    ids: np.ndarray
    """[tokens]: token ids, including the BOS and EOS tokens of each document."""
    lengths: np.ndarray
    """int64 [documents]: number of tokens in each document."""
    meta: np.ndarray
    """`META` [documents]: one entry per document."""
    byte_counts: np.ndarray
    """uint32 [documents, 256]: byte histogram of each document's text."""
    unreadable: np.ndarray
    """bool [documents]: whether the document is empty because its record could not be read."""
    trained: np.ndarray | None = None
    """bool [tokens]: loss mask; None if all tokens are trained on."""
    unread: Sequence[tuple[str, ...]] = ()
    """`EncodedDocument.unread` of each conversation."""
    marks: Sequence[int] = ()
    """`EncodedDocument.marks` of each conversation."""

    def part(self, first: int, stop: int) -> DocumentBatch:
        """Return the batch with documents `first` to `stop` - 1."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        here, tokens = slice(first, stop), slice(ends[first], ends[stop])
        trained = None if self.trained is None else self.trained[tokens]
        parts = self.lengths, self.meta, self.byte_counts, self.unreadable
        lengths, meta, counts, unreadable = (part[here] for part in parts)
        notes = self.unread[here], self.marks[here]
        return DocumentBatch(self.ids[tokens], lengths, meta, counts, unreadable, trained, *notes)


class FinishedShard(TypedDict):
    """A complete shard on disk, with the counts that it adds to the totals."""

    shard: ShardEntry
    text_bytes: int
    byte_counts: list[int]


class ChecksummedWriter:
    """Writer for a new file that also computes the SHA-256 and the CRCs of the content. Symbolic
    links are not followed.
    """

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = open(open_regular(path, flags), "wb", buffering=1 << 20)  # noqa: SIM115
        self._sha = hashlib.sha256()
        self._bytes = 0
        self._crc = 0
        self.crcs = array("I")
        """CRC of each complete block; `close` adds the CRC of the last block."""

    def write(self, content: bytes) -> None:
        """Append bytes to the file."""
        view = memoryview(content)
        self._file.write(view)
        self._sha.update(view)
        at = 0
        while at < len(view):
            part = view[at : at + BLOCK_BYTES - self._bytes % BLOCK_BYTES]
            self._crc = zlib.crc32(part, self._crc)
            self._bytes += len(part)
            at += len(part)
            if self._bytes % BLOCK_BYTES == 0:
                self.crcs.append(self._crc)
                self._crc = 0

    def close(self) -> FileEntry:
        """Flush the file to disk, close it, and return its size and SHA-256."""
        if self._bytes % BLOCK_BYTES:
            self.crcs.append(self._crc)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "sha256": self._sha.hexdigest()}

    def abandon(self) -> None:
        """Close an incomplete file."""
        self._file.close()


class _Mask:
    def __init__(self, file: ChecksummedWriter):
        self.file = file
        self.count = 0
        """Number of tokens that are trained on."""
        self._rest = np.zeros(0, bool)

    def add(self, trained: np.ndarray) -> None:
        """Append a mask, bool [tokens]."""
        self.count += int(trained.sum())
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self.file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def finish(self) -> None:
        """Write the last byte, padded with zero bits."""
        self.file.write(np.packbits(self._rest, bitorder="little").tobytes())


class ShardWriter:
    """Writer for the files of one shard. Files left over from an earlier attempt are replaced."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype, *, has_mask: bool = False):
        self.tokens = 0
        self._folder, self._number, self._dtype = folder, number, dtype
        self._lengths: list[np.ndarray] = []
        self._text_bytes = self._unreadable = 0
        self._byte_counts = np.zeros(256, np.int64)
        self._unread, self._marks = Counter[str](), Counter[str]()
        self._bin = self._open(BIN)
        self._meta = self._open(META_FILE)
        self._mask = _Mask(self._open(MASK_FILE)) if has_mask else None

    def _open(self, suffix: str) -> ChecksummedWriter:
        return ChecksummedWriter(self._folder / shard_name(self._number, suffix))

    def add(self, piece: DocumentBatch) -> None:
        """Append a batch of documents."""
        longest = int(piece.lengths.max(initial=0))
        if longest > _MAX_DOCUMENT_TOKENS:
            rule = f"must have at most {_MAX_DOCUMENT_TOKENS} tokens: the longest has {longest}."
            raise ConfigError.one(
                Code.DATA_RECORD, "data.path: a document", None, rule, "Split the document."
            )
        self._bin.write(piece.ids.tobytes())
        self._meta.write(piece.meta.tobytes())
        if self._mask is not None:
            assert piece.trained is not None
            self._mask.add(piece.trained)
        self._lengths.append(piece.lengths)
        self._text_bytes += int(piece.meta["text_bytes"].sum(dtype=np.int64))
        self._byte_counts += piece.byte_counts.sum(axis=0, dtype=np.int64)
        self._unreadable += int(piece.unreadable.sum())
        self._unread.update(key for keys in piece.unread for key in keys)
        self._marks.update(str(mark) for mark in piece.marks if mark)
        self.tokens += len(piece.ids)

    def close(self) -> FinishedShard:
        """Write the index and the CRCs, and flush all files to disk."""
        lengths = np.concatenate(self._lengths)
        files = {BIN: self._bin, META_FILE: self._meta, IDX: self._open(IDX)}
        for part in encode_index(lengths, self._dtype):
            files[IDX].write(part)
        if self._mask is not None:
            self._mask.finish()
            files[MASK_FILE] = self._mask.file
        entries = {suffix: file.close() for suffix, file in files.items()}
        crc = self._open(CRC_FILE)
        for suffix in checksummed_suffixes(self._mask is not None):
            crc.write(np.array(files[suffix].crcs, "<u4").tobytes())
        entries[CRC_FILE] = crc.close()
        shard: ShardEntry = {
            "documents": len(lengths),
            "unreadable": self._unreadable,
            "tokens": self.tokens,
            "files": entries,
        }
        if self._mask is not None:
            shard["trained"] = self._mask.count
            shard["unread"], shard["marks"] = dict(self._unread), dict(self._marks)
        return {
            "shard": shard,
            "text_bytes": self._text_bytes,
            "byte_counts": self._byte_counts.tolist(),
        }

    def abandon(self) -> None:
        """Close the files of an incomplete shard."""
        self._bin.abandon()
        self._meta.abandon()
        if self._mask is not None:
            self._mask.file.abandon()


_MAX_CHARACTERS = 1 << 20
_MAX_TOKENS = 1 << 18


class ShardEncoder(Protocol):
    """Encoder that converts the documents of a source to stored token ids."""

    def encode_batch(self, first: int, stop: int) -> DocumentBatch:
        """Return documents `first` to `stop` - 1, or fewer (at least one) if documents are long.

        Returning fewer documents bounds the memory used by batches of long documents.
        """
        ...

    def identity(self, document: int) -> tuple[int, int]:
        """Return the `META` entry of a document."""
        ...


class _TextShardEncoder:
    def __init__(self, source: Source, tokenizer: Tokenizer):
        self._source, self._tokenizer = source, tokenizer

    def encode_batch(self, first: int, stop: int) -> DocumentBatch:
        texts = self._read(first, stop)
        tokenizer, dtype = self._tokenizer, dtype_for(self._tokenizer.vocab_size)
        begin, end = np.array([tokenizer.begin_id], dtype), np.array([tokenizer.end_id], dtype)
        ids: list[np.ndarray] = []
        lengths: list[int] = []
        with wrap_text_errors(lambda number: self._source.where(first + number)):
            encoded = tokenizer.encode_batch(texts)
        for token_ids in encoded:
            ids += begin, token_ids.astype(dtype), end  # the ids may have any integer dtype
            lengths.append(len(token_ids) + 2)
        raws = [text.encode() for text in texts]
        meta = np.array([(len(raw), digest_of(raw)) for raw in raws], META)
        unreadable = np.isin(np.arange(first, first + len(texts)), self._source.unreadable)
        return DocumentBatch(
            np.concatenate(ids), np.array(lengths), meta, _histograms(raws), unreadable
        )

    def identity(self, document: int) -> tuple[int, int]:
        raw = self._source[document].encode()
        return len(raw), digest_of(raw)

    def _read(self, first: int, stop: int) -> list[str]:
        texts: list[str] = []
        characters = 0
        while characters < _MAX_CHARACTERS and first + len(texts) < stop:
            texts.append(self._source[first + len(texts)])
            characters += len(texts[-1])
        return texts


class _ConversationShardEncoder:
    def __init__(self, conversations: ConversationEncoder):
        self._conversations = conversations

    def encode_batch(self, first: int, stop: int) -> DocumentBatch:
        dtype = dtype_for(self._conversations.tokenizer.vocab_size)
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        raws: list[bytes] = []
        digests: list[int] = []
        unread: list[tuple[str, ...]] = []
        marks: list[int] = []
        tokens = 0
        while tokens < _MAX_TOKENS and first + len(ids) < stop:
            chat = encode_and_count(self._conversations, first + len(ids))
            ids.append(chat.ids.astype(dtype))
            masks.append(chat.trained)
            raws.append(chat.raw)
            digests.append(chat.digest)
            unread.append(chat.unread)
            marks.append(chat.marks)
            tokens += len(chat.ids)
        lengths = np.array([len(document) for document in ids])
        meta = np.array(list(zip(map(len, raws), digests, strict=True)), META)
        unreadable = np.zeros(len(ids), bool)
        parts = lengths, meta, _histograms(raws), unreadable
        return DocumentBatch(np.concatenate(ids), *parts, np.concatenate(masks), unread, marks)

    def identity(self, document: int) -> tuple[int, int]:
        chat = encode_and_count(self._conversations, document)
        return len(chat.raw), chat.digest


def _histograms(raws: list[bytes]) -> np.ndarray:
    """Return the byte histogram of each text, uint32 [texts, 256]."""
    counts = [np.bincount(np.frombuffer(raw, np.uint8), minlength=256) for raw in raws]
    return np.array(counts, np.uint32)


def build_shard_encoder(
    source: Source, tokenizer: Tokenizer, talks: ConversationEncoder | None
) -> ShardEncoder:
    """Return an encoder for plain text, or for conversations if `talks` is set."""
    return (
        _TextShardEncoder(source, tokenizer) if talks is None else _ConversationShardEncoder(talks)
    )


def build_conversation_encoder(
    data: SourceConfig, source: Source, tokenizer: Tokenizer
) -> ConversationEncoder | None:
    """Return the encoder for conversations; None if the documents are plain text."""
    return None if data.chat == "off" else ConversationEncoder(source, tokenizer, data)


class _Worker:
    encoder: ShardEncoder


def source_if_picklable(source: Source) -> Source | None:
    """Return the source, or None if it cannot be pickled and each worker must open it again."""
    try:
        ForkingPickler.dumps(source)
    except Exception:  # libraries raise various types of exceptions
        return None
    return source


def start(
    data: SourceConfig, tokenizer: TokenizerConfig, seed: int, source: Source | None, day: str
) -> None:
    """Initialize a spawned worker process. The worker exits when its parent exits.

    `day` is the date that the chat template renders.
    """
    # The worker processes provide the parallelism, so the libraries should not start threads.
    # `tokenizers` reads these variables at import.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the parent process handles these signals
    threading.Thread(target=_end_with_parent, daemon=True).start()
    opened = open_tokenizer(tokenizer)
    source = expand_trained_messages(open_source(data, seed), data) if source is None else source
    talks = build_conversation_encoder(data, source, opened)
    if talks is not None:
        talks.day = day
    _Worker.encoder = build_shard_encoder(source, opened, talks)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def encode(first: int, stop: int) -> DocumentBatch | tuple[Problem, ...]:
    """Return encoded documents from `first` on, or the problems if encoding fails; see
    `ShardEncoder.encode_batch`.
    """
    try:
        return _Worker.encoder.encode_batch(first, stop)
    except ConfigError as error:  # pickling the error would lose its `problems`
        return error.problems
