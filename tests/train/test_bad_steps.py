"""Runs with bad steps: their actions, records and final state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.digests import iter_named_arrays, tree_digest
from maxpipe.checkpoint.manager import open_run
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.data.loader import Loader
from maxpipe.distributed import runtime
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.errors import DivergenceError, Preemption, ReplicaError
from maxpipe.step import build
from maxpipe.step.state import TrainState
from maxpipe.step.step import Steps
from maxpipe.telemetry import goodput
from maxpipe.train import run, set_up
from maxpipe.train.loop import train
from tests.errors import assert_error
from tests.step.test_replica_check import flipped
from tests.train.runs import Run, Start, ledger, saved, saved_steps, start_pair, wait_for_outputs

STEPS = 24


def recorded(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: line for line in lines}


class Crash(Exception):
    """Simulates the death of the process."""


class FaultyTrainer:
    """Trains in this process, on eight devices, with some batches replaced by bad ones."""

    def __init__(self, tiny: Path, folder: Path):
        self.folder = folder / "run"
        self.bad: set[int] = set()
        self.crash: int | None = None
        self.seen: list[int] = []
        self._arguments = [str(tiny), f"run.dir={folder}", "mesh.ici_stage=2", "mesh.ici_data=4"]
        self._arguments += ["mesh.cpu_devices=8", "pipeline.microbatches=2", "eval.batches=0"]
        self._arguments += ["log.every=1", "log.trackers=[]"]

    def train(self, *overrides: str) -> None:
        train(load([*self._arguments, *overrides]))

    def spoil(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def batch(loader: Loader, step: int, rows: Any = slice(None)) -> Any:
            if step == self.crash:
                raise Crash
            self.seen.append(step)
            found = real(loader, step, rows)
            if step in self.bad:
                found["loss_mask"][0, 0] = np.inf
            return found

        return batch


class CompiledOnce(Steps):
    """Steps shared by all runs of this file; their guards differ on the host only."""

    def compile_train(self) -> Any:
        return self._train

    def init(self) -> TrainState:
        return jax.device_put(self._first, self.state_sharding)

    @cached_property
    def _train(self) -> Any:
        return super().compile_train()

    @cached_property
    def _first(self) -> TrainState:
        return jax.device_get(super().init())


@pytest.fixture(scope="module")
def steps_once() -> Callable[..., Steps]:
    made: list[Steps] = []

    def steps_of(config: Config, *arguments: Any) -> Steps:
        assert not config.guard.spike_sigmas
        if not made:
            steps = build.steps_on_all_devices(config, *arguments)
            made.append(CompiledOnce(**{f.name: getattr(steps, f.name) for f in fields(steps)}))
        return made[0]

    return steps_of


@pytest.fixture
def trainer(
    tiny: Path, tmp_path: Path, steps_once: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> FaultyTrainer:
    runs = FaultyTrainer(tiny, tmp_path)
    monkeypatch.setattr(set_up, "steps_on_all_devices", steps_once)
    monkeypatch.setattr(Loader, "batch", runs.spoil(Loader.batch))
    monkeypatch.setattr(runtime, "_prepare", lambda config, cpu_devices: None)
    return runs


def is_explained(error: BaseException) -> None:
    where, rule, action = str(error).splitlines()
    assert not where.startswith(" ")
    assert rule.startswith("  ") and rule.endswith(".")
    assert action.startswith("  ") and action.endswith(".")


@pytest.mark.parametrize("every", [0, 2, 3])
def test_last_checkpoint_includes_final_evaluation_metrics(
    every: int, trainer: FaultyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is also a periodic save, which would precede the final evaluation."""

    def evaluate(training: run.Run, step: int) -> dict[str, float]:
        metrics = {"eval/loss": 1.0 + step, "eval/nats_per_byte": 1.0}
        training.validation.latest = (step, metrics)
        return metrics

    monkeypatch.setattr(run.Run, "evaluate", evaluate)
    trainer.train("train.steps=4", "checkpoint.every=2", f"eval.every={every}")
    folder = open_run(trainer.folder).durable
    metrics = {step: folder.read_metadata(step).metrics or {} for step in folder.steps()}
    evaluated = {step: found["eval/loss"] for step, found in metrics.items() if found}
    assert evaluated == ({2: 3.0, 4: 5.0} if every == 2 else {4: 5.0})


# --- stop and skip ---------------------------------------------------------------------------


@pytest.mark.fault("N1")
def test_bad_step_stops_run_and_logs_its_batch(trainer: FaultyTrainer) -> None:
    trainer.bad, short = {9}, "train.steps=12"
    with pytest.raises(DivergenceError) as caught:
        trainer.train(short)
    is_explained(caught.value)
    assert caught.value.exit_code == 2
    assert f"{trainer.folder}: step 10: loss " in str(caught.value)
    assert "guard.bad_steps=skip" in str(caught.value)
    (event,) = ledger(trainer.folder, "bad_step")
    assert (event["step"], event["batch"], event["action"]) == (10, 9, "stop")
    assert event["loss"] is None and len(event["sequences"]) == 8 and event["documents"]
    assert saved_steps(trainer.folder) == [4, 8]
    # A second start stops at the same step; with the step skipped, the run continues.
    with pytest.raises(DivergenceError):
        trainer.train(short)
    trainer.train(short, "guard.bad_steps=skip")
    assert [each["step"] for each in ledger(trainer.folder, "start")] == [0, 8, 8]
    assert recorded(trainer.folder)[12]["train/skipped"] == 1


@pytest.mark.fault("N1")
def test_skipped_steps_are_counted(trainer: FaultyTrainer) -> None:
    trainer.bad = {3, 9, 10, 13}
    trainer.train("guard.bad_steps=skip", "guard.max_bad_steps=2", "train.steps=14")
    found = recorded(trainer.folder)
    assert [found[step]["train/skipped"] for step in (3, 4, 9, 10, 11, 13, 14)] == [
        *(0, 1, 1, 2, 3, 3, 4)
    ]
    assert {step for step, each in found.items() if each["train/loss"] is None} == {4, 10, 11, 14}
    skipped = ledger(trainer.folder, "bad_step")
    assert [(each["step"], each["action"]) for each in skipped] == [
        (step, "skip") for step in (4, 10, 11, 14)
    ]
    data = saved(trainer.folder).metadata.data
    assert data["step"] == 14 and data["guard"]["skipped"] == 4


def test_resume_keeps_count_of_consecutive_bad_steps(
    trainer: FaultyTrainer, tiny: Path, tmp_path: Path
) -> None:
    """The run is interrupted between two consecutive bad steps, which together exceed the limit."""
    trainer.bad = {3, 7, 8}
    limits = ("guard.bad_steps=skip", "guard.max_bad_steps=1")
    with pytest.raises(DivergenceError, match="is the last of 2 consecutive bad steps"):
        trainer.train(*limits)
    trainer.crash = 8
    trainer.folder = tmp_path / "again" / "run"
    with pytest.raises(Crash):
        trainer.train(*limits, f"run.dir={tmp_path / 'again'}")
    trainer.crash = None
    with pytest.raises(DivergenceError, match="is the last of 2 consecutive bad steps"):
        trainer.train(*limits, f"run.dir={tmp_path / 'again'}")
    assert [each["step"] for each in ledger(trainer.folder, "bad_step")] == [4, 8, 9]
    assert tree_digest(saved(trainer.folder, 8).state) == tree_digest(
        saved(tmp_path / "run", 8).state
    )
    assert saved(trainer.folder, 8).metadata.data == saved(tmp_path / "run", 8).metadata.data


@pytest.mark.fault("N2")
def test_too_many_bad_steps_stop_run_with_finite_parameters(trainer: FaultyTrainer) -> None:
    trainer.bad = set(range(6, 100))
    with pytest.raises(DivergenceError) as caught:
        trainer.train("guard.bad_steps=skip", "guard.max_bad_steps=3", "checkpoint.every=3")
    is_explained(caught.value)
    assert "step 10: " in str(caught.value) and "allows 3" in str(caught.value)
    actions = [each["action"] for each in ledger(trainer.folder, "bad_step")]
    assert actions == ["skip", "skip", "skip", "stop"]
    last = saved(trainer.folder, 9)
    assert all(np.isfinite(array).all() for _, array in iter_named_arrays(last.state))
    good = saved(trainer.folder, 6).state
    assert tree_digest(last.state["params"]) == tree_digest(good["params"])
    assert tree_digest(last.state["optimizer"]) == tree_digest(good["optimizer"])


# --- rollback --------------------------------------------------------------------------------

BACK = ("guard.bad_steps=rollback",)


@pytest.mark.fault("N3")
def test_rollback_restores_checkpoint_and_skips_bad_batch(trainer: FaultyTrainer) -> None:
    trainer.bad, last = {9, 17}, 17
    trainer.train(*BACK, f"train.steps={last}")
    rolled = ledger(trainer.folder, "bad_step", "rollback")
    # Batches 8 and 9 are skipped, so step n uses batch n + 1 until the second rollback.
    assert [(each["event"], each["step"], each.get("to")) for each in rolled] == [
        ("bad_step", 10, None),
        ("rollback", 10, 8),
        ("bad_step", 16, None),
        ("rollback", 16, 12),
    ]
    assert [each["batch"] for each in rolled if "batch" in each] == [9, 17]
    found = recorded(trainer.folder)
    assert list(found) == list(range(1, last + 1))
    assert all(np.isfinite(each["train/loss"]) for each in found.values())
    spent = goodput.read_goodput(trainer.folder).seconds
    assert spent["redone"] > 0 and spent["restore"] > 0
    data = saved(trainer.folder).metadata.data
    assert data["step"] == last + 2 + 4
    assert data["guard"] == {
        **{"skipped": 0, "spikes": 0, "recent": [[], []]},
        **{"roll_backs": 2, "in_row": 0},
    }


def test_rollback_records_layer_statistics_of_repeated_steps_once(trainer: FaultyTrainer) -> None:
    trainer.bad, last = {9}, 12
    trainer.train(*BACK, f"train.steps={last}", "layer_stats.every=2")
    lines = (trainer.folder / "layers.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["step"] for each in found] == [2, 4, 6, 8, 10, 12]
    assert all(None not in each["values"]["grad_norm/mlp.up"] for each in found)


def test_skipped_steps_are_recorded_without_update(trainer: FaultyTrainer) -> None:
    """The gradients of a bad step are null, and its updates are 0."""
    trainer.bad = {3}
    trainer.train("guard.bad_steps=skip", "train.steps=6", "layer_stats.every=2")
    lines = (trainer.folder / "layers.jsonl").read_text().splitlines()
    found = {each["step"]: each["values"] for each in map(json.loads, lines)}
    assert found[4]["grad_norm/mlp.up"] == [None] * 4
    assert found[4]["update_norm/mlp.up"] == [0.0] * 4
    assert min(found[6]["update_norm/mlp.up"]) > 0


@pytest.mark.long
def test_resume_after_rollback_is_bitwise_equal(trainer: FaultyTrainer, tmp_path: Path) -> None:
    """The run crashes before and after its first save after a rollback, and again later."""
    trainer.bad = {9, 17}
    for crash in (11, 14, 20):
        trainer.crash = crash
        with pytest.raises(Crash):
            trainer.train(*BACK)
    trainer.crash = None
    trainer.train(*BACK)
    assert [each["to"] for each in ledger(trainer.folder, "rollback")] == [8, 8, 12, 12]
    uninterrupted = tmp_path / "uninterrupted"
    trainer.train(*BACK, f"run.dir={uninterrupted}")
    found, wanted = saved(trainer.folder), saved(uninterrupted / "run")
    assert tree_digest(found.state) == tree_digest(wanted.state)
    assert found.metadata.data == wanted.metadata.data


def test_stop_request_at_bad_step_rolls_back_before_saving(
    trainer: FaultyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.bad = {9}
    asked = iter([False] * 10 + [True] * 2)
    monkeypatch.setattr(ControlChannel, "should_stop", lambda self: next(asked))
    with pytest.raises(Preemption, match="stopped after step 8 of 24"):
        trainer.train(*BACK)
    assert saved_steps(trainer.folder) == [4, 8]
    assert saved(trainer.folder, 8).metadata.data["step"] == 8


def test_rollback_without_checkpoints_restarts_from_step_0(trainer: FaultyTrainer) -> None:
    trainer.bad = {2}
    trainer.train(*BACK, "checkpoint.every=0", "train.steps=6")
    assert [each["to"] for each in ledger(trainer.folder, "rollback")] == [0]
    assert saved(trainer.folder).metadata.data["step"] == 6 + 3
    assert int(saved(trainer.folder).state["step"]) == 6


@pytest.mark.fault("N3")
def test_run_stops_after_max_rollbacks(trainer: FaultyTrainer) -> None:
    trainer.bad = set(range(5, 100))
    with pytest.raises(DivergenceError) as caught:
        trainer.train(*BACK, "guard.max_rollbacks=2")
    is_explained(caught.value)
    facts = ["rollback number 3", "guard.max_rollbacks allows 2"]
    assert_error(caught.value, trainer.folder, names=facts, suggests="guard.max_rollbacks=5")
    assert [each["to"] for each in ledger(trainer.folder, "rollback")] == [4, 4]
    batches = [each["batch"] for each in ledger(trainer.folder, "bad_step")]
    assert batches == [5, 6, 7]


# --- replicas --------------------------------------------------------------------------------


@pytest.mark.fault("N5")
def test_replica_mismatch_stops_run_before_saving(
    trainer: FaultyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_train = CompiledOnce.compile_train

    def faulty(steps: CompiledOnce) -> Any:
        run = compile_train(steps)

        def step(state: Any, batch: Any) -> Any:
            state, metrics = run(state, batch)
            if int(state.step) == 11:
                scale = flipped(state.params["final_norm"]["scale"], device=5, index=3, bit=2)
                state = state._replace(params=state.params | {"final_norm": {"scale": scale}})
            return state, metrics

        step.memory_analysis = run.memory_analysis  # type: ignore[attr-defined]
        return step

    trainer.train("guard.replica_check_every=3", "train.steps=4")
    monkeypatch.setattr(CompiledOnce, "compile_train", faulty)
    with pytest.raises(ReplicaError) as caught:
        trainer.train("guard.replica_check_every=100")
    is_explained(caught.value)
    assert caught.value.exit_code == 74
    assert "step 12: params." in str(caught.value)
    (event,) = ledger(trainer.folder, "replicas_differ")
    assert event["step"] == 12
    assert any(
        "params.final_norm.scale on device 5 (cpu, process 0)" in name for name in event["arrays"]
    )
    assert saved_steps(trainer.folder) == [4, 8]


# --- the command -----------------------------------------------------------------------------

ALONE = ("mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1")


@pytest.mark.long
def test_diverging_run_stops_with_finite_checkpoint(tiny: Path, run: Run, tmp_path: Path) -> None:
    arguments = (*ALONE, "optim.learning_rate=1e30", "checkpoint.every=1", "eval.batches=0")
    arguments += ("guard.bad_steps=skip", "guard.max_bad_steps=2", f"run.dir={tmp_path}")
    output = run("train", tiny, *arguments, code=2)
    assert "Traceback" not in output
    where, rule, action = output.splitlines()[-3:]
    assert where.startswith(f"{tmp_path / 'run'}: step ") and "gradient norm" in where
    assert rule.startswith("  ") and "guard." in rule
    assert "optim.learning_rate" in action
    with open_run(tmp_path / "run") as checkpoints:
        state = checkpoints.restore(checkpoints.steps()[-1]).state
    assert all(np.isfinite(array).all() for _, array in iter_named_arrays(state))


@pytest.mark.long
@pytest.mark.fault("N3")
def test_garbage_document_triggers_spike_rollback(tiny: Path, run: Run, tmp_path: Path) -> None:
    """One short document of random characters among documents of three letters."""
    chance = random.Random(0)
    documents = ["".join(chance.choices("ab ", k=300)) for _ in range(20)]
    documents[7] = "".join(chr(chance.randint(0x4E00, 0x9FFF)) for _ in range(9))
    text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (tmp_path / "documents.jsonl").write_text(text)
    arguments = ("data.source=jsonl", f"data.path={tmp_path}/documents.jsonl", "log.every=1")
    arguments += ("train.steps=48", "run.seed=6", "data.validation_fraction=0", "eval.batches=0")
    arguments += ("guard.spike_sigmas=6", "guard.spike_window=16", "guard.on_spike=rollback")
    run("train", tiny, *ALONE, *arguments, f"run.dir={tmp_path}")
    found = ledger(tmp_path / "run", "spike")
    assert [(each["batch"], each["action"]) for each in found] == [
        (39, "rollback"),
        (43, "rollback"),
    ]
    assert all(7 in each["documents"] for each in found)
    assert len(ledger(tmp_path / "run", "rollback")) == 2
    last = recorded(tmp_path / "run")[48]
    assert last["train/loss"] < 1.3 and last["train/skipped"] == 0


@pytest.mark.multihost
@pytest.mark.fault("N4")
@pytest.mark.faults
def test_two_processes_roll_back_and_stop_at_same_step(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    """Both processes roll back once and then stop."""
    arguments = (tiny, "mesh.ici_stage=4", "mesh.ici_fsdp=2", "optim.learning_rate=1e30")
    arguments += ("guard.bad_steps=rollback", "guard.max_rollbacks=1", "checkpoint.every=4")
    with start_pair(start, *arguments, "eval.batches=0", f"run.dir={tmp_path}") as processes:
        outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    for output in outputs:
        assert "Traceback" not in output
        assert "requires rollback number 2; guard.max_rollbacks allows 1" in output
    assert len({output.splitlines()[-3] for output in outputs}) == 1
    (back,) = ledger(tmp_path / "run", "rollback")
    bad = ledger(tmp_path / "run", "bad_step")
    assert bad[0]["step"] == back["step"]
    assert [each["action"] for each in bad] == ["rollback", "stop"], "the stop is recorded"
