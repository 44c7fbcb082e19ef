"""Named validation sets: separate metrics, reproduced by `maxpipe eval`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of two validation sets, one of text files and one of JSON lines."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "digits").mkdir()
    for number in range(7):
        (folder / "digits" / f"{number}.txt").write_text(f"{number} {number * 37} " * 5)
    (folder / "words.jsonl").write_text(
        "".join(json.dumps({"text": f"the shire and the oat {n} " * 3}) + "\n" for n in range(5))
    )
    named = {"digits": ("text", folder / "digits"), "words": ("jsonl", folder / "words.jsonl")}
    return [
        setting
        for name, (source, path) in named.items()
        for setting in (
            f"data.validation.{name}.source={source}",
            f"data.validation.{name}.path={path}",
        )
    ]


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found: dict[int, dict[str, float]] = {}
    for row in map(json.loads, lines):
        tags = {tag: value for tag, value in row.items() if tag.startswith("eval/")}
        found.setdefault(row["step"], {}).update(tags)
    return {step: tags for step, tags in found.items() if tags}


@pytest.mark.long
def test_each_validation_set_has_its_own_metrics(
    tiny: Path, uninterrupted: Path, sets: list[str], run: Run, tmp_path: Path
) -> None:
    keys = [*sets, "eval.batches=100"]
    output = run("train", tiny, f"run.dir={tmp_path}", *keys)
    assert "validation on digits after step 24" in output
    found, without = evaluations(tmp_path / "run"), evaluations(uninterrupted)
    assert list(found) == list(without) == [12, 24]
    names = ("loss", "nats_per_byte")
    expected = {f"eval/{of}{name}" for of in ("", "digits/", "words/") for name in names}
    assert all(set(tags) == expected for tags in found.values())
    assert found[24]["eval/digits/loss"] != found[24]["eval/words/loss"]
    for name in ("digits", "words", "validation"):
        output = run("eval", f"{tmp_path}/run@12", "--split", name, "--json")
        scored = json.loads(output[output.index("{") :])
        tag = "eval/loss" if name == "validation" else f"eval/{name}/loss"
        assert scored["nats_per_token"] == pytest.approx(found[12][tag], rel=1e-6)
    # Validation sets do not affect training data, so the run resumes without them.
    output = run("train", tiny, f"run.dir={tmp_path}", "train.steps=26", code=0)
    assert "warning: data" not in output
    assert "--split digits." in run("eval", f"{tmp_path}/run", "--split", "digit", *sets, code=2)


@pytest.mark.long
def test_eval_loss_without_holdout_covers_all_validation_sets(
    tiny: Path, sets: list[str], run: Run, tmp_path: Path
) -> None:
    keys = [*sets, "eval.batches=100", "data.validation_fraction=0", "train.steps=12"]
    run("train", tiny, f"run.dir={tmp_path}", *keys)
    tags = evaluations(tmp_path / "run")[12]
    scored = {}
    for name in ("digits", "words"):
        output = run("eval", f"{tmp_path}/run", "--split", name, "--json")
        scored[name] = json.loads(output[output.index("{") :])
    tokens = sum(each["tokens"] for each in scored.values())
    nats = sum(each["tokens"] * each["nats_per_token"] for each in scored.values())
    assert tags["eval/loss"] == pytest.approx(nats / tokens, rel=1e-6)


@pytest.mark.long
def test_validation_sets_with_training_mixture(
    tiny: Path, sets: list[str], run: Run, tmp_path: Path
) -> None:
    """Metrics of validation sets equal those without a mixture; sets are not mixture sources."""
    text = next(line for line in tiny.read_text().splitlines() if "path:" in line)
    folder = text.partition("path: ")[2].partition(",")[0]
    mixed = []
    for name, first in (("a", 1), ("b", 2)):
        mixed += [f"data.mixture.{name}.source=text"]
        mixed += [f"data.mixture.{name}.path={folder}/{first}*.txt"]
    keys = [*sets, *mixed, "data.path=", "eval.batches=100", "train.steps=12"]
    run("train", tiny, f"run.dir={tmp_path}", *keys)
    tags = evaluations(tmp_path / "run")[12]
    for name in ("digits", "words"):
        alone = ["data.mixture={}", f"data.path={folder}"]
        for way in ([], alone):  # with and without per-source sums
            output = run("eval", f"{tmp_path}/run", *way, "--split", name, "--json")
            scored = json.loads(output[output.index("{") :])
            assert scored["sources"] == {}
            loss = pytest.approx(tags[f"eval/{name}/loss"], rel=1e-6)
            assert scored["nats_per_token"] == loss


@pytest.mark.long
def test_overlap_of_validation_and_training_data_is_reported(
    tiny: Path, sets: list[str], run: Run, tmp_path: Path
) -> None:
    text = next(line for line in tiny.read_text().splitlines() if "path:" in line)
    folder = Path(text.partition("path: ")[2].partition(",")[0])
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in sorted(folder.iterdir())[:3]:
        (copied / path.name).write_text(path.read_text())
    keys = ["data.validation.mine.source=text", f"data.validation.mine.path={copied}"]
    keys += ["data.validation_fraction=0", "train.steps=1", f"run.dir={tmp_path}"]
    output = run("train", tiny, *keys, "data.validation_overlap=stop", code=2)
    rule = "has 3 of 3 documents that also occur in the training data"
    assert f"data.validation.mine [MP-DATA-009] {rule}" in " ".join(output.split())
    assert str(copied) in output and "Traceback" not in output
    output = run("train", tiny, *keys)
    assert f"data.validation.mine: {rule}" in output
    output = run("train", tiny, *keys, "run.name=other", "data.validation_overlap=ignore")
    assert "in the training data" not in output
