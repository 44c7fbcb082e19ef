"""Hugging Face folders, written without any of the code under test."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CODES = {
    **{"U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
}
"""Types of the tensors of quantized weights, in addition to `TYPES`."""
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, MLP, VOCAB, EXPERTS = 3, 10, 4, 2, 6, 14, 263, 3

Tensors = dict[str, np.ndarray]

SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "eos_token_id": [7, 9],
    "max_position_embeddings": 77,
}


def llama(
    dtype: str = "BF16", vocab: int = VOCAB, **changes: Any
) -> tuple[dict[str, Any], Tensors]:
    """Return a Llama config.json and tensors seeded by their names."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, **changes}
    config["vocab_size"] = vocab
    return config, _drawn(
        {
            **_ends(tied=bool(config.get("tie_word_embeddings")), vocab=vocab),
            **_layers(_ATTENTION, _MLP, ("input_layernorm", "post_attention_layernorm")),
        },
        dtype,
    )


def phi3(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Phi-3 config.json and its tensors, with fused projections."""
    config = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **SIZES, **changes}
    fused = {
        "self_attn.qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD),
        "mlp.gate_up_proj": (2 * MLP, WIDTH),
        "mlp.down_proj": (WIDTH, MLP),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return config, _drawn({**_ends(tied=False), **_layers(fused, {}, norms)}, dtype)


def gemma3(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Gemma 3 config.json and its tensors."""
    config = {
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **SIZES},
        **{"sliding_window": 5, "sliding_window_pattern": 2, **changes},
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    heads = {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
    return config, _drawn({**_ends(tied=True), **_layers(_ATTENTION | heads, _MLP, norms)}, dtype)


def gemma4(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Gemma 4 config.json with experts, and its tensors; the second and the last layer are
    global.
    """
    config = {
        **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **SIZES},
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        **{"sliding_window": 5, "global_head_dim": 8, "num_global_key_value_heads": 1},
        **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True},
        **{"num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 7, **changes},
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
    norms += tuple(f"post_feedforward_layernorm{end}" for end in ("", "_1", "_2"))
    norms += ("pre_feedforward_layernorm_2",)
    experts = {"router.proj": (EXPERTS, WIDTH)}
    found = _ends(tied=True)
    for layer in range(LAYERS):
        size, kv_heads = (HEAD, KV_HEADS) if not layer else (8, 1)
        attention: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * size, WIDTH),
            "self_attn.k_proj": (kv_heads * size, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * size),
            **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (size,)),
        }
        attention |= {} if layer else {"self_attn.v_proj": (kv_heads * size, WIDTH)}
        each = _layers(attention, _MLP | experts, norms)
        found |= {name: shape for name, shape in each.items() if f".{layer}." in name[:16]}
        inside: dict[str, tuple[int, ...]] = {
            "layer_scalar": (1,),
            "router.scale": (WIDTH,),
            "router.per_expert_scale": (EXPERTS,),
            "experts.gate_up_proj": (EXPERTS, 14, WIDTH),
            "experts.down_proj": (EXPERTS, WIDTH, 7),
        }
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    return config, _drawn(found, dtype)


def gemma4_small(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Gemma 4 config.json with per-layer embeddings, and its tensors; the last layer uses
    the keys and values of the second layer.
    """
    size, global_dim = 4, 8
    config = {
        **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **SIZES},
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        **{"sliding_window": 5, "global_head_dim": global_dim, "num_kv_shared_layers": 1},
        **{"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": VOCAB, **changes},
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
    norms += ("post_feedforward_layernorm", "post_per_layer_input_norm")
    found = _ends(tied=True) | {
        "model.embed_tokens_per_layer.weight": (VOCAB, LAYERS * size),
        "model.per_layer_model_projection.weight": (LAYERS * size, WIDTH),
        "model.per_layer_projection_norm.weight": (size,),
    }
    for layer in range(LAYERS):
        head_dim = global_dim if layer else HEAD
        attention: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * head_dim, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * head_dim),
            "self_attn.q_norm": (head_dim,),
            "per_layer_input_gate": (size, WIDTH),
            "per_layer_projection": (WIDTH, size),
        }
        if layer < LAYERS - 1:
            inputs = dict.fromkeys(("k_proj", "v_proj"), (KV_HEADS * head_dim, WIDTH))
            attention |= {f"self_attn.{name}": shape for name, shape in inputs.items()}
            attention["self_attn.k_norm"] = (head_dim,)
        each = _layers(attention, _MLP, norms)
        found |= {name: shape for name, shape in each.items() if f".{layer}." in name[:16]}
        found[f"model.layers.{layer}.layer_scalar"] = (1,)
    return config, _drawn(found, dtype)


def mixtral(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Mixtral config.json and its tensors."""
    config = {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **SIZES},
        **{"num_local_experts": EXPERTS, **changes},
    }
    experts = {
        f"block_sparse_moe.experts.{number}.{name}": shape
        for number in range(EXPERTS)
        for name, shape in (("w1", (MLP, WIDTH)), ("w3", (MLP, WIDTH)), ("w2", (WIDTH, MLP)))
    }
    experts["block_sparse_moe.gate"] = (EXPERTS, WIDTH)
    norms = ("input_layernorm", "post_attention_layernorm")
    return config, _drawn({**_ends(tied=False), **_layers(_ATTENTION, experts, norms)}, dtype)


def qwen3_next(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Qwen3-Next config.json and its tensors, with a multi-token prediction layer."""
    config = {
        **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **SIZES},
        **{**_HYBRID, **_HYBRID_MOE, **changes},
    }
    delta = {
        "linear_attn.in_proj_qkvz": (2 * (3 + 3 + 15 + 15), WIDTH),
        "linear_attn.in_proj_ba": (2 * (3 + 3), WIDTH),
    }
    found = _hybrid(delta, _gated_experts())
    return config, _drawn(found | {"mtp.fc.weight": (WIDTH, 2 * WIDTH)}, dtype)


def qwen3_5(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Qwen3.5 config.json and its tensors, with a multi-token prediction layer."""
    config = {
        **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **SIZES},
        **{**_HYBRID, "num_hidden_layers": 2, "mtp_num_hidden_layers": 1, **changes},
    }
    return config, _drawn(_qwen3_5(_MLP), dtype)


def qwen3_5_moe(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return the config.json and tensors of a Qwen3.5 model with experts."""
    config = {
        **{"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **SIZES},
        **{**_HYBRID, **_HYBRID_MOE, "num_hidden_layers": 2, "mtp_num_hidden_layers": 1, **changes},
    }
    del config["intermediate_size"]  # every layer has experts
    return config, _drawn(_qwen3_5(_gated_experts()), dtype)


def _qwen3_5(mlp: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of two layers and a multi-token prediction layer."""
    delta: dict[str, tuple[int, ...]] = {
        "linear_attn.in_proj_qkv": (6 + 6 + 30, WIDTH),
        "linear_attn.in_proj_z": (30, WIDTH),
        "linear_attn.in_proj_b": (6, WIDTH),
        "linear_attn.in_proj_a": (6, WIDTH),
    }
    found = _hybrid(delta, mlp)
    found = {name: shape for name, shape in found.items() if "layers.2." not in name}
    ahead = {name: shape for name, shape in found.items() if name.startswith("model.layers.1.")}
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    return {
        **found,
        **{name.replace("model.layers.1.", "mtp.layers.0."): each for name, each in ahead.items()},
        **{f"{name}.weight": (WIDTH,) for name in norms},
        "mtp.fc.weight": (WIDTH, 2 * WIDTH),
    }


_HYBRID: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "full_attention_interval": 2},
    **{"linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3},
    "partial_rotary_factor": 0.67,
}
_HYBRID_MOE = {
    **{"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 7},
    "shared_expert_intermediate_size": 9,
}


def _gated_experts() -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of experts with a gated shared expert."""
    hidden = {"gate_proj": (7, WIDTH), "up_proj": (7, WIDTH), "down_proj": (WIDTH, 7)}
    shared = {"gate_proj": (9, WIDTH), "up_proj": (9, WIDTH), "down_proj": (WIDTH, 9)}
    mlp = {
        f"mlp.experts.{number}.{name}": shape
        for number in range(EXPERTS)
        for name, shape in hidden.items()
    }
    mlp |= {f"mlp.shared_expert.{name}": shape for name, shape in shared.items()}
    return mlp | {"mlp.gate": (EXPERTS, WIDTH), "mlp.shared_expert_gate": (1, WIDTH)}


def _hybrid(
    projections: dict[str, tuple[int, ...]], mlp: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a model whose odd layers have full attention."""
    full: dict[str, tuple[int, ...]] = {
        **_ATTENTION,
        "self_attn.q_proj": (2 * HEADS * HEAD, WIDTH),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (HEAD,)),
    }
    delta: dict[str, tuple[int, ...]] = {
        **projections,
        "linear_attn.conv1d": (6 + 6 + 30, 1, 3),
        "linear_attn.norm": (5,),
        "linear_attn.out_proj": (WIDTH, 30),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    found = _ends(tied=False)
    for layer in range(LAYERS):
        each = _layers(full if layer % 2 else delta, mlp, norms)
        found |= {name: shape for name, shape in each.items() if f".{layer}." in name[:16]}
        if not layer % 2:
            found |= {f"model.layers.{layer}.linear_attn.{x}": (6,) for x in ("A_log", "dt_bias")}
    return found


def glm4_moe(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a GLM-4.5 config.json and its tensors, with a multi-token prediction layer."""
    config = {
        **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **SIZES},
        **{"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.67},
        **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 7},
        **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, **changes},
    }
    hidden = {"gate_proj": (7, WIDTH), "up_proj": (7, WIDTH), "down_proj": (WIDTH, 7)}
    places = ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS)))
    routed: dict[str, tuple[int, ...]] = {
        f"mlp.{place}.{name}": shape for place in places for name, shape in hidden.items()
    }
    attention: dict[str, tuple[int, ...]] = {
        f"{name}.weight": shape for name, shape in _ATTENTION.items()
    }
    attention |= {f"self_attn.{x}_proj.bias": (HEADS * HEAD,) for x in "q"}
    attention |= {f"self_attn.{x}_proj.bias": (KV_HEADS * HEAD,) for x in "kv"}
    attention |= {f"self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
    norms = ("input_layernorm", "post_attention_layernorm")
    attention |= {f"{name}.weight": (WIDTH,) for name in norms}
    dense = {f"{name}.weight": shape for name, shape in _MLP.items()}
    experts = {f"{name}.weight": shape for name, shape in routed.items()}
    experts |= {
        "mlp.gate.weight": (EXPERTS, WIDTH),
        "mlp.gate.e_score_correction_bias": (EXPERTS,),
    }
    ends = _ends(tied=False)
    found = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(LAYERS + 1)
        for name, shape in (attention | (experts if layer else dense)).items()
    }
    ahead = f"model.layers.{LAYERS}."
    found |= {f"{ahead}{x}.weight": (WIDTH,) for x in ("enorm", "hnorm", "shared_head.norm")}
    found |= {f"{ahead}eh_proj.weight": (WIDTH, 2 * WIDTH)}
    tensors = _drawn(ends | found, dtype)
    tensors[f"{ahead}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{ahead}shared_head.head.weight"] = tensors["lm_head.weight"]
    return config, tensors


def minimax_m2(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a MiniMax M2 config.json and its tensors."""
    config, tensors = mixtral(dtype, **{"rotary_dim": 4, "num_experts_per_tok": 2, **changes})
    config |= {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2"}
    more: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        first = f"model.layers.{layer}."
        more[f"{first}self_attn.q_norm.weight"] = (HEADS * HEAD,)
        more[f"{first}self_attn.k_norm.weight"] = (KV_HEADS * HEAD,)
        more[f"{first}block_sparse_moe.e_score_correction_bias"] = (EXPERTS,)
    return config, tensors | _drawn(more, dtype)


def granite4(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Granite 4 config.json with experts, and its tensors; the second layer has
    attention.
    """
    config = {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
        **{**SIZES, "layer_types": ["mamba", "attention", "mamba"], "intermediate_size": 7},
        **{"shared_intermediate_size": MLP, "num_local_experts": EXPERTS},
        **{"num_experts_per_tok": 2, "num_attention_heads": 5, "num_key_value_heads": 1},
        **{"mamba_expand": 3, "mamba_n_heads": 6, "mamba_d_head": 5, "mamba_n_groups": 2},
        **{"mamba_d_state": 4, "mamba_d_conv": 3, "tie_word_embeddings": False, **changes},
    }
    del config["head_dim"]
    attention = {f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qo"}
    attention |= {f"self_attn.{name}_proj.weight": (2, WIDTH) for name in "kv"}
    both = {
        "shared_mlp.input_linear.weight": (2 * MLP, WIDTH),
        "shared_mlp.output_linear.weight": (WIDTH, MLP),
        "block_sparse_moe.router.layer.weight": (EXPERTS, WIDTH),
        "block_sparse_moe.input_linear.weight": (EXPERTS, 2 * 7, WIDTH),
        "block_sparse_moe.output_linear.weight": (EXPERTS, WIDTH, 7),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    found = _ends(tied=False)
    for layer in range(LAYERS):
        mixing = attention if layer == 1 else _mamba2("mamba.")
        each: dict[str, tuple[int, ...]] = {**both, **mixing}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in each.items()}
    return config, _drawn(found, dtype)


def falcon_h1(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Falcon-H1 config.json with multipliers and a gated norm, and its tensors."""
    config = {
        **{"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", **SIZES},
        **{"mamba_n_heads": 6, "mamba_d_ssm": 30, "mamba_n_groups": 2, "mamba_d_state": 4},
        **{"mamba_d_conv": 3, "ssm_multipliers": [0.4, 0.7, 1.3, 0.5, 1.6], **changes},
        **{"mlp_multipliers": [0.6, 1.4], "key_multiplier": 0.7, "ssm_in_multiplier": 1.3},
    }
    mlp = {name.replace("mlp", "feed_forward"): shape for name, shape in _MLP.items()}
    found = _ends(tied=False)
    found["model.final_layernorm.weight"] = found.pop("model.norm.weight")
    layers = _layers(_ATTENTION, mlp, ("input_layernorm", "pre_ff_layernorm"))
    for layer in range(LAYERS):
        mamba = _mamba2("mamba.")
        if not config.get("mamba_rms_norm"):
            del mamba["mamba.norm.weight"]
        layers |= {f"model.layers.{layer}.{name}": shape for name, shape in mamba.items()}
    return config, _drawn({**found, **layers}, dtype)


def nemotron_h(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Nemotron-H config.json with one layer of each type, and its tensors, with a
    multi-token prediction layer.
    """
    config = {
        **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", **SIZES},
        **{"hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "mamba_num_heads": 6},
        **{"mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 4, "conv_kernel": 3},
        **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 7},
        **{"moe_shared_expert_intermediate_size": 9, **changes},
    }
    mixers: tuple[dict[str, tuple[int, ...]], ...] = (
        _mamba2("mixer."),
        {f"{name}.weight".replace("self_attn", "mixer"): x for name, x in _ATTENTION.items()},
        {
            "mixer.gate.weight": (EXPERTS, WIDTH),
            "mixer.gate.e_score_correction_bias": (EXPERTS,),
            "mixer.shared_experts.up_proj.weight": (9, WIDTH),
            "mixer.shared_experts.down_proj.weight": (WIDTH, 9),
            **{f"mixer.experts.{n}.up_proj.weight": (7, WIDTH) for n in range(EXPERTS)},
            **{f"mixer.experts.{n}.down_proj.weight": (WIDTH, 7) for n in range(EXPERTS)},
        },
        {"mixer.up_proj.weight": (MLP, WIDTH), "mixer.down_proj.weight": (WIDTH, MLP)},
    )
    found: dict[str, tuple[int, ...]] = {
        **{"backbone.embeddings.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)},
        **{"backbone.norm_f.weight": (WIDTH,), "mtp.layers.0.norm.weight": (WIDTH,)},
    }
    for layer, mixer in enumerate(mixers):
        each = {**mixer, "norm.weight": (WIDTH,)}
        found |= {f"backbone.layers.{layer}.{name}": shape for name, shape in each.items()}
    return config, _drawn(found, dtype)


def kimi_linear(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Kimi Linear config.json and its tensors. The second layer has latent attention, and
    the first layer has no experts.
    """
    linear = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 3, "head_dim": 5}
    config = {
        **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **SIZES},
        **{"num_key_value_heads": HEADS, "kv_lora_rank": 7, "q_lora_rank": None},
        **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5},
        **{"linear_attn_config": linear | {"short_conv_kernel_size": 3}},
        **{"num_experts": EXPERTS, "num_experts_per_token": 2, "moe_intermediate_size": 6},
        **{"first_k_dense_replace": 1, **changes},
    }
    delta: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj.weight": (15, WIDTH) for name in "qkv"},
        **{f"self_attn.{name}_conv1d.weight": (15, 1, 3) for name in "qkv"},
        **{f"self_attn.{name}_a_proj.weight": (5, WIDTH) for name in "fg"},
        **{f"self_attn.{name}_b_proj.weight": (15, 5) for name in "fg"},
        **{"self_attn.b_proj.weight": (3, WIDTH), "self_attn.A_log": (1, 1, 3, 1)},
        **{"self_attn.dt_bias": (15,), "self_attn.o_norm.weight": (5,)},
        **{"self_attn.o_proj.weight": (WIDTH, 15)},
    }
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * 6, WIDTH),
        "self_attn.kv_a_proj_with_mqa.weight": (7 + 2, WIDTH),
        "self_attn.kv_a_layernorm.weight": (7,),
        "self_attn.kv_b_proj.weight": (HEADS * (4 + 5), 7),
        "self_attn.o_proj.weight": (WIDTH, HEADS * 5),
    }
    sparse, hidden = "block_sparse_moe.", {"w1": (6, WIDTH), "w3": (6, WIDTH), "w2": (WIDTH, 6)}
    shared = {"gate_proj": (6, WIDTH), "up_proj": (6, WIDTH), "down_proj": (WIDTH, 6)}
    experts: dict[str, tuple[int, ...]] = {
        **{f"{sparse}gate.weight": (EXPERTS, WIDTH)},
        **{f"{sparse}gate.e_score_correction_bias": (EXPERTS,)},
        **{f"{sparse}shared_experts.{name}.weight": shape for name, shape in shared.items()},
        **{
            f"{sparse}experts.{number}.{name}.weight": shape
            for number in range(EXPERTS)
            for name, shape in hidden.items()
        },
    }
    dense = {f"{name}.weight": shape for name, shape in _MLP.items()}
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    found = _ends(tied=False)
    for layer in range(LAYERS):
        each = (attention if layer == 1 else delta) | (experts if layer else dense)
        each |= dict.fromkeys(norms, (WIDTH,))
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in each.items()}
    return config, _drawn(found, dtype)


def deepseek_v4(dtype: str = "F32", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a DeepSeek-V4 config.json with one layer of each type of attention, and its tensors,
    with a multi-token prediction layer.
    """
    config = {
        **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **SIZES},
        **{"num_key_value_heads": 1, "moe_intermediate_size": 7, "q_lora_rank": 5},
        **{"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "qk_rope_head_dim": 2},
        **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 3},
        **{"index_n_heads": 2, "index_head_dim": 4, "index_topk": 2, "hc_mult": 2, **changes},
    }
    del config["intermediate_size"]
    streams, coefficients = 2 * WIDTH, 2 * (2 + 2)
    ends: dict[str, tuple[int, ...]] = {
        **{"model.embed_tokens.weight": (VOCAB, WIDTH), "head.weight": (VOCAB, WIDTH)},
        **{"model.norm.weight": (WIDTH,), "model.hc_head.hc_fn": (2, streams)},
        **{"model.hc_head.hc_base": (2,), "model.hc_head.hc_scale": (1,)},
        "mtp.0.norm.weight": (WIDTH,),
    }
    found = dict(ends)
    for layer, rate in enumerate((0, 4, 128)):
        inside: dict[str, tuple[int, ...]] = {
            **{"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)},
            **{"attn.wq_a.weight": (5, WIDTH), "attn.q_norm.weight": (5,)},
            **{"attn.wq_b.weight": (HEADS * HEAD, 5), "attn.wkv.weight": (HEAD, WIDTH)},
            **{"attn.norm.weight": (HEAD,), "attn.attn_sink": (HEADS,)},
            **{"attn.wo_a.weight": (2 * 3, HEADS * HEAD // 2), "attn.wo_b.weight": (WIDTH, 2 * 3)},
            **{"ffn.gate.weight": (EXPERTS, WIDTH)},
            **{f"ffn.{n}.w1.weight": (7, WIDTH) for n in _mlps()},
            **{f"ffn.{n}.w3.weight": (7, WIDTH) for n in _mlps()},
            **{f"ffn.{n}.w2.weight": (WIDTH, 7) for n in _mlps()},
        }
        for name in ("attn", "ffn"):
            inside |= {
                f"hc_{name}_fn": (coefficients, streams),
                f"hc_{name}_base": (coefficients,),
                f"hc_{name}_scale": (3,),
            }
        inside |= {"ffn.gate.bias": (EXPERTS,)} if layer else {"ffn.gate.tid2eid": (VOCAB, 2)}
        if rate:
            series = 2 if rate == 4 else 1
            inside |= _compression("attn.compressor.", rate, series, HEAD)
        if rate == 4:
            inside |= _compression("attn.indexer.compressor.", rate, 2, 4)
            inside |= {"attn.indexer.wq_b.weight": (2 * 4, 5)}
            inside |= {"attn.indexer.weights_proj.weight": (2, WIDTH)}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    tensors = _drawn(found, dtype)
    table = np.arange(VOCAB)[:, None] + np.arange(2)
    return config, {
        name: (table % EXPERTS).astype(np.int64) if name.endswith("tid2eid") else tensor
        for name, tensor in tensors.items()
    }


def _mlps() -> list[str]:
    return [*(f"experts.{n}" for n in range(EXPERTS)), "shared_experts"]


def _compression(prefix: str, rate: int, series: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a compression of `rate` tokens."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"wkv.weight": (series * size, WIDTH), "wgate.weight": (series * size, WIDTH)},
        **{"ape": (rate, series * size), "norm.weight": (size,)},
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def olmo_hybrid(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return an OLMo Hybrid config.json and its tensors; the second layer has attention."""
    config = {
        **{"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", **SIZES},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 3},
        **{"linear_value_head_dim": 5, "linear_conv_kernel_dim": 3},
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"rope_parameters": {"rope_theta": None, "rope_type": "default"}, **changes},
    }
    rows = {"q": 6, "k": 6, "v": 30}
    delta: dict[str, tuple[int, ...]] = {
        **{f"linear_attn.{name}_proj.weight": (size, WIDTH) for name, size in rows.items()},
        **{f"linear_attn.{name}_conv1d.weight": (size, 1, 3) for name, size in rows.items()},
        **{f"linear_attn.{name}_proj.weight": (6, WIDTH) for name in "ab"},
        **{"linear_attn.g_proj.weight": (30, WIDTH), "linear_attn.o_proj.weight": (WIDTH, 30)},
        **{"linear_attn.A_log": (6,), "linear_attn.dt_bias": (6,)},
        **{"linear_attn.o_norm.weight": (5,), "attention_layer_norm.weight": (WIDTH,)},
        **{"feedforward_layer_norm.weight": (WIDTH,)},
    }
    attention: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": shape for name, shape in _ATTENTION.items()},
        **{"self_attn.q_norm.weight": (HEADS * HEAD,)},
        **{"self_attn.k_norm.weight": (KV_HEADS * HEAD,)},
        **{"post_attention_layernorm.weight": (WIDTH,)},
        **{"post_feedforward_layernorm.weight": (WIDTH,)},
    }
    mlp = {f"{name}.weight": shape for name, shape in _MLP.items()}
    found = _ends(tied=False)
    for layer in range(LAYERS):
        each = (attention if layer == 1 else delta) | mlp
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in each.items()}
    return config, _drawn(found, dtype)


def _mamba2(prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a Mamba-2 sublayer: 6 heads of 5 dims, and 2 groups of 4 dims."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"in_proj.weight": (30 + 30 + 8 + 8 + 6, WIDTH), "out_proj.weight": (WIDTH, 30)},
        **{"conv1d.weight": (30 + 8 + 8, 1, 3), "conv1d.bias": (30 + 8 + 8,)},
        **{"A_log": (6,), "dt_bias": (6,), "D": (6,), "norm.weight": (30,)},
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def gpt_oss(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a GPT-OSS config.json and its tensors; gate and up projections are interleaved."""
    config = {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **SIZES},
        **{"num_local_experts": EXPERTS, "num_experts_per_tok": 2, **changes},
    }
    inside = {f"{name}.weight": shape for name, shape in _ATTENTION.items()}
    inside |= {f"{name}.bias": shape[:1] for name, shape in _ATTENTION.items()}
    inside |= {
        "self_attn.sinks": (HEADS,),
        "mlp.router.weight": (EXPERTS, WIDTH),
        "mlp.router.bias": (EXPERTS,),
        "mlp.experts.gate_up_proj": (EXPERTS, WIDTH, 2 * MLP),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * MLP),
        "mlp.experts.down_proj": (EXPERTS, MLP, WIDTH),
        "mlp.experts.down_proj_bias": (EXPERTS, WIDTH),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    layers = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in inside.items()
    }
    return config, _drawn({**_ends(tied=False), **layers}, dtype)


def ministral3(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Ministral 3 config.json and its tensors, which have the names of Llama."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    config, tensors = llama(dtype)
    about = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    about |= {"rope_parameters": rope | {"original_max_position_embeddings": 16}}
    return {**config, **about, **changes}, tensors


def llama4(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Return a Llama 4 config.json and its tensors; every second layer has experts."""
    own = {"intermediate_size_mlp": MLP, "intermediate_size": 7, "num_local_experts": EXPERTS}
    own |= {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 5}
    config = {
        **{"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", **SIZES},
        **{**own, **changes},
    }
    hidden = {"gate_proj": (7, WIDTH), "up_proj": (7, WIDTH), "down_proj": (WIDTH, 7)}
    routed = {f"feed_forward.shared_expert.{name}": shape for name, shape in hidden.items()}
    routed["feed_forward.router"] = (EXPERTS, WIDTH)
    dense = {name.replace("mlp", "feed_forward"): shape for name, shape in _MLP.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    found = _ends(tied=False)
    for layer in range(LAYERS):
        each = _layers(_ATTENTION, routed if layer % 2 else dense, norms)
        found |= {name: shape for name, shape in each.items() if f".{layer}." in name[:16]}
        if layer % 2:
            experts = f"model.layers.{layer}.feed_forward.experts."
            found[experts + "gate_up_proj"] = (EXPERTS, WIDTH, 2 * 7)
            found[experts + "down_proj"] = (EXPERTS, 7, WIDTH)
    return config, _drawn(found, dtype)


_ATTENTION = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
}
_MLP = {
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}


def _ends(*, tied: bool, vocab: int = VOCAB) -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens.weight": (vocab, WIDTH), "model.norm.weight": (WIDTH,)}
    return found if tied else {**found, "lm_head.weight": (vocab, WIDTH)}


def _layers(
    attention: dict[str, tuple[int, ...]],
    mlp: dict[str, tuple[int, ...]],
    norms: tuple[str, ...],
) -> dict[str, tuple[int, ...]]:
    inside = {**attention, **mlp, **dict.fromkeys(norms, (WIDTH,))}
    return {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in inside.items()
    }


def _drawn(shapes: dict[str, tuple[int, ...]], dtype: str) -> Tensors:
    return {
        name: np.random.default_rng([*name.encode()]).normal(size=shape).astype(TYPES[dtype])
        for name, shape in shapes.items()
    }


def encoded(tensors: Tensors, **changes: Any) -> bytes:
    """Return a safetensors file; `changes` replace entries of its header."""
    names = {np.dtype(kind): name for name, kind in {**TYPES, **CODES}.items()}
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        more = array.tobytes()
        header[name] = {
            "dtype": names[array.dtype],
            "shape": [*array.shape],
            "data_offsets": [len(data), len(data) + len(more)],
        }
        data += more
    text = json.dumps(header | changes).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(folder: Path, config: dict[str, Any], tensors: Tensors, files: int = 1) -> Path:
    """Write a folder with the tensors split over `files` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        (folder / "model.safetensors").write_bytes(encoded(tensors))
        return folder
    place = {}
    for number in range(files):
        mine = dict([*tensors.items()][number::files])
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        (folder / name).write_bytes(encoded(mine))
        place |= dict.fromkeys(mine, name)
    index = {"metadata": {"total_size": 1}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read(folder: Path) -> Tensors:
    """Return the tensors of all files in a folder."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                data = raw[8 + length :][begin:end]
                assert name not in found
                dtype = {**TYPES, **CODES}[entry["dtype"]]
                found[name] = np.frombuffer(data, dtype).reshape(entry["shape"])
    return found


def same_bits(found: Tensors, wanted: Tensors) -> None:
    """Assert that names, dtypes, shapes and bytes are equal."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
