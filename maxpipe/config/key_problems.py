"""Error messages for unknown keys, and for values that do not have the type of their key."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any, Literal

from maxpipe.config.assignments import Assignment, is_mapping
from maxpipe.config.foreign_keys import join_reason, list_action, value_action
from maxpipe.config.rules import BOUNDS, did_you_mean
from maxpipe.config.schema import (
    KEYS,
    SECTIONS,
    declared_key,
    item_type,
    section_of,
    split_key,
    without_none,
)
from maxpipe.config.translation import Translation, TranslationContext, is_main_key, translate
from maxpipe.errors import Code, Problem

_LISTS = {
    list[int]: ("list of integers", "[2, 2]"),
    list[float]: ("list of numbers", "[1.5, 2]"),
    list[str]: ("list of names", "[]"),
}
"""Maps each list type to the name of the type and an example value."""


_MAPPING_TO_NUMBERS = "mapping of names to numbers"


def type_name(hint: Any) -> str:
    """Return the name of a type, such as `integer` or `one of a, b`."""
    hint = without_none(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    if is_mapping(hint):
        inner = typing.get_args(hint)[-1]
        if inner is float:
            return _MAPPING_TO_NUMBERS
        contents = "sections" if dataclasses.is_dataclass(inner) else "lists of names"
        return f"mapping of names to {contents}"
    if item_type(hint) is not None:
        return "list of mappings"
    if hint in _LISTS:
        return _LISTS[hint][0]
    return {int: "integer", float: "number", bool: "true or false", str: "string"}[hint]


def _is_too_large(raw: object) -> bool:
    """Return True if the value is an integer string that exceeds the range of 64-bit floats."""
    return bool(re.fullmatch(r"[-+]?\d{309,}", str(raw) if isinstance(raw, str) else ""))


def type_problem(assignment: Assignment, hint: Any) -> Problem:
    """Return the error for a value that does not have the type of its key."""
    key = ".".join(assignment.path)
    is_entry = len(key.split(".")) > 2  # of a mapping
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        action = value_action(key, str(assignment.raw), choices) or f"Set {key}={choices[0]}."
        if "[" in key:
            action = f"Write `{assignment.path[-1]}: {choices[0]}`."
        return assignment.problem(Code.CFG_VALUE, f"must be {type_name(hint)}.", action)
    if type_name(hint) == _MAPPING_TO_NUMBERS and is_entry:
        return assignment.problem(
            Code.CFG_TYPE, "must be a finite number.", f"Write a value such as {key}=1."
        )
    if is_mapping(hint):
        example = f"Set {key}=[tensor]" if is_entry else f"Set {key}={{}}"
        rule = "must be a list of mesh axes" if is_entry else "must be a mapping"
        return assignment.problem(Code.CFG_TYPE, f"{rule}.", f"{example}.")
    if hint in _LISTS:
        is_name = hint == list[str] and isinstance(assignment.raw, str)
        example = f"[{assignment.raw}]" if is_name else _LISTS[hint][1]
        return assignment.problem(
            Code.CFG_TYPE, f"must be a {type_name(hint)}.", f"Set {key}={example}."
        )
    if hint is str and isinstance(assignment.raw, list) and (action := list_action(key)):
        return assignment.problem(Code.CFG_TYPE, "must be a string, not a list.", action)
    if hint is str:
        action = f"Write {key} = '...', or leave the key out."
        if "[" in key:
            action = f"Write `{assignment.path[-1]}: ...`."
        return assignment.problem(Code.CFG_TYPE, "must be a string.", action)
    example = {int: "8", float: "0.1", bool: "true"}[hint]
    if bound := BOUNDS.get(declared_key(key)):
        example = str(bound.example)
    setting = f"{key}={example}"
    if "[" in key:
        setting = f"`{assignment.path[-1]}: {example}`"
    article = {int: "an integer", float: "a finite number", bool: "true or false"}[hint]
    if hint is float and _is_too_large(assignment.raw):
        article = "a number below 1.8e308, the largest 64-bit float"
    return assignment.problem(
        Code.CFG_TYPE, f"must be {article}.", f"Write a value such as {setting}."
    )


def unknown_problem(assignment: Assignment, context: TranslationContext) -> Problem:
    """Return the error for a key that does not exist, with the key that replaces it."""
    section, names = split_key(assignment.path)
    key = ".".join(assignment.path)
    is_text = isinstance(assignment.raw, str) and is_main_key(section, assignment.raw)
    if section in SECTIONS and not names and not is_text and not assignment.option:
        rule = "is a section: write its keys below it, one `key: value` per line."
        action = f"Run `maxpipe config explain {section}` to list its keys."
        return assignment.problem(Code.CFG_UNKNOWN_KEY, rule, action)
    if key in KEYS and not assignment.option:
        lines = [f"`{each}:`" for each in section_of(key).split(".")]
        rule = "is a full key: in a file, write it below its section."
        last = f"and `{key.rpartition('.')[2]}: ...` indented below it."
        return assignment.problem(
            Code.CFG_UNKNOWN_KEY, rule, f"Write {', below it '.join(lines)}, {last}"
        )
    rule, show = _unknown_rule(assignment)
    if (
        isinstance(assignment.raw, dict)
        and not names
        and (close := did_you_mean(section, SECTIONS))
    ):
        return assignment.problem(
            Code.CFG_UNKNOWN_KEY, rule, f"Did you mean {close}? {show}", given=False
        )
    translation = _translate_unknown(assignment, context)
    action = translation.action_text(in_file=assignment.is_in_file)
    if translation.key and not translation.is_exact:
        action = f"Did you mean {translation.key}? {show}"
    problem = assignment.problem(
        Code.CFG_UNKNOWN_KEY,
        join_reason(rule, translation.why),
        action or show,
        given=bool(assignment.option) or bool(names) or not isinstance(assignment.raw, dict),
    )
    if assignment.option:
        return dataclasses.replace(problem, where=f"command line: {assignment.option}", value="")
    return problem


def _unknown_rule(assignment: Assignment) -> tuple[str, str]:
    """Return the rule that an unknown key violates, and a hint about where valid keys are
    listed.
    """
    section, names = split_key(assignment.path)
    if assignment.option:
        return "is not an option of this command.", "Run the command with --help."
    if section in SECTIONS and names:
        show = f"`maxpipe config explain {section}` lists its keys."
        return f"is not a key of {section}.", show
    if assignment.is_in_file or names:
        return "is not a section.", f"The sections are {', '.join(SECTIONS)}."
    return "has no section: an override must be `section.key=value`.", "Write section.key=value."


def _translate_unknown(assignment: Assignment, context: TranslationContext) -> Translation:
    """Translate an unknown key. A command-line option with the name of an existing key is
    translated to that key.
    """
    key = ".".join(assignment.path)
    if key in KEYS:
        text = assignment.raw if isinstance(assignment.raw, str) else "VALUE"
        return Translation(((key, text),), key=key)
    return translate(assignment.path, assignment.raw, context)
