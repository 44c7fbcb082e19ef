"""An imported MaxText checkpoint computes the logits of its Hugging Face export."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.cli import main
from maxpipe.config.load import from_dict
from maxpipe.huggingface import import_ as huggingface_import
from maxpipe.maxtext import import_
from maxpipe.maxtext.orbax_arrays import ParamArrays
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.huggingface import maker
from tests.maxtext import checkpoints

TOKENS = np.random.default_rng(0).integers(0, checkpoints.VOCAB, (2, 17))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, np.ndarray]]:
    """Config and logits of each model, imported from its Hugging Face folder."""
    base = tmp_path_factory.mktemp("references")
    found = {}
    for model in checkpoints.MODELS:
        maker.write(base / f"{model}-hf", *checkpoints.hugging_face(model))
        out = base / model
        assert main(["import", str(base / f"{model}-hf"), "--out", str(out)]) == 0
        found[model] = logits(out)
    return found


def logits(folder: Path) -> tuple[Any, np.ndarray]:
    """Return the model config and the float32 logits of an imported checkpoint."""
    with CheckpointManager(folder, write=False) as manager:
        restored = manager.restore(0)
    model = from_dict(restored.metadata.config).model
    config = dataclasses.replace(model, compute_dtype="float32", attention="xla")
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    params = restored.state["params"]
    kinds = [*decoder.model.layer_types]
    if len(kinds) == 1:
        params["layers"] = {kinds[0]: params["layers"]}
    batch = {
        "tokens": jnp.asarray(TOKENS, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape),
        "segment_ids": jnp.ones(TOKENS.shape, jnp.int32),
    }
    with jax.default_matmul_precision("highest"):
        return model, np.asarray(jax.jit(decoder.apply)(params, batch))


def written(model: str, folder: Path, *, scanned: bool = True, **options: Any) -> list[str]:
    """Write a checkpoint and its model file; return the arguments of the import."""
    _, tensors = checkpoints.hugging_face(model)
    params = checkpoints.max_text(model, tensors, scanned=scanned)
    checkpoints.write(folder / "checkpoints", params, **options)
    path = folder / f"{checkpoints.MODELS[model]['name']}.yml"
    path.write_text(checkpoints.model_yml(model))
    source = f"maxtext:{folder / 'checkpoints'}"
    return ["import", source, "--config", str(path), "--out", str(folder / "out")]


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("model", checkpoints.MODELS)
def test_imported_logits_equal_hugging_face_export(
    model: str, scanned: bool, references: dict[str, Any], tmp_path: Path
) -> None:
    arguments = written(model, tmp_path, scanned=scanned, state=scanned)
    assert main(arguments) == 0
    config, found = logits(tmp_path / "out")
    expected, reference = references[model]
    assert config.family == expected.family
    error = np.abs(found - reference).max() / np.abs(reference).max()
    assert error < 1e-5


def test_imported_weights_are_bitwise_those_of_hugging_face_where_unscaled(
    tmp_path: Path,
) -> None:
    _, tensors = checkpoints.hugging_face("qwen3")
    assert main(written("qwen3", tmp_path, zarr3=False)) == 0
    with CheckpointManager(tmp_path / "out", write=False) as manager:
        params = manager.restore(0).state["params"]
    query = params["layers"]["attention"]["query"][1]
    stored = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query.reshape(checkpoints.WIDTH, -1), stored.T)


def test_config_of_import_trains_from_its_weights(tmp_path: Path) -> None:
    assert main(written("llama2", tmp_path)) == 0
    run = [
        *(sys.executable, "-m", "maxpipe", "train"),
        *(str(tmp_path / "out" / "config.yml"), "tokenizer.kind=bytes", "tokenizer.path="),
        *("train.steps=1", "train.batch_size=1", "train.sequence_length=16", "data.source=corpus"),
        *(f"run.dir={tmp_path / 'runs'}", "eval.batches=0", "log.trackers=[]"),
        *("model.compute_dtype=float32", "runtime.platform=cpu"),
    ]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_reads_are_bounded_by_the_slab_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = ParamArrays.read

    def recorded(self: ParamArrays, name: str, index: Any) -> np.ndarray:
        values = read(self, name, index)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(ParamArrays, "read", recorded)
    monkeypatch.setattr(import_, "SLAB_BYTES", 1200)
    assert main(written("mixtral", tmp_path)) == 0
    assert max(sizes) <= 1200
    assert huggingface_import.SLAB_BYTES > 1200


def test_vocabulary_padding_is_left_out(
    tmp_path: Path, references: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, tensors = checkpoints.hugging_face("gemma2")
    params = checkpoints.max_text("gemma2", tensors, scanned=True)
    table = params["token_embedder"]["embedding"]
    params["token_embedder"]["embedding"] = np.pad(table, ((0, 5), (0, 0)), constant_values=9.0)
    checkpoints.write(tmp_path / "checkpoints", params)
    path = tmp_path / "gemma2-2b.yml"
    path.write_text(checkpoints.model_yml("gemma2"))
    source = f"maxtext:{tmp_path / 'checkpoints'}"
    assert main(["import", source, "--config", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "the last 5 of 268 token embeddings are left out" in capsys.readouterr().out
    _, found = logits(tmp_path / "out")
    reference = references["gemma2"][1]
    assert np.abs(found - reference).max() < 1e-5 * np.abs(reference).max()


def test_rope_option_selects_the_layout_of_pairs(
    tmp_path: Path, references: dict[str, Any]
) -> None:
    arguments = written("llama3.1", tmp_path)
    assert main([*arguments, "--rope", "split"]) == 0
    _, found = logits(tmp_path / "out")
    reference = references["llama3.1"][1]
    assert np.abs(found - reference).max() > 1e-3 * np.abs(reference).max()


def test_config_next_to_checkpoint_is_found(tmp_path: Path) -> None:
    arguments = written("qwen2", tmp_path)
    (tmp_path / "qwen2.5-7b.yml").rename(tmp_path / "config.yml")
    place = arguments.index("--config")
    del arguments[place : place + 2]
    assert main(arguments) == 0


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_missing_and_unexpected_arrays_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tensors = checkpoints.hugging_face("llama2")
    params = checkpoints.max_text("llama2", tensors, scanned=True)
    layers = params["decoder"]["layers"]
    layers["self_attention"]["qkv_proj"] = layers["self_attention"].pop("key")
    arguments = written("llama2", tmp_path / "good")
    checkpoints.write(tmp_path / "bad", params)
    arguments[1] = f"maxtext:{tmp_path / 'bad'}"
    text = _fails(arguments, capsys)
    assert "lacks decoder.layers.self_attention.key.kernel" in text
    assert "has unexpected decoder.layers.self_attention.qkv_proj.kernel" in text
    assert not (tmp_path / "good" / "out").exists()


def test_array_of_another_shape_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = written("llama2", tmp_path)
    path = Path(arguments[3])
    path.write_text(path.read_text().replace("base_mlp_dim: 14", "base_mlp_dim: 16"))
    text = _fails(arguments, capsys)
    assert "decoder.layers.mlp.wi_0.kernel has shape (10, 3, 14)" in text
    assert "needs (10, 3, 16)" in text


def test_folder_that_is_no_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert "no _METADATA" in _fails(["import", f"maxtext:{tmp_path}", *out], capsys)
    assert "on this machine" in _fails(["import", "maxtext:gs://bucket/run", *out], capsys)
    (tmp_path / "_METADATA").write_text("[" * 100_000)
    assert "cannot be read" in _fails(["import", f"maxtext:{tmp_path}", *out], capsys)
    tree = {"('params',)": {"key_metadata": [{"key": "decoder"}, {"key": "x"}]}}
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True}
    (tmp_path / "_METADATA").write_text(json.dumps(metadata))
    assert "cannot be read" in _fails(["import", f"maxtext:{tmp_path}", *out], capsys)
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"()": 3}}))
    assert "no parameters" in _fails(["import", f"maxtext:{tmp_path}", *out], capsys)


def test_checkpoint_without_config_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = written("llama2", tmp_path)
    place = arguments.index("--config")
    del arguments[place : place + 2]
    assert "--config FILE" in _fails(arguments, capsys)


def test_family_without_a_layout_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = written("llama2", tmp_path)
    arguments[3] = "deepseek-v2-lite"
    assert "deepseek" in _fails(arguments, capsys)


def test_config_option_requires_a_maxtext_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["import", str(tmp_path), "--out", str(tmp_path / "out"), "--config", "run.yml"]
    assert "maxtext:DIR" in _fails(arguments, capsys)
