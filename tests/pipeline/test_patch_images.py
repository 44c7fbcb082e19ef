"""Images of different sizes in the engine: gradients equal those of the unpipelined model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.models.gemma4 import Gemma4Config
from maxpipe.models.qwen3 import Qwen3Config
from maxpipe.models.qwen3_5 import Qwen35Config
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.cases import Case, batch_of
from tests.pipeline.test_engine import check_gradients

TOWER: dict[str, Any] = {
    "num_vision_layers": 3,
    "d_vision": 16,
    "num_vision_heads": 2,
    "d_vision_mlp": 12,
    "patch_size": 2,
    "num_position_embeddings": 16,
    "min_pixels": 16,
    "max_pixels": 96,
    "image_token_id": 29,
}
QWEN3_5 = Qwen35Config(
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    mrope_section=[1, 1, 0],
    **TOWER,
)
QWEN3_VL = Qwen3Config(deepstack_visual_indexes=[0, 1], mrope_section=[1, 1, 0], **TOWER)
GEMMA4 = Gemma4Config(
    sliding_window=5,
    sliding_window_pattern=2,
    global_head_dim=8,
    num_vision_layers=2,
    d_vision=16,
    num_vision_heads=2,
    d_vision_mlp=12,
    patch_size=2,
    pooling_kernel_size=2,
    max_soft_tokens=6,
    num_position_embeddings=12,
    image_token_id=29,
    bidirectional_images=True,
    standardize_images=True,
)
GEMMA4_SMALL = replace(
    GEMMA4,
    hidden_size_per_layer_input=4,
    num_kv_shared_layers=2,
    use_clipped_linears=True,
    standardize_images=False,
    bidirectional_images=False,
)
WITH_IMAGES = Case(own=QWEN3_5, images=2, length=24, tied=True, epsilon=1e-2, layers=4)
FROZEN_TOWER = ("vision.patches.*", "vision.positions", "vision.layers.*")


def case_of(**changes: Any) -> Case:
    return replace(WITH_IMAGES, **changes)


CASES = [
    case_of(stages=2, repeats=2, microbatches=3, fsdp=2),
    case_of(stages=2, microbatches=4, tensor=2, data=2, frozen=("vision.*",)),
    case_of(stages=2, microbatches=2, outside=1, fsdp=2, schedule="1f1b"),
    case_of(stages=2, microbatches=2, fsdp=2, frozen=FROZEN_TOWER, remat="chunk"),
    case_of(stages=2, microbatches=2, fsdp=2, schedule="zb_h1"),
    case_of(own=QWEN3_VL, stages=4, microbatches=4, tensor=2, schedule="zb_h1"),
    case_of(own=QWEN3_VL, stages=2, microbatches=2, outside=1, fsdp=2, schedule="1f1b"),
    case_of(own=QWEN3_VL, stages=2, repeats=2, microbatches=2, frozen=FROZEN_TOWER),
    case_of(own=GEMMA4, stages=2, microbatches=2, fsdp=2, schedule="1f1b"),
    case_of(own=GEMMA4, stages=2, repeats=2, microbatches=2, frozen=FROZEN_TOWER),
    case_of(own=GEMMA4_SMALL, stages=2, microbatches=2, fsdp=2, schedule="1f1b"),
    case_of(own=GEMMA4_SMALL, stages=2, microbatches=2, outside=1, schedule="zb_h1"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_autodiff(case: Case) -> None:
    check_gradients(case)


def test_documents_of_a_sequence_are_independent() -> None:
    """The logits of a document do not depend on the document before it."""
    case = case_of()
    batch = batch_of(3, case=case)
    decoder = Decoder(case.model, AxisRules.from_config(MeshConfig()))
    params = jax.jit(decoder.init)(jax.random.key(1))
    logits = np.asarray(jax.jit(decoder.apply)(params, batch))
    start = int((batch["segment_ids"][2] == 1).sum())
    assert batch["image_tokens_left"][2, start:].any()
    by_token = ("tokens", "segment_ids", "positions", "image_tokens_left", "rotary_positions")
    alone = {name: batch[name][2:, start:] for name in by_token}
    alone |= {name: batch[name][2:] for name in ("images", "image_grids", "example_ids")}
    found = np.asarray(jax.jit(decoder.apply)(params, alone))
    np.testing.assert_allclose(logits[2, start:], found[0], rtol=1e-4, atol=1e-5)
    # The test would not notice wrong positions if images had no influence on them.
    assert (alone["rotary_positions"][..., 0] != alone["positions"]).any()
    wrong = alone | {"rotary_positions": np.repeat(alone["positions"][..., None], 3, -1)}
    assert np.abs(np.asarray(jax.jit(decoder.apply)(params, wrong)) - found).max() > 1e-4


@pytest.mark.parametrize("own", [QWEN3_5, GEMMA4], ids=["qwen3_5", "gemma4"])
def test_unused_patches_have_no_influence(own: Any) -> None:
    case = case_of(own=own)
    batch = batch_of(3, case=case)
    decoder = Decoder(case.model, AxisRules.from_config(MeshConfig()))
    params = jax.jit(decoder.init)(jax.random.key(1))
    run = jax.jit(decoder.apply)
    count = batch["image_grids"].prod(-1)
    assert (count < batch["images"].shape[2]).any()
    noise = np.random.default_rng(0).integers(0, 256, batch["images"].shape, np.uint8)
    used = np.arange(batch["images"].shape[2]) < count[..., None]
    changed = np.where(used[..., None, None, None], batch["images"], noise)
    np.testing.assert_array_equal(run(params, batch), run(params, batch | {"images": changed}))
