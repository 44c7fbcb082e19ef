"""A small mixture of experts that would drop tokens, and what the plain loop says of texts."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.generate.load_model import LoadedModel
from maxpipe.models.config import ModelConfig
from maxpipe.models.moe import MoeConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules

BYTES = ByteTokenizer()
MODEL = ModelConfig(
    family="moe",
    own=MoeConfig(num_experts=3, top_k=2, d_expert=10, capacity_factor=0.5, num_dense_layers=1),
    num_layers=3,
    d_model=12,
    num_heads=2,
    num_kv_heads=2,
    head_dim=6,
    d_mlp=20,
    vocab_size=261,
    compute_dtype="float32",
)
MESH = MeshConfig(ici_data=2, ici_tensor=2, axis_rules={"vocab": []})


@cache
def weights() -> LoadedModel:
    """On two devices for rows, times two for heads."""
    decoder = Decoder(MODEL, AxisRules.from_config(MESH))
    params = jax.jit(decoder.init)(jax.random.key(5))
    params = jax.tree.map(lambda leaf: leaf * 6.0 if leaf.ndim > 1 else leaf, params)
    return LoadedModel(decoder, params, build_mesh(MESH, jax.devices()[:4]))


@cache
def _plain() -> Any:
    own = dataclasses.replace(MODEL.own, capacity_factor=0.0)  # pyright: ignore[reportArgumentType]
    config = dataclasses.replace(MODEL, own=own)
    return jax.jit(Decoder(config, AxisRules.from_config(MeshConfig())).apply)


@cache
def logprobs(text: bytes, room: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Of each byte after those before it and the begin token, and the most likely bytes."""
    ids = [BYTES.begin_id, *text]
    assert len(ids) <= room + 1
    row = jnp.asarray([ids[:-1] + [0] * (room + 1 - len(ids))])
    batch = {"tokens": row, "positions": jnp.arange(room)[None]}
    batch["segment_ids"] = (jnp.arange(room)[None] < len(ids) - 1).astype(jnp.int32)
    scores = jax.nn.log_softmax(_plain()(weights().params, batch)[0, : len(text)])
    return np.asarray(scores[jnp.arange(len(text)), jnp.asarray(list(text))]), np.asarray(
        scores.argmax(-1)
    )


def followed(text: bytes, count: int) -> bytes:
    """The most likely bytes that follow, one by one."""
    for _ in range(count):
        text += bytes([int(logprobs(text + b"?")[1][-1])])
    return text
