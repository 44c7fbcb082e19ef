"""Configs from names, files, dicts, configs and overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import maxpipe
from maxpipe.api.config import load_config
from maxpipe.config.load import to_yaml
from maxpipe.errors import Code
from tests.errors import assert_error


def test_nested_dict_full_keys_and_overrides_are_merged() -> None:
    loaded = load_config(
        "quickstart",
        {"train": {"steps": 7}, "optim.learning_rate": 1e-4},
        {"train.steps": 8},
        "train.sequence_length=64",
    )
    train = loaded.config.train
    assert (train.steps, train.sequence_length) == (8, 64)
    assert loaded.config.optim.learning_rate == 1e-4
    assert loaded.origins["train.steps"] == "dict"
    assert loaded.origins["train.sequence_length"] == "train.sequence_length=64"


def test_override_wins_regardless_of_position() -> None:
    assert load_config("quickstart", "train.steps=3", {"train.steps": 9}).config.train.steps == 3


def test_config_and_loaded_config_load_back_equal() -> None:
    loaded = load_config("quickstart", {"data.mixture": {}, "eval.sample_prompts": ["a", "b: c"]})
    assert load_config(loaded) is loaded
    assert load_config(loaded.config).config == loaded.config
    assert load_config(loaded, "train.steps=5").config.train.steps == 5


def test_path_may_be_relative_or_contain_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = to_yaml(load_config("quickstart", "train.steps=4").config)
    Path("a=b.yml").write_text(text)
    assert load_config(Path("a=b.yml")).config.train.steps == 4


def test_model_name_in_dict_selects_bundled_model() -> None:
    assert load_config({"model": "tiny", "train.steps": 1}).config.model.d_model == 128


@pytest.mark.parametrize(
    ("source", "where", "action"),
    [
        ("train.stepz=4", "load_config: train.stepz", "train.steps"),
        ({"train": {"stepz": 4}}, "dict: train.stepz", "train.steps"),
        ({"train.steps": "many"}, "dict: train.steps", "train.steps=100"),
        ({"trian.steps": 4}, "dict: trian.steps", "below `train:`"),
        ("quickstrat", "load_config: quickstrat", "quickstart"),
    ],
)
def test_bad_source_is_config_error_with_action(source: object, where: str, action: str) -> None:
    with pytest.raises(maxpipe.ConfigError) as caught:
        load_config("quickstart", source)  # type: ignore[arg-type]
    assert isinstance(caught.value, maxpipe.MaxpipeError)
    problem = caught.value.problems[0]
    assert problem.where == where and action in problem.action


def test_errors_name_the_function_in_place_of_the_command_line() -> None:
    calls: dict[str, Callable[[], object]] = {
        "load_config: train.steps": lambda: load_config("quickstart", "train.steps=-1"),
        "plan: train.steps": lambda: maxpipe.plan("quickstart", "train.steps=-1"),
        "plan: topology": lambda: maxpipe.plan("quickstart", topology="h100x8"),
        "build: model.d_model": lambda: maxpipe.build("quickstart", "model.d_model=127"),
        "evaluate: nowhere": lambda: maxpipe.evaluate("nowhere"),
        "generate: nowhere": lambda: maxpipe.generate("nowhere", "text"),
        "Checkpoint.open: nowhere": lambda: maxpipe.Checkpoint.open("nowhere"),
    }
    for where, call in calls.items():
        with pytest.raises(maxpipe.ConfigError) as caught:
            call()
        assert caught.value.problems[0].where == where
        assert "command line" not in str(caught.value)


@pytest.mark.parametrize("source", [5, None, b"tiny", ["train.steps=1"], object()])
def test_source_of_other_type_is_config_error(source: object) -> None:
    with pytest.raises(maxpipe.ConfigError) as caught:
        load_config("quickstart", source)  # type: ignore[arg-type]
    assert_error(caught.value, "config", code=Code.API_ARGUMENT)


def test_dict_that_contains_itself_is_config_error() -> None:
    cyclic: dict[str, object] = {}
    cyclic["train"] = [cyclic, cyclic]
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"train": deep}
    for source in (cyclic, deep):
        with pytest.raises(maxpipe.ConfigError) as caught:
            load_config("quickstart", source)
        assert_error(caught.value, "dict", code=Code.API_ARGUMENT)


def test_key_set_twice_in_one_dict_is_config_error() -> None:
    with pytest.raises(maxpipe.ConfigError) as caught:
        load_config("quickstart", {"train": {"steps": 5}, "train.steps": 6})
    assert_error(caught.value, "dict: train.steps", names=[5, 6], code=Code.CFG_CONFLICT)
    loaded = load_config("quickstart", {"train": {"steps": 5}}, {"train.steps": 6})
    assert loaded.config.train.steps == 6
