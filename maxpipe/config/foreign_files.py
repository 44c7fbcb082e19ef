"""Translate other trainers' config files, and report the result for each key."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from maxpipe.config.assignments import Assignment, from_document, from_values
from maxpipe.config.config_files import FOREIGN_SUFFIXES, bundled_configs
from maxpipe.config.rules import did_you_mean
from maxpipe.config.schema import KEYS, SECTIONS
from maxpipe.config.sections.model import FAMILY
from maxpipe.config.translation import (
    MODEL,
    Translation,
    TranslationContext,
    translate,
    yaml_line_of_text,
)
from maxpipe.config.yaml_values import MAX_FILE_BYTES, Raw, compose, to_raw, to_yaml_line
from maxpipe.errors import Code, ConfigError, Problem
from maxpipe.io.files import read
from maxpipe.io.formatting import pluralize

SUFFIXES = FOREIGN_SUFFIXES

_FEWEST = 4
"""An entire file is translated only if it contains at least this many keys from other trainers."""
_WIDTH = 96
_MOST_TRANSLATED = 300
"""Maximum number of unknown keys per file that are examined to detect another trainer's config."""
_NOT_KNOWN = "unknown names"


def read_foreign(path: Path, origin: str) -> list[Assignment]:
    """Read the assignments in a TOML or JSON file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = read(path, MAX_FILE_BYTES).decode("utf-8")
        values = to_raw(tomllib.loads(text) if path.suffix == ".toml" else json.loads(text))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}."
        action = "Use an existing YAML file; `maxpipe init DIR` writes an example."
        raise ConfigError.one(Code.CFG_YAML, origin, None, rule, action) from error
    except (ValueError, RecursionError) as error:
        rule = f"is not a config: {path.suffix[1:]} cannot be parsed ({error})."
        action = "Write a config in YAML; `maxpipe init DIR` writes an example."
        raise ConfigError.one(Code.CFG_YAML, origin, None, rule, action) from error
    if not isinstance(values, dict):
        rule = "must contain keys and values."
        raise ConfigError.one(Code.CFG_YAML, origin, None, rule, "Write a config in YAML.")
    return list(from_values(values, origin))


def leaves(assignment: Assignment) -> Iterator[tuple[tuple[str, ...], Raw]]:
    """Yield (path, value) for each key, including keys in nested sections."""
    yield from _leaves(assignment.path, assignment.raw)


def _leaves(path: tuple[str, ...], raw: Raw) -> Iterator[tuple[tuple[str, ...], Raw]]:
    if isinstance(raw, dict) and raw and ".".join(path) not in KEYS:
        for name, value in raw.items():
            yield from _leaves((*path, name), value)
    else:
        yield path, raw


_CONFIG_FILE = ("job.config_file", "job_config_file", "config_file")
"""Names of torchtitan's config-file option, which may also appear as a key in a file."""


def find_config_file_key(assignments: Iterable[Assignment]) -> tuple[str, str] | None:
    """Return the key that refers to another trainer's config file and the path of that file, or
    None.
    """
    for assignment in assignments:
        for path, raw in leaves(assignment):
            if (name := ".".join(path)) in _CONFIG_FILE and isinstance(raw, str) and raw:
                return name, raw
    return None


def is_foreign(unknown: Sequence[Assignment], context: TranslationContext) -> bool:
    """Return True if a file's unknown keys indicate that the file is another trainer's config."""
    known = 0
    for assignment in unknown:
        if _is_misspelled(assignment):
            continue
        found = [
            translate(path, raw, context).is_exact
            for path, raw in leaves(assignment)
            if not _is_misplaced(path)
        ]
        known += sum(found)
        is_section = isinstance(assignment.raw, dict) and assignment.path[0] not in SECTIONS
        # Even if the name of a section is misspelled, the section contains maxpipe keys.
        is_section &= not all(path[-1] in _OWN_NAMES for path, _ in leaves(assignment))
        if known >= _FEWEST or (is_section and any(found) and all(found)):
            return True
    return False


def _is_misspelled(assignment: Assignment) -> bool:
    """Return True if the assignment sets a maxpipe section whose name is misspelled."""
    if len(assignment.path) != 1 or not isinstance(assignment.raw, dict):
        return False
    (section,) = assignment.path
    guess = did_you_mean(section, SECTIONS)
    return bool(guess) and all(f"{guess}.{name}" in KEYS for name in assignment.raw)


def _is_misplaced(path: Sequence[str]) -> bool:
    """Return True if the path is a maxpipe key in the wrong section."""
    return path[0] in SECTIONS and path[-1] in _OWN_NAMES


_OWN_NAMES = frozenset(key.rpartition(".")[2] for key in KEYS)


class TranslationReport(NamedTuple):
    """Result of translating another trainer's config file."""

    problem: Problem
    origin: str
    text: str
    """YAML text of a maxpipe config with the settings that could be translated."""
    has_config_file_key: bool
    """Whether a key refers to another config file, which may set the required keys."""

    def assignments(self, problems: list[Problem]) -> list[Assignment]:
        """Return the assignments that are parsed from `text`."""
        root = compose(self.text)
        if not isinstance(root, yaml.MappingNode):
            return []
        return list(from_document(root, f"the lines for {self.origin}", problems))


class OtherTrainerError(Exception):
    """Raised if one or more config files are written for other trainers."""

    def __init__(self, reports: dict[str, TranslationReport]):
        super().__init__()
        self.reports = reports


def translate_files(
    unknown: Sequence[Assignment],
    known: Sequence[Assignment],
    foreign: Collection[str],
    context: TranslationContext,
) -> dict[str, TranslationReport]:
    """Return the translations of all config files written for other trainers, keyed by origin.

    `foreign` contains the origins of files in a format that only other trainers use.
    """
    found = {}
    for origin in dict.fromkeys(each.origin for each in (*unknown, *known) if each.is_in_file):
        theirs = [each for each in unknown if each.origin == origin]
        # For values from a published config.json, the origin is the path of that file, but the keys
        # are maxpipe keys.
        if origin in foreign or is_foreign(theirs[:_MOST_TRANSLATED], context):
            mine = [each for each in known if each.origin == origin]
            found[origin] = translate_file(origin, [*mine, *theirs], context)
    return found


def translate_file(
    origin: str, assignments: Sequence[Assignment], context: TranslationContext
) -> TranslationReport:
    """Translate all keys of another trainer's config file."""
    lines: dict[str, tuple[str, str]] = {}
    absent: dict[str, list[str]] = {}
    count = 0
    given = [leaf for assignment in assignments for leaf in leaves(assignment)]
    family = _family(given, context)
    context = dataclasses.replace(
        context, values={**context.values, FAMILY: family or context.family}
    )
    names = {path[-1]: raw for path, raw in given}
    for path, raw in given:
        name = ".".join(path)
        if name in KEYS and not isinstance(raw, dict):
            lines[name] = (_text(raw), "")
            continue
        count += 1
        if path[-1] == "flavor" and f"{names.get('name')}-{raw}".lower() in bundled_configs():
            raw = (
                f"{names['name']}-{raw}".lower()
            )  # torchtitan's keys for the name and flavor of a model
            path = ("model_name",)
        found = translate(_unambiguous(path, names), raw, context)
        settings = dict(found.settings)
        if not found.is_exact:
            absent.setdefault(_NOT_KNOWN, []).append(name)
        elif family and FAMILY in settings and found.key != FAMILY:
            reason = f"only used with model.family={settings[FAMILY]}."
            absent.setdefault(reason, []).append(name)
        elif found.settings:
            remark = _original_setting(name, raw, found)
            lines |= {key: (text, remark) for key, text in found.settings}
            if found.action:
                absent.setdefault(found.action, []).append(name)
        else:
            absent.setdefault(_reason(found), []).append(name)
    config = find_config_file_key(assignments)
    if config and not lines:
        return TranslationReport(
            _launcher_problem(origin, *config), origin, "", has_config_file_key=True
        )
    text = [*_yaml(lines), *_remarks(absent)]
    body = "\n".join(f"    {line}".rstrip() for line in text)
    named = sum(bool(remark) for _, remark in lines.values())
    rule = (
        f"contains {pluralize(count, 'key')} from another trainer; maxpipe has equivalents for "
        f"{named}. A config must be a YAML file with sections and keys below them."
    )
    action = f"Write these lines to a .yml file, and use it instead of {origin}:\n{body}"
    problem = Problem(Code.CFG_FOREIGN, origin, "", rule, action)
    return TranslationReport(
        problem, origin, "\n".join(text) + "\n", has_config_file_key=config is not None
    )


_ACCELERATE_KEYS = ("distributed_type", "compute_environment")


def _unambiguous(path: tuple[str, ...], names: Mapping[str, Raw]) -> tuple[str, ...]:
    """If the meaning of a key depends on other keys in the file, rename the key unambiguously."""
    if path == ("num_processes",) and any(each in names for each in _ACCELERATE_KEYS):
        return ("num_gpus",)
    return path


def _launcher_problem(origin: str, name: str, file: str) -> Problem:
    rule = f"contains another trainer's command-line options; {name} refers to the config {file}."
    return Problem(Code.CFG_FOREIGN, origin, "", rule, f"Use {file} instead of {origin}.")


def _family(given: Sequence[tuple[tuple[str, ...], Raw]], context: TranslationContext) -> str:
    """Return the model family that the file selects, or an empty string if it selects none."""
    for path, raw in given:
        if ".".join(path) == FAMILY and isinstance(raw, str):
            return raw
        found = translate(path, raw, context)
        if found.is_exact and found.key == FAMILY and found.settings:
            return found.settings[0][1]
    return ""


def _text(raw: Raw) -> str:
    return raw if isinstance(raw, str) else "null" if raw is None else to_yaml_line(raw)


def _original_setting(name: str, raw: Raw, found: Translation) -> str:
    """Return the original key, followed by the original value if the translation changed it."""
    text = _text(raw)
    same = any(value.lower() == text.lower() for _, value in found.settings)
    return name if same else f"{name}: {' '.join(text.split())[:40]}"


def _reason(found: Translation) -> str:
    return f"{found.why} {found.action}".strip()


def _yaml(lines: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a config file with these settings and the original key names as
    comments.
    """
    reference = lines.pop(MODEL, None)
    if reference:
        yield f"model: {yaml_line_of_text(reference[0])}  # {reference[1]}"
        if kept := [key for key in lines if key.startswith("model.")]:
            yield from _wrapped(f"set by this model: {', '.join(kept)}")
        lines = {key: value for key, value in lines.items() if not key.startswith("model.")}
    written: list[str] = []
    order = {key: place for place, key in enumerate(KEYS)}
    for key in sorted(lines, key=lambda key: order.get(key, len(order))):
        *sections, name = key.split(".")
        common = 0
        while common < min(len(sections), len(written)) and sections[common] == written[common]:
            common += 1
        for depth in range(common, len(sections)):
            yield f"{'  ' * depth}{sections[depth]}:"
        written = sections
        text, remark = lines[key]
        line = f"{'  ' * len(sections)}{name}: {yaml_line_of_text(text)}"
        yield f"{line}  # {remark}" if remark else line


def _remarks(absent: dict[str, list[str]]) -> Iterator[str]:
    for reason, names in absent.items():
        yield from _wrapped(f"{', '.join(names)}: {reason.rstrip('.')}.")


def _wrapped(text: str) -> list[str]:
    text = "".join(each for each in text if each.isprintable())
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False
    )
