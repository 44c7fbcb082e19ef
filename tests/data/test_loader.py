"""Loader: batches depend only on seed and data, and threads end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Batch, Datasets, Loader, build_loaders
from maxpipe.errors import ConfigError
from tests.data.test_sources import write_records

BATCH = 4
LENGTH = 16


@pytest.fixture
def datasets(folder: str) -> Iterator[Datasets]:
    datasets = open_folder(folder)
    yield datasets
    datasets.close()


def open_folder(folder: str, *, seed: int = 0, **changes: Any) -> Datasets:
    data = DataConfig(source="text", path=folder, validation_fraction=0.2, **changes)
    return build_loaders(
        data, TokenizerConfig(), seed=seed, batch_size=BATCH, sequence_length=LENGTH
    )


def equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def take(loader: Loader, count: int, start_step: int = 0, **where: Any) -> list[Batch]:
    with loader.batches(start_step, **where) as batches:
        return [next(batches) for _ in range(count)]


def test_batch_shapes_and_dtypes(datasets: Datasets) -> None:
    [batch] = take(datasets.train, 1, rows=[3, 1])
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "tokens": ((2, LENGTH), "int32"),
        "targets": ((2, LENGTH), "int32"),
        "segment_ids": ((2, LENGTH), "int32"),
        "positions": ((2, LENGTH), "int32"),
        "loss_mask": ((2, LENGTH), "float32"),
        "example_ids": ((2,), "int32"),
    }
    assert batch["example_ids"].tolist() == [3, 1]


@pytest.mark.parametrize("step", [0, 7, 1000])
def test_batch_contents_match_batch_rows(step: int, datasets: Datasets) -> None:
    train = datasets.train
    ids, batch = train.batch_contents(step), train.batch(step)
    for row, number in enumerate(ids["sequences"]):
        assert train.sequences[number]["tokens"].tolist() == batch["tokens"][row].tolist()
    assert ids["documents"] == sorted(
        {name for number in ids["sequences"] for name in train.sequences.documents(number)}
    )
    validation = datasets.validation
    assert validation is not None
    last = validation.num_batches - 1
    assert validation.batch_contents(last)["sequences"] == list(
        range(last * BATCH, len(validation.sequences))
    )


def test_same_seed_gives_same_batches(folder: str, datasets: Datasets) -> None:
    expected = take(datasets.train, 40)
    again = take(open_folder(folder, threads=1, prefetch_batches=1).train, 40)
    assert all(map(equal, expected, again))
    other = take(open_folder(folder, seed=1).train, 40)
    assert not any(map(equal, expected, other))


@settings(max_examples=20)
@given(rows=st.permutations(range(BATCH)), cuts=st.sets(st.integers(1, BATCH - 1)))
@pytest.mark.fault("D7")
def test_row_partitions_form_whole_batch(rows: list[int], cuts: set[int], shared: Datasets) -> None:
    edges = [0, *sorted(cuts), BATCH]
    parts = [rows[a:b] for a, b in pairwise(edges)]
    for step in (0, 7, 1000):
        whole = shared.train.batch(step)
        pieces = [shared.train.batch(step, part) for part in parts]
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in whole}
        assert equal({name: array[rows] for name, array in whole.items()}, joined)


@pytest.fixture(scope="module")
def shared(folder: str) -> Datasets:
    return open_folder(folder)


def test_batches_of_two_processes_form_whole_batch(folder: str, datasets: Datasets) -> None:
    whole = take(datasets.train, 20)
    first = take(open_folder(folder).train, 20, rows=slice(0, BATCH // 2))
    second = take(open_folder(folder).train, 20, rows=range(BATCH // 2, BATCH))
    for batch, a, b in zip(whole, first, second, strict=True):
        assert equal(batch, {name: np.concatenate([a[name], b[name]]) for name in batch})


def test_batches_can_start_at_any_step(datasets: Datasets) -> None:
    running = take(datasets.train, 30)
    for start in (1, 13, 29):
        assert equal(take(datasets.train, 1, start_step=start)[0], running[start])
    far = 10**12
    assert equal(take(datasets.train, 1, start_step=far)[0], datasets.train.batch(far))


def test_each_epoch_has_every_sequence_once_in_new_order(datasets: Datasets) -> None:
    loader = datasets.train
    count = len(loader.sequences)
    assert loader.steps_per_epoch == count / BATCH and count % BATCH
    rows = np.concatenate([batch["tokens"] for batch in take(loader, 3 * loader.num_batches)])
    expected = sorted(loader.sequences[i]["tokens"].tolist() for i in range(count))
    epochs = [rows[e * count : (e + 1) * count].tolist() for e in range(3)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_batch_larger_than_split_repeats_sequences(folder: str) -> None:
    data = DataConfig(source="text", path=f"{folder}/0[0-1].txt", validation_fraction=0.5)
    datasets = build_loaders(data, TokenizerConfig(), seed=0, batch_size=40, sequence_length=LENGTH)
    count = len(datasets.train.sequences)
    assert count < 20
    tokens = datasets.train.batch(0)["tokens"]
    assert sorted(tokens[:count].tolist()) == sorted(tokens[count : 2 * count].tolist())


def test_validation_counts_every_token_once(datasets: Datasets) -> None:
    loader = datasets.validation
    assert loader is not None and len(loader.sequences) % BATCH
    batches = list(loader.batches(0))
    assert len(batches) == loader.num_batches
    count = len(loader.sequences)
    rows = np.concatenate([batch["tokens"] for batch in batches])
    for i in range(count):
        assert np.array_equal(rows[i], loader.sequences[i]["tokens"])
    mask = np.concatenate([batch["loss_mask"] for batch in batches])
    assert mask[:count].any(axis=1).all() and not mask[count:].any()
    longer = take(loader, loader.num_batches + 2, stop_step=loader.num_batches + 2)
    assert all(map(equal, batches, longer))
    assert not longer[-1]["loss_mask"].any()


def test_train_and_validation_splits_are_disjoint(folder: str, datasets: Datasets) -> None:
    def documents(loader: Loader) -> set[int]:
        sequences = loader.sequences
        return {name for i in range(len(sequences)) for name in sequences.documents(i)}

    assert datasets.validation is not None
    train, validation = documents(datasets.train), documents(datasets.validation)
    assert not train & validation and len(train | validation) == 24 and len(validation) == 5
    assert open_folder(folder, seed=3).validation is not None
    without = build_loaders(
        DataConfig(source="text", path=folder, validation_fraction=0.0),
        TokenizerConfig(),
        seed=0,
        batch_size=1,
        sequence_length=8,
    )
    assert without.validation is None


@pytest.mark.parametrize(("threads", "ahead"), [(0, 4), (2, 0), (0, 0), (5, 2)])
def test_batches_do_not_depend_on_threads_or_prefetch(
    threads: int, ahead: int, folder: str, datasets: Datasets
) -> None:
    other = open_folder(folder, threads=threads, prefetch_batches=ahead)
    assert all(map(equal, take(other.train, 5), take(datasets.train, 5)))


def test_batches_end_at_stop_step(datasets: Datasets) -> None:
    assert len(list(datasets.train.batches(3, stop_step=8))) == 5
    assert list(datasets.train.batches(8, stop_step=8)) == []
    assert list(datasets.train.batches(9, stop_step=8)) == []


def test_batches_are_prefetched(datasets: Datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    batch = Loader.batch

    def counted(self: Loader, step: int, *rest: Any) -> Batch:
        made.append(step)
        return batch(self, step, *rest)

    monkeypatch.setattr(Loader, "batch", counted)
    batches = datasets.train.batches(10)
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    batches.close()
    assert sorted(made) == [10, 11, 12, 13]


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "grain-prefetch" in thread.name]


def wait_until_no_threads() -> None:
    deadline = time.monotonic() + 5
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetch_threads()


def test_close_stops_prefetch_threads(folder: str) -> None:
    wait_until_no_threads()
    datasets = open_folder(folder)
    iterators = [datasets.train.batches(0), datasets.train.batches(5)]
    for iterator in iterators:
        next(iterator)
    assert prefetch_threads()
    datasets.close()
    datasets.close()
    wait_until_no_threads()
    with pytest.raises(ValueError, match="closed"):
        next(iterators[0])


@pytest.mark.fault("F21")
def test_data_error_reaches_batch_iterator(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 50)
    datasets = build_loaders(
        DataConfig(source="text", path=str(tmp_path), validation_fraction=0),
        TokenizerConfig(),
        seed=0,
        batch_size=4,
        sequence_length=LENGTH,
    )
    (tmp_path / "b.txt").unlink()
    with datasets.train.batches(0) as batches, pytest.raises(ConfigError, match=r"b\.txt"):
        for _ in range(10):
            next(batches)
    wait_until_no_threads()


@pytest.mark.parametrize("source", ["jsonl", "arrayrecord"])
def test_only_empty_documents_are_rejected(source: Any, tmp_path: Path) -> None:
    path = tmp_path / "a"
    line = json.dumps({"text": ""})
    if source == "jsonl":
        path.write_text(f"{line}\n" * 50)
    else:
        write_records(path, [line.encode()] * 50)
    data = DataConfig(source=source, path=str(path))
    for _ in range(2):  # the second time from the cached index
        with pytest.raises(ConfigError) as error:
            build_loaders(
                data,
                TokenizerConfig(),
                seed=0,
                batch_size=4,
                sequence_length=LENGTH,
                cache_dir=str(tmp_path / "index"),
            )
        (problem,) = error.value.problems
        assert (problem.where, problem.value) == ("data.path", str(path))
        assert problem.rule == "must contain text: found 50 documents, all empty."
        assert problem.action.endswith("data.text_field to the field with the text.")


SCRIPT = """
import sys
from maxpipe.config.schema import DataConfig, TokenizerConfig
from maxpipe.data.loader import build_loaders
assert not {"jax", "grain"} & sys.modules.keys(), "jax and grain must be imported lazily"
data = DataConfig(source="text", path=sys.argv[1])
datasets = build_loaders(data, TokenizerConfig(), seed=0, batch_size=4, sequence_length=16)
batches = datasets.train.batches(0)
next(batches)
if sys.argv[2] == "close":
    datasets.close()
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("close", 0), pytest.param("raise", 3, marks=pytest.mark.long)]
)
def test_process_exits_with_open_iterators(how: str, code: int, folder: str) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, folder, how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (code, "")


def test_first_read_reports_progress(tmp_path: Path) -> None:
    """Without progress, a long first read would look like a hang."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 46_000)
    data = DataConfig(source="jsonl", path=str(tmp_path), validation_fraction=0.2)
    moves: list[None] = []

    def moves_of_a_build() -> int:
        moves.clear()
        build_loaders(
            data,
            TokenizerConfig(),
            seed=0,
            batch_size=BATCH,
            sequence_length=LENGTH,
            cache_dir=str(tmp_path / "cache"),
            moved=lambda: moves.append(None),
        ).close()
        return len(moves)

    # Line offsets are found in two chunks of 1 MiB; the documents are read in one batch.
    assert moves_of_a_build() == 3
    assert moves_of_a_build() == 2  # the index is cached


def test_loader_state_and_fingerprint(folder: str, datasets: Datasets) -> None:
    state = datasets.train.state(12)
    assert state == {"step": 12, "fingerprint": datasets.train.fingerprint()}
    assert json.loads(json.dumps(state)) == state
    assert compare_fingerprints(state["fingerprint"], open_folder(folder).train.fingerprint()) == []
    other = build_loaders(
        DataConfig(source="text", path=folder, validation_fraction=0.2),
        TokenizerConfig(),
        seed=5,
        batch_size=BATCH,
        sequence_length=8,
    )
    assert compare_fingerprints(state["fingerprint"], other.train.fingerprint()) == [
        ("seed", 0, 5),
        ("sequence_length", LENGTH, 8),
    ]
    assert compare_fingerprints({"a": 1}, {"b": 2}) == [("a", 1, None), ("b", None, 2)]


def test_default_corpus_with_cache(tmp_path: Path) -> None:
    def first_batch() -> tuple[Datasets, Batch]:
        datasets = build_loaders(
            DataConfig(),
            TokenizerConfig(),
            seed=0,
            batch_size=4,
            sequence_length=64,
            cache_dir=str(tmp_path),
        )
        return datasets, datasets.train.batch(0)

    datasets, batch = first_batch()
    assert datasets.unigram_entropy is not None and 2.5 < datasets.unigram_entropy < 4
    assert datasets.train.sequences.num_tokens > 4_000_000
    assert datasets.tokenizer.decode(batch["tokens"][0]).isprintable() is False
    assert equal(first_batch()[1], batch)


def test_batch_order_never_changes() -> None:
    """A change here changes the data of every resumed run: increment _ORDER_VERSION."""
    datasets = build_loaders(
        DataConfig(source="synthetic"),
        TokenizerConfig(),
        seed=0,
        batch_size=2,
        sequence_length=16,
    )
    texts = [datasets.tokenizer.decode(row) for row in datasets.train.batch(12345)["tokens"]]
    assert texts == ["yvlzsb iehgrh bh", "jrlxaqezw ibp ij"]
