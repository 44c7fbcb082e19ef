"""Rules between config values, and phrases that their messages share.

A rule names the keys it reads, so that it is left out when one of them is already known to be
wrong. `check` and the modules `*_rules` hold the rules themselves.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from maxpipe.config.keys import NAMED, declared_as, default_of, parted, sections_of
from maxpipe.config.schema import Config
from maxpipe.errors import Finding
from maxpipe.parallel.axes import DEFAULT_AXIS_RULES, MeshConfig


def value_of(config: Config, key: str) -> Any:
    """The value of a full key, or of one entry of a mapping; a default of another family's key."""
    if (outer := declared_as(key).rpartition(".")[0]) in NAMED:
        section, name, each, inner = key.split(".")
        assert outer.startswith(f"{section}.{name}.")
        return getattr(getattr(getattr(config, section), name)[each], inner)
    section, (name, *entry) = parted(key.split(".", 2))
    is_own = "." in section
    values = sections_of(config).get(section) if is_own else getattr(config, section)
    value = default_of(key) if values is None else getattr(values, name)
    return value[entry[0]] if entry else value


def is_read(config: Config, key: str) -> bool:
    """Whether the key is not one of another model family."""
    section, _ = parted(key.split(".", 2))
    return "." not in section or section in sections_of(config)


@dataclass(frozen=True, slots=True)
class Rule:
    """`find` yields what is wrong; it reads no other keys than these."""

    keys: tuple[str, ...]
    find: Callable[[Config], Iterator[Finding]]
    is_first: bool = False
    """Whether other relations mean nothing with the keys that it finds wrong."""


RULES: list[Rule] = []

_NAME_CHARACTERS = 100
"""More than enough for a name that is made from another; file systems allow 255."""


def rule(
    *keys: str, is_first: bool = False
) -> Callable[[Callable[[Config], Iterator[Finding]]], None]:
    """Registers a function as the rule on these keys."""

    def register(find: Callable[[Config], Iterator[Finding]]) -> None:
        RULES.append(Rule(keys, find, is_first))

    return register


def axis_keys(*axes: str) -> tuple[str, ...]:
    """The keys with the sizes of these mesh axes."""
    return tuple(f"mesh.{link}_{axis}" for axis in axes for link in ("ici", "dcn"))


_MAX_WORD = 200


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The one choice that resembles the word most, or an empty string.

    The same letters and digits win, whatever their case and what joins them.
    """
    known = list(choices)
    if len(word) > _MAX_WORD:
        return ""  # difflib needs quadratic time
    wanted = squashed(word)
    same = [choice for choice in known if squashed(choice) == wanted]
    lower = {choice.lower(): choice for choice in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1)
    return next(iter(same or [lower[each] for each in close]), "")


@functools.lru_cache(maxsize=8192)
def squashed(name: str) -> str:
    """Letters and digits of a name, in lower case."""
    return "".join(each for each in name.lower() if each.isalnum())


def folder_name(text: str) -> str:
    """The text as a run may be called: letters, digits, `.`, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_NAME_CHARACTERS].strip("-.") or "run"


def axis_size(mesh: MeshConfig, axis: str) -> int | None:
    """Total size of a mesh axis; None when it depends on the number of devices."""
    ici, dcn = getattr(mesh, f"ici_{axis}"), getattr(mesh, f"dcn_{axis}")
    return ici * dcn if ici >= 1 and dcn >= 1 else None


BATCH_AXES = DEFAULT_AXIS_RULES["batch"]
"""Mesh axes that each see their own rows."""


def batch_shards(mesh: MeshConfig) -> tuple[int, list[str]]:
    """Over how many devices rows are split as far as is known, and the axes as words.

    Not of the expert axis when it has one device, as in most runs.
    """
    sizes = {axis: axis_size(mesh, axis) for axis in BATCH_AXES}
    words = [f"{axis} ({n})" for axis, n in sizes.items() if n and (n > 1 or axis != "expert")]
    return math.prod(size or 1 for size in sizes.values()), words


# Words for messages.


def shown(value: object) -> str:
    """A value as it is written in a config file, shortened when long."""
    if is_dataclass(value):
        return ""  # a whole section: the key says which
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, list):
        text = f"[{', '.join(map(str, value))}]"
    elif value == "":
        text = "''"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
