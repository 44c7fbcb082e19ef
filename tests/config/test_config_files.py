"""Config arguments that are names or files, and default run names."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.config import config_files
from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from tests.errors import assert_error

RUN = "train: {steps: 5}\n"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run.yml").write_text(RUN)
    return tmp_path


def error_text(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(arguments))
    return "\n".join(map(str, caught.value.problems))


# --- names of configs --------------------------------------------------------------------


def test_name_loads_shipped_config(workspace: Path):
    named = load(["tiny", "my-run.yml"])
    path = str(config_files.bundled_configs()["tiny"].path)
    assert named.config == load([path, "my-run.yml"]).config
    assert named.origins["model.num_layers"] == "shipped config tiny"
    assert named.origins["train.steps"] == "my-run.yml"


def test_errors_in_shipped_config_name_it(workspace: Path):
    assert error_text("tiny", "my-run.yml", "model.num_kv_heads=3").startswith(
        "shipped config tiny: model.num_heads = 8  [MP-MODEL-001]\n"
    )


@pytest.mark.parametrize(
    ("argument", "guess"),
    [
        ("lama3-8b", "llama3-8b"),
        ("Mistral-7B-v0.1", "mistral-7b"),
        ("quickstrat", "quickstart"),
    ],
)
def test_unknown_config_name_suggests_similar_name(argument: str, guess: str, workspace: Path):
    assert f"\n  Did you mean {guess}? `maxpipe configs list`" in error_text(argument)


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("llama3_8b", "llama3-8b"),
        ("Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama3.1-405b"),
        ("meta-llama/Llama-3-70B", "llama3-70b"),
        ("google/gemma-2-2b-it", "gemma2-2b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
    ],
)
def test_alternative_spellings_resolve_to_shipped_model(argument: str, name: str, workspace: Path):
    loaded = load([argument, "train.steps=1"])
    assert loaded.config.model == load([name, "train.steps=1"]).config.model
    assert bool(loaded.notes) == ("/" in argument)


def test_unrecognizable_config_name_points_to_list_command(workspace: Path):
    assert "\n  `maxpipe configs list`" in error_text("qqqqqq")


@pytest.mark.parametrize("file", ["quickstart.yml", "configs/quickstart.yml"])
def test_missing_file_of_shipped_config_suggests_its_name(file: str, workspace: Path):
    action = error_text(file).splitlines()[-1]
    assert f"Write quickstart instead of {file}" in action
    assert "`maxpipe configs copy quickstart`" in action


def test_broken_symbolic_link_is_reported(workspace: Path):
    (workspace / "dangling.yml").symlink_to("further.yml")
    (workspace / "further.yml").symlink_to("/nope")
    (workspace / "loop.yml").symlink_to("loop.yml")
    message = error_text("dangling.yml")
    assert_error(message, "dangling.yml", names=["symbolic link", "/nope"])
    assert_error(error_text("loop.yml"), "loop.yml", names=["symbolic link", "loop.yml"])
    assert "Did you mean" not in message


def test_name_of_shipped_config_and_different_file_is_ambiguous(workspace: Path):
    (workspace / "tiny.yml").write_text(config_files.bundled_configs()["tiny"].text)
    assert load(["tiny", "my-run.yml"]).config.model.num_layers == 8
    (workspace / "tiny.yml").write_text("model: {num_layers: 2}\n")
    assert_error(error_text("tiny", "my-run.yml"), "tiny", names="tiny.yml", suggests="tiny.yml")
    assert error_text("tiny.yml", "my-run.yml").startswith("tiny.yml, my-run.yml: model.d_model")


def test_file_without_suffix_is_rejected(workspace: Path):
    (workspace / "tiny").write_text(RUN)
    assert_error(error_text("tiny"), "tiny", names=[".yml", ".yaml"], suggests="tiny.yml")
    (workspace / "quickstart").mkdir()
    assert load(["quickstart"]).config.run.name == "quickstart"


@pytest.mark.parametrize("name", ["train_char.py", "config/train_char.py"])
def test_python_file_is_rejected_as_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = error_text(name)
    assert "Programs" in text and "maxpipe init DIR" in text
    assert "maxpipe fetch" not in text and "Rename" not in text


# --- names of runs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my-run.yml", "my-run"),
        ("a.b_c.yaml", "a.b_c"),
        ("größe 2.yml", "gr-e-2"),
        ("日本.yml", "run"),
        (".hidden.yml", "hidden"),
        ("--.yml", "run"),
        ("x" * 240 + ".yml", "x" * 100),
    ],
)
def test_run_name_defaults_to_file_name(file: str, name: str, workspace: Path):
    (workspace / file).write_text(RUN)
    loaded = load(["tiny", f"./{file}"])
    assert loaded.config.run.name == name
    assert loaded.origins["run.name"] == f"the name of ./{file}"


def test_run_name_comes_from_last_file(workspace: Path):
    (workspace / "other.yml").write_text(RUN)
    assert load(["tiny", "my-run.yml"]).config.run.name == "my-run"
    assert load(["tiny", "my-run.yml", "other.yml"]).config.run.name == "other"
    assert load(["quickstart"]).config.run.name == "quickstart"


def test_explicit_run_name_is_kept(workspace: Path):
    (workspace / "named.yml").write_text("run: {name: a}\n")
    assert load(["named.yml", "tiny", "my-run.yml"]).config.run.name == "a"
    assert load(["named.yml", "tiny", "my-run.yml", "run.name=b"]).config.run.name == "b"
    keys = [f"model.{key}=2" for key in ("num_layers", "d_model", "num_heads", "num_kv_heads")]
    sizes = ["model.head_dim=2", "model.d_mlp=2", "model.vocab_size=259", "train.steps=1"]
    assert load([*keys, *sizes]).config.run.name == "run"


def test_written_config_keeps_run_name(workspace: Path):
    from maxpipe.config.load import to_yaml

    (workspace / "written.yml").write_text(to_yaml(load(["tiny", "my-run.yml"]).config))
    assert load(["written.yml"]).config.run.name == "my-run"


def test_folder_argument_suggests_its_config(tmp_path: Path):
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (run / "config.yml").write_text("")
    (model / "config.json").write_text("{}")
    assert f"Use {run / 'config.yml'}." in error_text(str(run))
    assert f"Run `maxpipe import {model} --out" in error_text(str(model))
