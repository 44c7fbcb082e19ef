"""Generation with images equals the argmax of the plain decoder."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.generation.completions import GenerationLimits, Prompt, batch_shape
from maxpipe.generation.decoding import DecodeEngine, DecodeShape, PromptImages, Sampling
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules, auto_mesh
from tests.pipeline.test_images import TOWER, case_of

NEW, K = 4, TOWER.tokens_per_image


def make_prompts() -> list[Prompt]:
    """Return a prompt with two images, a prompt without images, and a prompt with one image."""
    random, prompts = np.random.default_rng(5), []
    for number, (length, begins) in enumerate(((15, (2, 8)), (6, ()), (9, (3,)))):
        ids = random.integers(0, TOWER.image_token_id, length)
        left = np.zeros(length, np.int32)
        for begin in begins:
            ids[begin : begin + K] = TOWER.image_token_id
            left[begin : begin + K] = np.arange(K, 0, -1)
        pixels = random.integers(0, 256, (len(begins), 9, 9, 3), np.uint8)
        images = PromptImages(pixels, left) if begins else None
        prompts.append(Prompt(number, "", ids.tolist(), images))
    return prompts


def greedy(decoder: Decoder, params: Any, prompt: Prompt) -> list[int]:
    """Return the most likely tokens after a prompt, computed without a cache."""
    ids = list(prompt.ids)
    for _ in range(NEW):
        count = len(ids)
        batch: dict[str, Any] = {
            "tokens": np.array([ids]),
            "segment_ids": np.ones((1, count), np.int32),
            "positions": np.arange(count)[None],
        }
        if prompt.images is not None:
            left = np.zeros(count, np.int32)
            left[: len(prompt.images.tokens_left)] = prompt.images.tokens_left
            arrays = {"images": prompt.images.pixels[None], "image_tokens_left": left[None]}
            batch |= arrays
        placed = jax.tree.map(jax.numpy.asarray, batch)
        ids.append(int(decoder.apply(params, placed)[0, -1].argmax()))
    return ids[len(prompt.ids) :]


@pytest.mark.parametrize("axes", [{}, {"ici_fsdp": 2, "ici_tensor": 2}])
def test_images_in_prompts(axes: dict[str, Any]) -> None:
    config = dataclasses.replace(case_of().model, num_layers=3)
    mesh_config = MeshConfig(**axes)  # type: ignore[arg-type]
    count = 1
    for size in axes.values():
        count *= size
    mesh = auto_mesh(build_mesh(mesh_config, jax.devices()[:count]))
    decoder = Decoder(config, AxisRules.from_config(mesh_config))
    plain = Decoder(config, AxisRules.from_config(MeshConfig()))
    params = jax.jit(plain.init)(jax.random.key(3))
    prompts = make_prompts()
    engine = DecodeEngine(decoder, mesh, Sampling(temperature=0.0), seed=0)
    limits = GenerationLimits(NEW, 64)
    size = batch_shape(prompts, limits, engine.batch_multiple)
    assert size.num_images == 2 and size.prefill_chunk == size.prompt_length
    with jax.set_mesh(mesh):
        placed = decoder.by_layer(params)
    ids = [prompt.ids for prompt in prompts]
    images = [prompt.images for prompt in prompts]
    steps = engine.run(placed, ids, [0, 1, 2], size, None, images)
    found = np.array([tokens[:3] for tokens, _ in steps]).T
    wanted = [greedy(plain, params, prompt) for prompt in prompts]
    np.testing.assert_array_equal(found, wanted)


def test_prompts_without_images_are_prefilled_in_chunks() -> None:
    assert DecodeShape(1, 2048, 4).prefill_chunk == 512
    assert DecodeShape(1, 2048, 4, 1).prefill_chunk == 2048
