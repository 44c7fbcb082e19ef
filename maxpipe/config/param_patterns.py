"""Numbers for some parameters: `optim.lr_multipliers` and `optim.weight_decays`. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from maxpipe.config.yaml_values import READERS
from maxpipe.models.config import LARGEST

FORM = "PATTERN NUMBER"


def parse_param_values(texts: Sequence[str]) -> list[tuple[str, float]]:
    """(pattern over names of parameters, number) of each text.

    Raises:
        ValueError: one of them cannot be read; the message is the rule.
    """
    return [_pair(text) for text in texts]


def _pair(text: str) -> tuple[str, float]:
    pattern, _, number = text.strip().rpartition(" ")
    try:
        value = READERS[float](number)
    except ValueError:
        value = -1.0
    if not pattern.strip() or not 0 <= value <= LARGEST:
        raise ValueError(f"holds {text!r}: must be {FORM}, the number from 0 to {LARGEST:g}.")
    return pattern.strip(), value
