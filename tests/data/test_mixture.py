"""Mixtures: shares, constant-time seeks, and no lost or repeated sample after any change."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.config.load import from_dict, load, to_dict, to_yaml
from maxpipe.config.render import explain, json_schema
from maxpipe.config.sections.data import (
    DataConfig,
    MixedSourceConfig,
    MixtureStageConfig,
    mixture_shares,
)
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import BatchRamp
from maxpipe.config.sections.train import RampStage as Batches
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Loader, build_loaders
from maxpipe.data.mixture import BLOCK, Mixture, QuotaStage, compute_quotas, single_pass_mixture
from maxpipe.errors import ConfigError
from tests.data.texts import write_texts

LENGTH = 16
NAMES = ("books", "code", "web")
WEIGHTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


def mixture_of(weights: Sequence[Sequence[float]], firsts: Sequence[int]) -> Mixture:
    dealt = [compute_quotas([w / sum(each) for w in each]) for each in weights]
    return Mixture([QuotaStage(*each) for each in zip(firsts, dealt, strict=True)], seed=3)


MIXTURES = st.lists(WEIGHTS, min_size=1, max_size=3).flatmap(
    lambda weights: st.lists(
        st.integers(1, 3 * BLOCK), min_size=len(weights) - 1, max_size=len(weights) - 1, unique=True
    ).map(lambda firsts: mixture_of(weights, [0, *sorted(firsts)]))
)


@settings(max_examples=20, deadline=None)
@given(MIXTURES, st.lists(st.integers(0, 4 * BLOCK), min_size=1, max_size=4))
def test_source_samples_are_numbered_without_gaps(mixed: Mixture, at: list[int]) -> None:
    last = 3 * BLOCK + 100
    sources, samples = mixed.locate(np.arange(last))
    for source in range(3):
        mine = samples[sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))
        assert mixed.samples_before(last)[source] == len(mine)
    for number in at:  # and looked up individually
        [source], [sample] = mixed.locate(np.array([number]))
        if number < last:
            assert (source, sample) == (sources[number], samples[number])
        assert mixed.samples_before(number)[source] == sample


@settings(max_examples=20, deadline=None)
@given(MIXTURES, MIXTURES, MIXTURES, st.integers(0, 3 * BLOCK), st.integers(0, 3 * BLOCK))
def test_changed_weights_keep_source_positions(
    one: Mixture, other: Mixture, third: Mixture, at: int, later: int
) -> None:
    at, later = sorted((at, later))
    numbers = np.arange(later + BLOCK)
    found = one.switched_to(other, at).switched_to(third, later)
    sources, samples = found.locate(numbers)
    before = one.locate(numbers[:at])
    assert np.array_equal(sources[:at], before[0]) and np.array_equal(samples[:at], before[1])
    for source in range(3):
        mine = samples[sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))
    assert Mixture.from_metadata(found.metadata(), 3).stages == found.stages
    # Switching to the same weights changes nothing.
    assert found.switched_to(third, later + 1).stages == found.stages


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=5))
def test_evaluations_read_each_sequence_once(sizes: list[int]) -> None:
    found = single_pass_mixture([*sizes, 100_000], seed=3)
    end = sum(sizes) + 100_000
    assert found.end == end
    sources, samples = found.locate(np.arange(end))
    for source, size in enumerate([*sizes, 100_000]):
        assert np.array_equal(samples[sources == source], np.arange(size))
    # Sources are spread evenly: half of the samples have half of the large source.
    large = (sources == len(sizes))[: end // 2].sum()
    assert abs(large - 50_000) < 0.02 * 50_000


def test_quotas_round_to_nearest_integers() -> None:
    assert sum(compute_quotas([1 / 3, 1 / 3, 1 / 3])) == BLOCK
    assert compute_quotas([0.5, 0.25, 0.25]) == (BLOCK // 2, BLOCK // 4, BLOCK // 4)
    assert compute_quotas([1 / 3, 2 / 3]) == (21845, 43691)


def test_mixture_shares_with_temperature() -> None:
    weights = {"a": 1.0, "b": 8.0, "c": 0.0}
    assert mixture_shares(weights, 1.0) == pytest.approx({"a": 1 / 9, "b": 8 / 9, "c": 0})
    assert mixture_shares(weights, 3.0) == pytest.approx({"a": 1 / 3, "b": 2 / 3, "c": 0})
    assert mixture_shares(weights, 1e9) == pytest.approx({"a": 1 / 2, "b": 1 / 2, "c": 0})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write three sources of different sizes; each text names its source."""
    root = tmp_path_factory.mktemp("sources")
    return {
        name: write_texts(root / name, [f"{name} {i} " * (2 + i % 5) for i in range(count)])
        for name, count in zip(NAMES, (9, 24, 40), strict=True)
    }


def loader_of(
    folders: dict[str, str], ramp: BatchRamp, weights: Sequence[float] = (1, 2, 3), **more: Any
) -> Loader:
    mixture = {
        name: MixedSourceConfig(source="text", path=folders[name], weight=weight)
        for name, weight in zip(NAMES, weights, strict=True)
    }
    data = DataConfig(mixture=mixture, validation_fraction=0.2, **more)
    return build_loaders(
        data,
        TokenizerConfig(),
        seed=0,
        batch_size=ramp.batch_size,
        batch_ramp=ramp,
        sequence_length=LENGTH,
    ).train


def read_rows(loader: Loader, step: int, processes: int) -> list[bytes]:
    """Return the rows of one step in batch order, each read by one of the processes."""
    count = loader.ramp.position_of(step)[1]
    parts = [loader.batch(step, range(rank, count, processes)) for rank in range(processes)]
    ids = np.concatenate([part["example_ids"] for part in parts])
    tokens = np.concatenate([part["tokens"] for part in parts])
    return [tokens[at].tobytes() for at in np.argsort(ids)]


RAMPS = st.builds(
    lambda stages, rows: BatchRamp(tuple(Batches(*each) for each in stages), rows),
    st.lists(st.tuples(st.integers(4, 7), st.integers(1, 5)), max_size=2),
    st.integers(4, 9),
)


@settings(max_examples=25, deadline=None)
@given(
    RAMPS,
    st.lists(st.tuples(st.integers(0, 30), WEIGHTS), min_size=1, max_size=4),
    st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
)
def test_no_sample_is_lost_or_repeated_across_resumes(
    folders: dict[str, str],
    ramp: BatchRamp,
    attempts: list[tuple[int, list[int]]],
    processes: list[int],
) -> None:
    """The run stops at random steps and resumes with other weights and process counts."""
    edges = [0, *sorted(step for step, _ in attempts)]
    saved: dict[str, Any] | None = None
    seen: Counter[tuple[str, int]] = Counter()
    order: dict[str, list[int]] = {name: [] for name in NAMES}
    for (start, stop), (_, weights), count in zip(
        itertools.pairwise(edges), attempts, processes, strict=False
    ):
        loader = loader_of(folders, ramp, weights)
        if saved is not None:
            assert compare_fingerprints(saved, loader.fingerprint(), start) == []
            loader.resume_mixture(saved, start)
        for step in range(start, stop):
            rows, read = loader.sequence_origins(step), read_rows(loader, step, count)
            for row, text in zip(rows, read, strict=True):
                part = {p.name: p for p in loader.stream.parts}[row.source]
                assert part.sequences[row.sequence]["tokens"].tobytes() == text
                seen[row.source, row.sequence] += 1
                order[row.source].append(row.sequence)
        saved = loader.state(stop)["fingerprint"]
    for part in loader_of(folders, ramp).stream.parts:
        count, total = len(part.sequences), len(order[part.name])
        # Each source yields whole epochs and the beginning of another.
        each = [seen[part.name, number] for number in range(count)]
        assert sum(each) == total and set(each) <= {total // count, -(-total // count)}
        for begin in range(0, total, count):
            epoch = order[part.name][begin : begin + count]
            assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_rows_do_not_depend_on_process_count(folders: dict[str, str], processes: int) -> None:
    ramp = BatchRamp((), 8)
    one, other = loader_of(folders, ramp), loader_of(folders, ramp)
    for step in (0, 17, 10_000_000):
        assert read_rows(one, step, 1) == read_rows(other, step, processes)


def test_shares_over_ten_thousand_steps(folders: dict[str, str]) -> None:
    loader = loader_of(folders, BatchRamp((), 8), (1, 2, 5))
    sources, _ = loader.stream.locate(np.arange(8 * 10_000))
    found = np.bincount(sources) / len(sources)
    for share, wanted in zip(found, (1 / 8, 2 / 8, 5 / 8), strict=True):
        assert abs(share - wanted) < 3 * (wanted * (1 - wanted) / len(sources)) ** 0.5
    # The shares also hold within short intervals.
    for stretch in np.split(sources, 100):
        for source, wanted in enumerate((1 / 8, 2 / 8, 5 / 8)):
            deviation = (wanted * (1 - wanted) / len(stretch)) ** 0.5
            assert abs((stretch == source).mean() - wanted) < 5 * deviation


def test_mixture_stages_run_in_order(folders: dict[str, str]) -> None:
    stages = [
        MixtureStageConfig(weights={"books": 1}, steps=10),
        MixtureStageConfig(weights={"code": 1, "web": 1}, tokens=1600),
    ]
    loader = loader_of(folders, BatchRamp((), 8), (0, 0, 1), mixture_stages=stages)
    names = [[row.source for row in loader.sequence_origins(step)] for step in range(30)]
    assert {name for step in names[:10] for name in step} == {"books"}
    # 1600 tokens are 100 rows, and 13 whole batches.
    assert {name for step in names[10:23] for name in step} == {"code", "web"}
    assert {name for step in names[23:] for name in step} == {"web"}


def test_shares_follow_source_sizes_or_epochs(folders: dict[str, str]) -> None:
    def mixed(**keys: Any) -> dict[str, Any]:
        sources = {
            name: MixedSourceConfig(
                source="text", path=folders[name], **{k: v[name] for k, v in keys.items()}
            )
            for name in NAMES
        }
        data = DataConfig(mixture=sources, validation_fraction=0)
        found = build_loaders(
            data, TokenizerConfig(), seed=0, batch_size=4, sequence_length=LENGTH
        ).train
        sizes = {part.name: len(part.sequences) for part in found.stream.parts}
        return {"sizes": sizes, "counts": found.stream.samples_before(1 << 22)}

    by_size = mixed()
    total = sum(by_size["sizes"].values())
    for name, count in by_size["counts"].items():
        assert count / (1 << 22) == pytest.approx(by_size["sizes"][name] / total, abs=1e-5)
    epochs = {"books": 3.0, "code": 1.0, "web": 0.5}
    found = mixed(epochs=epochs)
    read = {name: found["counts"][name] / found["sizes"][name] for name in NAMES}
    for name in NAMES:
        assert read[name] / read["code"] == pytest.approx(epochs[name], rel=1e-3)


def test_seek_takes_constant_time(folders: dict[str, str]) -> None:
    loader = loader_of(folders, BatchRamp((), 8))

    def seconds(step: int) -> float:
        begin = time.process_time()
        loader.batch(step)
        return time.process_time() - begin

    seconds(5)
    near = min(seconds(10 + step) + 0.001 for step in range(3))
    far = min(seconds(10_000_000 + 40_000 * step) for step in range(3))
    assert far < 0.2 and near < 0.2


def test_batch_contents_list_row_sources(folders: dict[str, str]) -> None:
    loader = loader_of(folders, BatchRamp((), 8))
    ids, rows = loader.batch_contents(3), loader.sequence_origins(3)
    assert ids["sources"] == [row.source for row in rows] and len(rows) == 8
    assert ids["sequences"] == [row.sequence for row in rows]
    for name, documents in ids["documents"].items():
        wanted = {number for row in rows if row.source == name for number in row.documents}
        assert documents == sorted(wanted)


def test_changed_sources_change_fingerprint(folders: dict[str, str]) -> None:
    ramp = BatchRamp((), 8)
    saved = loader_of(folders, ramp).fingerprint()
    assert compare_fingerprints(saved, loader_of(folders, ramp, (5, 1, 1)).fingerprint(), 7) == []
    moved = loader_of({**folders, "web": folders["code"]}, ramp).fingerprint()
    assert (
        next(name for name, *_ in compare_fingerprints(saved, moved, 7))
        == "web: the number of documents"
    )
    alone = build_loaders(
        DataConfig(source="text", path=folders["web"]),
        TokenizerConfig(),
        seed=0,
        batch_size=8,
        sequence_length=LENGTH,
    ).train.fingerprint()
    [(name, before, now)] = compare_fingerprints(saved, alone, 7)
    assert (name, before, now) == ("the sources of data.mixture", "books, code, web", None)


TINY = ["quickstart", "train.steps=5"]
WEB = ["data.mixture.web.source=text", "data.mixture.web.path=web/*.txt"]
CODE = ["data.mixture.code.source=text", "data.mixture.code.path=code/*.py"]


def test_mixture_config_by_source_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(
        "data:\n  mixture:\n    web: {source: text, path: 'web/*.txt', weight: 0.7}\n"
        "    code:\n      source: text\n      path: code/*.py\n      weight: 0.3\n    rest:\n"
    )
    loaded = load([*TINY, str(file), "data.mixture.web.weight=0.5"])
    mixture = loaded.config.data.mixture
    assert list(mixture) == ["web", "code", "rest"]
    assert mixture["web"] == MixedSourceConfig(source="text", path="web/*.txt", weight=0.5)
    assert mixture["rest"] == MixedSourceConfig()
    assert loaded.origins["data.mixture.web.path"] == str(file)
    assert loaded.origins["data.mixture.web.weight"] == "data.mixture.web.weight=0.5"
    assert from_dict(to_dict(loaded.config)) == loaded.config
    file.write_text(to_yaml(loaded.config))
    assert load([str(file)]).config == loaded.config
    assert load([str(file), "data.mixture={}"]).config.data.mixture == {}
    one = load([str(file), "data.mixture.web={source: synthetic}"]).config.data.mixture
    assert one["web"] == MixedSourceConfig(source="synthetic")


@pytest.mark.parametrize("name", ["../x", "a/b", "a.b", "<b>", "x" * 65])
def test_invalid_names_in_files_are_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text(
        f'eval: {{generative_tasks: {{"{name}": {{path: p.jsonl, scorer: number}}}}}}\n'
    )
    with pytest.raises(ConfigError, match="at most 64 letters, digits, `_` and `-`; got") as caught:
        load(["tiny", str(tmp_path / "c.yml")])
    assert "Set eval.generative_tasks.web.path=... (with another name)." in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["data.mixture=web"], "must be a mapping of names"),
        (["data.mixture.web=3"], "must be a mapping of keys"),
        (["data.mixture.web.weigth=3"], "Did you mean data.mixture.web.weight?"),
        (["data.mixture.web.weight=much"], "must be a finite number"),
        (["data.mixture.web.source=csv"], "must be one of corpus, text"),
        (["data.mixture.we b.weight=1"], "at most 64 letters"),
        (["alerts.rules=3"], "Set alerts.rules.web.metric=train/loss."),
        ([*WEB, "data.mixture.web.weight=-1"], "must be from 0 to 3.4e+38"),
        ([*WEB, "data.mixture.web.weight=1e308"], "must be from 0 to 3.4e+38"),
        ([*WEB, "data.mixture.web.epochs=1e10"], "must be from 0 to 1000000000"),
        ([*WEB, "train.steps=100000000001"], "must be from 0 to 100000000000"),
        ([*WEB, "data.path=x"], "if data.mixture is set"),
        (["data.mixture.web.source=text"], "data.mixture.web.path"),
        (
            [*WEB, *CODE, "data.mixture.web.weight=1", "data.mixture.code.epochs=1"],
            "weights or epochs",
        ),
        ([*WEB, *CODE, "data.mixture.web.epochs=1"], "another source has epochs"),
        ([*WEB, "data.mixture_temperature=0"], "must be greater than 0"),
        (["data.mixture_temperature=2"], "requires data.mixture"),
        (["data.mixture_stages=[{weights: {web: 1}, steps: 3}]"], "requires data.mixture"),
        ([*WEB, "data.mixture_stages=[{weights: {wep: 1}, steps: 3}]"], "Did you mean web?"),
    ],
)
def test_invalid_mixture_config_is_rejected(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*TINY, *given])
    assert said in str(caught.value)


def test_config_explain_covers_mixture_keys() -> None:
    assert "number" in explain("data.mixture.web.weight")
    assert "data.mixture.NAME" in explain("data.mixture")
    assert "weight" in explain("data.mixture.web")
    mixture = json_schema()["properties"]["data"]["properties"]["mixture"]
    assert mixture["additionalProperties"]["properties"]["weight"]["type"] == "number"


def test_share_that_rounds_to_zero_is_rejected(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="smaller shares round to 0"):
        loader_of(folders, BatchRamp((), 8), (1e-9, 1, 1))


def test_stages_beyond_maximum_sequence_are_rejected(folders: dict[str, str]) -> None:
    """Sample counts would silently overflow."""
    long = MixtureStageConfig(weights={"code": 1}, steps=10**17)
    loader = loader_of(folders, BatchRamp((), 8), mixture_stages=[long] * 2)
    assert loader.stream.samples_before(16 * 10**17 - 1)["code"] == 16 * 10**17 - 1
    with pytest.raises(ConfigError, match="must end before sequence 2305843009213693952"):
        loader_of(folders, BatchRamp((), 8), mixture_stages=[long] * 3)


def test_missing_path_error_names_source(tmp_path: Path, folders: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        loader_of({**folders, "code": str(tmp_path / "none")}, BatchRamp((), 8))
    assert caught.value.problems[0].where == "data.mixture.code.path"
