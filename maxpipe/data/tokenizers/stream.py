"""Text of tokens that come one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

_CONTEXT = 4
_BROKEN = "\ufffd"
_MOST_INCOMPLETE = 3
"""A character has up to four bytes: three may have come."""
_MOST_HELD = 64


class TextStream:
    """Turns ids into text as they come, and never gives half a character.

    The pieces together are what `decode` makes of all ids, as long as these are whole characters.
    What a token stands for depends on those before it (a space at the start of a text is left
    out), so each id is decoded behind the last few.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], special_ids: Collection[int]):
        self._decode = decode
        self._special_ids = special_ids
        self._ids: list[int] = []
        self._given = 0
        """Characters of the text of `_ids` that were given."""

    def push(self, token: int) -> str:
        """What the next id adds to the text; empty while a character is incomplete."""
        if token in self._special_ids:
            return ""
        self._ids.append(token)
        text = complete = self._decode(self._ids)
        for _ in range(_MOST_INCOMPLETE):
            complete = complete.removesuffix(_BROKEN)
        if len(self._ids) > _MOST_HELD:  # of bytes that are no text any number may come
            complete = text
        added = complete[self._given :]
        self._given = max(self._given, len(complete))
        if complete == text and len(self._ids) > 2 * _CONTEXT:
            self._forget(text)
        return added

    def finish(self) -> str:
        """What is left: bytes that never became a character."""
        added = self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return added

    def _forget(self, text: str) -> None:
        """Drops ids that are not needed any more; never between the bytes of a character."""
        for first in range(len(self._ids) - _CONTEXT, 0, -1):
            tail = self._decode(self._ids[first:])
            if tail and _BROKEN not in tail and text.endswith(tail):
                self._ids, self._given = self._ids[first:], len(tail)
                return
        if len(self._ids) > _MOST_HELD:
            self._ids, self._given = [], 0
