"""The quoting of words in a line of bash: reading it without expansion, and writing it.

Readline replaces the end of a line, from some character of the last word on. The replacement is
written for the quote that is open there, and every character in it stands for itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

_PLAIN, _SINGLE, _DOUBLE, _ANSI = "", "'", '"', "$'"
_ENDS_WORD = " \t\n;|&()<>"
_SAFE = "%+,-./:=@_"
_ESCAPED_IN_DOUBLE = '"$`\\'
_NAMED = {"a": 7, "b": 8, "e": 27, "E": 27, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_OCTAL = 3
"""Digits of a character in octal."""


@dataclass(slots=True)
class Word:
    """One word of a line, and where its characters are in the line."""

    text: str = ""
    ends: list[int] = field(default_factory=list)
    """Offset in the line after each character of the text."""


@dataclass(slots=True)
class Line:
    """A line up to the cursor."""

    line: str
    words: list[Word]
    quotes: list[str]
    """The open quote before each character of the line, and at its end."""

    def replacement(self, start: int, text: str) -> str:
        """What to write in place of the line from `start` on, so that its last word is `text`."""
        word, quote = self.words[-1], self.quotes[start]
        rest = text[sum(end <= start for end in word.ends) :]
        if quote:
            found = "".join(_inside(quote, each) for each in rest)
            # Readline closes the quote, unless its character is the last one already.
            return found + quote[-1] if not found or found[-1] == quote[-1] else found
        if any(not _is_shown(each) for each in rest):
            return f"$'{''.join(_inside(_ANSI, each) for each in rest)}'"
        is_home = rest.startswith("~") and self.line.startswith("~", start)
        return ("~" if is_home else "") + "".join(map(_escaped, rest[is_home:]))


def read(line: str) -> Line:
    """The words of a simple command; the last one is empty after a space. Nothing is expanded."""
    words: list[Word] = []
    quotes: list[str] = []
    quote, inside, position = _PLAIN, False, 0
    while position < len(line):
        if quote == _PLAIN and line[position] in _ENDS_WORD:
            inside, after = False, position + 1
            quotes.append(quote)
        else:
            if not inside:
                words.append(Word())
            inside, before = True, quote
            quote, text, after = _next(line, position, quote)
            words[-1].text += text
            words[-1].ends += [after] * len(text)
            quotes += [before] * (after - position)
        position = after
    return Line(line, words if inside else [*words, Word()], [*quotes, quote])


def _next(line: str, position: int, quote: str) -> tuple[str, str, int]:
    """The quote after the next piece of a word, the text of the piece, and where it ends."""
    character, after = line[position], position + 1
    follows = line[after : after + 1]
    if quote == _PLAIN:
        if character == "$" and follows == "'":
            return _ANSI, "", after + 1
        if character in (_SINGLE, _DOUBLE):
            return character, "", after
        if character == "\\":
            return quote, follows.replace("\n", ""), after + len(follows)
    elif character == quote[-1]:
        return _PLAIN, "", after
    elif quote == _DOUBLE and character == "\\" and (not follows or follows in '\\"$`\n'):
        return quote, follows.replace("\n", ""), after + len(follows)
    elif quote == _ANSI and character == "\\":
        text, after = _of_ansi(line, after)
        return quote, text, after
    return quote, character, after


def _of_ansi(line: str, position: int) -> tuple[str, int]:
    """The text of an escape in `$'...'`, and where it ends. Bytes above 127 come one by one."""
    content, after = bytearray(), position
    while True:
        digits = ""
        while len(digits) < _OCTAL and line[after : after + 1] in tuple("01234567"):
            digits, after = digits + line[after], after + 1
        if not digits:
            break
        is_cut = len(digits) < _OCTAL and after == len(line)
        content += b"" if is_cut else bytes([int(digits, 8) & 255])
        if content[-1:] < b"\x80" or line[after : after + 1] != "\\":
            break
        if line[after + 1 : after + 2] not in tuple("01234567"):
            break
        after += 1
    if after > position:
        return os.fsdecode(bytes(content)), after
    follows = line[position : position + 1]
    known = _NAMED.get(follows)
    return (follows if known is None else chr(known)), position + len(follows)


def _inside(quote: str, character: str) -> str:
    """A character inside an open quote, which is open again afterwards."""
    if quote == _ANSI:
        if _is_shown(character) and character not in "'\\!":
            return character
        return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
    if not _is_shown(character):
        return f"{quote}$'{_inside(_ANSI, character)}'{quote}"
    if quote == _SINGLE:
        return "'\\''" if character == "'" else character
    if character == "!":  # interactive shells find their history by it
        return "\"'!'\""
    return f"\\{character}" if character in _ESCAPED_IN_DOUBLE else character


def _escaped(character: str) -> str:
    is_safe = character.isalnum() or character in _SAFE or not character.isascii()
    return character if is_safe else f"\\{character}"


def _is_shown(character: str) -> bool:
    """Whether it may be in a line as it is: no control character, no byte of no text."""
    return character.isprintable()
