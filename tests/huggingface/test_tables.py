"""Conversion between config.json and `model`, and the tensors of all parameters."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.config import config_files
from maxpipe.config.load import load
from maxpipe.config.schema import flatten
from maxpipe.errors import ConfigError
from maxpipe.huggingface.config_json import (
    model_of,
    read_description,
    table_for,
    to_json,
    values,
)
from maxpipe.huggingface.mapping import (
    count,
    export_slab_shape,
    import_slab_shape,
    map_tensors,
    parse_axis_mapping,
)
from maxpipe.models.config import ModelConfig
from maxpipe.models.count import num_params
from maxpipe.models.registry import FAMILIES, describe
from tests.errors import without_codes
from tests.huggingface import maker

QWEN3_5: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


def qwen3_5(
    width: int, layers: int, heads: int, kv_heads: int, value_heads: int, mlp: int, tied: bool
) -> dict[str, Any]:
    """Return the config.json of a dense Qwen3.5 model."""
    inner = {
        **QWEN3_5,
        "hidden_size": width,
        "intermediate_size": mlp,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_num_value_heads": value_heads,
        "model_type": "qwen3_5_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "output_gate_type": "swish",
        "tie_word_embeddings": tied,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": inner,
        "tie_word_embeddings": tied,
    }


def qwen3_5_moe(
    width: int, layers: int, heads: int, value_heads: int, mlp: int, experts: int, top_k: int
) -> dict[str, Any]:
    """Return the config.json of a Qwen3.5 model with experts."""
    inner = {
        **QWEN3_5,
        "hidden_size": width,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_num_value_heads": value_heads,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": mlp,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": inner,
        "tie_word_embeddings": False,
    }


GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 151552,
}

LOCAL, WHOLE = "sliding_attention", "full_attention"


def olmo3(layers: int, width: int, heads: int, kv_heads: int, mlp: int) -> dict[str, Any]:
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp,
        "layer_types": [*[LOCAL] * 3, WHOLE] * (layers // 4),
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    }


def ministral3(layers: int, width: int, mlp: int, theta: float, tied: bool) -> dict[str, Any]:
    inner = {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": theta,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "vocab_size": 131072,
    }
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": inner,
        "tie_word_embeddings": tied,
    }


def llama4(experts: int, interval: int, *, is_scout: bool) -> dict[str, Any]:
    scaling = {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    inner = {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": interval,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "layer_types": [*["chunked_attention"] * 3, WHOLE] * 12,
        "max_position_embeddings": 10485760 if is_scout else 1048576,
        "model_type": "llama4_text",
        "moe_layers": [*range(interval - 1, 48, interval)],
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "rms_norm_eps": 1e-05,
        "rope_scaling": scaling if is_scout else None,
        "rope_theta": 500000.0,
        "use_qk_norm": is_scout,
        "vocab_size": 202048,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": inner,
        "tie_word_embeddings": False,
    }


_GEMMA4: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "model_type": "gemma4_text",
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
"""Keys that all published sizes of Gemma 4 share, except where another value is set."""

# As published on the Hugging Face Hub, without irrelevant keys.
GRANITE4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "layer_types": [("attention" if layer % 10 == 5 else "mamba") for layer in range(40)],
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_dropout": 0.0,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": {
        **NEMOTRON_H,
        "attention_head_dim": 128,
        "chunk_size": 256,
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
    },
    "nemotron-nano2-9b": {
        **NEMOTRON_H,
        "head_dim": 128,
        "hidden_size": 4480,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "intermediate_size": 15680,
        "mamba_head_dim": 80,
        "mamba_num_heads": 128,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_hidden_layers": 56,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
    },
    "nemotron3-nano-30b-a3b": {
        **NEMOTRON_H,
        "chunk_size": 128,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
    },
    "falcon-h1-0.5b": {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1536,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "max_position_embeddings": 16384,
        "mlp_bias": False,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1",
        "num_attention_heads": 8,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "projectors_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32784,
    },
    "granite4-h-micro": {
        **GRANITE4,
        "attention_multiplier": 0.015625,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8,
        "mamba_n_heads": 64,
        "num_attention_heads": 32,
        "num_experts_per_tok": 0,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 8192,
    },
    "granite4-h-tiny": {
        **GRANITE4,
        "attention_multiplier": 0.0078125,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "logits_scaling": 6,
        "mamba_n_heads": 48,
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "shared_intermediate_size": 1024,
    },
    "granite4-h-small": {
        **GRANITE4,
        "attention_multiplier": 0.0078125,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "logits_scaling": 16,
        "mamba_n_heads": 128,
        "num_attention_heads": 32,
        "num_experts_per_tok": 10,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "shared_intermediate_size": 1536,
    },
    "olmo3-7b": olmo3(32, 4096, 32, 32, 11008),
    "olmo3-32b": olmo3(64, 5120, 40, 8, 27648),
    "olmo-hybrid-7b": {
        "architectures": ["OlmoHybridForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "layer_types": [*["linear_attention"] * 3, WHOLE] * 8,
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 96,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
        "model_type": "olmo_hybrid",
        "num_attention_heads": 30,
        "num_hidden_layers": 32,
        "num_key_value_heads": 30,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": [WHOLE] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "ministral3-3b": ministral3(26, 3072, 9216, 1e6, True),
    "ministral3-8b": ministral3(34, 4096, 14336, 1e6, False),
    "ministral3-14b": ministral3(40, 5120, 16384, 1e9, False),
    "llama4-scout-109b-a17b": llama4(16, 1, is_scout=True),
    "llama4-maverick-400b-a17b": llama4(128, 2, is_scout=False),
    "llama3-1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "gemma3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma4-31b": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    },
    "gemma4-26b-a4b": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "sliding_window": 1024,
            "top_k_experts": 8,
            "use_bidirectional_attention": "vision",
        },
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    },
    "gemma4-e2b": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"},
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_attention_heads": 8,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "sliding_window": 512,
            "use_double_wide_mlp": True,
        },
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
    },
    "gemma4-e4b": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"},
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "hidden_size": 2560,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 10240,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
            "num_attention_heads": 8,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "sliding_window": 512,
        },
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    **{
        f"qwen3.5-{name}": qwen3_5(*sizes)
        for name, sizes in {
            "0.8b": (1024, 24, 8, 2, 16, 3584, True),
            "2b": (2048, 24, 8, 2, 16, 6144, True),
            "4b": (2560, 32, 16, 4, 32, 9216, True),
            "9b": (4096, 32, 16, 4, 32, 12288, False),
            "27b": (5120, 64, 24, 4, 48, 17408, False),
        }.items()
    },
    "qwen3.5-35b-a3b": qwen3_5_moe(2048, 40, 16, 32, 512, 256, 8),
    "qwen3.5-122b-a10b": qwen3_5_moe(3072, 48, 32, 64, 1024, 256, 8),
    "qwen3.5-397b-a17b": qwen3_5_moe(4096, 60, 32, 64, 1024, 512, 10),
    "glm4.5-355b-a32b": {
        **GLM,
        "first_k_dense_replace": 3,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_hidden_layers": 92,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "glm4.5-air-106b-a12b": {
        **GLM,
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_hidden_layers": 46,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "minimax-m2-230b-a10b": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "kimi-k2-1t-a32b": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "model_type": "kimi_k2",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "kimi-linear-48b-a3b": {
        "architectures": ["KimiLinearForCausalLM"],
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}

_SPARSE: dict[str, Any] = {
    **{"attention_bias": False, "hidden_act": "silu", "index_head_dim": 128, "index_topk": 2048},
    **{"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"tie_word_embeddings": False, "qk_rope_head_dim": 64, "kv_lora_rank": 512},
}
PUBLISHED |= {
    "deepseek-v3.2": {
        **PUBLISHED["deepseek-v3"],
        **_SPARSE,
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": 64,
        "model_type": "deepseek_v32",
    },
    "glm5-744b-a40b": {
        **_SPARSE,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "hidden_size": 6144,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
}


def model(name: str) -> ModelConfig:
    return load(
        [name, "train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]
    ).config.model


def config_values(folder: Path, content: object) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return values(read_description(folder).config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_equal_bundled_models(name: str, tmp_path: Path) -> None:
    wanted = values(model(name))
    for key in [*wanted]:
        of_training = (
            "load_balance_loss_weight",
            "z_loss_weight",
            "capacity_factor",
            "expert_bias_update_rate",
            "indexer_stage",
            "indexer_loss_weight",
        )
        if key.rpartition(".")[2] in of_training:
            del wanted[key]
    assert wanted.items() <= config_values(tmp_path / "x", PUBLISHED[name]).items()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_bundled_models_round_trip_through_config_json(every: int, tmp_path: Path) -> None:
    names = [
        name for name in config_files.bundled_configs() if name not in ("quickstart", "tiny-moe")
    ]
    configs = {name: model(name) for name in names}
    with_form = {n: each for n, each in configs.items() if FAMILIES[each.family].huggingface}
    assert len(with_form) > 9
    for name, config in [*with_form.items()][::every]:
        table, written = table_for(config)
        text = to_json(table, written, {}, "bfloat16", {})
        found = config_values(tmp_path / "x", json.loads(text))
        wanted = values(config)
        # Compare the keys that config.json sets; the others are training options.
        decided = {*flatten({"model": read_description(tmp_path / "x").section})}
        for key in (each.removeprefix("model.") for each in decided):
            assert found[key] == wanted[key], (name, key)
        both = map_tensors(describe(config), table)
        once = {tensor: s for tensor, s in both.tensors.items() if tensor not in both.originals}
        assert count(once) == count(both.shapes) == num_params(describe(config)), name


@pytest.mark.parametrize("key", ["layer_types", "moe_layers", "no_rope_layers"])
def test_layer_count_is_checked_before_lists_of_layers(key: str, tmp_path: Path) -> None:
    config = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    values = {"num_hidden_layers": 10**12, key: [0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ConfigError, match="num_hidden_layers = 1000000000000 "):
        read_description(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Gemma4ForCausalLM", "enable_moe_block", {}),
        ("Gemma4ForCausalLM", "enable_moe_block", "false"),
        ("Gemma4ForCausalLM", "final_logit_softcapping", False),
        ("Llama4ForCausalLM", "attention_chunk_size", []),
        ("Llama4ForCausalLM", "attn_temperature_tuning", 0),
        ("Llama4ForCausalLM", "no_rope_layers", {}),
        ("SmolLM3ForCausalLM", "no_rope_layers", ""),
        ("SmolLM3ForCausalLM", "use_sliding_window", 0),
        ("DeepseekV3ForCausalLM", "q_lora_rank", ""),
        ("Qwen3_5ForCausalLM", "mtp_num_hidden_layers", []),
        ("Ministral3ForCausalLM", "beta_slow", ""),
        ("Ministral3ForCausalLM", "mscale", {}),
        ("Ministral3ForCausalLM", "attention_factor", ""),
    ],
)
def test_empty_values_of_another_type_are_rejected(
    architecture: str, key: str, value: Any, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale_all_dim": 1.0}
    rope |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1, key: value}
    values = {"rope_parameters": rope} if architecture.startswith("Ministral3") else {key: value}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    with pytest.raises(ConfigError) as caught:
        read_description(tmp_path)
    assert key in str(caught.value) and "must " in str(caught.value)


@pytest.mark.parametrize("most", [1, 700, 3 * 10**6, 10**12])
def test_slab_shapes_respect_size_limit_and_cover_whole_rows(most: int) -> None:
    for name in ("llama3-8b", "phi4", "mixtral-8x7b"):
        config = model(name)
        both = map_tensors(describe(config), table_for(config)[0])
        for param, shape in both.shapes.items():
            found, piece = import_slab_shape(both, param, most), both.slices[param][0]
            row = math.prod(piece.shape) // piece.sizes[piece.outer_dim]
            assert math.prod(found) <= max(most, row), (name, param)
            if most == 10**12:
                assert found == shape
            assert all(1 <= part <= size for part, size in zip(found, shape, strict=True))
            # Slabs have as many rows as allowed, and an export reads each chunk once.
            assert export_slab_shape(both, param, found) == found


def test_axis_mappings_of_every_family_round_trip() -> None:
    for family in FAMILIES.values():
        for table in family.huggingface:
            assert len({row.ours for row in table.tensors}) == len(table.tensors)
            for row in table.tensors:
                form = parse_axis_mapping(row.dims)
                sizes = tuple(range(2, 2 + len(form.param_dims)))
                kept = [
                    s
                    for name, s in zip(form.param_dims, sizes, strict=True)
                    if name != form.index_dim
                ]
                ours = np.arange(np.prod(kept)).reshape(kept)
                theirs = form.to_hf(ours)
                assert theirs.shape == form.shape(sizes)
                assert (form.to_param(theirs, sizes) == ours).all()


def test_axis_mapping_transposes_and_indexes_dims() -> None:
    query = parse_axis_mapping("d n h -> (n h) d")
    ours = np.arange(30).reshape(5, 3, 2)
    assert (query.to_hf(ours) == ours.reshape(5, 6).T).all()
    experts = parse_axis_mapping("d expert f -> f d")
    assert experts.index_dim == "expert"
    assert experts.shape((5, 7, 3)) == (3, 5)


def test_rope_scaling_and_rope_parameters_are_equivalent(tmp_path: Path) -> None:
    scaling = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old, _ = maker.llama(rope_theta=7000.0, rope_scaling={"type": "llama3", **scaling})
    new, _ = maker.llama(rope_parameters={"rope_type": "llama3", "rope_theta": 7000.0, **scaling})
    found = config_values(tmp_path / "old", old)
    assert found == config_values(tmp_path / "new", new)
    assert (found["rope_theta"], found["llama.rope_factor"]) == (7000.0, 8.0)
    assert found["llama.original_max_position_embeddings"] == 64


def test_original_length_defaults_to_max_position_embeddings(tmp_path: Path) -> None:
    for kind in ("yarn", "dynamic"):
        config, _ = maker.llama(rope_scaling={"type": kind, "factor": 4})
        found = config_values(tmp_path / "x", config)
        assert (found["llama.rope_type"], found["llama.original_max_position_embeddings"]) == (
            kind,
            77,
        )


def test_phi3_longrope_factors_and_partial_rotary_dims(tmp_path: Path) -> None:
    """As in the config.json of Phi-3 mini 128k and Phi-4 mini."""
    factors = {"short_factor": [1, 1.25, 1.5], "long_factor": [1.5, 4, 16]}
    config = {
        **maker.SIZES,
        **{"architectures": ["Phi3ForCausalLM"], "hidden_size": 32, "head_dim": None},
        **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
        **{"partial_rotary_factor": 0.75, "rope_scaling": {"type": "su", **factors}},
    }
    found = config_values(tmp_path / "x", config)
    assert (found["phi3.rope_size"], found["phi3.rope_factor"]) == (6, 32.0)
    assert found["phi3.rope_long_factor"] == [1.5, 4.0, 16.0]
    table, written = table_for(read_description(tmp_path / "x").config)
    # transformers before version 5 rejects any other key here.
    assert written["rope_scaling"] == {"type": "longrope", **factors}
    assert written["max_position_embeddings"] == 131072
    assert written["original_max_position_embeddings"] == 4096
    text = to_json(table, written, {}, "bfloat16", {"max_position_embeddings": 77})
    assert config_values(tmp_path / "x", json.loads(text)) == found


def test_config_defaults_equal_transformers(tmp_path: Path) -> None:
    found = config_values(tmp_path / "llama", {"architectures": ["LlamaForCausalLM"]})
    assert (found["num_kv_heads"], found["head_dim"], found["d_mlp"]) == (32, 128, 11008)
    assert (found["norm_epsilon"], found["rope_theta"]) == (1e-6, 1e4)
    found = config_values(tmp_path / "gemma3", {"architectures": ["Gemma3ForCausalLM"]})
    assert (found["vocab_size"], found["gemma3.sliding_window"], found["tied_embeddings"]) == (
        262208,
        4096,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mlp_only_layers": "0"}, "qwen3_moe.dense_layers"),
        ({"mlp_only_layers": [0.5]}, "qwen3_moe.dense_layers"),
        ({"mlp_only_layers": [-1]}, "from 0 to 2"),
        ({"mlp_only_layers": [0, 1, 2]}, "at least one of"),
        ({"decoder_sparse_step": 0}, "moe_layer_interval"),
        ({"decoder_sparse_step": 4}, "at least one of"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "must be at most"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_invalid_expert_layers_are_rejected(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {**maker.SIZES, "architectures": ["Qwen3MoeForCausalLM"]}
    found = config_values(
        tmp_path / "x", config | {"num_local_experts": 11, "mlp_only_layers": [1]}
    )
    assert found["qwen3_moe.num_experts"] == 11 and found["qwen3_moe.dense_layers"] == [1]
    with pytest.raises(ConfigError, match=re.escape(reason)):
        config_values(tmp_path / "x", config | changes)


def kimi_layers(full: Any, delta: Any) -> dict[str, Any]:
    """Return the layer lists of a Kimi Linear model."""
    sizes = {"num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 3}
    return {"linear_attn_config": sizes | {"full_attn_layers": full, "kda_layers": delta}}


_YARN_V4 = {
    **{"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    **{"beta_fast": 32, "beta_slow": 1},
}


UNSUPPORTED: list[tuple[Any, dict[str, Any], str]] = [
    (maker.deepseek_v4, {"compress_ratios": [0, 4, 8]}, "compress_ratios"),
    (maker.deepseek_v4, {"compress_ratios": [0, 4]}, "compress_ratios"),
    (maker.deepseek_v4, {"compress_ratios": "044"}, "compress_ratios"),
    (maker.deepseek_v4, {"compress_ratios": [0, [4], 4]}, "compress_ratios"),
    (maker.deepseek_v4, {"compress_ratios": [False, 4, 4]}, "compress_ratios"),
    (maker.deepseek_v4, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    (maker.deepseek_v4, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (maker.deepseek_v4, {"compress_rates": {"sliding_attention": 3}}, "compress_rates"),
    (maker.deepseek_v4, {"compress_rates": 4}, "compress_rates"),
    (maker.deepseek_v4, {"compress_rate_csa": 0}, "sparse_compress_rate"),
    (maker.deepseek_v4, {"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "mlp_layer_types"),
    (maker.deepseek_v4, {"mlp_layer_types": "moe"}, "mlp_layer_types"),
    (maker.deepseek_v4, {"num_hash_layers": 4}, "num_hash_layers"),
    (maker.deepseek_v4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    (maker.deepseek_v4, {"partial_rotary_factor": "x"}, "partial_rotary_factor"),
    (maker.deepseek_v4, {"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
    (maker.deepseek_v4, {"num_key_value_heads": 2}, "num_kv_heads"),
    (maker.deepseek_v4, {"o_groups": 3}, "o_groups"),
    (maker.deepseek_v4, {"scoring_func": "sigmoid"}, "scoring_func"),
    (maker.deepseek_v4, {"n_shared_experts": 2}, "n_shared_experts"),
    (maker.deepseek_v4, {"norm_topk_prob": False}, "norm_topk_prob"),
    (maker.deepseek_v4, {"hidden_act": "gelu"}, "hidden_act"),
    (maker.deepseek_v4, {"hc_mult": 1}, "num_residual_streams"),
    (maker.deepseek_v4, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
    (
        maker.deepseek_v4,
        {"rope_scaling": _YARN_V4 | {"attention_factor": 1.2}},
        "attention_factor",
    ),
    (
        maker.deepseek_v4,
        {
            "rope_parameters": {
                "main": {"rope_type": "default", "partial_rotary_factor": 0.4},
                "compress": _YARN_V4 | {"partial_rotary_factor": 0.4},
            }
        },
        "attention_factor",
    ),
    (maker.nemotron_h, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
    (maker.nemotron_h, {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    (maker.nemotron_h, {"layers_block_type": ["mamba", "rnn"]}, "layers_block_type"),
    (maker.nemotron_h, {"layers_block_type": "mamba"}, "layers_block_type"),
    (maker.nemotron_h, {"layer_types": []}, "layer_types"),
    (maker.nemotron_h, {"num_hidden_layers": 5}, "num_hidden_layers"),
    (maker.nemotron_h, {"moe_latent_size": 5}, "moe_latent_size"),
    (maker.nemotron_h, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    (maker.nemotron_h, {"n_shared_experts": 2}, "n_shared_experts"),
    (maker.nemotron_h, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    (maker.nemotron_h, {"use_bias": True}, "use_bias"),
    (maker.nemotron_h, {"sliding_window": 8}, "sliding_window"),
    (maker.falcon_h1, {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
    (
        maker.falcon_h1,
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        "mamba_norm_before_gate",
    ),
    (maker.falcon_h1, {"mamba_rms_norm": "yes"}, "mamba_rms_norm"),
    (maker.falcon_h1, {"mamba_d_head": 4}, "mamba_d_head"),
    (maker.falcon_h1, {"mamba_d_ssm": 31}, "mamba_d_ssm"),
    (maker.falcon_h1, {"mamba_d_ssm": None}, "mamba_d_ssm"),
    (maker.falcon_h1, {"mamba_d_ssm": None, "mamba_expand": "auto"}, "mamba_expand"),
    (maker.falcon_h1, {"mamba_n_heads": 0}, "mamba_n_heads"),
    (maker.falcon_h1, {"projectors_bias": True}, "projectors_bias"),
    (maker.falcon_h1, {"mamba_proj_bias": True}, "mamba_proj_bias"),
    (maker.falcon_h1, {"mlp_bias": True}, "mlp_bias"),
    (maker.falcon_h1, {"hidden_act": "gelu"}, "hidden_act"),
    (maker.falcon_h1, {"attn_layer_indices": [1]}, "attn_layer_indices"),
    (maker.falcon_h1, {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
    (maker.granite4, {"layer_types": ["mamba", "attention"]}, "layer_types"),
    (maker.granite4, {"layer_types": ["mamba", "mamba", "moe"]}, "layer_types"),
    (maker.granite4, {"layer_types": "mamba"}, "layer_types"),
    (maker.granite4, {"mamba_d_head": 6}, "mamba_d_head"),
    (maker.granite4, {"mamba_expand": 2.5}, "mamba_expand"),
    (maker.granite4, {"mamba_proj_bias": True}, "mamba_proj_bias"),
    (maker.granite4, {"mamba_n_groups": 4}, "mamba_num_groups"),
    (maker.granite4, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    (maker.granite4, {"position_embedding_type": "alibi"}, "position_embedding_type"),
    (maker.kimi_linear, {"layer_types": ["linear_attention", WHOLE]}, "layer_types"),
    (maker.kimi_linear, {"layer_types": ["linear_attention", "mamba", WHOLE]}, "layer_types"),
    (maker.kimi_linear, {"layer_types": WHOLE}, "layer_types"),
    (maker.kimi_linear, {"linear_attn_config": [1]}, "linear_attn_config"),
    (maker.kimi_linear, kimi_layers([2], [1]), "must list each layer from 1 to 3 once"),
    (maker.kimi_linear, kimi_layers([2], [1, 2, 3]), "must list each layer from 1 to 3 once"),
    (maker.kimi_linear, kimi_layers([0], [1, 2]), "must list each layer from 1 to 3 once"),
    (maker.kimi_linear, kimi_layers(["2"], [1, 3]), "full_attn_layers"),
    (maker.kimi_linear, kimi_layers([2], {"1": 3}), "kda_layers"),
    (maker.kimi_linear, kimi_layers([2], [True, 3]), "kda_layers"),
    (maker.kimi_linear, {"linear_num_heads": 4}, "must be 3 to match"),
    (maker.kimi_linear, {"linear_attn_config": {"num_heads": 0}}, "linear_num_heads"),
    (maker.kimi_linear, {"linear_attn_config": {"head_dim": "5"}}, "linear_head_dim"),
    (maker.kimi_linear, {"qk_head_dim": 7}, "qk_head_dim"),
    (maker.kimi_linear, {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
    (maker.kimi_linear, {"mla_use_nope": False}, "mla_use_nope"),
    (maker.kimi_linear, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    (maker.kimi_linear, {"use_grouped_topk": False}, "use_grouped_topk"),
    (maker.kimi_linear, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    (maker.kimi_linear, {"num_key_value_heads": 2}, "num_kv_heads"),
    (maker.kimi_linear, {"num_shared_experts": "1"}, "num_shared_experts"),
    (maker.kimi_linear, {"hidden_act": "gelu"}, "hidden_act"),
    (maker.olmo_hybrid, {"layer_types": ["linear_attention", WHOLE]}, "layer_types"),
    (maker.olmo_hybrid, {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    (maker.olmo_hybrid, {"layer_types": [WHOLE] * 3}, "layer_types"),
    (maker.olmo_hybrid, {"layer_types": ["linear_attention", "mamba", WHOLE]}, "layer_types"),
    (maker.olmo_hybrid, {"layer_types": ["linear_attention", WHOLE, 1]}, "layer_types"),
    (maker.olmo_hybrid, {"layer_types": WHOLE}, "layer_types"),
    (maker.olmo_hybrid, {"linear_num_value_heads": 5}, "linear_num_value_heads"),
    (maker.olmo_hybrid, {"linear_num_key_heads": 0}, "linear_num_key_heads"),
    (maker.olmo_hybrid, {"linear_key_head_dim": "3"}, "linear_key_head_dim"),
    (maker.olmo_hybrid, {"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval"),
    (maker.olmo_hybrid, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
    (maker.olmo_hybrid, {"rope_parameters": [None]}, "rope_parameters"),
    (maker.olmo_hybrid, {"attention_bias": True}, "attention_bias"),
    (maker.olmo_hybrid, {"hidden_act": "gelu"}, "hidden_act"),
    (maker.qwen3_5, {"attn_output_gate": False}, "attn_output_gate"),
    (maker.qwen3_5, {"output_gate_type": "sigmoid"}, "output_gate_type"),
    (maker.qwen3_5, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
    (maker.qwen3_5, {"full_attention_interval": 3}, "mtp_num_hidden_layers"),
    (maker.qwen3_5, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    (maker.qwen3_5, {"attention_bias": True}, "attention_bias"),
    (maker.qwen3_5_moe, {"mlp_only_layers": [0]}, "mlp_only_layers"),
    (maker.qwen3_5_moe, {"norm_topk_prob": False}, "norm_topk_prob"),
    (maker.glm4_moe, {"n_shared_experts": None, "num_nextn_predict_layers": "1"}, "mtp_heads"),
    (maker.glm4_moe, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    (maker.minimax_m2, {"rotary_dim": 7}, "rotary_dim"),
    (maker.minimax_m2, {"rotary_dim": 3}, "rotary_dim"),
    (maker.minimax_m2, {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
    (maker.minimax_m2, {"scoring_func": "softmax"}, "scoring_func"),
    (maker.minimax_m2, {"use_routing_bias": False}, "use_routing_bias"),
    (maker.minimax_m2, {"use_qk_norm": False}, "use_qk_norm"),
    (maker.minimax_m2, {"qk_norm_type": "per_head"}, "qk_norm_type"),
    (maker.minimax_m2, {"shared_intermediate_size": 8}, "shared_intermediate_size"),
]


@pytest.mark.parametrize(("make", "changes", "key"), UNSUPPORTED)
def test_unsupported_variants_of_families_are_rejected(
    make: Any, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    config, _ = make()
    config_values(tmp_path / "x", config)
    with pytest.raises(ConfigError, match=key):
        config_values(tmp_path / "x", config | changes)


def test_kimi_k2_5_is_read_as_deepseek(tmp_path: Path) -> None:
    inner = PUBLISHED["kimi-k2-1t-a32b"]
    wanted = config_values(tmp_path / "x", inner)
    for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"):
        whole = {"architectures": [name], "model_type": "kimi_k25", "text_config": inner}
        assert config_values(tmp_path / "x", whole) == wanted


@pytest.mark.parametrize("share", [{"rotary_dim": 4}, {"partial_rotary_factor": 0.67}])
def test_minimax_rotary_dim_is_read_and_written(share: dict[str, Any], tmp_path: Path) -> None:
    config, _ = maker.minimax_m2()
    del config["rotary_dim"]
    found = config_values(tmp_path / "x", config | share)
    assert found["minimax_m2.rotary_dim"] == 4
    _, written = table_for(read_description(tmp_path / "x").config)
    assert written["rotary_dim"] == int(maker.HEAD * written["partial_rotary_factor"]) == 4


def test_mlp_layer_types_define_number_of_dense_layers(tmp_path: Path) -> None:
    types = {"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 56, "layer_types": [INDEXED] * 61}
    found = config_values(tmp_path / "x", PUBLISHED["deepseek-v3.2"] | types)
    assert found["deepseek_v32.num_dense_layers"] == 5
    table, written = table_for(read_description(tmp_path / "x").config)
    assert table.architecture == "DeepseekV32ForCausalLM"
    assert written["mlp_layer_types"] == types["mlp_layer_types"]
    assert written["first_k_dense_replace"] == 5


def test_contradictions_of_llama4_layer_lists_are_reported(tmp_path: Path) -> None:
    content = PUBLISHED["llama4-scout-109b-a17b"]
    changes = {"no_rope_layer_interval": 3, "interleave_moe_layer_step": 2}
    content = content | {"text_config": content["text_config"] | changes}
    assert config_values(tmp_path / "x", content)["llama4.no_rope_layer_interval"] == 4
    found = read_description(tmp_path / "x").differences
    assert len(found) == 2
    assert "no_rope_layer_interval = 3 differ: no_rope_layers is used" in found[1]
    assert "interleave_moe_layer_step = 2 differ: moe_layers is used" in found[0]


CHUNKED, INDEXED = "chunked_attention", "indexed_attention"
UNSUPPORTED_VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek-v3.2", {"layer_types": [WHOLE] * 61}, "layer_types"),
    ("deepseek-v3.2", {"layer_types": [INDEXED] * 60}, "layer_types"),
    (
        "deepseek-v3.2",
        {"mlp_layer_types": ["dense", "sparse"] * 30 + ["sparse"]},
        "mlp_layer_types",
    ),
    ("deepseek-v3.2", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("deepseek-v3.2", {"q_lora_rank": 0}, "q_lora_rank"),
    ("deepseek-v3.2", {"index_head_dim": 62}, "index_head_dim"),
    ("deepseek-v3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
    ("glm5-744b-a40b", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ("glm5-744b-a40b", {"indexer_types": ["full", "shared"] * 39}, "indexer_types"),
    ("glm5-744b-a40b", {"index_topk_freq": 4}, "index_topk_freq"),
    ("glm5-744b-a40b", {"index_topk_pattern": "FS" * 39}, "index_topk_pattern"),
    ("olmo3-7b", {"layer_types": [WHOLE] + [LOCAL] * 31}, "layer_types"),
    ("olmo3-7b", {"attention_bias": True}, "attention_bias"),
    ("olmo3-7b", {"sliding_window": 0}, "sliding_window"),
    ("smollm3-3b", {"no_rope_layers": [0, *[1] * 35]}, "no_rope_layers"),
    ("smollm3-3b", {"no_rope_layers": [1, 0] * 8}, "no_rope_layers"),
    ("smollm3-3b", {"no_rope_layers": "x"}, "no_rope_layers"),
    ("smollm3-3b", {"layer_types": [LOCAL] * 36}, "layer_types"),
    ("smollm3-3b", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ("ministral3-3b", {"sliding_window": 8}, "sliding_window"),
    ("ministral3-3b", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "scaling_beta"),
    ("ministral3-3b", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    ("ministral3-3b", {"model_type": "mistral"}, "text_config.model_type"),
    ("llama4-scout-109b-a17b", {"layer_types": [CHUNKED] * 48}, "layer_types"),
    ("llama4-scout-109b-a17b", {"moe_layers": [0, 2]}, "moe_layers"),
    ("llama4-scout-109b-a17b", {"moe_layers": []}, "moe_layers"),
    ("llama4-scout-109b-a17b", {"no_rope_layers": [0] + [1] * 47}, "no_rope_layers"),
    ("llama4-scout-109b-a17b", {"attn_temperature_tuning": 4}, "attn_temperature_tuning"),
    ("llama4-scout-109b-a17b", {"attention_bias": True}, "attention_bias"),
    ("llama4-scout-109b-a17b", {"hidden_act": "gelu"}, "hidden_act"),
]


@pytest.mark.parametrize(("name", "changes", "key"), UNSUPPORTED_VARIANTS)
def test_unsupported_variants_of_published_configs_are_rejected(
    name: str, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    content = PUBLISHED[name]
    inner = content.get("text_config", content) | changes
    content = content | ({"text_config": inner} if "text_config" in content else inner)
    with pytest.raises(ConfigError, match=key):
        config_values(tmp_path / "x", content)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"no_rope_layers": None, "layer_types": None}, {"no_rope_layer_interval": 4}),
        ({"no_rope_layers": [], "layer_types": None}, {"no_rope_layer_interval": 4}),
        ({"no_rope_layers": [1] * 48, "layer_types": None}, {"no_rope_layer_interval": 0}),
        ({"no_rope_layers": [1, 0] * 25, "layer_types": None}, {"no_rope_layer_interval": 2}),
        ({"moe_layers": None, "interleave_moe_layer_step": 3}, {"moe_layer_interval": 3}),
        ({"moe_layers": [3, 7, *range(11, 48, 4)]}, {"moe_layer_interval": 4}),
        ({"attn_temperature_tuning": False}, {"attn_scale": 0.0}),
        ({"attention_chunk_size": None, "layer_types": [WHOLE] * 48}, {"attention_chunk_size": 0}),
    ],
)
def test_llama4_layers_round_trip(
    changes: dict[str, Any], found: dict[str, Any], tmp_path: Path
) -> None:
    content = PUBLISHED["llama4-scout-109b-a17b"]
    content = content | {"text_config": content["text_config"] | changes}
    read = config_values(tmp_path / "x", content)
    for key, value in found.items():
        assert read[f"llama4.{key}"] == value
    table, written = table_for(read_description(tmp_path / "x").config)
    text = to_json(table, written, {}, "bfloat16", {})
    again = config_values(tmp_path / "x", json.loads(text))
    assert {key: again[key] for key in read if key.startswith("llama4.")} == {
        key: read[key] for key in read if key.startswith("llama4.")
    }


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"layer_types": None}, "attention_layers", []),
        ({"layer_types": ["linear_attention", "mamba", WHOLE]}, "attention_layers", [2]),
        ({"mamba_d_head": "auto"}, "mamba_head_dim", 5),
        ({"position_embedding_type": "rope"}, "rotary_positions", True),
        ({"num_experts_per_tok": None}, "top_k", 2),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, "num_experts", maker.EXPERTS),
    ],
)
def test_granite4_variants_round_trip(
    changes: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    read = config_values(tmp_path / "x", maker.granite4()[0] | changes)
    assert read[f"granite4.{key}"] == value
    table, written = table_for(read_description(tmp_path / "x").config)
    text = to_json(table, written, {}, "bfloat16", {})
    assert config_values(tmp_path / "x", json.loads(text)) == read


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "hybrid_override_pattern", "M*E-"),
        (
            {"layers_block_type": ["moe", "mamba", "mlp"], "num_hidden_layers": 3},
            "hybrid_override_pattern",
            "EM-",
        ),
        (
            {"layer_types": ["linear_attention", WHOLE], "num_hidden_layers": None},
            "hybrid_override_pattern",
            "M*",
        ),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern", "ME*-"),
        ({"time_step_min": 0.5}, "mamba_min_time_step", 0.5),
        ({"use_conv_bias": False}, "mamba_conv_bias", False),
    ],
)
def test_nemotron_h_variants_round_trip(
    changes: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    read = config_values(tmp_path / "x", maker.nemotron_h()[0] | changes)
    assert read[f"nemotron_h.{key}"] == value
    assert read["num_layers"] == len(read["nemotron_h.hybrid_override_pattern"])
    table, written = table_for(read_description(tmp_path / "x").config)
    text = to_json(table, written, {}, "bfloat16", {})
    assert config_values(tmp_path / "x", json.loads(text)) == read


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "attention_layers", [1]),
        (kimi_layers([1, 3], [2]), "attention_layers", [0, 2]),
        (kimi_layers([], [1, 2, 3]), "attention_layers", []),
        ({"layer_types": [WHOLE, "linear_attention", WHOLE]}, "attention_layers", [0, 2]),
        ({"linear_attn_config": None, "num_hidden_layers": 9}, "attention_layers", [4, 8]),
        ({"linear_attn_config": {"num_heads": 7}}, "linear_num_heads", 7),
        ({"linear_attn_config": {}, "linear_head_dim": 7}, "linear_head_dim", 7),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "num_dense_layers", 2),
        ({"num_local_experts": 99}, "num_experts", maker.EXPERTS),
        ({"num_experts_per_token": None, "num_experts_per_tok": 3}, "top_k", 3),
        ({"moe_renormalize": None, "norm_topk_prob": False}, "norm_topk_prob", False),
        ({"q_lora_rank": 5}, "q_lora_rank", 5),
    ],
)
def test_kimi_linear_variants_round_trip(
    changes: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    read = config_values(tmp_path / "x", maker.kimi_linear()[0] | changes)
    assert read[f"kimi_linear.{key}"] == value
    table, written = table_for(read_description(tmp_path / "x").config)
    text = to_json(table, written, {}, "bfloat16", {})
    assert config_values(tmp_path / "x", json.loads(text)) == read


def test_contradictions_of_kimi_linear_layer_lists_are_reported(tmp_path: Path) -> None:
    types = {"layer_types": [WHOLE, "linear_attention", WHOLE]}
    config_values(tmp_path / "x", maker.kimi_linear()[0] | types)
    (message,) = read_description(tmp_path / "x").differences
    assert "linear_attn_config.full_attn_layers = [2] differ: layer_types is used" in message


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "rotary_positions", False),
        ({"rope_theta": 500.0}, "rotary_positions", False),
        ({"rope_parameters": None}, "rotary_positions", True),
        ({"rope_parameters": None, "rope_theta": None}, "rotary_positions", False),
        ({"rope_parameters": {"rope_type": "default"}}, "rotary_positions", True),
        ({"rope_parameters": {}, "rope_theta": None}, "rotary_positions", False),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": None}, "rotary_positions", True),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_factor", 2.0),
        ({"layer_types": None}, "attention_layers", [2]),
        ({"layer_types": None, "num_hidden_layers": 9}, "attention_layers", [3, 7]),
        ({"layer_types": [WHOLE, "linear_attention", WHOLE]}, "attention_layers", [0, 2]),
        ({"linear_num_key_heads": None}, "linear_num_key_heads", maker.HEADS),
        ({"linear_num_value_heads": None}, "linear_num_value_heads", maker.HEADS),
        ({"linear_key_head_dim": None}, "linear_key_head_dim", 3),
        ({"linear_value_head_dim": None}, "linear_value_head_dim", 6),
        ({"linear_allow_neg_eigval": None}, "linear_allow_neg_eigval", True),
        ({"linear_allow_neg_eigval": False}, "linear_allow_neg_eigval", False),
    ],
)
def test_olmo_hybrid_variants_round_trip(
    changes: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    if changes.get("linear_num_key_heads", 0) is None:
        changes = changes | {"linear_num_value_heads": 2 * maker.HEADS}
    read = config_values(tmp_path / "x", maker.olmo_hybrid()[0] | changes)
    assert read[f"olmo_hybrid.{key}"] == value
    table, written = table_for(read_description(tmp_path / "x").config)
    text = to_json(table, written, {}, "bfloat16", {})
    assert config_values(tmp_path / "x", json.loads(text)) == read


def test_rope_parameters_without_effect_are_reported(tmp_path: Path) -> None:
    rope = {"rope_theta": None, "rope_type": "yarn", "factor": 4.0}
    config_values(tmp_path / "x", maker.olmo_hybrid()[0] | {"rope_parameters": rope})
    unknown = read_description(tmp_path / "x").unknown
    assert {"rope_parameters.rope_type", "rope_parameters.factor"} <= {*unknown}


@pytest.mark.parametrize("layers", [[], [0, 1, 2]])
def test_olmo_hybrid_with_one_layer_type_is_not_exported(layers: list[int], tmp_path: Path) -> None:
    config_values(tmp_path / "x", maker.olmo_hybrid()[0])
    config = read_description(tmp_path / "x").config
    own: Any = config.own
    with pytest.raises(ConfigError, match="must contain at least one layer, but not all layers"):
        table_for(replace(config, own=replace(own, attention_layers=layers)))


def test_nemotron_h_experts_without_shared_expert_are_not_exported(tmp_path: Path) -> None:
    config_values(tmp_path / "x", maker.nemotron_h()[0])
    config = read_description(tmp_path / "x").config
    with pytest.raises(ConfigError, match="d_shared_expert = 0"):
        table_for(replace(config, own=replace(config.own, d_shared_expert=0)))
    only_mlp = replace(config.own, d_shared_expert=0, hybrid_override_pattern="M*-")
    table, _ = table_for(replace(config, own=only_mlp))
    assert table.architecture == "NemotronHForCausalLM"


def test_granite4_width_that_transformers_lacks_is_not_exported(tmp_path: Path) -> None:
    config_values(tmp_path / "x", maker.granite4()[0])
    config = read_description(tmp_path / "x").config
    odd = replace(config, own=replace(config.own, mamba_head_dim=4))
    with pytest.raises(ConfigError, match="mamba_num_heads must be a multiple of model.d_model"):
        table_for(odd)


LINEAR = ["linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "period", "size"),
    [
        ({}, 4, 2),
        ({"full_attention_interval": 2, "partial_rotary_factor": 1.0}, 2, 8),
        ({"layer_types": LINEAR, "rope_parameters": {"partial_rotary_factor": 0.5}}, 3, 4),
        ({"layer_types": [*LINEAR[:2], LINEAR[0]], "partial_rotary_factor": 0.99}, 4, None),
    ],
)
def test_qwen3_next_layer_types_and_interval_are_equivalent(
    changes: dict[str, Any], period: int, size: int | None, tmp_path: Path
) -> None:
    config = {**maker.SIZES, "head_dim": 8, "architectures": ["Qwen3NextForCausalLM"], **changes}
    if size is None:
        with pytest.raises(ConfigError, match="even number of the 8 dims"):
            config_values(tmp_path / "x", config)
        return
    found = config_values(tmp_path / "x", config)
    assert (found["qwen3_next.full_attention_interval"], found["qwen3_next.rotary_dim"]) == (
        period,
        size,
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"architectures": None, "model_type": "x"}, "architectures"),
    "another architecture": ({"architectures": ["LLamaForCausalLM"]}, "LlamaForCausalLM?"),
    "two architectures": (
        {"architectures": ["LlamaForCausalLM"] * 2},
        "must be a list with one of",
    ),
    "architecture as a list": ({"architectures": [["x"]]}, "must be a list with one of"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "another scaling": ({"rope_scaling": {"type": "axial", "factor": 4}}, "'llama3'"),
    "a ramp that rises": (
        {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 17}},
        "rope_beta_slow",
    ),
    "layers that differ": ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    "few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2, 2, 2]}},
        "rope_short_factor",
    ),
    "factors that are texts": (
        {"rope_scaling": {"type": "longrope", "short_factor": "x", "long_factor": ["y"]}},
        "rope_short_factor",
    ),
    "a factor less than 1": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor"),
    "a factor of text": ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "must be a number"),
    "a length of text": (
        {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": "2", "mscale_all_dim": 1}},
        "rope_scaling",
    ),
    "scaling as a list": ({"rope_scaling": []}, "must be an object"),
    "scaling without factor": ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
    "YaRN without factor": (
        {"rope_scaling": {"rope_type": "yarn", "beta_fast": 8}},
        "rope_scaling.factor = null\n  is required with rope_type = 'yarn'",
    ),
    "no slow turns": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4}},
        "low_freq_factor = null\n  is required with rope_type = 'llama3'",
    ),
    "no fast turns": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}},
        "high_freq_factor = null\n  is required with rope_type = 'llama3'",
    ),
    "more in a scaling": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "a text as a size": ({"num_attention_heads": "4"}, "must be an integer"),
    "a list as a size": ({"hidden_size": [1]}, "must be an integer"),
    "true as a size": ({"num_hidden_layers": True}, "must be an integer"),
    "half a layer": ({"num_hidden_layers": 2.5}, "must be an integer"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, "num_heads"),
    "negative": ({"vocab_size": -5}, "vocab_size"),
    "many layers": ({"num_hidden_layers": 10**15}, "at most 10000"),
    "odd head": ({"head_dim": 7}, "head_dim"),
    "groups": ({"num_key_value_heads": 3}, "num_kv_heads"),
    "nothing": ({"rms_norm_eps": "1e-6\x1b"}, "must be a number"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_config_is_rejected(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, reason = BAD[name]
    config, tensors = maker.llama()
    folder = maker.write(tmp_path / "x", {**config, **changes}, tensors)
    assert main(["import", str(folder), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{folder / 'config.json'}") and reason in without_codes(error)
    assert len(error.splitlines()) >= 3 and "\x1b" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 9999, b"\xff", b'{"a": 1e999}', None])
def test_unreadable_config_json_is_rejected(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_description(tmp_path)


def test_gemma_layer_types_must_be_periodic(tmp_path: Path) -> None:
    local, whole = "sliding_attention", "full_attention"
    config, _ = maker.gemma3(layer_types=[local, whole, local])
    assert config_values(tmp_path / "x", config)["gemma3.sliding_window_pattern"] == 2
    for types in ([whole, local, local], [local, whole], "x", [local, "chunked", local]):
        with pytest.raises(ConfigError, match="layer_types"):
            config_values(tmp_path / "x", {**config, "layer_types": types})


def test_model_without_hugging_face_equivalent_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"moe.num_dense_layers = 1"):
        table_for(model("tiny-moe"))


def gemma4(**changes: Any) -> dict[str, Any]:
    return maker.gemma4(**changes)[0]


def test_gemma4_sizes_of_global_layers_are_read_from_both_formats(tmp_path: Path) -> None:
    """Current releases of transformers write the sizes of each layer instead of two keys."""
    found = config_values(tmp_path / "x", gemma4())
    keys = ("gemma4.global_head_dim", "gemma4.num_global_kv_heads")
    assert [found[key] for key in keys] == [8, 1]
    changed = {"head_dim": 8, "num_key_value_heads": 1}
    per_layer = {"1": changed, "2": changed}
    others = {"global_head_dim": None, "num_global_key_value_heads": None}
    padded = {f"0{number}": sizes for number, sizes in per_layer.items()}
    for layers in (per_layer, padded):
        assert config_values(tmp_path / "x", gemma4(per_layer_config=layers, **others)) == found
    wrong: list[Any] = [{"1": changed}, {**per_layer, "0": changed}, {"1": {"top_k": 1}}, "x"]
    for value in wrong:
        with pytest.raises(ConfigError, match="per_layer_config"):
            config_values(tmp_path / "x", gemma4(per_layer_config=value))
    # transformers ignores the number of heads unless keys are used as values.
    assert config_values(tmp_path / "x", gemma4(attention_k_eq_v=False))[keys[1]] == 0
    own = {name: found[f"gemma4.{name}"] for name in ("global_head_dim", "num_global_kv_heads")}
    section = {**{key: value for key, value in found.items() if "." not in key}, "gemma4": own}
    _, written = table_for(model_of(section, "test"))
    assert written["per_layer_config"] == {"2": changed}


def test_gemma4_layer_types_must_be_periodic(tmp_path: Path) -> None:
    local, whole = "sliding_attention", "full_attention"
    key = "gemma4.sliding_window_pattern"
    # transformers makes the last layer global.
    for types, interval in (([local, whole, local], 2), ([local, local, local], 3), (None, 6)):
        assert config_values(tmp_path / "x", gemma4(layer_types=types))[key] == interval
    for types in ([whole, local, whole], [local, whole], "x", [local, "chunked", local]):
        with pytest.raises(ConfigError, match="layer_types"):
            config_values(tmp_path / "x", gemma4(layer_types=types))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"num_experts": None}, "num_experts"),
        ({"top_k_experts": None}, "top_k_experts"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}},
            "rope_type",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}
                }
            },
            "partial_rotary_factor",
        ),
    ],
)
def test_unsupported_gemma4_values_are_rejected(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=key):
        config_values(tmp_path / "x", gemma4(**changes))


def gemma4_unified(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a small model with the format of Gemma 4 12B."""
    inner = {
        **{"model_type": "gemma4_unified_text", "num_hidden_layers": 6, "hidden_size": 48},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"intermediate_size": 96, "vocab_size": 300, "final_logit_softcapping": 30.0},
        **{"layer_types": [*["sliding_attention"] * 5, "full_attention"], **changes},
    }
    return {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "text_config": inner,
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "audio_config": {"model_type": "gemma4_unified_audio"},
    }


def test_gemma4_unified_language_model_is_read(tmp_path: Path) -> None:
    found = config_values(tmp_path / "x", gemma4_unified())
    own = {
        **{"sliding_window": 1024, "sliding_window_pattern": 6, "global_head_dim": 16},
        **{"num_global_kv_heads": 1, "global_rotary_dim": 4, "attention_k_eq_v": True},
        **{"num_experts": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    }
    assert {name: found[f"gemma4.{name}"] for name in own} == own
    assert found["tied_embeddings"] and found["vocab_size"] == 300
    only_text = gemma4_unified()["text_config"] | {"architectures": ["Gemma4UnifiedForCausalLM"]}
    assert config_values(tmp_path / "x", only_text) == found
    for changes in ({"enable_moe_block": True}, {"hidden_size_per_layer_input": 256}):
        (key,) = changes
        with pytest.raises(ConfigError, match=rf"{key} = .*\n.*must be null or "):
            config_values(tmp_path / "x", gemma4_unified(**changes))


def test_gemma4_layers_without_embeddings_share_keys_only_in_the_unified_class() -> None:
    """transformers 5.24 fails in shared layers of `Gemma4ForCausalLM` without embeddings."""
    known = {"family": "gemma4", "d_model": 48, "num_layers": 6, "num_heads": 4, "head_dim": 12}
    known |= {"num_kv_heads": 2, "d_mlp": 96, "vocab_size": 300, "tied_embeddings": True}

    def exported(**own: int) -> str:
        section = {**known, "gemma4": {"sliding_window_pattern": 3, "global_head_dim": 16, **own}}
        return table_for(model_of(section, "test"))[0].architecture

    assert exported() == "Gemma4ForCausalLM"
    assert exported(num_kv_shared_layers=3) == "Gemma4UnifiedForCausalLM"
    embeddings = {"hidden_size_per_layer_input": 6}
    assert exported(num_kv_shared_layers=3, **embeddings) == "Gemma4ForCausalLM"
    with pytest.raises(ConfigError, match="num_experts = 4"):
        exported(num_kv_shared_layers=3, num_experts=4)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "attention_pattern", "WSH"),
        ({"compress_ratios": None}, "attention_pattern", "H"),
        ({"compress_ratios": [0, 0, 0, 0]}, "attention_pattern", "W"),
        ({"compress_rates": None, "compress_rate_csa": 8}, "sparse_compress_rate", 8),
        ({}, "heavy_compress_rate", 128),
        ({"mlp_layer_types": ["hash_moe", "hash_moe", "moe"]}, "num_hash_layers", 2),
        ({"num_hash_layers": None}, "num_hash_layers", 3),
        ({"partial_rotary_factor": 0.7}, "qk_rope_head_dim", 4),
        ({"rope_scaling": _YARN_V4}, "rope_factor", 16),
        ({"rope_parameters": _YARN_V4 | {"rope_type": "yarn"}}, "rope_factor", 16),
        ({"rope_scaling": _YARN_V4}, "compress_rope_theta", 160000.0),
        ({"rope_theta": 7.0, "compress_rope_theta": 9.0}, "compress_rope_theta", 9.0),
    ],
)
def test_deepseek_v4_variants_round_trip(
    changes: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    content = maker.deepseek_v4(index_head_dim=6)[0] | changes
    read = config_values(tmp_path / "x", content)
    assert read[f"deepseek_v4.{key}"] == value
    assert read["rope_theta"] == changes.get("rope_theta", 10000.0)
    table, written = table_for(read_description(tmp_path / "x").config)
    assert table.architecture == "DeepseekV4ForCausalLM"
    text = to_json(table, written, {}, "bfloat16", {})
    assert config_values(tmp_path / "x", json.loads(text)) == read
