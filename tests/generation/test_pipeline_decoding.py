"""Decoding with layers divided over pipeline stages gives the tokens of one device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import PipelineDecodeEngine
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MESH_AXES, MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.schedule.table import Ring
from maxpipe.step.state import ParamLayout
from tests.cases import keeping
from tests.generation.small import (
    DRAWN,
    FALCON,
    GEMMA,
    GEMMA4,
    GEMMA4_SMALL,
    KIMI,
    LLAMA,
    MOE,
    NEMOTRON,
    OLMO_HYBRID,
    PROMPTS,
    decoding_of,
    generate_tokens,
    params_of,
)


def staged_of(
    model: ModelConfig, sampling: Sampling, mesh: MeshConfig, cut: tuple[int, ...]
) -> tuple[PipelineDecodeEngine, Any]:
    """Return a pipeline decode engine and its parameters, as `decoding_of` does for one stage."""
    decoder = Decoder(model, AxisRules.from_config(mesh))
    count = math.prod(getattr(mesh, f"ici_{axis}") for axis in MESH_AXES)
    grid = build_mesh(mesh, jax.devices()[:count])
    layout = LayerLayout(Ring(len(cut), 1), cut, layer_types=decoder.model.layers)
    parts = ParamLayout(decoder, layout, grid)
    stack = jax.jit(parts.stack, out_shardings=parts.shardings(parts.specs))
    placed = stack(params_of(model))
    return PipelineDecodeEngine(decoder, layout, parts.specs, grid, sampling, seed=5), placed


DEEP = dataclasses.replace(LLAMA, num_layers=4)
LIMITED = dataclasses.replace(
    MOE,
    own=dataclasses.replace(
        MOE.own, num_experts=4, capacity_factor=0.3, all_to_all_capacity_factor=0.3
    ),
)
"""Drops tokens in training, but not in generation."""
CASES = {
    "four stages": (DEEP, MeshConfig(ici_stage=4), (1, 1, 1, 1)),
    "uneven": (GEMMA, MeshConfig(ici_stage=2), (2, 1)),
    "kinds, all axes": (MOE, MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2), (1, 2)),
    "gemma4": (GEMMA4, MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2), (2, 1)),
    "kimi": (KIMI, MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2), (3, 1)),
    "olmo": (OLMO_HYBRID, MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2), (3, 1)),
    "falcon": (FALCON, MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2), (2, 1)),
    "mamba": (NEMOTRON, MeshConfig(ici_stage=2, ici_fsdp=2, ici_tensor=2), (3, 1)),
    "shared keys": (GEMMA4_SMALL, MeshConfig(ici_stage=2, ici_tensor=2), (3, 2)),
    "divided rows": (DEEP, MeshConfig(ici_stage=2, ici_context=4), (2, 2)),
    "limited experts": (LIMITED, MeshConfig(ici_stage=2, ici_expert=2, ici_context=2), (1, 2)),
}


@pytest.mark.parametrize("case", keeping(CASES, 0))
def test_pipeline_stages_decode_same_tokens_as_one_device(case: str) -> None:
    model, mesh, cut = CASES[case]
    decoding, params = decoding_of(model, DRAWN)
    wanted, nats = generate_tokens(decoding, params, PROMPTS, range(5))
    staged, params = staged_of(model, DRAWN, mesh, cut)
    tokens, logprobs = generate_tokens(staged, params, PROMPTS, range(5))
    assert tokens.tolist() == wanted.tolist()
    np.testing.assert_allclose(logprobs, nats, rtol=1e-5, atol=1e-5)
