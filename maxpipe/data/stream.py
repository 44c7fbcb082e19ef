"""Sequences of one source or of several, by the number of a sample.

Owns the order of sequences over epochs, each source's for itself, and over the sources of a
mixture. It does not know batches or processes; `loader.py` is the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxpipe.data.mixture import Mixture
from maxpipe.data.packing import Permutation, Sequences
from maxpipe.data.sections import in_section

_SEQUENCE_ORDER = 1
_ONCE_ORDER = 3
"""Second words of the keys of permutations, beside those of documents and mixtures."""


class Part(NamedTuple):
    """The sequences of one source."""

    name: str
    """Empty for the only source of a run without a mixture."""
    sequences: Sequences
    seed: int


def seed_of(name: str, seed: int) -> int:
    """The seed of a source: sources of one size have orders of their own."""
    if not name:
        return seed
    # Below 2**63: manifests of prepared documents have it as a signed number.
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


class Stream:
    """Sequences by sample number, the same in any thread and process.

    With `repeat` each epoch of a source has an order of its own; a `mixture` says whose turn it is,
    and nothing follows behind `end` samples. Without it every sequence comes once: those of one
    source as they are, those of several in a fixed shuffled order.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        seed: int,
        repeat: bool,
        mixture: Mixture | None = None,
        end: int | None = None,
    ):
        assert (len(parts) > 1) <= (not repeat or mixture is not None)
        self.parts = tuple(parts)
        self.repeat = repeat
        self.mixture = mixture
        self.end = end if repeat else sum(len(part.sequences) for part in parts)
        """Samples that there are; None if there is no end."""
        self._ends = np.cumsum([len(part.sequences) for part in parts])
        self._seed = seed

    def part(self, name: str) -> Part:
        """A source by its name."""
        return next(each for each in self.parts if each.name == name)

    def __len__(self) -> int:
        """Sequences of all sources."""
        return int(self._ends[-1])

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the source, number of the sequence in it) of each sample, int64 [numbers].

        Both are -1 behind the last sequence.
        """
        sources, sequences = np.full_like(numbers, -1), np.full_like(numbers, -1)
        there = numbers < (np.inf if self.end is None else self.end)
        found = self._repeated if self.repeat else self._once
        sources[there], sequences[there] = found(numbers[there])
        return sources, sequences

    def _repeated(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.mixture is None:
            sources, samples = np.zeros_like(numbers), numbers
        else:
            sources, samples = self.mixture.places(numbers)
        sequences = np.empty_like(samples)
        for source in np.unique(sources[sources >= 0]):
            mine = sources == source
            sequences[mine] = _shuffled(self.parts[source], samples[mine])
        return sources, sequences

    def _once(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = numbers
        if len(self.parts) > 1:
            order = Permutation(len(self), self._seed, _ONCE_ORDER)(order)
        sources = np.searchsorted(self._ends, order, side="right")
        starts = np.concatenate([[0], self._ends])
        return sources, order - starts[sources]

    def read(self, source: int, sequence: int) -> Mapping[str, np.ndarray]:
        """The arrays of a sequence; of -1 and -1 padding."""
        if sequence < 0:
            return self.parts[0].sequences.padding()
        part = self.parts[source]
        with in_section(part.name):
            return part.sequences[sequence]

    def counts(self, number: int) -> dict[str, int]:
        """Samples of each source with a smaller number, by name."""
        number = number if self.end is None else min(number, self.end)
        found = [number] if self.mixture is None else self.mixture.counts(number).tolist()
        return {part.name: count for part, count in zip(self.parts, found, strict=True)}


def _shuffled(part: Part, samples: np.ndarray) -> np.ndarray:
    count = len(part.sequences)
    epochs, within = np.divmod(samples, count)
    for epoch in np.unique(epochs):
        order = part.sequences.shuffled(part.seed, _SEQUENCE_ORDER, int(epoch))
        within[epochs == epoch] = order(within[epochs == epoch])
    return within
