"""Resolve `model: NAME`, and report which files define the shape of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxpipe.config import config_files
from maxpipe.config.assignments import Assignment, from_document
from maxpipe.config.config_files import ConfigFile
from maxpipe.config.keys import KEYS, default_of
from maxpipe.config.rules import did_you_mean
from maxpipe.config.translation import MODEL
from maxpipe.config.yaml_values import read_file
from maxpipe.errors import Problem
from maxpipe.io.formatting import pluralize

_NOT_SHAPE = ("attention", "compute_dtype", "param_dtype", "dropout", "frozen")
"""Model keys, other than the `matmul*` keys, that do not affect parameter shapes."""

_SHAPE = tuple(
    key
    for key in KEYS
    if key.startswith("model.")
    and not key.startswith("model.matmul")
    and key not in [f"model.{name}" for name in _NOT_SHAPE]
)
_REQUIRED = frozenset(key for key in _SHAPE if default_of(key) is dataclasses.MISSING)


class ModelReference(NamedTuple):
    """Assignments of a model that a file or override refers to by name."""

    before: list[Assignment]
    """Assignments with lower precedence than those of all files."""
    after: list[Assignment]
    """Assignments with higher precedence than those of all files."""
    notes: tuple[str, ...]


def is_reference(assignment: Assignment) -> bool:
    """Whether the assignment is `model: NAME` or `model=NAME`."""
    return assignment.path == (MODEL,) and isinstance(assignment.raw, str)


def resolve_model(
    in_files: Sequence[Assignment],
    from_overrides: Sequence[Assignment],
    problems: list[Problem],
    *,
    is_saved: bool,
) -> ModelReference:
    """Return the assignments of the model that files or overrides refer to.

    A model name in a file is only a default: a file with a complete model replaces it. A model name
    in an override replaces the model of all files.
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
            f"model: {_short(name)} replaces {last.raw}, the default of {last.origin}"
            for name in models[-1:]
        ]
        return ModelReference([], [], tuple(notes) if found else ())
    return ModelReference(found, [], ())


def _models(assignments: Sequence[Assignment]) -> list[str]:
    """Return the origins of complete models, which set all required model keys, in order."""
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
            "must be a section with keys, or the name of a bundled model (`maxpipe configs list`)."
        )
        action = action or "Write model: tiny, or the keys of a model below `model:`."
        problems.append(reference.problem(rule, action))
        return []
    document = read_file(ConfigFile(found.path, f"shipped config {found.name}"), problems)
    return (
        list(from_document(document, f"shipped config {found.name}", problems)) if document else []
    )


def shape_override_notes(assignments: Sequence[Assignment]) -> Iterator[str]:
    """Yield notes about files that change the shape of a model that an earlier file defines."""
    shape = set(_SHAPE)
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
            before = values.get(key, None if default is dataclasses.MISSING else _text(default))
            if before != each.raw:
                changed.setdefault(each.origin, []).append(key)
        for origin, keys in changed.items():
            count = pluralize(len(dict.fromkeys(keys)), "key")
            yield f"model: {_short(model)}, {count} overridden by {_short(origin)}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _short(origin: str) -> str:
    return origin.removeprefix("shipped config ")
