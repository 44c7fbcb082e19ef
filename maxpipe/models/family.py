"""Interface of a model family, and helpers that several families share.

The helpers of families with experts are at the end. The module does not import jax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.huggingface import HuggingFace
from maxpipe.models.layers.attention import Attention, Rope
from maxpipe.models.layers.experts import BalanceOver, Experts
from maxpipe.models.layers.mlp import GatedMLP, RMSNorm
from maxpipe.models.spec import Branch, Dims, Ends, LayerType, Model, Normal, Param, Part


def residual_gain(config: ModelConfig) -> float:
    """Return the initialization gain of projections to the residual stream.

    The gain keeps the variance of the residual stream near 1.
    """
    return (2 * config.num_layers) ** -0.5


def attention(config: ModelConfig, rope: Rope, **options: Any) -> Attention:
    """Return attention with the sizes in the section `model`; `options` are further fields of
    `Attention`.
    """
    return Attention(
        config.d_model,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        residual_gain(config),
        config.attention,
        rope,
        **options,
    )


def gated_mlp(config: ModelConfig, **options: Any) -> GatedMLP:
    """Return the gated MLP with the width in the section `model`; `options` are further fields of
    `GatedMLP`.
    """
    return GatedMLP(config.d_model, config.d_mlp, residual_gain(config), **options)


def ends(config: ModelConfig, norm: Part, **options: Any) -> Ends:
    """Return the embedding, final norm and output projection.

    Tied embeddings have no separate output projection. `options` are further fields of `Ends`.
    """
    width, vocab = (config.d_model, "embed"), (config.vocab_size, "vocab")

    def table(*dims: tuple[int, str]) -> Param:
        found: Dims = dims
        return Param(found, Normal(config.d_model))

    head = None if config.tied_embeddings else table(width, vocab)
    return Ends(table(vocab, width), norm, head, **options)


def alike(
    config: ModelConfig,
    mixing: Attention,
    norm: RMSNorm,
    *,
    before: bool = True,
    after: bool = False,
    scale: float = 1.0,
    function: Literal["silu", "gelu"] = "silu",
    values: Mapping[str, tuple[float, ...]] | None = None,
    **of_ends: Any,
) -> Model:
    """Return a model with one layer type: attention and a gated MLP.

    `before` and `after` select the norms of each branch. `scale` is the scale of both branches.
    `of_ends` are further fields of `Ends`.
    """
    parts = {"attention": mixing, "mlp": gated_mlp(config, function=function)}
    branches = tuple(
        Branch(name, part, norm if before else None, norm if after else None, config.dropout, scale)
        for name, part in parts.items()
    )
    layers = ("layer",) * config.num_layers
    return Model(
        {"layer": LayerType(branches)}, layers, ends(config, norm, **of_ends), values or {}
    )


def yarn(theta: float, factor: float, original_tokens: int, **options: Any) -> Rope:
    """Return YaRN positions for a context `factor` times as long as the original
    (arXiv:2309.00071).

    `options` are further fields of `Rope`.
    """
    length = 0.1 * math.log(factor) + 1.0
    return Rope(theta, factor, "yarn", original_tokens, attention_factor=length, **options)


def same_everywhere(config: ModelConfig, value: float) -> tuple[float, ...]:
    """Return a per-layer value that is the same for all layers."""
    return (value,) * config.num_layers


def embeddings_are_tied(config: ModelConfig) -> Iterator[RuleViolation]:
    """Yield a violation unless embeddings are tied, as in all released models of the family."""
    if not config.tied_embeddings:
        yield RuleViolation(
            "model.tied_embeddings",
            f"must be true with model.family={config.family}, because the output projection is "
            "the embedding table.",
            "Set model.tied_embeddings=true.",
        )


@dataclass(frozen=True)
class Family:
    """A model family, defined by a module in `maxpipe.models`."""

    name: str
    """Value of `model.family`, and the name of the family's section below `model`."""
    section: type
    """Frozen dataclass with the keys that only this family uses. Every key has a default."""
    describe: Callable[[ModelConfig], Model]
    """Function that returns the model of a valid config."""
    bounds: tuple[Bound, ...] = ()
    """Bounds of the numeric values in the family's section."""
    rules: Callable[[ModelConfig], Iterable[RuleViolation]] = lambda _: ()
    """Function that yields the violated rules of a config whose numbers are within bounds."""
    metric_parts: tuple[type[Part], ...] = ()
    """Part classes with `metrics`, used to list all metrics."""
    huggingface: tuple[HuggingFace, ...] = ()
    """Equivalent classes of transformers. An export uses the first class that supports the
    config."""


_Section = TypeVar("_Section")


def own_keys(config: ModelConfig, section: type[_Section]) -> _Section:
    """Return the section of the config's family."""
    own = section() if config.own is None else config.own
    assert isinstance(own, section), f"{config.family} has other keys than {own}"
    return own


# --- families with experts ----------------------------------------------------


@dataclass(
    frozen=True, kw_only=True
)  # no slots, because a family may inherit from several such classes
class MixtureConfig:
    """Keys of all families with experts."""

    num_experts: int = 8
    """Number of experts per layer."""
    top_k: int = 2
    """Number of experts per token. The experts with the largest router probabilities are
    selected."""
    d_expert: int = 0
    """Hidden width of one expert. 0 selects `model.d_mlp`."""
    capacity_factor: float = 0.0
    """Capacity factor: the maximum number of tokens that an expert processes per sequence, as a
    multiple of an even share. A common value is 1.25. Tokens beyond this capacity are dropped,
    second choices first. Generation never drops tokens. 0 disables the limit."""
    all_to_all_capacity_factor: float = field(default=0.0, metadata=renamed_from("exchange_factor"))
    """Capacity factor of the all-to-all with expert parallelism (`mesh.ici_expert`): the maximum
    number of token-expert pairs per microbatch that a device sends to each other device, as a
    multiple of an even share. Pairs beyond this capacity are dropped, second choices first.
    Generation never drops pairs. 0 disables the limit; buffers are then sized for the worst case
    and need the most memory."""
    dispatch: Literal["auto", "dense", "grouped"] = field(
        default="auto", metadata=renamed_from(values={"all": "dense"})
    )
    """Method that dispatches tokens to experts without a capacity limit. `grouped` sorts
    tokens by expert and computes only the selected experts, with a kernel on TPUs and in blocks of
    tokens on other platforms. `dense` computes all experts for all tokens. `auto` uses `grouped` if
    there are at least twice as many experts as `top_k`."""
    load_balance_loss_weight: float = field(default=0.01, metadata=renamed_from("balance_weight"))
    """Coefficient of the load-balance loss of each layer with experts. The loss is 1 if all experts
    receive the same number of tokens. With 0, the loss is only recorded."""
    load_balance_scope: BalanceOver = field(
        default="sequence", metadata=renamed_from("balance_over")
    )
    """Tokens over which the load-balance loss computes expert loads. `sequence` uses each sequence
    separately, so the loss is independent of the layout. `microbatch`, as in Switch Transformer,
    uses the sequences of one device in a microbatch. The loss then depends on the batch size, the
    number of microbatches, and the data and fsdp axes. `devices`, known as global-batch balancing,
    uses the sequences of all devices in a microbatch. The loss then depends on the number of
    microbatches, and on the data and fsdp axes, which determine the sequences of a microbatch. The
    loss never depends on the schedule, or on the stage and tensor axes."""
    z_loss_weight: float = field(default=0.0, metadata=renamed_from("z_weight"))
    """Coefficient of the router z-loss, the mean squared log partition function of the router. The
    z-loss keeps router logits small. With 0, the z-loss is only recorded."""


MOE_BOUNDS = (
    Bound("num_experts", 8, 1, axis="experts"),
    Bound("top_k", 2, 1),
    Bound("d_expert", 0, 0, why="0 uses model.d_mlp", axis="mlp"),
    Bound("capacity_factor", 1.25, 0, LARGEST, "0 drops no token"),
    Bound("all_to_all_capacity_factor", 2, 0, LARGEST, "0 drops no token"),
    Bound("z_loss_weight", 0.001, 0, LARGEST, "0 only records the z-loss"),
    Bound("load_balance_loss_weight", 0.01, 0, LARGEST, "0 only records the balance loss"),
)
"""Bounds of the keys of `MixtureConfig`."""


def expert_width(config: ModelConfig, own: MixtureConfig) -> int:
    """Return the hidden width of one expert."""
    return own.d_expert or config.d_mlp


def experts(config: ModelConfig, own: MixtureConfig, **options: Any) -> Experts:
    """Return the experts of a layer; `options` are further fields of `Experts`."""
    return Experts(
        config.d_model,
        expert_width(config, own),
        own.num_experts,
        own.top_k,
        residual_gain(config),
        own.load_balance_loss_weight,
        own.z_loss_weight,
        own.capacity_factor,
        own.all_to_all_capacity_factor,
        dispatch=own.dispatch,
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
    """Return a model of pre-norm layers with attention and either an MLP (`dense`) or experts
    (`experts`).

    `dense` selects the layers with an MLP, starting with the first. The remaining layers have
    experts.
    """
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    branches = {
        "dense": Branch("mlp", gated_mlp(config), norm, dropout=config.dropout),
        "experts": Branch("experts", routed, norm, dropout=config.dropout),
    }
    first = Branch("attention", mixing, norm, dropout=config.dropout)
    front = tuple("dense" if is_dense else "experts" for is_dense in dense)
    layers = front + ("experts",) * (config.num_layers - len(front))
    layer_types = {name: LayerType((first, branches[name])) for name in dict.fromkeys(layers)}
    return Model(layer_types, layers, ends(config, norm), values or {})


def moe_rules(config: ModelConfig, own: MixtureConfig) -> Iterator[RuleViolation]:
    """Yield the violated rules of dispatch and `top_k`."""
    section = f"model.{config.family}"
    if own.capacity_factor and own.dispatch != "auto":
        yield RuleViolation(
            f"{section}.dispatch",
            f"must be auto with {section}.capacity_factor={own.capacity_factor:g}: the capacity "
            "determines the dispatch.",
            f"Set {section}.dispatch=auto, or {section}.capacity_factor=0 for experts without a "
            "capacity.",
        )
    if own.top_k > own.num_experts:
        yield RuleViolation(
            f"{section}.top_k",
            f"must be at most {section}.num_experts ({own.num_experts}), because a token's "
            "experts are distinct.",
            f"Set {section}.top_k={min(2, own.num_experts)}.",
        )
