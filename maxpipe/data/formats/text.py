"""Sources for text files, the Python standard library and synthetic documents."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence

import numpy as np

from maxpipe.data.formats.files import File, common_folder, digest, read, stat_files
from maxpipe.data.formats.record_text import check_length, decode_utf8
from maxpipe.errors import ConfigError
from maxpipe.io.formatting import pluralize

# Test folders contain invalid text on purpose, and the other folders are not part of the library.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class TextFiles:
    """Source with one document per text file."""

    def __init__(self, name: str, files: Sequence[File], *, errors: str = "strict"):
        self.name = name
        self.files = [file for file in files if file.size_bytes > 0]
        self._errors = errors
        if not self.files:
            raise ConfigError.one(
                "data.path",
                common_folder(files),
                f"must contain text: {pluralize(len(files), 'file')} without content.",
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
    """Return a source whose documents are the source files of the Python standard library.

    Raises:
        ConfigError: the source files are not installed.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        # Files with build variables differ between machines that have the same Python version.
        files += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise ConfigError.one(
            "data.source",
            "corpus",
            f"requires the source files of Python's standard library, and {root} has none.",
            "Set data.source=text and data.path to a folder with text.",
        )
    return TextFiles("corpus", stat_files(files, root), errors="replace")


_DOCUMENTS = 8192
_WORDS = 1024


class SyntheticRecords:
    """Synthetic documents for benchmarks, generated on demand from random words with Zipf
    frequencies.
    """

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
    # numpy guarantees that the raw output of bit generators is stable across versions. This
    # guarantee does not extend to distributions.
    return np.random.PCG64([seed, stream]).random_raw(count)
