"""The order of documents of which there are too many to shuffle as a whole.

Spans of consecutive documents are shuffled by the seed. Some are held out. The others fill windows,
one after the other; documents are shuffled and packed inside a window, and so are its sequences.
An epoch visits the windows in an order of its own. What is held in memory are sums over spans, and
the lengths of the documents of the windows that were read last.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from maxpipe.data.documents import Encoded
from maxpipe.data.packing import DOCUMENT_ORDER, PackedSequences, Permutation
from maxpipe.data.prepared.manifest import SPAN

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


class WindowedSequences:
    """Sequences of T tokens of many documents. As `PackedSequences` has them, window by window."""

    def __init__(
        self, documents: TokenFiles, spans: np.ndarray, sequence_length: int, seed: int | None
    ):
        """Documents inside windows are in their own order without a seed."""
        self.sequence_length = sequence_length
        self._documents, self._seed = documents, seed
        self._spans = np.split(spans, range(WINDOW_SPANS, len(spans), WINDOW_SPANS))
        tokens = np.array([documents.span_tokens[each].sum() for each in self._spans])
        self.num_tokens = int(tokens.sum())
        self._counts = -(-np.maximum(tokens - 1, 0) // sequence_length)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        self._windows: OrderedDict[int, tuple[_Window, PackedSequences]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """As of `PackedSequences`."""
        number, inside = self._place(index)
        return self._window(number)[1][inside]

    def padding(self) -> dict[str, np.ndarray]:
        """A sequence without text: it adds nothing to a loss."""
        return self._window(0)[1].padding()

    def documents(self, index: int) -> list[int]:
        """Numbers of the documents that have a token in this sequence."""
        number, inside = self._place(index)
        window, packed = self._window(number)
        return window.numbers[packed.documents(inside)].tolist()

    def where(self, document: int) -> str:
        """The file of a document and its place in it, for people."""
        return self._documents.where(document)

    def size(self, document: int) -> int:
        """Tokens of a document."""
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

    def _window(self, number: int) -> tuple[_Window, PackedSequences]:
        with self._lock:  # others that need this window would only do the same work
            if number not in self._windows:
                window = _Window(self._documents, self._spans[number])
                order = np.arange(len(window.lengths))
                if self._seed is not None:
                    order = Permutation(len(order), self._seed, DOCUMENT_ORDER, number)(order)
                packed = PackedSequences(window, order, self.sequence_length)
                self._windows[number] = window, packed
                while len(self._windows) > _KEPT_WINDOWS:
                    self._windows.popitem(last=False)
            self._windows.move_to_end(number)
            return self._windows[number]
