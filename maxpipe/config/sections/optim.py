"""Config section `optim`: optimizer, learning-rate schedule and per-parameter overrides."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from maxpipe.config.rules import (
    EXAMPLES,
    MAX_FINDINGS,
    add_item_rules,
    add_ranges,
    did_you_mean,
    format_value,
    rule,
    upgrade_lr_multipliers,
    upgrade_lr_phases,
    upgrade_weight_decays,
)
from maxpipe.config.sections.model import MODEL_KEYS
from maxpipe.config.sections.train import LENGTH_KEYS, total_steps
from maxpipe.errors import Code, Problem, RuleViolation
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, SMALLEST, Bound
from maxpipe.models.param_names import chosen, declared, suggestions, trained, without_match
from maxpipe.models.registry import describe

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class LRPhaseConfig:
    """Phase of the learning-rate schedule. A phase with neither `steps` nor `percent` covers the
    remaining steps of the run.
    """

    steps: int | None = None
    """Length of the phase in steps."""
    percent: float | None = None
    """Length of the phase as a percentage of the run. Set either `steps` or `percent`."""
    shape: Literal["linear", "cosine"]
    """Shape of the learning-rate curve between `from` and `to`."""
    from_: float | None = None
    """Learning rate at the start of the phase, as a fraction of the peak. By default, a phase
    starts at the final value of the previous phase, and the first phase starts at the peak."""
    to: float
    """Learning rate at the end of the phase, as a fraction of the peak."""
    times: int = 1
    """Number of consecutive repetitions of the phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRMultiplierConfig:
    """Learning-rate multiplier for the parameters whose names match a pattern."""

    pattern: str
    """Pattern of parameter names, as in `model.frozen`."""
    multiplier: float
    """Factor by which the learning rate is multiplied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDecayConfig:
    """Weight decay for the parameters whose names match a pattern."""

    pattern: str
    """Pattern of parameter names, as in `model.frozen`."""
    weight_decay: float
    """Decoupled weight decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """Optimizer. `adamw` (arXiv:1711.05101) stores two moments per parameter. `lion`
    (arXiv:2302.06675) stores one moment, and changes each parameter by plus or minus the learning
    rate. Lion needs a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger
    by the same factor. `adafactor` (arXiv:1804.04235) has no first moment. Adafactor's second
    moment is factored into one value per row and one per column of each matrix. `muon`
    (arXiv:2502.16982) orthogonalizes the update of each matrix in the layers and stores one moment.
    AdamW updates the embedding, the output projection and all parameters that are not matrices.
    Muon's updates are scaled to match AdamW's, so the same learning rate and weight decay can be
    used. A resumed run must use the same optimizer."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning-rate schedule after the warm-up. `cosine` and `linear` decay to
    `optim.min_lr_ratio` over the entire run. `constant` does not decay. `wsd` (warm-up, stable,
    decay) keeps the learning rate constant, and decays it linearly in the last
    `optim.decay_fraction` of the run."""
    warmup_steps: int = 0
    """Number of warm-up steps, during which the learning rate increases from 0 to its peak."""
    lr_phases: list[LRPhaseConfig] = field(
        default_factory=list,
        hash=False,  # a list has no hash
        metadata=renamed_from("phases", values=upgrade_lr_phases),
    )
    """Phases of the learning-rate schedule, such as `[{percent: 10, shape: linear, from: 0, to: 1},
    {shape: cosine, to: 0.1}]`. Replaces `optim.schedule`, `optim.decay_fraction` and
    `optim.min_lr_ratio`. The phases must include the warm-up, so `optim.warmup_steps` must be 0.
    After the last phase, the learning rate is constant."""
    decay_fraction: float = 0.2
    """Fraction of the run over which `wsd` decays the learning rate, at the end of the run. Ignored
    unless `optim.schedule` is `wsd`."""
    min_lr_ratio: float = field(default=0.1, metadata=renamed_from("final_fraction"))
    """Learning rate at the end of the run, as a fraction of the peak. Ignored if `optim.schedule`
    is `constant`."""
    beta1: float = 0.9
    """Decay rate of the first moment. For `lion`, the weight of the momentum in the update
    direction. Ignored by `adafactor`."""
    beta2: float = 0.95
    """Decay rate of the second moment. For `lion`, the decay rate of its only moment. Ignored by
    `adafactor`, which uses 1 - t^-0.8 at step t."""
    momentum: float = 0.95
    """Decay rate of the Nesterov momentum that Muon applies to matrices. Ignored unless
    `optim.name` is `muon`."""
    epsilon: float = 1e-8
    """Constant added to the square root of the second moment. Ignored by `lion` and `adafactor`."""
    weight_decay: float = 0.1
    """Decoupled weight decay, which is not applied to normalization scales and biases."""
    lr_multipliers: list[LRMultiplierConfig] = field(
        default_factory=list,
        hash=False,
        metadata=renamed_from("rate_factors", values=upgrade_lr_multipliers),
    )
    """Learning-rate multipliers for selected parameters, such as `[{pattern: embedding, multiplier:
    0.1}, {pattern: '*.router', multiplier: 0}]`. If several patterns match a parameter, the last
    one applies."""
    weight_decays: list[WeightDecayConfig] = field(
        default_factory=list, hash=False, metadata=renamed_from(values=upgrade_weight_decays)
    )
    """Weight decay for selected parameters, such as `[{pattern: embedding, weight_decay: 0}]`.
    Overrides `optim.weight_decay` for these parameters, which may include normalization scales and
    biases. If several patterns match a parameter, the last one applies."""
    clip_norm: float = 1.0
    """Maximum global gradient norm, computed over the parameters of all stages. Larger gradients
    are scaled down. 0 disables clipping."""
    ema_decay: float = field(default=0.0, metadata=renamed_from("average_decay"))
    """Decay rate of an exponential moving average (EMA) of the parameters, such as 0.999. The EMA
    is stored in float32 in addition to the parameters, and is initialized with the initial
    parameters. The EMA does not affect training, and can be evaluated and exported. 0 disables the
    EMA."""
    state_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Dtype of the stored moments. `same` uses `model.param_dtype`. Updates are always computed in
    float32."""
    zero1: bool = field(default=False, metadata=renamed_from("shard_over_data"))
    """Shard optimizer state and the EMA over the data axis (ZeRO-1, arXiv:1910.02054). Gradients
    are reduce-scattered, each device updates its shard of the parameters, and the updated
    parameters are all-gathered. If no dimension of a parameter divides evenly, its state is
    replicated."""
    offload_state: bool = False
    """Offload optimizer state and the EMA to host memory. The state is copied to the device,
    updated and copied back, one layer at a time. These copies do not overlap with compute. Results
    are bitwise identical to training without offloading."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced across devices. Each device accumulates its gradients in
    float32."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding mode for parameters and moments that are stored in bfloat16. `stochastic`
    (arXiv:1502.02551) rounds up or down at random, unbiased in expectation, so that small updates
    are not lost. The random bits depend only on the seed, the step and the position in the model,
    so they are identical for every mesh and schedule."""


add_ranges(
    Bound("optim.learning_rate", 3e-4, 1e-30, LARGEST, "the value must fit in float32"),
    Bound("optim.warmup_steps", 0, 0),
    Bound("optim.decay_fraction", 0.2, 0, 1),
    Bound("optim.min_lr_ratio", 0.1, 0, 1),
    Bound("optim.beta1", 0.9, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.beta2", 0.95, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.momentum", 0.95, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.ema_decay", 0.999, 0, 1, "1 would never update the average", high_is_inside=False),
    Bound("optim.epsilon", 1e-8, SMALLEST, LARGEST, "0 would allow a division by 0"),
    Bound("optim.weight_decay", 0.1, 0, LARGEST, "the value must fit in float32"),
    Bound("optim.clip_norm", 1.0, 0, LARGEST, "0 disables clipping; the value must fit in float32"),
    Bound("optim.lr_phases[].steps", 100, 0, 10**9),
    Bound("optim.lr_phases[].percent", 10, 0, 1000),
    Bound("optim.lr_phases[].from", 1, 0, 1),
    Bound("optim.lr_phases[].to", 0.1, 0, 1),
    Bound("optim.lr_phases[].times", 3, 1, 99),
    Bound("optim.lr_multipliers[].multiplier", 0.1, 0, LARGEST, "the value must fit in float32"),
    Bound("optim.weight_decays[].weight_decay", 0.1, 0, LARGEST, "the value must fit in float32"),
)
add_item_rules(
    "optim.lr_phases",
    "[{percent: 10, shape: linear, from: 0, to: 1}, {shape: cosine, to: 0.1}]",
    at_most_one_of=("steps", "percent"),
)
add_item_rules("optim.lr_multipliers", "[{pattern: embedding, multiplier: 0.1}]")
add_item_rules("optim.weight_decays", "[{pattern: embedding, weight_decay: 0}]")


def optimizer_warnings(config: Config) -> Iterator[Problem]:
    """Yield warnings about optimizer settings that would make training diverge or progress very
    slowly.
    """
    warmup, steps = config.optim.warmup_steps, total_steps(config.train)
    if warmup >= steps > 0:
        yield Problem(
            Code.CFG_NO_LEARNING,
            "optim.warmup_steps",
            str(warmup),
            f"must be less than the {pluralize(steps, 'step')} of the run: otherwise the learning "
            "rate never reaches its peak.",
            f"Set optim.warmup_steps={steps // 10}, or increase train.steps.",
        )
    yield from _phases_beyond_the_run(config)
    yield from _decays_past_zero(config)
    yield from _updates_too_small(config)
    yield from _rate_is_large(config)


def _phases_beyond_the_run(config: Config) -> Iterator[Problem]:
    phases, steps, end, late = config.optim.lr_phases, total_steps(config.train), 0, 0
    for phase in resolve_phases(phases, steps):
        late += end >= steps
        end += phase.steps
    if late and steps:
        yield Problem(
            Code.CFG_NO_LEARNING,
            "optim.lr_phases",
            format_value(phases),
            f"covers {pluralize(end, 'step')}, but the run has {steps}: the run ends before the "
            f"last {pluralize(late, 'phase')}.",
            "Shorten the earlier phases, for example by setting `percent` instead of `steps`.",
        )


def _decays_past_zero(config: Config) -> Iterator[Problem]:
    optim = config.optim
    decays = [("weight_decay", optim.weight_decay)]
    decays += [("weight_decays", item.weight_decay) for item in optim.weight_decays]
    key, decay = max(decays, key=operator.itemgetter(1))
    rates = [1.0, *(item.multiplier for item in optim.lr_multipliers)]
    if (taken := optim.learning_rate * max(rates) * decay) > 1:
        yield Problem(
            Code.CFG_NO_LEARNING,
            f"optim.{key}",
            f"{decay:g}",
            f"reduces each parameter by {taken:.3g} times its value in every step if "
            f"optim.learning_rate = {optim.learning_rate:g}: this factor must be at most 1.",
            f"Set a weight decay of 0.1, or leave optim.{key} out.",
        )


_LARGEST_RATE = 1.0
"""Learning rate at or above which a warning is printed. Typical learning rates for these optimizers
are at most about 0.02."""


def _rate_is_large(config: Config) -> Iterator[Problem]:
    if (rate := config.optim.learning_rate) >= _LARGEST_RATE:
        yield Problem(
            Code.CFG_NO_LEARNING,
            "optim.learning_rate",
            f"{rate:g}",
            "changes each parameter by about this amount in one step: the loss will diverge.",
            "Set optim.learning_rate=3e-4.",
        )


def _updates_too_small(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.learning_rate < 1e-10:  # parameters are typically about 0.01, and updates this small
        yield Problem(
            Code.CFG_NO_LEARNING,
            "optim.learning_rate",
            f"{optim.learning_rate:g}",
            "is too small: all updates are lost in float32 rounding, so parameters do not change.",
            "Set optim.learning_rate=3e-4.",
        )
    # The gradient norm is computed over more entries than just the embedding table.
    entry = (optim.clip_norm or 1.0) / math.sqrt(config.model.vocab_size * config.model.d_model)
    if entry < optim.epsilon and optim.name in ("adamw", "muon"):
        yield Problem(
            Code.CFG_NO_LEARNING,
            "optim.epsilon",
            f"{optim.epsilon:g}",
            f"is larger than a typical gradient entry ({entry:.1g} with optim.clip_norm = "
            f"{optim.clip_norm:g}), so parameters hardly change.",
            "Set optim.epsilon=1e-8 and optim.clip_norm=1.0.",
        )


_ROUNDS_TO_ONE = 1 - 2.0**-25
"""Smallest value that rounds to 1 in float32."""


@rule("optim.name", "optim.beta1", "optim.beta2", "optim.epsilon")
def _moments_can_be_computed(config: Config) -> Iterator[RuleViolation]:
    optim = config.optim
    if optim.name not in ("adamw", "muon"):
        return
    # Moments start at 0 and are divided by 1 - beta^updates. No single device can check whether
    # Muon's update is finite, so the bound on beta must guarantee that it is.
    limit, shown = (
        (1 - 1e-6, "0.999999")
        if optim.name == "muon"
        else (_ROUNDS_TO_ONE, f"{_ROUNDS_TO_ONE:.8f}")
    )
    if optim.name == "muon" and optim.epsilon <= 1e-30:
        rule = (
            "must be more than 1e-30 with optim.name=muon: smaller values may be lost in float32 "
            "arithmetic."
        )
        yield RuleViolation(Code.CFG_VALUE, "optim.epsilon", rule, "Set optim.epsilon=1e-8.")
    for name, usual in (("beta1", 0.9), ("beta2", 0.95)):
        if getattr(optim, name) >= limit:
            rule = f"must be less than {shown} with optim.name={optim.name}: float32 may round it"
            yield RuleViolation(
                Code.CFG_VALUE, f"optim.{name}", f"{rule} to 1.", f"Set optim.{name}={usual}."
            )


@rule("optim.lr_phases")
def _one_phase_is_open(config: Config) -> Iterator[RuleViolation]:
    phases = enumerate(config.optim.lr_phases)
    is_open = [n for n, phase in phases if phase.steps is None and phase.percent is None]
    for number in is_open:
        place = f"optim.lr_phases[{number}]"
        if config.optim.lr_phases[number].times > 1:
            text = "must be 1 if the phase covers the remaining steps of the run."
            yield RuleViolation(
                Code.CFG_CONFLICT, f"{place}.times", text, "Add `steps: ...`, or leave out `times`."
            )
        elif number != is_open[-1]:
            text = "must set a length: another phase already covers the remaining steps."
            yield RuleViolation(
                Code.CFG_CONFLICT, place, text, "Add `steps: 100`, or `percent: 10`."
            )


@rule("optim.lr_phases", "optim.warmup_steps", *LENGTH_KEYS)
def _phases_replace_the_warmup(config: Config) -> Iterator[RuleViolation]:
    steps, warmup = total_steps(config.train), config.optim.warmup_steps
    phases = resolve_phases(config.optim.lr_phases, steps)
    if phases and warmup:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "optim.warmup_steps",
            "must be 0 if optim.lr_phases is set, because the phases include the warm-up.",
            "Set optim.warmup_steps=0, and write the first phase as "
            f"`{{steps: {warmup}, shape: linear, from: 0, to: 1}}`.",
        )
    if phases and steps and all(phase.start == phase.end == 0 for phase in phases if phase.steps):
        yield RuleViolation(
            Code.CFG_NO_LEARNING,
            "optim.lr_phases",
            "must have a phase with a learning rate above 0: otherwise nothing is learned.",
            f'Set "optim.lr_phases={EXAMPLES["optim.lr_phases"]}".',
        )


@rule("optim.lr_multipliers", "optim.weight_decays", *MODEL_KEYS)
def _param_values_match_parameters(config: Config) -> Iterator[RuleViolation]:
    model, names = describe(config.model), ", ".join(declared(describe(config.model)))
    for name in ("lr_multipliers", "weight_decays"):
        key, items = f"optim.{name}", getattr(config.optim, name)
        unknown = without_match(model, [item.pattern for item in items])
        wrong = [number for number, item in enumerate(items) if item.pattern in unknown]
        for number in wrong[:MAX_FINDINGS]:
            guess = did_you_mean(items[number].pattern, suggestions(model))
            action = f"Did you mean `pattern: {guess}`?" if guess else "Leave this item out."
            rule = f"matches no parameter: {names}."
            yield RuleViolation(Code.MODEL_PARAMS, f"{key}[{number}].pattern", rule, action)
        if name == "lr_multipliers" and trained(model):
            rates = chosen(model, [(item.pattern, item.multiplier) for item in items])
            if all(rates.get(name) == 0 for name in trained(model)):
                rule = "sets the learning rate of all trained parameters to 0: nothing is learned."
                action = f"Set {key}=[] to use the same learning rate for all parameters."
                yield RuleViolation(Code.MODEL_PARAMS, key, rule, action)


class LRPhase(NamedTuple):
    """Consecutive steps in which the learning rate changes from one fraction of its peak to
    another.
    """

    steps: int
    shape: Literal["linear", "cosine"]
    start: float
    end: float


def resolve_phases(phases: Sequence[LRPhaseConfig], total_steps: int) -> list[LRPhase]:
    """Return the learning-rate phases of a run with `total_steps` steps.

    A repeated phase is listed once per repetition. After the last phase, the learning rate is
    constant.
    """
    listed = [phase for phase in phases for _ in range(phase.times)]
    lengths = [_phase_steps(phase, total_steps) for phase in listed]
    remaining = max(0, total_steps - sum(steps or 0 for steps in lengths))
    resolved, last = list[LRPhase](), 1.0
    for phase, steps in zip(listed, lengths, strict=True):
        start = last if phase.from_ is None else phase.from_
        length = remaining if steps is None else steps
        resolved.append(LRPhase(length, phase.shape, start, phase.to))
        last = phase.to
    return resolved


def _phase_steps(phase: LRPhaseConfig, total_steps: int) -> int | None:
    if phase.percent is None:
        return phase.steps
    return round(total_steps * phase.percent / 100)
