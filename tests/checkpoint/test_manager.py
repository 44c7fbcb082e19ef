"""Saves and restores are bit-exact; damaged checkpoints are reported, quarantined and skipped."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxpipe.checkpoint import manager, manifest, storage, writer
from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import iter_named_arrays, tree_digest
from maxpipe.checkpoint.folder import FORMAT, CheckpointFolder
from maxpipe.checkpoint.inspect import describe_checkpoint, format_checkpoint_list
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager, open_run
from maxpipe.checkpoint.storage import DamagedError
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import Code, ConfigError, StorageError
from tests.checkpoint.cases import Faults, abstract, config, data, files, put, restore, save, tree
from tests.errors import assert_error, without_codes

Tree = dict[str, Any]
Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture

# --- saving and restoring -------------------------------------------------------------------


def test_restore_returns_saved_state(saved: Path):
    with open_run(saved) as checkpoints:
        assert checkpoints.steps() == [3, 6]
        for step in (3, 6):
            found = checkpoints.restore(step)
            assert found.step == step
            assert found.metadata.config == config(step) and found.metadata.data == data(step)
            assert time.time() - 600 < found.metadata.time < time.time() + 600
            assert tree_digest(found.state) == tree_digest(tree(step))
            for _, array in iter_named_arrays(found.state):
                assert isinstance(array, np.ndarray)


def test_large_arrays_are_chunked_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Arrays whose dimensions do not divide into chunks of more than one row stay whole."""
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 20_000)
    draw = np.random.default_rng(5)
    params = {
        "embedding": draw.normal(size=(512, 64)).astype("float32"),
        "odd": draw.normal(size=(521, 64)).astype("float32"),
        "layers": {
            "gate": draw.normal(size=(6, 64, 96)).astype("float32"),
            "scale": draw.normal(size=(6, 64)).astype("float32"),
        },
    }
    state = {"params": jax.tree.map(jax.numpy.asarray, params)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, lambda: state, config(1), data(1), {}, last=True)
    step = CheckpointFolder(tmp_path / CHECKPOINTS_FOLDER) / 1
    chunks = {
        name: manifest.open_array(step, f"params.{name}").chunk_layout.read_chunk.shape
        for name in ("embedding", "odd", "layers.gate", "layers.scale")
    }
    assert chunks["odd"] == (521, 64) and chunks["layers.scale"] == (6, 64)
    assert chunks["embedding"] == (64, 64) and chunks["layers.gate"] == (1, 64, 48)
    assert not manifest.verify_arrays(step, 1, manifest.read_expected_digests(step, 1))
    assert tree_digest(restore(tmp_path, 1)) == tree_digest(state)


def test_chunks_subdivide_device_shards(
    tmp_path: Path, devices: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 3_000)
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=devices[:8])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None, "y"))
    gate = jax.device_put(np.random.default_rng(6).normal(size=(6, 64, 96)), place)
    state = {"params": {"layers": {"gate": gate}}}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, lambda: state, config(1), data(1), {}, last=True)
    step = CheckpointFolder(tmp_path / CHECKPOINTS_FOLDER) / 1
    stored = manifest.open_array(step, "params.layers.gate")
    assert stored.chunk_layout.read_chunk.shape == (1, 64, 8)
    assert not manifest.verify_arrays(step, 1, manifest.read_expected_digests(step, 1))
    assert tree_digest(restore(tmp_path, 1)) == tree_digest(state)


def test_restore_uses_requested_sharding(saved: Path, devices: list[Any]):
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2])
    spec = jax.sharding.PartitionSpec
    split = jax.sharding.NamedSharding(mesh, spec("x"))
    whole = jax.sharding.NamedSharding(mesh, spec())
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=split if leaf.ndim else whole
        ),
        tree(6),
    )
    state = restore(saved, 6, wanted)
    assert state["params"]["embedding"].sharding == split
    assert tree_digest(state) == tree_digest(tree(6))


def test_state_can_be_deleted_after_save_returns(tmp_path: Path):
    state = tree(1)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, lambda: state, config(1), data(1))
        jax.tree.map(lambda leaf: leaf.delete(), state)
    assert tree_digest(restore(tmp_path, 1)) == tree_digest(tree(1))


def test_only_newest_checkpoints_are_kept_across_restarts(tmp_path: Path):
    save(tmp_path, 1, 2, 3, keep=2)
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS_FOLDER).iterdir()) == ["2", "3"]
    save(tmp_path, 4, keep=2)
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS_FOLDER).iterdir()) == ["3", "4"]
    assert tree_digest(restore(tmp_path, 3)) == tree_digest(tree(3))


def test_should_save_at_multiples_of_every(tmp_path: Path):
    with CheckpointManager(tmp_path / "some", CheckpointConfig(every=3)) as checkpoints:
        assert [step for step in range(1, 10) if checkpoints.should_save(step)] == [3, 6, 9]
    with CheckpointManager(tmp_path / "none", CheckpointConfig(every=0)) as checkpoints:
        assert not any(checkpoints.should_save(step) for step in range(1, 10))


def test_run_stopped_before_first_step_saves_step_0(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore_newest(abstract()) is None
        put(checkpoints, 0, last=True)
    assert resume(tmp_path) == (0, [])


def test_saved_step_is_never_overwritten(copy: Path):
    with CheckpointManager(copy) as checkpoints:
        with pytest.raises(StorageError, match="step 3 was not saved"):
            checkpoints.save(3, lambda: tree(99), config(99), data(99))
        checkpoints.save(6, lambda: tree(99), config(99), data(99), last=True)
    for step in (3, 6):
        assert tree_digest(restore(copy, step)) == tree_digest(tree(step))


@pytest.mark.fault("F2")
def test_unfinished_save_is_not_a_checkpoint(copy: Path, caplog: Logs):
    unfinished = copy / CHECKPOINTS_FOLDER / "9.orbax-checkpoint-tmp"
    shutil.copytree(copy / CHECKPOINTS_FOLDER / "6", unfinished)
    with open_run(copy) as checkpoints:
        assert checkpoints.steps() == [3, 6]
    assert unfinished.exists(), "a reader must not delete files"
    save(copy, 9)
    assert not unfinished.exists()
    assert f"{unfinished} was removed" in caplog.text
    assert tree_digest(restore(copy, 9)) == tree_digest(tree(9))


def test_reader_does_not_modify_files(saved: Path, tmp_path: Path, capsys: Capture):
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    assert list(format_checkpoint_list(parse_address(str(saved)), None)) and list(
        describe_checkpoint(parse_address(str(saved)))
    )
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert capsys.readouterr().err == ""
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="one complete checkpoint"):
            open_run(missing)
    assert list(tmp_path.iterdir()) == []


# --- faults ---------------------------------------------------------------------------------


def test_damage_to_any_file_is_detected(copy: Path, saved: Path):
    """Each file of the newest step is deleted, truncated to half its size and emptied in turn."""
    step = copy / CHECKPOINTS_FOLDER / "6"
    for name in files(step)[:-1]:
        content = (step / name).read_bytes()
        for left in (None, content[: len(content) // 2], b""):
            (step / name).unlink()
            if left is not None:
                (step / name).write_bytes(left)
            with pytest.raises(StorageError) as caught:
                restore(copy, 6)
            where, rule, action = str(caught.value).splitlines()
            assert where == f"{step}: cannot be restored  [MP-CKPT-002]" and rule.startswith(
                f"  {name} "
            )
            assert "step 3" in action
            (step / name).write_bytes(content)
    assert tree_digest(restore(copy, 6)) == tree_digest(tree(6))


def test_damaged_oldest_checkpoint_is_reported(tmp_path: Path):
    save(tmp_path, 2)
    shutil.rmtree(tmp_path / CHECKPOINTS_FOLDER / "2" / "state")
    with pytest.raises(StorageError, match="the oldest checkpoint"):
        restore(tmp_path, 2)


def test_shape_mismatch_is_rejected_but_not_damage(copy: Path):
    """The restore fails, but the step is not renamed."""
    wanted = abstract()
    wanted["params"]["embedding"] = jax.ShapeDtypeStruct((30, 16), "float32")
    del wanted["optimizer"]["nu"]
    with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError) as caught:
        checkpoints.restore_newest(wanted)
    assert "params.embedding is 30 x 8 in the checkpoint, not 30 x 16" in str(caught.value)
    facts = ["optimizer.nu.embedding is only in the checkpoint"]
    assert_error(caught.value, copy / CHECKPOINTS_FOLDER / "6", names=facts, suggests="run.name")
    assert names(copy) == ["3", "6"]


def test_checkpoint_of_newer_release_is_rejected_but_not_damage(copy: Path):
    """Falling back to an older step would lose work."""
    facts = copy / CHECKPOINTS_FOLDER / "6" / "facts" / "metadata"
    facts.write_text(facts.read_text().replace(f'"format": {FORMAT}', '"format": 7'))
    reseal(copy, 6)
    with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError, match="format 7"):
        checkpoints.restore_newest(abstract())
    assert names(copy) == ["3", "6"]


def test_unwritable_folder_is_reported_at_start(tmp_path: Path):
    (tmp_path / CHECKPOINTS_FOLDER).write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        CheckpointManager(tmp_path)


# --- skipping damaged checkpoints -----------------------------------------------------------


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS_FOLDER).iterdir())


def reseal(run_dir: Path, step: int) -> None:
    """Rewrite the manifest so that it matches the current files of the step."""
    folder = CheckpointFolder(run_dir / CHECKPOINTS_FOLDER) / step
    arrays = manifest.read_arrays(folder, step)
    assert arrays and not manifest.write(folder, step, manifest.digest_files(folder), arrays)


def resume(run_dir: Path, **options: Any) -> tuple[int, list[str]]:
    """Return the step from which a run resumes, and the events that it recorded."""
    recorded: list[str] = []

    def record(event: str, **fields: object) -> None:
        recorded.append(f"{event} {fields['step']}: {fields['reason']}")

    with CheckpointManager(run_dir, CheckpointConfig(**options), record=record) as checkpoints:
        found = checkpoints.restore_newest(abstract())
    assert found is not None and tree_digest(found.state) == tree_digest(tree(found.step))
    assert found.metadata.data == data(found.step)
    return found.step, recorded


def inject_read_errors(monkeypatch: pytest.MonkeyPatch, error: OSError, times: int) -> None:
    """Make the next `times` reads of array files of step 6 fail with this error."""
    true, faults = manifest._digest, Faults(times)

    def digest_of(path: Any, *options: bool) -> manifest.ManifestFile:
        if "/6/state/d/" in str(path) and faults.take():
            raise error
        return true(path, *options)

    monkeypatch.setattr(manifest, "_digest", digest_of)
    monkeypatch.setattr(storage, "PAUSE_SECONDS", 0.0)


def test_unreachable_storage_is_not_damage(copy: Path, monkeypatch: pytest.MonkeyPatch):
    inject_read_errors(monkeypatch, OSError(errno.ESTALE, "Stale file handle"), 1000)
    with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError) as caught:
        checkpoints.restore_newest(abstract())
    assert "6: cannot be reached\n  Stale file handle." in without_codes(caught.value)
    assert names(copy) == ["3", "6"]


def test_read_errors_are_retried(copy: Path, monkeypatch: pytest.MonkeyPatch):
    inject_read_errors(monkeypatch, OSError(errno.EIO, "Input/output error"), 2)
    assert resume(copy)[0] == 6


def test_step_with_manifest_that_fails_to_decode_is_damaged(
    copy: Path, monkeypatch: pytest.MonkeyPatch
):
    """The manifest matches the files, as if an older release had written it after a bit flip."""
    real = manifest.read_shapes

    def shapes(folder: Any) -> Tree:
        if folder.name == "6":
            raise DamagedError("state cannot be read: DATA_LOSS")
        return real(folder)

    monkeypatch.setattr(manifest, "read_shapes", shapes)
    assert resume(copy) == (3, ["checkpoint_skipped 6: state cannot be read: DATA_LOSS"])
    assert names(copy) == ["3", "6.corrupt"]


@pytest.mark.fault("F11")
def test_damaged_step_is_quarantined_and_previous_step_restored(copy: Path, caplog: Logs):
    arrays = next((copy / CHECKPOINTS_FOLDER / "6" / "state" / "d").iterdir())
    content = bytearray(arrays.read_bytes())
    content[len(content) // 2] ^= 4
    arrays.write_bytes(content)
    reason = f"state/d/{arrays.name} differs from the saved content"
    assert resume(copy) == (3, [f"checkpoint_skipped 6: {reason}"])
    assert (
        f"{copy / CHECKPOINTS_FOLDER}/6 is skipped, renamed 6.corrupt: {reason}" in caplog.messages
    )
    assert names(copy) == ["3", "6.corrupt"]
    assert (
        bytes(content)
        == (copy / CHECKPOINTS_FOLDER / "6.corrupt/state/d" / arrays.name).read_bytes()
    )
    # The run saves that step again, and the new checkpoint is damaged, too.
    save(copy, 6)
    (copy / CHECKPOINTS_FOLDER / "6" / "commit_success.txt").unlink()
    assert resume(copy) == (3, ["checkpoint_skipped 6: commit_success.txt is missing"])
    assert names(copy) == ["3", "6.corrupt", "6.corrupt-2"]
    assert ocp.CheckpointManager(copy / CHECKPOINTS_FOLDER).all_steps() == [3], (
        "orbax must ignore the quarantined steps"
    )


def test_reader_skips_damaged_step_without_renaming_it(copy: Path):
    (copy / CHECKPOINTS_FOLDER / "6" / "_CHECKPOINT_METADATA").write_text("{}")
    with open_run(copy) as checkpoints:
        found = checkpoints.restore_newest(abstract())
    assert found is not None and found.step == 3
    assert names(copy) == ["3", "6"]


@pytest.mark.fault("F14", "K8")
@pytest.mark.parametrize("steps", [["6"], ["3", "6"]])
def test_run_does_not_restart_if_all_checkpoints_are_damaged(steps: list[str], copy: Path):
    """No checkpoint is renamed if several are damaged, which suggests a storage failure."""
    for step in ("3", "6"):
        shutil.rmtree(copy / CHECKPOINTS_FOLDER / step / ("facts" if step in steps else "."))
    for _ in range(2):
        with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError) as caught:
            checkpoints.restore_newest(abstract())
        message = str(caught.value)
        assert "6: facts/" in message
        if len(steps) == 1:
            assert "no checkpoint can be used" in message and "start from scratch" in message
        else:
            assert "the newest 2 checkpoints both look damaged" in message
            assert "3: facts/" in message
            assert f"`maxpipe checkpoints verify {copy}`" in message
        assert names(copy) == steps
    for step in steps:
        (copy / CHECKPOINTS_FOLDER / step).rename(copy / CHECKPOINTS_FOLDER / f"{step}.corrupt")
    with (
        CheckpointManager(copy) as checkpoints,
        pytest.raises(StorageError, match="start from scratch"),
    ):
        checkpoints.restore_newest(abstract())
    with CheckpointManager(copy / "new") as checkpoints:
        assert checkpoints.restore_newest(abstract()) is None


@pytest.mark.fault("F13")
def test_step_renamed_to_other_number_is_damaged(copy: Path):
    (copy / CHECKPOINTS_FOLDER / "6").rename(copy / CHECKPOINTS_FOLDER / "9")
    step, (recorded,) = resume(copy)
    assert (
        step == 3
        and "checkpoint_skipped 9: manifest.json is invalid: the manifest belongs to st" in recorded
    )
    # Without a manifest, the metadata reveals the step; without that, the digests or the state.
    (copy / CHECKPOINTS_FOLDER / "9.corrupt").rename(copy / CHECKPOINTS_FOLDER / "8")
    (copy / CHECKPOINTS_FOLDER / "8" / "manifest.json").unlink()
    step, (recorded,) = resume(copy)
    assert step == 3 and "8: the metadata belongs to step 6" in recorded
    facts = copy / CHECKPOINTS_FOLDER / "8.corrupt" / "facts" / "metadata"
    facts.write_text(facts.read_text().replace('"step": 6', '"step": 8'))
    (copy / CHECKPOINTS_FOLDER / "8.corrupt").rename(copy / CHECKPOINTS_FOLDER / "8")
    step, (recorded,) = resume(copy)
    assert step == 3 and "8: digests/0.json belongs to step 6" in recorded
    shutil.rmtree(copy / CHECKPOINTS_FOLDER / "8.corrupt" / "digests")
    (copy / CHECKPOINTS_FOLDER / "8.corrupt").rename(copy / CHECKPOINTS_FOLDER / "8")
    step, (recorded,) = resume(copy)
    assert step == 3 and "8: the saved state belongs to step 6" in recorded


def test_step_without_manifest_is_verified_and_manifest_written(copy: Path, caplog: Logs):
    """This is the state after a kill between orbax's commit and the write of the manifest."""
    (copy / CHECKPOINTS_FOLDER / "6" / "manifest.json").unlink()
    assert resume(copy) == (6, [])
    assert any("6 has no manifest.json: " in line for line in caplog.messages)
    assert manifest.has_manifest(CheckpointFolder(copy / CHECKPOINTS_FOLDER) / 6)
    caplog.clear()
    assert resume(copy) == (6, []) and caplog.messages == []
    # A step without a manifest that cannot be read is quarantined.
    (copy / CHECKPOINTS_FOLDER / "6" / "manifest.json").unlink()
    for path in (copy / CHECKPOINTS_FOLDER / "6" / "state").rglob("d/*"):
        path.write_bytes(b"")
    step, (recorded,) = resume(copy)
    assert step == 3 and recorded.startswith("checkpoint_skipped 6: state cannot be read: ")


@pytest.mark.fault("F13")
def test_entries_that_are_not_checkpoints_are_ignored(copy: Path, caplog: Logs):
    folder = copy / CHECKPOINTS_FOLDER
    for name in ("30", "40/notes", "007", "best", "50.orbax-checkpoint-tmp/state", "20.deleting"):
        (folder / name).mkdir(parents=True)
    (folder / "60").write_text("a file")
    (folder / "40" / "notes" / "a.txt").write_text("mine")
    assert resume(copy) == (6, [])
    for odd in (30, 40, 60):
        assert f"{folder / str(odd)}: is ignored" in caplog.text
    assert names(copy) == ["007", "3", "30", "40", "6", "60", "best"]
    # A save of the same step renames the existing folder instead of deleting it.
    save(copy, 30, 40)
    assert tree_digest(restore(copy, 40)) == tree_digest(tree(40))
    assert (folder / "40.foreign" / "notes" / "a.txt").read_text() == "mine"
    assert "40.foreign" in names(copy) and "30.foreign" in names(copy)


def test_all_processes_skip_step_if_one_finds_damage(copy: Path):
    """Process 1 of 2 reads the damaged file; this process reads other files and skips it, too."""
    exchanged: list[str] = []

    def agree(text: str) -> str:
        exchanged.append(text)
        # Two of the calls report damage, because a damaged file is read again.
        return "state/x differs from the saved content" if len(exchanged) in (3, 5) else text

    with CheckpointManager(copy, agree=agree) as checkpoints:
        found = checkpoints.restore_newest(abstract())
    assert found is not None and found.step == 3
    assert names(copy) == ["3", "6.corrupt"]
    assert exchanged == ["0 6", "", "", "", "", "0 3", "", "", "", "done"]


def test_config_mismatch_is_raised_before_reading_arrays(copy: Path):
    def accept(facts: Any) -> None:
        raise ConfigError.one(Code.CKPT_MODEL, "model.d_model", 3, "must be 4.", "Set it.")

    with CheckpointManager(copy) as checkpoints, pytest.raises(ConfigError):
        checkpoints.restore_newest(abstract(), accept)
    assert names(copy) == ["3", "6"]


# --- failing saves --------------------------------------------------------------------------


@pytest.fixture
def broken_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`broken_writes(error, count)`: the next `count` saves fail in the background."""
    monkeypatch.setattr(manager, "_FIRST_PAUSE_SECONDS", 0.0)
    real = manifest.verify_and_write_manifest

    def set_up(error: OSError, count: int) -> list[int]:
        tried: list[int] = []

        def seal(folder: Any, step: int) -> int:
            tried.append(step)
            if len(tried) <= count:
                shutil.rmtree(folder)  # nothing was committed
                raise error
            return real(folder, step)

        monkeypatch.setattr(writer, "verify_and_write_manifest", seal)
        return tried

    return set_up


def train(checkpoints: CheckpointManager, steps: range) -> None:
    """Run a training loop that saves when due and waits for each background save."""
    for step in steps:
        checkpoints.poll()
        if checkpoints.should_save(step):
            put(checkpoints, step)
        while checkpoints._writer is not None and checkpoints._writer.is_busy:
            time.sleep(0.005)
        time.sleep(0.02)


IO_ERROR = OSError(5, "Input/output error")
FULL = OSError(28, "No space left on device")


def test_moved_checkpoints_are_reported(tmp_path: Path):
    """The message suggests only moving them back, because the same command needs them."""
    with CheckpointManager(tmp_path, CheckpointConfig(every=4, retries=0)) as checkpoints:
        train(checkpoints, range(1, 5))
        checkpoints.wait()
        (tmp_path / CHECKPOINTS_FOLDER).rename(tmp_path / "away")
        with pytest.raises(StorageError) as caught:
            put(checkpoints, 8, last=True)
    where, _, action = str(caught.value).splitlines()
    rule = "was moved or deleted while the run was using it"
    assert where == f"{tmp_path / CHECKPOINTS_FOLDER}: {rule}  [MP-CKPT-005]"
    assert "start the same command again" in action
    assert (tmp_path / "away" / "4").is_dir()


def test_save_failure_is_raised_at_next_step(tmp_path: Path, broken_writes: Any):
    broken_writes(FULL, 9)
    with CheckpointManager(tmp_path, CheckpointConfig(every=4)) as checkpoints:
        train(checkpoints, range(1, 5))
        with pytest.raises(StorageError, match="No space left") as caught:
            checkpoints.poll()
    where, rule, action = str(caught.value).splitlines()
    assert where == f"{tmp_path / CHECKPOINTS_FOLDER / '4'}: cannot be written  [MP-IO-001]"
    assert rule == "  No space left on device." and action.startswith("  Free disk space")


@pytest.mark.fault("F6", "F18")
def test_transient_save_failure_is_retried_at_next_steps(tmp_path: Path, broken_writes: Any):
    tried, recorded = broken_writes(IO_ERROR, 2), []
    record = lambda event, **fields: recorded.append((event, fields["step"]))  # noqa: E731
    with CheckpointManager(tmp_path, CheckpointConfig(every=4), record=record) as checkpoints:
        train(checkpoints, range(1, 9))
    assert tried == [4, 5, 6, 8]
    assert recorded[:2] == [("checkpoint_failed", 4), ("checkpoint_failed", 5)]
    assert recorded[2:] == [("checkpoint", 6), ("checkpoint", 8)]
    assert tree_digest(restore(tmp_path, 8)) == tree_digest(tree(8))


def test_persistent_save_failure_stops_run_after_retries(tmp_path: Path, broken_writes: Any):
    tried = broken_writes(IO_ERROR, 99)
    settings = CheckpointConfig(every=4, retries=2)
    raises_io_error = pytest.raises(StorageError, match="Input/output error")
    with CheckpointManager(tmp_path, settings) as checkpoints, raises_io_error:
        train(checkpoints, range(1, 30))
    assert len(tried) == 3


def test_training_continues_with_on_failure_continue(tmp_path: Path, broken_writes: Any):
    tried, recorded = broken_writes(FULL, 2), []
    record = lambda event, **fields: recorded.append((event, fields["step"]))  # noqa: E731
    settings = CheckpointConfig(every=4, on_failure="continue")
    with CheckpointManager(tmp_path, settings, record=record) as checkpoints:
        train(checkpoints, range(1, 13))
    assert tried == [4, 8, 12]
    assert recorded == [("checkpoint_failed", 4), ("checkpoint_failed", 8), ("checkpoint", 12)]


@pytest.mark.fault("F6")
def test_final_save_is_retried_immediately_and_must_succeed(tmp_path: Path, broken_writes: Any):
    tried = broken_writes(IO_ERROR, 3)
    with CheckpointManager(tmp_path / "a", CheckpointConfig(on_failure="continue")) as checkpoints:
        put(checkpoints, 7, last=True)
        assert checkpoints.steps() == [7]
    assert tried == [7, 7, 7, 7]
    broken_writes(IO_ERROR, 99)
    raises_io_error = pytest.raises(StorageError, match="Input/output error")
    with (
        CheckpointManager(tmp_path / "b", CheckpointConfig(on_failure="continue")) as checkpoints,
        raises_io_error,
    ):
        put(checkpoints, 7, last=True)


def test_final_save_is_retried_if_another_process_failed(
    copy: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(manager, "_FIRST_PAUSE_SECONDS", 0.0)
    recorded: list[str] = []
    answers = [
        "",
        f"{errno.EIO} Input/output error",
    ]  # the other process's replies: it can save; its save failed

    def agree(text: str) -> str:
        return text or (answers.pop(0) if answers else "")

    def record(event: str, **fields: object) -> None:
        recorded.append(f"{event} {fields['step']} {fields.get('reason', '')}".strip())

    with CheckpointManager(copy, record=record, agree=agree) as checkpoints:
        monkeypatch.setattr(checkpoints, "_alone", False)
        put(checkpoints, 9, last=True)
    assert recorded == ["checkpoint_failed 9 Input/output error", "checkpoint 9"]
    assert resume(copy) == (9, [])


@pytest.mark.fault("L2")
def test_failed_fsync_is_never_repeated_on_same_file(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """After a failed fsync, a second one succeeds although data was lost: the save starts over."""
    monkeypatch.setattr(manager, "_FIRST_PAUSE_SECONDS", 0.0)
    real, left, recorded = os.fsync, iter([IO_ERROR]), []

    def fsync(number: int) -> None:
        if "/9/state/" in os.readlink(f"/proc/self/fd/{number}") and (error := next(left, None)):
            raise error
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with CheckpointManager(
        copy, record=lambda event, **fields: recorded.append(event)
    ) as checkpoints:
        put(checkpoints, 9, last=True)
    assert recorded == ["checkpoint_failed", "checkpoint"]
    assert resume(copy) == (9, [])


@pytest.mark.fault("F19")
def test_lost_process_during_save_is_not_a_storage_error(
    copy: Path, monkeypatch: pytest.MonkeyPatch
):
    """JAX raises the error during a save; it must propagate unchanged."""
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: Failed to send RPC to coordination service.")

    def flush(path: Any) -> None:
        raise lost

    monkeypatch.setattr(manifest, "_flush", flush)
    recorded: list[str] = []
    with (
        pytest.raises(jax.errors.JaxRuntimeError) as caught,
        CheckpointManager(
            copy, record=lambda event, **fields: recorded.append(event)
        ) as checkpoints,
    ):
        put(checkpoints, 9, last=True)
    assert caught.value is lost and not recorded


def test_save_is_retried_after_manifest_write_failure(copy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manager, "_FIRST_PAUSE_SECONDS", 0.0)
    real, tried = manifest._flush, []

    def flush(path: Any) -> None:
        if manifest.FILE in path.name:
            tried.append(path)
            if len(tried) == 1:
                raise IO_ERROR
        real(path)

    monkeypatch.setattr(manifest, "_flush", flush)
    with CheckpointManager(copy) as checkpoints:
        put(checkpoints, 9, last=True)
    assert names(copy) == ["3", "6", "9"] and len(tried) == 2
    assert resume(copy) == (9, [])


def test_free_space_is_checked_before_writing(copy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CheckpointFolder, "free_bytes", lambda folder: 1000)
    needed = sum(array.nbytes for _, array in iter_named_arrays(tree(9)))
    with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError) as caught:
        put(checkpoints, 9, last=True)
    assert f"({needed:,} bytes), but only 0.0 MiB (1,000 bytes) are free." in str(caught.value)
    assert "resumes from step 6." in str(caught.value)
    assert names(copy) == ["3", "6"]


def test_failed_save_leaves_no_files(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk becomes full while an array is written."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = tree(9) | {"big": jax.numpy.asarray(np.random.default_rng(0).normal(size=50_000))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError, match="too large"):
            checkpoints.save(9, lambda: big, config(9), data(9), last=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(copy) == ["3", "6"]
    assert resume(copy) == (6, [])


@pytest.mark.fault("F18")
def test_save_does_not_block_on_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_on, real = threading.Event(), manifest.verify_and_write_manifest

    def slow(folder: Any, step: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        assert go_on.wait(30)
        return real(folder, step)

    monkeypatch.setattr(writer, "verify_and_write_manifest", slow)
    with CheckpointManager(tmp_path) as checkpoints:
        put(checkpoints, 1)
        checkpoints.poll()
        go_on.set()
        checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_save_fails_after_lock_is_lost(tmp_path: Path):
    with RunLock(tmp_path) as lock, CheckpointManager(tmp_path, locks=[lock]) as checkpoints:
        put(checkpoints, 1, last=True)
        lock.path.write_text("{}")
        with pytest.raises(StorageError, match="lock of another run"):
            put(checkpoints, 2, last=True)
        lock.path.unlink()
    assert names(tmp_path) == ["1"]


# --- retention and tiers --------------------------------------------------------------------


def test_retention_rules_and_best_by_loss(tmp_path: Path):
    settings = CheckpointConfig(keep=1, keep_every_steps=4, keep_best=1)
    with CheckpointManager(tmp_path, settings) as checkpoints:
        for step, loss in ((2, 3.0), (3, 1.0), (4, 2.0), (5, 2.5), (6, 2.5)):
            put(checkpoints, step, loss=loss)
    assert names(tmp_path) == ["3", "4", "6"]


def test_interrupted_deletion_leaves_no_partial_checkpoint(
    copy: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = CheckpointFolder(copy / CHECKPOINTS_FOLDER)
    monkeypatch.setattr("maxpipe.checkpoint.folder._delete", lambda entry: None)
    folder.remove(3)
    monkeypatch.undo()
    assert folder.steps() == [6] and names(copy) == ["3.deleting", "6"]
    assert resume(copy) == (6, []) and names(copy) == ["6"]


def test_resume_uses_newest_checkpoint_of_both_tiers(tmp_path: Path):
    run, local = tmp_path / "runs" / "run", tmp_path / "fast"
    options: dict[str, Any] = {"every": 6, "local_dir": str(local), "local_every": 2}
    with CheckpointManager(run, CheckpointConfig(**options)) as checkpoints:
        assert [step for step in range(1, 13) if checkpoints.should_save(step)] == [
            2,
            4,
            6,
            8,
            10,
            12,
        ]
        for step in (2, 4, 6, 8, 10):
            put(checkpoints, step)
    (mine,) = local.iterdir()
    assert names(run) == ["6"] and [path.name for path in mine.iterdir()] == ["10"]
    assert resume(run, **options) == (10, [])
    # Another run with the same name uses its own local folder.
    with CheckpointManager(tmp_path / "other" / "run", CheckpointConfig(**options)) as other:
        assert other.restore_newest(abstract()) is None
    (mine / "10" / "commit_success.txt").write_text("")
    step, (recorded,) = resume(run, **options)
    assert step == 6 and recorded.startswith(
        "checkpoint_skipped 10: commit_success.txt has 0 bytes"
    )
    with CheckpointManager(run, CheckpointConfig(**options)) as checkpoints:
        checkpoints.restore_newest(abstract())
        put(checkpoints, 8)
        checkpoints.wait()
        assert names(run) == ["6"]
        put(checkpoints, 8, last=True)
    assert names(run) == ["6", "8"], "the final checkpoint must be in the run folder"
