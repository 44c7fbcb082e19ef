"""Chunked linear recurrences over packed sequences, shared by all layers with a recurrent state.

A recurrence processes all tokens of a chunk at once, and passes a state of constant size from chunk
to chunk. The state and the convolution are reset at document boundaries. The backward pass
recomputes each chunk from its saved initial state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxpipe.models.layers.recurrent import Recurrent
from maxpipe.nn import convolution_kernel
from maxpipe.nn.convolution_kernel import Columns, Convolution
from maxpipe.nn.module import LayerContext
from maxpipe.nn.recurrent_backends import (
    run_backward,
    run_convolution,
    run_forward,
)
from maxpipe.nn.recurrent_kernels import Layout, Operands, merge_states, split_states
from maxpipe.parallel.collectives import mark_varying
from maxpipe.parallel.tpu_kernels import has_tpu_devices

EMPTY_SEGMENT = -1
"""Segment ID that marks positions before the start of a sequence."""

Weights = Mapping[str, Array]
Tree = Any


class RecurrentCache(NamedTuple):
    """Cache of one layer, whose size does not depend on the number of earlier tokens."""

    tail: Tree
    """Convolution inputs of the most recent tokens: arrays `[B, w, ...]`."""
    segments: Int[Array, "B w"]
    """Segment IDs of the tokens whose convolution inputs are in `tail`."""
    state: Float[Array, "B K r dk dv"]
    """Float32 recurrent state."""

    def append(self, mixed: Tree, segments: Int[Array, "B T"], state: Array) -> RecurrentCache:
        """Return the cache after T more tokens; `mixed` are their convolution inputs, and `state`
        is the recurrent state after these tokens.
        """
        width = self.segments.shape[1]
        tail, of = self.prepend_tail(mixed, segments)
        return RecurrentCache(jax.tree.map(lambda x: x[:, -width:], tail), of[:, -width:], state)

    def prepend_tail(
        self, mixed: Tree, segments: Int[Array, "B T"]
    ) -> tuple[Tree, Int[Array, "B S"]]:
        """Return the cached and the new convolution inputs, concatenated, and the segment IDs of
        both.
        """
        join = lambda old, new: jnp.concatenate([old, new], axis=1)  # noqa: E731
        return jax.tree.map(join, self.tail, mixed), join(self.segments, segments)


def empty_cache(mixed: Tree, width: int, state: tuple[int, ...]) -> RecurrentCache:
    """Return an empty cache.

    Args:
        mixed: convolution inputs `[B, T, ...]`. Only their shapes and dtypes are used.
        width: number of earlier tokens that the convolution reads.
        state: shape of the state of one sequence.
    """
    first = jax.tree.leaves(mixed)[0]
    rows = first.shape[0]
    return RecurrentCache(
        jax.tree.map(lambda x: lax.full_like(x, 0, shape=(rows, width, *x.shape[2:])), mixed),
        lax.full_like(first, EMPTY_SEGMENT, jnp.int32, shape=(rows, width)),
        lax.full_like(first, 0, jnp.float32, shape=(rows, *state)),
    )


def cache_of(context: LayerContext, mixed: Tree, width: int, state: tuple[int, ...]) -> Any:
    """Return the cache of the context, or an empty one outside of decoding."""
    return empty_cache(mixed, width, state) if context.cache is None else context.cache


class StateUpdate(NamedTuple):
    """Float32 arrays with which a chunk updates the state S:
    `keep * S + key' (value - known S)`.
    """

    key: Float[Array, "*dims C dk"]
    value: Float[Array, "*dims C dv"]
    known: Float[Array, "*dims C dk"] | None
    """Keys that read the values already stored in the state. If None, no values are read."""
    keep: Float[Array, "*dims #dk"]
    """Factors by which the rows of the state decay over the chunk."""


@runtime_checkable
class Recurrence(Protocol):
    """A recurrence over chunks of tokens. Instances are compared by value, as static arguments."""

    step_weights: ClassVar[tuple[str, ...]]
    """Names of the weights that `step` reads, if the sublayer has them."""

    @property
    def part(self) -> Recurrent:
        """Return the sublayer."""
        ...

    def chunks(
        self, weights: Weights, inputs: Tree, segments: Array, before: RecurrentCache
    ) -> Tree:
        """Return arrays of all chunks `[N, ...]`. The last chunk is padded with tokens that do not
        change the state.
        """
        ...

    def step(self, weights: Weights, state: Array, chunk: Tree) -> tuple[Array, Array]:
        """Return the state at the end of a chunk, and the chunk's output `[B, K, r, C, dv]`."""
        ...

    def state_updates(self, chunks: Tree) -> StateUpdate:
        """Return the arrays of `chunks` that update the state."""
        ...


@runtime_checkable
class KernelRecurrence(Protocol):
    """A recurrence that TPU kernels can run."""

    def layout(self, inputs: Tree, tokens: int) -> Layout | None:
        """Return the options of the kernels, or None if they do not support the sizes."""
        ...

    def operands(
        self, weights: Weights, inputs: Tree, segments: Array, before: RecurrentCache
    ) -> Operands:
        """Return the arrays of the kernels."""
        ...


def chunk_size(part: Recurrent, tokens: int) -> int:
    """Return the number of tokens per chunk in a sequence of this length."""
    return min(part.chunk, 1 << (tokens - 1).bit_length())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan_chunks(
    rule: Recurrence,
    weights: Weights,
    inputs: Tree,
    segments: Int[Array, "B T"],
    before: RecurrentCache,
) -> tuple[Float[Array, "B T V o"], Float[Array, "B K r dk dv"]]:
    """Return the output of a recurrence, and the state after the last token.

    The backward pass saves the arguments and the state before each chunk.
    """
    layout = _kernel_layout(rule, inputs, segments)
    if layout is not None:
        operands = _kernel_operands(rule, weights, inputs, segments, before)
        out, state, _ = _run_kernel(layout, operands, before, save_states=False)
        return _tokens_first(layout, out, segments), state
    chunks = rule.chunks(weights, inputs, segments, before)
    state, read = lax.scan(partial(rule.step, _step_weights(rule, weights)), before.state, chunks)
    return _merge(read, segments.shape[1]), state


def _scan_forward(rule: Recurrence, *arguments: Any) -> tuple[Any, Any]:
    weights, inputs, segments, before = arguments
    layout = _kernel_layout(rule, inputs, segments)
    if layout is not None:
        operands = _kernel_operands(rule, *arguments)
        out, state, states = _run_kernel(layout, operands, before, save_states=True)
        return (_tokens_first(layout, out, segments), state), (arguments, states)
    chunks = rule.chunks(*arguments)

    def through(state: Array, chunk: Tree) -> tuple[Array, tuple[Array, Array]]:
        after, read = rule.step(_step_weights(rule, weights), state, chunk)
        return after, (read, state)

    state, (read, states) = lax.scan(through, before.state, chunks)
    return (_merge(read, segments.shape[1]), state), (arguments, states)


def _scan_backward(rule: Recurrence, saved: Any, cotangents: Any) -> Any:
    (weights, inputs, segments, before), states = saved
    layout = _kernel_layout(rule, inputs, segments)
    if layout is not None:
        return _kernel_backward(rule, layout, saved, cotangents)

    def again(weights: Weights, inputs: Tree, tail: Tree) -> Tree:
        return rule.chunks(weights, inputs, segments, before._replace(tail=tail))

    chunks, pull_chunks = jax.vjp(again, weights, inputs, before.tail)
    d_read, d_state = cotangents
    heads, group = d_state.shape[1:3]
    d_read = d_read.reshape(*d_read.shape[:2], heads, group, d_read.shape[-1])
    d_read = cut(d_read, chunk_size(rule.part, segments.shape[1]))
    used = _step_weights(rule, weights)

    def back(carry: tuple[Array, Weights], each: Any) -> tuple[tuple[Array, Weights], Tree]:
        (d_state, d_used), (state, chunk, d_read) = carry, each
        _, pull = jax.vjp(rule.step, used, state, chunk)
        more, d_state, d_chunk = pull((d_state, d_read))
        d_used = jax.tree.map(lambda sum_, new: sum_ + new.astype(jnp.float32), d_used, more)
        return (d_state, d_used), d_chunk

    nothing = jax.tree.map(lambda leaf: lax.full_like(d_state, 0, shape=leaf.shape), used)
    each = (states, chunks, d_read)
    (d_state, d_used), d_chunks = lax.scan(back, (d_state, nothing), each, reverse=True)
    d_weights, d_inputs, d_tail = pull_chunks(d_chunks)
    d_weights = dict(d_weights)
    for name, more in d_used.items():
        d_weights[name] += more.astype(d_weights[name].dtype)
    # A split backward pass saves these small gradients instead of their inputs.
    d_weights, d_inputs = lax.optimization_barrier((d_weights, d_inputs))
    return d_weights, d_inputs, None, RecurrentCache(d_tail, None, d_state)  # type: ignore[arg-type]


def _kernel_backward(rule: Any, layout: Layout, saved: Any, cotangents: Any) -> Any:
    (weights, inputs, segments, before), states = saved

    def again(weights: Weights, inputs: Tree, tail: Tree) -> Operands:
        return _kernel_operands(rule, weights, inputs, segments, before._replace(tail=tail))

    operands, pull_operands = jax.vjp(again, weights, inputs, before.tail)
    d_read, d_state = cotangents
    tokens = operands.tokens[0].shape[2]
    d_read = jnp.pad(d_read, [(0, 0), (0, tokens - d_read.shape[1]), (0, 0), (0, 0)])
    heads = d_read.shape[2] // layout.heads_per_state
    d_out = d_read.reshape(*d_read.shape[:2], heads, -1).swapaxes(1, 2)
    d_last = merge_states(layout, d_state)
    d_operands, d_start = run_backward(layout, operands, states, d_out, d_last)
    d_start = split_states(layout, d_start, d_state.shape)
    d_weights, d_inputs, d_tail = pull_operands(d_operands)
    # A split backward pass saves these small gradients instead of their inputs.
    d_weights, d_inputs = lax.optimization_barrier((d_weights, d_inputs))
    cache: Any = RecurrentCache(d_tail, None, d_start)  # type: ignore
    return d_weights, d_inputs, None, cache


scan_chunks.defvjp(_scan_forward, _scan_backward)


def _kernel_layout(rule: Recurrence, inputs: Tree, segments: Array) -> Layout | None:
    """Return the options of the TPU kernels, or None if plain JAX runs the recurrence."""
    if not isinstance(rule, KernelRecurrence):
        return None
    if not has_tpu_devices():
        return None
    return rule.layout(inputs, segments.shape[1])


def _kernel_operands(rule: Any, *arguments: Any) -> Operands:
    # The transpose of `mark_varying` sums the gradients of weights that are replicated across
    # devices.
    return mark_varying(rule.operands(*arguments))


def _run_kernel(
    layout: Layout, operands: Operands, before: RecurrentCache, *, save_states: bool
) -> tuple[Array, Array, Array | None]:
    start = merge_states(layout, before.state)
    out, state, states = run_forward(layout, operands, start, save_states=save_states)
    return out, split_states(layout, state, before.state.shape), states


def _tokens_first(
    layout: Layout, out: Float[Array, "B V S w"], segments: Array
) -> Float[Array, "B T H dv"]:
    out = out.swapaxes(1, 2)[:, : segments.shape[1]]
    return out.reshape(*segments.shape, out.shape[2] * layout.heads_per_state, -1)


def _step_weights(rule: Recurrence, weights: Weights) -> Weights:
    return {name: weights[name] for name in rule.step_weights if name in weights}


class Decay(NamedTuple):
    """Decay of the state between tokens of each chunk, 0 between different documents."""

    between: Float[Array, "N B K r C C"]
    """Decay from the second token to the first."""
    since: Float[Array, "N B K r C"]
    """Decay from the start of the chunk to each token."""
    until: Float[Array, "N B K r C"]
    """Decay from each token to the end of the chunk."""

    @property
    def over_chunk(self) -> Float[Array, "N B K r"]:
        """Return the decay over the entire chunk."""
        return self.since[..., -1]


def decay_in_chunks(
    forget: Float[Array, "B T K r"],
    segments: Int[Array, "B T"],
    before: RecurrentCache,
    size: int,
) -> Decay:
    """Return the decay in chunks of `size` tokens; `forget` is the log decay of each token."""
    total, document, since, until = decay_rows(forget, segments, before, size)
    within = _within_documents(document)
    between = jnp.where(within, total[..., :, None] - total[..., None, :], -jnp.inf)
    return Decay(jnp.exp(between), since, until)


class DecayRows(NamedTuple):
    """Decay of each token of each chunk."""

    total: Float[Array, "N B K r C"]
    """Log decay since the start of the chunk or of the token's document."""
    document: Int[Array, "N B 1 1 C"]
    """Index of each token's document within the chunk. Document 0 continues from the previous
    chunk."""
    since: Float[Array, "N B K r C"]
    """Decay from the start of the chunk to each token, 0 if another document starts between
    them."""
    until: Float[Array, "N B K r C"]
    """Decay from each token to the end of the chunk."""


def decay_rows(
    forget: Float[Array, "B T K r"],
    segments: Int[Array, "B T"],
    before: RecurrentCache,
    size: int,
) -> DecayRows:
    """Return the decay of each token in chunks of `size` tokens."""
    last = jnp.concatenate([before.segments[:, -1:], segments[:, :-1]], axis=1)
    document = jnp.cumsum(cut((segments != last)[:, :, None, None], size)[:, :, :, :, 0], axis=-1)
    document = document[:, :, :, None]
    total = _cumulative_log_decay(_within_documents(document), cut(forget[..., None], size))
    until = jnp.where(document == document[..., -1:], total[..., -1:] - total, -jnp.inf)
    since = jnp.where(document == 0, jnp.exp(total), 0.0)
    return DecayRows(total, document, since, jnp.exp(until))


def _within_documents(document: Int[Array, "N B 1 1 C"]) -> Bool[Array, "N B 1 1 C C"]:
    """Return for each token the earlier tokens of its document, including the token."""
    same = document[..., :, None] == document[..., None, :]
    return same & jnp.tri(document.shape[-1], dtype=bool)


def _cumulative_log_decay(
    within: Bool[Array, "N B 1 1 C C"], forget: Float[Array, "N B K r C 1"]
) -> Float[Array, "N B K r C"]:
    """Return each token's cumulative log decay since the start of the chunk or of the token's
    document.

    Differences of cumulative sums over entire chunks would be inaccurate, because a large decay in
    other documents would cause rounding errors.
    """
    factors, each = within[:, :, 0, 0].astype(jnp.float32), forget[..., 0]
    return jnp.einsum("nbcj,nbkrj->nbkrc", factors, each, precision=lax.Precision.HIGHEST)


def causal_convolution(
    kernel: Float[Array, "*dims w"],
    bias: Float[Array, "*dims"] | None,
    row: Float[Array, "B S *dims"],
    of: Int[Array, "B S"],
    segments: Int[Array, "B T"],
) -> Float[Array, "B T *dims"]:
    """Convolve each channel over the tokens of a document, and apply SiLU, in float32.

    `row` and `of` are the result of `RecurrentCache.prepend_tail`. The kernel's last entry
    multiplies the current token.
    """
    tokens, total = segments.shape[1], 0.0 if bias is None else bias.astype(jnp.float32)
    for at in range(kernel.shape[-1]):
        there = slice(at, at + tokens)
        seen = (of[:, there] == segments).reshape(*segments.shape, *(1,) * (row.ndim - 2))
        tap = kernel[..., at].astype(jnp.float32)
        total = total + jnp.where(seen, row[:, there], 0).astype(jnp.float32) * tap
    return jax.nn.silu(total)


@dataclass(frozen=True)
class HeadConvolution:
    """Convolution of the inputs of TPU kernels, which have heads before tokens."""

    before: RecurrentCache
    segments: Int[Array, "B T"]
    size: int
    """Number of tokens per chunk of the recurrence."""

    def __call__(
        self,
        columns: Sequence[Columns],
        x: Float[Array, "B T K E"],
        tail: Float[Array, "B w K e"],
        kernel: Float[Array, "K e taps"],
        bias: Float[Array, "K e"] | None = None,
    ) -> Float[Array, "B K S E"]:
        """Convolve the first `e` columns, and apply SiLU and the norms of `columns`.

        `tail` contains the tokens before the first one.
        """
        x = heads_first(x, self.size)
        masks = convolution_kernel.token_masks(self.before.segments, self.segments, x.shape[2])
        options = Convolution(tuple(columns), kernel.shape[-1], bias is not None)
        arguments = convolution_kernel.make_arguments(x, tail, kernel, bias, masks)
        return run_convolution(options, arguments)


def cut(x: Array, size: int) -> Array:
    """Split `[B, T, K, ..., d]` into chunks `[N, B, K, ..., C, d]`, padded with zeros."""
    rows, tokens, *other_dims = x.shape
    count = -(-tokens // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * len(other_dims)])
    x = x.reshape(rows, count, size, *other_dims)
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)


def heads_first(x: Float[Array, "B T K d"], size: int) -> Float[Array, "B K S d"]:
    """Move heads before tokens, and pad the tokens with zeros to a multiple of the chunk size."""
    padding = -x.shape[1] % size
    return jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)]).swapaxes(1, 2)


def _merge(x: Float[Array, "N B K r C d"], tokens: int) -> Float[Array, "B T V d"]:
    """Merge the chunks of value heads; the inverse of `cut`."""
    x = jnp.moveaxis(jnp.moveaxis(x, -2, 2), 0, 1)
    rows, count, size, heads, group, width = x.shape
    return x.reshape(rows, count * size, heads * group, width)[:, :tokens]
