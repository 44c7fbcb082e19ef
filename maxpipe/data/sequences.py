"""Sequences built from documents with the packing strategy of `data.packing`.

`packing.py` computes packing plans; this module caches them on disk and builds the arrays of the
planned sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from maxpipe.config.data_schema import Packing
from maxpipe.data import disk_cache
from maxpipe.data.documents import Documents
from maxpipe.data.packing import (
    ConcatenatedSequences,
    PackingPlan,
    Permutation,
    Sequences,
    Strategy,
    TokenSpan,
    assemble_sequence,
    count_targets,
    pack_documents,
)
from maxpipe.data.sources import Heartbeat

_MIN_CACHED_DOCUMENTS = 1 << 17
"""Minimum number of documents for which packing plans are cached. Smaller plans can be computed as
fast as they can be read.
"""
_PLAN_VERSION = 1

_CACHE_MESSAGES = disk_cache.CacheMessages(
    "packing documents into sequences", "packing them again", "the next start packs them again"
)


class _Tuple(Protocol):
    """Named tuple of arrays."""

    def _asdict(self) -> dict[str, Any]: ...


TupleT = TypeVar("TupleT", bound=_Tuple)


PAIRS, REFERENCE, RESPONSE_TOKENS = "pairs", "reference", "response_tokens"
"""Names of the per-pair arrays of a sequence. These arrays have no token dimension."""


class BinPackedSequences:
    """Sequences of a packing plan, with padding at the end; see `packing.py`."""

    def __init__(
        self, documents: Documents, order: np.ndarray, plan: PackingPlan, sequence_length: int
    ):
        """Create the sequences of a plan for the documents `order`, int64 [documents]."""
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
    `response_tokens` [2N] is the number of trained tokens in each half. `reference` [2N] is the
    reference log-probability of each half, or 0 if unknown.
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
    """Function that is called after each part of a long computation."""
    max_pairs: int = 0
    """Maximum number of preference pairs per sequence; 0 for other documents."""

    def __call__(self, documents: Documents, order: np.ndarray) -> Sequences:
        """Return the sequences packed from the documents `order`, int64 [documents]."""
        if self.packing == "cut":
            return ConcatenatedSequences(documents, order, self.sequence_length)
        assert self.packing != "auto", "sources resolve auto"
        plan = self._plan(documents.lengths, order, self.packing)
        given = (documents, order, plan, self.sequence_length)
        if self.max_pairs:
            return PairSequences(*given, self.max_pairs)
        return BinPackedSequences(*given)

    def _plan(self, lengths: np.ndarray, order: np.ndarray, strategy: Strategy) -> PackingPlan:
        def make(moved: Heartbeat | None = None) -> PackingPlan:
            return pack_documents(lengths, order, self.sequence_length, strategy, self.max_pairs)

        if len(order) < _MIN_CACHED_DOCUMENTS or strategy == "pad":
            return make()
        digest = hashlib.sha256()
        for part in (order, lengths[order]):
            digest.update(np.ascontiguousarray(part, "<i8").data)
        key = [digest.hexdigest(), *([self.max_pairs] if self.max_pairs else [])]
        return self.load_or_compute("plan", key, _plan_of, make)

    def load_or_compute(
        self,
        name: str,
        key: Iterable[object],
        of: Callable[[disk_cache.Arrays], TupleT],
        make: Callable[[Heartbeat | None], TupleT],
    ) -> TupleT:
        """Return the value cached under a key of JSON values, or compute the value with `make`.

        The cache stores only numpy arrays. `of` builds the value from the arrays, and raises
        ValueError or KeyError for unexpected arrays.
        """
        if self.cache_dir is None:
            return make(self.moved)
        facts = [_PLAN_VERSION, self.packing, self.sequence_length, self.key, *key]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        return disk_cache.load_or_compute(
            os.path.join(os.path.expanduser(self.cache_dir), f"{name}-{digest}.npz"),
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
