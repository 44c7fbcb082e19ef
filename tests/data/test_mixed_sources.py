"""Sources of every format in a mixture: same samples as alone, and errors that name their keys."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.config.sections.data import DataConfig, MixedSourceConfig
from maxpipe.config.sections.source import SourceConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.datasets import build_datasets
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.mixture import seed_of
from maxpipe.errors import ConfigError
from tests.data.conversations import write_records
from tests.data.texts import write_texts

LENGTH, ROWS = 23, 5
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sources in several formats."""
    root = tmp_path_factory.mktemp("kinds")
    write_texts(root / "files", [f"file {i} " * (1 + i % 4) for i in range(30)])
    lines = [{"head": f"h{i}", "body": f"line {i} " * (1 + i % 5)} for i in range(25)]
    write_records(root / "lines.jsonl", lines)
    talks = [{"prompt": f"say {i}", "response": f"I say {i} " * 3} for i in range(12)]
    write_records(root / "talks.jsonl", talks)
    (root / "chat.jinja").write_text(TEMPLATE)
    return root


def kinds(here: Path) -> dict[str, dict[str, Any]]:
    return {
        "files": {"source": "text", "path": str(here / "files")},
        "lines": {
            **{"source": "jsonl", "paths": [str(here / "lines.jsonl")]},
            "template": "{head}: {body}",
        },
        "talks": {
            **{"source": "jsonl", "path": str(here / "talks.jsonl"), "chat": "prompt"},
            "chat_template": str(here / "chat.jinja"),
        },
        "made": {"source": "synthetic"},
    }


def opened(data: DataConfig, seed: int = 0) -> Datasets:
    return build_loaders(
        data, TokenizerConfig(), seed=seed, batch_size=ROWS, sequence_length=LENGTH
    )


def test_mixture_samples_match_standalone_sources(here: Path) -> None:
    sections = kinds(here)
    mixture = {name: MixedSourceConfig(**keys) for name, keys in sections.items()}
    weights = {name: MixedSourceConfig(**keys, weight=1) for name, keys in sections.items()}
    assert mixture.keys() == weights.keys()
    mixed = opened(DataConfig(mixture=weights)).train
    alone = {
        name: opened(DataConfig(**keys), seed_of(name, 0)).train for name, keys in sections.items()
    }
    seen: dict[str, list[bytes]] = {name: [] for name in sections}
    for step in range(60):
        arrays = mixed.batch(step)
        for row, each in enumerate(mixed.sequence_origins(step)):
            seen[each.source].append(b"".join(arrays[name][row].tobytes() for name in ARRAYS))
            assert each.documents and mixed.where(each.source, each.documents[0])
    for name, found in seen.items():
        assert len(found) > 40
        wanted = [alone[name].batch(step) for step in range(len(found) // ROWS + 1)]
        stacked = {key: np.concatenate([each[key] for each in wanted]) for key in ARRAYS}
        for number, row in enumerate(found):
            assert row == b"".join(stacked[key][number].tobytes() for key in ARRAYS)


ARRAYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def overrides(here: Path) -> list[str]:
    given = ["quickstart", f"train.sequence_length={LENGTH + 1}", f"run.dir={here / 'runs'}"]
    for name, keys in kinds(here).items():
        for key, value in keys.items():
            given.append(f"data.mixture.{name}.{key}={written(value)}")
    return [*given, "data.validation_fraction=0.1"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main([*arguments]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def test_prepared_folders_match_text_in_mixture(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches and fingerprint match those of the text, so a run can be resumed with either."""
    inputs = overrides(here)
    more = []
    for name in ("files", "lines", "talks"):
        out = str(tmp_path / name)
        printed(
            capsys, "data", "prepare", *inputs, "--source", name, "--out", out, "--workers", "1"
        )
        key = f"data.mixture.{name}"
        more += [f"{key}.source=tokens", f"{key}.path={out}", f"{key}.paths=[]", f"{key}.template="]
        more += [f"{key}.chat=off", f"{key}.chat_template="]
    text = opened(load(inputs).config.data)
    ids = opened(load([*inputs, *more]).config.data)
    assert text.train.fingerprint() == ids.train.fingerprint()
    assert text.unigram_entropy == ids.unigram_entropy
    for one, other in ((text.train, ids.train), (text.validation, ids.validation)):
        assert one is not None and other is not None
        for step in (0, 3, 7):
            pair = one.batch(step), other.batch(step)
            assert all(np.array_equal(pair[0][key], pair[1][key]) for key in pair[0])
    # The prepared folder can also be read as Megatron files.
    megatron = ["data.mixture.files.source=megatron", f"data.mixture.files.path={tmp_path}/files"]
    mixed = opened(load([*inputs, *more, *megatron]).config.data)
    assert mixed.unigram_entropy is None
    for step in (0, 3):
        assert mixed.train.sequence_origins(step) == ids.train.sequence_origins(step)


def test_prepare_requires_source_name_for_mixture(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "prepare", *overrides(here), "--out", str(tmp_path / "out")]
    assert "Add --source files." in printed(capsys, *command, code=2)
    said = printed(capsys, *command, "--source", "file", code=2)
    assert "must be one of files, lines, made, talks." in said
    said = printed(capsys, *command, "--source", "talks", "--workers", "1")
    assert f"wrote {tmp_path / 'out'}: " in said


def test_data_stats_reports_every_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "data", "stats", *overrides(here), "--json"))["sources"]
    assert list(found) == sorted(kinds(here))
    documents = {name: each["documents"] for name, each in found.items()}
    assert (documents["files"], documents["lines"], documents["talks"]) == (30, 25, 12)
    assert found["talks"]["tokens_trained"] < found["talks"]["tokens"]
    facts = opened(load(overrides(here)).config.data).train.fingerprint()["sources"]
    assert {name: each["tokens"] for name, each in found.items()} == {
        name: each["tokens"] for name, each in facts.items()
    }
    text = printed(capsys, "data", "stats", *overrides(here))
    assert all(f"source      {name}: " in text for name in kinds(here))


def test_data_find_and_show_name_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = overrides(here)
    rows = opened_rows = None
    found = json.loads(
        printed(capsys, "data", "find", *inputs[:1], "3", "1", *inputs[1:], "--json")
    )
    assert rows is opened_rows
    assert found["source"] in kinds(here) and found["documents"][0]["where"]
    said = printed(capsys, "data", "show", *inputs, "--step", "3", "--row", "1")
    assert f"of {found['source']}" in said
    for each in found["documents"]:
        assert each["where"] in said


def test_doctor_opens_every_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from maxpipe.diagnosis.doctor import check_data

    checks = {each.name: each for each in check_data(load(overrides(here)).config)}
    assert set(checks) == {"tokenizer", *(f"data.mixture.{name}" for name in kinds(here))}
    assert {each.status for each in checks.values()} == {"ok"}, list(map(str, checks.values()))


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({"source": "jsonl"}, "path", "must not be empty with data.mixture.web.source=jsonl"),
        ({"source": "text", "path": "[a, b]"}, "path", "must be a single path"),
        ({"source": "text", "path": "a", "paths": ["b"]}, "paths", "data.mixture.web.path (a)"),
        ({"source": "tokens", "paths": ["b"]}, "paths", "which accepts only one path"),
        ({"source": "text", "path": "a", "template": "{x}"}, "template", "have no columns"),
        ({"source": "jsonl", "path": "a", "template": "x"}, "template", "column"),
        ({"source": "jsonl", "path": "a", "template": "{x"}, "template", "unmatched"),
        ({"source": "text", "path": "a", "chat": "messages"}, "chat", "have no fields"),
        (
            {"source": "jsonl", "path": "a", "chat": "prompt", "bad_records": "skip"},
            "bad_records",
            "must be stop if data.mixture.web.chat is set",
        ),
        (
            {"source": "jsonl", "path": "a", "chat_template": "x"},
            "chat_template",
            "is ignored with data.mixture.web.chat=off",
        ),
        (
            {"source": "jsonl", "path": "a", "trained_roles": []},
            "trained_roles",
            "must not be empty",
        ),
        (
            {"source": "jsonl", "path": "a", "trained_roles": ["x"]},
            "trained_roles",
            "data.mixture.web.chat_roles",
        ),
        ({"source": "jsonl", "path": "a", "max_bad_records": 0}, "max_bad_records", "at least 1"),
        ({"path": "a"}, "path", "is ignored with data.mixture.web.source=corpus"),
    ],
)
def test_config_rules_apply_to_every_source(given: dict[str, Any], key: str, said: str) -> None:
    keys = [f"data.mixture.web.{name}={written(value)}" for name, value in given.items()]
    with pytest.raises(ConfigError) as caught:
        load(["quickstart", *keys], to_train=True)
    found = {each.where.rpartition(" ")[2]: str(each) for each in caught.value.problems}
    assert said in found[f"data.mixture.web.{key}"]
    assert not re.search(r"data\.(?!mixture\.web\.)[a-z]", found[f"data.mixture.web.{key}"])


def test_bad_record_error_names_source_keys(here: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "bad.jsonl", [{"text": "good"}, {"txt": "bad"}, {"text": "good"}])
    mixture = {
        "web": MixedSourceConfig(source="jsonl", path=str(tmp_path / "bad.jsonl")),
        "files": MixedSourceConfig(**kinds(here)["files"]),
    }
    with pytest.raises(ConfigError) as caught:
        opened(DataConfig(mixture=mixture))
    [problem] = caught.value.problems
    assert "bad.jsonl" in problem.where and "data.mixture.web.text_field" in f"{problem}"


def test_mixed_source_config_has_every_source_key() -> None:
    names = set(SourceConfig.__slots__)
    assert names <= set(DataConfig.__dataclass_fields__)
    assert names <= set(MixedSourceConfig.__dataclass_fields__)


def test_data_mixture_lists_any_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [*overrides(here), "data.mixture_stages=[{weights: {files: 3, lines: 1}, steps: 4}]"]
    command = ["data", "mixture", *inputs, "--step"]
    train = build_datasets(load(inputs).config, lambda: None).train
    for step in (1, 3, 5, 1_000_000):
        found = json.loads(printed(capsys, *command, str(step), "--json"))
        rows = [(row["source"], row["sequence"]) for row in found["step"]["rows"]]
        assert rows == [(row.source, row.sequence) for row in train.sequence_origins(step - 1)]
    first, last = found["stages"]
    assert first["shares"] == {"files": 0.75, "lines": 0.25, "made": 0, "talks": 0}
    assert (first["first_step"], last["first_step"]) == (1, 5)
    text = printed(capsys, *command, "3")
    assert "from step 1: files 75.00%, lines 25.00%" in text and "\nfrom step 5: " in text
    sources = Counter(row.source for row in train.sequence_origins(2))
    assert f"sequences by source: files {sources['files']}, lines {sources['lines']}\n" in text
    said = printed(capsys, "data", "mixture", "quickstart", code=2)
    assert "data.source" in said
    stopped = [*inputs, "data.end=stop", "train.steps=100000", "data.mixture.made.source=text"]
    stopped.append(f"data.mixture.made.path={here / 'files'}")
    text = printed(capsys, "data", "mixture", *stopped)
    assert "no data: all sources are exhausted" in text and text.count(", 1.00 epochs") == 4
