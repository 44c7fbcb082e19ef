"""Folders with quantized weights, and the same folders with dequantized weights.

Codes and scales are random. The dequantized values are computed from the definitions of the
formats, without any of the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxpipe.huggingface.config_json import read_description
from maxpipe.huggingface.mapping import map_tensors
from maxpipe.models.registry import describe
from tests.huggingface import maker

BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)

SIZES: dict[str, Any] = {
    **{"num_hidden_layers": 2, "hidden_size": 136, "intermediate_size": 264, "vocab_size": 263},
    **{"max_position_embeddings": 64, "eos_token_id": 7, "dtype": "bfloat16"},
}
DEEPSEEK = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **SIZES},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 60},
    **{"qk_rope_head_dim": 10, "v_head_dim": 67, "kv_lora_rank": 134, "q_lora_rank": 130},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 140, "num_nextn_predict_layers": 1},
}
"""Sizes that are not multiples of 128, so that most matrices have incomplete blocks."""

HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 50}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(kind: str, ignore: list[str], **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a folder written by compressed-tensors."""
    weights = {"symmetric": True, "dynamic": False, "actorder": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        **{"quant_method": "compressed-tensors", "format": kind, "config_groups": groups},
        **{"ignore": ignore, "quantization_status": "compressed", "kv_cache_scheme": None},
    }


class Case(NamedTuple):
    """A quantized model: config.json, names of its quantized tensors, and their format."""

    config: dict[str, Any]
    is_quantized: Callable[[str], bool]
    draw: Callable[[str, tuple[int, ...]], tuple[maker.Tensors, np.ndarray]]
    file_name: Callable[[str], str] = str
    """Returns the name in the quantized folder of a tensor."""


def _is_linear(name: str) -> bool:
    others = ("norm", "embed_tokens", "head", "mlp.gate.", "eh_proj", "bias")
    return not any(each in name for each in others)


def _random(name: str) -> np.random.Generator:
    return np.random.default_rng([*name.encode()])


def _fp8_codes(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = draw.integers(0, 254, shape, np.uint8)
    return (codes + (codes >= 127)).view(ml_dtypes.float8_e4m3fn)  # all codes but NaN


def fp8(
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int] = (128, 128),
    dtype: Any = np.float32,
    suffix: str = "_scale_inv",
) -> tuple[maker.Tensors, np.ndarray]:
    """Return FP8 codes with a scale per block, and the dequantized matrix."""
    draw, (rows, columns) = _random(name), shape
    codes = _fp8_codes(draw, shape)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = (draw.uniform(1, 2, grid) * 2.0 ** draw.integers(-13, -9, grid)).astype(dtype)
    spread = np.kron(scales.astype(np.float32), np.ones(block, np.float32))[:rows, :columns]
    return {name: codes, name + suffix: scales}, (codes.astype(np.float32) * spread).astype(BF16)


def powers(name: str, shape: tuple[int, ...]) -> tuple[maker.Tensors, np.ndarray]:
    """Return FP8 codes with scales that are powers of two, stored in 8 bits (ue8m0)."""
    tensors, _ = fp8(name, shape)
    scales = tensors[f"{name}_scale_inv"].astype(ml_dtypes.float8_e8m0fnu)
    tensors[f"{name}_scale_inv"] = scales
    spread = np.kron(scales.astype(np.float32), np.ones((128, 128), np.float32))
    values = tensors[name].astype(np.float32) * spread[: shape[0], : shape[1]]
    return tensors, values.astype(BF16)


def deepseek_v4(name: str, shape: tuple[int, ...]) -> tuple[maker.Tensors, np.ndarray]:
    """Return float4 codes of experts or FP8 codes of other matrices, and the matrix."""
    stem = name.removesuffix(".weight")
    if ".experts." not in name:
        tensors, values = powers(name, shape)
        return {name: tensors[name], f"{stem}.scale": tensors[f"{name}_scale_inv"]}, values
    draw, (rows, columns) = _random(name), shape
    codes = draw.integers(0, 16, (rows, columns), np.uint8)
    scales = draw.integers(116, 124, (rows, columns // 32), np.uint8)
    values = np.array(E2M1)[codes] * np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return {name: packed, f"{stem}.scale": scales}, values.astype(BF16)


def deepseek_v4_file_name(name: str) -> str:
    """Return the published name of a tensor of DeepSeek-V4."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    return name.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")


def mxfp4(name: str, shape: tuple[int, ...]) -> tuple[maker.Tensors, np.ndarray]:
    """Return 4-bit codes in blocks of 32 inputs, and the dequantized experts `[E, in, out]`."""
    draw, (experts, inputs, outputs) = _random(name), shape
    codes = draw.integers(0, 16, (experts, outputs, inputs // 32, 32), np.uint8)
    scales = draw.integers(116, 124, codes.shape[:3], np.uint8)
    values = np.array(E2M1, np.float64)[codes] * 2.0 ** (scales.astype(float) - 127)[..., None]
    values = values.reshape(experts, outputs, inputs).swapaxes(1, 2)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, values.astype(BF16)


def int4(
    name: str, shape: tuple[int, ...], group: int = 0, dtype: Any = BF16
) -> tuple[maker.Tensors, np.ndarray]:
    """Return packed 4-bit codes with a scale per group of inputs (0: per row), and the matrix."""
    draw, (rows, columns) = _random(name), shape
    codes = draw.integers(-8, 8, shape)
    scales = draw.uniform(0.004, 0.03, (rows, -(-columns // (group or columns)))).astype(dtype)
    spread = np.repeat(scales.astype(np.float32), group or columns, 1)[:, :columns]
    values = (codes * spread).astype(np.float32).astype(dtype).astype(np.float32)
    padded = np.zeros((rows, -(-columns // 8) * 8), np.int64)
    padded[:, :columns] = codes + 8
    words = padded.reshape(rows, -1, 8) << 4 * np.arange(8)
    packed = words.sum(-1).astype(np.uint32).view(np.int32)
    tensors = {f"{name}_packed": packed, f"{name}_scale": scales}
    return tensors | {f"{name}_shape": np.array(shape, np.int64)}, values.astype(BF16)


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name


_DEEPSEEK_V4_LINEAR = (
    *("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b"),
    *("w1", "w2", "w3"),
)

CASES: dict[str, Case] = {
    "deepseek": Case(
        {**DEEPSEEK, "quantization_config": {**FP8, "weight_block_size": [128, 128]}},
        _is_linear,
        fp8,
    ),
    "deepseek v3.1": Case(
        {
            **DEEPSEEK,
            "quantization_config": {
                **FP8,
                "weight_block_size": [128, 128],
                "scale_fmt": "ue8m0",
            },
        },
        _is_linear,
        powers,
    ),
    "deepseek v4": Case(
        {
            **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **SIZES},
            **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1},
            **{"head_dim": 36, "qk_rope_head_dim": 10, "q_lora_rank": 130, "o_groups": 2},
            **{"o_lora_rank": 66, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1},
            **{"n_routed_experts": 3, "num_experts_per_tok": 2, "hidden_size": 160},
            **{"moe_intermediate_size": 96, "index_n_heads": 2, "index_head_dim": 12},
            **{"index_topk": 2, "hc_mult": 2, "expert_dtype": "fp4"},
            "quantization_config": {
                **FP8,
                "weight_block_size": [128, 128],
                "scale_fmt": "ue8m0",
            },
        },
        lambda name: any(f".{part}." in name for part in _DEEPSEEK_V4_LINEAR),
        deepseek_v4,
        deepseek_v4_file_name,
    ),
    "qwen3": Case(
        {
            **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES, **HEADS},
            "quantization_config": {
                **FP8,
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
            },
        },
        lambda name: _is_linear(name) and "layers.0.mlp.down" not in name,
        lambda name, shape: fp8(name, shape, dtype=BF16),
    ),
    "gpt-oss": Case(
        {
            **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **SIZES, **HEADS},
            **{"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 96},
            **{"intermediate_size": 64, "sliding_window": 5},
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            },
        },
        lambda name: name.endswith("_proj"),
        mxfp4,
    ),
    "kimi": Case(
        {
            **DEEPSEEK,
            **{"model_type": "kimi_k2", "num_nextn_predict_layers": 0},
            **{"hidden_size": 160, "moe_intermediate_size": 96},
            "quantization_config": compressed(
                "pack-quantized",
                ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.up_proj.*"],
                **{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            ),
        },
        _is_expert,
        lambda name, shape: int4(name, shape, 32),
    ),
    "int4 rows": Case(
        {
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, **HEADS},
            "intermediate_size": 61,
            "quantization_config": compressed(
                "pack-quantized", ["lm_head"], num_bits=4, type="int", strategy="channel"
            ),
        },
        _is_linear,
        lambda name, shape: int4(name, shape, dtype=np.float16),
    ),
    "fp8 rows": Case(
        {
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, **HEADS},
            "quantization_config": compressed(
                "float-quantized", ["lm_head"], num_bits=8, type="float", strategy="channel"
            ),
        },
        _is_linear,
        lambda name, shape: fp8(name, shape, (1, shape[1]), BF16, "_scale"),
    ),
}


class Folders(NamedTuple):
    """A quantized folder and its dequantized copy."""

    config: dict[str, Any]
    tensors: maker.Tensors
    plain: maker.Tensors
    """Dequantized tensors."""
    quantized: Path
    dequantized: Path


def write(base: Path, name: str, **changes: Any) -> Folders:
    """Write the folders of a case to `quantized` and `dequantized`.

    `changes` replace keys of config.json.
    """
    case = CASES[name]
    full = {**case.config, **changes}
    config = {key: each for key, each in full.items() if key != "quantization_config"}
    (base / "config").mkdir(parents=True)
    (base / "config" / "config.json").write_text(json.dumps(config))
    said = read_description(base / "config")
    tensors: maker.Tensors = {}
    plain: maker.Tensors = {}
    for tensor, shape in map_tensors(describe(said.config), said.table).tensors.items():
        if case.is_quantized(tensor):
            more, plain[tensor] = case.draw(tensor, shape)
            tensors |= {case.file_name(each): array for each, array in more.items()}
        elif tensor.endswith("tid2eid"):
            values = np.arange(shape[0])[:, None] + np.arange(shape[1])
            plain[tensor] = values % full["n_routed_experts"]
            tensors[case.file_name(tensor)] = plain[tensor]
        else:
            scale = 1.0 if "norm" in tensor else 0.1
            values = _random(tensor).normal(scale=scale, size=shape)
            plain[tensor] = values.astype(np.float32 if "e_score" in tensor else BF16)
            tensors[case.file_name(tensor)] = plain[tensor]
    copies = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    }
    for tensor in plain:
        for copy, original in copies.items():
            if ".layers." in tensor and tensor.endswith(copy):
                plain[tensor] = tensors[tensor] = plain[original]
    quantized = maker.write(base / "quantized", full, tensors, files=3)
    dequantized = maker.write(base / "dequantized", config, plain, files=2)
    return Folders(full, tensors, plain, quantized, dequantized)
