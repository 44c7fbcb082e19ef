"""Values of keys that had another name in earlier releases."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from maxpipe.config.load import load, to_dict
from maxpipe.config.schema import flatten, upgrade_config, upgrade_setting

RUN = ["tiny", "train.steps=2"]
MIXTURE = ["data.mixture.web.source=synthetic"]

RENAMED: list[tuple[list[str], str, str, str]] = [
    ([], "data.packing", "cut", "concatenate"),
    (MIXTURE, "data.mixture.web.packing", "cut", "concatenate"),
    ([], "pipeline.weight_gather", "visit", "window"),
    ([], "checkpoint.best_mode", "smallest", "min"),
    ([], "checkpoint.best_mode", "largest", "max"),
    ([], "mesh.context_attention", "gather", "all_gather"),
    ([], "mesh.context_attention", "heads", "ulysses"),
    (["tiny-moe"], "model.moe.dispatch", "all", "dense"),
    ([], "guard.bad_steps", "roll_back", "rollback"),
    ([], "guard.on_spike", "note", "warn"),
    ([], "guard.on_spike", "roll_back", "rollback"),
]
"""Overrides that the key requires, the key, its former value and its current value."""


@pytest.mark.parametrize(("more", "key", "former", "current"), RENAMED)
def test_former_value_in_override_loads_with_a_warning(
    more: list[str], key: str, former: str, current: str
) -> None:
    loaded = load([*RUN, *more, f"{key}={former}"])
    (warning,) = loaded.warnings
    assert warning.where == f"command line: {key}" and warning.value == former
    assert warning.rule == f"was renamed to {key}={current}."
    assert loaded.config == load([*RUN, *more, f"{key}={current}"]).config


@pytest.mark.parametrize(("more", "key", "former", "current"), RENAMED)
def test_former_value_in_saved_config_loads_without_warning(
    more: list[str], key: str, former: str, current: str
) -> None:
    config = load([*RUN, *more, f"{key}={current}"]).config
    now = to_dict(config)
    saved: dict[str, Any] = copy.deepcopy(now)
    *path, name = key.split(".")
    section = saved
    for part in path:
        section = section[part]
    section[name] = former
    loaded = load([], saved, "config.yml")
    assert loaded.config == config and not loaded.warnings
    assert flatten(upgrade_config(saved)) == flatten(now)
    assert upgrade_setting(key, current) == (key, current)


@pytest.mark.parametrize(
    ("pipeline", "schedule"),
    [
        ({"schedule": "1f1b", "repeats": 2}, "interleaved"),
        ({"schedule": "1f1b", "repeats": 1}, "1f1b"),
        ({"schedule": "1f1b"}, "1f1b"),
        ({"schedule": "zb_v", "repeats": 2}, "zb_v"),
    ],
)
def test_saved_1f1b_with_repeats_is_interleaved(pipeline: dict[str, Any], schedule: str) -> None:
    assert upgrade_config({"pipeline": pipeline})["pipeline"]["schedule"] == schedule
