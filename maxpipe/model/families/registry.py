"""All model families, and the description of the model that a config chooses."""

from __future__ import annotations

from functools import lru_cache

from maxpipe.config.schema import ModelConfig
from maxpipe.model.families.llama import Llama
from maxpipe.model.spec import Model


@lru_cache(maxsize=64)
def describe(config: ModelConfig) -> Model:
    """The model of a config: one object for equal configs, as what is counted of it is cached."""
    return Llama().describe(config)
