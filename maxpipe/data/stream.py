"""Sequences of one source or of several, by the number of a sample.

Owns the order of sequences over epochs, each source's for itself, and over the sources of a
mixture. It does not know batches or processes; `loader.py` is the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxpipe.config.data import section_of
from maxpipe.data.formats.reads import reading
from maxpipe.data.mixture import Mixture
from maxpipe.data.packing import Sequences
from maxpipe.data.sections import in_section

_SEQUENCE_ORDER = 1
"""Second word of the keys of permutations, beside those of documents and mixtures."""


Arrays = Mapping[str, np.ndarray]
Beside = Callable[[str, int, Arrays], Arrays]
"""(name of a source, number of a sequence in it, its arrays) -> further arrays of the sequence."""


class Part(NamedTuple):
    """The sequences of one source."""

    name: str
    """Empty for the only source of a run without a mixture."""
    sequences: Sequences
    seed: int
    packing: str = ""
    """How its sequences are filled, see `data.packing`."""


def seed_of(name: str, seed: int) -> int:
    """The seed of a source: sources of one size have orders of their own."""
    if not name:
        return seed
    # Below 2**63: manifests of prepared documents have it as a signed number.
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


class Stream:
    """Sequences by sample number, the same in any thread and process.

    With `repeat` each epoch of a source has an order of its own, and nothing follows behind `end`
    samples. Without it every sequence comes once, those of a source as they are. A `mixture` says
    whose turn it is.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        repeat: bool,
        mixture: Mixture | None = None,
        end: int | None = None,
    ):
        assert len(parts) == 1 or mixture is not None
        self.parts = tuple(parts)
        self.repeat = repeat
        self.mixture = mixture
        self.beside: Beside | None = None
        """What there is of sequences beside documents. The sequence of padding is -1."""
        self._length = sum(len(part.sequences) for part in parts)
        self.end = end if repeat else self._length
        """Samples that there are; None if there is no end."""

    def part(self, name: str) -> Part:
        """A source by its name."""
        return next(each for each in self.parts if each.name == name)

    def __len__(self) -> int:
        """Sequences of all sources."""
        return self._length

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the source, number of the sequence in it) of each sample, int64 [numbers].

        Both are -1 behind the last sequence.
        """
        sources, sequences = np.full_like(numbers, -1), np.full_like(numbers, -1)
        there = numbers < (np.inf if self.end is None else self.end)
        sources[there], sequences[there] = self._places(numbers[there])
        return sources, sequences

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, samples = np.zeros_like(numbers), numbers
        if self.mixture is not None:
            sources, samples = self.mixture.places(numbers)
        if not self.repeat:
            return sources, samples
        sequences = np.full_like(samples, -1)
        for source in np.unique(sources[sources >= 0]):
            mine = sources == source
            sequences[mine] = _shuffled(self.parts[source], samples[mine])
        return sources, sequences

    def read(self, source: int, sequence: int) -> Arrays:
        """The arrays of a sequence; of -1 and -1 padding."""
        part = self.parts[max(source, 0)]
        if sequence < 0:
            found = part.sequences.padding()
        else:
            with in_section(part.name), reading(section_of(part.name)):
                found = part.sequences[sequence]
        if self.beside is None:
            return found
        return {**found, **self.beside(part.name, sequence, found)}

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
