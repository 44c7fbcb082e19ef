"""Preference training: margins, reference log-probabilities and resume."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config.config_files import REFERENCE_FILE
from maxpipe.posttrain.reference_logprobs import load_references, save_references
from tests.data.conversations import write_records
from tests.train.runs import (
    SAME,
    Run,
    Start,
    events,
    forget_after,
    is_explained,
    records,
    saved_digest,
    start_pair,
    wait_for,
    wait_for_outputs,
)

WORDS = ("sea", "sun", "hill", "rain", "wind", "road", "bird", "tree")


def toy(count: int = 40) -> list[dict[str, Any]]:
    """Return questions, each with a short yes and a no of another length."""
    return [
        {"prompt": f"{WORDS[i % 8]} {i}?", "chosen": "yes" + "!" * (i % 3), "rejected": "no way"}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def given(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run with four stages."""
    path = write_records(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", toy())
    return [
        *(str(tiny), "train.objective=preference", "data.source=jsonl", f"data.path={path}"),
        *("data.chat=pairs", "data.packing=best_fit", "data.max_pairs_per_sequence=2"),
        *("train.sequence_length=64", "log.every=1", "preference.beta=0.5"),
    ]


@pytest.fixture(scope="module")
def uninterrupted(given: list[str], run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run, with its output in `output.txt`."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = run("train", *given, f"run.dir={folder}")
    (folder / "run" / "output.txt").write_text(output)
    return folder / "run"


def test_margin_increases(uninterrupted: Path) -> None:
    found = records(uninterrupted)
    first, last = found[1], found[24]
    assert first["train/loss"] == pytest.approx(np.log(2), rel=1e-4)  # equal to reference
    assert first["train/margin"] == pytest.approx(0, abs=1e-4)
    assert last["train/margin"] > 2 and last["train/accuracy"] == 1
    assert last["train/loss"] < 0.3
    for when, record in (("train", last), ("eval", found[24])):
        rewards = record[f"{when}/reward_chosen"], record[f"{when}/reward_rejected"]
        assert record[f"{when}/margin"] == pytest.approx(rewards[0] - rewards[1], rel=1e-4)
    assert found[24]["eval/accuracy"] == 1 and "eval/nats_per_byte" not in found[24]
    output = (uninterrupted / "output.txt").read_text()
    assert "computing reference log-probabilities of 40 pairs" in output
    assert re.search(r"validation after step 24: loss \d\.\d+, accuracy 1\.0000, margin ", output)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["orpo", "ipo"])
def test_orpo_and_ipo_increase_margin(
    given: list[str], loss: str, run: Run, tmp_path: Path
) -> None:
    """The target margin of IPO is beta / (2 beta)."""
    keys = [f"preference.loss={loss}", "checkpoint.every=0"]
    output = run("train", *given, *keys, f"run.dir={tmp_path}")
    found = records(tmp_path / "run")
    assert found[24]["train/margin"] > found[1]["train/margin"] + (0.05 if loss == "orpo" else 0.3)
    assert found[24]["eval/accuracy"] == 1
    if loss == "orpo":
        assert found[24]["train/nats_chosen"] < found[1]["train/nats_chosen"] - 1
        assert "reference" not in output and not (tmp_path / "run" / REFERENCE_FILE).exists()


@pytest.mark.layouts
def test_losses_match_across_layouts(
    given: list[str], uninterrupted: Path, run: Run, tmp_path: Path
) -> None:
    layout = ["mesh.ici_stage=2", "mesh.ici_fsdp=2", "pipeline.microbatches=2", "train.steps=6"]
    layout += ["pipeline.loss_block_tokens=24", "eval.every=0", "optim.schedule=constant"]
    plain = ["train.steps=6", "eval.every=0", "optim.schedule=constant"]
    found = []
    for name, keys in (("one", layout), ("other", plain)):
        run("train", *given, *keys, f"run.dir={tmp_path}", f"run.name={name}")
        found.append(records(tmp_path / name))
    stored = [load_references(tmp_path / name / REFERENCE_FILE) for name in ("one", "other")]
    assert stored[0] and stored[1] and stored[0].weights == stored[1].weights
    np.testing.assert_allclose(stored[0].values[""], stored[1].values[""], rtol=SAME)
    for step in range(1, 7):
        for tag in ("train/loss", "train/grad_norm", "train/nats_chosen"):
            assert found[0][step][tag] == pytest.approx(found[1][step][tag], rel=20 * SAME), tag


@pytest.mark.long
def test_resume_after_kill_is_bitwise_equal(
    given: list[str], uninterrupted: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    process = start("train", *given, f"run.dir={tmp_path}")
    wait_for(process, "step 10/24")
    process.kill()
    process.communicate()
    before = (tmp_path / "run" / REFERENCE_FILE).read_bytes()
    output = run("train", *given, f"run.dir={tmp_path}")
    assert "resuming" in output and "reference log-probabilities" not in output
    assert (tmp_path / "run" / REFERENCE_FILE).read_bytes() == before
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)
    wanted, found = records(uninterrupted), records(tmp_path / "run")
    timed = ("perf/", "memory/")
    for step, record in wanted.items():
        for tag, value in record.items():
            if not tag.startswith(timed):
                assert found[step][tag] == value, (step, tag)


@pytest.mark.long
def test_interrupted_reference_pass_resumes(
    given: list[str], uninterrupted: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    """Ctrl-C keeps finished log-probabilities; the final ones equal those without a stop."""
    folder = tmp_path / "run"
    process = start("train", *given, f"run.dir={tmp_path}")
    wait_for(process, "computing reference log-probabilities")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 130, output
    is_explained(output)
    stored, wanted = (
        load_references(folder / REFERENCE_FILE),
        load_references(uninterrupted / REFERENCE_FILE),
    )
    assert stored and wanted
    known = ~np.isnan(stored.values[""]).any(1)
    assert known.any()
    np.testing.assert_array_equal(stored.values[""][known], wanted.values[""][known])
    output = run("train", *given, f"run.dir={tmp_path}", "train.steps=2", "eval.every=0")
    if not known.all():
        left = int((~known).sum())
        assert f"computing reference log-probabilities of {left} pair" in output
    again = load_references(folder / REFERENCE_FILE)
    assert again is not None
    np.testing.assert_array_equal(again.values[""], wanted.values[""])


def copied(uninterrupted: Path, folder: Path, step: int) -> Path:
    found = Path(shutil.copytree(uninterrupted, folder / "run"))
    forget_after(found, step)
    return found


@pytest.mark.long
def test_resume_without_reference_logprobs_is_rejected(
    given: list[str], uninterrupted: Path, run: Run, tmp_path: Path
) -> None:
    folder = copied(uninterrupted, tmp_path, 20)
    path = folder / REFERENCE_FILE
    kept = path.read_bytes()
    for damage in (lambda: path.unlink(), lambda: path.write_bytes(kept[:-300])):
        path.write_bytes(kept)
        damage()
        output = run("train", *given, f"run.dir={tmp_path}", code=74)
        is_explained(output)
        assert "lacks the reference log-probabilities" in output
    path.write_bytes(kept)
    output = run("train", *given, f"run.dir={tmp_path}", "preference.beta=0.7")
    assert "preference.beta was 0.5" in output
    assert events(folder, "done")[-1] == ("done", 24)


@pytest.mark.layouts
def test_references_of_other_weights_are_recomputed(
    given: list[str], uninterrupted: Path, run: Run, tmp_path: Path
) -> None:
    """Before its first checkpoint, a run may start from other weights."""
    keys = [f"run.dir={tmp_path}", "train.steps=1", "eval.batches=0"]
    (tmp_path / "run").mkdir()
    stored = load_references(uninterrupted / REFERENCE_FILE)
    assert stored is not None
    marked = {name: each + 1 for name, each in stored.values.items()}
    path = tmp_path / "run" / REFERENCE_FILE
    save_references(path, type(stored)("0" * 64, stored.digests, marked))
    output = run("train", *given, *keys)
    assert "was computed with different weights and will be overwritten" in output
    found = load_references(path)
    assert found and (found.values[""] == stored.values[""]).all()
    assert found.weights == stored.weights


@pytest.mark.long
def test_eval_uses_reference_logprobs_of_run(
    given: list[str], uninterrupted: Path, run: Run, tmp_path: Path
) -> None:
    page = json.loads(
        run("eval", uninterrupted, "--json", "mesh.cpu_devices=1").split("\n{", 1)[-1].join("{ ")
    )
    wanted = records(uninterrupted)[24]
    for name in ("loss", "margin", "accuracy"):
        assert page["preference"][name] == pytest.approx(wanted[f"eval/{name}"], rel=20 * SAME)
    assert page["pairs"] == 8
    other = write_records(tmp_path / "other.jsonl", toy(7))
    output = run("eval", uninterrupted, "--data", other, code=2)
    is_explained(output)
    assert "references" in output
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a text of its own " * 9)
    assert "nats per byte" in run("eval", uninterrupted, "--data", tmp_path / "text")


@pytest.mark.layouts
def test_mixture_of_preference_pairs(given: list[str], run: Run, tmp_path: Path) -> None:
    """Each source has its own reference log-probabilities, losses and order."""
    keys = ["data.source=corpus", "data.path=", "data.chat=off", "data.packing=auto"]
    for name, records_ in (("a", toy(21)), ("b", toy(16)[::-1])):
        path = write_records(tmp_path / f"{name}.jsonl", records_)
        section = f"data.mixture.{name}"
        keys += [f"{section}.source=jsonl", f"{section}.path={path}", f"{section}.chat=pairs"]
        keys += [f"{section}.packing=best_fit", f"{section}.weight=1"]
    path = write_records(tmp_path / "set.jsonl", toy(5))
    keys += ["data.validation.held.source=jsonl", f"data.validation.held.path={path}"]
    keys += ["data.validation.held.chat=pairs", "data.validation.held.packing=pad"]
    keys += ["data.validation_overlap=ignore", "train.steps=8", "eval.every=8"]
    output = run("train", *given, *keys, f"run.dir={tmp_path}")
    assert "computing reference log-probabilities of 42 pairs" in output
    stored = load_references(tmp_path / "run" / REFERENCE_FILE)
    assert stored and {name: len(each) for name, each in stored.values.items()} == {
        "a": 21,
        "b": 16,
        "validation.held": 5,
    }
    last = records(tmp_path / "run")[8]
    assert last["source/a/loss"] > 0 and last["source/b/eval_loss"] > 0
    assert last["eval/held/margin"] > 0


@pytest.mark.layouts
@pytest.mark.multihost
def test_adapter_training_matches_in_two_processes(
    uninterrupted: Path, given: list[str], run: Run, start: Start, tmp_path: Path
) -> None:
    """The base model is the reference; one run has stages, the other shards over all devices."""
    base = (
        f"checkpoint.restore_from={uninterrupted}",
        "checkpoint.restore=weights",
        "adapter.rank=4",
    )
    keys = (*given, *base, "train.steps=6", f"run.dir={tmp_path}", "eval.every=3")
    run("train", *keys, "run.name=alone")
    split = ("mesh.cpu_devices=2", "mesh.ici_stage=1", "mesh.ici_fsdp=4", "pipeline.microbatches=2")
    split = (*split, "pipeline.schedule=interleaved", "run.name=together")
    with start_pair(start, *keys, *split) as processes:
        outputs = wait_for_outputs(processes)
    assert [each.returncode for each in processes] == [0, 0], outputs
    alone, together = (records(tmp_path / name) for name in ("alone", "together"))
    assert alone.keys() == together.keys() and len(alone) == 6
    for step, wanted in alone.items():
        tags = [tag for tag in wanted if tag.startswith(("train/", "eval/"))]
        found, wanted = ([each[tag] for tag in tags] for each in (together[step], wanted))
        np.testing.assert_allclose(found, wanted, rtol=SAME, atol=1e-6)
