"""All model families: what `model.family` may be. To add one, write its file and name it here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from maxpipe.config.schema import ModelConfig
from maxpipe.model.families import gemma3, llama
from maxpipe.model.frozen import freeze
from maxpipe.model.spec import Family, Model

FAMILIES: Mapping[str, Family] = {each.name: each for each in (llama.FAMILY, gemma3.FAMILY)}


@lru_cache(maxsize=64)
def describe(config: ModelConfig) -> Model:
    """The model of a config that satisfies every rule.

    One object for equal configs, as what is counted of it is cached.
    """
    return freeze(FAMILIES[config.family].describe(config), config.frozen)
