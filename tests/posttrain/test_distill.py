"""Distillation by the command: meshes, stored logits, interrupts and rejected settings."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxpipe.config.load import load
from maxpipe.data.prepared.logits import MANIFEST, LogitsReader, open_logits, read_manifest
from maxpipe.data.prepared.manifest import JOURNAL
from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.errors import ConfigError, StorageError
from maxpipe.posttrain.distill import open_teacher
from maxpipe.step.build import split_devices
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
    start_pair,
    wait_for_outputs,
)

STEPS, EVERY, COUNT = 6, 2, 7
CONFIG = f"""
run: {{dir: RUNS}}
model: {{num_layers: 3, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, d_mlp: 32,
         vocab_size: 259, compute_dtype: float32}}
train: {{steps: {STEPS}, batch_size: 8, sequence_length: 24}}
optim: {{learning_rate: 1.0e-2}}
data: {{source: text, path: TEXT, validation_fraction: 0.2}}
checkpoint: {{every: {EVERY}, keep: 10}}
eval: {{batches: 2}}
log: {{every: 1, trackers: []}}
runtime: {{platform: cpu, compilation_cache: ''}}
"""
TEACHER = ("model.d_model=32", "model.num_layers=4", "run.name=teacher", "train.steps=9")
TEACHER += ("eval.batches=0",)
TAUGHT = ("train.objective=distill", f"distill.top_k={COUNT}", "distill.temperature=1.5")
STAGED = ("mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=-1", "pipeline.microbatches=2")
LAYOUT = "distill.teacher_layout=[mesh.ici_stage=2,pipeline.microbatches=4]"
"""Layout of a teacher on two devices."""


class Workspace:
    """A folder with a trained teacher, and the arguments of runs in it."""

    def __init__(self, folder: Path, run: Run):
        self.folder, self._run = folder, run

    def keys(self, name: str, *more: object) -> tuple[object, ...]:
        """Return the arguments of a student with a live teacher."""
        teacher = f"distill.teacher={self.folder / 'runs' / 'teacher'}@9"
        return (self.folder / "run.yml", f"run.name={name}", *TAUGHT, teacher, *more)

    def train(self, name: str, *more: object, code: int = 0) -> str:
        return self._run("train", *self.keys(name, *more), code=code)

    def prepare(self, out: Path, *more: object, code: int = 0) -> str:
        return self._run("distill", "prepare", *self.keys("x", *more), "--out", out, code=code)

    def stored(self, out: Path) -> tuple[str, ...]:
        """Return the overrides of a student that reads stored logits."""
        return "distill.teacher=", f"distill.teacher_logits={out}"

    def losses(self, name: str) -> dict[int, float]:
        return losses(self.folder / "runs" / name)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Workspace:
    folder, words = tmp_path_factory.mktemp("distill"), random.Random(0)
    (folder / "text").mkdir()
    for number in range(20):
        letters = words.choices("etaoin shrdlu", k=words.randint(20, 300))
        (folder / "text" / f"{number}.txt").write_text("".join(letters))
    config = CONFIG.replace("RUNS", str(folder / "runs")).replace("TEXT", str(folder / "text"))
    (folder / "run.yml").write_text(config)
    run("train", folder / "run.yml", *TEACHER)
    return Workspace(folder, run)


@pytest.fixture(scope="module")
def live(workspace: Workspace) -> Workspace:
    """A workspace with a run `live`: teacher and student have two devices each, as stages."""
    workspace.train("live", *STAGED, "distill.teacher_devices=2", LAYOUT)
    return workspace


@pytest.fixture(scope="module")
def stored_logits(workspace: Workspace) -> Path:
    """The logits of the same teacher for every sequence."""
    out = workspace.folder / "stored_logits"
    output = workspace.prepare(out, *STAGED, "distill.teacher_devices=2", LAYOUT)
    assert f"wrote {out}: " in output and (out / MANIFEST).exists() and not (out / JOURNAL).exists()
    return out


def assert_close(found: dict[int, float], wanted: dict[int, float]) -> None:
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=SAME)


@pytest.mark.layouts
def test_separate_teacher_mesh_matches_one_device(live: Workspace) -> None:
    """Compare one device with two devices each for teacher and student, in different layouts."""
    live.train("one")
    wanted = live.losses("one")
    assert_close(live.losses("live"), wanted)
    assert wanted[STEPS] < wanted[1]
    record = records(live.folder / "runs" / "live")[STEPS]
    batch = 8 * 24 * 4 * 5 + 8 * 4  # five arrays of tokens, and the sequence indices
    assert record["distill/transfer_bytes"] == batch + 8 * 24 * COUNT * 8
    assert record["distill/teacher_wait_s"] <= record["perf/data_wait_s"]
    mean = (record["train/cross_entropy"] + record["train/divergence"]) / 2
    np.testing.assert_allclose(record["train/loss"], mean, rtol=SAME)


@pytest.mark.layouts
def test_teacher_and_student_share_all_devices(live: Workspace) -> None:
    """Test a batch ramp, and batch size, sequence length and top_k of equal size, too."""
    live.train(
        "turns", *STAGED, "distill.teacher_layout=[mesh.ici_stage=4,pipeline.microbatches=2]"
    )
    assert_close(live.losses("turns"), live.losses("live"))
    ramp = ("train.batch_ramp=[{batch_size: 4, steps: 2}]", "pipeline.microbatches=2")
    live.train("ramp", *ramp)
    live.train("ramp-staged", *ramp, *STAGED, "distill.teacher_devices=2", LAYOUT)
    assert_close(live.losses("ramp-staged"), live.losses("ramp"))
    alike = ("train.batch_size=8", "train.sequence_length=8", "distill.top_k=8")
    live.train("alike", *alike)
    live.train("alike-staged", *alike, *STAGED, "distill.teacher_devices=2", LAYOUT)
    assert_close(live.losses("alike-staged"), live.losses("alike"))


def test_stored_logits_match_live_teacher(live: Workspace, stored_logits: Path) -> None:
    """Results are bitwise equal if the teacher has the same layout."""
    keys = (*STAGED, "mesh.cpu_devices=2", "eval.batches=0")
    live.train("stored", *keys, *live.stored(stored_logits))
    assert live.losses("stored") == live.losses("live")


@pytest.mark.layouts
def test_stored_logits_support_other_batch_sizes(live: Workspace, stored_logits: Path) -> None:
    more = ("train.batch_size=4", "distill.top_k=5")
    live.train("half", *more, *live.stored(stored_logits))
    live.train("half-live", *more)
    assert_close(live.losses("half"), live.losses("half-live"))


@pytest.mark.long
def test_resume_after_kill_is_bitwise_equal(live: Workspace, start: Start) -> None:
    runs = live.folder / "runs"
    keys = live.keys("killed", *STAGED, "distill.teacher_devices=2", LAYOUT)
    process = start("train", *keys)
    while not (runs / "killed" / "checkpoints" / str(EVERY)).exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    process.communicate()
    forget_after(runs / "killed", EVERY)
    assert saved_steps(runs / "killed") == [EVERY]
    live.train("killed", *STAGED, "distill.teacher_devices=2", LAYOUT)
    assert saved_digest(runs / "killed") == saved_digest(runs / "live")
    assert live.losses("killed") == live.losses("live")


@pytest.mark.long
def test_resume_with_another_teacher_is_rejected(live: Workspace) -> None:
    """The other teacher is an earlier step of the same run."""
    runs = live.folder / "runs"
    shutil.copytree(runs / "live", runs / "changed")
    forget_after(runs / "changed", EVERY)
    other = f"distill.teacher={runs / 'teacher'}@2"
    output = live.train("changed", *STAGED, "distill.teacher_devices=2", LAYOUT, other, code=2)
    is_explained(output)
    assert "must be the teacher used for the checkpoint of step 2" in output


@pytest.mark.layouts
def test_resume_accepts_teacher_in_hugging_face_format(live: Workspace, run: Run) -> None:
    """A teacher is identified by its parameters, not by its path or format."""
    runs, folder = live.folder / "runs", live.folder / "exported"
    run("export", f"{runs / 'teacher'}@9", folder)
    shutil.copytree(runs / "live", runs / "moved")
    forget_after(runs / "moved", EVERY)
    keys = (*STAGED, "distill.teacher_devices=2", LAYOUT, f"distill.teacher=hf:{folder}")
    assert "must be the teacher" not in live.train("moved", *keys)
    assert live.losses("moved") == live.losses("live")
    run("export", runs / "moved", live.folder / "student")


@pytest.mark.layouts
def test_stored_logits_support_other_mixture_weights(live: Workspace) -> None:
    """The logits were prepared with other mixture weights."""
    text, out = live.folder / "text", live.folder / "mixed"
    for name in ("a", "b"):
        (live.folder / name).mkdir()
        for number in range(6):
            file = f"{number + 6 * (name == 'b')}.txt"
            shutil.copy(text / file, live.folder / name / file)
    mixed = tuple(
        f"data.mixture.{name}.{key}={value}"
        for name in ("a", "b")
        for key, value in {"source": "text", "path": live.folder / name}.items()
    )
    mixed = ("data.path=", "data.source=corpus", *mixed)
    live.prepare(out, *mixed, "data.mixture.a.weight=1", "data.mixture.b.weight=1")
    shares = ("data.mixture.a.weight=1", "data.mixture.b.weight=3", "train.batch_size=4")
    live.train("mixed", *mixed, *shares)
    live.train("mixed-stored", *mixed, *shares, *live.stored(out))
    assert_close(live.losses("mixed-stored"), live.losses("mixed"))


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("model.vocab_size=300",), "same vocabulary as the student: the teacher has 259 ids"),
    (("distill.top_k=260",), "must be at most model.vocab_size (259)"),
    (
        ("distill.teacher_devices=8",),
        "Set distill.teacher_devices=7, or mesh.cpu_devices=16, or distill.teacher_devices=0 to "
        "share all devices",
    ),
    (
        ("distill.teacher_devices=2", "distill.teacher_layout=[mesh.ici_stage=3]"),
        "distill.teacher_layout: mesh = stage 3",
    ),
    (
        (
            "distill.teacher_devices=2",
            "distill.teacher_layout=[mesh.ici_fsdp=2,pipeline.microbatches=3]",
        ),
        "distill.teacher_layout: train.batch_size = 8",
    ),
    (("distill.teacher_layout=[mesh.ici_nothing=2]",), "distill.teacher_layout: mesh.ici_nothing"),
    (
        ("distill.teacher_layout=[train.steps=2]",),
        "KEY=VALUE settings from the sections mesh and pipeline",
    ),
    (("distill.teacher=absent",), "distill.teacher = absent"),
    (("distill.teacher=hf:absent",), "absent"),
    (("distill.teacher_logits=answers",), "must be empty if distill.teacher is set"),
]


@pytest.mark.parametrize(("keys", "text"), REFUSED, ids=[text[:24] for _, text in REFUSED])
def test_invalid_distill_settings_are_rejected(
    workspace: Workspace, keys: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded = load([str(each) for each in workspace.keys("refused", *keys)])
        split_devices(loaded.config)
        open_teacher(loaded, ByteTokenizer())
    assert text in str(refused.value)
    is_explained(str(refused.value))


def test_incompatible_stored_logits_are_rejected(
    workspace: Workspace, stored_logits: Path, tmp_path: Path
) -> None:
    found = read_manifest(str(stored_logits))
    for changes, text in (
        ({"temperature": 1.0}, "distill.temperature = 1.0"),
        ({"top_k": COUNT + 1}, "distill.top_k = 8"),
        ({"row_tokens": 16}, "train.sequence_length = 16"),
        ({"vocab_size": 300}, "model.vocab_size = 300"),
        ({"sources": {"": {**found["sources"][""], "seed": 1}}}, "seed: 0 and 1"),
        ({"sources": {"web": found["sources"][""]}}, "no sequences from data.mixture.web"),
    ):
        sizes = {"vocab_size": 259, "temperature": 1.5, "top_k": COUNT, "row_tokens": 24}
        given = {"sources": found["sources"], **sizes, **changes}
        with pytest.raises(ConfigError, match="(?s)" + text):
            open_logits(str(stored_logits), **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="logits.json is missing"):
        read_manifest(str(tmp_path))


def opened(folder: Path) -> LogitsReader:
    sizes = {"vocab_size": 259, "temperature": 1.5, "top_k": 3, "row_tokens": 24}
    return open_logits(str(folder), read_manifest(str(folder))["sources"], **sizes)


def test_every_flipped_bit_is_detected(stored_logits: Path, tmp_path: Path, run: Run) -> None:
    """Damage is detected before the sequence is used, and by `maxpipe data verify`."""
    draw, damaged = random.Random(1), stored_logits
    for number in range(40):
        damaged = tmp_path / str(number)
        shutil.copytree(stored_logits, damaged)
        file = draw.choice(sorted(damaged.iterdir()))
        raw = bytearray(file.read_bytes())
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        file.write_bytes(raw)
        with pytest.raises((StorageError, ConfigError)) as found:
            stored = opened(damaged)
            for sequence in range(read_manifest(str(damaged))["sources"][""]["sequences"]):
                with contextlib.suppress(ConfigError):  # the tokens do not match the stored digest
                    stored.read("", sequence, NOTHING)
        assert "is damaged" in str(found.value) and str(file) in str(found.value)
    output = run("data", "verify", damaged, code=74)
    assert "damaged" in output
    assert "all checksums match" in run("data", "verify", stored_logits)


NOTHING = {name: np.zeros(24, np.int32) for name in ("tokens", "segment_ids")}


def test_stored_logits_of_other_tokens_are_rejected(stored_logits: Path) -> None:
    """File names and sizes are unchanged, but the digest of the sequence differs."""
    with pytest.raises(ConfigError, match="sequence 2 has different tokens"):
        opened(stored_logits).read("", 2, NOTHING)


TEACHER_OF_STUDENTS = (
    *("model.num_layers=4", "model.d_model=64", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=16", "model.d_mlp=192", "train.steps=300", "train.batch_size=16"),
    *("run.name=taught-well", "run.seed=7"),
)
LIBRARY = ("data.source=corpus", "data.path=", "train.sequence_length=64", "checkpoint.every=0")


@pytest.mark.layouts
def test_distillation_improves_student_loss(workspace: Workspace, run: Run) -> None:
    """Compare the validation loss after equal numbers of steps, for three seeds.

    `benchmarks/distill.py` has larger runs.
    """
    file, runs = workspace.folder / "run.yml", workspace.folder / "runs"
    library = (*LIBRARY, "eval.batches=16", "eval.batch_size=32", "optim.learning_rate=5e-3")
    run("train", file, *library, *TEACHER_OF_STUDENTS)
    taught = ("train.objective=distill", f"distill.teacher={runs / 'taught-well'}")
    for seed in range(3):
        found = {}
        for name, keys in (("alone", ()), ("with", (*taught, "distill.weight=0.9"))):
            keys = (*keys, *library, "train.steps=80", f"run.seed={seed}")
            run("train", file, *keys, f"run.name={name}-{seed}")
            (found[name],) = losses(runs / f"{name}-{seed}", "eval/loss").values()
        assert found["with"] < found["alone"] - 0.01, found


def stop(process: object) -> None:
    process.send_signal(signal.SIGINT)  # type: ignore[attr-defined]


ENDS = [stop, lambda process: process.kill()]


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS, ids=["ctrl-c", "kill"])
def test_prepare_resumes_after_interrupt(
    workspace: Workspace,
    stored_logits: Path,
    start: Start,
    tmp_path: Path,
    end: Callable[[object], None],
) -> None:
    """The result has the same bytes; shards are small, so some are complete at the interrupt."""
    out = tmp_path / "stored_logits"
    keys = workspace.keys("x", *STAGED, "distill.teacher_devices=2", LAYOUT)
    command = ("distill", "prepare", *keys, "--out", out, "--shard-bytes", 9000)
    process = start(*command)
    while not (out / "shard-00001.bin").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    end(process)
    output, _ = process.communicate()
    if process.returncode == 130:
        assert "Run the same command again" in output
    assert not (out / MANIFEST).exists()
    with pytest.raises(ConfigError, match="the manifest is missing"):
        read_manifest(str(out))
    again = start(*command)
    output = again.communicate()[0]
    assert again.returncode == 0, output
    assert sum(each["rows"] for each in read_manifest(str(out))["shards"]) > 0
    assert content(out) == content(stored_logits)


def content(folder: Path) -> bytes:
    """Return the concatenated records of all shards."""
    return b"".join(each.read_bytes() for each in sorted(folder.glob("shard-*.bin")))


@pytest.mark.layouts
@pytest.mark.multihost
def test_two_processes_read_stored_logits(
    live: Workspace, stored_logits: Path, start: Start
) -> None:
    """Each process reads the logits of its own sequences."""
    keys = live.keys("pair", *STAGED, "mesh.cpu_devices=2", "mesh.ici_stage=2", "mesh.ici_fsdp=2")
    with start_pair(start, *keys, *live.stored(stored_logits)) as processes:
        outputs = wait_for_outputs(processes)
    assert [each.returncode for each in processes] == [0, 0], outputs
    assert_close(live.losses("pair"), live.losses("live"))


SEVERAL: list[tuple[str, tuple[str, ...]]] = [
    # Each teacher process has all sequences and each student process half of them.
    ("rows-of-one", ("mesh.ici_fsdp=2", "distill.teacher_devices=2", LAYOUT)),
    # Each student process has all sequences and each teacher process half of them.
    (
        "rows-of-both",
        (STAGED[1], "mesh.ici_fsdp=1", "pipeline.microbatches=2", "distill.teacher_devices=2"),
    ),
    ("turns", ("mesh.ici_stage=2", "mesh.ici_fsdp=2", "pipeline.microbatches=2")),
]


@pytest.mark.long
@pytest.mark.multihost
@pytest.mark.parametrize(("name", "keys"), SEVERAL, ids=[name for name, _ in SEVERAL])
def test_two_processes_with_live_teacher_match_one(
    live: Workspace, start: Start, name: str, keys: tuple[str, ...]
) -> None:
    """Each process gives its last devices to the teacher, so both meshes span both processes.

    The single-process run has the same layout: under another one, rounding could change the last of
    the top-k tokens.
    """
    live.train(f"one-{name}", "mesh.cpu_devices=4", *keys)
    with start_pair(start, *live.keys(f"pair-{name}", "mesh.cpu_devices=2", *keys)) as processes:
        outputs = wait_for_outputs(processes)
    assert [each.returncode for each in processes] == [0, 0], outputs
    assert_close(live.losses(f"pair-{name}"), live.losses(f"one-{name}"))
