"""Checkpoints whose arrays are read and written in slabs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from maxpipe.checkpoint import manifest, storage, writer
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.reader import restore
from maxpipe.errors import DivergenceError
from tests.checkpoint.test_injected import DAMAGES

ARRAYS = {
    "a": np.random.default_rng(1).normal(size=(5, 7, 9)).astype(ml_dtypes.bfloat16),
    "b": np.random.default_rng(2).normal(size=(11,)).astype(np.float16),
    "c": np.random.default_rng(3).normal(size=(3, 1)).astype(np.float32),
}
SLABS = {"a": (2, 4, 9), "b": (11,), "c": (1, 1)}


def state(arrays: dict[str, np.ndarray] = ARRAYS, **changes: Any) -> dict[str, Any]:
    return {
        "params": {
            name: writer.LazySlabArray(
                array.shape, array.dtype, SLABS[name], changes.get(name, array.__getitem__)
            )
            for name, array in arrays.items()
        }
    }


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointFolder(tmp_path / "checkpoints")


FACTS = CheckpointMetadata(4, {"model": {}}, {"step": 4})


def test_slab_wise_save_restores_equal_arrays(folder: CheckpointFolder) -> None:
    counts: list[int] = []
    writer.save(folder, FACTS, state(), counts.append)
    assert folder.steps() == [4]
    assert sum(counts) == sum(array.nbytes for array in ARRAYS.values()) and len(counts) == 10
    found = restore(folder, 4, None)
    assert found.metadata.data == {"step": 4}
    for name, array in ARRAYS.items():
        assert found.state["params"][name].dtype == array.dtype
        assert found.state["params"][name].tobytes() == array.tobytes()
    assert not manifest.verify_arrays(folder / 4, 4, manifest.read_expected_digests(folder / 4, 4))


def test_slab_arrays_are_restored_in_requested_dtype(folder: CheckpointFolder) -> None:
    writer.save(folder, FACTS, state())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, np.float32, sharding=place)
        for name, array in ARRAYS.items()
    }
    found = restore(folder, 4, {"params": wanted}).state["params"]
    for name, array in ARRAYS.items():
        assert found[name].dtype == np.float32
        assert (np.asarray(found[name]) == array.astype(np.float32)).all()


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyboardInterrupt])
def test_slab_read_error_is_raised_unchanged(folder: CheckpointFolder, kind: type) -> None:
    begun = threading.active_count()

    def read(region: writer.Region) -> np.ndarray:
        if region[0].start:
            raise kind("while it was read")
        return ARRAYS["a"][region]

    with pytest.raises(kind, match="while it was read"):
        writer.save(folder, FACTS, state(a=read))
    assert not folder.steps()
    assert threading.active_count() <= begun + 1  # no writer threads remain


def test_non_finite_slabs_are_rejected(folder: CheckpointFolder) -> None:
    bad = {**ARRAYS, "b": ARRAYS["b"] + np.float16(np.inf)}
    with pytest.raises(DivergenceError, match=r"params\.b contains 11 values"):
        writer.save(folder, FACTS, state(bad))


@pytest.mark.parametrize(
    ("shape", "slab", "count"),
    [((5, 7), (2, 7), 3), ((5,), (9,), 1), ((), (), 1), ((4, 3, 2), (3, 2, 2), 4)],
)
def test_regions_cover_each_element_once(
    shape: tuple[int, ...], slab: tuple[int, ...], count: int
) -> None:
    seen = np.zeros(shape, int)
    found = [*writer.regions(shape, slab)]
    for region in found:
        seen[region] += 1
    assert (seen == 1).all() and len(found) == count


def test_run_in_threads_stops_after_first_error() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        done.append(number)
        if number == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        writer.run_in_threads(work, range(1000))
    assert len(done) < 20


# --- digests that are computed during the save ----------------------------------------------


@pytest.fixture
def frequent_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_SCAN_EVERY", 1)


@pytest.mark.usefixtures("frequent_scans")
def test_files_are_digested_while_others_are_written(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is digested once more when the manifest is written."""
    real, early, later = manifest._digest, list[str](), list[str]()
    done = False

    def digest(path: Any, drop: bool) -> manifest.ManifestFile:
        (later if done else early).append(path.name)
        return real(path, drop)

    def sealed(*arguments: Any) -> int:
        nonlocal done
        done = True
        return manifest.verify_and_write_manifest(*arguments)

    monkeypatch.setattr(manifest, "_digest", digest)
    monkeypatch.setattr(writer, "verify_and_write_manifest", sealed)
    writer.save(folder, FACTS, state())
    data = {path.name for path in (folder / 4 / "state" / "ocdbt.process_0" / "d").iterdir()}
    assert len(early) == len({*early}) > 5 and {*early} <= data
    assert all(later.count(name) == 1 for name in early)
    assert not manifest.verify_files(folder / 4, 4)


@pytest.mark.usefixtures("frequent_scans")
@pytest.mark.fault("K1")
@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "names"])
def test_data_changed_after_early_digest_fails_the_save(
    name: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage `names` is left out, because it renames an array that this state lacks."""

    def seal(step: Any, number: int, ahead: Any) -> int:
        assert ahead
        DAMAGES[name](Path(step))
        return manifest.verify_and_write_manifest(step, number, ahead)

    monkeypatch.setattr(writer, "verify_and_write_manifest", seal)
    with pytest.raises(manifest.SaveVerificationError):
        writer.save(folder, FACTS, state())
    assert not manifest.has_manifest(folder / 4)


@pytest.mark.usefixtures("frequent_scans")
@pytest.mark.fault("K1")
def test_corrupted_early_digest_fails_the_save(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = manifest._digest, [1]

    def digest(path: Any, drop: bool) -> manifest.ManifestFile:
        found = real(path, drop)
        if left[0]:
            left[0] -= 1
            found["sha256"] = found["sha256"][::-1]
        return found

    monkeypatch.setattr(manifest, "_digest", digest)
    with pytest.raises(manifest.SaveVerificationError, match="differs from the saved content"):
        writer.save(folder, FACTS, state())
    assert not manifest.has_manifest(folder / 4)


@pytest.mark.usefixtures("frequent_scans")
@pytest.mark.parametrize("name", ["_flush", "_digest", "_drop", "_flush_folder"])
def test_disk_error_in_background_digest_fails_the_save(
    name: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no retry: after a failed fsync, a second one succeeds although data was lost."""
    begun, failed = threading.active_count(), [0]
    real, most = getattr(manifest, name), storage.ATTEMPTS if name == "_digest" else 1

    def fail(*arguments: Any) -> Any:
        failed[0] += 1
        if failed[0] <= most:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(manifest, name, fail)
    monkeypatch.setattr(storage, "PAUSE_SECONDS", 0.0)
    with pytest.raises(OSError, match="Input/output error"):
        writer.save(folder, FACTS, state({"c": ARRAYS["c"]}))
    assert failed[0] >= most and not folder.steps()
    assert threading.active_count() <= begun + 1


@pytest.mark.usefixtures("frequent_scans")
def test_file_is_digested_after_its_writers_finish(tmp_path: Path) -> None:
    with (
        manifest.BackgroundDigester(epath.Path(tmp_path)) as ahead,
        contextlib.ExitStack() as first,
    ):
        first.enter_context(ahead.writing())
        (tmp_path / "a").write_bytes(b"half")
        (tmp_path / "b.__lock").write_bytes(b"half")
        with ahead.writing():
            (tmp_path / "c").write_bytes(b"whole")
        assert not ahead.results()
        (tmp_path / "a").write_bytes(b"all of it")
        first.close()
        found = ahead.results()
    assert found == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in (("a", b"all of it"), ("c", b"whole"))
    }
