"""Text files as documents, and the corpus that every machine has.

Made-up documents, for measurements.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence

import numpy as np

from maxpipe.data.formats.files import File, common_folder, digest, read, stat_files
from maxpipe.data.formats.record_text import check_length, decode_utf8
from maxpipe.errors import ConfigError
from maxpipe.io.formatting import pluralize

# Tests hold text that is broken on purpose, the others are not part of the library.
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


class TextFiles:
    """One document per file."""

    def __init__(self, name: str, files: Sequence[File], *, errors: str = "strict"):
        self.name = name
        self.files = [file for file in files if file.size_bytes > 0]
        self._errors = errors
        if not self.files:
            raise ConfigError.one(
                "data.path",
                common_folder(files),
                f"must hold text: {pluralize(len(files), 'file')} with nothing inside.",
                "Set data.path to a folder with text, or data.source=corpus.",
            )

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, columns: list[str] | None = None) -> str:
        file = self.files[index]
        check_length(file.size_bytes)
        return decode_utf8(read(file), self._errors)

    def where(self, index: int) -> str:
        return self.files[index].path

    def fingerprint(self, chosen: str) -> str:
        return digest((file.name, file.size_bytes) for file in self.files)


def open_stdlib_corpus() -> TextFiles:
    """The source files of Python's standard library.

    Raises:
        ConfigError: it has none.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        # The build's variables differ between machines with the same Python.
        files += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise ConfigError.one(
            "data.source",
            "corpus",
            f"needs the source files of Python's standard library, and {root} has none.",
            "Set data.source=text and data.path to a folder with text.",
        )
    return TextFiles("corpus", stat_files(files, root), errors="replace")


_DOCUMENTS = 8192
_WORDS = 1024


class SyntheticRecords:
    """Documents of made-up words, some frequent and most rare, made when they are asked for."""

    name = "synthetic"
    files = ()

    def __init__(self, seed: int, num_documents: int = _DOCUMENTS):
        self._seed = seed % (1 << 64)
        self._num_documents = num_documents
        letters = _random_bits(self._seed, num_documents, 16 * _WORDS).reshape(-1, 16)
        self._words = [
            (row[1 : 2 + row[0] % 10] % 26 + ord("a")).astype(np.uint8).tobytes().decode()
            for row in letters
        ]
        share = np.cumsum(1 / np.arange(1, _WORDS + 1))
        self._shares = share / share[-1]

    def __len__(self) -> int:
        return self._num_documents

    def read(self, index: int, columns: list[str] | None = None) -> str:
        if not 0 <= index < self._num_documents:
            raise IndexError(index)
        bits = _random_bits(self._seed, index, 1024)
        draws = bits[: 16 + int(bits[-1] % 1008)] / 2.0**64
        words = np.minimum(np.searchsorted(self._shares, draws), _WORDS - 1)
        return " ".join(self._words[word] for word in words)

    def where(self, index: int) -> str:
        return f"synthetic: document {index}"

    def fingerprint(self, chosen: str) -> str:
        return digest([self._seed, self._num_documents])


def _random_bits(seed: int, stream: int, count: int) -> np.ndarray:
    # numpy guarantees a bit generator's raw output across versions, but not its distributions.
    return np.random.PCG64([seed, stream]).random_raw(count)
