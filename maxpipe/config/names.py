"""Names of other trainers, and the names here.

An entry of the tables leads to the name of the same thing here, or says why there is none and what
to do. Names are compared by their letters and digits only: `max_steps`, `maxSteps` and `max-steps`
are one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from maxpipe.config.foreign_features import ABSENT_KEY
from maxpipe.config.foreign_keys import SAME_KEY
from maxpipe.config.foreign_values import COMMANDS, LISTS, NO_COMMAND, VALUES
from maxpipe.config.rules import did_you_mean, squashed

_PREFERRED = "model.moe."
"""Of keys that several families have, where none is of the family of the config."""


class Answer(NamedTuple):
    """The entry for a name from elsewhere: one of name and action is empty."""

    name: str = ""
    """The key here."""
    why: str = ""
    action: str = ""
    is_exact: bool = True
    """Whether an entry says so, and not the resemblance of two names."""


def key_meant(path: Sequence[str], keys: Collection[str]) -> Answer:
    """The key meant by one that does not exist; `path` is its section, if any, and name."""
    guess = Answer(_resembling(path, keys), is_exact=False)
    return same_key(path, keys) or guess


def same_key(path: Sequence[str], keys: Collection[str]) -> Answer | None:
    """The entry for exactly this name, without guesses."""
    full, tail = squashed("".join(path)), squashed(path[-1])
    if full in _foreign_keys():
        return _foreign_keys()[full]
    if found := [key for key in keys if squashed(key) == full]:
        return Answer(found[0])
    if len(path) > 1 and (answer := _of_pattern(path)):
        return answer
    if found := [key for key in keys if squashed(key.rpartition(".")[2]) == tail]:
        # A key of the section that was meant comes before those of others.
        found = [key for key in found if key.startswith(f"{path[0]}.")] or found
        found.sort(key=lambda key: (key.count(".") > 1, not key.startswith(_PREFERRED)))
        return Answer(found[0])
    for part in (tail, squashed(path[0])):
        if part in _foreign_keys():
            return _foreign_keys()[part]
    return _of_pattern(path[-1:])


def _of_pattern(path: Sequence[str]) -> Answer | None:
    word = re.sub(r"[^a-z0-9]+", "_", ".".join(path).lower())
    return next((found for each, found in _patterns() if fnmatchcase(word, each)), None)


def because(rule: str, why: str) -> str:
    """The rule with its reason, if there is one."""
    return f"{rule.removesuffix('.')}: {why}" if why else rule


def _resembling(path: Sequence[str], keys: Collection[str]) -> str:
    """Choices of the same section if it is known: its keys resemble each other."""
    if len(path) > 1:
        prefix = f"{path[0]}."
        names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        if guess := did_you_mean(".".join(path[1:]), names):
            return prefix + guess
    return did_you_mean(".".join(path), keys)


def same_value(key: str, value: str, choices: Iterable[str]) -> str:
    """The choice meant by a value, or an action for it; empty if no entry says so."""
    exact = [choice for choice in choices if squashed(choice) == squashed(value)]
    return exact[0] if exact else _foreign_values(key).get(squashed(value), "")


def value_meant(key: str, value: str, choices: Iterable[str]) -> str:
    """The action for a value that is none of the choices; empty if there is none."""
    choices = list(choices)
    found = same_value(key, value, choices) or did_you_mean(value, choices)
    return f"Set {key}={found}." if found in choices else found.replace("KEY", key)


def list_meant(key: str) -> str:
    """The action for a list in place of one text; empty if there is none."""
    return LISTS.get(key, "")


def command_meant(word: str, commands: Collection[str]) -> Answer:
    """The command meant by one that does not exist."""
    if exact := [command for command in commands if squashed(command) == squashed(word)]:
        return Answer(exact[0])
    for command, names in COMMANDS.items():
        if command in commands and squashed(word) in map(squashed, names.split()):
            return Answer(command)
    for names, action in NO_COMMAND.items():
        if squashed(word) in map(squashed, names.split()):
            return Answer(action=action)
    return Answer(did_you_mean(word, commands))


@functools.cache
def _foreign_keys() -> dict[str, Answer]:
    same = {
        squashed(name): Answer(key) for key, names in SAME_KEY.items() for name in names.split()
    }
    return same | {
        squashed(name): Answer("", *said)
        for names, said in ABSENT_KEY.items()
        for name in names.split()
        if "*" not in name
    }


@functools.cache
def _patterns() -> list[tuple[str, Answer]]:
    return [
        (name, Answer("", *said))
        for names, said in ABSENT_KEY.items()
        for name in names.split()
        if "*" in name
    ]


@functools.cache
def _foreign_values(key: str) -> dict[str, str]:
    table = VALUES.get(key, {})
    return {squashed(name): found for names, found in table.items() for name in names.split()}
