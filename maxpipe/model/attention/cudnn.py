"""Attention by cuDNN's fused kernel, for NVIDIA GPUs.

jax partitions the kernel by a rule that fails in a program that is written per device over some
axes and automatic over others, as the pipeline's is: so each device calls it by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float

from maxpipe.model.attention import shards
from maxpipe.model.attention.interface import Mask
from maxpipe.parallel import stated
from maxpipe.parallel.per_device import on_shards, vary

_on_shards = partial(on_shards, states_types=True)

IMPLEMENTATION: Any = "cudnn"
"""Of `jax.nn.dot_product_attention`."""
_BACKWARD = 2.5
"""Products of the backward for each of the forward: the scores once more, and four gradients."""


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
    key, value = (shards.for_every_shard(each, query.shape[2]) for each in (key, value))
    # Marked out here, their gradients are summed where an input is the same on several devices.
    mixed = _attention(*vary((query, key, value, seen)), Call(square, mask.scale))
    return checkpoint_name(mixed, "context")


@dataclass(frozen=True)
class Call:
    """What a kernel is compiled for."""

    causal: bool
    scale: float | None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    seen: Bool[Array, "B 1 T S"],
    call: Call,
) -> Float[Array, "B T N H"]:
    """Differentiated by rules that each enter the devices' own program: see `on_shards`."""
    arrays, beside, _ = _specs(query)
    run = _on_shards(partial(_mix, call=call), (arrays, arrays, arrays, beside), arrays)
    return run(query, key, value, seen)


def _forward(
    query: Array, key: Array, value: Array, seen: Array, call: Call
) -> tuple[Array, tuple[Any, ...]]:
    arrays, beside, devices = _specs(query)
    _, heads = shards.axes_of(query)

    def run(query: Array, key: Array, value: Array, seen: Array) -> tuple[Array, Any]:
        # The kernel's unused gradient of it is typed as differing between heads.
        seen = lax.pcast(seen, heads, to="varying") if heads else seen
        mixed, pull = jax.vjp(
            lambda query, key, value: _mix(query, key, value, seen, call=call), query, key, value
        )
        # What the backward needs stays where it is: each device's behind that of the one before.
        return mixed, jax.tree.map(lambda x: x[None], pull)

    run = _on_shards(run, (arrays, arrays, arrays, beside), (arrays, devices))
    mixed, pull = run(query, key, value, seen)
    return mixed, (mixed, pull)


def _backward(call: Call, saved: tuple[Any, ...], d_mixed: Array) -> tuple[Any, ...]:
    mixed, pull = saved
    arrays, _, devices = _specs(mixed)
    del mixed, call

    def run(pull: Callable[..., Any], d_mixed: Array) -> tuple[Array, Array, Array]:
        return jax.tree.map(lambda x: x[0], pull)(d_mixed)

    run = _on_shards(run, (devices, arrays), (arrays, arrays, arrays))
    return *run(pull, d_mixed), None


_attention.defvjp(_forward, _backward)


def _specs(query: Array) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """(of arrays with heads, of what is the same for all heads, of one array from each device)."""
    rows, heads = shards.axes_of(query)
    devices = (*rows, heads) if heads else rows
    return PartitionSpec(rows, None, heads), PartitionSpec(rows), PartitionSpec(devices)


def _mix(query: Array, key: Array, value: Array, seen: Array, *, call: Call) -> Array:
    """On one device."""
    rows, tokens, heads, size = query.shape
    pairs = rows * heads * tokens * key.shape[1] / (2 if call.causal else 1)
    products = 4 * size * pairs
    with jax.named_scope(stated.flops(products, _BACKWARD * products)):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=seen,
            is_causal=call.causal,
            scale=call.scale,
            implementation=IMPLEMENTATION,
        )
