"""Images of different sizes in chat records: patches, tokens, positions and errors."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxpipe.config.image_format import PatchFormat
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.datasets import build_datasets
from maxpipe.data.image_grids import resized_shape, rotary_positions, to_patches
from maxpipe.data.inspect_batch import inspect_sequence
from maxpipe.data.loader import Datasets
from maxpipe.data.tokenizer import open_tokenizer
from maxpipe.errors import Code, ConfigError
from tests.data.conversations import (
    GEMMA4,
    GEMMA4_TOKENS,
    QWEN_TOKENS,
    QWEN_VL,
    make_tokenizer,
    write_records,
)
from tests.data.test_images import ANSWER, encode, make_png, question

PATCH, LEAST, MOST, TOKENS = 4, 128, 1024, 128
UNIT, SOFT_TOKENS = 2 * PATCH, 70
SMALL = {
    **{"num_layers": 2, "d_model": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4},
    **{"d_mlp": 8, "vocab_size": 512},
}
FORM = PatchFormat(PATCH, 2, LEAST, MOST, 0, "qwen3_5")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grids") / "tokenizer"
    return make_tokenizer(folder, QWEN_VL, QWEN_TOKENS)


def qwen_model(tokenizer: Path) -> dict[str, Any]:
    """Return the `model` section of a Qwen3.5 model with images."""
    opened = open_tokenizer(TokenizerConfig(kind="huggingface", path=str(tokenizer)))
    begin, token, end, video = (opened.special_tokens[name] for name in QWEN_TOKENS)
    tower = {
        **{"num_vision_layers": 1, "d_vision": 8, "num_vision_heads": 2, "d_vision_mlp": 8},
        **{"patch_size": PATCH, "num_position_embeddings": 16, "min_pixels": LEAST},
        **{"max_pixels": MOST, "image_token_id": token, "image_begin_token_id": begin},
        **{"image_end_token_id": end, "video_token_id": video, "full_attention_interval": 2},
    }
    return {"family": "qwen3_5", **SMALL, "qwen3_5": tower}


def gemma4_model(tokenizer: Path) -> dict[str, Any]:
    """Return the `model` section of a Gemma 4 model with images."""
    opened = open_tokenizer(TokenizerConfig(kind="huggingface", path=str(tokenizer)))
    begin, token, end, video = (opened.special_tokens[name] for name in GEMMA4_TOKENS)
    tower = {
        **{"num_vision_layers": 1, "d_vision": 8, "num_vision_heads": 2, "d_vision_mlp": 8},
        **{"patch_size": PATCH, "max_soft_tokens": SOFT_TOKENS, "image_token_id": token},
        **{"image_begin_token_id": begin, "image_end_token_id": end, "video_token_id": video},
        "global_head_dim": 4,
    }
    return {"family": "gemma4", **SMALL, "tied_embeddings": True, "gemma4": tower}


def config_of(
    tokenizer: Path,
    records: Path,
    *more: str,
    images: int = 2,
    model: Any = qwen_model,
    length: int = TOKENS,
) -> Config:
    known = {
        "model": model(tokenizer),
        "train": {"objective": "sft", "steps": 1, "batch_size": 2, "sequence_length": length},
        "data": {
            **{"source": "jsonl", "path": str(records), "chat": "messages"},
            **{"validation_fraction": 0.0, "long_conversations": "drop"},
            **{"max_images_per_sequence": images},
        },
        "eval": {"batches": 0},
        "tokenizer": {"kind": "huggingface", "path": str(tokenizer)},
        "run": {"dir": str(records.parent / "runs")},
    }
    return load(list(more), known, "test", to_train=True).config


def open_records(
    tokenizer: Path, folder: Path, records: list[Any], *more: str, images: int = 2
) -> Datasets:
    path = write_records(folder / "records.jsonl", records)
    return build_datasets(config_of(tokenizer, path, *more, images=images), lambda: None)


def open_gemma4_records(
    tokenizer: Path, folder: Path, records: list[Any], *more: str, images: int = 2
) -> Datasets:
    path = write_records(folder / "records.jsonl", records)
    options: dict[str, Any] = {"images": images, "model": gemma4_model, "length": 1024}
    return build_datasets(config_of(tokenizer, path, *more, **options), lambda: None)


def error_of(tokenizer: Path, folder: Path, record: Any, *more: str) -> Any:
    with pytest.raises(ConfigError) as error:
        open_records(tokenizer, folder, [record], *more)
    return error.value.problems[0]


def test_batch_contains_patches_grids_and_positions(tokenizer: Path, tmp_path: Path) -> None:
    raw = {"wide.png": make_png(size=(40, 16)), "tall.png": make_png((1, 2, 3), size=(9, 25))}
    for name, content in raw.items():
        (tmp_path / name).write_bytes(content)
    record = {"messages": [question(*({"path": name} for name in raw)), ANSWER]}
    short = {"messages": [{"role": "user", "content": "No image"}, ANSWER]}
    batch = open_records(tokenizer, tmp_path, [record, short]).train.batch(0)
    row = next(n for n in range(2) if batch["image_tokens_left"][n].any())
    assert batch["images"].shape == (2, 2, 64, PATCH, PATCH, 3)
    np.testing.assert_array_equal(batch["image_grids"][row], [(4, 10), (6, 2)])
    left, positions = batch["image_tokens_left"][row], batch["rotary_positions"][row]
    first, second = np.flatnonzero((left > 0) & (np.roll(left, 1) <= 1))
    assert left[first] == 10 and left[second] == 3
    start = positions[first, 0]
    np.testing.assert_array_equal(positions[first - 1], [start - 1] * 3)
    rows, columns = np.divmod(np.arange(10), 5)
    wanted = np.stack([0 * rows, rows, columns], -1) + start
    np.testing.assert_array_equal(positions[first : first + 10], wanted)
    np.testing.assert_array_equal(positions[first + 10], [start + 5] * 3)
    np.testing.assert_array_equal(positions[second + 3], [positions[second, 0] + 3] * 3)
    assert not batch["loss_mask"][row][batch["targets"][row] == batch["tokens"][row][first]].any()
    # The order of patches is that of the squares which become one token.
    image = Image.open(io.BytesIO(raw["wide.png"])).resize((40, 16), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    np.testing.assert_array_equal(batch["images"][row, 0, 1], pixels[:PATCH, PATCH : 2 * PATCH])
    np.testing.assert_array_equal(batch["images"][row, 0, 2], pixels[PATCH : 2 * PATCH, :PATCH])
    assert not batch["images"][row, 0, 40:].any()


def test_positions_of_packed_documents_start_at_0(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png(size=(24, 16)))
    records = [
        {"messages": [question({"path": "a.png"}, text="?" * number), ANSWER]}
        for number in range(3)
    ]
    records += [{"messages": [{"role": "user", "content": "No image"}, ANSWER]}]
    settings = ("data.packing=first_fit", "train.sequence_length=512")
    batch = open_records(tokenizer, tmp_path, records, *settings, images=4).train.batch(0)
    for row in range(2):
        ids = batch["segment_ids"][row]
        for segment in range(1, ids.max() + 1):
            tokens = ids == segment
            left, rotary = batch["image_tokens_left"][row][tokens], batch["rotary_positions"][row]
            grids = np.array([(4, 6)])[: (left == 1).sum()]
            alone = rotary_positions(left, grids, FORM)
            np.testing.assert_array_equal(rotary[tokens], alone)
            assert alone[0].tolist() == [0, 0, 0]
    assert (batch["segment_ids"].max(1) > 1).any()


def test_placeholder_shows_the_number_of_tokens(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png(size=(24, 16)))
    (tmp_path / "b.png").write_bytes(make_png(size=(8, 32)))
    record = {"messages": [question({"path": "a.png"}, {"path": "b.png"}), ANSWER]}
    datasets = open_records(tokenizer, tmp_path, [record])
    (segment,) = inspect_sequence(datasets.train, datasets.tokenizer, 0, 0).segments
    text = "".join(piece.text for piece in segment.pieces)
    assert "<|vision_start|>[image of 6 tokens]<|vision_end|>" in text
    assert "<|vision_start|>[image of 4 tokens]<|vision_end|>" in text


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((20, 30), (16, 32)),
        ((21, 30), (24, 32)),
        ((4, 4), (16, 16)),
        ((300, 100), (48, 16)),
        ((12, 20), (16, 16)),
    ],
)
def test_sizes_are_multiples_within_the_limits(
    size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    found = resized_shape(*size, FORM)
    assert found == wanted
    assert not any(side % UNIT for side in found) and LEAST <= found[0] * found[1] <= MOST


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((100, 100), (96, 96)),
        ((5, 3), (120, 72)),
        ((1000, 900), (96, 84)),
        ((400, 3), (840, 12)),
        ((30, 400), (24, 360)),
        ((1, 9), (24, 300)),
    ],
)
def test_sizes_of_gemma4_are_the_largest(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    form = PatchFormat(PATCH, 3, 0, 12**2 * SOFT_TOKENS, 0, "gemma4", has_rotary_positions=False)
    assert resized_shape(*size, form) == wanted
    assert resized_shape(size[1], size[0], form) == (wanted[1], wanted[0])


def test_gemma4_has_no_rotary_positions(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", GEMMA4, GEMMA4_TOKENS)
    (tmp_path / "a.png").write_bytes(make_png(size=(8, 4)))
    record = {"messages": [question({"path": "a.png"}), ANSWER]}
    datasets = open_gemma4_records(tokenizer, tmp_path, [record])
    batch = datasets.train.batch(0)
    assert "rotary_positions" not in batch and batch["images"].shape[2:] == (630, PATCH, PATCH, 3)
    np.testing.assert_array_equal(batch["image_grids"][0], [(15, 33), (0, 0)])
    assert batch["image_tokens_left"][0].max() == 55
    (segment,) = inspect_sequence(datasets.train, datasets.tokenizer, 0, 0).segments
    text = "".join(piece.text for piece in segment.pieces)
    assert "\n\n<|image>[image of 55 tokens]<image|>\n\n" in text
    for token in GEMMA4_TOKENS[:3]:
        spelled = {"messages": [question({"path": "a.png"}, text=token), ANSWER]}
        with pytest.raises(ConfigError, match="1 time, once for each image"):
            open_gemma4_records(tokenizer, tmp_path, [spelled])


def test_patches_are_padded() -> None:
    pixels = np.arange(16 * 8 * 3, dtype=np.uint8).reshape(16, 8, 3)
    patches = to_patches(pixels, FORM, 12)
    assert patches.shape == (12, PATCH, PATCH, 3) and not patches[8:].any()
    np.testing.assert_array_equal(patches[4], pixels[8:12, :4])


def test_unusable_images_are_errors(tokenizer: Path, tmp_path: Path) -> None:
    record = {"messages": [question({"path": "a.png"}), ANSWER]}
    (tmp_path / "a.png").write_bytes(make_png()[:-60])
    assert "complete image" in error_of(tokenizer, tmp_path, record).rule
    (tmp_path / "a.png").write_bytes(encode(Image.new("RGB", (1000, 4))))
    assert "ratio of at most 200" in error_of(tokenizer, tmp_path, record).rule
    # With the minimum height of one token, the image has more pixels than the maximum.
    (tmp_path / "a.png").write_bytes(encode(Image.new("RGB", (1600, 9))))
    problem = error_of(tokenizer, tmp_path, record)
    assert problem.code == Code.DATA_IMAGE and "max_pixels (1024)" in problem.rule
    assert "1600 x 9, which becomes 424 x 8" in problem.rule
    least = int(problem.action.split("set model.qwen3_5.max_pixels=")[1].rstrip("."))
    assert math.prod(resized_shape(9, 1600, FORM._replace(max_pixels=least))) == least


def test_wrong_tokens_and_videos_are_errors(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png())
    image = {"path": "a.png"}
    for text in ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"):
        spelled = {"messages": [question(image, text=text), ANSWER]}
        assert "1 time, once for each image" in error_of(tokenizer, tmp_path, spelled).rule
        without = {"messages": [{"role": "user", "content": text}, ANSWER]}
        assert "0 times, once for each image" in error_of(tokenizer, tmp_path, without).rule
    spelled = {"messages": [question(image, text="<|video_pad|>"), ANSWER]}
    assert "videos are not supported" in error_of(tokenizer, tmp_path, spelled).rule
    part = {"type": "video", "video": "a.mp4"}
    video = {"messages": [{"role": "user", "content": [part]}, ANSWER]}
    assert "parts of type video are not supported" in error_of(tokenizer, tmp_path, video).rule
    three = {"messages": [question(image, image, image), ANSWER]}
    assert error_of(tokenizer, tmp_path, three).value == "3 images"


def test_records_with_images_are_not_truncated(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png(size=(64, 16)))
    record = {"messages": [question({"path": "a.png"}), ANSWER]}
    settings = ("train.sequence_length=16", "data.long_conversations=error")
    problem = error_of(tokenizer, tmp_path, record, *settings)
    assert "train.sequence_length" in f"{problem.rule} {problem.action}"
