"""Checkpoints whose arrays are read and written in slabs."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from maxpipe.checkpoint import manifest, slab_writer
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.reader import restore
from maxpipe.errors import Code, ConfigError, DivergenceError
from maxpipe.io import direct_io
from tests.checkpoint.test_injected import DAMAGES
from tests.errors import raises

ARRAYS = {
    "a": np.random.default_rng(1).normal(size=(5, 7, 9)).astype(ml_dtypes.bfloat16),
    "b": np.random.default_rng(2).normal(size=(11,)).astype(np.float16),
    "c": np.random.default_rng(3).normal(size=(3, 1)).astype(np.float32),
}
SLABS = {"a": (2, 4, 9), "b": (11,), "c": (1, 1)}


def state(arrays: dict[str, np.ndarray] = ARRAYS, **changes: Any) -> dict[str, Any]:
    return {
        "params": {
            name: slab_writer.LazySlabArray(
                array.shape,
                array.dtype,
                SLABS[name],
                changes.get(name, array.__getitem__),
                is_fork_safe=True,
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
    slab_writer.save(folder, FACTS, state(), counts.append)
    assert folder.steps() == [4]
    assert sum(counts) == sum(array.nbytes for array in ARRAYS.values()) and len(counts) == 10
    found = restore(folder, 4, None)
    assert found.metadata.data == {"step": 4}
    for name, array in ARRAYS.items():
        assert found.state["params"][name].dtype == array.dtype
        assert found.state["params"][name].tobytes() == array.tobytes()
    assert not manifest.verify_arrays(folder / 4, 4, manifest.read_expected_digests(folder / 4, 4))


def test_slab_arrays_are_restored_in_requested_dtype(folder: CheckpointFolder) -> None:
    slab_writer.save(folder, FACTS, state())
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

    def read(region: slab_writer.Region) -> np.ndarray:
        if region[0].start:
            raise kind("while it was read")
        return ARRAYS["a"][region]

    with pytest.raises(kind, match="while it was read"):
        slab_writer.save(folder, FACTS, state(a=read))
    assert not folder.steps()
    assert threading.active_count() <= begun + 1  # no writer threads remain


def test_non_finite_slabs_are_rejected(folder: CheckpointFolder) -> None:
    bad = {**ARRAYS, "b": ARRAYS["b"] + np.float16(np.inf)}
    with pytest.raises(DivergenceError, match=r"params\.b contains 11 values"):
        slab_writer.save(folder, FACTS, state(bad))


@pytest.mark.parametrize(
    ("shape", "slab", "count"),
    [((5, 7), (2, 7), 3), ((5,), (9,), 1), ((), (), 1), ((4, 3, 2), (3, 2, 2), 4)],
)
def test_regions_cover_each_element_once(
    shape: tuple[int, ...], slab: tuple[int, ...], count: int
) -> None:
    seen = np.zeros(shape, int)
    found = [*slab_writer.regions(shape, slab)]
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
        slab_writer.run_in_threads(work, range(1000))
    assert len(done) < 20


# --- slabs that are written by forked processes -----------------------------------------------


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_writer, "FORK_BYTES", 0)
    monkeypatch.setattr(slab_writer, "PROCESSES_PER_CORE", 1)


@pytest.mark.usefixtures("forks")
def test_forked_processes_write_the_same_files(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[int]()
    real = slab_writer.ForkedWorkers.call

    def call(self: Any, task: Any) -> Any:
        seen.update(process.pid for process in self._processes)
        return real(self, task)

    monkeypatch.setattr(slab_writer.ForkedWorkers, "call", call)
    counts: list[int] = []
    slab_writer.save(folder, FACTS, state(), counts.append)
    assert len(seen) == len(os.sched_getaffinity(0)) and len(counts) == 10
    for name, array in ARRAYS.items():
        assert restore(folder, 4, None).state["params"][name].tobytes() == array.tobytes()
    monkeypatch.setattr(slab_writer, "FORK_BYTES", 1 << 60)
    (tmp_path / "threads").mkdir()
    slab_writer.save(other := CheckpointFolder(tmp_path / "threads"), FACTS, state())
    chunks = list(Path(folder / 4 / "state").glob("params.*/*"))
    assert len(chunks) == 13
    for path in chunks:
        same = Path(other / 4 / "state") / path.parent.name / path.name
        assert path.read_bytes() == same.read_bytes()


@pytest.mark.usefixtures("forks")
def test_errors_of_forked_processes_are_raised(folder: CheckpointFolder) -> None:
    def read(region: slab_writer.Region) -> np.ndarray:
        if region[0].start:
            raise ConfigError.one(Code.HF_DAMAGED, "a file", None, "is damaged.", "Copy it.")
        return ARRAYS["a"][region]

    with raises(ConfigError, "a file", names=["is damaged"], code=Code.HF_DAMAGED):
        slab_writer.save(folder, FACTS, state(a=read))

    def die(region: slab_writer.Region) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(OSError, match="exit code -9"):
        slab_writer.save(folder, FACTS, state(a=die))
    with pytest.raises(DivergenceError, match=r"params\.b contains 11 values"):
        slab_writer.save(folder, FACTS, state({**ARRAYS, "b": ARRAYS["b"] + np.float16(np.inf)}))
    assert not any(manifest.has_manifest(folder / step) for step in folder.steps())
    assert not multiprocessing.active_children()


# --- verification of written slabs ------------------------------------------------------------


def damage_before_manifest(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]) -> None:
    """Damage the step after its slabs were verified, before the manifest is written."""

    def seal(step: Any, number: int, verified: Any) -> int:
        assert verified.files and verified.arrays
        damage(Path(step))
        return manifest.verify_and_write_manifest(step, number, verified)

    monkeypatch.setattr(slab_writer, "verify_and_write_manifest", seal)


def test_slab_files_are_read_once_after_they_are_written(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, digested = list[str](), list[str]()
    from_disk, digest = direct_io.read_from_disk, manifest._digest
    monkeypatch.setattr(
        direct_io,
        "read_from_disk",
        lambda path, memory: read.append(path) or from_disk(path, memory),
    )
    monkeypatch.setattr(
        manifest, "_digest", lambda path, drop: digested.append(str(path)) or digest(path, drop)
    )
    slab_writer.save(folder, FACTS, state())
    chunks = [
        path for name in ARRAYS for path in (folder / 4 / "state" / f"params.{name}").iterdir()
    ]
    names = sorted(path.name for path in chunks if not path.name.startswith("."))
    assert len(names) == 10 and sorted(os.path.basename(path) for path in read) == names
    assert not {os.path.basename(path) for path in digested} & {*names}
    assert not manifest.verify_files(folder / 4, 4)


@pytest.mark.fault("K1")
@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_damaged_chunk_fails_the_save(
    wrong: int, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of the chunk is flipped, or the file has one byte more or less."""
    real, numbers = direct_io.write_file, itertools.count(1)

    def write(path: str, memory: np.ndarray, size: int) -> None:
        real(path, memory, size)
        if next(numbers) == 3:  # several threads write
            content = bytearray(Path(path).read_bytes())
            content[size // 2] ^= 4 if not wrong else 0
            Path(path).write_bytes(bytes(content) + b"x" if wrong > 0 else content[: size + wrong])

    monkeypatch.setattr(direct_io, "write_file", write)
    with pytest.raises(manifest.SaveVerificationError, match="state/params.* differs from"):
        slab_writer.save(folder, FACTS, state())
    assert next(numbers) > 3 and not folder.steps()


@pytest.mark.fault("K1")
@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in ("no index", "flipped")])
def test_damage_after_verification_of_slabs_fails_the_save(
    name: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit is not noticed, because files are not read a second time."""

    def damage(step: Path) -> None:
        metadata = step / "state" / "_METADATA"
        if name == "names":
            metadata.write_text(metadata.read_text().replace('"b"', '"bb"'))
        elif name in ("cut", "emptied"):
            size = (chunk := step / "state" / "params.a" / "1.1.0").stat().st_size
            os.truncate(chunk, size - 1 if name == "cut" else 0)
        else:
            DAMAGES[name](step)

    damage_before_manifest(monkeypatch, damage)
    with pytest.raises(manifest.SaveVerificationError):
        slab_writer.save(folder, FACTS, state())
    assert not manifest.has_manifest(folder / 4)


@pytest.mark.fault("K1")
def test_storage_library_must_find_the_written_slabs(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_writer, "_chunk_name", lambda region, slab: f"wrong-{region[0].start}")
    with pytest.raises(manifest.SaveVerificationError, match=r"array params\.. differs"):
        slab_writer.save(folder, FACTS, state({"b": ARRAYS["b"], "c": ARRAYS["c"]}))
    assert not manifest.has_manifest(folder / 4)


@pytest.mark.parametrize("name", ["write_file", "read_from_disk"])
def test_disk_error_fails_the_save(
    name: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no retry: after a failed fsync, a second one succeeds although data was lost."""
    begun = threading.active_count()

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct_io, name, fail)
    with pytest.raises(OSError, match="Input/output error"):
        slab_writer.save(folder, FACTS, state({"c": ARRAYS["c"]}))
    assert not folder.steps() and threading.active_count() <= begun + 1


def test_large_slabs_are_written_directly(folder: CheckpointFolder) -> None:
    """Slabs at the array boundary are padded, and the restored arrays are equal."""
    array = np.random.default_rng(4).normal(size=(3, 700, 1030)).astype(np.float32)
    lazy = slab_writer.LazySlabArray(array.shape, array.dtype, (1, 512, 1030), array.__getitem__)
    slab_writer.save(folder, FACTS, {"params": {"large": lazy}})
    chunk = (folder / 4 / "state" / "params.large" / "2.1.0").read_bytes()
    assert len(chunk) == 512 * 1030 * 4 and not any(chunk[188 * 1030 * 4 :])
    assert restore(folder, 4, None).state["params"]["large"].tobytes() == array.tobytes()
