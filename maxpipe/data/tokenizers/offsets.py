"""Character positions of tokens in the encoded text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def of_widths(text: str, widths: np.ndarray) -> np.ndarray:
    """Return the begin and end of each token in characters, int64 [tokens, 2].

    `widths` [tokens] are the token sizes in bytes, and the tokens must cover the bytes of the text
    exactly. A token that is part of a character spans the full character.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (letters >= 1 << 7) + (letters >= 1 << 11) + (letters >= 1 << 16)
    character = np.repeat(np.arange(len(text)), sizes)
    ends = np.cumsum(widths)
    assert (int(ends[-1]) if len(ends) else 0) == len(character), "tokens are not the text's bytes"
    first, last = ends - widths, np.maximum(ends - 1, ends - widths)
    return np.stack([character[first], character[last] + 1], axis=1)


def mask_of_spans(offsets: np.ndarray, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return bool [tokens]: true for tokens that overlap a span. Tokens without characters that lie
    inside a span are included.
    """
    # The library may report arbitrary positions for tokens without characters.
    begins = np.maximum.accumulate(offsets[:, 0]) if len(offsets) else offsets[:, 0]
    ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
    found = np.zeros(len(offsets), bool)
    for begin, end in spans:
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(begins, end, "left")
        found[first:last] = True
    return found
