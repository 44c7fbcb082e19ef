"""Which objective a config asks for: the one place that chooses."""

from __future__ import annotations

from maxpipe.config.schema import Config
from maxpipe.pipeline.objective import CrossEntropy, Objective


def objective_of(config: Config) -> Objective:
    """What training minimises."""
    del config
    return CrossEntropy()
