"""Adapters: which matrices of a model get a low-rank change, and what of the base is held how.

A matrix W of `K x N` with an adapter becomes `W + scale * A @ B`, of which only A and B are
trained. They are parameters beside W, with W's logical axes and one for the rank: stacking,
sharding, the optimizer and forecasts know no difference. No jax.

Sources: LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353; QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from maxpipe.models.config import AdapterConfig
from maxpipe.models.param_names import declared, names_in_layers, picked, without_match
from maxpipe.models.spec import Adapter, Held, Kind, Made, Model, Normal, Param

Key = tuple[str, str]
"""(part, name) of a parameter."""

RANK = "lora"
"""Logical axis of the rank, and of dims of size 1."""
DOWN, UP, LENGTH, SCALE = "_lora_a", "_lora_b", "_lora_length", "_scale"
"""Behind a matrix' name: its change's factors, its columns' lengths, and scales of its numbers."""
BLOCK = 64
"""Numbers that share a scale in 4 bits, if their count can be divided so."""
_TYPES = {"int8": "int8", "nf4": "uint8"}
_WITHIN = ("head_dim", "mlp")
"""Logical axes of the inside of a layer, the first that a matrix has is that of its scales."""


def with_adapters(model: Model, config: AdapterConfig) -> Model:
    """The model with everything frozen, and changes beside the matrices that `targets` match."""
    targets = _targets(model, config)

    def adapted(name: str, kind: Kind) -> Kind:
        names = names_in_layers(model, name)
        mine = {key: kind.declared[key] for key in adaptable(kind) if names[key] in targets}
        stored = dict(_held(kind, config.base_quantization))
        for key, param in mine.items():
            stored |= _change(key, param, config)
        scale = config.alpha / (config.rank if config.scale_by == "rank" else config.rank**0.5)
        adapters = {key: Adapter(scale, config.dropout, summed(each)) for key, each in mine.items()}
        frozen = frozenset(base_of({**kind.declared, **stored}))
        return replace(kind, frozen=frozen, stored=stored, adapters=adapters)

    kinds = {name: adapted(name, kind) for name, kind in model.layer_types.items()}
    ends = replace(model.ends, frozen=frozenset(model.ends.params))
    return replace(model, layer_types=kinds, ends=ends)


def adaptable(kind: Kind) -> list[Key]:
    """Matrices of a layer that can have a change: those of which activations see only a product."""
    return [key for key, param in kind.declared.items() if summed(param)]


def summed(param: Param) -> int:
    """Over how many of a matrix' first dims its product sums; 0 of what has more uses than one."""
    return param.num_contracted_dims or param.linear


def names_of_adaptable(model: Model) -> list[str]:
    """Their names in checkpoints."""
    return [
        names_in_layers(model, name)[key]
        for name, kind in model.layer_types.items()
        for key in adaptable(kind)
    ]


def matrices(model: Model, config: AdapterConfig) -> dict[str, Param]:
    """By their names in checkpoints those that get a change, as the model declares them."""
    targets = _targets(model, config)
    return {name: param for name, param in declared(model).items() if name in targets}


def unmatched(model: Model, config: AdapterConfig) -> list[str]:
    """Targets that no parameter's name matches."""
    return without_match(model, config.targets)


def _targets(model: Model, config: AdapterConfig) -> set[str]:
    can = set(names_of_adaptable(model))
    return can & picked(model, config.targets) if config.targets else can


def _change(key: Key, param: Param, config: AdapterConfig) -> Iterator[tuple[Key, Param]]:
    """The factors of a matrix' change; the first is drawn as PEFT draws it, the second is 0."""
    part, name = key
    inside, outside = param.dims[: summed(param)], param.dims[summed(param) :]
    rank = (config.rank, RANK)
    width = math.prod(size for size, _ in inside)
    yield (part, name + DOWN), Param((*inside, rank), Normal(width, 3**-0.5))
    yield (part, name + UP), Param((rank, *outside), Normal(config.rank, 0.0))
    if config.kind == "dora":
        yield (part, name + LENGTH), Param(outside, Made(key), decays=False, own_dtype="float32")


# How a frozen matrix is held.


def _held(kind: Kind, base: str) -> Iterator[tuple[Key, Param]]:
    """In place of each matrix of a layer its numbers in few bits, and beside it their scales."""
    if base == "default":
        return
    for (part, name), param in kind.declared.items():
        if (dim := dim_of_scales(param)) is not None:
            size, axis = param.dims[dim]
            numbers, scales = list(param.dims), list(param.dims)
            if base == "nf4":
                numbers[dim] = (size // 2, axis)
                scales[dim] = (size // block_size(size), axis)
            else:
                scales[dim] = (1, RANK)
            made = Made((part, name))
            yield (part, name), Param(tuple(numbers), made, own_dtype=_TYPES[base])
            yield (part, name + SCALE), Param(tuple(scales), made, own_dtype="float32")


def dim_of_scales(param: Param) -> int | None:
    """Along which dim of a matrix numbers share scales; None of what is no matrix of many numbers.

    It is one that no fsdp divides: scales are divided as the numbers are.
    """
    if not isinstance(param.init, Normal) or not param.axes[-1]:
        return None  # the latter are taps of convolutions
    axes = (param.axes.index(axis) for axis in _WITHIN if axis in param.axes)
    return next(axes, None)


def block_size(size: int) -> int:
    """Numbers of such a dim that share a scale in 4 bits."""
    return math.gcd(size, BLOCK)


def factors_of(kind: Kind) -> dict[Key, Param]:
    """Both factors of each change of a layer."""
    return {
        (part, name + end): kind.params[part, name + end]
        for part, name in kind.adapters
        for end in (DOWN, UP)
    }


def residuals_of_changes(kind: Kind) -> Held:
    """What differentiating the changes of a layer's matrices keeps besides their inputs.

    Between both factors; with lengths the product that they stretch, with dropout a mask.
    """
    found = Held()
    for (part, name), adapter in kind.adapters.items():
        down, up = (kind.params[part, name + end].dims for end in (DOWN, UP))
        stretched = ((1.0, up[1:]),) if (part, name + LENGTH) in kind.stored else ()
        masks = ((1.0, down[:-1]),) if adapter.dropout else ()
        found += Held(compute_dtype=((1.0, down[-1:]), *stretched), one_byte=masks)
    return found


def is_held(kind: Kind, key: Key) -> bool:
    """Whether a matrix is held in few bits."""
    part, name = key
    return (part, name + SCALE) in kind.stored


def base_of(params: Mapping[Key, Any]) -> list[Key]:
    """Those of a layer that are no adapter's."""
    ends = (DOWN, UP, LENGTH)
    return [key for key in params if not key[1].endswith(ends)]
