"""Bound on how much longer a `tokenizer.json` makes a text.

Six chained replacements of `a` by `aaaaaaaaaa` make a million characters of one. The bound is
computed from the definition, before any text is encoded: it is the largest number of characters
that one character of a text can become. The growth by Unicode's own forms (NFKC, lower case) is
small and not counted.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_GROWTH = 64
"""Characters per character; published tokenizers have at most 4."""
_MAX_STEPS = 200
_LONGEST_UNICODE = 64
"""Bytes of the longest entry in a published `precompiled_charsmap`, rounded up."""
_OTHER = ""
"""Stands for all characters that the definition does not name."""


def check_growth(definition: Mapping[str, Any]) -> None:
    """Raise ValueError if normalizer or decoder make text more than MAX_GROWTH times as long."""
    for part in ("normalizer", "decoder"):
        found = growth([*_steps(definition.get(part))])
        if found > MAX_GROWTH:
            raise ValueError(
                f"its {part} can make a text {found:.3g} times as long, at most {MAX_GROWTH} times "
                "is allowed"
            )


def growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest number of characters that one character can become."""
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"it has {len(steps):,} steps in a normalizer or decoder")
    alphabet = {_OTHER, *"".join(_texts(steps))}

    @functools.cache
    def of_text(number: int, text: str) -> float:
        return sum(of(number, each) for each in text)

    @functools.cache
    def of(number: int, character: str) -> float:
        """Characters that a character before step `number` becomes at the end."""
        if number == len(steps):
            return 1.0
        step, same = steps[number], of(number + 1, character)
        pattern, content = _replacement(step)
        if content:
            grown = of_text(number + 1, content)
            if not pattern:  # a regex may match any character, and the empty text next to it
                return same + grown
            # Each match consumes all characters of its pattern.
            return max(same, grown / len(pattern)) if character in pattern else same
        if step.get("type") == "Precompiled":
            longest = _longest(step) / _LONGEST_UNICODE
            return max(1.0, longest) * max(of(number + 1, each) for each in alphabet)
        if step.get("type") in _FOLDS:  # `A` may become `a`
            return max(of(number + 1, each) for each in alphabet)
        return same

    # From the end, so that no recursion is deeper than one step.
    worst = [max(of(number, each) for each in alphabet) for number in range(len(steps), -1, -1)]
    return worst[-1]


_FOLDS = {"Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "BertNormalizer", "Nmt"}
_FOLDS |= {"ByteLevel", "ByteFallback"}


def _steps(node: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(node, dict):
        return
    inner = node.get("normalizers", node.get("decoders"))
    if isinstance(inner, list):
        for each in inner:
            yield from _steps(each)
    else:
        yield node


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    """(pattern, content) of a step that inserts text; no pattern if it may match everywhere."""
    if step.get("type") == "Prepend":
        return "", str(step.get("prepend", ""))
    if step.get("type") != "Replace":
        return "", ""
    pattern = step.get("pattern")
    text = pattern.get("String", "") if isinstance(pattern, dict) else ""
    return str(text), str(step.get("content", ""))


def _texts(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for step in steps:
        yield from _replacement(step)


def _longest(step: Mapping[str, Any]) -> int:
    """Return the bytes of the longest text that a `precompiled_charsmap` inserts."""
    try:
        raw = base64.b64decode(step.get("precompiled_charsmap") or "")
    except (ValueError, TypeError):
        return 0  # `tokenizers` reports what is wrong with it
    trie = int.from_bytes(raw[:4], "little")
    return max(map(len, raw[4 + trie :].split(b"\0")), default=0)
