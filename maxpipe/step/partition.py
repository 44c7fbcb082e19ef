"""From config sections to the compiled steps of a model on a mesh.

`partition` takes the config sections of a model and a mesh and returns the steps together with the
shardings of what goes in and out.

Source: the idea of one call that partitions a model is Pax's.
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxpipe.config.pipeline_rules import activations
from maxpipe.config.schema import GuardConfig, OptimConfig, PipelineConfig, TrainConfig
from maxpipe.models.choice import Divided, loss_block, resolved
from maxpipe.models.config import ModelConfig
from maxpipe.models.count import layer_costs
from maxpipe.nn.decoder import Decoder
from maxpipe.nn.part import low_precision
from maxpipe.optim.schedule import learning_rate
from maxpipe.optim.update import Optimizer
from maxpipe.parallel.mesh import BATCH_AXES, CONTEXT, STAGE, TENSOR
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline import ahead
from maxpipe.pipeline.executor import Engine
from maxpipe.pipeline.layout import Layout
from maxpipe.pipeline.network import Network
from maxpipe.pipeline.objective import CrossEntropy, Objective
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.schedule.balance import balanced_cut
from maxpipe.schedule.catalog import build
from maxpipe.schedule.table import Schedule
from maxpipe.step.state import Partition
from maxpipe.step.step import Steps


def partition(
    mesh: Mesh,
    *,
    model: ModelConfig,
    pipeline: PipelineConfig,
    optim: OptimConfig,
    train: TrainConfig,
    total_steps: int,
    rules: AxisRules,
    seed: int,
    byte_lengths: np.ndarray,
    guard: GuardConfig = GuardConfig(),  # noqa: B008  frozen
    num_sources: int = 0,
    objective: Objective = CrossEntropy(),  # noqa: B008
) -> Steps:
    """Everything that training this model on this mesh needs, by default for cross entropy.

    Batches of a mixture have `num_sources`, and losses of each are summed apart.

    Raises:
        ConfigError: the axis rules put two dims of a tensor on one mesh axis, or the schedule
            does not allow these sizes.
    """
    platform, tokens = mesh.devices.flat[0].platform, train.sequence_length
    divided = Divided(mesh.shape[CONTEXT], mesh.shape[TENSOR], rules.context)
    model = resolved(model, platform, tokens, divided)
    decoder = Decoder(model, rules.on(platform))

    scheduled = partial(_schedule, pipeline, mesh.shape[STAGE])
    schedule = scheduled(pipeline.microbatches)
    ring = schedule.ring
    # Embedding and loss head are spread over all stages: only layers weigh on the cut.
    outside, costs = pipeline.layers_outside, layer_costs(decoder.model, train.sequence_length)
    cut = pipeline.cut or balanced_cut(costs[outside:], ring.num_chunks)
    layout = Layout(ring, tuple(cut), outside, decoder.model.layers)
    parts = Partition(decoder, layout, mesh)
    ends = decoder.model.ends
    network = Network(
        {kind: decoder.layer(kind) for kind in decoder.model.kinds},
        decoder.norm,
        model.vocab_size,
        jnp.dtype(model.compute_dtype),
        dict(decoder.model.losses),
        ends.embed_scale,
        ends.logit_scale,
        ends.logit_cap,
        _loss_block(mesh, model, pipeline, train),
        _heads_ahead(decoder),
        num_sources,
        objective,
    )
    rate, targets = learning_rate(optim, total_steps), parts.targets(optim)
    optimizer = Optimizer(optim, rate, targets, model.param_dtype, seed, mesh)
    lengths = np.zeros(model.vocab_size, np.int32)
    lengths[: len(byte_lengths)] = byte_lengths[: model.vocab_size]  # ids of no text have no row
    return Steps(
        partition=parts,
        optimizer=optimizer,
        train_schedule=schedule,
        engine=Engine(
            network,
            layout,
            mesh,
            parts.specs,
            weight_gather=pipeline.weight_gather,
            keep=keep_of(pipeline, model),
            idle=pipeline.idle,
            trainable=parts.trainable,
            exact=parts.exact,
            summed=parts.summed,
            low=low_precision(model),
            gradients=optimizer.target_specs,
            reduced=optim.reduce_dtype,
        ),
        shape=(train.batch_size, train.sequence_length),
        schedules=scheduled,
        seed=seed,
        byte_lengths=lengths,
        guard=guard,
    )


def _schedule(pipeline: PipelineConfig, stages: int, microbatches: int) -> Schedule:
    return build(
        pipeline.schedule,
        stages=stages,
        repeats=pipeline.repeats,
        microbatches=microbatches,
        group=pipeline.group,
        delayed=pipeline.delayed_forwarding,
    )


def _loss_block(
    mesh: Mesh, model: ModelConfig, pipeline: PipelineConfig, train: TrainConfig
) -> int:
    shape = mesh.shape
    rows = train.batch_size // math.prod(shape[axis] for axis in BATCH_AXES)
    tokens = rows // pipeline.microbatches * (train.sequence_length // shape[CONTEXT])
    vocabulary = -(-model.vocab_size // (shape[STAGE] * shape[TENSOR]))
    return loss_block(pipeline.loss_block_tokens, tokens, vocabulary)


def _heads_ahead(decoder: Decoder) -> ahead.Heads | None:
    ends = decoder.model.ends
    if ends.layers_ahead is not None:
        return ahead.Layers(decoder.layer_ahead, dict(ends.losses))
    return None if ends.ahead is None else ahead.Projections(decoder.ahead, dict(ends.losses))


def keep_of(pipeline: PipelineConfig, model: ModelConfig) -> RematPolicy:
    """What the engine keeps for backward slots, as the config says."""
    if pipeline.remat != "names":
        return RematPolicy(pipeline.remat)
    saved, offloaded = pipeline.saved_names, pipeline.offloaded_names
    return RematPolicy("names", activations(saved, model), activations(offloaded, model))
