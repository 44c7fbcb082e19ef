"""Lists of mappings: phases, stages, and values by parameter pattern."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from maxpipe.config import check
from maxpipe.config.load import from_dict, load, to_dict, to_yaml
from maxpipe.config.render import explain, json_schema
from maxpipe.config.rules import BOUNDS, EXAMPLES, ITEM, format_value
from maxpipe.config.schema import ITEM_SECTIONS, upgrade_config, upgrade_setting
from maxpipe.config.sections.data import MixtureStageConfig
from maxpipe.config.sections.optim import (
    LRMultiplierConfig,
    LRPhase,
    LRPhaseConfig,
    WeightDecayConfig,
    resolve_phases,
)
from maxpipe.config.sections.train import BatchRamp, BatchRampStageConfig, RampStage, total_steps
from maxpipe.errors import ConfigError

TINY = ["tiny", "train.steps=200", "train.batch_size=8", "pipeline.microbatches=8"]
MIXTURE = ["data.mixture.web.source=synthetic", "data.mixture.code.source=synthetic"]


def problem_of(*overrides: str) -> Any:
    with pytest.raises(ConfigError) as caught:
        load([*TINY, *MIXTURE, *overrides])
    (problem,) = caught.value.problems
    return problem


# Phases of the learning rate.


def test_phase_lengths_in_steps_percent_or_remaining() -> None:
    phases = [
        LRPhaseConfig(percent=5, shape="linear", from_=0, to=1),
        LRPhaseConfig(steps=10, shape="cosine", to=0.1, times=2),
        LRPhaseConfig(shape="linear", to=0),
    ]
    first, *repeated, last = resolve_phases(phases, 100)
    assert first == LRPhase(5, "linear", 0, 1)
    # Without `from`, each repetition starts at the final value of the previous one.
    assert repeated == [LRPhase(10, "cosine", 1, 0.1), LRPhase(10, "cosine", 0.1, 0.1)]
    assert last == LRPhase(75, "linear", 0.1, 0)


def test_repeated_phases_restart_at_from() -> None:
    phase = LRPhaseConfig(percent=20, shape="cosine", from_=1, to=0.1, times=3)
    assert resolve_phases([phase], 100) == [LRPhase(20, "cosine", 1, 0.1)] * 3


def test_lr_phases_reject_warmup_and_zero_rates() -> None:
    phases = f"optim.lr_phases={EXAMPLES['optim.lr_phases']}"
    assert problem_of(phases, "optim.warmup_steps=5").where == "command line: optim.warmup_steps"
    zero = problem_of("optim.lr_phases=[{shape: linear, from: 0, to: 0}]")
    assert "a learning rate above 0" in zero.rule


# Errors.


@pytest.mark.parametrize(
    ("setting", "where", "value", "rule"),
    [
        ("optim.lr_phases=3", "optim.lr_phases", "3", "list of mappings"),
        ("optim.lr_phases=[ten linear 1]", "optim.lr_phases[0]", "ten linear 1", "a mapping with"),
        ("optim.lr_phases=[{steps: ten, shape: linear, to: 1}]", "[0].steps", "ten", "an integer"),
        ("optim.lr_phases=[{steps: -3, shape: linear, to: 1}]", "[0].steps", "-3", "from 0 to"),
        ("optim.lr_phases=[{shape: polynomial, to: 1}]", "[0].shape", "polynomial", "linear, cos"),
        ("optim.lr_phases=[{shape: linear}]", "lr_phases[0]", "{shape: linear}", "the field to"),
        ("optim.lr_phases=[{shape: linear, to: 2}]", "lr_phases[0].to", "2.0", "from 0 to 1"),
        ("optim.lr_phases=[{shape: linear, to: nan}]", "lr_phases[0].to", "nan", "finite number"),
        ("optim.lr_phases=[{shape: linear, to: 1, step: 3}]", "[0].step", "3", "not a field"),
        ("optim.lr_phases=[{shape: linear, to: 1, times: 0}]", "[0].times", "0", "from 1 to 99"),
        ("optim.lr_phases=[{shape: linear, to: 1, times: 2}]", "[0].times", "2", "must be 1"),
        (
            "optim.lr_phases=[{steps: 3, percent: 5, shape: linear, to: 1}]",
            "lr_phases[0]",
            "{steps: 3, percent: 5.0, shape: linear, to: 1.0}",
            "either steps or percent",
        ),
        (
            "optim.lr_phases=[{shape: linear, to: 1}, {shape: linear, to: 0}]",
            "lr_phases[0]",
            "{shape: linear, to: 1.0}",
            "must set a length",
        ),
        ("train.batch_ramp=[four]", "batch_ramp[0]", "four", "batch_size, steps, tokens"),
        ("train.batch_ramp=[{batch_size: 4}]", "batch_ramp[0]", "{batch_size: 4}", "steps or tok"),
        ("train.batch_ramp=[{batch_size: 0, steps: 3}]", "[0].batch_size", "0", "from 1 to"),
        ("train.batch_ramp=[{batch_size: 4, steps: 3, tokens: 3}]", "[0]", "{batch", "not both"),
        ("optim.lr_multipliers=[{pattern: head, multiplier: inf}]", "[0].mult", "inf", "finite"),
        ("optim.lr_multipliers=[{pattern: head, multiplier: -1}]", "multiplier", "-1.0", "from 0"),
        ("optim.lr_multipliers=[{multiplier: 1}]", "[0]", "{multiplier: 1}", "the field pattern"),
        (
            "optim.weight_decays=[{pattern: [a], weight_decay: 1}]",
            "[0].pattern",
            "[a]",
            "be a string",
        ),
        ("data.mixture_stages=[{weights: 3, steps: 3}]", "[0].weights", "3", "names to numbers"),
        ("data.mixture_stages=[{weights: {web: x}, steps: 3}]", "weights.web", "x", "finite"),
        ("data.mixture_stages=[{weights: {web: -1}, steps: 3}]", "weights.web", "-1.0", "from 0"),
        ("data.mixture_stages=[{weights: {web: 0}, steps: 3}]", "weights", "{web: 0.0}", "above 0"),
        ("data.mixture_stages=[{weights: {wep: 1}, steps: 3}]", "weights.wep", "1.0", "a source"),
        ("data.mixture_stages=[{weights: {web: 1}}]", "stages[0]", "{weights: ", "steps or tokens"),
    ],
)
def test_errors_name_the_item_and_the_field(
    setting: str, where: str, value: str, rule: str
) -> None:
    problem = problem_of(setting)
    assert problem.where.startswith("command line: ") and where in problem.where
    assert problem.value.startswith(value) and rule in problem.rule and problem.action


@pytest.mark.parametrize("declared", [key for key in BOUNDS if ITEM in key])
def test_out_of_range_fields_are_rejected(declared: str) -> None:
    bound, (key, _, field) = BOUNDS[declared], declared.partition(f"{ITEM}.")
    item = yaml.safe_load(EXAMPLES[key])[0]
    lengths = ("steps", "percent", "tokens")
    item = {name: value for name, value in item.items() if {name, field} - {*lengths}}
    for value in (bound.low - 1, bound.high * 2):
        item[field] = {"web": value} if field == "weights" else value
        problem = problem_of(f"{key}=[{json.dumps(item)}]")
        assert f"{key}[0].{field}" in problem.where and str(bound) in problem.rule
        # The action is a valid value.
        assert problem.action.endswith(f": {format_value(bound.example)}`.")
    assert bound.holds(bound.example)


def test_errors_in_files_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text("optim:\n  lr_phases:\n    - {steps: 3, shape: linear, to: 1, to: 0}\n")
    with pytest.raises(ConfigError, match=r"run.yml:3: optim.lr_phases\[0\].to = 0\n.*twice"):
        load([*TINY, str(file)])
    file.write_text("optim:\n  lr_phases:\n    - steps: three\n      shape: linear\n      to: 1\n")
    with pytest.raises(ConfigError, match=r"run.yml:2: optim.lr_phases\[0\].steps = three"):
        load([*TINY, str(file)])


@pytest.mark.parametrize("key", EXAMPLES)
def test_examples_in_messages_load(key: str) -> None:
    load([*TINY, *MIXTURE, f"{key}={EXAMPLES[key]}"])


# Forms of earlier releases.

FORMER: dict[str, tuple[list[str], list[Any]]] = {
    "optim.lr_phases": (
        ["5% linear 0->1", "3 x 10 cosine 1 -> 0.1", "1 x 2.5% linear 0.5", " rest  linear 0 "],
        [
            LRPhaseConfig(percent=5, shape="linear", from_=0, to=1),
            LRPhaseConfig(times=3, steps=10, shape="cosine", from_=1, to=0.1),
            LRPhaseConfig(percent=2.5, shape="linear", to=0.5),
            LRPhaseConfig(shape="linear", to=0),
        ],
    ),
    "train.batch_ramp": (
        ["2 for 5 steps", "4 for 1_000 tokens"],
        [
            BatchRampStageConfig(batch_size=2, steps=5),
            BatchRampStageConfig(batch_size=4, tokens=1000),
        ],
    ),
    "optim.lr_multipliers": (
        ["embedding 0.1", "layers.* 1e-05"],
        [
            LRMultiplierConfig(pattern="embedding", multiplier=0.1),
            LRMultiplierConfig(pattern="layers.*", multiplier=1e-5),
        ],
    ),
    "optim.weight_decays": (
        ["*norm* 0"],
        [WeightDecayConfig(pattern="*norm*", weight_decay=0)],
    ),
    "data.mixture_stages": (
        ["web 0.9 code 0.1 for 1_000 steps", "code 1 for 5 tokens"],
        [
            MixtureStageConfig(weights={"web": 0.9, "code": 0.1}, steps=1000),
            MixtureStageConfig(weights={"code": 1}, tokens=5),
        ],
    ),
}


def test_former_format_is_covered_for_each_list_of_items() -> None:
    assert {f"{key}{ITEM}" for key in FORMER} == ITEM_SECTIONS.keys()


@pytest.mark.parametrize("key", FORMER)
def test_string_items_of_earlier_releases_load_with_a_warning(key: str, tmp_path: Path) -> None:
    texts, items = FORMER[key]
    section, name = key.split(".")
    base = [*TINY, *MIXTURE, "train.sequence_length=64"]
    loaded = load([*base, f"{key}={texts}"])
    assert getattr(getattr(loaded.config, section), name) == items
    (warning,) = loaded.warnings
    assert warning.where == f"command line: {key}"
    # The suggested setting has the same meaning, and no warning.
    action = re.fullmatch(r'Write "(.*)"\.', warning.action)
    assert action
    current = load([*base, action[1]])
    assert current.config == loaded.config and not current.warnings
    file = tmp_path / "run.yml"
    file.write_text(f"{section}:\n  {name}: {json.dumps(texts)}\n")
    (warning,) = load([*base, str(file)]).warnings
    action = re.fullmatch(r"Write `(.*)`\.", warning.action)
    assert action
    file.write_text(f"{section}:\n  {action[1]}\n")
    assert getattr(getattr(load([*base, str(file)]).config, section), name) == items


@pytest.mark.parametrize("key", FORMER)
def test_saved_configs_use_mappings_for_items(key: str) -> None:
    """A resumed run compares the saved values with its own."""
    texts, items = FORMER[key]
    section, name = key.split(".")
    config = load([*TINY, *MIXTURE, "train.sequence_length=64", f"{key}={texts}"]).config
    saved = to_dict(config)
    assert upgrade_setting(key, texts) == (key, saved[section][name])
    former = json.loads(json.dumps(saved))
    former[section][name] = texts
    assert upgrade_config(former) == json.loads(json.dumps(saved))
    assert from_dict(saved) == from_dict(former) == config
    printed = yaml.safe_load(to_yaml(config))
    assert from_dict(printed) == config
    # No warning, because the user did not write the saved config.
    assert not load([], former, "the checkpoint").warnings
    assert getattr(getattr(from_dict(former), section), name) == items


@pytest.mark.parametrize(
    "setting",
    [
        "optim.lr_phases=['10 linear 1 -> ']",
        "optim.lr_phases=['100 x 1 linear 1']",
        "optim.lr_phases=['']",
        "train.batch_ramp=['\u0662 for 5 steps']",
        "train.batch_ramp=['2 for 5__0 tokens']",
        "optim.lr_multipliers=['head']",
        "optim.lr_multipliers=['head x']",
        "data.mixture_stages=['web 1 web 2 for 3 steps']",
        "data.mixture_stages=['web 1 code for 3 steps']",
    ],
)
def test_invalid_string_items_are_rejected(setting: str) -> None:
    assert problem_of(setting).where.endswith("[0]")


def test_values_in_string_items_are_validated() -> None:
    assert problem_of("optim.lr_phases=['10 linear 2']").where.endswith("lr_phases[0].to")
    assert problem_of("train.batch_ramp=['0 for 3 steps']").where.endswith("[0].batch_size")
    assert problem_of("optim.lr_phases=['2 x rest linear 1']").where.endswith("[0].times")


# Documentation.


def test_fields_are_documented() -> None:
    assert "percentage of the run" in explain("optim.lr_phases")
    assert "from 0 to 1" in explain("optim.lr_phases[1].from")
    phases = json_schema()["properties"]["optim"]["properties"]["lr_phases"]
    assert phases["items"]["required"] == ["shape", "to"]
    assert phases["items"]["properties"]["from"]["maximum"] == 1
    stages = json_schema()["properties"]["data"]["properties"]["mixture_stages"]
    weights = stages["items"]["properties"]["weights"]
    assert weights["additionalProperties"]["type"] == "number"


def test_batch_ramp_from_items() -> None:
    ramp = "[{batch_size: 2, steps: 5}, {batch_size: 4, tokens: 300}]"
    train = load([*TINY, "train.sequence_length=16", f"train.batch_ramp={ramp}"]).config.train
    assert BatchRamp.from_config(train) == BatchRamp((RampStage(2, 5), RampStage(4, 5)), 8)
    assert total_steps(train) == 200


def test_warnings_show_items() -> None:
    phases = "[{steps: 200, shape: linear, to: 1}, {steps: 5, shape: linear, to: 0}]"
    (warning,) = check.find_warnings(load([*TINY, f"optim.lr_phases={phases}"]).config)
    assert warning.value.startswith("[{steps: 200, shape: linear, to: 1.0}, {steps: 5")
