"""Rules for the items of list keys: ranges of their fields, and fields that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from maxpipe.config.item_reader import EXAMPLES
from maxpipe.config.keys import ITEM, ITEM_SECTIONS, names_in, plain_value
from maxpipe.config.rules import BOUNDS, rule, value_of
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation

_LENGTHS = ("steps", "percent", "tokens")
"""Fields that set the length of an item. An item may have one of them."""


def _add_item_rule(key: str) -> None:
    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        for number, item in enumerate(plain_value(value_of(config, key))):
            place = f"{key}[{number}]"
            for name, value in item.items():
                yield from _out_of_range(f"{key}{ITEM}.{name}", f"{place}.{name}", value)
            lengths = [name for name in names_in(f"{key}{ITEM}") if name in _LENGTHS]
            given = [name for name in lengths if name in item]
            if len(given) > 1:
                text = f"must have either {' or '.join(lengths)}, not both."
                yield RuleViolation(place, text, f"Leave {given[1]} out.")
            elif "tokens" in lengths and not given:
                action = f'Add `steps: ...`, as in "{key}={EXAMPLES[key]}".'
                yield RuleViolation(place, f"requires {' or '.join(lengths)}.", action)


def _out_of_range(declared: str, place: str, value: Any) -> Iterator[RuleViolation]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _out_of_range(declared, f"{place}.{name}", part)
        if not any(value.values()):
            yield RuleViolation(place, "must have a weight above 0.", "Set a weight to 1.")
    elif (bound := BOUNDS.get(declared)) and not bound.holds(value):
        name = place.rpartition(".")[2]
        yield RuleViolation(place, f"must be {bound}.", f"Write `{name}: {bound.example:g}`.")


for _section in ITEM_SECTIONS:
    _add_item_rule(_section.removesuffix(ITEM))


@rule("optim.lr_phases")
def _one_phase_is_open(config: Config) -> Iterator[RuleViolation]:
    phases = enumerate(config.optim.lr_phases)
    is_open = [n for n, phase in phases if phase.steps is None and phase.percent is None]
    for number in is_open:
        place = f"optim.lr_phases[{number}]"
        if config.optim.lr_phases[number].times > 1:
            text = "must be 1 if the phase has the remaining steps of the run."
            yield RuleViolation(f"{place}.times", text, "Add `steps: ...`, or leave times out.")
        elif number != is_open[-1]:
            text = "must have a length: another phase already has the remaining steps of the run."
            yield RuleViolation(place, text, "Add `steps: 100`, or `percent: 10`.")
