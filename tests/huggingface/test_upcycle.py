"""`maxpipe import --upcycle`: mixtures of experts that start from a dense folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.checkpoint import slab_writer
from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface import import_, upcycle
from maxpipe.huggingface.folder import open_folder
from maxpipe.models.registry import describe
from maxpipe.nn.router import route_tokens
from maxpipe.parallel.mesh import build_mesh
from maxpipe.step.build import steps_from_config
from tests.conftest import environment_of_command
from tests.errors import parse_problems
from tests.huggingface import maker, quantized
from tests.huggingface.test_finetune import logits
from tests.huggingface.test_oracle import PYTHON, reason, run_oracle
from tests.huggingface.test_starts import started
from tests.train.runs import losses

Capture = pytest.CaptureFixture[str]
TOKENS = np.random.default_rng(5).integers(0, maker.VOCAB, (2, 19))
EQUAL = 1e-5
"""Largest difference of equal float32 logits, relative to the largest logit."""


def qwen3(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], maker.Tensors]:
    """Return a Qwen3 config.json and its tensors."""
    config, tensors = maker.llama(dtype, **changes)
    for layer in range(maker.LAYERS):
        for number, name in enumerate(("q_norm", "k_norm")):
            norm = np.random.default_rng([layer, number]).normal(size=maker.HEAD)
            name = f"model.layers.{layer}.self_attn.{name}.weight"
            tensors[name] = norm.astype(maker.TYPES[dtype])
    return {**config, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, tensors


def mistral(dtype: str = "BF16", **changes: Any) -> tuple[dict[str, Any], maker.Tensors]:
    """Return a Mistral config.json and its tensors, without a sliding window."""
    config, tensors = maker.llama(dtype, **changes)
    about = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {**config, **about, "sliding_window": None, **changes}, tensors


MAKERS: dict[str, Callable[..., tuple[dict[str, Any], maker.Tensors]]] = {
    "llama": maker.llama,
    "mistral": mistral,
    "qwen3": qwen3,
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one float32 folder of each dense family."""
    base = tmp_path_factory.mktemp("dense")
    for name, make in MAKERS.items():
        maker.write(base / name, *make("F32"), files=2)
    return base


def moe(**keys: Any) -> list[str]:
    """Return overrides of the family `moe`, whose layers all have experts by default."""
    keys = {"num_dense_layers": 0, "num_experts": 4, "top_k": 2, **keys}
    return ["model.family=moe", *(f"model.moe.{name}={value}" for name, value in keys.items())]


def upcycled(folder: Path, out: Path, *arguments: str) -> Any:
    """Import a folder, and return the parameters."""
    assert main(["import", str(folder), "--out", str(out), "--upcycle", *arguments]) == 0
    return saved(out)


def saved(out: Path) -> Any:
    """Return the parameters of an imported checkpoint."""
    with CheckpointManager(out, write=False) as checkpoints:
        return checkpoints.restore(0).state["params"]


EXACT = {
    "copies": ("llama", moe()),
    "copies of mistral": ("mistral", moe(num_experts=3, top_k=3)),
    "qwen3": ("qwen3", ["model.family=qwen3_moe", "model.qwen3_moe.num_experts=4"]),
    "qwen3 with dense layers": (
        "qwen3",
        [
            *("model.family=qwen3_moe", "model.qwen3_moe.num_experts=4"),
            *("model.qwen3_moe.dense_layers=[1]", "model.qwen3_moe.d_expert=7"),
        ],
    ),
    "shards": ("mistral", moe(d_expert=7, num_experts=6, top_k=4)),
    "single columns": ("llama", moe(d_expert=1, num_experts=28, top_k=14)),
    "first dense layers": ("llama", moe(num_dense_layers=2)),
    "scaled weights": ("llama", moe(routed_scaling_factor=2.5)),
    "sigmoid": ("llama", moe(score_func="sigmoid", d_expert=7, expert_bias="true")),
    "groups": (
        "llama",
        moe(
            d_expert=7,
            num_experts=8,
            num_expert_groups=2,
            group_scores="top2",
            score_func="sigmoid",
            expert_bias="true",
        ),
    ),
    "shared columns": ("llama", moe(d_expert=2, num_shared_experts=3, top_k=4, num_experts=8)),
    "shared MLP": ("llama", moe(d_expert=7, num_shared_experts=2)),
    "all experts, not normalized": ("llama", moe(num_experts=4, top_k=4, norm_topk_prob="false")),
    "grouped dispatch": ("llama", moe(dispatch="grouped", d_expert=7)),
}


@pytest.mark.parametrize("name", EXACT)
def test_upcycled_logits_equal_dense_logits(name: str, dense: Path, tmp_path: Path) -> None:
    family, arguments = EXACT[name]
    upcycled(dense / family, tmp_path / "moe", *arguments)
    wanted = logits(dense, family, TOKENS, maker.VOCAB)
    found = logits(tmp_path, "moe", TOKENS, maker.VOCAB)
    assert np.abs(found - wanted).max() <= EQUAL * np.abs(wanted).max()


SCALED = {
    "softmax": moe(num_experts=8, norm_topk_prob="false", routed_scaling_factor=2.5),
    "softmax and shards": moe(d_expert=7, num_experts=8, top_k=4, norm_topk_prob="false"),
    "sigmoid and shared": moe(
        d_expert=2,
        num_experts=8,
        top_k=4,
        num_shared_experts=3,
        score_func="sigmoid",
        norm_topk_prob="false",
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_experts_without_normalized_weights_compute_multiple_of_dense_mlp(
    name: str, dense: Path, tmp_path: Path
) -> None:
    """The factor is the sum of the selected scores, relative to its value for equal logits."""
    params = upcycled(dense / "llama", tmp_path / "moe", *SCALED[name])["layers"]["experts"]
    config = load([str(tmp_path / "moe/config.yml"), "train.steps=1"]).config.model
    (layer_type,) = describe(config).layer_types.values()
    part: Any = layer_type.parts["experts"]
    x = np.random.default_rng(3).normal(size=(1, 40, maker.WIDTH)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        routes = route_tokens(jnp.asarray(x), jnp.asarray(params["router"][1]), part)
    scores = np.asarray(routes.weights).sum(-1) / part.weight_scale
    factor = scores / part.per_token * (2 if part.scores == "sigmoid" else part.num_experts)
    assert factor.std() > 0.1
    shared = part.shared.d_mlp if part.shared else 0
    wanted = factor[..., None] * mlp(x, dense_mlp(dense / "llama", 1, slice(shared, None)))
    found = sum(
        np.asarray(routes.weights)[..., expert, None]
        * mlp(x, tuple(np.moveaxis(params[n][1], int(n != "down"), 0)[expert] for n in NAMES))
        for expert in range(part.num_experts)
    )
    if shared:
        found += mlp(x, tuple(params[f"shared_{name}"][1] for name in NAMES))
        wanted += mlp(x, dense_mlp(dense / "llama", 1, slice(0, shared)))
    assert np.abs(found - wanted).max() <= EQUAL * np.abs(wanted).max()


NAMES = ("gate", "up", "down")


def mlp(x: np.ndarray, weights: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the output of a gated MLP in float64."""
    gate, up, down = (each.astype(np.float64) for each in weights)
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def dense_mlp(folder: Path, layer: int, columns: slice) -> tuple[np.ndarray, ...]:
    """Return columns of the projections of a layer's MLP."""
    tensors = maker.read(folder)
    gate, up, down = (tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"].T for name in NAMES)
    return gate[:, columns], up[:, columns], down[columns]


def test_routers_equal_those_of_new_run_with_same_seed(dense: Path, tmp_path: Path) -> None:
    args = ["run.seed=7", *moe(num_dense_layers=1, num_experts=6, top_k=2)]
    params = upcycled(dense / "llama", tmp_path / "moe", *args)
    layout = ["mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=2"]
    inputs = [str(tmp_path / "moe/config.yml"), "train.steps=1", "run.seed=7", *layout]
    config = load(inputs).config
    mesh = build_mesh(config.mesh, jax.devices()[:4])
    steps = steps_from_config(config, mesh, np.zeros(maker.VOCAB, np.int32))
    wanted = jax.device_get(steps.to_saved(steps.init())["params"])
    router = params["layers"]["experts"]["experts"]["router"]
    assert (router == wanted["layers"]["experts"]["experts"]["router"]).all()
    again = upcycled(dense / "llama", tmp_path / "half", *args, "--router-scale", "0.5")
    assert (again["layers"]["experts"]["experts"]["router"] == router / 2).all()
    other = upcycled(dense / "llama", tmp_path / "other", *args, "run.seed=8")
    assert (other["layers"]["experts"]["experts"]["router"] != router).all()


def test_slabs_do_not_affect_values(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*moe(d_expert=7, num_shared_experts=2), "--drop-ratio", "0.3"]
    one = upcycled(dense / "llama", tmp_path / "one", *args)
    for module in (import_, upcycle):
        monkeypatch.setattr(module, "SLAB_BYTES", 300)
    two = upcycled(dense / "llama", tmp_path / "two", *args)
    assert jax.tree.all(jax.tree.map(np.array_equal, one, two))


def test_slabs_read_each_dense_weight_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slab is larger than a plain import's, and experts share the weights that were read."""
    maker.write(tmp_path / "hf", *maker.llama("F32"))
    monkeypatch.setattr(upcycle, "SLAB_BYTES", 2000)
    source = open_folder(str(tmp_path / "hf"))
    options = upcycle.UpcycleOptions((*moe(d_expert=7, num_experts=8, top_k=4),))
    loaded = upcycle.load_config(source, options)
    model = upcycle.UpcycledModel(source, loaded.config.model, 0, options)
    counts = {"read": 0}
    read_region = type(source).read_region

    def count(self: Any, name: str, dtype: Any, region: Any, size: int = 0) -> np.ndarray:
        values = read_region(self, name, dtype, region, size)
        counts["read"] += values.size
        return values

    monkeypatch.setattr(type(source), "read_region", count)
    for name in NAMES:
        counts["read"] = 0
        array = model.lazy_arrays()[f"layers.experts.{name}"]
        assert math.prod(array.slab) * 4 <= 2000 and array.slab[0] == 1
        for region in slab_writer.regions(array.shape, array.slab):
            array.read(region)
        assert counts["read"] == maker.LAYERS * maker.WIDTH * maker.MLP


def test_drop_ratio_initializes_part_of_each_expert(dense: Path, tmp_path: Path) -> None:
    args = [*moe(num_experts=8), "--drop-ratio", "0.5"]
    experts = upcycled(dense / "llama", tmp_path / "moe", *args)["layers"]["experts"]
    dropped = []
    for layer in range(maker.LAYERS):
        weights = dense_mlp(dense / "llama", layer, slice(None))
        for number in range(8):
            kept = [
                (experts["gate"][layer][:, number] == weights[0]).all(0),
                (experts["up"][layer][:, number] == weights[1]).all(0),
                (experts["down"][layer, number] == weights[2]).all(1),
            ]
            assert (kept[0] == kept[1]).all() and (kept[0] == kept[2]).all()
            assert kept[0].sum() == maker.MLP // 2
            dropped.append(tuple(kept[0]))
    assert len({*dropped}) > 20
    is_new = ~np.array(dropped).reshape(maker.LAYERS, 8, maker.MLP)
    new = np.moveaxis(experts["gate"], 1, 3)[is_new]
    assert abs(new.std() - dense_mlp(dense / "llama", 0, slice(None))[0].std()) < 0.1
    assert abs(new.mean()) < 0.15 and len(np.unique(new)) > 0.9 * new.size


def test_bfloat16_and_tied_weights_are_kept(tmp_path: Path, capsys: Capture) -> None:
    maker.write(tmp_path / "hf", *maker.llama("BF16", tie_word_embeddings=True))
    params = upcycled(tmp_path / "hf", tmp_path / "moe", *moe(expert_bias="true", d_expert=7))
    assert "head" not in params and params["layers"]["experts"]["router"].dtype == "bfloat16"
    assert params["layers"]["experts"]["router_bias"].dtype == "float32"
    tensors = maker.read(tmp_path / "hf")
    up = tensors["model.layers.2.mlp.up_proj.weight"].T
    assert (params["layers"]["experts"]["up"][2, :, 3] == up[:, 7:]).all()
    down = tensors["model.layers.2.mlp.down_proj.weight"].T
    assert (params["layers"]["experts"]["down"][2, 0] == 2 * down[:7]).all()
    assert (params["embedding"] == tensors["model.embed_tokens.weight"]).all()
    assert "their down projections are multiplied by 2" in capsys.readouterr().out


def test_quantized_folder_is_dequantized(tmp_path: Path) -> None:
    made = quantized.write(tmp_path, "qwen3")
    one = upcycled(made.quantized, tmp_path / "one", "model.family=qwen3_moe")
    two = upcycled(made.dequantized, tmp_path / "two", "model.family=qwen3_moe")
    assert jax.tree.all(jax.tree.map(np.array_equal, one, two))


REJECTED = {
    "dense family": ([], "model.family", "llama", "model.family=moe"),
    "other attention": (["model.family=qwen3_moe"], "model.family", "head_norm", "=moe"),
    "layers": (
        [*moe(), "model.num_layers=2"],
        "model.num_layers",
        "must be 3",
        "model.num_layers=3",
    ),
    "width": ([*moe(), "model.d_model=8"], "model.d_model", "must be 10", "model.d_model=10"),
    "tied": (
        [*moe(), "model.tied_embeddings=true"],
        "model.tied_embeddings",
        "must be false",
        "model.tied_embeddings=false",
    ),
    "dense layer width": (
        [*moe(num_dense_layers=1), "model.d_mlp=16"],
        "model.d_mlp",
        "must be 14",
        "model.d_mlp=14",
    ),
    "rotary positions": (
        moe(rope_factor=2.0),
        "model.moe.rope_factor",
        "must be 1.0",
        "model.moe.rope_factor=1.0",
    ),
    "prediction heads": ([*moe(), "model.mtp_heads=1"], "model.mtp_heads", "must be 0", "=0"),
    "expert width": (
        moe(d_expert=5),
        "model.moe.d_expert",
        "(14)",
        "model.moe.d_expert=2 and model.moe.top_k=7 and model.moe.num_experts=7",
    ),
    "large expert": (moe(d_expert=28), "model.moe.d_expert", "(14)", "model.moe.d_expert=14"),
    "shared width": (
        moe(d_expert=7, num_shared_experts=3),
        "model.moe.d_expert",
        "minus that of the shared expert (21)",
        "model.moe.d_expert=2 and model.moe.top_k=4",
    ),
    "top_k": (
        moe(d_expert=2, num_experts=8),
        "model.moe.top_k",
        "multiple of 7",
        "model.moe.top_k=7 and model.moe.num_experts=14",
    ),
    "number of experts": (
        moe(d_expert=7, num_experts=5),
        "model.moe.num_experts",
        "multiple of 2",
        "model.moe.num_experts=6",
    ),
    "groups": (
        moe(d_expert=7, num_experts=6, num_expert_groups=2),
        "model.moe.num_expert_groups",
        "multiple of 2",
        "model.moe.num_expert_groups=1",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_mismatch_is_rejected(name: str, dense: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments, key, rule, action = REJECTED[name]
    command = ["import", str(dense / "llama"), "--out", str(tmp_path / "out"), "--upcycle"]
    assert main([*command, *arguments]) == 2
    (problem,) = parse_problems(capsys.readouterr().err)
    assert problem.code == Code.HF_UPCYCLE and problem.where.endswith(f": {key}")
    assert rule in f"{problem.value} {problem.rule}" and action in problem.action
    assert not (tmp_path / "out").exists()
    if action.startswith("model.") and key != "model.family":
        corrected = action.split(" and ")
        assert main([*command, *arguments, *corrected]) == 0


def test_folder_with_experts_is_rejected(tmp_path: Path, capsys: Capture) -> None:
    maker.write(tmp_path / "hf", *maker.mixtral())
    command = ["import", str(tmp_path / "hf"), "--out", str(tmp_path / "out"), "--upcycle"]
    assert main([*command, *moe()]) == 2
    (problem,) = parse_problems(capsys.readouterr().err)
    assert problem.code == Code.HF_UPCYCLE and "already has experts" in problem.rule
    maker.write(tmp_path / "gemma3", *maker.gemma3())
    command[1] = str(tmp_path / "gemma3")
    assert main([*command, *moe()]) == 2
    (problem,) = parse_problems(capsys.readouterr().err)
    assert "no family with experts has such layers" in problem.action


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["model.family=moe"], "model.family=moe"),
        (["--drop-ratio", "0.5"], "--drop-ratio"),
        (["--upcycle", "--drop-ratio", "1.5"], "--drop-ratio"),
        (["--upcycle", "--router-scale", "0"], "--router-scale"),
        (["--upcycle", "--router-scale", "nan"], "--router-scale"),
        (["--upcycle", "--router-scale", "1e300"], "--router-scale"),
        (["--upcycle", "optim.learning_rate=1"], "optim.learning_rate=1"),
        (["--upcycle", "--rope", "split"], "--rope"),
        (["--upcycle", "--unknown"], "maxpipe import"),
    ],
)
def test_options_that_do_not_apply_are_rejected(
    arguments: list[str], place: str, dense: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["import", str(dense / "llama"), "--out", str(tmp_path / "out"), *arguments]) == 2
    (problem,) = parse_problems(capsys.readouterr().err)
    assert problem.where == f"command line: {place}"


def test_config_file_defines_experts(dense: Path, tmp_path: Path) -> None:
    """Other sections of the file are not read."""
    (tmp_path / "moe.yml").write_text(
        "model: {family: moe, moe: {num_dense_layers: 0, num_experts: 4}}\n"
        "train: {batch_size: 3}\nadapter: {rank: 2}\nrun: {seed: 4}\n"
    )
    file = str(tmp_path / "moe.yml")
    one = upcycled(dense / "llama", tmp_path / "one", file)
    two = upcycled(dense / "llama", tmp_path / "two", "--config", file)
    three = upcycled(dense / "llama", tmp_path / "three", *moe(), "run.seed=4")
    for other in (two, three):
        assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_dense_folder_of_run_with_experts_is_rejected(dense: Path, tmp_path: Path) -> None:
    """The error names the import command, whose result starts the run."""
    upcycled(dense / "llama", tmp_path / "ckpt", *moe(d_expert=7))
    with pytest.raises(ConfigError) as error:
        started(tmp_path, tmp_path, f"checkpoint.restore_from=hf:{dense / 'llama'}")
    (problem,) = error.value.problems
    assert problem.code == Code.HF_UPCYCLE and problem.where.endswith("checkpoint.restore_from")
    assert f"maxpipe import {dense / 'llama'} --out NEW --upcycle" in problem.action
    start, _, _ = started(tmp_path, tmp_path, "mesh.cpu_devices=2", "mesh.ici_expert=2")
    assert "the weights of" in start.message


def test_train_command_starts_from_upcycled_checkpoint(dense: Path, tmp_path: Path) -> None:
    upcycled(dense / "llama", tmp_path / "moe", *moe(d_expert=7))
    command = [sys.executable, "-m", "maxpipe", "train", str(tmp_path / "moe/config.yml")]
    command += [f"run.dir={tmp_path}", "run.name=run", "data.source=synthetic"]
    command += ["tokenizer.kind=bytes", "tokenizer.path=", "eval.every=0", "log.every=1"]
    command += ["train.steps=2", "train.batch_size=4", "train.sequence_length=16"]
    command += ["optim.warmup_steps=0", "log.trackers=[]", "runtime.platform=cpu"]
    command += ["mesh.cpu_devices=2", "mesh.ici_expert=2"]
    environment = environment_of_command()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert f"with the weights of {tmp_path / 'moe'}" in done.stdout
    assert list(losses(tmp_path / "run")) == [1, 2]


def test_export_writes_model_with_experts(dense: Path, tmp_path: Path) -> None:
    params = upcycled(dense / "llama", tmp_path / "moe", *moe(num_experts=maker.EXPERTS))
    assert main(["export", str(tmp_path / "moe"), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    wanted = json.loads((dense / "llama/config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert all(config[key] == wanted[key] for key in maker.SIZES)
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "again")]) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, params, saved(tmp_path / "again")))


# transformers requires that the number of heads of a Llama model divides its width.
ORACLE_CASES = ["copies of mistral", "shards", "qwen3", "qwen3 with dense layers"]


@pytest.mark.oracle
@pytest.mark.parametrize("name", ORACLE_CASES)
def test_transformers_computes_logits_of_dense_model(
    name: str, dense: Path, tmp_path: Path
) -> None:
    if why := reason():
        pytest.skip(f"no transformers in {PYTHON}: {why}")
    family, arguments = EXACT[name]
    upcycled(dense / family, tmp_path / "moe", *arguments)
    assert main(["export", str(tmp_path / "moe"), str(tmp_path / "out")]) == 0
    np.save(tmp_path / "tokens.npy", TOKENS)
    folders = {"dense": dense / family, "moe": tmp_path / "out"}
    jobs = [
        {"folder": str(folder), "tokens": str(tmp_path / "tokens.npy")}
        | {"logits": str(tmp_path / f"{kind}.npy")}
        for kind, folder in folders.items()
    ]
    run_oracle("logits", jobs, tmp_path)
    found, wanted = (np.load(tmp_path / f"{kind}.npy") for kind in ("moe", "dense"))
    assert np.abs(found - wanted).max() <= EQUAL * np.abs(wanted).max()
