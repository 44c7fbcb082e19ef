"""What the range of a number in a config is."""

from __future__ import annotations

import math
from typing import NamedTuple

LARGEST = 3.4e38
"""What devices compute with are float32 numbers: more is infinite."""
SMALLEST = 1.2e-38
"""Less is zero there."""


class Bound(NamedTuple):
    """A range of one number; `example` is a value inside it."""

    key: str
    example: float
    low: float
    high: float = math.inf
    why: str = ""
    low_is_inside: bool = True
    high_is_inside: bool = True
    axis: str = ""
    """Logical axis of the dims of this size: it is a multiple of the devices that split them."""

    def holds(self, value: float) -> bool:
        above = self.low <= value if self.low_is_inside else self.low < value
        below = value <= self.high if self.high_is_inside else value < self.high
        return above and below

    def __str__(self) -> str:
        if math.isinf(self.high):
            text = f"at least {self.low}" if self.low_is_inside else f"more than {self.low}"
        elif not self.low_is_inside:
            text = f"more than {self.low} and at most {self.high}"
        elif self.high_is_inside:
            text = f"from {self.low} to {self.high}"
        else:
            text = f"at least {self.low} and less than {self.high}"
        return f"{text}{': ' + self.why if self.why else ''}"
