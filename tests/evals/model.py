"""A small mixture-of-experts model that drops tokens in training, and its reference scores."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.data.tokenizer import ByteTokenizer
from maxpipe.generation.load_model import LoadedModel
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
    """Return the model on four devices: two for the batch, times two for attention heads."""
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
def logprobs(text: bytes, length: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each byte given its prefix, and the most likely bytes."""
    ids = [BYTES.begin_id, *text]
    assert len(ids) <= length + 1
    row = jnp.asarray([ids[:-1] + [0] * (length + 1 - len(ids))])
    batch = {"tokens": row, "positions": jnp.arange(length)[None]}
    batch["segment_ids"] = (jnp.arange(length)[None] < len(ids) - 1).astype(jnp.int32)
    scores = jax.nn.log_softmax(_plain()(weights().params, batch)[0, : len(text)])
    return np.asarray(scores[jnp.arange(len(text)), jnp.asarray(list(text))]), np.asarray(
        scores.argmax(-1)
    )


def greedy_continuation(text: bytes, count: int) -> bytes:
    """Append `count` greedily decoded bytes to the text."""
    for _ in range(count):
        text += bytes([int(logprobs(text + b"?")[1][-1])])
    return text
