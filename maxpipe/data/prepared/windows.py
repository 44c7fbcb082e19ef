"""The order of documents of which there are too many to shuffle as a whole.

Spans of consecutive documents are shuffled by the seed. Some are held out. The others fill windows,
one after the other; documents are shuffled and packed inside a window, and so are its sequences.
An epoch visits the windows in an order of its own. What is held in memory are sums over spans, and
the lengths of the documents of the windows that were read last. How many sequences a window has
follows from the sums where documents are cut, and else from all lengths, which are read once.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np

from maxpipe.data.documents import Encoded
from maxpipe.data.packing import DOCUMENT_ORDER, Permutation, Sequences
from maxpipe.data.prepared.manifest import SPAN
from maxpipe.data.sequences import Packer
from maxpipe.data.sources import Moved, Progress

WINDOW_SPANS = 1024
"""Spans of a window, about a million documents. No more of them are shuffled as a whole, in the
order that the same documents have as text."""

_KEPT_WINDOWS = 4


class TokenFiles(Protocol):
    """Documents in files of ids."""

    num_documents: int
    num_tokens: int
    pad_id: int
    span_tokens: np.ndarray
    """int64 [spans]: tokens of each `SPAN` documents."""

    @property
    def lengths(self) -> np.ndarray: ...

    def lengths_between(self, first: int, stop: int) -> np.ndarray:
        """int64 tokens of the documents from `first` to before `stop`."""
        ...

    def __getitem__(self, document: int) -> Encoded: ...

    def where(self, document: int) -> str: ...


def needs_windows(documents: TokenFiles) -> bool:
    """Whether there are too many documents to shuffle them as a whole."""
    return len(documents.span_tokens) > WINDOW_SPANS


def spans_of(
    documents: TokenFiles, split: Literal["validation", "train", "all"], fraction: float, seed: int
) -> np.ndarray:
    """Numbers of the spans of a split, shuffled but for `all`: at least one is held out, if any."""
    count = len(documents.span_tokens)
    if split == "all":
        return np.arange(count)
    order = Permutation(count, seed, DOCUMENT_ORDER)(np.arange(count))
    held_out = min(max(round(fraction * count), 1), count - 1) if fraction > 0 else 0
    return order[:held_out] if split == "validation" else order[held_out:]


class _Window:
    """Documents of some spans, numbered from 0."""

    def __init__(self, documents: TokenFiles, spans: np.ndarray):
        self._documents = documents
        self.pad_id = documents.pad_id
        edges = [(SPAN * s, min(SPAN * (s + 1), documents.num_documents)) for s in spans.tolist()]
        self.numbers = np.concatenate([np.arange(*each) for each in edges])
        self.lengths = np.concatenate([documents.lengths_between(*each) for each in edges])

    def __getitem__(self, document: int) -> Encoded:
        return self._documents[int(self.numbers[document])]

    def where(self, document: int) -> str:
        return self._documents.where(int(self.numbers[document]))


class _Counts(NamedTuple):
    """Of each window, int64 [windows]."""

    sequences: np.ndarray
    targets: np.ndarray


class WindowedSequences:
    """Sequences of many documents, window by window; see `Sequences`."""

    def __init__(
        self,
        documents: TokenFiles,
        spans: np.ndarray,
        packer: Packer,
        seed: int | None,
    ):
        """Documents inside windows are in their own order without a seed."""
        self.sequence_length = packer.sequence_length
        self._documents, self._packer, self._seed = documents, packer, seed
        self._spans = np.split(spans, range(WINDOW_SPANS, len(spans), WINDOW_SPANS))
        self._windows: OrderedDict[int, tuple[_Window, Sequences]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_tokens = int(documents.span_tokens[spans].sum())
        # Sums over spans are of documents that are whole.
        is_cut = packer.packing == "cut" and not getattr(documents, "is_bounded", False)
        counts = self._cut() if is_cut else self._planned(spans)
        self.num_targets = int(counts.targets.sum())
        self._counts = counts.sequences
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])

    def _cut(self) -> _Counts:
        """From the sums alone: each document is taken to have a token."""
        tokens = np.array([self._documents.span_tokens[each].sum() for each in self._spans])
        documents = np.array([self._sizes(each).sum() for each in self._spans])
        sequences = -(-np.maximum(tokens - 1, 0) // self.sequence_length)
        return _Counts(sequences, np.maximum(tokens - documents, 0))

    def _sizes(self, spans: np.ndarray) -> np.ndarray:
        """Documents of each span."""
        return np.minimum(SPAN * (spans + 1), self._documents.num_documents) - SPAN * spans

    def _planned(self, spans: np.ndarray) -> _Counts:
        def make(moved: Moved | None) -> _Counts:
            found = []
            progress = Progress("planning windows", len(self._spans), moved)
            for number in range(len(self._spans)):
                window = self._window(number)[1]
                found.append((len(window), window.num_targets))
                progress.update(number + 1)
            return _Counts(*np.array(found, np.int64).T)

        def of(arrays: Mapping[str, np.ndarray]) -> _Counts:
            counts = _Counts(**{name: arrays[name] for name in _Counts._fields})
            if {each.shape for each in counts} != {(len(self._spans),)}:
                raise ValueError("arrays of another shape")
            return counts

        digest = hashlib.sha256()
        for part in (spans, self._documents.span_tokens):
            digest.update(np.ascontiguousarray(part, "<i8").data)
        facts = [self._documents.num_documents, self._seed, WINDOW_SPANS, digest.hexdigest()]
        return self._packer.remembered("rows", facts, of, make)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number, inside = self._place(index)
        return self._window(number)[1][inside]

    def padding(self) -> dict[str, np.ndarray]:
        return self._window(0)[1].padding()

    def documents(self, index: int) -> list[int]:
        number, inside = self._place(index)
        window, packed = self._window(number)
        return window.numbers[packed.documents(inside)].tolist()

    def where(self, document: int) -> str:
        return self._documents.where(document)

    def size(self, document: int) -> int:
        return int(self._documents.lengths_between(document, document + 1)[0])

    def shuffled(self, *key: int) -> Callable[[np.ndarray], np.ndarray]:
        """The order of an epoch: of the windows, and of the sequences inside each."""
        return functools.partial(self._shuffle, key)

    def _shuffle(self, key: tuple[int, ...], places: np.ndarray) -> np.ndarray:
        count = len(self._counts)
        visits = Permutation(count, *key, count)(np.arange(count))
        ends = np.cumsum(self._counts[visits])
        found = np.empty_like(places)
        at = np.searchsorted(ends, places, side="right")
        for visit in np.unique(at):
            here, window = at == visit, int(visits[visit])
            size = int(self._counts[window])
            order = Permutation(size, *key, count, window)
            found[here] = self._starts[window] + order(places[here] - (ends[visit] - size))
        return found

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _window(self, number: int) -> tuple[_Window, Sequences]:
        with self._lock:  # others that need this window would only do the same work
            if number not in self._windows:
                window = _Window(self._documents, self._spans[number])
                order = np.arange(len(window.lengths))
                if self._seed is not None:
                    order = Permutation(len(order), self._seed, DOCUMENT_ORDER, number)(order)
                self._windows[number] = window, self._packer(window, order)
                while len(self._windows) > _KEPT_WINDOWS:
                    self._windows.popitem(last=False)
            self._windows.move_to_end(number)
            return self._windows[number]
