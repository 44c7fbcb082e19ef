"""Checks for training only, beyond those for forecasts and compiled steps."""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping

from maxpipe.config.check import DEFAULT, error_location
from maxpipe.config.data_rules import named_sources
from maxpipe.config.data_sources import COLUMNS, is_synthetic, paths_of, section_of, train_sources
from maxpipe.config.eval_rules import check_eval_during_training
from maxpipe.config.rules import BYTES_VOCABULARY, format_value, value_of
from maxpipe.config.schema import Config
from maxpipe.config.translation import infer_source
from maxpipe.errors import ConfigError, Problem

LARGEST_FOR_BYTES = 4096
"""Ids of a model that is trained on bytes: more than 259 where shards of the vocabulary have to
be even. Vocabularies of public models begin at 30,000."""


def runs_teacher(config: Config) -> bool:
    """Whether a run has a teacher beside it, and not what one has said."""
    return config.train.objective == "distill" and bool(config.distill.teacher)


def check_training(
    config: Config, origins: Mapping[str, str], skip: Collection[str] = ()
) -> list[Problem]:
    """Finds a valid config that should not be trained: it would not be on the text that is meant.

    Forecasts and compiled steps need neither text nor tokenizer.
    """
    wrong = not {"data.source", "data.mixture", "data.validation"}.isdisjoint(skip)
    problems = [] if wrong else find_unused_path(config, origins)
    problems += [] if wrong else _check_sft_data(config, origins)
    problems += _check_evaluation(config, origins, skip)
    problems += _check_adapter_base(config, origins, skip)
    if {"train.steps", "train.tokens"}.isdisjoint(skip):
        problems += find_missing_length(config, origins)
    return problems + _check_vocabulary(config, origins, skip)


def find_missing_length(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """The problem of a run that ends at no step, which forecasts and data pages do not need."""
    if config.train.steps or config.train.tokens:
        return []
    rule = "must be more than 0 when train.tokens is 0: one of them is the length of the run."
    return [
        Problem(
            error_location("train.steps", origins),
            "0",
            rule,
            "Set train.steps=100, or train.tokens.",
        )
    ]


def check_length(config: Config, origins: Mapping[str, str]) -> None:
    """Raises ConfigError for a run that ends at no step."""
    if problems := find_missing_length(config, origins):
        raise ConfigError(problems)


def _check_evaluation(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    if not {"eval.tasks", "eval.batches", "data.mixture", "data.validation"}.isdisjoint(skip):
        return []
    return [
        Problem(error_location(key, origins), format_value(value_of(config, key)), text, action)
        for key, text, action in check_eval_during_training(config)
    ]


def _check_sft_data(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Documents that do not say what is trained, for an objective that is about nothing else."""
    if config.train.objective != "sft":
        return []
    problems = []
    for name, each in train_sources(config.data).items():
        if each.chat == "off":
            section = section_of(name)
            rule = "must be messages or prompt with train.objective=sft, which trains on answers: "
            rule += (
                f"documents of {section}.source={each.source} do not say which tokens those are."
            )
            records = f"{section}.source=jsonl, {section}.path=chats.jsonl (your own) and "
            records = "" if each.source in COLUMNS else records
            action = f"Set {records}{section}.chat=messages, or train.objective=pretrain to train "
            action += "on all tokens."
            problems.append(
                Problem(error_location(f"{section}.chat", origins), "off", rule, action)
            )
    return problems


def _check_adapter_base(
    config: Config, origins: Mapping[str, str], skip: Collection[str]
) -> list[Problem]:
    """Adapters beside random weights learn nothing of use, and could not be used without them."""
    key = "checkpoint.restore_from"
    if not config.adapter.rank or config.checkpoint.restore_from or key in skip:
        return []
    rule = f"must name the weights that adapters (adapter.rank={config.adapter.rank}) belong to."
    action = f"Set {key}=hf:DIR, the folder of a public model, or RUN@STEP."
    return [Problem(error_location(key, origins), "''", rule, action)]


def find_unused_path(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """A path that the source does not read: the run would be on other text than the user's."""
    problems = []
    for section, each in named_sources(config):
        if each.source in ("corpus", "synthetic") and (paths := paths_of(each)):
            key = f"{section}.path" if each.path else f"{section}.paths"
            rule = f"is not read with {section}.source={each.source}."
            missing = [path for path in paths if "://" not in path and not glob.glob(path)]
            if missing:
                rule = f"does not exist: {missing[0]}. It {rule}"
            kinds = {infer_source(path) for path in paths}
            source = kinds.pop() if len(kinds) == 1 else ""
            source = source or ("text" if missing else "")
            action = f"Set {section}.source={source}, or leave {key} out."
            if missing:
                action = f"Name files that exist, and set {section}.source={source}, or leave "
                action += f"{key} out."
            elif not source:
                action = f"Name files of one kind in {key}, such as '*.jsonl' with "
                action += f"{section}.source=jsonl, or leave {key} out."
            problems.append(Problem(error_location(key, origins), ", ".join(paths), rule, action))
    return problems


def _check_vocabulary(
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
                error_location("tokenizer.kind", origins),
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
                error_location("data.source", origins),
                config.data.source,
                "is text for first tries, the source files of Python's library, and was not "
                f"chosen for this model, whose vocabulary has {vocabulary} ids.",
                "Set data.source=text and data.path=data/*.txt (your own), or data.source=corpus "
                "if you mean it.",
            )
        )
    return problems
