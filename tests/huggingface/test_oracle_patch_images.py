"""Images of different sizes: logits, gradients and exports equal those of transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.config.image_format import PatchFormat
from maxpipe.config.load import load
from maxpipe.data.image_grids import rotary_positions, to_patches
from maxpipe.generation.decoding import DecodeEngine, DecodeShape, PromptImages, Sampling
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import HuggingFaceFolder, open_folder
from maxpipe.huggingface.import_ import import_folder
from maxpipe.models.config import ModelConfig
from maxpipe.models.param_names import unflatten
from maxpipe.nn.decoder import Decoder, cross_entropy
from maxpipe.nn.vision_layers import normalize_image
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules, auto_mesh
from maxpipe.restore.initial_weights import read_folder_params
from maxpipe.step.build import steps_from_config
from tests.data.conversations import GEMMA4, GEMMA4_TOKENS, QWEN_TOKENS, QWEN_VL, make_tokenizer
from tests.data.test_image_grids import (
    LEAST,
    MOST,
    PATCH,
    SOFT_TOKENS,
    open_gemma4_records,
    open_records,
)
from tests.data.test_images import make_png
from tests.huggingface.test_oracle import PYTHON, oracle_answers, reason

pytestmark = pytest.mark.oracle

TOKENS, BEGIN, END, IMAGE, VIDEO = 64, 150, 151, 152, 153
SQUARES = ((6, 4), (2, 4), (8, 6))
"""Height and width of each image in tokens. The first two images are in the same sequence."""
PROMPTS, NEW, STEPS = (43, 57), 6, 3
OPTIM = {"rate": 1e-3, "decay": 0.1, "betas": (0.9, 0.95), "steps": STEPS}
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
GEMMA4_TEXT = TEXT | {
    "num_hidden_layers": 6,
    "global_head_dim": 20,
    "sliding_window": 9,
    "pad_token_id": 156,
    "final_logit_softcapping": 4.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
GEMMA4_VISION = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 220,
}
GEMMA4_IDS = {
    **{"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": BEGIN},
    **{"eoi_token_id": END, "audio_token_id": 154, "vision_soft_tokens_per_image": 70},
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
    "gemma4-small": {
        "text_config": GEMMA4_TEXT
        | {
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 160,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        "vision_config": GEMMA4_VISION | {"use_clipped_linears": True},
        "audio_config": {
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"subsampling_conv_channels": [4, 4], "output_proj_dims": 12},
        },
        **GEMMA4_IDS,
    },
    "gemma4-moe": {
        "text_config": GEMMA4_TEXT
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
        "vision_config": GEMMA4_VISION | {"standardize": True},
        **GEMMA4_IDS,
    },
}


class Kind(NamedTuple):
    """A case of `CONFIGS`."""

    name: str
    architecture: str
    form: PatchFormat

    @property
    def epsilon(self) -> float:
        """Return Adam's epsilon. A few gradients of some models are as small as their rounding
        errors, which Adam would amplify.
        """
        models = ("gemma4-small", "Qwen3_5MoeForConditionalGeneration")
        return 1e-5 if self.name in models else 1e-8

    @property
    def merge(self) -> int:
        """Return the height and width of an image token in patches."""
        return self.form.merge_size

    @property
    def max_patches(self) -> int:
        return self.form.max_pixels // self.form.patch_size**2


def kind_of(name: str) -> Kind:
    if name.startswith("gemma4"):
        form = PatchFormat(4, 3, 0, 70 * 12**2, VIDEO, "gemma4", has_rotary_positions=False)
        return Kind(name, "Gemma4ForConditionalGeneration", form)
    return Kind(name, name, PatchFormat(4, 2, 1, 16 * 12 * 4**2, VIDEO, "qwen3_5"))


def make_arrays(kind: Kind) -> dict[str, np.ndarray]:
    """Return two sequences: one with two images, and one with one image."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, 150, (2, TOKENS))
    left = np.zeros((2, TOKENS), np.int32)
    for row, begin, (height, width) in (
        (0, 3, SQUARES[0]),
        (0, 32, SQUARES[1]),
        (1, 7, SQUARES[2]),
    ):
        count = height * width
        tokens[row, begin - 1], tokens[row, begin + count] = BEGIN, END
        tokens[row, begin : begin + count] = IMAGE
        left[row, begin : begin + count] = np.arange(count, 0, -1)
    unit = kind.merge * kind.form.patch_size
    images = {
        f"image_{number}": random.integers(0, 256, (unit * height, unit * width, 3), np.uint8)
        for number, (height, width) in enumerate(SQUARES)
    }
    mask = (tokens[:, 1:] != IMAGE).astype(np.float32)
    return {"tokens": tokens, "mask": mask, "left": left, **images}


def make_batch(kind: Kind) -> dict[str, Any]:
    """Return the batch of the arrays, with an unused image in the second sequence."""
    arrays, form = make_arrays(kind), kind.form
    tokens, shape = arrays["tokens"].astype(np.int32), (2, TOKENS)
    patches = [to_patches(arrays[f"image_{number}"], form, kind.max_patches) for number in range(3)]
    sizes = [(kind.merge * height, kind.merge * width) for height, width in SQUARES]
    grids = np.array([sizes[:2], [sizes[2], (0, 0)]], np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (2, 1)),
        "loss_mask": np.pad(arrays["mask"], ((0, 0), (0, 1))),
        "example_ids": np.arange(2, dtype=np.int32),
        "images": np.stack([np.stack(patches[:2]), np.stack([patches[2], 0 * patches[2]])]),
        "image_grids": grids,
        "image_tokens_left": arrays["left"],
    }
    if form.has_rotary_positions:
        used = (grids[0], grids[1, :1])
        batch["rotary_positions"] = np.stack(
            [rotary_positions(arrays["left"][row], used[row], form) for row in range(2)]
        )
    return batch


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
    base, kind = tmp_path_factory.mktemp("images"), kind_of(request.param)
    arrays = make_arrays(kind)
    del arrays["left"]
    np.savez(base / "arrays.npz", **arrays)  # type: ignore[arg-type]
    paths = {name: str(base / name) for name in ("folder", "gradients", "trained")}
    job = {
        "class": kind.architecture,
        "config": CONFIGS[request.param],
        "seed": 1,
        "arrays": str(base / "arrays.npz"),
        "results": str(base / "results.npz"),
        **paths,
        **{"prompts": PROMPTS, "count": NEW, "optim": OPTIM | {"epsilon": kind.epsilon}},
    }
    (loss,) = oracle_answers("patch_images_oracle.py", [job], base)
    return job | {"loss": loss, "base": base, "kind": kind}


def open_model(job: dict[str, Any]) -> tuple[HuggingFaceFolder, ModelConfig]:
    """Return the folder and its config for float32, with the image sizes of the test."""
    source, form = open_folder(job["folder"], images=True), job["kind"].form
    own = source.config.own
    if form.min_pixels:
        own = dataclasses.replace(own, max_pixels=form.max_pixels, min_pixels=1)
    return source, dataclasses.replace(source.config, compute_dtype="float32", own=own)


def test_logits_and_gradients_equal_transformers(job: dict[str, Any]) -> None:
    source, config = open_model(job)
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    batch = {name: jnp.asarray(array) for name, array in make_batch(job["kind"]).items()}
    params = read_params(source)
    results = np.load(job["results"])
    if "rotary_positions" in batch:
        positions = np.moveaxis(results["positions"], 0, -1)
        np.testing.assert_array_equal(batch["rotary_positions"], positions)

    def run(params: Any) -> tuple[Any, Any]:
        logits = decoder.apply(params, batch)
        return cross_entropy(logits, batch), logits

    with jax.default_matmul_precision("highest"):
        arrays = {name: batch[name] for name in ("images", "image_grids")}
        features = np.asarray(jax.jit(decoder.image_features)(params, arrays))
        (loss, logits), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    counts = [math.prod(size) for size in SQUARES]
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
        if is_stored(name):
            continue
        theirs = torch_gradients
        for key in name.split("."):
            theirs = theirs[key]
        assert np.abs(theirs).max() > 0, name
        assert np.abs(mine - theirs).max() < 1e-5 * np.abs(theirs).max(), name


def is_stored(name: str) -> bool:
    """Return whether a parameter is a stored number, which is not trained."""
    return name.endswith((".output.scale", "_min", "_max")) or ".standardize." in name


def steps_of(job: dict[str, Any]) -> tuple[Any, Any]:
    """Return the steps of a run that starts from the folder, and its initial state."""
    source, config = open_model(job)
    section = {**source.description.section, "compute_dtype": "float32"}
    own = dict(section[config.family])
    if "min_pixels" in {field.name for field in dataclasses.fields(config.own)}:
        own |= {"max_pixels": config.own.max_pixels, "min_pixels": 1}
    if "top_k" in own:
        own |= {"load_balance_loss_weight": 0.0, "z_loss_weight": 0.0}
    optim = {"learning_rate": OPTIM["rate"], "weight_decay": OPTIM["decay"]}
    optim |= {
        "beta1": OPTIM["betas"][0],
        "beta2": OPTIM["betas"][1],
        "epsilon": job["optim"]["epsilon"],
    }
    known = {
        "model": {**section, config.family: own},
        "train": {"steps": STEPS, "batch_size": 2, "sequence_length": TOKENS},
        "data": {"max_images_per_sequence": 2},
        "optim": {**optim, "clip_norm": 0.0, "schedule": "constant"},
        "pipeline": {"microbatches": 1},
        "tokenizer": {"kind": "huggingface", "path": "none"},
    }
    run = load([], known, "test").config
    mesh = build_mesh(run.mesh, jax.devices()[:1])
    steps = steps_from_config(run, mesh, np.zeros(run.model.vocab_size, np.int32))
    params = read_folder_params(source, steps.abstract_saved["params"])
    return steps, steps.init_from_params(params)


def test_trained_weights_equal_torch(job: dict[str, Any]) -> None:
    with jax.default_matmul_precision("highest"):
        steps, state = steps_of(job)
        step = steps.compile_train()
        batch = jax.device_put(make_batch(job["kind"]), steps.batch_sharding)
        for _ in range(STEPS):
            state, _ = step(state, batch)
    params = leaves_by_name(jax.device_get(steps.to_saved(state)["params"]))
    before, after = (open_folder(job[name], images=True) for name in ("folder", "trained"))
    assert any(name.startswith("vision.") for name in params)
    for name, found in params.items():
        whole = [slice(None)] * found.ndim
        old, wanted = (
            each.read_region(name, np.dtype(np.float32), whole) for each in (before, after)
        )
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max(), name
        change = np.abs(found - old).max()
        assert not change if is_stored(name) else change > 1e-3, name


def test_greedy_tokens_equal_transformers(job: dict[str, Any]) -> None:
    source, config = open_model(job)
    arrays, ids, images = make_batch(job["kind"]), list[list[int]](), list[PromptImages]()
    for row, (length, count) in enumerate(zip(PROMPTS, (2, 1), strict=True)):
        ids.append(arrays["tokens"][row, :length].tolist())
        rotary = arrays.get("rotary_positions")
        parts = (arrays[name][row, :count] for name in ("images", "image_grids"))
        pixels, grids = parts
        left = arrays["image_tokens_left"][row, :length]
        images.append(
            PromptImages(pixels, left, grids, None if rotary is None else rotary[row, :length])
        )
    mesh = auto_mesh(build_mesh(MeshConfig(), jax.devices()[:1]))
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        params = decoder.by_layer(read_params(source))
        decoding = DecodeEngine(decoder, mesh, Sampling(temperature=0.0), seed=0)
        size = DecodeShape(2, 64, NEW, 2)
        rows = decoding.run(params, ids, [0, 1], size, None, images)
        found = np.stack([tokens for tokens, _ in rows], 1)
    np.testing.assert_array_equal(found, np.load(job["results"])["greedy"])


def test_exported_folder_has_the_same_logits_and_tensors(job: dict[str, Any]) -> None:
    base: Path = job["base"]
    import_folder(job["folder"], str(base / "run"), lambda _: None, images=True)
    export(parse_address(str(base / "run")), str(base / "out"), None, lambda _: None)
    names = {"folder": str(base / "out"), "results": str(base / "again.npz")}
    again = {name: job[name] for name in ("arrays", "class")} | names
    (loss,) = oracle_answers("patch_images_oracle.py", [again], base)
    assert loss == job["loss"]
    results, first = np.load(base / "again.npz"), np.load(job["results"])
    np.testing.assert_array_equal(results["logits"], first["logits"])


def test_import_without_images_is_the_text_model(job: dict[str, Any]) -> None:
    source = open_folder(job["folder"])
    assert not any(name.startswith("vision.") for name in source.mapping.shapes)
    assert source.description.config.own.num_vision_layers == 0
    parts = ("visual.", "vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
    assert all(
        name.startswith(tuple(f"model.{part}" for part in parts)) for name in source.unused_tensors
    )


def test_import_reports_tensors_of_the_audio_tower(job: dict[str, Any]) -> None:
    unused = open_folder(job["folder"], images=True).unused_tensors
    if "audio_config" in job["config"]:
        assert "model.embed_audio.embedding_projection.weight" in unused
        assert any(name.startswith("model.audio_tower.layers.0.") for name in unused)
    assert all("audio" in name for name in unused)


AUDIO_TOKENS = ("<|audio|>", "<|audio>", "<audio|>")
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen": {
        "sizes": {
            **{"size": {"shortest_edge": LEAST, "longest_edge": MOST}},
            **{"patch_size": PATCH, "merge_size": 2},
        }
    },
    "gemma4": {
        "sizes": {"max_soft_tokens": SOFT_TOKENS, "patch_size": PATCH, "pooling_kernel_size": 3},
        "roles": dict(
            zip(
                ("boi_token", "image_token", "eoi_token", "video_token"), GEMMA4_TOKENS, strict=True
            )
        )
        | dict(zip(("audio_token", "boa_token", "eoa_token"), AUDIO_TOKENS, strict=True)),
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_records_equal_the_processor_of_transformers(name: str, tmp_path: Path) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    is_gemma = name == "gemma4"
    template = (GEMMA4, GEMMA4_TOKENS + AUDIO_TOKENS) if is_gemma else (QWEN_VL, QWEN_TOKENS)
    tokenizer = make_tokenizer(tmp_path / "tokenizer", *template)
    random = np.random.default_rng(0)
    shapes = {"wide.png": (31, 17, 3), "tall.jpg": (9, 44, 3), "clear.png": (20, 20, 4)}
    if is_gemma:
        shapes |= {"strip.png": (400, 4, 3), "exact.png": (72, 108, 3)}
    for file, shape in shapes.items():
        Image.fromarray(random.integers(0, 256, shape, np.uint8)).save(tmp_path / file)
    (tmp_path / "small.gif").write_bytes(make_png(size=(5, 3)))
    names = [*shapes, "small.gif"]
    question = [{"type": "text", "text": "Look: "}]
    question += [{"type": "image", "path": file} for file in names]
    question += [{"type": "text", "text": " what is it?"}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "Noise."},
    ]
    job = {
        "tokenizer": str(tokenizer),
        **PROCESSORS[name],
        "files": [str(tmp_path / file) for file in names],
        "messages": messages,
        "processed": str(tmp_path / "processed.npz"),
    }
    oracle_answers("patch_images_oracle.py", [job], tmp_path)
    open_images = open_gemma4_records if is_gemma else open_records
    datasets = open_images(tokenizer, tmp_path, [{"messages": messages}], images=len(names))
    row = datasets.train.sequences[0]
    wanted = np.load(tmp_path / "processed.npz")
    ids = wanted["input_ids"][0]
    np.testing.assert_array_equal(row["tokens"][: len(ids)], ids[: len(row["tokens"])])
    is_image = wanted["mm_token_type_ids"][0] == 1
    np.testing.assert_array_equal(row["image_tokens_left"][: len(ids)] > 0, is_image)
    if is_gemma:
        assert "rotary_positions" not in row
        check_gemma4_pixels(row, wanted)
        return
    grids = wanted["image_grid_thw"][:, 1:]
    np.testing.assert_array_equal(row["image_grids"], grids)
    counts = grids.prod(1)
    used = [patches[:count] for patches, count in zip(row["images"], counts, strict=True)]
    mine = normalize_image(jnp.asarray(np.concatenate(used))).transpose(0, 3, 1, 2)
    theirs = wanted["pixel_values"].reshape(len(mine), 3, 2, PATCH, PATCH)
    for frame in range(2):
        np.testing.assert_allclose(mine, theirs[:, :, frame], rtol=0, atol=1e-6)


def check_gemma4_pixels(row: Any, wanted: Any) -> None:
    """Check that the patches are those of the processor, which orders them by rows."""
    places = wanted["image_position_ids"]
    grids = places.max(1)[:, ::-1] + 1
    np.testing.assert_array_equal(row["image_grids"], grids)
    for patches, theirs, (rows, columns) in zip(
        row["images"], wanted["pixel_values"], grids, strict=True
    ):
        mine = patches[: rows * columns].reshape(rows // 3, columns // 3, 3, 3, -1)
        mine = mine.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        np.testing.assert_allclose(mine / 255, theirs[: rows * columns], rtol=0, atol=1e-6)
        assert not patches[rows * columns :].any() and not theirs[rows * columns :].any()
