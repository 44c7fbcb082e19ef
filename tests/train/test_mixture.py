"""Runs on a data mixture: losses and tokens of each source, across layouts."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.commands.data_inspect import open_datasets
from maxpipe.config.load import load
from maxpipe.evals.evaluate import SourceSums, evaluate
from maxpipe.step.step import BY_SOURCE
from tests.train.runs import (
    SAME,
    Run,
    Start,
    forget_after,
    is_explained,
    ledger,
    records,
    saved_steps,
    start_pair,
    wait_for_outputs,
)

NAMES = ("code", "rare", "web")
WEIGHTS = {"code": 3, "rare": 1, "web": 12}


@pytest.fixture(scope="module")
def mixed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run on three sources with different letters."""
    root, words = tmp_path_factory.mktemp("mixed"), random.Random(1)
    given = [str(tiny), "data.source=corpus", "data.path=", "log.every=1", "train.batch_size=16"]
    for number, name in enumerate(NAMES):
        (root / name).mkdir()
        for i in range(12 + 7 * number):
            letters = "etaoin shrdlu"[4 * number :]
            text = "".join(words.choices(letters, k=words.randint(20, 300)))
            (root / name / f"{i}.txt").write_text(text)
        section = f"data.mixture.{name}"
        given += [f"{section}.source=text", f"{section}.path={root / name}"]
        given.append(f"{section}.weight={WEIGHTS[name]}")
    return given


@pytest.fixture(scope="module")
def uninterrupted(mixed: list[str], run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run, with its output in `output.txt`."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = run("train", *mixed, f"run.dir={folder}")
    (folder / "run" / "output.txt").write_text(output)
    return folder / "run"


def test_source_losses_and_tokens_sum_to_totals(uninterrupted: Path) -> None:
    read: dict[str, set[float]] = {name: set() for name in NAMES}
    for step, record in records(uninterrupted).items():
        targets = {name: record[f"source/{name}/targets"] for name in NAMES}
        losses = {name: record.get(f"source/{name}/loss", 0.0) for name in NAMES}
        total = sum(losses[name] * targets[name] for name in NAMES)
        assert total / sum(targets.values()) == pytest.approx(record["train/loss"], rel=SAME)
        tokens = {name: record[f"source/{name}/tokens"] for name in NAMES}
        assert sum(tokens.values()) == record["train/tokens"] == step * 16 * 16
        assert all((f"source/{name}/loss" in record) == (targets[name] > 0) for name in NAMES)
        assert "train/epochs" not in record and not set(BY_SOURCE) & set(record)
        for name in NAMES:
            read[name].add(tokens[name])
    assert all(len(each) > 5 for each in read.values())
    # The sources have different letters, so no two losses are equal.
    last = records(uninterrupted)[24]
    assert len({round(last[f"source/{name}/eval_loss"], 3) for name in NAMES}) == 3
    for name in NAMES:
        share = last[f"source/{name}/tokens"] / last["train/tokens"]
        assert share == pytest.approx(WEIGHTS[name] / 16, abs=0.1)


def test_tensorboard_and_console_show_source_metrics(uninterrupted: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(uninterrupted / "tensorboard"))
    reader.Reload()
    for name in NAMES:
        wanted = {
            step: record[f"source/{name}/loss"]
            for step, record in records(uninterrupted).items()
            if f"source/{name}/loss" in record
        }
        found = {event.step: event.value for event in reader.Scalars(f"source/{name}/loss")}
        assert found == pytest.approx(wanted)
    output = (uninterrupted / "output.txt").read_text()
    assert all(f"{name:4}  " in output for name in NAMES) and "epochs of" in output


@pytest.mark.parametrize(
    "layout",
    [
        "mesh.ici_stage=2 mesh.ici_fsdp=2 pipeline.repeats=2 pipeline.schedule=interleaved "
        "pipeline.microbatches=2",
        "mesh.ici_stage=1 mesh.ici_data=2 mesh.ici_context=2 pipeline.microbatches=1",
    ],
)
@pytest.mark.layouts
def test_source_metrics_match_across_layouts(
    layout: str, uninterrupted: Path, mixed: list[str], run: Run, tmp_path: Path
) -> None:
    run("train", *mixed, *layout.split(), f"run.dir={tmp_path}")
    found, wanted = records(tmp_path / "run"), records(uninterrupted)
    for step, record in wanted.items():
        for tag, value in record.items():
            if tag.startswith(("source/", "train/loss", "eval/")):
                assert found[step][tag] == pytest.approx(value, rel=SAME), (step, tag)


@pytest.mark.long
def test_eval_prints_source_losses(uninterrupted: Path, run: Run) -> None:
    output = run("eval", uninterrupted, "eval.batches=4")
    record = records(uninterrupted)[24]
    for name in NAMES:
        assert f"of {name}  {record[f'source/{name}/eval_loss']:.6f}" in output


@pytest.mark.long
def test_run_stops_at_end_of_data(
    uninterrupted: Path, mixed: list[str], run: Run, tmp_path: Path
) -> None:
    """The run evaluates and saves; the same command has nothing to do; more epochs resume it."""
    given = [*mixed, "train.steps=1000", "eval.every=0", f"run.dir={tmp_path}", "data.end=stop"]
    output = " ".join(run("train", *given).split())
    folder = tmp_path / "run"
    [last] = [each["step"] for each in ledger(folder, "done")]
    assert 24 < last < 1000 and saved_steps(folder)[-1] == last
    assert f"ends at step {last} of 1000, and the run stops there (data.end=stop)" in output
    assert f"done: {last} steps" in output and "all documents were read" in output
    record = records(folder)[last]
    assert "eval/loss" in record
    for name in NAMES:
        assert record[f"source/{name}/epochs"] == 1
    again = run("train", *given)
    assert f"all {last} steps are done" in again and saved_steps(folder)[-1] == last
    refused = run("train", *given[:-1], "data.end=fail", "run.name=other", code=2)
    assert "data.end" in refused and "has documents for" in refused
    is_explained(refused)
    more = [f"data.mixture.{name}.epochs=1.5" for name in NAMES]
    more += [f"data.mixture.{name}.weight=0" for name in NAMES]
    run("train", *given, *more)
    [*_, end] = records(folder).items()
    assert all(1.4 < end[1][f"source/{name}/epochs"] < 1.6 for name in NAMES) and end[0] > last


@pytest.mark.long
def test_single_source_repeats_or_stops_at_end_of_data(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    given = ["train", tiny, "train.steps=200", f"run.dir={tmp_path}", "log.every=1"]
    run(*given, "data.end=stop", "checkpoint.every=0")
    folder = tmp_path / "run"
    [last] = [each["step"] for each in ledger(folder, "done")]
    epochs = {step: record["train/epochs"] for step, record in records(folder).items()}
    assert list(epochs) == list(range(1, last + 1)) and epochs[last] == 1 and last < 200
    run(*given, "data.end=repeat", f"train.steps={last + 9}", "run.name=again")
    assert records(tmp_path / "again")[last + 9]["train/epochs"] > 1


@pytest.mark.long
def test_resume_keeps_or_changes_mixture_weights(
    uninterrupted: Path, mixed: list[str], run: Run, tmp_path: Path
) -> None:
    """Equal weights give bitwise equal losses; with others, no sample is lost or repeated."""
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    forget_after(folder, 12)
    given = ["train", *mixed, f"run.dir={tmp_path}"]
    assert "mixture weights" not in run(*given)
    of_losses = ("source/", "train/loss", "eval/")
    found, wanted = records(folder), records(uninterrupted)
    for step, record in wanted.items():
        for tag, value in record.items():
            if tag.startswith(of_losses):
                assert found[step][tag] == value, (step, tag)
    forget_after(folder, 12)
    assert "the mixture weights change at step 13" in run(*given, "data.mixture.rare.weight=20")

    def rows(step: int, of: Path) -> list[tuple[str, int]]:
        report = json.loads(run("data", "mixture", of, "--step", step, "--json"))
        return [(row["source"], row["sequence"]) for row in report["step"]["rows"]]

    assert rows(12, folder) == rows(12, uninterrupted) and rows(13, folder) != rows(
        13, uninterrupted
    )
    report = json.loads(run("data", "mixture", folder, "--json"))
    assert [stage["first_step"] for stage in report["stages"]] == [1, 13]
    assert report["stages"][1]["shares"]["rare"] == pytest.approx(20 / 35, abs=1e-4)
    last = records(folder)[24]
    for each in report["sources"]:
        assert each["samples"] * 16 == last[f"source/{each['source']}/tokens"]
    read = Counter(place for step in range(1, 25) for place in rows_of(folder, step))
    for each in report["sources"]:
        mine = [read[each["source"], number] for number in range(each["sequences"])]
        assert sum(mine) == each["samples"] and max(mine) - min(mine) <= 1


def rows_of(folder: Path, step: int) -> list[tuple[str, int]]:
    """Return source and index of the sequences in a step of a run."""
    datasets = open_datasets(load([str(folder / "config.yml")]).config, str(folder))
    return [(row.source, row.sequence) for row in datasets.train.sequence_origins(step - 1)]


@pytest.mark.long
def test_two_processes_match_one_process(
    uninterrupted: Path, mixed: list[str], start: Start, tmp_path: Path
) -> None:
    given = (*mixed, "mesh.cpu_devices=2", f"run.dir={tmp_path}")
    with start_pair(start, *given) as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    found, wanted = records(tmp_path / "run"), records(uninterrupted)
    for step, record in wanted.items():
        for name in NAMES:
            assert found[step][f"source/{name}/tokens"] == record[f"source/{name}/tokens"]
            tag = f"source/{name}/loss"
            assert found[step].get(tag, -1) == pytest.approx(record.get(tag, -1), rel=SAME)


def test_source_sums_reset_after_each_record() -> None:
    """A source without targets has no loss, and a NaN does not persist."""
    sums = SourceSums(["a", "b"])
    nats, targets = BY_SOURCE
    sums.add_step({nats: [6.0, 0.0], targets: [2.0, 0.0]})
    sums.add_step({nats: [3.0, float("nan")], targets: [1.0, 5.0]})
    assert sums.take_metrics() == {"source/a/targets": 3, "source/a/loss": 3, "source/b/targets": 0}
    assert sums.take_metrics() == {"source/a/targets": 0, "source/b/targets": 0}
    sums.add_step({nats: [1.0, 8.0], targets: [1.0, 4.0]})
    assert sums.take_metrics()["source/b/loss"] == 2
    assert SourceSums([]).take_metrics() == {}


def test_evaluate_returns_source_metrics() -> None:
    def step(_: None, batch: list[float]) -> dict[str, Any]:
        return {name: np.array(batch) * factor for name, factor in FACTORS.items()}

    found = evaluate(step, None, [[1.0, 0.0], [3.0, 0.0]], sources=["a", "b"])
    assert found is not None
    wanted = {"source/a/eval_loss": 2.0, "source/a/eval_nats_per_byte": 0.5}
    assert found.metrics == {"eval/loss": 2.0, "eval/nats_per_byte": 0.5, **wanted}
    assert found.targets == 4 and found.by_source["b"].targets == 0


FACTORS = {"loss": 2.0, "targets": 1.0, "bytes": 4.0}
