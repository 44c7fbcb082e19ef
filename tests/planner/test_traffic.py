"""Predicted bytes per mesh axis against the collectives of the compiled program."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import pytest

from maxpipe.config.load import from_dict
from maxpipe.config.schema import Config
from maxpipe.parallel.mesh import AXES
from maxpipe.planner.compile import build_steps, profile_step
from maxpipe.planner.compile import collective_traffic as of_program
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.traffic import count_collectives, step_traffic
from maxpipe.schedule.table import Schedule
from tests.cases import keeping

MODEL = {
    "num_layers": 4,
    "d_model": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "d_mlp": 96,
    "vocab_size": 262,
    "compute_dtype": "float32",
    "attention": "xla",
}
BLOCKS = {"attention": "blockwise"}
WINDOWS = {"family": "mistral", "mistral": {"window": 5}}
EXPERTS: dict[str, Any] = {
    "family": "moe",
    "moe": {"num_experts": 8, "d_expert": 28, "num_dense_layers": 0},
}
DELTA: dict[str, Any] = {
    "family": "olmo_hybrid",
    "olmo_hybrid": {
        "attention_layers": [3],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "gdn_chunk_size": 4,
    },
}
MAMBA2: dict[str, Any] = {
    "family": "granite4",
    "granite4": {
        "attention_layers": [3],
        "num_experts": 0,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "mamba_num_groups": 2,
        "mamba_state_dim": 32,
        "mamba_chunk_size": 4,
    },
}
FALCON: dict[str, Any] = {
    "family": "falcon_h1",
    "falcon_h1": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "mamba_num_groups": 2,
        "mamba_state_dim": 32,
        "mamba_chunk_size": 4,
    },
}
MXFP8 = {"matmul": "mxfp8", "head_dim": 32, "d_model": 128}
INT8 = {"matmul": "int8"}


def experts(**changes: Any) -> dict[str, Any]:
    return EXPERTS | {"moe": EXPERTS["moe"] | changes}


def config_of(model: dict[str, Any], mesh: dict[str, Any], pipeline: dict[str, Any]) -> Config:
    pipeline = {"microbatches": 2 * mesh.get("ici_stage", 1)} | pipeline
    shards = math.prod(mesh.get(f"ici_{axis}", 1) for axis in ("data", "fsdp", "expert"))
    train = {
        "batch_size": 2 * pipeline["microbatches"] * shards,
        "sequence_length": 32,
        "steps": 1,
    }
    sections = {"model": MODEL | model, "mesh": mesh, "pipeline": pipeline, "train": train}
    return from_dict(sections)


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # Stage, context and fsdp axes combined.
    ({}, {"ici_stage": 2, "ici_fsdp": 2, "ici_context": 2}, {}),
    (BLOCKS, {"ici_context": 2, "context_attention": "all_gather"}, {"remat": "names"}),
    ({}, {"ici_fsdp": 4, "ici_data": 2}, {}),
    # Expert parallelism, with weights sharded over three axes and over two.
    (EXPERTS, {"ici_fsdp": 2, "ici_expert": 2, "ici_context": 2}, {}),
    ({}, {"ici_context": 4}, {"remat": "chunk"}),
    ({}, {"ici_context": 2, "ici_data": 2}, {"remat": "none", "weight_gather": "step"}),
    (BLOCKS, {"ici_context": 4, "context_attention": "ring"}, {}),
    (BLOCKS, {"ici_context": 2, "context_attention": "ring"}, {"remat": "names"}),
    (WINDOWS, {"ici_context": 2, "context_attention": "all_gather"}, {}),
    ({"num_kv_heads": 1}, {"ici_context": 4, "context_attention": "ulysses"}, {}),
    (BLOCKS, {"ici_context": 4, "context_attention": "ulysses_ring", "ulysses_size": 2}, {}),
    (
        BLOCKS | {"num_kv_heads": 2},
        {"ici_context": 8, "context_attention": "ulysses_ring", "ulysses_size": 4},
        {"remat": "names"},
    ),
    (
        {"num_layers": 8},
        {"ici_stage": 4, "ici_context": 2},
        {"schedule": "zb_h1", "remat": "names"},
    ),
    (
        {"num_layers": 6},
        {"ici_stage": 2, "ici_context": 2, "ici_fsdp": 2},
        {"prologue_layers": 2, "remat": "names"},
    ),
    ({"num_layers": 8}, {"ici_stage": 2, "ici_context": 2}, {"repeats": 2}),
    # Recurrent states.
    (DELTA, {"ici_context": 2}, {}),
    (DELTA, {"ici_context": 4}, {"remat": "none"}),
    (MAMBA2, {"ici_stage": 2, "ici_context": 2}, {"schedule": "zb_h1", "remat": "names"}),
    (EXPERTS, {"ici_expert": 4}, {"remat": "names"}),
    (EXPERTS, {"ici_expert": 2, "ici_stage": 2}, {"remat": "none"}),
    (EXPERTS, {"ici_expert": 2, "ici_data": 2}, {"weight_gather": "step", "remat": "chunk"}),
    (experts(dispatch="dense"), {"ici_expert": 2, "ici_context": 2}, {}),
    (experts(capacity_factor=1.25), {"ici_expert": 2, "ici_context": 2}, {}),
    (experts(all_to_all_capacity_factor=1.5), {"ici_expert": 4}, {}),
    # The messages to both neighbors are one message in a ring of two stages.
    ({}, {"ici_stage": 2, "ici_fsdp": 2}, {"schedule": "zb_h1"}),
    # Stacks of one layer, which are still gathered in each slot; the last layer is not quantized.
    (MXFP8 | {"num_layers": 2}, {"ici_stage": 2, "ici_fsdp": 2}, {"schedule": "zb_h1"}),
    (MXFP8 | {"num_layers": 2, "matmul": "nvfp4"}, {"ici_fsdp": 2}, {}),
    (FALCON, {"ici_context": 2}, {}),
]

_NUMBERS = 1100
"""Most bytes of losses, statistics and the gradient norm in a step."""


def check_bytes(
    config: Config,
) -> tuple[dict[str, float], tuple[Sizes, Schedule, float]]:
    """Compare the bytes; return the numbers of collectives per axes, and the arguments with which
    they are predicted.

    Excludes reductions of losses, statistics and the gradient norm.
    """
    count = math.prod(getattr(config.mesh, f"ici_{axis}") for axis in AXES)
    steps = build_steps(config, jax.devices()[:count])
    text = steps.compile_train().as_text()
    # XLA for CPU gathers 8-bit floats as float16 arrays, which these programs do not use otherwise.
    text = re.sub(r"\bf16\[", "f8e4m3fn[", text)
    profile, _ = profile_step(text, steps, config.pipeline.weight_gather)
    found: dict[str, float] = {}
    counts: dict[str, float] = {}
    for each in of_program(profile.collectives, steps.param_layout.mesh):
        if each.total_bytes > _NUMBERS:
            found[each.axes] = found.get(each.axes, 0.0) + each.total_bytes
            if each.kind != "all-reduce":
                counts[each.axes] = counts.get(each.axes, 0.0) + each.count
    run = (
        Sizes(config).on_platform("cpu"),
        steps.train_schedule,
        float(config.pipeline.remat != "none"),
    )
    wanted = {axes: sent for (axes, _), sent in step_traffic(*run).items()}
    assert found == pytest.approx(wanted, abs=_NUMBERS)
    return counts, run


@pytest.mark.parametrize(("model", "mesh", "pipeline"), keeping(CASES, 0, 10, 15, 21, 25), ids=str)
def test_predicted_traffic_matches_compiled_program(
    model: dict[str, Any], mesh: dict[str, Any], pipeline: dict[str, Any]
) -> None:
    counts, run = check_bytes(config_of(model, mesh, pipeline))
    assert counts == count_collectives(*run)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (MXFP8, {"ici_fsdp": 4, "ici_data": 2}),
        (MXFP8, {"ici_stage": 2, "ici_fsdp": 2, "ici_context": 2}),
        (INT8, {"ici_fsdp": 4, "ici_data": 2}),
        (INT8 | {"matmul_scales": "tensor"}, {"ici_fsdp": 4}),
    ],
    ids=str,
)
def test_predicted_traffic_of_quantized_weights_matches_compiled_program(
    model: dict[str, Any], mesh: dict[str, Any]
) -> None:
    """The numbers of both directions and their scales are gathered."""
    counts, run = check_bytes(config_of(model, mesh, {"weight_gather": "step"}))
    assert counts == count_collectives(*run)


@pytest.mark.parametrize(
    ("model", "pipeline"),
    [
        (MXFP8, {"remat": "full"}),
        (MXFP8, {"remat": "names"}),
        (MXFP8, {"remat": "names", "saved_names": ["gate", "up"]}),
        (MXFP8, {"remat": "chunk"}),
        (INT8, {"remat": "full"}),
        (INT8, {"remat": "names"}),
    ],
    ids=str,
)
def test_slots_gather_only_the_quantized_arrays_that_they_use(
    model: dict[str, Any], pipeline: dict[str, Any]
) -> None:
    """A backward pass uses the arrays for the forward matmuls only to repeat these matmuls."""
    counts, run = check_bytes(config_of(model | {"num_layers": 2}, {"ici_fsdp": 2}, pipeline))
    assert counts == count_collectives(*run)
