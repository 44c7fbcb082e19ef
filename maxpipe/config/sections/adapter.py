"""Value ranges and rules for the keys of section `adapter`, declared in `maxpipe.models.config`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from maxpipe.config.rules import (
    DROPS_EVERYTHING,
    MAX_FINDINGS,
    add_local_folder_rule,
    add_ranges,
    axis_keys,
    axis_size,
    did_you_mean,
    rule,
)
from maxpipe.config.sections.model import MODEL_KEYS
from maxpipe.errors import Code, RuleViolation
from maxpipe.models.adapters import (
    DOWN,
    LENGTH,
    UP,
    block_size,
    dim_of_scales,
    matrices,
    names_of_adaptable,
    picked,
    sides,
    unmatched,
)
from maxpipe.models.config import LARGEST, SMALLEST, AdapterConfig, Bound
from maxpipe.models.param_names import declared, suggestions
from maxpipe.models.registry import describe

if TYPE_CHECKING:
    from maxpipe.config.schema import Config

add_ranges(
    Bound("adapter.rank", 16, 0, why="0 trains all parameters"),
    Bound("adapter.alpha", 16.0, SMALLEST, LARGEST, "the value must fit in float32"),
    Bound("adapter.dropout", 0.1, 0, 1, DROPS_EVERYTHING, high_is_inside=False),
)

add_local_folder_rule(
    "adapter.restore_from", "Download the adapter, and set adapter.restore_from to its folder."
)

ADAPTER_KEYS = tuple(f"adapter.{field.name}" for field in fields(AdapterConfig))
_KEYS = (*ADAPTER_KEYS, *MODEL_KEYS)


@rule(*ADAPTER_KEYS)
def _adapter_keys_need_a_rank(config: Config) -> Iterator[RuleViolation]:
    if config.adapter.rank:
        return
    for key in ("targets", "dropout", "base_quantization", "kind", "restore_from"):
        if getattr(config.adapter, key) != getattr(AdapterConfig(), key):
            yield RuleViolation(
                Code.MODEL_ADAPTER,
                f"adapter.{key}",
                "is ignored with adapter.rank = 0, which trains all parameters without adapters.",
                "Omit adapter.rank, whose default is the rank of the PEFT adapter."
                if key == "restore_from"
                else f"Set adapter.rank=16, or leave adapter.{key} out.",
            )


@rule(*_KEYS)
def _targets_support_adapters(config: Config) -> Iterator[RuleViolation]:
    if not config.adapter.rank:
        return
    model, targets = describe(replace(config.model, adapter=None)), config.adapter.targets
    can = names_of_adaptable(model)
    if not can:
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            "adapter.rank",
            f"must be 0: layers of model.family={config.model.family} have no matrices that "
            "support adapters.",
            "Set adapter.rank=0, and list the parameters to freeze in model.frozen.",
        )
    unknown = unmatched(model, config.adapter)
    useless = [
        target
        for target in targets
        if target not in unknown and not picked(model, [target]) & {*can}
    ]
    good = [target for target in targets if target not in (*unknown, *useless)]
    for wrong in (*unknown, *useless)[:MAX_FINDINGS]:
        guess = did_you_mean(wrong, [*can, *suggestions(model)])
        guess = guess if picked(model, [guess]) & {*can} else ""
        what = (
            "which matches no parameter" if wrong in unknown else "which does not support adapters"
        )
        kept = ",".join([*good, *filter(None, [guess])])
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            "adapter.targets",
            f"contains {wrong!r}, {what}: adapters support {', '.join(can)}.",
            f"Set adapter.targets=[{kept}]"
            + ("." if kept else " for the default: all of these except routed experts."),
        )


@rule(*_KEYS)
def _rank_fits_the_matrices(config: Config) -> Iterator[RuleViolation]:
    adapter = config.adapter
    if not adapter.rank:
        return
    for name, param in matrices(describe(replace(config.model, adapter=None)), adapter).items():
        small = min(math.prod(size for size, _ in side) for side in sides(param))
        if adapter.rank > small:
            action = f"Set adapter.rank={small}, or select only larger matrices in adapter.targets."
            if adapter.restore_from:
                action = "Use a PEFT adapter of a lower rank, or merge the adapter with PEFT."
            yield RuleViolation(
                Code.MODEL_ADAPTER,
                "adapter.rank",
                f"must be at most {small}, the smaller dimension of {name}, which limits its rank.",
                action,
            )
            return


@rule(*ADAPTER_KEYS)
def _only_nf4_scales_are_quantized(config: Config) -> Iterator[RuleViolation]:
    base = config.adapter.base_quantization
    if config.adapter.double_quantization and base != "nf4":
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            "adapter.double_quantization",
            f"requires adapter.base_quantization=nf4, but the value is {base}.",
            "Set adapter.base_quantization=nf4, or adapter.double_quantization=false.",
        )


@rule("adapter.restore_from", *_KEYS)
def _restored_factors_are_trained(config: Config) -> Iterator[RuleViolation]:
    if not config.adapter.rank or not config.adapter.restore_from:
        return
    params = declared(describe(config.model))
    ends = (DOWN, UP, LENGTH)
    if frozen := [name for name in params if name.endswith(ends) and not params[name].trainable]:
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            "model.frozen",
            f"must not match {frozen[0]} with adapter.restore_from: checkpoints of adapters "
            "contain only trained parameters.",
            "Set model.frozen=[].",
        )


@rule(*_KEYS)
def _routed_experts_need_plain_lora(config: Config) -> Iterator[RuleViolation]:
    adapter = config.adapter
    if not adapter.rank or (adapter.kind == "lora" and not adapter.dropout):
        return
    params = matrices(describe(replace(config.model, adapter=None)), adapter)
    if routed := [name for name, param in params.items() if param.expert_dim >= 0]:
        key, good = ("kind", "lora") if adapter.kind != "lora" else ("dropout", "0")
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            f"adapter.{key}",
            f"must be {good} with adapters on routed experts ({', '.join(routed)}), as in PEFT.",
            f"Set adapter.{key}={good}, or remove these matrices from adapter.targets.",
        )


@rule("adapter.rank", "model.mtp_heads")
def _no_mtp_with_adapters(config: Config) -> Iterator[RuleViolation]:
    if config.adapter.rank and config.model.mtp_heads:
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            "model.mtp_heads",
            "must be 0 with adapters: multi-token prediction heads do not support adapters.",
            "Set model.mtp_heads=0; MTP heads in the base weights are then ignored.",
        )


@rule("adapter.rank", "adapter.kind", "model.matmul")
def _dora_needs_default_matmul(config: Config) -> Iterator[RuleViolation]:
    if config.adapter.rank and config.adapter.kind == "dora" and config.model.matmul != "default":
        yield RuleViolation(
            Code.MODEL_ADAPTER,
            "adapter.kind",
            "must be lora with quantized matmuls: dora normalizes weight columns, but "
            f"model.matmul={config.model.matmul} quantizes the weights.",
            "Set adapter.kind=lora, or model.matmul=default.",
        )


@rule(*_KEYS, *axis_keys("tensor"))
def _nf4_blocks_divide_over_tensor(config: Config) -> Iterator[RuleViolation]:
    """Reject tensor shardings that split an NF4 byte (two 4-bit values) or block (one scale)."""
    if not config.adapter.rank or config.adapter.base_quantization != "nf4":
        return
    shards = axis_size(config.mesh, "tensor") or 1
    for name, param in declared(describe(replace(config.model, adapter=None))).items():
        if name.startswith("layers.") and (dim := dim_of_scales(param)) is not None:
            size, axis = param.dims[dim]
            parts = shards if axis == "mlp" else 1
            piece = max(block_size(size), 2)
            if size % (piece * parts):
                yield RuleViolation(
                    Code.MODEL_ADAPTER,
                    "adapter.base_quantization",
                    f"nf4 stores {name} in blocks of {piece} values along {axis} ({size}), which "
                    f"{parts} devices of mesh axis tensor cannot shard evenly."
                    if parts > 1
                    else f"nf4 stores {name} in pairs of values along {axis}, but {axis} has an "
                    f"odd size ({size}).",
                    "Set adapter.base_quantization=int8.",
                )
                return
