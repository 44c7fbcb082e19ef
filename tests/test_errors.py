"""Error messages have a bounded length even if a file contains very long values."""

from __future__ import annotations

from maxpipe.errors import Code, ConfigError, Problem, truncate_middle


def test_truncate_middle_keeps_short_string() -> None:
    assert truncate_middle("x" * 500, 500) == "x" * 500


def test_truncate_middle_keeps_both_ends_and_states_length() -> None:
    text = "a" * 600 + "z" * 400
    expected = "a" * 375 + "... (1,000 characters) ..." + "z" * 125
    assert truncate_middle(text, 500) == expected


def test_every_part_of_problem_has_bounded_length() -> None:
    megabyte = "k" * 1_000_000
    problem = Problem(Code.CFG_VALUE, megabyte, megabyte, megabyte, megabyte)
    assert len(problem.value) == 500 + len("... (1,000,000 characters) ...")
    assert len(str(problem)) < 10_000
    assert len(problem.line) < 10_000


def test_message_states_number_of_omitted_problems() -> None:
    error = ConfigError(
        [Problem(Code.CFG_VALUE, f"key{number}", "1", "r", "a") for number in range(5000)]
    )
    lines = str(error).splitlines()
    assert lines[0] == "key0 = 1  [MP-CFG-003]"
    assert lines[-1] == "and 4,880 more problems"
    assert len(lines) == 3 * 120 + 1
    assert len(error.problems) == 5000
