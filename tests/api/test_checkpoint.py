"""Checkpoints of custom loops: lists, metrics, and use by the commands."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import maxpipe
from maxpipe.checkpoint.folder import CheckpointFolder
from maxpipe.cli import main
from maxpipe.config import plugins
from maxpipe.errors import Code
from tests.api.conftest import Settings
from tests.errors import assert_error, raises, without_codes

SAVED = Code.API_SAVED
pytestmark = pytest.mark.usefixtures("devices")


@pytest.fixture(scope="module")
def trainer(settings: Settings, devices: list[Any]) -> Iterator[maxpipe.Trainer]:
    with maxpipe.build(
        settings("saved", train={"steps": 4, "batch_size": 8, "sequence_length": 16})
    ) as built:
        yield built


@pytest.fixture(scope="module")
def checkpoints(trainer: maxpipe.Trainer) -> list[maxpipe.Checkpoint]:
    """Checkpoints of steps 1 to 3. Step 2 has the smallest loss, step 3 the largest accuracy."""
    assert maxpipe.Checkpoint.newest(trainer) is None and not maxpipe.Checkpoint.list(trainer)
    state, saved = trainer.init(), []
    values = [(0.3, 0.1), (0.2, 0.2), (0.4, 0.3)]
    with trainer.batches(0, 3) as batches:
        for batch, (loss, accuracy) in zip(batches, values, strict=True):
            state, _ = maxpipe.train_step(trainer, state, batch)
            metrics = {"eval/loss": loss, "eval/quiz/accuracy": accuracy}
            extra = {"position": int(state.step)}
            saved.append(maxpipe.Checkpoint.save(trainer, state, metrics=metrics, extra=extra))
    return saved


def test_list_newest_and_best_describe_checkpoints(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    listed = maxpipe.Checkpoint.list(trainer.run_dir)
    assert list(listed) == checkpoints
    assert [each.step for each in listed] == [1, 2, 3]
    assert [each.extra["position"] for each in listed] == [1, 2, 3]
    assert listed[0].config["train"]["steps"] == 4
    newest = maxpipe.Checkpoint.newest(trainer)
    assert newest is not None and newest == checkpoints[-1] and Path(newest.path).is_dir()
    assert maxpipe.Checkpoint.best(trainer).step == 2
    assert maxpipe.Checkpoint.best(trainer, "eval/quiz/accuracy").step == 3
    assert maxpipe.Checkpoint.best(trainer, "eval/quiz/accuracy", "min").step == 1
    assert maxpipe.Checkpoint.open(f"{trainer.run_dir}@best").step == 2
    assert maxpipe.Checkpoint.open(checkpoints[0].path) == checkpoints[0]


def test_unknown_run_step_and_metric_are_config_errors(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    with pytest.raises(maxpipe.ConfigError, match="is not a run"):
        maxpipe.Checkpoint.list("no-such-run")
    with pytest.raises(maxpipe.ConfigError, match="saved steps: 1, 2, 3"):
        maxpipe.Checkpoint.open(f"{trainer.run_dir}@7")
    with pytest.raises(maxpipe.ConfigError, match="has no checkpoint with metric eval/los"):
        maxpipe.Checkpoint.best(trainer, "eval/los")


def test_saving_an_earlier_step_is_storage_error(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    with pytest.raises(maxpipe.StorageError, match="already a checkpoint for a later step, 3"):
        maxpipe.Checkpoint.save(trainer, trainer.init())


def test_saving_a_saved_step_again_is_config_error_unless_nothing_differs(
    settings: Settings,
) -> None:
    with maxpipe.build(settings("twice")) as trainer:
        state, save = trainer.init(), maxpipe.Checkpoint.save
        first = save(trainer, state, metrics={"eval/loss": float("nan")}, extra={"row": 3})
        again = save(trainer, state, metrics={"eval/loss": float("nan")}, extra={"row": 3})
        assert again.saved == first.saved
        restored, metrics = first.restore(trainer), {"eval/loss": float("nan")}
        assert save(trainer, restored, metrics=metrics, extra={"row": 3}).step == 0
        for other, more in (
            (restored, {}),
            (restored, {"metrics": {"eval/loss": 1.0}, "extra": {"row": 3}}),
            (restored, {"metrics": {"eval/loss": float("nan")}, "extra": {"row": 4}}),
            (trainer.init(), {"metrics": {"eval/loss": float("nan")}, "extra": {"row": 3}}),
        ):
            with pytest.raises(maxpipe.ConfigError) as error:
                save(trainer, other, **more)
            assert_error(
                error.value, value="step 0", names=[first.path], suggests="run.name", code=SAVED
            )
        shutil.rmtree(first.path)  # the suggested action
        assert save(trainer, restored, extra={"row": 4}).extra == {"row": 4}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"extra": {"rows": (1, 2)}}, "extra"),
        ({"extra": {"row": np.int64(3)}}, "extra"),
        ({"extra": {3: "row"}}, "extra"),
        ({"extra": {"loss": float("nan")}}, "extra"),
        ({"extra": 5}, "extra"),
        ({"metrics": 5}, "metrics"),
        ({"metrics": {"eval/loss": float("inf")}}, "metrics"),
        ({"metrics": {"eval/loss": "1"}}, "metrics"),
        ({"metrics": {"eval/loss": True}}, "metrics"),
        ({"metrics": {5: 1.0}}, "metrics"),
    ],
)
def test_values_that_a_checkpoint_cannot_store_are_config_errors(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint], more: dict[str, Any], key: str
) -> None:
    state = checkpoints[-1].restore(trainer)
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.Checkpoint.save(trainer, state, **more)
    assert_error(error.value, f"Checkpoint.save: {key}", code=Code.API_ARGUMENT)


@pytest.mark.parametrize("name", ["list", "newest", "best", "open"])
def test_run_that_is_no_path_is_config_error(name: str) -> None:
    for run in (5, None, b"run"):
        with pytest.raises(maxpipe.ConfigError) as error:
            getattr(maxpipe.Checkpoint, name)(run)
        assert_error(error.value, "address" if name == "open" else "run", code=Code.API_ARGUMENT)


def test_other_optimizer_suggests_address_of_checkpoint(
    settings: Settings, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    address = checkpoints[-1].address
    with maxpipe.build(settings("other"), "optim.name=lion") as other:
        with pytest.raises(maxpipe.ConfigError) as error:
            checkpoints[-1].restore(other)
        problem = assert_error(
            error.value,
            "optim.name",
            "lion",
            suggests=f"checkpoint.restore_from={address}",
            code=Code.CKPT_RESUME,
        )
        assert "run.name" not in problem.action  # the run is new already
    with maxpipe.build(
        settings("other"), "optim.name=lion", f"checkpoint.restore_from={address}"
    ) as other:
        assert int(other.init().step) == 0


def test_restore_and_save_without_trainer_are_config_errors(
    checkpoints: list[maxpipe.Checkpoint],
) -> None:
    state: Any = None
    for call in (checkpoints[-1].restore, lambda each: maxpipe.Checkpoint.save(each, state)):
        with pytest.raises(maxpipe.ConfigError) as error:
            call(None)  # type: ignore[arg-type]
        assert_error(error.value, "trainer", suggests="maxpipe.build", code=Code.API_ARGUMENT)


def test_restored_state_is_bitwise_equal(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    first, second = (checkpoints[-1].restore(trainer) for _ in range(2))
    batch = trainer.datasets.train.batch(3)
    first, _ = maxpipe.train_step(trainer, first, batch)
    second, _ = maxpipe.train_step(trainer, second, batch)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, second))


def test_another_model_is_rejected(
    settings: Settings, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    values = settings("wide")
    values["model"] = values["model"] | {"d_mlp": 64}
    with maxpipe.build(values) as wide, pytest.raises(maxpipe.ConfigError, match="model.d_mlp"):
        checkpoints[0].restore(wide)


def test_generation_with_state_equals_generation_with_checkpoint(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    state = checkpoints[-1].restore(trainer)
    prompts = ["the ", "rain"]
    texts = []
    kept = maxpipe.generate(
        trainer, prompts, state=state, max_tokens=6, temperature=0, on_text=texts.append
    )
    loaded = maxpipe.generate(checkpoints[-1], prompts, max_tokens=6, temperature=0)
    assert [each.tokens for each in kept] == [each.tokens for each in loaded]
    assert [each.prompt.text for each in kept] == prompts and not texts
    (one,) = maxpipe.generate(
        trainer, "the ", state=state, max_tokens=6, temperature=0, on_text=texts.append
    )
    assert "".join(texts) == one.text and one.tokens == kept[0].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "generate: temperature = -1.0\n  must be at least 0"),
        ({"top_p": 0.0}, "generate: top_p = 0.0\n"),
        ({"temperature": 0, "top_k": 3}, "has no effect with temperature 0"),
        ({"max_tokens": 0}, "generate: max_tokens = 0\n"),
        ({"chat": True}, "generate: chat\n  requires a chat template"),
        ({"temperature": "x"}, "generate: temperature = 'x' .str.\n  must be a number"),
        ({"max_tokens": 2.5}, "generate: max_tokens = 2.5 .float.\n  must be an integer"),
        ({"seed": None}, "generate: seed = None\n  must be an integer"),
        ({"stop": 5}, "generate: stop = 5"),
        ({"stop": [5]}, "generate: stop = .5. .list.\n  must be strings"),
        ({"overrides": "eval.batches=1"}, "must be a list of overrides"),
        ({"overrides": 5}, "must be a list of overrides"),
        ({"prompts": None}, "generate: prompts = None"),
        ({"prompts": 5}, "generate: prompts = 5"),
        ({"prompts": [5]}, r"generate: prompts\[0\] = 5"),
        ({"prompts": b"a"}, "generate: prompts = b'a'"),
        ({"prompts": {"a": 1}}, "generate: prompts = "),
        ({"model": 5}, "model = 5"),
    ],
)
def test_wrong_generation_option_is_config_error(
    checkpoints: list[maxpipe.Checkpoint], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(maxpipe.ConfigError) as error:
        maxpipe.generate(**({"model": checkpoints[0], "prompts": "the"} | options))
    assert re.search(message, without_codes(error.value))


def test_trainer_without_state_is_config_error(trainer: maxpipe.Trainer) -> None:
    with pytest.raises(maxpipe.ConfigError, match="evaluate: state"):
        maxpipe.evaluate(trainer)  # type: ignore[call-overload]
    with pytest.raises(maxpipe.ConfigError, match="generate: state"):
        maxpipe.generate(trainer, "the")


def test_argument_without_effect_is_config_error(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    evaluate: Any = maxpipe.evaluate
    state = trainer.init()
    calls: list[tuple[str, Any]] = [
        ("overrides", lambda: evaluate(trainer, state, overrides=["eval.batches=1"])),
        ("data", lambda: evaluate(trainer, state, data="a.txt")),
        ("split", lambda: evaluate(trainer, state, split="train")),
        ("average", lambda: evaluate(trainer, state, average=True)),
        ("state", lambda: evaluate(checkpoints[0], state)),
        ("batches", lambda: evaluate(checkpoints[0], batches=[])),
        ("average", lambda: maxpipe.generate(trainer, "a", state=state, average=True)),
        ("overrides", lambda: maxpipe.generate(trainer, "a", state=state, overrides=["a.b=1"])),
        ("state", lambda: maxpipe.generate(checkpoints[0], "a", state=state)),
    ]
    for name, call in calls:
        with raises(maxpipe.ConfigError, name, suggests=name, code=Code.API_ARGUMENT):
            call()


def test_evaluate_reads_other_documents(
    checkpoints: list[maxpipe.Checkpoint], tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("the rain in spain " * 20)
    report = maxpipe.evaluate(checkpoints[-1], data=tmp_path / "other.txt")
    assert report is not None and report["split"] == "all" and report["step"] == 3
    assert report["source"] == "text"
    overrides = [f"data.path={tmp_path}", "data.source=text"]
    with pytest.raises(maxpipe.ConfigError, match="evaluate: data = .*\n  conflicts with"):
        maxpipe.evaluate(checkpoints[-1], overrides=overrides, data=tmp_path / "other.txt")


def test_command_resumes_own_loop(
    trainer: maxpipe.Trainer, checkpoints: list[maxpipe.Checkpoint]
) -> None:
    state = checkpoints[-1].restore(trainer)
    state, metrics = maxpipe.train_step(trainer, state, trainer.datasets.train.batch(3))
    assert main(["train", str(trainer.run_dir / "config.yml")]) == 0
    lines = (trainer.run_dir / "metrics.jsonl").read_text().splitlines()
    losses = {record["step"]: record.get("train/loss") for record in map(json.loads, lines)}
    assert losses.keys() == {4}
    np.testing.assert_allclose(losses[4], float(metrics["train/loss"]), rtol=1e-5)


def test_command_rejects_checkpoint_of_other_data(settings: Settings, tmp_path: Path) -> None:
    with maxpipe.build(settings("other-data")) as own:
        batch = {"tokens": np.zeros((8, 16), int), "targets": np.ones((8, 16), int)}
        state, _ = maxpipe.train_step(own, own.init(), batch)
        maxpipe.Checkpoint.save(own, state)
    with pytest.raises(maxpipe.ConfigError, match=r"must be unchanged since step 1.*source was"):
        maxpipe.run_training(own.run_dir / "config.yml")


def test_checkpoint_gives_no_permission_and_changed_plugin_is_config_error(
    settings: Settings, tmp_path: Path
) -> None:
    plugin = tmp_path / "plugin.py"
    lines = [
        "from maxpipe.config.plugins import register_objective",
        "from maxpipe import Objective",
    ]
    plugin.write_text("\n".join([*lines, "register_objective('mine', Objective)", ""]))
    permission = {"modules": [str(plugin)], "allow_code": True}
    try:
        with maxpipe.build(settings("plugin", plugins=permission)) as trainer:
            saved = maxpipe.Checkpoint.save(trainer, trainer.init())
        assert saved.config["plugins"]["allow_code"] is False
        folder = CheckpointFolder(str(Path(saved.path).parent))
        digest = hashlib.sha256(plugin.read_bytes()).hexdigest()
        assert folder.read_metadata(0).data["plugins"] == {"plugin.py": digest}
        plugin.write_text(f"{plugin.read_text()}# changed\n")
        expected = {"names": ["plugin.py", digest[:12]], "code": Code.PLUG_CHANGED}
        with maxpipe.build(settings("plugin", plugins=permission)) as trainer:
            error = raises(
                maxpipe.ConfigError,
                "plugins.modules",
                suggests="plugins.allow_change=true",
                **expected,
            )
            with error:
                saved.restore(trainer)
        allowed = permission | {"allow_change": True}  # the suggested action
        with maxpipe.build(settings("plugin", plugins=allowed)) as trainer:
            saved.restore(trainer)
    finally:
        plugins.unload_plugins()


def test_second_generation_with_state_compiles_nothing(
    trainer: maxpipe.Trainer,
    checkpoints: list[maxpipe.Checkpoint],
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = checkpoints[0].restore(trainer)
    compiled: list[int] = []
    for temperature in (1.0, 1.0, 0.5):
        caplog.clear()
        with jax.log_compiles():
            maxpipe.generate(trainer, ["the "], state=state, max_tokens=3, temperature=temperature)
        compiled.append(sum("Compiling" in each.message for each in caplog.records))
    first, second, other = compiled
    assert first and other and not second, caplog.text
