"""Grouped matmul, which multiplies each token only by the weights of its selected experts.

Each row holds one token-expert pair, and rows are sorted by expert. `maxpipe.nn.expert_backends`
multiplies the rows on each device. The row gradients and the weight gradients are separate matmuls,
so a split backward pass can schedule them separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from maxpipe.models.layers.experts import ExpertBackend
from maxpipe.nn.expert_backends import dispatch
from maxpipe.nn.token_permutation import (
    TokenPermutation,
    custom_vjp_with_static,
    gather_tokens,
    sum_rows_by_token,
)
from maxpipe.parallel.collectives import map_shards
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.sharding import AxisRules, auto_axes


class GroupedMatmulOptions(NamedTuple):
    """Static options of a grouped matmul."""

    axes: tuple[str, ...]
    """Mesh axes that shard the hidden width of an expert."""
    complete: bool = True
    """Whether every token-expert pair has a row, that is, no pair is dropped."""
    quantizer: MatmulQuantizer | None = None
    """Quantizer for the matmul operands. Kernels multiply dequantized operands."""
    fill_fraction: float = 1.0
    """Mean fraction of rows that hold a token-expert pair. Kernels skip unused rows."""
    backend: ExpertBackend = "auto"

    def multiply(
        self,
        rows: Sequence[Array],
        weights: Sequence[Array],
        sizes: Array,
        *,
        dim: int,
        transposed: bool = False,
    ) -> Array:
        """Multiply each row by its expert's weights, which may be transposed, and sum over the
        pairs of rows and weights.
        """
        return dispatch.grouped_matmul(
            rows,
            weights,
            sizes,
            dim=dim,
            transposed=transposed,
            filled=self.fill_fraction,
            backend=self.backend,
        )

    def outer(
        self, rows: Array, cotangents: Sequence[Array], sizes: Array, *, dim: int
    ) -> tuple[Array, ...]:
        """Sum the outer products of rows and each array of cotangents for each expert."""
        return dispatch.grouped_outer(
            rows, cotangents, sizes, dim=dim, filled=self.fill_fraction, backend=self.backend
        )

    def quantize_rows(self, rows: Array, *, divided: bool = False, gradient: bool = False) -> Array:
        """Quantize rows that will be multiplied by weights.

        `divided` means that the rows' last dim is sharded over `axes`.
        """
        if self.quantizer is None:
            return rows
        return self.quantizer.quantize_dequantize(
            rows, (1,), over=self.axes if divided else (), gradient=gradient
        )

    def quantize_weights(self, weights: Array, dim: int, *, back: bool = False) -> Array:
        """Quantize weights whose expert dim is `dim`; the forward matmul contracts dim `1 - dim`.

        `back` means that the matmul computes the rows' gradient.
        """
        if self.quantizer is None:
            return weights
        over = () if dim == 1 else self.axes
        around = self.axes
        return self.quantizer.quantize_dequantize_weight(
            weights, (1 - dim,), each=(dim,), over=over, around=around, back=back
        )


# Matmuls of tokens with expert weights. The input projections return one result per row. The output
# projection sums the results over each token's rows. The hidden width of an expert is sharded over
# `axes`. Partial sums are reduced after the sum over each token's rows, so that communication is
# proportional to the number of tokens.


@custom_vjp_with_static(static=4)
def up_projection(
    x: Float[Array, "B T D"],
    weights: tuple[Float[Array, "D E F"], ...],
    rows: TokenPermutation,
    sizes: Int[Array, " E"],
    spread: GroupedMatmulOptions,
) -> tuple[Float[Array, "N F"], ...]:
    """Multiply the token in each row by its expert's weights, for each weight array."""

    def run(tokens: Array, weights: tuple[Array, ...], sizes: Array) -> tuple[Array, ...]:
        tokens = spread.quantize_rows(tokens)
        return tuple(
            spread.multiply([tokens], [spread.quantize_weights(weight, 1)], sizes, dim=1)
            for weight in weights
        )

    split = PartitionSpec(None, spread.axes)
    run = map_shards(run, (_WHOLE, PartitionSpec(None, None, spread.axes), _WHOLE), split)
    return run(gather_tokens(x, rows), weights, sizes)


def _up_projection_backward(
    spread: GroupedMatmulOptions,
    saved: tuple[Any, ...],
    cotangents: tuple[Float[Array, "N F"], ...],
) -> tuple[Any, ...]:
    x, weights, rows, sizes = saved
    split, of_weights = PartitionSpec(None, spread.axes), PartitionSpec(None, None, spread.axes)

    def to_tokens(cotangents: Any, weights: Any, row: Array, sizes: Array) -> Array:
        product = spread.multiply(
            [spread.quantize_rows(each, divided=True, gradient=True) for each in cotangents],
            [spread.quantize_weights(weight, 1, back=True) for weight in weights],
            sizes,
            dim=1,
            transposed=True,
        )
        return sum_rows_by_token(product, row, complete=spread.complete)[None]

    def to_weights(tokens: Array, cotangents: Any, sizes: Array) -> tuple[Array, ...]:
        return spread.outer(tokens, cotangents, sizes, dim=1)

    to_tokens = map_shards(
        to_tokens, (split, of_weights, _WHOLE, _WHOLE), PartitionSpec(spread.axes)
    )
    to_weights = map_shards(to_weights, (_WHOLE, split, _WHOLE), of_weights)
    d_x = to_tokens(cotangents, weights, rows.row_of_choice, sizes).sum(0).reshape(x.shape)
    return d_x, to_weights(gather_tokens(x, rows), cotangents, sizes), None, None


up_projection.defvjp(
    lambda x, weights, rows, sizes, spread: (
        up_projection(x, weights, rows, sizes, spread),
        (x, weights, rows, sizes),
    ),
    _up_projection_backward,
)


@custom_vjp_with_static(static=4)
def down_projection(
    hidden: Float[Array, "N F"],
    weight: Float[Array, "E F D"],
    rows: TokenPermutation,
    sizes: Int[Array, " E"],
    spread: GroupedMatmulOptions,
) -> Float[Array, "n D"]:
    """Multiply each row by its expert's weights, and sum over each token's rows."""

    def run(hidden: Array, weight: Array, row: Array, sizes: Array) -> Array:
        hidden, weight = (
            spread.quantize_rows(hidden, divided=True),
            spread.quantize_weights(weight, 0),
        )
        product = spread.multiply([hidden], [weight], sizes, dim=0)
        return sum_rows_by_token(product, row, complete=spread.complete)[None]

    split = PartitionSpec(None, spread.axes)
    run = map_shards(run, (split, split, _WHOLE, _WHOLE), PartitionSpec(spread.axes))
    return run(hidden, weight, rows.row_of_choice, sizes).sum(0)


def _down_projection_backward(
    spread: GroupedMatmulOptions, saved: tuple[Any, ...], cotangent: Float[Array, "n D"]
) -> tuple[Any, ...]:
    hidden, weight, rows, sizes = saved
    split = PartitionSpec(None, spread.axes)

    def to_hidden(cotangents: Array, weight: Array, sizes: Array) -> Array:
        cotangents = spread.quantize_rows(cotangents, gradient=True)
        weight = spread.quantize_weights(weight, 0, back=True)
        return spread.multiply([cotangents], [weight], sizes, dim=0, transposed=True)

    to_hidden = map_shards(to_hidden, (_WHOLE, split, _WHOLE), split)
    to_weight = map_shards(
        lambda hidden, cotangents, sizes: spread.outer(hidden, [cotangents], sizes, dim=0)[0],
        (split, _WHOLE, _WHOLE),
        split,
    )
    cotangents = gather_tokens(cotangent, rows)
    d_hidden = to_hidden(cotangents, weight, sizes)
    return d_hidden, to_weight(hidden, cotangents, sizes), None, None


down_projection.defvjp(
    lambda hidden, weight, rows, sizes, spread: (
        down_projection(hidden, weight, rows, sizes, spread),
        (hidden, weight, rows, sizes),
    ),
    _down_projection_backward,
)


class RowProjection(NamedTuple):
    """Static options of `row_projection`."""

    options: GroupedMatmulOptions
    is_hidden_output: bool
    """Whether the hidden width of an expert is the output dim, with weights `[K, E, J]`. Otherwise,
    the hidden width is contracted, and weights have the dims `[E, K, J]`."""

    @property
    def dim(self) -> int:
        """Return the index of the weights' expert dim."""
        return int(self.is_hidden_output)

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Return the partition specs of the rows, the weights and the results."""
        split = PartitionSpec(None, self.options.axes)
        if self.is_hidden_output:
            return _WHOLE, PartitionSpec(None, None, self.options.axes), split
        return split, split, _WHOLE

    def summed(self, run: Callable[..., Array], specs: Any, out: PartitionSpec) -> Any:
        """Map `run` over shards. If the result is not sharded, it is summed over the shards."""
        if out != _WHOLE:
            return map_shards(run, specs, out)
        partial_sums = map_shards(
            lambda *arrays: run(*arrays)[None], specs, PartitionSpec(self.options.axes)
        )
        return lambda *arrays: partial_sums(*arrays).sum(0)


@custom_vjp_with_static(static=3)
def row_projection(
    rows: Float[Array, "N K"],
    weight: Float[Array, "_ _ _"],
    sizes: Int[Array, " E"],
    how: RowProjection,
) -> Float[Array, "N J"]:
    """Multiply each row by its expert's weights, without gathering or summing a token's rows."""

    def run(rows: Array, weight: Array, sizes: Array) -> Array:
        return how.options.multiply([rows], [weight], sizes, dim=how.dim)

    of_rows, of_weight, of_results = how.specs
    return how.summed(run, (of_rows, of_weight, _WHOLE), of_results)(rows, weight, sizes)


def _row_projection_backward(
    how: RowProjection, saved: tuple[Any, ...], cotangent: Float[Array, "N J"]
) -> tuple[Any, ...]:
    rows, weight, sizes = saved
    of_rows, of_weight, of_results = how.specs

    def to_rows(cotangent: Array, weight: Array, sizes: Array) -> Array:
        return how.options.multiply([cotangent], [weight], sizes, dim=how.dim, transposed=True)

    to_weight = map_shards(
        lambda rows, cotangent, sizes: how.options.outer(rows, [cotangent], sizes, dim=how.dim)[0],
        (of_rows, of_results, _WHOLE),
        of_weight,
    )
    to_rows = how.summed(to_rows, (of_results, of_weight, _WHOLE), of_rows)
    return to_rows(cotangent, weight, sizes), to_weight(rows, cotangent, sizes), None


row_projection.defvjp(
    lambda rows, weight, sizes, how: (
        row_projection(rows, weight, sizes, how),
        (rows, weight, sizes),
    ),
    _row_projection_backward,
)

_WHOLE = PartitionSpec()


def expert_width_axes(rules: AxisRules) -> tuple[str, ...]:
    """Return the mesh axes that shard the hidden width of an expert and are auto axes in the
    current program.
    """
    automatic = auto_axes()
    return tuple(axis for axis in dict(rules.table).get("mlp", ()) if axis in automatic)
