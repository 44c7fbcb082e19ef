"""Text of tokens as they come: whole characters only, and up to the first stop string. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from maxpipe.data.tokenizer import Tokenizer

_BROKEN = "\ufffd"
"""What a tokenizer makes of bytes that are no character, or not yet."""
_MOST_WAITING = 3
"""Bytes that an incomplete character of UTF-8 has at most."""


class Characters:
    """Text of a row of tokens, without characters that later tokens may complete.

    Text is the difference of two decodings, with and without the newest tokens, as in
    text-generation-inference. What both begin with is needed, as some tokenizers drop the space in
    front of a text's first token; it begins where a character does.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._known = len(self._ids)
        """Number of tokens whose text has been given in full."""
        self._given = 0
        """Characters that have been given of the tokens behind those."""

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self._ids.append(token)
        text, is_whole = self._behind()
        if not is_whole:
            return ""
        certain = text.rstrip(_BROKEN)
        certain = text[: max(len(certain), len(text) - _MOST_WAITING)]
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if text and len(certain) == len(text):
            self._ids, self._given = self._ids[self._known :], 0
            self._known = len(self._ids)
        return new

    def rest(self) -> str:
        """What still waits when no token follows; incomplete characters are U+FFFD."""
        return self._behind()[0][self._given :]

    def _behind(self) -> tuple[str, bool]:
        """Text of the tokens that are not known in full, and whether the known text stays.

        Some decoders give up all characters of a row of bytes while its last one is incomplete.
        """
        before = self._tokenizer.decode(self._ids[: self._known])
        whole = self._tokenizer.decode(self._ids)
        return whole[len(before) :], whole.startswith(before)


class Stops:
    """Text up to the first stop string, without what may become one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._waiting = ""
        self.found = False
        """Whether a stop string came: the text ends in front of it."""

    def add(self, text: str) -> str:
        """The text that is certain now."""
        self._waiting += text
        starts = [at for stop in self._stops if (at := self._waiting.find(stop)) >= 0]
        if starts:
            self.found = True
            before, self._waiting = self._waiting[: min(starts)], ""
            return before
        begun = max((_begun(self._waiting, stop) for stop in self._stops), default=0)
        end = len(self._waiting) - begun
        certain, self._waiting = self._waiting[:end], self._waiting[end:]
        return certain

    def rest(self) -> str:
        """What waited, when no text follows."""
        waited, self._waiting = self._waiting, ""
        return waited


def _begun(text: str, stop: str) -> int:
    """Characters at the end of the text with which the stop string may begin."""
    most = min(len(stop) - 1, len(text))
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)


class Writing:
    """The text of one row: `add` for each token, `end` when it is over."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self._characters, self._stops = Characters(tokenizer, prompt), Stops(stops)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that is certain so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stops.found

    def add(self, token: int) -> str:
        """The text that is certain by this token."""
        return self._kept(self._stops.add(self._characters.add(token)))

    def end(self) -> str:
        """What waited for tokens that do not come."""
        if self.stopped:
            return ""
        last = self._stops.add(self._characters.rest())
        return self._kept(last if self.stopped else last + self._stops.rest())

    def _kept(self, text: str) -> str:
        self._parts.append(text)
        return text
