"""Adapters on top of a folder's weights: checkpoints and exports."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.errors import ConfigError, StorageError
from maxpipe.huggingface.export import export, export_adapters
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.import_ import hub_id, import_folder
from maxpipe.huggingface.peft import CONFIG, WEIGHTS
from maxpipe.huggingface.safetensors import SafetensorsReader
from maxpipe.models.param_names import unflatten
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.huggingface import maker
from tests.huggingface.adapted import Made, begun, made
from tests.huggingface.test_oracle import PYTHON, job_of, reason, run_oracle

TOLERANCE = 1e-5
KINDS = ("lora", "dora")
TOKENS = np.random.default_rng(0).integers(0, maker.VOCAB, (2, 8), np.int32)


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases") / "llama"
    maker.write(folder, *maker.llama("F32"))
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run with the default adapters; tests must not modify it."""
    return made(base, tmp_path_factory.mktemp("runs"))


def logits(decoder: Decoder, params: Any, vocab: int = maker.VOCAB) -> np.ndarray:
    place = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
    batch = {"tokens": jnp.asarray(TOKENS % vocab), "positions": jnp.asarray(place)}
    batch["segment_ids"] = jnp.ones_like(batch["tokens"])
    return np.asarray(jax.jit(decoder.apply)(params, batch))


def of_adapters(run: Made, vocab: int = maker.VOCAB) -> np.ndarray:
    return logits(run.steps.param_layout.decoder, run.params, vocab)


def of_folder(folder: Path) -> np.ndarray:
    source = open_folder(str(folder))
    names = source.mapping.shapes
    every = {name: tuple(slice(0, size) for size in names[name]) for name in names}
    flat = {name: source.read_region(name, np.dtype(np.float32), every[name]) for name in names}
    params = unflatten({tuple(name.split(".")): values for name, values in flat.items()})
    config = replace(source.config, compute_dtype="float32")
    decoder = Decoder(config, AxisRules.from_config(MeshConfig()))
    kinds = decoder.model.layer_types
    if len(kinds) == 1:
        params["layers"] = {next(iter(kinds)): params["layers"]}
    return logits(decoder, params)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(
            ["adapter.kind=dora", "adapter.base_quantization=nf4"], marks=pytest.mark.layouts
        ),
        ["adapter.targets=['*.mlp.*']", "adapter.base_quantization=int8", "adapter.rslora=true"],
    ],
    ids=str,
)
def test_merged_export_equals_base_with_adapters(
    overrides: list[str], base: Path, adapted: Made, tmp_path: Path
) -> None:
    run = made(base, tmp_path, *overrides) if overrides else adapted
    export(parse_address(str(run.folder)), str(tmp_path / "out"), None, quiet)
    found, wanted = of_folder(tmp_path / "out"), of_adapters(run)
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    assert np.abs(wanted - of_folder(base)).max() > 1e-2 * np.abs(wanted).max()
    saved = {*leaves_by_name(run.steps.abstract_saved["params"])}
    assert all("_lora_" in name for name in saved)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_export_reproduces_merged_export(kind: str, base: Path, tmp_path: Path) -> None:
    run = made(base, tmp_path, f"adapter.kind={kind}", "adapter.targets=[layers.attention.*]")
    export(parse_address(str(run.folder)), str(tmp_path / "out"), None, quiet)
    export_adapters(parse_address(str(run.folder)), str(tmp_path / "alone"), None, quiet)
    peft_config = json.loads((tmp_path / "alone" / CONFIG).read_text())
    assert peft_config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (peft_config["r"], peft_config["lora_alpha"], peft_config["use_dora"]) == (
        2,
        3.0,
        kind == "dora",
    )
    assert peft_config["base_model_name_or_path"] == str(base)
    reader = SafetensorsReader(tmp_path / "alone" / WEIGHTS)
    tensors = {name: reader.read(name) for name in reader.entries}
    before, after = maker.read(base), maker.read(tmp_path / "out")
    for name, old in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in tensors:
            assert "self_attn" not in name and (after[name] == old).all()
            continue
        down, up = (tensors[f"{module}.lora_{each}.weight"] for each in "AB")
        assert (down.shape, up.shape) == ((2, old.shape[1]), (old.shape[0], 2))
        new = old + 1.5 * up @ down
        if kind == "dora":
            length = tensors[f"{module}.lora_magnitude_vector"]
            new *= (length / np.linalg.norm(new, axis=1))[:, None]
        assert np.abs(new - after[name]).max() < TOLERANCE * np.abs(new).max()


def test_peft_config_names_original_folder_of_imported_base(base: Path, tmp_path: Path) -> None:
    import_folder(str(base), str(tmp_path / "imported"), quiet)
    run = made(base, tmp_path, f"checkpoint.restore_from={tmp_path / 'imported'}")
    export_adapters(parse_address(str(run.folder)), str(tmp_path / "alone"), None, quiet)
    config = json.loads((tmp_path / "alone" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_hub_id_of_snapshot_folder() -> None:
    cache = Path("/c/hub/models--meta-llama--Llama-3.2-1B/snapshots")
    assert hub_id(cache / ("4e" * 20)) == "meta-llama/Llama-3.2-1B"
    assert hub_id(cache / "main") is None and hub_id(Path("/models/llama")) is None


def test_adapter_run_resumes_with_moved_but_not_changed_base(base: Path, tmp_path: Path) -> None:
    """The mesh may change and the base folder may move, but its weights must not change."""
    own = tmp_path / "own"
    maker.write(own, *maker.llama("F32"))
    run = made(own, tmp_path, "adapter.kind=dora", "adapter.base_quantization=int8")
    again = (
        "adapter.rank=2",
        "adapter.alpha=3",
        "adapter.kind=dora",
        "adapter.base_quantization=int8",
    )
    staged = (
        "mesh.cpu_devices=4",
        "mesh.ici_stage=2",
        "mesh.ici_fsdp=2",
        "pipeline.microbatches=2",
    )
    own.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="must be a folder"):
        begun(base, tmp_path, *again, f"checkpoint.restore_from=hf:{own}", saved=True)
    _, steps, start = begun(tmp_path / "moved", tmp_path, *again, *staged, saved=True)
    parts = steps.param_layout
    found = jax.device_get(parts.split_layer_types(jax.jit(parts.to_saved)(start.state.params)))
    for name, wanted in leaves_by_name(run.params).items():
        np.testing.assert_array_equal(leaves_by_name(found)[name], wanted, err_msg=name)
    other = (*again, f"checkpoint.restore_from={run.folder}", "run.name=next")
    with pytest.raises(ConfigError, match="must be a folder"):  # the base folder was moved
        begun(base, tmp_path, *other)
    (tmp_path / "moved").rename(own)
    _, _, start = begun(base, tmp_path, *other)
    assert int(start.state.step) == 1 and start.base is not None
    assert start.base["given"] == str(run.folder) and start.base["address"] == f"hf:{own}"
    own.rename(tmp_path / "moved")
    config, tensors = maker.llama("F32")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1e-3
    maker.write(tmp_path / "other", config, tensors)
    with pytest.raises(ConfigError, match="digest was"):
        begun(tmp_path / "other", tmp_path, *again, saved=True)
    (tmp_path / "other").rename(own)
    with pytest.raises(ConfigError, match="expected digest"):
        export(parse_address(str(run.folder)), str(tmp_path / "out"), None, quiet)
    assert not (tmp_path / "out").exists()


def test_damaged_array_is_not_exported(adapted: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(adapted.folder, tmp_path / "adapted")
    (step,) = (path for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    for path in (step / "state" / "d").iterdir():
        path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(StorageError, match="cannot be exported"):
        export_adapters(parse_address(str(folder)), str(tmp_path / "alone"), None, quiet)
    assert not (tmp_path / "alone").exists()


def test_resume_with_different_adapter_config_is_rejected(
    base: Path, adapted: Made, tmp_path: Path
) -> None:
    shutil.copytree(adapted.folder, tmp_path / "adapted")
    for changed, words in (
        (["adapter.rank=3"], "must be 2, the value in step 1"),
        (["adapter.alpha=4"], "must be 3"),
        (["adapter.targets=['*.query']"], "had an adapter\\."),
        (["adapter.rank=0"], "must be 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            begun(base, tmp_path, "adapter.rank=2", "adapter.alpha=3", *changed, saved=True)
    text = f"checkpoint.restore_from={tmp_path / 'adapted'}"
    weights = (text, "checkpoint.restore=weights", "run.name=next")
    with pytest.raises(ConfigError, match="must hold a complete model"):
        begun(base, tmp_path, *weights)


ORACLE_CASES = [
    *((family, kind, []) for family in ("llama", "qwen3", "gemma3") for kind in KINDS),
    ("mixtral", "lora", ["*.experts.*"]),
    ("mixtral", "lora", ["*.experts.up"]),
    ("qwen3_moe", "lora", ["*.mlp.*", "*.experts.*", "*.attention.*"]),
    ("qwen3_next", "lora", ["*.experts.*", "*.out"]),
    ("granite4", "lora", ["*.mamba.out", "*.attention.query"]),
    ("nemotron_h", "lora", ["*.experts.*", "*.attention.out", "*.mlp.*"]),
    ("kimi_linear", "lora", ["*.kda.*", "*.experts.*", "*.attention.*"]),
    ("olmo_hybrid", "lora", ["*.delta.[gkoqv]*", "*.attention.*", "*.mlp.*"]),
    ("deepseek_v2", "lora", ["*"]),
    ("deepseek_v3", "lora", ["*.experts.down", "*.shared_gate"]),
    ("gpt_oss", "lora", ["*.experts.*", "*.query"]),
    ("gpt_oss", "lora", ["*.experts.gate"]),
    ("llama4", "lora", ["*.experts.*"]),
    ("phi3", "lora", ["*.query", "*.value", "*.mlp.*"]),
]


@pytest.mark.oracle
def test_peft_computes_the_same_logits(tmp_path: Path) -> None:
    """Compare adapters loaded by PEFT on their base, and the merged model loaded without PEFT."""
    if why := reason("peft"):
        pytest.skip(f"no PEFT in {PYTHON}: {why}")
    jobs = {family: job_of(family, 0, tmp_path) for family in {case[0] for case in ORACLE_CASES}}
    run_oracle("make", [*jobs.values()], tmp_path)
    asks: dict[str, list[dict[str, Any]]] = {"adapted": [], "logits": []}
    for number, (family, kind, targets) in enumerate(ORACLE_CASES):
        here, base = tmp_path / str(number), jobs[family]["folder"]
        vocab = jobs[family]["config"]["vocab_size"]
        settings = f"adapter.kind={kind}", f"adapter.targets={json.dumps(targets)}"
        run = made(Path(base), here, *settings)
        export_adapters(parse_address(str(run.folder)), str(here / "alone"), None, quiet)
        export(parse_address(str(run.folder)), str(here / "merged"), None, quiet)
        np.save(here / "tokens.npy", TOKENS % vocab)
        np.save(here / "wanted.npy", of_adapters(run, vocab))
        assert json.loads((here / "alone" / CONFIG).read_text())["base_model_name_or_path"] == base
        for action, folder in (("adapted", base), ("logits", str(here / "merged"))):
            paths = {name: str(here / f"{name}.npy") for name in ("tokens", action)}
            asks[action].append(
                {
                    "folder": folder,
                    "tokens": paths["tokens"],
                    "logits": paths[action],
                    "adapter": str(here / "alone"),
                }
            )
    for action, listed in asks.items():
        run_oracle(action, listed, tmp_path)
        for case, ask in zip(ORACLE_CASES, listed, strict=True):
            found = np.load(ask["logits"])
            wanted = np.load(Path(ask["logits"]).with_name("wanted.npy"))
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error < 1e-4, f"{case}, {action}: {error:.1e}"
    # PEFT loads several adapters into one base model, as in a folder with several adapters.
    first, second = asks["adapted"][:2]
    both = tmp_path / "both"
    for name, ask in (("first", first), ("second", second)):
        shutil.copytree(ask["adapter"], both / name)
    paths = {"adapter": str(both / "first"), "others": {"second": str(both / "second")}}
    run_oracle("adapted", [first | paths | {"logits": str(both / "logits.npy")}], tmp_path)
    np.testing.assert_array_equal(np.load(both / "logits.npy"), np.load(second["logits"]))
