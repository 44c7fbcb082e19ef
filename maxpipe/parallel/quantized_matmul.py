"""Quantized matmuls between activations and weights, with custom gradients.

`MatmulQuantizer` defines the operands of each matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from maxpipe.parallel.block_scaled_matmul import MatmulSharding
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer, QuantizedWeight, Weight
from maxpipe.parallel.quantized_array import Dims, QuantizedArray, dot_general
from maxpipe.parallel.stochastic_rounding import TokenKeys, fold_in


def matmul(
    x: Float[Array, "B T *K"], weight: Weight, dims: int, how: MatmulQuantizer, into: bool
) -> Float[Array, "B T *N"]:
    """Call `matmuls` with a single weight, and return the only result."""
    return matmuls(x, None, (weight,), dims, how, into)[0]


def matmuls(
    x: Float[Array, "B T *K"],
    most: Float[Array, "B T 1"] | None,
    weights: Sequence[Weight],
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings = (),
    keys: Sequence[TokenKeys] = (),
) -> list[Float[Array, "B T *N"]]:
    """Multiply `x` by each weight with `MatmulQuantizer.matmul`, preserving the dtype of `x`.

    If `into` is set, the weights are input projections of attention or an MLP. `most` is the
    maximum absolute value in each token, if known. `shardings` contains the sharding of each
    weight (`MatmulQuantizer.matmul`), or is empty. `keys` contains the keys of stochastic rounding
    for each weight, or is empty to round to the nearest.
    """
    shardings = tuple(shardings) or (None,) * len(weights)
    each_keys = tuple(keys) or (None,) * len(weights)
    return list(_matmuls(x, most, tuple(weights), each_keys, dims, how, into, shardings))


Shardings = Sequence[MatmulSharding | None]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _matmuls(
    x: Array,
    most: Any,
    weights: tuple[Weight, ...],
    keys: tuple[TokenKeys | None, ...],
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings,
) -> tuple[Array, ...]:
    del keys
    quantized: Array | QuantizedArray = x
    if how.can_prequantize:
        quantized = how.quantize_tokens(x, most)
        # Store the rounded input if several matmuls share it. If there is only one matmul, XLA can
        # fuse the rounding into it.
        quantized = lax.optimization_barrier(quantized) if into else quantized
    return tuple(
        how.matmul(quantized, weight, dims, sharding=sharding).compute().astype(x.dtype)
        for weight, sharding in zip(weights, shardings, strict=True)
    )


def _matmuls_forward(
    x: Array,
    most: Any,
    weights: tuple[Weight, ...],
    keys: tuple[TokenKeys | None, ...],
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings,
) -> Any:
    products = _matmuls(x, most, weights, keys, dims, how, into, shardings)
    return products, (x, most, tuple(map(weight_residual, weights)), keys)


def _matmuls_backward(
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings,
    saved: Any,
    cotangents: tuple[Array, ...],
) -> Any:
    x, most, weights, keys = saved
    d_xs, d_weights = [], []
    for cotangent, weight, sharding, key in zip(cotangents, weights, shardings, keys, strict=True):
        quantized: Array | QuantizedArray = cotangent
        of_input, of_weight = split_keys(key)
        if how.can_prequantize:
            quantized = how.quantize_tokens(cotangent, gradient=True, keys=of_input)
            quantized = lax.optimization_barrier(quantized)
        # Without the barrier, reductions over a token's full width, as in norms, would be fused
        # into the matmul and slow it down.
        product = how.input_grad(quantized, weight.weight, dims, sharding=sharding)
        d_x = product.compute().astype(x.dtype)
        d_xs.append(lax.optimization_barrier(d_x))
        inside = quantized if into and how.reuses_token_operands else cotangent
        most_of_x = most if into else None
        make = partial(
            weight_grad,
            *(x, inside, how),
            into=into,
            most=most_of_x,
            sharding=sharding,
            keys=of_weight,
        )
        d_weights.append(weight.gradient(make, x.dtype))
    return sum(d_xs[1:], d_xs[0]), None, tuple(d_weights), None


def split_keys(keys: TokenKeys | None) -> tuple[TokenKeys | None, TokenKeys | None]:
    """Return separate keys for the input gradient and the weight gradient of a matmul."""
    if keys is None:
        return None, None
    return fold_in(keys, 0), fold_in(keys, 1)


class WeightResidual(NamedTuple):
    """A weight saved for the backward pass."""

    weight: Weight
    trained: Any
    """None if the weight has no gradient."""

    def gradient(self, make: Callable[[], Array], dtype: Any) -> Any:
        """Return the gradient in the tree structure of the weight."""
        if self.trained is None:
            return None
        if not isinstance(self.weight, QuantizedWeight):
            return make().astype(self.weight.dtype)
        nothing: Any = None  # weights stored as integers have no gradient
        return QuantizedWeight(nothing, None, make().astype(dtype))


def weight_residual(weight: Weight) -> WeightResidual:
    """Return the residual that a matmul saves for its weight."""
    if not isinstance(weight, QuantizedWeight):
        return WeightResidual(weight, ())
    return WeightResidual(replace(weight, gradient=None), None if weight.gradient is None else ())


def weight_grad(
    x: Array | QuantizedArray,
    cotangent: Array | QuantizedArray,
    how: MatmulQuantizer,
    *,
    into: bool,
    over: Sequence[str] = (),
    most: Array | None = None,
    sharding: MatmulSharding | None = None,
    keys: TokenKeys | None = None,
) -> Float[Array, "*I *O"]:
    """Return a weight's gradient, from quantized operands if `weight_gradients` is set."""
    if how.weight_gradients:
        return how.weight_grad(
            x, cotangent, into=into, over=over, most=most, sharding=sharding, keys=keys
        )
    # Without the barrier, XLA for TPU would fuse the producers of both operands, although other
    # matmuls already store the operands.
    x, cotangent = lax.optimization_barrier((x, cotangent))
    assert not isinstance(x, QuantizedArray) and not isinstance(cotangent, QuantizedArray)
    return dot_general(x, cotangent, ((0, 1), (0, 1)))


_matmuls.defvjp(_matmuls_forward, _matmuls_backward)


# For batched matrices, the dequantized operands are multiplied in the compute dtype.


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def quantized_einsum(form: str, x: Array, weight: Array, how: MatmulQuantizer) -> Array:
    """Compute `jnp.einsum` of quantized operands; the gradient of `x` uses a quantized cotangent.

    The letter `e` (experts) denotes the batch dim of the weight.
    """
    dims = _EinsumDims.from_equation(form)
    x = how.quantize_dequantize(x, dims.contracted_of_x)
    return jnp.einsum(
        form,
        x,
        how.quantize_dequantize_weight(
            weight, dims.contracted_of_weight, each=dims.batch_of_weight
        ),
    )


def _quantized_einsum_backward(
    form: str, how: MatmulQuantizer, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    (x, weight), dims = saved, _EinsumDims.from_equation(form)
    rounded = how.quantize_dequantize_weight(
        weight, dims.contracted_of_weight, each=dims.batch_of_weight, back=True
    )
    (d_x,) = jax.vjp(lambda x: jnp.einsum(form, x, rounded), x)[1](
        how.quantize_dequantize(cotangent, dims.contracted_of_result, gradient=True)
    )
    (d_weight,) = jax.vjp(lambda weight: jnp.einsum(form, x, weight), weight)[1](cotangent)
    return d_x, d_weight


quantized_einsum.defvjp(
    lambda form, x, weight, how: (quantized_einsum(form, x, weight, how), (x, weight)),
    _quantized_einsum_backward,
)


class _EinsumDims(NamedTuple):
    """Dims of the operands and the result of an einsum."""

    contracted_of_x: Dims
    contracted_of_weight: Dims
    """Contracted dims of the weight."""
    batch_of_weight: Dims
    """Batch dims of the weight."""
    contracted_of_result: Dims
    """Dims of the result that are contracted by the matmul that computes the gradient of `x`."""

    @classmethod
    def from_equation(cls, form: str) -> _EinsumDims:
        operands, result = form.split("->")
        x, weight = operands.split(",")
        inside = [letter for letter in weight if letter in x and letter not in result]
        return cls(
            tuple(map(x.index, inside)),
            tuple(map(weight.index, inside)),
            tuple(dim for dim, letter in enumerate(weight) if letter == "e"),
            tuple(dim for dim, letter in enumerate(result) if letter in weight and letter not in x),
        )
