from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from maxpipe.config import render, schema
from maxpipe.config.foreign_keys import foreign_tables
from maxpipe.config.load import load, to_dict
from maxpipe.config.schema import ALL_KEYS, ALL_SECTIONS, SECTIONS
from maxpipe.errors import ConfigError
from maxpipe.models.count import num_params
from maxpipe.models.registry import describe
from maxpipe.parallel.axes import DEFAULT_AXIS_RULES
from maxpipe.schedule.catalog import SCHEDULES

ROOT = Path(__file__).parents[2]
MODELS = sorted((ROOT / "configs/model").glob("*.yml"))
TINY = str(ROOT / "configs/model/tiny.yml")

Golden = Callable[[str, str], None]


def test_every_section_and_key_has_a_doc():
    docs = render.field_docs()
    assert set(docs) == {*ALL_SECTIONS, *ALL_KEYS}
    assert all(doc.endswith(".") and "\n" not in doc for doc in docs.values())


def test_field_docs_use_string_below_field():
    docs = render.field_docs()
    assert docs["model.num_heads"] == "Number of query heads."
    assert docs["mesh"].startswith("Sizes of the mesh axes")
    assert ast.get_docstring(ast.parse(Path(schema.__file__).read_text())) not in docs.values()


@pytest.mark.parametrize("key", ["", *ALL_SECTIONS, *ALL_KEYS])
def test_explain_covers_all_sections_and_keys(key: str):
    text = render.explain(key)
    assert text.endswith("\n") and max(map(len, text.splitlines())) <= 100
    if key:
        assert text.startswith(f"{key}\n")


def test_explain_prints_range_and_default():
    text = render.explain("model.dropout")
    assert "at least 0 and less than 1" in text and "default  0.0" in text
    assert "required" in render.explain("model.d_model")
    assert all(f"`{name}`" in render.field_docs()["pipeline.schedule"] for name in SCHEDULES)


def test_explain_axis_rules_prints_the_table(golden: Golden):
    text = render.explain("mesh.axis_rules")
    for name, axes in DEFAULT_AXIS_RULES.items():
        assert re.search(rf"^  {name} +{', '.join(axes) or 'none'}", text, re.MULTILINE)
    golden("config/explain_axis_rules.txt", text)


@pytest.mark.parametrize(
    ("key", "guess"),
    [("repeats", "pipeline.repeats"), ("pipeline.repeat", "pipeline.repeats"), ("optm", "optim")],
)
def test_explain_of_unknown_key_suggests_similar_key(key: str, guess: str):
    with pytest.raises(
        ConfigError, match=f"Did you mean `maxpipe config explain {guess}`"
    ) as error:
        render.explain(key)
    assert str(error.value).count("\n") == 2


@pytest.mark.parametrize(
    ("key", "rule", "action"),
    [
        (
            "per_device_batch_size",
            "the maxpipe key is train.batch_size: train.batch_size is the total",
            "explain train.batch_size`",
        ),
        (
            "activation_checkpoint.mode",
            "the maxpipe key is pipeline.remat.",
            "explain pipeline.remat`",
        ),
        ("max_steps", "the maxpipe key is train.steps.", "explain train.steps`"),
        ("training.seq_len", "the maxpipe key is train.sequence_length.", "train.sequence_length`"),
        ("loss_scale", "is a key of other trainers: bfloat16", "guard.bad_steps"),
    ],
)
def test_explain_of_foreign_key_names_maxpipe_key(key: str, rule: str, action: str):
    with pytest.raises(ConfigError) as error:
        render.explain(key)
    [problem] = error.value.problems
    assert problem.where == f"command line: {key}"
    assert rule in problem.rule and action in problem.action


@pytest.mark.parametrize("name", sorted({*foreign_tables()["keys"]}))
def test_explain_names_key_for_every_foreign_name(name: str):
    for foreign in foreign_tables()["keys"][name].split():
        if foreign not in ALL_SECTIONS and foreign not in ALL_KEYS:
            with pytest.raises(ConfigError) as error:
                render.explain(foreign)
            assert "is a key of other trainers" in str(error.value), foreign


def test_explain_of_unrecognizable_key_points_to_sections():
    with pytest.raises(ConfigError, match="lists the sections"):
        render.explain("qqqqq")


def test_json_schema_agrees_with_load():
    schema = render.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    valid = to_dict(load([TINY, "train.steps=1", "mesh.axis_rules.mlp=[]"]).config)
    validator.validate(valid)
    for path in MODELS:
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    for wrong in (
        {"modle": {}},
        {"model": {"num_layer": 1}},
        {"model": {"num_layers": "x"}},
        {"model": {"num_layers": 0}},
        {"model": {"dropout": 1}},
        {"optim": {"schedule": "cosin"}},
        {"mesh": {"axis_rules": {"hedas": []}}},
        {"mesh": {"axis_rules": {"mlp": "tensor"}}},
    ):
        assert not validator.is_valid(wrong), wrong


def test_json_schema_contains_docs_and_defaults():
    keys = render.json_schema()["properties"]["pipeline"]["properties"]
    assert keys["repeats"]["default"] == 1
    assert all(key["description"] for key in keys.values())


def test_print_config_loads_back_and_names_origins(tmp_path: Path, golden: Golden):
    file = tmp_path / "run.yml"
    file.write_text("train: {steps: 3}\n")
    loaded = load([TINY, str(file), "run.name=on", "mesh.axis_rules.mlp=[]", "data.path=a\nb\x01"])
    text = render.print_config(loaded, origin=True)
    assert f"  steps: 3  # {file}\n" in text
    assert "  name: 'on'  # run.name=on\n" in text
    assert "  beta1: 0.9  # default\n" in text
    copy = tmp_path / "copy.yml"
    for origin in (True, False):
        copy.write_text(render.print_config(loaded, origin=origin))
        assert load([str(copy)]).config == loaded.config
    golden("config/print.yml", render.print_config(loaded, origin=False))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_file_header_matches_its_config(path: Path, monkeypatch: pytest.MonkeyPatch):
    text = path.read_text(encoding="utf-8")
    assert list(yaml.safe_load(text)) == ["model"]
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    command = re.search(r"Command: +maxpipe config print (.*?) Expects:", header)
    assert command
    monkeypatch.chdir(ROOT)
    config = load(command[1].split()).config
    assert f"{num_params(describe(config.model)):,} parameters" in header


def test_section_docs_do_not_end_after_abbreviations():
    """The abbreviation `e.g.` does not end a sentence."""
    text = render.explain("data")
    assert "the name of a dataset, e.g. `c4/en:3.1.0`. (default" in " ".join(text.split())
    for section in SECTIONS:
        assert not re.search(
            r"\b(e\.g|i\.e)\.? \(default", " ".join(render.explain(section).split())
        )
