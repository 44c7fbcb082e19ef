"""Recurrent states of sequences that are sharded over the context axis.

Each device holds two chunks of a sequence in zig-zag order (`parallel.collectives`), called pieces
here. The state after a piece is an affine function of the state before it: `A S + b`. All devices
first compute A and b of their pieces with a scan that has no output. They exchange A and b, compose
them in sequence order, and run the recurrence of each piece from the resulting state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from maxpipe.models.layers.recurrent import Recurrent
from maxpipe.nn.chunked_scan import (
    EMPTY_SEGMENT,
    Recurrence,
    RecurrentCache,
    StateUpdate,
    Tree,
    Weights,
    cache_of,
    scan_chunks,
)
from maxpipe.nn.module import LayerContext
from maxpipe.parallel import collectives
from maxpipe.parallel.collectives import FULL_SEGMENT_IDS, axis_size, map_auto_axes, mark_varying
from maxpipe.parallel.mesh import CONTEXT
from maxpipe.parallel.sharding import AxisRules, auto_axes, constrain, entry_axes

_STATES = (None, "heads", None, None)


def scan_sequences(
    rule: Recurrence,
    weights: Weights,
    inputs: Tree,
    mixed: Tree,
    context: LayerContext,
    rules: AxisRules,
) -> tuple[Float[Array, "B T V dv"], RecurrentCache | None]:
    """Return the output of a recurrence for the local tokens, and the updated cache in decoding.

    `mixed` are the inputs of the convolution.
    """
    if context.cache is None and axis_size(CONTEXT) > 1:
        return _scan_pieces(rule, weights, inputs, mixed, context.inputs, rules), None
    part, segments = rule.part, context.inputs["segment_ids"]
    before = cache_of(context, mixed, part.kernel - 1, part.state_shape)
    results: Any = scan_chunks(rule, weights, inputs, segments, before)
    read, state = results
    return read, None if context.cache is None else before.append(mixed, segments, state)


def _scan_pieces(
    rule: Recurrence,
    weights: Weights,
    inputs: Tree,
    mixed: Tree,
    batch: Mapping[str, Any],
    rules: AxisRules,
) -> Float[Array, "B T V dv"]:
    part, segments = rule.part, _as_rows(batch["segment_ids"])
    weights, inputs = _add_gradients(weights, jax.tree.map(_as_rows, inputs))
    before = RecurrentCache(
        jax.tree.map(partial(_preceding_tokens, width=part.kernel - 1), mixed),
        _preceding_segments(batch[FULL_SEGMENT_IDS], segments.shape[1], part.kernel - 1),
        _empty_effect(part, len(segments)),
    )
    results: Any = scan_chunks(_Effect(rule), weights, inputs, segments, before)
    shape = len(segments), *part.state_shape
    effect = results[1].reshape(shape[0], -1, shape[-2], shape[-1] + part.transition_columns)
    effect = constrain(effect, _STATES, rules)
    state: Any = _states_before(effect, part.transition_columns, _auto_axes_of_heads(rules))
    before = before._replace(state=state.reshape(shape))
    results = scan_chunks(rule, weights, inputs, segments, before)
    read = results[0]
    return read.reshape(*batch["segment_ids"].shape, *read.shape[2:])


@jax.custom_vjp
def _add_gradients(weights: Weights, inputs: Tree) -> tuple[Weights, Tree]:
    """Return the arguments. A split backward pass adds the gradients of both scans before it saves
    those of the weights.
    """
    return weights, inputs


def _add_gradients_backward(_: None, gradients: tuple[Weights, Tree]) -> tuple[Weights, Tree]:
    return lax.optimization_barrier(gradients)


_add_gradients.defvjp(lambda *arguments: (arguments, None), _add_gradients_backward)


@dataclass(frozen=True)
class _Effect:
    """The update of the state by a recurrence, without its output.

    The columns of the state are b and A. They are updated in the same way, except that values are
    only added to b.
    """

    rule: Recurrence
    step_weights: ClassVar[tuple[str, ...]] = ()

    @property
    def part(self) -> Recurrent:
        return self.rule.part

    def chunks(
        self, weights: Weights, inputs: Tree, segments: Array, before: RecurrentCache
    ) -> StateUpdate:
        """Return the updates of the state by all chunks."""
        return self.rule.state_updates(self.rule.chunks(weights, inputs, segments, before))

    def step(
        self, weights: Weights, state: Float[Array, "B K r dk e"], chunk: StateUpdate
    ) -> tuple[Float[Array, "B K r dk e"], Float[Array, "B K r C 0"]]:
        """Return b and A at the end of a chunk, and an output without elements."""
        del weights
        missing = self.part.transition_columns
        written = jnp.pad(chunk.value, [*[(0, 0)] * (chunk.value.ndim - 1), (0, missing)])
        if chunk.known is not None:
            written -= chunk.known @ state
        state = chunk.keep[..., None] * state + chunk.key.swapaxes(-1, -2) @ written
        return state, chunk.value[..., :0]

    def state_updates(self, chunks: StateUpdate) -> StateUpdate:
        """Return the chunks, which only contain updates."""
        return chunks


def _empty_effect(part: Recurrent, rows: int) -> Float[Array, "B K r dk e"]:
    """Return b = 0 and A = 1, the effect of no tokens.

    If A is a multiple of the identity, its single column is the factor.
    """
    *heads, size, width = part.state_shape
    columns = part.transition_columns
    identity = jnp.ones((size, 1)) if columns == 1 else jnp.eye(size)
    effect = jnp.concatenate([jnp.zeros((size, width)), identity], axis=1)
    return mark_varying(jnp.broadcast_to(effect, (rows, *heads, *effect.shape)))


# States before each piece, from the effects of all pieces. All devices compose all effects, because
# the composition is small compared with the scan of a piece.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _states_before(
    effect: Float[Array, "B H dk e"], columns: int, axes: tuple[str, ...]
) -> Float[Array, "B H dk dv"]:
    """Return the state before each local piece.

    Args:
        effect: b and A of each local piece.
        columns: number of columns of A.
        axes: auto axes over which heads are sharded.
    """
    effects = _gather_pieces(effect, axes)
    added, transition = _split(effects, columns)

    def through(state: Array, piece: tuple[Array, Array]) -> tuple[Array, Array]:
        added, transition = piece
        return _product(transition, state) + added, state

    start = mark_varying(jnp.zeros(added.shape[1:]))
    return _local_pieces(lax.scan(through, start, (added, transition))[1])


def _states_before_forward(
    effect: Array, columns: int, axes: tuple[str, ...]
) -> tuple[Array, tuple[Array, Array]]:
    states: Any = _states_before(effect, columns, axes)
    return states, (_split(effect, columns)[1], states)


def _states_before_backward(
    columns: int, axes: tuple[str, ...], saved: tuple[Array, Array], d_states: Array
) -> tuple[Array]:
    transition, states = saved
    both = _gather_pieces(jnp.concatenate([d_states, transition], axis=-1), axes)

    def back(d_after: Array, piece: tuple[Array, Array]) -> tuple[Array, Array]:
        d_before, transition = piece
        if columns > 1:
            transition = transition.swapaxes(-1, -2)
        return _product(transition, d_after) + d_before, d_after

    pieces = _split(both, columns)
    start = mark_varying(jnp.zeros(pieces[0].shape[1:]))
    d_added = _local_pieces(lax.scan(back, start, pieces, reverse=True)[1])
    if columns > 1:
        d_transition = _matmul(d_added, states.swapaxes(-1, -2))
    else:
        d_transition = (d_added * states).sum(-1, keepdims=True)
    return (jnp.concatenate([d_added, d_transition], axis=-1),)


_states_before.defvjp(_states_before_forward, _states_before_backward)


def _split(effect: Float[Array, "*dims e"], columns: int) -> tuple[Array, Array]:
    """Return b and A."""
    return effect[..., :-columns], effect[..., -columns:]


def _product(transition: Float[Array, "*dims dk c"], state: Float[Array, "*dims dk dv"]) -> Array:
    """Return `A S`. A single column of A is a factor of each row."""
    return transition * state if transition.shape[-1] == 1 else _matmul(transition, state)


def _matmul(x: Array, y: Array) -> Array:
    """Multiply in full float32 precision, because errors accumulate over all pieces."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _auto_axes_of_heads(rules: AxisRules) -> tuple[str, ...]:
    (entry,) = rules.spec(("heads",))
    return tuple(axis for axis in entry_axes(entry) if axis in auto_axes())


def _gather_pieces(
    x: Float[Array, "B H dk e"], axes: tuple[str, ...]
) -> Float[Array, "P b H dk e"]:
    """Return the arrays of all pieces, in sequence order."""
    run = map_auto_axes(partial(collectives.gather_sequences, dim=0), (None, None, axes))
    return mark_varying(run(jnp.moveaxis(_by_piece(x), 1, 0)))


def _local_pieces(x: Float[Array, "P b H dk e"]) -> Float[Array, "B H dk e"]:
    """Return the arrays of the local pieces, the inverse of `_gather_pieces`."""
    own = jnp.moveaxis(collectives.local_shard(x, 0), 0, 1)
    return own.reshape(-1, *own.shape[2:])


# Pieces as sequences. The two pieces of a sequence are adjacent.


def _as_rows(x: Array) -> Array:
    """Reshape `[b, 2t, ...]` to `[2b, t, ...]`."""
    return x.reshape(2 * x.shape[0], -1, *x.shape[2:])


def _by_piece(x: Array) -> Array:
    """Reshape `[2b, ...]` to `[b, 2, ...]`."""
    return x.reshape(-1, 2, *x.shape[1:])


def _preceding_tokens(x: Float[Array, "b T *dims"], width: int) -> Float[Array, "B w *dims"]:
    """Return the `width` tokens before each local piece, with zeros before the first token."""
    rows, tokens, *dims = x.shape
    size = min(width, tokens // 2)
    ends = x.reshape(rows, 2, tokens // 2, *dims)[:, :, tokens // 2 - size :]
    ends = collectives.gather_sequences(ends.reshape(rows, 2 * size, *dims), 1)
    return _windows(ends, size, width, 0)


def _preceding_segments(segments: Int[Array, "b S"], tokens: int, width: int) -> Int[Array, "B w"]:
    """Return the segment IDs of the `width` tokens before each local piece of `tokens` tokens."""
    return _windows(segments, tokens, width, EMPTY_SEGMENT)


def _windows(x: Array, size: int, width: int, empty: int) -> Array:
    """Return the `width` entries before each local piece of `size` entries."""
    x = jnp.pad(x, [(0, 0), (width, 0), *[(0, 0)] * (x.ndim - 2)], constant_values=empty)
    starts = collectives.local_starts(2 * size)
    windows = [lax.dynamic_slice_in_dim(x, start, width, 1) for start in starts]
    return jnp.stack(windows, axis=1).reshape(-1, width, *x.shape[2:])
