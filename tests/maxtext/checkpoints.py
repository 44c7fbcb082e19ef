"""MaxText checkpoints of small models, written with Orbax without any of the code under test.

The layout follows MaxText's `checkpoint_conversion/utils/param_mapping.py` (functions
`*_MAXTEXT_TO_HF_PARAM_MAPPING` and `*_HOOK_FN`), in the direction from Hugging Face to MaxText.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
WIDTH, HEADS, KV_HEADS, HEAD, MLP, VOCAB, EXPERTS = 10, 4, 2, 6, 14, 263, 3

# `name`: name of the MaxText model file. `layers`: decoder layers of the Hugging Face model.
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"name": "llama2-7b", "block": "llama2", "kind": "llama", "layers": 3},
    "llama3.1": {"name": "llama3.1-8b", "block": "llama2", "kind": "llama", "layers": 3},
    "mistral": {"name": "mistral-7b", "block": "mistral", "kind": "mistral", "layers": 2},
    "mixtral": {"name": "mixtral-8x7b", "block": "mixtral", "kind": "mixtral", "layers": 3},
    "qwen2": {"name": "qwen2.5-7b", "block": "qwen2", "kind": "qwen2", "layers": 2},
    "qwen3": {"name": "qwen3-0.6b", "block": "qwen3", "kind": "qwen3", "layers": 3},
    "qwen3_moe": {"name": "qwen3-30b-a3b", "block": "qwen3_moe", "kind": "qwen3_moe", "layers": 3},
    "gemma2": {"name": "gemma2-2b", "block": "gemma2", "kind": "gemma2", "layers": 4},
    "gemma3": {"name": "gemma3-4b", "block": "gemma3", "kind": "gemma3_text", "layers": 14},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_TIED = ("gemma2", "gemma3", "qwen3")
_LLAMA31 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def hugging_face(model: str) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and random tensors of the model's Hugging Face export."""
    kind, layers = MODELS[model]["kind"], MODELS[model]["layers"]
    config: dict[str, Any] = {
        **{"architectures": [_ARCHITECTURES[kind]], "model_type": kind, "hidden_size": WIDTH},
        **{"num_hidden_layers": layers, "num_attention_heads": HEADS, "head_dim": HEAD},
        **{"num_key_value_heads": KV_HEADS, "intermediate_size": MLP, "vocab_size": VOCAB},
        **{"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": model in _TIED},
        "max_position_embeddings": 65536 if model == "llama3.1" else 64,
    }
    if model == "llama3.1":
        config["rope_scaling"] = dict(_LLAMA31)
    if kind in ("mixtral", "qwen3_moe"):
        counts = ("num_local_experts" if kind == "mixtral" else "num_experts", EXPERTS)
        config |= dict([counts]) | {"num_experts_per_tok": 2, "moe_intermediate_size": MLP}
        config |= {"norm_topk_prob": True} if kind == "qwen3_moe" else {"sliding_window": None}
    if kind.startswith("gemma"):
        config |= {"sliding_window": 5, "query_pre_attn_scalar": HEAD}
    if kind == "gemma3_text":
        config |= {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
        config |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    if kind in ("qwen2", "mistral"):
        config |= {"sliding_window": None}
    return config, _tensors(model, layers)


def _tensors(model: str, layers: int) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    if model not in _TIED:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    inner: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    mlp = {"gate": (MLP, WIDTH), "up": (MLP, WIDTH), "down": (WIDTH, MLP)}
    if model == "mixtral":
        inner["block_sparse_moe.gate.weight"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            for name, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                inner[f"block_sparse_moe.experts.{expert}.{name}.weight"] = mlp[ours]
    elif model == "qwen3_moe":
        inner["mlp.gate.weight"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            for name, shape in mlp.items():
                inner[f"mlp.experts.{expert}.{name}_proj.weight"] = shape
    else:
        inner |= {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    if model.startswith("gemma"):
        for name in ("pre", "post"):
            inner[f"{name}_feedforward_layernorm.weight"] = (WIDTH,)
    if model in ("qwen3", "qwen3_moe", "gemma3"):
        inner |= {f"self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    if model == "qwen2":
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            inner[f"self_attn.{name}_proj.bias"] = (heads * HEAD,)
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inner.items()}
    return {
        name: (0.5 * np.random.default_rng([*name.encode()]).normal(size=shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def model_yml(model: str) -> str:
    """Return the text of the MaxText model file."""
    block, layers = MODELS[model]["block"], MODELS[model]["layers"]
    values: dict[str, Any] = {
        **{"decoder_block": block, "base_emb_dim": WIDTH, "base_num_query_heads": HEADS},
        **{"base_num_kv_heads": KV_HEADS, "head_dim": HEAD, "base_mlp_dim": MLP},
        **{"base_num_decoder_layers": layers // (2 if model == "gemma2" else 1)},
        **{"vocab_size": VOCAB, "normalization_layer_epsilon": "1.e-6"},
        **{"logits_via_embedding": str(model in _TIED).lower()},
    }
    if model in ("qwen2", "qwen3"):
        values["normalize_embedding_logits"] = "false"
    if model in ("mixtral", "qwen3_moe"):
        values |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "base_moe_mlp_dim": MLP}
    if model in ("qwen3", "qwen3_moe"):
        values["use_qk_norm"] = "true"
    if model == "qwen2":
        values["attention_bias"] = "true"
    if model.startswith("gemma"):
        values |= {"mlp_activations": '["gelu", "linear"]', "sliding_window_size": 5}
        values |= {"use_post_attn_norm": "true", "use_post_ffw_norm": "true"}
    if model == "gemma2":
        values |= {"attn_logits_soft_cap": 50.0, "final_logits_soft_cap": 30.0}
    if model == "gemma3":
        values |= {"local_rope_max_timescale": 10_000, "rope_linear_scaling_factor": 8.0}
    return "".join(f"{name}: {value}\n" for name, value in values.items())


def max_text(model: str, tensors: Tensors, *, scanned: bool) -> dict[str, Any]:
    """Return the parameters of MaxText as nested dicts, converted from Hugging Face tensors."""
    flat: Tensors = {
        "token_embedder.embedding": _embedding(model, tensors["model.embed_tokens.weight"]),
        "decoder.decoder_norm.scale": _norm(model, tensors["model.norm.weight"]),
    }
    if "lm_head.weight" in tensors:
        flat["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    layers = MODELS[model]["layers"]
    converted = [_layer(model, tensors, layer) for layer in range(layers)]
    flat |= {f"decoder.{name}": array for name, array in _groups(model, converted, scanned)}
    nested: dict[str, Any] = {}
    for name, array in flat.items():
        *outer, last = name.split(".")
        inner = nested
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[last] = np.ascontiguousarray(array)
    return nested


def _groups(model: str, layers: list[Tensors], scanned: bool) -> list[tuple[str, np.ndarray]]:
    """Return the arrays of all layers, stacked along axis 1 if `scanned`."""
    if model == "gemma2":  # one layer of MaxText has a local and a global part
        pairs = zip(layers[::2], layers[1::2], strict=True)
        layers = [
            {_with_side(name, "local"): array for name, array in local.items()}
            | {_with_side(name, "global"): array for name, array in full.items()}
            for local, full in pairs
        ]
    if not scanned:
        return [(f"layers_{n}.{k}", v) for n, each in enumerate(layers) for k, v in each.items()]
    blocks = {"layers": layers}
    found: list[tuple[str, np.ndarray]] = []
    if model == "gemma3":
        whole = len(layers) - len(layers) % 6
        blocks = {f"layers.layers_{n}": layers[n:whole:6] for n in range(6)}
        for n, each in enumerate(layers[whole:]):
            found += [(f"layers_remainder.layers_{n}.{k}", v) for k, v in each.items()]
    for block, members in blocks.items():
        for name in members[0]:
            stacked = np.stack([each[name] for each in members], axis=1)
            found.append((f"{block}.{name}", stacked))
    return found


def _with_side(name: str, side: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}_{side}.{rest}"


def _layer(model: str, tensors: Tensors, layer: int) -> Tensors:
    def take(name: str) -> np.ndarray:
        return tensors[f"model.layers.{layer}.{name}"]

    query = take("self_attn.q_proj.weight").T.reshape(WIDTH, HEADS, HEAD)
    key = take("self_attn.k_proj.weight").T.reshape(WIDTH, KV_HEADS, HEAD)
    if model == "llama3.1":
        query, key = _interleaved(query), _interleaved(key)
    if model in ("llama2", "llama3.1", "mistral", "mixtral", "gemma2"):
        query = query * np.float32(1 / np.sqrt(HEAD))
    found = {
        "self_attention.query.kernel": query,
        "self_attention.key.kernel": key,
        "self_attention.value.kernel": take("self_attn.v_proj.weight").T.reshape(
            WIDTH, KV_HEADS, HEAD
        ),
        "self_attention.out.kernel": take("self_attn.o_proj.weight").T.reshape(HEADS, HEAD, WIDTH),
    }
    if model in ("qwen3", "qwen3_moe", "gemma3"):
        for ours, name in (("query", "q"), ("key", "k")):
            scale = _norm(model, take(f"self_attn.{name}_norm.weight"))
            found[f"self_attention.{ours}_norm.scale"] = scale
    if model == "qwen2":
        for ours, name in (("query", "q"), ("key", "k"), ("value", "v")):
            bias = take(f"self_attn.{name}_proj.bias").reshape(-1, HEAD)
            found[f"self_attention.{ours}.bias"] = bias
    norms = {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
    }
    if model.startswith("gemma"):
        norms = {
            "pre_self_attention_norm": "input_layernorm",
            "post_self_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    for ours, name in norms.items():
        found[f"{ours}.scale"] = _norm(model, take(f"{name}.weight"))
    return found | _mlp(model, take)


def _mlp(model: str, take: Callable[[str], np.ndarray]) -> Tensors:
    if model == "mixtral":
        names = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}
        experts = {
            f"MoeBlock_0.{ours}": np.stack(
                [take(f"block_sparse_moe.experts.{n}.{name}.weight").T for n in range(EXPERTS)]
            )
            for ours, name in names.items()
        }
        return experts | {"MoeBlock_0.gate.kernel": take("block_sparse_moe.gate.weight").T}
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    if model == "qwen3_moe":
        experts = {
            f"moe_block.{ours}": np.stack(
                [take(f"mlp.experts.{n}.{name}.weight").T for n in range(EXPERTS)]
            )
            for ours, name in names.items()
        }
        return experts | {"moe_block.gate.kernel": take("mlp.gate.weight").T}
    return {f"mlp.{ours}.kernel": take(f"mlp.{name}.weight").T for ours, name in names.items()}


def _interleaved(array: np.ndarray) -> np.ndarray:
    """`adjust_rope` of MaxText: from two halves to adjacent pairs."""
    half = array.shape[-1] // 2
    return np.stack([array[..., :half], array[..., half:]], axis=-1).reshape(array.shape)


def _norm(model: str, weight: np.ndarray) -> np.ndarray:
    return weight + 1.0 if model.startswith("gemma") else weight


def _embedding(model: str, table: np.ndarray) -> np.ndarray:
    if model == "gemma2":
        return table * np.float32(WIDTH**0.5)
    if model == "gemma3":
        return (table * ml_dtypes.bfloat16(WIDTH**0.5)).astype(np.float32)
    return table


def write(folder: Path, params: dict[str, Any], *, state: bool = True, zarr3: bool = True) -> Path:
    """Write a checkpoint as MaxText does: with optimizer state at step 7, or only parameters."""
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {"params": {"params": params}}
    if not state:
        with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
            checkpointer.save(folder, tree)
        return folder
    tree |= {"step": np.int32(7), "opt_state": {"mu": {"params": params}, "count": np.int32(7)}}
    handlers = {"items": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=zarr3)}
    names = ("items",)
    with ocp.CheckpointManager(folder, item_names=names, item_handlers=handlers) as manager:
        manager.save(7, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
    return folder
