"""Plug-in with a model family, an objective, a data source and a schedule.

Run it from the root of the repository, after reading this file:

    maxpipe train examples/plugin.yml plugins.allow_code=true
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config import plugins
from maxpipe.models import family
from maxpipe.models.config import Bound, ModelConfig
from maxpipe.models.layers.attention import Rope
from maxpipe.models.layers.mlp import MLP, RMSNorm
from maxpipe.models.spec import Branch, Dims, LayerType, Matmul, Model, Normal, Operation, Param
from maxpipe.nn.module import LayerContext, Output, SpecModule
from maxpipe.parallel.sharding import AxisRules, constrain
from maxpipe.pipeline.objective import CrossEntropy, Objective, Scores
from maxpipe.schedule.table import Action, Orders, Ring

# A model family: Llama with the MLP of Primer (arXiv:2109.08668), `relu(x W_up)**2 W_down`.


@dataclass(frozen=True)
class SquaredReluMLP(MLP):
    """MLP with a squared ReLU. The planner assumes the activation memory of a gated MLP."""

    @property
    def params(self) -> Mapping[str, Param]:
        """Return the two projections, with the logical axis of each dim."""
        embed, mlp = (self.d_model, "embed"), (self.d_mlp, "mlp")
        return {
            "up": Param((embed, mlp), Normal(self.d_model), linear=1),
            "down": Param((mlp, embed), Normal(self.d_mlp, self.out_gain), linear=1),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Return the array that `pipeline.saved_names` can select."""
        return {"up": ((self.d_mlp, "mlp"),)}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the matmuls, from which FLOPs are counted."""
        return Matmul("up"), Matmul("down")


class SquaredRelu(SpecModule):
    """Forward pass of `SquaredReluMLP`."""

    up: nnx.Param
    down: nnx.Param

    def __init__(self, part: SquaredReluMLP, rules: AxisRules):
        super().__init__(part)
        self.rules = rules

    def __call__(self, x: Array, context: LayerContext) -> Output:
        """Apply the MLP, `[B, T, D] -> [B, T, D]`."""
        up = checkpoint_name(x @ self.up[...].astype(x.dtype), "up")
        hidden = constrain(jnp.square(jax.nn.relu(up)), (None, None, "mlp"), self.rules)
        return Output(hidden @ self.down[...].astype(x.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrimerConfig:
    """Keys of the section `model.primer`."""

    branch_scale: float = 1.0
    """Factor by which the output of each branch is multiplied."""


def describe(config: ModelConfig) -> Model:
    """Return the model: one layer type with two branches."""
    scale = family.own_keys(config, PrimerConfig).branch_scale
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    mlp = SquaredReluMLP(config.d_model, config.d_mlp, family.residual_gain(config))
    parts = {"attention": family.attention(config, Rope(config.rope_theta)), "mlp": mlp}
    branches = [Branch(name, part, norm, scale=scale) for name, part in parts.items()]
    layers = ("layer",) * config.num_layers
    return Model({"layer": LayerType(tuple(branches))}, layers, family.ends(config, norm))


plugins.register_family(
    family.Family("primer", PrimerConfig, describe, (Bound("branch_scale", 1.0, 0.0, 100.0),)),
    {SquaredReluMLP: SquaredRelu},
)


@dataclass(frozen=True)
class Focal(Objective):
    """Focal loss (arXiv:1708.02002): `-(1 - p)**gamma log p` for each target token."""

    gamma: float = 2.0
    report_names: ClassVar[tuple[str, ...]] = ("cross_entropy",)

    @property
    def eval_objective(self) -> Objective:
        """Return the objective of evaluations, which then report nats per token."""
        return CrossEntropy()

    def __call__(self, scores: Scores, inputs: Mapping[str, Array]) -> tuple[Array, Scores]:
        """Return the loss of each token, and its cross entropy as a metric."""
        (log_prob,) = scores
        return -((1.0 - jnp.exp(log_prob)) ** self.gamma) * log_prob, (-log_prob,)


plugins.register_objective("focal", Focal)


def paragraphs(files: list[str], seed: int) -> list[str]:
    """Return the paragraphs of all text files as documents."""
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    return [part for text in texts for part in text.split("\n\n") if part.strip()]


plugins.register_source("paragraphs", paragraphs)


def thrifty(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Return 1F1B orders that save the activations of at most P chunks per stage."""
    orders: Orders = []
    for stage in range(ring.num_stages):
        warmup = min(num_microbatches, ring.num_stages - stage)
        order = [Action("F", microbatch, 0) for microbatch in range(warmup)]
        for microbatch in range(num_microbatches):
            order.append(Action("B", microbatch, 0))
            if warmup + microbatch < num_microbatches:
                order.append(Action("F", warmup + microbatch, 0))
        orders.append(order)
    return orders


plugins.register_schedule("thrifty", thrifty, summary="1F1B with a short warm-up", repeats=1)
