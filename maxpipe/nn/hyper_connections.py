"""Hyper-connections: several residual streams, which branches read and update.

The streams of a token are one vector, one stream after the other. Streams are slices of the last
dim; a separate dim of n = 4 streams would be padded to 8 or 16 rows in the memory of a TPU. All
sums are in float32.

The backward passes are written by hand. They save the streams, the output of the branch, the
output of the projection (n * (n + 2) numbers per token) and one float32 number per token. The maps
are computed again, so that no result of a Sinkhorn iteration is saved.

`nn/stream_backends.py` computes the sums over streams, with kernels on TPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from maxpipe.models.layers.hyper_connections import HyperConnection, StreamHead, StreamMap
from maxpipe.nn import stream_backends, stream_kernels
from maxpipe.nn.module import SpecModule
from maxpipe.nn.stream_backends import StreamShards
from maxpipe.nn.stream_kernels import Projection, Sizes
from maxpipe.parallel.sharding import AxisRules


class _Weights(NamedTuple):
    """Float32 parameters of a map."""

    project: Float[Array, "nD J"]
    bias: Float[Array, " J"]
    scale: Float[Array, " G"]


class _Map(NamedTuple):
    """Static options of a map."""

    part: Any
    shards: StreamShards | None
    """How kernels are sharded. If None, plain JAX is used."""


class _Module(SpecModule):
    project: nnx.Param
    bias: nnx.Param
    scale: nnx.Param

    def __init__(self, part: StreamMap, rules: AxisRules):
        super().__init__(part)
        self.part, self.rules = part, rules

    def _weights(self) -> _Weights:
        weights = (self.project[...], self.bias[...], self.scale[...])
        return _Weights(*(weight.astype(jnp.float32) for weight in weights))

    def read(
        self, x: Float[Array, "B T nD"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "J B T"]]:
        """Return the weighted sum of the streams, and the projection z."""
        return _read(self._map(x), x, self._weights())

    def _map(self, x: Float[Array, "B T nD"]) -> _Map:
        return _Map(self.part, stream_backends.select_shards(_sizes(self.part), x, self.rules))


class HyperConnectionModule(_Module):
    """Maps between the residual streams and the input and output of a branch."""

    part: HyperConnection

    def write(
        self, x: Float[Array, "B T nD"], change: Float[Array, "B T D"], z: Float[Array, "J B T"]
    ) -> Float[Array, "B T nD"]:
        """Return the new streams, given the output of the branch and z."""
        return _write(self._map(x), x, change, z, self._weights())


class StreamHeadModule(_Module):
    """Sum of all residual streams, weighted per token."""

    part: StreamHead

    def _map(self, x: Float[Array, "B T nD"]) -> _Map:
        """Return the static options; every device has all tokens, as in the final norm."""
        return _Map(self.part, stream_backends.select_shards(_sizes(self.part), x, None))

    def __call__(self, x: Float[Array, "B T nD"]) -> Float[Array, "B T D"]:
        """Return the weighted sum."""
        h, _ = self.read(x)
        return h


def _sizes(part: StreamMap) -> Sizes:
    return Sizes(
        part.num_streams, part.d_model, part.num_coefficients, part.norm_epsilon, part.epsilon
    )


def spread(x: Float[Array, "*dims D"], num_streams: int) -> Float[Array, "*dims nD"]:
    """Copy an array to all residual streams."""
    return x if num_streams == 1 else jnp.concatenate([x] * num_streams, axis=-1)


# Coefficients of the streams. Their first dim is the number of the coefficient, so that tokens are
# the last dim.


def _logits(part: StreamMap, z: Float[Array, "J B T"], weights: _Weights) -> Float[Array, "J B T"]:
    """Return the logits of all coefficients."""
    return z * _scales(part, weights)[:, None, None] + weights.bias[:, None, None]


def _logits_backward(
    part: StreamMap,
    z: Float[Array, "J B T"],
    weights: _Weights,
    d_logits: Float[Array, "_ B T"],
    start: int = 0,
) -> tuple[Float[Array, "J B T"], Float[Array, " J"], Float[Array, " G"]]:
    """Return the cotangents of z, the bias and the scales, given the cotangent of the logits from
    index `start` on.

    The barrier makes a split backward pass save the cotangent of the logits. Otherwise, the second
    part would differentiate the Sinkhorn iterations again.
    """
    after = part.num_coefficients - start - len(d_logits)
    padding = ((start, after), (0, 0), (0, 0))
    d_logits = jnp.pad(lax.optimization_barrier(d_logits), padding)
    by_coefficient = (z * d_logits).sum(axis=(1, 2))
    ends = itertools.accumulate(part.scale_counts)
    d_scale = jnp.stack([each.sum() for each in jnp.split(by_coefficient, [*ends][:-1])])
    return d_logits * _scales(part, weights)[:, None, None], d_logits.sum(axis=(1, 2)), d_scale


def _scales(part: StreamMap, weights: _Weights) -> Float[Array, " J"]:
    counts = enumerate(part.scale_counts)
    return jnp.concatenate([jnp.broadcast_to(weights.scale[i], count) for i, count in counts])


def _projection(part: StreamMap, weights: _Weights) -> Projection:
    return Projection(weights.project, _scales(part, weights), weights.bias)


def _pre(part: StreamMap, logits: Float[Array, "n B T"]) -> Float[Array, "n B T"]:
    """Return the weights of the streams in the input of a branch or of the final norm."""
    return jax.nn.sigmoid(logits) + part.epsilon


def _post_and_comb(
    part: HyperConnection, logits: Float[Array, "_ B T"]
) -> tuple[Float[Array, "n B T"], Float[Array, "n n B T"]]:
    """Return the weights of the branch's output, and the matrix that mixes the streams."""
    n = part.num_streams
    comb = logits[n:].reshape(n, n, *logits.shape[1:])
    return 2.0 * jax.nn.sigmoid(logits[:n]), sinkhorn(comb, part)


def sinkhorn(logits: Float[Array, "n n B T"], part: HyperConnection) -> Float[Array, "n n B T"]:
    """Return approximately doubly stochastic matrices, whose rows are dim 0."""
    matrix = jax.nn.softmax(logits, axis=1) + part.epsilon
    matrix = matrix / (matrix.sum(axis=0, keepdims=True) + part.epsilon)
    for _ in range(part.num_iterations - 1):
        matrix = matrix / (matrix.sum(axis=1, keepdims=True) + part.epsilon)
        matrix = matrix / (matrix.sum(axis=0, keepdims=True) + part.epsilon)
    return matrix


# Sums over streams.


def _split(x: Float[Array, "B T nD"], part: StreamMap) -> list[Float[Array, "B T D"]]:
    return [stream.astype(jnp.float32) for stream in jnp.split(x, part.num_streams, axis=-1)]


def _sum(
    coefficients: Sequence[Float[Array, "B T"]], arrays: Sequence[Float[Array, "B T D"]]
) -> Float[Array, "B T D"]:
    terms = [c[..., None] * array for c, array in zip(coefficients, arrays, strict=True)]
    return sum(terms[1:], start=terms[0])


def _dot(a: Float[Array, "B T D"], b: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    return jnp.sum(a * b, axis=-1)


def _project(
    part: StreamMap, x: Float[Array, "B T nD"], project: Float[Array, "nD J"]
) -> tuple[Float[Array, "J B T"], Float[Array, "B T"]]:
    """Return z and the inverse root mean square of each token's streams.

    The norm is applied to the result of the matmul, so that the normalized streams are not stored.
    """
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + part.norm_epsilon)
    z = jnp.einsum("btk,kj->jbt", wide, project, precision=lax.Precision.HIGH)
    return z * inverse, inverse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(
    map_: _Map, x: Float[Array, "B T nD"], weights: _Weights
) -> tuple[Float[Array, "B T D"], Float[Array, "J B T"]]:
    return _read_forward(map_, x, weights)[0]


def _read_forward(map_: _Map, x: Array, weights: _Weights):
    part, shards = map_
    if shards is not None:
        h, z, inverse = stream_backends.read(shards, _sizes(part), x, _projection(part, weights))
    else:
        z, inverse = _project(part, x, weights.project)
        pre = _pre(part, _logits(part, z, weights)[: part.num_streams])
        h = _sum(list(pre), _split(x, part)).astype(x.dtype)
    return (h, z), (x, z, inverse, weights)


def _read_backward(map_: _Map, saved: Any, cotangents: Any):
    x, z, inverse, weights = saved
    d_h, d_z = cotangents
    part, shards = map_
    if shards is not None:
        return _read_backward_with_kernels(part, shards, saved, d_h, d_z)
    pre, of_pre = jax.vjp(partial(_pre, part), _logits(part, z, weights)[: part.num_streams])
    d_h = d_h.astype(jnp.float32)
    (d_logits,) = of_pre(jnp.stack([_dot(d_h, stream) for stream in _split(x, part)]))
    more, d_bias, d_scale = _logits_backward(part, z, weights, d_logits)
    d_z = d_z + more
    # z is x W / rms(x), so that the gradient through the norm is -x sum(z d_z) / (nD rms(x)^2).
    d_product = d_z * inverse
    through_norm = (z * d_z).sum(axis=0) * jnp.square(inverse) / x.shape[-1]
    wide, high = x.astype(jnp.float32), lax.Precision.HIGH
    d_x = jnp.einsum("jbt,kj->btk", d_product, weights.project, precision=high)
    d_x += jnp.concatenate([d_h * each[..., None] for each in pre], axis=-1)
    d_x -= wide * through_norm[..., None]
    d_project = jnp.einsum("btk,jbt->kj", wide, d_product, precision=high)
    return d_x.astype(x.dtype), _Weights(d_project, d_bias, d_scale)


def _read_backward_with_kernels(
    part: StreamMap, shards: StreamShards, saved: Any, d_h: Array, d_z: Array
):
    x, z, inverse, weights = saved
    d_x, d_product, d_logits = stream_backends.read_backward(
        shards, _sizes(part), x, _projection(part, weights), z, inverse, d_h, d_z
    )
    _, d_bias, d_scale = _logits_backward(part, z, weights, d_logits)
    d_product = lax.optimization_barrier(d_product).reshape(len(z), -1)
    d_project = stream_kernels.outer(x.reshape(-1, x.shape[-1]), d_product)
    return d_x, _Weights(d_project, d_bias, d_scale)


_read.defvjp(_read_forward, _read_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _write(
    map_: _Map,
    x: Float[Array, "B T nD"],
    change: Float[Array, "B T D"],
    z: Float[Array, "J B T"],
    weights: _Weights,
) -> Float[Array, "B T nD"]:
    return _write_forward(map_, x, change, z, weights)[0]


def _write_forward(map_: _Map, x: Array, change: Array, z: Array, weights: _Weights):
    part, shards = map_
    logits, saved = _logits(part, z, weights)[part.num_streams :], (x, change, z, weights)
    if shards is not None:
        numbers = _coefficients(part, shards, logits)
        return stream_backends.write(shards, _sizes(part), x, change, numbers), saved
    post, comb = _post_and_comb(part, logits)
    arrays = [change.astype(jnp.float32), *_split(x, part)]
    streams = [_sum([post[j], *comb[:, j]], arrays) for j in range(part.num_streams)]
    return jnp.concatenate(streams, axis=-1).astype(x.dtype), saved


def _write_backward(map_: _Map, saved: Any, d_output: Array):
    x, change, z, weights = saved
    part, shards = map_
    logits = _logits(part, z, weights)[part.num_streams :]
    if shards is not None:
        d_x, d_change, d_numbers = stream_backends.write_backward(
            shards, _sizes(part), x, change, _coefficients(part, shards, logits), d_output
        )
        d_logits = stream_backends.map_coefficients(
            shards, partial(_flat_backward, part), (logits, d_numbers), len(logits)
        )
    else:
        (post, comb), of_maps = jax.vjp(partial(_post_and_comb, part), logits)
        d_streams, streams = _split(d_output, part), _split(x, part)
        wide = change.astype(jnp.float32)
        d_post = jnp.stack([_dot(wide, d_stream) for d_stream in d_streams])
        d_comb = jnp.stack(
            [jnp.stack([_dot(stream, d_stream) for d_stream in d_streams]) for stream in streams]
        )
        (d_logits,) = of_maps((d_post, d_comb))
        d_change = _sum(list(post), d_streams).astype(change.dtype)
        d_x = jnp.concatenate([_sum(list(row), d_streams) for row in comb], axis=-1)
        d_x = d_x.astype(x.dtype)
    d_z, d_bias, d_scale = _logits_backward(part, z, weights, d_logits, part.num_streams)
    d_project = jnp.zeros_like(weights.project)
    return d_x, d_change, d_z, _Weights(d_project, d_bias, d_scale)


def _coefficients(
    part: HyperConnection, shards: StreamShards, logits: Float[Array, "_ B T"]
) -> Float[Array, "_ B T"]:
    """Return the weights of the branch's output and the mixing matrix, computed by a kernel."""
    return stream_backends.map_coefficients(shards, partial(_flat, part), (logits,), len(logits))


def _flat(part: HyperConnection, logits: Float[Array, "_ B T"]) -> Float[Array, "_ B T"]:
    post, comb = _post_and_comb(part, logits)
    return jnp.concatenate([post, comb.reshape(-1, *comb.shape[2:])])


def _flat_backward(
    part: HyperConnection, logits: Float[Array, "_ B T"], d_numbers: Float[Array, "_ B T"]
) -> Float[Array, "_ B T"]:
    return jax.vjp(partial(_flat, part), logits)[1](d_numbers)[0]


_write.defvjp(_write_forward, _write_backward)
