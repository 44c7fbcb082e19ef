"""Embedding and loss head with the vocabulary divided over the stages.

Each stage holds V / P rows, looks up or scores its own, and one small sum over the
stage axis puts the parts together: every stage does an equal share of the work that
would otherwise sit on the first and the last. Forward and backward are explicit;
both run in control flow that is the same on all stages.

Source: the vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxpipe.mesh import STAGE
from maxpipe.pipeline.collectives import (
    from_position,
    gather_shards,
    index_on,
    max_over,
    scatter_sum,
    sum_over,
    vary,
)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """`table [V/P, D]`, `tokens [B, T]` -> `[B, T, D]`, the same on every stage."""
    row, mine = _own_rows(tokens, table.shape[0])
    return sum_over(jnp.where(mine[..., None], table[row], 0), STAGE)


def accumulate_embedding(total: jax.Array, tokens: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Adds stage 0's `cotangent [B, T, D]` to the rows of `total [V/P, D]` held here."""
    return _add_rows(total, tokens, from_position(cotangent, STAGE, 0))


def embed_own(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """`table [V/P, D]`, `tokens [P, B, T]` -> `[B, T, D]`: to each stage its own microbatch."""
    row, mine = _own_rows(tokens, table.shape[0])
    return scatter_sum(jnp.where(mine[..., None], table[row], 0), STAGE, 0)[0]


def accumulate_embedding_of_all(
    total: jax.Array, tokens: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """Adds every stage's own `cotangent [B, T, D]` for `tokens [P, B, T]` to the rows here."""
    return _add_rows(total, tokens, gather_shards(cotangent[None], STAGE, 0))


def _add_rows(total: jax.Array, tokens: jax.Array, cotangent: jax.Array) -> jax.Array:
    row, mine = _own_rows(tokens, total.shape[0])
    row = jnp.where(mine, row, total.shape[0])  # out of range is dropped
    return total.at[row].add(vary(cotangent.astype(total.dtype)), mode="drop")


def _own_rows(tokens: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    row = tokens - index_on(STAGE) * num_rows
    return jnp.clip(row, 0, num_rows - 1), (row >= 0) & (row < num_rows)


class Loss(NamedTuple):
    """Summed loss of one microbatch and its gradients."""

    total: jax.Array
    output: jax.Array
    """Cotangent of the last layer's output `[B, T, D]`."""
    norm: Any
    head: jax.Array
    """Of this stage's `[D, V/P]`, summed over the microbatch, float32."""


class LossHead(NamedTuple):
    """Final norm, projection to the vocabulary and cross entropy."""

    norm: Callable[[Any, jax.Array], jax.Array]
    last_stage: int
    """The stage on which the network ends."""
    vocab_size: int
    """Columns from here on are padding and get no probability."""

    def loss(
        self,
        norm_params: Any,
        head: jax.Array,
        output: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
    ) -> jax.Array:
        """Sum over the microbatch of the masked cross entropy, in nats."""
        hidden = self.norm(norm_params, self._from_last_stage(output))
        return self._scores(hidden, head, targets, mask)[0]

    def loss_and_grad(
        self,
        norm_params: Any,
        head: jax.Array,
        output: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        scale: jax.Array,
    ) -> Loss:
        """The loss and the gradients of `scale` times it.

        `output [B, T, D]` is read from the last stage, `head [D, V/P]` is this stage's part,
        `targets` and `mask` are `[B, T]`.
        """
        output = self._from_last_stage(output)
        hidden, norm_vjp = jax.vjp(self.norm, vary(norm_params), output)
        total, exponent, normaliser, is_target = self._scores(hidden, head, targets, mask)
        weight = (mask * scale)[..., None]
        error = (exponent / normaliser[..., None] - is_target) * weight
        error = error.astype(hidden.dtype)
        d_head = _product("btd,btv->dv", hidden, error)
        d_hidden = _product("btv,dv->btd", error, head)
        d_hidden = vary(sum_over(d_hidden, STAGE)).astype(hidden.dtype)
        d_norm, d_output = norm_vjp(d_hidden)
        return Loss(total, d_output, d_norm, d_head)

    def _from_last_stage(self, output: jax.Array) -> jax.Array:
        return vary(from_position(output, STAGE, self.last_stage))

    def _scores(
        self, hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Loss, exp(logits - max) `[B, T, V/P]`, its sum `[B, T]`, and one-hot targets."""
        num_columns = head.shape[1]
        logits = _product("btd,dv->btv", hidden, head)
        column = index_on(STAGE) * num_columns + jnp.arange(num_columns)
        logits = jnp.where(column < self.vocab_size, logits, jnp.finfo(jnp.float32).min)
        largest = max_over(logits.max(axis=-1), STAGE)
        exponent = jnp.exp(logits - largest[..., None])
        normaliser = sum_over(exponent.sum(axis=-1), STAGE)
        is_target = column == targets[..., None]
        picked = sum_over(jnp.where(is_target, logits, 0.0).sum(axis=-1), STAGE)
        total = ((jnp.log(normaliser) + largest - picked) * mask).sum()
        return vary(total), exponent, normaliser, is_target.astype(jnp.float32)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum, summed in float32. XLA for CPU lacks some such products of bfloat16."""
    multiply = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if a.dtype != jnp.bfloat16:
        return multiply(a, b)
    wide = lambda a, b: multiply(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(a, b, cpu=wide, default=multiply)
