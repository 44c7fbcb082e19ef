"""Built-in rewards, and evaluation of arithmetic expressions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from maxpipe.rewards.builtin import builtin_reward, evaluate_expression, number


def test_exact_ignores_surrounding_whitespace() -> None:
    reward = builtin_reward("exact", "")
    assert reward(" 7\n", {"answer": "7"}) == 1
    assert reward("7", {"answer": 7}) == 1
    assert reward("17", {"answer": "7"}) == 0
    assert builtin_reward("exact", "wanted")("a b", {"wanted": "a b", "answer": "c"}) == 1


def test_regex_matches_anywhere_in_completion() -> None:
    reward = builtin_reward("regex", "")
    assert reward("the answer is 42.", {"pattern": r"\b42\b"}) == 1
    assert reward("the answer is 420.", {"pattern": r"\b42\b"}) == 0


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("3+4", Fraction(7)),
        (" 2 * (3 - 5) / 8 ", Fraction(-1, 2)),
        ("0.1+0.2", Fraction(3, 10)),
        ("6 ÷ 3 × 4", Fraction(8)),
        ("-(-2)", Fraction(2)),
    ],
)
def test_expressions_are_evaluated_exactly(expression: str, wanted: Fraction) -> None:
    assert evaluate_expression(expression) == wanted


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1e999999999",
        "2**99",
        "open('x')",
        "1/0",
        "a",
        "9" * 1001,
        "(" * 500,
        "True",
        "0x1",
        "1+",
    ],
)
def test_invalid_expressions_are_rejected(expression: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        evaluate_expression(expression)


def test_arithmetic_reads_prompt_or_expression() -> None:
    reward = builtin_reward("arithmetic", "")
    assert reward("7", {"prompt": "1+1=2\n3+4="}) == 1
    assert reward("7", {"prompt": "What is three and four?", "expression": "3+4"}) == 1
    assert reward(" 07.0 ", {"prompt": "3+4="}) == 1
    assert reward("7 or 8", {"prompt": "3+4="}) == 0
    assert reward("1/2", {"prompt": "1 / 2 ="}) == 1
    with pytest.raises(ValueError, match="its prompt contains no ="):
        reward("7", {"prompt": "3+4"})


@pytest.mark.parametrize("text", ["", "seven", "1/0", "1e5", "--1", "9" * 1001, "٣"])
def test_non_numeric_strings_are_not_parsed(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999}", "(" * 3000 + ")" * 3000])
def test_invalid_regex_patterns_are_rejected(pattern: str) -> None:
    with pytest.raises(
        ValueError, match="the record's `pattern` is not a valid regular expression"
    ):
        builtin_reward("regex", "")("", {"pattern": pattern})


@pytest.mark.parametrize("kind", ["exact", "regex"])
@pytest.mark.parametrize(
    "record",
    [
        {},
        {"answer": [], "pattern": None},
        {"answer": True, "pattern": True},
    ],
)
def test_records_without_valid_field_are_rejected(kind: str, record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no string or number"):
        builtin_reward(kind, "")("", record)


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("#### 1,234", "the sum is 1234.", 1.0),
        (1e-05, "0.00001", 1.0),
        (1e-05, "5", 0.0),
        (1e22, "10000000000000000000000", 1.0),
        ("5", "about 1e-05", 0.0),
        ("5", "3e+5", 0.0),
        ("-05", "x = -5", 1.0),
    ],
)
def test_numbers_with_exponents_are_not_read_in_part(
    answer: object, completion: str, reward: float
) -> None:
    assert builtin_reward("number", "")(completion, {"answer": answer}) == reward
