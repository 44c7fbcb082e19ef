"""Images in chat records: decoding, tokens, masks, packing and errors."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxpipe.config.image_format import image_format
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.data.datasets import build_datasets
from maxpipe.data.images import BadImage, decode_image, expand_image_tokens, image_tokens_left
from maxpipe.data.inspect_batch import inspect_sequence
from maxpipe.data.loader import Datasets
from maxpipe.data.tokenizer import open_tokenizer
from maxpipe.errors import Code, ConfigError, StorageError
from tests.data.conversations import GEMMA, IMAGE_TOKENS, make_tokenizer, write_records

SIZE, PER_IMAGE, TOKENS = 12, 4, 96
ANSWER = {"role": "assistant", "content": "A small red square."}


def make_png(color: tuple[int, ...] = (250, 10, 20), size: tuple[int, int] = (20, 30)) -> bytes:
    """Return a PNG whose pixels differ, so that resizing changes them."""
    random = np.random.default_rng(sum(color))
    noise = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
    noise[: size[1] // 2] = color
    return encode(Image.fromarray(noise))


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def question(*images: dict[str, Any], text: str = "What is this?") -> dict[str, Any]:
    parts = [{"type": "image", **image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tokenizer"
    return make_tokenizer(folder, GEMMA, ("<start_of_turn>", "<end_of_turn>", *IMAGE_TOKENS))


def config_of(tokenizer: Path, records: Path, *more: str, images: int = 2) -> Config:
    from maxpipe.config.sections.tokenizer import TokenizerConfig

    opened = open_tokenizer(TokenizerConfig(kind="huggingface", path=str(tokenizer)))
    begin, token, end = (opened.special_tokens[name] for name in IMAGE_TOKENS)
    tower = {
        **{"num_vision_layers": 1, "d_vision": 8, "num_vision_heads": 2, "d_vision_mlp": 8},
        **{"image_size": SIZE, "patch_size": 3, "tokens_per_image": PER_IMAGE},
        **{"image_token_id": token, "image_begin_token_id": begin, "image_end_token_id": end},
    }
    known = {
        "model": {
            **{"family": "gemma3", "num_layers": 2, "d_model": 8, "num_heads": 2},
            **{"num_kv_heads": 1, "head_dim": 4, "d_mlp": 8, "vocab_size": 512},
            **{"tied_embeddings": True, "gemma3": tower},
        },
        "train": {
            **{"objective": "sft", "steps": 1, "batch_size": 2, "sequence_length": TOKENS},
        },
        "data": {
            **{"source": records.suffix[1:], "path": str(records), "chat": "messages"},
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
) -> tuple[Config, Datasets]:
    path = write_records(folder / "records.jsonl", records)
    config = config_of(tokenizer, path, *more, images=images)
    return config, build_datasets(config, lambda: None)


def error_of(tokenizer: Path, folder: Path, *records: Any, images: int = 2) -> Any:
    with pytest.raises(ConfigError) as error:
        open_records(tokenizer, folder, list(records), images=images)
    return error.value.problems[0]


def test_batch_contains_resized_images_tokens_and_mask(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "art").mkdir()
    (tmp_path / "art" / "one.png").write_bytes(make_png())
    inline = base64.b64encode(make_png((0, 90, 5))).decode()
    records = [
        {"messages": [question({"path": "art/one.png"}), ANSWER]},
        {
            "messages": [
                question({"image": f"data:image/png;base64,{inline}"}, {"path": "art/one.png"}),
                ANSWER,
            ]
        },
        {"messages": [{"role": "user", "content": "No image"}, ANSWER]},
    ]
    config, datasets = open_records(tokenizer, tmp_path, records)
    batch = datasets.train.batch(0)
    assert batch["images"].shape == (2, 2, SIZE, SIZE, 3)
    assert batch["images"].dtype == np.uint8
    image = image_format(config)
    assert image is not None
    is_image = batch["tokens"] == image.token_id
    np.testing.assert_array_equal(is_image, batch["image_tokens_left"] > 0)
    # The loss excludes image tokens, whose targets are one position earlier.
    assert not batch["loss_mask"][batch["targets"] == image.token_id].any()
    seen = 0
    for row in range(2):
        ends = np.flatnonzero(batch["image_tokens_left"][row] == 1)
        for number, place in enumerate(ends):
            tokens = batch["tokens"][row]
            assert tokens[place - PER_IMAGE] == image.begin_id
            assert tokens[place + 1] == image.end_id
            left = batch["image_tokens_left"][row][place - PER_IMAGE + 1 : place + 1]
            np.testing.assert_array_equal(left, np.arange(PER_IMAGE, 0, -1))
            assert batch["images"][row, number].any()
        assert not batch["images"][row, len(ends) :].any()
        seen += len(ends)
    # The step has 2 of the sequences; the two records with images need 3 images together.
    assert 1 <= seen <= 3


def test_pixels_equal_those_of_pillow(tokenizer: Path, tmp_path: Path) -> None:
    raw = make_png()
    (tmp_path / "a.png").write_bytes(raw)
    record = {"messages": [question({"bytes": None, "path": "a.png"}), ANSWER]}
    _, datasets = open_records(tokenizer, tmp_path, [record])
    wanted = Image.open(io.BytesIO(raw)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(datasets.train.batch(0)["images"][0, 0], np.asarray(wanted))


def test_parquet_rows_with_bytes_and_a_field_of_images(tokenizer: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    first, second = make_png(), make_png((1, 2, 200))
    rows = [
        {
            "images": [{"bytes": first, "path": None}, {"bytes": second, "path": None}],
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}] * 2},
                {"role": "assistant", "content": [{"type": "text", "text": "Two images."}]},
            ],
        }
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = config_of(tokenizer, tmp_path / "rows.parquet")
    batch = build_datasets(config, lambda: None).train.batch(0)
    for number, raw in enumerate((first, second)):
        np.testing.assert_array_equal(batch["images"][0, number], decode_image(raw, SIZE))


def test_image_tokens_are_shown_as_a_placeholder(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png())
    record = {"messages": [question({"path": "a.png"}, {"path": "a.png"}), ANSWER]}
    _, datasets = open_records(tokenizer, tmp_path, [record])
    (segment,) = inspect_sequence(datasets.train, datasets.tokenizer, 0, 0).segments
    text = "".join(piece.text for piece in segment.pieces)
    shown = f"<start_of_image>[image of {PER_IMAGE} tokens]<end_of_image>"
    assert text.count(shown) == 2 and "<image_soft_token>" not in text
    assert not any(piece.is_trained for piece in segment.pieces if "[image" in piece.text)


def test_packing_limits_the_images_of_a_sequence(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png())
    records = [
        {"messages": [question(*[{"path": "a.png"}] * (1 + n % 2), text="?" * n), ANSWER]}
        for n in range(9)
    ]
    _, datasets = open_records(tokenizer, tmp_path, records, "train.sequence_length=512")
    sequences = datasets.train.sequences
    counts = []
    for number in range(len(sequences)):
        arrays = sequences[number]
        counts.append(int((arrays["image_tokens_left"] == 1).sum()))
        assert len(arrays["images"]) == counts[-1]
    assert sum(counts) == 9 + 4 and max(counts) == 2


def test_resumed_loader_returns_the_same_images(tokenizer: Path, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(make_png((number, 30, 40)))
    records = [{"messages": [question({"path": f"{n}.png"}), ANSWER]} for n in range(4)]
    _, first = open_records(tokenizer, tmp_path, records)
    _, again = open_records(tokenizer, tmp_path, records)
    assert first.fingerprint() == again.fingerprint()
    for step in range(3):
        for name, array in first.train.batch(step).items():
            np.testing.assert_array_equal(array, again.train.batch(step)[name])
    (tmp_path / "2.png").write_bytes(make_png((9, 9, 9)))
    _, changed = open_records(tokenizer, tmp_path, records)
    with pytest.raises(StorageError, match="the file has changed"):
        for step in range(4):
            changed.train.batch(step)


def bomb() -> bytes:
    """Return a PNG whose header declares 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def animated() -> bytes:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:])


HOSTILE = {
    "empty": (b"", "1 to"),
    "text": (b"GIF89a but not an image", "complete image"),
    "truncated": (make_png()[:-60], "complete image"),
    "bomb": (bomb(), "at most"),
    "animated": (animated(), "2 frames"),
    "16-bit": (encode(Image.fromarray(np.full((4, 4), 40_000, np.uint16))), "8 bits per channel"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "complete image"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unusable_images_name_the_file_and_the_record(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    raw, rule = HOSTILE[name]
    (tmp_path / "a.png").write_bytes(raw)
    good = {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}
    record = {"messages": [question({"path": "a.png"}), ANSWER]}
    problem = error_of(tokenizer, tmp_path, good, record)
    assert problem.code == Code.DATA_IMAGE
    assert problem.where.endswith("records.jsonl:2")
    assert "a.png" in str(problem.value) and "image 1, message 1" in str(problem.value)
    assert rule in problem.rule


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("missing.png", "readable file"),
        ("../a.png", "without `..`"),
        ("b/../../a.png", "without `..`"),
        ("/etc/hostname", "without `..`"),
        ("https://example.com/a.png", "does not download"),
        ("file:///etc/hostname", "does not download"),
        ("b\0.png", "without `..`"),
        (".", "readable file"),
    ],
)
def test_unusable_paths_are_errors(path: str, rule: str, tokenizer: Path, tmp_path: Path) -> None:
    problem = error_of(tokenizer, tmp_path, {"messages": [question({"path": path}), ANSWER]})
    assert problem.code == Code.DATA_IMAGE and rule in problem.rule


def test_wrong_numbers_of_images_are_errors(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png())
    three = {"messages": [question(*[{"path": "a.png"}] * 3), ANSWER]}
    problem = error_of(tokenizer, tmp_path, three)
    assert problem.code == Code.DATA_IMAGE and problem.value == "3 images"
    assert "max_images_per_sequence=3" in problem.action
    lacks = {"messages": [question({}), ANSWER]}
    assert "without a path" in error_of(tokenizer, tmp_path, lacks).rule
    more = {"messages": [question({}), ANSWER], "images": ["a.png", "a.png"]}
    assert "2 images" in error_of(tokenizer, tmp_path, more).rule
    spelled = {"messages": [question({"path": "a.png"}, text="<start_of_image>"), ANSWER]}
    assert "once for each" in error_of(tokenizer, tmp_path, spelled).rule


def test_images_require_the_limit(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(make_png())
    path = write_records(
        tmp_path / "records.jsonl", [{"messages": [question({"path": "a.png"}), ANSWER]}]
    )
    with pytest.raises(ConfigError) as error:
        config_of(tokenizer, path, images=0)
    assert error.value.problems[0].code == Code.MODEL_IMAGES
    config = config_of(tokenizer, path, "model.frozen=[vision.*]", images=0)
    with pytest.raises(ConfigError) as error:
        build_datasets(config, lambda: None)
    assert error.value.problems[0].code == Code.DATA_IMAGE
    assert "max_images_per_sequence" in error.value.problems[0].action


@pytest.mark.parametrize(
    "setting",
    ["data.packing=concatenate", "data.long_conversations=split", "mesh.ici_context=2"],
)
def test_settings_that_images_do_not_support(setting: str, tokenizer: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "records.jsonl", [{"messages": [ANSWER]}])
    with pytest.raises(ConfigError) as error:
        config_of(tokenizer, path, setting)
    assert Code.MODEL_IMAGES in [problem.code for problem in error.value.problems]


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "LA", "RGBA", "1"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.open(io.BytesIO(make_png())).convert(mode)
    raw = encode(image, "TIFF" if mode == "CMYK" else "PNG")
    assert decode_image(raw, SIZE).shape == (SIZE, SIZE, 3)


def test_transparent_pixels_become_white_and_orientation_is_applied() -> None:
    clear = Image.new("RGBA", (5, 5), (0, 0, 0, 0))
    assert (decode_image(encode(clear), 3) == 255).all()
    wide = Image.new("RGB", (4, 2), "black")
    wide.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 3  # rotated by 180 degrees
    turned = decode_image(encode(wide, exif=exif), 8)
    assert turned[-1, -1, 0] > 200 and turned[0, 0, 0] == 0


def test_spans_move_with_the_tokens_of_images(tokenizer: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "records.jsonl", [{"messages": [ANSWER]}])
    config = config_of(tokenizer, path)
    image = image_format(config)
    opened = open_tokenizer(config.tokenizer)
    assert image is not None
    text = "ab<start_of_image>cd<start_of_image>ef"
    spans = [(0, 2), (text.index("cd"), text.index("cd") + 2), (text.index("ef"), len(text))]
    found = expand_image_tokens(text, spans, [PER_IMAGE] * 2, image, opened.special_tokens)
    assert [found.text[a:b] for a, b in found.spans] == ["ab", "cd", "ef"]
    ids = opened.encode_chat(found.text)
    assert (image_tokens_left(ids, image, [PER_IMAGE] * 2) > 0).sum() == 2 * PER_IMAGE
    with pytest.raises(BadImage):
        image_tokens_left(ids, image, [PER_IMAGE])
