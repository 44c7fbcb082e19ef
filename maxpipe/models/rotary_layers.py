"""Layers without rotary positions, which several families have at a fixed interval, without jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maxpipe.models.config import Bound
from maxpipe.models.huggingface import Ours, Theirs, UnsupportedError

BOUND = Bound(
    "no_rope_layer_interval", 4, 0, why="0 gives all layers rotary positions, 1 gives them to none"
)
"""Allowed range of the interval between layers without rotary positions."""


@dataclass(frozen=True)
class RotaryLayers:
    """Key-table row for `no_rope_layers` and `no_rope_layer_interval`, if every n-th layer has no
    rotary positions.
    """

    ours: str
    """maxpipe key for n. 0 means that all layers have rotary positions."""
    default: int = 4
    """Value of n if `config.json` has neither key."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the key with one entry per layer, and the key with the interval."""
        return ("no_rope_layers", "no_rope_layer_interval")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the interval between layers without rotary positions, computed from the list of
        layers if there is one.
        """
        layers, count = theirs.get(self.names[0]), ours["num_layers"]
        if layers is None or layers == []:
            interval = theirs.get(self.names[1])
            return {self.ours: self.default if interval is None else interval}
        if isinstance(layers, list) and len(layers) >= count:
            flags = layers[:count]
            interval = flags.index(0) + 1 if 0 in flags else 0
            if flags == rotary_flags(count, interval):
                return {self.ours: interval}
        rule = f"must list {count} entries: 0 for every n-th layer, and 1 for the other layers."
        raise UnsupportedError(self.names[0], layers, rule)

    def restated(self, theirs: Theirs) -> tuple[str, Any] | None:
        """Return the key and value of an interval that contradicts the list, or None."""
        layers, interval = (theirs.get(name) for name in self.names)
        if not isinstance(layers, list) or not layers or type(interval) is not int or interval < 1:
            return None
        flags = rotary_flags(len(layers), interval)
        return None if flags == layers else (self.names[1], interval)

    def write(self, ours: Ours) -> Theirs:
        """Return both keys. An interval larger than the number of layers has no effect."""
        count, interval = ours["num_layers"], ours[self.ours]
        flags = rotary_flags(count, interval)
        return {self.names[0]: flags, self.names[1]: interval or count + 1}


def rotary_flags(num_layers: int, interval: int) -> list[int]:
    """Return one flag per layer: 0 for every `interval`-th layer, which has no rotary positions,
    and 1 for the others. If `interval` is 0, all layers have rotary positions.
    """
    return [int(not interval or layer % interval != 0) for layer in range(1, num_layers + 1)]
