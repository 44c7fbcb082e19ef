"""All sections and keys, those of model families included.

A section is a field of `Config`, or below `model` that of a family: `model.llama`. A config has
the keys of one family only; what is said of keys in general knows all of them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from maxpipe.config.schema import Config
from maxpipe.model.families.registry import FAMILIES

FAMILY = "model.family"
_MODEL = "model"
_OWN = "own"


def _sections() -> Iterator[tuple[str, type]]:
    for section, declared in typing.get_type_hints(Config).items():
        yield section, declared
        if section == _MODEL:
            yield from ((f"{_MODEL}.{name}", each.section) for name, each in FAMILIES.items())


SECTIONS: dict[str, type] = dict(_sections())
"""Section name to the dataclass that declares it."""

KEYS: dict[str, Any] = {
    f"{section}.{name}": hint
    for section, declared in SECTIONS.items()
    for name, hint in typing.get_type_hints(declared).items()
    if (section, name) != (_MODEL, _OWN)
}
"""Full key to its type, in the order of the schema."""
KEYS[FAMILY] = Literal[tuple(FAMILIES)]

MOVED: dict[str, str] = {
    field.metadata["was"]: f"{section}.{field.name}"
    for section, declared in SECTIONS.items()
    for field in dataclasses.fields(declared)
    if "was" in field.metadata
}
"""Full key of an earlier release to that of this one."""


def parted(path: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(section, the rest) of the parts of a dotted name."""
    inner = ".".join(path[:2])
    return (inner, tuple(path[2:])) if inner in SECTIONS else (path[0], tuple(path[1:]))


def section_of(key: str) -> str:
    """The section of a full key."""
    return parted(key.split("."))[0]


def names_in(section: str) -> list[str]:
    """Names of a section's keys."""
    return [key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == section]


def field_of(key: str) -> dataclasses.Field[Any]:
    """The declaration of a full key."""
    section, _, name = key.rpartition(".")
    return next(each for each in dataclasses.fields(SECTIONS[section]) if each.name == name)


def default_of(key: str) -> Any:
    """The default of a full key, or `dataclasses.MISSING` if it is required."""
    field = field_of(key)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def before_of(key: str) -> Any:
    """What runs did that did not know the key."""
    return field_of(key).metadata.get("before", default_of(key))


def family_section(family: str) -> str:
    """The section of a family."""
    return f"{_MODEL}.{family}"


def is_of_another_family(section: str, family: str) -> bool:
    """Whether a section belongs to a family, and not to this one."""
    return section.startswith(f"{_MODEL}.") and section != family_section(family)


def sections_of(config: Config) -> dict[str, Any]:
    """The sections of a config: the common ones, and that of its family."""
    found: dict[str, Any] = {}
    for section, declared in SECTIONS.items():
        if section == family_section(config.model.family):
            found[section] = declared() if config.model.own is None else config.model.own
        elif "." not in section:
            found[section] = getattr(config, section)
    return found


def flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Full key to value, of nested dicts such as a config or a checkpoint holds."""
    found: dict[str, Any] = {}
    for section, values in nested.items():
        for name, value in values.items():
            if f"{section}.{name}" in SECTIONS:
                found |= flat({f"{section}.{name}": value})
            else:
                found[f"{section}.{name}"] = value
    return found
