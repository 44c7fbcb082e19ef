"""Mixture of sources: maps each sample number to a source and to a sequence of this source.

The source of sample n is computed without iterating over earlier samples. In every block of `BLOCK`
samples, each source has a fixed number of samples, called its quota. A seeded permutation orders
the samples of a block. The quotas determine how many samples of each source precede a block. The
samples of a source are numbered 0, 1, 2, ... independently of the weights, so no sample is lost or
repeated when weights change.

`Stream` maps sample numbers to sequences across epochs and sources. Batches and processes are
handled by the next layer, `loader.py`.
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

from maxpipe.config.sections import data as texts
from maxpipe.config.sections.data import DataConfig, MixedSourceConfig, section_of
from maxpipe.config.sections.train import BatchRamp
from maxpipe.data.formats.source import track_read
from maxpipe.data.packing import Permutation, Sequences
from maxpipe.data.sources import wrap_section_errors
from maxpipe.errors import Code, ConfigError

BLOCK = 1 << 16
_MIXTURE_ORDER = 2
"""Second integer in the key of a mixture permutation, distinct for each permutation type."""
_CACHED_BLOCKS = 8
_MAX_SAMPLES = 1 << 61
"""Exclusive upper limit of sample numbers."""
MIXTURE_KEY = "mixture"
"""Name of the fingerprint entry that contains `Mixture.metadata()`."""


class QuotaStage(NamedTuple):
    """Range of samples with constant quotas."""

    first: int
    """Index of the first sample in the range."""
    quotas: tuple[int, ...]
    """Number of samples per block for each source. All quotas are 0 in a stage without samples."""


class Mixture:
    """Assignment of samples to sources in stages. The first stage begins with sample 0."""

    def __init__(self, stages: Sequence[QuotaStage], seed: int):
        assert stages[0].first == 0 and all(sum(stage.quotas) in (0, BLOCK) for stage in stages)
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
        """Number of samples before the mixture ends; None if the mixture has no end."""
        return None if any(self.stages[-1].quotas) else self.stages[-1].first

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample, and the index among the source's samples, int64
        [numbers].

        Both arrays are -1 after the end of the mixture.
        """
        stages = np.searchsorted(self._firsts, numbers, side="right") - 1
        blocks, inside = np.divmod(numbers - self._firsts[stages], BLOCK)
        sources, samples = np.full_like(stages, -1), np.full_like(stages, -1)
        for stage, block in sorted(set(zip(stages.tolist(), blocks.tolist(), strict=True))):
            if not any(self.stages[stage].quotas):
                continue
            here = (stages == stage) & (blocks == block)
            dealt, ranks = self._block_assignment(stage, block)
            source = dealt[inside[here]].astype(np.int64)
            front = self._before[stage] + block * self._quotas[stage]
            sources[here] = source
            samples[here] = front[source] + ranks[inside[here]]
        return sources, samples

    def samples_before(self, number: int) -> np.ndarray:
        """Return how many samples before sample `number` come from each source, int64 [sources]."""
        stage = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._before[stage] + self._samples_in_stage(
            stage, number - int(self._firsts[stage])
        )

    def samples_to_reach(self, source: int, count: int) -> int | None:
        """Return the smallest n for which the first n samples include `count` samples of a source;
        None if no such n exists.
        """
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
        """Return this mixture with a limit for each source, applied from sample `since` on.

        `limits` are the maximum sample counts per source. The share of a source that has ended is
        distributed among the remaining sources in proportion to their shares. A stage ends when all
        of its sources have ended. The mixture has no samples after the last stage.
        """
        at = [stage for stage in self.stages if stage.first <= since][-1]
        coming = [at._replace(first=since), *(s for s in self.stages if s.first > since)]
        kept = [stage for stage in self.stages if stage.first < since]
        mixed = Mixture(kept, self.seed) if kept else None
        here = since
        for number, stage in enumerate(coming):
            stop = coming[number + 1].first if number + 1 < len(coming) else sys.maxsize
            while here < stop:
                counts = mixed.samples_before(here).tolist() if mixed else [0] * len(limits)
                left = [
                    quota if count < limit else 0
                    for quota, count, limit in zip(stage.quotas, counts, limits, strict=True)
                ]
                if not any(left):
                    break
                mixed = self._append_stage(
                    mixed, QuotaStage(here, compute_quotas([quota / sum(left) for quota in left]))
                )
                here = min(stop, mixed._next_end(limits))
        return self._append_stage(mixed, QuotaStage(here, (0,) * len(limits)))

    def _append_stage(self, mixed: Mixture | None, stage: QuotaStage) -> Mixture:
        if mixed is None:
            return Mixture([stage], self.seed)
        if mixed.stages[-1].quotas == stage.quotas:
            return mixed
        longer = copy.copy(mixed)
        longer.stages = (*mixed.stages, stage)
        longer._firsts = np.append(mixed._firsts, stage.first)
        longer._quotas = np.vstack([mixed._quotas, stage.quotas])
        longer._before = np.vstack([mixed._before, mixed.samples_before(stage.first)])
        return longer

    def _next_end(self, limits: Sequence[int]) -> int:
        """Return the sample after which a source of the last stage first reaches its limit."""
        need, quota = np.array(limits) - self._before[-1], self._quotas[-1]
        # The exact position is needed only for sources that end in the nearest block.
        blocks = np.where(quota > 0, (need - 1) // np.maximum(quota, 1), sys.maxsize)
        nearest = np.flatnonzero(blocks == blocks.min()).tolist()
        ends = [self.samples_to_reach(source, limits[source]) for source in nearest]
        return min(end for end in ends if end is not None)

    def switched_to(self, to: Mixture, number: int) -> Mixture:
        """Return a mixture that equals this one before sample `number`, and `to` from there on."""
        kept = [stage for stage in self.stages if stage.first < number] or [to.stages[0]]
        last = [stage for stage in to.stages if stage.first <= number][-1]
        if last.quotas != kept[-1].quotas:
            kept.append(QuotaStage(number, last.quotas))
        return Mixture([*kept, *(s for s in to.stages if s.first > number)], self.seed)

    def metadata(self) -> list[list[Any]]:
        """Return JSON values for the data fingerprint; the inverse of `from_metadata`."""
        return [[stage.first, list(stage.quotas)] for stage in self.stages]

    @classmethod
    def from_metadata(cls, facts: Any, seed: int) -> Mixture:
        """Return the mixture for the metadata in a fingerprint."""
        return cls(
            [QuotaStage(int(first), tuple(map(int, quotas))) for first, quotas in facts], seed
        )

    def _samples_in_stage(self, stage: int, count: int) -> np.ndarray:
        """Count the samples of each source in a stage's first `count` samples, int64 [sources]."""
        blocks, remainder = divmod(count, BLOCK)
        samples = blocks * self._quotas[stage]
        if remainder and any(self.stages[stage].quotas):
            dealt, _ = self._block_assignment(stage, blocks)
            samples = samples + np.bincount(dealt[:remainder], minlength=len(samples))
        return samples

    def _block_assignment(self, stage: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        return _assign_block(self.seed, self.stages[stage], block)


@functools.lru_cache(_CACHED_BLOCKS)
def _assign_block(seed: int, stage: QuotaStage, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source (uint16) of each sample in a block, and the sample's index in the source
    (int32).
    """
    order = Permutation(BLOCK, seed, _MIXTURE_ORDER, stage.first, block)(np.arange(BLOCK))
    counts = np.array(stage.quotas)
    ends = np.cumsum(counts)
    dealt = np.searchsorted(ends, order, side="right").astype(np.uint16)
    ranks = np.empty(BLOCK, np.int32)
    by_source = np.argsort(dealt, kind="stable")
    ranks[by_source] = np.arange(BLOCK) - np.repeat(ends - counts, counts)
    return dealt, ranks


def compute_quotas(shares: Sequence[float]) -> tuple[int, ...]:
    """Return quotas proportional to the shares, rounded by the largest-remainder method."""
    exact = np.array(shares) * BLOCK
    quotas = np.floor(exact).astype(int)
    left = BLOCK - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:left]] += 1
    return tuple(quotas.tolist())


def single_pass_mixture(sizes: Sequence[int], seed: int) -> Mixture:
    """Return a mixture that reads each sample once, weighted by the source sizes."""
    total = sum(sizes)
    dealt = [max(1, quota) for quota in compute_quotas([size / total for size in sizes])]
    dealt[dealt.index(max(dealt))] -= sum(dealt) - BLOCK
    return Mixture([QuotaStage(0, tuple(dealt))], seed).with_limits(sizes, 0)


def final_weights(
    mixture: Mapping[str, MixedSourceConfig], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return the weights in the last stage of the weight schedule, for sources of these sizes."""
    if any(source.epochs for source in mixture.values()):
        return {name: mixture[name].epochs * size for name, size in sizes.items()}
    if any(source.weight for source in mixture.values()):
        return {name: mixture[name].weight for name in sizes}
    return {name: float(size) for name, size in sizes.items()}


def sample_limits(
    mixture: Mapping[str, MixedSourceConfig], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the sample limit of each source: `epochs` epochs, or one epoch if none is set."""
    with_epochs = any(source.epochs for source in mixture.values())
    return {
        name: max(1, min(round(mixture[name].epochs * size), _MAX_SAMPLES)) if with_epochs else size
        for name, size in sizes.items()
    }


def build_mixture(
    data: DataConfig, sizes: Mapping[str, int], ramp: BatchRamp, sequence_length: int, seed: int
) -> Mixture:
    """Build the mixture of a config. `sizes` maps source names to numbers of sequences.

    Raises:
        ConfigError: a source has less than one sample per block, or a stage is too long.
    """
    stages = data.mixture_stages
    weights = [{name: stage.weights.get(name, 0.0) for name in sizes} for stage in stages]
    weights.append(final_weights(data.mixture, sizes))
    quota_stages: list[QuotaStage] = []
    firsts = [0, *texts.stage_ends(stages, ramp, sequence_length)]
    if firsts[-1] > _MAX_SAMPLES:
        rule = f"must end before sequence {_MAX_SAMPLES}: the stages end after {firsts[-1]}."
        raise ConfigError.one(
            Code.DATA_MIXTURE, "data.mixture_stages", None, rule, "Make the stages shorter."
        )
    for first, weight in zip(firsts, weights, strict=True):
        shares = texts.mixture_shares(weight, data.mixture_temperature)
        dealt = compute_quotas(list(shares.values()))
        for (name, share), quota in zip(shares.items(), dealt, strict=True):
            if share and not quota:
                raise ConfigError.one(
                    Code.DATA_MIXTURE,
                    f"data.mixture.{name}",
                    f"a share of {share:.2g}",
                    f"must be at least {1 / BLOCK:.2g} of the total: smaller shares round to 0.",
                    "Set a larger weight, or add the path of a small source to another source.",
                )
        if not quota_stages or quota_stages[-1].quotas != dealt:
            quota_stages.append(QuotaStage(first, dealt))
    return Mixture(quota_stages, seed)


_SEQUENCE_ORDER = 1
"""Second integer in the key of a sequence permutation, distinct for each permutation type."""


Arrays = Mapping[str, np.ndarray]
ExtraArrays = Callable[[str, int, Arrays], Arrays]
"""Maps (source name, sequence index in the source, arrays of the sequence) to additional arrays."""


class SourceSequences(NamedTuple):
    """Sequences of one source."""

    name: str
    """Name of the source; empty without a mixture."""
    sequences: Sequences
    seed: int
    packing: str = ""
    """Packing strategy of the sequences; see `data.packing`."""


def seed_of(name: str, seed: int) -> int:
    """Return the seed of a source, so that sources of equal size are shuffled differently."""
    if not name:
        return seed
    # The seed is below 2**63, because manifests of prepared data store it as a signed integer.
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


class Stream:
    """Sequences keyed by sample number, identical in every thread and process.

    With `repeat`, the order of a source differs between epochs, and the stream ends after `end`
    samples. Without `repeat`, every sequence is read once, in the order of the source. `mixture`
    selects the source of each sample.
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
        """Additional arrays of a sequence, such as teacher logits. Padding has index -1."""
        self._length = sum(len(part.sequences) for part in parts)
        self.end = end if repeat else self._length
        """Number of samples before the stream ends; None if the stream has no end."""

    def part(self, name: str) -> SourceSequences:
        """Return the source with this name."""
        return next(part for part in self.parts if part.name == name)

    def __len__(self) -> int:
        return self._length

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source index and the sequence index in the source of each sample, int64
        [numbers].

        Both arrays are -1 after the end of the stream.
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
            here = sources == source
            sequences[here] = _shuffle_samples(self.parts[source], samples[here])
        return sources, sequences

    def read(self, source: int, sequence: int) -> Arrays:
        """Return the arrays of a sequence. An index of -1 returns padding."""
        part = self.parts[max(source, 0)]
        if sequence < 0:
            arrays = part.sequences.padding()
        else:
            with wrap_section_errors(part.name), track_read(section_of(part.name)):
                arrays = part.sequences[sequence]
        if self.extra_arrays is None:
            return arrays
        return {**arrays, **self.extra_arrays(part.name, sequence, arrays)}

    def samples_before(self, number: int) -> dict[str, int]:
        """Return how many samples before sample `number` come from each source."""
        number = number if self.end is None else min(number, self.end)
        counts = [number] if self.mixture is None else self.mixture.samples_before(number).tolist()
        return {part.name: count for part, count in zip(self.parts, counts, strict=True)}


def _shuffle_samples(part: SourceSequences, samples: np.ndarray) -> np.ndarray:
    count = len(part.sequences)
    epochs, within = np.divmod(samples, count)
    for epoch in np.unique(epochs):
        order = part.sequences.epoch_permutation(part.seed, _SEQUENCE_ORDER, int(epoch))
        within[epochs == epoch] = order(within[epochs == epoch])
    return within
