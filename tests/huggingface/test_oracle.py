"""Logits of imported and exported models equal those of transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.import_ import import_folder

pytestmark = pytest.mark.oracle

SCRIPT = Path(__file__).with_name("oracle.py")
PYTHON = os.environ.get("ORACLE") or sys.executable
CASES = 3
NUM_TOKENS = 23


def cases(kind: str) -> int:
    """Return the number of cases of a family; Llama has one for each rotary scaling type."""
    return 6 if kind in ("llama", "phi3") else CASES + len(ALONE.get(kind, ()))


@cache
def reason(more: str = "") -> str:
    """Return why transformers or the `more` package cannot be imported; empty if they can."""
    code = f"import torch, transformers{', ' * bool(more)}{more}"
    run = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    return run.stderr.strip().rpartition("\n")[2]


def run_oracle(action: str, jobs: list[dict[str, Any]], folder: Path) -> None:
    listed = folder / f"{action}.json"
    listed.write_text(json.dumps(jobs))
    run = subprocess.run(
        [PYTHON, SCRIPT, action, listed], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def oracle_answers(script: str, jobs: list[Any], folder: Path) -> list[Any]:
    """Run a script in this folder and return its results, one for each job."""
    listed, out = folder / "jobs.json", folder / "answers.json"
    listed.write_text(json.dumps(jobs))
    command = [PYTHON, Path(__file__).with_name(script), listed, out]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(out.read_text())


def sizes(draw: random.Random) -> dict[str, Any]:
    """Draw odd, unequal sizes."""
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2, 3))
    return {
        "vocab_size": draw.randrange(131, 391, 2),
        "hidden_size": heads * draw.choice((6, 10, 14)),
        "intermediate_size": draw.randrange(37, 93, 2),
        "num_hidden_layers": draw.choice((3, 5, 7)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((4, 8, 12, 18)),
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
    }


def llama(draw: random.Random) -> dict[str, Any]:
    return {"tie_word_embeddings": draw.random() < 0.5}


SCALINGS = ("longrope", "dynamic", "yarn", "llama3", "linear", "default")
LONG = ("longrope", "dynamic")
"""Scaling types whose frequencies depend on the length of the sequence."""


def scaled(number: int, draw: random.Random, size: int) -> dict[str, Any]:
    """Draw rotary parameters of each scaling type; sequences exceed the original context."""
    original, factor = draw.choice((8, 16)), draw.choice((2.0, 4.0, 32.0))
    rope = default_rope(draw)
    context = {"original_max_position_embeddings": original}
    kind = SCALINGS[number % 6]
    if kind == "default":
        return {"rope_parameters": rope}
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **context}
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": draw.choice((64, 256))}
        rope |= draw.choice(
            ({}, {"attention_factor": 1.25}, {"mscale": 0.7, "mscale_all_dim": 1.3})
        )
    if kind == "longrope":
        rope |= {name: [draw.uniform(1, 8) for _ in range(size // 2)] for name in FACTORS}
        rope |= context
        return {"rope_parameters": rope, "max_position_embeddings": int(factor * original)}
    return {"rope_parameters": rope} | (
        {"max_position_embeddings": original} if kind == "dynamic" else {}
    )


FACTORS = ("short_factor", "long_factor")


def gemma3(draw: random.Random) -> dict[str, Any]:
    full = {"rope_type": "default", "rope_theta": 1e6}
    if draw.random() < 0.5:
        full |= {"rope_type": "linear", "factor": draw.choice((2.0, 8.0))}
    rope = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return {
        "rope_parameters": rope,
        "sliding_window": draw.choice((3, 5, 9)),
        "sliding_window_pattern": draw.choice((2, 3, 6)),
        "query_pre_attn_scalar": draw.choice((7, 24, 256)),
    }


def gemma4(draw: random.Random) -> dict[str, Any]:
    """Draw a dense model; the sizes of global layers differ from those of local layers."""
    global_dim, proportional = draw.choice((6, 10, 16)), {"rope_type": "proportional"}
    full = {**proportional, "rope_theta": 1e6, "partial_rotary_factor": draw.choice((0.4, 1.0))}
    full |= {"factor": draw.choice((1.0, 8.0))}
    keys_are_values = draw.random() < 0.7
    return {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": draw.choice((3, 5, 9)),
        "layer_types": draw.choice((2, 3)),  # interval between global layers
        "global_head_dim": global_dim,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": keys_are_values,
        "final_logit_softcapping": draw.choice((None, 2.0)),
        "use_bidirectional_attention": draw.choice((None, "vision")),
        "hidden_size_per_layer_input": 0,
        "pad_token_id": None,  # the embedding of this token would not be trained
    }


def gemma4_moe(draw: random.Random) -> dict[str, Any]:
    return gemma4(draw) | {
        "enable_moe_block": True,
        "num_experts": draw.choice((3, 5, 7)),
        "top_k_experts": draw.choice((1, 2, 3)),
        "moe_intermediate_size": draw.randrange(23, 41, 2),
    }


def gemma4_small(draw: random.Random) -> dict[str, Any]:
    """Draw a model with shared keys and values and with per-layer embeddings."""
    return gemma4(draw) | {
        "attention_k_eq_v": False,
        "num_kv_shared_layers": draw.choice((1, 2)),
        "num_hidden_layers": draw.choice((5, 6, 7)),
        "use_double_wide_mlp": draw.random() < 0.7,
        "hidden_size_per_layer_input": draw.choice((6, 10)),
        "vocab_size_per_layer_input": 393,
    }


def gemma4_unified(draw: random.Random) -> dict[str, Any]:
    return {key: value for key, value in gemma4(draw).items() if "per_layer" not in key}


def mixtral(draw: random.Random) -> dict[str, Any]:
    return {
        "num_local_experts": draw.choice((3, 5)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "tie_word_embeddings": draw.random() < 0.3,
    }


def default_rope(draw: random.Random) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": draw.choice((5000.0, 500000.0))}


def yarn(draw: random.Random) -> dict[str, Any]:
    stretched: dict[str, Any] = {"rope_type": "yarn", "factor": draw.choice((2.0, 4.0))}
    stretched |= {"original_max_position_embeddings": draw.choice((64, 256))}
    return default_rope(draw) | (stretched if draw.random() < 0.6 else {})


def even(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes for classes that divide the width evenly over heads."""
    return {"hidden_size": 8 * config["num_attention_heads"], "head_dim": 8}


def mistral(draw: random.Random) -> dict[str, Any]:
    return {"sliding_window": draw.choice((None, 5, 9))}


qwen2 = qwen3 = llama


def olmo3(draw: random.Random) -> dict[str, Any]:
    full = yarn(draw) | {"rope_theta": draw.choice((5000.0, 500000.0))}
    if "factor" in full:
        full |= draw.choice(({}, {"attention_factor": 1.25}, {"beta_fast": 16.0}))
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": default_rope(draw)},
        "sliding_window": draw.choice((3, 5, 9)),
        "layer_types": None,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def smollm3(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "no_rope_layer_interval": draw.choice((1, 2, 3, 99)),
        "pad_token_id": None,  # the default exceeds these vocabularies
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if draw.random() < 0.5:
        found["no_rope_layers"] = [1, 0] * 4
    return found


def ministral3(draw: random.Random) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": draw.choice(("yarn", "llama3")),
        "factor": draw.choice((1.0, 2.0, 16.0)),
        "rope_theta": draw.choice((5000.0, 500000.0)),
        "original_max_position_embeddings": draw.choice((3, 8, 16)),
        "llama_4_scaling_beta": draw.choice((0.1, 0.7)),
    }
    if rope["rope_type"] == "yarn":
        rope |= draw.choice(({}, {"mscale": 1.0, "mscale_all_dim": 1.0}))
    else:
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_parameters": rope, "tie_word_embeddings": draw.random() < 0.5}


def llama4(draw: random.Random) -> dict[str, Any]:
    rope = default_rope(draw)
    if draw.random() < 0.6:
        rope |= {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice((1.0, 4.0))}
    return {
        "intermediate_size_mlp": draw.randrange(37, 93, 2),
        "intermediate_size": draw.randrange(23, 41, 2),
        "num_local_experts": draw.choice((3, 5, 7)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "interleave_moe_layer_step": draw.choice((1, 2)),
        "no_rope_layer_interval": draw.choice((2, 3)),
        "attention_chunk_size": draw.choice((None, 3, 5, 9)),
        "use_qk_norm": draw.random() < 0.6,
        "attn_temperature_tuning": draw.random() < 0.7,
        "attn_scale": draw.choice((0.1, 0.7)),
        "floor_scale": draw.choice((3, 7)),
        "rope_parameters": rope,
        "tie_word_embeddings": draw.random() < 0.3,
    }


def qwen3_moe(draw: random.Random) -> dict[str, Any]:
    return qwen3(draw) | {
        "num_experts": draw.choice((3, 5, 7)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "moe_intermediate_size": draw.randrange(23, 41, 2),
        "norm_topk_prob": draw.random() < 0.5,
        "decoder_sparse_step": draw.choice((1, 2)),
        "mlp_only_layers": draw.choice(([], [0], [1])),
    }


def hybrid(draw: random.Random) -> dict[str, Any]:
    """Draw the keys that all families with the delta rule share."""
    key_heads, head = draw.choice((1, 2, 3)), draw.choice((8, 12, 20))
    factor = draw.choice((0.25, 0.5)) if head % 8 == 0 else 0.5
    rope = yarn(draw)
    return {
        "head_dim": head,
        "partial_rotary_factor": factor,
        "rope_parameters": rope | {"partial_rotary_factor": factor},
        "full_attention_interval": draw.choice((2, 3, 4)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 2, 3)),
        "linear_key_head_dim": draw.choice((5, 6, 8)),
        "linear_value_head_dim": draw.choice((3, 7, 10)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def hybrid_moe(draw: random.Random) -> dict[str, Any]:
    return hybrid(draw) | {
        "num_experts": draw.choice((3, 5, 7)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "moe_intermediate_size": draw.randrange(23, 41, 2),
        "shared_expert_intermediate_size": draw.randrange(13, 41, 2),
    }


def qwen3_next(draw: random.Random) -> dict[str, Any]:
    return hybrid_moe(draw) | {"norm_topk_prob": draw.random() < 0.5}


def gpt_oss(draw: random.Random) -> dict[str, Any]:
    rope = default_rope(draw)
    if draw.random() < 0.7:
        rope |= {"rope_type": "yarn", "factor": draw.choice((2.0, 32.0)), "truncate": False}
        rope |= {"original_max_position_embeddings": draw.choice((64, 256))}
    return {
        "rope_parameters": rope,
        "num_local_experts": draw.choice((3, 5, 7)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "sliding_window": draw.choice((3, 5, 9)),
        "swiglu_limit": draw.choice((0.3, 7.0)),
        "tie_word_embeddings": draw.random() < 0.3,
    }


def gemma2(draw: random.Random) -> dict[str, Any]:
    return {
        "rope_parameters": default_rope(draw),
        "sliding_window": draw.choice((3, 5, 9)),
        "query_pre_attn_scalar": draw.choice((7, 24)),
        "attn_logit_softcapping": draw.choice((None, 3.0)),
        "final_logit_softcapping": draw.choice((None, 2.0)),
    }


def plain(draw: random.Random) -> dict[str, Any]:
    return {"rope_parameters": default_rope(draw), "tie_word_embeddings": draw.random() < 0.5}


def granite(draw: random.Random) -> dict[str, Any]:
    return plain(draw) | {
        "embedding_multiplier": draw.choice((1.0, 12.0)),
        "attention_multiplier": draw.choice((0.015625, 0.4)),
        "residual_multiplier": draw.choice((1.0, 0.22)),
        "logits_scaling": draw.choice((1.0, 8.0)),
    }


def granite4(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((2, 4))
    kinds = ("mamba", "attention")
    rotates = draw.random() < 0.3
    return granite(draw) | {
        "rope_parameters": default_rope(draw) if rotates else None,
        "position_embedding_type": "rope" if rotates else None,
        "layer_types": [kinds[draw.random() < 0.4] for _ in range(7)],
        "mamba_n_heads": heads,
        "mamba_expand": draw.choice((1, 2)) * heads,
        "mamba_n_groups": draw.choice((1, heads)),
        "mamba_d_state": draw.choice((5, 8)),
        "mamba_d_conv": draw.choice((2, 3, 4)),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_chunk_size": draw.choice((4, 8)),
        "num_local_experts": draw.choice((0, 3, 5)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "shared_intermediate_size": draw.randrange(13, 41, 2),
    }


def falcon_h1(draw: random.Random) -> dict[str, Any]:
    groups = draw.choice((1, 2))
    heads, size = groups * draw.choice((1, 3)), draw.choice((5, 6))
    multipliers = {
        f"{name}_multiplier": draw.choice((1.0, 0.3, 1.7))
        for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_out")
    }
    multipliers["ssm_in_multiplier"] = draw.choice((1.0, 1.3))
    return multipliers | {
        "rope_parameters": default_rope(draw),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice((1e-6, 1e-4)),
        "mamba_n_heads": heads,
        "mamba_d_head": draw.choice((size, "auto")),
        "mamba_d_ssm": heads * size,
        "mamba_n_groups": groups,
        "mamba_d_state": draw.choice((5, 8)),
        "mamba_d_conv": draw.choice((2, 3, 4)),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_chunk_size": draw.choice((4, 8)),
        "mamba_rms_norm": draw.random() < 0.5,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": draw.choice(([0.4, 0.7, 1.3, 0.5, 1.6], [1.0] * 5)),
        "mlp_multipliers": draw.choice(([0.6, 1.4], [1.0, 1.0])),
    }


def nemotron_h(draw: random.Random) -> dict[str, Any]:
    names = ["linear_attention", "full_attention", "mlp", "moe"]
    layers = draw.sample(names, 4) + draw.choices(names, k=draw.randrange(4))
    groups = draw.choice((1, 2))
    return {
        "layers_block_type": layers,
        "num_hidden_layers": len(layers),
        "layer_norm_epsilon": draw.choice((1e-6, 1e-4)),
        "mamba_num_heads": groups * draw.choice((1, 3)),
        "mamba_head_dim": draw.choice((5, 6)),
        "n_groups": groups,
        "ssm_state_size": draw.choice((5, 8)),
        "conv_kernel": draw.choice((2, 3, 4)),
        "use_conv_bias": draw.random() < 0.7,
        "chunk_size": draw.choice((4, 8)),
        "time_step_min": draw.choice((0.001, 0.4)),
        "n_routed_experts": 12,
        "num_experts_per_tok": draw.choice((3, 4)),
        **draw.choice(({}, {"n_group": 3, "topk_group": 2}, {"n_group": 4, "topk_group": 2})),
        "moe_intermediate_size": draw.choice((17, 23)),
        "moe_shared_expert_intermediate_size": draw.choice((13, 19)),
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }


def phi3(draw: random.Random) -> dict[str, Any]:
    ids = {"pad_token_id": 0, "eos_token_id": 1}  # the defaults exceed these vocabularies
    window, turned = draw.choice((None, 5)), draw.choice((1.0, 0.75, 0.5))
    rope = default_rope(draw)
    found: dict[str, Any] = ids | {"sliding_window": window, "partial_rotary_factor": turned}
    found |= {"tie_word_embeddings": draw.random() < 0.5}
    original = draw.choice((0, 8, 64))
    if original:
        factors = {
            name: [draw.uniform(1, 8) for _ in range(int(8 * turned) // 2)] for name in FACTORS
        }
        rope |= {"rope_type": "longrope", **factors}
        found["original_max_position_embeddings"] = original
        found["max_position_embeddings"] = original * draw.choice((1, 4, 32))
    return found | {"rope_parameters": rope}


def deepseek(draw: random.Random) -> dict[str, Any]:
    """Draw the latent-attention keys that both classes share."""
    heads = draw.choice((2, 3, 5))
    rope = yarn(draw)
    if "factor" in rope:
        mscale = draw.choice((0.707, 1.0))
        rope |= {"mscale": mscale, "mscale_all_dim": draw.choice((mscale, 0.4))}
        rope |= {"beta_fast": draw.choice((1.0, 32.0)), "beta_slow": 1.0}
    return {
        "hidden_size": heads * draw.choice((6, 14)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": draw.choice((6, 10)),
        "qk_rope_head_dim": draw.choice((4, 8)),
        "v_head_dim": draw.choice((7, 11)),
        "kv_lora_rank": draw.choice((10, 14)),
        "q_lora_rank": draw.choice((None, 11)),
        "moe_intermediate_size": draw.choice((17, 23)),
        "first_k_dense_replace": draw.choice((0, 1, 2)),
        "n_shared_experts": draw.choice((1, 2)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "n_routed_experts": 12,
        "num_experts_per_tok": draw.choice((3, 4)),
        "n_group": draw.choice((3, 4)),
        "topk_group": 2,
        "rope_parameters": rope,
        "tie_word_embeddings": draw.random() < 0.3,
    }


def deepseek_v2(draw: random.Random) -> dict[str, Any]:
    return deepseek(draw) | {"topk_method": draw.choice(("greedy", "group_limited_greedy"))}


def deepseek_v3(draw: random.Random) -> dict[str, Any]:
    return deepseek(draw) | {"norm_topk_prob": draw.random() < 0.5, "kv_lora_rank": 9}


def sparse_attention(draw: random.Random) -> dict[str, Any]:
    """Draw a model with an indexer. With several heads, few index scores are exactly 0, so that the
    order of equal scores does not matter.
    """
    return deepseek_v3(draw) | {
        "q_lora_rank": 11,
        "index_topk": draw.choice((3, 7)),
        "index_n_heads": draw.choice((8, 12)),
        "index_head_dim": draw.choice((10, 16)),
    }


def deepseek_v4(draw: random.Random) -> dict[str, Any]:
    """Draw a model with all types of attention and both types of routers. Several windows are
    complete.
    """
    heads, size = draw.choice((4, 6)), draw.choice((8, 12))
    rates = (draw.choice((2, 3)), draw.choice((4, 5)))
    types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    types += draw.choices(types, k=draw.choice((0, 2)))
    rope = draw.choice(({"rope_type": "default"}, YARN | {"original_max_position_embeddings": 16}))
    return {
        **{"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": size},
        **{"num_hidden_layers": len(types), "layer_types": types, "hidden_size": 20},
        **{"moe_intermediate_size": draw.choice((17, 23)), "q_lora_rank": draw.choice((7, 11))},
        **{"partial_rotary_factor": 4 / size, "compress_rope_theta": 900.0, "rope_theta": 50.0},
        **{"rope_parameters": rope, "o_groups": 2, "o_lora_rank": draw.choice((5, 6))},
        **{"sliding_window": draw.choice((3, 5)), "index_topk": draw.choice((2, 3))},
        "compress_rates": dict(zip(types[1:3], rates, strict=True)),
        **{"index_n_heads": draw.choice((8, 12)), "index_head_dim": draw.choice((6, 10))},
        **{"n_routed_experts": draw.choice((5, 7)), "num_experts_per_tok": draw.choice((2, 3))},
        **{"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * (len(types) - 2)},
        **{"routed_scaling_factor": draw.choice((1.0, 1.5)), "swiglu_limit": 0.7},
        **{"hc_mult": draw.choice((2, 4)), "hc_sinkhorn_iters": draw.choice((2, 5))},
        "num_nextn_predict_layers": 0,
    }


def partial_rope(draw: random.Random) -> dict[str, Any]:
    factor = draw.choice((0.5, 1.0))
    return {
        "head_dim": draw.choice((8, 12, 20)),
        "partial_rotary_factor": factor,
        "rope_parameters": yarn(draw) | {"partial_rotary_factor": factor},
    }


def glm4_moe(draw: random.Random) -> dict[str, Any]:
    return partial_rope(draw) | {
        "attention_bias": draw.random() < 0.5,
        "use_qk_norm": draw.random() < 0.5,
        "moe_intermediate_size": draw.choice((17, 23)),
        "first_k_dense_replace": draw.choice((0, 1, 2)),
        "n_shared_experts": draw.choice((1, 2)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "n_routed_experts": 12,
        "num_experts_per_tok": draw.choice((3, 4)),
        **draw.choice(({}, {"n_group": 3, "topk_group": 2}, {"n_group": 4, "topk_group": 2})),
        "norm_topk_prob": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.3,
    }


def minimax_m2(draw: random.Random) -> dict[str, Any]:
    return partial_rope(draw) | {
        "num_local_experts": draw.choice((3, 5, 7)),
        "num_experts_per_tok": draw.choice((1, 2, 3)),
        "tie_word_embeddings": draw.random() < 0.3,
    }


def kimi_linear(draw: random.Random) -> dict[str, Any]:
    latent = deepseek_v3(draw)
    renamed = {
        **{"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
        **{"n_shared_experts": "num_shared_experts", "n_group": "num_expert_group"},
        **{"norm_topk_prob": "moe_renormalize"},
    }
    del latent["rope_parameters"]
    kinds = ("linear_attention", "full_attention")
    return {renamed.get(name, name): value for name, value in latent.items()} | {
        "layer_types": [kinds[draw.random() < 0.4] for _ in range(7)],
        "linear_num_heads": draw.choice((1, 2, 3)),
        "linear_head_dim": draw.choice((5, 6, 8)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "tie_word_embeddings": False,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},  # defaults exceed the sizes
    }


def olmo_hybrid(draw: random.Random) -> dict[str, Any]:
    kinds = ("linear_attention", "full_attention")
    key_heads = draw.choice((1, 2, 3))
    no_rope = {"rope_type": "default", "rope_theta": None}
    return {
        "rope_parameters": draw.choice((no_rope, default_rope(draw), yarn(draw))),
        "layer_types": draw.sample(kinds, 2) + draw.choices(kinds, k=5),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 2)),
        "linear_key_head_dim": draw.choice((3, 5, 8)),
        "linear_value_head_dim": draw.choice((4, 5, 7)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "linear_allow_neg_eigval": draw.random() < 0.7,
        "tie_word_embeddings": draw.random() < 0.3,
        **{"pad_token_id": 0, "eos_token_id": 2},  # defaults exceed the sizes
    }


SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Classes with sparse latent attention."""
XLA_ONLY = (*SPARSE, "deepseek_v4")
"""Classes that only the `xla` backend supports."""
HEADS_SHARE_THE_WIDTH = {
    *("qwen2", "olmo2", "olmo3", "olmo_hybrid", "granite", "granite4", "phi3", "smollm3"),
}
SCALED = (
    "smollm3",
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma2", "granite", "olmo2", "mixtral"),
)
CLASSES = {
    "llama": (llama, "LlamaConfig", "LlamaForCausalLM"),
    "gemma3": (gemma3, "Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": (gemma4, "Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_moe": (gemma4_moe, "Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_small": (gemma4_small, "Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified": (gemma4_unified, "Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
    "mixtral": (mixtral, "MixtralConfig", "MixtralForCausalLM"),
    "mistral": (mistral, "MistralConfig", "MistralForCausalLM"),
    "qwen2": (qwen2, "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": (qwen3, "Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": (qwen3_moe, "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": (qwen3_next, "Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": (hybrid, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": (hybrid_moe, "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "gpt_oss": (gpt_oss, "GptOssConfig", "GptOssForCausalLM"),
    "gemma2": (gemma2, "Gemma2Config", "Gemma2ForCausalLM"),
    "olmo2": (plain, "Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": (olmo3, "Olmo3Config", "Olmo3ForCausalLM"),
    "smollm3": (smollm3, "SmolLM3Config", "SmolLM3ForCausalLM"),
    "ministral3": (ministral3, "Ministral3Config", "Ministral3ForCausalLM"),
    "llama4": (llama4, "Llama4TextConfig", "Llama4ForCausalLM"),
    "granite": (granite, "GraniteConfig", "GraniteForCausalLM"),
    "granite4": (granite4, "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "nemotron_h": (nemotron_h, "NemotronHConfig", "NemotronHForCausalLM"),
    "falcon_h1": (falcon_h1, "FalconH1Config", "FalconH1ForCausalLM"),
    "deepseek_v2": (deepseek_v2, "DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": (deepseek_v3, "DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": (sparse_attention, "DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "deepseek_v4": (deepseek_v4, "DeepseekV4Config", "DeepseekV4ForCausalLM"),
    "glm4_moe": (glm4_moe, "Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm_moe_dsa": (sparse_attention, "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "minimax_m2": (minimax_m2, "MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "phi3": (phi3, "Phi3Config", "Phi3ForCausalLM"),
    "kimi_linear": (kimi_linear, "KimiLinearConfig", "KimiLinearForCausalLM"),
    "olmo_hybrid": (olmo_hybrid, "OlmoHybridConfig", "OlmoHybridForCausalLM"),
}


def rotary(share: float, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": share, **more}
    return {"partial_rotary_factor": share, "rope_parameters": rope}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def by_layer_type(full: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


MINISTRAL: dict[str, Any] = {
    **{"rope_theta": 5000.0, "rope_type": "yarn", "factor": 1.0},
    **{"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.0},
}
PROPORTIONAL = ROPE | {"rope_type": "proportional", "partial_rotary_factor": 1.0}
SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 3}
GEMMA4: dict[str, Any] = {
    **by_layer_type(PROPORTIONAL, ROPE),
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    **{"global_head_dim": 8, "num_global_key_value_heads": None, "attention_k_eq_v": False},
    **{"sliding_window": 99, "layer_types": 3, "final_logit_softcapping": None},
}
PLAIN: dict[str, dict[str, Any]] = {
    **{"gemma4": GEMMA4, "gemma4_unified": GEMMA4},
    "hybrid": {**rotary(1.0), "full_attention_interval": 1, "tie_word_embeddings": False},
    "glm4_moe": {
        **rotary(1.0),
        **{"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0},
        **{"n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
        **{"n_group": 1, "topk_group": 1, "tie_word_embeddings": False},
    },
    "minimax_m2": {**rotary(1.0), "num_experts_per_tok": 1, "tie_word_embeddings": False},
    "smollm3": {
        **{"no_rope_layers": None, "no_rope_layer_interval": 99, "tie_word_embeddings": False},
        "rope_parameters": ROPE,
    },
    "ministral3": {"rope_parameters": MINISTRAL, "tie_word_embeddings": False},
    "llama4": {
        **{"no_rope_layer_interval": 99, "attention_chunk_size": None, "use_qk_norm": False},
        **{"attn_temperature_tuning": False, "attn_scale": 0.7, "floor_scale": 3},
        **{"interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "num_local_experts": 5},
        **{"rope_parameters": ROPE, "tie_word_embeddings": False},
    },
    "olmo3": {
        **by_layer_type(ROPE, ROPE),
        **{"sliding_window": 99, "layer_types": None, "tie_word_embeddings": False},
    },
}
"""Keys that disable all optional features of a family."""
ROTATED: list[dict[str, Any]] = [rotary(0.5), rotary(1.0, **YARN), {"tie_word_embeddings": True}]
DELTA: list[dict[str, Any]] = [
    {"full_attention_interval": 99, "linear_num_key_heads": 2, "linear_num_value_heads": values}
    for values in (2, 6)
]
FEATURES: dict[str, list[dict[str, Any]]] = {
    "gemma4": [
        *({"sliding_window": 3}, {"sliding_window": 3, "layer_types": 2}),
        *({"global_head_dim": 12}, {"attention_k_eq_v": True}),
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        by_layer_type(PROPORTIONAL | {"partial_rotary_factor": 0.5}, ROPE),
        by_layer_type(PROPORTIONAL | {"factor": 8.0}, ROPE),
        by_layer_type(PROPORTIONAL, ROPE | {"rope_theta": 50.0}),
        {"final_logit_softcapping": 2.0},
        {"enable_moe_block": True, "num_experts": 5}
        | {"top_k_experts": 2, "moe_intermediate_size": 23},
        {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 393},
    ],
    # In transformers 5.24, `gemma4` supports shared keys only with per-layer embeddings.
    "gemma4_unified": [{}, SHARED, SHARED | {"use_double_wide_mlp": True}],
    "hybrid": [*ROTATED, *DELTA, {"full_attention_interval": 2}],
    "glm4_moe": [
        *ROTATED,
        *({"attention_bias": True}, {"use_qk_norm": True}, {"first_k_dense_replace": 2}),
        *({"n_shared_experts": 3}, {"routed_scaling_factor": 2.5}, {"norm_topk_prob": False}),
        {"n_group": 3, "topk_group": 1},
    ],
    "minimax_m2": [*ROTATED, {"num_experts_per_tok": 3}],
    "smollm3": [
        *({"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0] * 4}),
        *({"no_rope_layer_interval": 1}, {"tie_word_embeddings": True}),
    ],
    "ministral3": [
        {"rope_parameters": MINISTRAL | {"llama_4_scaling_beta": 0.7}},
        {"rope_parameters": MINISTRAL | YARN},
        {"tie_word_embeddings": True},
    ],
    "llama4": [
        *({"no_rope_layer_interval": 2}, {"attention_chunk_size": 5}, {"use_qk_norm": True}),
        {"no_rope_layer_interval": 2, "attn_temperature_tuning": True},
        {"no_rope_layer_interval": 2, "use_qk_norm": True},
        {"no_rope_layer_interval": 2, "attention_chunk_size": 5},
        *({"interleave_moe_layer_step": 2}, {"moe_layers": [1, 3, 5]}, {"num_experts_per_tok": 3}),
        {
            "rope_parameters": {**ROPE, "rope_type": "llama3", "factor": 16.0}
            | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
            | {"original_max_position_embeddings": 8}
        },
        {"tie_word_embeddings": True},
    ],
    "olmo3": [
        {"sliding_window": 3},
        {"sliding_window": 3, "layer_types": "every second layer is global"},
        *(by_layer_type(ROPE | YARN, ROPE), by_layer_type(ROPE, ROPE | {"rope_theta": 50.0})),
        {"tie_word_embeddings": True},
    ],
}
ALONE: dict[str, list[dict[str, Any]]] = {
    name: [PLAIN[kind] | feature for feature in features]
    for kind, features in FEATURES.items()
    for name in (("qwen3_5", "qwen3_5_moe") if kind == "hybrid" else (kind,))
}
"""Keys of config.json that enable one feature alone, by class."""


def job_of(kind: str, number: int, base: Path, **changes: Any) -> dict[str, Any]:
    """Return the job of a model to make; `changes` are keys of its config.json."""
    own, config_class, architecture = CLASSES[kind]
    name = f"{kind}-{number}"
    draw = random.Random(name)
    config = sizes(draw) | own(draw)
    if kind in HEADS_SHARE_THE_WIDTH:
        config |= even(config)
    if kind in SCALED:
        config |= scaled(number + SCALED.index(kind), draw, config["head_dim"])
    if kind in (*HEADS_SHARE_THE_WIDTH, "deepseek_v2", "deepseek_v3", "kimi_linear", *SPARSE):
        del config["head_dim"]
    if number >= CASES and kind in ALONE:
        config |= ALONE[kind][number - CASES]
    config |= changes
    if isinstance(types := config.get("layer_types"), list):
        config["layer_types"] = types[: config["num_hidden_layers"]]
    if isinstance(config.get("layer_types"), str):
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    if isinstance(interval := config.get("layer_types"), int):
        last, kinds = config["num_hidden_layers"], ("sliding_attention", "full_attention")
        config["layer_types"] = [
            kinds[layer % interval == 0 or layer == last] for layer in range(1, last + 1)
        ]
    job = {
        "folder": str(base / name),
        "config_class": config_class,
        "architecture": architecture,
        "config": config,
        "seed": number,
        "dtype": ("float32", "bfloat16", "float16")[number % 3],
        "max_shard_size": "20KB" if number % 2 else "1GB",
        "tokens": str(base / f"{name}-tokens.npy"),
        "logits": str(base / f"{name}-logits.npy"),
    }
    ids = np.random.default_rng(number).integers(0, config["vocab_size"], (2, NUM_TOKENS))
    np.save(job["tokens"], ids)
    return job


def use_fixed_frequencies(config: dict[str, Any]) -> None:
    """Use rotary frequencies that do not depend on the length of a sequence.

    Training here pads sequences, and generation chooses frequencies by the capacity of the cache.
    transformers chooses them by the tokens so far.
    """
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "dynamic":
        config["max_position_embeddings"] = 256
    if rope.get("rope_type") == "longrope":
        for keys in (config, rope):
            if "original_max_position_embeddings" in keys:
                keys["original_max_position_embeddings"] = 128
        config["max_position_embeddings"] = 256


def selected(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """Return the values of a parameter in the selected tests of the same module that use the
    requested fixture.
    """
    items: list[Any] = [test for test in request.session.items if test.path == request.path]
    tests = [test for test in items if request.fixturename in test.fixturenames]
    return {test.callspec.params[parameter] for test in tests}


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Jobs of the selected tests by name; transformers has written each job's folder and logits."""
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base = tmp_path_factory.mktemp("oracle")
    jobs = {
        name: job_of(kind, int(number), base)
        for name in NAMES
        if name in selected(request, "name")
        for kind, _, number in [name.rpartition("-")]
    }
    run_oracle("make", [*jobs.values()], base)
    return jobs


@pytest.fixture(scope="module")
def exported(folders: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory):
    """The folder of imported checkpoints, and jobs with transformers' logits of the exports."""
    base = tmp_path_factory.mktemp("exported")
    jobs = {}
    for name, job in folders.items():
        import_folder(job["folder"], str(base / f"{name}-checkpoint"), print)
        address = parse_address(str(base / f"{name}-checkpoint"))
        export(address, str(base / name), None, print, shard_bytes=30000)
        logits = str(base / f"{name}-logits.npy")
        jobs[name] = {**job, "folder": str(base / name), "logits": logits}
    run_oracle("logits", [*jobs.values()], base)
    return base, jobs


NAMES = [f"{kind}-{number}" for kind in CLASSES for number in range(cases(kind))]


def splash_case(kind: str) -> int:
    """Return a case whose rotary frequencies do not depend on the length, because splash tests pad
    sequences.
    """
    if kind not in SCALED:
        return {"phi3": 3, "llama4": 8}.get(kind, 0)
    numbers = (n for n in range(cases(kind)) if SCALINGS[(n + SCALED.index(kind)) % 6] not in LONG)
    return next(numbers)


ATTENTION = [(name, "xla") for name in NAMES] + [
    (f"{kind}-{number}", backend)
    for kind in CLASSES
    if kind not in XLA_ONLY
    for number, backend in (
        ({"llama4": 8}.get(kind, 0), "blockwise"),
        ({"llama4": 8}.get(kind, 0), "blockwise in loops"),
        (splash_case(kind), "splash"),
    )
]


@pytest.mark.parametrize(("name", "backend"), ATTENTION)
def test_imported_logits_equal_transformers(
    name: str, backend: str, folders, exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax
    import jax.numpy as jnp

    from maxpipe.models.count import even_blocks, unrolled_blocks
    from maxpipe.nn import attention
    from maxpipe.nn.attention import blockwise, splash
    from maxpipe.nn.decoder import Decoder
    from maxpipe.parallel.axes import MeshConfig
    from maxpipe.parallel.sharding import AxisRules

    # Several blocks, the last one partial; with loops, as for more than 512 tokens.
    backend, _, loops = backend.partition(" in ")
    short = (lambda *_: ()) if loops else partial(unrolled_blocks, size=8)
    monkeypatch.setattr(blockwise, "unrolled_blocks", short)
    monkeypatch.setattr(blockwise, "even_blocks", lambda tokens, block=0: even_blocks(tokens, 8))
    interpreted = partial(splash.attend, interpret=True)
    monkeypatch.setitem(attention.BACKENDS, "splash", interpreted)
    named: dict[str, Any] = {"compute_dtype": "float32", "attention": backend}
    job = folders[name]
    config = dataclasses.replace(open_folder(job["folder"]).config, **named)
    with CheckpointManager(exported[0] / f"{name}-checkpoint", write=False) as checkpoints:
        params = checkpoints.restore(0).state["params"]
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    kinds = [*decoder.model.layer_types]
    if len(kinds) == 1:
        params["layers"] = {kinds[0]: params["layers"]}
    # Splash kernels require whole blocks, so sequences are padded at the end.
    padding = (0, splash.LANES - NUM_TOKENS if backend == "splash" else 0)
    tokens = np.load(job["tokens"]).astype(np.int32)
    batch = {
        "tokens": jnp.pad(tokens, ((0, 0), padding)),
        "positions": jnp.stack([jnp.arange(NUM_TOKENS + padding[1])] * 2),
        "segment_ids": jnp.pad(np.ones_like(tokens), ((0, 0), padding)),
        "example_ids": jnp.arange(2),
    }
    with jax.default_matmul_precision("highest"):
        found = np.asarray(jax.jit(decoder.apply)(params, batch))[:, :NUM_TOKENS]
    close(found, np.load(job["logits"]))


@pytest.mark.parametrize("name", NAMES)
def test_exported_models_have_same_logits_in_transformers(name: str, folders, exported) -> None:
    close(np.load(exported[1][name]["logits"]), np.load(folders[name]["logits"]))


@pytest.mark.parametrize("name", NAMES)
def test_import_and_export_preserve_every_bit(name: str, folders, exported) -> None:
    before, after = open_folder(folders[name]["folder"]), open_folder(exported[1][name]["folder"])
    assert before.dtypes == after.dtypes
    assert before.description.section == after.description.section
    for tensor in before.mapping.tensors:
        bits = []
        for folder in (before, after):
            # transformers 5.24 saves the MLPs of Kimi Linear under the name of the experts, and a
            # norm of OLMo Hybrid's attention layers under a name in the other layers.
            published = tensor.replace(".block_sparse_moe.", ".mlp.")
            published = published.replace("feedforward_layer_norm", "post_attention_layernorm")
            stored = tensor if tensor in folder.mapping.tensors else published
            bits.append(folder._files[stored].read(folder._names[stored]).tobytes())
        assert bits[0] == bits[1]


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
