"""Runs a schedule: the layer stack as a ring of stages in one jitted SPMD program.

The program is written per device over the axes stage, data and fsdp (tensor stays
automatic). One scan walks the ticks of the table. In a tick, every stage runs a
forward slot, all stages together run embedding and loss head for the microbatch
that enters or leaves, and every stage runs a backward slot. The backward is part of
the table: nothing differentiates through this program.

The engine sees functions and stacked parameters, never a model class or a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.mesh import BATCH_AXES, STAGE
from maxpipe.pipeline.collectives import (
    from_position,
    index_on,
    program_axes,
    shift,
    sum_over,
    vary,
)
from maxpipe.pipeline.layout import Layout
from maxpipe.pipeline.schedule import Schedule
from maxpipe.pipeline.vocabulary import LossHead, accumulate_embedding, embed
from maxpipe.pipeline.weights import NOT_SHARDED, LayerWeights, gather, scatter, sum_over_batch
from maxpipe.sharding import BATCH_SPEC, fsdp_dim, restrict

Tree = Any


@dataclass(frozen=True)
class Network:
    """What the engine runs: a stack of like layers between an embedding and a loss head.

    Parameters are `{embedding [V, D], layers {... [R, P, L, ...]}, final_norm, head [D, V]}`;
    without `head` the embedding table is used.
    """

    layer: Callable[[Tree, jax.Array, Tree, jax.Array, jax.Array | None], jax.Array]
    """(params, x [B, T, D], inputs, layer index, key) -> [B, T, D]."""
    norm: Callable[[Tree, jax.Array], jax.Array]
    """The norm in front of the loss head."""
    vocab_size: int
    compute_dtype: jnp.dtype


@dataclass(frozen=True)
class Engine:
    """A network on a mesh: builds the functions that run it by a schedule."""

    network: Network
    layout: Layout
    mesh: Mesh
    specs: Tree
    """PartitionSpec of every parameter, stacked dims included."""
    weight_gather: Literal["iteration", "step"] = "iteration"
    remat: Literal["full", "chunk"] = "full"
    idle: Literal["skip", "compute"] = "skip"

    def value_and_grad(self, schedule: Schedule) -> Callable[..., tuple[jax.Array, Tree]]:
        """(params, batch, key) -> (mean loss over all target tokens, float32 gradients).

        `batch` is a dict of global arrays `[rows, ...]` with `tokens`, `targets`, `loss_mask`
        and whatever the layers read; rows are sharded over the batch axes.
        """
        return self._shard_map(_train, schedule, (PartitionSpec(), self.specs))

    def loss(self, schedule: Schedule) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """(params, batch, None) -> (summed loss, number of target tokens), forward only."""
        return self._shard_map(_evaluate, schedule, (PartitionSpec(), PartitionSpec()))

    def _per_device(self, specs: Tree) -> Tree:
        """The specs as the per-device program sees them."""
        axes = program_axes(self.mesh)
        return jax.tree.map(lambda spec: restrict(spec, axes), specs, is_leaf=_is_spec)

    def _shard_map(self, program: Callable, schedule: Schedule, out_specs: Tree) -> Callable:
        assert schedule.num_stages == self.mesh.shape[STAGE]
        table, table_specs = _device_table(schedule)
        run, axes = partial(program, self, schedule), program_axes(self.mesh)
        if axes:
            in_specs = (self.specs, BATCH_SPEC, PartitionSpec(), table_specs)
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                axis_names=set(axes),
                in_specs=self._per_device(in_specs),
                out_specs=self._per_device(out_specs),
            )
        return lambda params, batch, key: run(params, batch, key, table)


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


class Row(NamedTuple):
    """One tick of the table as one stage sees it; every entry is a scalar."""

    f_microbatch: jax.Array
    f_repeat: jax.Array
    f_stash: jax.Array
    f_inbox: jax.Array
    f_arrive: jax.Array
    b_microbatch: jax.Array
    b_repeat: jax.Array
    b_stash: jax.Array
    b_inbox: jax.Array
    b_arrive: jax.Array
    loss_inbox: jax.Array
    any_forward: jax.Array
    any_backward: jax.Array
    embed: jax.Array
    loss: jax.Array
    embed_grad: jax.Array


def _device_table(schedule: Schedule) -> tuple[Row, Row]:
    """The table as a scan input, and how it lies on the mesh: a column for each stage."""
    columns = [
        getattr(slots, name)
        for slots in (schedule.forward, schedule.backward)
        for name in ("microbatch", "repeat", "stash", "inbox", "arrive")
    ]
    columns.append(schedule.loss_inbox)
    shared = [
        schedule.forward.active.any(axis=1),
        schedule.backward.active.any(axis=1),
        schedule.embed_microbatch,
        schedule.loss_microbatch,
        schedule.embed_grad_microbatch,
    ]
    specs = [PartitionSpec(None, STAGE)] * len(columns) + [PartitionSpec()] * len(shared)
    return Row._make(np.asarray(c, np.int32) for c in columns + shared), Row._make(specs)


class Gradients(NamedTuple):
    """Float32 accumulators of one device."""

    embedding: jax.Array
    layers: Tree
    final_norm: Tree
    head: jax.Array | None


class Buffers(NamedTuple):
    """What the scan over ticks carries."""

    forward_inbox: jax.Array
    backward_inbox: jax.Array
    stash: jax.Array
    """Saved chunks: their layers' inputs `[slots * L, B, T, D]`, or only the first one's."""
    sent_back: jax.Array
    """Cotangent that leaves for the previous stage in the next tick."""
    gradients: Gradients | None
    loss: jax.Array


class _Program:
    """The per-device program of one step: weights at hand, and the slots of a tick."""

    def __init__(
        self, engine: Engine, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None
    ):
        self.engine, self.schedule = engine, schedule
        self.network, self.layout = engine.network, engine.layout
        self.stage = index_on(STAGE)
        self.last = schedule.num_stages - 1
        self.key = None if key is None else vary(key)
        self.batch = jax.tree.map(partial(_cut, schedule.num_microbatches), vary(batch))
        self._hold_weights(params)

    def _hold_weights(self, params: Tree) -> None:
        specs, dtype = self.engine.specs, self.network.compute_dtype
        dims = jax.tree.map(_fsdp_dim, specs, is_leaf=_is_spec)
        self.dims = dims
        # Stacked dims [R, 1, L] of this stage become one; the fsdp dim is one layer's.
        self.weights = LayerWeights(
            self.engine.weight_gather,
            jax.tree.map(lambda dim: dim if dim == NOT_SHARDED else dim - 3, dims["layers"]),
            dtype,
        )
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), params["layers"])
        self.layers = self.weights.hold(flat)
        self.embedding = gather(params["embedding"], dims["embedding"], dtype)
        self.final_norm = jax.tree.map(lambda leaf: vary(leaf.astype(dtype)), params["final_norm"])
        self.tied = "head" not in params
        self.head = self.embedding.T if self.tied else gather(params["head"], dims["head"], dtype)
        keeps_layers = self.engine.remat == "full"
        self.saved_per_chunk = self.layout.layers_per_chunk if keeps_layers else 1
        self.loss_head = LossHead(
            self.network.norm, self.schedule.num_stages, self.network.vocab_size
        )

    def activation(self) -> jax.Array:
        """Zeros of one message `[B, T, D]`."""
        _, rows, tokens = self.batch["tokens"].shape
        shape = (rows, tokens, self.embedding.shape[1])
        return vary(jnp.zeros(shape, self.network.compute_dtype))

    def buffers(self, *, train: bool) -> Buffers:
        """Everything empty, at the sizes that the table declares."""
        empty, schedule = self.activation(), self.schedule
        slots = lambda count: vary(jnp.zeros((count, *empty.shape), empty.dtype))  # noqa: E731
        gradients = None
        if train:
            wide = partial(jnp.zeros_like, dtype=jnp.float32)
            gradients = Gradients(
                wide(self.embedding),
                self.weights.zeros(self.layers),
                jax.tree.map(wide, self.final_norm),
                None if self.tied else wide(self.head),
            )
        return Buffers(
            forward_inbox=slots(schedule.num_forward_inbox),
            backward_inbox=slots(schedule.num_backward_inbox if train else 0),
            stash=slots(schedule.num_stash * self.saved_per_chunk if train else 0),
            sent_back=empty,
            gradients=vary(gradients),
            loss=vary(jnp.float32(0)),
        )

    def tick(self, carry: Buffers, row: Row, scale: jax.Array | None) -> Buffers:
        """One tick. `scale` multiplies the gradients; None runs forward only."""
        if scale is None:
            output, _ = self._forward_slot(carry, row)
            message = self._send(output, +1)
            carry = carry._replace(loss=self._loss(carry, row, output))
        else:
            # The cotangent sent in the last tick travels while the forward slot computes,
            # the activation while loss head and backward slot compute.
            arriving = self._send(carry.sent_back, -1)
            output, stash = self._forward_slot(carry, row)
            message = self._send(output, +1)
            carry = self._loss_and_grad(carry._replace(stash=stash), row, output, scale)
            inbox = _write(carry.backward_inbox, row.b_arrive, arriving)
            carry = self._backward_slot(carry._replace(backward_inbox=inbox), row)
        inbox = _write(carry.forward_inbox, row.f_arrive, message)
        return carry._replace(forward_inbox=inbox)

    def _send(self, message: jax.Array, step: int) -> jax.Array:
        """To the next (+1) or previous (-1) stage of the ring."""
        return shift(message, STAGE, step, self.schedule.num_stages)

    def _microbatch(self, index: jax.Array) -> Tree:
        """The batch's arrays of one microbatch (of microbatch 0 when idle)."""
        return jax.tree.map(lambda leaf: _read(leaf, jnp.maximum(index, 0)), self.batch)

    def _chunk(self, microbatch: jax.Array, repeat: jax.Array, any_work: jax.Array) -> _Chunk:
        size = _read(_read(vary(jnp.asarray(self.layout.chunk_sizes)), repeat), self.stage)
        first = _read(_read(vary(jnp.asarray(self.layout.first_layer)), repeat), self.stage)
        size = jnp.where(microbatch >= 0, size, 0)
        longest = self.layout.layers_per_chunk
        trips = size if self.engine.idle == "skip" else jnp.where(any_work > 0, longest, 0)
        return _Chunk(repeat * longest, first, size, trips, self.engine.idle == "compute")

    def _forward_slot(self, carry: Buffers, row: Row) -> tuple[jax.Array, jax.Array]:
        """The chunk's output, and the stash with what the backward slot will need."""
        tokens = _read(self.batch["tokens"], jnp.maximum(row.embed, 0))
        entering = lax.cond(
            row.embed >= 0,
            lambda: vary(embed(self.embedding, tokens)),
            lambda: jnp.zeros_like(carry.sent_back),
        )
        is_first = (self.stage == 0) & (row.f_repeat == 0)
        x = jnp.where(is_first, entering, _read(carry.forward_inbox, row.f_inbox))
        inputs = self._microbatch(row.f_microbatch)
        chunk = self._chunk(row.f_microbatch, row.f_repeat, row.any_forward)
        slot = row.f_stash * self.saved_per_chunk
        if carry.gradients is None:
            return self._run_layers(x, carry.stash, slot, chunk, inputs, saves=False)
        if self.engine.remat == "full":
            return self._run_layers(x, carry.stash, slot, chunk, inputs, saves=True)
        kept = jnp.where(row.f_microbatch >= 0, x, _read(carry.stash, slot))
        stash = _write(carry.stash, slot, kept)
        return self._run_layers(x, stash, slot, chunk, inputs, saves=False)

    def _run_layers(
        self,
        x: jax.Array,
        stash: jax.Array,
        slot: jax.Array,
        chunk: _Chunk,
        inputs: Tree,
        *,
        saves: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """The chunk's output; with `saves`, layer l's input goes to `stash[slot + l]`."""

        def body(step: jax.Array, state: tuple[jax.Array, jax.Array]):
            x, stash = state
            used = chunk.uses(step)
            if saves:
                kept = x if used is None else jnp.where(used, x, _read(stash, slot + step))
                stash = _write(stash, slot + step, kept)
            weights = self.weights.layer(self.layers, chunk.base + step)
            y = self.network.layer(weights, x, inputs, chunk.first + step, self.key)
            return (y if used is None else jnp.where(used, y, x)), stash

        return lax.fori_loop(0, chunk.trips, body, (x, stash))

    def _backward_slot(self, carry: Buffers, row: Row) -> Buffers:
        """Replays each layer of the chunk from its input, last first."""
        cotangent = _read(carry.backward_inbox, row.b_inbox)
        inputs = self._microbatch(row.b_microbatch)
        chunk = self._chunk(row.b_microbatch, row.b_repeat, row.any_backward)
        saved, slot = carry.stash, row.b_stash * self.saved_per_chunk
        if self.engine.remat == "chunk":
            x, slot = _read(saved, slot), jnp.zeros_like(slot)
            scratch = jnp.zeros((self.layout.layers_per_chunk, *x.shape), x.dtype)
            _, saved = self._run_layers(x, vary(scratch), slot, chunk, inputs, saves=True)
        gradients = carry.gradients
        assert gradients is not None

        def body(step: jax.Array, state: tuple[jax.Array, Tree]):
            cotangent, totals = state
            step = chunk.trips - 1 - step
            weights = self.weights.layer(self.layers, chunk.base + step)
            x = _read(saved, slot + step)
            run = lambda w, x: self.network.layer(w, x, inputs, chunk.first + step, self.key)  # noqa: E731
            _, vjp = jax.vjp(run, weights, x)
            d_weights, d_x = vjp(cotangent)
            used = chunk.uses(step)
            if used is not None:
                d_weights = jax.tree.map(lambda leaf: jnp.where(used, leaf, 0), d_weights)
                d_x = jnp.where(used, d_x, cotangent)
            return d_x, self.weights.accumulate(totals, chunk.base + step, d_weights)

        d_input, layers = lax.fori_loop(0, chunk.trips, body, (cotangent, gradients.layers))
        tokens = _read(self.batch["tokens"], jnp.maximum(row.embed_grad, 0))
        embedding = lax.cond(
            row.embed_grad >= 0,
            lambda total: vary(accumulate_embedding(total, tokens, d_input)),
            lambda total: total,
            gradients.embedding,
        )
        gradients = gradients._replace(layers=layers, embedding=embedding)
        return carry._replace(gradients=gradients, sent_back=d_input)

    def _loss(self, carry: Buffers, row: Row, output: jax.Array) -> jax.Array:
        inputs = self._microbatch(row.loss)
        args = (self.final_norm, self.head, output, inputs["targets"], inputs["loss_mask"])
        more = lax.cond(
            row.loss >= 0, lambda: self.loss_head.loss(*args), lambda: vary(jnp.float32(0))
        )
        return carry.loss + more

    def _loss_and_grad(
        self, carry: Buffers, row: Row, output: jax.Array, scale: jax.Array
    ) -> Buffers:
        """Adds the leaving microbatch's loss; its cotangent goes to the backward inbox."""
        inputs = self._microbatch(row.loss)
        args = (self.final_norm, self.head, output, inputs["targets"], inputs["loss_mask"], scale)
        gradients = carry.gradients
        assert gradients is not None

        def work(loss: jax.Array, norm: Tree, head: jax.Array):
            found = self.loss_head.loss_and_grad(*args)
            d_head = found.head.T if self.tied else found.head
            norm = jax.tree.map(jnp.add, norm, found.norm)
            return found.output, loss + found.total, norm, head + d_head

        def rest(loss: jax.Array, norm: Tree, head: jax.Array):
            return jnp.zeros_like(output), loss, norm, head

        head = gradients.embedding if self.tied else gradients.head
        cotangent, loss, norm, head = lax.cond(
            row.loss >= 0, work, rest, carry.loss, gradients.final_norm, head
        )
        gradients = gradients._replace(
            final_norm=norm, **{"embedding" if self.tied else "head": head}
        )
        inbox = _write(carry.backward_inbox, row.loss_inbox, cotangent)
        return carry._replace(loss=loss, gradients=gradients, backward_inbox=inbox)

    def run(self, table: Row, scale: jax.Array | None) -> Buffers:
        """All ticks."""

        def body(carry: Buffers, row: Row) -> tuple[Buffers, None]:
            # A column arrives as [1], this stage's part of [P].
            row = Row._make(entry.reshape(()) for entry in row)
            return self.tick(carry, row, scale), None

        return lax.scan(body, self.buffers(train=scale is not None), table)[0]

    def finish(self, gradients: Gradients) -> Tree:
        """Gradients summed over devices, in the form of the parameters."""
        shape = self.layout.shape
        layers = jax.tree.map(
            lambda leaf: leaf.reshape(shape[0], 1, shape[2], *leaf.shape[1:]),
            self.weights.finish(gradients.layers),
        )

        def vocabulary(gradient: jax.Array, dim: int) -> jax.Array:
            return sum_over_batch(scatter(gradient, dim), dim)

        # Every stage computed the same gradient of the final norm; one counts.
        final_norm = jax.tree.map(
            lambda leaf: sum_over_batch(from_position(leaf, STAGE, self.last), NOT_SHARDED),
            gradients.final_norm,
        )
        found = {
            "embedding": vocabulary(gradients.embedding, self.dims["embedding"]),
            "layers": layers,
            "final_norm": final_norm,
        }
        if gradients.head is not None:
            found["head"] = vocabulary(gradients.head, self.dims["head"])
        return found


class _Chunk(NamedTuple):
    """The layers that a slot runs, as scalars that differ between stages."""

    base: jax.Array
    """Position of its first layer among the stage's stacked layers."""
    first: jax.Array
    """The same layer's position in the network."""
    size: jax.Array
    """Number of layers, 0 when idle."""
    trips: jax.Array
    """Turns of the layer loop."""
    masks: bool

    def uses(self, step: jax.Array) -> jax.Array | None:
        """Whether this turn counts; None when every turn does."""
        return step < self.size if self.masks else None


def _train(
    engine: Engine, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None, table: Row
) -> tuple[jax.Array, Tree]:
    program = _Program(engine, schedule, params, batch, key)
    count = _count_targets(batch)
    carry = program.run(table, vary(1.0 / count))
    assert carry.gradients is not None
    return _total_loss(carry.loss, program.last) / count, program.finish(carry.gradients)


def _evaluate(
    engine: Engine, schedule: Schedule, params: Tree, batch: Tree, key: jax.Array | None, table: Row
) -> tuple[jax.Array, jax.Array]:
    program = _Program(engine, schedule, params, batch, key)
    carry = program.run(table, None)
    return _total_loss(carry.loss, program.last), _count_targets(batch)


def _count_targets(batch: Tree) -> jax.Array:
    """Target tokens of the whole batch, at least 1."""
    mine = batch["loss_mask"].astype(jnp.float32).sum()
    return jnp.maximum(sum_over(mine, BATCH_AXES), 1.0)


def _total_loss(loss: jax.Array, last: int) -> jax.Array:
    return sum_over(from_position(loss, STAGE, last), BATCH_AXES)


def _fsdp_dim(spec: PartitionSpec) -> int:
    dim = fsdp_dim(spec)
    return NOT_SHARDED if dim is None else dim


def _cut(num_microbatches: int, rows: jax.Array) -> jax.Array:
    """This device's rows `[M * B, ...]` as microbatches `[M, B, ...]`."""
    return rows.reshape(num_microbatches, -1, *rows.shape[1:])


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False)


def _write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)
