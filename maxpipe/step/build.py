"""Build the steps, batches and objective that a config defines.

Training, evaluation and `maxpipe compile` share these functions. `build_steps` receives the config
sections of a model and a mesh, and returns the steps with the shardings of their inputs and
outputs.

Source: Pax, which also partitions a model in a single function.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

import maxpipe
from maxpipe.config.check import check
from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.plugins import find_plugin_error, plugin_digests
from maxpipe.config.schema import Config, flatten, may_differ
from maxpipe.config.sections.distill import runs_teacher
from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.config.sections.guard import GuardConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig, activations
from maxpipe.config.sections.train import OBJECTIVES, TrainConfig, total_steps
from maxpipe.data.loader import Batch, Batches, Loader
from maxpipe.errors import Code, ConfigError, MaxpipeError
from maxpipe.io import redact
from maxpipe.models.config import ModelConfig
from maxpipe.models.count import layer_costs
from maxpipe.models.layers.vision import VISION
from maxpipe.models.resolve_auto import loss_block, resolved
from maxpipe.nn.decoder import Decoder
from maxpipe.nn.module import make_quantizer
from maxpipe.objectives import Distill, KlPolicyGradient, Policy, TokenLoss, make_preference
from maxpipe.optim.lr_schedule import learning_rate
from maxpipe.optim.optax_update import OptaxOptimizer
from maxpipe.optim.update import Optimizer
from maxpipe.parallel.mesh import (
    BATCH_AXES,
    CONTEXT,
    STAGE,
    TENSOR,
    Device,
    build_mesh,
    partition_devices,
    resolve_mesh_config,
)
from maxpipe.parallel.sharding import AxisRules, local_sequences, make_global_batch
from maxpipe.pipeline import mtp
from maxpipe.pipeline.engine import Engine
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.pipeline.network import Network
from maxpipe.pipeline.objective import CrossEntropy, Objective, find_objective_error
from maxpipe.pipeline.remat import RematPolicy
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.table import Schedule, balance_layers
from maxpipe.step.image_features import ImageFeatures
from maxpipe.step.state import ParamLayout
from maxpipe.step.step import Steps


def objective_of(config: Config) -> Objective:
    """Return the objective that training minimizes."""
    match config.train.objective:
        case "pretrain" | "sft":
            return CrossEntropy()
        case "preference":
            return make_preference(config.preference, config.data.max_pairs_per_sequence)
        case "distill":
            distill = config.distill
            return Distill(distill.direction, distill.temperature, distill.top_k, distill.weight)
        case "grpo":
            return policy_of(config.grpo)
        case name:
            return _plugin_objective(name, config)


def check_plugin_objective(config: Config) -> None:
    """Check the objective that training minimizes, if a plug-in defines it. No device is used.

    Raises:
        ConfigError: a train step cannot use the result of the objective.
    """
    if config.train.objective in OBJECTIVES:
        objective_of(config)


def check_loss(config: Config, loss: Objective) -> None:
    """Check the result of a loss that replaces the objective in the config.

    Raises:
        ConfigError: the loss raised an exception, or a train step cannot use its result.
    """
    action = "Return one float32 loss per token, [B, T], and metrics as listed in report_names."
    if isinstance(loss, TokenLoss):
        action = "Return one float32 loss per token, with the shape of the log-probabilities."
    for objective in (loss, loss.eval_objective):
        try:
            rule = _objective_rule(objective, config)
        except MaxpipeError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            rule = f"raised {type(error).__name__}: {text}"
            action = "Correct the loss; the cause of this exception shows its line."
            raise ConfigError.one(
                Code.API_LOSS, "build: loss", _name_of(loss), rule, action
            ) from error
        if rule:
            raise ConfigError.one(Code.API_LOSS, "build: loss", _name_of(loss), rule, action)


def _name_of(loss: Objective) -> str:
    of = loss.function if isinstance(loss, TokenLoss) else type(loss)
    return getattr(of, "__name__", type(of).__name__)


def _objective_rule(objective: object, config: Config) -> str:
    """Return the rule that an objective breaks, or an empty string; see `find_objective_error`."""
    if not isinstance(objective, Objective):
        return f"must be an Objective (maxpipe.Objective), not {type(objective).__name__}."
    if isinstance(objective, TokenLoss) and not callable(objective.function):
        return f"must be a function or an Objective, not {type(objective.function).__name__}."
    if isinstance(objective, TokenLoss) and isinstance(objective.function, type):
        return "is a class: pass an instance of it."
    return find_objective_error(objective, _microbatch_shape(config))


def _microbatch_shape(config: Config) -> tuple[int, int]:
    """Return the sequences and tokens of a microbatch on a device. Unknown axes have size 1."""
    batch, context = (
        math.prod(
            max(1, getattr(config.mesh, f"{link}_{axis}"))
            for link in ("ici", "dcn")
            for axis in axes
        )
        for axes in (BATCH_AXES, (CONTEXT,))
    )
    rows, tokens = config.train.batch_size // batch, config.train.sequence_length // context
    return max(1, rows // config.pipeline.microbatches), max(1, tokens)


def _plugin_objective(name: str, config: Config) -> Objective:
    try:
        objective = OBJECTIVES[name](**config.train.objective_options)
        return _checked_objective(name, objective, config)
    except MaxpipeError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        rule = f"raised {type(error).__name__}: {text}"
        action = "Correct the plug-in, or set train.objective_options."
        raise (find_plugin_error(error) or _objective_error(name, rule, action)) from error


def _checked_objective(name: str, objective: object, config: Config) -> Objective:
    if not isinstance(objective, Objective):
        rule = f"must be an Objective (maxpipe.pipeline.objective), not {type(objective).__name__}."
        raise _objective_error(name, rule, "Return an Objective from the registered function.")
    if objective.segments_per_loss or objective.batch_arrays:
        rule = "must be computed per token from standard batch arrays: a plug-in cannot add arrays "
        rule += "to the batch."
        raise _objective_error(name, rule, "Leave segments_per_loss and batch_arrays out.")
    for each in (objective, objective.eval_objective):
        if rule := _objective_rule(each, config):
            action = "Return float32 losses and metrics per token, [B, T], from the plug-in."
            raise _objective_error(name, rule, action)
    return objective


def _objective_error(name: str, rule: str, action: str) -> ConfigError:
    return ConfigError.one(Code.PLUG_FAILED, "train.objective", name, rule, action)


def policy_of(grpo_config: GrpoConfig) -> Policy:
    """Return the policy objective that GRPO uses."""
    clip = grpo_config.clip_ratio, grpo_config.clip_ratio_high or grpo_config.clip_ratio
    if not grpo_config.kl_coef:
        return Policy(*clip, grpo_config.temperature)
    return KlPolicyGradient(*clip, grpo_config.temperature, kl=grpo_config.kl_coef)


def build_steps(
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
    transformation: optax.GradientTransformation | None = None,
    max_images: int = 0,
) -> Steps:
    """Return the train and eval steps for a model on a mesh. The default objective is cross
    entropy. An optax `transformation` replaces the optimizer in `optim`.

    For a data mixture, losses are summed separately for each of the `num_sources` sources. Batches
    have `max_images` images per sequence.

    Raises:
        ConfigError: the axis rules shard two dims of a tensor over the same mesh axis, the
            schedule does not support these sizes, or the transformation is not supported.
    """
    platform, tokens = mesh.devices.flat[0].platform, train.sequence_length
    sizes = {"context": mesh.shape[CONTEXT], "tensor": mesh.shape[TENSOR]}
    model = resolved(model, platform, tokens, rules.context_attention._replace(**sizes))
    decoder = Decoder(model, rules.for_platform(platform))

    scheduled = partial(_schedule, pipeline, mesh.shape[STAGE])
    schedule = scheduled(pipeline.microbatches)
    ring = schedule.ring
    # All stages share the work of the embedding and the loss head, so the partition considers only
    # layers.
    outside, costs = pipeline.prologue_layers, layer_costs(decoder.model, train.sequence_length)
    cut = pipeline.layers_per_chunk or balance_layers(costs[outside:], ring.num_chunks)
    layout = LayerLayout(ring, tuple(cut), outside, decoder.model.layers)
    parts = ParamLayout(decoder, layout, mesh)
    network = _network(
        decoder,
        loss_block_tokens=_loss_block(mesh, model, pipeline, train),
        num_sources=num_sources,
        objective=objective,
        has_image_gradients=max_images > 0
        and any(jax.tree.leaves(parts.trainable.get(VISION, {}))),
    )
    rate, targets = learning_rate(optim, total_steps), parts.trainable_params(optim)
    optimizer = Optimizer(optim, rate, targets, model.param_dtype, seed, mesh)
    if transformation is not None:
        if pipeline.offload_weights:
            raise ConfigError.one(
                Code.API_OPTIMIZER,
                "pipeline.offload_weights",
                True,
                "is not supported with an optax transformation.",
                "Set pipeline.offload_weights=false.",
            )
        optimizer = OptaxOptimizer.replacing(optimizer, transformation)
    lengths = np.zeros(model.vocab_size, np.int32)
    # Token IDs outside the tokenizer's vocabulary have length 0.
    lengths[: len(byte_lengths)] = byte_lengths[: model.vocab_size]
    return Steps(
        param_layout=parts,
        optimizer=optimizer,
        train_schedule=schedule,
        engine=Engine(
            network,
            layout,
            mesh,
            _without_vision(parts.specs),
            weight_gather=pipeline.weight_gather,
            remat_policy=make_remat_policy(pipeline, model),
            idle=pipeline.idle,
            trainable=_without_vision(parts.trainable),
            has_own_dtype=_without_vision(parts.has_own_dtype),
            contracted_dims=_without_vision(parts.contracted_dims),
            quantizer=make_quantizer(model),
            gradient_specs=_without_vision(optimizer.target_specs),
            reduce_dtype=optim.reduce_dtype,
        ),
        shape=(train.batch_size, train.sequence_length),
        schedules=scheduled,
        seed=seed,
        byte_lengths=lengths,
        guard=guard,
        offloads_weights=pipeline.offload_weights,
        images=_image_features(parts, optimizer, max_images),
    )


def _network(decoder: Decoder, **options: Any) -> Network:
    """Return the functions and constants of a model; `options` are additional fields."""
    model, ends = decoder.model, decoder.model.ends
    return Network(
        {kind: decoder.layer(kind) for kind in model.layer_types},
        decoder.norm,
        decoder.config.vocab_size,
        jnp.dtype(decoder.config.compute_dtype),
        loss_weights=dict(model.losses),
        embed_scale=ends.embed_scale,
        logit_scale=ends.logit_scale,
        final_logit_softcapping=ends.final_logit_softcapping,
        mtp=_make_mtp(decoder),
        num_carried=sum(model.carried.values()),
        num_streams=ends.num_streams,
        reduce=decoder.reduce_streams,
        **options,
    )


def _image_features(
    parts: ParamLayout, optimizer: Optimizer, max_images: int
) -> ImageFeatures | None:
    if not max_images:
        return None
    decoder, mesh = parts.decoder, parts.mesh
    tower, dtype = decoder.model.ends.vision, jnp.dtype(decoder.config.compute_dtype)
    assert tower is not None, "rejected by a config rule"
    specs = optimizer.target_specs.get(VISION, {})
    return ImageFeatures(tower, max_images, mesh, dtype, parts.trainable[VISION], specs)


def _without_vision(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of parameters without those of the vision tower, which the engine does not
    use.
    """
    return {name: subtree for name, subtree in tree.items() if name != VISION}


def _schedule(pipeline: PipelineConfig, stages: int, microbatches: int) -> Schedule:
    return make_schedule(
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


def _make_mtp(decoder: Decoder) -> mtp.MtpFns | None:
    ends = decoder.model.ends
    if ends.mtp_layers is not None:
        return mtp.MtpLayerFns(decoder.mtp_layer, dict(ends.losses))
    return None if ends.mtp is None else mtp.MtpProjectionFns(decoder.mtp_head, dict(ends.losses))


def make_remat_policy(pipeline: PipelineConfig, model: ModelConfig) -> RematPolicy:
    """Return the remat policy that the config selects."""
    if pipeline.remat != "names":
        return RematPolicy(pipeline.remat)
    saved, offloaded = pipeline.saved_names, pipeline.offloaded_names
    return RematPolicy("names", activations(saved, model), activations(offloaded, model))


def steps_on_all_devices(
    config: Config,
    byte_lengths: np.ndarray,
    *,
    objective: Objective | None = None,
    transformation: optax.GradientTransformation | None = None,
) -> Steps:
    """Return the steps for a config with a resolved mesh, on all devices except the teacher's; see
    `steps_from_config`.
    """
    mesh = build_mesh(config.mesh, split_devices(config)[0])
    return steps_from_config(
        config, mesh, byte_lengths, objective=objective, transformation=transformation
    )


def steps_from_config(
    config: Config,
    mesh: Mesh,
    byte_lengths: np.ndarray,
    *,
    num_sources: int | None = None,
    objective: Objective | None = None,
    transformation: optax.GradientTransformation | None = None,
) -> Steps:
    """Return the train and eval steps for a config on a mesh; see `build_steps`.

    Losses are summed separately for `num_sources` sources (default: the sources of the mixture).
    `objective` and `transformation` replace the loss and the optimizer in the config.
    """
    return build_steps(
        mesh,
        model=config.model,
        pipeline=config.pipeline,
        optim=config.optim,
        train=config.train,
        total_steps=total_steps(config.train),
        rules=AxisRules.from_config(config.mesh),
        seed=config.run.seed,
        byte_lengths=byte_lengths,
        guard=config.guard,
        num_sources=len(config.data.mixture) if num_sources is None else num_sources,
        objective=objective_of(config) if objective is None else objective,
        transformation=transformation,
        max_images=config.data.max_images_per_sequence,
    )


def load_batches(sharding: NamedSharding, loader: Loader, start: int, stop: int) -> Batches:
    """Return prefetched global batches for steps `start` to `stop - 1`."""
    rows = {count: local_sequences(sharding, count) for count in loader.ramp.sizes(start)}

    def placed(host: Batch, count: int) -> dict[str, jax.Array]:
        return make_global_batch(host, rows[count], count, sharding)

    return loader.batches(start, rows.__getitem__, stop_step=stop, made=placed)


def split_devices(config: Config) -> tuple[list[Device], list[Device]]:
    """Return the devices of the student and the devices of its teacher, which can be the same.

    Raises:
        ConfigError: there are not enough devices, or they cannot be divided evenly among the
        processes.
    """
    count = config.distill.teacher_devices if runs_teacher(config) else 0
    return partition_devices(jax.devices(), count, "distill.teacher_devices")


def resolve_mesh(loaded: LoadedConfig) -> LoadedConfig:
    """Resolve each -1 in the mesh config, and check the rules that depend on the mesh."""
    mesh = resolve_mesh_config(loaded.config.mesh, split_devices(loaded.config)[0])
    config = dataclasses.replace(loaded.config, mesh=mesh)
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    before = dataclasses.asdict(loaded.config.mesh)
    filled = frozenset(f"mesh.{name}" for name, size in before.items() if size == -1)
    return dataclasses.replace(loaded, config=config, inferred=filled)


def shared_metadata(config: Config) -> dict[str, str]:
    """Return the settings that must be identical in all processes, keyed by name."""
    facts = {"maxpipe": maxpipe.__version__, "jax": jax.__version__}
    for key, value in flatten(to_dict(redact.redact_value(config))).items():
        if not may_differ(key):
            facts[key] = json.dumps(value)
    for name, digest in plugin_digests(config.plugins.modules).items():
        facts[f"plug-in {name}"] = digest
    return facts
