"""What the file of a model family declares, and the keys that it alone reads. No jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from maxpipe.errors import Finding
from maxpipe.models.bounds import Bound
from maxpipe.models.config import ModelConfig
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.spec import Model, Part


@dataclass(frozen=True)
class Family:
    """A model family: a file in `maxpipe.models`."""

    name: str
    """Value of `model.family`, and name of its section of keys below `model`."""
    section: type
    """Frozen dataclass with the keys that only this family reads; each has a default."""
    describe: Callable[[ModelConfig], Model]
    """The model of a config that satisfies every rule."""
    bounds: tuple[Bound, ...] = ()
    """Ranges of the numbers in its section."""
    rules: Callable[[ModelConfig], Iterable[Finding]] = lambda _: ()
    """What is wrong with a config of which each number is within its range."""
    reporting: tuple[type[Part], ...] = ()
    """Classes of its parts with `summaries`, for the list of all that runs write."""
    huggingface: tuple[HuggingFace, ...] = ()
    """Classes of transformers that compute the same. An export takes the first that can say what a
    config says."""


_Section = TypeVar("_Section")


def own_keys(config: ModelConfig, section: type[_Section]) -> _Section:
    """The keys of the config's family, whose section this is."""
    own = section() if config.own is None else config.own
    assert isinstance(own, section), f"{config.family} has other keys than {own}"
    return own
