"""Embedding and loss head with the vocabulary divided over the stages.

Each stage holds V / P rows, looks up or scores its own, and one small sum over the
stage axis puts the parts together: every stage does an equal share of the work that
would otherwise sit on the first and the last. Forward and backward are explicit;
both run in control flow that is the same on all stages.

The embedding's columns stay divided over fsdp and the axes beside it: tokens go to all shards and
activations come back, which is less than the table. In shapes `v` is V / P, this stage's part of
the padded vocabulary, and `d` the columns of the table that a device holds: D, or its shard.

Source: the vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from maxpipe.parallel.collectives import (
    exchange,
    from_position,
    gather_shards,
    index_on,
    max_over,
    scatter_sum,
    size_of,
    sum_over,
)
from maxpipe.parallel.mesh import STAGE
from maxpipe.parallel.per_device import vary
from maxpipe.pipeline.blocks import by_blocks
from maxpipe.pipeline.weights import (
    WeightSharding,
    gather,
    scatter,
    sum_over_batch,
)


class Embedding(NamedTuple):
    """Lookup in this stage's rows of the table `[v, d]`."""

    division: WeightSharding
    """Of the table."""
    scale: float = 1.0
    """Factor of what is looked up, rounded to its type."""

    @property
    def by_column(self) -> bool:
        """Whether devices that share the columns each look up their own."""
        return self.division.dim == 1

    def hold(self, shard: Float[Array, "v shard"], dtype: jnp.dtype) -> Float[Array, "v d"]:
        """What `lookup` reads."""
        return vary(shard.astype(dtype)) if self.by_column else gather(shard, self.division, dtype)

    def lookup(
        self, table: Float[Array, "v d"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """The first layer's input, the same on every stage."""
        return self._to_rows(sum_over(self._found(table, tokens), STAGE))

    def lookup_own(
        self, table: Float[Array, "v d"], tokens: Int[Array, "P B T"]
    ) -> Float[Array, "B T D"]:
        """The same, to each stage that of its own microbatch."""
        return self._to_rows(scatter_sum(self._found(table, tokens), STAGE, 0)[0])

    def accumulate(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Adds stage 0's cotangent to the gradient of what is held, float32."""
        return self._add(total, tokens, self._to_columns(vary(from_position(cotangent, STAGE, 0))))

    def accumulate_parts(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Adds a cotangent of which every stage has a part, their sum."""
        return self._add(total, tokens, self._to_columns(vary(sum_over(cotangent, STAGE))))

    def accumulate_own(
        self,
        total: Float[Array, "v d"],
        tokens: Int[Array, "P B T"],
        cotangent: Float[Array, "B T D"],
    ) -> Float[Array, "v d"]:
        """Adds every stage's own cotangent, of its microbatch among all stages' tokens."""
        columns = self._to_columns(cotangent)[None]
        return self._add(total, tokens, gather_shards(columns, STAGE, 0))

    def finish(self, total: Float[Array, "v d"]) -> Float[Array, "v shard"]:
        """Summed over devices, in the form of the stored shard."""
        total = total if self.by_column else scatter(total, self.division)
        return sum_over_batch(total, self.division)

    def _found(
        self, table: Float[Array, "v d"], tokens: Int[Array, "*dims T"]
    ) -> Float[Array, "*found T d"]:
        row, mine = self._own_rows(tokens, table.shape[0])
        return self._scaled(jnp.where(mine[..., None], table[row], 0), table.dtype)

    def _scaled(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Times the scale, rounded to the type of activations."""
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, dtype).astype(x.dtype)

    def _add(self, total: jax.Array, tokens: jax.Array, cotangent: jax.Array) -> jax.Array:
        row, mine = self._own_rows(tokens, total.shape[0])
        row = jnp.where(mine, row, total.shape[0])  # out of range: dropped
        cotangent = self._scaled(cotangent.astype(total.dtype), cotangent.dtype)
        return total.at[row].add(vary(cotangent), mode="drop")

    def _to_rows(self, x: jax.Array) -> jax.Array:
        """This device's columns of all shards' tokens -> all columns of its own tokens."""
        return exchange(x, self.division.axes, 0, 2) if self.by_column else x

    def _to_columns(self, x: jax.Array) -> jax.Array:
        """All columns of this device's tokens -> its own columns of all shards' tokens."""
        if not self.by_column:
            return x
        # XLA for TPU takes five times as long to exchange from dim 2 to dim 0.
        axes = self.division.axes
        return exchange(jnp.concatenate(jnp.split(x, size_of(axes), axis=2)), axes, 0, 0)

    def _own_rows(
        self, tokens: Int[Array, "*dims T"], num_rows: int
    ) -> tuple[Int[Array, "*found T"], Bool[Array, "*found T"]]:
        """Row of every token that is looked up here, and whether it is held here."""
        if self.by_column:
            tokens = gather_shards(tokens, self.division.axes, tokens.ndim - 2)
        row = tokens - index_on(STAGE) * num_rows
        return jnp.clip(row, 0, num_rows - 1), (row >= 0) & (row < num_rows)


class Loss(NamedTuple):
    """Summed loss of one microbatch and its gradients."""

    total: Float[Array, "*sources"]
    """In nats, over the microbatch's targets, of each source if there are several; float32."""
    output: Float[Array, "B T D"]
    """Cotangent of the last layer's output."""
    norm: Any
    head: Float[Array, "D v"]
    """Of this stage's columns, summed over the microbatch, float32."""


class LossHead(NamedTuple):
    """Final norm, projection to the vocabulary and cross entropy."""

    norm: Callable[[Any, Float[Array, "B T D"]], Float[Array, "B T D"]]
    last_stage: int
    """The stage on which the network ends."""
    vocab_size: int
    """Columns from here on are padding and get no probability."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_cap: float = 0.0
    """Scaled logits become `cap * tanh(logits / cap)`. 0: as they are."""
    block_tokens: int = 0
    """Tokens whose logits are in memory at once. 0: those of a microbatch."""
    num_sources: int = 0
    """Sources of rows of which each has a sum of its own. 0: there is one sum."""

    def loss(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T D"],
        inputs: Any,
    ) -> Float[Array, "*sources"]:
        """Sum over the microbatch of the masked cross entropy, in nats."""

        def of_block(output: Array, *given: Array) -> tuple[Array, None]:
            hidden = self.norm(norm_params, output)
            return self._scores(hidden, head, *given)[0], None

        output = self._from_last_stage(output)
        return by_blocks(of_block, self.block_tokens, output, *self._given(inputs))[0]

    def loss_and_grad(
        self,
        norm_params: Any,
        head: Float[Array, "D v"],
        output: Float[Array, "B T D"],
        inputs: Any,
        scale: Float[Array, ""],
        ahead: Callable[..., Any] | None = None,
    ) -> tuple[Loss, Any]:
        """The loss and the gradients of `scale` times it.

        `output` is read from the last stage, `head` is this stage's part, `inputs` are the
        microbatch's arrays. Heads ahead add to both gradients, and what else they have found is
        returned: see `HeadsAhead.add`.
        """
        norm_params = vary(norm_params)

        def of_block(output: Array, *given: Array) -> tuple[Any, Array]:
            hidden, norm_vjp = jax.vjp(self.norm, norm_params, output)
            total, d_hidden, d_head = self._differentiated(head, hidden, scale, *given)
            sums = None
            if ahead is not None:
                score = partial(self._differentiated, head)  # of all rows together
                d_hidden, d_head, sums = ahead(score, hidden, d_hidden, d_head)
            d_hidden = vary(sum_over(d_hidden, STAGE)).astype(hidden.dtype)
            d_norm, d_output = norm_vjp(d_hidden)
            return (total, d_norm, d_head, sums), d_output

        # Heads ahead read tokens of other blocks: only logits are by blocks then.
        size = self.block_tokens if ahead is None else 0
        given = self._from_last_stage(output), *self._given(inputs)
        (total, d_norm, d_head, sums), d_output = by_blocks(of_block, size, *given)
        return Loss(total, d_output, d_norm, d_head), sums

    def _differentiated(
        self,
        head: Float[Array, "D v"],
        hidden: Float[Array, "B T D"],
        scale: Float[Array, ""],
        targets: Int[Array, "B T"],
        mask: Float[Array, "B T"],
        *sources: Int[Array, "B T"],
    ) -> tuple[Float[Array, "*sources"], Float[Array, "B T D"], Float[Array, "D v"]]:
        """Loss, and its gradients by this stage's columns: of `hidden`, and of the columns."""

        def of_block(hidden: Array, targets: Array, mask: Array, *sources: Array):
            total, exponent, normaliser, is_target, slope = self._scores(
                hidden, head, targets, mask, *sources
            )
            weight = (mask * scale)[..., None]
            error = (exponent / normaliser[..., None] - is_target) * weight
            error = error if slope is None else error * slope
            error = error.astype(hidden.dtype)
            d_head = _product("btd,btv->dv", hidden, error)
            return (total, d_head), _product("btv,dv->btd", error, head)

        given = hidden, targets, mask, *sources
        (total, d_head), d_hidden = by_blocks(of_block, self.block_tokens, *given)
        return total, d_hidden, d_head

    def _given(self, inputs: Any) -> tuple[Array, ...]:
        """What each token has beside its activation: target, whether it counts, its source."""
        targets, mask = inputs["targets"], inputs["loss_mask"]
        if not self.num_sources:
            return targets, mask
        return targets, mask, jnp.broadcast_to(inputs["source_ids"][:, None], targets.shape)

    def _from_last_stage(self, output: jax.Array) -> jax.Array:
        return vary(from_position(output, STAGE, self.last_stage))

    def _scores(
        self,
        hidden: Float[Array, "B T D"],
        head: Float[Array, "D v"],
        targets: Int[Array, "B T"],
        mask: Float[Array, "B T"],
        *sources: Int[Array, "B T"],
    ) -> tuple[
        Float[Array, "*sources"],
        Float[Array, "B T v"],
        Float[Array, "B T"],
        Float[Array, "B T v"],
        Float[Array, "B T v"] | float | None,
    ]:
        """Loss, exp(logits - max), its sum over the vocabulary, one-hot targets, logits' slope."""
        num_columns = head.shape[1]
        logits, slope = _product("btd,dv->btv", hidden, head), None
        if self.logit_scale != 1.0:
            logits, slope = logits * self.logit_scale, self.logit_scale
        if self.logit_cap:
            bent = jnp.tanh(logits / self.logit_cap)
            logits, slope = self.logit_cap * bent, (1.0 - bent * bent) * self.logit_scale
        column = index_on(STAGE) * num_columns + jnp.arange(num_columns)
        logits = jnp.where(column < self.vocab_size, logits, jnp.finfo(jnp.float32).min)
        largest = max_over(logits.max(axis=-1), STAGE)
        exponent = jnp.exp(logits - largest[..., None])
        normaliser = sum_over(exponent.sum(axis=-1), STAGE)
        is_target = column == targets[..., None]
        picked = sum_over(jnp.where(is_target, logits, 0.0).sum(axis=-1), STAGE)
        lost = (jnp.log(normaliser) + largest - picked) * mask
        total = by_source(lost, self.num_sources, *sources) if sources else lost.sum()
        return vary(total), exponent, normaliser, is_target.astype(jnp.float32), slope


def by_source(
    values: Float[Array, "B T"], num_sources: int, sources: Int[Array, "B _"]
) -> Float[Array, " sources"]:
    """Sums over the tokens of each source."""
    # One sum for each: a scatter would add in an order that devices choose.
    mine = sources == jnp.arange(num_sources)[:, None, None]
    return jnp.where(mine, values, 0.0).sum((1, 2))


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum, summed in float32. XLA for CPU lacks some such products of bfloat16."""
    multiply = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if a.dtype != jnp.bfloat16:
        return multiply(a, b)
    wide = lambda a, b: multiply(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
    return jax.lax.platform_dependent(a, b, cpu=wide, default=multiply)
