"""Functions and constants of the network that a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.pipeline.mtp import MtpFns, MtpLayerFns
from maxpipe.pipeline.objective import CrossEntropy, Objective
from maxpipe.pipeline.remat import LayerFn

Tree = Any


@dataclass(frozen=True)
class Network:
    """Functions and constants of a network: an embedding, a stack of layers and a loss head.

    Parameters are `{embedding [V, D], layers {type: ... [R, P, L, ...]}, final_norm, head [D, V]}`.
    If `head` is missing, the embedding table is used as the head. Prologue layers are stored in
    `outside {type: ...}`, stacked as `[layers, ...]`. MTP heads are stored in `ahead`, stacked as
    `[heads, ...]`.
    """

    layers: dict[str, LayerFn]
    """Function that applies a layer, for each layer type."""
    norm: Callable[[Tree, jax.Array], jax.Array]
    """Final norm, applied before the output projection."""
    vocab_size: int
    compute_dtype: jnp.dtype
    loss_weights: dict[str, float] = field(default_factory=dict)
    """Weight with which each auxiliary loss of the layers is added to the objective's loss."""
    embed_scale: float = 1.0
    """Scaling factor applied to the embeddings."""
    logit_scale: float = 1.0
    """Scaling factor applied to the logits."""
    final_logit_softcapping: float = 0.0
    """Soft cap: scaled logits become `cap * tanh(logits / cap)`. 0 disables the cap."""
    loss_block_tokens: int = 0
    """Number of tokens per device whose logits are in memory at the same time. If 0, all tokens of
    a microbatch are processed together."""
    mtp: MtpFns | None = None
    """MTP heads, which are computed only in training."""
    num_sources: int = 0
    """Number of data sources for which losses are computed separately. The batch array `source_ids`
    contains each sequence's source index (-1 for none). If 0, all sequences come from one
    source."""

    objective: Objective = field(default_factory=CrossEntropy)
    """Objective that training minimizes."""
    num_carried: int = 0
    """Number of entries per token that follow the residual stream in the input and output of each
    layer."""
    num_streams: int = 1
    """Number of residual streams."""
    reduce: Callable[[Tree, jax.Array], jax.Array] = lambda _, x: x
    """Function that maps the last layer's output to the input of the final norm. The parameters are
    those of `norm`."""
    has_image_gradients: bool = False
    """Whether a training step returns the gradient of the batch array `image_features`."""

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Return the shape of the summed loss and metrics: `[R]`, or `[R, sources]` with several
        sources.
        """
        sources = (self.num_sources,) if self.num_sources else ()
        return (1 + len(self.objective.report_names), *sources)

    @property
    def has_mtp_layers(self) -> bool:
        """Return whether the MTP heads are layers, which also return losses and statistics."""
        return isinstance(self.mtp, MtpLayerFns)
