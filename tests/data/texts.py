"""A source for tests of data."""

from __future__ import annotations

from collections.abc import Sequence


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
