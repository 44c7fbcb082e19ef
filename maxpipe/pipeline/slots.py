"""What a stage does in a slot: its chunk's layers, forward or backward.

The layers of a slot run in a loop whose number of turns comes from the table, none when idle, so
that no conditional ever passes a buffer through. With `idle="compute"` every stage turns as often
as the busiest one and throws away what does not count: control flow that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.collectives import index_on, vary
from maxpipe.pipeline.layout import Layout
from maxpipe.pipeline.remat import Differentiated, Keep, Kept, differentiate
from maxpipe.pipeline.weights import LayerWeights

Tree = Any
Idle = Literal["skip", "compute"]


class SlotRow(NamedTuple):
    """One kind of slot in one tick as one stage sees it; every entry is a scalar."""

    microbatch: jax.Array
    repeat: jax.Array
    inbox: jax.Array
    stash: jax.Array
    deferred: jax.Array
    window: jax.Array
    gradient: jax.Array
    any_work: jax.Array
    """Whether any stage works in this slot."""


class Work(NamedTuple):
    """What one slot does, as scalars that differ between stages."""

    row: SlotRow
    weights: jax.Array
    """Position of its first layer among the weights that are held."""
    gradient: jax.Array
    """The same among the gradients."""
    first: jax.Array
    """The same layer's position in the network."""
    size: jax.Array
    """Number of layers, 0 when idle."""
    trips: jax.Array
    """Turns of the layer loop."""
    inputs: Tree
    """The microbatch's arrays."""


@dataclass(frozen=True)
class LayerSlots:
    """Runs the layers of a stage's chunks.

    `held` in the methods is what weights are read from: all that the stage holds, or the window.
    """

    layer: Callable[[Tree, jax.Array, Tree, jax.Array, jax.Array | None], jax.Array]
    """(params, x [B, T, D], inputs, layer index, key) -> [B, T, D]."""
    layout: Layout
    weights: LayerWeights
    keep: Keep
    idle: Idle
    key: jax.Array | None
    by_visit: bool
    """Weights and gradients lie where the table's window columns say, not by repeat."""

    @property
    def length(self) -> int:
        """Layers of the longest chunk: the stride of everything kept by layer."""
        return self.layout.layers_per_chunk

    def pieces(self, held: Tree, x: jax.Array, inputs: Tree, *, halves: bool) -> Differentiated:
        """The layer differentiated, traced aside: nothing of it enters this program."""
        found: list[Differentiated] = []
        keep = Keep("full") if self.keep.remat == "chunk" else self.keep

        def trace(held: Tree, x: jax.Array, inputs: Tree, index: jax.Array) -> jax.Array:
            weights = self.weights.layer(held, index)
            constants = (inputs, index, self.key)
            run = lambda w, x, constants: self.layer(w, x, *constants)  # noqa: E731
            found.append(differentiate(run, keep, weights, x, constants, halves=halves))
            return index

        jax.eval_shape(trace, held, x, inputs, vary(jnp.int32(0)))
        return found[0]

    def empty_stash(self, pieces: Differentiated, count: int, like: jax.Array) -> list[jax.Array]:
        """Room for what `count` chunks keep for their backward."""
        if self.keep.remat == "chunk":
            return [room(count, like)]
        return [room(count * self.length, leaf) for leaf in pieces.saved]

    def empty_deferred(self, pieces: Differentiated, count: int) -> list[jax.Array]:
        """Room for what `count` chunks keep for their weights' gradients."""
        return [room(count * self.length, leaf) for leaf in pieces.deferred]

    def work(self, row: SlotRow, batch: Tree) -> Work:
        """What this slot does on this stage."""
        stage = index_on(STAGE)
        size = read(read(vary(jnp.asarray(self.layout.chunk_sizes)), row.repeat), stage)
        first = read(read(vary(jnp.asarray(self.layout.first_layer)), row.repeat), stage)
        size = jnp.where(row.microbatch >= 0, size, 0)
        skips = self.idle == "skip"
        return Work(
            row,
            weights=self.length * (row.window if self.by_visit else row.repeat),
            gradient=self.length * (row.gradient if self.by_visit else row.repeat),
            first=first,
            size=size,
            trips=size if skips else jnp.where(row.any_work > 0, self.length, 0),
            inputs=microbatch(batch, row.microbatch),
        )

    def _uses(self, work: Work, step: jax.Array) -> jax.Array | None:
        """Whether this turn counts; None when every turn does."""
        return step < work.size if self.idle == "compute" else None

    def _constants(self, work: Work, step: jax.Array) -> Tree:
        """What a layer reads besides weights and input."""
        return work.inputs, work.first + step, self.key

    def forward(self, held: Tree, work: Work, x: jax.Array) -> jax.Array:
        """The chunk's output and nothing else."""

        def body(step: jax.Array, x: jax.Array) -> jax.Array:
            weights = self.weights.layer(held, work.weights + step)
            y = self.layer(weights, x, *self._constants(work, step))
            return _pick(self._uses(work, step), y, x)

        return lax.fori_loop(0, work.trips, body, x)

    def forward_and_keep(
        self, pieces: Differentiated, held: Tree, work: Work, x: jax.Array, stash: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The chunk's output, and the stash with what its backward needs."""
        if self.keep.remat != "chunk":
            return self._keep_layers(pieces, held, work, x, stash, work.row.stash * self.length)
        kept = jnp.where(work.row.microbatch >= 0, x, read(stash[0], work.row.stash))
        return self.forward(held, work, x), [write(stash[0], work.row.stash, kept)]

    def _keep_layers(
        self,
        pieces: Differentiated,
        held: Tree,
        work: Work,
        x: jax.Array,
        stash: list[jax.Array],
        base: jax.Array,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The chunk's output; what layer l keeps goes to `stash[...][base + l]`."""

        def body(step: jax.Array, state: tuple[jax.Array, list[jax.Array]]):
            x, stash = state
            used = self._uses(work, step)
            weights = self.weights.layer(held, work.weights + step)
            y, saved = pieces.forward(weights, x, self._constants(work, step))
            return _pick(used, y, x), _write_all(stash, base + step, saved, used)

        return lax.fori_loop(0, work.trips, body, (x, stash))

    def _kept(
        self, pieces: Differentiated, held: Tree, work: Work, stash: list[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        """What the layers kept, and the first one's place; `chunk` replays the chunk for it."""
        if self.keep.remat != "chunk":
            return stash, work.row.stash * self.length
        scratch = [room(self.length, leaf) for leaf in pieces.saved]
        base = jnp.zeros_like(work.row.stash)
        with jax.named_scope("replay"):
            x = read(stash[0], work.row.stash)
            return self._keep_layers(pieces, held, work, x, scratch, base)[1], base

    def _layer_from_last(
        self, held: Tree, work: Work, turn: jax.Array, kept: list[jax.Array], base: jax.Array
    ) -> tuple[jax.Array, tuple[Tree, list[jax.Array], Tree]]:
        """A layer's place in the chunk, last one first; its weights, what it kept and constants."""
        step = work.trips - 1 - turn
        weights = self.weights.layer(held, work.weights + step)
        values = [read(leaf, base + step) for leaf in kept]
        return step, (weights, values, self._constants(work, step))

    def backward(
        self,
        pieces: Differentiated,
        held: Tree,
        work: Work,
        cotangent: jax.Array,
        stash: list[jax.Array],
        totals: Tree,
    ) -> tuple[jax.Array, Tree]:
        """Both gradients of a chunk, its last layer first: the input's, and the totals."""
        kept, base = self._kept(pieces, held, work, stash)

        def body(turn: jax.Array, state: tuple[jax.Array, Tree]):
            cotangent, totals = state
            step, layer = self._layer_from_last(held, work, turn, kept, base)
            d_weights, d_x = pieces.backward(*layer, cotangent)
            totals = self._accumulate(totals, work, step, d_weights)
            return _pick(self._uses(work, step), d_x, cotangent), totals

        return lax.fori_loop(0, work.trips, body, (cotangent, totals))

    def input_grad(
        self,
        pieces: Differentiated,
        held: Tree,
        work: Work,
        cotangent: jax.Array,
        stash: list[jax.Array],
        deferred: list[jax.Array],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The gradient of a chunk's input; what its weights' gradients need is deferred."""
        kept, base = self._kept(pieces, held, work, stash)
        place = work.row.deferred * self.length

        def body(turn: jax.Array, state: tuple[jax.Array, list[jax.Array]]):
            cotangent, deferred = state
            step, layer = self._layer_from_last(held, work, turn, kept, base)
            d_x, later = pieces.input_grad(*layer, cotangent)
            used = self._uses(work, step)
            return _pick(used, d_x, cotangent), _write_all(deferred, place + step, later, used)

        return lax.fori_loop(0, work.trips, body, (cotangent, deferred))

    def weight_grad(
        self, pieces: Differentiated, work: Work, deferred: list[jax.Array], totals: Tree
    ) -> Tree:
        """The totals with the gradients of a chunk's weights, from what was deferred."""
        place = work.row.deferred * self.length

        def body(step: jax.Array, totals: Tree) -> Tree:
            later = [read(leaf, place + step) for leaf in deferred]
            d_weights = pieces.weight_grad(later, self._constants(work, step))
            return self._accumulate(totals, work, step, d_weights)

        return lax.fori_loop(0, work.trips, body, totals)

    def _accumulate(self, totals: Tree, work: Work, step: jax.Array, d_weights: Tree) -> Tree:
        used = self._uses(work, step)
        if used is not None:
            d_weights = jax.tree.map(lambda leaf: jnp.where(used, leaf, 0), d_weights)
        return self.weights.accumulate(totals, work.gradient + step, d_weights)


# Buffers.


_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def room(count: int, like: Any) -> jax.Array:
    """Slots for arrays like this one, where it is kept; what lies in them is undefined."""
    empty = vary(lax.empty((count, *like.shape), like.dtype))
    return jax.device_put(empty, _HOST) if isinstance(like, Kept) and like.on_host else empty


def read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    """What lies in a slot."""
    return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)


def write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """The buffer with the value in a slot."""
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def microbatch(batch: Tree, index: jax.Array) -> Tree:
    """The batch's arrays of one microbatch, of microbatch 0 when idle."""
    return jax.tree.map(lambda leaf: read(leaf, jnp.maximum(index, 0)), batch)


def _pick(used: jax.Array | None, new: jax.Array, old: jax.Array) -> jax.Array:
    return new if used is None else jnp.where(used, new, old)


def _write_all(
    buffers: list[jax.Array], slot: jax.Array, values: list[jax.Array], used: jax.Array | None
) -> list[jax.Array]:
    """Each value into its buffer, where the turn counts."""

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        if used is not None:
            # Nothing is computed in host memory: what is kept there comes and goes.
            space = jax.typeof(buffer).memory_space
            new, old = (jax.device_put(a, _DEVICE) for a in (value, read(buffer, slot)))
            value = jax.device_put(jnp.where(used, new, old), space)
        return write(buffer, slot, value)

    return [put(*pair) for pair in zip(buffers, values, strict=True)]
