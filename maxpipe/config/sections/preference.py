"""Config section `preference`: losses for `train.objective=preference`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import add_ranges, rule
from maxpipe.config.sections.data import named_sources
from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import LARGEST, Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """Preference optimization on pairs of responses. Ignored unless
    `train.objective=preference`.
    """

    loss: Literal["dpo", "ipo", "orpo"] = "dpo"
    """Loss on a pair of responses. `dpo` (arXiv:2305.18290) increases the likelihood of the chosen
    response relative to the rejected response. Both likelihoods are measured relative to a
    reference model, which is the model at the start of the run. `ipo` (arXiv:2310.12036) regresses
    the difference of the two log-ratios to a fixed margin. `orpo` (arXiv:2403.07691) needs no
    reference model, and adds an odds-ratio term to the cross-entropy of the chosen response."""
    beta: float = 0.1
    """Strength of the penalty for deviating from the reference model: beta in the DPO paper, tau in
    the IPO paper. The reward metrics are also scaled by this value. Ignored by `orpo`."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels (arXiv:2306.15479). Only for `dpo`."""
    length_normalised: Literal["auto", "on", "off"] = "auto"
    """Use the mean log-probability over the tokens of a response instead of the sum. `auto` uses
    the mean for `ipo` and `orpo`, and the sum for `dpo`."""
    odds_weight: float = 0.1
    """Weight of the odds-ratio term relative to the cross-entropy (lambda in the ORPO paper).
    Ignored unless `preference.loss` is `orpo`."""


add_ranges(
    Bound(
        "preference.beta",
        0.1,
        0,
        LARGEST,
        "the value must fit in float32",
        low_is_inside=False,
    ),
    Bound(
        "preference.label_smoothing",
        0.1,
        0,
        0.5,
        "at 0.5, labels carry no information",
        high_is_inside=False,
    ),
    Bound("preference.odds_weight", 0.1, 0, LARGEST, "the value must fit in float32"),
)


@rule("train.objective", "data.source", "data.chat", "data.mixture", "data.validation")
def _pairs_for_preferences(config: Config) -> Iterator[RuleViolation]:
    wants_pairs = config.train.objective == "preference"
    for section, each in named_sources(config):
        key, has_pairs = f"{section}.chat", each.chat == "pairs"
        if wants_pairs and not has_pairs:
            yield RuleViolation(
                Code.CFG_CONFLICT,
                key,
                "must be pairs with train.objective=preference, which compares two responses.",
                f"Set {key}=pairs, {section}.packing=best_fit, {section}.source=jsonl, and "
                f"{section}.path to records with prompt, chosen and rejected.",
            )
        if has_pairs and not wants_pairs:
            yield RuleViolation(
                Code.CFG_CONFLICT,
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
            Code.CFG_CONFLICT,
            "model.mtp_heads",
            "must be 0 with train.objective=preference: MTP heads would also train on rejected "
            "responses.",
            "Set model.mtp_heads=0.",
        )


@rule("preference.loss", "preference.length_normalised")
def _orpo_needs_length_normalisation(config: Config) -> Iterator[RuleViolation]:
    section = config.preference
    if section.loss == "orpo" and section.length_normalised == "off":
        yield RuleViolation(
            Code.CFG_CONFLICT,
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
            Code.CFG_IGNORED,
            "preference.label_smoothing",
            f"is ignored with preference.loss={section.loss}.",
            "Set preference.label_smoothing=0, or preference.loss=dpo.",
        )
