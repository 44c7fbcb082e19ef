"""Gemma 3 with images: logits, gradients and exported folders equal those of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxpipe.checkpoint.address import parse_address
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import HuggingFaceFolder, open_folder
from maxpipe.huggingface.import_ import import_folder
from maxpipe.models.param_names import unflatten
from maxpipe.nn.decoder import Decoder, cross_entropy
from maxpipe.nn.vision_layers import normalize_image
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.data.conversations import GEMMA, IMAGE_TOKENS, make_tokenizer
from tests.data.test_images import PER_IMAGE as TOKENS_IN_DATA
from tests.data.test_images import SIZE as SIZE_IN_DATA
from tests.data.test_images import make_png, open_records
from tests.huggingface.test_oracle import PYTHON, oracle_answers, reason

pytestmark = pytest.mark.oracle

TOKENS, IMAGE, PER_IMAGE, SIZE = 40, 152, 9, 26
TEXT = {
    "vocab_size": 160,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 10,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 4,
    "vision_use_head": False,
}
CONFIG = {
    "text_config": TEXT,
    "vision_config": VISION,
    "mm_tokens_per_image": PER_IMAGE,
    "boi_token_index": 150,
    "eoi_token_index": 151,
    "image_token_index": IMAGE,
}


def make_arrays() -> dict[str, np.ndarray]:
    """Return two sequences: one with two images, and one with one image."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, 150, (2, TOKENS))  # torch drops the gradient of token 0, padding
    left = np.zeros((2, TOKENS), np.int32)
    for row, begin in ((0, 3), (0, 21), (1, 12)):
        tokens[row, begin - 1], tokens[row, begin + PER_IMAGE] = 150, 151
        tokens[row, begin : begin + PER_IMAGE] = IMAGE
        left[row, begin : begin + PER_IMAGE] = np.arange(PER_IMAGE, 0, -1)
    images = random.integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    mask = (tokens[:, 1:] != IMAGE).astype(np.float32)
    return {"tokens": tokens, "images": images, "mask": mask, "left": left}


def make_batch(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the batch of the arrays, with an unused image in the second sequence."""
    tokens, shape = arrays["tokens"], (2, TOKENS)
    images = np.stack(
        [arrays["images"][:2], np.stack([arrays["images"][2], 0 * arrays["images"][2]])]
    )
    batch = {
        "tokens": tokens,
        "targets": np.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(TOKENS), (2, 1)),
        "loss_mask": np.pad(arrays["mask"], ((0, 0), (0, 1))),
        "example_ids": np.arange(2),
        "images": images,
        "image_tokens_left": arrays["left"],
    }
    return {name: jnp.asarray(array) for name, array in batch.items()}


def read_params(source: HuggingFaceFolder) -> Any:
    """Return the parameters of a folder, with layers keyed by type."""
    flat = {
        name: source.read_region(name, np.dtype("f4"), [slice(0, n) for n in shape])
        for name, shape in source.mapping.shapes.items()
    }
    params = unflatten({tuple(name.split(".")): array for name, array in flat.items()})
    return params | {"layers": {"layer": params["layers"]}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    base = tmp_path_factory.mktemp("images")
    np.savez(base / "arrays.npz", **make_arrays())  # type: ignore[arg-type]
    job = {
        "config": CONFIG,
        "seed": 1,
        "folder": str(base / "folder"),
        "arrays": str(base / "arrays.npz"),
        "logits": str(base / "logits.npy"),
        "gradients": str(base / "gradients"),
    }
    (loss,) = oracle_answers("images_oracle.py", [job], base)
    return job | {"loss": loss, "base": base}


def test_logits_and_gradients_equal_transformers(job: dict[str, Any]) -> None:
    source = open_folder(job["folder"], images=True)
    config = dataclasses.replace(source.config, compute_dtype="float32")
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    params, batch = read_params(source), make_batch(make_arrays())

    def run(params: Any) -> tuple[Any, Any]:
        logits = decoder.apply(params, batch)
        return cross_entropy(logits, batch), logits

    with jax.default_matmul_precision("highest"):
        (loss, logits), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    wanted = np.load(job["logits"])
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(loss, job["loss"], rtol=1e-5)
    torch_gradients = read_params(open_folder(job["gradients"], images=True))
    scale = np.abs(torch_gradients["vision"]["layers"]["attention"]["query_bias"]).max()
    assert jax.tree.structure(gradients) == jax.tree.structure(torch_gradients)
    for path, mine in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        theirs = torch_gradients
        for key in name.split("."):
            theirs = theirs[key]
        # Without RoPE, the gradient of the key bias is 0, because a softmax does not depend on it.
        largest = scale if name.endswith("key_bias") else np.abs(theirs).max()
        assert np.abs(mine - theirs).max() < 1e-5 * largest, name


def test_exported_folder_has_the_same_logits_and_tensors(job: dict[str, Any]) -> None:
    base: Path = job["base"]
    import_folder(job["folder"], str(base / "run"), lambda _: None, images=True)
    export(parse_address(str(base / "run")), str(base / "out"), None, lambda _: None)
    names = {"folder": str(base / "out"), "logits": str(base / "again.npy")}
    again = {name: job[name] for name in ("arrays",)} | names
    (loss,) = oracle_answers("images_oracle.py", [again], base)
    assert loss == job["loss"]
    np.testing.assert_array_equal(np.load(base / "again.npy"), np.load(job["logits"]))


def test_import_without_images_is_the_text_model(job: dict[str, Any]) -> None:
    source = open_folder(job["folder"])
    assert not any(name.startswith("vision.") for name in source.mapping.shapes)
    assert source.description.config.own.num_vision_layers == 0
    assert len(source.unused_tensors) == 39


def test_records_equal_the_processor_of_transformers(tmp_path: Path) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    more = ("<start_of_turn>", "<end_of_turn>", *IMAGE_TOKENS)
    tokenizer = make_tokenizer(tmp_path / "tokenizer", GEMMA, more)
    random = np.random.default_rng(0)
    shapes = {"wide.png": (31, 17, 3), "tall.jpg": (9, 44, 3), "clear.png": (20, 20, 4)}
    for name, shape in shapes.items():
        Image.fromarray(random.integers(0, 256, shape, np.uint8)).save(tmp_path / name)
    (tmp_path / "small.gif").write_bytes(make_png(size=(SIZE_IN_DATA, SIZE_IN_DATA)))
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
        "size": SIZE_IN_DATA,
        "num_tokens": TOKENS_IN_DATA,
        "files": [str(tmp_path / name) for name in names],
        "messages": messages,
        "processed": str(tmp_path / "processed.npz"),
    }
    oracle_answers("images_oracle.py", [job], tmp_path)
    _, datasets = open_records(tokenizer, tmp_path, [{"messages": messages}], images=4)
    row = datasets.train.sequences[0]
    wanted = np.load(tmp_path / "processed.npz")
    ids = wanted["input_ids"][0]
    np.testing.assert_array_equal(row["tokens"][: len(ids)], ids[: len(row["tokens"])])
    is_image = wanted["token_type_ids"][0] == 1
    np.testing.assert_array_equal(row["image_tokens_left"][: len(ids)] > 0, is_image)
    for pixels, theirs in zip(row["images"], wanted["pixel_values"], strict=True):
        mine = normalize_image(jnp.asarray(pixels)).transpose(2, 0, 1)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
