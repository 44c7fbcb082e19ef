"""Which objective a config asks for: the one place that chooses."""

from __future__ import annotations

from maxpipe.config.schema import Config
from maxpipe.config.tuning_schema import GrpoConfig
from maxpipe.objectives import preference
from maxpipe.objectives.distill import Distill
from maxpipe.objectives.policy import Policy, PolicyNearReference
from maxpipe.pipeline.objective import CrossEntropy, Objective


def objective_of(config: Config) -> Objective:
    """What training minimises."""
    match config.train.objective:
        case "pretrain" | "sft":
            return CrossEntropy()
        case "preference":
            return preference.of_config(config.preference, config.data.pairs_per_row)
        case "distill":
            distill = config.distill
            return Distill(distill.direction, distill.temperature, distill.top_k, distill.weight)
        case "grpo":
            return policy_of(config.grpo)


def policy_of(grpo_config: GrpoConfig) -> Policy:
    """That of rewarded completions."""
    clip = grpo_config.clip, grpo_config.clip_high or grpo_config.clip
    if not grpo_config.kl:
        return Policy(*clip, grpo_config.temperature)
    return PolicyNearReference(*clip, grpo_config.temperature, kl=grpo_config.kl)
