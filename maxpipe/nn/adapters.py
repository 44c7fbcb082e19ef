"""Initialize and apply adapters, and quantize frozen weight matrices.

`int8` stores integers and one scale per row. `nf4` packs two 4-bit codes into each byte. The codes
are quantiles of a normal distribution, and each block of 64 weights shares one scale
(arXiv:2305.14314, section 3). Double quantization subtracts the mean from the scales of a matrix
and stores the differences in the 8-bit format of arXiv:2110.02861, with one float32 scale for every
256 of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key as RandomKey

from maxpipe.models.adapters import (
    DOWN,
    LENGTH,
    SCALE,
    SCALE_MEAN,
    SCALE_SCALE,
    UP,
    Key,
    dim_of_scale_scales,
    dim_of_scales,
    is_held,
)
from maxpipe.models.spec import LayerType
from maxpipe.parallel.lora_weight import LoraWeight, column_norms

_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantization level of each 4-bit code, as a fraction of the block's largest magnitude (values
from the paper)."""


def quantize(weight: Array, dtype: str, dim: int, blocks: int) -> tuple[Array, Array]:
    """Quantize a matrix to `int8` or to packed 4-bit codes (`uint8`).

    `dim` is a negative index (-1 is the last dim). The dim is split into `blocks` blocks with one
    scale each. Returns the quantized weights and their float32 scales.
    """
    split = _split(weight.astype(jnp.float32), dim, blocks)
    most = jnp.abs(split).max(dim, keepdims=True)
    scaled = split / jnp.where(most == 0, 1.0, most)
    scales = jnp.squeeze(most, dim)
    if dtype == "int8":
        return jnp.round(scaled * 127).astype(jnp.int8).reshape(weight.shape), scales / 127
    middle = [(a + b) / 2 for a, b in itertools.pairwise(_LEVELS)]
    # A weight's code is the number of thresholds below that weight. Summing one comparison at a
    # time avoids an array with an extra dim for the thresholds.
    below = ((scaled > threshold).astype(jnp.uint8) for threshold in middle)
    codes = sum(below, jnp.zeros(scaled.shape, jnp.uint8)).reshape(weight.shape)
    pairs = jnp.moveaxis(codes, dim, -1)
    pairs = pairs.reshape(*pairs.shape[:-1], -1, 2)
    return jnp.moveaxis(pairs[..., 0] | pairs[..., 1] << 4, -1, dim), scales


def dequantize(numbers: Array, scales: Array, dim: int, dtype: jnp.dtype) -> Array:
    """Return the dequantized weights of a matrix."""
    if numbers.dtype == jnp.uint8:
        pairs = jnp.moveaxis(numbers, dim, -1)
        codes = jnp.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1)
        values = jnp.moveaxis(jnp.asarray(_LEVELS, jnp.float32)[codes], -1, dim)
    else:
        values = numbers.astype(jnp.float32)
    split = _split(values, dim, scales.shape[dim])
    return (split * jnp.expand_dims(scales, dim)).reshape(values.shape).astype(dtype)


def _dynamic_levels() -> np.ndarray:
    """Return the 256 levels of the signed 8-bit format with dynamic exponent (arXiv:2110.02861,
    section 2): for each power of ten, equal intervals from 0.1 to 1, represented by their midpoint.
    """
    levels = [0.0, 1.0]
    for bits in range(7):
        bounds = np.linspace(0.1, 1.0, 2**bits + 1)
        middle = 10.0 ** (bits - 6) * (bounds[:-1] + bounds[1:]) / 2
        levels += [*middle, *-middle]
    return np.sort(np.asarray(levels, np.float32))


_DYNAMIC = _dynamic_levels()


class QuantizedScales(NamedTuple):
    """Scales in 8 bits: `level[codes] * scales + mean`."""

    codes: Array
    scales: Array
    mean: Array
    """Means over each matrix, or over each expert's matrix."""


def quantize_scales(
    scales: Array, dim: int, blocks: int, means_over: Sequence[int]
) -> QuantizedScales:
    """Quantize the scales of a matrix. The dims in `means_over` are the dims of one matrix. All
    dims are negative indices. The dim `dim` is split into `blocks` blocks with one scale each.
    """
    means_over = tuple(means_over)
    # Sums of integers do not depend on the sharding of the scales.
    most = scales.max(means_over, keepdims=True)
    count = math.prod(scales.shape[each] for each in means_over)
    bits = min(30 - count.bit_length(), 11)
    fixed = jnp.round(scales / jnp.where(most == 0, 1.0, most) * 4.0**bits).astype(jnp.int32)
    halves = (
        half.sum(means_over, keepdims=True, dtype=jnp.int32).astype(jnp.float32)
        for half in (fixed >> bits, fixed & (2**bits - 1))
    )
    high, low = halves
    mean = (high + low / 2**bits) / (count * 2**bits) * most
    split = _split(scales - mean, dim, blocks)
    largest = jnp.abs(split).max(dim, keepdims=True)
    middle = (_DYNAMIC[:-1] + _DYNAMIC[1:]) / 2
    codes = jnp.searchsorted(middle, split / jnp.where(largest == 0, 1.0, largest))
    codes = codes.astype(jnp.uint8).reshape(scales.shape)
    return QuantizedScales(codes, jnp.squeeze(largest, dim), mean)


def dequantize_scales(quantized: QuantizedScales, dim: int) -> Array:
    """Return the float32 scales of a matrix."""
    codes, scales, mean = quantized
    levels = jnp.asarray(_DYNAMIC)[codes]
    split = _split(levels, dim, scales.shape[dim]) * jnp.expand_dims(scales, dim)
    return split.reshape(codes.shape) + mean


def _split(weight: Array, dim: int, blocks: int) -> Array:
    """Split a dim into two dims (blocks, weights per block). In the result, `dim` indexes the
    weights within a block.
    """
    at = weight.ndim + dim
    size = weight.shape[at]
    return weight.reshape(*weight.shape[:at], blocks, size // blocks, *weight.shape[at + 1 :])


Params = dict[str, Any]
_STREAM = np.uint32(2**32 - 1)
"""Number folded into the dropout key to obtain the random stream for adapters. Example IDs, which
are folded into the same key, are far smaller, so the streams never collide.
"""


def complete_params(layer_type: LayerType, arrays: Mapping[Key, Array]) -> dict[Key, Array]:
    """Derive a layer's stored parameters from its initialized or loaded parameters.

    The arrays may have leading dims over which layers are stacked. DoRA magnitudes are initialized
    to the column norms of the quantized base matrix, so that a new adapter does not change the
    model.
    """
    base, stored = dict(arrays), dict[Key, Array]()
    for key, weight in arrays.items():
        part, name = key
        if is_held(layer_type, key):
            arrays_of = _quantize_param(layer_type, key, weight)
            stored |= {(part, name + end): array for end, array in arrays_of.items()}
            base[key] = _dequantize_param(layer_type, key, arrays_of, weight.dtype)
    for (part, name), adapter in layer_type.adapters.items():
        if (length := (part, name + LENGTH)) in layer_type.stored:
            weight = base[part, name]
            first = weight.ndim - len(layer_type.declared[part, name].dims)
            norms = lambda one, summed=adapter.num_contracted_dims: column_norms(one, summed)  # noqa: E731
            for _ in range(first):
                norms = jax.vmap(norms)
            stored[length] = norms(weight)
    return {name: stored[name] if name in stored else arrays[name] for name in layer_type.params}


def quantize_dequantize(layer_type: LayerType, key: Key, weight: Array) -> Array:
    """Quantize a matrix and return the dequantized weights."""
    arrays = _quantize_param(layer_type, key, weight)
    return _dequantize_param(layer_type, key, arrays, weight.dtype)


def _quantize_param(layer_type: LayerType, key: Key, weight: Array) -> dict[str, Array]:
    """Return the stored arrays of a quantized matrix, keyed by suffix."""
    (part, name), dim = key, _scale_dim(layer_type, key)
    blocks = layer_type.stored[part, name + SCALE].shape[dim]
    numbers, scales = quantize(weight, layer_type.stored[key].own_dtype, dim, blocks)
    if (second := layer_type.stored.get((part, name + SCALE_SCALE))) is None:
        return {"": numbers, SCALE: scales}
    at, means_over, ndim = *_scale_scale_dims(layer_type, key), len(second.dims)
    quantized = quantize_scales(scales, at, second.shape[at], means_over)
    experts = [n - ndim for n in range(ndim) if n - ndim not in means_over]
    shape = (*weight.shape[: weight.ndim - ndim], *(weight.shape[n] for n in experts or [-1]))
    mean = quantized.mean.reshape(shape if experts else (*shape[:-1], 1))
    return {"": numbers, SCALE: quantized.codes, SCALE_SCALE: quantized.scales, SCALE_MEAN: mean}


def _dequantize_param(
    layer_type: LayerType, key: Key, arrays: Mapping[str, Array], dtype: jnp.dtype
) -> Array:
    """Return the dequantized weights of a matrix, given its stored arrays by suffix."""
    scales = arrays[SCALE]
    if SCALE_SCALE in arrays:
        at, means_over = _scale_scale_dims(layer_type, key)
        mean = arrays[SCALE_MEAN]
        mean = mean if len(means_over) < len(layer_type.declared[key].dims) else mean[..., 0]
        mean = jnp.expand_dims(mean, sorted(means_over))
        scales = dequantize_scales(QuantizedScales(scales, arrays[SCALE_SCALE], mean), at)
    return dequantize(arrays[""], scales, _scale_dim(layer_type, key), dtype)


def _scale_scale_dims(layer_type: LayerType, key: Key) -> tuple[int, tuple[int, ...]]:
    """Return the negative index of the dim along which quantized scales share scales, and of the
    dims over which their mean is computed.
    """
    declared = layer_type.declared[key]
    at, ndim = dim_of_scale_scales(declared), len(declared.dims)
    assert at is not None
    return at - ndim, tuple(n - ndim for n in range(ndim) if n != declared.expert_dim)


def apply_adapters(
    layer_type: LayerType,
    params: Params,
    dtype: jnp.dtype,
    inputs: Mapping[str, Array],
    key: RandomKey[Array, ""] | None,
) -> Params:
    """Return one layer's parameters, keyed by sublayer and name, with adapters applied to the
    weights.

    `key` is the layer's dropout key; None disables dropout.
    """
    if not layer_type.stored:
        return params
    weights = {
        part: {
            name: each for name, each in part_params.items() if (part, name) in layer_type.declared
        }
        for part, part_params in params.items()
    }
    for part, name in layer_type.declared:
        if is_held(layer_type, (part, name)):
            ends = ("", SCALE, SCALE_SCALE, SCALE_MEAN)
            arrays = {end: params[part][name + end] for end in ends if name + end in params[part]}
            weights[part][name] = _dequantize_param(layer_type, (part, name), arrays, dtype)
    for number, ((part, name), adapter) in enumerate(layer_type.adapters.items()):
        keys = None
        if key is not None and adapter.dropout:
            own = jax.random.fold_in(jax.random.fold_in(key, _STREAM), number)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(own, inputs["example_ids"])
        part_params = params[part]
        weights[part][name] = LoraWeight(
            weights[part][name],
            part_params[name + DOWN],
            part_params[name + UP],
            part_params.get(name + LENGTH),
            keys,
            scale=adapter.scale,
            dropout_rate=adapter.dropout,
            contracted_dims=adapter.num_contracted_dims,
            expert_dim=adapter.expert_dim,
        )
    return weights


def _scale_dim(layer_type: LayerType, key: Key) -> int:
    """Return the negative index of the dim along which a quantized matrix shares scales."""
    declared = layer_type.declared[key]
    dim = dim_of_scales(declared)
    assert dim is not None
    return dim - len(declared.dims)
