"""Registry of the model families, which are the possible values of `model.family`.

To add a family, write its module and list it here. Families from outside the package are added by
`maxpipe.config.plugins`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from maxpipe.models import (
    deepseek,
    deepseek_v4,
    deepseek_v32,
    falcon_h1,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    granite,
    granite4,
    kimi_linear,
    llama,
    llama4,
    minimax_m2,
    ministral3,
    mistral,
    moe,
    nemotron_h,
    olmo2,
    olmo3,
    olmo_hybrid,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from maxpipe.models.adapters import with_adapters
from maxpipe.models.config import ModelConfig, num_unquantized_layers
from maxpipe.models.family import Family
from maxpipe.models.layer_reports import Summary
from maxpipe.models.param_names import declared, freeze, picked
from maxpipe.models.spec import Ahead, LayersAhead, Model, Part

FAMILIES: dict[str, Family] = {
    family.FAMILY.name: family.FAMILY
    for family in (
        *(llama, mistral, ministral3, qwen2, qwen3, gemma2, gemma3, gemma4, phi3, olmo2, olmo3),
        *(granite, granite4, smollm3, moe, qwen3_moe, qwen3_next, qwen3_5, qwen3_5_moe, gpt_oss),
        *(deepseek, deepseek_v32, deepseek_v4, glm4_moe, glm_moe_dsa, minimax_m2, llama4),
        *(nemotron_h, kimi_linear, olmo_hybrid, falcon_h1),
    )
}

PLUGIN_MODULES: dict[type[Part], Any] = {}
"""Module class that implements each sublayer class from a plug-in. `maxpipe.nn.block` lists the
module classes of all other sublayers."""


def summaries() -> Iterator[tuple[str, Summary, list[str]]]:
    """Yield (tag, summary, families) for each metric that layers report."""
    families: dict[tuple[str, Summary], list[str]] = {}
    for family in FAMILIES.values():
        for part in family.metric_parts:
            for metric in part.metrics.items():
                families.setdefault(metric, []).append(family.name)
    return ((*metric, names) for metric, names in families.items())


_UNQUANTIZED = "_unquantized"
"""Suffix of the layer types whose matmuls are not quantized by `model.matmul`."""


@lru_cache(maxsize=64)
def describe(config: ModelConfig) -> Model:
    """Return the model spec for a valid config.

    Equal configs share one model object, because counts are cached per object.
    """
    model = _with_unquantized_layers(FAMILIES[config.family].describe(config), config)
    if config.mtp_heads:
        model = _with_heads_ahead(model, config)
    if config.adapter is not None:
        model = with_adapters(model, config.adapter)
    return freeze(model, (*config.frozen, *_untrained(model, config)))


def _untrained(model: Model, config: ModelConfig) -> list[str]:
    """Return the names of the parameters that the family does not train with this config."""
    patterns = FAMILIES[config.family].trained(config)
    names = picked(model, patterns)
    return [name for name in declared(model) if name not in names] if patterns else []


def _with_unquantized_layers(model: Model, config: ModelConfig) -> Model:
    """Return the model with separate types for the last layers, if these are not quantized."""
    count = num_unquantized_layers(
        config.matmul_unquantized_layers, config.matmul, config.num_layers
    )
    if not count:
        return model
    first = len(model.layers) - count
    layers = (*model.layers[:first], *(name + _UNQUANTIZED for name in model.layers[first:]))
    layer_types = {}
    for name in dict.fromkeys(layers):
        own = model.layer_types[name.removesuffix(_UNQUANTIZED)]
        is_last = name.endswith(_UNQUANTIZED)
        layer_types[name] = dataclasses.replace(own, in_compute_dtype=is_last)
    return dataclasses.replace(model, layers=layers, layer_types=layer_types)


def _with_heads_ahead(model: Model, config: ModelConfig) -> Model:
    heads = config.mtp_heads
    ahead, values = Ahead(heads, config.d_model, config.mtp_loss_weight), model.values
    if config.mtp_kind == "layer":
        last = model.layers[-1]
        own = (last, model.layer_types[last], model.ends.norm, model.ends.stream_head)
        ahead = LayersAhead(heads, config.d_model, config.mtp_loss_weight, *own)
        values = {name: (*layers, *layers[-1:] * heads) for name, layers in values.items()}
    ends = dataclasses.replace(model.ends, mtp=ahead)
    return dataclasses.replace(model, ends=ends, values=values)
