"""Sources for the data tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class Texts:
    """In-memory source that counts reads."""

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

    def folder(self, index: int) -> str:
        return "."

    def content(self, moved: object = None) -> dict[str, str]:
        return {}

    def check_unchanged(self, moved: object = None) -> None:
        """Do nothing: an in-memory source has no files."""


def write_texts(folder: Path, texts: Sequence[str]) -> str:
    """Write one file per document; return the folder's path for `data.source=text`."""
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:04}.txt").write_text(text)
    return str(folder)
