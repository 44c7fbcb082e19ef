"""Checks for training only, beyond those for forecasts and compiled steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from maxpipe.config.check import DEFAULT, where
from maxpipe.config.data import is_synthetic, paths_of
from maxpipe.config.data_rules import named_sources
from maxpipe.config.ranges import BYTES_VOCABULARY
from maxpipe.config.schema import Config
from maxpipe.errors import Problem

LARGEST_FOR_BYTES = 4096
"""Ids of a model that is trained on bytes: more than 259 where shards of the vocabulary have to
be even. Vocabularies of public models begin at 30,000."""


def check_training(
    config: Config, origins: Mapping[str, str], skip: Collection[str] = ()
) -> list[Problem]:
    """Finds a valid config that should not be trained: it would not be on the text that is meant.

    Forecasts and compiled steps need neither text nor tokenizer.
    """
    wrong = not {"data.source", "data.mixture", "data.validation"}.isdisjoint(skip)
    unread = [] if wrong else unread_path(config, origins)
    return [
        *unread,
        *_built_in_for_a_public_model(config, origins, skip),
        *_without_base(config, origins, skip),
    ]


def _without_base(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    """Adapters beside random weights learn nothing of use, and could not be used without them."""
    key = "checkpoint.restore_from"
    if not config.adapter.rank or config.checkpoint.restore_from or key in skip:
        return []
    rule = f"must name the weights that adapters (adapter.rank={config.adapter.rank}) belong to."
    action = f"Set {key}=hf:DIR, the folder of a public model, or RUN@STEP."
    return [Problem(where(key, origins), "''", rule, action)]


def unread_path(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """A path that the source does not read: the run would be on other text than the user's."""
    problems = []
    for section, each in named_sources(config):
        if each.source in ("corpus", "synthetic") and (paths := paths_of(each)):
            key = f"{section}.path" if each.path else f"{section}.paths"
            rule = f"is not read with {section}.source={each.source}."
            action = f"Set {section}.source=text, or jsonl, parquet or another that reads it, or "
            action += f"leave {key} out."
            problems.append(Problem(where(key, origins), ", ".join(paths), rule, action))
    return problems


def _built_in_for_a_public_model(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    """A model with its own vocabulary on the built-in text or tokenizer would waste its time."""
    vocabulary = config.model.vocab_size
    if not {"model.vocab_size", "tokenizer.kind", "data.source"}.isdisjoint(skip):
        return []
    prompts = config.train.objective == "grpo"
    if vocabulary <= LARGEST_FOR_BYTES or is_synthetic(config.data):
        return []
    problems = []
    if config.tokenizer.kind == "bytes":
        problems.append(
            Problem(
                where("tokenizer.kind", origins),
                "bytes",
                f"has {BYTES_VOCABULARY} ids, and model.vocab_size is {vocabulary}: a model with "
                "such a vocabulary needs its tokenizer.",
                "Set tokenizer.kind=auto and tokenizer.path=tokenizer.json (the model's own, or "
                f"its folder), or model.vocab_size={BYTES_VOCABULARY} to train on bytes.",
            )
        )
    if not prompts and origins.get("data.source", DEFAULT) == DEFAULT and not config.data.mixture:
        problems.append(
            Problem(
                where("data.source", origins),
                config.data.source,
                "is text for first tries, the source files of Python's library, and was not "
                f"chosen for this model, whose vocabulary has {vocabulary} ids.",
                "Set data.source=text and data.path=data/*.txt (your own), or data.source=corpus "
                "if you mean it.",
            )
        )
    return problems
