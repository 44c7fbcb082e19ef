"""Runs that start from weights only, on any mesh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.cli import main
from maxpipe.config.load import LoadedConfig, load
from maxpipe.distributed import runtime
from maxpipe.errors import ConfigError
from maxpipe.parallel.mesh import build_mesh
from maxpipe.step.build import steps_from_config
from maxpipe.train.resume import RunStart, restore_or_init
from tests.huggingface import maker

VOCAB = maker.VOCAB + 18
LAYOUTS = {"one": [], "staged": ["mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=2"]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral folder `hf`, and its import `ckpt`."""
    base = tmp_path_factory.mktemp("weights")
    maker.write(base / "hf", *maker.mixtral(), files=2)
    assert main(["import", str(base / "hf"), "--out", str(base / "ckpt")]) == 0
    return base


class RecordingConsole:
    """A console that records its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    warn = note


def started(weights: Path, folder: Path, *overrides: str) -> tuple[RunStart, Any, list[str]]:
    """Start a run; return its start, its parameters as in checkpoints, and console lines."""
    shared = [str(weights / "ckpt" / "config.yml"), "train.steps=2", f"run.dir={folder}"]
    loaded: LoadedConfig = load([*shared, "pipeline.microbatches=2", *overrides])
    config, said = loaded.config, RecordingConsole()
    size = config.model.vocab_size
    mesh = build_mesh(config.mesh, jax.devices()[: config.mesh.cpu_devices])
    steps = steps_from_config(config, mesh, np.zeros(size, np.int32))
    datasets: Any = SimpleNamespace(train=SimpleNamespace(fingerprint=lambda: {"tokenizer": "x"}))
    console: Any = said
    with CheckpointManager(folder / config.run.name, config.checkpoint, write=False) as checkpoints:
        start = restore_or_init(loaded, steps, checkpoints, datasets, console)
    return start, jax.device_get(steps.to_saved(start.state)["params"]), said.lines


@pytest.mark.parametrize(
    ("given", "grown", "layout"),
    [
        ("hf", False, "one"),
        ("hf", True, "staged"),
        ("ckpt", True, "staged"),
        ("ckpt-all", False, "one"),
    ],
)
def test_run_starts_from_weights_of_folder_or_import(
    given: str, grown: bool, layout: str, weights: Path, tmp_path: Path
) -> None:
    prefix = "hf:" if given == "hf" else ""
    overrides = [f"checkpoint.restore_from={prefix}{weights / given.removesuffix('-all')}"]
    overrides += [f"model.vocab_size={VOCAB}"] if grown else []
    overrides += ["checkpoint.restore=all"] if given == "ckpt-all" else []
    start, params, lines = started(weights, tmp_path, *overrides, *LAYOUTS[layout])
    assert "the weights of" in start.message and int(start.state.step) == 0
    old = {name: each.astype(np.float32) for name, each in maker.read(weights / "hf").items()}
    for name, theirs in (("embedding", "model.embed_tokens"), ("head", "lm_head")):
        table = params[name] if name == "embedding" else params[name].T
        wanted = old[f"{theirs}.weight"]
        assert table.shape == (VOCAB if grown else maker.VOCAB, maker.WIDTH)
        assert (table[: maker.VOCAB] == wanted).all()
        assert np.allclose(table[maker.VOCAB :], wanted.mean(0), atol=1e-6)
    query = old["model.layers.2.self_attn.q_proj.weight"]
    assert (params["layers"]["attention"]["query"][2].reshape(maker.WIDTH, -1) == query.T).all()
    down = old["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    assert (params["layers"]["experts"]["down"][1, 2] == down.T).all()
    assert any("grows from 263 to 281" in line for line in lines) == grown


@pytest.mark.parametrize(("given", "layout"), [("hf", "staged"), ("ckpt", "one")])
def test_per_layer_embedding_tables_grow_with_vocabulary(
    given: str, layout: str, tmp_path: Path
) -> None:
    folder, ckpt = tmp_path / "hf", tmp_path / "ckpt"
    config, tensors = maker.gemma4_small("F32")
    maker.write(folder, config, tensors)
    assert main(["import", str(folder), "--out", str(ckpt)]) == 0
    source = f"hf:{folder}" if given == "hf" else str(ckpt)
    overrides = [f"checkpoint.restore_from={source}", f"model.vocab_size={VOCAB}"]
    _, params, lines = started(tmp_path, tmp_path / "runs", *overrides, *LAYOUTS[layout])
    size = config["hidden_size_per_layer_input"]
    whole = tensors["model.embed_tokens_per_layer.weight"]
    assert {*params["layers"]} == {"first", "global", "global_shared"}
    for layer, layer_type in enumerate(("first", "global", "global_shared")):
        table = params["layers"][layer_type]["per_layer"]["table"][0]
        wanted = whole[:, layer * size : (layer + 1) * size]
        assert table.shape == (VOCAB, size)
        assert (table[: maker.VOCAB] == wanted).all()
        assert np.allclose(table[maker.VOCAB :], wanted.mean(0), atol=1e-6)
    embedding = tensors["model.embed_tokens.weight"]
    assert (params["embedding"][: maker.VOCAB] == embedding).all()
    assert np.allclose(params["embedding"][maker.VOCAB :], embedding.mean(0), atol=1e-6)
    assert any("grows from 263 to 281" in line for line in lines)


def test_per_layer_embedding_tables_with_a_fixed_size_are_not_grown(tmp_path: Path) -> None:
    """Tables can have more rows than the vocabulary, but not fewer."""
    rows = VOCAB + 1
    config, tensors = maker.gemma4_small("F32", vocab_size_per_layer_input=rows)
    name = "model.embed_tokens_per_layer.weight"
    tensors[name] = np.pad(tensors[name], ((0, rows - maker.VOCAB), (0, 0)), constant_values=2)
    maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 0
    source = f"checkpoint.restore_from=hf:{tmp_path / 'hf'}"
    grown = f"model.vocab_size={VOCAB}"
    _, params, _ = started(tmp_path, tmp_path / "runs", source, grown)
    table = params["layers"]["first"]["per_layer"]["table"][0]
    assert (table == tensors[name][:, : table.shape[1]]).all()
    with pytest.raises(ConfigError, match="vocab_size_per_layer_input"):
        started(tmp_path, tmp_path / "runs", source, f"model.vocab_size={rows + 1}")


@pytest.mark.parametrize(
    ("given", "override"),
    [
        ("hf:hf", "model.vocab_size=262"),
        ("hf:hf", "model.moe.top_k=1"),
        ("ckpt", "model.vocab_size=262"),
    ],
)
def test_different_model_config_is_rejected(
    given: str, override: str, weights: Path, tmp_path: Path
) -> None:
    name = given.removeprefix("hf:")
    source = f"checkpoint.restore_from={given.removesuffix(name)}{weights / name}"
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        started(weights, tmp_path, source, override)


def test_resume_from_imported_weights_is_rejected(weights: Path) -> None:
    with pytest.raises(ConfigError, match="contains imported weights, not a run"):
        started(weights, weights, "run.name=ckpt")


def test_training_keys_may_differ_from_folder(weights: Path, tmp_path: Path) -> None:
    source = f"checkpoint.restore_from=hf:{weights / 'hf'}"
    start, _, _ = started(weights, tmp_path, source, "model.moe.load_balance_loss_weight=0.5")
    assert "the weights of" in start.message


def test_generate_from_folder_equals_generate_from_import(
    weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runtime, "start", lambda *_, **__: None
    )  # use the devices of the test process
    asked = ["--prompt", "ab", "--temperature", "0", "--max-tokens", "5", "--json"]
    asked += ["tokenizer.kind=bytes", "tokenizer.path=", "mesh.ici_data=8"]
    answers = []
    for model in (f"hf:{weights / 'hf'}", str(weights / "ckpt")):
        assert main(["generate", model, *asked, "model.compute_dtype=float32"]) == 0
        answers.append(capsys.readouterr().out)
    assert len({*answers}) == 1 and '"prompt": "ab"' in answers[0]
    assert main(["generate", f"hf:{weights / 'none'}", *asked]) == 2
    assert "must be a folder on this machine" in capsys.readouterr().err
    assert main(["generate", str(weights / "hf"), *asked, "model.num_layers=2"]) == 2
    assert "the value in the checkpoint" in capsys.readouterr().err


def test_layers_that_are_not_quantized_start_from_folder(weights: Path, tmp_path: Path) -> None:
    """The last layers have separate stacks, which a Hugging Face folder does not define."""
    start = f"checkpoint.restore_from=hf:{weights / 'hf'}"
    last = ("model.matmul=int8", "model.matmul_unquantized_layers=1")
    _, expected, _ = started(weights, tmp_path / "plain", start)
    _, found, _ = started(weights, tmp_path / "split", start, *last, *LAYOUTS["staged"])
    assert [*found["layers"]] == ["experts", "experts_unquantized"]
    joined = jax.tree.map(lambda *stacks: np.concatenate(stacks), *found.pop("layers").values())
    jax.tree.map(np.testing.assert_array_equal, found | {"layers": joined}, expected)
