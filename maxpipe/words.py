"""Numbers with their nouns, in the singular or plural."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 slice`, `2 slices`, `3 batches`."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
