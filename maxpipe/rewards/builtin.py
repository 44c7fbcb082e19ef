"""Built-in rewards: pure functions of a completion and its prompt record.

This module does not import other maxpipe modules, so that the worker process starts quickly.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Record = Mapping[str, Any]
"""A record of the prompt file: the JSON object on one line."""
Reward = Callable[[str, Record], float]

FIELDS = {
    "exact": "answer",
    "number": "answer",
    "regex": "pattern",
    "arithmetic": "expression",
}
"""Record field that each built-in reward reads by default."""

_MAX_CHARACTERS = 1000
"""Maximum length in characters of an expression or a number."""
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(/\d+)?", re.ASCII)
_IN_EXPRESSION = re.compile(r"\d+(\.\d*)?", re.ASCII)
"""Regular expression for a number in an expression. Exponents are rejected, because `1e999999999`
has a billion digits."""
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_SIGNS = str.maketrans("×÷−", "*/-")


def builtin_reward(kind: str, field: str) -> Reward:
    """Return the reward function named `kind`, which returns 1 for a correct completion and 0
    otherwise.

    `field` names the record field that the function uses. The function raises ValueError for a
    record without the required fields.
    """
    field = field or FIELDS[kind]
    if kind == "exact":
        return lambda text, record: float(text.strip() == read_text(record, field).strip())
    if kind == "number":
        return lambda text, record: float(last_number(text) == read_number(record, field))
    if kind == "regex":
        return lambda text, record: float(read_pattern(record, field).search(text) is not None)
    return lambda text, record: float(number(text) == expected_value(record, field))


def read_text(record: Record, field: str) -> str:
    """Return the string or number in a field of a record, as a string."""
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the record has no string or number `{field}`")
    return str(value)


def read_number(record: Record, field: str) -> Fraction:
    """Return the number in a field of a record; a text may end with the number, as in GSM8K."""
    value = record.get(field)
    if isinstance(value, float) and math.isfinite(value):
        return Fraction(repr(value))  # a number such as 1e-05 has an exponent as text
    found = last_number(read_text(record, field))
    if found is None:
        raise ValueError(f"the record's `{field}` contains no number")
    return found


_LAST_NUMBER = re.compile(
    r"(?<![\w.])(?<![\d.][eE][+-])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?!\w)",
    re.ASCII,
)
"""Regular expression for a number in text, with or without separators of thousands. Numbers with an
exponent do not match."""


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text (integer, decimal or fraction), or None without a number.

    Only the last 1,000 characters are searched.
    """
    found = _LAST_NUMBER.findall(text[-_MAX_CHARACTERS:].translate(_SIGNS))
    return number(found[-1].replace(",", "")) if found else None


def read_pattern(record: Record, field: str) -> re.Pattern[str]:
    """Return the compiled regular expression in a field of a record."""
    try:
        return re.compile(read_text(record, field))
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        reason = "the pattern is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(
            f"the record's `{field}` is not a valid regular expression: {reason}"
        ) from error


def expected_value(record: Record, field: str) -> Fraction:
    """Return the value of the expression in a field of a record, or in its prompt.

    If the field is missing, the expression is read from the prompt: the text before the last `=`,
    from the start of its line.
    """
    if field in record:
        return evaluate_expression(read_text(record, field))
    before, equals, _ = str(record.get("prompt", "")).rpartition("=")
    if not equals:
        raise ValueError(f"the record has no `{field}`, and its prompt contains no =")
    return evaluate_expression(before.rpartition("\n")[2])


def evaluate_expression(expression: str) -> Fraction:
    """Return the exact value of an expression that contains numbers, `+ - * /` and parentheses."""
    text = expression.strip().translate(_SIGNS)
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"the record's expression has more than {_MAX_CHARACTERS} characters")
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:40]!r} is not an expression") from error
    except ZeroDivisionError as error:
        raise ValueError(f"the record's expression {text[:40]!r} divides by 0") from error


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, text), _value(node.right, text))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.Constant):
        written = ast.get_source_segment(text, node) or ""
        if _IN_EXPRESSION.fullmatch(written):
            return Fraction(written)  # 0.1 is exactly 1/10
    raise ValueError(
        f"the record's expression {text[:40]!r} may contain only numbers, + - * / and ( )"
    )


def number(text: str) -> Fraction | None:
    """Return the number in a string (integer, decimal or fraction), or None if the string is not a
    number.
    """
    text = text.strip().translate(_SIGNS)
    if len(text) > _MAX_CHARACTERS or not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.partition("/")
    below = int(bottom or 1)
    return Fraction(top) / below if below else None
