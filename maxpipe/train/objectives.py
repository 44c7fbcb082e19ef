"""Which objective a config asks for: the one place that chooses."""

from __future__ import annotations

from maxpipe.config.schema import Config
from maxpipe.config.tuning_schema import GrpoConfig
from maxpipe.objectives.distill import Distill
from maxpipe.objectives.policy import Policy, PolicyNearReference
from maxpipe.pipeline.objective import CrossEntropy, Objective


def objective_of(config: Config) -> Objective:
    """What training minimises."""
    if config.train.objective == "distill":
        distill = config.distill
        return Distill(distill.direction, distill.temperature, distill.top_k, distill.weight)
    if config.train.objective == "grpo":
        return policy_of(config.grpo)
    return CrossEntropy()


def policy_of(grpo_config: GrpoConfig) -> Policy:
    """That of rewarded completions."""
    clip = grpo_config.clip, grpo_config.clip_high or grpo_config.clip
    if not grpo_config.kl:
        return Policy(*clip, grpo_config.temperature)
    return PolicyNearReference(*clip, grpo_config.temperature, kl=grpo_config.kl)
