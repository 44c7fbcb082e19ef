"""Read and write large files without the page cache.

A copy through the page cache can cost more CPU time than the disk transfer, and it evicts data that
other programs use. Direct transfers need addresses, offsets and lengths that are multiples of
`ALIGNMENT`. They are used only for files on a block device: network and FUSE file systems rely on
the page cache for read-ahead. All functions fall back to the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
from collections.abc import Sequence

import numpy as np

from maxpipe.io.files import open_regular

ALIGNMENT = 4096
"""Alignment in bytes: the largest logical block size of common disks."""

_MIN_BYTES = 1 << 20
"""Smaller reads use the page cache, because a direct read has no read-ahead."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


def aligned_empty(size: int) -> np.ndarray:
    """Return an uninitialized byte array of at least `size` bytes that is suitable for direct
    transfers. Its size is a multiple of `ALIGNMENT`.
    """
    rounded = _round_up(size)
    memory = np.empty(rounded + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + rounded]


def empty_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array whose memory `write_file` can write without a copy."""
    size = math.prod(shape) * dtype.itemsize
    return aligned_empty(size)[:size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Return whether `write_file` can write the memory of an array without a copy."""
    is_contiguous = array.flags.c_contiguous
    return is_contiguous and not (array.ctypes.data % ALIGNMENT or array.nbytes % ALIGNMENT)


def read_bytes(file: int, place: int, size: int) -> np.ndarray:
    """Return `size` bytes of a file, beginning at offset `place`, as a byte array.

    Bytes in the page cache are read from there.

    Raises:
        EOFError: the file ends too early.
        OSError: the file cannot be read.
    """
    begin = place % ALIGNMENT
    memory = aligned_empty(begin + size)
    if size >= _MIN_BYTES and not _is_cached(file, place) and _set_direct(file, True):
        with contextlib.suppress(OSError):  # the read below reports the error if it persists
            _fill(file, memory, place - begin, begin + size)
            return memory[begin : begin + size]
        _set_direct(file, False)
    _fill(file, memory[begin:], place, size)
    return memory[begin : begin + size]


def read_from_disk(path: str, memory: np.ndarray) -> np.ndarray:
    """Return all bytes of a file, read from disk even if they are in the page cache.

    The file is flushed first, so that the bytes survive a power failure. The result uses `memory`,
    which is from `aligned_empty`, unless the file is larger.

    Raises:
        OSError: the file cannot be flushed or read, is not a regular file, or shrinks.
    """
    file = open_regular(path)
    try:
        os.fsync(file)
        size = os.fstat(file).st_size
        memory = memory if size <= memory.size else aligned_empty(size)
        if _set_direct(file, True):
            with contextlib.suppress(OSError):
                _fill(file, memory, 0, size)
                return memory[:size]
            _set_direct(file, False)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        _fill(file, memory, 0, size)
        return memory[:size]
    except EOFError as error:
        raise OSError(errno.EIO, str(error), path) from error
    finally:
        os.close(file)


def write_file(path: str, memory: np.ndarray, size: int) -> None:
    """Create a file with the first `size` bytes of an array from `aligned_empty`.

    The file is not flushed; `read_from_disk` flushes it.

    Raises:
        OSError: the file exists or cannot be written.
    """
    file = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if size >= _MIN_BYTES and _set_direct(file, True):
            with contextlib.suppress(OSError):
                _write(file, memory[: _round_up(size)])
                os.ftruncate(file, size)
                return
            _set_direct(file, False)
        _write(file, memory[:size])
        os.ftruncate(file, size)
    finally:
        os.close(file)


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_cached(file: int, place: int) -> bool:
    """Return whether the page cache contains the byte at offset `place`."""
    if not _RWF_NOWAIT:
        return False
    try:
        os.preadv(file, [bytearray(1)], place, _RWF_NOWAIT)
    except OSError:  # EAGAIN, or the file system does not support the flag
        return False
    return True


def _set_direct(file: int, direct: bool) -> bool:
    """Switch direct transfers of an open file on or off, and return whether this succeeded."""
    if not _O_DIRECT or os.major(os.fstat(file).st_dev) == 0:
        return False
    try:
        flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~_O_DIRECT
        fcntl.fcntl(file, fcntl.F_SETFL, flags | (_O_DIRECT if direct else 0))
    except OSError:  # the file system does not support direct transfers
        return False
    return True


def _fill(file: int, memory: np.ndarray, place: int, size: int) -> None:
    """Read at least `size` bytes at offset `place` into the beginning of `memory`.

    Raises:
        EOFError: the file ends too early.
    """
    view, total = memoryview(memory.data), 0
    while total < size:
        if not (count := os.preadv(file, [view[total:]], place + total)):
            raise EOFError("the file was truncated")
        total += count


def _write(file: int, memory: np.ndarray) -> None:
    view, total = memoryview(memory.data), 0
    while total < len(view):
        total += os.pwrite(file, view[total:], total)
