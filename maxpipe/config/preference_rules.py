"""Rules for `train.objective=preference` and its data."""

from __future__ import annotations

from collections.abc import Iterator

from maxpipe.config.data_rules import named_sources
from maxpipe.config.rules import rule
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation


@rule("train.objective", "data.source", "data.chat", "data.mixture", "data.validation")
def _pairs_for_preferences(config: Config) -> Iterator[RuleViolation]:
    wants_pairs = config.train.objective == "preference"
    for section, each in named_sources(config):
        key, has_pairs = f"{section}.chat", each.chat == "pairs"
        if wants_pairs and not has_pairs:
            yield RuleViolation(
                key,
                "must be pairs with train.objective=preference, which compares two responses.",
                f"Set {key}=pairs, {section}.packing=best_fit, {section}.source=jsonl, and "
                f"{section}.path to records with prompt, chosen and rejected.",
            )
        if has_pairs and not wants_pairs:
            yield RuleViolation(
                key,
                f"must not be pairs with train.objective={config.train.objective}, which would "
                "also train on rejected responses.",
                f"Set train.objective=preference, or {key}=prompt and "
                f"{section}.response_field={each.chosen_field} to train on chosen responses only.",
            )


@rule("train.objective", "model.mtp_heads")
def _no_mtp_with_preferences(config: Config) -> Iterator[RuleViolation]:
    if config.train.objective == "preference" and config.model.mtp_heads:
        yield RuleViolation(
            "model.mtp_heads",
            "must be 0 with train.objective=preference: these heads would also train on rejected "
            "responses.",
            "Set model.mtp_heads=0.",
        )


@rule("preference.loss", "preference.length_normalised")
def _orpo_needs_length_normalisation(config: Config) -> Iterator[RuleViolation]:
    section = config.preference
    if section.loss == "orpo" and section.length_normalised == "off":
        yield RuleViolation(
            "preference.length_normalised",
            "must not be off with preference.loss=orpo: the odds of a full response are close to "
            "zero.",
            "Set preference.length_normalised=auto.",
        )


@rule("preference.loss", "preference.label_smoothing")
def _smoothed_labels(config: Config) -> Iterator[RuleViolation]:
    section = config.preference
    if section.loss != "dpo" and section.label_smoothing:
        yield RuleViolation(
            "preference.label_smoothing",
            f"is ignored with preference.loss={section.loss}.",
            "Set preference.label_smoothing=0, or preference.loss=dpo.",
        )
