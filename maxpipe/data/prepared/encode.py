"""What one of the processes of `prepare` does: documents to ids."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

import numpy as np

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.schema import TokenizerConfig
from maxpipe.data.answers import answers_of
from maxpipe.data.chat import Conversations, count
from maxpipe.data.documents import digest_of
from maxpipe.data.prepared.indexed import dtype_for
from maxpipe.data.prepared.manifest import META
from maxpipe.data.prepared.writer import Piece
from maxpipe.data.sources import Source, open_source
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.data.tokenizers.files import naming
from maxpipe.errors import ConfigError, Problem

_MOST_CHARACTERS = 1 << 20
_MOST_TOKENS = 1 << 18


class Encoder(Protocol):
    """Documents of a source as they are stored."""

    def piece(self, first: int, stop: int) -> Piece:
        """The documents from `first` to before `stop`: fewer, but one, where they are long.

        So what is held at a time does not grow with the size of documents.
        """
        ...

    def identity(self, document: int) -> tuple[int, int]:
        """What `META` has of a document."""
        ...


class _Texts:
    """Texts, each with begin and end ids."""

    def __init__(self, source: Source, tokenizer: Tokenizer):
        self._source, self._tokenizer = source, tokenizer

    def piece(self, first: int, stop: int) -> Piece:
        texts = self._read(first, stop)
        tokenizer, dtype = self._tokenizer, dtype_for(self._tokenizer.vocab_size)
        begin, end = np.array([tokenizer.begin_id], dtype), np.array([tokenizer.end_id], dtype)
        ids: list[np.ndarray] = []
        lengths: list[int] = []
        with naming(lambda number: self._source.where(first + number)):
            encoded = tokenizer.encode_batch(texts)
        for found in encoded:
            ids += begin, found.astype(dtype), end  # `found` may be of any integers
            lengths.append(len(found) + 2)
        raws = [text.encode() for text in texts]
        meta = np.array([(len(raw), digest_of(raw)) for raw in raws], META)
        unreadable = np.isin(np.arange(first, first + len(texts)), self._source.unreadable)
        return Piece(np.concatenate(ids), np.array(lengths), meta, _histograms(raws), unreadable)

    def identity(self, document: int) -> tuple[int, int]:
        raw = self._source[document].encode()
        return len(raw), digest_of(raw)

    def _read(self, first: int, stop: int) -> list[str]:
        """Those from `first` on, up to the one with which they have about a million characters."""
        texts: list[str] = []
        characters = 0
        while characters < _MOST_CHARACTERS and first + len(texts) < stop:
            texts.append(self._source[first + len(texts)])
            characters += len(texts[-1])
        return texts


class _Talks:
    """Conversations, with what of them is trained."""

    def __init__(self, conversations: Conversations):
        self._conversations = conversations

    def piece(self, first: int, stop: int) -> Piece:
        dtype = dtype_for(self._conversations.tokenizer.vocab_size)
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        raws: list[bytes] = []
        digests: list[int] = []
        unread: list[tuple[str, ...]] = []
        marks: list[int] = []
        tokens = 0
        while tokens < _MOST_TOKENS and first + len(ids) < stop:
            found = count(self._conversations, first + len(ids))
            ids.append(found.ids.astype(dtype))
            masks.append(found.trained)
            raws.append(found.raw)
            digests.append(found.digest)
            unread.append(found.unread)
            marks.append(found.marks)
            tokens += len(found.ids)
        lengths = np.array([len(each) for each in ids])
        meta = np.array(list(zip(map(len, raws), digests, strict=True)), META)
        unreadable = np.zeros(len(ids), bool)
        parts = lengths, meta, _histograms(raws), unreadable
        return Piece(np.concatenate(ids), *parts, np.concatenate(masks), unread, marks)

    def identity(self, document: int) -> tuple[int, int]:
        found = count(self._conversations, document)
        return len(found.raw), found.digest


def _histograms(raws: list[bytes]) -> np.ndarray:
    """uint32 [texts, 256]: how often each has each byte."""
    counts = [np.bincount(np.frombuffer(raw, np.uint8), minlength=256) for raw in raws]
    return np.array(counts, np.uint32)


def encoder_of(source: Source, tokenizer: Tokenizer, talks: Conversations | None) -> Encoder:
    """Of texts, or of conversations where these are given."""
    return _Texts(source, tokenizer) if talks is None else _Talks(talks)


def conversations_of(
    data: SourceConfig, source: Source, tokenizer: Tokenizer
) -> Conversations | None:
    """The records as conversations, if they are.

    Raises:
        ConfigError: there is no chat template, or it cannot be read.
    """
    return None if data.chat == "off" else Conversations(source, tokenizer, data)


class _Worker:
    """What a process encodes with."""

    encoder: Encoder


def sendable(source: Source) -> Source | None:
    """The source, if it can be sent to other processes, which then need not look through its files
    again.
    """
    try:
        ForkingPickler.dumps(source)
    except Exception:  # objects of libraries raise what they like
        return None
    return source


def start(
    data: SourceConfig, tokenizer: TokenizerConfig, seed: int, source: Source | None, day: str
) -> None:
    """Sets up a process that was spawned: it ends with the one that started it.

    `day` is the date that a chat template reads.
    """
    # The processes are the parallelism. Read by `tokenizers` when it is imported.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the one that started it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found = open_tokenizer(tokenizer)
    source = answers_of(open_source(data, seed), data) if source is None else source
    talks = conversations_of(data, source, found)
    if talks is not None:
        talks.day = day
    _Worker.encoder = encoder_of(source, found, talks)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def encode(first: int, stop: int) -> Piece | tuple[Problem, ...]:
    """The documents from `first` on, or what the user has to change; as `Encoder.piece`."""
    try:
        return _Worker.encoder.piece(first, stop)
    except ConfigError as error:  # its pickled form would lose the problems
        return error.problems
