"""Documents for evaluation whose text is also trained on, found by digests of whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxpipe.config.data import section_of
from maxpipe.data.corpus import Corpus, Indexed, Split
from maxpipe.data.documents import digest_of

Moved = Callable[[], object]

_Part = tuple[Indexed, np.ndarray, np.ndarray]
_EMPTY = np.uint64(digest_of(b""))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one set, the documents that are also trained on."""

    name: str
    """In `data.validation`; empty for the documents that are held out of the training's own."""
    count: int
    total: int
    """Documents of the set, without empty ones."""
    first: str
    """The file of the first of them and its place in it, for people."""
    trained: str
    """That of the same text in the training."""


def overlaps(
    train: Corpus, sets: Mapping[str, Corpus], *, large: bool, moved: Moved = lambda: None
) -> list[Overlap]:
    """Of the held-out documents of a corpus, and of other sets by name.

    Memory grows with the documents for evaluation, not with those of the training; time with all of
    them. `large` says whether sources with too many to be shuffled as a whole are compared, too.
    `moved` is called for each part.
    """
    candidates: dict[str, tuple[Corpus, Split]] = {"": (train, "validation")}
    candidates |= {name: (each, "all") for name, each in sets.items()}
    found = {name: list(_digests(*each, large, moved)) for name, each in candidates.items()}
    parts = [digests for each in found.values() for _, _, digests in each]
    if not parts:
        return []
    trained = _Trained(np.unique(np.concatenate(parts)))
    for part in _digests(train, "train", large, moved):
        trained.add(*part)
    return [each for name in found if (each := _of_set(name, found[name], trained)).count]


def left_out(corpora: Iterable[Corpus], *, large: bool) -> Iterator[tuple[str, str]]:
    """(section, why) of each source that is not compared."""
    for corpus in corpora:
        for indexed in corpus.indexed:
            if indexed.digests is None:
                yield section_of(indexed.name), "its files have no digests of texts"
            elif indexed.is_large and not large:
                yield section_of(indexed.name), "it has too many documents to read all at the start"


class _Trained:
    """Which of some digests the training has, and where."""

    def __init__(self, known: np.ndarray):
        """`known` uint64, sorted."""
        self._known = known
        self._sources: list[Indexed] = []
        self._source_of = np.full(len(known), -1, np.int32)
        self._number_of = np.zeros(len(known), np.int64)

    def add(self, indexed: Indexed, numbers: np.ndarray, digests: np.ndarray) -> None:
        """Documents that are trained on."""
        if not self._sources or self._sources[-1] is not indexed:
            self._sources.append(indexed)
        places, is_known = self._places(digests)
        places, numbers = places[is_known], numbers[is_known]
        self._source_of[places], self._number_of[places] = len(self._sources) - 1, numbers

    def has(self, digests: np.ndarray) -> np.ndarray:
        """Whether each is trained on: bool [digests]."""
        places, is_known = self._places(digests)
        return is_known & (self._source_of[places] >= 0)

    def where(self, digest: int) -> str:
        """The file of a document with it and its place there."""
        place = int(np.searchsorted(self._known, np.uint64(digest)))
        source = self._sources[self._source_of[place]]
        return source.documents.where(int(self._number_of[place]))

    def _places(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.minimum(np.searchsorted(self._known, digests), len(self._known) - 1)
        return places, self._known[places] == digests


def _of_set(name: str, parts: Sequence[_Part], trained: _Trained) -> Overlap:
    count, total, first, copy = 0, 0, "", ""
    for indexed, numbers, digests in parts:
        total += len(numbers)
        hits = np.flatnonzero(trained.has(digests))
        if len(hits) and not count:
            at = hits[numbers[hits].argmin()]
            first, copy = indexed.documents.where(int(numbers[at])), trained.where(int(digests[at]))
        count += len(hits)
    return Overlap(name, count, total, first, copy)


def _digests(corpus: Corpus, split: Split, large: bool, moved: Moved) -> Iterator[_Part]:
    """(source, numbers, digests) of parts of a split; documents without text are left out."""
    for indexed in corpus.indexed:
        if indexed.digests is None or (indexed.is_large and not large):
            continue
        for numbers in indexed.numbers(split, corpus.data.validation_fraction):
            moved()
            if not len(numbers):
                continue
            first = int(numbers.min())
            digests = indexed.digests(first, int(numbers.max()) + 1)[numbers - first]
            with_text = digests != _EMPTY
            if with_text.any():
                yield indexed, numbers[with_text], digests[with_text]
