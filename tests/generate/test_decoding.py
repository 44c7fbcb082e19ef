"""Tokens that follow prompts: cached, side by side, and on any mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxpipe.config.schema import MeshConfig, ModelConfig
from maxpipe.generate.decoding import Decoding, Size, padded, side_by_side
from maxpipe.generate.sampling import Sampling
from maxpipe.model.decoder import Decoder
from maxpipe.model.families.deepseek import DeepseekConfig
from maxpipe.model.families.gemma3 import Gemma3Config
from maxpipe.model.families.moe import MoeConfig
from maxpipe.model.families.qwen3_next import Qwen3NextConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules

LLAMA = ModelConfig(
    num_layers=3,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    d_mlp=24,
    vocab_size=40,
    compute_dtype="float32",
)
GEMMA = dataclasses.replace(
    LLAMA, family="gemma3", tied_embeddings=True, own=Gemma3Config(window=5, period=2)
)
MOE = dataclasses.replace(
    LLAMA, family="moe", own=MoeConfig(num_dense_layers=1, num_experts=3, top_k=2, d_expert=12)
)
NEXT = dataclasses.replace(
    LLAMA,
    family="qwen3_next",
    own=Qwen3NextConfig(
        num_experts=3,
        d_expert=12,
        d_shared=10,
        num_key_heads=2,
        num_value_heads=4,
        key_size=5,
        value_size=3,
        chunk=4,
        attention_period=2,
        rope_size=2,
    ),
)
DEEPSEEK = dataclasses.replace(
    LLAMA,
    family="deepseek",
    num_kv_heads=4,
    own=DeepseekConfig(
        kv_rank=10, rope_size=4, value_size=6, num_experts=4, d_expert=12, scores="sigmoid"
    ),
)
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.3, top_k=17, top_p=0.9, repetition_penalty=1.2)
GENERATOR = np.random.default_rng(11)
PROMPTS = [GENERATOR.integers(0, 40, size).tolist() for size in (3, 21, 1, 9, 14)]
MORE = 7
ONE_DEVICE = MeshConfig()


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple)


def decoding_of(
    model: ModelConfig,
    sampling: Sampling = GREEDY,
    mesh: MeshConfig = ONE_DEVICE,
) -> tuple[Decoding, Any]:
    """Something to generate with on the first devices, and its parameters on them."""
    decoder = Decoder(model, AxisRules.from_config(mesh))
    count = mesh.ici_data * mesh.ici_fsdp * mesh.ici_tensor
    grid = build_mesh(mesh, jax.devices()[:count])
    params = jax.jit(decoder.init)(jax.random.key(2))
    spec, axes = decoder.rules.spec, decoder.axes()
    layers = axes["layers"]
    specs = jax.tree.map(spec, axes, is_leaf=_is_axes)
    specs |= {"layers": jax.tree.map(lambda each: spec((None, *each)), layers, is_leaf=_is_axes)}
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(grid, spec)),
        params,
        specs,
    )
    return Decoding(decoder, grid, sampling, seed=5), placed


def followed(
    decoding: Decoding, params: Any, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities `[rows, tokens]` behind the prompts."""
    shards = decoding.shards
    rows = -(-len(prompts) // shards) * shards
    size = Size(rows, padded(max(map(len, prompts))), MORE)
    steps = list(decoding.run(params, prompts, numbers, size))
    assert len(steps) == MORE
    tokens, logprobs = (np.stack(each, axis=1)[: len(prompts)] for each in zip(*steps, strict=True))
    return tokens, logprobs


def by_full_forwards(decoding: Decoding, params: Any, prompt: list[int]) -> tuple[list, list]:
    """The best tokens, each by a forward pass over all before it, and their log-probabilities."""
    row, nats, apply = list(prompt), [], jax.jit(decoding.decoder.apply)
    room = len(prompt) + MORE
    for _ in range(MORE):
        held = jnp.asarray([row + [0] * (room - len(row))])
        batch = {"tokens": held, "segment_ids": jnp.ones_like(held)}
        batch |= {"positions": jnp.arange(room)[None]}
        scores = jax.nn.log_softmax(apply(params, batch)[0, len(row) - 1])
        row.append(int(scores.argmax()))
        nats.append(float(scores.max()))
    return row[len(prompt) :], nats


@pytest.mark.parametrize(
    "model", [LLAMA, GEMMA, MOE, NEXT, DEEPSEEK], ids=lambda model: model.family
)
def test_rows_side_by_side_are_what_full_forwards_give(model: ModelConfig) -> None:
    decoding, params = decoding_of(model)
    tokens, logprobs = followed(decoding, params, PROMPTS, range(5))
    for row, prompt in enumerate(PROMPTS):
        wanted, nats = by_full_forwards(decoding, params, prompt)
        assert tokens[row].tolist() == wanted
        np.testing.assert_allclose(logprobs[row], nats, rtol=1e-5)


def test_a_row_is_the_same_by_itself_and_nothing_is_compiled_twice() -> None:
    decoding, params = decoding_of(LLAMA, DRAWN)
    tokens, logprobs = followed(decoding, params, PROMPTS, range(5))
    other, _ = followed(decoding, params, PROMPTS[::-1], range(4, -1, -1))
    assert other[::-1].tolist() == tokens.tolist()
    assert decoding._extend._cache_size() == decoding._step._cache_size() == 1
    for row, prompt in enumerate(PROMPTS):
        alone, nats = followed(decoding, params, [prompt], [row])
        assert alone[0].tolist() == tokens[row].tolist()
        np.testing.assert_allclose(nats[0], logprobs[row], rtol=1e-5)


def test_long_prompts_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, params = decoding_of(GEMMA)
    wanted, nats = followed(decoding, params, PROMPTS, range(5))
    monkeypatch.setattr("maxpipe.generate.decoding._LARGEST_PIECE", 8)
    assert padded(21) == 24
    tokens, logprobs = followed(decoding, params, PROMPTS, range(5))
    assert tokens.tolist() == wanted.tolist()
    np.testing.assert_allclose(logprobs, nats, rtol=1e-5)


MESHES = {
    "all axes": (MOE, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "states": (NEXT, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "tensor-data": (LLAMA, MeshConfig(ici_data=2, ici_tensor=2)),
    "latents": (DEEPSEEK, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "whole kv heads": (LLAMA, MeshConfig(ici_tensor=4, axis_rules={"kv_heads": []})),
}


@pytest.mark.parametrize("case", MESHES)
def test_every_mesh_gives_the_same_tokens(case: str) -> None:
    model, mesh = MESHES[case]
    found = []
    for each in (ONE_DEVICE, mesh):
        decoding, params = decoding_of(model, DRAWN, each)
        found.append(followed(decoding, params, PROMPTS, range(5)))
    (wanted, nats), (tokens, logprobs) = found
    assert tokens.tolist() == wanted.tolist()
    np.testing.assert_allclose(logprobs, nats, rtol=1e-5)


def test_caches_are_split_over_rows_and_heads() -> None:
    decoding, _ = decoding_of(LLAMA, mesh=MESHES["tensor-data"][1])
    caches = decoding._empty(Size(4, 16, 3)).caches["layer"]
    assert caches.key.shape == (3, 4, 19, 2, 6)
    assert caches.key.sharding.shard_shape(caches.key.shape) == (3, 2, 19, 1, 6)
    assert caches.segments.sharding.shard_shape(caches.segments.shape) == (3, 2, 19)


def test_the_cache_is_in_the_compute_type() -> None:
    decoder = Decoder(dataclasses.replace(LLAMA, compute_dtype="bfloat16"), AxisRules(()))
    assert jax.eval_shape(lambda: decoder.empty_caches(1, 2))["layer"].key.dtype == jnp.bfloat16


def test_the_program_does_not_grow_with_depth() -> None:
    def size(num_layers: int) -> int:
        decoder = Decoder(dataclasses.replace(LLAMA, num_layers=num_layers), AxisRules(()))
        params = jax.eval_shape(decoder.init, jax.random.key(0))
        ids = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        batch = dict.fromkeys(("tokens", "segment_ids", "positions"), ids)
        caches = jax.eval_shape(lambda: decoder.empty_caches(2, 8))
        return len(jax.jit(decoder.extend).lower(params, batch, caches).as_text().splitlines())

    assert size(3) == size(11)


@pytest.mark.parametrize(
    ("longest", "wanted"), [(1, 16), (16, 16), (17, 32), (512, 512), (513, 1024), (1025, 1536)]
)
def test_prompts_of_few_sizes_are_compiled(longest: int, wanted: int) -> None:
    assert padded(longest) == wanted and wanted % Size(1, wanted, 1).piece == 0


def test_prompts_end_together() -> None:
    rows = side_by_side([[7], [4, 5, 6]], 3, 4)
    assert rows.tokens.tolist() == [[0, 0, 0, 7], [0, 4, 5, 6], [0] * 4]
    assert rows.segment_ids.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0] * 4]
    assert rows.positions.tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0] * 4]
