"""Low-rank adapters for a model's weight matrices, and quantization of the frozen base weights.

A `K x N` matrix W with an adapter becomes `W + scale * A @ B`, where only A and B are trained. A
and B are stored alongside W. A and B have the logical axes of W plus one axis for the rank.
Stacking, sharding, the optimizer and the forecasts of `plan` therefore need no special handling.
Each routed expert has a separate adapter: A and B are stacked over experts in the same way as W.
The module does not import jax.

Sources: LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353; QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from maxpipe.models.config import AdapterConfig
from maxpipe.models.layers.experts import Experts
from maxpipe.models.param_names import declared, names_in_layers, picked, without_match
from maxpipe.models.spec import Adapter, Dims, Held, LayerType, Made, Model, Normal, Param

Key = tuple[str, str]
"""Identifier of a layer's parameter: sublayer name and parameter name."""

RANK = "lora"
"""Logical axis of the rank dim, also used for dims of size 1."""
DOWN, UP, LENGTH, SCALE = "_lora_a", "_lora_b", "_lora_length", "_scale"
"""Suffixes appended to a matrix's name for its adapter factors A and B, its DoRA column magnitudes,
and its quantization scales."""
SCALE_SCALE, SCALE_MEAN = "_scale_scale", "_scale_mean"
"""Suffixes of the arrays from which double quantization computes the scales."""
BLOCK, SCALE_BLOCK = 64, 256
"""Maximum number of nf4 weights that share one scale, and of quantized scales that share one
scale (see `block_size`)."""
_SCALE_AXES = ("embed", "expert_embed", "latent")
"""Logical axes along which quantized scales can share a scale. tensor never shards these axes."""
_TYPES = {"int8": "int8", "nf4": "uint8"}
_WITHIN = ("head_dim", "mlp")
"""Logical axes along which weights can share quantization scales. Each matrix uses the first of
these axes that is among its logical axes."""


def with_adapters(model: Model, config: AdapterConfig) -> Model:
    """Return the model with all parameters frozen and an adapter on each matrix that `targets`
    selects.
    """
    targets = _targets(model, config)

    def adapted(name: str, layer_type: LayerType) -> LayerType:
        names = names_in_layers(model, name)
        matrices = {
            key: layer_type.declared[key] for key in adaptable(layer_type) if names[key] in targets
        }
        stored = dict(_held(layer_type, config))
        for key, param in matrices.items():
            stored |= _change(key, param, config)
        scale = config.alpha / (config.rank**0.5 if config.rslora else config.rank)
        adapters = {
            key: Adapter(scale, config.dropout, summed(each), each.expert_dim)
            for key, each in matrices.items()
        }
        frozen = frozenset(base_of({**layer_type.declared, **stored}))
        return replace(layer_type, frozen=frozen, stored=stored, adapters=adapters)

    layer_types = {
        name: adapted(name, layer_type) for name, layer_type in model.layer_types.items()
    }
    ends = replace(model.ends, frozen=frozenset(model.ends.params))
    return replace(model, layer_types=layer_types, ends=ends)


def without_adapters(model: Model) -> Model:
    """Return the model without adapters, quantized matrices and frozen parameters."""
    plain = {
        name: replace(layer_type, frozen=frozenset(), stored={}, adapters={})
        for name, layer_type in model.layer_types.items()
    }
    return replace(model, layer_types=plain)


def adaptable(layer_type: LayerType) -> list[Key]:
    """Return the matrices of a layer that support an adapter: those used by exactly one matmul."""
    return [key for key, param in layer_type.declared.items() if summed(param)]


def summed(param: Param) -> int:
    """Return the number of leading dims that the matmul contracts; 0 unless exactly one matmul uses
    the parameter. The count excludes the expert dim.
    """
    return param.num_contracted_dims or param.linear


def sides(param: Param) -> tuple[Dims, Dims]:
    """Return the contracted dims and the output dims of one matrix, without the expert dim."""
    dims = [dim for n, dim in enumerate(param.dims) if n != param.expert_dim]
    return tuple(dims[: summed(param)]), tuple(dims[summed(param) :])


def names_of_adaptable(model: Model, *, routed: bool = True) -> list[str]:
    """Return the checkpoint names of the matrices that support an adapter.

    If `routed` is not set, the matrices of routed experts are excluded.
    """
    return [
        names_in_layers(model, name)[key]
        for name, layer_type in model.layer_types.items()
        for key in adaptable(layer_type)
        if routed or layer_type.declared[key].expert_dim < 0
    ]


def matrices(model: Model, config: AdapterConfig) -> dict[str, Param]:
    """Return the declaration of each matrix that has an adapter, keyed by checkpoint name."""
    targets = _targets(model, config)
    return {name: param for name, param in declared(model).items() if name in targets}


def unmatched(model: Model, config: AdapterConfig) -> list[str]:
    """Return the target patterns that match no parameter name."""
    return without_match(model, config.targets)


def _targets(model: Model, config: AdapterConfig) -> set[str]:
    can = set(names_of_adaptable(model, routed=bool(config.targets)))
    return can & picked(model, config.targets) if config.targets else can


def _change(key: Key, param: Param, config: AdapterConfig) -> Iterator[tuple[Key, Param]]:
    """Yield the adapter's parameters. The first factor is initialized as in PEFT, and the second is
    initialized to zero.
    """
    part, name = key
    inside, outside = sides(param)
    rank = (config.rank, RANK)
    down, up, at = [*inside, rank], [rank, *outside], param.expert_dim
    if at >= 0:
        down.insert(at, param.dims[at])
        up.insert(at, param.dims[at])
    width = math.prod(size for size, _ in inside)
    yield (part, name + DOWN), Param(tuple(down), Normal(width, 3**-0.5))
    yield (part, name + UP), Param(tuple(up), Normal(config.rank, 0.0))
    if config.kind == "dora":
        yield (part, name + LENGTH), Param(outside, Made(key), decays=False, own_dtype="float32")


# Number format of the frozen matrices.


def _held(layer_type: LayerType, config: AdapterConfig) -> Iterator[tuple[Key, Param]]:
    """Yield the quantized weights and the scales that replace each matrix of a layer."""
    if (base := config.base_quantization) == "default":
        return
    for (part, name), param in layer_type.declared.items():
        if (dim := dim_of_scales(param)) is not None:
            size, axis = param.dims[dim]
            numbers, scales = list(param.dims), list(param.dims)
            if base == "nf4":
                numbers[dim] = (size // 2, axis)
                scales[dim] = (size // block_size(size), axis)
            else:
                scales[dim] = (1, RANK)
            derived = Made((part, name))
            yield (part, name), Param(tuple(numbers), derived, own_dtype=_TYPES[base])
            at = dim_of_scale_scales(param) if config.double_quantization else None
            dtype = "float32" if at is None else "uint8"
            yield (part, name + SCALE), Param(tuple(scales), derived, own_dtype=dtype)
            if at is not None:
                size = scales[at][0]
                scales[at] = (size // math.gcd(size, SCALE_BLOCK), RANK)
                experts = param.expert_dim
                means = ((1, RANK) if experts < 0 else param.dims[experts],)
                wide = {SCALE_SCALE: tuple(scales), SCALE_MEAN: means}
                for end, dims in wide.items():
                    yield (part, name + end), Param(dims, derived, own_dtype="float32")


def dim_of_scales(param: Param) -> int | None:
    """Return the dim along which a matrix's weights share quantization scales, or None if the
    matrix is not quantized.

    fsdp never shards this dim, so the scales are sharded in the same way as the weights.
    """
    if not isinstance(param.init, Normal) or not param.axes[-1]:
        return None  # an unnamed axis indexes convolution taps, and convolutions are not quantized
    axes = (param.axes.index(axis) for axis in _WITHIN if axis in param.axes)
    return next(axes, None)


def dim_of_scale_scales(param: Param) -> int | None:
    """Return the dim along which the quantized scales of a matrix share scales (double
    quantization), or None if the scales of the matrix are not quantized.
    """
    axes = (param.axes.index(axis) for axis in _SCALE_AXES if axis in param.axes)
    return next(axes, None)


def block_size(size: int) -> int:
    """Return the number of nf4 weights that share one scale along a dim of this size."""
    return math.gcd(size, BLOCK)


def factors_of(layer_type: LayerType) -> dict[Key, Key]:
    """Return the adapted matrix of both factors of each adapter in a layer, keyed by factor."""
    return {
        (part, name + end): (part, name) for part, name in layer_type.adapters for end in (DOWN, UP)
    }


def residuals_of_changes(layer_type: LayerType) -> Held:
    """Return the residuals saved for differentiating a layer's adapters, except for the adapters'
    inputs.

    The residuals are the activations between the two factors, the product before DoRA magnitudes
    are applied, and the dropout masks.
    """
    held = Held()
    for (part, name), adapter in layer_type.adapters.items():
        if adapter.expert_dim >= 0:
            experts = layer_type.parts[part]
            assert isinstance(experts, Experts)
            rank = layer_type.params[part, name + DOWN].dims[-1:]
            held += Held(compute_dtype=(experts.per_token_rows(1.0, rank),))
            continue
        down, up = (layer_type.params[part, name + end].dims for end in (DOWN, UP))
        stretched = ((1.0, up[1:]),) if (part, name + LENGTH) in layer_type.stored else ()
        masks = ((1.0, down[:-1]),) if adapter.dropout else ()
        held += Held(compute_dtype=((1.0, down[-1:]), *stretched), one_byte=masks)
    return held


def is_held(layer_type: LayerType, key: Key) -> bool:
    """Return True if a parameter is a quantized matrix."""
    part, name = key
    # The scales of a matrix can also have scales, but they are not declared by the layer.
    return key in layer_type.declared and (part, name + SCALE) in layer_type.stored


def base_of(params: Mapping[Key, Any]) -> list[Key]:
    """Return the keys of a layer's parameters that do not belong to an adapter."""
    ends = (DOWN, UP, LENGTH)
    return [key for key in params if not key[1].endswith(ends)]
