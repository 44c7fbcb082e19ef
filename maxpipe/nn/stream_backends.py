"""Selection and sharding of the TPU kernels for residual streams (`nn/stream_kernels.py`).

Arrays with one number per coefficient and token have the tokens in the last dims here, and in the
first dim in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from maxpipe.nn import stream_kernels
from maxpipe.nn.attention.interface import shard_axes
from maxpipe.nn.stream_kernels import Projection, Sizes
from maxpipe.parallel.collectives import map_shards, mark_varying
from maxpipe.parallel.sequence_parallel import SequenceParallel
from maxpipe.parallel.sharding import AxisRules
from maxpipe.parallel.tpu_kernels import has_tpu_devices


class StreamShards(NamedTuple):
    """Mesh axes over which the kernels are sharded."""

    rows: tuple[str, ...]
    """Axes that shard sequences."""
    tokens: str | None
    """Axis that shards the tokens of a sequence."""


def select_shards(
    sizes: Sizes, x: Float[Array, "B T nD"], rules: AxisRules | None
) -> StreamShards | None:
    """Return how the kernels are sharded, or None if plain JAX is used. Without `rules`, every
    device of the tensor axis has all tokens.
    """
    if not has_tpu_devices() or not stream_kernels.supports(sizes, x.dtype):
        return None
    axis = "" if rules is None else SequenceParallel.from_rules(rules).axis
    mesh = jax.sharding.get_abstract_mesh()
    rows, _ = shard_axes(len(x), 1)
    return StreamShards(rows, axis if axis and x.shape[1] % mesh.shape[axis] == 0 else None)


def read(
    shards: StreamShards, sizes: Sizes, x: Float[Array, "B T nD"], projection: Projection
) -> tuple[Float[Array, "B T D"], Float[Array, "J B T"], Float[Array, "B T"]]:
    """Return the weighted sum of the streams, z, and the inverse root mean square of each token."""
    h, z, inverse = _on_shards(shards, partial(stream_kernels.read, sizes), [x], projection, 3)
    return h, _tokens_last(z), inverse[..., 0]


def read_backward(
    shards: StreamShards,
    sizes: Sizes,
    x: Float[Array, "B T nD"],
    projection: Projection,
    z: Float[Array, "J B T"],
    inverse: Float[Array, "B T"],
    d_h: Float[Array, "B T D"],
    d_z: Float[Array, "J B T"],
) -> tuple[Float[Array, "B T nD"], Float[Array, "J B T"], Float[Array, "n B T"]]:
    """Return the cotangents of x, of the product of x and the projection, and of the logits of the
    weights of the streams.
    """
    arrays = [x, _tokens_first(z), inverse[..., None], d_h, _tokens_first(d_z)]
    run = partial(stream_kernels.read_backward, sizes)
    d_x, d_product, d_logits = _on_shards(shards, run, arrays, projection, 3)
    return d_x, _tokens_last(d_product), _tokens_last(d_logits)


def write(
    shards: StreamShards,
    sizes: Sizes,
    x: Float[Array, "B T nD"],
    change: Float[Array, "B T D"],
    coefficients: Float[Array, "_ B T"],
) -> Float[Array, "B T nD"]:
    """Return the new streams."""
    arrays = [x, change, _tokens_first(coefficients)]
    return _on_shards(shards, partial(stream_kernels.write, sizes), arrays, None, 1)[0]


def write_backward(
    shards: StreamShards,
    sizes: Sizes,
    x: Float[Array, "B T nD"],
    change: Float[Array, "B T D"],
    coefficients: Float[Array, "_ B T"],
    d_streams: Float[Array, "B T nD"],
) -> tuple[Float[Array, "B T nD"], Float[Array, "B T D"], Float[Array, "_ B T"]]:
    """Return the cotangents of x, of the change and of the coefficients."""
    arrays = [x, change, _tokens_first(coefficients), d_streams]
    run = partial(stream_kernels.write_backward, sizes)
    d_x, d_change, d_coefficients = _on_shards(shards, run, arrays, None, 3)
    return d_x, d_change, _tokens_last(d_coefficients)


def map_coefficients(
    shards: StreamShards,
    function: Callable[..., Array],
    inputs: Sequence[Float[Array, "_ B T"]],
    num_outputs: int,
) -> Float[Array, "_ B T"]:
    """Apply a function whose result for a token depends on the numbers of this token only."""
    spec = PartitionSpec(None, shards.rows, shards.tokens)

    def run(*arrays: Array) -> Array:
        flat = [each.reshape(len(each), -1) for each in arrays]
        out = stream_kernels.map_coefficients(
            function, flat, num_outputs, interpret=not has_tpu_devices()
        )
        return out.reshape(num_outputs, *arrays[0].shape[1:])

    return map_shards(run, (spec,) * len(inputs), spec)(*mark_varying(tuple(inputs)))


def _on_shards(
    shards: StreamShards,
    run: Callable[..., Any],
    arrays: Sequence[Float[Array, "B T _"]],
    projection: Projection | None,
    num_outputs: int,
) -> tuple[Float[Array, "B T _"], ...]:
    spec, shared = PartitionSpec(shards.rows, shards.tokens), PartitionSpec()

    def local(projection: Projection | None, *arrays: Array) -> tuple[Array, ...]:
        flat = [each.reshape(-1, each.shape[-1]) for each in arrays]
        weights = () if projection is None else (projection,)
        out = run(*weights, *flat, interpret=not has_tpu_devices())
        return tuple(each.reshape(*arrays[0].shape[:2], each.shape[-1]) for each in out)

    mapped = map_shards(local, (shared, *(spec for _ in arrays)), (spec,) * num_outputs)
    return mapped(*mark_varying((projection, *arrays)))


def _tokens_first(numbers: Float[Array, "J B T"]) -> Float[Array, "B T J"]:
    return jnp.moveaxis(numbers, 0, -1)


def _tokens_last(numbers: Float[Array, "B T J"]) -> Float[Array, "J B T"]:
    return jnp.moveaxis(numbers, -1, 0)
