"""Declarations of the keys of objectives beyond the next token, as `schema.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """How a model learns which of two responses is preferred. Read with
    `train.objective=preference`.
    """

    loss: Literal["dpo", "ipo", "orpo"] = "dpo"
    """`dpo` (arXiv:2305.18290) makes the chosen response likelier and the rejected one less likely,
    both beside the reference: the weights that the run starts from. `ipo` (arXiv:2310.12036)
    wants a margin and no more. `orpo` (arXiv:2403.07691) has no reference: it adds the odds of the
    two responses to the cross-entropy of the chosen one."""
    beta: float = 0.1
    """How much a distance from the reference costs: the beta of `dpo`, the tau of `ipo`. Rewards in
    the metrics are in its unit. Not read by `orpo`."""
    label_smoothing: float = 0.0
    """Share of the pairs that are taken to be the wrong way round, for `dpo`
    (arXiv:2306.15479)."""
    length_normalised: Literal["auto", "on", "off"] = "auto"
    """Whether the log-probability of a response is the mean over its tokens in place of the sum.
    `auto`: the mean for `ipo` and `orpo`, the sum for `dpo`."""
    odds_weight: float = 0.1
    """What the odds count beside the cross-entropy, the lambda of `orpo`. Read by it alone."""
