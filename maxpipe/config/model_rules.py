"""Rules for trained and frozen parameters, low-precision matmuls and attention kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator

from maxpipe.config.keys import KEYS
from maxpipe.config.rules import axis_keys, axis_size, did_you_mean, rule
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation
from maxpipe.io.formatting import round_up
from maxpipe.models.param_names import chosen, declared, suggestions, trained, without_match
from maxpipe.models.registry import describe
from maxpipe.parallel.axes import QUANTIZATION_BLOCK

_KEY = "model.frozen"
_MAX_FINDINGS = 8
_MODEL_KEYS = tuple(key for key in KEYS if key.startswith("model."))


@rule(*_MODEL_KEYS)
def _frozen_parameters_exist(config: Config) -> Iterator[RuleViolation]:
    patterns, model = config.model.frozen, describe(config.model)
    wrong = without_match(model, patterns)
    others = [each for each in patterns if each not in wrong]
    for pattern in wrong[:_MAX_FINDINGS]:
        guess = did_you_mean(pattern, suggestions(model))
        yield RuleViolation(
            _KEY,
            f"contains {pattern!r}, which matches no parameter: {', '.join(declared(model))}.",
            f"Set {_KEY}=[{','.join([*others, *filter(None, [guess])])}].",
        )


@rule(*_MODEL_KEYS, "adapter.rank")
def _something_is_trained(config: Config) -> Iterator[RuleViolation]:
    model = describe(config.model)
    wanted = config.adapter.rank and not any(kind.adapters for kind in model.layer_types.values())
    if trained(model) or wanted:
        return
    if config.adapter.rank:
        yield RuleViolation(
            _KEY,
            "freezes all adapters, in addition to the base model, which is always frozen.",
            f"Set {_KEY}=[], or {_KEY}=['*_lora_a'] to train only the second factor of adapters.",
        )
    else:
        yield RuleViolation(
            _KEY,
            "freezes every parameter: nothing would be trained.",
            f"Set {_KEY}=[layers.*] to train only embedding, final norm and output projection, "
            f"or {_KEY}=[] to train all parameters.",
        )


@rule("optim.lr_multipliers", "optim.weight_decays", *_MODEL_KEYS)
def _param_values_match_parameters(config: Config) -> Iterator[RuleViolation]:
    model, names = describe(config.model), ", ".join(declared(describe(config.model)))
    for field in ("lr_multipliers", "weight_decays"):
        key, items = f"optim.{field}", getattr(config.optim, field)
        unknown = without_match(model, [item.pattern for item in items])
        wrong = [number for number, item in enumerate(items) if item.pattern in unknown]
        for number in wrong[:_MAX_FINDINGS]:
            guess = did_you_mean(items[number].pattern, suggestions(model))
            action = f"Did you mean `pattern: {guess}`?" if guess else "Leave this item out."
            rule = f"matches no parameter: {names}."
            yield RuleViolation(f"{key}[{number}].pattern", rule, action)
        if field == "lr_multipliers" and trained(model):
            rates = chosen(model, [(item.pattern, item.multiplier) for item in items])
            if all(rates.get(name) == 0 for name in trained(model)):
                rule = "sets the learning rate of all trained parameters to 0: nothing is learned."
                action = f"Set {key}=[] to use the same learning rate for all parameters."
                yield RuleViolation(key, rule, action)


_LONGEST_SUM = (2**31 - 1) // 127**2
"""Maximum number of int8 products whose sum is guaranteed to fit into 32 bits."""


@rule("model.matmul", "model.matmul_scales", "model.d_mlp")
def _int8_sums_fit(config: Config) -> Iterator[RuleViolation]:
    model = config.model
    if model.matmul != "int8" or model.matmul_scales == "block":
        return
    if model.d_mlp > _LONGEST_SUM:
        rule = f"must be at most {_LONGEST_SUM} with model.matmul=int8, which sums in 32 bits."
        yield RuleViolation("model.d_mlp", rule, "Set model.matmul=fp8.")


@rule(
    "model.matmul",
    "model.matmul_scales",
    "model.matmul_weight_gradients",
    "train.sequence_length",
    *axis_keys("context"),
)
def _int8_weight_gradient_sums_fit(config: Config) -> Iterator[RuleViolation]:
    model, tokens = config.model, config.train.sequence_length
    if model.matmul_weight_gradients == "default" or model.matmul != "int8":
        return
    tokens //= max(1, axis_size(config.mesh, "context") or 1)
    if model.matmul_scales != "block" and tokens > _LONGEST_SUM:
        rule = (
            f"results in sums over {tokens} tokens on a device; a 32-bit sum can hold at most "
            f"{_LONGEST_SUM} products of 8-bit integers."
        )
        action = "Set model.matmul_weight_gradients=default."
        yield RuleViolation("model.matmul_weight_gradients", rule, action)


@rule(
    "mesh.sequence_parallel", *axis_keys("tensor", "context"), *_MODEL_KEYS, "train.sequence_length"
)
def _scale_blocks_are_not_sharded(config: Config) -> Iterator[RuleViolation]:
    """Reject layouts that split a quantization block, because the loss would depend on the
    layout.
    """
    model, mesh, tokens = config.model, config.mesh, config.train.sequence_length
    if model.matmul == "default" or model.matmul_scales != "block":
        return
    dims = {
        size
        for param in declared(describe(model)).values()
        for size, axis in param.dims
        if axis == "mlp"
    }
    shards = axis_size(mesh, "tensor") or 1 if mesh.sequence_parallel else 1
    cut = [(size, f"columns of an MLP ({size})", "tensor", shards) for size in sorted(dims)]
    if model.matmul_weight_gradients == "same":
        shards = axis_size(mesh, "context") or 1
        pieces = 2 * shards if shards > 1 else 1  # each device has an early and a late chunk
        cut.append((tokens, f"tokens ({tokens})", "context", pieces))
    for size, words, axis, pieces in cut:
        block = math.gcd(size, QUANTIZATION_BLOCK)
        if size % (pieces * block):
            yield RuleViolation(
                "model.matmul_scales",
                f"has one scale for {block} {words}; {pieces} shards over mesh axis {axis} would "
                "split such a block, and the loss would depend on the layout.",
                "Set model.matmul_scales=channel, or a mesh that does not split blocks.",
            )


_SPLASH_BLOCK = 128
"""Block size in tokens. The sizes of query and key blocks must be multiples of this value."""


@rule("model.attention", "runtime.platform", "train.sequence_length", *axis_keys("context"))
def _splash_runs_there(config: Config) -> Iterator[RuleViolation]:
    if config.model.attention != "splash":
        return
    if config.runtime.platform in ("cpu", "cuda"):
        yield RuleViolation(
            "model.attention",
            f"requires a TPU, but runtime.platform is {config.runtime.platform}.",
            "Set model.attention=xla.",
        )
    shards, tokens = axis_size(config.mesh, "context") or 1, config.train.sequence_length
    pieces = 2 * shards if shards > 1 else 1  # each device has an early and a late chunk
    if tokens % (pieces * _SPLASH_BLOCK):
        each = f" in each of {pieces} pieces of a sequence" if pieces > 1 else ""
        yield RuleViolation(
            "train.sequence_length",
            f"must be a multiple of {pieces * _SPLASH_BLOCK} with model.attention=splash, whose "
            f"kernels use blocks of {_SPLASH_BLOCK} tokens{each}.",
            f"Set train.sequence_length={round_up(tokens, pieces * _SPLASH_BLOCK)}, or "
            "model.attention=xla.",
        )
