"""Reference loss functions that use the decoder's layers, for comparison with the engine.

`circular_loss` is the published circular pipeline, as in praxis and MaxText. One scan over
M * R + P - 1 ticks runs the forward pass of a ring of stages, with each tick under
`jax.checkpoint`. The backward pass is the reverse-mode derivative of this scan. The compiler
partitions the fsdp axis. Embedding and loss head are outside the scan, and their batch is also
sharded over the stages.

`sharded_loss` has no pipeline. It processes the full batch at once, with every layer under
`jax.checkpoint`, and shards sequences and parameters over all devices. Each device gathers a
layer's weights immediately before the layer. In the backward pass, these gathers become
reductions. Without explicit gathers, XLA for CPU would reduce unsharded gradients on every device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.collectives import manual_axes_of, sum_over
from maxpipe.parallel.mesh import BATCH_AXES, STAGE, TOKEN_AXES
from maxpipe.parallel.sharding import BATCH_SPEC, restrict_spec
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.weights import WeightSharding, gather_weight

Tree = Any


def circular_loss(
    decoder: Decoder,
    layout: LayerLayout,
    mesh: Mesh,
    num_microbatches: int,
    params: Tree,
    batch: Tree,
) -> jax.Array:
    """Return the mean loss over target tokens; `params` are stacked as `[R, P, L]`."""
    dtype = jnp.dtype(decoder.config.compute_dtype)
    rows = batch["tokens"].shape[0] // num_microbatches
    # Microbatch m consists of sequences m, m + M, ..., so it stays sharded over the batch axes.
    cut = lambda leaf: leaf.reshape(rows, num_microbatches, *leaf.shape[1:]).swapaxes(0, 1)  # noqa: E731
    inputs = {name: cut(batch[name]) for name in ("segment_ids", "positions", "example_ids")}
    embedded = _spread(params["embedding"].astype(dtype)[cut(batch["tokens"])], 1)
    ring = jax.shard_map(
        partial(_ring, decoder, layout, num_microbatches),
        mesh=mesh,
        axis_names={STAGE},
        in_specs=(PartitionSpec(None, STAGE), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    hidden = _spread(ring(_of_one_kind(decoder, params), embedded, inputs), 1)
    hidden = lax.with_sharding_constraint(
        hidden, PartitionSpec(None, BATCH_AXES, STAGE)
    )  # also shard the loss head over the stages
    hidden = decoder.norm(params["final_norm"], hidden)
    logits = jnp.einsum(
        "mbtd,dv->mbtv", hidden, params["head"].astype(dtype), preferred_element_type=jnp.float32
    )
    scores = jax.nn.log_softmax(logits[..., : decoder.config.vocab_size])
    picked = jnp.take_along_axis(scores, cut(batch["targets"])[..., None], axis=-1)[..., 0]
    mask = cut(batch["loss_mask"])
    return -(picked * mask).sum() / mask.sum()


def sharded_loss(decoder: Decoder, mesh: Mesh, specs: Tree, params: Tree, batch: Tree) -> jax.Array:
    """Return the mean loss over target tokens for `params` `[1, 1, L]`, sharded as in `specs`."""
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    divisions = jax.tree.map(WeightSharding.from_spec, specs, is_leaf=is_spec)
    axes = manual_axes_of(mesh)
    mine = lambda spec: restrict_spec(spec, axes)  # noqa: E731
    run = jax.shard_map(
        partial(_of_own_rows, decoder, divisions),
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(jax.tree.map(mine, specs, is_leaf=is_spec), mine(BATCH_SPEC)),
        out_specs=PartitionSpec(),
    )
    return run(params, batch)


def _of_own_rows(decoder: Decoder, divisions: Tree, params: Tree, batch: Tree) -> jax.Array:
    dtype = jnp.dtype(decoder.config.compute_dtype)
    whole = lambda name: gather_weight(params[name], divisions[name], dtype)  # noqa: E731
    layers = jax.tree.map(lambda leaf: leaf[0, 0], _of_one_kind(decoder, params))
    of_layer = jax.tree.map(lambda each: each.unstacked(3), _of_one_kind(decoder, divisions))
    run = decoder.layer(*decoder.model.layer_types)

    @partial(
        jax.checkpoint, prevent_cse=False
    )  # no CSE: forward and backward passes are separate loops
    def body(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        weights = jax.tree.map(lambda leaf, each: gather_weight(leaf, each, dtype), layer, of_layer)
        return run(weights, x, batch, jnp.int32(0))[0], None

    x, _ = lax.scan(body, whole("embedding")[batch["tokens"]], layers)
    hidden = decoder.norm(params["final_norm"], x)
    logits = jnp.einsum("btd,dv->btv", hidden, whole("head"), preferred_element_type=jnp.float32)
    scores = jax.nn.log_softmax(logits[..., : decoder.config.vocab_size])
    picked = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    lost, count = (
        sum_over(x.sum(), TOKEN_AXES) for x in (picked * batch["loss_mask"], batch["loss_mask"])
    )
    return -lost / count


def _spread(x: jax.Array, dim: int) -> jax.Array:
    return lax.with_sharding_constraint(x, PartitionSpec(*(None,) * dim, BATCH_AXES))


def _ring(
    decoder: Decoder,
    layout: LayerLayout,
    num_microbatches: int,
    layers: Tree,
    embedded: jax.Array,
    inputs: Tree,
) -> jax.Array:
    """Return the last stage's outputs `[M, B, T, D]`, for B sequences per microbatch."""
    stages = layout.ring.num_stages
    stage = lax.axis_index(STAGE)
    layers = jax.tree.map(lambda leaf: leaf[:, 0], layers)
    work = num_microbatches * layout.ring.num_repeats

    def tick(carry: tuple[jax.Array, ...], k: jax.Array):
        arrived, waiting = carry
        item = jnp.clip(k - stage, 0, work - 1)
        microbatch, repeat = item % num_microbatches, item // num_microbatches
        x = jnp.where(repeat == 0, embedded[microbatch], waiting[microbatch])
        x = jnp.where(stage == 0, x, arrived)
        y = _chunk(
            decoder,
            jax.tree.map(lambda leaf: leaf[repeat], layers),
            x,
            jax.tree.map(lambda leaf: leaf[microbatch], inputs),
        )
        arrived = lax.ppermute(y, STAGE, [(s, (s + 1) % stages) for s in range(stages)])
        sender = jnp.clip(k - (stages - 1), 0, work - 1) % num_microbatches
        return (arrived, waiting.at[sender].set(arrived)), y

    empty = lax.pcast(jnp.zeros_like(embedded), (STAGE,), to="varying")
    body = jax.checkpoint(tick, policy=jax.checkpoint_policies.nothing_saveable)
    _, made = lax.scan(body, (empty[0], empty), jnp.arange(work + stages - 1))
    outputs = made[-num_microbatches:]  # the scan ends with the last repeat of the last stage
    return lax.psum(jnp.where(stage == stages - 1, outputs, 0), STAGE)


def _of_one_kind(decoder: Decoder, params: Tree) -> Tree:
    (kind,) = decoder.model.layer_types
    return params["layers"][kind]


def _chunk(decoder: Decoder, layers: Tree, x: jax.Array, inputs: Tree) -> jax.Array:
    dtype, (kind,) = x.dtype, decoder.model.layer_types
    run = decoder.layer(kind)

    @jax.checkpoint
    def body(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        whole = jax.tree.map(lambda leaf: _whole(leaf, dtype), layer)
        y, _, _ = run(whole, _rows(x), inputs, jnp.int32(0))
        return _rows(y), None

    return lax.scan(body, x, layers)[0]


def _whole(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.with_sharding_constraint(weight.astype(dtype), PartitionSpec())


def _rows(x: jax.Array) -> jax.Array:
    return lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))
