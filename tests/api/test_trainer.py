"""Own loops: their values, layouts, batches, processes and mistakes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxpipe
from maxpipe.api.batch import complete_batch
from maxpipe.cli import main
from maxpipe.config.load import from_dict, to_yaml
from maxpipe.distributed.coordinator import free_port
from maxpipe.errors import Code
from tests.api.conftest import Settings
from tests.conftest import environment_of_command
from tests.errors import assert_error, without_codes

SAME = 1e-5  # float32, relative
pytestmark = pytest.mark.usefixtures("devices")


@pytest.fixture(scope="module")
def trainer(settings: Settings, devices: list[Any]) -> Iterator[maxpipe.Trainer]:
    with maxpipe.build(settings("loop")) as built:
        yield built


def train(trainer: maxpipe.Trainer, state: Any, first: int, last: int) -> tuple[Any, list[float]]:
    losses = []
    with trainer.batches(first, last) as batches:
        for batch in batches:
            state, metrics = maxpipe.train_step(trainer, state, batch)
            losses.append(float(metrics["train/loss"]))
    return state, losses


# Values.


def test_own_loop_equals_run_of_command(
    trainer: maxpipe.Trainer, settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "run.yml"
    path.write_text(to_yaml(from_dict(settings("command"))))
    assert main(["train", str(path)]) == 0
    records = [
        json.loads(line)
        for line in (trainer.run_dir.parent / "command" / "metrics.jsonl").read_text().splitlines()
    ]
    expected = [record["train/loss"] for record in records if "train/loss" in record]
    state, losses = train(trainer, trainer.init(), 0, 6)
    assert len(expected) == 6
    np.testing.assert_allclose(losses, expected, rtol=SAME)
    found = maxpipe.evaluate(trainer, state)
    evaluated = {tag: value for record in records for tag, value in record.items() if "eval" in tag}
    assert found.keys() == evaluated.keys() == {"eval/loss", "eval/nats_per_byte"}
    np.testing.assert_allclose(found["eval/loss"], evaluated["eval/loss"], rtol=SAME)
    report = maxpipe.evaluate(trainer.run_dir.parent / "command")
    assert report is not None and "nats_per_token" in report
    np.testing.assert_allclose(report["nats_per_token"], found["eval/loss"], rtol=SAME)


def test_numpy_batches_equal_batches_of_config(trainer: maxpipe.Trainer) -> None:
    _, expected = train(trainer, trainer.init(), 0, 3)
    state, losses, metrics = trainer.init(), [], {}
    for step in range(3):
        batch = trainer.datasets.train.batch(step)
        names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
        state, metrics = maxpipe.train_step(trainer, state, {name: batch[name] for name in names})
        losses.append(float(metrics["train/loss"]))
    assert losses == expected
    assert metrics.keys() >= {"train/loss", "train/grad_norm", "train/lr"}


def test_batches_given_to_evaluate_are_weighted_by_mask(trainer: maxpipe.Trainer) -> None:
    state, batch = trainer.init(), dict(trainer.datasets.train.batch(0))
    both = [batch, batch | {"loss_mask": np.zeros((8, 16))}]
    alone = maxpipe.evaluate(trainer, state, batches=[batch])
    assert maxpipe.evaluate(trainer, state, batches=both) == alone


def test_loss_function_of_cross_entropy_equals_objective(
    trainer: maxpipe.Trainer, settings: Settings
) -> None:
    _, expected = train(trainer, trainer.init(), 0, 3)
    with maxpipe.build(settings("loss"), loss=lambda log_probs, batch: -log_probs) as own:
        _, losses = train(own, own.init(), 0, 3)
    assert losses == expected


def test_own_loss_and_optimizer_lower_own_loss(settings: Settings) -> None:
    def weighted(log_probs: jax.Array, batch: Any) -> jax.Array:
        return -jnp.where(batch["targets"] == ord("e"), 3.0, 1.0) * log_probs

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    with maxpipe.build(settings("own"), loss=weighted, optimizer=optimizer) as own:
        state, losses = train(own, own.init(), 0, 12)
        assert losses[-1] < losses[0] - 1
        saved = maxpipe.Checkpoint.save(own, state)
        again = saved.restore(own)
        _, after = train(own, state, 12, 14)
        _, restored = train(own, again, 12, 14)
        assert after == restored
        _, metrics = maxpipe.train_step(own, saved.restore(own), own.datasets.train.batch(14))
        assert "train/lr" not in metrics
    for optimizer, message in (
        (None, "belongs to an optax transformation"),
        (optax.sgd(1e-2), "must have the state arrays of"),
    ):
        other = maxpipe.build(settings("own"), optimizer=optimizer)
        with other, pytest.raises(maxpipe.ConfigError, match=message):
            saved.restore(other)
    path = own.run_dir / "config.yml"
    assert main(["train", str(path), "train.steps=15"]) == 2


def recording(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the same transformation, whose state also contains the latest gradients."""

    def init(params: Any) -> Any:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return {"gradients": zeros, "inner": transformation.init(params)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        changes, inner = transformation.update(updates, state["inner"], params)
        return changes, {"gradients": updates, "inner": inner}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_optimizer_equals_plain_optax(settings: Settings, dtype: str) -> None:
    base = settings("optax")
    values = settings(
        "optax",
        model=base["model"] | {"param_dtype": dtype, "num_heads": 2, "num_kv_heads": 2},
        mesh={"cpu_devices": 8, "ici_data": 4, "ici_fsdp": 2},
        pipeline={"microbatches": 2},
        train=base["train"] | {"batch_size": 16},
    )
    plain = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.linear_schedule(1e-2, 2e-2, 4), b2=0.999, weight_decay=0.1),
    )
    rounding = 1e-5 if dtype == "float32" else 2.0**-7
    with maxpipe.build(values, optimizer=recording(plain)) as own:
        state = own.init()
        assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(state.optimizer.trees))
        plain_state = plain.init(jax.device_get(state.params))
        for step in range(4):
            before, trees = jax.device_get((state.params, state.optimizer.trees))
            trees = {name.rpartition("_")[2]: tree for name, tree in trees.items()}
            moments = {name: trees[name] for name in ("mu", "nu")}
            plain_state = optax.tree_utils.tree_set(plain_state, **moments)
            state, _ = maxpipe.train_step(own, state, own.datasets.train.batch(step))
            trees = {name.rpartition("_")[2]: tree for name, tree in state.optimizer.trees.items()}
            gradients = jax.device_get(trees["gradients"])
            changes, new = plain.update(gradients, plain_state, before)
            # The trainer keeps the dtypes of the initial state; optax alone would widen `mu`.
            plain_state = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), new, plain_state)
            moved = optax.apply_updates(before, changes)
            mu, nu = (optax.tree_utils.tree_get(plain_state, name) for name in ("mu", "nu"))
            assert_close(trees["mu"], mu, rounding, 1e-3 * rounding)
            assert_close(trees["nu"], nu, rounding, 0)
            assert_close(state.params, moved, rounding, 2e-2 * rounding)  # learning rate 2e-2
            assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(changes)) > 5e-3
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(state.params))


def assert_close(tree: Any, expected: Any, rtol: float, atol: float) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(leaf), np.float32(wanted), rtol, atol)


class Reporting(maxpipe.Objective):
    report_names = ("share",)

    def __call__(self, scores: Any, inputs: Any) -> Any:
        return -scores[0], ()


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (5, "int"),
        (Reporting(), ["0", "share"]),
        (Reporting, "class"),
        (lambda log_probs: log_probs, "TypeError"),
        (lambda log_probs, batch: -log_probs.sum(), "[]"),
        (lambda log_probs, batch: -log_probs.T, "[16, 1]"),
        (lambda log_probs, batch: None, "None"),
        (lambda log_probs, batch: (-log_probs, ()), "tuple"),
        (lambda log_probs, batch: 0.5, "float"),
        (lambda log_probs, batch: -log_probs.astype(jnp.bfloat16), "bfloat16"),
        (lambda log_probs, batch: -log_probs.astype(jnp.int32), "int32"),
        (lambda log_probs, batch: -log_probs * batch["mask"], "KeyError"),
    ],
)
def test_loss_with_wrong_result_is_config_error(settings: Settings, loss: Any, names: str) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.build(settings("wrong"), loss=loss)
    assert_error(error.value, "build: loss", names=names, code=Code.API_LOSS)


def transform(init: Any, update: Any) -> optax.GradientTransformation:
    """Return a transformation of functions that do not have the types optax requires."""
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (5, "init"),
        (optax.adam, "init"),
        (transform(lambda params: None, lambda *_: (None, None)), "changes"),
        (transform(lambda params: None, lambda *_: 1 / 0), "ZeroDivisionError"),
        (transform(lambda params: None, lambda grads, *_: (grads, grads)), "state"),
    ],
)
def test_optimizer_with_wrong_result_is_config_error(
    settings: Settings, optimizer: Any, names: str
) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.build(settings("wrong"), optimizer=optimizer)
    assert_error(error.value, "optimizer", names=names, code=Code.API_OPTIMIZER)


# Layouts.


def test_checkpoint_restored_in_another_layout_gives_same_losses(
    trainer: maxpipe.Trainer, settings: Settings
) -> None:
    state, _ = train(trainer, trainer.init(), 0, 2)
    saved = maxpipe.Checkpoint.save(trainer, state)
    _, expected = train(trainer, state, 2, 4)
    mesh = {"cpu_devices": 8, "ici_stage": 4, "ici_fsdp": 2}
    pipeline = {"schedule": "gpipe", "microbatches": 4}
    with maxpipe.build(settings("moved", mesh=mesh, pipeline=pipeline)) as other:
        assert other.schedule.num_stages == 4
        restored = saved.restore(other)
        _, losses = train(other, restored, 2, 4)
        np.testing.assert_allclose(losses, expected, rtol=SAME)
        with pytest.raises(maxpipe.ConfigError, match="has another model, optimizer, mesh"):
            maxpipe.train_step(other, saved.restore(trainer), other.datasets.train.batch(0))


def test_used_state_is_named(trainer: maxpipe.Trainer) -> None:
    state, batch = trainer.init(), trainer.datasets.train.batch(0)
    maxpipe.train_step(trainer, state, batch)
    with pytest.raises(maxpipe.ConfigError, match="was used by an earlier train step"):
        maxpipe.train_step(trainer, state, batch)
    with pytest.raises(maxpipe.ConfigError, match="was used by an earlier train step"):
        maxpipe.evaluate(trainer, state)


# Batches.

TOKENS = np.zeros((8, 16), np.int64)
GOOD = {"tokens": TOKENS, "targets": TOKENS}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": TOKENS}, "batch: targets\n  is missing"),
        ({"tokens": TOKENS[:, :8], "targets": TOKENS}, r"tokens = \(8, 8\)\n.*\[sequences, 16\]"),
        ({"tokens": TOKENS[:3], "targets": TOKENS[:3]}, "must have 8 sequences .* multiple of 4"),
        ({"tokens": TOKENS, "targets": TOKENS - 100}, "targets = -100\n.*from 0 to 258"),
        ({"tokens": TOKENS + 259, "targets": TOKENS}, "tokens = 259\n"),
        ({"tokens": TOKENS, "targets": TOKENS * 0.5}, "targets = float64\n  must be integers"),
        ({"tokens": TOKENS, "targets": TOKENS[:4]}, r"targets = \(4, 16\)\n.*shape \[8, 16\]"),
        ({"tokens": TOKENS, "targets": TOKENS, "labels": TOKENS}, "labels\n  is not an array"),
        ({}, "batch: tokens\n  is missing"),
        (None, "batch = None\n  must be a dict"),
        ([TOKENS, TOKENS], "batch = list\n  must be a dict"),
        ({"tokens": TOKENS, "targets": [[1], [1, 2]]}, "targets\n  cannot be converted"),
        ({"tokens": TOKENS, "targets": "text"}, "targets = <U4\n  must contain numbers"),
        (GOOD | {"loss_mask": np.full((8, 16), -1.0)}, "loss_mask = -1.0\n  must be at least 0"),
        (GOOD | {"loss_mask": np.full((8, 16), np.nan)}, "loss_mask = nan\n  must be at least 0"),
        (GOOD | {"segment_ids": TOKENS - 1}, "segment_ids = -1\n  must be at least 0"),
        (GOOD | {"segment_ids": TOKENS + 0.5}, "segment_ids = float64\n  must be integers"),
        (GOOD | {"positions": TOKENS - 1}, "positions = -1\n  must be at least 0"),
    ],
)
def test_wrong_batch_names_array_and_rule(
    trainer: maxpipe.Trainer, batch: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.train_step(trainer, trainer.init(), batch)
    assert re.search(message, without_codes(error.value))


@pytest.mark.parametrize("batches", [GOOD, [], 5, iter(())])
def test_batches_that_cannot_be_evaluated_are_config_errors(
    trainer: maxpipe.Trainer, batches: Any
) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.evaluate(trainer, trainer.init(), batches=batches)
    assert_error(error.value, "evaluate: batches", code=Code.API_ARGUMENT)


def test_object_in_place_of_trainer_or_state_is_config_error(trainer: maxpipe.Trainer) -> None:
    with pytest.raises(maxpipe.ConfigError, match="train_step: trainer"):
        maxpipe.train_step(5, trainer.init(), GOOD)  # type: ignore[arg-type]
    for state in (None, 5, {}):
        with pytest.raises(maxpipe.ConfigError) as error:
            maxpipe.train_step(trainer, state, GOOD)  # type: ignore[arg-type]
        assert_error(error.value, "state", code=Code.API_STATE)


def test_missing_arrays_have_defaults(trainer: maxpipe.Trainer) -> None:
    found = complete_batch({"tokens": TOKENS[:4], "targets": TOKENS[:4]}, trainer.steps)
    assert {name: (array.shape, array.dtype.name) for name, array in found.items()} == {
        "tokens": ((4, 16), "int32"),
        "targets": ((4, 16), "int32"),
        "segment_ids": ((4, 16), "int32"),
        "positions": ((4, 16), "int32"),
        "loss_mask": ((4, 16), "float32"),
        "example_ids": ((4,), "int32"),
    }
    assert (found["positions"] == np.arange(16)).all() and found["loss_mask"].all()


# Processes.


def test_build_and_steps_leave_signal_handlers_and_run_in_thread(settings: Settings) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results: list[Any] = []

    def run() -> None:
        with maxpipe.build(settings("thread")) as own:
            state, losses = train(own, own.init(), 0, 1)
            assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
            saved = maxpipe.Checkpoint.save(own, state)
            results.extend([losses, maxpipe.generate(saved, "the", max_tokens=2)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(results) == 2
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_second_build_with_other_devices_names_key(settings: Settings) -> None:
    mesh = {"cpu_devices": 4, "ici_stage": 2, "ici_fsdp": 2}
    with pytest.raises(maxpipe.ConfigError) as caught:
        maxpipe.build(settings("devices", mesh=mesh))
    assert caught.value.problems[0].where == "mesh.cpu_devices"
    assert "start a new process" in caught.value.problems[0].action


def test_absent_platform_is_config_error(settings: Settings) -> None:
    code = (
        "import json, sys, maxpipe\n"
        "try:\n    maxpipe.build(json.load(sys.stdin))\n"
        "except maxpipe.ConfigError as error:\n    print(error)"
    )
    values = settings("tpu", runtime={"platform": "tpu", "compilation_cache": ""})
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        env=environment_of_command(),
    )
    assert ran.stdout.startswith("runtime.platform = tpu  [MP-ENV-002]\n"), ran.stderr


@pytest.mark.parametrize("objective", ["preference", "grpo", "distill"])
def test_objective_with_more_models_suggests_run_training(
    settings: Settings, objective: Any
) -> None:
    loaded = maxpipe.load_config(settings("objective"))
    train = replace(loaded.config.train, objective=objective)
    loaded = replace(loaded, config=replace(loaded.config, train=train))
    with pytest.raises(maxpipe.ConfigError, match="run_training"):
        maxpipe.build(loaded)


def test_length_is_required_by_schedule_of_learning_rate_only(settings: Settings) -> None:
    train_config = {"batch_size": 8, "sequence_length": 16}
    with pytest.raises(maxpipe.ConfigError, match="train.steps = 0"):
        maxpipe.build(settings("endless", train=train_config))
    own = maxpipe.build(settings("endless", train=train_config), optimizer=optax.sgd(0.1))
    with own, pytest.raises(maxpipe.ConfigError, match="train.steps = 0"):
        own.batches()


def test_training_config_without_training_checks_is_checked(settings: Settings) -> None:
    data = {"source": "corpus", "path": "elsewhere"}
    loaded = maxpipe.load_config(settings("unchecked", data=data))
    with pytest.raises(maxpipe.ConfigError, match="data.path = elsewhere"):
        maxpipe.run_training(loaded)


PROCESS = """
import json, sys, maxpipe
with maxpipe.build(json.loads(sys.argv[1]), f"runtime.process_id={sys.argv[2]}") as trainer:
    state = trainer.init()
    for step in range(3):
        batch = trainer.datasets.train.batch(step)
        state, metrics = maxpipe.train_step(trainer, state, batch)
        print(float(metrics["train/loss"]))
        assert not trainer.should_stop()
    found = maxpipe.evaluate(trainer, state)
    saved = maxpipe.Checkpoint.save(trainer, state, metrics=found)
    state = saved.restore(trainer)
    print(saved.step, found["eval/loss"])
"""


@pytest.mark.multihost
def test_two_processes_equal_one(trainer: maxpipe.Trainer, settings: Settings) -> None:
    state, expected = train(trainer, trainer.init(), 0, 3)
    found = maxpipe.evaluate(trainer, state)
    runtime = {"platform": "cpu", "num_processes": 2, "compilation_cache": ""}
    runtime["coordinator"] = f"127.0.0.1:{free_port()}"
    mesh = {"cpu_devices": 4, "ici_stage": 2, "ici_fsdp": 4}
    values = json.dumps(settings("processes", runtime=runtime, mesh=mesh))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, values, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of_command(),
        )
        for rank in range(2)
    ]
    for process in processes:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        numbers = [float(number) for number in out.split()]
        np.testing.assert_allclose(numbers[:3], expected, rtol=SAME)
        assert numbers[3] == 3
        np.testing.assert_allclose(numbers[4], found["eval/loss"], rtol=SAME)
