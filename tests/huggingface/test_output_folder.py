"""`maxpipe import` and `maxpipe export`: bitwise round trips, and no files after failures."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.checkpoint import manifest, slab_writer
from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.folder import CheckpointFolder
from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.huggingface import folder as folder_module
from maxpipe.huggingface import import_
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.output_folder import atomic_folder
from tests.huggingface import maker

Capture = pytest.CaptureFixture[str]

TRAVELLING = {"tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
TRAVELLING |= {"qwen.tiktoken", "tiktoken.model"}

MAKERS = {
    "gemma3": maker.gemma3,
    "gemma4": maker.gemma4,
    "gemma4_small": maker.gemma4_small,
    "mixtral": maker.mixtral,
    "gpt_oss": maker.gpt_oss,
    "qwen3_next": maker.qwen3_next,
    "qwen3_5": maker.qwen3_5,
    "qwen3_5_moe": maker.qwen3_5_moe,
    "glm4_moe": maker.glm4_moe,
    "minimax_m2": maker.minimax_m2,
    "llama4": maker.llama4,
    "granite4": maker.granite4,
    "nemotron_h": maker.nemotron_h,
    "falcon_h1": maker.falcon_h1,
    "kimi_linear": maker.kimi_linear,
    "deepseek_v4": maker.deepseek_v4,
    "olmo_hybrid": maker.olmo_hybrid,
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder `hf` and its import `ckpt`."""
    base = tmp_path_factory.mktemp("imported")
    config, tensors = maker.llama(bos_token_id=3)
    maker.write(base / "hf", config, tensors, files=3)
    for name in TRAVELLING:
        (base / "hf" / name).write_text(f'{{"of": "{name}"}}')
    (base / "hf" / ".hidden.model").write_text("no tokenizer")
    (base / "hf" / "modeling_llama.py").write_text("raise SystemExit")
    assert main(["import", str(base / "hf"), "--out", str(base / "ckpt")]) == 0
    return base


def test_export_of_import_reproduces_folder(
    imported: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(imported / "ckpt"), "--format", "hf", str(out)]) == 0
    maker.same_bits(maker.read(out), maker.read(imported / "hf"))
    config = json.loads((out / "config.json").read_text())
    wanted = json.loads((imported / "hf" / "config.json").read_text())
    assert wanted.items() <= config.items()
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {*os.listdir(out)} == TRAVELLING | {"config.json", "model.safetensors"}
    for name in TRAVELLING:
        assert (out / name).read_bytes() == (imported / "hf" / name).read_bytes()
    assert os.stat(out).st_mode & 0o777 == os.stat(imported / "ckpt").st_mode & 0o777 != 0o700
    # Repeating the command is rejected.
    assert main(["export", str(imported / "ckpt"), "--format", "hf", str(out)]) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_only_links_into_download_cache_are_followed(
    imported: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Otherwise an export could publish the target of any link in an untrusted folder."""
    folder = tmp_path / "models--a--b" / "snapshots" / "main"
    shutil.copytree(imported / "hf", folder)
    name, secret = "tokenizer_config.json", tmp_path / "secret"
    secret.write_text("mine")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (folder / name).rename(blobs / "0a1b")
    (folder / name).symlink_to("../../blobs/0a1b")
    assert main(["import", str(folder), "--out", str(tmp_path / "cached")]) == 0
    copied = (tmp_path / "cached" / "huggingface" / name).read_bytes()
    assert copied == (blobs / "0a1b").read_bytes()
    (folder / "qwen.tiktoken").unlink()
    (folder / "qwen.tiktoken").symlink_to(secret)
    assert main(["import", str(folder), "--out", str(tmp_path / "other")]) == 2
    assert f"must not link to {secret}" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"models--a--b", "secret", "cached"}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("gemma3", "F16"), ("mixtral", "F32"), ("gpt_oss", "BF16"), ("qwen3_next", "BF16")),
        *(("qwen3_5", "BF16"), ("qwen3_5_moe", "F16"), ("glm4_moe", "BF16"), ("minimax_m2", "F32")),
        *(("llama4", "BF16"), ("gemma4", "BF16"), ("gemma4_small", "F16")),
        *(("granite4", "BF16"), ("nemotron_h", "F32"), ("kimi_linear", "BF16")),
        ("deepseek_v4", "BF16"),
        *(("olmo_hybrid", "BF16"), ("falcon_h1", "BF16")),
    ],
)
def test_other_families_and_dtypes_round_trip_bitwise(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    # Split layers into slabs and slabs into blocks, as for large models.
    monkeypatch.setattr(import_, "SLAB_BYTES", 400)
    monkeypatch.setattr(folder_module, "_BLOCK_ELEMENTS", 30)
    config, tensors = MAKERS[kind](dtype)
    names = {"nemotron_h": "backbone.norm_f", "falcon_h1": "model.final_layernorm"}
    norm = f"{names.get(kind, 'model.norm')}.weight"
    tensors[norm] = tensors[norm].astype(np.float32)
    maker.write(tmp_path / "hf", config, tensors, files=2)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 0
    ignored = {
        **{"qwen3_next": "mtp.fc.weight", "nemotron_h": "mtp.layers.0.norm.weight"},
        "deepseek_v4": "mtp.0.norm.weight",
    }
    if kind in ignored:
        del tensors[ignored[kind]]
        text = f"omitted, because this model does not use them: {ignored[kind]}"
        assert text in capsys.readouterr().out
    export(
        parse_address(str(tmp_path / "ckpt")), str(tmp_path / "out"), None, print, shard_bytes=3000
    )
    maker.same_bits(maker.read(tmp_path / "out"), tensors)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert len({*index["weight_map"].values()}) > 3
    open_folder(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("make", "architecture", "vision"),
    [
        (maker.gemma3, "Gemma3ForConditionalGeneration", "vision_tower.x.weight"),
        (maker.qwen3_5, "Qwen3_5ForConditionalGeneration", "model.visual.x.weight"),
        (maker.qwen3_5_moe, "Qwen3_5MoeForConditionalGeneration", "model.visual.x.weight"),
        (maker.ministral3, "Mistral3ForConditionalGeneration", "vision_tower.x.weight"),
        (maker.llama4, "Llama4ForConditionalGeneration", "vision_model.x.weight"),
    ],
)
def test_language_model_of_multimodal_model_is_read(
    make: Any, architecture: str, vision: str, tmp_path: Path
) -> None:
    inner, tensors = make()
    inner.pop("architectures")
    config = {"architectures": [architecture], "text_config": inner}
    others = {vision: np.ones(3, np.float32)}
    for prefix in ("language_model.model.", "model.language_model."):
        named = {re.sub("^model[.]", prefix, name): each for name, each in tensors.items()}
        folder = maker.write(tmp_path / prefix, config, named | others)
        found = open_folder(str(folder))
        assert found.unused_tensors == (vision,)
        region = found.read_region("embedding", np.dtype(np.float32), [slice(None)] * 2)
        assert (region == tensors["model.embed_tokens.weight"].astype(np.float32)).all()


def test_parameter_region_equals_slice_of_whole(tmp_path: Path) -> None:
    config, tensors = maker.mixtral("F32")
    found = open_folder(str(maker.write(tmp_path / "hf", config, tensors)))
    whole = found.read_region("layers.experts.up", np.dtype(np.float32), [slice(None)] * 4)
    assert whole.shape == (maker.LAYERS, maker.WIDTH, maker.EXPERTS, maker.MLP)
    name = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    assert (whole[2, :, 1] == tensors[name].T).all()
    part = (slice(1, 3), slice(2, 9), slice(1, 2), slice(5, None))
    assert (found.read_region("layers.experts.up", whole.dtype, part) == whole[part]).all()


def test_added_vocabulary_rows_are_mean_of_old_rows(imported: Path) -> None:
    found = open_folder(str(imported / "hf"))
    size, dtype = maker.VOCAB + 20, np.dtype(np.float32)
    whole = found.read_region("head", dtype, [slice(None)] * 2, size)
    old = maker.read(imported / "hf")["lm_head.weight"].astype(np.float32).T
    assert whole.shape == (maker.WIDTH, size)
    assert (whole[:, : maker.VOCAB] == old).all()
    assert np.allclose(whole[:, maker.VOCAB :], old.mean(1, keepdims=True), atol=1e-6)
    for part in (
        (slice(3, 7), slice(maker.VOCAB - 2, size)),
        (slice(None), slice(maker.VOCAB + 4, size)),
    ):
        assert (found.read_region("head", dtype, part, size) == whole[part]).all()


def _without(name: str) -> Callable[[Path, dict[str, Any], maker.Tensors], None]:
    def write(folder: Path, config: dict[str, Any], tensors: maker.Tensors) -> None:
        maker.write(folder, config, {n: each for n, each in tensors.items() if n != name})

    return write


def _with(name: str, array: np.ndarray) -> Callable[[Path, dict[str, Any], maker.Tensors], None]:
    def write(folder: Path, config: dict[str, Any], tensors: maker.Tensors) -> None:
        maker.write(folder, config, {**tensors, name: array})

    return write


def _index(change: Callable[[dict[str, Any]], object]):
    def write(folder: Path, config: dict[str, Any], tensors: maker.Tensors) -> None:
        maker.write(folder, config, tensors, files=2)
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content["weight_map"])
        path.write_text(json.dumps(content))

    return write


def _pickled(folder: Path, config: dict[str, Any], tensors: maker.Tensors) -> None:
    maker.write(folder, config, {})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncated(folder: Path, config: dict[str, Any], tensors: maker.Tensors) -> None:
    maker.write(folder, config, tensors)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


NORM = "model.norm.weight"
ROWS = np.zeros((maker.WIDTH,), np.float32)
BAD = {
    "missing tensor": (_without(NORM), "lacks 1 tensor: 'model.norm.weight'"),
    "surplus tensor": (_with("model.layers.3.x", ROWS), "'model.layers.3.x'"),
    "path as a name": (_with("../../x", ROWS), "'../../x'"),
    "wrong shape": (_with(NORM, ROWS[:3]), "must have the shape 10"),
    "wrong type": (_with(NORM, ROWS.astype(np.int8)), "must have dtype F32"),
    "NaN": (_with(NORM, ROWS + np.nan), "10 values that are NaN"),
    "infinite": (_with(NORM, ROWS - np.inf), "NaN or infinite"),
    "file outside": (
        _index(lambda m: m.update({NORM: "../x.safetensors"})),
        "only files in this folder",
    ),
    "absolute file": (
        _index(lambda m: m.update({NORM: "/etc/passwd"})),
        "only files in this folder",
    ),
    "another kind of file": (
        _index(lambda m: m.update({NORM: "x.bin"})),
        "only files in this folder",
    ),
    "missing file": (_index(lambda m: m.update({NORM: "x.safetensors"})), "has no x.safetensors"),
    "not in its file": (
        _index(lambda m: m.update({NORM: next(f for f in m.values() if f != m[NORM])})),
        "Copy the complete folder again",
    ),
    "not in the index": (_index(lambda m: m.pop(NORM)), "maps it to no file"),
    "a number as a file": (_index(lambda m: m.update({NORM: 5})), "weight_map"),
    "pickled": (_pickled, "save_pretrained"),
    "truncated": (_truncated, "ends too early"),
}


@pytest.mark.parametrize("name", BAD)
def test_failed_import_of_invalid_folder_leaves_no_files(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    write, reason = BAD[name]
    write(tmp_path / "hf", *maker.llama("F32"))
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "hf") in error and reason in error
    assert len(error.splitlines()) == 3
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("key", ["num_local_experts", "hidden_size", "vocab_size"])
def test_config_sizes_beyond_tensor_files_are_rejected(
    key: str, tmp_path: Path, capsys: Capture
) -> None:
    config, tensors = maker.mixtral("F32", **{key: 10**15})
    folder = maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_tied_head_is_accepted_only_if_equal_to_embedding(tmp_path: Path, capsys: Capture) -> None:
    config, tensors = maker.llama(tie_word_embeddings=True)
    table = tensors["model.embed_tokens.weight"]
    open_folder(str(maker.write(tmp_path / "same", config, {**tensors, "lm_head.weight": table})))
    folder = maker.write(tmp_path / "other", config, {**tensors, "lm_head.weight": -table})
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 2
    assert "tie_word_embeddings" in capsys.readouterr().err


def test_unknown_keys_and_unused_tensors_are_reported(tmp_path: Path, capsys: Capture) -> None:
    config, tensors = maker.llama(mystery=1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ROWS
    folder = maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 0
    text = capsys.readouterr().out
    assert "'mystery'" in text and "rotary_emb.inv_freq" in text


@pytest.mark.parametrize("folder", ["", "nowhere", "gs://bucket/x", "\0"])
def test_import_of_missing_or_remote_folder_is_rejected(
    folder: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["import", folder, "--out", str(tmp_path / "ckpt")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["a b", "ünï", "v@2", "x#y", "it's", ".dot", "a\nmesh: 3\n#"])
def test_imported_config_loads_from_any_folder_name(name: str, tmp_path: Path) -> None:
    folder = maker.write(tmp_path / "hf", *maker.llama())
    out = tmp_path / name
    assert main(["import", str(folder), "--out", str(out)]) == 0
    data = ["data.source=text", "data.path=x", "train.steps=1"]
    found = load([str(out / "config.yml"), *data]).config
    assert found.checkpoint.restore_from == str(out)
    assert found.run.name.endswith("-tuned")


@pytest.mark.parametrize(
    ("stored", "computed", "most", "rows"),
    [
        ("F32", "float32", 77, 77),
        ("BF16", "bfloat16", 5000, 1024),
        ("F16", "bfloat16", None, 1024),
        ("F32", "float32", 1, 1024),
    ],
)
def test_import_derives_dtypes_and_sequence_length_from_folder(
    stored: str, computed: str, most: int | None, rows: int, tmp_path: Path, capsys: Capture
) -> None:
    folder = maker.write(tmp_path / "hf", *maker.llama(stored, max_position_embeddings=most))
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 0
    assert f" train.sequence_length={rows} " in capsys.readouterr().out
    data = ["data.source=text", "data.path=x", "train.steps=1"]
    run = load([str(tmp_path / "ckpt" / "config.yml"), *data]).config.model
    assert (run.compute_dtype, run.param_dtype) == (computed, "float32")
    saved = CheckpointFolder(tmp_path / "ckpt" / "checkpoints").read_metadata(0).config
    assert saved["model"]["compute_dtype"] == computed
    assert saved["model"]["param_dtype"] == open_folder(str(folder)).model_dtypes["param_dtype"]
    assert saved["train"]["sequence_length"] == rows


def test_interrupt_leaves_no_files(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module.HuggingFaceFolder, "read_region", interrupt)
    assert main(["import", str(imported / "hf"), "--out", str(tmp_path / "ckpt")]) == 130
    monkeypatch.setattr("maxpipe.huggingface.export._read_param", interrupt)
    assert main(["export", str(imported / "ckpt"), str(tmp_path / "out")]) == 130
    assert not os.listdir(tmp_path)


def test_writer_threads_running_after_interrupt_leave_no_files(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        for number in range(300):
            with contextlib.suppress(OSError):
                (folder / "inside").mkdir(exist_ok=True)
                (folder / "inside" / str(number)).touch()
            time.sleep(0.001)

    def interrupted() -> None:
        with atomic_folder(str(tmp_path / "out"), "--out") as here:
            threads.append(threading.Thread(target=write, args=(here,)))
            threads[0].start()
            time.sleep(0.02)
            raise KeyboardInterrupt

    threads: list[threading.Thread] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    threads[0].join()
    assert not os.listdir(tmp_path)


def test_second_interrupt_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, remove = signal.getsignal(signal.SIGINT), shutil.rmtree

    def interrupted(*given: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(*given, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with (
        pytest.raises(KeyboardInterrupt, match="first"),
        atomic_folder(str(tmp_path / "out"), "--out") as here,
    ):
        (here / "inside").touch()
        raise KeyboardInterrupt("first")
    assert not os.listdir(tmp_path) and signal.getsignal(signal.SIGINT) is before


def test_stopped_save_handler_does_not_start() -> None:
    """Orbax may call the handler in another thread after Ctrl-C."""
    handler = slab_writer._Handler(lambda count: None)
    handler.stop()
    with pytest.raises(InterruptedError):
        asyncio.run(handler.serialize([], []))
    assert handler.sums() is None


def test_full_disk_leaves_no_files(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert main(["export", str(imported / "ckpt"), str(tmp_path / "out")]) == 74
    assert "No space left" in capsys.readouterr().err
    importing = ["import", str(imported / "hf"), "--out", str(tmp_path / "ckpt")]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "free_bytes", lambda _: 4321)
        assert main(importing) == 74
    assert "4,321" in capsys.readouterr().err
    # The disk fills up while the weights are being written.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        assert main(importing) == 74
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_partial_folder_of_killed_command_is_removed(imported: Path, tmp_path: Path) -> None:
    dead, alive = tmp_path / ".out.a.partial", tmp_path / ".out.b.partial"
    dead.mkdir()
    alive.mkdir()
    held = os.open(alive, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert main(["export", str(imported / "ckpt"), str(tmp_path / "out")]) == 0
    finally:
        os.close(held)
    assert {*os.listdir(tmp_path)} == {"out", alive.name}


def test_damaged_checkpoint_is_not_exported(
    imported: Path, tmp_path: Path, capsys: Capture
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(imported / "ckpt", copy)
    arrays = (path for path in (copy / "checkpoints" / "0" / "state").rglob("*") if path.is_file())
    largest = max(arrays, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert main(["export", str(copy), str(tmp_path / "out")]) == 74
    assert "differs from the saved content" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["copy"]


def test_metadata_file_checksum_is_verified_on_export(
    imported: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(imported / "ckpt", tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoints" / "0" / "_CHECKPOINT_METADATA"
    path.write_bytes(path.read_bytes() + b" ")
    assert main(["export", str(tmp_path / "copy"), str(tmp_path / "out")]) == 74
    assert "_CHECKPOINT_METADATA" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["copy"]


def test_failed_export_stops_checksum_verification(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    real, begun, over = manifest._digest, threading.Event(), threading.Event()
    read: list[str] = []

    def digest(path: Any, drop: bool) -> manifest.ManifestFile:
        read.append(str(path))
        begun.set()
        assert over.wait(60)
        return real(path, drop)

    def fail(*_: object) -> None:
        assert begun.wait(60)
        threading.Timer(0.2, over.set).start()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(manifest, "_NUM_THREADS", 1)
    monkeypatch.setattr(manifest, "_digest", digest)
    monkeypatch.setattr("maxpipe.huggingface.export._read_param", fail)
    assert main(["export", str(imported / "ckpt"), str(tmp_path / "out")]) == 74
    assert "Input/output error" in capsys.readouterr().err
    assert len(read) == 1 and not os.listdir(tmp_path)


def test_export_converts_to_requested_dtype(imported: Path, tmp_path: Path) -> None:
    tensors = maker.read(imported / "hf")
    for dtype, name in (("float32", "F32"), ("float16", "F16")):
        out = tmp_path / dtype
        assert main(["export", str(imported / "ckpt"), str(out), "--dtype", dtype]) == 0
        wanted = {n: each.astype(maker.TYPES[name]) for n, each in tensors.items()}
        maker.same_bits(maker.read(out), wanted)
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype


def test_export_rejects_values_that_overflow_dtype(tmp_path: Path, capsys: Capture) -> None:
    config, tensors = maker.llama("F32")
    tensors[NORM] = tensors[NORM] + np.float32(1e6)
    folder = maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 0
    command = ["export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "float16"]
    assert main(command) == 2
    assert NORM in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00003.safetensors"])
def test_corrupted_bytes_are_rejected_or_harmless(name: str, tmp_path: Path) -> None:
    folder = maker.write(tmp_path / "hf", *maker.llama("F32"), files=3)
    good = (folder / name).read_bytes()
    end = len(good) if name == "config.json" else 8 + int.from_bytes(good[:8], "little")
    draw, refused = random.Random(name), 0
    for _ in range(60):
        content = bytearray(good)
        for _ in range(draw.choice((1, 3, 20))):
            content[draw.randrange(end)] = draw.randrange(256)
        (folder / name).write_bytes(content)
        try:
            open_folder(str(folder))
        except ConfigError as error:
            assert str(folder) in str(error) and len(str(error).splitlines()) % 3 == 0
            refused += 1
    assert refused > 50


def test_export_completes_if_stdout_pipe_is_closed(imported: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "maxpipe", "export", str(imported / "ckpt"), "out"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with os.fdopen(writing, "wb") as gone, open("/dev/full", "wb") as full:
        for stdout, code, unbuffered in ((full, 74, ""), (gone, 0, "1")):
            environment["PYTHONUNBUFFERED"] = unbuffered
            ran = subprocess.run(
                command, stdout=stdout, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
            )
            assert ran.returncode == code, ran.stderr
            assert ran.stderr.startswith(b"standard output: cannot be written" if code else b"")
            assert os.listdir(tmp_path) == ([] if code else ["out"])
    maker.same_bits(maker.read(tmp_path / "out"), maker.read(imported / "hf"))


def test_partial_folder_removed_by_another_command_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, new = [], tempfile.mkdtemp

    def taken_once(*arguments: Any) -> str:
        made.append(new(*arguments))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken_once)
    with atomic_folder(str(tmp_path / "out"), "OUT") as here:
        assert [str(here)] == made[1:]
        (here / "a").touch()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["a"]


@pytest.mark.parametrize(
    ("row", "dtype", "words"),
    [
        ([1, 1], np.int64, "must contain 2 different experts from 0 to 2"),
        ([0, 3], np.int64, "must contain 2 different experts from 0 to 2"),
        ([-1, 0], np.int32, "must contain 2 different experts from 0 to 2"),
        ([0, 1], np.float32, "must have dtype I64 or I32"),
    ],
)
def test_invalid_tables_of_experts_are_rejected(
    row: list[int], dtype: Any, words: str, tmp_path: Path, capsys: Capture
) -> None:
    config, tensors = maker.deepseek_v4()
    table = tensors["model.layers.0.ffn.gate.tid2eid"].astype(dtype)
    table[100] = row
    tensors["model.layers.0.ffn.gate.tid2eid"] = table
    maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 2
    message = capsys.readouterr().err
    assert words in message and "tid2eid" in message
