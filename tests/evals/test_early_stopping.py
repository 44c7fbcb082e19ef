"""Early stopping: a run ends once its evaluations stop improving, also after a restart."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from maxpipe.checkpoint.retention import BestMetric
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.eval import EvalConfig
from maxpipe.evals.early_stopping import EarlyStopping
from tests.train.runs import Run, events, forget_after, ledger, records, saved, saved_digest

ENOUGH = ("eval.every=2", "eval.patience=2", "eval.min_delta=9", "checkpoint.every=2")
ENOUGH += ("mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1")


def early_stopping_after(losses: list[float], facts: Any = None, **settings: Any) -> EarlyStopping:
    best = {key: settings.pop(key) for key in ("best_metric", "best_mode") if key in settings}
    config = EvalConfig(**{"every": 5, "patience": 3, **settings})
    patience = EarlyStopping(config, CheckpointConfig(**best), facts)
    for number, loss in enumerate(losses, 1):
        metric = best.get("best_metric", "eval/loss")
        patience.update(5 * number, {metric: loss} if loss is not None else {})
    return patience


def patience_state(patience: EarlyStopping) -> tuple[int, int, float | None]:
    found = patience.state_dict()["patience"]
    return found["waited"], found.get("best_step", 0), found.get("best")


def test_evaluations_without_improvement_are_counted() -> None:
    assert patience_state(early_stopping_after([3.0, 2.0, 2.0, 2.5])) == (2, 10, 2.0)
    assert patience_state(early_stopping_after([3.0, 2.0, 2.5, 1.9, 4.0])) == (1, 20, 1.9)
    assert patience_state(early_stopping_after([3.0, 2.8, 2.6, 2.4], min_delta=0.5)) == (0, 20, 2.4)
    assert (
        not early_stopping_after([3.0, 4.0, 4.0]).should_stop
        and early_stopping_after([3.0, 4.0, 4.0, 3.0]).should_stop
    )
    assert not early_stopping_after([3.0] * 9, patience=0).should_stop


def test_max_mode_counts_larger_metric_as_improvement() -> None:
    largest = {"best_metric": "eval/sums/accuracy", "best_mode": "max"}
    assert patience_state(early_stopping_after([0.2, 0.5, 0.5, 0.4], **largest)) == (2, 10, 0.5)
    assert patience_state(
        early_stopping_after([0.2, 0.5, 0.54, 0.56], min_delta=0.05, **largest)
    ) == (0, 20, 0.56)


def test_non_finite_metric_is_not_an_improvement() -> None:
    assert patience_state(early_stopping_after([math.nan, 3.0, math.nan])) == (1, 10, 3.0)
    assert patience_state(early_stopping_after([math.nan, math.inf])) == (2, 0, None)
    assert early_stopping_after([math.nan] * 3).should_stop
    assert "no evaluation returned a finite value" in early_stopping_after([math.nan] * 3).message()


def test_only_scheduled_evaluations_count_once_each() -> None:
    patience = early_stopping_after([3.0, 4.0])
    for step in (5, 10, 12):  # an earlier step, a repeated step and an unscheduled last step
        assert not patience.update(step, {"eval/loss": 5.0})
    assert patience_state(patience) == (1, 5, 3.0)
    assert (
        patience.needs_evaluation(15)
        and not patience.needs_evaluation(10)
        and not patience.needs_evaluation(12)
    )


def test_patience_count_resumes_from_saved_state() -> None:
    losses = [3.0, 2.0, 2.5, 1.9, 4.0, 1.95, 2.0]
    uninterrupted = early_stopping_after(losses)
    assert uninterrupted.should_stop
    for cut in range(len(losses) + 1):
        saved = json.loads(json.dumps(early_stopping_after(losses[:cut]).state_dict()["patience"]))
        patience = early_stopping_after([], saved)
        for number, loss in enumerate(losses[cut:], cut + 1):
            patience.update(5 * number, {"eval/loss": loss})
        assert patience.state_dict() == uninterrupted.state_dict()
    other = early_stopping_after(
        [], early_stopping_after(losses).state_dict()["patience"], best_metric="eval/nats_per_byte"
    )
    assert patience_state(other) == (0, 0, None) and not other.should_stop


def test_best_metric_reads_saved_config() -> None:
    assert BestMetric.of({}) == BestMetric() == BestMetric.of(CheckpointConfig())
    assert BestMetric.of({"best_metric": "eval/a/accuracy", "best_mode": "max"}).is_largest


@pytest.fixture(scope="module")
def stopped(tiny: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An early-stopped run and its output; tests must not modify it."""
    folder = tmp_path_factory.mktemp("stopped")
    output = run("train", tiny, f"run.dir={folder}", *ENOUGH)
    return folder / "run", output


@pytest.mark.long
def test_early_stopped_run_does_not_train_when_restarted(
    stopped: tuple[Path, str], tiny: Path, run: Run, tmp_path: Path
) -> None:
    folder, output = stopped
    assert "stopped early after step 6: eval/loss did not improve by more than 9" in output
    assert "done: 6 steps" in output and "the best value was" in output
    assert events(folder, "early_stop", "done") == [("early_stop", 6), ("done", 6)]
    [event] = ledger(folder, "early_stop")
    metrics = records(folder)
    assert event["best_step"] == 2 and event["best"] == metrics[2]["eval/loss"]
    assert saved(folder).metadata.metrics == {
        tag: value for tag, value in metrics[6].items() if tag.startswith("eval/")
    }
    copy = Path(shutil.copytree(folder, tmp_path / "again" / "run"))
    before = saved_digest(copy)
    again = run("train", tiny, f"run.dir={copy.parent}", *ENOUGH)
    assert "stopped early after step 6" in again and "nothing is left to train" in again
    assert saved_digest(copy) == before and len(ledger(copy, "early_stop")) == 1
    more = run("train", tiny, f"run.dir={copy.parent}", *ENOUGH, "eval.patience=3")
    assert "stopped early after step 8" in more


def test_resumed_run_stops_at_same_step_as_uninterrupted_run(
    stopped: tuple[Path, str], tiny: Path, run: Run, tmp_path: Path
) -> None:
    """Resume from a checkpoint saved at an evaluation step."""
    copy = Path(shutil.copytree(stopped[0], tmp_path / "copy" / "run"))
    forget_after(copy, 4)
    run("train", tiny, f"run.dir={copy.parent}", *ENOUGH)
    assert saved_digest(copy) == saved_digest(stopped[0])
    assert records(copy)[6]["eval/loss"] == records(stopped[0])[6]["eval/loss"]


@pytest.mark.long
def test_new_run_can_start_from_early_stopped_run(
    stopped: tuple[Path, str], tiny: Path, run: Run, tmp_path: Path
) -> None:
    start = f"checkpoint.restore_from={stopped[0]}@best"
    output = run("train", tiny, f"run.dir={tmp_path}", *ENOUGH, "run.name=new", start)
    assert "@best after step 6" in output
    assert "stopped early after step 10" in output and (tmp_path / "new/checkpoints").is_dir()
