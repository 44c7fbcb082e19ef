"""Runs, generation and exports that start from a PEFT folder, and invalid PEFT folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.digests import leaves_by_name
from maxpipe.cli import main
from maxpipe.config.load import load, to_yaml
from maxpipe.errors import ConfigError
from maxpipe.huggingface.export import TYPES, export_adapters
from maxpipe.huggingface.mapping import cast
from maxpipe.huggingface.peft import CONFIG, WEIGHTS, CheckpointAdapters
from maxpipe.huggingface.safetensors import DTYPES, SafetensorsReader
from maxpipe.restore.open_model import open_address_or_folder
from tests.huggingface import maker
from tests.huggingface.adapted import Made, begun, made
from tests.huggingface.test_adapters import TOKENS, logits, quiet
from tests.huggingface.test_oracle import PYTHON, job_of, reason, run_oracle


def peft_folder(family: str, here: Path, *overrides: str) -> tuple[Path, Made, Path]:
    """Return a base model, a run that trained an adapter, and the adapter's PEFT folder."""
    base = maker.write(here / "base", *getattr(maker, family)("F32"))
    run = made(base, here, *overrides)
    export_adapters(parse_address(str(run.folder)), str(here / "peft"), None, quiet)
    return base, run, here / "peft"


def started(base: Path, peft: Path, here: Path, *overrides: str) -> Any:
    """Return the saved adapters of a new run that starts from a PEFT folder."""
    names = f"adapter.restore_from={peft}", "run.name=next"
    loaded, steps, start = begun(base, here, *names, *overrides)
    assert loaded.config.adapter.rank == 2 and loaded.config.adapter.alpha == 3.0
    return leaves_by_name(jax.device_get(steps.to_saved(start.state)["params"]))


CASES = [
    ("llama", ()),
    ("llama", ("adapter.kind=dora", "adapter.targets=['*.attention.*']", "adapter.rslora=true")),
    ("mixtral", ("adapter.targets=['*.experts.*', '*.query']",)),
    ("mixtral", ("adapter.targets=['*.experts.down']",)),
    ("gpt_oss", ("adapter.targets=['*.experts.*']",)),
    ("llama4", ("adapter.targets=['*.experts.*', '*.mlp.*']",)),
    ("nemotron_h", ("adapter.targets=['*.experts.*', '*.mamba.mamba.[!o]*', '*.mlp.*']",)),
    ("falcon_h1", ("adapter.targets=['*.mamba.[!o]*', '*.attention.*', '*.mlp.*']",)),
    ("kimi_linear", ("adapter.targets=['*.experts.*', '*.kda.*', '*.attention.*', '*.mlp.*']",)),
    ("olmo_hybrid", ("adapter.targets=['*.delta.delta.*', '*.attention.*', '*.mlp.*']",)),
    ("granite4", ("adapter.targets=['*.experts.*', '*.mamba.*', '*.attention.*']",)),
    ("qwen3_next", ("adapter.targets=['*.experts.down', '*.shared_up', '*.full.attention.*']",)),
]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_run_starts_from_peft_folder(
    family: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    base, run, peft = peft_folder(family, tmp_path, *overrides)
    found, wanted = started(base, peft, tmp_path), leaves_by_name(run.params)
    kinds = [*run.steps.param_layout.decoder.model.layer_types]
    if len(kinds) == 1:
        found = {name.replace("layers.", f"layers.{kinds[0]}."): found[name] for name in found}
    assert found.keys() == {name for name in wanted if "_lora_" in name}
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name], err_msg=name)


def test_adapter_of_module_that_peft_rejects_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is in a module that PEFT does not adapt"):
        peft_folder("nemotron_h", tmp_path, "adapter.targets=['*.mamba.out']")
    with pytest.raises(ConfigError, match="is in a module that PEFT does not adapt"):
        peft_folder("falcon_h1", tmp_path / "next", "adapter.targets=['*.mamba.out']")


def test_experts_with_separate_modules_are_read(tmp_path: Path) -> None:
    """transformers 4 has one module per expert, whose adapters PEFT names separately."""
    base, _, peft = peft_folder("mixtral", tmp_path, "adapter.targets=['*.experts.*']")
    stacked = started(base, peft, tmp_path)
    reader, apart = SafetensorsReader(peft / WEIGHTS), dict[str, np.ndarray]()
    for name in reader.entries:
        layer, end, values = name.split(".mlp.")[0], name[-13:], reader.read(name)
        count = maker.EXPERTS
        for expert in range(count):
            module = f"{layer}.block_sparse_moe.experts.{expert}"
            if end == "lora_A.weight":
                own = values.reshape(count, -1, values.shape[-1])[expert]
            else:
                own = values.reshape(len(values), -1, count)[..., expert]
            if "base_layer" not in name:
                apart[f"{module}.w2.{end}"] = own
                continue
            half = len(own) // 2
            for number, module_name in enumerate(("w1", "w3")):
                ranks = slice(2 * number, 2 * number + 2)
                part = own[ranks] if end == "lora_A.weight" else own[half * number :][:half, ranks]
                apart[f"{module}.{module_name}.{end}"] = part
    (peft / WEIGHTS).write_bytes(maker.encoded(apart))
    for name, values in started(base, peft, tmp_path).items():
        np.testing.assert_array_equal(values, stacked[name], err_msg=name)


def test_opened_base_model_includes_peft_adapter(tmp_path: Path) -> None:
    base, run, peft = peft_folder("llama", tmp_path)
    opened = open_address_or_folder(
        base, [f"adapter.restore_from={peft}", "model.compute_dtype=float32"], dict
    )
    found = opened.params(run.steps)
    decoder = run.steps.param_layout.decoder
    split = run.steps.param_layout.split_layer_types
    wanted = logits(decoder, run.params)
    assert (logits(decoder, jax.device_get(split(found))) == wanted).all()
    assert np.abs(wanted - logits(decoder, jax.device_get(split(found))) * 0.5).max() > 0


Change = Callable[[Path], object]


def config_with(**keys: Any) -> Change:
    def change(peft: Path) -> None:
        content = json.loads((peft / CONFIG).read_text()) | keys
        (peft / CONFIG).write_text(json.dumps(content))

    return change


def tensors_with(change: Callable[[dict[str, np.ndarray]], object]) -> Change:
    def rewrite(peft: Path) -> None:
        reader = SafetensorsReader(peft / WEIGHTS)
        tensors = {name: reader.read(name) for name in reader.entries}
        change(tensors)
        (peft / WEIGHTS).write_bytes(maker.encoded(tensors))

    return rewrite


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
A, B = FIRST.format("A"), FIRST.format("B")
INVALID: list[tuple[str, Change, str]] = [
    ("no config", lambda peft: (peft / CONFIG).unlink(), "must contain adapter_config.json"),
    (
        "no weights",
        lambda peft: (peft / WEIGHTS).unlink(),
        "must contain adapter_model.safetensors",
    ),
    ("no JSON", lambda peft: (peft / CONFIG).write_text("{"), "must be a JSON object"),
    ("list", lambda peft: (peft / CONFIG).write_text("[1]"), "must be a JSON object"),
    ("type", config_with(peft_type="IA3"), "peft_type"),
    ("bias", config_with(bias="all"), "bias"),
    ("bool", config_with(use_rslora="yes"), "use_rslora"),
    ("rank", config_with(r=2.5), ": r"),
    ("rank 3", config_with(r=3), "rank_pattern"),
    ("alpha", config_with(lora_alpha=-1), "lora_alpha"),
    ("alpha_pattern", config_with(alpha_pattern={"q_proj": 7.0}), "alpha_pattern"),
    ("slow", config_with(alpha_pattern={"(a|a)*": 7.0}), "general regular expressions"),
    ("pissa", config_with(init_lora_weights="pissa"), "init_lora_weights"),
    ("saved", config_with(modules_to_save=["lm_head"]), "modules_to_save"),
    ("layers", config_with(layers_to_transform=[0]), "layers_to_transform"),
    ("future", config_with(use_new_method=True), "use_new_method"),
    ("tokens", config_with(trainable_token_indices=[1]), "trainable_token_indices"),
    ("dora", config_with(use_dora=True), "lora_magnitude_vector"),
    ("missing", tensors_with(lambda tensors: tensors.pop(A)), "lacks 1 tensor"),
    ("long", config_with(alpha_pattern={f"q{n}": 7.0 for n in range(1001)}), "at most 1,000 keys"),
    ("high rank", config_with(r=maker.WIDTH + 1), "Use a PEFT adapter of a lower rank"),
    (
        "some layers",
        tensors_with(lambda t: [t.pop(name) for name in [*t] if ".layers.0." in name]),
        "must have adapters in all its layers.\n  Merge the adapter",
    ),
    (
        "output projection",
        tensors_with(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[A]})),
        "no matrix that supports adapters in this base model",
    ),
    (
        "slow name",
        tensors_with(lambda t: t.update({"layers.1.lora_x." * 4000 + "-": t[A]})),
        "has 1 tensor that",
    ),
    ("surplus", tensors_with(lambda t: t.update({"x.lora_A.weight": t[A]})), "has 1 tensor that"),
    ("no adapter", tensors_with(lambda tensors: tensors.clear()), "must have adapters"),
    ("shape", tensors_with(lambda t: t.update({A: t[A][:, 1:]})), "must have the shape"),
    ("rank of B", tensors_with(lambda t: t.update({B: t[B][:, :1]})), "rank_pattern"),
    ("NaN", tensors_with(lambda t: t.update({A: t[A] * np.nan})), "must be finite"),
    (
        "truncated",
        lambda peft: (peft / WEIGHTS).write_bytes((peft / WEIGHTS).read_bytes()[:-8]),
        "ends too early",
    ),
    ("header", lambda peft: (peft / WEIGHTS).write_bytes(b"\xff" * 9), "safetensors file"),
]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base, _, peft = peft_folder("llama", tmp_path_factory.mktemp("valid"))
    return base, peft


@pytest.mark.parametrize(("name", "change", "words"), INVALID, ids=[each[0] for each in INVALID])
def test_invalid_peft_folder_is_explained(
    name: str, change: Change, words: str, valid: tuple[Path, Path], tmp_path: Path
) -> None:
    base, peft = valid
    peft = shutil.copytree(peft, tmp_path / "peft")
    change(peft)
    with pytest.raises(ConfigError) as caught:
        started(base, peft, tmp_path)
    assert words in str(caught.value)
    assert all(problem.action for problem in caught.value.problems)


def test_settings_that_contradict_the_folder_are_explained(
    valid: tuple[Path, Path], tmp_path: Path
) -> None:
    base, peft = valid
    for setting, words in (
        ("adapter.rank=3", "must be 2, the value of the adapter"),
        ("adapter.alpha=8", "must be 3"),
        ("adapter.kind=dora", "must be lora"),
        ("adapter.targets=['*.query']", "no matrix in adapter.targets uses"),
        ("adapter.rank=0", "is ignored with adapter.rank = 0"),
        ("model.frozen=['*_lora_a']", "must not match layers.attention.query_lora_a"),
        (f"adapter.restore_from={tmp_path / 'none'}", "must be a folder on this machine"),
    ):
        with pytest.raises(ConfigError, match=words):
            started(base, peft, tmp_path, setting)


def test_several_adapters_of_one_base_are_exported(
    valid: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, peft = valid
    runs = [made(base, tmp_path / name, "adapter.targets=['*.query']") for name in "ab"]
    first = peft.parent / "adapted"
    export = ["export", str(first), str(tmp_path / "out"), "--adapter", "--name", "sql"]
    added = ["--add", f"chat={runs[0].folder}@1", "--add", f"code-2={runs[1].folder}"]
    assert main([*export, *added]) == 0, capsys.readouterr().err
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"sql", "chat", "code-2"}
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "out" / "sql" / name).read_bytes() == (peft / name).read_bytes()
        assert (tmp_path / "out" / "chat" / name).exists()
    other = maker.write(tmp_path / "other", *maker.llama("F32", rms_norm_eps=1e-3))
    table = maker.read(other)["model.embed_tokens.weight"] + 1
    maker.write(
        other, maker.llama("F32")[0], maker.read(other) | {"model.embed_tokens.weight": table}
    )
    of_other = made(other, tmp_path / "c")
    invalid = {
        f"../x={runs[0].folder}": "letters, digits",
        f"a/b={runs[0].folder}": "letters, digits",
        f"a.b={runs[0].folder}": "letters, digits",
        f"={runs[0].folder}": "letters, digits",
        f"SQL={runs[0].folder}": "repeats the name",
        "chat": "must be NAME=CKPT",
        f"chat={of_other.folder}": "must have the same base model",
        f"chat={tmp_path / 'none'}": "none",
    }
    for text, words in invalid.items():
        arguments = [*export[:2], str(tmp_path / "new"), *export[3:], "--add", text]
        assert main(arguments) == 2
        assert words in capsys.readouterr().err, text
        assert not (tmp_path / "new").exists()
    assert main([*export[:4], "--add", f"chat={first}"]) == 2
    assert main([*export[:3], "--name", "sql"]) == 2


def test_dora_of_a_fused_tensor_is_explained(tmp_path: Path) -> None:
    """PEFT has one magnitude vector for qkv_proj, and maxpipe has one for each projection."""
    base, _, peft = peft_folder("phi3", tmp_path, "adapter.targets=['*.query','*.key','*.value']")
    config_with(use_dora=True)(peft)
    with pytest.raises(ConfigError, match="shares its tensor") as caught:
        started(base, peft, tmp_path)
    (problem,) = caught.value.problems
    assert problem.where == str(peft / CONFIG) and problem.action.startswith("Merge the adapter")


def test_other_errors_do_not_blame_the_unset_rank(valid: tuple[Path, Path], tmp_path: Path) -> None:
    base, peft = valid
    with pytest.raises(ConfigError) as caught:
        started(base, peft, tmp_path, "tokenizer.kind=words")
    assert [problem.where for problem in caught.value.problems] == ["command line: tokenizer.kind"]


def test_run_resumes_with_its_own_config_without_the_folder(
    valid: tuple[Path, Path], tmp_path: Path
) -> None:
    base, peft = valid
    key = f"adapter.restore_from={shutil.copytree(peft, tmp_path / 'peft')}"
    config = to_yaml(begun(base, tmp_path, key)[0].config)
    shutil.rmtree(tmp_path / "peft")
    with pytest.raises(ConfigError, match="To resume a run without the folder, use the config.yml"):
        begun(base, tmp_path, key)
    (tmp_path / "config.yml").write_text(config)
    assert to_yaml(load([str(tmp_path / "config.yml")]).config) == config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_out_of_range_of_the_dtype_are_explained(dtype: str) -> None:
    values = np.full(3, 1e6, DTYPES[TYPES[dtype]])
    with pytest.raises(ConfigError, match="cannot represent a.weight: .* 65504"):
        cast(values, np.dtype(np.float16), "a.weight")


def test_adapters_out_of_range_of_the_dtype_are_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, _ = peft_folder("llama", tmp_path)
    factor = CheckpointAdapters.factor
    monkeypatch.setattr(CheckpointAdapters, "factor", lambda *args: 1e6 * factor(*args))
    with pytest.raises(ConfigError, match="the float16 maximum is 65504"):
        export_adapters(parse_address(str(run.folder)), str(tmp_path / "half"), "float16", quiet)
    assert not (tmp_path / "half").exists()


OF_PEFT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    ("llama", {"target_modules": r".*\.(v_proj|up_proj)", "use_dora": True}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    ("qwen3", {"target_modules": "all-linear"}),
    (
        "mixtral",
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []},
    ),
    ("qwen3_moe", {"target_parameters": ["experts.down_proj"], "target_modules": ["q_proj"]}),
    ("gpt_oss", {"target_parameters": ["experts.gate_up_proj"], "target_modules": ["o_proj"]}),
    (
        "llama4",
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []},
    ),
]


@pytest.mark.oracle
def test_adapters_of_peft_compute_the_same_logits(tmp_path: Path) -> None:
    if why := reason("peft"):
        pytest.skip(f"no PEFT in {PYTHON}: {why}")
    bases = {family: job_of(family, 0, tmp_path) for family in {family for family, _ in OF_PEFT}}
    run_oracle("make", [*bases.values()], tmp_path)
    jobs: list[dict[str, Any]] = []
    for number, (family, lora) in enumerate(OF_PEFT):
        names = {name: str(tmp_path / f"{number}-{name}") for name in ("adapter", "logits")}
        tokens = tmp_path / f"{number}.npy"
        np.save(tokens, TOKENS % bases[family]["config"]["vocab_size"])
        folder, lora = bases[family]["folder"], {"r": 2, "lora_alpha": 3} | lora
        names["logits"] += ".npy"
        jobs.append({"folder": folder, "tokens": str(tokens), "lora": lora, **names})
    run_oracle("make_adapter", jobs, tmp_path)
    for (family, lora), job in zip(OF_PEFT, jobs, strict=True):
        folder, name = Path(job["folder"]), Path(job["adapter"]).name
        settings = f"adapter.restore_from={job['adapter']}", f"run.name={name}"
        _, steps, start = begun(folder, tmp_path, *settings)
        merged = steps.param_layout.to_saved(start.state.params)
        params = jax.device_get(steps.param_layout.split_layer_types(merged))
        found = logits(steps.param_layout.decoder, params, bases[family]["config"]["vocab_size"])
        wanted = np.load(job["logits"])
        error = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert error < 1e-4, f"{family}, {lora}: {error:.1e}"
