"""Writes the files of one shard, with digests and CRCs as the bytes go by."""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from maxpipe.data.prepared.indexed import BIN, IDX, index_of
from maxpipe.data.prepared.manifest import (
    CRC_FILE,
    MASK_FILE,
    META_FILE,
    FileEntry,
    ShardEntry,
    checked,
    shard_name,
)
from maxpipe.data.prepared.ranges import BLOCK_BYTES
from maxpipe.errors import ConfigError
from maxpipe.io.files import opened

_LONGEST = (1 << 31) - 1
"""Tokens of a document that an index can count."""


class Piece(NamedTuple):
    """Consecutive documents."""

    ids: np.ndarray
    """[tokens] with begin and end of each."""
    lengths: np.ndarray
    """int64 [documents]"""
    meta: np.ndarray
    """`META` [documents]"""
    byte_counts: np.ndarray
    """uint32 [documents, 256]: the histograms of the bytes of their texts."""
    unreadable: np.ndarray
    """bool [documents]: those that are empty because their records could not be read."""
    trained: np.ndarray | None = None
    """bool [tokens]: those that are trained on; None where all are."""
    unread: Sequence[tuple[str, ...]] = ()
    """`Encoded.unread` of each conversation."""
    marks: Sequence[int] = ()
    """`Encoded.marks` of each conversation."""

    def part(self, first: int, stop: int) -> Piece:
        """The documents from `first` to before `stop`."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        here, tokens = slice(first, stop), slice(ends[first], ends[stop])
        trained = None if self.trained is None else self.trained[tokens]
        parts = self.lengths, self.meta, self.byte_counts, self.unreadable
        lengths, meta, counts, unreadable = (each[here] for each in parts)
        notes = self.unread[here], self.marks[here]
        return Piece(self.ids[tokens], lengths, meta, counts, unreadable, trained, *notes)


class Finished(TypedDict):
    """A shard that is on the disk, and what it adds to the sums of all."""

    shard: ShardEntry
    text_bytes: int
    byte_counts: list[int]


class SignedFile:
    """A new file; what is written is summed up. Written through no link."""

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = open(opened(path, flags), "wb", buffering=1 << 20)  # noqa: SIM115
        self._sha = hashlib.sha256()
        self._bytes = 0
        self._crc = 0
        self.crcs = array("I")
        """Of each block that is full; `close` adds the last one."""

    def write(self, content: bytes) -> None:
        """Appends bytes."""
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
        """Brings it to the disk."""
        if self._bytes % BLOCK_BYTES:
            self.crcs.append(self._crc)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "sha256": self._sha.hexdigest()}

    def abandon(self) -> None:
        """Closes it as it is."""
        self._file.close()


class _Mask:
    """Which tokens are trained, a bit each."""

    def __init__(self, file: SignedFile):
        self.file = file
        self.count = 0
        """Of trained tokens."""
        self._rest = np.zeros(0, bool)

    def add(self, trained: np.ndarray) -> None:
        """Appends bool [tokens]."""
        self.count += int(trained.sum())
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self.file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def finish(self) -> None:
        """Fills the last byte."""
        self.file.write(np.packbits(self._rest, bitorder="little").tobytes())


class ShardWriter:
    """The files of a shard, which replace what an earlier attempt left of it."""

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

    def _open(self, suffix: str) -> SignedFile:
        return SignedFile(self._folder / shard_name(self._number, suffix))

    def add(self, piece: Piece) -> None:
        """Appends documents."""
        longest = int(piece.lengths.max(initial=0))
        if longest > _LONGEST:
            rule = f"must have at most {_LONGEST} tokens: one has {longest}."
            raise ConfigError.one("data.path: a document", None, rule, "Cut it into several.")
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

    def close(self) -> Finished:
        """Brings everything to the disk."""
        lengths = np.concatenate(self._lengths)
        files = {BIN: self._bin, META_FILE: self._meta, IDX: self._open(IDX)}
        for part in index_of(lengths, self._dtype):
            files[IDX].write(part)
        if self._mask is not None:
            self._mask.finish()
            files[MASK_FILE] = self._mask.file
        entries = {suffix: file.close() for suffix, file in files.items()}
        crc = self._open(CRC_FILE)
        for suffix in checked(self._mask is not None):
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
        """Leaves it unfinished."""
        self._bin.abandon()
        self._meta.abandon()
        if self._mask is not None:
            self._mask.file.abandon()
