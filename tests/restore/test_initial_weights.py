"""Comparison of the model sections of a checkpoint and of a config."""

from __future__ import annotations

from typing import Any

import pytest

from maxpipe.config.load import from_dict, to_dict
from maxpipe.errors import ConfigError
from maxpipe.restore.initial_weights import check_model

SIZES = {"d_model": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_mlp": 32}


def section(**keys: Any) -> dict[str, Any]:
    """Return the `model` section of a config with eight layers."""
    model = {**SIZES, "vocab_size": 259, "num_layers": 8, **keys}
    train = {"batch_size": 8, "sequence_length": 32, "steps": 1}
    return to_dict(from_dict({"model": model, "train": train}))["model"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dispatch", "dense"),
        ("expert_backend", "ragged_dot"),
        ("all_to_all", "padded"),
        ("all_to_all_chunks", 2),
    ],
)
def test_implementation_of_experts_may_change(key: str, value: Any) -> None:
    saved, wanted = section(family="moe"), section(family="moe", moe={key: value})
    assert saved != wanted
    check_model(saved, wanted, {})
    check_model(wanted, saved, {})
    with pytest.raises(ConfigError):
        check_model(saved, section(family="moe", moe={"top_k": 1}), {})


def test_sizes_of_images_may_change() -> None:
    tower = {"num_vision_layers": 1, "image_token_id": 5}
    saved = section(family="qwen3", qwen3=tower)
    limits = {"min_pixels": 4096, "max_pixels": 8192}
    check_model(saved, section(family="qwen3", qwen3={**tower, **limits}), {})
    with pytest.raises(ConfigError):
        check_model(saved, section(family="qwen3", qwen3={**tower, "d_vision": 576}), {})


def test_format_of_matmuls_may_change_with_the_same_unquantized_layers() -> None:
    two = {"matmul_unquantized_layers": 2}
    check_model(section(matmul="nvfp4"), section(matmul="default", **two), {})
    check_model(section(matmul="default", **two), section(matmul="nvfp4"), {})
    check_model(section(), section(matmul="fp8"), {})
    old = section()
    del old["matmul_unquantized_layers"]
    check_model(old, section(matmul="int8"), {})
    for saved, wanted, count in (
        (section(matmul="nvfp4"), section(), 2),
        (section(), section(matmul="nvfp4"), 0),
    ):
        with pytest.raises(ConfigError) as error:
            check_model(saved, wanted, {})
        (problem,) = error.value.problems
        assert problem.action.startswith(f"Set model.matmul_unquantized_layers={count}, or ")
