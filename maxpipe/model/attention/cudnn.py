"""Attention by cuDNN's fused kernel, for NVIDIA GPUs."""

from __future__ import annotations

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from maxpipe.model.attention.interface import Mask


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    mask: Mask,
) -> Float[Array, "B T N H"]:
    """Attention in one kernel; what it cannot do is in `parts.attention.CANNOT`."""
    assert not mask.soft_cap and mask.sinks is None, "refused with the config"
    tokens, keys = query.shape[1], key.shape[1]
    square = mask.causal and mask.in_order
    seen = mask.seen(0, tokens, keys, causal=mask.causal and not square)
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=seen,
        is_causal=square,
        scale=mask.scale,
        implementation="cudnn",
    )
    return checkpoint_name(mixed, "context")
