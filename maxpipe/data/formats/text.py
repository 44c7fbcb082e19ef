"""Text files as documents, and the corpus that every machine has."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence

from maxpipe.data.formats.files import File, common_folder, described, digest, read
from maxpipe.data.formats.text_of import check_length, decoded
from maxpipe.errors import ConfigError
from maxpipe.io.text import counted

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
                f"must hold text: {counted(len(files), 'file')} with nothing inside.",
                "Set data.path to a folder with text, or data.source=corpus.",
            )

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, columns: list[str] | None = None) -> str:
        file = self.files[index]
        check_length(file.size_bytes)
        return decoded(read(file), self._errors)

    def where(self, index: int) -> str:
        return self.files[index].path

    def fingerprint(self, chosen: str) -> str:
        return digest((file.name, file.size_bytes) for file in self.files)


def open_corpus() -> TextFiles:
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
    return TextFiles("corpus", described(files, root), errors="replace")
