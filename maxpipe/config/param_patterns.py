"""Parser for `optim.lr_multipliers` and `optim.weight_decays`. This module does not import jax."""

from __future__ import annotations

from collections.abc import Sequence

from maxpipe.config.yaml_values import READERS
from maxpipe.models.config import LARGEST

FORM = "PATTERN NUMBER"


def parse_param_values(texts: Sequence[str]) -> list[tuple[str, float]]:
    """Parse each text into a pair of a parameter name pattern and a number.

    Raises:
        ValueError: a text cannot be parsed; the message describes the valid form.
    """
    return [_pair(text) for text in texts]


def _pair(text: str) -> tuple[str, float]:
    pattern, _, number = text.strip().rpartition(" ")
    try:
        value = READERS[float](number)
    except ValueError:
        value = -1.0
    if not pattern.strip() or not 0 <= value <= LARGEST:
        rule = f"must have entries of the form {FORM}, with a number from 0 to {LARGEST:g}"
        raise ValueError(f"{rule}; {text!r} does not match.")
    return pattern.strip(), value
