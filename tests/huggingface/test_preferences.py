"""docs/tutorials/preferences.md: import a model, train it on preferences, and export it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import FAST_COMPILE
from tests.huggingface.test_finetune import logits
from tests.huggingface.test_oracle import PYTHON, close, reason, run_oracle
from tests.pages import DOCS, run_page
from tests.train.runs import records

PAGE = DOCS / "tutorials" / "preferences.md"
VOCAB = 320


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder in which the page's commands ran, and the output of each block."""
    folder = tmp_path_factory.mktemp("preferences")
    return folder, run_page(PAGE, folder, FAST_COMPILE)


@pytest.mark.long
def test_preferences_page_commands(written: tuple[Path, list[str]]) -> None:
    folder, (_, trained, told) = written
    found = records(folder / "runs" / "prefer")
    assert found[40]["train/margin"] > found[2]["train/margin"] + 1
    assert found[40]["eval/margin"] > found[10]["eval/margin"] > 0
    assert found[40]["eval/accuracy"] == 1
    # The sequences shown on the page equal the output of the command.
    shown = re.search(r"in `⟦ ⟧`:\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown and shown[1] in trained
    answers = re.findall(r"^ ?(Yes|No), it is", told, re.M)
    assert answers == ["Yes", "No"]
    assert re.search(r"^margin +\d", told, re.M)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    after = logits(folder, "preferred", tokens, VOCAB)
    assert (after == logits(folder, "runs/prefer@40", tokens, VOCAB)).all()
    assert np.abs(after - logits(folder, "base", tokens, VOCAB)).max() > 0.1
    assert (folder / "margin.svg").read_text().startswith("<svg")


@pytest.mark.oracle
def test_transformers_loads_exported_model(written: tuple[Path, list[str]], tmp_path: Path) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    folder, _ = written
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 23))
    np.save(tmp_path / "tokens.npy", tokens)
    job = {"folder": str(folder / "preferred"), "tokens": str(tmp_path / "tokens.npy")}
    job["logits"] = str(tmp_path / "logits.npy")
    run_oracle("load", [job], tmp_path)
    close(logits(folder, "preferred", tokens, VOCAB), np.load(job["logits"]))
