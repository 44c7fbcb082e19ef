"""Products of activations with weights in 8 bits, and their gradients.

Each token has a scale of its own, and so has what its gradient is multiplied with: numbers depend
neither on the rows beside it nor on how the batch is divided. `channel` and `tensor` multiply
8-bit numbers and put scales on the sums. `block` rounds blocks along the sum to 8 bits and a power
of two, and multiplies what they stand for in the type of the activations, which holds it exactly.

Sources: scaled integers, arXiv:1712.05877; fp8 with e5m2 gradients, arXiv:2209.05433; blocks,
DeepSeek-V3 (arXiv:2412.19437) and the OCP microscaling formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from maxpipe.parallel.axes import QUANTIZATION_BLOCK
from maxpipe.parallel.collectives import axis_size, mark_varying, max_over, with_layout
from maxpipe.parallel.mesh import CONTEXT

MAX_UNROLLED_SEQUENCES = 4
"""Rows of the batch up to which XLA adds their products up where it makes them."""
_MIN_SCALE = 1e-30
"""Of numbers that are all 0, or may be rounded to it."""

Dims = Sequence[int]


@dataclass(frozen=True)
class MatmulQuantizer:
    """Of which form the operands of products are."""

    format: Literal["int8", "fp8"]
    scales: Literal["channel", "tensor", "block"]
    """What has a scale in weights."""
    weight_gradients: bool
    """Whether products that make gradients of weights are of that form, too."""
    attention: bool = True
    """Whether projections of attention are."""

    def operand_dtype(self, *, gradient: bool = False) -> Any:
        """Of the 8-bit numbers. Gradients in fp8 need range more than digits, if not in blocks."""
        if self.format == "int8":
            return jnp.int8
        return jnp.float8_e5m2 if gradient and self.scales != "block" else jnp.float8_e4m3fn

    def quantize_tokens(
        self,
        x: Float[Array, "B T *K"],
        most: Float[Array, "B T 1"] | None = None,
        *,
        over: Sequence[str] = (),
        gradient: bool = False,
    ) -> QuantizedArray:
        """Numbers with a scale for each token, of which `most` is the largest if that is known."""
        most = None if most is None else most.reshape(*most.shape[:2], *(1,) * (x.ndim - 2))
        found = quantize_array(
            x, range(2, x.ndim), self.operand_dtype(gradient=gradient), over, most
        )
        if x.ndim > 3:
            return found
        # XLA for TPU would have tokens in the last dim, as attention does, and copy in between.
        return found._replace(values=with_layout(found.values, (0, 1, 2)))

    def matmul(
        self,
        x: Float[Array, "*rows *K"] | QuantizedArray,
        weight: Weight,
        dims: int,
        *,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> ScaledMatmul:
        """Over the last `dims` dims of one and the first of the other.

        Axes of the program divide these dims if they are in `over`, the weight's dims, these or
        others, if they are in `around`. The sum over them is the caller's.
        """
        ndim = x.values.ndim if isinstance(x, QuantizedArray) else x.ndim
        summed = tuple(range(ndim - dims, ndim)), tuple(range(dims))
        if self.scales == "block":
            assert not isinstance(weight, QuantizedWeight) and not isinstance(x, QuantizedArray)
            mine = quantize_dequantize_blocks(x, summed[0][-1:], self.operand_dtype())
            return ScaledMatmul(
                TokenOperand(mine), self._quantize_dequantize_squares(weight, dims), None, summed
            )
        mine = (
            x
            if isinstance(x, QuantizedArray)
            else quantize_array(x, summed[0], self.operand_dtype(), over)
        )
        theirs = self.quantize_weight_operand(weight, summed[1], over, around)
        rows = mine.values.shape[: ndim - dims]
        of_x = mine.scales.reshape(*rows, *(1,) * (weight.ndim - dims))
        of_weight = theirs.scales.reshape(theirs.scales.shape[dims:])
        return ScaledMatmul(TokenOperand(mine.values, of_x), theirs.values, of_weight, summed)

    def input_grad(
        self,
        cotangent: Float[Array, "*rows *N"] | QuantizedArray,
        weight: Weight,
        dims: int,
        *,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> ScaledMatmul:
        """The gradient of `product` to its first operand.

        `dims` are those of `K`. Axes of the program divide `N` if they are in `over`, `N` or `K` if
        they are in `around`.
        """
        rest = tuple(range(dims, weight.ndim))
        ndim = cotangent.values.ndim if isinstance(cotangent, QuantizedArray) else cotangent.ndim
        summed = tuple(range(ndim - len(rest), ndim)), rest
        kind = self.operand_dtype(gradient=True)
        if self.scales == "block":
            assert not isinstance(weight, QuantizedWeight) and not isinstance(
                cotangent, QuantizedArray
            )
            mine = quantize_dequantize_blocks(cotangent, summed[0][-1:], kind)
            return ScaledMatmul(
                TokenOperand(mine), self._quantize_dequantize_squares(weight, dims), None, summed
            )
        theirs = self.quantize_weight_operand(weight, rest, over, around, back=True)
        mine = cotangent
        if not isinstance(mine, QuantizedArray):
            mine = quantize_array(mine, summed[0], kind, over)
        of_mine = mine.scales.reshape(*mine.values.shape[: summed[0][0]], *(1,) * dims)
        of_weight = theirs.scales.reshape(theirs.scales.shape[:dims])
        return ScaledMatmul(TokenOperand(mine.values, of_mine), theirs.values, of_weight, summed)

    def _quantize_dequantize_squares(self, weight: Array, dims: int) -> Array:
        return quantize_dequantize_blocks(weight, (dims - 1, weight.ndim - 1), self.operand_dtype())

    def quantize_weight(
        self,
        weight: Array,
        first: int,
        dims: int,
        over: Sequence[str] = (),
        divided: int | None = None,
    ) -> QuantizedWeight:
        """A weight for all its products, or many with `first` dims in front; `dims` are those of K.

        Axes of the program divide its dim `divided` if they are in `over`.
        """
        inside = range(first, first + dims)
        rest = range(first + dims, weight.ndim)
        forward, back = (
            self.quantize_weight_operand(
                weight, summed, over if divided in summed else (), over, each=each
            )
            for each in [range(first)]
            for summed in (inside, rest)
        )
        return QuantizedWeight(forward, None if self.scales == "tensor" else back)

    def quantize_weight_operand(
        self,
        weight: Weight,
        summed: Dims,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
        *,
        back: bool = False,
        each: Dims = (),
    ) -> QuantizedArray:
        """Rounded for a product over these dims, of many matrices if there are dims `each`."""
        if isinstance(weight, QuantizedWeight):
            return weight.backward if back and weight.backward is not None else weight.forward
        if self.scales == "tensor":
            whole = [dim for dim in range(weight.ndim) if dim not in each]
            return quantize_array(weight, whole, self.operand_dtype(), around)
        return quantize_array(weight, summed, self.operand_dtype(), over)

    def quantize_dequantize(
        self, x: Array, dims: Dims, *, over: Sequence[str] = (), gradient: bool = False
    ) -> Array:
        """What numbers with a scale for these dims stand for, in the type of `x`."""
        kind = self.operand_dtype(gradient=gradient)
        if self.scales == "block":
            return quantize_dequantize_blocks(x, dims[-1:], kind)
        found, scale = quantize_array(x, dims, kind, over)
        return (found.astype(jnp.float32) * scale).astype(x.dtype)

    def quantize_dequantize_weight(
        self,
        weight: Array,
        inside: Dims,
        *,
        each: Dims = (),
        over: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> Array:
        """`rounded`, for a weight whose dims `inside` are summed over; `each`: of many matrices."""
        if self.scales == "block":
            own = [dim for dim in range(weight.ndim) if dim not in (*inside, *each)]
            return quantize_dequantize_blocks(weight, (inside[-1], own[-1]), self.operand_dtype())
        found, scale = self.quantize_weight_operand(weight, inside, over, around, each=each)
        return (found.astype(jnp.float32) * scale).astype(weight.dtype)

    def weight_grad(
        self,
        x: Float[Array, "B T *I"] | QuantizedArray,
        cotangent: Float[Array, "B T *O"] | QuantizedArray,
        *,
        into: bool,
        over: Sequence[str] = (),
        most: Float[Array, "B T 1"] | None = None,
    ) -> Float[Array, "*I *O"]:
        """In float32: summed over rows and tokens.

        What is inside of a layer, cotangents of a projection `into` it, is in the numbers that
        other products have of it, with scales of tokens; axes of the program divide its width if
        they are in `over`. The other operand, whose tokens' largest numbers are `most` if they are
        known, is multiplied with these scales, and has one of its own for each row of the batch.
        """
        moved = (CONTEXT,) if axis_size(CONTEXT) > 1 else ()
        inside, other = (cotangent, x) if into else (x, cotangent)
        assert not isinstance(other, QuantizedArray)
        kind = self.operand_dtype(gradient=not into)
        if self.scales == "block":
            assert not isinstance(inside, QuantizedArray)
            tokens = most = jnp.zeros((len(other), 0))
        else:
            if not isinstance(inside, QuantizedArray):
                inside = self.quantize_tokens(inside, over=over, gradient=into)
            tokens = inside.scales.reshape(*other.shape[:2], *(1,) * (other.ndim - 2))
            inside = inside.values
            if most is None:
                most = compute_max_abs(other, range(2, other.ndim))
            most = most.reshape(tokens.shape)

        def of_row(row: tuple[Array, ...]) -> Array:
            mine, theirs, tokens, most = row
            if self.scales == "block":
                pair = (
                    quantize_dequantize_blocks(each, (0,), self.operand_dtype())
                    for each in (theirs, mine)
                )
                first, second = pair if into else reversed(tuple(pair))
                return _dot_general(first, second, ((0,), (0,)))
            scale = compute_scale(max_over((tokens * most).max(), moved), kind)
            theirs = _round_to_dtype(theirs.astype(jnp.float32) * (tokens / scale), kind)
            # Else it is rounded again for each part of the product.
            theirs = lax.optimization_barrier(theirs)
            first, second = (theirs, mine) if into else (mine, theirs)
            return _dot_general(first, second, ((0,), (0,))) * scale

        rows = (inside, other, tokens, most)
        if len(other) <= MAX_UNROLLED_SEQUENCES:
            found = [of_row(row) for row in zip(*rows, strict=True)]
            return sum(found[1:], found[0])
        shape = (*(other if into else inside).shape[2:], *(inside if into else other).shape[2:])
        add = lambda total, row: (total + of_row(row), None)  # noqa: E731
        return lax.scan(add, mark_varying(jnp.zeros(shape, jnp.float32)), rows)[0]


class QuantizedArray(NamedTuple):
    """Numbers in 8 bits, and float32 scales that they are multiplied with."""

    values: Array
    scales: Array


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is rounded already, for the products that it is in."""

    forward: QuantizedArray
    backward: QuantizedArray | None
    """For the gradient to what it is multiplied with; None if it is the same there."""
    gradient: Array | None = None
    """Zeros in whose place the weight is differentiated, of the type of its gradient."""

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return self.forward.values.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.forward.values.shape

    def astype(self, dtype: Any) -> QuantizedWeight:
        """Products are in any type."""
        del dtype
        return self

    def __getitem__(self, key: Any) -> QuantizedWeight:
        """All of it."""
        assert key is ...
        return self


Weight = Array | QuantizedWeight


def is_quantized_weight(tree: Any) -> bool:
    """Whether it is a weight in 8 bits, and not the arrays of one."""
    return isinstance(tree, QuantizedWeight)


class TokenOperand(NamedTuple):
    """Operands of which each token has its own."""

    values: Float[Array, "*rows *K"]
    scales: Float[Array, "*rows ..."] | None = None
    """That the product's dims are multiplied with."""


class ScaledMatmul(NamedTuple):
    """A product in 8 bits, of which all scales are known, but not multiplied yet."""

    tokens: TokenOperand
    weight: Array
    weight_scales: Float[Array, ...] | None
    contracted_dims: tuple[Dims, Dims]

    def compute_for(self, rows: TokenOperand) -> Float[Array, ...]:
        """In float32, of some of the tokens."""
        found = _dot_general(rows.values, self.weight, self.contracted_dims)
        for scale in (rows.scales, self.weight_scales):
            found = found if scale is None else found * scale
        return found

    def compute(self) -> Float[Array, ...]:
        """In float32, of all of them."""
        return self.compute_for(self.tokens)


def quantize_array(
    x: Array, dims: Dims, dtype: Any, over: Sequence[str] = (), most: Array | None = None
) -> QuantizedArray:
    """Numbers of that type, and scales with these dims of size 1: their product is about `x`.

    What is not finite makes its scale so, and with it all that is computed of it. Devices along
    the axes `over` of the program have other numbers of the same dims. `most` is what the largest
    would be, if that is known.
    """
    most = compute_max_abs(x, dims) if most is None else most
    scale = compute_scale(max_over(most, over), dtype)
    return QuantizedArray(_round_to_dtype(x.astype(jnp.float32) * (1 / scale), dtype), scale)


def compute_max_abs(x: Array, dims: Dims) -> Array:
    """Float32, these dims of size 1."""
    return jnp.abs(x).max(tuple(dims), keepdims=True).astype(jnp.float32)


def compute_scale(most: Array, dtype: Any) -> Array:
    """Of numbers of which this is the largest."""
    return jnp.maximum(most / max_of_dtype(dtype), _MIN_SCALE)


def quantize_dequantize_blocks(x: Array, dims: Dims, dtype: Any) -> Array:
    """`x` as numbers of that type times powers of two, one for each block in these dims.

    In the type of `x`, which holds all of them.
    """
    shape: list[int] = []
    inner: list[int] = []
    for dim, size in enumerate(x.shape):
        block = math.gcd(size, QUANTIZATION_BLOCK) if dim in dims else 1
        shape += [size // block, block]
        inner += [len(shape) - 1]
    split = x.reshape(shape).astype(jnp.float32)
    most = jnp.abs(split).max(inner, keepdims=True)
    scale = _next_power_of_two(jnp.maximum(most / max_of_dtype(dtype), _MIN_SCALE))
    scale = jnp.where(jnp.isfinite(most), scale, most)
    found = _round_to_dtype(split / scale, dtype).astype(jnp.float32) * scale
    return found.astype(x.dtype).reshape(x.shape)


def _next_power_of_two(x: Array) -> Array:
    """The least that is not below."""
    fraction, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(x), exponent - (fraction == 0.5).astype(exponent.dtype))


def max_of_dtype(dtype: Any) -> float:
    """Number of an 8-bit type."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def _round_to_dtype(x: Array, dtype: Any) -> Array:
    x = jnp.clip(x, -max_of_dtype(dtype), max_of_dtype(dtype))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def _dot_general(x: Array, y: Array, summed: tuple[Dims, Dims]) -> Float[Array, ...]:
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    found = lax.dot_general(x, y, (summed, ((), ())), preferred_element_type=sums)
    return found.astype(jnp.float32)


# Products with gradients of their own.


def matmul(
    x: Float[Array, "B T *K"], weight: Weight, dims: int, how: MatmulQuantizer, into: bool
) -> Float[Array, "B T *N"]:
    """One of `products`."""
    return matmuls(x, None, (weight,), dims, how, into)[0]


def matmuls(
    x: Float[Array, "B T *K"],
    most: Float[Array, "B T 1"] | None,
    weights: Sequence[Weight],
    dims: int,
    how: MatmulQuantizer,
    into: bool,
) -> list[Float[Array, "B T *N"]]:
    """`LowPrecision.product` with each weight, in the type of `x`.

    `into`: a layer's inside is what they make. `most` is the largest number of each token, if that
    is known.
    """
    return list(_matmuls(x, most, tuple(weights), dims, how, into))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _matmuls(
    x: Array, most: Any, weights: tuple[Weight, ...], dims: int, how: MatmulQuantizer, into: bool
) -> tuple[Array, ...]:
    mine: Array | QuantizedArray = x
    if how.scales != "block":
        mine = how.quantize_tokens(x, most)
        # Who has several products rounds once; one alone may do so where it reads.
        mine = lax.optimization_barrier(mine) if into else mine
    return tuple(how.matmul(mine, each, dims).compute().astype(x.dtype) for each in weights)


def _matmuls_forward(
    x: Array, most: Any, weights: tuple[Weight, ...], dims: int, how: MatmulQuantizer, into: bool
) -> Any:
    found = _matmuls(x, most, weights, dims, how, into)
    return found, (x, most, tuple(map(weight_residual, weights)))


def _matmuls_backward(
    dims: int, how: MatmulQuantizer, into: bool, saved: Any, cotangents: tuple[Array, ...]
) -> Any:
    x, most, weights = saved
    d_xs, d_weights = [], []
    for cotangent, weight in zip(cotangents, weights, strict=True):
        mine: Array | QuantizedArray = cotangent
        if how.scales != "block":
            mine = how.quantize_tokens(cotangent, gradient=True)
            mine = lax.optimization_barrier(mine)
        # Sums over a token's whole width, as norms have, make a product behind which they stand
        # slow.
        d_x = how.input_grad(mine, weight.weight, dims).compute().astype(x.dtype)
        d_xs.append(lax.optimization_barrier(d_x))
        inside = mine if into and how.weight_gradients else cotangent
        make = partial(weight_grad, x, inside, how, into=into, most=most if into else None)
        d_weights.append(weight.gradient(make, x.dtype))
    return sum(d_xs[1:], d_xs[0]), None, tuple(d_weights)


class WeightResidual(NamedTuple):
    """A weight for the backward pass."""

    weight: Weight
    trained: Any
    """Its form says whether the weight has a gradient."""

    def gradient(self, make: Callable[[], Array], dtype: Any) -> Any:
        """In the form of the weight."""
        if self.trained is None:
            return None
        if not isinstance(self.weight, QuantizedWeight):
            return make().astype(self.weight.dtype)
        nothing: Any = None  # of integers
        return QuantizedWeight(nothing, None, make().astype(dtype))


def weight_residual(weight: Weight) -> WeightResidual:
    """Of what a product is given."""
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
) -> Float[Array, "*I *O"]:
    """A weight's gradient, as chosen."""
    if how.weight_gradients:
        return how.weight_grad(x, cotangent, into=into, over=over, most=most)
    # Else XLA for TPU puts into it what makes them, which it writes for other products anyway.
    x, cotangent = lax.optimization_barrier((x, cotangent))
    assert not isinstance(x, QuantizedArray) and not isinstance(cotangent, QuantizedArray)
    return _dot_general(x, cotangent, ((0, 1), (0, 1)))


_matmuls.defvjp(_matmuls_forward, _matmuls_backward)


# Of many matrices at once: what numbers in 8 bits stand for, multiplied in compute type.


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def quantized_einsum(form: str, x: Array, weight: Array, how: MatmulQuantizer) -> Array:
    """`jnp.einsum` with both operands rounded, and the cotangent for the gradient to `x`.

    The letter e, of experts, counts the weight's matrices.
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
        weight, dims.contracted_of_weight, each=dims.batch_of_weight
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
    """Dims of the operands and of the result of a product."""

    contracted_of_x: Dims
    contracted_of_weight: Dims
    """Of the weight, summed over."""
    batch_of_weight: Dims
    """Of the weight: which matrix."""
    contracted_of_result: Dims
    """In the gradient to `x`."""

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
