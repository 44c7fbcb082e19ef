"""Runs with every packing strategy: source formats, resume and several processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from maxpipe.config.sections.source import Packing
from tests.data.conversations import write_records
from tests.train.runs import SAME, Run, Start, losses, saved_digest, wait_for

PACKINGS: tuple[Packing, ...] = get_args(Packing)[1:]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LENGTH = 48
EVERY = (f"train.sequence_length={LENGTH}", "train.steps=8", "log.every=1", "log.trackers=[]")
SMALL = ("mesh.cpu_devices=1", "mesh.ici_stage=1", "pipeline.microbatches=1")
STAGED = ("mesh.cpu_devices=8", "mesh.ici_stage=4", "mesh.ici_fsdp=2")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    root = tmp_path_factory.mktemp("sources")
    draw = np.random.default_rng(0)
    texts = [
        "".join(draw.choice(list("etaoin shrdlu"), size=int(size)))
        for size in draw.integers(1, 2 * LENGTH, 80)
    ]
    write_records(root / "a.jsonl", [{"text": text} for text in texts])
    run("data", "prepare", *keys_of("jsonl", root), "--out", root / "tokens", "--workers", 1)
    talks = [{"prompt": f"say {n}", "response": text[:30]} for n, text in enumerate(texts)]
    write_records(root / "chat.jsonl", talks)
    (root / "chat.jinja").write_text(TEMPLATE)
    return root


def keys_of(kind: str, sources: Path) -> list[str]:
    if kind == "tokens":
        return ["data.source=tokens", f"data.path={sources / 'tokens'}"]
    if kind == "jsonl":
        return ["data.source=jsonl", f"data.path={sources / 'a.jsonl'}"]
    found = ["data.source=jsonl", f"data.path={sources / 'chat.jsonl'}", "data.chat=prompt"]
    return [*found, f"data.chat_template={sources / 'chat.jinja'}"]


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
def test_each_packing_trains_on_every_source_format(
    packing: Packing, tiny: Path, sources: Path, run: Run, tmp_path: Path
) -> None:
    found = {}
    for kind in ("jsonl", "tokens", "chat"):
        keys = [*keys_of(kind, sources), f"data.packing={packing}", f"run.dir={tmp_path / kind}"]
        printed = run("train", tiny, *EVERY, *SMALL, *keys)
        found[kind] = losses(tmp_path / kind / "run")
        line = re.search(r"^packing +(\w+), efficiency ([\d.]+)%$", printed, re.M)
        assert line and line[1] == packing
        # Conversations are truncated to about one sequence each; texts leave short segments.
        assert (float(line[2]) < 75) == (packing == "pad" and kind != "chat"), line[0]
        assert list(found[kind]) == list(range(1, 9)) and all(
            map(np.isfinite, found[kind].values())
        )
        assert found[kind][8] < found[kind][1]
        evaluated = losses(tmp_path / kind / "run", "eval/loss")
        assert evaluated and all(map(np.isfinite, evaluated.values()))
    assert found["tokens"] == found["jsonl"]


@pytest.fixture(scope="module")
def uninterrupted(
    tiny: Path, sources: Path, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a completed run with `data.packing=best_fit`."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("train", *of_best_fit(tiny, sources, folder))
    return folder / "run"


def of_best_fit(tiny: Path, sources: Path, folder: Path) -> tuple[object, ...]:
    keys = (*keys_of("chat", sources), "data.packing=best_fit", f"run.dir={folder}")
    return (tiny, *EVERY, *STAGED, *keys, "checkpoint.every=1", "eval.batches=0")


@pytest.mark.long
def test_resume_after_kill_is_bitwise_equal(
    tiny: Path, sources: Path, uninterrupted: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    arguments = of_best_fit(tiny, sources, tmp_path)
    with start("train", *arguments) as process:
        wait_for(process, "step 4/")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    run("train", *arguments)
    assert losses(tmp_path / "run") == losses(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)


@pytest.mark.long
def test_two_processes_have_same_losses(
    tiny: Path, sources: Path, uninterrupted: Path, run: Run, tmp_path: Path
) -> None:
    run("launch", "local", "--processes", 2, *of_best_fit(tiny, sources, tmp_path))
    assert losses(tmp_path / "run") == pytest.approx(losses(uninterrupted), rel=SAME)


@pytest.mark.long
def test_resume_with_changed_packing_is_rejected(
    tiny: Path, sources: Path, run: Run, tmp_path: Path
) -> None:
    keys = (
        tiny,
        *EVERY,
        *SMALL,
        *keys_of("jsonl", sources),
        "eval.batches=0",
        f"run.dir={tmp_path}",
    )
    run("train", *keys, "checkpoint.every=4")
    more = (*keys, "train.steps=9")
    output = run("train", *more, "data.packing=best_fit", code=2)
    assert "since step 8 was saved: the packing strategy was concatenate and is best_fit" in output
    output = run("train", *more, "data.packing=best_fit", "data.allow_change=true")
    assert "the packing strategy was concatenate when step 8 was saved and is best_fit" in output
    output = run("train", *keys, "train.steps=10", code=2)
    assert "since step 9 was saved: the packing strategy was best_fit and is concatenate" in output
