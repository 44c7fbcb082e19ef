"""Quantizers for the operands of 8-bit matmuls between activations and weights.

Every token has a separate scale in the forward and backward passes, so results depend neither on
other sequences in the batch nor on sharding. With `channel` and `tensor` scales, the 8-bit operands
are multiplied and the scales are applied to the sums. With `block` scales, each block along the
contracted dim is rounded to 8-bit numbers times a power of two. The dequantized operands are then
multiplied in the activation dtype, which represents them exactly. With `mxfp8` and `nvfp4`, each
block along the contracted dim has its own scale, and GPUs multiply the scaled blocks
(`block_scaled_matmul`).

Sources: scaled integers, arXiv:1712.05877; fp8 with e5m2 gradients, arXiv:2209.05433; blocks,
DeepSeek-V3 (arXiv:2412.19437) and the OCP microscaling formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float

from maxpipe.parallel import block_scaled_matmul, mxfp8, nvfp4, stochastic_rounding
from maxpipe.parallel.block_scaled_matmul import BlockFormat, MatmulSharding, OperandSpecs
from maxpipe.parallel.collectives import axis_size, mark_varying, max_over, with_layout
from maxpipe.parallel.mesh import CONTEXT
from maxpipe.parallel.quantized_array import (
    Dims,
    QuantizedArray,
    compute_max_abs,
    compute_scale,
    dot_general,
    quantize_array,
    quantize_dequantize_blocks,
    round_to_dtype,
)
from maxpipe.parallel.stochastic_rounding import TokenKeys

MAX_UNROLLED_SEQUENCES = 4
"""Maximum number of sequences for which matmuls are unrolled, so that XLA fuses the additions
between them."""


@dataclass(frozen=True)
class MatmulQuantizer:
    """Quantizer for the operands of matmuls."""

    format: Literal["int8", "fp8", "mxfp8", "nvfp4"]
    scales: Literal["channel", "tensor", "block"]
    """Granularity of the weight scales. Ignored by mxfp8 and nvfp4, which define their own
    blocks."""
    weight_gradients: bool
    """Whether the matmuls that compute weight gradients are quantized."""
    attention: bool = True
    """Whether the attention projections are quantized."""

    @property
    def block_format(self) -> BlockFormat | None:
        """Return the format if each block along the contracted dim has its own scale, else None."""
        return None if self.format in ("int8", "fp8") else self.format

    @property
    def rounds_stochastically(self) -> bool:
        """Return whether cotangents are rounded stochastically."""
        return self.format == "nvfp4"

    @property
    def can_prequantize(self) -> bool:
        """Return whether a quantized weight is an array of 4 or 8 bits with scales."""
        return self.block_format is not None or self.scales != "block"

    @property
    def has_token_scales(self) -> bool:
        """Return whether every token has one scale."""
        return self.can_prequantize and self.block_format is None

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
        keys: TokenKeys | None = None,
    ) -> QuantizedArray:
        """Quantize with one scale per token. `most` is the maximum absolute value in each token, if
        known. `keys` are the keys of stochastic rounding, which only nvfp4 uses.
        """
        if self.format == "mxfp8":
            return mxfp8.quantize_blocks(x, -1)
        if self.format == "nvfp4":
            random = None if keys is None else stochastic_rounding.uniform(keys, x.shape, over)
            return nvfp4.quantize_blocks(x, range(2, x.ndim), over, random)
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
        weight. The caller must sum the result over the axes in `over`. Only mxfp8 and nvfp4 read
        `sharding`, which is None if the sharding is unknown.
        """
        ndim = x.values.ndim if isinstance(x, QuantizedArray) else x.ndim
        summed = tuple(range(ndim - dims, ndim)), tuple(range(dims))
        if self.block_format is not None:
            if not isinstance(x, QuantizedArray):
                x = self.quantize_tokens(x, over=over)
            return self._block_scaled_matmul(x, weight, summed, around, sharding)
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
        keys: TokenKeys | None = None,
    ) -> ScaledMatmul:
        """Return the matmul that computes the gradient of `matmul` with respect to `x`.

        `dims` is the number of dims in `K`. Mesh axes in `over` shard `N`. Mesh axes in `around`
        shard `N` or `K`. `sharding` is described in `matmul`, and `keys` in `quantize_tokens`.
        """
        outputs = tuple(range(dims, weight.ndim))
        ndim = cotangent.values.ndim if isinstance(cotangent, QuantizedArray) else cotangent.ndim
        summed = tuple(range(ndim - len(outputs), ndim)), outputs
        kind = self.operand_dtype(gradient=True)
        if self.block_format is not None:
            if not isinstance(cotangent, QuantizedArray):
                cotangent = self.quantize_tokens(cotangent, over=over, gradient=True, keys=keys)
            return self._block_scaled_matmul(cotangent, weight, summed, around, sharding, back=True)
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

    def _block_scaled_matmul(
        self,
        tokens: QuantizedArray,
        weight: Weight,
        summed: tuple[Dims, Dims],
        around: Sequence[str],
        sharding: MatmulSharding | None,
        *,
        back: bool = False,
    ) -> ScaledMatmul:
        theirs = self.quantize_weight_operand(weight, summed[1], around=around, back=back)
        specs = sharding and (sharding.of_tokens(summed[1]), sharding.weight)
        operand = TokenOperand(tokens.values, tokens.scales)
        if tokens.row_scales is not None and theirs.row_scales is not None:
            # The result has the tokens' leading dims and the other dims of the weight.
            rows = tokens.row_scales.shape[: summed[0][0]]
            ones = (1,) * (weight.ndim - len(summed[1]))
            operand = operand._replace(row_scales=tokens.row_scales.reshape(*rows, *ones))
            theirs = theirs._replace(row_scales=theirs.row_scales.reshape(ones))
        return ScaledMatmul(
            operand,
            theirs.values,
            theirs.scales,
            summed,
            self.block_format,
            specs,
            theirs.row_scales,
        )

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
        if self.format == "nvfp4":
            return QuantizedWeight(*nvfp4.quantize_weight(weight, inside, outputs, over))
        forward, back = (
            self.quantize_weight_operand(
                weight, summed, over if divided in summed else (), over, each=each
            )
            for each in [range(first)]
            for summed in (inside, outputs)
        )
        is_shared = self.scales == "tensor" and self.block_format is None
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
        if self.format == "mxfp8":
            return mxfp8.quantize_blocks(weight, summed[-1])
        if self.format == "nvfp4":
            others = [dim for dim in range(weight.ndim) if dim not in summed]
            return nvfp4.quantize_weight(weight, summed, others, around)[0]
        if self.scales == "tensor":
            whole = [dim for dim in range(weight.ndim) if dim not in each]
            return quantize_array(weight, whole, self.operand_dtype(), around)
        return quantize_array(weight, summed, self.operand_dtype(), over)

    def quantize_dequantize(
        self, x: Array, dims: Dims, *, over: Sequence[str] = (), gradient: bool = False
    ) -> Array:
        """Quantize `x` with one scale over `dims`, and dequantize it to the dtype of `x`."""
        kind = self.operand_dtype(gradient=gradient)
        if self.format == "mxfp8":
            return mxfp8.quantize_dequantize(x, dims[-1])
        if self.scales == "block":
            return quantize_dequantize_blocks(x, dims[-1:], kind)
        values, scale, _ = quantize_array(x, dims, kind, over)
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
        if self.format == "mxfp8":
            outputs = [dim for dim in range(weight.ndim) if dim not in (*inside, *each)]
            return mxfp8.quantize_dequantize(weight, (outputs if back else inside)[-1])
        if self.scales == "block":
            own = [dim for dim in range(weight.ndim) if dim not in (*inside, *each)]
            return quantize_dequantize_blocks(weight, (inside[-1], own[-1]), self.operand_dtype())
        values, scale, _ = self.quantize_weight_operand(weight, inside, over, around, each=each)
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
        keys: TokenKeys | None = None,
    ) -> Float[Array, "*I *O"]:
        """Return a float32 weight gradient, summed over sequences and tokens.

        If `into` is set, the weight is an input projection of attention or an MLP, and the inner
        operand is the cotangent. Otherwise, the weight is an output projection, and the inner
        operand is `x`. The inner operand has one scale per token. If the inner operand is already
        quantized, its 8-bit numbers are reused. The inner operand's hidden width is sharded over
        the mesh axes in `over`. The outer operand is pre-multiplied by the inner operand's
        per-token scales and quantized with one scale per sequence. `most` contains the maximum
        absolute value in each token of the outer operand, if known.

        With mxfp8 and nvfp4, both operands are quantized in blocks of tokens of the same sequence.
        `sharding` is described in `matmul`, and `keys` in `quantize_tokens`.
        """
        if self.block_format is not None:
            assert not isinstance(x, QuantizedArray) and not isinstance(cotangent, QuantizedArray)
            dims = x.ndim - 2
            specs = sharding and sharding.of_weight_grad(dims, dims + cotangent.ndim - 2)
            if self.format == "nvfp4":
                random = None
                if keys is not None:
                    sharded = over if into else ()
                    random = stochastic_rounding.uniform(keys, cotangent.shape, sharded)
                return _nvfp4_weight_grad(x, cotangent, specs, random)
            left, right = (mxfp8.quantize_blocks(each, 1) for each in (x, cotangent))
            return block_scaled_matmul.matmul(left, right, ((0, 1), (0, 1)), "mxfp8", specs)
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
                return dot_general(first, second, ((0,), (0,)))
            scale = compute_scale(max_over((tokens * most).max(), moved), kind)
            cotangents = round_to_dtype(cotangents.astype(jnp.float32) * (tokens / scale), kind)
            # Without the barrier, XLA would repeat the rounding for each slice of the matmul.
            cotangents = lax.optimization_barrier(cotangents)
            first, second = (cotangents, rows) if into else (rows, cotangents)
            return dot_general(first, second, ((0,), (0,))) * scale

        return _sum_over_sequences(of_row, (inside, other, tokens, most))


def _nvfp4_weight_grad(
    x: Float[Array, "B T *I"],
    cotangent: Float[Array, "B T *O"],
    specs: OperandSpecs | None,
    random: Float[Array, "B T *O"] | None,
) -> Float[Array, "*I *O"]:
    """Return a float32 weight gradient; `random` are the numbers that round the cotangent."""
    left, right = (
        nvfp4.quantize_blocks(nvfp4.hadamard_transform(array), (1,), (CONTEXT,), numbers)
        for array, numbers in ((x, None), (cotangent, random))
    )
    of_sequence = specs and (PartitionSpec(*specs[0][1:]), PartitionSpec(*specs[1][1:]))

    def of_row(row: tuple[QuantizedArray, QuantizedArray]) -> Array:
        left, right = row
        assert left.row_scales is not None and right.row_scales is not None
        product = block_scaled_matmul.matmul(left, right, ((0,), (0,)), "nvfp4", of_sequence)
        channels = left.row_scales.reshape(*x.shape[2:], *(1,) * (cotangent.ndim - 2))
        return product * channels * right.row_scales[0]

    return _sum_over_sequences(of_row, (left, right))


def _sum_over_sequences(of_row: Callable[[Any], Array], rows: Any) -> Array:
    """Return the sum of `of_row` over the first dim of the arrays in the tree `rows`."""
    count = len(jax.tree.leaves(rows)[0])
    pick = lambda number: jax.tree.map(lambda leaf: leaf[number], rows)  # noqa: E731
    if count <= MAX_UNROLLED_SEQUENCES:
        products = [of_row(pick(number)) for number in range(count)]
        return sum(products[1:], products[0])
    shape = jax.eval_shape(of_row, pick(0)).shape
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
        shape = self.forward.values.shape
        if self.backward is None:
            return shape
        # 4-bit numbers are packed along a different dim in each direction.
        return tuple(map(max, shape, self.backward.values.shape))

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
    """Return whether `tree` is a quantized weight instead of an array."""
    return isinstance(tree, QuantizedWeight)


class TokenOperand(NamedTuple):
    """A matmul operand whose rows are tokens."""

    values: Float[Array, "*rows *K"]
    scales: Float[Array, "*rows ..."] | None = None
    """Scales by which the matmul result is multiplied, or block scales."""
    row_scales: Float[Array, "*rows ..."] | None = None
    """Scales by which the matmul result is multiplied in addition to block scales."""


class ScaledMatmul(NamedTuple):
    """A quantized matmul that has not been computed yet, but whose scales are known."""

    tokens: TokenOperand
    weight: Array
    weight_scales: Float[Array, ...] | None
    contracted_dims: tuple[Dims, Dims]
    block_format: BlockFormat | None = None
    """Format of operands whose blocks along the last contracted dim have their own scales."""
    specs: OperandSpecs | None = None
    """Specs of the operands, if known. Only set if `block_format` is set."""
    weight_row_scales: Float[Array, ...] | None = None
    """Scales of the weight by which the result is multiplied in addition to block scales."""

    def compute_for(self, rows: TokenOperand) -> Float[Array, ...]:
        """Compute the float32 result for a subset of the tokens."""
        if self.block_format is not None:
            assert rows.scales is not None and self.weight_scales is not None
            left = QuantizedArray(rows.values, rows.scales)
            right = QuantizedArray(self.weight, self.weight_scales)
            product = block_scaled_matmul.matmul(
                left, right, self.contracted_dims, self.block_format, self.specs
            )
            scales = rows.row_scales, self.weight_row_scales
        else:
            product = dot_general(rows.values, self.weight, self.contracted_dims)
            scales = rows.scales, self.weight_scales
        for scale in scales:
            product = product if scale is None else product * scale
        return product

    def compute(self) -> Float[Array, ...]:
        """Compute the float32 result for all tokens."""
        return self.compute_for(self.tokens)
