"""Hugging Face format of a model family: tables of config keys and tensors, without jax.

A family has one table of keys and one table of tensors. An import reads both tables from left to
right, and an export from right to left. The code that applies the tables is in
`maxpipe.huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Theirs = Mapping[str, Any]
"""Content of `config.json`."""

Ours = Mapping[str, Any]
"""Values keyed by name below `model`, such as `num_heads` and `llama.rope_factor`."""


class Unlike(ValueError):
    """A value that the other format cannot represent, with its key and the violated rule.

    `action` is the suggested fix, if the default suggestion does not apply.
    """

    def __init__(self, key: str, given: Any, rule: str, action: str = ""):
        super().__init__(f"{key} = {given!r} {rule}")
        self.key, self.value, self.rule, self.action = key, given, rule, action


class Row(Protocol):
    """A row of the key table."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the keys of `config.json` that the row handles."""
        ...

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Convert `config.json` to our keys; `ours` has the values of the preceding rows.

        Raises:
            Unlike: the model family cannot compute the value.
        """
        ...

    def write(self, ours: Ours) -> Theirs:
        """Convert our values to keys of `config.json`.

        Raises:
            Unlike: transformers cannot represent the value.
        """
        ...


@dataclass(frozen=True)
class Key:
    """A key with the same meaning in both formats."""

    theirs: str
    ours: str
    default: Any = None
    """Value that transformers uses if `config.json` lacks the key, or a function that computes it
    from our values so far."""
    zero_means: str = ""
    """Another of our keys, whose value is used if this key is 0."""
    is_integer: bool = False
    """Whether transformers stores an integer where our config has a float."""
    also: str = ""
    """Second name of the key in some releases of transformers. Exports write both names."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the key's name, or both names."""
        return (self.theirs, self.also) if self.also else (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the value, or the default."""
        value = theirs.get(self.theirs)
        if value is None and self.also:
            value = theirs.get(self.also)
        if value is None:
            value = self.default(ours) if callable(self.default) else self.default
        if value is None:
            raise Unlike(self.theirs, None, "is missing, and has no default.")
        if self.zero_means and value == ours[self.zero_means]:
            value = 0
        return {self.ours: value}

    def write(self, ours: Ours) -> Theirs:
        value = ours[self.ours]
        if self.zero_means and not value:
            value = ours[self.zero_means]
        if self.is_integer and value != (value := int(value)):
            raise Unlike(f"model.{self.ours}", ours[self.ours], "must be a whole number.")
        return dict.fromkeys(self.names, value)


@dataclass(frozen=True)
class Fixed:
    """A key of `config.json`, with the only values that the family supports."""

    theirs: str
    values: tuple[Any, ...]
    """Accepted values. Exports write the first value."""
    default: Any = None
    """Value that transformers uses if `config.json` lacks the key."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the value; none of our keys depends on it."""
        found = theirs.get(self.theirs)
        found = self.default if found is None else found
        # 0 equals false, and 1 equals true.
        if not any(
            found == value and (type(found) is bool) == (type(value) is bool)
            for value in self.values
        ):
            allowed = " or ".join("null" if value is None else repr(value) for value in self.values)
            raise Unlike(self.theirs, found, f"must be {allowed}: other values are not supported.")
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return the first value. Null is omitted, because the mere presence of some keys has a
        meaning.
        """
        return {} if self.values[0] is None else {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Only:
    """A key of our config without a counterpart, and the only value that transformers supports."""

    ours: str
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        return {self.ours: self.value}

    def write(self, ours: Ours) -> Theirs:
        """Check the value; no key of `config.json` depends on it."""
        if ours[self.ours] != self.value:
            raise Unlike(f"model.{self.ours}", ours[self.ours], f"must be {self.value!r}.")
        return {}


@dataclass(frozen=True)
class Kept:
    """A key that does not change logits. Exports copy it from the imported `config.json`."""

    theirs: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Return nothing: `maxpipe.huggingface` copies the key."""
        return {}


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: `rope_parameters`, or `rope_theta` and `rope_scaling` in older releases."""

    theta: str
    """Our key for the base."""
    default: float
    """Default of the base in transformers."""
    scalings: Mapping[str, tuple[Row, ...]]
    """Rows for the other parameters, keyed by `rope_type`."""
    unscaled: Ours
    """Our values for the type `default`."""
    select_type: Callable[[Ours], str] = lambda ours: "default"
    """Function that returns the `rope_type` of our values."""
    layers: str = ""
    """Layer type, if `rope_parameters` has an entry per layer type."""
    legacy_theta_key: str = "rope_theta"
    """Key of the base in older releases."""
    legacy_type_key: str = "rope_type"
    """Key of the type in older releases."""
    top_level_keys: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """Rows for keys of `config.json` outside the rotary parameters, keyed by `rope_type`."""
    defaults: Theirs = field(default_factory=dict)
    """Default rotary parameters in transformers if `config.json` specifies nothing except the
    base."""
    default_max_positions: int = 0
    """Default of `max_position_embeddings` in transformers."""
    default_original_positions: int = 0
    """Default of `original_max_position_embeddings` in transformers. 0 means no default."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the keys of the current and of older releases."""
        return (self.legacy_theta_key, "rope_scaling", "rope_parameters")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return base and scaling from the normalized `rope_parameters`.

        See `maxpipe.huggingface.config_json`.
        """
        said = an_object(theirs, "rope_parameters")
        if self.layers:
            said = an_object(said, self.layers)
        ours_read, kind = {self.theta: said["rope_theta"]}, said["rope_type"]
        if kind != "default" and (not isinstance(kind, str) or kind not in self.scalings):
            known = " or ".join(repr(scaling) for scaling in ("default", *self.scalings))
            raise Unlike("rope_type", kind, f"must be {known}.")
        if kind == "default":
            ours_read |= dict(self.unscaled)
        length = theirs.get("max_position_embeddings")
        lengths = {} if length is None else {"max_position_embeddings": length}
        for row in (*self.scalings.get(kind, ()), *self.top_level_keys.get(kind, ())):
            ours_read |= row.read({**lengths, **said}, ours)
        return ours_read

    def write(self, ours: Ours) -> Theirs:
        """Return the keys of the current and of older releases, for compatibility with both."""
        kind, scaling = self.select_type(ours), {}
        if kind != "default":
            for row in self.scalings[kind]:
                scaling |= row.write(ours)
        said = {"rope_theta": ours[self.theta], "rope_type": kind, **scaling}
        written: dict[str, Any] = {self.legacy_theta_key: ours[self.theta]}
        for row in self.top_level_keys.get(kind, ()):
            written |= row.write(ours)
        if self.scalings:
            known_before = {self.legacy_type_key: kind, **scaling} if scaling else None
            written["rope_scaling"] = known_before
        return written | {"rope_parameters": {self.layers: said} if self.layers else said}


def an_object(theirs: Theirs, key: str) -> Theirs:
    """Return the object below a key, or an empty object for null.

    Raises:
        Unlike: the value is not an object.
    """
    section = theirs.get(key)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise Unlike(key, section, "must be an object or null.")
    return section


@dataclass(frozen=True)
class Twice:
    """Two keys of `config.json` with the same meaning. transformers prefers the first key."""

    primary: str
    other: str
    is_read: bool = True
    """Whether the other key is used if only that key is present."""
    default: Any = None
    """Value to use if the other key is ignored."""


@dataclass(frozen=True)
class Tensor:
    """A parameter and the Hugging Face tensors that store it.

    Rows with the same tensor name are concatenated along the tensor's first dim.
    """

    ours: str
    """`PART.PARAM` for a layer parameter, or the checkpoint name of a parameter outside layers."""
    theirs: str
    """Tensor name with `{layer}`, the layer's index in the network, and optionally `{expert}`."""
    dims: str
    """Einops pattern from our dims to theirs: `d n h -> (n h) d`. A dim that is missing on the
    right is `{expert}`."""
    interleaved: bool = False
    """Whether the rows alternate along the tensor's last dim instead of its first dim."""


@dataclass(frozen=True)
class Whole:
    """A larger model that contains this model as a component. Only imports use it."""

    architecture: str
    section: str
    """Key of `config.json` with the component's config."""
    model_type: str
    other_tensors: tuple[str, ...]
    """Patterns of the tensor names of the other components."""


@dataclass(frozen=True)
class HuggingFace:
    """A class of transformers that is equivalent to a family."""

    architecture: str
    model_type: str
    keys: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    unused: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of the names of tensors that some releases saved but never read."""
    containers: tuple[Whole, ...] = ()
    mtp_tensors: tuple[Tensor, ...] = ()
    """Tensors of multi-token prediction layers in addition to the tensors of ordinary layers. The
    `{layer}` index continues after the network's layers. Empty if the class has no such layers."""
    copies: tuple[tuple[str, str], ...] = ()
    """(parameter, tensor) pairs for tensors that a multi-token prediction layer duplicates."""
    duplicate_keys: tuple[Twice, ...] = ()
    """Pairs of keys with the same meaning."""

    def names(self) -> frozenset[str]:
        """Return the keys of `config.json` that the table handles."""
        named = (name for row in self.keys for name in row.names)
        return frozenset(named) | {pair.other for pair in self.duplicate_keys}


def written(keys: Iterable[Row], ours: Ours) -> dict[str, Any]:
    """Return the content of `config.json` for our values.

    Raises:
        Unlike: transformers cannot represent a value.
    """
    params: dict[str, Any] = {}
    for row in keys:
        for name, value in row.write(ours).items():
            before = params.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}  # merges entries of different layer types
            params[name] = value
    return params
