"""The content of compressed files, in pieces of bounded size."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO

from maxpipe.data.formats.files import File, reaching, stream
from maxpipe.errors import ConfigError

PIECE_BYTES = 1 << 20
"""The largest piece of content, but of zstd's."""

_READ_BYTES = 1 << 18
_ZSTD_READ_BYTES = 1 << 10
"""Of a few bytes zstd makes a block of 128 KiB, and its package all blocks of what it is given."""
_WINDOW_BYTES = 1 << 27
"""The most memory that a decompressor may ask for; `zstd --long=27` and `xz -9` take as much."""


class _Gzip:
    """zlib with the methods of the decompressors of bz2 and lzma."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._is_full = False

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail and not self._is_full

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self._is_full = len(piece) == max_length  # zlib may hold more without more input
        return piece


class _Zstd:
    """The package zstandard with the same methods."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._frame.decompress(data)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": _Gzip,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_WINDOW_BYTES),
    ".zst": _Zstd,
}
SUFFIXES = tuple(_DECOMPRESSORS)
"""Names of compressed files end with one of them."""


def unpacked(file: File) -> Generator[bytes]:
    """The content, of all members and frames one after another.

    Raises:
        ConfigError: the file is cut or damaged, or cannot be read.
    """
    suffix = next(each for each in SUFFIXES if file.path.endswith(each))
    size = _ZSTD_READ_BYTES if suffix == ".zst" else _READ_BYTES
    with reaching(file.path), stream(file) as packed:
        try:
            yield from _contents(_DECOMPRESSORS[suffix], packed, size)
        except ImportError as error:
            raise ConfigError.one(
                "data.path",
                file.path,
                f"needs the package zstandard: {error}.",
                "Run: pip install 'maxpipe[zstandard]'",
            ) from error
        except EOFError as error:
            raise _damaged(file, suffix, "it ends in the middle") from error
        except Exception as error:
            if isinstance(error, ConfigError) or not _is_of_a_decompressor(error):
                raise
            raise _damaged(file, suffix, str(error)) from error


def _is_of_a_decompressor(error: Exception) -> bool:
    if isinstance(error, (zlib.error, lzma.LZMAError, EOFError, ValueError)):
        return True
    # bz2 has no error of its own: its OSErrors are without a number.
    is_bz2 = isinstance(error, OSError) and error.errno is None
    return is_bz2 or type(error).__name__ == "ZstdError"


def _contents(new: Callable[[], Any], packed: BinaryIO, size: int) -> Iterator[bytes]:
    decompressor, data, begun, whole = new(), b"", False, False
    while data := data or packed.read(size):
        # Zero bytes may follow a member. A file that begins with them is of no format.
        if whole and not begun and not (data := data.lstrip(b"\0")):
            continue
        begun = True
        piece, data = decompressor.decompress(data, PIECE_BYTES), b""
        while piece or not (decompressor.eof or decompressor.needs_input):
            yield piece
            if decompressor.eof or decompressor.needs_input:
                break
            piece = decompressor.decompress(b"", PIECE_BYTES)
        if decompressor.eof:
            data, decompressor, begun, whole = decompressor.unused_data, new(), False, True
    if begun or not whole:
        raise EOFError


def _damaged(file: File, suffix: str, how: str) -> ConfigError:
    return ConfigError.one(
        "data.path",
        file.path,
        f"must be a whole {suffix} file: {how}.",
        "Copy it again from where it is whole, or leave it out of data.path.",
    )
