"""How a family of models is written in Hugging Face folders: tables, without jax.

A family has one table of keys and one of tensors. Both are read in both directions: by an import
from left to right, by an export from right to left. `maxpipe.huggingface` has the code that reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Theirs = Mapping[str, Any]
"""The content of config.json."""

Ours = Mapping[str, Any]
"""Values by key below `model`, such as `num_heads` and `llama.rope_factor`."""


class Unlike(ValueError):
    """A value that the other side has nothing for: what was given where, and the rule.

    `action` is what to do about it, if it is something special.
    """

    def __init__(self, key: str, given: Any, rule: str, action: str = ""):
        super().__init__(f"{key} = {given!r} {rule}")
        self.key, self.value, self.rule, self.action = key, given, rule, action


class Row(Protocol):
    """A row of the table of keys."""

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of config.json that it accounts for."""
        ...

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """What config.json says in our keys; `ours` is what the rows before have found.

        Raises:
            Unlike: it says something that the family cannot compute.
        """
        ...

    def write(self, ours: Ours) -> Theirs:
        """The way back.

        Raises:
            Unlike: they cannot say it.
        """
        ...


@dataclass(frozen=True)
class Key:
    """One key on both sides."""

    theirs: str
    ours: str
    default: Any = None
    """What transformers takes where config.json lacks it, or a function of our values so far."""
    zero_means: str = ""
    """Another key of ours that a 0 of this one stands for."""
    is_integer: bool = False
    """Whether they have it as a whole number, and we do not."""
    also: str = ""
    """Another name of theirs, which some releases of readers know; both are written."""

    @property
    def names(self) -> tuple[str, ...]:
        """One, or both."""
        return (self.theirs, self.also) if self.also else (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """The value, or the default."""
        found = theirs.get(self.theirs)
        if found is None and self.also:
            found = theirs.get(self.also)
        if found is None:
            found = self.default(ours) if callable(self.default) else self.default
        if found is None:
            raise Unlike(self.theirs, None, "is missing, and has no default.")
        if self.zero_means and found == ours[self.zero_means]:
            found = 0
        return {self.ours: found}

    def write(self, ours: Ours) -> Theirs:
        """The value."""
        found = ours[self.ours]
        if self.zero_means and not found:
            found = ours[self.zero_means]
        if self.is_integer and found != (found := int(found)):
            raise Unlike(f"model.{self.ours}", ours[self.ours], "must be a whole number.")
        return dict.fromkeys(self.names, found)


@dataclass(frozen=True)
class Fixed:
    """A key of theirs with the only values that the family computes."""

    theirs: str
    values: tuple[Any, ...]
    """The first is written."""
    default: Any = None
    """As `Key.default`."""

    @property
    def names(self) -> tuple[str, ...]:
        """One."""
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Nothing of ours."""
        found = theirs.get(self.theirs)
        found = self.default if found is None else found
        # 0 equals false, and 1 equals true.
        if not any(
            found == each and (type(found) is bool) == (type(each) is bool) for each in self.values
        ):
            allowed = " or ".join("null" if each is None else repr(each) for each in self.values)
            raise Unlike(self.theirs, found, f"must be {allowed}: nothing else is computed.")
        return {}

    def write(self, ours: Ours) -> Theirs:
        """The first value; for null nothing, as some keys mean something by being there."""
        return {} if self.values[0] is None else {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Only:
    """A key of ours that they have none for, with the one value that they compute."""

    ours: str
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """The value."""
        return {self.ours: self.value}

    def write(self, ours: Ours) -> Theirs:
        """Nothing of theirs."""
        if ours[self.ours] != self.value:
            raise Unlike(f"model.{self.ours}", ours[self.ours], f"must be {self.value!r}.")
        return {}


@dataclass(frozen=True)
class Kept:
    """A key that changes no logits: an export has it as the imported config.json had it."""

    theirs: str

    @property
    def names(self) -> tuple[str, ...]:
        """One."""
        return (self.theirs,)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Nothing of ours."""
        return {}

    def write(self, ours: Ours) -> Theirs:
        """Nothing: `maxpipe.huggingface` copies it."""
        return {}


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: `rope_parameters`, and as written before `rope_theta`, `rope_scaling`."""

    theta: str
    """Our key."""
    default: float
    """Base that transformers takes where there is none."""
    scalings: Mapping[str, tuple[Row, ...]]
    """By `rope_type` the rows for what stands beside it."""
    unscaled: Ours
    """Our values where the type is `default`."""
    select_type: Callable[[Ours], str] = lambda ours: "default"
    """The `rope_type` of a model of ours."""
    layers: str = ""
    """Type of layers, where `rope_parameters` has entries by type."""
    legacy_theta_key: str = "rope_theta"
    """Where the base was written before."""
    legacy_type_key: str = "rope_type"
    """Where the type was written before."""
    top_level_keys: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """By `rope_type` rows for keys of config.json itself."""
    defaults: Theirs = field(default_factory=dict)
    """What transformers takes where nothing is said but perhaps the base."""
    default_max_positions: int = 0
    """What transformers takes for `max_position_embeddings` where there is none."""
    default_original_positions: int = 0
    """The same for `original_max_position_embeddings` of config.json itself; 0: nothing."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of both spellings."""
        return (self.legacy_theta_key, "rope_scaling", "rope_parameters")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Base and scaling, as `maxpipe.huggingface.normalize_config` leaves `rope_parameters`."""
        said = an_object(theirs, "rope_parameters")
        if self.layers:
            said = an_object(said, self.layers)
        found, kind = {self.theta: said["rope_theta"]}, said["rope_type"]
        if kind != "default" and (not isinstance(kind, str) or kind not in self.scalings):
            known = " or ".join(repr(each) for each in ("default", *self.scalings))
            raise Unlike("rope_type", kind, f"must be {known}.")
        if kind == "default":
            found |= dict(self.unscaled)
        length = theirs.get("max_position_embeddings")
        lengths = {} if length is None else {"max_position_embeddings": length}
        for row in (*self.scalings.get(kind, ()), *self.top_level_keys.get(kind, ())):
            found |= row.read({**lengths, **said}, ours)
        return found

    def write(self, ours: Ours) -> Theirs:
        """Both spellings: releases of readers know the one or the other."""
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
    """The object below a key, empty for null.

    Raises:
        Unlike: something else is there.
    """
    found = theirs.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Unlike(key, found, "must be an object or null.")
    return found


@dataclass(frozen=True)
class Twice:
    """Two keys of config.json that state one value: transformers uses the first if both do."""

    primary: str
    other: str
    is_read: bool = True
    """Whether the other one counts where it is alone."""
    default: Any = None
    """What counts instead where it does not."""


@dataclass(frozen=True)
class Tensor:
    """A parameter of ours, and the tensors of theirs that it is in.

    Rows with the same name are parts of one tensor, one after the other along its first dim.
    """

    ours: str
    """`PART.PARAM` of a layer, or the name in checkpoints of one outside layers."""
    theirs: str
    """Name with `{layer}`, the layer's number in the network, and perhaps `{expert}`."""
    dims: str
    """Our dims and theirs: `d n h -> (n h) d`. One that is missing on the right is `{expert}`."""
    interleaved: bool = False
    """Whether the parts of the tensor alternate along its last dim, not along its first."""


@dataclass(frozen=True)
class Whole:
    """A larger model that this one is a part of; only an import reads it."""

    architecture: str
    section: str
    """Key of config.json with the part's config."""
    model_type: str
    other_tensors: tuple[str, ...]
    """Patterns of the names of its other parts' tensors."""


@dataclass(frozen=True)
class HuggingFace:
    """A class of transformers that computes what a family does."""

    architecture: str
    model_type: str
    keys: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    unused: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of the names of tensors that some releases saved and none reads."""
    containers: tuple[Whole, ...] = ()
    mtp_tensors: tuple[Tensor, ...] = ()
    """Of heads ahead that are layers: what they have besides the layer, whose rows are those of all
    layers. `{layer}` counts on behind the network. Empty: the class has none."""
    copies: tuple[tuple[str, str], ...] = ()
    """(parameter, tensor) of what such a layer's tensors have again."""
    duplicate_keys: tuple[Twice, ...] = ()
    """Keys that state one value."""

    def names(self) -> frozenset[str]:
        """Keys of config.json that the table accounts for."""
        named = (name for row in self.keys for name in row.names)
        return frozenset(named) | {each.other for each in self.duplicate_keys}


def written(keys: Iterable[Row], ours: Ours) -> dict[str, Any]:
    """config.json of our values.

    Raises:
        Unlike: they cannot say it.
    """
    found: dict[str, Any] = {}
    for row in keys:
        for name, value in row.write(ours).items():
            before = found.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}  # by type of layers
            found[name] = value
    return found
