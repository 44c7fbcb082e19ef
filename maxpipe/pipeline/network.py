"""What the engine is given: a network, and how it runs on a ring of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.mtp import MtpFns, MtpLayerFns
from maxpipe.pipeline.objective import CrossEntropy, Objective
from maxpipe.pipeline.remat import LayerFn, RematPolicy
from maxpipe.pipeline.slots import Idle
from maxpipe.pipeline.weights import GatherMode
from maxpipe.schedule.table import Schedule

Tree = Any


@dataclass(frozen=True)
class Network:
    """What the engine runs: a stack of layers between an embedding and a loss head.

    Parameters are `{embedding [V, D], layers {kind: ... [R, P, L, ...]}, final_norm, head [D, V]}`;
    without `head` the embedding table is used. Layers in front of the ring are in
    `outside {kind: ...}`, stacked `[layers, ...]`, and parameters of heads ahead in `ahead`,
    stacked `[heads, ...]`.
    """

    layers: dict[str, LayerFn]
    """By kind."""
    norm: Callable[[Tree, jax.Array], jax.Array]
    """The norm in front of the loss head."""
    vocab_size: int
    compute_dtype: jnp.dtype
    loss_weights: dict[str, float] = field(default_factory=dict)
    """What each of the layers' losses counts beside the objective's."""
    embed_scale: float = 1.0
    """Factor of what the embedding looks up."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    final_logit_softcapping: float = 0.0
    """Scaled logits become `cap * tanh(logits / cap)`. 0: as they are."""
    loss_block_tokens: int = 0
    """Tokens on a device whose logits are in memory at once. 0: those of a microbatch."""
    mtp: MtpFns | None = None
    """Heads for tokens further ahead, which only training computes."""
    num_sources: int = 0
    """Sources of rows of which each has a loss of its own; `source_ids` of a batch say which each
    row is of, -1 none. 0: rows are all of one."""

    objective: Objective = field(default_factory=CrossEntropy)
    """What is minimised."""

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Of the loss and the objective's reports, of each source if there are several."""
        sources = (self.num_sources,) if self.num_sources else ()
        return (1 + len(self.objective.report_names), *sources)

    @property
    def has_mtp_layers(self) -> bool:
        """Whether they are layers, which report what layers do."""
        return isinstance(self.mtp, MtpLayerFns)


@dataclass(frozen=True)
class PipelinePlan:
    """How a network runs on a ring of stages."""

    network: Network
    layout: LayerLayout
    weight_gather: GatherMode
    remat_policy: RematPolicy
    idle: Idle
    weight_shardings: Tree
    """For each parameter its `WeightSharding`."""

    @cached_property
    def trainable(self) -> Tree:
        """For each parameter whether it has a gradient."""
        return jax.tree.map(lambda division: division.trainable, self.weight_shardings)

    @property
    def prologue_gather_mode(self) -> GatherMode:
        """When weights outside the ring are gathered: no window holds them."""
        return "step" if self.weight_gather == "visit" else self.weight_gather

    def has_mtp(self, schedule: Schedule) -> bool:
        """Whether a step by this schedule has heads for tokens further ahead."""
        return schedule.trains and self.network.mtp is not None
