"""Frozen weights with a low-rank update (LoRA, DoRA), used as operands of a layer's matmuls.

`SequenceParallel` computes `x @ W + scale * (x @ A) @ B`. Neither the forward nor the backward pass
allocates another matrix as large as the weight W, and W has no gradient. With DoRA, each output
column is multiplied by its magnitude and divided by the norm of the updated column; no gradient
flows through the norm (arXiv:2402.09353, section 4.3).

Dropout masks do not depend on how the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from maxpipe.parallel.collectives import local_positions
from maxpipe.parallel.matmul_quantizer import QuantizedWeight


def dropout(
    x: Float[Array, "B T *dims"], rate: float, keys: Key[Array, " B"], places: Int[Array, " T"]
) -> Float[Array, "B T *dims"]:
    """Apply dropout to `x`. `keys` holds one key per example, and `places` holds token positions.

    The mask depends only on the example's key and the position, not on microbatches or sharding.
    """

    def kept(key: Key[Array, ""], place: Int[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, x.shape[2:])

    keep = jax.vmap(jax.vmap(kept, (None, 0)), (0, None))(keys, places)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight", "down", "up", "magnitudes", "dropout_keys"),
    meta_fields=("scale", "dropout_rate", "contracted_dims", "expert_dim"),
)
@dataclass(frozen=True)
class LoraWeight:
    """A weight `[*K, *N]` with a low-rank update; matmuls contract `*K`.

    The weights of several experts can be stacked over the dim `expert_dim`, which is a dim of both
    factors and is not counted in the shapes below.
    """

    weight: Any
    """Frozen weight: an array or an 8-bit weight."""
    down: Float[Array, "*K r"]
    up: Float[Array, "... N"]
    """Second factor of the update, with shape `[r, *N]`."""
    magnitudes: Float[Array, "*N"] | None
    """Float32 DoRA magnitudes of the columns; None for plain LoRA."""
    dropout_keys: Key[Array, " B"] | None
    """Dropout key of each sequence; None disables dropout."""
    scale: float
    dropout_rate: float
    """Dropout rate."""
    contracted_dims: int
    """Number of dims in `*K`."""
    expert_dim: int = -1
    """Index of the dim that stacks experts, or -1."""

    @property
    def ndim(self) -> int:
        """Number of dims of the weight."""
        return self.weight.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    def astype(self, dtype: Any) -> LoraWeight:
        """Cast the weight and its update, but keep magnitudes in float32."""
        weight, down, up = (array.astype(dtype) for array in (self.weight, self.down, self.up))
        return replace(self, weight=weight, down=down, up=up)

    def __getitem__(self, key: Any) -> LoraWeight:
        """Return the weight restricted to a slice of its columns, `[..., slice of the last
        dim]`.
        """
        return self if key is ... else self.map_columns(lambda columns: columns[key])

    def map_columns(self, change: Callable[[Array], Array]) -> LoraWeight:
        """Apply `change` to the last dim of every array whose last dim indexes the weight's
        columns.
        """
        lengths = None if self.magnitudes is None else change(self.magnitudes)
        return replace(self, weight=change(self.weight), up=change(self.up), magnitudes=lengths)

    def apply_dropout(self, x: Float[Array, "B T *K"]) -> Float[Array, "B T *K"]:
        """Return the input of the low-rank update: `x` after dropout."""
        if self.dropout_keys is None:
            return x
        return dropout(x, self.dropout_rate, self.dropout_keys, local_positions(x.shape[1]))

    def combine(
        self, product: Float[Array, "B T *N"], change: Float[Array, "B T *N"]
    ) -> Float[Array, "B T *N"]:
        """Add the outputs of the frozen weight and of its low-rank update."""
        total = product + (change * self.scale).astype(product.dtype)
        return total if self.magnitudes is None else _scale_columns(total, self._column_scale())

    def _column_scale(self) -> Float[Array, "*N"]:
        assert self.magnitudes is not None
        norms = jax.lax.stop_gradient(column_norms(self._unscaled_merge(), self.contracted_dims))
        return self.magnitudes / jnp.where(norms == 0, 1.0, norms)  # padding has norm 0

    def _unscaled_merge(self) -> Float[Array, "*K *N"]:
        assert not isinstance(self.weight, QuantizedWeight)
        factors = self.down.astype(jnp.float32), self.up.astype(jnp.float32)
        multiply, at = partial(jnp.tensordot, axes=1), self.expert_dim
        multiply = multiply if at < 0 else jax.vmap(multiply, (at, at), at)
        return self.weight.astype(jnp.float32) + self.scale * multiply(*factors)

    def merge(self) -> Float[Array, "*K *N"]:
        """Merge the update into a single equivalent weight, ignoring dropout."""
        merged = self._unscaled_merge()
        merged = merged if self.magnitudes is None else merged * self._column_scale()
        return merged.astype(self.weight.dtype)


@jax.custom_vjp
def _scale_columns(x: Float[Array, "B T *N"], by: Float[Array, "*N"]) -> Float[Array, "B T *N"]:
    return (x * by).astype(x.dtype)


def _scale_columns_backward(
    saved: tuple[Array, Array], cotangent: Float[Array, "B T *N"]
) -> tuple[Array, Array]:
    """Compute the gradients of `x` and `by` together, so that a split backward pass does not defer
    the gradient of `by`.

    If that gradient were deferred, the matmul with the weight would be repeated and its inputs
    stored.
    """
    x, by = saved
    both = cotangent * by, cotangent.astype(jnp.float32) * x
    d_x, d_by = both[0].astype(x.dtype), both[1].sum((0, 1))
    return jax.lax.optimization_barrier((d_x, d_by))


_scale_columns.defvjp(lambda x, by: (_scale_columns(x, by), (x, by)), _scale_columns_backward)


def column_norms(weight: Float[Array, "*K *N"], summed: int) -> Float[Array, "*N"]:
    """Return the float32 norms over the first `summed` dims."""
    return jnp.sqrt(jnp.square(weight.astype(jnp.float32)).sum(tuple(range(summed))))


def map_columns(change: Callable[[Array], Array], weight: Any) -> Any:
    """Apply `change` to the last dim of a weight, which may have a low-rank update."""
    return weight.map_columns(change) if isinstance(weight, LoraWeight) else change(weight)


def merge_lora(weight: Any) -> Any:
    """Merge the low-rank update into a weight that is used outside matmuls."""
    return weight.merge() if isinstance(weight, LoraWeight) else weight


def base_weights(weights: Sequence[Any]) -> list[Any]:
    """Return the weights without their low-rank updates."""
    return [weight.weight if isinstance(weight, LoraWeight) else weight for weight in weights]
