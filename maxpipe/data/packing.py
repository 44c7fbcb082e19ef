"""Pack documents into fixed-length sequences with random access by index.

Every sequence depends only on the document lengths, so any sequence can be built without reading
earlier sequences. This module also splits documents into training and validation sets and shuffles
documents. Higher layers, starting with `mixture.py`, handle batches, epochs and processes.

A sequence has T inputs and the target of the last input, for a total of T + 1 tokens. Packing
strategies that keep documents together split a document only if it has more than T + 1 tokens. The
document is then split into chunks of T + 1 tokens. Each chunk begins with the last token of the
previous chunk, so no target is lost. The remainder is a shorter chunk, which is packed like a
document. Documents with fewer than two tokens have no target and are skipped. Packing plans of
large sources are cached on disk.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from maxpipe.config.sections.source import Packing
from maxpipe.data.documents import Documents
from maxpipe.data.formats import disk_cache
from maxpipe.data.formats.files import digest
from maxpipe.data.formats.source import track_read
from maxpipe.data.images import IMAGE_GRIDS, IMAGE_TOKENS_LEFT, IMAGES, ROTARY_POSITIONS
from maxpipe.data.sources import Heartbeat
from maxpipe.errors import Code, ConfigError

_FEISTEL_ROUNDS = 8
_FEISTEL_BLOCK = 1 << 16
DOCUMENT_ORDER = 0
"""Second integer in the key of a document permutation, distinct for each permutation type."""


class Permutation:
    """Seeded permutation of `range(size)`, computed per index in constant memory.

    The order does not depend on library versions, because a data position in a checkpoint must
    always refer to the same sequence. The permutation is a Feistel network over the next power of
    four, iterated until the result is within the range.
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
        assert inside, f"an index outside range({self._size}) would cause an infinite loop"
        # For many indices, processing blocks that fit in the CPU cache is four times as fast.
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
    """Mix the bits of uint64 values (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_documents(
    num_documents: int, validation_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return shuffled document indices for the training split and for the validation split.

    Raises:
        ConfigError: the fraction is above 0 and the source has fewer than two documents.
    """
    order = Permutation(num_documents, seed, DOCUMENT_ORDER)(np.arange(num_documents))
    if validation_fraction <= 0:
        return order, order[:0]
    if num_documents < 2:
        rule = "requires at least 2 documents, one to train on and one to evaluate: data.path has "
        rule += f"{num_documents}."
        action = "Set data.validation_fraction=0 and eval.batches=0, or split the text into "
        action += "documents."
        raise ConfigError.one(
            Code.DATA_VALIDATION, "data.validation_fraction", validation_fraction, rule, action
        )
    num_validation = min(max(round(validation_fraction * num_documents), 1), num_documents - 1)
    return order[num_validation:], order[:num_validation]


class TokenSpan(NamedTuple):
    """Range of one document's tokens that is part of a sequence."""

    document: int
    begin: int
    end: int


class Sequences(Protocol):
    """Indexed sequences of T tokens. Every read in every process returns the same arrays."""

    sequence_length: int
    num_tokens: int
    """Total number of tokens across all documents, including BOS and EOS."""
    num_targets: int
    """Total number of positions, across all sequences, whose next token is in the same document."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the arrays `tokens`, `targets`, `segment_ids` and `positions`, int32 [T], and
        `loss_mask`, float32 [T].

        `segment_ids` numbers the documents of the sequence from 1; 0 is padding. `positions` starts
        at 0 at each document's first token in this sequence. `loss_mask` is 1 where the token and
        its target are in the same document and the target is trained on.
        """
        ...

    def padding(self) -> dict[str, np.ndarray]:
        """Return a sequence that contains only padding and does not contribute to the loss."""
        ...

    def documents(self, index: int) -> list[int]:
        """Return the indices of the documents that have a token in this sequence."""
        ...

    def epoch_permutation(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return the permutation of the sequences for a key that includes the epoch."""
        ...

    def where(self, document: int) -> str:
        """Return a document's file and its position in that file, for use in messages."""
        ...

    def size(self, document: int) -> int:
        """Return the number of tokens in a document."""
        ...


def packing_efficiency(sequences: Sequences) -> float:
    """Return the fraction of positions whose target is in the same document."""
    return sequences.num_targets / (len(sequences) * sequences.sequence_length)


def count_targets(lengths: np.ndarray) -> int:
    """Return the number of tokens that have a preceding token in the same document."""
    return int(lengths.sum() - np.count_nonzero(lengths))


def assemble_sequence(
    documents: Documents, pieces: Iterable[TokenSpan], sequence_length: int
) -> dict[str, np.ndarray]:
    """Return the arrays of one sequence, filled with document chunks in the given order.

    The chunks have at most T + 1 tokens in total: T inputs and the target of the last input. The
    two halves of a preference pair become separate segments.
    """
    size = sequence_length + 1
    window = np.full(size, documents.pad_id, np.int32)
    segments = np.zeros(size, np.int32)
    trained = np.ones(size, bool)
    positions = np.zeros(size, np.int32)
    images, left = list[np.ndarray](), np.zeros(size, np.int32)
    grids, rotary = list[np.ndarray](), list[tuple[slice, np.ndarray]]()
    at = segment = 0
    for number, begin, end in pieces:
        with track_read(partial(documents.where, number)):
            document = documents[number]
        here, inside = slice(at, at + end - begin), slice(begin, end)
        window[here] = document.ids[inside]
        if document.trained is not None:
            trained[here] = document.trained[inside]
        if document.images is not None and document.image_tokens_left is not None:
            assert not begin and end == len(document.ids), "images are not split"
            images.append(document.images)
            left[here] = document.image_tokens_left
            if document.image_grids is not None:
                grids.append(document.image_grids)
            if document.rotary_positions is not None:
                rotary.append((here, document.rotary_positions))
        border = [document.second_half_start] if document.second_half_start else []
        for first, last in itertools.pairwise([begin, *border, end]):
            segment += 1
            segments[at : at + last - first] = segment
            positions[at : at + last - first] = np.arange(last - first)
            at += last - first
    by_image = {IMAGES: np.concatenate(images), IMAGE_TOKENS_LEFT: left[:-1]} if images else {}
    if grids:
        by_image[IMAGE_GRIDS] = np.concatenate(grids)
    if rotary:
        each = np.repeat(positions[:, None], 3, axis=1)
        for here, of_document in rotary:
            each[here] = of_document
        by_image[ROTARY_POSITIONS] = each[:-1]
    same = (segments[:-1] == segments[1:]) & (segments[1:] > 0) & trained[1:]
    return {
        "tokens": window[:-1],
        "targets": window[1:],
        "segment_ids": segments[:-1],
        "positions": positions[:-1],
        "loss_mask": same.astype(np.float32),
        **by_image,
    }


class ConcatenatedSequences:
    """Sequences of T tokens cut from the concatenation of all documents.

    Sequence i consists of tokens i*T to i*T + T of the stream: T inputs, and targets shifted by
    one. The last sequence is padded.
    """

    def __init__(self, documents: Documents, order: np.ndarray, sequence_length: int):
        self.sequence_length = sequence_length
        self._documents = documents
        self._order = order
        lengths = documents.lengths[order]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_tokens = int(self._starts[-1])
        self.num_targets = count_targets(lengths)

    def __len__(self) -> int:
        # The last token of the stream is only a target, so no sequence starts with it.
        return -(-(self.num_tokens - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return assemble_sequence(self._documents, self._pieces(index), self.sequence_length)

    def epoch_permutation(self, *key: int) -> Permutation:
        return Permutation(len(self), *key)

    def padding(self) -> dict[str, np.ndarray]:
        return assemble_sequence(self._documents, (), self.sequence_length)

    def documents(self, index: int) -> list[int]:
        first = index * self.sequence_length
        last = min(first + self.sequence_length, self.num_tokens) - 1
        begin, end = np.searchsorted(self._starts, [first, last], side="right")
        return self._order[begin - 1 : end].tolist()

    def where(self, document: int) -> str:
        return self._documents.where(document)

    def size(self, document: int) -> int:
        return int(self._documents.lengths[document])

    def _pieces(self, index: int) -> Iterator[TokenSpan]:
        at = index * self.sequence_length
        last = min(at + self.sequence_length + 1, self.num_tokens)
        position = int(np.searchsorted(self._starts, at, side="right")) - 1
        while at < last:
            begin, end = self._starts[position : position + 2].tolist()
            end = min(end, last)
            yield TokenSpan(int(self._order[position]), at - begin, end - begin)
            at, position = end, position + 1


Strategy = Literal["first_fit", "best_fit", "pad"]

MAX_OPEN_SEQUENCES = 1024
"""Maximum number of open sequences, which are the sequences that `first_fit` searches."""
_PACKED_ORDER = 4
"""Second integer in the key of a packing permutation, distinct for each permutation type."""


class PackingPlan(NamedTuple):
    """Assignment of document chunks to sequences. Chunk p starts at token `begins[p]` of document
    `documents[p]`.
    """

    starts: np.ndarray
    """int64 [sequences + 1]: index of each sequence's first chunk, then the number of chunks."""
    documents: np.ndarray
    """Unsigned integers [chunks]: document index, in the smallest dtype that fits."""
    begins: np.ndarray
    """Unsigned integers [chunks]: index of the first token, in the smallest dtype that fits."""


def pack_documents(
    lengths: np.ndarray,
    order: np.ndarray,
    sequence_length: int,
    strategy: Strategy,
    most_pieces: int = 0,
    images: np.ndarray | None = None,
    most_images: int = 0,
) -> PackingPlan:
    """Return the packing plan for the documents in `order`, an int64 array of shape [documents].

    `lengths`, int64 [all documents], is the number of tokens per document. The same arguments
    produce the same plan on every machine. The chunks of a sequence are in document order. If
    `most_pieces` is not 0, a sequence has at most `most_pieces` chunks: each chunk counts as at
    least 1 / `most_pieces` of the capacity. If `images`, int64 [all documents], is the number of
    images per document, each image counts as at least 1 / `most_images` of the capacity.
    """
    documents, begins = _split_into_spans(lengths[order], order, sequence_length)
    capacity = sequence_length + 1
    sizes = np.minimum(lengths[documents] - begins, capacity)
    if most_pieces:
        sizes = np.maximum(sizes, -(-capacity // most_pieces))
    if images is not None:
        sizes = np.maximum(sizes, -(-capacity * images[documents] // most_images))
    documents, begins = _to_smallest_dtype(documents), _to_smallest_dtype(begins)
    if strategy == "pad":
        return PackingPlan(np.arange(len(sizes) + 1), documents, begins)
    rows = _best_fit(sizes, capacity) if strategy == "best_fit" else _first_fit(sizes, capacity)
    num_rows = int(rows.max(initial=-1)) + 1
    # Packing places similar sequences next to each other, so the sequences are shuffled.
    rows = Permutation(num_rows, 0, _PACKED_ORDER)(np.arange(num_rows))[rows]
    by_row = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return PackingPlan(starts, documents[by_row], begins[by_row])


def _to_smallest_dtype(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _split_into_spans(
    lengths: np.ndarray, order: np.ndarray, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    counts = -(-np.maximum(lengths - 1, 0) // sequence_length)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(order, counts), numbers * sequence_length


def _first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign chunks to sequences by first fit, in the given order; return int64 [chunks].

    Each chunk is assigned to the first open sequence with enough free space. If no open sequence
    has enough space, a new sequence is opened. If `MAX_OPEN_SEQUENCES` sequences are open, the
    fullest sequence is closed first.
    """
    row_of = np.empty(len(sizes), np.int64)
    rooms = np.zeros(MAX_OPEN_SEQUENCES, np.int64)
    opened = np.zeros(MAX_OPEN_SEQUENCES, np.int64)
    rows = 0
    for piece, size in enumerate(sizes.tolist()):
        has_room = rooms >= size
        at = has_room.argmax()
        if not has_room[at]:
            fullest = rooms.argmin()
            rooms[fullest:-1] = rooms[fullest + 1 :]
            opened[fullest:-1] = opened[fullest + 1 :]
            at = -1
            rooms[at], opened[at] = capacity, rows
            rows += 1
        rooms[at] -= size
        row_of[piece] = opened[at]
    return row_of


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign chunks to sequences by best fit, longest chunks first; return int64 [chunks].

    Each chunk is assigned to the fullest sequence with enough free space, or to the first such
    sequence if several are equally full. Chunks of the same size are assigned together, because the
    fullest sequence remains the fullest until no further chunk fits. Except for sorting, the run
    time grows with the number of distinct sizes, not with the number of chunks.
    """
    rests = (capacity - sizes).astype(np.min_scalar_type(capacity))
    by_size = np.argsort(rests, kind="stable")  # numpy uses radix sort for 16-bit values
    counts = np.bincount(rests)
    row_of = np.empty(len(sizes), np.int64)  # ordered as `by_size`
    opened, rows, placed = _OpenSequences(capacity), 0, 0
    for room_left in np.flatnonzero(counts).tolist():
        size, count = capacity - room_left, int(counts[room_left])
        opened.set_piece_size(size)
        while count:
            open_range = opened.take()
            if open_range is None:
                end = rows - (-count // (capacity // size))
                open_range, rows = (rows, end, capacity), end
            first, end, room = open_range
            per_row = room // size
            middle = first + min(end - first, count // per_row)
            filled = np.repeat(np.arange(first, middle), per_row)
            opened.put(first, middle, room - per_row * size)
            if middle < end:  # the remaining chunks do not fill another sequence
                last = count - len(filled)
                filled = np.append(filled, np.full(last, middle))
                opened.put(middle, middle + (last > 0), room - last * size)
                opened.put(middle + (last > 0), end, room)
            row_of[placed : placed + len(filled)] = filled
            placed, count = placed + len(filled), count - len(filled)
    found_rows = np.empty_like(row_of)
    found_rows[by_size] = row_of
    return found_rows


class _OpenSequences:
    """Open sequences, stored as ranges of consecutive sequences with the same free space."""

    def __init__(self, capacity: int):
        self._size = capacity + 1
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        """Maps free space to a heap of ranges (first sequence, end)."""
        self._rooms: list[int] = []
        """Heap of the free-space values that fit a chunk of the current size."""

    def set_piece_size(self, size: int) -> None:
        """Set the size of the next chunks. All later chunks must have at most this size."""
        for room in range(size, self._size):
            if room in self._ranges:
                heapq.heappush(self._rooms, room)
        self._size = size

    def take(self) -> tuple[int, int, int] | None:
        """Remove and return a range of the fullest sequences that fit a chunk, as (first, end, free
        space).
        """
        if not self._rooms:
            return None
        room = self._rooms[0]
        ranges = self._ranges[room]
        first, end = heapq.heappop(ranges)
        if not ranges:
            del self._ranges[room]
            heapq.heappop(self._rooms)
        return first, end, room

    def put(self, first: int, end: int, room: int) -> None:
        """Add sequences `first` to `end` - 1 with this free space."""
        if first == end:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            if room >= self._size:
                heapq.heappush(self._rooms, room)
        heapq.heappush(self._ranges[room], (first, end))


_MIN_CACHED_DOCUMENTS = 1 << 17
"""Minimum number of documents for which plans are cached. Smaller plans are computed quickly."""
_PLAN_VERSION = 1
_FORMER_PACKINGS = {"concatenate": "cut"}
"""Former names of the packing strategies. Cache keys contain these names, to match caches of
earlier releases."""

_CACHE_MESSAGES = disk_cache.CacheMessages(
    "packing documents into sequences", "packing them again", "all documents will be packed again"
)


class _Tuple(Protocol):
    def _asdict(self) -> dict[str, Any]: ...


TupleT = TypeVar("TupleT", bound=_Tuple)


PAIRS, REFERENCE, RESPONSE_TOKENS = "pairs", "reference", "response_tokens"
"""Names of the arrays of a sequence with one entry per pair or response. These arrays have no token
dimension."""


class BinPackedSequences:
    """Sequences built from a packing plan and padded at the end; see `packing.py`."""

    def __init__(
        self, documents: Documents, order: np.ndarray, plan: PackingPlan, sequence_length: int
    ):
        """Create the sequences of a plan for the documents in `order`, int64 [documents]."""
        lengths = documents.lengths[order]
        self.sequence_length = sequence_length
        self.num_tokens = int(lengths.sum())
        self.num_targets = count_targets(lengths)
        self._documents = documents
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.starts) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return assemble_sequence(self._documents, self._pieces(index), self.sequence_length)

    def epoch_permutation(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        return Permutation(len(self), *key)

    def padding(self) -> dict[str, np.ndarray]:
        return assemble_sequence(self._documents, (), self.sequence_length)

    def documents(self, index: int) -> list[int]:
        return [piece.document for piece in self._pieces(index)]

    def where(self, document: int) -> str:
        return self._documents.where(document)

    def size(self, document: int) -> int:
        return int(self._documents.lengths[document])

    def _pieces(self, index: int) -> Iterator[TokenSpan]:
        plan = self._plan
        first, end = plan.starts[index : index + 2].tolist()
        pieces = plan.documents[first:end].tolist(), plan.begins[first:end].tolist()
        for document, begin in zip(*pieces, strict=True):
            yield TokenSpan(
                document, begin, min(begin + self.sequence_length + 1, self.size(document))
            )


class PairSequences(BinPackedSequences):
    """Sequences of preference pairs. The halves of pair i are segments 2i + 1 and 2i + 2.

    A sequence has three additional float32 arrays. `pairs` [N] is 1 for a pair and 0 for padding.
    `response_tokens` [2N] is the number of tokens in each half that are trained on. `reference`
    [2N] is the log-probability of each half under the reference model, or 0 if unknown.
    """

    def __init__(
        self,
        documents: Documents,
        order: np.ndarray,
        plan: PackingPlan,
        sequence_length: int,
        most_pairs: int,
    ):
        """Create the sequences. N in the array shapes is `most_pairs`."""
        super().__init__(documents, order, plan, sequence_length)
        lengths = documents.lengths[order]
        # the first token of the second half is not a target
        self.num_targets -= int(np.count_nonzero(lengths))
        self._max_pairs = most_pairs

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._add_pair_arrays(super().__getitem__(index), self.documents(index))

    def padding(self) -> dict[str, np.ndarray]:
        return self._add_pair_arrays(super().padding(), [])

    def _add_pair_arrays(
        self, row: dict[str, np.ndarray], documents: list[int]
    ) -> dict[str, np.ndarray]:
        halves = 2 * self._max_pairs
        tokens = np.bincount(row["segment_ids"], row["loss_mask"], minlength=halves + 1)[1:]
        pairs = (np.arange(self._max_pairs) < len(documents)).astype(np.float32)
        reference = np.zeros(halves, np.float32)
        known = getattr(self._documents, REFERENCE, None)
        if known is not None:
            reference[: 2 * len(documents)] = known[documents].ravel()
        return {**row, PAIRS: pairs, REFERENCE: reference, RESPONSE_TOKENS: tokens.astype("f4")}


@dataclass(frozen=True, slots=True)
class Packer:
    """Builder that packs documents into sequences, with the same result in every process."""

    packing: Packing
    sequence_length: int
    cache_dir: str | None = None
    """Folder for cached packing plans; None disables the cache."""
    keep: bool = True
    """Whether new results are written to the cache."""
    key: str = ""
    """Identifier of the documents in cache keys."""
    moved: Heartbeat | None = None
    """Heartbeat function, called after each chunk of a long computation."""
    max_pairs: int = 0
    """Maximum number of preference pairs per sequence; 0 for other documents."""
    images: np.ndarray | None = None
    """int64 [documents]: number of images per document; None if documents have no images."""
    max_images: int = 0
    """Maximum number of images per sequence."""

    def __call__(self, documents: Documents, order: np.ndarray) -> Sequences:
        """Return the sequences packed from the documents in `order`, int64 [documents]."""
        if self.packing == "concatenate":
            return ConcatenatedSequences(documents, order, self.sequence_length)
        assert self.packing != "auto", "`auto` is resolved before packing"
        plan = self._plan(documents.lengths, order, self.packing)
        if self.max_pairs:
            return PairSequences(documents, order, plan, self.sequence_length, self.max_pairs)
        return BinPackedSequences(documents, order, plan, self.sequence_length)

    def _plan(self, lengths: np.ndarray, order: np.ndarray, strategy: Strategy) -> PackingPlan:
        def make(moved: Heartbeat | None = None) -> PackingPlan:
            return pack_documents(
                lengths,
                order,
                self.sequence_length,
                strategy,
                self.max_pairs,
                self.images,
                self.max_images,
            )

        if len(order) < _MIN_CACHED_DOCUMENTS or strategy == "pad":
            return make()
        total = hashlib.sha256()
        for part in (order, lengths[order]):
            total.update(np.ascontiguousarray(part, "<i8").data)
        if self.images is not None:
            total.update(np.ascontiguousarray(self.images[order], "<i8").data)
        limits = (self.max_pairs, self.max_images if self.images is not None else 0)
        key = [total.hexdigest(), *(limit for limit in limits if limit)]
        return self.load_or_compute("plan", key, _plan_of, make)

    def load_or_compute(
        self,
        name: str,
        key: Iterable[object],
        of: Callable[[disk_cache.Arrays], TupleT],
        make: Callable[[Heartbeat | None], TupleT],
    ) -> TupleT:
        """Return the value cached for `key` (JSON values), or compute it with `make`.

        The cache stores only numpy arrays. `of` builds the value from the arrays, and raises
        ValueError or KeyError for unexpected arrays.
        """
        if self.cache_dir is None:
            return make(self.moved)
        packing = _FORMER_PACKINGS.get(self.packing, self.packing)
        facts = [_PLAN_VERSION, packing, self.sequence_length, self.key, *key]
        return disk_cache.load_or_compute(
            os.path.join(os.path.expanduser(self.cache_dir), f"{name}-{digest(facts)[:32]}.npz"),
            of,
            make,
            lambda made: made._asdict(),
            _CACHE_MESSAGES,
            keep=self.keep,
            moved=self.moved,
        )


def _plan_of(arrays: disk_cache.Arrays) -> PackingPlan:
    plan = PackingPlan(**{name: arrays[name] for name in PackingPlan._fields})
    if not len(plan.documents) == len(plan.begins) == plan.starts[-1]:
        raise ValueError("arrays with an unexpected shape")
    return plan
