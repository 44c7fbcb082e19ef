"""Shipped models of realistic size require a tokenizer and data other than the built-in ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config import config_files
from maxpipe.config.load import load, to_yaml
from maxpipe.errors import ConfigError

STEPS = "train.steps=3"
TOKENIZER = ("tokenizer.kind=huggingface", "tokenizer.path=tokenizer.json")
DATA = ("data.source=text", "data.path=*.txt")
LARGE = [
    name
    for name, each in config_files.bundled_configs().items()
    if each.kind == "model" and not name.startswith("tiny")
]
Capture = pytest.CaptureFixture[str]


def keys(*arguments: str) -> list[str]:
    """Return the keys for which training with these arguments is rejected."""
    try:
        load([*arguments, STEPS], to_train=True)
    except ConfigError as error:
        return [problem.where.partition(": ")[2] for problem in error.problems]
    return []


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_shipped_models_require_tokenizer_and_data(every: int):
    assert len(LARGE) == 98
    for name in LARGE[::every]:
        assert keys(name) == ["tokenizer.kind", "data.source"]
        assert keys(name, *DATA) == ["tokenizer.kind"]
        assert keys(name, *TOKENIZER) == ["data.source"]
        assert keys(name, *TOKENIZER, *DATA) == []


def test_explicit_builtin_data_or_vocabulary_is_accepted():
    assert keys("llama3-8b", *TOKENIZER, "data.source=corpus") == []
    assert keys("llama3-8b", "data.source=synthetic") == []
    assert keys("llama3-8b", "model.vocab_size=384") == []


@pytest.mark.parametrize("source", ["corpus", "synthetic"])
def test_data_path_ignored_by_source_is_rejected(source: str):
    assert keys("quickstart", f"data.source={source}", "data.path=book") == ["data.path"]
    assert keys("quickstart", f"data.source={source}", "data.path=") == []
    assert keys("quickstart", "data.source=jsonl", "data.path=book") == []
    assert keys("quickstart", "data.source=text", "data.source=corps", "data.path=x") == [
        "data.source"
    ]


@pytest.mark.parametrize("name", sorted(set(config_files.bundled_configs()) - set(LARGE)))
def test_small_models_train_without_tokenizer_and_data(name: str):
    assert keys(name) == []
    assert keys(name, "model.vocab_size=4096") == []


def test_written_config_still_requires_tokenizer(tmp_path: Path):
    written = tmp_path / "written.yml"
    written.write_text(to_yaml(load(["llama3-8b", STEPS]).config))
    assert keys(str(written)) == ["tokenizer.kind"]


def test_missing_tokenizer_and_data_are_reported_with_other_errors():
    assert keys("llama3-8b", "model.num_heads=31") == [
        "model.num_heads",
        "tokenizer.kind",
        "data.source",
    ]
    assert "tokenizer.kind" not in keys("llama3-8b", "model.vocab_size=x")


@pytest.mark.fault("U2")
@pytest.mark.parametrize(
    "command",
    [
        "train llama3-8b",
        "launch local llama3-8b",
        "launch slurm llama3-8b launch.topology=h100:8 mesh.ici_fsdp=8",
    ],
)
def test_training_commands_reject_builtin_data_for_large_models(
    command: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), STEPS]) == 2
    out, err = capsys.readouterr()
    assert not out and "default: tokenizer.kind = bytes  [MP-TOK-002]\n" in err
    assert "default: data.source = corpus  [MP-TOK-002]\n" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("home")
@pytest.mark.fault("U2")
def test_plan_does_not_require_data(capsys: Capture):
    wanted = ["llama3-8b", "--topology", "v5p:2x2x4", STEPS, "mesh.ici_fsdp=16"]
    assert main(["plan", *wanted, "train.batch_size=16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.fault("U2")
def test_doctor_reports_missing_tokenizer_and_data(monkeypatch: pytest.MonkeyPatch):
    from maxpipe.diagnosis import doctor

    for name in ("check_devices", "check_folders"):
        monkeypatch.setattr(doctor, name, lambda patient: iter(()))
    monkeypatch.setattr(doctor, "check_loopback", doctor.check_clock)
    found = [check for check in doctor.examine(["llama3-8b", STEPS]) if check.name == "training"]
    assert [check.status for check in found] == ["FAILED", "FAILED"]
    assert "tokenizer.path=tokenizer.json" in found[0].action
    assert not [check for check in doctor.examine(["tiny", STEPS]) if check.name == "training"]
