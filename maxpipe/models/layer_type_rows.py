"""Key-table rows for keys of `config.json` that depend on the type of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maxpipe.models.huggingface import FULL, Ours, Theirs, UnsupportedError, a_flag


@dataclass(frozen=True)
class LayerTypes:
    """Key-table row for `layer_types`, which the model family determines."""

    types: tuple[str, ...]
    """Layer types of the first layers. The pattern repeats for the following layers."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("layer_types",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check that the layer types match the family."""
        layer_types = theirs.get("layer_types")
        if layer_types is not None and layer_types != (wanted := self._of(ours)):
            names = " and ".join(map(repr, self.types))
            rule = f"must list {len(wanted)} layers, {names}{' in turn' * (len(self.types) > 1)}."
            raise UnsupportedError("layer_types", layer_types, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the type of each layer."""
        return {"layer_types": self._of(ours)}

    def _of(self, ours: Ours) -> list[str]:
        count = ours["num_layers"]
        return [self.types[number % len(self.types)] for number in range(count)]


@dataclass(frozen=True)
class NoWindow:
    """Key-table row for keys that enable sliding windows in some layers (unsupported)."""

    first: int | None
    """Default index of the first layer with a window. None means that all layers have a window."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the only key that this row converts; `Kept` rows handle the other window keys."""
        return ("use_sliding_window",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check that no layer uses a window."""
        window = theirs.get("sliding_window", 4096)
        if not a_flag(theirs, "use_sliding_window") or window is None:
            return {}
        first = 0
        if self.first is not None:
            if theirs.get("layer_types") is not None:
                return {}
            max_window_layers = theirs.get("max_window_layers")
            first = self.first if max_window_layers is None else max_window_layers
        if first < ours["num_layers"]:
            rule = f"must be false: sliding-window layers ({window} tokens) are not supported."
            raise UnsupportedError("use_sliding_window", theirs["use_sliding_window"], rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the `config.json` key that disables sliding windows."""
        return {"use_sliding_window": False}


@dataclass(frozen=True)
class Period:
    """Key-table row for `layer_types` if every n-th layer is global, and for the key with n."""

    ours: str
    others: str
    """Type of the layers that are not global."""
    default: int
    """Value of n if `config.json` has neither key."""
    theirs: str
    also: tuple[str, ...] = ()
    """Alternative names of the key that stores n."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the keys that this row converts."""
        return ("layer_types", self.theirs, *self.also)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the interval between global layers, computed from the list of layer types."""
        types = theirs.get("layer_types")
        if types is None:
            period = theirs.get(self.theirs)
            return {self.ours: self.default if period is None else period}
        count = ours["num_layers"]
        if isinstance(types, list) and len(types) == count:
            # An interval larger than the layer count means that no layer attends to all tokens.
            first = types.index(FULL) + 1 if FULL in types else max(count + 1, self.default)
            if types == self._types(count, first):
                return {self.ours: first}
        rule = f"must list {count} layers, where every n-th is {FULL!r} and the others are "
        raise UnsupportedError("layer_types", types, f"{rule}{self.others!r}.")

    def write(self, ours: Ours) -> Theirs:
        """Return `layer_types` and the key that stores n."""
        period = ours[self.ours]
        return {"layer_types": self._types(ours["num_layers"], period), self.theirs: period}

    def restated(self, theirs: Theirs) -> tuple[str, Any] | None:
        """Return the key and value of an interval that contradicts `layer_types`, or None."""
        types = theirs.get("layer_types")
        if not isinstance(types, list):
            return None
        for name in (self.theirs, *self.also):
            period = theirs.get(name)
            if type(period) is int and period > 0 and self._types(len(types), period) != types:
                return name, period
        return None

    def _types(self, count: int, period: int) -> list[str]:
        return [self.others if number % period else FULL for number in range(1, count + 1)]
