"""Pallas kernels for TPUs that sum residual streams (`nn/hyper_connections.py`).

Every array of streams is read once, and sums are in float32. Arrays with one row per token have the
tokens in the first dim. The numbers of a token (coefficients, z, their cotangents) are lanes of a
row of 128 float32 numbers.

XLA would fuse all sums of one token into one instruction sequence without loops, which takes half a
minute to compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Float

from maxpipe.parallel import scopes
from maxpipe.parallel.tpu_kernels import compiler_parameters, cost_estimate, tpu_cores, usable_vmem

LANES = 128
_MAX_TOKENS = 128
"""Number of tokens of a grid step, if they fit into the memory of a core."""
_GROUP = 16
"""Number of tokens of a group: the rows of a vector register of bfloat16 numbers."""
_PIECES = 3
"""Number of bfloat16 numbers whose sum is a float32 number."""
_MAP_TOKENS = 8 * LANES
"""Number of tokens of a grid step of `map_coefficients`: one vector register per coefficient."""
_MAP_CYCLES = 1300
"""Length of the instruction schedule of a grid step of `map_coefficients` on v5p, for four streams
and 20 Sinkhorn iterations. The backward kernel, with two inputs, is twice as long."""


class Sizes(NamedTuple):
    """Sizes and constants of the kernels of one connection."""

    num_streams: int
    width: int
    """Width of one stream."""
    num_coefficients: int
    norm_epsilon: float
    epsilon: float


class Projection(NamedTuple):
    """Float32 weights of the logits."""

    project: Float[Array, "nD J"]
    scale: Float[Array, " J"]
    bias: Float[Array, " J"]


def supports(sizes: Sizes, dtype: Any) -> bool:
    """Return whether the kernels support these sizes and activations of this dtype."""
    tokens = (_tokens(sizes, 2, dtype, projection=True), _tokens(sizes, 3, dtype, projection=False))
    fits = _PIECES * sizes.num_coefficients < LANES
    return sizes.width % LANES == 0 and fits and min(tokens) > 0


def read(
    sizes: Sizes,
    projection: Projection,
    x: Float[Array, "N nD"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, "N J"], Float[Array, "N 1"]]:
    """Return the weighted sum of the streams, z, and the inverse root mean square of each token."""
    rows, _ = _projections(projection.project, x.dtype)
    out = (_like(x, sizes.width), _numbers(x))
    h, numbers = _call(
        _read_kernel,
        "streams_read",
        sizes,
        (x,),
        out,
        shared=(rows, _affine(projection)),
        instructions=10,
        interpret=interpret,
    )
    count = sizes.num_coefficients
    return h, numbers[:, :count], numbers[:, count : count + 1]


def read_backward(
    sizes: Sizes,
    projection: Projection,
    x: Float[Array, "N nD"],
    z: Float[Array, "N J"],
    inverse: Float[Array, "N 1"],
    d_h: Float[Array, "N D"],
    d_z: Float[Array, "N J"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N nD"], Float[Array, "N J"], Float[Array, "N n"]]:
    """Return the cotangents of x, of the product of x and the projection, and of the logits of the
    weights of the streams.
    """
    _, rows = _projections(projection.project, x.dtype)
    numbers = _lanes(jnp.concatenate([z, inverse], axis=1))
    d_x, products, logits = _call(
        _read_backward_kernel,
        "streams_read_backward",
        sizes,
        (x, numbers, d_h, _lanes(d_z)),
        (_like(x, x.shape[1]), _numbers(x), _numbers(x)),
        shared=(rows, _affine(projection)),
        instructions=8,
        interpret=interpret,
    )
    return d_x, products[:, : sizes.num_coefficients], logits[:, : sizes.num_streams]


def write(
    sizes: Sizes,
    x: Float[Array, "N nD"],
    change: Float[Array, "N D"],
    coefficients: Float[Array, "N _"],
    *,
    interpret: bool = False,
) -> Sequence[Float[Array, "N nD"]]:
    """Return the new streams, as the only entry of a list. The coefficients are those of `change`,
    followed by the mixing matrix row by row.
    """
    return _call(
        _write_kernel,
        "streams_write",
        sizes,
        (x, change, _lanes(coefficients)),
        (_like(x, x.shape[1]),),
        instructions=12,
        interpret=interpret,
    )


def write_backward(
    sizes: Sizes,
    x: Float[Array, "N nD"],
    change: Float[Array, "N D"],
    coefficients: Float[Array, "N _"],
    d_streams: Float[Array, "N nD"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N nD"], Float[Array, "N D"], Float[Array, "N _"]]:
    """Return the cotangents of x, of the change and of the coefficients."""
    d_x, d_change, numbers = _call(
        _write_backward_kernel,
        "streams_write_backward",
        sizes,
        (x, change, _lanes(coefficients), d_streams),
        (_like(x, x.shape[1]), _like(change, sizes.width), _numbers(x)),
        instructions=17,
        interpret=interpret,
    )
    return d_x, d_change, numbers[:, : coefficients.shape[1]]


def map_coefficients(
    function: Callable[[Float[Array, "I 8 lanes"]], Float[Array, "O 8 lanes"]],
    inputs: Sequence[Float[Array, "_ N"]],
    num_outputs: int,
    *,
    interpret: bool = False,
) -> Float[Array, "O N"]:
    """Apply an elementwise function of the numbers of each token; `inputs` have the tokens in the
    last dim.
    """
    tokens = inputs[0].shape[-1]
    padding = -tokens % _MAP_TOKENS
    arrays = [jnp.pad(each, ((0, 0), (0, padding))) for each in inputs]
    arrays = [each.reshape(len(each), -1, LANES) for each in arrays]
    shape = (num_outputs, *arrays[0].shape[1:])

    def kernel(*refs: Any) -> None:
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]))

    def spec(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((count, 8, LANES), lambda step: (0, step, 0))

    cycles = _MAP_CYCLES * len(inputs) * tokens / _MAP_TOKENS / tpu_cores().number
    flops = float(num_outputs * tokens)
    with jax.named_scope(scopes.flops(flops)), jax.named_scope(scopes.cycles(cycles)):
        out = pl.pallas_call(
            kernel,
            grid=(shape[1] // 8,),
            in_specs=[spec(len(each)) for each in arrays],
            out_specs=spec(num_outputs),
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
            compiler_params=compiler_parameters("parallel"),
            cost_estimate=cost_estimate(flops, arrays),
            interpret=interpret,
            name="stream_coefficients",
        )(*arrays)
    return out.reshape(num_outputs, -1)[:, :tokens]


def outer(x: Float[Array, "N nD"], d_product: Float[Array, "J N"]) -> Float[Array, "nD J"]:
    """Return the gradient of the projection. It needs no kernel."""
    if x.dtype != jnp.bfloat16:
        return jnp.einsum("nk,jn->kj", x, d_product, precision=lax.Precision.HIGHEST)
    pieces = lax.optimization_barrier(jnp.concatenate(_pieces(d_product, _PIECES)))
    rows = jnp.einsum("nk,jn->jk", x, pieces, preferred_element_type=jnp.float32)
    return rows.reshape(_PIECES, len(d_product), -1).sum(axis=0).T


# Arrays of the kernels.


def _like(x: Array, width: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(x), width), x.dtype)


def _numbers(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(x), LANES), jnp.float32)


def _lanes(numbers: Float[Array, "N _"]) -> Float[Array, "N lanes"]:
    return jnp.pad(numbers, ((0, 0), (0, LANES - numbers.shape[1])))


def _affine(projection: Projection) -> Float[Array, "8 lanes"]:
    """Return scales in row 0 and biases in row 1."""
    numbers = jnp.stack([projection.scale, projection.bias])
    return jnp.pad(_lanes(numbers), ((0, 6), (0, 0)))


def _pieces(x: Float[Array, "*dims"], count: int) -> list[Array]:
    """Return bfloat16 arrays whose sum is x, the largest first."""
    pieces = []
    for _ in range(count):
        # XLA would omit the conversion to bfloat16 and back.
        high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        pieces.append(high.astype(jnp.bfloat16))
        x = x - high
    return pieces


def _projections(
    project: Float[Array, "nD J"], dtype: Any
) -> tuple[Float[Array, "lanes nD"], Float[Array, "lanes nD"]]:
    """Return the rows that are multiplied by x, and those that are multiplied by the cotangent of
    this product.

    Activations in bfloat16 are exact, so that one matmul with the three pieces of each row has the
    precision of float32. The cotangent has two pieces, and products of small pieces are omitted.
    """
    rows = project.T
    if dtype != jnp.bfloat16:
        return _rows([rows]), _rows([rows])
    high, middle, low = _pieces(rows, _PIECES)
    return _rows([high, middle, low]), _rows([high, middle, high])


def _rows(arrays: Sequence[Float[Array, "J nD"]]) -> Float[Array, "lanes nD"]:
    rows = jnp.concatenate(arrays)
    return jnp.pad(rows, ((0, LANES - len(rows)), (0, 0)))


def _tokens(sizes: Sizes, num_arrays: int, dtype: Any, *, projection: bool) -> int:
    """Return the number of tokens per grid step, for a number of arrays of streams. Return 0 if
    16 tokens do not fit into the memory of a core.
    """
    width, itemsize = sizes.num_streams * sizes.width, jnp.dtype(dtype).itemsize
    # Each array has two buffers, so that transfers overlap with the computation.
    per_token = 2 * itemsize * (num_arrays * width + 2 * sizes.width)
    available = int(usable_vmem()) - projection * 2 * LANES * itemsize * width
    tokens = max(available, 0) // per_token
    return min(_MAX_TOKENS, 1 << (tokens.bit_length() - 1)) if tokens >= _GROUP else 0


def _call(
    kernel: Callable[..., None],
    name: str,
    sizes: Sizes,
    arrays: Sequence[Array],
    out: Sequence[jax.ShapeDtypeStruct],
    *,
    instructions: float,
    shared: Sequence[Array] = (),
    interpret: bool,
) -> Sequence[Array]:
    """Run a kernel on blocks of tokens. Every grid step reads the complete `shared` arrays.

    `instructions` is the length of the kernel's instruction schedule on v5p for four streams, per
    group of tokens and 128 columns of x.
    """
    x = arrays[0]
    num_arrays = sum(each.shape[1] == x.shape[1] for each in (*arrays, *out))
    tokens = _tokens(sizes, num_arrays, x.dtype, projection=bool(shared))
    flops = 2.0 * x.size * (LANES if shared else sizes.num_streams + 1)
    cores, moved = tpu_cores(), sum(each.size * each.dtype.itemsize for each in (*arrays, *out))
    scheduled = instructions * x.size / (_GROUP * LANES)
    cycles = max(scheduled, moved / cores.num_bytes) / cores.number

    def spec(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, array.shape[1]), lambda step: (step, 0))

    with jax.named_scope(scopes.flops(flops)), jax.named_scope(scopes.cycles(cycles)):
        return pl.pallas_call(
            partial(kernel, sizes),
            grid=(pl.cdiv(len(x), tokens),),
            in_specs=[
                *(pl.BlockSpec(each.shape, lambda step: (0, 0)) for each in shared),
                *map(spec, arrays),
            ],
            out_specs=[*map(spec, out)],
            out_shape=list(out),
            compiler_params=compiler_parameters("parallel"),
            cost_estimate=cost_estimate(flops, [*shared, *arrays, *out]),
            interpret=interpret,
            name=name,
        )(*shared, *arrays)


# Kernels. The sums over a stream are loops over groups of tokens and chunks of the width, so that
# sums of one group stay in registers.


def _read_kernel(
    sizes: Sizes, rows_of_projection: Any, affine: Any, x: Any, h: Any, numbers: Any
) -> None:
    total, count = x.shape[1], sizes.num_coefficients
    size = math.gcd(total, 256)

    def add(chunk: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        at = _at(chunk * size, size)
        part = x[:, at]
        return sums[0] + _matmul(part, rows_of_projection[:, at], 1), sums[1] + _fold(_square(part))

    zeros = jnp.zeros((len(x), LANES), jnp.float32)
    product, squares = lax.fori_loop(0, total // size, add, (zeros, zeros))
    if x.dtype == jnp.bfloat16:
        product += _shift(product, -count) + _shift(product, -2 * count)
    mean = squares.sum(axis=1, keepdims=True) / total
    inverse = lax.rsqrt(mean + sizes.norm_epsilon)
    lane = _lane(product)
    numbers[...] = jnp.where(lane == count, inverse, jnp.where(lane < count, product * inverse, 0))

    def sum_streams(rows: Any) -> None:
        weights = _columns(_weights(sizes, affine, numbers[rows, :])[0], sizes.num_streams)

        def chunk(at: Callable[[int], Any]) -> None:
            h[rows, at(0)] = _sum(weights, _load(x, rows, at, sizes)).astype(h.dtype)

        _each_chunk(sizes, chunk)

    _each_group(len(x), sum_streams)


def _read_backward_kernel(
    sizes: Sizes,
    rows_of_projection: Any,
    affine: Any,
    x: Any,
    numbers: Any,
    d_h: Any,
    d_z: Any,
    d_x: Any,
    products: Any,
    logits: Any,
) -> None:
    count = sizes.num_coefficients

    def sum_products(rows: Any) -> None:
        def chunk(at: Callable[[int], Any], sums: list[Array]) -> list[Array]:
            wide = d_h[rows, at(0)].astype(jnp.float32)
            terms = (_fold(wide * stream) for stream in _load(x, rows, at, sizes))
            return [a + b for a, b in zip(sums, terms, strict=True)]

        zeros = [jnp.zeros((_GROUP, LANES), jnp.float32)] * sizes.num_streams
        d_weights = _to_lanes(_sum_chunks(sizes, chunk, zeros))
        _, slope = _weights(sizes, affine, numbers[rows, :])
        d_logits = d_weights * slope
        logits[rows, :] = d_logits
        inverse = numbers[rows, count : count + 1]
        products[rows, :] = (d_z[rows, :] + d_logits * affine[0:1, :]) * inverse

    _each_group(len(x), sum_products)
    product, z = products[...], numbers[...]
    # z is x W / rms(x), so that the gradient through the norm is -x sum(z d_z) / (nD rms(x)^2).
    through_norm = (z * product).sum(axis=1, keepdims=True)
    through_norm *= z[:, count : count + 1] / x.shape[1]
    if x.dtype == jnp.bfloat16:
        high, rest = _round(product)
        product = high + _shift(high, count) + _shift(_round(rest)[0], 2 * count)
        product = product.astype(jnp.bfloat16)
    weights = _columns(_weights(sizes, affine, z)[0], sizes.num_streams)

    def chunk(at: Callable[[int], Any]) -> None:
        wide = d_h[:, at(0)].astype(jnp.float32)
        for stream, weight in enumerate(weights):
            here = at(stream)
            through_z = _matmul(product, rows_of_projection[:, here], 0)
            old = x[:, here].astype(jnp.float32)
            d_x[:, here] = (through_z + weight * wide - old * through_norm).astype(d_x.dtype)

    _each_chunk(sizes, chunk)


def _write_kernel(sizes: Sizes, x: Any, change: Any, numbers: Any, out: Any) -> None:
    def group(rows: Any) -> None:
        post, comb = _coefficients(sizes, numbers[rows, :])

        def chunk(at: Callable[[int], Any]) -> None:
            arrays = [change[rows, at(0)].astype(jnp.float32), *_load(x, rows, at, sizes)]
            for stream in range(sizes.num_streams):
                weights = [post[stream], *(row[stream] for row in comb)]
                out[rows, at(stream)] = _sum(weights, arrays).astype(out.dtype)

        _each_chunk(sizes, chunk)

    _each_group(len(x), group)


def _write_backward_kernel(
    sizes: Sizes,
    x: Any,
    change: Any,
    numbers: Any,
    d_streams: Any,
    d_x: Any,
    d_change: Any,
    d_numbers: Any,
) -> None:
    def group(rows: Any) -> None:
        post, comb = _coefficients(sizes, numbers[rows, :])

        def chunk(at: Callable[[int], Any], sums: list[Array]) -> list[Array]:
            gradients = _load(d_streams, rows, at, sizes)
            arrays = [change[rows, at(0)].astype(jnp.float32), *_load(x, rows, at, sizes)]
            d_change[rows, at(0)] = _sum(post, gradients).astype(d_change.dtype)
            for stream, weights in enumerate(comb):
                d_x[rows, at(stream)] = _sum(weights, gradients).astype(d_x.dtype)
            terms = [_fold(array * gradient) for array in arrays for gradient in gradients]
            return [a + b for a, b in zip(sums, terms, strict=True)]

        zeros = jnp.zeros((_GROUP, LANES), jnp.float32)
        count = sizes.num_streams * (sizes.num_streams + 1)
        d_numbers[rows, :] = _to_lanes(_sum_chunks(sizes, chunk, [zeros] * count))

    _each_group(len(x), group)


def _each_group(tokens: int, run: Callable[[Any], None]) -> None:
    def step(group: Array, carry: Any) -> Any:
        run(pl.ds(pl.multiple_of(group * _GROUP, _GROUP), _GROUP))
        return carry

    lax.fori_loop(0, tokens // _GROUP, step, 0)


def _each_chunk(sizes: Sizes, run: Callable[[Callable[[int], Any]], None]) -> None:
    """Call `run(at)` for each chunk of the width; `at(i)` are the columns of stream i."""

    def step(at: Callable[[int], Any], carry: list[Array]) -> list[Array]:
        run(at)
        return carry

    _sum_chunks(sizes, step, [])


def _sum_chunks(
    sizes: Sizes,
    step: Callable[[Callable[[int], Any], list[Array]], list[Array]],
    sums: list[Array],
) -> list[Array]:
    """Call `step(at, sums)` for each chunk of the width, and return the last sums."""
    size = math.gcd(sizes.width, 512)

    def run(chunk: Array, sums: list[Array]) -> list[Array]:
        return step(lambda stream: _at(stream * sizes.width + chunk * size, size), sums)

    return lax.fori_loop(0, sizes.width // size, run, sums)


def _at(start: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(start, LANES), size)


def _load(x: Any, rows: Any, at: Callable[[int], Any], sizes: Sizes) -> list[Array]:
    return [x[rows, at(stream)].astype(jnp.float32) for stream in range(sizes.num_streams)]


def _sum(weights: Sequence[Array], arrays: Sequence[Array]) -> Array:
    terms = [weight * array for weight, array in zip(weights, arrays, strict=True)]
    return sum(terms[1:], start=terms[0])


def _square(x: Array) -> Array:
    return jnp.square(x.astype(jnp.float32))


def _fold(x: Float[Array, "G _"]) -> Float[Array, "G lanes"]:
    """Return the sum of all groups of 128 columns."""
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    return sum(parts[1:], start=parts[0])


def _to_lanes(sums: Sequence[Float[Array, "G lanes"]]) -> Float[Array, "G lanes"]:
    """Return the sum of all columns of array i in lane i."""
    lane = _lane(sums[0])
    result = jnp.zeros_like(sums[0])
    for number, each in enumerate(sums):
        result = jnp.where(lane == number, each.sum(axis=1, keepdims=True), result)
    return result


def _columns(numbers: Float[Array, "G lanes"], count: int, start: int = 0) -> list[Array]:
    return [numbers[:, start + i : start + i + 1] for i in range(count)]


def _weights(
    sizes: Sizes, affine: Any, z: Float[Array, "G lanes"]
) -> tuple[Float[Array, "G lanes"], Float[Array, "G lanes"]]:
    """Return the weights of the streams in their sum, and the derivatives by the logits. Other
    lanes are zero.
    """
    is_weight = _lane(z) < sizes.num_streams
    gate = jax.nn.sigmoid(jnp.where(is_weight, z * affine[0:1, :] + affine[1:2, :], 0.0))
    zero = jnp.zeros_like(z)
    return (
        jnp.where(is_weight, gate + sizes.epsilon, zero),
        jnp.where(is_weight, gate * (1.0 - gate), zero),
    )


def _coefficients(
    sizes: Sizes, numbers: Float[Array, "G lanes"]
) -> tuple[list[Array], list[list[Array]]]:
    """Return the weights of the branch's output, and the rows of the mixing matrix."""
    n = sizes.num_streams
    rows = [_columns(numbers, n, n * (1 + row)) for row in range(n)]
    return _columns(numbers, n), rows


def _lane(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _shift(x: Float[Array, "G lanes"], lanes: int) -> Float[Array, "G lanes"]:
    """Return x with column i moved to column i + lanes."""
    return tpu.roll(x, lanes % LANES, 1)


def _round(x: Array) -> tuple[Array, Array]:
    """Return x rounded to bfloat16, and the error."""
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return high, x - high


def _matmul(first: Array, second: Array, second_dim: int) -> Array:
    """Contract the last dim of `first` with a dim of `second`."""
    precision = lax.Precision.HIGHEST if first.dtype == jnp.float32 else None
    dims = (((1,), (second_dim,)), ((), ()))
    return lax.dot_general(
        first, second, dims, precision=precision, preferred_element_type=jnp.float32
    )
