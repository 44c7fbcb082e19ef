"""Format numbers with nouns or units, and format lists of choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def pluralize(number: int, noun: str) -> str:
    """Format a count with its noun: `1 slice`, `2 slices`, `3 batches`."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_si(number: float, unit: str) -> str:
    """Format a number with four significant digits and an SI prefix: `21.35 GFLOP`."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size * (1 - 5e-5):  # rounded to four digits, 999,960 is 1 M, not 1000 k
            return f"{number / size:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def format_duration(seconds: float) -> str:
    """Format a time with three significant digits: `1.51 s`, `86.2 ms`, `99.7 us`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size * (1 - 5e-4):  # rounded to three digits, 0.9996 s is 1 s, not 1e+03 ms
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_count(count: float) -> str:
    """Format a number of parameters or tokens: `8.03 B`, `0.852 M`, `9,216`."""
    if count < 1e4:
        return f"{count:,.0f}"
    size, unit = (1e9, "B") if count >= 0.9995e9 else (1e6, "M")
    return f"{count / size:.3g} {unit}" if count < 1e12 else f"{count / size:,.0f} {unit}"


def capitalize_first(text: str) -> str:
    """Capitalize the first letter and leave all other letters unchanged (`TPU` stays `TPU`)."""
    return text[:1].upper() + text[1:]


def round_up(value: int, factor: int) -> int:
    """Return the smallest positive multiple of `factor` that is at least `value`."""
    return max(1, -(-value // factor)) * factor


def format_divisors(value: int) -> str:
    """Return the divisors of `value` up to 4096, formatted for a message."""
    return format_choices(d for d in range(1, min(value, 4096) + 1) if value % d == 0)


def format_choices(numbers: Iterable[int]) -> str:
    """Format a list of choices as `1, 2, 4 or 8`. Long lists show only the first six numbers and
    the last one.
    """
    words = [str(number) for number in numbers]
    if len(words) > 8:
        words = [*words[:6], "..", words[-1]]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def format_nested(value: Any) -> str:
    """Format a value as text for a message, without quotes."""
    if isinstance(value, dict):
        fields = (f"{name}: {format_nested(part)}" for name, part in value.items())
        return f"{{{', '.join(fields)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(format_nested, value))}]"
    return str(value)
