"""Every packing strategy with every source format: targets, batches by step, and statistics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.config.sections.data import DataConfig, MixedSourceConfig
from maxpipe.config.sections.source import Packing
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Batch, Datasets, Loader, build_loaders
from maxpipe.data.mixture import seed_of
from maxpipe.data.packing import packing_efficiency
from maxpipe.data.prepared import reader
from maxpipe.data.prepared.manifest import SPAN_DOCUMENTS
from maxpipe.errors import ConfigError
from tests.data.conversations import write_records
from tests.data.test_megatron import write

PACKINGS: tuple[Packing, ...] = get_args(Packing)[1:]
FITTED = PACKINGS[1:]
KINDS = ("jsonl", "tokens", "megatron", "chat")
LENGTH, ROWS, DOCUMENTS = 40, 6, 90
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def text_of(number: int) -> str:
    return f"number {number} " * (1 + number * number % 11)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    texts = [text_of(number) for number in range(DOCUMENTS)]
    write_records(root / "a.jsonl", [{"text": text} for text in texts])
    keys = ["data.source=jsonl", f"data.path={root / 'a.jsonl'}"]
    assert main(["data", "prepare", *keys, "--out", str(root / "tokens"), "--workers", "1"]) == 0
    write(root / "pair", [[list(text.encode())] for text in texts])
    talks = [{"prompt": f"say {n}", "response": text} for n, text in enumerate(texts)]
    write_records(root / "chat.jsonl", talks)
    (root / "chat.jinja").write_text(TEMPLATE)
    return root


def keys_of(kind: str, here: Path) -> dict[str, Any]:
    return {
        "jsonl": {"source": "jsonl", "path": str(here / "a.jsonl")},
        "tokens": {"source": "tokens", "path": str(here / "tokens")},
        "megatron": {"source": "megatron", "path": str(here / "pair")},
        "chat": {
            **{"source": "jsonl", "path": str(here / "chat.jsonl"), "chat": "prompt"},
            "chat_template": str(here / "chat.jinja"),
            "long_conversations": "split",
        },
    }[kind]


def opened(here: Path, kind: str, packing: Packing, **more: Any) -> Datasets:
    data = DataConfig(**{"validation_fraction": 0.2, **keys_of(kind, here), "packing": packing})
    options: Any = {"seed": 0, "batch_size": ROWS, "sequence_length": LENGTH, **more}
    return build_loaders(data, TokenizerConfig(), **options)


def equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def rows_of_an_epoch(loader: Loader, epoch: int = 0) -> list[bytes]:
    """Return tokens, targets and mask of each row as bytes."""
    count = len(loader.sequences)
    found = []
    for number in range(epoch * count, (epoch + 1) * count):
        batch = loader.batch(number // ROWS, [number % ROWS])
        found.append(b"".join(batch[name].tobytes() for name in ("tokens", "targets", "loss_mask")))
    return found


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_target_once(kind: str, packing: Packing, here: Path) -> None:
    """Compares counts of (token, next token) pairs of both splits with a loop over the texts."""
    found = opened(here, kind, packing)
    assert found.validation is not None
    seen: Counter[tuple[int, int]] = Counter()
    for loader in (found.train, found.validation):
        for number in range(len(loader.sequences)):
            row = loader.sequences[number]
            mask = row["loss_mask"] > 0
            seen.update(
                zip(row["tokens"][mask].tolist(), row["targets"][mask].tolist(), strict=True)
            )
    expected: Counter[tuple[int, int]] = Counter()
    for number in range(DOCUMENTS):
        ids, first = [256, *text_of(number).encode(), 257], 1
        if kind == "chat":
            ids = list(f"user: say {number}\nassistant: {text_of(number)}\n".encode())
            # The assistant turn is trained on, including its header.
            first = len(f"user: say {number}\n")
        expected.update(zip(ids[first - 1 : -1], ids[first:], strict=True))
    assert seen == expected
    again = [rows_of_an_epoch(found.train, epoch) for epoch in (0, 1)]
    assert sorted(again[0]) == sorted(again[1]) and again[0] != again[1]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["tokens", "megatron"])
def test_token_files_match_text_batches(kind: str, packing: Packing, here: Path) -> None:
    text, ids = opened(here, "jsonl", packing), opened(here, kind, packing)
    assert all(equal(text.train.batch(step), ids.train.batch(step)) for step in (0, 7, 10**9))
    assert text.validation is not None and ids.validation is not None
    assert equal(text.validation.batch(0), ids.validation.batch(0))
    if kind == "tokens":
        assert not compare_fingerprints(text.train.fingerprint(), ids.train.fingerprint())


@pytest.mark.parametrize("packing", FITTED)
@pytest.mark.parametrize("kind", KINDS)
def test_any_process_can_read_any_row(kind: str, packing: Packing, here: Path) -> None:
    whole, other = opened(here, kind, packing).train, opened(here, kind, packing).train
    for step in (3, 10**12):
        batch = whole.batch(step)
        parts = [other.batch(step, range(rank, ROWS, 2)) for rank in range(2)]
        for name, array in batch.items():
            assert np.array_equal(array[0::2], parts[0][name])
            assert np.array_equal(array[1::2], parts[1][name])
    with whole.batches(11) as batches:
        assert equal(next(batches), other.batch(11))


@pytest.mark.parametrize("kind", ["jsonl", "chat"])
def test_documents_that_fit_are_not_split(kind: str, here: Path) -> None:
    for packing in FITTED:
        train = opened(here, kind, packing).train
        names = [d for n in range(len(train.sequences)) for d in train.sequences.documents(n)]
        for document, count in Counter(names).items():
            assert count == -(-(train.size("", document) - 1) // LENGTH)


def test_packing_strategy_changes_fingerprint(here: Path) -> None:
    concatenated, best, first = (
        opened(here, "jsonl", packing).train.fingerprint()
        for packing in ("concatenate", "best_fit", "first_fit")
    )
    # Runs that began while `concatenate` was called `cut` have the same fingerprint.
    assert "packing" not in concatenated
    assert compare_fingerprints(concatenated, best) == [
        ("the packing strategy", "concatenate", "best_fit")
    ]
    assert compare_fingerprints(best, concatenated) == [
        ("the packing strategy", "best_fit", "concatenate")
    ]
    assert compare_fingerprints(first, best) == [("the packing strategy", "first_fit", "best_fit")]


def test_each_mixture_source_has_its_own_packing(here: Path) -> None:
    def mixed(**packings: Packing) -> Loader:
        mixture = {
            kind: MixedSourceConfig(**keys_of(kind, here), packing=packing)
            for kind, packing in packings.items()
        }
        data = DataConfig(mixture=mixture, validation_fraction=0.2)
        options: Any = {"seed": 0, "batch_size": ROWS, "sequence_length": LENGTH}
        return build_loaders(data, TokenizerConfig(), **options).train

    found = mixed(chat="pad", jsonl="concatenate")
    for part, packing in zip(found.stream.parts, ("pad", "concatenate"), strict=True):
        alone = opened(here, part.name, packing, seed=seed_of(part.name, 0)).train  # type: ignore[arg-type]
        assert len(part.sequences) == len(alone.sequences)
        for number in (0, len(part.sequences) - 1):
            assert equal(part.sequences[number], alone.sequences[number])
    other = mixed(chat="best_fit", jsonl="concatenate")
    assert compare_fingerprints(found.fingerprint(), other.fingerprint()) == [
        ("chat: the packing strategy", "pad", "best_fit")
    ]


@pytest.mark.parametrize("packing", FITTED)
def test_packing_in_windows(
    packing: Packing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "WINDOW_SPANS", 2)
    monkeypatch.setattr("maxpipe.data.packing._MIN_CACHED_DOCUMENTS", 100)
    count = 4 * SPAN_DOCUMENTS + 300
    write_records(tmp_path / "a.jsonl", [{"text": "x" * (n % 37)} for n in range(count)])
    keys = ["data.source=jsonl", f"data.path={tmp_path / 'a.jsonl'}"]
    assert (
        main(["data", "prepare", *keys, "--out", str(tmp_path / "tokens"), "--workers", "1"]) == 0
    )

    def go() -> tuple[Loader, Loader]:
        found = opened(tmp_path, "tokens", packing, cache_dir=str(tmp_path / "index"))
        assert found.validation is not None
        return found.train, found.validation

    found, held = go()
    names = Counter(
        name
        for each in (found.sequences, held.sequences)
        for n in range(len(each))
        for name in each.documents(n)
    )
    assert len(names) == count and set(names.values()) == {1}
    kept = sorted(path.name.partition("-")[0] for path in (tmp_path / "index").iterdir())
    # Two windows for training and one single-span window for validation.
    assert kept == ["plan"] * (3 if packing != "pad" else 0) + ["rows"] * 2
    again, _ = go()
    assert equal(found.batch(10**7), again.batch(10**7))
    assert len(list((tmp_path / "index").iterdir())) == len(kept)


# --- command output ------------------------------------------------------------------------------


def stats(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["data", "stats", "quickstart", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_data_stats_match_training_packing(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"data.{name}={value}" for name, value in keys_of(kind, here).items()]
    for packing in PACKINGS:
        more = [f"data.packing={packing}", f"train.sequence_length={LENGTH}"]
        found = stats(capsys, *keys, *more)
        data = DataConfig(**keys_of(kind, here), packing=packing, validation_fraction=0)
        options: Any = {"seed": 0, "batch_size": ROWS, "sequence_length": LENGTH}
        whole = build_loaders(data, TokenizerConfig(), **options).train
        assert found["packing"] == packing
        # First fit gives other rows for another order of documents.
        slack = 2 if packing == "first_fit" else 0
        assert abs(found["sequences"] - len(whole.sequences)) <= slack
        assert found["packing_efficiency"] == pytest.approx(
            packing_efficiency(whole.sequences), rel=0.02 if slack else 1e-5
        )


def test_data_show_and_find_padded_rows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f"data.{name}={value}" for name, value in keys_of("chat", here).items()]
    keys += [f"train.sequence_length={LENGTH * 3}", "data.packing=pad"]
    capsys.readouterr()
    assert main(["data", "show", "quickstart", *keys, "--row", "1"]) == 0
    shown = capsys.readouterr().out
    assert "1 document," in shown and "of padding" in shown and shown.count("--- document") == 1
    assert main(["data", "find", "quickstart", "1", "1", *keys, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["documents"]
    assert f"document {found['document']}, " in shown and "chat.jsonl" in found["where"]


def test_packing_key_and_its_aliases(here: Path) -> None:
    def problem(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(["quickstart", *overrides])
        return str(caught.value)

    assert load(["quickstart", "data.packing=best_fit"]).config.data.packing == "best_fit"
    assert "best_fit" in problem("data.packing=bfd")
    assert "pad" in problem("data.packing=none")
    assert "data.packing" in problem("data.sample_packing=true")
    one = ["data.mixture.a.source=corpus", "data.mixture.b.source=synthetic"]
    found = problem(*one, "data.packing=pad")
    assert "if data.mixture is set" in found and "data.mixture.a.packing=pad" in found
    mixed = load(["quickstart", *one, "data.mixture.b.packing=pad"]).config.data.mixture
    assert mixed["a"].packing == "auto" and mixed["b"].packing == "pad"


def test_documents_without_targets_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "pair", [[[256, 257]], [[256, 257]]])
    write(tmp_path / "short", [[[256]], [[257]], [[256]], [[257]]] * 20)
    data = DataConfig(source="megatron", path=str(tmp_path / "short"), packing="best_fit")
    with pytest.raises(ConfigError, match="document of at least two tokens: the split train"):
        build_loaders(data, TokenizerConfig(), seed=0, batch_size=2, sequence_length=8)
