"""Value ranges of keys in named sections."""

from __future__ import annotations

import re

import pytest

from maxpipe.config.load import load
from maxpipe.config.render import explain, json_schema
from maxpipe.config.rules import BOUNDS, NAME
from maxpipe.config.schema import ALL_KEYS
from maxpipe.errors import ConfigError

NAMED = sorted(key for key in BOUNDS if f".{NAME}." in key)
SECTIONS = [
    "data.mixture.web.source=synthetic",
    "data.validation.web.source=synthetic",
    "alerts.rules.web.metric=train/loss",
    "eval.generative_tasks.tests.path=prompts.jsonl",
]


def rejected(*given: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(["tiny", *SECTIONS, *given])
    return {each.where.removeprefix("command line: "): str(each) for each in caught.value.problems}


@pytest.mark.parametrize("declared", NAMED)
def test_values_outside_of_the_range_are_rejected(declared: str):
    bound, name = BOUNDS[declared], "tests" if "generative" in declared else "web"
    key = declared.replace(f".{NAME}.", f".{name}.")
    values = [bound.low - 1, *([bound.high * 2] if bound.high < float("inf") else [])]
    for value in values:
        number = int(value) if ALL_KEYS[declared] is int else value
        problem = rejected(f"{key}={number}")[key]
        assert f"must be {bound}." in problem
        assert f"Set {key}=" in problem


def test_all_violations_in_named_sections_are_reported_at_once():
    keys = ["alerts.rules.web.window", "alerts.rules.web.records", "alerts.rules.b.window"]
    assert {*keys} <= {*rejected(*(f"{key}=0" for key in keys), "alerts.rules.b.metric=x")}


def test_explain_and_the_schema_contain_the_range():
    assert re.search(r"\n  range +from 4 to 100000", explain("alerts.rules.NAME.window"))
    rules = json_schema()["properties"]["alerts"]["properties"]["rules"]
    window = rules["additionalProperties"]["properties"]["window"]
    assert (window["minimum"], window["maximum"]) == (4, 100000)
