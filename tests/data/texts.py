"""Sources for tests of data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Texts:
    """A source in memory that counts how often it is read."""

    name = "texts"
    unreadable: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[str]):
        self.texts = list(texts)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        self.reads += 1
        return self.texts[index]

    def record(self, index: int) -> str:
        return self.texts[index]

    def where(self, index: int) -> str:
        return f"texts: document {index}"

    def fingerprint(self) -> str:
        return str(len(self.texts))

    def content(self, moved: object = None) -> dict[str, str]:
        return {}

    def check_unchanged(self, moved: object = None) -> None:
        """There are no files."""


def write_texts(folder: Path, texts: Sequence[str]) -> str:
    """A folder with a document in each file, for `data.source=text`."""
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:04}.txt").write_text(text)
    return str(folder)
