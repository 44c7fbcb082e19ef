"""Students and teachers, by the command: meshes, stored answers, stops, and what is refused."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxpipe.data.prepared.folder import JOURNAL
from maxpipe.data.prepared.logits import MANIFEST, open_stored, read_manifest
from tests.train.runs import (
    SAME,
    Run,
    Start,
    forget_after,
    is_explained,
    losses,
    records,
    saved_digest,
    saved_steps,
    wait_for,
)

STEPS, EVERY, COUNT = 6, 2, 7
CONFIG = f"""
run: {{dir: RUNS}}
model: {{num_layers: 3, d_model: 16, num_heads: 2, num_kv_heads: 1, head_size: 8, d_mlp: 32,
         vocab_size: 259, compute_dtype: float32}}
train: {{steps: {STEPS}, batch_size: 8, sequence_length: 24}}
optim: {{learning_rate: 1.0e-2}}
data: {{source: text, path: TEXT, validation_fraction: 0.2}}
checkpoint: {{every: {EVERY}, keep: 10}}
eval: {{batches: 2}}
log: {{every: 1, tensorboard: false}}
runtime: {{platform: cpu, compilation_cache: ''}}
"""
TEACHER = ("model.d_model=32", "model.num_layers=4", "run.name=teacher", "train.steps=9")
TAUGHT = ("train.objective=distill", f"distill.top_k={COUNT}", "distill.temperature=1.5")
STAGED = ("mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=-1", "pipeline.microbatches=2")
LAYOUT = "distill.layout=[mesh.ici_stage=2,pipeline.microbatches=4]"
"""Of a teacher on two devices."""


class Place:
    """A folder with a teacher, and the arguments of runs there."""

    def __init__(self, folder: Path, run: Run):
        self.folder, self._run = folder, run

    def keys(self, name: str, *more: object) -> tuple[object, ...]:
        """Of a student that asks its teacher."""
        teacher = f"distill.teacher={self.folder / 'runs' / 'teacher'}@9"
        return (self.folder / "run.yml", f"run.name={name}", *TAUGHT, teacher, *more)

    def train(self, name: str, *more: object, code: int = 0) -> str:
        return self._run("train", *self.keys(name, *more), code=code)

    def prepare(self, out: Path, *more: object, code: int = 0) -> str:
        return self._run("distill", "prepare", *self.keys("x", *more), "--out", out, code=code)

    def stored(self, out: Path) -> tuple[str, ...]:
        """Overrides of a student that reads answers."""
        return "distill.teacher=''", f"distill.stored={out}"

    def losses(self, name: str) -> dict[int, float]:
        return losses(self.folder / "runs" / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Place:
    folder, words = tmp_path_factory.mktemp("distill"), random.Random(0)
    (folder / "text").mkdir()
    for number in range(20):
        letters = words.choices("etaoin shrdlu", k=words.randint(20, 300))
        (folder / "text" / f"{number}.txt").write_text("".join(letters))
    config = CONFIG.replace("RUNS", str(folder / "runs")).replace("TEXT", str(folder / "text"))
    (folder / "run.yml").write_text(config)
    run("train", folder / "run.yml", *TEACHER)
    return Place(folder, run)


@pytest.fixture(scope="module")
def asked(place: Place) -> Place:
    """With a run, `asked`, whose teacher has two devices as stages, and the student two others."""
    place.train("asked", *STAGED, "distill.devices=2", LAYOUT)
    return place


@pytest.fixture(scope="module")
def answers(place: Place) -> Path:
    """What the same teacher says of all rows."""
    out = place.folder / "answers"
    said = place.prepare(out, *STAGED, "distill.devices=2", LAYOUT)
    assert f"wrote {out}: " in said and (out / MANIFEST).exists() and not (out / JOURNAL).exists()
    return out


def test_two_meshes_equal_one(asked: Place) -> None:
    """Teacher and student on one device, and each with the same four in turn."""
    asked.train("one")
    wanted = asked.losses("one")
    assert list(wanted) == list(range(1, STEPS + 1)) and wanted[STEPS] < wanted[1]
    layout = "distill.layout=[mesh.ici_stage=4,mesh.ici_data=1,pipeline.microbatches=2]"
    asked.train("turns", *STAGED, layout)
    for name in ("asked", "turns"):
        found = asked.losses(name)
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=SAME)
    record = records(asked.folder / "runs" / "asked")[STEPS]
    batch = 8 * 24 * 4 * 5 + 8 * 4  # five arrays of tokens and the numbers of rows
    assert record["distill/transfer_bytes"] == batch + 8 * 24 * COUNT * 8
    assert record["distill/teacher_wait_s"] <= record["perf/data_wait_s"]
    mean = (record["train/cross_entropy"] + record["train/divergence"]) / 2
    np.testing.assert_allclose(record["train/loss"], mean, rtol=SAME)


def test_stored_answers_equal_asked_ones(asked: Place, answers: Path) -> None:
    """Bit for bit, of a teacher with the same layout; batches of another size find their rows."""
    asked.train("stored", *STAGED, "mesh.cpu_devices=2", *asked.stored(answers))
    assert asked.losses("stored") == asked.losses("asked")
    more = ("train.batch_size=4", "distill.top_k=5")
    asked.train("half", *more, *asked.stored(answers))
    asked.train("half-asked", *more)
    found, wanted = asked.losses("half"), asked.losses("half-asked")
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=SAME)


def test_a_student_that_was_killed_goes_on_bit_for_bit(asked: Place, start: Start) -> None:
    runs = asked.folder / "runs"
    keys = asked.keys("killed", *STAGED, "distill.devices=2", LAYOUT)
    process = start("train", *keys)
    while not (runs / "killed" / "checkpoints" / str(EVERY)).exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    process.communicate()
    forget_after(runs / "killed", EVERY)
    assert saved_steps(runs / "killed") == [EVERY]
    asked.train("killed", *STAGED, "distill.devices=2", LAYOUT)
    assert saved_digest(runs / "killed") == saved_digest(runs / "asked")
    assert asked.losses("killed") == asked.losses("asked")


def test_another_teacher_is_refused(asked: Place) -> None:
    """And another one's answers, when a student goes on; as a new run may start from weights."""
    runs = asked.folder / "runs"
    shutil.copytree(runs / "asked", runs / "changed")
    forget_after(runs / "changed", EVERY)
    other = f"distill.teacher={runs / 'teacher'}@2"
    said = asked.train("changed", *STAGED, "distill.devices=2", LAYOUT, other, code=2)
    is_explained(said)
    assert "must be the teacher that step 2 was saved with" in said


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("model.vocab_size=300",), "must have the vocabulary of the student: it has 259 ids"),
    (("distill.top_k=260",), "must be at most model.vocab_size (259)"),
    (("distill.devices=1",), "Set distill.devices=0 or less, or 0 to take turns"),
    (
        (*STAGED, "distill.devices=2", "distill.layout=[mesh.ici_stage=3]"),
        "distill.layout: mesh = stage 3",
    ),
    (
        (*STAGED, "distill.devices=2", "distill.layout=[mesh.ici_fsdp=2,pipeline.microbatches=3]"),
        "distill.layout: train.batch_size",
    ),
    (("distill.teacher=nobody",), "command line: distill.teacher = nobody"),
]


@pytest.mark.parametrize(("keys", "text"), REFUSED, ids=[text[:24] for _, text in REFUSED])
def test_what_does_not_fit_is_refused(place: Place, keys: tuple[str, ...], text: str) -> None:
    said = place.train("refused", *keys, code=2)
    is_explained(said)
    assert text in said


def test_stored_answers_of_something_else_are_refused(
    place: Place, answers: Path, tmp_path: Path
) -> None:
    found = read_manifest(str(answers))
    for changes, text in (
        ({"temperature": 1.0}, "distill.temperature = 1.0"),
        ({"top_k": COUNT + 1}, "distill.top_k = 8"),
        ({"row_tokens": 16}, "train.sequence_length = 16"),
        ({"vocab_size": 300}, "model.vocab_size = 300"),
        ({"sources": {"": {**found["sources"][""], "seed": 1}}}, "seed: 0 and 1"),
        ({"sources": {"web": found["sources"][""]}}, "no rows of data.mixture.web"),
    ):
        sizes = {"vocab_size": 259, "temperature": 1.5, "top_k": COUNT, "row_tokens": 24}
        given = {"sources": found["sources"], **sizes, **changes}
        with pytest.raises(Exception, match="(?s)" + text):
            open_stored(str(answers), **given)
    with pytest.raises(Exception, match="wrote: it has no logits.json"):
        read_manifest(str(tmp_path))


def test_a_flipped_bit_ends_the_run(place: Place, answers: Path, tmp_path: Path, run: Run) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(answers, damaged)
    file = damaged / "shard-00000.bin"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    said = place.train("damaged", *place.stored(damaged), code=74)
    assert "is damaged" in said and str(file) in said
    assert "damaged: copy or prepare" in run("data", "verify", damaged, code=74)
    assert "every byte is what was written" in run("data", "verify", answers)


def test_rows_that_have_changed_are_refused(place: Place, answers: Path, tmp_path: Path) -> None:
    """Where names, sizes and edges of files are what they were, and a digest of the row is not."""
    stored = open_stored(
        str(answers),
        read_manifest(str(answers))["sources"],
        **{"vocab_size": 259, "temperature": 1.5, "top_k": 3, "row_tokens": 24},
    )
    row = {name: np.zeros(24, np.int32) for name in ("tokens", "segment_ids")}
    with pytest.raises(Exception, match="sequence 2 has other tokens"):
        stored.read("", 2, row)


def stop(process: object) -> None:
    process.send_signal(signal.SIGINT)  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [stop, lambda process: process.kill()], ids=["ctrl-c", "kill"])
def test_preparing_goes_on_after_a_stop(
    place: Place,
    answers: Path,
    start: Start,
    tmp_path: Path,
    end: Callable[[object], None],
) -> None:
    """With the same bytes; shards are small, so that some are done."""
    out = tmp_path / "answers"
    keys = place.keys("x", *STAGED, "distill.devices=2", LAYOUT)
    command = ("distill", "prepare", *keys, "--out", out, "--shard-bytes", 9000)
    process = start(*command)
    while not (out / "shard-00001.bin").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    end(process)
    said, _ = process.communicate()
    if process.returncode == 130:
        assert "Run the same command again" in said
    assert not (out / MANIFEST).exists()
    with pytest.raises(Exception, match="has no manifest yet"):
        read_manifest(str(out))
    again = start(*command)
    said = again.communicate()[0]
    assert again.returncode == 0, said
    assert sum(each["rows"] for each in read_manifest(str(out))["shards"]) > 0
    assert content(out) == content(answers)
    assert "is complete" in place.prepare(
        out, *STAGED, "distill.devices=2", LAYOUT, "--shard-bytes", 9000
    )
    is_explained(place.prepare(out, "distill.temperature=2", code=2))


def content(folder: Path) -> bytes:
    """Records of all shards, joined."""
    return b"".join(each.read_bytes() for each in sorted(folder.glob("shard-*.bin")))


def test_several_processes_train_the_same(asked: Place, start: Start) -> None:
    """Each with devices of both meshes."""
    from tests.train.runs import ends, pair

    keys = asked.keys("pair", *STAGED, "mesh.cpu_devices=2", "distill.devices=2", LAYOUT)
    with pair(start, *keys) as processes:
        said = ends(processes)
    assert [each.returncode for each in processes] == [0, 0], said
    found, wanted = asked.losses("pair"), asked.losses("asked")
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=SAME)


assert wait_for
