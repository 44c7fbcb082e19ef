"""Small models for decoding tests, and helpers that decode their prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxpipe.generation.completions import DecodeEngineProtocol
from maxpipe.generation.decoding import DecodeEngine, DecodeShape, Sampling, is_axes, padded_length
from maxpipe.models.config import ModelConfig
from maxpipe.models.deepseek import DeepseekConfig
from maxpipe.models.falcon_h1 import FalconH1Config
from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.models.gemma4 import Gemma4Config
from maxpipe.models.granite4 import Granite4Config
from maxpipe.models.kimi_linear import KimiLinearConfig
from maxpipe.models.llama4 import Llama4Config
from maxpipe.models.moe import MoeConfig
from maxpipe.models.nemotron_h import NemotronHConfig
from maxpipe.models.olmo_hybrid import OlmoHybridConfig
from maxpipe.models.qwen3_next import Qwen3NextConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MESH_AXES, MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules

LLAMA = ModelConfig(
    num_layers=3,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_mlp=24,
    vocab_size=40,
    compute_dtype="float32",
)
GEMMA = dataclasses.replace(
    LLAMA,
    family="gemma3",
    tied_embeddings=True,
    own=Gemma3Config(sliding_window=5, sliding_window_pattern=2),
)
GEMMA4 = dataclasses.replace(
    GEMMA,
    family="gemma4",
    own=Gemma4Config(
        sliding_window=5,
        sliding_window_pattern=2,
        global_head_dim=8,
        global_rotary_dim=4,
        attention_k_eq_v=True,
        num_experts=3,
        d_expert=12,
    ),
)
GEMMA4_SMALL = dataclasses.replace(
    GEMMA4,
    num_layers=5,
    own=Gemma4Config(
        sliding_window=5,
        sliding_window_pattern=2,
        global_head_dim=8,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=6,
    ),
)
MOE = dataclasses.replace(
    LLAMA, family="moe", own=MoeConfig(num_dense_layers=1, num_experts=3, top_k=2, d_expert=12)
)
LLAMA4 = dataclasses.replace(
    LLAMA,
    family="llama4",
    own=Llama4Config(
        num_experts=3,
        d_expert=12,
        moe_layer_interval=2,
        no_rope_layer_interval=3,
        attention_chunk_size=5,
        floor_scale=4,
    ),
)
DEEPSEEK = dataclasses.replace(
    LLAMA,
    family="deepseek",
    num_kv_heads=4,
    own=DeepseekConfig(
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        v_head_dim=6,
        num_experts=4,
        d_expert=12,
        score_func="sigmoid",
    ),
)
NEXT = dataclasses.replace(
    LLAMA,
    family="qwen3_next",
    own=Qwen3NextConfig(
        num_experts=3,
        d_expert=12,
        d_shared_expert=10,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=5,
        linear_value_head_dim=3,
        gdn_chunk_size=4,
        full_attention_interval=2,
        rotary_dim=2,
    ),
)
GRANITE4 = dataclasses.replace(
    LLAMA,
    family="granite4",
    own=Granite4Config(
        attention_layers=[1],
        num_experts=3,
        d_expert=12,
        mamba_num_heads=4,
        mamba_head_dim=3,
        mamba_num_groups=1,
        mamba_state_dim=5,
        mamba_chunk_size=4,
    ),
)
NEMOTRON = dataclasses.replace(
    LLAMA,
    num_layers=4,
    family="nemotron_h",
    own=NemotronHConfig(
        hybrid_override_pattern="ME*-",
        num_experts=3,
        d_expert=12,
        d_shared_expert=10,
        score_func="sigmoid",
        mamba_num_heads=6,
        mamba_head_dim=3,
        mamba_num_groups=2,
        mamba_state_dim=5,
        mamba_chunk_size=4,
    ),
)
FALCON = dataclasses.replace(
    LLAMA,
    family="falcon_h1",
    own=FalconH1Config(
        key_multiplier=1.7,
        attention_in_multiplier=1.3,
        ssm_multipliers=[0.4, 0.7, 1.3, 0.5, 1.6],
        mlp_multipliers=[0.6, 1.4],
        mamba_num_heads=4,
        mamba_head_dim=3,
        mamba_num_groups=1,
        mamba_state_dim=5,
        mamba_chunk_size=4,
    ),
)
KIMI = dataclasses.replace(
    LLAMA,
    num_layers=4,
    num_kv_heads=4,
    family="kimi_linear",
    own=KimiLinearConfig(
        attention_layers=[1, 3],
        linear_num_heads=4,
        linear_head_dim=6,
        kda_chunk_size=4,
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        v_head_dim=6,
        num_experts=4,
        d_expert=12,
        score_func="sigmoid",
    ),
)
OLMO_HYBRID = dataclasses.replace(
    LLAMA,
    num_layers=4,
    family="olmo_hybrid",
    own=OlmoHybridConfig(
        attention_layers=[1, 3],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=5,
        linear_value_head_dim=3,
        gdn_chunk_size=4,
    ),
)
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.3, top_k=17, top_p=0.9, repetition_penalty=1.2)
GENERATOR = np.random.default_rng(11)
PROMPTS = [GENERATOR.integers(0, 40, size).tolist() for size in (3, 21, 1, 9, 14)]
MORE = 7
ONE_DEVICE = MeshConfig()


_PARAMS: dict[str, Any] = {}


def params_of(model: ModelConfig) -> Any:
    """Return a model's parameters, initialized once and independent of the mesh."""
    name = repr(model)
    if name not in _PARAMS:
        decoder = Decoder(model, AxisRules.from_config(ONE_DEVICE))
        _PARAMS[name] = jax.device_get(jax.jit(decoder.init)(jax.random.key(2)))
    return _PARAMS[name]


def decoding_of(
    model: ModelConfig,
    sampling: Sampling = GREEDY,
    mesh: MeshConfig = ONE_DEVICE,
) -> tuple[DecodeEngine, Any]:
    """Return a decode engine on the first devices and its sharded parameters."""
    decoder = Decoder(model, AxisRules.from_config(mesh))
    count = math.prod(getattr(mesh, f"ici_{axis}") for axis in MESH_AXES)
    grid = build_mesh(mesh, jax.devices()[:count])
    params = params_of(model)
    spec, axes = decoder.rules.spec, decoder.axes()
    layers = axes["layers"]
    specs = jax.tree.map(spec, axes, is_leaf=is_axes)
    specs |= {"layers": jax.tree.map(lambda each: spec((None, *each)), layers, is_leaf=is_axes)}
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(grid, spec)),
        params,
        specs,
    )
    return DecodeEngine(decoder, grid, sampling, seed=5), placed


def generate_tokens(
    decoding: DecodeEngineProtocol,
    params: Any,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return generated tokens and their log-probabilities `[rows, tokens]`."""
    shards = decoding.batch_multiple
    rows = -(-len(prompts) // shards) * shards
    size = DecodeShape(rows, padded_length(max(map(len, prompts))), MORE)
    steps = list(decoding.run(params, prompts, numbers, size))
    assert len(steps) == MORE
    tokens, logprobs = (np.stack(each, axis=1)[: len(prompts)] for each in zip(*steps, strict=True))
    return tokens, logprobs
