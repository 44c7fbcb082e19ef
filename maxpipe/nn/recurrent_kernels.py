"""Pallas kernels for TPUs that run a chunked linear recurrence.

A grid step processes one chunk of some heads. The recurrent state is in on-chip memory from one
chunk to the next, and arrays of token pairs never leave it. The backward kernel processes the
chunks in reverse order. It differentiates the same function of a chunk that the forward kernel
evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Float

from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import compiler_parameters, cost_estimate

LANES = 128
Matrices = list[Array]


class Operands(NamedTuple):
    """Arrays of a kernel. The number of tokens T is a multiple of the chunk size C."""

    shared: tuple[Float[Array, "_ 1 _"], ...]
    """Weights. The first dim is 1 if all heads use the same values, and a number of heads
    otherwise."""
    tokens: tuple[Float[Array, "B _ T _"], ...]
    """Arrays with one row per token, for some number of heads."""
    rows: Float[Array, "B S N R W"]
    """Float32 arrays with tokens in the last dim, for each stack of heads and each chunk."""


@runtime_checkable
class Tile(Protocol):
    """Function of one chunk of some heads. All its arrays are matrices. The results are the outputs
    `[C, v]` and the new states.
    """

    def __call__(
        self, shared: list[Matrices], tokens: list[Matrices], rows: Matrices, states: Matrices
    ) -> tuple[Matrices, Matrices]: ...


class TokenMatrices(NamedTuple):
    """Columns of one of the arrays in `Operands.tokens`, for each head of the array."""

    array: int
    """Index of the array."""
    width: int
    """Number of columns of a matrix."""
    start: int = 0
    """First column."""
    number: int = 1
    """Number of matrices per head of the array."""


@dataclass(frozen=True)
class Layout:
    """Static options of the kernels of one layer."""

    tile: Tile
    size: int
    """Number of tokens per chunk."""
    matrices: tuple[TokenMatrices, ...]
    """Matrices of tokens that the tile reads. The output is as wide as the last ones."""
    steps: int
    """Number of grid steps that share the heads of one chunk."""
    flops: float
    """FLOPs of one chunk of one state."""
    heads_per_state: int = 1
    """Number of heads whose states are columns of the same matrix."""

    @property
    def out_width(self) -> int:
        """Return the width of an output matrix."""
        return self.matrices[-1].width


def forward(
    layout: Layout,
    operands: Operands,
    state: Float[Array, "B V k v"],
    *,
    save_states: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B V T w"], Float[Array, "B V k v"], Float[Array, "B N V k v"] | None]:
    """Return the output, the state after the last chunk, and the state before each chunk."""
    rows, tokens, num_chunks = _sizes(layout, operands)
    specs = _Specs(layout, operands, state, lambda chunk: chunk)
    dtype, wide = operands.tokens[-1].dtype, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out = jax.ShapeDtypeStruct((rows, state.shape[1], tokens, layout.out_width), dtype)
    out_shapes, out_specs = [out, wide(state.shape)], [specs.out, specs.state]
    if save_states:
        out_shapes.append(wide((rows, num_chunks, *state.shape[1:])))
        out_specs.append(specs.states)
    flops = layout.flops * rows * num_chunks * state.shape[1]
    with jax.named_scope(scopes.flops(flops)):
        results = pl.pallas_call(
            partial(_forward_kernel, layout, specs.counts),
            grid=(layout.steps, rows, num_chunks),
            in_specs=[*specs.operands, specs.state],
            out_specs=out_specs,
            out_shape=out_shapes,
            scratch_shapes=[tpu.VMEM(specs.state_shape, jnp.float32)],
            compiler_params=compiler_parameters("parallel", "parallel", "arbitrary"),
            cost_estimate=cost_estimate(flops, [*jax.tree.leaves(operands), *out_shapes]),
            interpret=interpret,
            name="recurrence_forward",
        )(*jax.tree.leaves(operands), state)
    return results[0], results[1], results[2] if save_states else None


def backward(
    layout: Layout,
    operands: Operands,
    states: Float[Array, "B N V k v"],
    d_out: Float[Array, "B V T w"],
    d_state: Float[Array, "B V k v"],
    *,
    interpret: bool = False,
) -> tuple[Operands, Float[Array, "B V k v"]]:
    """Return the gradients of the operands and of the state before the first chunk."""
    rows, _, num_chunks = _sizes(layout, operands)
    specs = _Specs(layout, operands, d_state, lambda chunk: num_chunks - 1 - chunk)
    # Gradients of shared weights are sums over chunks, for each sequence and each grid step.
    per_step = [
        jax.ShapeDtypeStruct((rows, layout.steps, *shape), jnp.float32)
        for shape in specs.shared_shapes
    ]
    out_shapes = [
        *per_step,
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*operands.tokens, operands.rows)),
        jax.ShapeDtypeStruct(d_state.shape, jnp.float32),
    ]
    sums = [
        pl.BlockSpec((1, 1, *sum_.shape[2:]), lambda h, b, c: (b, h, 0, 0, 0)) for sum_ in per_step
    ]
    arrays = (*operands, states, d_out, d_state)
    flops = 3 * layout.flops * rows * num_chunks * d_state.shape[1]
    with jax.named_scope(scopes.flops(flops)):
        results = pl.pallas_call(
            partial(_backward_kernel, layout, specs.counts),
            grid=(layout.steps, rows, num_chunks),
            in_specs=[*specs.operands, specs.states, specs.out, specs.state],
            out_specs=[*sums, *specs.operands[len(sums) :], specs.state],
            out_shape=out_shapes,
            scratch_shapes=[tpu.VMEM(specs.state_shape, jnp.float32)],
            compiler_params=compiler_parameters("parallel", "parallel", "arbitrary"),
            cost_estimate=cost_estimate(flops, [*jax.tree.leaves(arrays), *out_shapes]),
            interpret=interpret,
            name="recurrence_backward",
        )(*jax.tree.leaves(arrays))
    *d_operands, d_start = results
    d_shared = tuple(
        _sum_steps(sums, weight) for sums, weight in zip(d_operands, operands.shared, strict=False)
    )
    *d_tokens, d_rows = d_operands[len(d_shared) :]
    return Operands(d_shared, tuple(d_tokens), d_rows), d_start


def _sum_steps(sums: Float[Array, "B G h 1 w"], weight: Float[Array, "H 1 w"]) -> Array:
    """Sum the gradients of a weight over sequences, and over grid steps that share its values."""
    axes = (0, 1) if len(weight) == 1 else (0,)
    return sums.sum(axes).reshape(weight.shape).astype(weight.dtype)


def _sizes(layout: Layout, operands: Operands) -> tuple[int, int, int]:
    """Return the number of sequences, tokens and chunks."""
    rows, _, tokens, _ = operands.tokens[0].shape
    return rows, tokens, tokens // layout.size


class _Specs:
    """Blocks of the arrays of a kernel. `at` returns the chunk of a grid step."""

    def __init__(self, layout: Layout, operands: Operands, state: Array, at: Any):
        steps, size = layout.steps, layout.size

        def tokens(heads: int, width: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, heads, size, width), lambda h, b, c: (b, h, at(c), 0))

        self.shared_shapes = [
            (1 if len(weight) == 1 else len(weight) // steps, *weight.shape[1:])
            for weight in operands.shared
        ]

        def shared(weight: Array, block: tuple[int, ...]) -> pl.BlockSpec:
            return pl.BlockSpec(block, lambda h, b, c: (0 if len(weight) == 1 else h, 0, 0))

        stacks, _, *of_stack = operands.rows.shape[1:]
        heads, *of_head = state.shape[1:]
        self.operands = [
            *map(shared, operands.shared, self.shared_shapes),
            *(tokens(x.shape[1] // steps, x.shape[3]) for x in operands.tokens),
            pl.BlockSpec((1, stacks // steps, 1, *of_stack), lambda h, b, c: (b, h, at(c), 0, 0)),
        ]
        heads //= steps
        self.state_shape = (heads, *of_head)
        self.state = pl.BlockSpec((1, heads, *of_head), lambda h, b, c: (b, h, 0, 0))
        self.states = pl.BlockSpec((1, 1, heads, *of_head), lambda h, b, c: (b, at(c), h, 0, 0))
        self.out = tokens(heads, layout.out_width)
        self.counts = (len(operands.shared), len(operands.tokens))


class _Refs:
    """References to the blocks of `Operands`, or to the blocks of their gradients."""

    def __init__(self, layout: Layout, counts: tuple[int, int], refs: Sequence[Any], sums: bool):
        self.matrices, self.sums = layout.matrices, sums
        self.shared, self.tokens = refs[: counts[0]], refs[counts[0] : sum(counts)]
        self.rows = refs[sum(counts)]

    def _shared_places(self) -> list[list[Any]]:
        """Return the indices of the matrices of each weight."""
        lead = (0, 0) if self.sums else ()
        return [[(*lead, head) for head in range(ref.shape[len(lead)])] for ref in self.shared]

    def _token_places(self) -> list[list[Any]]:
        return [
            [
                (0, head, slice(None), pl.ds(of.start + place * of.width, of.width))
                for head in range(self.tokens[of.array].shape[1])
                for place in range(of.number)
            ]
            for of in self.matrices
        ]

    def _row_places(self) -> list[Any]:
        return [(0, stack, 0) for stack in range(self.rows.shape[1])]

    def load(self) -> tuple[list[Matrices], list[Matrices], Matrices]:
        """Return all matrices."""

        def read(refs: Sequence[Any], places: list[list[Any]]) -> list[Matrices]:
            return [[ref[at] for at in of] for ref, of in zip(refs, places, strict=True)]

        shared, tokens = (self._shared_places(), self._token_places())
        return (
            read(self.shared, shared),
            read([self.tokens[of.array] for of in self.matrices], tokens),
            [self.rows[at] for at in self._row_places()],
        )

    def store(self, shared: list[Matrices], tokens: list[Matrices], rows: Matrices) -> None:
        """Store gradients. Those of weights are added to the sums of previous chunks."""
        for ref, places, values in zip(self.shared, self._shared_places(), shared, strict=True):
            for at, value in zip(places, values, strict=True):
                ref[at] += value.astype(ref.dtype)
        for of, places, values in zip(self.matrices, self._token_places(), tokens, strict=True):
            ref = self.tokens[of.array]
            for at, value in zip(places, values, strict=True):
                ref[at] = value.astype(ref.dtype)
        for at, value in zip(self._row_places(), rows, strict=True):
            self.rows[at] = value


def _forward_kernel(layout: Layout, counts: tuple[int, int], *references: Any) -> None:
    *refs, state = references
    number = sum(counts) + 1
    start, out, final, *states = refs[number:]
    chunk = pl.program_id(2)

    @pl.when(chunk == 0)
    def _() -> None:
        state[...] = start[0]

    for saved in states:
        saved[0, 0] = state[...]
    before = [state[head] for head in range(state.shape[0])]
    outputs, after = layout.tile(*_Refs(layout, counts, refs[:number], False).load(), before)
    for head, (output, value) in enumerate(zip(outputs, after, strict=True)):
        out[0, head] = output.astype(out.dtype)
        state[head] = value

    @pl.when(chunk == pl.num_programs(2) - 1)
    def _() -> None:
        final[0] = state[...]


def _backward_kernel(layout: Layout, counts: tuple[int, int], *references: Any) -> None:
    *refs, d_state = references
    number = sum(counts) + 1
    states, d_out, d_final = refs[number : number + 3]
    d_operands, d_start = refs[number + 3 : -1], refs[-1]
    sums, heads, chunk = d_operands[: counts[0]], range(d_state.shape[0]), pl.program_id(2)

    @pl.when(chunk == 0)
    def _() -> None:
        d_state[...] = d_final[0]
        for sum_ in sums:
            sum_[...] = jnp.zeros(sum_.shape, sum_.dtype)

    before = [states[0, 0, head] for head in heads]
    loaded = _Refs(layout, counts, refs[:number], False).load()
    towards = [d_out[0, head].astype(jnp.float32) for head in heads]
    *of_operands, of_states = gradients(
        layout.tile, (*loaded, before), (towards, [d_state[head] for head in heads])
    )
    _Refs(layout, counts, d_operands, True).store(*of_operands)
    for head, value in zip(heads, of_states, strict=True):
        d_state[head] = value

    @pl.when(chunk == pl.num_programs(2) - 1)
    def _() -> None:
        d_start[0] = d_state[...]


def gradients(run: Any, arguments: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
    """Return the gradients of the arguments of a function of a kernel.

    The types of arguments may contain mesh axes over which the arrays vary, and those of results do
    not. Therefore, arrays without such types are differentiated.
    """

    def pull(arguments: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        return jax.vjp(run, *arguments)[1](cotangents)

    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arguments, cotangents))
    traced, shapes = jax.make_jaxpr(pull, return_shape=True)(*plain)
    results = jaxpr_as_fun(traced)(*jax.tree.leaves((arguments, cotangents)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


# Operations of tiles.


def _custom_gradient(*static: int) -> Callable[[Callable[..., Any]], Any]:
    """Return a variant of `jax.custom_vjp` for functions whose arguments at these indices are not
    arrays.
    """
    return partial(jax.custom_vjp, nondiff_argnums=static)


def sigmoid(x: Array) -> Array:
    """Return the sigmoid. Its gradient is finite for all numbers, unlike that of a division by
    `1 + exp(-x)`.
    """
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


@_custom_gradient(2, 3)
def matmul(x: Array, y: Array, dims: tuple[int, int], dtype: Any) -> Array:
    """Contract `dims` of two matrices. Operands and cotangents are rounded to `dtype`, and sums are
    float32.
    """
    return _rounded_matmul(x, y, dims, dtype)


def _rounded_matmul(x: Array, y: Array, dims: tuple[int, int], dtype: Any) -> Array:
    precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    numbers = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        numbers,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _matmul_forward(x: Array, y: Array, dims: tuple[int, int], dtype: Any) -> Any:
    return _rounded_matmul(x, y, dims, dtype), (x, y)


def _matmul_backward(dims: tuple[int, int], dtype: Any, saved: Any, cotangent: Array) -> Any:
    x, y = saved
    first, second = dims
    product = partial(_rounded_matmul, dtype=dtype)
    d_x = (
        product(cotangent, y, (1, 1 - second))
        if first == 1
        else product(y, cotangent, (1 - second, 1))
    )
    d_y = (
        product(x, cotangent, (1 - first, 0))
        if second == 0
        else product(cotangent, x, (0, 1 - first))
    )
    return d_x.astype(x.dtype), d_y.astype(y.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def accurate_matmul(x: Array, y: Array, dims: tuple[int, int], dtype: Any) -> Array:
    """Contract `dims` of two float32 matrices with an error of about 2^-16 if `dtype` is bfloat16,
    and of 2^-23 otherwise.
    """
    product = partial(_rounded_matmul, dims=dims, dtype=dtype)
    if dtype != jnp.bfloat16:
        return product(x, y)
    (x, x_error), (y, y_error) = (_split(each, dtype) for each in (x, y))
    return product(x, y) + (product(x, y_error) + product(x_error, y))


def _split(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Return the rounded matrix, and its rounding errors."""
    rounded = x.astype(dtype)
    return rounded, (x - rounded.astype(jnp.float32)).astype(dtype)


def iota(size: int, dim: int) -> Array:
    """Return the row or column number of each entry of a square matrix."""
    return lax.broadcasted_iota(jnp.int32, (size, size), dim)


@_custom_gradient()
def columns(rows: Float[Array, "R W"]) -> list[Float[Array, "W 1"]]:
    """Return each row as a column."""
    turned = rows.T
    return [turned[:, at : at + 1] for at in range(len(rows))]


def _columns_backward(shape: Any, cotangents: list[Array]) -> tuple[Array]:
    count, width = shape
    lane = lax.broadcasted_iota(jnp.int32, (width, count), 1)
    turned = jnp.zeros((width, count), jnp.float32)
    for at, cotangent in enumerate(cotangents):
        turned = jnp.where(lane == at, cotangent, turned)
    return (turned.T,)


columns.defvjp(lambda rows: (columns(rows), rows.shape), _columns_backward)


@_custom_gradient(1)
def row(rows: Float[Array, "R W"], at: int) -> Float[Array, "1 W"]:
    """Return one of the rows."""
    return rows[at : at + 1]


def _row_backward(at: int, shape: Any, cotangent: Array) -> tuple[Array]:
    place = lax.broadcasted_iota(jnp.int32, shape, 0)
    return (jnp.where(place == at, cotangent, 0.0),)


row.defvjp(lambda rows, at: (rows[at : at + 1], rows.shape), _row_backward)


@_custom_gradient(1)
def unstack(x: Array, count: int) -> list[Array]:
    """Split the rows of a matrix into `count` matrices."""
    size = len(x) // count
    return [x[at * size : (at + 1) * size] for at in range(count)]


unstack.defvjp(lambda x, count: (unstack(x, count), None), lambda count, _, d: (stack(d),))


@_custom_gradient()
def stack(parts: Matrices) -> Array:
    """Concatenate the rows of matrices of equal sizes."""
    return jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]


stack.defvjp(
    lambda parts: (stack(parts), [None] * len(parts)), lambda parts, d: (unstack(d, len(parts)),)
)


@_custom_gradient(2)
def masked_sums(mask: Float[Array, "W W"], x: Float[Array, "W d"], dtype: Any) -> Array:
    """Return sums of rows that a matrix of zeros and ones selects, as accurate as
    `accurate_matmul`. Masks have no gradient.
    """
    return _masked_sums(mask, x, 1, dtype)


def _masked_sums(mask: Array, x: Array, dim: int, dtype: Any) -> Array:
    product = partial(_rounded_matmul, dims=(dim, 0), dtype=dtype)
    if dtype != jnp.bfloat16:
        return product(mask, x)
    rounded, error = _split(x, dtype)
    return product(mask, rounded) + product(mask, error)


masked_sums.defvjp(
    lambda mask, x, dtype: (_masked_sums(mask, x, 1, dtype), mask),
    lambda dtype, mask, d: (jnp.zeros_like(mask), _masked_sums(mask, d, 0, dtype)),
)


@_custom_gradient()
def last_row_as_column(x: Float[Array, "W d"]) -> Float[Array, "d 1"]:
    """Return the last row as a column."""
    return x[-min(_SUBLANES, len(x)) :].T[:, -1:]


def _last_row_backward(size: int, cotangent: Array) -> tuple[Array]:
    wide = jnp.broadcast_to(cotangent, (len(cotangent), min(_SUBLANES, size))).T
    parts = [wide] * (size // len(wide))
    wide = jnp.concatenate(parts, axis=0)
    place = lax.broadcasted_iota(jnp.int32, wide.shape, 0)
    return (jnp.where(place == size - 1, wide, 0.0),)


last_row_as_column.defvjp(lambda x: (last_row_as_column(x), len(x)), _last_row_backward)


@_custom_gradient(1, 2)
def inverse_of_unit_lower(lower: Float[Array, "W W"], block: int, dtype: Any) -> Array:
    """Invert `1 + lower`, where `lower` is strictly lower triangular within diagonal blocks of this
    size, and 0 outside of them; see `delta_rule.inverse_of_unit_lower`.
    """
    return _inverse(lower, block, dtype)


_SUBLANES = 8
"""Rows of float32 in one register. Blocks of as many rows can be concatenated without moves."""


def _inverse(lower: Array, largest: int, dtype: Any) -> Array:
    size = len(lower)
    first, second = iota(size, 0), iota(size, 1)
    inverse, block = jnp.where(first == second, 1.0, 0.0), 1
    while block < largest:
        at = first // block
        below = (at == second // block + 1) & (at % 2 == 1)
        between = jnp.where(below, lower, 0.0)
        if block == 1:
            inverse = inverse - between
        elif block < _SUBLANES:
            product = accurate_matmul(inverse, between, (1, 0), dtype)
            inverse = inverse - accurate_matmul(product, inverse, (1, 0), dtype)
        else:
            # Only the second block of each pair changes.
            parts = [inverse[at : at + block] for at in range(0, size, block)]
            later = jnp.concatenate(parts[1::2], axis=0)
            product = accurate_matmul(later, between, (1, 0), dtype)
            later = later - accurate_matmul(product, inverse, (1, 0), dtype)
            parts[1::2] = [later[at : at + block] for at in range(0, size // 2, block)]
            inverse = jnp.concatenate(parts, axis=0)
        block *= 2
    return inverse


def _inverse_forward(lower: Array, block: int, dtype: Any) -> tuple[Array, Array]:
    inverse = _inverse(lower, block, dtype)
    return inverse, inverse


def _inverse_backward(block: int, dtype: Any, inverse: Array, cotangent: Array) -> tuple[Array]:
    product = accurate_matmul(inverse, cotangent, (0, 0), dtype)
    return (-accurate_matmul(product, inverse, (1, 1), dtype),)


inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)


def merge_states(layout: Layout, state: Float[Array, "B K r k v"]) -> Float[Array, "B V k w"]:
    """Return the states as the kernels use them, with the columns of several heads."""
    rows, _, _, key_size, size = state.shape
    joined = layout.heads_per_state
    state = state.reshape(rows, -1, joined, key_size, size).swapaxes(2, 3)
    return state.reshape(rows, -1, key_size, joined * size)


def split_states(
    layout: Layout, state: Float[Array, "B V k w"], shape: tuple[int, ...]
) -> Float[Array, "B K r k v"]:
    """Return the states of all heads; the inverse of `merge_states`."""
    rows, count, key_size, width = state.shape
    joined = layout.heads_per_state
    state = state.reshape(rows, count, key_size, joined, width // joined).swapaxes(2, 3)
    return state.reshape(shape)
