"""Config keys, layer types and rules that all families with experts share, without jax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.layers.experts import AllToAll, BalanceOver, ExpertBackend, Experts
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Branch, LayerType, Model, Part


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family can inherit from several such classes
class MixtureConfig:
    """Config keys shared by all families with experts."""

    num_experts: int = 8
    """Number of experts per layer."""
    top_k: int = 2
    """Number of experts selected per token. The experts with the largest router probabilities are
    selected."""
    d_expert: int = 0
    """Hidden width of one expert. If 0, `model.d_mlp` is used."""
    capacity_factor: float = 0.0
    """Capacity factor: the maximum number of tokens that an expert processes per sequence, as a
    multiple of the average per expert. A common value is 1.25. Tokens that exceed the capacity are
    dropped, lower-ranked choices first. Generation never drops tokens. 0 disables the limit."""
    all_to_all_capacity_factor: float = field(default=0.0, metadata=renamed_from("exchange_factor"))
    """Capacity factor of the all-to-all with expert parallelism (`mesh.ici_expert`): the maximum
    number of token-expert pairs per microbatch that a device sends to each other device, as a
    multiple of the average per device. With `all_to_all_chunks`, the limit applies to each chunk of
    the microbatch. Pairs that exceed the capacity are dropped, lower-ranked choices first.
    Generation never drops pairs. 0 disables the limit; buffers are then sized for the worst case,
    which needs the most memory."""
    dispatch: Literal["auto", "dense", "grouped"] = field(
        default="auto", metadata=renamed_from(values={"all": "dense"})
    )
    """Method for dispatching tokens to experts without a capacity limit. `grouped` sorts tokens by
    expert and applies only the selected experts (see `expert_backend`). `dense` applies every
    expert to every token. `auto` uses `grouped` if there are at least twice as many experts as
    `top_k`."""
    expert_backend: ExpertBackend = "auto"
    """Implementation of the matmuls of grouped dispatch. `auto` uses Pallas kernels on TPUs,
    Triton kernels on NVIDIA GPUs, and `loop` elsewhere. `loop` multiplies blocks of rows in a loop,
    on any platform. `ragged_dot` uses XLA's operation of this name; where XLA has no kernel, the
    operation applies every expert to every token."""
    all_to_all: AllToAll = "auto"
    """Implementation of the all-to-all with expert parallelism. `auto` sends only the used rows on
    TPUs and NVIDIA GPUs (ragged all-to-all), and complete buffers elsewhere. `padded` always sends
    complete buffers."""
    all_to_all_chunks: int = 1
    """Number of chunks into which the tokens of a microbatch are divided with expert parallelism
    (`mesh.ici_expert`). The tokens of one chunk can be exchanged while the experts process another
    chunk. Must divide the number of tokens per sequence on a device."""
    load_balance_loss_weight: float = field(default=0.01, metadata=renamed_from("balance_weight"))
    """Coefficient of the load-balance loss in each layer with experts. The loss is 1 if all experts
    receive the same number of tokens. If 0, the loss is logged but not added to the training
    loss."""
    load_balance_scope: BalanceOver = field(
        default="sequence", metadata=renamed_from("balance_over")
    )
    """Set of tokens over which the load-balance loss computes expert loads. `sequence` computes
    loads for each sequence separately, so the loss is independent of the layout. `microbatch`, as
    in Switch Transformer, computes loads over one device's sequences within a microbatch. The loss
    then depends on the batch size, the number of microbatches, and the data and fsdp axes.
    `devices`, known as global-batch balancing, computes loads over all devices' sequences within a
    microbatch. The loss then depends on the number of microbatches, and on the data and fsdp axes,
    which determine the sequences in each microbatch. The loss never depends on the schedule, or on
    the stage and tensor axes."""
    z_loss_weight: float = field(default=0.0, metadata=renamed_from("z_weight"))
    """Coefficient of the router z-loss, the mean squared log partition function of the router. The
    z-loss keeps router logits small. If 0, the z-loss is logged but not added to the training
    loss."""


MOE_BOUNDS = (
    Bound("num_experts", 8, 1, axis="experts"),
    Bound("top_k", 2, 1),
    Bound("d_expert", 0, 0, why="0 uses model.d_mlp", axis="mlp"),
    Bound("capacity_factor", 1.25, 0, LARGEST, "0 drops no token"),
    Bound("all_to_all_capacity_factor", 2, 0, LARGEST, "0 drops no token"),
    Bound("all_to_all_chunks", 2, 1, 64),
    Bound("z_loss_weight", 0.001, 0, LARGEST, "0 only logs the z-loss"),
    Bound("load_balance_loss_weight", 0.01, 0, LARGEST, "0 only logs this loss"),
)
"""Allowed ranges of the keys in `MixtureConfig`."""


def expert_width(config: ModelConfig, own: MixtureConfig) -> int:
    """Return the hidden width of one expert."""
    return own.d_expert or config.d_mlp


def experts(config: ModelConfig, own: MixtureConfig, **options: Any) -> Experts:
    """Return the expert sublayer of a layer; `options` are additional fields of `Experts`."""
    return Experts(
        config.d_model,
        expert_width(config, own),
        own.num_experts,
        own.top_k,
        family.residual_gain(config),
        own.load_balance_loss_weight,
        own.z_loss_weight,
        own.capacity_factor,
        own.all_to_all_capacity_factor,
        dispatch=own.dispatch,
        backend=own.expert_backend,
        all_to_all=own.all_to_all,
        all_to_all_chunks=own.all_to_all_chunks,
        load_balance_scope=own.load_balance_scope,
        **options,
    )


def moe_model(
    config: ModelConfig,
    mixing: Part,
    routed: Experts,
    dense: Iterable[bool] = (),
    values: Mapping[str, tuple[float, ...]] | None = None,
) -> Model:
    """Return a model of pre-norm layers that combine attention with either an MLP (`dense`) or
    experts (`experts`).

    `dense` has one entry per leading layer: true for an MLP, false for experts. The remaining
    layers have experts.
    """
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    branches = {
        "dense": Branch("mlp", family.mlp(config), norm, dropout=config.dropout),
        "experts": Branch("experts", routed, norm, dropout=config.dropout),
    }
    first = Branch("attention", mixing, norm, dropout=config.dropout)
    front = tuple("dense" if is_dense else "experts" for is_dense in dense)
    layers = front + ("experts",) * (config.num_layers - len(front))
    layer_types = {name: LayerType((first, branches[name])) for name in dict.fromkeys(layers)}
    return Model(layer_types, layers, family.ends(config, norm), values or {})


def moe_rules(config: ModelConfig, own: MixtureConfig) -> Iterator[RuleViolation]:
    """Yield violations of the rules for expert dispatch and `top_k`."""
    section = f"model.{config.family}"
    if own.capacity_factor and own.dispatch != "auto":
        yield RuleViolation(
            Code.CFG_CONFLICT,
            f"{section}.dispatch",
            f"must be auto with {section}.capacity_factor={own.capacity_factor:g}, because a "
            "capacity limit determines the dispatch method.",
            f"Set {section}.dispatch=auto, or {section}.capacity_factor=0 for no capacity limit "
            "(dropless).",
        )
    if own.top_k > own.num_experts:
        yield RuleViolation(
            Code.MODEL_SIZES,
            f"{section}.top_k",
            f"must be at most {section}.num_experts ({own.num_experts}), because a token cannot "
            "select an expert more than once.",
            f"Set {section}.top_k={min(2, own.num_experts)}.",
        )
