"""Made-up documents, for measurements."""

from __future__ import annotations

import numpy as np

from maxpipe.data.formats.files import digest

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
