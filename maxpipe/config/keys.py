"""All sections and keys, those of model families included.

A section is a field of `Config`, or below `model` that of a family: `model.llama`. A config has
the keys of one family only; what is said of keys in general knows all of them. A key may hold
sections under names that the user chooses: `data.mixture.web.path`, declared as
`data.mixture.NAME.path`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from maxpipe.config.schema import Config
from maxpipe.models.registry import FAMILIES

FAMILY = "model.family"
_MODEL = "model"
_FILLED = ("own", "adapter")
"""Fields of the model that are filled from other sections."""


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
    if section != _MODEL or name not in _FILLED
}
"""Full key to its type, in the order of the schema."""
KEYS[FAMILY] = Literal[tuple(FAMILIES)]

NAME = "NAME"
"""Stands for any name in what is declared."""


def _named_section_types(hint: Any) -> list[type]:
    """The dataclass of the sections that a key of this type holds by name, if it holds any."""
    inner = typing.get_args(hint)[-1] if typing.get_origin(hint) is dict else None
    return [inner] if dataclasses.is_dataclass(inner) and isinstance(inner, type) else []


NAMED_SECTIONS: dict[str, type] = {
    f"{key}.{NAME}": inner for key, hint in KEYS.items() for inner in _named_section_types(hint)
}
"""Sections that a key holds under names of the user's choice, to the dataclass of each."""

NAMED_KEYS: dict[str, Any] = {
    f"{section}.{name}": hint
    for section, declared in NAMED_SECTIONS.items()
    for name, hint in typing.get_type_hints(declared).items()
}
"""Full key, with `NAME` for the name, to its type."""


def declared_key(key: str) -> str:
    """The key, or section, by which this one is declared: itself, or with `NAME` for its name."""
    section, rest = split_key(key.split("."))
    if len(rest) < 2 or f"{section}.{rest[0]}.{NAME}" not in NAMED_SECTIONS:
        return key
    return ".".join([section, rest[0], NAME, *rest[2:]])


RENAMED_KEYS: dict[str, str] = {
    name if "." in name else f"{section}.{name}": f"{section}.{field.name}"
    for section, declared in SECTIONS.items()
    for field in dataclasses.fields(declared)
    for name in field.metadata.get("was", ())
}
"""Full key of an earlier release to that of this one."""

_RENAMED_VALUES: dict[str, dict[str, Any]] = {
    f"{section}.{field.name}": field.metadata["values"]
    for section, declared in SECTIONS.items()
    for field in dataclasses.fields(declared)
    if field.metadata.get("values")
}


def upgrade_setting(key: str, value: Any) -> tuple[str, Any]:
    """Return a setting of an earlier release with the key and the value of this release."""
    key = RENAMED_KEYS.get(key, key)
    return key, _RENAMED_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def split_key(path: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(section, the rest) of the parts of a dotted name."""
    inner = ".".join(path[:2])
    return (inner, tuple(path[2:])) if inner in SECTIONS else (path[0], tuple(path[1:]))


def section_of(key: str) -> str:
    """The section of a full key."""
    return key.rpartition(".")[0] if key in NAMED_KEYS else split_key(key.split("."))[0]


def names_in(section: str) -> list[str]:
    """Names of a section's keys."""
    keys = NAMED_KEYS if section in NAMED_SECTIONS else KEYS
    return [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]


def field_of(key: str) -> dataclasses.Field[Any]:
    """The declaration of a full key."""
    section, _, name = key.rpartition(".")
    of_section: Any = SECTIONS.get(section) or NAMED_SECTIONS[section]
    return next(each for each in dataclasses.fields(of_section) if each.name == name)


def default_of(key: str) -> Any:
    """The default of a full key, or `dataclasses.MISSING` if it is required."""
    field = field_of(key)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def legacy_value_of(key: str) -> Any:
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


def flatten(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Full key to value, of nested dicts such as a config or a checkpoint holds.

    Sections by name are taken apart, too; where there are none, the key that holds them is left.
    """
    found: dict[str, Any] = {}
    for section, values in nested.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if (
                key in SECTIONS
                or declared_key(key) in NAMED_SECTIONS
                or (f"{key}.{NAME}" in NAMED_SECTIONS and value)
            ):
                found |= flatten({key: value})
            else:
                found[key] = value
    return found


# Settings that may differ between processes.
OWN_SECTIONS = frozenset({"runtime", "log", "launch"})

OWN_KEYS = frozenset(
    {"run.dir", "data.path", "data.paths", "data.tfds_dir", "data.threads"}
    | {"data.prefetch_batches", "data.max_decompressed_bytes", "tokenizer.path"}
)


def may_differ(key: str) -> bool:
    """Whether processes may have other values of a full key, one of a section by name included."""
    outer, _, inner = declared_key(key).rpartition(".")
    return (
        key.partition(".")[0] in OWN_SECTIONS
        or key in OWN_KEYS
        or (outer in NAMED_SECTIONS and f"data.{inner}" in OWN_KEYS)
    )
