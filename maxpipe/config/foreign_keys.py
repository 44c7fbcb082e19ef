"""Map other trainers' keys, values and commands to their maxpipe equivalents.

The tables are in `foreign_keys.yml`, which is read only when an unknown name is found.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from maxpipe.config.rules import did_you_mean, normalize_name

_PREFERRED = "model.moe."
"""Section that is preferred if several model families have the same key."""


class NameMatch(NamedTuple):
    """maxpipe equivalent of another trainer's key or command. Either `name` or `action` is
    empty.
    """

    name: str = ""
    """Equivalent maxpipe key or command."""
    why: str = ""
    action: str = ""
    is_exact: bool = True
    """Whether the match is exact rather than based on similarity."""


def match_key(path: Sequence[str], keys: Collection[str]) -> NameMatch:
    """Return the maxpipe key that an unknown key most likely refers to. `path` contains the unknown
    key's section (if any) and name.
    """
    guess = NameMatch(_similar_key(path, keys), is_exact=False)
    return match_exact_key(path, keys) or guess


def match_exact_key(path: Sequence[str], keys: Collection[str]) -> NameMatch | None:
    """Return the match for this name, or None; the match must be exact except for case and
    separators.
    """
    full, tail = normalize_name("".join(path)), normalize_name(path[-1])
    if full in _foreign_keys():
        return _foreign_keys()[full]
    if matches := [key for key in keys if normalize_name(key) == full]:
        return NameMatch(matches[0])
    if len(path) > 1 and (answer := _match_pattern(path)):
        return answer
    if matches := [key for key in keys if normalize_name(key.rpartition(".")[2]) == tail]:
        # Keys in the same section take precedence.
        matches = [key for key in matches if key.startswith(f"{path[0]}.")] or matches
        matches.sort(key=lambda key: (key.count(".") > 1, not key.startswith(_PREFERRED)))
        return NameMatch(matches[0])
    for part in (tail, normalize_name(path[0])):
        if part in _foreign_keys():
            return _foreign_keys()[part]
    return _match_pattern(path[-1:])


def is_foreign_key(path: Sequence[str]) -> bool:
    """Return whether a table lists the name as a key of another trainer."""
    names = (normalize_name("".join(path)), normalize_name(path[-1]))
    return any(name in _foreign_keys() for name in names)


def _match_pattern(path: Sequence[str]) -> NameMatch | None:
    word = re.sub(r"[^a-z0-9]+", "_", ".".join(path).lower())
    return next(
        (match for name, match in _absent_keys() if "*" in name and fnmatchcase(word, name)), None
    )


def join_reason(rule: str, why: str) -> str:
    """Append the reason to the rule unless the reason is empty."""
    return f"{rule.removesuffix('.')}: {why}" if why else rule


def _similar_key(path: Sequence[str], keys: Collection[str]) -> str:
    """Return the key in `keys` that is most similar to `path`, preferably one in the same
    section.
    """
    if len(path) > 1:
        prefix = f"{path[0]}."
        names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        if guess := did_you_mean(".".join(path[1:]), names):
            return prefix + guess
    return did_you_mean(".".join(path), keys)


def match_exact_value(key: str, value: str, choices: Iterable[str]) -> str:
    """Return the choice that is equivalent to another trainer's value, or a suggested action.
    Return an empty string if the value is unknown.
    """
    exact = [choice for choice in choices if normalize_name(choice) == normalize_name(value)]
    return exact[0] if exact else _foreign_values(key).get(normalize_name(value), "")


def value_action(key: str, value: str, choices: Iterable[str]) -> str:
    """Return the suggested action for an invalid value, or an empty string if there is none."""
    choices = list(choices)
    match = match_exact_value(key, value, choices) or did_you_mean(value, choices)
    return f"Set {key}={match}." if match in choices else match.replace("KEY", key)


def list_action(key: str) -> str:
    """Return the suggested action for a key that is set to a list instead of a string, or an empty
    string if there is none.
    """
    return foreign_tables()["lists"].get(key, "")


def match_command(word: str, commands: Collection[str]) -> NameMatch:
    """Return the maxpipe command that an unknown command most likely refers to."""
    if exact := [
        command for command in commands if normalize_name(command) == normalize_name(word)
    ]:
        return NameMatch(exact[0])
    for command, names in foreign_tables()["commands"].items():
        if command in commands and normalize_name(word) in _normalized(names):
            return NameMatch(command)
    for entry in foreign_tables()["absent_commands"]:
        if normalize_name(word) in _normalized(entry["names"]):
            return NameMatch(action=entry["action"])
    return NameMatch(did_you_mean(word, commands))


@functools.cache
def foreign_tables() -> dict[str, Any]:
    """Return the tables in `foreign_keys.yml`."""
    import yaml  # slow to import, and rarely needed

    text = Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
    safe_loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return safe_loader(text).get_single_data()


def _normalized(names: str) -> list[str]:
    return [normalize_name(name) for name in names.split()]


@functools.cache
def _foreign_keys() -> dict[str, NameMatch]:
    same = {
        name: NameMatch(key)
        for key, names in foreign_tables()["keys"].items()
        for name in _normalized(names)
    }
    return same | {normalize_name(name): match for name, match in _absent_keys() if "*" not in name}


@functools.cache
def _absent_keys() -> list[tuple[str, NameMatch]]:
    return [
        (name, NameMatch("", entry.get("why", ""), entry["action"]))
        for entry in foreign_tables()["absent_keys"]
        for name in entry["names"].split()
    ]


@functools.cache
def _foreign_values(key: str) -> dict[str, str]:
    entries = foreign_tables()["values"].get(key, ())
    return {name: entry["use"] for entry in entries for name in _normalized(entry["names"])}
