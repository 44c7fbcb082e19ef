"""Qwen3.5 and Qwen3-VL with images: logits, gradients and exports equal those of transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxpipe.checkpoint.address import parse_address
from maxpipe.config.image_format import PatchFormat
from maxpipe.data.image_grids import rotary_positions, to_patches
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import HuggingFaceFolder, open_folder
from maxpipe.huggingface.import_ import import_folder
from maxpipe.models.param_names import unflatten
from maxpipe.nn.decoder import Decoder, cross_entropy
from maxpipe.nn.vision_layers import normalize_image
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.data.conversations import QWEN_TOKENS, QWEN_VL, make_tokenizer
from tests.data.test_image_grids import LEAST, MOST, PATCH, open_records
from tests.data.test_images import make_png
from tests.huggingface.test_oracle import PYTHON, oracle_answers, reason

pytestmark = pytest.mark.oracle

TOKENS, BEGIN, END, IMAGE, VIDEO = 64, 150, 151, 152, 153
SIZES = ((12, 8), (4, 8), (16, 12))
"""Height and width of each image in patches. The first two images are in the same sequence."""
FORM = PatchFormat(4, 2, 1, 16 * 12 * 4**2, VIDEO, "qwen3_5")
TEXT = {
    "vocab_size": 160,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
HYBRID = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 24,
    "num_position_embeddings": 25,
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
CONFIGS = {
    "Qwen3_5ForConditionalGeneration": {
        "text_config": TEXT | HYBRID,
        "vision_config": VISION,
        **IDS,
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "text_config": TEXT
        | HYBRID
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 8,
        },
        "vision_config": VISION,
        **IDS,
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": TEXT
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [3, 3, 2],
            }
        },
        "vision_config": VISION | {"deepstack_visual_indexes": [0, 2]},
        **IDS,
    },
}


def make_arrays() -> dict[str, np.ndarray]:
    """Return two sequences: one with two images, and one with one image."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, 150, (2, TOKENS))
    left = np.zeros((2, TOKENS), np.int32)
    for row, begin, (height, width) in ((0, 3, SIZES[0]), (0, 32, SIZES[1]), (1, 7, SIZES[2])):
        count = height * width // 4
        tokens[row, begin - 1], tokens[row, begin + count] = BEGIN, END
        tokens[row, begin : begin + count] = IMAGE
        left[row, begin : begin + count] = np.arange(count, 0, -1)
    images = {
        f"image_{number}": random.integers(0, 256, (4 * height, 4 * width, 3), np.uint8)
        for number, (height, width) in enumerate(SIZES)
    }
    mask = (tokens[:, 1:] != IMAGE).astype(np.float32)
    return {"tokens": tokens, "mask": mask, "left": left, **images}


def make_batch(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the batch of the arrays, with an unused image in the second sequence."""
    tokens, shape = arrays["tokens"], (2, TOKENS)
    patches = [to_patches(arrays[f"image_{number}"], FORM, 16 * 12) for number in range(3)]
    images = np.stack([np.stack(patches[:2]), np.stack([patches[2], 0 * patches[2]])])
    grids = np.array([SIZES[:2], [SIZES[2], (0, 0)]], np.int32)
    rotary = [rotary_positions(arrays["left"][0], grids[0], FORM)]
    rotary += [rotary_positions(arrays["left"][1], grids[1, :1], FORM)]
    batch = {
        "tokens": tokens,
        "targets": np.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(TOKENS), (2, 1)),
        "loss_mask": np.pad(arrays["mask"], ((0, 0), (0, 1))),
        "example_ids": np.arange(2),
        "images": images,
        "image_grids": grids,
        "image_tokens_left": arrays["left"],
        "rotary_positions": np.stack(rotary),
    }
    return {name: jnp.asarray(array) for name, array in batch.items()}


def read_params(source: HuggingFaceFolder) -> Any:
    """Return the parameters of a folder, with layers keyed by type."""
    flat = {
        name: source.read_region(name, np.dtype("f4"), [slice(0, n) for n in shape])
        for name, shape in source.mapping.shapes.items()
    }
    params = unflatten({tuple(name.split(".")): array for name, array in flat.items()})
    if "attention" in params["layers"]:
        params |= {"layers": {"layer": params["layers"]}}
    return params


@pytest.fixture(scope="module", params=CONFIGS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base = tmp_path_factory.mktemp("images")
    arrays = make_arrays()
    del arrays["left"]
    np.savez(base / "arrays.npz", **arrays)  # type: ignore[arg-type]
    job = {
        "class": request.param,
        "config": CONFIGS[request.param],
        "seed": 1,
        "folder": str(base / "folder"),
        "arrays": str(base / "arrays.npz"),
        "results": str(base / "results.npz"),
        "gradients": str(base / "gradients"),
    }
    (loss,) = oracle_answers("qwen_images_oracle.py", [job], base)
    return job | {"loss": loss, "base": base}


def test_logits_and_gradients_equal_transformers(job: dict[str, Any]) -> None:
    source = open_folder(job["folder"], images=True)
    own = dataclasses.replace(source.config.own, max_pixels=FORM.max_pixels, min_pixels=1)
    config = dataclasses.replace(source.config, compute_dtype="float32", own=own)
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    params, batch = read_params(source), make_batch(make_arrays())
    results = np.load(job["results"])
    positions = np.moveaxis(results["positions"], 0, -1)
    np.testing.assert_array_equal(batch["rotary_positions"], positions)

    def run(params: Any) -> tuple[Any, Any]:
        logits = decoder.apply(params, batch)
        return cross_entropy(logits, batch), logits

    with jax.default_matmul_precision("highest"):
        arrays = {name: batch[name] for name in ("images", "image_grids")}
        features = np.asarray(jax.jit(decoder.image_features)(params, arrays))
        (loss, logits), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    counts = [math.prod(size) // 4 for size in SIZES]
    used = [features.reshape(4, *features.shape[2:])[n, :count] for n, count in enumerate(counts)]
    wanted = results["features"]
    assert np.abs(np.concatenate(used) - wanted).max() < 1e-5 * np.abs(wanted).max()
    wanted = results["logits"]
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(loss, job["loss"], rtol=1e-5)
    torch_gradients = read_params(open_folder(job["gradients"], images=True))
    assert jax.tree.structure(gradients) == jax.tree.structure(torch_gradients)
    for path, mine in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        theirs = torch_gradients
        for key in name.split("."):
            theirs = theirs[key]
        assert np.abs(theirs).max() > 0, name
        assert np.abs(mine - theirs).max() < 1e-5 * np.abs(theirs).max(), name


def test_exported_folder_has_the_same_logits_and_tensors(job: dict[str, Any]) -> None:
    base: Path = job["base"]
    import_folder(job["folder"], str(base / "run"), lambda _: None, images=True)
    export(parse_address(str(base / "run")), str(base / "out"), None, lambda _: None)
    names = {"folder": str(base / "out"), "results": str(base / "again.npz")}
    again = {name: job[name] for name in ("arrays", "class")} | names
    (loss,) = oracle_answers("qwen_images_oracle.py", [again], base)
    assert loss == job["loss"]
    results, first = np.load(base / "again.npz"), np.load(job["results"])
    np.testing.assert_array_equal(results["logits"], first["logits"])


def test_import_without_images_is_the_text_model(job: dict[str, Any]) -> None:
    source = open_folder(job["folder"])
    assert not any(name.startswith("vision.") for name in source.mapping.shapes)
    assert source.description.config.own.num_vision_layers == 0
    assert all("visual." in name for name in source.unused_tensors)


def test_records_equal_the_processor_of_transformers(tmp_path: Path) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", QWEN_VL, QWEN_TOKENS)
    random = np.random.default_rng(0)
    shapes = {"wide.png": (31, 17, 3), "tall.jpg": (9, 44, 3), "clear.png": (20, 20, 4)}
    for name, shape in shapes.items():
        Image.fromarray(random.integers(0, 256, shape, np.uint8)).save(tmp_path / name)
    (tmp_path / "small.gif").write_bytes(make_png(size=(5, 3)))
    names = [*shapes, "small.gif"]
    question = [{"type": "text", "text": "Look: "}]
    question += [{"type": "image", "path": name} for name in names]
    question += [{"type": "text", "text": " what is it?"}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "Noise."},
    ]
    job = {
        "tokenizer": str(tokenizer),
        "size": {"shortest_edge": LEAST, "longest_edge": MOST},
        "patch_size": PATCH,
        "merge_size": 2,
        "files": [str(tmp_path / name) for name in names],
        "messages": messages,
        "processed": str(tmp_path / "processed.npz"),
    }
    oracle_answers("qwen_images_oracle.py", [job], tmp_path)
    datasets = open_records(tokenizer, tmp_path, [{"messages": messages}], images=4)
    row = datasets.train.sequences[0]
    wanted = np.load(tmp_path / "processed.npz")
    ids = wanted["input_ids"][0]
    np.testing.assert_array_equal(row["tokens"][: len(ids)], ids[: len(row["tokens"])])
    is_image = wanted["mm_token_type_ids"][0] == 1
    np.testing.assert_array_equal(row["image_tokens_left"][: len(ids)] > 0, is_image)
    grids = wanted["image_grid_thw"][:, 1:]
    np.testing.assert_array_equal(row["image_grids"], grids)
    counts = grids.prod(1)
    used = [patches[:count] for patches, count in zip(row["images"], counts, strict=True)]
    mine = normalize_image(jnp.asarray(np.concatenate(used))).transpose(0, 3, 1, 2)
    theirs = wanted["pixel_values"].reshape(len(mine), 3, 2, PATCH, PATCH)
    for frame in range(2):
        np.testing.assert_allclose(mine, theirs[:, :, frame], rtol=0, atol=1e-6)
