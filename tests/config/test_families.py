"""Keys of a model family are in a section of `model` that other families reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_origin

import jsonschema
import pytest

from maxpipe.cli import main
from maxpipe.config import render
from maxpipe.config.assignments import from_override
from maxpipe.config.load import from_dict, load, to_dict, to_yaml
from maxpipe.config.schema import (
    KEYS,
    RENAMED_KEYS,
    SECTIONS,
    flatten,
    upgrade_config,
    upgrade_setting,
)
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.models.llama import LlamaConfig
from tests.errors import raises, without_codes

LLAMA, GEMMA = ["llama3-1b", "train.steps=1"], ["gemma3-1b", "train.steps=1"]


def problem(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    assert len(caught.value.problems) == 1
    return without_codes(caught.value)


def test_config_contains_only_keys_of_its_family() -> None:
    for arguments, name, other in ((LLAMA, "llama", "gemma3"), (GEMMA, "gemma3", "llama")):
        config = load(arguments).config
        values = to_dict(config)
        assert name in values["model"] and other not in values["model"]
        assert f"\n  {name}:\n    " in to_yaml(config) and f"  {other}:" not in to_yaml(config)
        assert from_dict(values) == config
        jsonschema.Draft202012Validator(render.json_schema()).validate(values)
    own = load([*GEMMA, "model.gemma3.sliding_window=77"]).config.model.own
    assert own == Gemma3Config(sliding_window=77)


def test_files_merge_within_family_section(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yml", tmp_path / "b.yml"
    first.write_text("model:\n  gemma3:\n    sliding_window: 5\n    sliding_window_pattern: 3\n")
    second.write_text("model: {gemma3: {sliding_window: 7}}\ntrain: {steps: 1}\n")
    loaded = load(["gemma3-1b", str(first), str(second), "model.gemma3.query_pre_attn_scalar=3"])
    assert loaded.config.model.own == Gemma3Config(
        sliding_window=7, sliding_window_pattern=3, query_pre_attn_scalar=3.0
    )
    assert loaded.origins["model.gemma3.sliding_window"] == str(second)
    assert loaded.origins["model.gemma3.sliding_window_pattern"] == str(first)
    second.write_text("model:\n  gemma3:\n    sliding_window: 1\n    sliding_window: 2\n")
    assert f"{second}:4: model.gemma3.sliding_window = 2\n  appears twice" in problem(
        *GEMMA, str(second)
    )
    second.write_text("model:\n  gemma3: 3\n")
    assert "model.gemma3 = 3\n  is a section" in problem(*GEMMA, str(second))
    second.write_text("model:\n  gemma3:\n")
    assert load([*GEMMA, str(second)]).config.model == load(GEMMA).config.model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GEMMA, "model.llama.rope_factor=2"], "requires model.family=llama"),
        ([*LLAMA, "model.gemma3.sliding_window=2"], "or set model.family=gemma3."),
        ([*LLAMA, "model.family=gemma"], "Set model.family=gemma4."),
        ([*GEMMA, "model.gemma3.windw=2"], "Did you mean model.gemma3.sliding_window?"),
        ([*GEMMA, "model.gemma3.sliding_window_pattern=0"], "must be at least 1."),
        ([*GEMMA, "model.gemma3.sliding_window=2147483648"], "must be from 1 to 2147483647"),
        ([*GEMMA, "model.gemma3=3"], "model.gemma3 = 3\n  is a section"),
        ([*GEMMA, "sliding_window=3"], "Write model.gemma3.sliding_window=3."),
        ([*GEMMA, "sliding_window_pattern=3"], "Write model.gemma3.sliding_window_pattern=3."),
        (
            ["tiny", "train.steps=1", "model.family=phi3", "model.phi3.rope_short_factor=3"],
            "must be a list of numbers.",
        ),
        (["tiny-moe", "train.steps=1", f"model.moe.num_dense_layers={10**15}"], "less than model."),
        ([*GEMMA, "model.gemma3.sliding_window=x"], "must be an integer."),
        (
            ["granite4-h-micro", "train.steps=1", "model.granite4.rope_factor=2"],
            "requires model.granite4.rotary_positions=true.",
        ),
        (
            [*GEMMA, "pipeline.saved_names=[gat]"],
            "nor a preset (matmuls, attention, mlp).",
        ),
    ],
)
def test_invalid_family_settings_are_rejected(arguments: list[str], message: str) -> None:
    assert message in problem(*arguments)


@pytest.mark.parametrize("in_file", [True, False])
def test_renamed_key_loads_with_a_warning(in_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text("model: {rope_scaling: 3}\n")
    arguments = [str(file)] if in_file else ["model.rope_scaling=3"]
    loaded = load([*LLAMA, *arguments])
    assert loaded.config.model.own == LlamaConfig(
        rope_factor=3.0, original_max_position_embeddings=8192
    )
    (caution,) = loaded.warnings
    where = f"{file}:1" if in_file else "command line"
    assert caution.where == f"{where}: model.rope_scaling" and caution.value == "3"
    assert "model.llama.rope_factor" in caution.rule + caution.action
    file.write_text("model:\n  llama: {rope_scaling: 4}\n  rope_scaling: 3\n")
    twice = f"{file}:3: model.rope_scaling = 3\n  was renamed to model.llama.rope_factor"
    assert twice in (message := problem(*LLAMA, str(file))) and f"also set ({file}:2)" in message
    # A saved config of an earlier release loads without a warning.
    saved: dict[str, Any] = to_dict(load(LLAMA).config)
    saved["model"]["rope_scaling"] = saved["model"].pop("llama")["rope_factor"]
    again = load([], saved, "config.yml")
    assert again.config.model.own == LlamaConfig(rope_factor=32.0) and not again.warnings


def test_key_listings_include_all_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"model.llama", "model.gemma3"} <= set(SECTIONS)
    assert "model.own" not in KEYS and "model.gemma3.sliding_window" in KEYS
    assert "rope_factor" in render.explain("model.llama") and "gemma3" in render.explain("model")
    assert "one of llama, mistral" in render.explain("model.family")
    for word, answer in (
        ("model.gemma3.q", "model.gemma3.query_pre_attn_scalar="),
        ("model.family=gemma3", "model.family=gemma3"),
    ):
        assert main(["completion", "--complete", "fish", "train", word]) == 0
        assert capsys.readouterr().out == f"{answer}\0"


def test_flatten_names_each_value_by_its_full_key() -> None:
    values = flatten(to_dict(load([*GEMMA, "mesh.axis_rules.mlp=[]"]).config))
    assert values["model.gemma3.sliding_window"] == 512 and values["mesh.axis_rules"] == {"mlp": []}
    assert set(values) <= set(KEYS)


def test_renamed_keys_in_saved_configs_and_named_sections() -> None:
    """A saved config contains the keys and values of the release that wrote it."""
    assert upgrade_setting("data.mixture.web.unreadable", "skip") == (
        "data.mixture.web.bad_records",
        "skip",
    )
    assert upgrade_setting("optim.average_decay", 0.5) == ("optim.ema_decay", 0.5)
    assert upgrade_setting("optim.ema_decay", 0.5) == ("optim.ema_decay", 0.5)
    saved: dict[str, Any] = to_dict(load(LLAMA).config)
    saved["model"]["heads_ahead"] = saved["model"].pop("mtp_heads") + 1
    source = {"source": "corpus", "weight": 1.0, "unreadable": "skip"}
    saved["data"]["mixture"] = {"web": source}
    loaded = load([], saved, "config.yml")
    assert loaded.config.data.mixture["web"].bad_records == "skip" and not loaded.warnings
    assert loaded.config.model.mtp_heads == 1


def test_saved_configs_of_earlier_releases_are_upgraded() -> None:
    """On resume, the config in a checkpoint's metadata is compared with the run's config."""
    source = {"source": "corpus", "weight": 1.0, "unreadable": "skip"}
    saved = {
        "optim": {"average_decay": 0.9, "name": "adamw"},
        "adapter": {"rank": 4, "base": "nf4", "scale_by": "root"},
        "model": {"family": "llama", "llama": {"norm_epsilon": 1e-6}},
        "data": {"mixture": {"web": source}},
        "unknown": 3,
    }
    upgraded = upgrade_config(saved)
    assert upgraded["optim"] == {"ema_decay": 0.9, "name": "adamw"}
    assert upgraded["adapter"] == {"rank": 4, "base_quantization": "nf4", "rslora": True}
    assert upgraded["model"]["llama"] == {"norm_epsilon": 1e-6}
    assert upgraded["data"]["mixture"]["web"]["bad_records"] == "skip"
    assert upgraded["unknown"] == 3
    current = to_dict(load(GEMMA).config)
    assert upgrade_config(current) == current
    damaged: dict[str, Any] = {"data": {"mixture": {"web": 3}}, "model": {"llama": 3}, "eval": 1}
    assert upgrade_config(damaged) == damaged
    with pytest.raises(ValueError):
        upgrade_config({"a": {"b": 1, "b.c": 2}})


def test_renamed_values_load_with_a_warning_or_from_saved_configs() -> None:
    loaded = load([*LLAMA, "adapter.rank=4", "adapter.scale_by=root"])
    assert loaded.config.adapter.rslora
    (caution,) = loaded.warnings
    assert caution.rule == "was renamed to adapter.rslora=true."
    loaded = load([*LLAMA, "checkpoint.on_failure=go_on"])
    assert loaded.config.checkpoint.on_failure == "continue" and loaded.warnings
    saved: dict[str, Any] = to_dict(load([*LLAMA, "adapter.rank=4"]).config)
    saved["adapter"]["scale_by"] = {True: "root", False: "rank"}[saved["adapter"].pop("rslora")]
    saved["checkpoint"]["on_failure"] = "go_on"
    again = load([], saved, "config.yml")
    assert not again.config.adapter.rslora and not again.warnings
    assert again.config.checkpoint.on_failure == "continue"


@pytest.mark.parametrize(
    "former", [old for old, new in RENAMED_KEYS.items() if get_origin(KEYS.get(new)) is list]
)
def test_former_names_of_list_keys_in_overrides(former: str) -> None:
    problems: list[Problem] = []
    (assignment,) = from_override(f"{former}=[a, b]", problems)
    assert assignment.raw == ["a", "b"] and not problems


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("mesh.axis_rules={mlp: [tensor], mlp: []}", "mesh.axis_rules.mlp"),
        ("data.mixture={web: {source: jsonl, source: text}}", "data.mixture.web.source"),
        (
            "optim.weight_decays=[{pattern: head, pattern: norm, weight_decay: 1}]",
            "optim.weight_decays[0].pattern",
        ),
    ],
)
def test_duplicate_keys_in_override_are_rejected(override: str, key: str) -> None:
    with raises(ConfigError, key):
        load([*LLAMA, override])


@pytest.mark.parametrize(
    ("setting", "key", "rule"),
    [
        ("qwen3.max_pixels=100", "qwen3.max_pixels", "at least 65536"),
        ("qwen3.num_vision_heads=5", "qwen3.num_vision_heads", "multiple of 4 dims"),
        ("qwen3.num_position_embeddings=10", "qwen3.num_position_embeddings", "square number"),
        ("qwen3.deepstack_visual_indexes=[5,3]", "qwen3.deepstack_visual_indexes", "increasing"),
        ("qwen3.deepstack_visual_indexes=[24]", "qwen3.deepstack_visual_indexes", "0 to 23"),
        ("qwen3.mrope_section=[24]", "qwen3.mrope_section", "three numbers"),
        ("qwen3.image_token_id=151936", "qwen3.image_token_id", "less than model.vocab_size"),
        ("mtp_heads=1", "mtp_heads", "cannot predict images"),
        ("gemma4.num_vision_heads=5", "gemma4.num_vision_heads", "multiple of 4 dims"),
        ("gemma4.max_soft_tokens=5000", "gemma4.num_position_embeddings", "at least 15000"),
        ("gemma4.image_token_id=262144", "gemma4.image_token_id", "less than model.vocab_size"),
        ("gemma4.per_layer_pad_token_id=262144", "gemma4.per_layer_pad_token_id", "less than"),
    ],
)
def test_invalid_vision_keys_are_errors(setting: str, key: str, rule: str) -> None:
    name = "gemma4-e2b-images" if setting.startswith("gemma4.") else "qwen3-vl-4b"
    with pytest.raises(ConfigError) as error:
        load([name, "train.steps=1", f"model.{setting}"])
    found = next(each for each in error.value.problems if each.where.endswith(f"model.{key}"))
    assert found.code == Code.MODEL_IMAGES and rule in found.rule
