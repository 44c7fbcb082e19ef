"""Convert list items of earlier releases, such as the text `10% linear 0 -> 1`, to mappings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_COUNT = r"\d(?:_?\d){0,17}"
_LENGTH = rf"\s+for\s+(?:(?P<steps>{_COUNT})\s+steps|(?P<tokens>{_COUNT})\s+tokens)"


def _upgrade_items(form: str, types: Mapping[str, Callable[[str], Any]]) -> Callable[[Any], Any]:
    """Return a function that converts the texts in a list. Texts of other forms are unchanged."""
    pattern = re.compile(form, re.ASCII)

    def upgrade(item: Any) -> Any:
        match = pattern.fullmatch(item.strip()) if isinstance(item, str) else None
        if match is None:
            return item
        try:
            fields = {name: text for name, text in match.groupdict().items() if text is not None}
            return {name: types[name](text) for name, text in fields.items()}
        except ValueError:
            return item

    return lambda value: [*map(upgrade, value)] if isinstance(value, list) else value


def _weights(text: str) -> dict[str, float]:
    words = text.split()
    weights = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    if 2 * len(weights) != len(words):
        raise ValueError(text)
    return weights


upgrade_lr_phases = _upgrade_items(
    r"(?:(?:1|(?P<times>\d{1,2}))\s*x\s+)?"
    r"(?:(?P<steps>\d{1,9})|(?P<percent>\d{1,3}(?:\.\d+)?)%|rest)\s+"
    r"(?P<shape>linear|cosine)\s+(?:(?P<from>\S+)\s*->\s*)?(?P<to>\S+)",
    {"times": int, "steps": int, "percent": float, "shape": str, "from": float, "to": float},
)
upgrade_batch_ramp = _upgrade_items(
    rf"(?P<batch_size>\d{{1,8}}){_LENGTH}", {"batch_size": int, "steps": int, "tokens": int}
)
upgrade_mixture_stages = _upgrade_items(
    rf"(?P<weights>.+?){_LENGTH}", {"weights": _weights, "steps": int, "tokens": int}
)
upgrade_lr_multipliers = _upgrade_items(
    r"(?P<pattern>.*\S)\s+(?P<multiplier>\S+)", {"pattern": str, "multiplier": float}
)
upgrade_weight_decays = _upgrade_items(
    r"(?P<pattern>.*\S)\s+(?P<weight_decay>\S+)", {"pattern": str, "weight_decay": float}
)
