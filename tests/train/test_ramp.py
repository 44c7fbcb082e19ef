"""Runs with a batch ramp: resume and layouts do not change the results."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.config.sections.guard import GuardConfig
from maxpipe.config.sections.train import BatchRamp, RampStage
from maxpipe.data.loader import Loader
from maxpipe.errors import ConfigError
from maxpipe.train.bad_steps import BadStepMonitor
from maxpipe.train.loop import train
from tests.train.runs import SAME, Run, Start, saved_digest, wait_for

STEPS, ROW = 24, 16
RAMP = "train.batch_ramp=[{batch_size: 2, steps: 5}, {batch_size: 4, tokens: 300}]"
"""The second stage has 5 steps of 64 tokens."""
ROWS = [2] * 5 + [4] * 5 + [8] * 14
OTHER = ("mesh.ici_stage=2", "mesh.ici_data=2", "mesh.ici_context=2", "mesh.cpu_devices=8")
STAGED = ("mesh.ici_stage=4", "mesh.ici_data=2", "mesh.cpu_devices=8", "pipeline.microbatches=4")


class Stop(Exception):
    """Simulates the death of the run."""


def recorded(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def train_run(tiny: Path, folder: Path, *overrides: str) -> dict[int, dict[str, Any]]:
    quick = "log.every=1", "log.trackers=[]", "eval.batches=0", f"run.dir={folder}"
    train(load([str(tiny), *quick, *overrides]))
    return recorded(folder / "run")


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_run(tiny, folder, *STAGED, RAMP)
    return folder / "run"


def test_batch_sizes_and_tokens_follow_batch_ramp(uninterrupted: Path) -> None:
    found = recorded(uninterrupted)
    assert list(found) == list(range(1, STEPS + 1))
    assert [each["train/batch_size"] for each in found.values()] == ROWS
    assert [each["train/tokens"] for each in found.values()] == list(np.cumsum(ROWS) * ROW)
    assert (
        found[1]["pipe/bubble_pct"] > found[6]["pipe/bubble_pct"] > found[STEPS]["pipe/bubble_pct"]
    )
    assert found[STEPS]["train/loss"] < found[1]["train/loss"] - 0.5


@pytest.mark.layouts
def test_losses_match_across_layouts(tiny: Path, uninterrupted: Path, tmp_path: Path) -> None:
    other, staged = train_run(tiny, tmp_path, *OTHER, RAMP), recorded(uninterrupted)
    for step, each in other.items():
        assert each["train/loss"] == pytest.approx(staged[step]["train/loss"], rel=1e-5)
        assert each["train/tokens"] == staged[step]["train/tokens"]


@pytest.mark.long
def test_resume_within_batch_ramp_is_bitwise_equal(
    tiny: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run crashes at a stage boundary, within a stage, and after the ramp."""
    real = Loader.batch
    for crash in (5, 8, 13):

        def batch(loader: Loader, step: int, *rows: Any, crash: int = crash) -> Any:
            if step == crash:
                raise Stop
            return real(loader, step, *rows)

        monkeypatch.setattr(Loader, "batch", batch)
        with pytest.raises(Stop):
            train_run(tiny, tmp_path, *STAGED, RAMP)
    monkeypatch.setattr(Loader, "batch", real)
    found, wanted = train_run(tiny, tmp_path, *STAGED, RAMP), recorded(uninterrupted)
    for step, each in found.items():
        for tag in ("train/loss", "train/tokens", "train/batch_size"):
            assert each[tag] == wanted[step][tag]
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "begin"),
    [(4, ("train",)), (7, ("launch", "local", "--processes", 2))],
    ids=["one process", "two processes"],
)
def test_resume_within_batch_ramp_under_another_layout(
    step: int,
    begin: tuple[object, ...],
    tiny: Path,
    uninterrupted: Path,
    start: Start,
    run: Run,
    tmp_path: Path,
) -> None:
    """Equal losses in one and in two processes show that the data is the same."""
    every = tiny, f"run.dir={tmp_path}", "log.every=1", "eval.batches=0", RAMP
    with start("train", *every, "checkpoint.every=1", "pipeline.microbatches=8") as process:
        wait_for(process, f"step {step}/")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    run(*begin, *every, "mesh.ici_stage=2", "mesh.ici_fsdp=2")
    found, wanted = recorded(tmp_path / "run"), recorded(uninterrupted)
    assert list(found) == list(wanted)
    for number, each in found.items():
        assert each["train/loss"] == pytest.approx(wanted[number]["train/loss"], rel=SAME)
        for tag in ("train/tokens", "train/batch_size"):
            assert each[tag] == wanted[number][tag]


@pytest.mark.long
def test_resume_allows_changes_to_future_ramp_stages_only(tiny: Path, tmp_path: Path) -> None:
    """The batch size of a run changes by a ramp whose first stage is the past batch size."""
    train_run(tiny, tmp_path, *OTHER, "train.steps=8", "optim.schedule=constant")
    longer = *OTHER, "train.steps=12", "optim.schedule=constant", "train.batch_size=16"
    for ramp in ("[]", "[{batch_size: 8, steps: 7}]", "[{batch_size: 4, steps: 8}]"):
        with pytest.raises(ConfigError, match="train.batch_size"):
            train_run(tiny, tmp_path, *longer, f"train.batch_ramp={ramp}")
    found = train_run(tiny, tmp_path, *longer, "train.batch_ramp=[{batch_size: 8, steps: 8}]")
    assert [found[step]["train/tokens"] for step in (8, 9, 12)] == [1024, 1280, 2048]


def test_plan_prints_batch_ramp_stages(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny), "--topology", "cpu:4", RAMP]) == 0
    shown = capsys.readouterr().out
    assert "5 steps with batches of 2 sequences, 1 microbatch: 160 tokens" in shown
    assert "14 steps with batches of 8 sequences, 4 microbatches: 1,792 tokens" in shown


@pytest.mark.long
def test_eval_on_fewer_devices_ignores_batch_ramp(uninterrupted: Path, run: Run) -> None:
    """On fewer devices, a microbatch has more sequences than the smallest batch of the ramp."""
    shown = run("eval", uninterrupted, "mesh.cpu_devices=2")
    assert "evaluating with fsdp 2" in shown and "bits per byte" in shown


@pytest.mark.parametrize(
    ("ramp", "others", "text"),
    [
        (
            "[{batch_size: 2, tokens: 40}]",
            ("train.sequence_length=0",),
            "train.sequence_length = 0",
        ),
        (
            "[{batch_size: 3, steps: 2}, {batch_size: 5, steps: 2}]",
            (),
            "6, or set pipeline.microbatches=8.",
        ),
        (
            "[{batch_size: 3, steps: 2}]",
            ("pipeline.microbatches=1",),
            "Leave 3 out, or set pipeline.micr",
        ),
        ("[{batch_size: 9, steps: 2}]", (), "Set train.batch_ramp=[] for a constant batch size."),
    ],
)
def test_invalid_batch_ramps_are_rejected(
    ramp: str, others: tuple[str, ...], text: str, tiny: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        load([str(tiny), f"train.batch_ramp={ramp}", *others])


@pytest.mark.parametrize("others", [(), ("pipeline.microbatches=1",), ("train.steps=1",)])
@pytest.mark.parametrize("ramp", ["soon", "[soon]", "['2 for x steps']"])
def test_suggested_batch_ramps_are_valid(ramp: str, others: tuple[str, ...], tiny: Path) -> None:
    """The first suggestion fits every run; the example fits a run that is long enough."""
    with pytest.raises(ConfigError) as caught:
        load([str(tiny), f"train.batch_ramp={ramp}", *others])
    (problem,) = caught.value.problems
    action = re.fullmatch(
        r'Set (train.batch_ramp=.*), or items such as "(train.batch_ramp=.*)"\.', problem.action
    )
    assert action
    assert not load([str(tiny), action[1], *others]).config.train.batch_ramp
    config = load([str(tiny), action[2], "train.steps=200"]).config
    assert [(stage.batch_size, stage.steps) for stage in config.train.batch_ramp] == [(4, 10)]


def test_sequences_done_counts_rollback_before_batch_ramp() -> None:
    """A run with batch size 8 skipped 3 batches, and has batch size 16 from batch 9."""
    others: dict[str, Any] = {"run_dir": "", "events": None, "console": None}
    loader: Any = SimpleNamespace(ramp=BatchRamp((RampStage(8, 9),), 16))
    watch = BadStepMonitor(
        GuardConfig(), offset=3, counts={"roll_backs": 1}, loader=loader, **others
    )
    assert [watch.sequences_done(step) for step in (6, 7)] == [48, 64]


def test_sequences_done_counts_skipped_batches() -> None:
    """Roll back twice, the second time to a checkpoint before the first rollback."""
    ramp = BatchRamp((RampStage(2, 5), RampStage(4, 5)), 8)
    silent: Any = SimpleNamespace(write=lambda *_, **__: None, warn=lambda _: None, ramp=ramp)
    others: dict[str, Any] = {"run_dir": "", "loader": silent, "events": silent, "console": silent}
    watch = BadStepMonitor(GuardConfig(), **others)
    assert watch.sequences_done(6) == 14
    watch.record_rollback(6, 4, 0, None)  # skips batches 4 and 5, of 2 and 4 sequences
    assert watch.sequences_done(4) == 8 and watch.sequences_done(5) == 12
    saved = watch.state_dict()
    watch.record_rollback(7, 4, 0, None)  # also skips batches 6, 7 and 8
    assert watch.sequences_done(4) == 8
    assert watch.sequences_done(5) == 12 and watch.sequences_done(6) == 20  # batches 9 and 10
    resumed = BadStepMonitor(GuardConfig(), offset=2, counts=saved, **others)
    assert resumed.sequences_done(5) == 12
