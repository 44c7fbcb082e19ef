"""Sequence parallelism: activations between a layer's matmuls are sharded over tokens.

A layer's weights shard heads or hidden units over the tensor axis. Between the matmuls, all devices
along this axis would otherwise repeat the same computation. With sequence parallelism, each device
processes only a shard of the tokens between matmuls. A column-parallel projection gathers the
tokens, and a row-parallel projection reduce-scatters them. Gradients of activations and weights are
computed by separate equations, so that a split backward pass can defer weight gradients.
Activations are saved in sharded form and gathered again in the backward pass.

Source: sequence parallelism, arXiv:2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float

from maxpipe.parallel import collective_matmul, quantized_matmul
from maxpipe.parallel.block_scaled_matmul import MatmulSharding
from maxpipe.parallel.collective_matmul import TOKEN_DIM
from maxpipe.parallel.collectives import map_shards
from maxpipe.parallel.lora_weight import LoraWeight, base_weights
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer, QuantizedWeight, ScaledMatmul, Weight
from maxpipe.parallel.mesh import CONTEXT, TOKEN_AXES
from maxpipe.parallel.quantized_matmul import split_keys
from maxpipe.parallel.sharding import AxisRules, auto_axes, restrict_spec
from maxpipe.parallel.stochastic_rounding import TokenKeys, name_keys

LogicalAxes = Sequence[str | None]
"""Logical axes of a weight's dims."""


@dataclass(frozen=True)
class SequenceParallel:
    """Matmuls of a layer; the activations between them are sharded over tokens if `axis` is set."""

    rules: AxisRules
    axis: str = ""
    """Mesh axis that shards the tokens; empty if every device has all tokens."""
    quantizer: MatmulQuantizer | None = None
    """Quantizer for matmuls with weights. If None, matmuls use the compute dtype."""
    rounding_keys: TokenKeys | None = None
    """Keys of the tokens for stochastic rounding. If None, numbers are rounded to the nearest."""

    @classmethod
    def from_rules(
        cls, rules: AxisRules, low: MatmulQuantizer | None = None, keys: TokenKeys | None = None
    ) -> SequenceParallel:
        """Return the sharding defined by the axis rules for the current program.

        If all axes are auto axes, tokens are not sharded, because sequences can have any length.
        """
        automatic = auto_axes()
        if not automatic.isdisjoint(TOKEN_AXES):
            return cls(rules, quantizer=low, rounding_keys=keys)
        axes = dict(rules.table).get("sequence", ())
        return cls(rules, next((axis for axis in axes if axis in automatic), ""), low, keys)

    def split_tokens(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Shard the tokens of `x` and of its cotangent."""
        return _constrain_tokens(x, self.axis) if self.axis else x

    def gather_tokens(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Gather all tokens on every device; the cotangent is sharded again."""
        return _gather_tokens(x, self.axis) if self.axis else x

    def reduce_scatter_tokens(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Reduce-scatter partial sums over tokens; the transpose of `gather_tokens`."""
        return _reduce_scatter_tokens(x, self.axis) if self.axis else x

    def can_prequantize(self, weights: Sequence[Weight | LoraWeight]) -> bool:
        """Return whether the inputs of all these matmuls have one scale per token."""
        if self.axis or self.quantizer is None or not self.quantizer.has_token_scales:
            return False
        return not any(isinstance(weight, LoraWeight) for weight in weights)

    def column_parallel(
        self,
        x: Float[Array, "B T D"],
        weights: Sequence[Weight | LoraWeight],
        axes: Sequence[LogicalAxes],
        largest: Float[Array, "B T 1"] | None = None,
    ) -> list[Float[Array, "B T *dims"]]:
        """Multiply by each weight, gathering the tokens only once.

        `largest` is the maximum absolute activation of each token, if known.
        """
        outputs = self._column_parallel(x, base_weights(weights), axes, largest)
        for number, each in enumerate(weights):
            if isinstance(each, LoraWeight):
                how, (first, *rest) = replace(self, quantizer=None), axes[number]
                (inner,) = how._column_parallel(each.apply_dropout(x), [each.down], [(first, None)])
                (change,) = how._column_parallel(inner, [each.up], [(None, *rest)])
                outputs[number] = each.combine(outputs[number], change)
        return outputs

    def _column_parallel(
        self,
        x: Float[Array, "B T D"],
        weights: Sequence[Any],
        axes: Sequence[LogicalAxes],
        largest: Float[Array, "B T 1"] | None = None,
    ) -> list[Float[Array, "B T *dims"]]:
        specs = tuple(map(self._spec, axes))
        split = [number for number, spec in enumerate(specs) if any(spec)]
        if not self.axis or not split:
            return self._matmuls(x, weights, axes, into=True, most=largest)
        chosen = tuple(specs[number] for number in split)
        how = _ShardedMatmul(self.axis, self.rules.collective_matmul, chosen, self.quantizer)
        keys = self._matmul_keys(axes, into=True)
        chosen_keys = tuple(keys[number] for number in split) if keys else None
        outputs: Any = _column_parallel(x, tuple(weights[i] for i in split), chosen_keys, how)
        quantized = dict(zip(split, outputs, strict=True))
        # Multiply each device's local tokens by replicated weights.
        return [
            quantized[number]
            if number in quantized
            else self._matmuls(
                x, [weight], [axes[number]], into=True, keys=keys[number : number + 1]
            )[0]
            for number, weight in enumerate(weights)
        ]

    def row_parallel(
        self, x: Float[Array, "B T *dims"], weight: Weight | LoraWeight, axes: LogicalAxes
    ) -> Float[Array, "B T D"]:
        """Multiply by a weight whose `dims` are sharded, and sum over the devices."""
        if not isinstance(weight, LoraWeight):
            return self._row_parallel(x, weight, axes)
        how, product = replace(self, quantizer=None), self._row_parallel(x, weight.weight, axes)
        inner = how._row_parallel(weight.apply_dropout(x), weight.down, (*axes[:-1], None))
        return weight.combine(product, how._matmuls(inner, [weight.up], [], into=False)[0])

    def unsharded_matmul(
        self, x: Float[Array, "B T *K"], weight: Array | LoraWeight, dims: int = 1
    ) -> Float[Array, "B T *N"]:
        """Multiply each token by a weight in the compute dtype, contracting the weight's first
        `dims` dims.
        """
        if not isinstance(weight, LoraWeight):
            return jnp.tensordot(x, weight, dims)
        inner = jnp.tensordot(weight.apply_dropout(x), weight.down, dims)
        return weight.combine(
            self.unsharded_matmul(x, weight.weight, dims), self.unsharded_matmul(inner, weight.up)
        )

    def _row_parallel(self, x: Array, weight: Any, axes: LogicalAxes) -> Float[Array, "B T D"]:
        spec = self._spec(axes)
        if self.axis and any(spec):
            how = _ShardedMatmul(self.axis, self.rules.collective_matmul, (spec,), self.quantizer)
            keys = self._matmul_keys([axes], into=False)
            return _row_parallel(x, weight, keys[0] if keys else None, how)
        (product,) = self._matmuls(x, [weight], [axes], weight.ndim - 1, into=False)
        return self.split_tokens(product)

    def _matmuls(
        self,
        x: Array,
        weights: Sequence[Weight],
        axes: Sequence[LogicalAxes],
        dims: int = 1,
        *,
        into: bool,
        most: Array | None = None,
        keys: Sequence[TokenKeys] = (),
    ) -> list[Array]:
        """Return the matmul results for tokens that are unsharded or are sharded by the
        compiler. `keys` defaults to the keys of these matmuls.
        """
        if self.quantizer is not None:
            shardings = tuple(map(self._matmul_sharding, axes))
            keys = keys or self._matmul_keys(axes, into=into)
            return quantized_matmul.matmuls(
                x, most, weights, dims, self.quantizer, into, shardings, keys
            )
        arrays = [weight for weight in weights if not isinstance(weight, QuantizedWeight)]
        assert len(arrays) == len(weights)
        # Flattening sequences and sharded tokens into one dim would require communication.
        divided = self.axis or CONTEXT in auto_axes()
        if self.rules.flattens_tokens and not divided:
            return _flattened_matmuls(x, arrays, dims)
        return [jnp.tensordot(x, weight, dims) for weight in arrays]

    def _matmul_keys(self, axes: Sequence[LogicalAxes], *, into: bool) -> list[TokenKeys]:
        """Return independent keys for matmuls with the same input, or none if all numbers are
        rounded to the nearest.
        """
        if self.rounding_keys is None:
            return []
        return [
            name_keys(self.rounding_keys, into, number, *names) for number, names in enumerate(axes)
        ]

    def _matmul_sharding(self, axes: LogicalAxes) -> MatmulSharding | None:
        """Return the compiler's sharding of a matmul, or None if it also shards sequences."""
        automatic = auto_axes()
        if not automatic.isdisjoint(TOKEN_AXES):
            return None
        return MatmulSharding(
            restrict_spec(self.rules.spec(axes), (*automatic,)), self.axis or None
        )

    def _spec(self, axes: LogicalAxes) -> PartitionSpec:
        return restrict_spec(self.rules.spec(axes), (self.axis,))


def _flattened_matmuls(
    x: Float[Array, "B T *inside"], weights: Sequence[Float[Array, "*dims"]], summed: int
) -> list[Float[Array, "B T *outside"]]:
    """Contract the first `summed` dims of each weight with `x`, whose tokens are flattened.

    Sequences and tokens are flattened into one dim, over which weight gradients are summed. If both
    remained separate dims, the CPU backend would fuse a transpose of an operand into the operation
    that computes it, which would make memory access strided and slow. The TPU backend chooses the
    order of the two dims itself, and needs 3 to 11% more cycles if they are flattened.
    """
    rows, inside = x.shape[:2], math.prod(x.shape[2:])
    matrices = tuple(weight.reshape(inside, -1) for weight in weights)
    outputs = _matmuls(x.reshape(math.prod(rows), inside), matrices)
    outside = (weight.shape[summed:] for weight in weights)
    return [array.reshape(*rows, *dims) for array, dims in zip(outputs, outside, strict=True)]


@jax.custom_vjp
def _matmuls(x: Float[Array, "t A"], matrices: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x @ matrix for matrix in matrices)


def _matmuls_backward(
    saved: tuple[Array, tuple[Array, ...]], cotangents: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """Compute weight gradients as matmuls that contract inner dims, which is fastest on CPU.

    For each matrix, the narrower operand is transposed; `x` is transposed once for all matrices.
    Barriers prevent XLA from merging the transpose and the matmul.
    """
    x, matrices = saved
    parts = [c @ matrix.T for c, matrix in zip(cotangents, matrices, strict=True)]
    turned = lax.optimization_barrier(x.T)

    def gradient(matrix: Array, cotangent: Array) -> Array:
        if matrix.shape[0] <= matrix.shape[1]:
            return turned @ cotangent
        return lax.optimization_barrier(lax.optimization_barrier(cotangent.T) @ x).T

    return sum(parts[1:], parts[0]), tuple(map(gradient, matrices, cotangents))


_matmuls.defvjp(lambda x, matrices: (_matmuls(x, matrices), (x, matrices)), _matmuls_backward)


def _constrain_tokens(x: Array, axis: str) -> Array:
    return lax.with_sharding_constraint(x, _token_spec(axis, x.ndim))


def _token_spec(axis: str, ndim: int) -> PartitionSpec:
    return PartitionSpec(*(axis if dim == TOKEN_DIM else None for dim in range(ndim)))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_tokens(x: Array, axis: str) -> Array:
    return lax.with_sharding_constraint(x, PartitionSpec(*[None] * x.ndim))


_gather_tokens.defvjp(
    lambda x, axis: (_gather_tokens(x, axis), None),
    lambda axis, _, cotangent: (_constrain_tokens(cotangent, axis),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_scatter_tokens(x: Array, axis: str) -> Array:
    return _constrain_tokens(x, axis)


_reduce_scatter_tokens.defvjp(
    lambda x, axis: (_reduce_scatter_tokens(x, axis), None),
    lambda axis, _, cotangent: (_gather_tokens(cotangent, axis),),
)


# Matmuls.


@dataclass(frozen=True)
class _ShardedMatmul:
    axis: str
    collective_matmul: bool
    specs: tuple[PartitionSpec, ...]
    """PartitionSpecs of the weights, restricted to the axis that shards tokens."""
    quantizer: MatmulQuantizer | None = None

    @property
    def token_spec(self) -> PartitionSpec:
        """PartitionSpec of activations between layers' matmuls, sharded over tokens."""
        return PartitionSpec(None, self.axis, None)

    def hidden_spec(self, spec: PartitionSpec, *, first: bool) -> PartitionSpec:
        """Return the spec of activations `[B, T, *dims]`, sharded like the weight's `dims`."""
        return PartitionSpec(None, None, *(spec[1:] if first else spec[:-1]))

    def all_gather_matmul(
        self,
        x: Array,
        weights: Sequence[Array],
        *,
        gradient: bool = False,
        keys: TokenKeys | None = None,
    ) -> list[Array]:
        """Return this device's matmul results, contracting the unsharded dim of each weight.

        The contracted dim is the first dim of a weight. If `gradient` is set, `x` is a cotangent,
        and the contracted dim is the last dim. `keys` are the keys of the tokens in `x`.
        """

        def multiply(tokens: tuple[Array, TokenKeys | None], weight: Array) -> Array:
            x, keys = tokens
            if self.quantizer is not None:
                product = self._quantized_matmul(
                    x, weight, divided=False, gradient=gradient, keys=keys
                ).compute()
                return product.astype(x.dtype)
            return jnp.tensordot(x, jnp.moveaxis(weight, -1, 0) if gradient else weight, 1)

        if self.collective_matmul:
            return collective_matmul.all_gather_matmul((x, keys), weights, self.axis, multiply)
        tokens = jax.tree.map(self._gather_tokens, (x, keys))
        return [multiply(tokens, weight) for weight in weights]

    def matmul_reduce_scatter(
        self,
        arrays: Sequence[Array],
        weights: Sequence[Array],
        *,
        gradient: bool = False,
        keys: Sequence[TokenKeys | None] = (),
    ) -> Array:
        """Sum matmuls that contract the sharded dims of the weights, and return this device's
        tokens.

        The contracted dims are all dims of a weight except the last. If `gradient` is set, `arrays`
        are cotangents, and the contracted dims are all dims except the first.
        """
        dtype, pairs = arrays[0].dtype, list(zip(arrays, weights, strict=True))
        if self.quantizer is not None:
            # Scales must be identical on all devices, so they are computed before the
            # reduce-scatter over tokens.
            products = [
                self._quantized_matmul(*pair, divided=True, gradient=gradient, keys=of_pair)
                for pair, of_pair in zip(pairs, keys or [None] * len(pairs), strict=True)
            ]
            moving: list[Any] = [product.tokens for product in products]
            multiplies: list[Any] = [product.compute_for for product in products]
        else:
            turned = [jnp.moveaxis(weight, 0, -1) if gradient else weight for weight in weights]
            moving, sums = list(arrays), jnp.float32 if self.collective_matmul else dtype
            product = partial(collective_matmul.matmul, dtype=sums)
            multiplies = [partial(product, weight=weight) for weight in turned]
        if self.collective_matmul:
            return collective_matmul.matmul_reduce_scatter(moving, multiplies, self.axis, dtype)
        outputs: list[Array] = [
            multiply(x).astype(dtype) for x, multiply in zip(moving, multiplies, strict=True)
        ]
        return _psum_scatter_tokens(sum(outputs[1:], outputs[0]), self.axis)

    def _quantized_matmul(
        self,
        x: Array,
        weight: Array,
        *,
        divided: bool,
        gradient: bool,
        keys: TokenKeys | None = None,
    ) -> ScaledMatmul:
        assert self.quantizer is not None
        axis, num_other_dims = (self.axis,), weight.ndim - 1
        dims, over = num_other_dims if divided != gradient else 1, axis if divided else ()
        if gradient:
            return self.quantizer.input_grad(x, weight, dims, over=over, around=axis, keys=keys)
        return self.quantizer.matmul(x, weight, dims, over=over, around=axis)

    def all_gather_weight_grad(
        self,
        moving: Array,
        arrays: Sequence[Array],
        dtype: Any,
        *,
        first: bool,
        keys: Sequence[TokenKeys | None],
    ) -> tuple[Array, ...]:
        """Return local weight gradients; `moving` is the input if `first` is set, and a cotangent
        otherwise. `keys` contains the keys of all tokens for each array.
        """
        moving = self._gather_tokens(moving)

        def outer(x: Array, cotangent: Array, keys: TokenKeys | None) -> Array:
            if self.quantizer is None:
                return collective_matmul.outer_product(x, cotangent)
            return quantized_matmul.weight_grad(
                x, cotangent, self.quantizer, into=first, over=(self.axis,), keys=keys
            )

        products = [
            outer(moving, array, of_array) if first else outer(array, moving, of_array)
            for array, of_array in zip(arrays, keys, strict=True)
        ]
        return tuple(array.astype(dtype) for array in products)

    def _gather_tokens(self, x: Array) -> Array:
        if self.collective_matmul:
            return collective_matmul.ring_all_gather(x, self.axis)
        return lax.all_gather(x, self.axis, axis=TOKEN_DIM, tiled=True)


def _psum_scatter_tokens(x: Array, axis: str) -> Array:
    """Return the sum over the axis for this device's tokens, computed by a reduce-scatter.

    XLA for TPU lowers this operation to a reduce-scatter for matrices, but to an all-reduce for 3D
    arrays.
    """
    rows, tokens, width = x.shape
    matrix = jnp.moveaxis(x, TOKEN_DIM, 0).reshape(tokens * rows, width)
    sums = lax.psum_scatter(matrix, axis, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(sums.reshape(-1, rows, width), 0, TOKEN_DIM)


OptionalKeys = tuple[TokenKeys, ...] | None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _column_parallel(
    x: Array, weights: tuple[Array, ...], keys: OptionalKeys, how: _ShardedMatmul
) -> tuple[Array, ...]:
    del keys

    def run(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(how.all_gather_matmul(x, weights))

    inside = tuple(how.hidden_spec(spec, first=True) for spec in how.specs)
    return map_shards(run, (how.token_spec, how.specs), inside)(x, weights)


def _column_parallel_backward(
    how: _ShardedMatmul,
    saved: tuple[Array, tuple[Array, ...], OptionalKeys],
    cotangents: tuple[Array, ...],
) -> tuple[Array, tuple[Array, ...], None]:
    x, weights, keys = saved
    inside = tuple(how.hidden_spec(spec, first=True) for spec in how.specs)
    of_input, of_weight = zip(*map(split_keys, keys or [None] * len(weights)), strict=True)
    whole = PartitionSpec()

    def to_x(
        cotangents: tuple[Array, ...], weights: tuple[Array, ...], keys: Sequence[TokenKeys | None]
    ) -> Array:
        return how.matmul_reduce_scatter(cotangents, weights, gradient=True, keys=keys)

    def to_weights(
        x: Array, cotangents: tuple[Array, ...], keys: Sequence[TokenKeys | None]
    ) -> tuple[Array, ...]:
        return how.all_gather_weight_grad(x, cotangents, x.dtype, first=True, keys=keys)

    d_x = map_shards(to_x, (inside, how.specs, whole), how.token_spec)(
        cotangents, weights, of_input
    )
    d_weights = map_shards(to_weights, (how.token_spec, inside, whole), how.specs)(
        x, cotangents, of_weight
    )
    return d_x, d_weights, None


_column_parallel.defvjp(
    lambda x, weights, keys, how: (_column_parallel(x, weights, keys, how), (x, weights, keys)),
    _column_parallel_backward,
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _row_parallel(x: Array, weight: Array, keys: TokenKeys | None, how: _ShardedMatmul) -> Array:
    del keys
    (spec,) = how.specs
    run = lambda x, weight: how.matmul_reduce_scatter([x], [weight])  # noqa: E731
    return map_shards(run, (how.hidden_spec(spec, first=False), spec), how.token_spec)(x, weight)


def _row_parallel_backward(
    how: _ShardedMatmul, saved: tuple[Array, Array, TokenKeys | None], cotangent: Array
) -> tuple[Array, Array, None]:
    x, weight, keys = saved
    (spec,) = how.specs
    inside = how.hidden_spec(spec, first=False)
    of_input, of_weight = split_keys(keys)

    def to_x(cotangent: Array, weight: Array, keys: TokenKeys | None) -> Array:
        return how.all_gather_matmul(cotangent, [weight], gradient=True, keys=keys)[0]

    def to_weight(x: Array, cotangent: Array, keys: TokenKeys | None) -> Array:
        return how.all_gather_weight_grad(cotangent, [x], x.dtype, first=False, keys=[keys])[0]

    of_tokens = PartitionSpec(None, how.axis)
    d_x = map_shards(to_x, (how.token_spec, spec, of_tokens), inside)(cotangent, weight, of_input)
    whole = PartitionSpec()
    d_weight = map_shards(to_weight, (inside, how.token_spec, whole), spec)(x, cotangent, of_weight)
    return d_x, d_weight, None


_row_parallel.defvjp(
    lambda x, weight, keys, how: (_row_parallel(x, weight, keys, how), (x, weight, keys)),
    _row_parallel_backward,
)
