"""Which objective a config asks for: the one place that chooses."""

from __future__ import annotations

from maxpipe.config.schema import Config
from maxpipe.objectives.distill import Distill
from maxpipe.pipeline.objective import CrossEntropy, Objective


def objective_of(config: Config) -> Objective:
    """What training minimises."""
    if config.train.objective == "distill":
        distill = config.distill
        return Distill(distill.direction, distill.temperature, distill.top_k, distill.weight)
    return CrossEntropy()
