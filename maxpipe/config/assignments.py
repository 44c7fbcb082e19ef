"""Parse files, overrides and saved values into assignments, each with its origin."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from maxpipe.config.keys import (
    KEYS,
    NAME,
    NAMED_KEYS,
    NAMED_SECTIONS,
    SECTIONS,
    declared_key,
    split_key,
    upgrade_setting,
)
from maxpipe.config.translation import MODEL, is_main_key
from maxpipe.config.yaml_values import (
    Raw,
    compose,
    entries,
    find_duplicates,
    format_raw,
    raw_of,
    syntax_problem,
    to_yaml_line,
)
from maxpipe.errors import Problem
from maxpipe.io import redact


@dataclass(frozen=True, slots=True)
class Assignment:
    """A key and its unparsed value."""

    path: tuple[str, ...]
    """The section (two parts for the section of a model family), the key, and the entry if the key
    is a mapping. For a key in a named section, the path also contains the name of that section and
    the key inside it. Missing parts at the end are omitted."""
    raw: Raw
    origin: str
    place: str
    """Location for messages: the file with the line number, or the command line."""
    option: str = ""
    """Original text of the option, such as `--lr=1`; empty for other assignments."""

    @property
    def is_in_file(self) -> bool:
        """Whether the assignment comes from a file."""
        return self.place != "command line"

    def problem(self, rule: str, action: str, *, given: bool = True) -> Problem:
        """Return a problem that concerns this assignment, with secrets redacted."""
        is_secret = self.path[:2] == ("launch", "environment")
        raw = redact.redact_variable_names(self.raw) if is_secret else self.raw
        if is_secret and len(self.path) > 2:
            raw = redact.REDACTED
        text = format_raw(raw) if given else ""
        return Problem(f"{self.place}: {'.'.join(self.path)}", text, rule, action)


def from_document(
    root: yaml.MappingNode, file: str, problems: list[Problem]
) -> Iterator[Assignment]:
    """Yield the assignments in a parsed file."""
    for section, line, content in entries(root, file, "", problems):
        place = f"{file}:{line}"
        if not isinstance(content, yaml.MappingNode) or section not in SECTIONS:
            raw = raw_of(content)
            if raw is not None or section not in SECTIONS:
                yield Assignment((section,), raw, file, place)
            continue
        yield from _read_section((section,), content, file, problems)


def _read_section(
    above: tuple[str, ...], content: yaml.MappingNode, file: str, problems: list[Problem]
) -> Iterator[Assignment]:
    for name, line, value in entries(content, file, f"{'.'.join(above)}.", problems):
        path, place = (*above, name), f"{file}:{line}"
        is_section = ".".join(path) in SECTIONS
        if is_section and isinstance(value, yaml.MappingNode):
            yield from _read_section(path, value, file, problems)
            continue
        find_duplicates(value, file, ".".join(path), problems)
        raw = raw_of(value)
        if raw is not None or not is_section:
            yield from _split(path, raw, file, place)


def from_values(values: Mapping[str, Any], origin: str) -> Iterator[Assignment]:
    """Yield the assignments in nested dicts, such as the config in a checkpoint."""
    for section, content in values.items():
        yield from _from_value((str(section),), _as_raw(content), origin)


def _from_value(path: tuple[str, ...], raw: Raw, origin: str) -> Iterator[Assignment]:
    if isinstance(raw, dict) and ".".join(path) in SECTIONS:
        for name, value in raw.items():
            yield from _from_value((*path, name), value, origin)
    else:
        yield from _split(path, raw, origin, origin)


def _as_raw(value: Any) -> Raw:
    """Convert Python values to raw values, as read from a file."""
    if isinstance(value, Mapping):
        return {str(key): _as_raw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_raw(item) for item in value]
    return None if value is None else str(value)


def from_override(arg: str, problems: list[Problem]) -> Iterator[Assignment]:
    """Yield the assignments in an override, `section.key=value`."""
    key, _, text = arg.partition("=")
    section, rest = split_key(key.split("."))
    # An entry of a mapping may contain dots.
    path = (*section.split("."), *_key_path(section, rest)) if rest else (section,)
    if arg.startswith("-"):
        path = tuple(key.lstrip("-").split("."))
        yield Assignment(path, text if "=" in arg else None, arg, "command line", option=arg)
    elif key == MODEL or (key in SECTIONS and is_main_key(key, text)):
        yield Assignment((key,), text, arg, "command line")
    elif key in SECTIONS:
        rule = "is a section: an override must be `section.key=value`."
        action = f"Run `maxpipe config explain {key}` to list its keys."
        problems.append(Problem(f"command line: {key}", format_raw(text), rule, action))
    elif not all(path):
        rule = "has no section: an override must be `section.key=value`."
        action = "Write section.key=value."
        problems.append(Problem(f"command line: {key}", format_raw(text), rule, action))
    elif not _is_collection(_hint(path)):
        yield Assignment(path, text, arg, "command line")
    else:
        try:
            node = compose(text)
        except yaml.YAMLError as error:
            problems.append(syntax_problem(f"command line: {arg}", error))
            return
        if node:
            find_duplicates(node, "", ".".join(path), problems)
        raw = raw_of(node) if node else None
        if isinstance(raw, dict) and (
            is_mapping(KEYS.get(".".join(path))) or declared_key(".".join(path)) in NAMED_SECTIONS
        ):
            # `a.b=...` replaces the mapping, while `a.b.c=...` sets a single entry.
            yield Assignment(path, {}, arg, "command line")
        yield from _split(path, raw, arg, "command line")


def _split(path: tuple[str, ...], raw: Raw, origin: str, place: str) -> Iterator[Assignment]:
    """Yield one assignment, or one per entry of a mapping, so that the entries of several files are
    merged.
    """
    key = ".".join(path)
    if isinstance(raw, dict) and (is_mapping(KEYS.get(key)) or declared_key(key) in NAMED_SECTIONS):
        for name, value in raw.items():
            yield from _split((*path, name), value, origin, place)
        if not raw and declared_key(key) in NAMED_SECTIONS:
            yield Assignment(path, None, origin, place)
    else:
        yield Assignment(path, raw, origin, place)


def _key_path(section: str, rest: Sequence[str]) -> tuple[str, ...]:
    """Split the path after the section into the key, and the entry (or the name and key in a named
    section).
    """
    holds_sections = f"{section}.{rest[0]}.{NAME}" in NAMED_SECTIONS
    return tuple(".".join(rest).split(".", 2 if holds_sections else 1))


def _hint(path: Sequence[str]) -> Any:
    """Return the declared type of an override's key, which may have an earlier name. For an entry,
    return the type of the mapping.
    """
    section, rest = split_key(upgrade_setting(".".join(path), None)[0].split("."))
    path = (section, *rest)
    key = declared_key(".".join(path))
    return NAMED_KEYS[key] if key in NAMED_KEYS else KEYS.get(".".join([section, *rest[:1]]))


def is_mapping(hint: Any) -> bool:
    """Whether a key of this type is a mapping whose entries can be set separately."""
    return typing.get_origin(hint) is dict


def _is_collection(hint: Any) -> bool:
    return typing.get_origin(hint) in (dict, list)


def former_key_warnings(assignments: Iterable[Assignment], saved_as: str) -> Iterator[Problem]:
    """Yield a warning for each assignment that uses a key of an earlier release.

    Assignments that an earlier release saved are exempt.
    """
    for each in assignments:
        new = rename_former_key(each)
        if new == each or each.origin == saved_as:
            continue
        text = key = ".".join(new.path)
        if isinstance(new.raw, list) and new.raw != each.raw:
            items = to_yaml_line(upgrade_setting(".".join(each.path), each.raw)[1])
            setting = f"`{new.path[-1]}: {items}`" if each.is_in_file else f'"{key}={items}"'
            rule = f"is the form of an earlier release: {key} is a list of mappings."
            yield each.problem(rule, f"Write {setting}.")
            continue
        text += "" if new.raw == each.raw else f"={format_raw(new.raw)}"
        yield each.problem(f"was renamed to {text}.", f"Write {text} instead.")


def duplicate_settings(assignments: Sequence[Assignment]) -> Iterator[Problem]:
    """Yield a problem for each former key name if the same file also sets the current name."""
    first: dict[tuple[str, str], Assignment] = {}
    for each in assignments:
        key = ".".join(rename_former_key(each).path)
        other = first.setdefault((each.origin, key), each)
        if other.path != each.path:
            former = each if ".".join(each.path) != key else other
            place = other.place if former is each else each.place
            yield former.problem(
                f"was renamed to {key}, which is also set: {place}.", f"Keep only {key}."
            )


def rename_former_key(assignment: Assignment) -> Assignment:
    """Return the assignment with the current name of its key."""
    key = ".".join(assignment.path)
    new, value = upgrade_setting(key, assignment.raw)
    raw = str(value).lower() if isinstance(value, bool) else _as_raw(value)
    path = assignment.path if new == key else tuple(new.split("."))
    return dataclasses.replace(assignment, path=path, raw=raw)
