"""Compares errors by code, key, value, quoted names and suggested action, but not by their
wording.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

from maxpipe.errors import Code, ConfigError, MaxpipeError, Problem

_Error = TypeVar("_Error", bound=MaxpipeError)

_CODED = re.compile(r"(.*)  \[(MP-[A-Z]+-\d{3})\]")
_ACTION_LINES = 2
"""Number of lines of an action that are searched; a table may follow."""


def parse_problems(error: BaseException | str) -> list[Problem]:
    """Return the problems of an error, or of a command's output.

    In output, a problem is a line that ends in a code, followed by at least two indented lines: the
    rule and the action. Other lines are ignored. A warning is a single line.
    """
    if isinstance(error, ConfigError):
        return list(error.problems)
    blocks: list[list[str]] = []
    for line in str(error).splitlines():
        if line.startswith("  ") and blocks:
            blocks[-1].append(line.strip())
        else:
            blocks.append([line])
    problems = []
    for heading, *body in blocks:
        coded = _CODED.fullmatch(heading)
        if coded and len(body) >= 2 and not heading.lower().startswith("warning"):
            where, _, value = coded[1].partition(" = ")
            problem = Problem(Code(coded[2]), where, value, body[0], "\n".join(body[1:]))
            problems.append(problem)
    return problems


def without_codes(error: object) -> str:
    """Return an error's text without the codes at the ends of first lines."""
    return re.sub(r"  \[MP-[A-Z]+-\d{3}\]$", "", str(error), flags=re.MULTILINE)


def contains(text: str, name: object) -> bool:
    """Return whether a name or number occurs in `text` and is not part of a longer one.

    `8` does not occur in 18, -8, 8.5, 8,434 or 1e8, `tokens` not in `train.tokens`, `data` not in
    `data.path`, `llama3` not in `llama3-8b`. A folder occurs in the path of a file inside it.
    """
    words = re.escape(str(name))
    assert words, "an empty name occurs in any text"
    before, after = r"(?<![\w.+-])(?<!\d,)", r"(?![\w+-])(?!\.\w)(?!,\d)"
    return bool(re.search(f"{before}{words}{after}", text))


def assert_error(
    error: BaseException | str,
    key: object = "",
    value: object = None,
    names: Sequence[object] = (),
    suggests: str | Sequence[str] = (),
    code: Code | None = None,
) -> Problem:
    """Return the problem with this key, value, names, suggested actions and code, or fail.

    `key` must occur in the location: a config key, or a file with a line number. `names` must occur
    in the value or the rule, and `suggests` (commands, keys, `key=value`) in the action.
    """
    quoted = [names] if isinstance(names, str) else names
    texts = [suggests] if isinstance(suggests, str) else suggests
    matched = [
        problem
        for problem in parse_problems(error)
        if code is None or problem.code is code
        if str(key) == "" or contains(problem.where, key)
        if value is None or problem.value == str(value)
        if all(contains(problem.value, x) or contains(problem.rule, x) for x in quoted)
        if all(contains(_first_lines(problem.action), text) for text in texts)
    ]
    wanted = (
        f"no problem with key={key} value={value} names={quoted} suggests={texts} code={code} in:"
    )
    assert matched, f"{wanted}\n{error}"
    return matched[0]


def _first_lines(action: str) -> str:
    return "\n".join(action.splitlines()[:_ACTION_LINES])


@contextmanager
def raises(
    kind: type[_Error],
    key: object = "",
    value: object = None,
    names: Sequence[object] = (),
    suggests: str | Sequence[str] = (),
    code: Code | None = None,
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Check that the block raises this type, not a subclass of it, with such a problem.

    The type determines the exit code.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind, f"{type(caught.value).__name__} instead of {kind.__name__}"
    assert_error(caught.value, key, value, names, suggests, code)
