"""Values set twice in a config.json: the one that transformers uses is used and reported.

The `oracle` test compares the values in this table with those of transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from maxpipe.huggingface.config_json import read_description, values
from tests.huggingface.test_oracle import PYTHON, oracle_answers, reason

LOCAL, WHOLE = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """A config.json with a value in two places."""

    family: str
    content: dict[str, Any]
    used: str
    """Path of the value that takes precedence."""
    other: str
    theirs: str
    """Path of the value in transformers' config."""
    value: Any
    ours: str = ""
    """Key of the value below `model`; empty if no key depends on it."""
    own: Any = field(default=None)
    """Value of that key, if its representation differs."""


def in_both(*families: str) -> list[Case]:
    """Return the cases of families that support all rotary scaling types."""
    found = []
    for family in families:
        section = {"mixtral": "moe"}.get(family, family)
        found += [
            Case(
                family,
                {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
                "rope_parameters.rope_theta",
                "rope_theta",
                "rope_parameters.rope_theta",
                2e4,
                "rope_theta",
            ),
            Case(
                family,
                {"rope_theta": 5e5, "rope_scaling": LINEAR | {"factor": 2.0}},
                "rope_scaling.rope_theta",
                "rope_theta",
                "rope_parameters.rope_theta",
                1e4,
                "rope_theta",
            ),
            Case(
                family,
                {
                    "rope_scaling": LINEAR | {"factor": 2.0},
                    "rope_parameters": LINEAR | {"factor": 8.0},
                },
                "rope_scaling.factor",
                "rope_parameters.factor",
                "rope_parameters.factor",
                2.0,
                f"{section}.rope_factor",
            ),
            Case(
                family,
                {"rope_theta": 1e4, "rope_scaling": {**YARN, "type": "linear"}},
                "rope_scaling.rope_type",
                "rope_scaling.type",
                "rope_parameters.rope_type",
                "yarn",
                f"{section}.rope_type",
            ),
            Case(
                family,
                {
                    "rope_theta": 1e4,
                    "rope_scaling": YARN,
                    "original_max_position_embeddings": 64,
                    "max_position_embeddings": 256,
                },
                "original_max_position_embeddings",
                "rope_scaling.original_max_position_embeddings",
                "rope_parameters.original_max_position_embeddings",
                64,
                f"{section}.original_max_position_embeddings",
            ),
            Case(
                family,
                {"rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e4}},
                "rope_parameters.factor",
                "max_position_embeddings / original_max_position_embeddings",
                "rope_parameters.factor",
                2.0,
                f"{section}.rope_factor",
            ),
        ]
    return found


def experts(family: str, section: str, used: str, other: str) -> Case:
    """Return the case of a number of experts set under both of its names."""
    content = {used: 4, other: 8, "num_experts_per_tok": 2}
    return Case(family, content, used, other, used, 4, f"{section}.num_experts")


CASES = [
    *in_both("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *in_both("gemma2", "granite", "olmo2", "mixtral"),
    Case(
        "llama",
        {"dtype": "float16", "torch_dtype": "bfloat16"},
        "dtype",
        "torch_dtype",
        "dtype",
        "float16",
    ),
    experts("mixtral", "moe", "num_experts", "num_local_experts"),
    experts("qwen3_moe", "qwen3_moe", "num_local_experts", "num_experts"),
    experts("gpt_oss", "gpt_oss", "num_experts", "num_local_experts"),
    Case(
        "gpt_oss",
        {"num_experts_per_tok": 2, "experts_per_token": 3},
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_tok",
        2,
        "gpt_oss.top_k",
    ),
    Case(
        "gemma2",
        {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "silu"},
        "hidden_activation",
        "hidden_act",
        "hidden_activation",
        "gelu_pytorch_tanh",
    ),
    Case(
        "gemma3_text",
        {"layer_types": [LOCAL, WHOLE] * 2, "sliding_window_pattern": 3},
        "layer_types",
        "sliding_window_pattern",
        "layer_types",
        [LOCAL, WHOLE] * 2,
        "gemma3.sliding_window_pattern",
        2,
    ),
    Case(
        "gemma3_text",
        {
            "rope_local_base_freq": 5e3,
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 7e3},
                WHOLE: {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        f"rope_parameters.{LOCAL}.rope_theta",
        "rope_local_base_freq",
        f"rope_parameters.{LOCAL}.rope_theta",
        7e3,
        "gemma3.local_rope_theta",
    ),
    Case(
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
        "rope_parameters.partial_rotary_factor",
        "partial_rotary_factor",
        "rope_parameters.partial_rotary_factor",
        0.75,
        "phi3.rope_size",
        6,
    ),
]
NAMES = [f"{each.family}: {each.used}, {each.other}" for each in CASES]


def config(case: Case) -> dict[str, Any]:
    return {**SIZES, "model_type": case.family, **case.content}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_conflicting_values_resolve_as_in_transformers_and_are_reported(
    case: Case, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(case)))
    found = read_description(tmp_path)
    if case.ours:
        wanted = case.value if case.own is None else case.own
        assert values(found.config)[case.ours] == wanted
    named = [
        line for line in found.differences if case.used in line and f"and {case.other} = " in line
    ]
    assert len(named) == 1 and f"{case.used} is used, as in transformers" in named[0]


@pytest.mark.parametrize("family", sorted({each.family for each in CASES}))
def test_equal_duplicate_values_are_not_reported(family: str, tmp_path: Path) -> None:
    local = {"rope_type": "default", "rope_theta": 1e4}
    content: dict[str, Any] = {"dtype": "float32", "torch_dtype": "float32", "rope_theta": 1e4}
    content["rope_parameters"] = {LOCAL: local, WHOLE: local} if "gemma3" in family else local
    if "gemma3" in family:
        content |= {"layer_types": [LOCAL, WHOLE] * 2, "sliding_window_pattern": 2}
    whole = {**SIZES, "model_type": family, **content}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_description(tmp_path).differences == ()


@pytest.mark.oracle
def test_transformers_uses_same_values(tmp_path: Path) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    jobs = [{"config": config(case), "path": case.theirs.split(".")} for case in CASES]
    found = dict(zip(NAMES, oracle_answers("statements_oracle.py", jobs, tmp_path), strict=True))
    assert found == {name: case.value for name, case in zip(NAMES, CASES, strict=True)}
