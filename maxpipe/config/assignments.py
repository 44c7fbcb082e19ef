"""Parse config files, overrides and saved configs into assignments, and record their origins.

`resolve_model` replaces `model: NAME` with the assignments of the named model. The module also
reports which files change the shape of the model.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from maxpipe.config import config_files
from maxpipe.config.config_files import ConfigFile
from maxpipe.config.rules import did_you_mean
from maxpipe.config.schema import (
    KEYS,
    NAME,
    NAMED_KEYS,
    NAMED_SECTIONS,
    SECTIONS,
    declared_key,
    default_of,
    field_of,
    item_type,
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
    read_file,
    syntax_problem,
    to_raw,
    to_yaml_line,
)
from maxpipe.errors import Code, Problem
from maxpipe.io import redact
from maxpipe.io.formatting import pluralize


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of an unparsed value to a config key."""

    path: tuple[str, ...]
    """Components of the full key: the section (two components for a model family's section), the
    key name, and the entry name if the key is a mapping. For a key in a named section, the path
    also contains the name of that section and the key within it. Missing trailing components are
    omitted."""
    raw: Raw
    origin: str
    place: str
    """Location shown in messages: the file and line number, or `command line`."""
    option: str = ""
    """Original command-line option, such as `--lr=1`; empty for other assignments."""

    @property
    def is_in_file(self) -> bool:
        """Whether the assignment comes from a config file."""
        return self.place != "command line"

    def problem(self, code: Code, rule: str, action: str, *, given: bool = True) -> Problem:
        """Return an error about this assignment, with secrets redacted."""
        is_secret = self.path[:2] == ("launch", "environment")
        raw = redact.redact_variable_names(self.raw) if is_secret else self.raw
        if is_secret and len(self.path) > 2:
            raw = redact.REDACTED
        text = format_raw(raw) if given else ""
        return Problem(code, f"{self.place}: {'.'.join(self.path)}", text, rule, action)


def from_document(
    root: yaml.MappingNode, file: str, problems: list[Problem]
) -> Iterator[Assignment]:
    """Yield the assignments in a parsed config file."""
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
    """Yield the assignments in nested dicts, such as the config in a checkpoint. A key may also be
    a full key, such as `train.steps`.
    """
    for key, content in values.items():
        section, rest = split_key(str(key).split("."))
        path = (*section.split("."), *_key_path(section, rest)) if rest else (str(key),)
        yield from _from_value(path, to_raw(content), origin)


def repeated_keys(assignments: Iterable[Assignment]) -> Iterator[Problem]:
    """Yield an error for each key that a dict sets twice, for example nested and as a full key."""
    first: dict[tuple[str, ...], Assignment] = {}
    for each in assignments:
        other = first.setdefault(each.path, each)
        if other is not each:
            key = ".".join(each.path)
            rule = f"is set twice in the dict: to {format_raw(other.raw)} and to "
            rule += f"{format_raw(each.raw)}."
            yield each.problem(Code.CFG_CONFLICT, rule, f"Keep one value of {key}.")


def _from_value(path: tuple[str, ...], raw: Raw, origin: str) -> Iterator[Assignment]:
    if isinstance(raw, dict) and ".".join(path) in SECTIONS:
        for name, value in raw.items():
            yield from _from_value((*path, name), value, origin)
    else:
        yield from _split(path, raw, origin, origin)


def from_override(arg: str, problems: list[Problem]) -> Iterator[Assignment]:
    """Yield the assignments in an override, `section.key=value`."""
    key, _, text = arg.partition("=")
    section, rest = split_key(key.split("."))
    # The name of a mapping entry may contain dots.
    path = (*section.split("."), *_key_path(section, rest)) if rest else (section,)
    if arg.startswith("-"):
        path = tuple(key.lstrip("-").split("."))
        yield Assignment(path, text if "=" in arg else None, arg, "command line", option=arg)
    elif key == MODEL or (key in SECTIONS and is_main_key(key, text)):
        yield Assignment((key,), text, arg, "command line")
    elif key in SECTIONS:
        rule = "is a section: an override must be `section.key=value`."
        action = f"Run `maxpipe config explain {key}` to list its keys."
        problems.append(
            Problem(Code.CFG_UNKNOWN_KEY, f"command line: {key}", format_raw(text), rule, action)
        )
    elif not all(path):
        rule = "has no section: an override must be `section.key=value`."
        action = "Write section.key=value."
        problems.append(
            Problem(Code.CFG_UNKNOWN_KEY, f"command line: {key}", format_raw(text), rule, action)
        )
    elif not _is_collection(_hint(path)):
        yield Assignment(path, text, arg, "command line")
    else:
        try:
            node = compose(text)
        except yaml.YAMLError as error:
            example = f"{key}={{a: 1}}" if is_mapping(_hint(path)) else f"{key}=[a,b]"
            problems.append(syntax_problem(f"command line: {arg}", error, arg, example))
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
    """Yield one assignment, or one per mapping entry, so that mappings from several files are
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
    """Split the path after the section into the key and the mapping entry, or into the key, the
    name of a named section and the key within that section.
    """
    holds_sections = f"{section}.{rest[0]}.{NAME}" in NAMED_SECTIONS
    return tuple(".".join(rest).split(".", 2 if holds_sections else 1))


def _hint(path: Sequence[str]) -> Any:
    """Return the declared type of the key in an override; the key may be given by its former name.
    For a mapping entry, return the type of the mapping.
    """
    section, rest = split_key(upgrade_setting(".".join(path), None)[0].split("."))
    path = (section, *rest)
    key = declared_key(".".join(path))
    return NAMED_KEYS[key] if key in NAMED_KEYS else KEYS.get(".".join([section, *rest[:1]]))


def is_mapping(hint: Any) -> bool:
    """Return True if a key of this type is a mapping whose entries can be set separately."""
    return typing.get_origin(hint) is dict


def _is_collection(hint: Any) -> bool:
    return typing.get_origin(hint) in (dict, list)


def former_key_warnings(assignments: Iterable[Assignment], saved_as: str) -> Iterator[Problem]:
    """Yield a warning for each assignment that uses a key or value format from an earlier release.

    Assignments with the origin `saved_as`, which come from a saved config, are exempt.
    """
    for each in assignments:
        new = rename_former_key(each)
        if new == each or each.origin == saved_as or is_alias(".".join(new.path)):
            continue
        text = key = ".".join(new.path)
        if isinstance(new.raw, list) and new.raw != each.raw:
            items = to_yaml_line(upgrade_setting(".".join(each.path), each.raw)[1])
            setting = f"`{new.path[-1]}: {items}`" if each.is_in_file else f'"{key}={items}"'
            kind = "list of mappings" if item_type(KEYS.get(key)) else "list"
            rule = f"uses a format from an earlier release: {key} is now a {kind}."
            yield each.problem(Code.CFG_RENAMED, rule, f"Write {setting}.")
            continue
        text += "" if new.raw == each.raw else f"={format_raw(new.raw)}"
        yield each.problem(Code.CFG_RENAMED, f"was renamed to {text}.", f"Write {text} instead.")


def duplicate_settings(assignments: Sequence[Assignment]) -> Iterator[Problem]:
    """Yield an error for each key that a file sets under both its former and its current name."""
    first: dict[tuple[str, str], Assignment] = {}
    for each in assignments:
        key = ".".join(rename_former_key(each).path)
        other = first.setdefault((each.origin, key), each)
        if other.path != each.path:
            former = each if ".".join(each.path) != key else other
            place = other.place if former is each else each.place
            verb = "is a short form of" if is_alias(key) else "was renamed to"
            yield former.problem(
                Code.CFG_RENAMED,
                f"{verb} {key}, which is also set ({place}).",
                f"Keep only {key}.",
            )


def rename_former_key(assignment: Assignment) -> Assignment:
    """Return the assignment with its key replaced by the key's current name."""
    key = ".".join(assignment.path)
    new, value = upgrade_setting(key, assignment.raw)
    path = assignment.path if new == key else tuple(new.split("."))
    return dataclasses.replace(assignment, path=path, raw=to_raw(value))


def is_alias(key: str) -> bool:
    """Return True if the other name and format of a key are short forms, not deprecated."""
    return key in KEYS and bool(field_of(key).metadata.get("alias"))


_NOT_SHAPE = ("attention", "compute_dtype", "param_dtype", "dropout", "frozen")
"""Model keys, other than the `matmul*` keys, that do not affect parameter shapes."""

_REQUIRED = frozenset(
    key for key in KEYS if key.startswith("model.") and default_of(key) is dataclasses.MISSING
)


class ModelReference(NamedTuple):
    """Assignments from the bundled model config that a config file or an override names."""

    before: list[Assignment]
    """Assignments of default values, which config files override."""
    after: list[Assignment]
    """Assignments that take precedence over all config files."""
    notes: tuple[str, ...]


def is_reference(assignment: Assignment) -> bool:
    """Return True if the assignment is `model: NAME` or `model=NAME`."""
    return assignment.path == (MODEL,) and isinstance(assignment.raw, str)


def resolve_model(
    in_files: Sequence[Assignment],
    from_overrides: Sequence[Assignment],
    problems: list[Problem],
    *,
    is_saved: bool,
) -> ModelReference:
    """Return the assignments from the bundled model config that files or overrides reference by
    name.

    A model name in a file is only a default: a file that defines a complete model replaces it. A
    model name in an override replaces the models defined in all files.
    """
    overrides = [each for each in from_overrides if is_reference(each)]
    in_file = [each for each in in_files if is_reference(each)]
    models = _models(in_files)
    if overrides:
        return ModelReference([], _settings(overrides[-1], problems), ())
    if not in_file:
        return ModelReference([], [], ())
    last = in_file[-1]
    found = _settings(last, problems)
    if models or is_saved:
        notes = [
            f"model: {_short(name)} replaces {last.raw}, the default model of {last.origin}"
            for name in models[-1:]
        ]
        return ModelReference([], [], tuple(notes) if found else ())
    return ModelReference(found, [], ())


def _models(assignments: Sequence[Assignment]) -> list[str]:
    """Return, in order, the origins whose assignments set all required model keys."""
    keys: dict[str, set[str]] = {}
    for each in assignments:
        keys.setdefault(each.origin, set()).add(".".join(each.path))
    return [origin for origin, those in keys.items() if those >= _REQUIRED]


def _settings(reference: Assignment, problems: list[Problem]) -> list[Assignment]:
    name = str(reference.raw)
    found = config_files.find_model(name)
    if found is None:
        models = [
            each.name for each in config_files.bundled_configs().values() if each.kind == MODEL
        ]
        guess = did_you_mean(name.lower(), models)
        action = f"Write model: {guess}." if guess and reference.is_in_file else ""
        action = action or (f"Write model={guess}." if guess else "")
        if not guess and config_files.is_hub_id(name):
            action = config_files.hub_download_action(name)
        rule = (
            "must be a section with keys or the name of a bundled model (`maxpipe configs list`)."
        )
        action = action or "Write `model: tiny`, or write the model's keys below `model:`."
        problems.append(reference.problem(Code.CFG_FILE, rule, action))
        return []
    document = read_file(ConfigFile(found.path, f"shipped config {found.name}"), problems)
    return (
        list(from_document(document, f"shipped config {found.name}", problems)) if document else []
    )


def shape_override_notes(assignments: Sequence[Assignment]) -> Iterator[str]:
    """Yield a note for each file that changes the shape of a model defined in an earlier file."""
    shape = {
        key
        for key in KEYS
        if key.startswith("model.")
        and not key.startswith("model.matmul")
        and key not in [f"model.{name}" for name in _NOT_SHAPE]
    }
    # Assignments without an origin are placeholder values for configs that need no model.
    assignments = [each for each in assignments if each.origin]
    for model in _models([each for each in assignments if each.is_in_file]):
        values = {".".join(a.path): a.raw for a in assignments if a.origin == model}
        changed: dict[str, list[str]] = {}
        is_later = False
        for each in assignments:
            key = ".".join(each.path)
            is_later = is_later or each.origin == model
            if not is_later or each.origin == model or not each.is_in_file or key not in shape:
                continue
            default = default_of(key)
            before = values.get(key, None if default is dataclasses.MISSING else to_raw(default))
            if before != each.raw:
                changed.setdefault(each.origin, []).append(key)
        for origin, keys in changed.items():
            count = pluralize(len(dict.fromkeys(keys)), "key")
            yield f"model: {_short(model)}, {count} overridden by {_short(origin)}"


def _short(origin: str) -> str:
    return origin.removeprefix("shipped config ")
