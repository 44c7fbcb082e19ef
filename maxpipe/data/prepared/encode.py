"""What one of the processes of `prepare` does: documents to ids."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import parent_process
from multiprocessing.reduction import ForkingPickler

import numpy as np

from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.schema import TokenizerConfig
from maxpipe.data.prepared.indexed import dtype_for
from maxpipe.data.prepared.manifest import META
from maxpipe.data.prepared.writer import Piece
from maxpipe.data.sources import Source, open_source
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError, Problem

_BATCH_CHARACTERS = 1 << 20


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
    """The documents from `first` to before `stop`, or what the user has to change."""
    try:
        return encoded(_Worker.source, _Worker.tokenizer, first, stop)
    except ConfigError as error:  # its pickled form would lose the problems
        return error.problems


def encoded(source: Source, tokenizer: Tokenizer, first: int, stop: int) -> Piece:
    """The same of a source and a tokenizer."""
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    meta = np.zeros(stop - first, META)
    byte_counts = np.zeros((stop - first, 256), np.uint32)
    begin, end = np.array([tokenizer.begin_id]), np.array([tokenizer.end_id])
    for batch in _batches(source, first, stop):
        for text, found in zip(batch, tokenizer.encode_batch(batch), strict=True):
            raw = text.encode()
            digest = hashlib.blake2b(raw, digest_size=8).digest()
            meta[len(lengths)] = len(raw), int.from_bytes(digest, "little")
            byte_counts[len(lengths)] = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
            ids += begin, found, end
            lengths.append(len(found) + 2)
    dtype = dtype_for(tokenizer.vocab_size)
    # One conversion: `found` may be of any integers.
    joined = np.concatenate(ids).astype(dtype)
    unreadable = np.isin(np.arange(first, stop), source.unreadable)
    return Piece(joined, np.array(lengths, np.int64), meta, byte_counts, unreadable)


def _batches(source: Source, first: int, stop: int) -> Iterator[list[str]]:
    """Texts in batches of about a million characters."""
    texts: list[str] = []
    characters = 0
    for number in range(first, stop):
        texts.append(source[number])
        characters += len(texts[-1])
        if characters >= _BATCH_CHARACTERS or number + 1 == stop:
            yield texts
            texts, characters = [], 0
