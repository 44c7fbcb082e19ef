"""Which objective a config asks for: the one place that chooses."""

from __future__ import annotations

from maxpipe.config.schema import Config
from maxpipe.objectives import preference
from maxpipe.pipeline.objective import CrossEntropy, Objective


def objective_of(config: Config) -> Objective:
    """What training minimises."""
    match config.train.objective:
        case "pretrain":
            return CrossEntropy()
        case "preference":
            return preference.of_config(config.preference, config.data.pairs_per_row)
