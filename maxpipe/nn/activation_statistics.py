"""Statistics of a layer's activations: sums, maxima, histograms, and attention of sampled queries.

A recorder collects the statistics of one layer while the layer is traced. All statistics are sums
or maxima over the tokens of documents; padding is excluded. Sums and maxima can be accumulated over
microbatches and devices in any order, so the statistics do not depend on the layout of a run.
Optimization barriers separate the statistics from the layer, so that XLA compiles the layer as if
nothing were recorded.

Attention backends do not return scores. The scores of a few queries are therefore computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from maxpipe.nn.attention.interface import Mask, repeat_kv_heads
from maxpipe.parallel.collectives import (
    Maximum,
    Statistic,
    axis_index,
    axis_size,
    local_positions,
    mark_varying,
    max_over,
    sum_over,
)
from maxpipe.parallel.mesh import CONTEXT
from maxpipe.parallel.sharding import auto_axes, auto_sharded

NUM_SAMPLED_QUERIES = 64
"""Number of evenly spaced query positions per sequence whose attention scores are recorded."""
_MIN_EXPONENT, _MAX_EXPONENT = -24, 15
_NUM_MAGNITUDES = _MAX_EXPONENT - _MIN_EXPONENT + 1
NUM_BINS = 2 * _NUM_MAGNITUDES + 1


def histogram_edges() -> np.ndarray:
    """Return the edges of the histogram bins, float64 `[bins + 1]`.

    Bins are bounded by powers of two, separately for negative and positive entries. The middle bin
    counts entries smaller than `2**-24` in magnitude. The outer bins include all larger entries.
    """
    positive = np.exp2(np.arange(_MIN_EXPONENT, _MAX_EXPONENT + 2))
    return np.concatenate([-positive[::-1], positive])


def histogram_bins(x: Float[Array, "*dims"]) -> Int[Array, "*dims"]:
    """Return the bin of each entry; entries that are not finite are in an outer bin."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    exponent = ((bits >> 23) & 0xFF) - 127
    magnitude = jnp.clip(exponent - _MIN_EXPONENT + 1, 0, _NUM_MAGNITUDES)
    return (_NUM_MAGNITUDES + jnp.where(bits < 0, -magnitude, magnitude)).astype(jnp.int8)


def sum_squares(x: Float[Array, "*dims"], stacked: int = 0) -> Float[Array, "*stack"]:
    """Return the sum of squares over all dims except the first `stacked` dims.

    The last dim is summed first, because the rounding error of one long float32 sum is too large.
    The barrier prevents XLA from merging the two sums.
    """
    squares = jnp.square(x.astype(jnp.float32))
    if x.ndim > stacked + 1:
        squares = lax.optimization_barrier(squares.sum(-1))
    return squares.sum(tuple(range(stacked, squares.ndim)))


def count_bins(
    x: Float[Array, "*dims"], counts: Array | None = None, stacked: int = 0
) -> Float[Array, "*stack bins"]:
    """Return the number of entries in each bin, over all dims except the first `stacked` dims.

    `counts` selects the entries to count. XLA for CPU executes a scatter several times as fast as a
    loop over bins. On other platforms, scatters to a few addresses are slow, and the loop reads one
    byte per entry and bin. For a scatter, XLA would gather a sharded array.
    """
    bins, dims = histogram_bins(x), tuple(range(stacked, x.ndim))
    if counts is not None:
        bins = jnp.where(counts, bins, NUM_BINS)

    def loop(bins: Array) -> Array:
        def count(number: Array) -> Array:
            return (bins == number).sum(dims, dtype=jnp.int32)

        return jnp.moveaxis(lax.map(count, jnp.arange(NUM_BINS, dtype=jnp.int8)), 0, -1)

    def scatter(bins: Array) -> Array:
        empty = mark_varying(jnp.zeros(NUM_BINS, jnp.int32))
        count = lambda bins: empty.at[bins].add(1, mode="drop")  # noqa: E731
        for _ in range(stacked):
            count = jax.vmap(count)
        return count(bins.astype(jnp.int32))

    def run(bins: Array) -> Array:
        return (
            loop(bins) if auto_axes() else lax.platform_dependent(bins, cpu=scatter, default=loop)
        )

    bins = lax.optimization_barrier(bins)
    return auto_sharded(run, PartitionSpec())(bins).astype(jnp.float32)


class ActivationRecorder:
    """Statistics of the activations of one layer, collected while the layer is traced."""

    def __init__(self, inputs: Mapping[str, Any], *, histograms: bool):
        """Initialize the recorder for the arrays of a microbatch."""
        self._counted: Bool[Array, "B T"] = inputs["segment_ids"] > 0
        self._histograms = histograms
        self.statistics: dict[str, Statistic] = {}

    def record(self, name: str, x: Float[Array, "B T *dims"]) -> None:
        """Record the mean square of each token, summed over tokens, and the largest magnitude.

        An activation that occurs several times in a layer is recorded once.
        """
        if f"mean_square/{name}" in self.statistics:
            return
        x = lax.optimization_barrier(lax.stop_gradient(x))
        counted = self._counted.reshape(*self._counted.shape, *(1,) * (x.ndim - 2))
        masked = jnp.where(counted, x, 0)
        num_entries = math.prod(x.shape[2:])
        self.statistics[f"mean_square/{name}"] = sum_squares(masked) / num_entries
        largest = jnp.abs(masked).max().astype(jnp.float32)
        self.statistics[f"max/{name}"] = Maximum(largest)
        if self._histograms:
            bins = count_bins(x, jnp.broadcast_to(counted, x.shape))
            self.statistics[f"histogram/{name}"] = bins

    def record_hidden(self, name: str, x: Float[Array, "B T F"]) -> None:
        """Record the hidden units of an MLP, including the largest magnitude of each unit."""
        self.record(name, x)
        x = lax.optimization_barrier(lax.stop_gradient(x))
        masked = jnp.abs(jnp.where(self._counted[..., None], x, 0))
        self.statistics[f"unit_max/{name}"] = Maximum(masked.max((0, 1)).astype(jnp.float32))

    def record_router(
        self, probabilities: Float[Array, "B T E"], mask: Float[Array, "B T"]
    ) -> None:
        """Record the entropy of the router, summed over target tokens, and their number."""
        likely = lax.optimization_barrier(lax.stop_gradient(probabilities))
        entropy = -(likely * jnp.log(jnp.maximum(likely, 1e-30))).sum(-1)
        counts = mask.astype(jnp.float32)
        self.statistics["router_entropy"] = (entropy * counts).sum()
        self.statistics["router_tokens"] = counts.sum()

    def record_attention(
        self, query: Float[Array, "B T N H"], key: Float[Array, "B T G H"], mask: Mask
    ) -> None:
        """Record queries and keys, and the entropy and the largest logit of sampled queries.

        The entropy is in nats, averaged over heads and summed over the sampled queries. `mask` is
        the mask of this device's tokens.
        """
        self.record("query", query)
        self.record("key", key)
        query, key = lax.optimization_barrier(lax.stop_gradient((query, key)))
        sinks = None if mask.sinks is None else lax.stop_gradient(mask.sinks)
        positions = local_positions(query.shape[1])

        def sampled(query: Array, key: Array, ids: tuple[Any, ...], sinks: Any) -> Any:
            segments, positions, left = ids
            return _attention_statistics(query, key, segments, positions, left, sinks, mask)

        run = auto_sharded(sampled, PartitionSpec())
        ids = (mask.segments, positions, mask.image_tokens_left)
        entropy, largest, count = run(query, key, ids, sinks)
        self.statistics["attention_entropy"] = entropy
        self.statistics["attention_logit"] = Maximum(largest)
        self.statistics["attention_queries"] = count


def _attention_statistics(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    segments: Int[Array, "B T"],
    positions: Int[Array, " T"],
    image_tokens_left: Int[Array, "B T"] | None,
    sinks: Float[Array, " N"] | None,
    mask: Mask,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return the summed entropy, the largest logit and the number of the sampled queries.

    With context parallelism, every device computes the scores of all sampled queries with its own
    keys. Sums are returned by the first device along the context axis, and are 0 on the others.
    """
    rows, tokens, heads, size = query.shape
    key = repeat_kv_heads(key, heads)
    groups, total = key.shape[2], tokens * axis_size(CONTEXT)
    count = min(NUM_SAMPLED_QUERIES, total)
    places = (2 * np.arange(count) + 1) * total // (2 * count)
    query, query_segments = (_take_tokens(x, positions, places) for x in (query, segments))
    scores = jnp.einsum(
        "bqgnh,bsgh->bgnqs",
        query.reshape(rows, count, groups, heads // groups, size),
        key,
        preferred_element_type=jnp.float32,
    )
    scores *= size**-0.5 if mask.scale is None else mask.scale
    if mask.soft_cap:
        scores = mask.soft_cap * jnp.tanh(scores / mask.soft_cap)
    distance = places[:, None] - positions
    seen = query_segments[:, :, None] == segments[:, None]
    if mask.causal and image_tokens_left is not None:
        left = _take_tokens(image_tokens_left, positions, places)
        seen &= distance >= -jnp.maximum(left - 1, 0)[:, :, None]
    elif mask.causal:
        seen &= distance >= 0
    if not isinstance(mask.window, int) or mask.window:
        seen &= (distance < mask.window) | (jnp.asarray(mask.window) == 0)
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    largest = top = max_over(scores.max(-1), CONTEXT)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, groups, -1, 1)
        top = jnp.maximum(top, sinks)
    shifted = jnp.where(seen, scores - top[..., None], 0.0)
    likely = jnp.where(seen, jnp.exp(shifted), 0.0)
    mass = sum_over(likely.sum(-1), CONTEXT)
    weighted = sum_over((likely * shifted).sum(-1), CONTEXT)
    if sinks is not None:
        mass += jnp.exp(sinks - top)
        weighted += jnp.exp(sinks - top) * (sinks - top)
    entropy = jnp.log(mass) - weighted / mass
    counted = query_segments > 0
    is_first = axis_index(CONTEXT) == 0
    entropy = jnp.where(counted[:, None, None] & is_first, entropy, 0.0).sum() / heads
    largest = jnp.where(counted[:, None, None], largest, -jnp.inf).max()
    return entropy, largest, jnp.where(is_first, counted.sum().astype(jnp.float32), 0.0)


def _take_tokens(x: Array, positions: Int[Array, " T"], places: np.ndarray) -> Array:
    """Return the tokens `[B, n, ...]` at the given positions of the full sequences."""
    if axis_size(CONTEXT) == 1:
        return jnp.take(x, places, axis=1)
    hits = positions == places[:, None]
    is_local = hits.any(1).reshape(1, -1, *(1,) * (x.ndim - 2))
    local = jnp.take(x, hits.argmax(1), axis=1)
    return sum_over(jnp.where(is_local, local, 0), CONTEXT)
