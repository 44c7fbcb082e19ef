"""Validation rules for the config section `data`: paths and templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError


def error_text(*given: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(["tiny", "train.steps=1", *given])
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ("data.source=parquet", "data.path", "data/*.parquet"),
        ("data.source=huggingface", "data.path", "data.path=saved"),
        ("data.source=text data.path=a data.paths=[b]", "data.paths", "must be empty"),
        ("data.source=tfds data.paths=[a,b]", "data.paths", "accepts only one path"),
        ("data.template={a}", "data.template", "with data.source=corpus"),
        ("data.source=jsonl data.path=a data.template={a", "data.template", "unmatched"),
        ("data.source=jsonl data.path=a data.template={}", "data.template", "column"),
        ("data.source=jsonl data.path=a data.template=x", "data.template", "column"),
        ("data.bad_records=ignore", "data.bad_records", "stop"),
        ("data.max_bad_records=0", "data.max_bad_records", "1"),
        ("data.max_decompressed_bytes=0", "data.max_decompressed_bytes", "1"),
    ],
)
def test_invalid_data_settings_are_rejected(given: str, key: str, words: str) -> None:
    message = error_text(*given.split())
    assert key in message and words in message


@pytest.mark.parametrize("source", ["jsonl", "parquet", "arrayrecord", "huggingface"])
def test_data_paths_and_templates_are_loaded(source: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(
        f'data:\n  source: {source}\n  paths: [a, gs://b/c]\n  template: "{{x}}\\n{{y.z}}"\n'
    )
    data = load(["tiny", "train.steps=1", str(file)]).config.data
    assert data.paths == ["a", "gs://b/c"] and data.template == "{x}\n{y.z}"
    given = ("data.source=jsonl", "data.path=a", r"data.template={x}\n{y}")
    assert load(["tiny", "train.steps=1", *given]).config.data.template == r"{x}\n{y}"


def test_list_in_data_path_suggests_data_paths() -> None:
    assert "data.paths" in error_text("data.source=jsonl", "data.path=[a,b]")
