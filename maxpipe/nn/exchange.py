"""Tokens brought to experts on other devices of the expert axis, and what those make of them back.

Every device has room for some tokens of each other one. What is sent are rows of one size, the same
on all devices, of which the last may be empty; on TPUs only those in use travel (ragged).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.nn.rows import Rows, row_weights, rows_in_line, to_slots, to_tokens
from maxpipe.parallel.collectives import exchange, index_on, size_of
from maxpipe.parallel.mesh import EXPERT
from maxpipe.parallel.per_device import vary


class Received(NamedTuple):
    """Tokens from all devices of the axis for the experts of this one, e of them."""

    x: Float[Array, "1 S D"]
    places: Int[Array, "1 S 1"]
    """Of this device's experts the token's; e where there is none."""
    weights: Float[Array, "1 S e"]
    """What the expert's output is multiplied with; 0 for the others."""


class Sent(NamedTuple):
    """How tokens were sent, to bring back what becomes of them."""

    slots: Rows
    counts: Int[Array, " X"]
    """Rows in use for each device."""
    got: Int[Array, " X"]
    """Rows in use from each device."""


def to_experts(
    x: Float[Array, "B T D"],
    places: Int[Array, "B T k"],
    weights: Float[Array, "B T E"],
    room: int,
) -> tuple[Received, Sent]:
    """Each token to the devices of its experts. `room` is that for each pair of devices.

    A choice of E is one of no expert. Where more are to be sent than there is room for, first
    choices go before second ones and earlier tokens before later ones, whichever their experts.
    """
    size, num_experts = size_of(EXPERT), weights.shape[-1]
    mine = num_experts // size
    target = places // mine
    lengths = (target.reshape(-1, 1) == jnp.arange(size)).sum(0, dtype=jnp.int32)
    slots = rows_in_line(target, lengths, room)
    counts = jnp.minimum(lengths, room)
    sent = Sent(slots, counts, exchange(counts, EXPERT, 0, 0))
    flat, of_tokens = places.reshape(-1, places.shape[-1]), weights.reshape(-1, num_experts)
    factors = row_weights(of_tokens, flat, slots, num_experts)
    expert = flat.reshape(-1).at[slots.choice].get(mode="fill", fill_value=num_experts)
    # Where a row is empty there is no expert: its number is behind those of each device.
    expert = exchange(jnp.where(expert < num_experts, expert % mine, mine), EXPERT, 0, 0)
    factors = exchange(factors, EXPERT, 0, 0)
    of_mine = jnp.where(expert[:, None] == jnp.arange(mine), factors[:, None], 0)
    rows = _travelled(to_slots(x, slots, x.shape), sent.counts, sent.got)
    return Received(rows[None], expert[None, :, None], of_mine[None]), sent


def from_experts(x: Float[Array, "1 S D"], sent: Sent) -> Float[Array, "n D"]:
    """Each token's sum over the experts that it was sent to."""
    return to_tokens(_travelled(x[0], sent.got, sent.counts), sent.slots)


@jax.custom_vjp
def _travelled(
    x: Float[Array, "S D"], sent: Int[Array, " X"], got: Int[Array, " X"]
) -> Float[Array, "S D"]:
    """To each device its part of the rows, of which the first `sent` are in use.

    Where nothing arrives is whatever was in memory: it is not read.
    """
    padded = lambda x, sent, got: exchange(x, EXPERT, 0, 0)  # noqa: E731
    return lax.platform_dependent(x, sent, got, tpu=_ragged, default=padded)


_travelled.defvjp(
    lambda x, sent, got: (_travelled(x, sent, got), (sent, got)),
    lambda saved, cotangent: (_travelled(cotangent, *reversed(saved)), None, None),
)


def _ragged(x: Array, sent: Array, got: Array) -> Array:
    size, me = size_of(EXPERT), index_on(EXPERT)
    room = len(x) // size
    own, there = jnp.arange(size, dtype=jnp.int32) * room, jnp.full(size, me * room, jnp.int32)
    # XLA would copy rows that it both sends and writes to, one tile line at a time.
    empty = vary(lax.empty(x.shape, x.dtype))
    return lax.ragged_all_to_all(x, empty, vary(own), sent, vary(there), got, axis_name=EXPERT)
