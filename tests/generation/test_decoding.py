"""Decoded tokens: cached, batched, and on any mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.generation.decoding import (
    DecodeShape,
    RefillPrompt,
    SampledTokens,
    left_pad,
    padded_length,
)
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.cases import keeping
from tests.generation.small import (
    DEEPSEEK,
    DRAWN,
    FALCON,
    GEMMA,
    GEMMA4,
    GEMMA4_SMALL,
    GRANITE4,
    KIMI,
    LLAMA,
    LLAMA4,
    MOE,
    MORE,
    NEMOTRON,
    NEXT,
    OLMO_HYBRID,
    ONE_DEVICE,
    PROMPTS,
    decoding_of,
    generate_tokens,
    params_of,
)


def by_full_forwards(apply: Any, params: Any, prompt: list[int], length: int) -> tuple[list, list]:
    """Greedy tokens, each from a full forward pass over its prefix, and their log-probabilities."""
    row, nats = list(prompt), []
    for _ in range(MORE):
        held = jnp.asarray([row + [0] * (length - len(row))])
        batch = {"tokens": held, "segment_ids": jnp.ones_like(held)}
        batch |= {"positions": jnp.arange(length)[None]}
        scores = jax.nn.log_softmax(apply(params, batch)[0, len(row) - 1])
        row.append(int(scores.argmax()))
        nats.append(float(scores.max()))
    return row[len(prompt) :], nats


@pytest.mark.parametrize(
    "model",
    keeping(
        [
            *(LLAMA, GEMMA, DEEPSEEK, MOE, NEXT, GRANITE4, NEMOTRON, KIMI, OLMO_HYBRID),
            *(LLAMA4, GEMMA4, GEMMA4_SMALL, FALCON),
        ],
        0,
        2,
        12,
    ),
    ids=lambda model: model.family,
)
def test_batched_decoding_equals_full_forward_passes(model: ModelConfig) -> None:
    decoding, params = decoding_of(model)
    tokens, logprobs = generate_tokens(decoding, params, PROMPTS, range(5))
    apply, length = jax.jit(decoding.decoder.apply), max(map(len, PROMPTS)) + MORE
    for row, prompt in enumerate(PROMPTS):
        wanted, nats = by_full_forwards(apply, params, prompt, length)
        assert tokens[row].tolist() == wanted
        np.testing.assert_allclose(logprobs[row], nats, rtol=1e-5)


def test_tokens_do_not_depend_on_batch_and_compile_once() -> None:
    decoding, params = decoding_of(LLAMA, DRAWN)
    tokens, logprobs = generate_tokens(decoding, params, PROMPTS, range(5))
    other, _ = generate_tokens(decoding, params, PROMPTS[::-1], range(4, -1, -1))
    assert other[::-1].tolist() == tokens.tolist()
    assert decoding._prefill_program._cache_size() == decoding._decode_program._cache_size() == 1
    for row, prompt in enumerate(PROMPTS):
        alone, nats = generate_tokens(decoding, params, [prompt], [row])
        assert alone[0].tolist() == tokens[row].tolist()
        np.testing.assert_allclose(nats[0], logprobs[row], rtol=1e-5)


def test_chunked_prefill_equals_single_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, params = decoding_of(GEMMA)
    wanted, nats = generate_tokens(decoding, params, PROMPTS, range(5))
    monkeypatch.setattr("maxpipe.generation.decoding._MAX_PREFILL_CHUNK", 8)
    assert padded_length(21) == 24
    tokens, logprobs = generate_tokens(decoding, params, PROMPTS, range(5))
    assert tokens.tolist() == wanted.tolist()
    np.testing.assert_allclose(logprobs, nats, rtol=1e-5)


REFILLED = {
    "window": (GEMMA, ONE_DEVICE),
    "latents, all axes": (DEEPSEEK, MeshConfig(ici_data=2, ici_fsdp=2)),
    "tensor": (LLAMA, MeshConfig(ici_tensor=2)),
}


@pytest.mark.parametrize("case", keeping(REFILLED, 0))
def test_refilled_rows_decode_same_tokens(case: str) -> None:
    """Decode well beyond the cache capacity, with prompts of different lengths."""
    model, mesh = REFILLED[case]
    decoding, params = decoding_of(model, DRAWN, mesh)
    prompts = PROMPTS * 2
    wanted, nats = generate_tokens(decoding, params, prompts, range(10))
    lengths = [2, 7, 5, 7, 1, 6, 3, 7, 4, 7]
    waiting, rows = list(range(10)), [0, 1, 2, 3][: max(2, decoding.batch_multiple)]
    del waiting[: len(rows)]
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    new: list[RefillPrompt] = []

    def refill() -> list[RefillPrompt]:
        given = new.copy()
        new.clear()
        return given

    size = DecodeShape(len(rows), padded_length(max(map(len, prompts))), MORE)
    drawn = decoding.run(params, prompts[: len(rows)], rows, size, refill)
    for tokens, logprobs in drawn:
        for row, number in enumerate(rows):
            if len(found[number]) < lengths[number]:
                found[number].append((int(tokens[row]), float(logprobs[row])))
            if len(found[number]) == lengths[number] and waiting:
                rows[row] = waiting.pop(0)
                new.append(RefillPrompt(row, prompts[rows[row]], rows[row]))
        if [len(each) for each in found] == lengths:
            break
    drawn.close()
    for number, each in enumerate(found):
        assert [token for token, _ in each] == wanted[number][: lengths[number]].tolist()
        np.testing.assert_allclose([n for _, n in each], nats[number][: len(each)], rtol=1e-5)


MIXED = MeshConfig(ici_expert=4, ici_context=2, axis_rules={"latent": ["fsdp"]})
MESHES = {
    "all axes": (MOE, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "states": (NEXT, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "mamba": (GRANITE4, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "kimi": (KIMI, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "olmo": (OLMO_HYBRID, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "nemotron": (NEMOTRON, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "falcon": (FALCON, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "chunks": (LLAMA4, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "tensor-data": (LLAMA, MeshConfig(ici_data=2, ici_tensor=2)),
    "gemma4": (GEMMA4, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "latents": (DEEPSEEK, MeshConfig(ici_data=2, ici_fsdp=2, ici_tensor=2)),
    "experts-context": (DEEPSEEK, MIXED),
    "whole kv heads": (LLAMA, MeshConfig(ici_tensor=4, axis_rules={"kv_heads": []})),
}


@pytest.mark.parametrize("case", keeping(MESHES, 0))
def test_every_mesh_decodes_same_tokens(case: str) -> None:
    model, mesh = MESHES[case]
    found = []
    for each in (ONE_DEVICE, mesh):
        decoding, params = decoding_of(model, DRAWN, each)
        found.append(generate_tokens(decoding, params, PROMPTS, range(5)))
    (wanted, nats), (tokens, logprobs) = found
    assert tokens.tolist() == wanted.tolist()
    np.testing.assert_allclose(logprobs, nats, rtol=1e-5)


def test_resharding_needs_no_full_rematerialization(capfd: pytest.CaptureFixture[str]) -> None:
    """The embedding is sharded over context, rows are not; XLA warns if it replicates an array."""
    decoding, params = decoding_of(DEEPSEEK, mesh=MIXED)
    generate_tokens(decoding, params, PROMPTS[:4], range(4))
    assert "rematerialization" not in capfd.readouterr().err


def test_caches_are_sharded_over_batch_and_heads() -> None:
    decoding, _ = decoding_of(LLAMA, mesh=MESHES["tensor-data"][1])
    cache = decoding._init_program(DecodeShape(4, 16, 3)).caches[2]["attention"]
    assert cache.keys.shape == (4, 2, 19, 6)
    assert cache.keys.sharding.shard_shape(cache.keys.shape) == (2, 1, 19, 6)
    assert cache.segments.sharding.shard_shape(cache.segments.shape) == (2, 19)


def test_sliding_window_layers_cache_only_window() -> None:
    """The middle layer is global; `test_chunked_prefill_equals_single_prefill` wraps the cache."""
    decoding, _ = decoding_of(GEMMA)
    caches = jax.eval_shape(lambda: decoding._init_program(DecodeShape(2, 16, 500))).caches
    sizes = [cache["attention"].keys.shape[2] for cache in caches]
    assert sizes == [5 - 1 + 16, 516, 5 - 1 + 16]


def test_experts_in_layers_without_cache_drop_no_tokens() -> None:
    own = dataclasses.replace(NEMOTRON.own, capacity_factor=0.3)
    logits = []
    for model in (NEMOTRON, dataclasses.replace(NEMOTRON, own=own)):
        decoder, params = Decoder(model, AxisRules(())), params_of(NEMOTRON)
        tokens = jnp.arange(14).reshape(2, 7)
        batch = {"tokens": tokens, "segment_ids": jnp.ones_like(tokens)}
        batch |= {"positions": jnp.arange(7)[None].repeat(2, axis=0)}
        caches = decoder.empty_caches(2, 7)
        assert [*map(list, caches)] == [["mamba"], [], ["attention"], []]
        logits.append(jax.jit(decoder.extend)(params, batch, caches)[0])
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)


def test_cache_uses_compute_dtype() -> None:
    decoder = Decoder(dataclasses.replace(LLAMA, compute_dtype="bfloat16"), AxisRules(()))
    assert (
        jax.eval_shape(lambda: decoder.empty_caches(1, 2))[0]["attention"].keys.dtype
        == jnp.bfloat16
    )


def test_decode_step_copies_neither_parameters_nor_caches() -> None:
    """Caches are updated in place; temporary memory is smaller than the keys of one layer."""
    decoding, params = decoding_of(LLAMA)
    params = jax.jit(decoding.decoder.by_layer)(params)
    given: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    kept = jax.eval_shape(lambda: decoding._init_program(DecodeShape(2, 16, 5000)))
    with jax.set_mesh(decoding.mesh):
        step = decoding._decode_program.lower(
            params, kept, given, SampledTokens(given, given, given)
        ).compile()
    memory, num_bytes = step.memory_analysis(), 4 * kept.caches[0]["attention"].keys.size
    assert memory.alias_size_in_bytes >= 3 * 2 * num_bytes
    assert memory.temp_size_in_bytes < num_bytes


@pytest.mark.parametrize(
    ("longest", "wanted"), [(1, 16), (16, 16), (17, 32), (512, 512), (513, 1024), (1025, 1536)]
)
def test_padded_length_takes_few_values(longest: int, wanted: int) -> None:
    assert (
        padded_length(longest) == wanted and wanted % DecodeShape(1, wanted, 1).prefill_chunk == 0
    )


def test_left_pad() -> None:
    rows = left_pad([[7], [4, 5, 6]], 3, 4)
    assert rows.tokens.tolist() == [[0, 0, 0, 7], [0, 4, 5, 6], [0] * 4]
    assert rows.segment_ids.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0] * 4]
    assert rows.positions.tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0] * 4]
