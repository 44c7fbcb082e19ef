"""Every key of MaxText, torchtitan and `TrainingArguments` is translated with its default."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from maxpipe.config import translation
from maxpipe.config.load import load, parse_setting, to_dict
from maxpipe.config.schema import KEYS, flatten
from maxpipe.config.sections.model import FAMILY
from maxpipe.config.translation import CONTEXT_KEYS, Translation, TranslationContext, translate
from maxpipe.errors import Code, ConfigError, Problem

TRAINERS: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "foreign_keys.json").read_text()
)
"""For each trainer, its keys and their default values as strings."""

BASE = ["tiny", "train.steps=100"]
MODEL_OF = {
    "deepseek": "deepseek-v2-lite",
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4-flash",
    "gemma2": "gemma2-2b",
    "gemma4": "gemma4-31b",
    "moe": "tiny-moe",
}
"""Shipped models of families that require keys in addition to `model.family`."""
NEEDS = {
    "data.source": ["data.path=c4/en:3.1.0"],
    "model.num_kv_heads": ["model.num_heads=16"],
    "tokenizer.kind": ["tokenizer.path=tokenizer.model"],
}
"""Keys whose value requires other settings, which the next error message would request."""


@pytest.fixture(autouse=True)
def _no_accelerators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(translation, "accelerators", list)


def context() -> TranslationContext:
    values = flatten(to_dict(load(BASE).config))
    return TranslationContext({key: values[key] for key in CONTEXT_KEYS})


def check_loads(found: Translation) -> None:
    """Check that a config with the suggested settings loads."""
    settings = [f"{key}={text}" for key, text in found.settings]
    family = dict(found.settings).get(FAMILY, "")
    needs = [each for key, _ in found.settings for each in NEEDS.get(key, [])]
    base = [MODEL_OF[family], "train.steps=100"] if family in MODEL_OF else BASE
    if any(key.startswith("model.deepseek.rope") for key, _ in found.settings):
        settings += ["model.head_dim=192"]
    load([*base, *needs, *settings])


def unknown(trainer: str) -> list[tuple[str, str]]:
    return [(name, text) for name, text in TRAINERS[trainer].items() if name not in KEYS]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_foreign_key_translates_to_valid_settings(trainer: str):
    followed: set[Translation] = set()
    settings_so_far = context()
    for name, text in unknown(trainer):
        found = translate(tuple(name.split(".")), text, settings_so_far)
        assert found.is_exact, name
        assert bool(found.settings) != bool(found.action and not found.settings), name
        if found.settings and found not in followed:
            check_loads(found)
            followed.add(found)
    assert len(followed) >= 15


@pytest.mark.parametrize("trainer", TRAINERS)
def test_foreign_keys_on_command_line_are_translated(trainer: str):
    names = unknown(trainer)
    for start in range(0, len(names), 50):
        some = names[start : start + 50]
        for form in ("{}={}", "--{}={}"):
            with pytest.raises(ConfigError) as caught:
                load([*BASE, *(form.format(*each) for each in some)])
            problems = {problem.where: problem for problem in caught.value.problems}
            for name, text in some:
                written = form.format(name, text) if form.startswith("--") else name
                problem = problems.get(
                    Problem(Code.CFG_UNKNOWN_KEY, f"command line: {written}", "", "", "").where
                )
                if problem is None:
                    pytest.fail(f"{written} has no answer")
                assert problem.action.startswith(
                    ("Write ", "Set ", "Leave it out", "Run `maxpipe", "Specify a model")
                ), problem


@pytest.mark.parametrize("trainer", TRAINERS)
def test_foreign_file_translates_to_loadable_file(trainer: str, tmp_path: Path):
    lines: dict[str, dict[str, str] | str] = {}
    for name, text in TRAINERS[trainer].items():
        section, _, key = name.rpartition(".")
        below = lines.setdefault(section, {}) if section else lines
        assert isinstance(below, dict)
        below[key] = text
    path, translated = tmp_path / "theirs.yml", tmp_path / "ours.yml"
    path.write_text(json.dumps(lines))
    with pytest.raises(ConfigError) as caught:
        load(["tiny", str(path)])
    [problem] = [each for each in caught.value.problems if each.where == str(path)]
    assert problem.rule.startswith("contains ") and " keys from another trainer" in problem.rule
    head, _, body = problem.action.partition("\n")
    assert head.endswith(f"and use it instead of {path}:") and len(body.splitlines()) < 450
    assert "unknown names" not in body
    assert max(map(len, body.splitlines())) < 160
    assert (
        "family: deepseek" not in body
    )  # although the file contains keys of that family, all with defaults
    translated.write_text(textwrap.dedent(body) + "\n")
    try:
        load(["tiny", "train.steps=100", str(translated)])
    except (
        ConfigError
    ) as error:  # the defaults may conflict with each other, but every name and value is valid
        for each in error.problems:
            assert "is not a" not in each.rule and "must be one of" not in each.rule, each
            assert "must be an integer" not in each.rule, each


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (
            ["per_device_batch_size=2", "mesh.ici_fsdp=4", "mesh.ici_tensor=2"],
            "train.batch_size=16",
        ),
        (["per_device_batch_size=0.5", "mesh.ici_fsdp=4"], "train.batch_size=2"),
        (["per_device_batch_size=2", "ici_fsdp_parallelism=8"], "train.batch_size=16"),
        (
            ["per_device_train_batch_size=2", "gradient_accumulation_steps=4", "mesh.ici_data=2"],
            "train.batch_size=16",
        ),
        (["local_batch_size=2", "mesh.ici_fsdp=4", "mesh.ici_tensor=2"], "train.batch_size=8"),
        (
            ["per_device_batch_size=1", "mesh.ici_fsdp=-1", "mesh.cpu_devices=8"],
            "train.batch_size=8",
        ),
        (["warmup_ratio=0.1"], "optim.warmup_steps=10"),
        (["min_lr=3e-5", "lr=3e-4"], "optim.min_lr_ratio=0.1"),
        (["disable_tqdm=true"], "log.progress=plain"),
        (["model_name_or_path=meta-llama/Llama-3.1-8B-Instruct"], "model=llama3.1-8b"),
        (["fsdp=full_shard"], "mesh.ici_fsdp=-1"),
    ],
)
def test_translated_values_are_computed(given: list[str], settings: str):
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *given])
    assert any(problem.action == f"Write {settings}." for problem in caught.value.problems)
    assert settings.startswith("model=") or parse_setting(settings)


@pytest.mark.parametrize(
    ("given", "batch_size"),
    [
        (["per_device_batch_size=4", "mesh.ici_fsdp=-1"], 4),
        (["per_device_batch_size=4", "mesh.ici_data=-1", "mesh.cpu_devices=4"], 16),
        (["per_device_batch_size=4", "mesh.ici_fsdp=-1", "runtime.num_processes=2"], 8),
        (
            ["local_batch_size=3", "mesh.ici_fsdp=-1", "mesh.ici_tensor=2", "mesh.cpu_devices=8"],
            12,
        ),
        (["local_batch_size=3", "mesh.ici_stage=-1", "mesh.ici_data=2", "mesh.cpu_devices=8"], 6),
    ],
)
def test_batch_size_uses_device_count_without_accelerators(
    tmp_path: Path, given: list[str], batch_size: int
):
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *given])
    assert f"Write train.batch_size={batch_size}." in str(caught.value)
    name, _, number = given[0].partition("=")
    path = tmp_path / "theirs.yml"
    path.write_text(f"{name}: {number}\n")
    with pytest.raises(ConfigError) as caught:
        load([*BASE, str(path), *given[1:]])
    assert f"Write `batch_size: {batch_size}` below `train:`." in str(caught.value)


@pytest.mark.parametrize(
    ("given", "action"),
    [
        (
            ["per_device_batch_size=4", "mesh.ici_fsdp=-1", "mesh.ici_tensor=2"],
            "Set train.batch_size to 4 x the number of devices: train.batch_size=16 on 4 devices, "
            "where mesh.ici_fsdp is 2.",
        ),
        (
            ["local_batch_size=4", "mesh.ici_fsdp=-1", "mesh.ici_tensor=2", "mesh.cpu_devices=8"],
            "Set train.batch_size to 4 x the number of devices along data, fsdp and expert: "
            "train.batch_size=8 on 4 devices, where mesh.ici_fsdp is 2.",
        ),
        (
            ["per_device_batch_size=0.25", "mesh.ici_data=-1"],
            "Set train.batch_size to 0.25 x the number of devices: train.batch_size=1 on 4 "
            "devices, where mesh.ici_data is 4.",
        ),
    ],
)
def test_batch_size_depends_on_unknown_accelerator_count(
    monkeypatch: pytest.MonkeyPatch, given: list[str], action: str
):
    monkeypatch.setattr(translation, "accelerators", lambda: [Path("/dev/nvidia0")])
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *given])
    assert action in str(caught.value)


def test_batch_size_with_mesh_sizes_not_dividing_devices():
    sizes = ["mesh.ici_fsdp=-1", "mesh.ici_tensor=3", "mesh.cpu_devices=8"]
    with pytest.raises(ConfigError) as caught:
        load([*BASE, "per_device_batch_size=4", *sizes])
    assert "train.batch_size=24 on 6 devices, where mesh.ici_fsdp is 2." in str(caught.value)


NAMES_A_CONFIG = {
    "torchtitan.toml": '[job]\nconfig_file = "x.toml"\n',
    "section.yml": "job:\n  config_file: x.toml\n",
    "options.json": '{"job": {"config_file": "x.toml"}}',
}


@pytest.mark.parametrize("base", [[], BASE])
@pytest.mark.parametrize("name", NAMES_A_CONFIG)
def test_file_that_only_names_a_config_suggests_that_config(
    tmp_path: Path, name: str, base: list[str]
):
    path = tmp_path / name
    path.write_text(NAMES_A_CONFIG[name])
    with pytest.raises(ConfigError) as caught:
        load([*base, str(path)])
    [problem] = caught.value.problems  # and no error for missing keys
    assert problem.where == str(path) and "job.config_file" in problem.rule
    assert problem.action == f"Use x.toml instead of {path}."


def test_named_config_suppresses_missing_key_errors(tmp_path: Path):
    path = tmp_path / "job.yml"
    path.write_text("job:\n  config_file: x.toml\ntraining:\n  local_batch_size: 2\n")
    with pytest.raises(ConfigError) as caught:
        load([str(path)])
    [problem] = caught.value.problems
    assert problem.rule.startswith("contains 2 keys from another trainer")
    assert "x.toml" in problem.action


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "training:\n  local_batch_size: 8\n",
            "batch_size: 8  # training.local_batch_size",
        ),
        ("traning:\n  steps: 5\n  batch_size: 8\n", "Did you mean train?"),
        ("pipelin x y z of mine:\n  microbatches: 2\n", "is not a section"),
    ],
)
def test_foreign_section_is_not_treated_as_misspelling(content: str, words: str, tmp_path: Path):
    path = tmp_path / "run.yml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load([*BASE, str(path)])
    assert words in str(caught.value)
