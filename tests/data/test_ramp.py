"""Batch-size ramps: batch sizes, positions in the data, and config rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.config.load import load
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import (
    BatchRamp,
    BatchRampStageConfig,
    RampStage,
    TrainConfig,
    total_steps,
)
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Loader, build_loaders
from maxpipe.errors import ConfigError

LENGTH = 16
STAGES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), max_size=4)


def ramp_of(stages: list[tuple[int, int]], rows: int) -> BatchRamp:
    return BatchRamp(tuple(RampStage(*each) for each in stages), rows)


def sizes(ramp: BatchRamp, count: int) -> list[int]:
    """List the batch sizes of the first steps."""
    each = [rows for rows, steps in ramp.stages for _ in range(steps)]
    return [*each, *[ramp.batch_size] * count][:count]


@settings(deadline=None)
@given(STAGES, st.integers(1, 9), st.integers(0, 40))
def test_batch_positions_match_counting(
    stages: list[tuple[int, int]], rows: int, number: int
) -> None:
    ramp = ramp_of(stages, rows)
    wanted = sizes(ramp, number + 1)
    assert ramp.position_of(number) == (sum(wanted[:-1]), wanted[-1])
    batches = ramp.num_batches(ramp.sequences_before(number))
    assert ramp.sequences_before(batches) == ramp.sequences_before(number) and batches == number
    assert ramp.num_batches(ramp.sequences_before(number) + 1) == number + 1
    assert set(ramp.sizes(number)) == set(sizes(ramp, 60)[number:])
    assert BatchRamp.from_metadata(ramp.metadata()) == ramp


@settings(deadline=None)
@given(STAGES, STAGES, st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_equals_until_compares_batch_sizes(
    ours: list[tuple[int, int]],
    others: list[tuple[int, int]],
    rows: int,
    other_rows: int,
    number: int,
) -> None:
    one, other = ramp_of(ours, rows), ramp_of(others, other_rows)
    assert one.equals_until(other, number) == (sizes(one, number) == sizes(other, number))


def loader_of(folder: str, ramp: BatchRamp) -> Iterator[Loader]:
    data = DataConfig(source="text", path=folder, validation_fraction=0.2)
    found = build_loaders(
        data,
        TokenizerConfig(),
        seed=0,
        batch_size=ramp.batch_size,
        batch_ramp=ramp,
        sequence_length=LENGTH,
    )
    yield found.train
    found.close()


@settings(max_examples=25, deadline=None)
@given(STAGES, st.integers(1, 9), st.lists(st.integers(0, 20), max_size=3), st.integers(1, 3))
def test_no_row_is_lost_or_repeated_across_resumes(
    folder: str, stages: list[tuple[int, int]], rows: int, stops: list[int], processes: int
) -> None:
    """Holds for any number of stops and processes."""
    ramp, last = ramp_of(stages, rows), 22
    processes = min(processes, *sizes(ramp, last))  # each process has a row
    for loader in loader_of(folder, ramp):
        seen: list[bytes] = []
        edges = [0, *sorted(stops), last]
        for start, stop in itertools.pairwise(edges):
            shares = [
                lambda count, rank=rank: np.arange(rank, count, processes)
                for rank in range(processes)
            ]
            opened = [loader.batches(start, share, stop_step=stop) for share in shares]
            for parts in zip(*opened, strict=True):
                ids = np.concatenate([part["example_ids"] for part in parts])
                tokens = np.concatenate([part["tokens"] for part in parts])
                seen += [tokens[at].tobytes() for at in np.argsort(ids)]
            for each in opened:
                each.close()
        for plain in loader_of(folder, ramp_of([], 1)):
            total = sum(sizes(ramp, last))
            assert seen == [plain.batch(i)["tokens"][0].tobytes() for i in range(total)]
        ids = loader.batch_contents(3)["sequences"]
        assert len(ids) == sizes(ramp, 4)[3]


def test_fingerprints_without_ramp_are_unchanged() -> None:
    assert ramp_of([], 8).metadata() == {"batch_size": 8}
    grown = ramp_of([(4, 3)], 8).metadata()
    assert compare_fingerprints({"batch_size": 4}, grown, 3) == []
    assert [name for name, *_ in compare_fingerprints({"batch_size": 4}, grown, 4)] == [
        "train.batch_size",
        "the stages of train.batch_ramp (sequences, steps)",
    ]


def test_total_steps_with_batch_ramp() -> None:
    def steps(tokens: int, *ramp: BatchRampStageConfig) -> int:
        train = TrainConfig(tokens=tokens, batch_size=8, sequence_length=10, batch_ramp=list(ramp))
        return total_steps(train)

    stage = BatchRampStageConfig

    assert steps(800) == 10 and steps(801) == 11
    assert steps(800, stage(batch_size=2, steps=5)) == 5 + 9  # 100 of 800 in the stage
    stages = stage(batch_size=2, tokens=81), stage(batch_size=4, tokens=40)
    assert steps(800, *stages) == 5 + 1 + 9
    assert steps(90, stage(batch_size=2, steps=5)) == 5


TINY = ["quickstart", "train.batch_size=16", "pipeline.microbatches=4", "train.steps=100"]


@pytest.mark.parametrize(
    ("ramp", "more", "said"),
    [
        ("[{batch_size: 8, steps: 3}, {batch_size: 4, steps: 3}]", [], "8 is followed by 4"),
        ("[{batch_size: 16, steps: 3}]", [], "16 is followed by 16"),
        ("[{batch_size: 6, steps: 3}]", [], "multiples of 4"),
        ("[{batch_size: 8, steps: 100}]", [], "has 100 steps"),
        ("[{batch_size: 8, steps: 3}]", ["runtime.compiled_step=/tmp/x"], "train.batch_ramp"),
        (
            "[{batch_size: 4, steps: 3}]",
            ["pipeline.group=2", "mesh.ici_stage=2", "pipeline.repeats=2"],
            "for which pipeline.group must be 0",
        ),
    ],
)
def test_invalid_batch_ramps_are_rejected(ramp: str, more: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*TINY, f"train.batch_ramp={ramp}", *more])
    assert said in str(caught.value)


def test_lr_phases_use_total_steps_with_batch_ramp(tmp_path: Path) -> None:
    """Run length and ramp are both given in tokens."""
    given = (
        "train.batch_ramp=[{batch_size: 4, tokens: 5000}]",
        "train.steps=0",
        "train.tokens=100000",
    )
    phases = (
        "optim.lr_phases=[{percent: 10, shape: linear, from: 0, to: 1}, {shape: cosine, to: 0}]"
    )
    given = *given, "train.sequence_length=128"
    config = load([*TINY, *given, phases, "optim.warmup_steps=0"]).config
    assert total_steps(config.train) == 10 + -(-(100000 - 5120) // 2048)
