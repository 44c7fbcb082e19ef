"""End of the data: repeat, stop or fail, for a single source or a mixture."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.config.load import load
from maxpipe.config.sections.data import DataConfig, MixedSourceConfig, MixtureStageConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import BatchRamp
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Loader, build_loaders
from maxpipe.data.mixture import BLOCK, Mixture, QuotaStage, compute_quotas
from maxpipe.errors import ConfigError
from maxpipe.train.data_end import check_enough_data, last_step
from tests.data.test_mixture import LENGTH, NAMES, RAMPS, folders, read_rows
from tests.errors import raises

assert folders  # a fixture

CURRICULA = [
    [],
    [MixtureStageConfig(weights={"web": 1}, steps=3)],
    [
        MixtureStageConfig(weights={"web": 1, "code": 4}, tokens=500),
        MixtureStageConfig(weights={"books": 1}, steps=4),
    ],
]
SHARES = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


def quotas_of(weights: list[int]) -> tuple[int, ...]:
    return compute_quotas([weight / sum(weights) for weight in weights])


def mixture_of(all_weights: list[list[int]], lengths: list[int]) -> Mixture:
    """Build a mixture, merging consecutive stages with equal quotas."""
    firsts = itertools.accumulate([0, *lengths])
    stages: list[QuotaStage] = []
    for first, weights in zip(firsts, all_weights, strict=False):
        if not stages or stages[-1].quotas != quotas_of(weights):
            stages.append(QuotaStage(first, quotas_of(weights)))
    return Mixture(stages, 7)


MIXTURES = st.builds(
    mixture_of,
    st.lists(SHARES, min_size=1, max_size=3),
    st.lists(st.integers(1, 200), min_size=2, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.integers(0, 2), st.integers(0, 2 * BLOCK))
def test_samples_to_reach_matches_samples_before(mixture: Mixture, source: int, count: int) -> None:
    found = mixture.samples_to_reach(source, count)
    if found is None:
        assert mixture.stages[-1].quotas[source] == 0
        assert mixture.samples_before(mixture.stages[-1].first + BLOCK)[source] < count
    else:
        assert mixture.samples_before(found)[source] >= count
        assert found == 0 or count == 0 or mixture.samples_before(found - 1)[source] < count


@settings(max_examples=80, deadline=None)
@given(
    MIXTURES,
    st.lists(st.integers(1, 150), min_size=3, max_size=3),
    st.integers(0, 120),
)
def test_each_source_stops_at_its_limit(mixture: Mixture, limits: list[int], since: int) -> None:
    """Compared with a loop over all samples that only counts samples per source."""
    before = mixture.samples_before(since)
    found = mixture.with_limits(limits, since)
    end = found.end
    assert end is not None
    sources, samples = found.locate(np.arange(end + 20))
    read = [0, 0, 0]
    for number, (source, sample) in enumerate(
        zip(sources[:end].tolist(), samples[:end].tolist(), strict=True)
    ):
        assert sample == read[source], "samples of a source must be consecutive"
        assert number < since or read[source] < limits[source], "a source must not exceed its limit"
        read[source] += 1
    # All sources of the last stage are exhausted.
    for source, quota in enumerate(mixture.stages[-1].quotas):
        if quota and mixture.stages[-1].first <= end:
            assert read[source] == max(limits[source], before[source])
    # Samples before `since` and before the first exhausted source are unchanged.
    ends = [
        mixture.samples_to_reach(n, limit) for n, limit in enumerate(limits) if before[n] < limit
    ]
    same = max(since, min((each for each in ends if each is not None), default=since))
    if (before < limits).all():
        plain = mixture.locate(np.arange(same))
        assert np.array_equal(plain[0], sources[:same]) and np.array_equal(plain[1], samples[:same])
    assert (sources[end:] == -1).all() and (samples[end:] == -1).all()
    assert (
        Mixture.from_metadata(found.metadata(), 7).with_limits(limits, since).stages == found.stages
    )


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.lists(st.integers(1, 150), min_size=3, max_size=3), st.data())
def test_resumed_mixture_matches_uninterrupted_mixture(
    mixture: Mixture, limits: list[int], data: st.DataObject
) -> None:
    found = mixture.with_limits(limits, 0)
    position = data.draw(st.integers(0, found.stages[-1].first + 9))
    again = (
        Mixture.from_metadata(found.metadata(), 7)
        .switched_to(mixture, position)
        .with_limits(limits, position)
    )
    assert again.stages == found.stages


@settings(max_examples=60, deadline=None)
@given(MIXTURES, MIXTURES, st.lists(st.integers(1, 150), min_size=3, max_size=3), st.data())
def test_extending_epochs_after_end_loses_no_samples(
    mixture: Mixture, other: Mixture, limits: list[int], data: st.DataObject
) -> None:
    """Padding rows of the last batch belong to no source, so no sample is lost."""
    found = mixture.with_limits(limits, 0)
    assert found.end is not None
    position = found.end + data.draw(st.integers(0, 7))
    longer = [2 * limit for limit in limits]
    again = found.switched_to(other, position).with_limits(longer, position)
    assert again.end is not None
    sources, samples = again.locate(np.arange(again.end))
    assert (sources[found.end : position] == -1).all()
    for source in range(3):
        mine = samples[sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))


def test_exhausted_source_quota_is_shared_by_weight() -> None:
    mixture = Mixture([QuotaStage(0, quotas_of([8, 6, 2]))], 7)
    found = mixture.with_limits([3 * BLOCK, 4 * BLOCK, 5 * BLOCK], 0)
    assert found.end == 12 * BLOCK
    assert [stage.quotas for stage in found.stages] == [
        quotas_of([8, 6, 2]),
        quotas_of([0, 6, 2]),
        quotas_of([0, 0, 1]),
        (0, 0, 0),
    ]


def loader_of(folders: dict[str, str], ramp: BatchRamp, **keys: Any) -> Loader:
    """Open a mixture; a tuple in `keys` has one value per source."""
    mixture = {
        name: MixedSourceConfig(
            source="text",
            path=folders[name],
            **{key: each[number] for key, each in keys.items() if isinstance(each, tuple)},
        )
        for number, name in enumerate(NAMES)
    }
    keys = {key: each for key, each in keys.items() if not isinstance(each, tuple)}
    data = DataConfig(mixture=mixture, validation_fraction=0.2, **keys)
    return built(data, ramp)


def built(data: DataConfig, ramp: BatchRamp) -> Loader:
    sizes = {"batch_size": ramp.batch_size, "batch_ramp": ramp, "sequence_length": LENGTH}
    return build_loaders(data, TokenizerConfig(), seed=0, **sizes).train


@settings(max_examples=30, deadline=None)
@given(
    RAMPS,
    st.lists(st.tuples(st.integers(0, 40), SHARES), min_size=1, max_size=3),
    st.sampled_from([(), (1.5, 1.0, 0.5), (3.0, 2.0, 1.0)]),
    st.sampled_from(CURRICULA),
    st.floats(0.5, 3.0),
    st.sampled_from([1, 2, 4]),
)
def test_run_reads_every_source_to_its_end(
    folders: dict[str, str],
    ramp: BatchRamp,
    attempts: list[tuple[int, list[int]]],
    epochs: tuple[float, ...],
    stages: list[MixtureStageConfig],
    temperature: float,
    processes: int,
) -> None:
    """Weights change on each resume; every source still yields the planned multiset of samples."""
    more = {"end": "stop", "mixture_stages": stages, "mixture_temperature": temperature}
    saved, at, seen = None, 0, Counter[tuple[str, int]]()
    loader = loader_of(folders, ramp, **more)
    edges = [0, *sorted(step for step, _ in attempts[:-1]), None]
    for (_, stop), (_, weights) in zip(itertools.pairwise(edges), attempts, strict=True):
        weights = tuple(each + 1 for each in weights)
        given = {"epochs": epochs} if epochs else {"weight": weights}
        loader = loader_of(folders, ramp, **given, **more)
        if saved is not None:
            assert compare_fingerprints(saved, loader.fingerprint(), at) == []
            loader.resume_mixture(saved, at)
        last = loader.num_batches if stop is None else min(stop, loader.num_batches)
        for step in range(at, last):
            rows = loader.sequence_origins(step)
            assert rows, "a batch must have at least one row"
            texts = read_rows(loader, step, processes)[: len(rows)]
            for row, text in zip(rows, texts, strict=False):
                if len(rows) == loader.ramp.position_of(step)[1]:
                    part = loader.stream.part(row.source)
                    assert part.sequences[row.sequence]["tokens"].tobytes() == text
                seen[row.source, row.sequence] += 1
        at = max(at, last)
        saved = loader.state(at)["fingerprint"]
    assert not loader.sequence_origins(at) and not loader.batch(at)["loss_mask"].any()
    for number, part in enumerate(loader.stream.parts):
        size = len(part.sequences)
        limit = round(epochs[number] * size) if epochs else size
        each = [seen[part.name, sequence] for sequence in range(size)]
        assert sum(each) == limit and set(each) <= {limit // size, -(-limit // size)}
    assert loader.stream.samples_before(10**12) == {
        p.name: sum(seen[p.name, n] for n in range(len(p.sequences))) for p in loader.stream.parts
    }


def test_single_source_with_end_stop_is_read_once(folders: dict[str, str]) -> None:
    def opened(end: Any) -> Loader:
        data = DataConfig(source="text", path=folders["web"], validation_fraction=0.2, end=end)
        return built(data, BatchRamp((), 7))

    repeated, stopped = opened("repeat"), opened("stop")
    size = len(repeated.sequences)
    assert size % 7 and stopped.num_batches == -(-size // 7)
    assert repeated.stream.end is None and repeated.last_batch == np.inf
    for step in range(stopped.num_batches - 1):
        assert stopped.sequence_origins(step) == repeated.sequence_origins(step)
    rows = [
        row.sequence
        for step in range(stopped.num_batches)
        for row in stopped.sequence_origins(step)
    ]
    assert sorted(rows) == list(range(size))
    last = stopped.batch(stopped.num_batches - 1)
    assert last["loss_mask"][: size % 7].any(axis=1).all()
    assert not last["loss_mask"][size % 7 :].any()
    with stopped.batches(stopped.num_batches - 2) as batches:
        assert len(list(batches)) == 2
    stopped.close()
    # The fingerprint does not depend on data.end, which may change on resume.
    assert stopped.fingerprint() == repeated.fingerprint()


def test_last_step() -> None:
    class Ends:
        last_batch = 30.0

    assert last_step(Ends(), 100, 0, 0) == 30  # type: ignore[arg-type]
    assert last_step(Ends(), 20, 0, 0) == 20  # type: ignore[arg-type]
    assert last_step(Ends(), 100, 4, 0) == 26  # type: ignore[arg-type]
    assert last_step(Ends(), 100, 0, 33) == 33  # type: ignore[arg-type]


@pytest.mark.parametrize("mixed", [False, True])
def test_insufficient_data_is_rejected(mixed: bool, folders: dict[str, str]) -> None:
    """The first step that would repeat a sequence is rejected; the step before is accepted."""
    if mixed:
        loader = loader_of(folders, BatchRamp((), 4), weight=(3, 1, 1), end="fail")
        section = "data.mixture.books"
    else:
        data = DataConfig(source="text", path=folders["web"], validation_fraction=0, end="fail")
        loader, section = built(data, BatchRamp((), 4)), "data"
    seen = set[tuple[str, int]]()
    steps = 0
    while True:
        found = [(row.source, row.sequence) for row in loader.sequence_origins(steps)]
        if len(seen | set(found)) < len(seen) + len(found):
            break
        seen |= set(found)
        steps += 1
    check_enough_data(loader, steps, 0)
    with pytest.raises(ConfigError) as caught:
        check_enough_data(loader, steps + 1, 0)
    [problem] = caught.value.problems
    assert f"{section} has documents for {steps}." in problem.rule
    assert f"train.steps={steps}," in problem.action
    check_enough_data(loader, steps - 2, 2)
    with pytest.raises(ConfigError):
        check_enough_data(loader, steps - 1, 2)


def test_data_end_accepts_three_values() -> None:
    assert load(["quickstart", "data.end=stop"]).config.data.end == "stop"
    with raises(ConfigError, "data.end", "never", names=["repeat", "stop", "fail"]):
        load(["quickstart", "data.end=never"])


@pytest.mark.parametrize("epochs", [(), (2.0, 1.0, 0.5)])
def test_mixture_shares_until_first_source_ends(
    folders: dict[str, str], epochs: tuple[float, ...]
) -> None:
    """With epochs, shares are proportional to epochs and all sources end at about the same time."""
    given = {"epochs": epochs} if epochs else {"weight": (1, 1, 1)}
    stopped = loader_of(folders, BatchRamp((), 4), **given, end="stop")
    assert stopped.stream.mixture is not None and stopped.ending is not None
    first = stopped.stream.mixture.stages[1].first if len(stopped.stream.mixture.stages) > 1 else 0
    total = sum(stopped.ending.limits.values())
    assert stopped.stream.end == total
    assert first > 0.8 * total if epochs else first < 0.8 * total


def test_prepared_tokens_end_like_text(folders: dict[str, str], tmp_path: Path) -> None:
    from maxpipe.cli import main

    given = ["data.source=text", f"data.path={folders['web']}"]
    assert main(["data", "prepare", *given, "--out", str(tmp_path / "ids")]) == 0
    text = DataConfig(source="text", path=folders["web"], end="stop")
    ids = DataConfig(source="tokens", path=str(tmp_path / "ids"), end="stop")
    one, other = built(text, BatchRamp((), 5)), built(ids, BatchRamp((), 5))
    assert one.num_batches == other.num_batches
    for step in range(one.num_batches):
        pair = one.batch(step), other.batch(step)
        assert all(np.array_equal(pair[0][name], pair[1][name]) for name in pair[0])
