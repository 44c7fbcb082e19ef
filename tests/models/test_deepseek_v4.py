"""DeepSeek-V4 in model specs and configs: layer types, trained parameters and config rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models.config import ModelConfig
from maxpipe.models.deepseek_v4 import DeepseekV4Config, letters
from maxpipe.models.param_names import declared, trained
from maxpipe.models.registry import describe

OWN: dict[str, Any] = {
    **{"num_experts": 6, "d_expert": 12, "q_lora_rank": 10, "qk_rope_head_dim": 2},
    **{"o_groups": 2, "o_lora_rank": 3, "num_hash_layers": 2, "expert_bias": True},
    **{"index_topk": 3, "num_index_heads": 4, "index_head_dim": 6, "num_residual_streams": 2},
}
MODEL = ModelConfig(
    family="deepseek_v4",
    num_layers=6,
    d_model=16,
    num_heads=4,
    num_kv_heads=1,
    head_dim=8,
    d_mlp=32,
    vocab_size=30,
    own=DeepseekV4Config(**OWN),
)


def with_own(**changes: Any) -> ModelConfig:
    return dataclasses.replace(MODEL, own=DeepseekV4Config(**OWN | changes))


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [("WWSH", "WWSHSHS"), ("HHSH", "HHSHSHS"), ("S", "SSSSSSS"), ("WS", "WSWSWSW")],
)
def test_last_two_letters_of_the_pattern_repeat(pattern: str, layers: str) -> None:
    assert letters(pattern, len(layers)) == layers


def test_layer_types_combine_attention_and_routing() -> None:
    model = describe(with_own(attention_pattern="WHSH"))
    assert model.layers == (
        *("window_hash", "heavy_hash", "sparse_experts"),
        *("heavy_experts", "sparse_experts", "heavy_experts"),
    )
    names = {name.split(".", 2)[1]: set() for name in declared(model) if name.startswith("layers.")}
    for name in declared(model):
        if name.startswith("layers."):
            names[name.split(".", 2)[1]].add(name.split(".", 2)[2])
    assert "experts.token_experts" in names["window_hash"] & names["heavy_hash"]
    assert "experts.router_bias" in names["sparse_experts"] - names["window_hash"]
    assert "attention.index_query" in names["sparse_experts"] - names["heavy_experts"]
    assert "attention.entry_value" in names["heavy_experts"] - names["window_hash"]


def test_dense_stage_trains_only_the_indexer() -> None:
    model = describe(with_own(attention_pattern="WHSH", indexer_stage="dense"))
    names = trained(model)
    assert names == {name for name in declared(model) if ".attention.index_" in name}
    assert len(names) == 6
    sparse = describe(with_own(attention_pattern="WHSH"))
    fixed = {name for name in declared(sparse) if name.endswith(("router_bias", "token_experts"))}
    assert trained(sparse) == {*declared(sparse)} - fixed and len(fixed) == 4


BASE = ["deepseek-v4-flash", "train.steps=1"]
SECTION = "model.deepseek_v4"


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["mesh.ici_context=2"], "mesh.ici_context", "its attention needs all tokens"),
        (["model.attention=splash"], "model.attention", "does not support compressed entries"),
        (["model.attention=blockwise"], "model.attention", "does not support compressed entries"),
        (["model.num_kv_heads=2"], "model.num_kv_heads", "must be 1"),
        ([f"{SECTION}.o_groups=7"], "o_groups", "must divide model.num_heads"),
        ([f"{SECTION}.qk_rope_head_dim=63"], "qk_rope_head_dim", "must be even and at most 128"),
        ([f"{SECTION}.index_head_dim=32"], "qk_rope_head_dim", "at most 32"),
        ([f"{SECTION}.attention_pattern=WXS"], "attention_pattern", "Set .*='WS'"),
        ([f"{SECTION}.attention_pattern=''"], "attention_pattern", "must consist of the letters"),
        ([f"{SECTION}.attention_pattern={'W' * 44}"], "attention_pattern", "at most model.num_l"),
        ([f"{SECTION}.num_hash_layers=44"], "num_hash_layers", "at most model.num_layers"),
        ([f"{SECTION}.num_residual_streams=1"], "num_residual_streams", "must be from 2 to 64"),
        (
            [f"{SECTION}.indexer_stage=dense", f"{SECTION}.attention_pattern=WH"],
            "indexer_stage",
            "no layer has an indexer",
        ),
        (
            [f"{SECTION}.indexer_stage=dense", f"{SECTION}.indexer_loss_weight=0"],
            "indexer_loss_weight",
            "must be greater than 0",
        ),
    ],
)
def test_invalid_configs_are_rejected(settings: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load([*BASE, *settings])
    assert key in str(caught.value)
