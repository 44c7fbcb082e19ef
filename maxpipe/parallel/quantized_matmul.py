"""8-bit matmuls between activations and weights, and their gradients.

Every token has a separate scale in the forward and backward passes, so results depend neither on
other sequences in the batch nor on sharding. With `channel` and `tensor` scales, the 8-bit operands
are multiplied and the scales are applied to the sums. With `block` scales, each block along the
contracted dim is rounded to 8-bit numbers times a power of two. The dequantized operands are then
multiplied in the activation dtype, which represents them exactly. With `mxfp8`, each block of 32
numbers along the contracted dim has its own scale, and GPUs multiply the scaled blocks
(`block_scales`).

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

from maxpipe.parallel import block_scales
from maxpipe.parallel.axes import QUANTIZATION_BLOCK
from maxpipe.parallel.block_scales import MatmulSharding, OperandSpecs, QuantizedArray
from maxpipe.parallel.collectives import axis_size, mark_varying, max_over, with_layout
from maxpipe.parallel.mesh import CONTEXT

MAX_UNROLLED_SEQUENCES = 4
"""Maximum number of sequences for which matmuls are unrolled, so that XLA fuses the additions
between them."""
_MIN_SCALE = 1e-30
"""Minimum scale, used if all elements are 0 or would be rounded to 0."""

Dims = Sequence[int]


@dataclass(frozen=True)
class MatmulQuantizer:
    """Quantizer for the operands of matmuls."""

    format: Literal["int8", "fp8", "mxfp8"]
    scales: Literal["channel", "tensor", "block"]
    """Granularity of the weight scales. Ignored by mxfp8, which defines its own blocks."""
    weight_gradients: bool
    """Whether the matmuls that compute weight gradients are quantized."""
    attention: bool = True
    """Whether the attention projections are quantized."""

    @property
    def is_microscaled(self) -> bool:
        """Return whether each block along the contracted dim has its own scale, as in mxfp8."""
        return self.format == "mxfp8"

    @property
    def can_prequantize(self) -> bool:
        """Return whether a quantized weight is an 8-bit array with scales."""
        return self.is_microscaled or self.scales != "block"

    @property
    def has_token_scales(self) -> bool:
        """Return whether every token has one scale."""
        return self.can_prequantize and not self.is_microscaled

    @property
    def reuses_token_operands(self) -> bool:
        """Return whether weight gradients reuse the quantized operands of other matmuls."""
        return self.weight_gradients and self.has_token_scales

    def operand_dtype(self, *, gradient: bool = False) -> Any:
        """Return the operands' 8-bit dtype, which is e5m2 for fp8 gradients without blocks."""
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
        """Quantize with one scale per token. `most` is the maximum absolute value in each token, if
        known.
        """
        if self.is_microscaled:
            return block_scales.quantize_blocks(x, -1)
        most = None if most is None else most.reshape(*most.shape[:2], *(1,) * (x.ndim - 2))
        quantized = quantize_array(
            x, range(2, x.ndim), self.operand_dtype(gradient=gradient), over, most
        )
        if x.ndim > 3:
            return quantized
        # Otherwise, XLA for TPU would use the layout of attention, in which tokens are the last
        # dim, and add a copy.
        return quantized._replace(values=with_layout(quantized.values, (0, 1, 2)))

    def matmul(
        self,
        x: Float[Array, "*rows *K"] | QuantizedArray,
        weight: Weight,
        dims: int,
        *,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
        sharding: MatmulSharding | None = None,
    ) -> ScaledMatmul:
        """Return the matmul that contracts the last `dims` dims of `x` with the first `dims` dims
        of `weight`.

        Mesh axes in `over` shard the contracted dims. Mesh axes in `around` shard any dims of the
        weight. The caller must sum the result over the axes in `over`. Only mxfp8 reads `sharding`,
        which is None if the sharding is unknown.
        """
        ndim = x.values.ndim if isinstance(x, QuantizedArray) else x.ndim
        summed = tuple(range(ndim - dims, ndim)), tuple(range(dims))
        if self.is_microscaled:
            return self._microscaled_matmul(x, weight, summed, sharding)
        if self.scales == "block":
            assert not isinstance(weight, QuantizedWeight) and not isinstance(x, QuantizedArray)
            operand = quantize_dequantize_blocks(x, summed[0][-1:], self.operand_dtype())
            return ScaledMatmul(
                TokenOperand(operand), self._quantize_dequantize_squares(weight, dims), None, summed
            )
        operand = (
            x
            if isinstance(x, QuantizedArray)
            else quantize_array(x, summed[0], self.operand_dtype(), over)
        )
        theirs = self.quantize_weight_operand(weight, summed[1], over, around)
        rows = operand.values.shape[: ndim - dims]
        of_x = operand.scales.reshape(*rows, *(1,) * (weight.ndim - dims))
        of_weight = theirs.scales.reshape(theirs.scales.shape[dims:])
        return ScaledMatmul(TokenOperand(operand.values, of_x), theirs.values, of_weight, summed)

    def input_grad(
        self,
        cotangent: Float[Array, "*rows *N"] | QuantizedArray,
        weight: Weight,
        dims: int,
        *,
        over: Sequence[str] = (),
        around: Sequence[str] = (),
        sharding: MatmulSharding | None = None,
    ) -> ScaledMatmul:
        """Return the matmul that computes the gradient of `matmul` with respect to `x`.

        `dims` is the number of dims in `K`. Mesh axes in `over` shard `N`. Mesh axes in `around`
        shard `N` or `K`. `sharding` is described in `matmul`.
        """
        outputs = tuple(range(dims, weight.ndim))
        ndim = cotangent.values.ndim if isinstance(cotangent, QuantizedArray) else cotangent.ndim
        summed = tuple(range(ndim - len(outputs), ndim)), outputs
        kind = self.operand_dtype(gradient=True)
        if self.is_microscaled:
            return self._microscaled_matmul(cotangent, weight, summed, sharding, back=True)
        if self.scales == "block":
            assert not isinstance(weight, QuantizedWeight) and not isinstance(
                cotangent, QuantizedArray
            )
            operand = quantize_dequantize_blocks(cotangent, summed[0][-1:], kind)
            return ScaledMatmul(
                TokenOperand(operand), self._quantize_dequantize_squares(weight, dims), None, summed
            )
        theirs = self.quantize_weight_operand(weight, outputs, over, around, back=True)
        operand = cotangent
        if not isinstance(operand, QuantizedArray):
            operand = quantize_array(operand, summed[0], kind, over)
        of_mine = operand.scales.reshape(*operand.values.shape[: summed[0][0]], *(1,) * dims)
        of_weight = theirs.scales.reshape(theirs.scales.shape[:dims])
        return ScaledMatmul(TokenOperand(operand.values, of_mine), theirs.values, of_weight, summed)

    def _microscaled_matmul(
        self,
        tokens: Array | QuantizedArray,
        weight: Weight,
        summed: tuple[Dims, Dims],
        sharding: MatmulSharding | None,
        *,
        back: bool = False,
    ) -> ScaledMatmul:
        if not isinstance(tokens, QuantizedArray):
            tokens = self.quantize_tokens(tokens)
        theirs = self.quantize_weight_operand(weight, summed[1], back=back)
        specs = sharding and (sharding.of_tokens(summed[1]), sharding.weight)
        return ScaledMatmul(TokenOperand(*tokens), *theirs, summed, True, specs)

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
        """Quantize a weight for its forward and backward matmuls.

        The weight has `first` stacked dims, followed by `dims` contracted dims (`K`). Mesh axes in
        `over` shard the dim `divided`.
        """
        inside = range(first, first + dims)
        outputs = range(first + dims, weight.ndim)
        forward, back = (
            self.quantize_weight_operand(
                weight, summed, over if divided in summed else (), over, each=each
            )
            for each in [range(first)]
            for summed in (inside, outputs)
        )
        is_shared = self.scales == "tensor" and not self.is_microscaled
        return QuantizedWeight(forward, None if is_shared else back)

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
        """Quantize a weight for a matmul; `summed` are the contracted dims, and `each` the batch
        dims.
        """
        if isinstance(weight, QuantizedWeight):
            return weight.backward if back and weight.backward is not None else weight.forward
        if self.is_microscaled:
            return block_scales.quantize_blocks(weight, summed[-1])
        if self.scales == "tensor":
            whole = [dim for dim in range(weight.ndim) if dim not in each]
            return quantize_array(weight, whole, self.operand_dtype(), around)
        return quantize_array(weight, summed, self.operand_dtype(), over)

    def quantize_dequantize(
        self, x: Array, dims: Dims, *, over: Sequence[str] = (), gradient: bool = False
    ) -> Array:
        """Quantize `x` with one scale over `dims`, and dequantize it to the dtype of `x`."""
        kind = self.operand_dtype(gradient=gradient)
        if self.is_microscaled:
            return block_scales.quantize_dequantize(x, dims[-1])
        if self.scales == "block":
            return quantize_dequantize_blocks(x, dims[-1:], kind)
        values, scale = quantize_array(x, dims, kind, over)
        return (values.astype(jnp.float32) * scale).astype(x.dtype)

    def quantize_dequantize_weight(
        self,
        weight: Array,
        inside: Dims,
        *,
        each: Dims = (),
        over: Sequence[str] = (),
        around: Sequence[str] = (),
        back: bool = False,
    ) -> Array:
        """Quantize and dequantize a weight; `inside` are the contracted dims of the forward matmul,
        and `each` the batch dims.

        `back` means that the matmul computes the input gradient. It matters only for mxfp8, whose
        blocks then lie along an output dim.
        """
        if self.is_microscaled:
            outputs = [dim for dim in range(weight.ndim) if dim not in (*inside, *each)]
            return block_scales.quantize_dequantize(weight, (outputs if back else inside)[-1])
        if self.scales == "block":
            own = [dim for dim in range(weight.ndim) if dim not in (*inside, *each)]
            return quantize_dequantize_blocks(weight, (inside[-1], own[-1]), self.operand_dtype())
        values, scale = self.quantize_weight_operand(weight, inside, over, around, each=each)
        return (values.astype(jnp.float32) * scale).astype(weight.dtype)

    def weight_grad(
        self,
        x: Float[Array, "B T *I"] | QuantizedArray,
        cotangent: Float[Array, "B T *O"] | QuantizedArray,
        *,
        into: bool,
        over: Sequence[str] = (),
        most: Float[Array, "B T 1"] | None = None,
        sharding: MatmulSharding | None = None,
    ) -> Float[Array, "*I *O"]:
        """Return a float32 weight gradient, summed over sequences and tokens.

        If `into` is set, the weight is an input projection of attention or an MLP, and the inner
        operand is the cotangent. Otherwise, the weight is an output projection, and the inner
        operand is `x`. The inner operand has one scale per token. If the inner operand is already
        quantized, its 8-bit numbers are reused. The inner operand's hidden width is sharded over
        the mesh axes in `over`. The outer operand is pre-multiplied by the inner operand's
        per-token scales and quantized with one scale per sequence. `most` contains the maximum
        absolute value in each token of the outer operand, if known.

        With mxfp8, both operands are quantized in blocks of tokens of the same sequence. `sharding`
        is described in `matmul`.
        """
        if self.is_microscaled:
            assert not isinstance(x, QuantizedArray) and not isinstance(cotangent, QuantizedArray)
            dims = x.ndim - 2
            specs = sharding and sharding.of_weight_grad(dims, dims + cotangent.ndim - 2)
            left, right = (block_scales.quantize_blocks(each, 1) for each in (x, cotangent))
            return block_scales.matmul(left, right, ((0, 1), (0, 1)), specs)
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
            rows, cotangents, tokens, most = row
            if self.scales == "block":
                pair = (
                    quantize_dequantize_blocks(array, (0,), self.operand_dtype())
                    for array in (cotangents, rows)
                )
                first, second = pair if into else reversed(tuple(pair))
                return _dot_general(first, second, ((0,), (0,)))
            scale = compute_scale(max_over((tokens * most).max(), moved), kind)
            cotangents = _round_to_dtype(cotangents.astype(jnp.float32) * (tokens / scale), kind)
            # Without the barrier, XLA would repeat the rounding for each slice of the matmul.
            cotangents = lax.optimization_barrier(cotangents)
            first, second = (cotangents, rows) if into else (rows, cotangents)
            return _dot_general(first, second, ((0,), (0,))) * scale

        rows = (inside, other, tokens, most)
        if len(other) <= MAX_UNROLLED_SEQUENCES:
            products = [of_row(row) for row in zip(*rows, strict=True)]
            return sum(products[1:], products[0])
        shape = (*(other if into else inside).shape[2:], *(inside if into else other).shape[2:])
        add = lambda total, row: (total + of_row(row), None)  # noqa: E731
        return lax.scan(add, mark_varying(jnp.zeros(shape, jnp.float32)), rows)[0]


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is already quantized for its matmuls."""

    forward: QuantizedArray
    backward: QuantizedArray | None
    """Quantized weight used to compute the gradient of the other operand. If None, `forward` is
    used.
    """
    gradient: Array | None = None
    """Zeros with the shape and dtype of the weight gradient. Autodiff differentiates with respect
    to these zeros instead of the weight."""

    @property
    def ndim(self) -> int:
        """Return the number of dims of the weight."""
        return self.forward.values.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the weight."""
        return self.forward.values.shape

    def astype(self, dtype: Any) -> QuantizedWeight:
        """Return the weight unchanged, because its matmuls support any dtype."""
        del dtype
        return self

    def __getitem__(self, key: Any) -> QuantizedWeight:
        """Return the weight unchanged; the only supported index is `...`."""
        assert key is ...
        return self


Weight = Array | QuantizedWeight


def is_quantized_weight(tree: Any) -> bool:
    """Return whether `tree` is an 8-bit weight instead of an array."""
    return isinstance(tree, QuantizedWeight)


class TokenOperand(NamedTuple):
    """A matmul operand whose rows are tokens."""

    values: Float[Array, "*rows *K"]
    scales: Float[Array, "*rows ..."] | None = None
    """Scales by which the matmul result is multiplied."""


class ScaledMatmul(NamedTuple):
    """A quantized matmul that has not been computed yet, but whose scales are known."""

    tokens: TokenOperand
    weight: Array
    weight_scales: Float[Array, ...] | None
    contracted_dims: tuple[Dims, Dims]
    is_microscaled: bool = False
    """Whether blocks along the last contracted dim have their own scales."""
    specs: OperandSpecs | None = None
    """Specs of the operands, if known. Only set if `is_microscaled` is set."""

    def compute_for(self, rows: TokenOperand) -> Float[Array, ...]:
        """Compute the float32 result for a subset of the tokens."""
        if self.is_microscaled:
            assert rows.scales is not None and self.weight_scales is not None
            left = QuantizedArray(rows.values, rows.scales)
            right = QuantizedArray(self.weight, self.weight_scales)
            return block_scales.matmul(left, right, self.contracted_dims, self.specs)
        product = _dot_general(rows.values, self.weight, self.contracted_dims)
        for scale in (rows.scales, self.weight_scales):
            product = product if scale is None else product * scale
        return product

    def compute(self) -> Float[Array, ...]:
        """Compute the float32 result for all tokens."""
        return self.compute_for(self.tokens)


def quantize_array(
    x: Array, dims: Dims, dtype: Any, over: Sequence[str] = (), most: Array | None = None
) -> QuantizedArray:
    """Return an array of `dtype` and scales (of size 1 in `dims`) whose product approximates `x`.

    A non-finite element makes its scale non-finite, and therefore also every result that uses this
    scale. Mesh axes in `over` shard `dims`. `most` is the maximum absolute value, if known.
    """
    most = compute_max_abs(x, dims) if most is None else most
    scale = compute_scale(max_over(most, over), dtype)
    return QuantizedArray(_round_to_dtype(x.astype(jnp.float32) * (1 / scale), dtype), scale)


def compute_max_abs(x: Array, dims: Dims) -> Array:
    """Return the float32 maximum absolute value over `dims`, keeping `dims` with size 1."""
    return jnp.abs(x).max(tuple(dims), keepdims=True).astype(jnp.float32)


def compute_scale(most: Array, dtype: Any) -> Array:
    """Return the scale for an array with this maximum absolute value."""
    return jnp.maximum(most / max_of_dtype(dtype), _MIN_SCALE)


def quantize_dequantize_blocks(x: Array, dims: Dims, dtype: Any) -> Array:
    """Round `x` to numbers of `dtype` times a power of two for each block of `dims`.

    The result has the dtype of `x`, which represents these products exactly.
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
    rounded = _round_to_dtype(split / scale, dtype).astype(jnp.float32) * scale
    return rounded.astype(x.dtype).reshape(x.shape)


def _next_power_of_two(x: Array) -> Array:
    fraction, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(x), exponent - (fraction == 0.5).astype(exponent.dtype))


def max_of_dtype(dtype: Any) -> float:
    """Return the largest finite value of an 8-bit dtype."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def _round_to_dtype(x: Array, dtype: Any) -> Array:
    x = jnp.clip(x, -max_of_dtype(dtype), max_of_dtype(dtype))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def _dot_general(x: Array, y: Array, summed: tuple[Dims, Dims]) -> Float[Array, ...]:
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    product = lax.dot_general(x, y, (summed, ((), ())), preferred_element_type=sums)
    return product.astype(jnp.float32)


# Matmuls with custom gradients.


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
) -> list[Float[Array, "B T *N"]]:
    """Multiply `x` by each weight with `MatmulQuantizer.matmul`, preserving the dtype of `x`.

    If `into` is set, the weights are input projections of attention or an MLP. `most` is the
    maximum absolute value in each token, if known. `shardings` contains the sharding of each
    weight (`MatmulQuantizer.matmul`), or is empty.
    """
    shardings = tuple(shardings) or (None,) * len(weights)
    return list(_matmuls(x, most, tuple(weights), dims, how, into, shardings))


Shardings = Sequence[MatmulSharding | None]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _matmuls(
    x: Array,
    most: Any,
    weights: tuple[Weight, ...],
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings,
) -> tuple[Array, ...]:
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
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings,
) -> Any:
    products = _matmuls(x, most, weights, dims, how, into, shardings)
    return products, (x, most, tuple(map(weight_residual, weights)))


def _matmuls_backward(
    dims: int,
    how: MatmulQuantizer,
    into: bool,
    shardings: Shardings,
    saved: Any,
    cotangents: tuple[Array, ...],
) -> Any:
    x, most, weights = saved
    d_xs, d_weights = [], []
    for cotangent, weight, sharding in zip(cotangents, weights, shardings, strict=True):
        quantized: Array | QuantizedArray = cotangent
        if how.can_prequantize:
            quantized = how.quantize_tokens(cotangent, gradient=True)
            quantized = lax.optimization_barrier(quantized)
        # Without the barrier, reductions over a token's full width, as in norms, would be fused
        # into the matmul and slow it down.
        product = how.input_grad(quantized, weight.weight, dims, sharding=sharding)
        d_x = product.compute().astype(x.dtype)
        d_xs.append(lax.optimization_barrier(d_x))
        inside = quantized if into and how.reuses_token_operands else cotangent
        most_of_x = most if into else None
        make = partial(weight_grad, x, inside, how, into=into, most=most_of_x, sharding=sharding)
        d_weights.append(weight.gradient(make, x.dtype))
    return sum(d_xs[1:], d_xs[0]), None, tuple(d_weights)


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
) -> Float[Array, "*I *O"]:
    """Return a weight's gradient, from quantized operands if `weight_gradients` is set."""
    if how.weight_gradients:
        return how.weight_grad(x, cotangent, into=into, over=over, most=most, sharding=sharding)
    # Without the barrier, XLA for TPU would fuse the producers of both operands, although other
    # matmuls already store the operands.
    x, cotangent = lax.optimization_barrier((x, cotangent))
    assert not isinstance(x, QuantizedArray) and not isinstance(cotangent, QuantizedArray)
    return _dot_general(x, cotangent, ((0, 1), (0, 1)))


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
