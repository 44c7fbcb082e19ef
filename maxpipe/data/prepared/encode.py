"""What one of the processes of `prepare` does: documents to ids."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.reduction import ForkingPickler

import numpy as np

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.schema import TokenizerConfig
from maxpipe.data.documents import digest_of
from maxpipe.data.prepared.indexed import dtype_for
from maxpipe.data.prepared.manifest import META
from maxpipe.data.prepared.writer import Piece
from maxpipe.data.sources import Source, open_source
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError, Problem

_MOST_CHARACTERS = 1 << 20


class _Worker:
    """A process' own source and tokenizer."""

    source: Source
    tokenizer: Tokenizer


def sendable(source: Source) -> Source | None:
    """The source, if it can be sent to other processes, which then need not look through its files
    again.
    """
    try:
        ForkingPickler.dumps(source)
    except Exception:  # objects of libraries raise what they like
        return None
    return source


def start(data: SourceConfig, tokenizer: TokenizerConfig, seed: int, source: Source | None) -> None:
    """Sets up a process that was spawned: it ends with the one that started it."""
    # The processes are the parallelism. Read by `tokenizers` when it is imported.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the one that started it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.tokenizer = open_tokenizer(tokenizer)
    _Worker.source = open_source(data, seed) if source is None else source


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def encode(first: int, stop: int) -> Piece | tuple[Problem, ...]:
    """The documents from `first` on, or what the user has to change; as `encoded`."""
    try:
        return encoded(_Worker.source, _Worker.tokenizer, first, stop)
    except ConfigError as error:  # its pickled form would lose the problems
        return error.problems


def encoded(source: Source, tokenizer: Tokenizer, first: int, stop: int) -> Piece:
    """The documents from `first` to before `stop`: fewer, but one, where they have many characters.

    So what is held at a time does not grow with the size of documents.
    """
    texts = _texts(source, first, stop)
    meta = np.zeros(len(texts), META)
    byte_counts = np.zeros((len(texts), 256), np.uint32)
    dtype = dtype_for(tokenizer.vocab_size)
    begin, end = np.array([tokenizer.begin_id], dtype), np.array([tokenizer.end_id], dtype)
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    for text, found in zip(texts, tokenizer.encode_batch(texts), strict=True):
        raw = text.encode()
        meta[len(lengths)] = len(raw), digest_of(raw)
        byte_counts[len(lengths)] = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
        ids += begin, found.astype(dtype), end  # `found` may be of any integers
        lengths.append(len(found) + 2)
    unreadable = np.isin(np.arange(first, first + len(texts)), source.unreadable)
    return Piece(np.concatenate(ids), np.array(lengths, np.int64), meta, byte_counts, unreadable)


def _texts(source: Source, first: int, stop: int) -> list[str]:
    """Those from `first` on, up to the one with which they have about a million characters."""
    texts: list[str] = []
    characters = 0
    while characters < _MOST_CHARACTERS and first + len(texts) < stop:
        texts.append(source[first + len(texts)])
        characters += len(texts[-1])
    return texts
