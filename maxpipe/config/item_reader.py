"""Read the items of list keys, such as the phases of `optim.lr_phases`."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

from maxpipe.config.keys import ITEM_KEYS, ITEM_SECTIONS, names_in, without_none
from maxpipe.config.rules import EXAMPLES, ITEM, did_you_mean, field_name
from maxpipe.config.yaml_values import NAME_FORM, READERS, Raw, read_unchanged


class ItemError(ValueError):
    """Raised for an invalid item or field of an item."""

    def __init__(self, key: str, raw: Raw, rule: str = "", action: str = "", hint: Any = None):
        super().__init__(rule)
        self.key, self.raw, self.rule, self.action, self.hint = key, raw, rule, action, hint
        """`key` is the item or field, such as `optim.lr_phases[1].steps`. Without a rule, the value
        does not have the type `hint`."""


def read_items(raw: Raw, key: str) -> list[Any]:
    """Return the items of a list key.

    Raises:
        ItemError: an item or a field is invalid.
    """
    if not isinstance(raw, list):
        raise ItemError(key, raw, "must be a list of mappings.", _list_action(key))
    return [_read_item(item, key, f"{key}[{number}]") for number, item in enumerate(raw)]


def _list_action(key: str) -> str:
    return f'Set {key}=[], or items such as "{key}={EXAMPLES[key]}".'


def _read_item(raw: Raw, key: str, place: str) -> Any:
    declared, names = ITEM_SECTIONS[f"{key}{ITEM}"], names_in(f"{key}{ITEM}")
    if not isinstance(raw, dict):
        rule = f"must be a mapping with the fields {', '.join(names)}."
        raise ItemError(place, raw, rule, _list_action(key))
    for name, value in raw.items():
        if name not in names:
            guess = did_you_mean(name, names)
            action = f"Did you mean {guess}? " if guess else ""
            rule = f"is not a field of {key}."
            raise ItemError(
                f"{place}.{name}", value, rule, f"{action}Its fields are {', '.join(names)}."
            )
    values = {}
    for field in dataclasses.fields(declared):
        name = field_name(field)
        if name in raw:
            hint = ITEM_KEYS[f"{key}{ITEM}.{name}"]
            values[field.name] = _read_field(raw[name], hint, f"{place}.{name}")
        elif field.default is dataclasses.MISSING:
            action = f'Add `{name}: ...`, as in "{key}={EXAMPLES[key]}".'
            raise ItemError(place, raw, f"requires the field {name}.", action)
    return declared(**values)


def _read_field(raw: Raw, hint: Any, place: str) -> Any:
    if raw is None and without_none(hint) is not hint:
        return None
    hint = without_none(hint)
    if typing.get_origin(hint) is dict:
        if not isinstance(raw, dict):
            action = f"Write `{place.rpartition('.')[2]}: {{web: 0.9, code: 0.1}}`."
            raise ItemError(place, raw, "must be a mapping of names to numbers.", action)
        return {
            _name(name, place): _read_field(value, float, f"{place}.{name}")
            for name, value in raw.items()
        }
    try:
        value = READERS.get(hint, read_unchanged)(raw)
    except (ValueError, OverflowError):
        raise ItemError(place, raw, hint=hint) from None
    is_choice = typing.get_origin(hint) is Literal
    if (is_choice and value not in typing.get_args(hint)) or (
        hint is str and not isinstance(raw, str)
    ):
        raise ItemError(place, raw, hint=hint)
    return value


def _name(name: str, place: str) -> str:
    if not NAME_FORM.fullmatch(name):
        rule = "must have names of at most 64 letters, digits, `_` and `-`."
        raise ItemError(place, name, rule, "Write the name of a source in data.mixture.")
    return name
