"""What a config must say before it is trained, beyond what forecasts and compiled steps need."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from maxpipe.config.check import DEFAULT, where
from maxpipe.config.ranges import BYTES_VOCABULARY
from maxpipe.config.schema import Config
from maxpipe.errors import Problem

LARGEST_FOR_BYTES = 4096
"""Ids of a model that is trained on bytes: more than 259 where shards of the vocabulary have to
be even. Vocabularies of public models begin at 30,000."""


def check_training(
    config: Config, origins: Mapping[str, str], skip: Collection[str] = ()
) -> list[Problem]:
    """What keeps a sound config from being trained: a model for real text that is given none.

    Forecasts and compiled steps need neither text nor tokenizer; a run that took the built-in ones
    for a model with a vocabulary of its own would learn nothing of use, for as long as it is let.
    """
    vocabulary = config.model.vocab_size
    if not {"model.vocab_size", "tokenizer.kind", "data.source"}.isdisjoint(skip):
        return []
    if vocabulary <= LARGEST_FOR_BYTES or config.data.source == "synthetic":
        return []
    problems = []
    if config.tokenizer.kind == "bytes":
        problems.append(
            Problem(
                where("tokenizer.kind", origins),
                "bytes",
                f"has {BYTES_VOCABULARY} ids, and model.vocab_size is {vocabulary}: a model with "
                "such a vocabulary needs its tokenizer.",
                "Set tokenizer.kind=huggingface and tokenizer.path=tokenizer.json (the model's "
                f"own), or model.vocab_size={BYTES_VOCABULARY} to train on bytes.",
            )
        )
    if origins.get("data.source", DEFAULT) == DEFAULT:
        problems.append(
            Problem(
                where("data.source", origins),
                config.data.source,
                "is text for first tries, the source files of Python's library, and nobody has "
                f"chosen it for this model, whose vocabulary has {vocabulary} ids.",
                "Set data.source=text and data.path=data/*.txt (your own), or data.source=corpus "
                "if you mean it.",
            )
        )
    return problems
