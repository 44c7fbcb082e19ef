"""Rotary frequencies of a config.json equal those of transformers.

The results of transformers are in a golden file, which the `oracle` test verifies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.huggingface.config_json import read_description
from maxpipe.models.registry import FAMILIES
from maxpipe.nn.attention_layer import rotary_frequencies, rotary_length
from maxpipe.nn.module import LayerContext
from tests.huggingface.test_oracle import PYTHON, oracle_answers, reason

ANSWERS = Path(__file__).parents[1] / "golden" / "rotary_frequencies.json"
LENGTHS = [24, 3000]
ALL = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
TYPES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"), ALL),
    **dict.fromkeys(("gemma2", "granite", "olmo2", "mixtral", "smollm3", "llama4_text"), ALL),
    "granitemoehybrid": ALL,
    "olmo3": ("default", "linear", "yarn"),
    "ministral3": ("yarn", "llama3"),
    "gemma3_text": ("default", "linear"),
    "gemma4_text": ("default", "proportional"),
    "phi3": ("default", "longrope"),
    "gpt_oss": ("default", "yarn"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "glm4_moe", "minimax_m2"), ("default", "yarn")),
    "deepseek_v3": ("default", "yarn"),
}
"""Types of scaling by `model_type`."""
BY_LAYER_TYPE = ("gemma3_text", "gemma4_text", "olmo3")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "gemma4_text": {
        "sliding_window": 8,
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {"sliding_window": 8},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["mamba", "attention"] * 3,
        "mamba_n_heads": 4,
        "num_local_experts": 0,
    },
    "olmo3": {"num_hidden_layers": 8, "sliding_window": 8},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 4},
    "phi3": {"pad_token_id": 0},
    "qwen3": {"head_dim": 24},
    "llama": {"head_dim": 24},
    "qwen3_next": {"head_dim": 32},
    "qwen3_5_text": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32},
    "minimax_m2": {"head_dim": 32},
    "deepseek_v3": {
        "head_dim": 16,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "kv_lora_rank": 12,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}


def num_rotary_dims(config: dict[str, Any]) -> int:
    """Return the number of rotary dims of a head."""
    whole = config.get("qk_rope_head_dim") or config.get("head_dim") or 16
    return int(whole * config.get("partial_rotary_factor", 1))


def scaling(kind: str, family: str, config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Draw the parameters of one scaling type, with a random choice of optional ones."""

    def maybe(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if draw.random() < 0.5}

    rope: dict[str, Any] = {"rope_type": kind}
    original = {"original_max_position_embeddings": draw.choice((64, 512, 2048))}
    factor = {"factor": draw.choice((2.0, 4, 7.5, 32.0))}
    is_generic = TYPES[family] is ALL
    if kind == "default":
        rope |= {} if family in BY_LAYER_TYPE else maybe(mrope_section=[2, 3, 3])
    if kind == "proportional":
        rope |= maybe(**factor) | maybe(partial_rotary_factor=draw.choice((0.25, 0.3, 1.0)))
    if kind in ("linear", "dynamic"):
        rope |= factor | maybe(finetuned=True)
        if kind == "dynamic":
            rope |= maybe(original_max_position_embeddings=77)
    if kind == "yarn":
        rope |= original | factor
        if is_generic:
            rope |= maybe(beta_fast=draw.choice((16, 40.0)), beta_slow=draw.choice((2, 1.5)))
            rope |= maybe(attention_factor=1.375, truncate=False, finetuned=True)
        if family == "deepseek_v3":
            rope |= maybe(beta_fast=draw.choice((1.0, 8)), beta_slow=1.0)
        if is_generic or family == "deepseek_v3":
            rope |= draw.choice(({}, {"mscale": 0.707, "mscale_all_dim": 1.25}, {"mscale": 0.9}))
        if family == "gpt_oss":
            rope["truncate"] = False
        if is_generic and draw.random() < 0.3:
            rope["factor"] = None
    if kind == "llama3":
        rope |= original | factor | {"low_freq_factor": draw.choice((1.0, 1.5))}
        rope["high_freq_factor"] = draw.choice((4.0, 8))
    if kind == "longrope":
        pairs = num_rotary_dims(config) // 2
        for name in ("short_factor", "long_factor"):
            rope[name] = [round(draw.uniform(1, 9), 3) for _ in range(pairs)]
        rope |= maybe(attention_factor=1.19) if is_generic else {}
        rope |= maybe(**factor)
        rope |= original
    return rope


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the config.json of each case."""
    for family, kinds in TYPES.items():
        for kind in kinds:
            count = (2 if family == "llama" else 1) * (2 if kind in ("yarn", "longrope") else 1)
            for number in range(count):
                draw = random.Random(f"{family} {kind} {number}")
                yield f"{family} {kind} {number}", config_of(family, kind, draw)


def config_of(family: str, kind: str, draw: random.Random) -> dict[str, Any]:
    config = {**SIZES, **OWN.get(family, {}), "model_type": family}
    config["max_position_embeddings"] = draw.choice((2048, 4096, 8192))
    if family in ("phi3", "qwen3_next", "qwen3_5_text", "glm4_moe", "minimax_m2"):
        config["partial_rotary_factor"] = draw.choice((0.5, 0.75))
    rope = scaling(kind, family, config, draw)
    theta = draw.choice((10000.0, 5e5, 1e6))
    if family == "ministral3":
        rope["llama_4_scaling_beta"] = 0.1
    if family in BY_LAYER_TYPE:
        local = {"rope_type": "default", "rope_theta": 1e4}
        of_all = {**rope, "rope_theta": theta}
        config["rope_parameters"] = {"full_attention": of_all, "sliding_attention": local}
        del config["rope_theta"]
    elif draw.random() < 0.5:
        config |= {"rope_theta": theta, "rope_scaling": rope}
        if draw.random() < 0.5:
            rope["type"] = rope.pop("rope_type")
    else:
        del config["rope_theta"]
        config["rope_parameters"] = {**rope, "rope_theta": theta}
    if kind == "longrope" and draw.random() < 0.5:
        config["original_max_position_embeddings"] = draw.choice((64, 512))
    return config


CONFIGS = dict(configs())


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Results of transformers by config name."""
    return json.loads(ANSWERS.read_text())


@pytest.mark.parametrize("family", TYPES)
def test_rotary_frequencies_equal_golden_transformers_values(
    family: str, answers: dict[str, Any], tmp_path: Path
) -> None:
    for name in (each for each in CONFIGS if each.split()[0] == family):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        config = read_description(tmp_path).config
        model = FAMILIES[config.family].describe(config)
        parts: list[tuple[int, Any]] = [
            (number, branch.part)
            for number, kind in enumerate(model.layers)
            for branch in model.layer_types[kind].branches
            if hasattr(branch.part, "rope")
        ]
        layer, part = parts[-1]
        size = getattr(part, "rope_size", part.head_dim)
        for length, wanted in zip(LENGTHS, answers[name], strict=True):
            inputs = {"positions": jnp.zeros((1, length), jnp.int32)}
            context = LayerContext(inputs, jnp.asarray(layer), model.values)
            found = np.asarray(rotary_frequencies(part.rope, size, context))
            np.testing.assert_allclose(found, wanted["frequencies"], 1e-5, err_msg=name)
            assert rotary_length(part.rope, context) == pytest.approx(wanted["factor"], 1e-6), name


@pytest.mark.oracle
def test_golden_values_equal_transformers(tmp_path: Path, update_golden: bool) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    jobs = [{"config": each, "lengths": LENGTHS} for each in CONFIGS.values()]
    found = dict(zip(CONFIGS, oracle_answers("rotary_oracle.py", jobs, tmp_path), strict=True))
    if update_golden:
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
        ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert json.loads(ANSWERS.read_text()) == found
