"""Direct reads and writes of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.io import direct_io
from maxpipe.io.files import UnsafeFileError

SIZES = [1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 4097, 3_000_001]
CONTENT = np.random.default_rng(0).integers(256, size=max(SIZES) + 10_000, dtype=np.uint8)


@pytest.fixture(params=["direct", "no O_DIRECT", "EINVAL"])
def support(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system supports direct transfers, rejects the flag or rejects transfers."""
    if request.param == "no O_DIRECT":
        monkeypatch.setattr(direct_io, "_O_DIRECT", 0)
    if request.param == "EINVAL":
        enabled = set[int]()

        def set_direct(file: int, direct: bool) -> bool:
            (enabled.add if direct else enabled.discard)(file)
            return True

        def transfer(name: str) -> Any:
            real = getattr(os, name)

            def call(file: int, *arguments: Any) -> Any:
                if file in enabled:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return real(file, *arguments)

            return call

        monkeypatch.setattr(direct_io, "_set_direct", set_direct)
        for name in ("preadv", "pwrite"):
            monkeypatch.setattr(os, name, transfer(name))


@pytest.mark.usefixtures("support")
@pytest.mark.parametrize("size", SIZES)
def test_written_files_are_read_back_from_disk(size: int, tmp_path: Path) -> None:
    memory = direct_io.aligned_empty(size)
    memory[:size] = CONTENT[:size]
    direct_io.write_file(path := f"{tmp_path / 'file'}", memory, size)
    assert os.path.getsize(path) == size
    for capacity in (size, 2 * size, 1):
        found = direct_io.read_from_disk(path, direct_io.aligned_empty(capacity))
        assert found.tobytes() == CONTENT[:size].tobytes()
    with pytest.raises(FileExistsError):
        direct_io.write_file(path, memory, size)


@pytest.mark.usefixtures("support")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", [0, 8, 4096, 5001])
@pytest.mark.parametrize("is_cached", [False, True])
def test_range_of_a_file_is_read(size: int, place: int, is_cached: bool, tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(CONTENT.tobytes())
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        if not is_cached:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = direct_io.read_bytes(stream.fileno(), place, size)
        assert found.tobytes() == CONTENT[place : place + size].tobytes()
        with pytest.raises(EOFError):
            direct_io.read_bytes(stream.fileno(), len(CONTENT) - size + 1, size)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafeFileError):
        direct_io.read_from_disk(f"{tmp_path / 'pipe'}", direct_io.aligned_empty(1))


def test_write_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space left"):
        direct_io.write_file(f"{tmp_path / 'file'}", direct_io.aligned_empty(1 << 20), 1 << 20)


def test_aligned_arrays_are_recognized() -> None:
    aligned = direct_io.empty_array((2, 2048), np.dtype(np.float16))
    assert direct_io.is_aligned(aligned) and aligned.shape == (2, 2048)
    assert not direct_io.is_aligned(aligned.T)
    assert not direct_io.is_aligned(aligned[:, :1])
    assert not direct_io.is_aligned(aligned.reshape(-1)[1:])
