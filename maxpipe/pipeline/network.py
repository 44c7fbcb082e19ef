"""The network that the engine runs, and its execution plan on a ring of stages."""

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
    """Functions and constants of a stack of layers between an embedding and a loss head.

    Parameters are `{embedding [V, D], layers {type: ... [R, P, L, ...]}, final_norm, head [D, V]}`.
    Without `head`, the embedding table is the head. Prologue layers are in `outside {type: ...}`,
    stacked `[layers, ...]`. MTP heads are in `ahead`, stacked `[heads, ...]`.
    """

    layers: dict[str, LayerFn]
    """Layer function of each layer type."""
    norm: Callable[[Tree, jax.Array], jax.Array]
    """Norm before the loss head."""
    vocab_size: int
    compute_dtype: jnp.dtype
    loss_weights: dict[str, float] = field(default_factory=dict)
    """Weight with which each auxiliary loss of the layers is added to the objective's loss."""
    embed_scale: float = 1.0
    """Factor applied to the embeddings."""
    logit_scale: float = 1.0
    """Factor applied to the logits."""
    final_logit_softcapping: float = 0.0
    """Soft cap: scaled logits become `cap * tanh(logits / cap)`. 0: no cap."""
    loss_block_tokens: int = 0
    """Number of tokens per device whose logits are in memory at once. 0: all tokens of a
    microbatch."""
    mtp: MtpFns | None = None
    """MTP heads, computed in training only."""
    num_sources: int = 0
    """Number of data sources with separate losses. `source_ids` in the batch contains the source of
    each sequence (-1 for none). 0: all sequences have one source."""

    objective: Objective = field(default_factory=CrossEntropy)
    """Objective that training minimizes."""

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the summed loss and reports: `[R]`, or `[R, sources]` with several sources."""
        sources = (self.num_sources,) if self.num_sources else ()
        return (1 + len(self.objective.report_names), *sources)

    @property
    def has_mtp_layers(self) -> bool:
        """Whether the MTP heads are layers, which also return losses and statistics."""
        return isinstance(self.mtp, MtpLayerFns)


@dataclass(frozen=True)
class PipelinePlan:
    """Execution plan of a network on a ring of stages."""

    network: Network
    layout: LayerLayout
    weight_gather: GatherMode
    remat_policy: RematPolicy
    idle: Idle
    weight_shardings: Tree
    """The `WeightSharding` of each parameter."""

    @cached_property
    def trainable(self) -> Tree:
        """Whether each parameter has a gradient."""
        return jax.tree.map(lambda sharding: sharding.trainable, self.weight_shardings)

    @property
    def prologue_gather_mode(self) -> GatherMode:
        """Gather mode of weights outside the ring, which are not in the prefetch window."""
        return "step" if self.weight_gather == "visit" else self.weight_gather

    def has_mtp(self, schedule: Schedule) -> bool:
        """Whether a step with this schedule computes MTP heads."""
        return schedule.trains and self.network.mtp is not None
