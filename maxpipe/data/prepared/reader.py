"""Documents of a prepared folder as ids, read where they are on a disk or in a bucket.

Opening reads the manifest and the sums over spans: what it takes does not depend on the number of
documents. Each block of a file is compared with its CRC when it is first read.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from maxpipe.data.documents import Encoded
from maxpipe.data.prepared.indexed import BIN, HEADER_BYTES, IDX, parse
from maxpipe.data.prepared.manifest import (
    CONTENT,
    CRC_FILE,
    MASK_FILE,
    META,
    META_FILE,
    SPAN,
    SPANS,
    FileEntry,
    Manifest,
    ShardEntry,
    checked,
    content_facts,
    has_masks,
    read_manifest,
    shard_name,
)
from maxpipe.data.prepared.ranges import BLOCK_BYTES, Checked, Kept, damaged, joined, open_ranges
from maxpipe.data.tokenizer import Tokenizer, action_on_other, check_rows
from maxpipe.errors import ConfigError
from maxpipe.io.files import scheme


class Shard:
    """Consecutive documents. Its files are opened when they are first read."""

    def __init__(self, folder: str, number: int, entry: ShardEntry, kept: Kept | None):
        self.entry = entry
        self._folder, self._number, self._kept = folder, number, kept

    def _path(self, suffix: str) -> str:
        return joined(self._folder, shard_name(self._number, suffix))

    @functools.cached_property
    def files(self) -> dict[str, Checked]:
        """Those with CRCs, by suffix."""
        entries = self.entry["files"]
        names = checked(MASK_FILE in entries)
        crcs = np.frombuffer(read_whole(self._path(CRC_FILE), entries[CRC_FILE]), "<u4")
        sizes = [entries[suffix]["bytes"] for suffix in names]
        ends = np.cumsum([-(-size // BLOCK_BYTES) for size in sizes])
        if len(crcs) != ends[-1]:
            raise damaged(self._path(CRC_FILE), f"it has {len(crcs)} CRCs for {ends[-1]} blocks")
        parts = np.split(crcs, ends[:-1])
        return {
            suffix: Checked(open_ranges(self._path(suffix)), size, part, self._kept)
            for suffix, size, part in zip(names, sizes, parts, strict=True)
        }

    @functools.cached_property
    def layout(self) -> Any:
        """Of the index, which has to fit the manifest."""
        index = self.files[IDX]
        try:
            found = parse(index.read(0, min(HEADER_BYTES, index.size)), index.size)
        except ValueError as error:
            raise damaged(index.path, str(error)) from error
        if found.num_sequences != self.entry["documents"]:
            raise damaged(index.path, f"it is of {found.num_sequences} documents")
        if self.entry["tokens"] * found.dtype.itemsize != self.entry["files"][BIN]["bytes"]:
            raise damaged(index.path, f"it is of ids of {found.dtype.itemsize} bytes")
        return found

    def lengths(self, first: int, stop: int) -> np.ndarray:
        """int64 tokens of the documents from `first` to before `stop`."""
        at = self.layout.lengths_at
        raw = self.files[IDX].read(at + 4 * first, at + 4 * stop)
        return np.frombuffer(raw, "<i4").astype(np.int64)

    def read(self, document: int) -> Encoded:
        """The ids of a document, and which of them are trained."""
        begin, stop = self._place(document)
        size, files = self.layout.dtype.itemsize, self.files
        ids = np.frombuffer(files[BIN].read(begin, stop), self.layout.dtype)
        if MASK_FILE not in files:
            return Encoded(ids)
        front, first = begin // size, begin // size // 8
        raw = files[MASK_FILE].read(first, -(-(stop // size) // 8))
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        at = front - 8 * first
        return Encoded(ids, bits[at : at + len(ids)].astype(bool))

    def _place(self, document: int) -> tuple[int, int]:
        """The bytes of a document in the file of ids."""
        at = self.layout.pointers_at + 8 * document
        is_last = document + 1 == self.entry["documents"]
        raw = self.files[IDX].read(at, at + (8 if is_last else 16))
        begin, *end = np.frombuffer(raw, "<i8").tolist()
        stop, size = end[0] if end else self.files[BIN].size, self.layout.dtype.itemsize
        if not 0 <= begin <= stop <= self.files[BIN].size or begin % size or stop % size:
            raise damaged(
                self.files[IDX].path, f"document {document} is at bytes {begin} to {stop}"
            )
        return begin, stop

    def meta(self, first: int, stop: int) -> np.ndarray:
        """`META` of the documents from `first` to before `stop`."""
        raw = self.files[META_FILE].read(META.itemsize * first, META.itemsize * stop)
        return np.frombuffer(raw, META)


def read_whole(path: str, entry: FileEntry) -> bytes:
    """A small file, which has to have its digest.

    Raises:
        StorageError: it has not, or cannot be read.
    """
    file = open_ranges(path)
    if file.size != entry["bytes"]:
        raise damaged(path, f"it has {file.size} bytes, and {entry['bytes']} were written")
    content = file.read(0, file.size)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise damaged(path, "its content is not what was written")
    return content


class PreparedDocuments:
    """The documents of a folder that `maxpipe data prepare` wrote, in their order there."""

    def __init__(self, folder: str, tokenizer: Tokenizer):
        self.manifest = read_manifest(folder)
        _check_tokenizer(folder, self.manifest, tokenizer)
        self.pad_id = tokenizer.pad_id
        self._tokenizer = tokenizer
        self.num_documents = self.manifest["documents"]
        self.num_tokens = self.manifest["tokens"]
        self._folder = folder
        kept = Kept() if scheme(folder) else None
        shards = self.manifest["shards"]
        self._shards = [Shard(folder, number, each, kept) for number, each in enumerate(shards)]
        self._starts = np.cumsum([0, *(each["documents"] for each in shards)])
        self.span_tokens = self._read_spans()

    def _read_spans(self) -> np.ndarray:
        path = joined(self._folder, SPANS)
        starts = np.frombuffer(read_whole(path, self.manifest["spans"]), "<i8")
        fits = len(starts) == -(-self.num_documents // SPAN) + 1 and starts[-1] == self.num_tokens
        spans = np.diff(starts)
        if not fits or starts[0] or spans.min() < 0:
            raise damaged(path, "it does not fit the manifest")
        return spans

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents]; reads every index."""
        return self._lengths

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return self.lengths_between(0, self.num_documents)

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """int64 tokens of the documents from `first` to before `stop`."""
        return self._between(first, stop, lambda shard, a, b: shard.lengths(a, b))

    def meta(self, first: int, stop: int) -> np.ndarray:
        """`META` of the documents from `first` to before `stop`."""
        return self._between(first, stop, lambda shard, a, b: shard.meta(a, b))

    def digests(self, first: int, stop: int) -> np.ndarray:
        """uint64: digests of the texts of the documents from `first` to before `stop`."""
        return self.meta(first, stop)["digest"]

    def _between(self, first: int, stop: int, read: Any) -> np.ndarray:
        low, high = np.searchsorted(self._starts, [first, stop - 1], side="right") - 1
        parts = []
        for number in range(low, high + 1):
            start, end = self._starts[number : number + 2].tolist()
            parts.append(
                read(self._shards[number], max(first, start) - start, min(stop, end) - start)
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __getitem__(self, document: int) -> Encoded:
        if not 0 <= document < self.num_documents:
            raise IndexError(document)
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        inside = document - int(self._starts[number])
        found = self._shards[number].read(inside)
        low, high = int(found.ids.min(initial=0)), int(found.ids.max(initial=0))
        if low < 0 or high >= self._tokenizer.vocab_size:
            path = joined(self._folder, shard_name(number, BIN))
            raise damaged(path, f"document {inside} has the id {low if low < 0 else high}")
        if high >= self._tokenizer.rows:
            path = joined(self._folder, shard_name(number, BIN))
            check_rows(f"{path}: document {inside}", found.ids, self._tokenizer)
        return found

    def where(self, document: int) -> str:
        """The shard that a document is in, and its number in the source."""
        number = int(np.searchsorted(self._starts, document, side="right")) - 1
        path = joined(self._folder, shard_name(number, BIN))
        return f"{path}: document {document} of {self.manifest['source']['name']}"

    @property
    def has_conversations(self) -> bool:
        """Whether the documents are conversations, which have masks."""
        return has_masks(self.manifest)

    @property
    def remark(self) -> str:
        """Where they come from."""
        what = "conversations of " if self.has_conversations else ""
        return f"prepared from {what}{self.manifest['source']['name']}"

    @property
    def unreadable(self) -> int:
        """Documents that are empty because their records could not be read."""
        return sum(shard["unreadable"] for shard in self.manifest["shards"])

    @property
    def unread(self) -> dict[str, int]:
        """How many conversations have each key that nothing reads."""
        return notes_of(self.manifest["shards"])[0]

    @property
    def marks(self) -> dict[int, int]:
        """How many conversations have each mark, see `Encoded.marks`."""
        return notes_of(self.manifest["shards"])[1]

    @property
    def byte_counts(self) -> np.ndarray:
        """int64 [256]: of the text that was encoded."""
        return np.array(self.manifest["byte_counts"], np.int64)

    def facts(self) -> Mapping[str, Any]:
        """What the source gives of the same documents: a run may go on from text with its ids."""
        source = self.manifest["source"]
        chat = {"chat": source["chat"]} if "chat" in source else {}
        return {
            "source": source["name"],
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "source_digest": source["fingerprint"],
            **content_facts(source.get(CONTENT, {})),
            **chat,
        }


def notes_of(shards: Iterable[ShardEntry]) -> tuple[dict[str, int], dict[int, int]]:
    """How many conversations have each key that nothing reads, and how many each mark."""
    unread, marks = Counter[str](), Counter[int]()
    for shard in shards:
        unread.update(shard.get("unread", {}))
        for combined, count in shard.get("marks", {}).items():
            marks.update({1 << bit: count for bit in range(8) if int(combined) >> bit & 1})
    return dict(unread), dict(marks)


def _check_tokenizer(folder: str, manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the ids are those of another tokenizer."""
    made = manifest["tokenizer"]
    if made["fingerprint"] == tokenizer.fingerprint():
        return
    path = f" tokenizer.path={made['path']}" if made["path"] else ""
    named = f"tokenizer.kind={made['kind']}{path}"
    raise ConfigError.one(
        "data.path",
        folder,
        f"holds ids of another tokenizer than tokenizer.* names: of {named}, with "
        f"{made['vocab_size']} ids and the fingerprint {made['fingerprint'][:12]}; this one has "
        f"{tokenizer.vocab_size} and {tokenizer.fingerprint()[:12]}.",
        action_on_other(
            tokenizer,
            made["fingerprint"],
            f"Set {named}, or prepare the documents again with this tokenizer.",
        ),
    )
