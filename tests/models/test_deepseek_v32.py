"""Sparse attention in model specs and configs: trained parameters, counts and config rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models.config import ModelConfig
from maxpipe.models.count import active_params, forward_flops_per_token, num_params
from maxpipe.models.deepseek_v32 import DeepseekV32Config
from maxpipe.models.param_names import declared, trained
from maxpipe.models.registry import describe

OWN: dict[str, Any] = {
    **{"num_experts": 6, "num_dense_layers": 1, "d_expert": 12, "kv_lora_rank": 6},
    **{"q_lora_rank": 10, "qk_rope_head_dim": 2, "v_head_dim": 6, "expert_bias": True},
    **{"index_topk": 3, "num_index_heads": 4, "index_head_dim": 6},
}
MODEL = ModelConfig(
    family="deepseek_v32",
    num_layers=3,
    d_model=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    d_mlp=32,
    vocab_size=30,
    own=DeepseekV32Config(**OWN),
)


def with_own(**changes: Any) -> ModelConfig:
    return dataclasses.replace(MODEL, own=DeepseekV32Config(**OWN | changes))


@pytest.mark.parametrize("ahead", [{}, {"mtp_heads": 1, "mtp_kind": "layer"}])
def test_dense_stage_trains_only_the_indexer(ahead: dict[str, Any]) -> None:
    config = dataclasses.replace(with_own(indexer_stage="dense"), **ahead)
    names = trained(model := describe(config))
    assert names == {name for name in declared(model) if ".attention.index_" in name}
    assert len(names) == 5 * (2 + bool(ahead))
    assert not any(kind.balance_updates for kind in model.layer_types.values())
    assert not model.ends.balance_updates
    sparse = describe(dataclasses.replace(MODEL, **ahead))
    assert trained(sparse) == {name for name in declared(sparse) if "router_bias" not in name}


def test_user_patterns_also_freeze_the_indexer() -> None:
    config = with_own(indexer_stage="dense")
    names = trained(describe(dataclasses.replace(config, frozen=["*.index_key*"])))
    assert {name.rpartition(".")[2] for name in names} == {"index_query", "index_weights"}


def test_indexer_loss_has_its_weight_unless_it_is_0() -> None:
    assert describe(with_own(indexer_loss_weight=0.3)).losses["indexer"] == 0.3
    assert "indexer" not in describe(with_own(indexer_loss_weight=0.0)).losses


def test_counts_include_the_indexer() -> None:
    deepseek = load(["deepseek-v3", "train.steps=1"]).config.model
    sparse = load(["deepseek-v3.2", "train.steps=1"]).config.model
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    for count in (num_params, active_params):
        assert count(describe(sparse)) - count(describe(deepseek)) == 62 * indexer
    # Attention to 2048 keys costs as much as windows of 2048 tokens; all pairs have index scores.
    tokens = 8192
    keys = 2048 - 2048**2 / (2 * tokens)
    pairs = 128 * (192 + 128) * (tokens // 2 - keys) - 64 * 128 * (tokens // 2)
    matmuls = indexer - 2 * 128
    saved = forward_flops_per_token(describe(deepseek), tokens) - forward_flops_per_token(
        describe(sparse), tokens
    )
    assert saved == 2 * 62 * (pairs - matmuls)


BASE = ["deepseek-v3.2", "train.steps=1"]


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (
            ["mesh.ici_context=2", "model.deepseek_v32.indexer_stage=dense"],
            "mesh.ici_context",
            "the loss of the indexer needs all tokens",
        ),
        (
            ["mesh.ici_context=2", "mesh.context_attention=ulysses"],
            "mesh.context_attention",
            "must be auto or all_gather",
        ),
        (["mesh.ici_context=2", "model.attention=xla"], "model.attention", "auto or blockwise"),
        (["model.deepseek_v32.index_head_dim=32"], "index_head_dim", "must be at least"),
        (["model.deepseek_v32.q_lora_rank=0"], "q_lora_rank", "must be at least 1"),
        (["model.attention=splash"], "model.attention", "does not support index topk"),
        (["model.attention=cudnn"], "model.attention", "does not support index topk"),
        (
            [f"model.deepseek_v32.{x}" for x in ("indexer_stage=dense", "indexer_loss_weight=0")],
            "indexer_loss_weight",
            "must be greater than 0",
        ),
    ],
)
def test_invalid_configs_of_sparse_attention_are_rejected(
    settings: list[str], key: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load([*BASE, *settings])
    assert key in str(caught.value)


def test_dense_stage_supports_other_backends() -> None:
    settings = ["model.deepseek_v32.indexer_stage=dense", "model.attention=splash"]
    assert load([*BASE, *settings]).config.model.attention == "splash"
