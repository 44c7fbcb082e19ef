"""The embedding with the vocabulary divided over the stages.

Each stage holds V / P rows, looks up its own, and one small sum over the stage axis puts the parts
together: every stage does an equal share of the work that would otherwise sit on the first.
Forward and backward are explicit; both run in control flow that is the same on all stages.

The embedding's columns stay divided over fsdp and the axes beside it: tokens go to all shards and
activations come back, which is less than the table. In shapes `v` is V / P, this stage's part of
the padded vocabulary, and `d` the columns of the table that a device holds: D, or its shard.

Source: the vocabulary-parallel embedding of Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

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
    scatter_sum,
    size_of,
    sum_over,
)
from maxpipe.parallel.mesh import STAGE
from maxpipe.parallel.per_device import vary
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
