"""Documents for evaluation whose text is also trained on, found by digests of whole texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from maxpipe.config.data import section_of
from maxpipe.data.corpus import Corpus, Indexed, Split
from maxpipe.data.documents import digest_of

_Part = tuple[Indexed, np.ndarray, np.ndarray]
_Place = tuple[Indexed, int]
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


def overlaps(train: Corpus, sets: Mapping[str, Corpus]) -> list[Overlap]:
    """Of the held-out documents of a corpus, and of other sets by name.

    Memory grows with the documents for evaluation, not with those of the training.
    """
    candidates: dict[str, tuple[Corpus, Split]] = {"": (train, "validation")}
    candidates |= {name: (each, "all") for name, each in sets.items()}
    found = {name: list(_digests(*each)) for name, each in candidates.items()}
    parts = [digests for each in found.values() for _, _, digests in each]
    trained = _first_of(train, np.unique(np.concatenate(parts))) if parts else {}
    return [each for name in found if (each := _of_set(name, found[name], trained)).count]


def without_digests(corpora: Iterable[Corpus]) -> list[str]:
    """Sections of the sources whose documents are not compared, as their files have no digests."""
    return [
        section_of(indexed.name)
        for corpus in corpora
        for indexed in corpus.indexed
        if indexed.digests is None
    ]


def _of_set(name: str, parts: Sequence[_Part], trained: Mapping[int, _Place]) -> Overlap:
    places, total = [], 0
    known = np.array(sorted(trained), np.uint64)
    for indexed, numbers, digests in parts:
        total += len(numbers)
        hits = np.flatnonzero(np.isin(digests, known)).tolist()
        places += [(indexed, int(numbers[at]), int(digests[at])) for at in hits]
    if not places:
        return Overlap(name, 0, total, "", "")
    indexed, number, digest = min(places, key=itemgetter(1))
    other, its_number = trained[digest]
    where = (indexed.documents.where(number), other.documents.where(its_number))
    return Overlap(name, len(places), total, *where)


def _digests(corpus: Corpus, split: Split) -> Iterator[_Part]:
    """(source, numbers, digests) of parts of a split; documents without text are left out."""
    for indexed in corpus.indexed:
        if indexed.digests is None:
            continue
        for numbers in indexed.numbers(split, corpus.data.validation_fraction):
            if not len(numbers):
                continue
            first = int(numbers.min())
            digests = indexed.digests(first, int(numbers.max()) + 1)[numbers - first]
            with_text = digests != _EMPTY
            yield indexed, numbers[with_text], digests[with_text]


def _first_of(corpus: Corpus, known: np.ndarray) -> dict[int, _Place]:
    """A place in the training of each digest of `known` (sorted) that it has."""
    found: dict[int, _Place] = {}
    for indexed, numbers, digests in _digests(corpus, "train"):
        for at in np.flatnonzero(np.isin(digests, known)).tolist():
            found.setdefault(int(digests[at]), (indexed, int(numbers[at])))
    return found
