"""Evaluation documents that are also in the training data, in any combination of formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.sections.data import DataConfig, MixedSourceConfig
from maxpipe.config.sections.source import SourceConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.corpus import Corpus
from maxpipe.data.datasets import Overlap, find_overlaps, uncompared_sources
from maxpipe.data.documents import build_index
from maxpipe.data.loader import Datasets, build_loaders
from maxpipe.data.prepared.prepare import PrepareJob, prepare
from maxpipe.data.prepared.reader import WINDOW_SPANS
from maxpipe.data.tokenizer import ByteTokenizer
from tests.data.texts import Texts

TRAINED = [f"trained {i} " * 3 for i in range(40)]
OTHERS = [f"other {i} " * 3 for i in range(9)]


def lines(path: Path, texts: list[str]) -> SourceConfig:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return SourceConfig(source="jsonl", path=str(path))


def prepared(source: SourceConfig, folder: Path) -> SourceConfig:
    plan = PrepareJob(
        data=source, tokenizer=TokenizerConfig(), seed=0, folder=folder, workers=1, shard_tokens=300
    )
    prepare(plan, lambda *_: None)
    return SourceConfig(source="tokens", path=str(folder))


def opened(trained: SourceConfig, **changes: Any) -> Datasets:
    data = DataConfig(source=trained.source, path=trained.path, **changes)
    return build_loaders(data, TokenizerConfig(), seed=3, batch_size=4, sequence_length=16)


def corpora_of(datasets: Datasets) -> tuple[Corpus, Mapping[str, Corpus]]:
    assert datasets.corpora is not None
    return datasets.corpora


def all_of(datasets: Datasets, *, large: bool = True) -> list[Overlap]:
    return find_overlaps(*corpora_of(datasets), large=large)


def found(datasets: Datasets) -> dict[str, tuple[int, int]]:
    return {each.name: (each.count, each.total) for each in all_of(datasets)}


def uncompared(datasets: Datasets, *, large: bool) -> list[str]:
    train, sets = corpora_of(datasets)
    return [section for section, _ in uncompared_sources([train, *sets.values()], large=large)]


@pytest.mark.parametrize("form", ["text in text", "ids in text", "text in ids", "ids in ids"])
def test_overlap_is_found_in_every_format(form: str, tmp_path: Path) -> None:
    trained = lines(tmp_path / "trained.jsonl", ["", *TRAINED])
    clean = lines(tmp_path / "clean.jsonl", ["", *OTHERS])
    copied = lines(tmp_path / "copied.jsonl", ["", OTHERS[0], TRAINED[7], TRAINED[0], OTHERS[1]])
    if form.endswith("in ids"):
        trained = prepared(trained, tmp_path / "trained")
    if form.startswith("ids"):
        copied = prepared(copied, tmp_path / "copied")
    sets = {"clean": clean, "copied": copied}
    datasets = opened(trained, validation=sets, validation_fraction=0)
    [each] = all_of(datasets)
    assert (each.name, each.count, each.total) == ("copied", 2, 4)
    assert "copied" in each.first and "trained" in each.trained
    if form == "text in text":
        assert each.first.endswith("copied.jsonl:3") and each.trained.endswith("trained.jsonl:9")


def test_duplicates_across_splits_are_found(tmp_path: Path) -> None:
    # Every text occurs twice: if one copy is held out, the other may be trained on.
    trained = lines(tmp_path / "trained.jsonl", TRAINED * 2)
    datasets = opened(trained, validation_fraction=0.25)
    held_out = corpora_of(datasets)[0].indexed[0].numbers("validation", 0.25)
    numbers = np.concatenate(list(held_out)).tolist()
    copies = [n for n in numbers if (n + 40) % 80 not in numbers]
    assert len(copies) > 0 and found(datasets) == {"": (len(copies), 20)}
    assert found(opened(lines(tmp_path / "once.jsonl", TRAINED), validation_fraction=0.25)) == {}


def test_all_sources_of_a_mixture_are_compared(tmp_path: Path) -> None:
    mixture = {
        "a": MixedSourceConfig(source="jsonl", path=lines(tmp_path / "a", TRAINED[:20]).path),
        "b": MixedSourceConfig(source="jsonl", path=lines(tmp_path / "b", TRAINED[20:]).path),
    }
    sets = {"one": lines(tmp_path / "one", [TRAINED[30], *OTHERS])}
    data = DataConfig(mixture=mixture, validation=sets, validation_fraction=0)
    datasets = build_loaders(data, TokenizerConfig(), seed=0, batch_size=4, sequence_length=16)
    [each] = all_of(datasets)
    assert (each.name, each.count, each.total) == ("one", 1, 10)
    assert each.trained == f"{tmp_path}/b:11"


def test_sources_without_digests_are_listed(tmp_path: Path) -> None:
    folder = prepared(lines(tmp_path / "a.jsonl", TRAINED), tmp_path / "ids")
    sets = {"old": SourceConfig(source="megatron", path=folder.path)}
    datasets = opened(folder, validation=sets)
    assert found(datasets) == {}
    assert uncompared(datasets, large=True) == ["data.validation.old"]


def test_windowed_documents_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents in windows are compared one part of a split at a time."""
    many = [f"{i}" for i in range(3000)]
    folder = prepared(lines(tmp_path / "a.jsonl", many), tmp_path / "ids")
    assert WINDOW_SPANS > 2
    monkeypatch.setattr("maxpipe.data.prepared.reader.WINDOW_SPANS", 2)
    sets = {"some": lines(tmp_path / "some", ["5", "x", "2999"])}
    datasets = opened(folder, validation=sets, validation_fraction=0)
    assert found(datasets) == {"some": (2, 3)}
    assert uncompared(datasets, large=True) == []
    # Not at every start, because all digests would be read.
    assert all_of(datasets, large=False) == [] and uncompared(datasets, large=False) == ["data"]


@pytest.mark.parametrize("seed", range(5))
def test_overlap_counts_match_text_sets(seed: int, tmp_path: Path) -> None:
    """Compared with sets of the texts, which include many duplicates and empty texts."""
    draw = np.random.default_rng(seed)
    trained, held = (
        ["" if n < 9 else str(n) for n in draw.integers(0, 400, 300).tolist()] for _ in range(2)
    )
    sets = {"held": lines(tmp_path / "held", held)}
    datasets = opened(lines(tmp_path / "trained", trained), validation=sets)
    train = corpora_of(datasets)[0].indexed[0]
    parts = {
        split: [trained[n] for part in train.numbers(split, 0.05) for n in part.tolist()]
        for split in ("train", "validation")
    }
    assert sorted(parts["train"] + parts["validation"]) == sorted(trained)
    seen = set(parts["train"])
    expected = {
        name: (sum(text in seen for text in texts if text), sum(map(bool, texts)))
        for name, texts in (("", parts["validation"]), ("held", held))
    }
    assert found(datasets) == {name: each for name, each in expected.items() if each[0]}


def test_index_stores_document_digests(tmp_path: Path) -> None:
    source = Texts(["abc", "", "é", "abc"])
    for _ in range(2):  # built, then read from the cache
        index = build_index(source, ByteTokenizer(), str(tmp_path))
        assert index.digests[0] == index.digests[3] and len(set(index.digests.tolist())) == 3
    assert source.reads == 4


def test_validation_sets_do_not_change_training(tmp_path: Path) -> None:
    trained = lines(tmp_path / "trained.jsonl", TRAINED)
    sets = {"b": lines(tmp_path / "b", OTHERS), "a": lines(tmp_path / "a", OTHERS[:2])}
    alone, beside = opened(trained), opened(trained, validation=sets)
    assert alone.train.fingerprint() == beside.train.fingerprint()
    assert list(beside.eval_loaders()) == ["", "a", "b"]
    assert alone.fingerprint() != beside.fingerprint()
    # Every token of a validation set is evaluated once.
    seen = [
        beside.validation_sets["b"].batch(step)
        for step in range(beside.validation_sets["b"].num_batches)
    ]
    assert sum(int(batch["loss_mask"].sum()) for batch in seen) == sum(len(t) + 1 for t in OTHERS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.validation.code.source=jsonl", "data.validation.code.path"),
        ("data.validation.code.sauce=jsonl", "Did you mean data.validation.code.source?"),
        ("data.validation.train.source=corpus", "must have a different name"),
        ("data.validation.a.source=corpus eval.batches=0", "nothing is evaluated"),
        ("data.validation.a.source=text data.validation.a.path=/none/x", "data.validation.a.path"),
    ],
)
def test_invalid_validation_sets_are_rejected(
    given: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = [f"run.dir={tmp_path}", *given.split()]
    assert main(["data", "show", "quickstart", *keys]) == 2
    assert said in capsys.readouterr().err


def test_data_show_accepts_validation_set_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lines(tmp_path / "mine.jsonl", ["one document"])
    keys = ["data.validation.mine.source=jsonl", f"data.validation.mine.path={source.path}"]
    command = ["data", "show", "quickstart", f"run.dir={tmp_path}", *keys]
    assert main([*command, "--split", "mine"]) == 0
    assert "one document" in capsys.readouterr().out
    assert main([*command, "--split", "mines"]) == 2
    assert "--split mine" in capsys.readouterr().err
