"""What families with experts have in common: keys, kinds of layers, and rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from maxpipe.errors import RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models import family
from maxpipe.models.config import LARGEST, Bound, ModelConfig
from maxpipe.models.layers.experts import BalanceOver, Experts
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Branch, Kind, Model, Part


@dataclass(frozen=True, kw_only=True)  # without slots: a family may have keys of several such
class MixtureConfig:
    """Keys of all families with experts."""

    num_experts: int = 8
    """Experts of a layer."""
    top_k: int = 2
    """Experts that a token is sent to: those to which the router gives the largest probabilities.
    """
    d_expert: int = 0
    """Hidden width of one expert. 0 takes `model.d_mlp`."""
    capacity_factor: float = 0.0
    """Tokens of a sequence for which an expert has room, as a multiple of an even share: 1.25 is
    common. The others lose this expert, second choices first; when text is generated none does. 0:
    for all, nothing is lost."""
    all_to_all_capacity_factor: float = field(default=0.0, metadata=renamed_from("exchange_factor"))
    """With experts on several devices (`mesh.ici_expert`): choices of a microbatch's tokens that a
    device sends to each of them at most, as a multiple of an even share. The others lose this
    expert, second choices first; when text is generated none does. 0: all, however unequal they
    are, which takes the most memory: room for all that may ever come."""
    dispatch: Literal["auto", "all", "grouped"] = "auto"
    """How tokens get to their experts without a capacity: `grouped` sorts them by expert and
    computes those that they are sent to, with a kernel on TPUs and in blocks of rows elsewhere.
    `all` computes all experts for all tokens, and much that is not used. `auto` is `grouped` if
    there are at least twice as many experts as a token is sent to."""
    load_balance_loss_weight: float = field(default=0.01, metadata=renamed_from("balance_weight"))
    """Coefficient of the balance loss, which is 1 when experts get equally many tokens; the
    objective has it once for each layer with experts. 0 only records it."""
    load_balance_scope: BalanceOver = field(
        default="sequence", metadata=renamed_from("balance_over")
    )
    """Of which tokens the balance loss takes the shares that experts get. `sequence`: of each by
    itself; the loss depends on nothing else. `microbatch`, as in Switch: of the rows that one
    device has in a microbatch; it depends on their number, so on batch size, microbatches, data
    and fsdp. `devices`, known as global-batch: of the rows that all devices have in a microbatch;
    it depends on the microbatches, and which rows meet in one on data and fsdp. None depends on
    the schedule, stages or tensor."""
    z_loss_weight: float = field(default=0.0, metadata=renamed_from("z_weight"))
    """Coefficient of the router's z-loss, the mean square of the logarithm of its partition
    function: keeps logits small. 0 only records it."""


BOUNDS = (
    Bound("num_experts", 8, 1, axis="experts"),
    Bound("top_k", 2, 1),
    Bound("d_expert", 0, 0, why="0 takes model.d_mlp", axis="mlp"),
    Bound("capacity_factor", 1.25, 0, LARGEST, "0 drops no token"),
    Bound("all_to_all_capacity_factor", 2, 0, LARGEST, "0 drops no token"),
    Bound("z_loss_weight", 0.001, 0, LARGEST, "0 only records the z-loss"),
    Bound("load_balance_loss_weight", 0.01, 0, LARGEST, "0 only records the balance loss"),
)
"""Of these keys."""


def width(config: ModelConfig, own: MixtureConfig) -> int:
    """Hidden width of one expert."""
    return own.d_expert or config.d_mlp


def experts(config: ModelConfig, own: MixtureConfig, **options: Any) -> Experts:
    """The experts of a layer; `options` are further fields of `Experts`."""
    return Experts(
        config.d_model,
        width(config, own),
        own.num_experts,
        own.top_k,
        family.residual_gain(config),
        own.load_balance_loss_weight,
        own.z_loss_weight,
        own.capacity_factor,
        own.all_to_all_capacity_factor,
        dispatch=own.dispatch,
        load_balance_scope=own.load_balance_scope,
        **options,
    )


def model(
    config: ModelConfig,
    mixing: Part,
    routed: Experts,
    dense: Iterable[bool] = (),
    values: Mapping[str, tuple[float, ...]] | None = None,
) -> Model:
    """Layers of attention and an MLP (kind `dense`) or experts (kind `experts`), each normed first.

    `dense` says which layers have an MLP, from the first one on; the rest have experts.
    """
    norm = RMSNorm(config.d_model, config.norm_epsilon)
    branches = {
        "dense": Branch("mlp", family.gated_mlp(config), norm, dropout=config.dropout),
        "experts": Branch("experts", routed, norm, dropout=config.dropout),
    }
    first = Branch("attention", mixing, norm, dropout=config.dropout)
    front = tuple("dense" if each else "experts" for each in dense)
    layers = front + ("experts",) * (config.num_layers - len(front))
    kinds = {name: Kind((first, branches[name])) for name in dict.fromkeys(layers)}
    return Model(kinds, layers, family.ends(config, norm), values or {})


def rules(config: ModelConfig, own: MixtureConfig) -> Iterator[RuleViolation]:
    """A token goes to different experts, by one way."""
    section = f"model.{config.family}"
    if own.capacity_factor and own.dispatch != "auto":
        yield RuleViolation(
            f"{section}.dispatch",
            f"has no meaning with {section}.capacity_factor={own.capacity_factor:g}: tokens pass "
            "through the experts that have room for them.",
            f"Set {section}.dispatch=auto, or {section}.capacity_factor=0 for experts that have "
            "room for all.",
        )
    if own.top_k > own.num_experts:
        yield RuleViolation(
            f"{section}.top_k",
            f"is more than {section}.num_experts ({own.num_experts}): a token is sent to different "
            "experts.",
            f"Set {section}.top_k={min(2, own.num_experts)}.",
        )
