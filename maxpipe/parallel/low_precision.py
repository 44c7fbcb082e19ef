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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from maxpipe.config.model_rules import BLOCK
from maxpipe.config.schema import ModelConfig
from maxpipe.parallel.collectives import max_over, size_of
from maxpipe.parallel.mesh import CONTEXT
from maxpipe.parallel.per_device import vary

UNROLLED = 4
"""Rows of the batch up to which XLA adds their products up where it makes them."""
_LEAST_SCALE = 1e-30
"""Of numbers that are all 0, or may be rounded to it."""

Dims = Sequence[int]


@dataclass(frozen=True)
class LowPrecision:
    """Of which form the operands of products are."""

    format: Literal["int8", "fp8"]
    scales: Literal["channel", "tensor", "block"]
    """What has a scale in weights."""
    weight_gradients: bool
    """Whether products that make gradients of weights are of that form, too."""
    attention: bool = True
    """Whether projections of attention are."""

    @classmethod
    def of(cls, config: ModelConfig) -> LowPrecision | None:
        """None: products in compute type."""
        if config.matmul == "default":
            return None
        own, everywhere = config.matmul_weight_gradients == "same", config.matmul_parts == "all"
        return cls(config.matmul, config.matmul_scales, own, everywhere)

    def type_of(self, *, gradient: bool = False) -> Any:
        """Of the 8-bit numbers. Gradients in fp8 need range more than digits, if not in blocks."""
        if self.format == "int8":
            return jnp.int8
        return jnp.float8_e5m2 if gradient and self.scales != "block" else jnp.float8_e4m3fn

    def product(
        self,
        x: Float[Array, "*rows *K"],
        weight: Weight,
        dims: int,
        *,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> Product:
        """Over the last `dims` dims of one and the first of the other.

        Axes of the program divide these dims if they are in `over`, the weight's dims, these or
        others, if they are in `around`. The sum over them is the caller's.
        """
        summed = tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims))
        if self.scales == "block":
            assert not isinstance(weight, Rounded)
            mine = in_blocks(x, summed[0][-1:], self.type_of())
            return Product(Rows(mine), self._in_squares(weight, dims), None, summed)
        mine = scaled(x, summed[0], self.type_of(), over)
        theirs = self.of_weight(weight, summed[1], over, around)
        of_x = mine.scales.reshape(*x.shape[: x.ndim - dims], *(1,) * (weight.ndim - dims))
        of_weight = theirs.scales.reshape(theirs.scales.shape[dims:])
        return Product(Rows(mine.numbers, of_x), theirs.numbers, of_weight, summed)

    def back(
        self,
        cotangent: Float[Array, "*rows *N"],
        weight: Weight,
        dims: int,
        *,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> Product:
        """The gradient of `product` to its first operand.

        `dims` are those of `K`. Axes of the program divide `N` if they are in `over`, `N` or `K` if
        they are in `around`.
        """
        rest = tuple(range(dims, weight.ndim))
        summed = tuple(range(cotangent.ndim - len(rest), cotangent.ndim)), rest
        kind = self.type_of(gradient=True)
        if self.scales == "block":
            assert not isinstance(weight, Rounded)
            mine = in_blocks(cotangent, summed[0][-1:], kind)
            return Product(Rows(mine), self._in_squares(weight, dims), None, summed)
        theirs = self.of_weight(weight, rest, over, around, back=True)
        mine = scaled(cotangent, summed[0], kind, over)
        of_mine = mine.scales.reshape(*cotangent.shape[: summed[0][0]], *(1,) * dims)
        of_weight = theirs.scales.reshape(theirs.scales.shape[:dims])
        return Product(Rows(mine.numbers, of_mine), theirs.numbers, of_weight, summed)

    def _in_squares(self, weight: Array, dims: int) -> Array:
        return in_blocks(weight, (dims - 1, weight.ndim - 1), self.type_of())

    def rounds(
        self,
        weight: Array,
        first: int,
        dims: int,
        over: Sequence[str] = (),
        divided: int | None = None,
    ) -> Rounded:
        """A weight for all its products, or many with `first` dims in front; `dims` are those of K.

        Axes of the program divide its dim `divided` if they are in `over`.
        """
        inside = range(first, first + dims)
        rest = range(first + dims, weight.ndim)
        forward, back = (
            self.of_weight(weight, summed, over if divided in summed else (), over, each=each)
            for each in [range(first)]
            for summed in (inside, rest)
        )
        return Rounded(forward, None if self.scales == "tensor" else back)

    def of_weight(
        self,
        weight: Weight,
        summed: Dims,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
        *,
        back: bool = False,
        each: Dims = (),
    ) -> Scaled:
        """Rounded for a product over these dims, of many matrices if there are dims `each`."""
        if isinstance(weight, Rounded):
            return weight.back if back and weight.back is not None else weight.forward
        if self.scales == "tensor":
            whole = [dim for dim in range(weight.ndim) if dim not in each]
            return scaled(weight, whole, self.type_of(), around)
        return scaled(weight, summed, self.type_of(), over)

    def rounded(
        self, x: Array, dims: Dims, *, over: Sequence[str] = (), gradient: bool = False
    ) -> Array:
        """What numbers with a scale for these dims stand for, in the type of `x`."""
        kind = self.type_of(gradient=gradient)
        if self.scales == "block":
            return in_blocks(x, dims[-1:], kind)
        found, scale = scaled(x, dims, kind, over)
        return (found.astype(jnp.float32) * scale).astype(x.dtype)

    def rounded_weight(
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
            return in_blocks(weight, (inside[-1], own[-1]), self.type_of())
        found, scale = self.of_weight(weight, inside, over, around, each=each)
        return (found.astype(jnp.float32) * scale).astype(weight.dtype)

    def outer(
        self,
        x: Float[Array, "B T *I"],
        cotangent: Float[Array, "B T *O"],
        *,
        into: bool,
        over: Sequence[str] = (),
    ) -> Float[Array, "*I *O"]:
        """In float32: summed over rows and tokens.

        What is inside of a layer, cotangents of a projection `into` it, is in the numbers that
        other products have of it, with scales of tokens; axes of the program divide its width if
        they are in `over`. The other operand is multiplied with these scales, and has scales of its
        own for each row of the batch.
        """
        moved = (CONTEXT,) if size_of(CONTEXT) > 1 else ()
        inside, other = (cotangent, x) if into else (x, cotangent)
        if self.scales != "block":
            kind = self.type_of(gradient=into)
            inside, tokens = scaled(inside, range(2, inside.ndim), kind, over)
            tokens = tokens.reshape(*tokens.shape[:2], *(1,) * (other.ndim - 2))
            other = (other.astype(jnp.float32) * tokens).astype(other.dtype)
        kind = self.type_of(gradient=not into)

        def of_row(row: tuple[Array, Array]) -> Array:
            mine, theirs = row
            if self.scales == "block":
                pair = (in_blocks(each, (0,), self.type_of()) for each in (theirs, mine))
                first, second = pair if into else reversed(tuple(pair))
                return _multiplied(first, second, ((0,), (0,)))
            theirs, by = scaled(theirs, (0,), kind, moved)
            if into:
                by = by.reshape(*theirs.shape[1:], *(1,) * (mine.ndim - 1))
                return _multiplied(theirs, mine, ((0,), (0,))) * by
            return _multiplied(mine, theirs, ((0,), (0,))) * by[0]

        if len(x) <= UNROLLED:
            rows = [of_row(row) for row in zip(inside, other, strict=True)]
            return sum(rows[1:], rows[0])
        shape = (*x.shape[2:], *cotangent.shape[2:])
        add = lambda total, row: (total + of_row(row), None)  # noqa: E731
        return lax.scan(add, vary(jnp.zeros(shape, jnp.float32)), (inside, other))[0]


class Scaled(NamedTuple):
    """Numbers in 8 bits, and float32 scales that they are multiplied with."""

    numbers: Array
    scales: Array


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Rounded:
    """A weight that is rounded already, for the products that it is in."""

    forward: Scaled
    back: Scaled | None
    """For the gradient to what it is multiplied with; None if it is the same there."""
    gradient: Array | None = None
    """Zeros in whose place the weight is differentiated, of the type of its gradient."""

    @property
    def ndim(self) -> int:
        """Of the weight."""
        return self.forward.numbers.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.forward.numbers.shape

    def astype(self, dtype: Any) -> Rounded:
        """Products are in any type."""
        del dtype
        return self

    def __getitem__(self, key: Any) -> Rounded:
        """All of it."""
        assert key is ...
        return self


Weight = Array | Rounded


def is_rounded(tree: Any) -> bool:
    """Whether it is a weight in 8 bits, and not the arrays of one."""
    return isinstance(tree, Rounded)


class Rows(NamedTuple):
    """Operands of which each token has its own."""

    numbers: Float[Array, "*rows *K"]
    scales: Float[Array, "*rows ..."] | None = None
    """That the product's dims are multiplied with."""


class Product(NamedTuple):
    """A product in 8 bits, of which all scales are known, but not multiplied yet."""

    rows: Rows
    weight: Array
    of_weight: Float[Array, ...] | None
    summed: tuple[Dims, Dims]

    def of(self, rows: Rows) -> Float[Array, ...]:
        """In float32, of some of the tokens."""
        found = _multiplied(rows.numbers, self.weight, self.summed)
        for scale in (rows.scales, self.of_weight):
            found = found if scale is None else found * scale
        return found

    def whole(self) -> Float[Array, ...]:
        """In float32, of all of them."""
        return self.of(self.rows)


def scaled(x: Array, dims: Dims, dtype: Any, over: Sequence[str] = ()) -> Scaled:
    """Numbers of that type, and scales with these dims of size 1: their product is about `x`.

    What is not finite makes its scale so, and with it all that is computed of it. Devices along
    the axes `over` of the program have other numbers of the same dims.
    """
    most = jnp.abs(x).max(tuple(dims), keepdims=True).astype(jnp.float32)
    most = max_over(most, over)
    scale = jnp.maximum(most / largest(dtype), _LEAST_SCALE)
    return Scaled(_rounded(x.astype(jnp.float32) / scale, dtype), scale)


def in_blocks(x: Array, dims: Dims, dtype: Any) -> Array:
    """`x` as numbers of that type times powers of two, one for each block in these dims.

    In the type of `x`, which holds all of them.
    """
    shape: list[int] = []
    inner: list[int] = []
    for dim, size in enumerate(x.shape):
        block = math.gcd(size, BLOCK) if dim in dims else 1
        shape += [size // block, block]
        inner += [len(shape) - 1]
    split = x.reshape(shape).astype(jnp.float32)
    most = jnp.abs(split).max(inner, keepdims=True)
    scale = _power_of_two(jnp.maximum(most / largest(dtype), _LEAST_SCALE))
    scale = jnp.where(jnp.isfinite(most), scale, most)
    found = _rounded(split / scale, dtype).astype(jnp.float32) * scale
    return found.astype(x.dtype).reshape(x.shape)


def _power_of_two(x: Array) -> Array:
    """The least that is not below."""
    fraction, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(x), exponent - (fraction == 0.5).astype(exponent.dtype))


def largest(dtype: Any) -> float:
    """Number of an 8-bit type."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def _rounded(x: Array, dtype: Any) -> Array:
    x = jnp.clip(x, -largest(dtype), largest(dtype))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def _multiplied(x: Array, y: Array, summed: tuple[Dims, Dims]) -> Float[Array, ...]:
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    found = lax.dot_general(x, y, (summed, ((), ())), preferred_element_type=sums)
    return found.astype(jnp.float32)


# A product with gradients of its own.


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(
    x: Float[Array, "B T *K"], weight: Weight, dims: int, how: LowPrecision, into: bool
) -> Float[Array, "B T *N"]:
    """`LowPrecision.product`, in the type of `x`. `into`: a layer's inside is what it makes."""
    return how.product(x, weight, dims).whole().astype(x.dtype)


def _product_forward(x: Array, weight: Weight, dims: int, how: LowPrecision, into: bool) -> Any:
    found = product(x, weight, dims, how, into)
    if not isinstance(weight, Rounded):
        return found, (x, weight, ())
    # The form of what is kept says whether it has a gradient.
    return found, (x, replace(weight, gradient=None), None if weight.gradient is None else ())


def _product_backward(
    dims: int, how: LowPrecision, into: bool, saved: tuple[Array, Weight, Any], cotangent: Array
) -> tuple[Array, Any]:
    x, weight, trained = saved
    # Sums over a token's whole width, as norms have, make a product behind which they stand slow.
    d_x = lax.optimization_barrier(how.back(cotangent, weight, dims).whole().astype(x.dtype))
    if trained is None:
        return d_x, None
    d_weight = outer(x, cotangent, how, into=into)
    if isinstance(weight, Rounded):
        nothing: Any = None  # of integers
        return d_x, Rounded(nothing, None, d_weight.astype(x.dtype))
    return d_x, d_weight.astype(weight.dtype)


def outer(
    x: Array, cotangent: Array, how: LowPrecision, *, into: bool, over: Sequence[str] = ()
) -> Float[Array, "*I *O"]:
    """A weight's gradient, as chosen."""
    if how.weight_gradients:
        return how.outer(x, cotangent, into=into, over=over)
    # Else XLA for TPU puts into it what makes them, which it writes for other products anyway.
    x, cotangent = lax.optimization_barrier((x, cotangent))
    return _multiplied(x, cotangent, ((0, 1), (0, 1)))


product.defvjp(_product_forward, _product_backward)


# Of many matrices at once: what numbers in 8 bits stand for, multiplied in compute type.


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def rounded_einsum(form: str, x: Array, weight: Array, how: LowPrecision) -> Array:
    """`jnp.einsum` with both operands rounded, and the cotangent for the gradient to `x`.

    The letter e, of experts, counts the weight's matrices.
    """
    dims = _Letters.of(form)
    x = how.rounded(x, dims.summed_of_x)
    return jnp.einsum(form, x, how.rounded_weight(weight, dims.inside, each=dims.each))


def _rounded_einsum_backward(
    form: str, how: LowPrecision, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    (x, weight), dims = saved, _Letters.of(form)
    rounded = how.rounded_weight(weight, dims.inside, each=dims.each)
    (d_x,) = jax.vjp(lambda x: jnp.einsum(form, x, rounded), x)[1](
        how.rounded(cotangent, dims.summed_of_result, gradient=True)
    )
    (d_weight,) = jax.vjp(lambda weight: jnp.einsum(form, x, weight), weight)[1](cotangent)
    return d_x, d_weight


rounded_einsum.defvjp(
    lambda form, x, weight, how: (rounded_einsum(form, x, weight, how), (x, weight)),
    _rounded_einsum_backward,
)


class _Letters(NamedTuple):
    """Dims of the operands and of the result of a product."""

    summed_of_x: Dims
    inside: Dims
    """Of the weight, summed over."""
    each: Dims
    """Of the weight: which matrix."""
    summed_of_result: Dims
    """In the gradient to `x`."""

    @classmethod
    def of(cls, form: str) -> _Letters:
        operands, result = form.split("->")
        x, weight = operands.split(",")
        inside = [letter for letter in weight if letter in x and letter not in result]
        return cls(
            tuple(map(x.index, inside)),
            tuple(map(weight.index, inside)),
            tuple(dim for dim, letter in enumerate(weight) if letter == "e"),
            tuple(dim for dim, letter in enumerate(result) if letter in weight and letter not in x),
        )
