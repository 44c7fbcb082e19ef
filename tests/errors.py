"""Compares errors by key, value, quoted names and suggested action, but not by their wording."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

from maxpipe.errors import ConfigError, MaxpipeError, Problem

_Error = TypeVar("_Error", bound=MaxpipeError)


def parse_problems(error: BaseException | str) -> list[Problem]:
    """Return the problems of an error, or of the text that a command printed."""
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
        where, _, value = heading.partition(" = ")
        problems.append(Problem(where, value, " ".join(body[:-1]), "".join(body[-1:])))
    return problems


def _contains(text: str, name: object) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(str(name))}(?!\w)", text))


def assert_error(
    error: BaseException | str,
    key: object = "",
    value: object = None,
    names: Sequence[object] = (),
    suggests: str | Sequence[str] = (),
) -> Problem:
    """Return the problem with this key, value, names and suggested actions, or fail.

    `key` is a part of the location: a config key, or a file with its line. `names` are in the
    location, the value or the rule. `suggests` (commands, keys, `key=value`) is in the action.
    """
    texts = [suggests] if isinstance(suggests, str) else suggests
    matched = [
        problem
        for problem in parse_problems(error)
        if _contains(problem.where, key) or not key
        if value is None or problem.value == str(value)
        if all(_contains(f"{problem.where} {problem.value} {problem.rule}", x) for x in names)
        if all(_contains(problem.action, text) for text in texts)
    ]
    wanted = f"no problem with key={key} value={value} names={names} suggests={texts} in:"
    assert matched, f"{wanted}\n{error}"
    return matched[0]


@contextmanager
def raises(
    kind: type[_Error],
    key: object = "",
    value: object = None,
    names: Sequence[object] = (),
    suggests: str | Sequence[str] = (),
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Check that the block raises this type, and thus its exit code, with such a problem."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_error(caught.value, key, value, names, suggests)
