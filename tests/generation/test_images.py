"""Generation with images equals the argmax of the plain decoder."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from maxpipe.config.image_format import PatchFormat
from maxpipe.data.image_grids import rotary_positions
from maxpipe.generation.completions import GenerationLimits, Prompt, batch_shape
from maxpipe.generation.decoding import DecodeEngine, DecodeShape, PromptImages, Sampling
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules, auto_mesh
from tests.pipeline.test_images import TOWER, case_of
from tests.pipeline.test_patch_images import GEMMA4, GEMMA4_SMALL, QWEN3_5, QWEN3_VL
from tests.pipeline.test_patch_images import case_of as patch_case

IMAGE_MODELS = {
    **{"qwen3_5": QWEN3_5, "qwen3": QWEN3_VL, "gemma4": GEMMA4, "gemma4_small": GEMMA4_SMALL}
}
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


class Generated(NamedTuple):
    """Tokens of each sequence, and their log-probabilities."""

    tokens: np.ndarray
    logprobs: np.ndarray


def greedy(decoder: Decoder, params: Any, prompt: Prompt) -> Generated:
    """Return the most likely tokens after a prompt, computed without a cache."""
    ids, logprobs = list(prompt.ids), list[float]()
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
            if prompt.images.grids is not None:
                batch["image_grids"] = prompt.images.grids[None]
            if prompt.images.rotary_positions is not None:
                rotary = prompt.images.rotary_positions
                more = rotary[-1] + np.arange(1, count - len(rotary) + 1)[:, None]
                batch["rotary_positions"] = np.concatenate([rotary, more])[None]
        placed = jax.tree.map(jax.numpy.asarray, batch)
        scores = jax.nn.log_softmax(decoder.apply(params, placed)[0, -1])
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return Generated(np.array(ids[len(prompt.ids) :]), np.array(logprobs))


def make_patch_prompts(*, has_rotary_positions: bool) -> list[Prompt]:
    """Return prompts as `make_prompts` does, with images of different sizes."""
    form = PatchFormat(2, 2, 16, 96, 0, "qwen3_5")
    random, prompts = np.random.default_rng(5), []
    layouts: tuple[tuple[int, dict[int, tuple[int, int]]], ...]
    layouts = ((19, {2: (4, 6), 10: (2, 8)}), (6, {}), (9, {3: (2, 4)}))
    for number, (length, placed) in enumerate(layouts):
        ids = random.integers(0, TOWER.image_token_id, length)
        left = np.zeros(length, np.int32)
        for begin, (height, width) in placed.items():
            count = height * width // 4
            ids[begin : begin + count] = TOWER.image_token_id
            left[begin : begin + count] = np.arange(count, 0, -1)
        pixels = random.integers(0, 256, (len(placed), 24, 2, 2, 3), np.uint8)
        grids = np.array(list(placed.values()), np.int32).reshape(-1, 2)
        rotary = rotary_positions(left, grids, form) if has_rotary_positions else None
        images = PromptImages(pixels, left, grids, rotary)
        prompts.append(Prompt(number, "", ids.tolist(), images if placed else None))
    return prompts


def decode(config: ModelConfig, prompts: list[Prompt], **axes: int) -> tuple[Generated, Generated]:
    """Return the greedy tokens of the decode engine and of the plain decoder."""
    mesh_config = MeshConfig(**axes)  # type: ignore[arg-type]
    mesh = auto_mesh(build_mesh(mesh_config, jax.devices()[: math.prod(axes.values())]))
    decoder = Decoder(config, AxisRules.from_config(mesh_config))
    plain = Decoder(config, AxisRules.from_config(MeshConfig()))
    params = jax.jit(plain.init)(jax.random.key(3))
    engine = DecodeEngine(decoder, mesh, Sampling(temperature=0.0), seed=0)
    limits = GenerationLimits(NEW, 64)
    size = batch_shape(prompts, limits, engine.batch_multiple)
    assert size.num_images == 2 and size.prefill_chunk == size.prompt_length
    with jax.set_mesh(mesh):
        placed = decoder.by_layer(params)
    ids = [prompt.ids for prompt in prompts]
    images = [prompt.images for prompt in prompts]
    steps = engine.run(placed, ids, [0, 1, 2], size, None, images)
    tokens, logprobs = (np.array(each)[:, :3].T for each in zip(*steps, strict=True))
    wanted = [greedy(plain, params, prompt) for prompt in prompts]
    return Generated(tokens, logprobs), Generated(*map(np.stack, zip(*wanted, strict=True)))


@pytest.mark.parametrize("axes", [{}, {"ici_fsdp": 2, "ici_tensor": 2}])
def test_images_in_prompts(axes: dict[str, Any]) -> None:
    config = dataclasses.replace(case_of().model, num_layers=3)
    found, wanted = decode(config, make_prompts(), **axes)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=1e-4)


@pytest.mark.parametrize("own", IMAGE_MODELS.values(), ids=IMAGE_MODELS)
def test_images_of_different_sizes(own: Any) -> None:
    config = patch_case(own=own).model
    prompts = make_patch_prompts(has_rotary_positions=config.family != "gemma4")
    found, wanted = decode(config, prompts, ici_tensor=2)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=1e-4)


def test_prompts_without_images_are_prefilled_in_chunks() -> None:
    assert DecodeShape(1, 2048, 4).prefill_chunk == 512
    assert DecodeShape(1, 2048, 4, 1).prefill_chunk == 2048
