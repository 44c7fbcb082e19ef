"""Which source each sample is of, and which of the source's own samples it is, by its number.

Sample n of a run is known without those before it. In blocks of `BLOCK` numbers each source has a
fixed count, its quota, and a seeded permutation deals them out; how many of each source came before
a block follows from the quotas. A source's own samples are counted 0, 1, 2, ... in the order of the
numbers, whatever the weights were: where weights change, no sample is lost or repeated.

Sequences of one source or of several, by the number of a sample.

Owns the order of sequences over epochs, each source's for itself, and over the sources of a
mixture. It does not know batches or processes; `loader.py` is the next step.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config import data_sources as texts
from maxpipe.config.data_schema import DataConfig, MixedSourceConfig
from maxpipe.config.data_sources import section_of
from maxpipe.config.training_schedule import BatchRamp
from maxpipe.data.formats.read_tracker import track_read
from maxpipe.data.packing import Permutation, Sequences
from maxpipe.data.sources import wrap_section_errors
from maxpipe.errors import ConfigError

BLOCK = 1 << 16
_MIXTURE_ORDER = 2
"""First word of the keys of a permutation, beside those of documents and sequences."""
_CACHED_BLOCKS = 8
_MAX_SAMPLES = 1 << 61
"""Samples that are numbered."""
MIXTURE_KEY = "mixture"
"""Name of `Mixture.facts` in a fingerprint."""


class QuotaStage(NamedTuple):
    """Samples that are dealt out alike."""

    first: int
    """Number of the first one."""
    quotas: tuple[int, ...]
    """Samples of each source in a block. All 0: there are none, of any."""


class Mixture:
    """Sources of samples by stages; the first one begins with sample 0."""

    def __init__(self, stages: Sequence[QuotaStage], seed: int):
        assert stages[0].first == 0 and all(sum(each.quotas) in (0, BLOCK) for each in stages)
        self.stages = tuple(stages)
        self.seed = seed
        self._firsts = np.array([stage.first for stage in stages], np.int64)
        self._quotas = np.array([stage.quotas for stage in stages], np.int64)
        self._before = np.zeros_like(self._quotas)
        for number, (one, other) in enumerate(itertools.pairwise(stages), 1):
            more = self._samples_in_stage(number - 1, other.first - one.first)
            self._before[number] = self._before[number - 1] + more

    @property
    def end(self) -> int | None:
        """The number of samples, if there is an end."""
        return None if any(self.stages[-1].quotas) else self.stages[-1].first

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number among the source's own samples) of each, int64 [numbers].

        Both are -1 where there is none.
        """
        stages = np.searchsorted(self._firsts, numbers, side="right") - 1
        blocks, inside = np.divmod(numbers - self._firsts[stages], BLOCK)
        sources, samples = np.full_like(stages, -1), np.full_like(stages, -1)
        for stage, block in sorted(set(zip(stages.tolist(), blocks.tolist(), strict=True))):
            if not any(self.stages[stage].quotas):
                continue
            mine = (stages == stage) & (blocks == block)
            dealt, ranks = self._block_assignment(stage, block)
            source = dealt[inside[mine]].astype(np.int64)
            front = self._before[stage] + block * self._quotas[stage]
            sources[mine] = source
            samples[mine] = front[source] + ranks[inside[mine]]
        return sources, samples

    def samples_before(self, number: int) -> np.ndarray:
        """int64 [sources]: samples of each with a smaller number."""
        stage = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._before[stage] + self._samples_in_stage(
            stage, number - int(self._firsts[stage])
        )

    def samples_to_reach(self, source: int, count: int) -> int | None:
        """The fewest samples with this count of a source among them; None if there never are."""
        last = len(self.stages) - 1
        number = next((n for n in range(last) if self._before[n + 1][source] >= count), last)
        need, quota = count - int(self._before[number][source]), int(self._quotas[number][source])
        if need <= 0:
            return self.stages[number].first
        if not quota:
            return None
        block, rank = divmod(need - 1, quota)
        dealt, _ = self._block_assignment(number, block)
        place = int(np.flatnonzero(dealt == source)[rank])
        return self.stages[number].first + block * BLOCK + place + 1

    def with_limits(self, limits: Sequence[int], since: int) -> Mixture:
        """The same up to `since`; from there on a source ends with its limit of samples.

        What was its goes to the others, by their shares. A stage of which all sources have ended is
        over, and behind the last one there is nothing.
        """
        at = [stage for stage in self.stages if stage.first <= since][-1]
        coming = [at._replace(first=since), *(s for s in self.stages if s.first > since)]
        kept = [stage for stage in self.stages if stage.first < since]
        found = Mixture(kept, self.seed) if kept else None
        here = since
        for number, stage in enumerate(coming):
            stop = coming[number + 1].first if number + 1 < len(coming) else sys.maxsize
            while here < stop:
                read = found.samples_before(here).tolist() if found else [0] * len(limits)
                left = [
                    quota if count < limit else 0
                    for quota, count, limit in zip(stage.quotas, read, limits, strict=True)
                ]
                if not any(left):
                    break
                found = self._append_stage(
                    found, QuotaStage(here, compute_quotas([each / sum(left) for each in left]))
                )
                here = min(stop, found._next_end(limits))
        return self._append_stage(found, QuotaStage(here, (0,) * len(limits)))

    def _append_stage(self, found: Mixture | None, stage: QuotaStage) -> Mixture:
        """A mixture with one more stage, unless that is as the one before."""
        if found is None:
            return Mixture([stage], self.seed)
        if found.stages[-1].quotas == stage.quotas:
            return found
        longer = copy.copy(found)
        longer.stages = (*found.stages, stage)
        longer._firsts = np.append(found._firsts, stage.first)
        longer._quotas = np.vstack([found._quotas, stage.quotas])
        longer._before = np.vstack([found._before, found.samples_before(stage.first)])
        return longer

    def _next_end(self, limits: Sequence[int]) -> int:
        """The samples in front of which the first source of the last stage has ended."""
        need, quota = np.array(limits) - self._before[-1], self._quotas[-1]
        # Only in the nearest block has to be looked where in it that is.
        blocks = np.where(quota > 0, (need - 1) // np.maximum(quota, 1), sys.maxsize)
        nearest = np.flatnonzero(blocks == blocks.min()).tolist()
        ends = [self.samples_to_reach(source, limits[source]) for source in nearest]
        return min(end for end in ends if end is not None)

    def switched_to(self, to: Mixture, number: int) -> Mixture:
        """This mixture up to a number, and the stages of the other one from there on."""
        kept = [stage for stage in self.stages if stage.first < number] or [to.stages[0]]
        last = [stage for stage in to.stages if stage.first <= number][-1]
        if last.quotas != kept[-1].quotas:
            kept.append(QuotaStage(number, last.quotas))
        return Mixture([*kept, *(s for s in to.stages if s.first > number)], self.seed)

    def metadata(self) -> list[list[Any]]:
        """JSON values that a fingerprint of the data holds; `of_facts` reads them."""
        return [[stage.first, list(stage.quotas)] for stage in self.stages]

    @classmethod
    def from_metadata(cls, facts: Any, seed: int) -> Mixture:
        """The mixture of a fingerprint."""
        return cls(
            [QuotaStage(int(first), tuple(map(int, quotas))) for first, quotas in facts], seed
        )

    def _samples_in_stage(self, stage: int, count: int) -> np.ndarray:
        """Samples of each source among the first ones of a stage."""
        blocks, rest = divmod(count, BLOCK)
        found = blocks * self._quotas[stage]
        if rest and any(self.stages[stage].quotas):
            dealt, _ = self._block_assignment(stage, blocks)
            found = found + np.bincount(dealt[:rest], minlength=len(found))
        return found

    def _block_assignment(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        return _assign_block(self.seed, self.stages[stage], block)


@functools.lru_cache(_CACHED_BLOCKS)
def _assign_block(seed: int, stage: QuotaStage, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a block's samples their sources, uint16, and ranks among its source's, int32."""
    order = Permutation(BLOCK, seed, _MIXTURE_ORDER, stage.first, block)(np.arange(BLOCK))
    counts = np.array(stage.quotas)
    ends = np.cumsum(counts)
    dealt = np.searchsorted(ends, order, side="right").astype(np.uint16)
    ranks = np.empty(BLOCK, np.int32)
    by_source = np.argsort(dealt, kind="stable")
    ranks[by_source] = np.arange(BLOCK) - np.repeat(ends - counts, counts)
    return dealt, ranks


def compute_quotas(shares: Sequence[float]) -> tuple[int, ...]:
    """The samples of a block divided by these shares, whole numbers by largest remainders."""
    exact = np.array(shares) * BLOCK
    found = np.floor(exact).astype(int)
    left = BLOCK - int(found.sum())
    found[np.argsort(found - exact, kind="stable")[:left]] += 1
    return tuple(found.tolist())


def single_pass_mixture(sizes: Sequence[int], seed: int) -> Mixture:
    """Each sample of sources of these sizes once, in proportion to the sizes."""
    total = sum(sizes)
    dealt = [max(1, quota) for quota in compute_quotas([size / total for size in sizes])]
    dealt[dealt.index(max(dealt))] -= sum(dealt) - BLOCK
    return Mixture([QuotaStage(0, tuple(dealt))], seed).with_limits(sizes, 0)


def final_weights(
    mixture: Mapping[str, MixedSourceConfig], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Weights behind the last stage, of a mixture of sources of these sizes."""
    if any(each.epochs for each in mixture.values()):
        return {name: mixture[name].epochs * size for name, size in sizes.items()}
    if any(each.weight for each in mixture.values()):
        return {name: mixture[name].weight for name in sizes}
    return {name: float(size) for name, size in sizes.items()}


def sample_limits(
    mixture: Mapping[str, MixedSourceConfig], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Samples with which sources of these sizes end: as often as their `epochs` say, else once."""
    with_epochs = any(each.epochs for each in mixture.values())
    return {
        name: max(1, min(round(mixture[name].epochs * size), _MAX_SAMPLES)) if with_epochs else size
        for name, size in sizes.items()
    }


def build_mixture(
    data: DataConfig, sizes: Mapping[str, int], ramp: BatchRamp, sequence_length: int, seed: int
) -> Mixture:
    """The mixture that a config describes, of sources of these numbers of sequences.

    Raises:
        ConfigError: a source has a share too small to be dealt out, or a stage is too long.
    """
    stages = texts.parse_mixture_stages(data.mixture_stages)
    weights = [{name: stage.weights.get(name, 0.0) for name in sizes} for stage in stages]
    weights.append(final_weights(data.mixture, sizes))
    found: list[QuotaStage] = []
    firsts = [0, *texts.stage_ends(stages, ramp, sequence_length)]
    if firsts[-1] > _MAX_SAMPLES:
        raise ConfigError.one(
            "data.mixture_stages",
            None,
            f"must end before {_MAX_SAMPLES} sequences are read: they end after {firsts[-1]}.",
            "Make the stages shorter.",
        )
    for first, each in zip(firsts, weights, strict=True):
        shares = texts.mixture_shares(each, data.mixture_temperature)
        dealt = compute_quotas(list(shares.values()))
        for (name, share), quota in zip(shares.items(), dealt, strict=True):
            if share and not quota:
                raise ConfigError.one(
                    f"data.mixture.{name}",
                    f"a share of {share:.2g}",
                    f"must be at least {1 / BLOCK:.2g} of the sequences: it would never be read.",
                    "Give it a larger weight, or join the path of a small source to another's.",
                )
        if not found or found[-1].quotas != dealt:
            found.append(QuotaStage(first, dealt))
    return Mixture(found, seed)


_SEQUENCE_ORDER = 1
"""Second word of the keys of permutations, beside those of documents and mixtures."""


Arrays = Mapping[str, np.ndarray]
ExtraArrays = Callable[[str, int, Arrays], Arrays]
"""(name of a source, number of a sequence in it, its arrays) -> further arrays of the sequence."""


class SourceSequences(NamedTuple):
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
        parts: Sequence[SourceSequences],
        *,
        repeat: bool,
        mixture: Mixture | None = None,
        end: int | None = None,
    ):
        assert len(parts) == 1 or mixture is not None
        self.parts = tuple(parts)
        self.repeat = repeat
        self.mixture = mixture
        self.extra_arrays: ExtraArrays | None = None
        """What there is of sequences beside documents. The sequence of padding is -1."""
        self._length = sum(len(part.sequences) for part in parts)
        self.end = end if repeat else self._length
        """Samples that there are; None if there is no end."""

    def part(self, name: str) -> SourceSequences:
        """A source by its name."""
        return next(each for each in self.parts if each.name == name)

    def __len__(self) -> int:
        """Sequences of all sources."""
        return self._length

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
            sources, samples = self.mixture.locate(numbers)
        if not self.repeat:
            return sources, samples
        sequences = np.full_like(samples, -1)
        for source in np.unique(sources[sources >= 0]):
            mine = sources == source
            sequences[mine] = _shuffle_samples(self.parts[source], samples[mine])
        return sources, sequences

    def read(self, source: int, sequence: int) -> Arrays:
        """The arrays of a sequence; of -1 and -1 padding."""
        part = self.parts[max(source, 0)]
        if sequence < 0:
            found = part.sequences.padding()
        else:
            with wrap_section_errors(part.name), track_read(section_of(part.name)):
                found = part.sequences[sequence]
        if self.extra_arrays is None:
            return found
        return {**found, **self.extra_arrays(part.name, sequence, found)}

    def samples_before(self, number: int) -> dict[str, int]:
        """Samples of each source with a smaller number, by name."""
        number = number if self.end is None else min(number, self.end)
        found = [number] if self.mixture is None else self.mixture.samples_before(number).tolist()
        return {part.name: count for part, count in zip(self.parts, found, strict=True)}


def _shuffle_samples(part: SourceSequences, samples: np.ndarray) -> np.ndarray:
    count = len(part.sequences)
    epochs, within = np.divmod(samples, count)
    for epoch in np.unique(epochs):
        order = part.sequences.epoch_permutation(part.seed, _SEQUENCE_ORDER, int(epoch))
        within[epochs == epoch] = order(within[epochs == epoch])
    return within
