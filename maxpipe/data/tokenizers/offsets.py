"""Positions of tokens in the encoded text, in characters."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def of_widths(text: str, widths: np.ndarray) -> np.ndarray:
    """Return begin and end of each token, int64 [tokens, 2], for tokens that are bytes of the text.

    `widths` [tokens] are the token sizes in bytes. A token that is part of a character spans the
    full character.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (letters >= 1 << 7) + (letters >= 1 << 11) + (letters >= 1 << 16)
    character = np.repeat(np.arange(len(text)), sizes)
    ends = np.cumsum(widths)
    assert (int(ends[-1]) if len(ends) else 0) == len(character), "tokens are not the text's bytes"
    first, last = ends - widths, np.maximum(ends - 1, ends - widths)
    return np.stack([character[first], character[last] + 1], axis=1)


def mask_of_spans(offsets: np.ndarray, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return bool [tokens]: tokens with a character in a span, and tokens between them."""
    # The library may report any position for a token without characters.
    begins = np.maximum.accumulate(offsets[:, 0]) if len(offsets) else offsets[:, 0]
    ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
    found = np.zeros(len(offsets), bool)
    for begin, end in spans:
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(begins, end, "left")
        found[first:last] = True
    return found
