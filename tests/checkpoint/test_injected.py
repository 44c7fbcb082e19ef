"""Injected bit flips, truncated files and storage failures during saves and restores."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint._src.serialization import replica_slices

from maxpipe.checkpoint import digests, manager, manifest, storage, writer
from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import tree_digest
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.inspect import verify_checkpoints
from maxpipe.checkpoint.manager import CHECKPOINTS_FOLDER, CheckpointManager
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.errors import DivergenceError, ExitCode, StorageError
from maxpipe.io.typed_json import dump_checksummed
from tests.checkpoint.cases import Faults, abstract, config, data, put, save, tree
from tests.errors import contains

Tree = dict[str, Any]
Logs = pytest.LogCaptureFixture
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(storage, "PAUSE_SECONDS", 0.0)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS_FOLDER).iterdir())


def arrays(step: Path) -> Path:
    """Return the largest file with array data."""
    return max((step / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


def resume(run_dir: Path) -> tuple[int, list[str]]:
    recorded: list[str] = []

    def record(event: str, **fields: object) -> None:
        recorded.append(f"{event} {fields['step']}: {fields['reason']}")

    with CheckpointManager(run_dir, record=record) as checkpoints:
        found = checkpoints.restore_newest(abstract())
    assert found is not None and tree_digest(found.state) == tree_digest(tree(found.step))
    return found.step, recorded


# --- between memory and disk ----------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def damage_array_files(step: Path, harm: Damage) -> None:
    """Damage every file with array data, so that orbax cannot read any array from it."""
    for path in (step / "state").rglob("d/*"):
        harm(path)


def flip_some(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[::97] = bytes(byte ^ 4 for byte in content[::97])
    path.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "flipped": lambda step: damage_array_files(step, flip_some),
    "cut": lambda step: damage_array_files(step, cut),
    "emptied": lambda step: damage_array_files(step, lambda path: path.write_bytes(b"")),
    "no index": lambda step: cut(step / "state" / "manifest.ocdbt"),
    "facts": lambda step: flip(step / "facts" / "metadata", 0.7),
    "digests": lambda step: flip(step / "digests" / "0.json"),
    "digests gone": lambda step: shutil.rmtree(step / "digests"),
    "names": lambda step: (step / "state" / "_METADATA").write_text(
        (step / "state" / "_METADATA").read_text().replace("embedding", "embeddinh")
    ),
}


def before_seal(monkeypatch: pytest.MonkeyPatch, harm: Damage, times: int = 1) -> list[int]:
    """Damage files after orbax commits them and before they are verified."""
    real, tried = manifest.verify_and_write_manifest, []

    def seal(folder: epath.Path, step: int) -> int:
        tried.append(step)
        if len(tried) <= times:
            harm(Path(folder))
        return real(folder, step)

    monkeypatch.setattr(writer, "verify_and_write_manifest", seal)
    return tried


@pytest.mark.fault("K1")
@pytest.mark.parametrize("harm", DAMAGES.values(), ids=DAMAGES)
def test_save_fails_if_data_changes_between_memory_and_disk(
    harm: Damage, copy: Path, monkeypatch: pytest.MonkeyPatch
):
    """The save is retried, and the retry is intact."""
    tried, recorded = before_seal(monkeypatch, harm), list[str]()
    record = lambda event, **fields: recorded.append(event)  # noqa: E731
    with CheckpointManager(copy, record=record) as checkpoints:
        put(checkpoints, 9, last=True)
    assert tried == [9, 9] and recorded == ["checkpoint_failed", "checkpoint"]
    assert names(copy) == ["3", "6", "9"]
    assert resume(copy) == (9, [])


@pytest.mark.fault("K1")
def test_manifest_is_never_written_for_repeated_corruption(
    copy: Path, monkeypatch: pytest.MonkeyPatch
):
    before_seal(monkeypatch, DAMAGES["flipped"], 99)
    with CheckpointManager(copy) as checkpoints, pytest.raises(StorageError, match="9: cannot be"):
        put(checkpoints, 9, last=True)
    assert names(copy) == ["3", "6"]
    go_on = CheckpointConfig(every=1, on_failure="continue", retries=0)
    with CheckpointManager(copy, go_on) as checkpoints:
        put(checkpoints, 9)
        checkpoints._handle_result(
            checkpoints._writer and checkpoints._writer.take_result(wait=True)
        )
    assert names(copy) == ["3", "6"] and resume(copy) == (6, [])


@pytest.mark.fault("K1")
def test_host_copy_corrupted_during_write_is_detected(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """In the first attempt, the digested copy differs by one bit from what orbax writes."""
    real, faults = digests.digest_host_copies, Faults(1)

    def sums(state: Tree, taken: digests.HostCopies) -> Any:
        if faults.take():
            part, start = taken["params.embedding"][0]
            part = part.copy()
            part.view(np.uint32)[3, 5] ^= 1 << 7
            taken = taken | {"params.embedding": [(part, start)]}
        return real(state, taken)

    recorded: list[str] = []
    monkeypatch.setattr(digests, "digest_host_copies", sums)
    with CheckpointManager(
        copy, record=lambda event, **f: recorded.append(str(f.get("reason")))
    ) as some:
        put(some, 9, last=True)
    assert recorded == ["array params.embedding differs from the saved content", "None"]
    assert resume(copy) == (9, [])


@pytest.mark.fault("K1")
def test_bit_flip_while_writing_manifest_is_detected(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise an intact checkpoint would be reported as damaged from then on."""
    real, faults = manifest._digest, Faults(1)

    def digest_of(path: Any, drop: bool) -> manifest.ManifestFile:
        found = real(path, drop)
        if drop and faults.take():
            found["sha256"] = found["sha256"][::-1]
        return found

    monkeypatch.setattr(manifest, "_digest", digest_of)
    recorded: list[str] = []
    with CheckpointManager(copy, record=lambda event, **f: recorded.append(event)) as checkpoints:
        put(checkpoints, 9, last=True)
    assert recorded == ["checkpoint_failed", "checkpoint"] and resume(copy) == (9, [])


def test_digests_read_the_host_copy_that_orbax_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Digests are computed from the same buffers that orbax writes, not from a second copy."""
    written: list[Any] = []
    seen: list[Any] = []
    transfer, sums = replica_slices.transfer_arrays_to_host, digests.digest_host_copies

    def transfer_and_note(*args: Any, **options: Any) -> Any:
        found = transfer(*args, **options)
        written.extend(part.data() for slices in found for part in slices.replica_slices)
        return found

    def note(state: Tree, taken: digests.HostCopies) -> Any:
        seen.extend(part for parts in taken.values() for part, _ in parts)
        return sums(state, taken)

    # On GPUs, orbax copies to pinned host memory by default, which would be a second copy.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", transfer_and_note)
    monkeypatch.setattr(digests, "digest_host_copies", note)
    save(tmp_path, 1)
    assert len(seen) == 7
    assert {part.ctypes.data for part in seen} == {part.ctypes.data for part in written}


# --- between commit and manifest ------------------------------------------------------------


@pytest.mark.fault("K7")
def test_step_without_manifest_is_verified_by_recorded_digests(copy: Path, caplog: Logs):
    step = copy / CHECKPOINTS_FOLDER / "6"
    (step / "manifest.json").unlink()
    assert resume(copy) == (6, [])
    assert "matches its recorded digests" in caplog.text
    assert manifest.has_manifest(CheckpointFolder(copy / CHECKPOINTS_FOLDER) / 6)
    for harm in ("flipped", "facts", "digests"):
        shutil.copytree(step, copy / "kept")
        (step / "manifest.json").unlink()
        DAMAGES[harm](step)
        number, (recorded,) = resume(copy)
        assert number == 3 and recorded.startswith("checkpoint_skipped 6: ")
        shutil.rmtree(copy / CHECKPOINTS_FOLDER / "6.corrupt")
        (copy / "kept").rename(step)


# --- between disk and memory ----------------------------------------------------------------


@pytest.mark.fault("K2")
@pytest.mark.parametrize("times", [1, 2])
def test_bit_flip_while_reading_arrays_is_detected(
    times: int, copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: Logs
):
    """A single bad read is retried. If the second read is bad, too, the step is damaged."""
    real, faults = CheckpointFolder.arrays, Faults(times)

    def read(self: CheckpointFolder, step: int, wanted: Tree | None = None) -> Tree:
        state = real(self, step, wanted)
        if step == 6 and faults.take():
            state["optimizer"]["mu"]["embedding"] = -state["optimizer"]["mu"]["embedding"]
        return state

    monkeypatch.setattr(CheckpointFolder, "arrays", read)
    reason = "array optimizer.mu.embedding differs from the saved content"
    if times == 1:
        assert resume(copy) == (6, []) and names(copy) == ["3", "6"]
        assert f"6: the first read found damage ({reason})" in caplog.text
    else:
        assert resume(copy) == (3, [f"checkpoint_skipped 6: {reason}"])


@pytest.mark.fault("K2")
def test_transient_read_corruption_is_not_damage(copy: Path, monkeypatch: pytest.MonkeyPatch):
    real, faults = manifest._digest, Faults(1)

    def digest_of(path: Any, *options: bool) -> manifest.ManifestFile:
        found = real(path, *options)
        if "/6/state/d/" in str(path) and faults.take():
            found["sha256"] = found["sha256"][::-1]
        return found

    monkeypatch.setattr(manifest, "_digest", digest_of)
    assert resume(copy) == (6, []) and names(copy) == ["3", "6"] and not faults.left


# --- failing storage ------------------------------------------------------------------------


ERROR_CODES = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.EAGAIN, errno.EACCES]
# What is read: (owner, function, part of an argument for which the function fails)
READERS = {
    "a file": (manifest, "_digest", "/6/state"),
    "a folder": (os, "listdir", CHECKPOINTS_FOLDER),
    "the files of a step": (storage, "_walk", "/6"),
    "whether there is a manifest": (storage, "_exists", "/6/manifest.json"),
    "the manifest": (storage, "open_file", "/6/manifest.json"),
    "facts": (storage, "open_file", "/6/facts"),
    "shapes": (ocp.StandardCheckpointHandler, "metadata", "/6/state"),
    "arrays": (ocp.PyTreeCheckpointHandler, "restore", "/6/state"),
}


def inject_read_errors(
    monkeypatch: pytest.MonkeyPatch, reader: str, error: Exception, times: int
) -> Faults:
    owner, name, part = READERS[reader]
    real, faults = getattr(owner, name), Faults(times)

    def read(*args: Any, **options: Any) -> Any:
        if any(part in str(each) for each in args[:2]) and faults.take():
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, read)
    return faults


@pytest.mark.fault("K5")
@pytest.mark.parametrize("number", ERROR_CODES)
def test_storage_errors_do_not_change_checkpoints(
    number: int, copy: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every read is attempted three times; then the run stops without changing any file."""
    in_words = ValueError(f"UNKNOWN: Error reading x: it fails [os_error_code='{number}']")
    for reader in READERS:
        error = in_words if reader in ("shapes", "arrays") else OSError(number, "it fails")
        with monkeypatch.context() as patch:
            faults = inject_read_errors(patch, reader, error, 2)
            assert resume(copy) == (6, []), reader
            assert not faults.left, reader
        with monkeypatch.context() as patch:
            inject_read_errors(patch, reader, error, 10_000)
            with pytest.raises(StorageError, match=r"cannot be (reached|written) .*\n.*it fails"):
                resume(copy)
        assert names(copy) == ["3", "6"], reader
    assert resume(copy) == (6, [])


def test_out_of_memory_is_not_damage(copy: Path, monkeypatch: pytest.MonkeyPatch):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    inject_read_errors(monkeypatch, "arrays", error, 99)
    with pytest.raises((StorageError, jax.errors.JaxRuntimeError)):
        resume(copy)
    assert names(copy) == ["3", "6"]


@pytest.mark.fault("K8")
def test_one_damaged_step_is_renamed_but_two_are_not(tmp_path: Path):
    save(tmp_path, 1, 2, 3)
    before = digests_of_files(tmp_path)
    for step in ("2", "3"):
        flip(arrays(tmp_path / CHECKPOINTS_FOLDER / step))
    for _ in range(2):
        with pytest.raises(StorageError, match="newest 2 checkpoints both look") as caught:
            resume(tmp_path)
        assert "the run then resumes from step 1." in str(caught.value)
        assert names(tmp_path) == ["1", "2", "3"]
    flip(arrays(tmp_path / CHECKPOINTS_FOLDER / "2"))  # flip the bit back
    assert resume(tmp_path)[0] == 2
    assert names(tmp_path) == ["1", "2", "3.corrupt"]
    assert {k: v for k, v in digests_of_files(tmp_path).items() if k[0] in "12"} == {
        k: v for k, v in before.items() if k[0] in "12"
    }


def digests_of_files(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / CHECKPOINTS_FOLDER
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- non-finite values ----------------------------------------------------------------------


def non_finite_tree(step: int, value: float = np.nan) -> Tree:
    state = tree(step)
    scale = state["optimizer"]["nu"]["layers"]["scale"]
    state["optimizer"]["nu"]["layers"]["scale"] = scale.at[1, 2].set(value)
    return state


@pytest.mark.fault("K3")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("last", [True, False])
def test_non_finite_state_is_not_saved(value: float, last: bool, copy: Path):
    settings = CheckpointConfig(on_failure="continue")
    with (
        pytest.raises(DivergenceError) as caught,
        CheckpointManager(copy, settings) as checkpoints,
    ):
        checkpoints.save(9, lambda: non_finite_tree(9, value), config(9), data(9), last=last)
        checkpoints.wait()
    assert caught.value.exit_code == ExitCode.CONFIG
    where, rule, _ = str(caught.value).splitlines()
    assert where == f"{copy / CHECKPOINTS_FOLDER / '9'}: was not saved  [MP-RUN-003]"
    assert contains(rule, "optimizer.nu.layers.scale contains 1 values")
    assert contains(rule, "NaN or infinite")
    assert names(copy) == ["3", "6"] and resume(copy) == (6, [])


@pytest.mark.fault("K4")
@pytest.mark.parametrize("release", ["this", "older"])
def test_non_finite_checkpoint_is_damaged(
    release: str, copy: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr("maxpipe.checkpoint.digests.describe_non_finite", lambda sums: [])
        with CheckpointManager(copy) as checkpoints:
            checkpoints.save(9, lambda: non_finite_tree(9), config(9), data(9), last=True)
    if release == "older":
        as_version_1(copy / CHECKPOINTS_FOLDER / "9")
    (found,) = (line for line in verify_lines(copy) if "damaged" in line)
    assert found.startswith(
        "         9  damaged: array optimizer.nu.layers.scale contains 1 values"
    )
    step, (recorded,) = resume(copy)
    assert step == 6 and contains(recorded, "optimizer.nu.layers.scale contains 1 values")
    assert contains(recorded, "NaN or infinite")
    assert names(copy) == ["3", "6", "9.corrupt"]


def as_version_1(step: Path) -> None:
    """Convert a step to the format of a release without array digests."""
    shutil.rmtree(step / "digests")
    content = json.loads((step / "manifest.json").read_text())
    files = {n: one for n, one in content["files"].items() if not n.startswith("digests/")}
    old = {"version": 1, "step": content["step"], "files": files}
    (step / "manifest.json").write_text(dump_checksummed(old))


# --- the command ----------------------------------------------------------------------------


def verify_lines(run_dir: Path) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(StorageError):
        for line in verify_checkpoints(parse_address(str(run_dir))):
            found.append(line)
    return found


@pytest.mark.fault("K9")
def test_verify_decodes_arrays_and_names_damaged_ones(copy: Path):
    step = copy / CHECKPOINTS_FOLDER / "6"
    other = save(copy.parent / "other", 7) / CHECKPOINTS_FOLDER / "7"
    shutil.rmtree(step / "state")
    shutil.copytree(other / "state", step / "state")
    folder = epath.Path(step)
    listed = manifest.read_arrays(folder, 6)
    assert listed and not manifest.write(folder, 6, manifest.digest_files(folder), listed)
    assert manifest.verify_files(folder, 6) == [], "the files match the manifest"
    found = verify_lines(copy)
    assert found[0].startswith("         3  intact")
    assert found[1:] == [
        f"         6  damaged: array {name} differs from the saved content"
        for name in sorted(listed)
    ]


@pytest.mark.parametrize("kind", [TypeError, IndexError, AttributeError, KeyError, OverflowError])
def test_orbax_metadata_error_counts_as_failed_save(
    kind: type[Exception], copy: Path, monkeypatch: pytest.MonkeyPatch
):
    def harm(folder: Path) -> None:
        raise kind("of a flipped bit")

    tried = before_seal(monkeypatch, harm)
    with CheckpointManager(copy) as checkpoints:
        put(checkpoints, 9, last=True)
    assert tried == [9, 9] and resume(copy) == (9, [])
    before_seal(monkeypatch, harm, 99)
    with (
        CheckpointManager(copy) as checkpoints,
        pytest.raises(StorageError, match="cannot be written"),
    ):
        put(checkpoints, 12, last=True)
    assert resume(copy) == (12, [])  # complete except for its manifest


def test_step_with_invalid_metadata_is_skipped(copy: Path, caplog: Logs):
    def accept(facts: CheckpointMetadata) -> None:
        if facts.step == 6:
            raise storage.DamagedError("facts/metadata does not describe a run")

    with CheckpointManager(copy) as checkpoints:
        found = checkpoints.restore_newest(abstract(), accept)
    assert found is not None and found.step == 3
    assert "6 is skipped, renamed 6.corrupt: facts/metadata does not describe a run" in caplog.text
    assert names(copy) == ["3", "6.corrupt"]
