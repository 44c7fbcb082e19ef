"""Tensor layouts of other tools: the same parameters, or an error that names the layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.checkpoint.address import parse_address
from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.huggingface import folder as folder_module
from maxpipe.huggingface import import_
from maxpipe.huggingface.export import export
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.tensor_layouts import canonical, composite_name
from tests.huggingface import maker

Change = Callable[[maker.Tensors], maker.Tensors]


def prefixed(body: str, head: str) -> Change:
    def change(tensors: maker.Tensors) -> maker.Tensors:
        return {
            body + name.removeprefix("model.") if name.startswith("model.") else head + name: each
            for name, each in tensors.items()
        }

    return change


def wrapped(tensors: maker.Tensors) -> maker.Tensors:
    return {name.replace(".self_attn", "._orig_mod.self_attn"): x for name, x in tensors.items()}


def joined(parts: tuple[str, ...], whole: str) -> Change:
    """Concatenate modules along the first dim."""

    def change(tensors: maker.Tensors) -> maker.Tensors:
        found = dict(tensors)
        for name in tensors:
            if parts[0] in name:
                each = [found.pop(name.replace(parts[0], part)) for part in parts]
                found[name.replace(parts[0], whole)] = np.concatenate(each)
        return found

    return change


def separate(tensors: maker.Tensors) -> maker.Tensors:
    """Split Phi's fused projections into separate tensors."""
    found: maker.Tensors = {}
    q, k = maker.HEADS * maker.HEAD, maker.KV_HEADS * maker.HEAD
    for name, each in tensors.items():
        cuts: dict[str, tuple[tuple[str, ...], list[int]]]
        cuts = {"qkv_proj": (("q_proj", "k_proj", "v_proj"), [q, q + k])}
        cuts["gate_up_proj"] = (("gate_proj", "up_proj"), [maker.MLP])
        whole = next((each for each in cuts if each in name), "")
        if not whole:
            found[name] = each
            continue
        names, places = cuts[whole]
        for part, values in zip(names, np.split(each, places), strict=True):
            found[name.replace(whole, part)] = values
    return found


def stacked(names: tuple[str, str, str], gate_up: str, down: str, at: str = "") -> Change:
    """Stack all experts of a layer in two tensors, as transformers 5 and vLLM do."""

    def change(tensors: maker.Tensors) -> maker.Tensors:
        found = {n: each for n, each in tensors.items() if ".experts." not in n}
        stems = {n.partition(".experts.")[0] for n in tensors if ".experts." in n}
        for stem in stems:
            each = {
                name: np.stack(
                    [tensors[f"{stem}.experts.{e}.{name}.weight"] for e in range(maker.EXPERTS)]
                )
                for name in names
            }
            found[f"{stem}.experts.{gate_up}"] = np.concatenate([each[n] for n in names[:2]], 1)
            found[f"{stem}.experts.{down}"] = each[names[2]]
        return {
            n.replace("block_sparse_moe", at or "block_sparse_moe"): x for n, x in found.items()
        }

    return change


def kimi_mlp(tensors: maker.Tensors) -> maker.Tensors:
    """Return the names that transformers 5.24 writes."""
    return {name.replace(".mlp.", ".block_sparse_moe."): x for name, x in tensors.items()}


def kimi_in_memory(tensors: maker.Tensors) -> maker.Tensors:
    """Return the names of the modules in transformers 5."""
    for change in (
        joined(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"),
        stacked(("w1", "w3", "w2"), "gate_up_proj", "down_proj", "mlp"),
    ):
        tensors = change(tensors)
    for name in ("f_a_proj", "f_b_proj", "A_log", "dt_bias"):
        old, new = f"self_attn.{name}", f"self_attn.forget_gate.{name}"
        tensors = {each.replace(old, new): x for each, x in tensors.items()}
    return tensors


def olmo_in_memory(tensors: maker.Tensors) -> maker.Tensors:
    """Return the names of the modules in transformers 5."""
    names = {"attention_layer_norm": "input_layernorm"}
    names |= {"feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in names.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    return joined(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d")(tensors)


def olmo_norms(tensors: maker.Tensors) -> maker.Tensors:
    """Return the names that transformers 5.24 writes."""
    old, new = "post_attention_layernorm", "feedforward_layer_norm"
    return {name.replace(old, new): x for name, x in tensors.items()}


def olmo_saved(tensors: maker.Tensors) -> maker.Tensors:
    """Return the names and shapes that transformers 5.24 writes."""
    tensors = olmo_norms(tensors)
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{each}_conv1d.weight" for each in "qkv"]
        whole = np.concatenate([tensors[name] for name in names])
        tensors |= dict(zip(names, np.split(whole, 3), strict=True))
    return tensors


def phi3(dtype: str = "BF16") -> tuple[dict[str, Any], maker.Tensors]:
    config, tensors = maker.llama(dtype, hidden_size=24, head_dim=6)
    tensors = {
        name: np.random.default_rng([*name.encode()])
        .normal(size=[24 if size == maker.WIDTH else size for size in each.shape])
        .astype(each.dtype)
        for name, each in tensors.items()
    }
    fused = joined(("gate_proj", "up_proj"), "gate_up_proj")(
        joined(("q_proj", "k_proj", "v_proj"), "qkv_proj")(tensors)
    )
    return {**config, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, fused


GATED = ("gate_proj", "up_proj", "down_proj")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("mlp.gate_proj", "mlp.up_proj")
LAYOUTS: dict[str, tuple[Callable[..., tuple[dict[str, Any], maker.Tensors]], Change]] = {
    "base class": (maker.llama, prefixed("", "")),
    "part of a larger model": (maker.llama, prefixed("model.language_model.", "")),
    "larger model of transformers 4": (
        maker.llama,
        prefixed("language_model.model.", "language_model."),
    ),
    "merged by PEFT": (maker.mixtral, prefixed("base_model.model.model.", "base_model.model.")),
    "DistributedDataParallel": (maker.gemma3, prefixed("module.model.", "module.")),
    "compiled": (maker.llama, prefixed("_orig_mod.model.", "_orig_mod.")),
    "compiled layers": (maker.llama, wrapped),
    "fused queries, keys and values": (maker.llama, joined(QKV, "qkv_proj")),
    "fused gates": (maker.gemma3, joined(GATE_UP, "mlp.gate_up_proj")),
    "separate projections of Phi": (phi3, separate),
    "experts of Mixtral": (
        maker.mixtral,
        stacked(("w1", "w3", "w2"), "gate_up_proj", "down_proj", "mlp"),
    ),
    "experts of vLLM": (maker.mixtral, stacked(("w1", "w3", "w2"), "w13_weight", "w2_weight")),
    "MLPs of Kimi Linear": (maker.kimi_linear, kimi_mlp),
    "modules of Kimi Linear in memory": (maker.kimi_linear, kimi_in_memory),
    "norms of OLMo Hybrid": (maker.olmo_hybrid, olmo_norms),
    "equal parts of the convolution of OLMo Hybrid": (maker.olmo_hybrid, olmo_saved),
    "modules of OLMo Hybrid in memory": (maker.olmo_hybrid, olmo_in_memory),
    "experts of Qwen3-Next": (maker.qwen3_next, stacked(GATED, "gate_up_proj", "down_proj")),
    "experts of Qwen3.5": (maker.qwen3_5_moe, stacked(GATED, "gate_up_proj", "down_proj")),
    "each expert's gate and up": (
        maker.qwen3_next,
        joined(("gate_proj", "up_proj"), "gate_up_proj"),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_layouts_import_bitwise_equal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change = LAYOUTS[name]
    # Split layers into slabs and slabs into blocks, as for large models.
    monkeypatch.setattr(import_, "SLAB_BYTES", 400)
    monkeypatch.setattr(folder_module, "_BLOCK_ELEMENTS", 30)
    config, tensors = make("BF16")
    for each in tensors:
        if "norm" in each or ".experts." in each:  # two dtypes in one folder
            tensors[each] = tensors[each].astype(np.float32)
    other = change(tensors)
    assert other.keys() != tensors.keys()
    folder = maker.write(tmp_path / "hf", config, other, files=2)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 0
    export(parse_address(str(tmp_path / "ckpt")), str(tmp_path / "out"), None, print)
    unread = "mtp." if make is maker.qwen3_next else "-"
    wanted = {each: x for each, x in tensors.items() if not each.startswith(unread)}
    maker.same_bits(maker.read(tmp_path / "out"), wanted)


def test_parts_with_several_dtypes_import_bitwise_equal(tmp_path: Path) -> None:
    config, tensors = maker.olmo_hybrid("BF16")
    name = "model.layers.0.linear_attn.k_conv1d.weight"
    tensors[name] = tensors[name].astype(np.float32)
    folder = maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 0
    export(parse_address(str(tmp_path / "ckpt")), str(tmp_path / "out"), None, print)
    maker.same_bits(maker.read(tmp_path / "out"), tensors)


@pytest.mark.parametrize("shape", [(7, 1, 3), (6, 1, 4), (6,)])
def test_parts_with_wrong_shapes_are_rejected(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = maker.olmo_hybrid("BF16")
    for layer in (0, 2):
        name = f"model.layers.{layer}.linear_attn.k_conv1d.weight"
        tensors[name] = np.ones(shape, tensors[name].dtype)
    folder = maker.write(tmp_path / "hf", config, tensors)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 2
    message = capsys.readouterr().err
    assert "must have the shape" in message and "conv1d.weight" in message


def test_canonical_strips_only_known_tool_prefixes() -> None:
    assert canonical("model.norm.weight") == canonical("norm.weight") == "model.norm.weight"
    assert canonical("base_model.model.lm_head.weight") == "lm_head.weight"
    for name in ("vision_tower.layers.0.x", "mtp.layers.0.x", "visual.norm.weight", "score"):
        assert canonical(name) == name


def _renamed(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): each for name, each in tensors.items()}


def _layers(count: int) -> Change:
    return lambda tensors: {n: x for n, x in tensors.items() if f"layers.{count}." not in n}


def _another(tensors: maker.Tensors) -> maker.Tensors:
    more = {n.replace("layers.2.", "layers.3."): x for n, x in tensors.items() if "layers.2." in n}
    return tensors | more


ROW = np.zeros((maker.WIDTH,), np.float32)
ODD: dict[str, tuple[Change, str, str]] = {
    "LoRA": (
        _renamed("q_proj.weight", "q_proj.base_layer.weight"),
        "PEFT adapters that are not merged",
        "merge_and_unload",
    ),
    "Meta": (
        _renamed("self_attn.q_proj", "attention.wq"),
        "the tensor names of Meta's",
        "in transformers format",
    ),
    "GPTQ": (
        _renamed("q_proj.weight", "q_proj.qweight"),
        "weights quantized by GPTQ or AWQ",
        "no tool can restore",
    ),
    "FP8": (
        lambda x: x | {"model.layers.0.self_attn.q_proj.weight_scale_inv": ROW},
        "quantized weights that quantization_config in config.json does not describe",
        "Restore the config.json",
    ),
    "fused and separate": (
        lambda x: x | {"model.layers.0.self_attn.qkv_proj.weight": ROW},
        "has 1 tensor that config.json does not describe",
        "Use the config.json",
    ),
    "Megatron": (
        _renamed("self_attn.q_proj", "query_key_value"),
        "Megatron",
        "in transformers format",
    ),
    "classifier": (
        lambda x: {**_renamed("lm_head", "score")(x)},
        "a classification head",
        "AutoModelForCausalLM",
    ),
    "value head": (lambda x: x | {"v_head.summary.bias": ROW}, "a value head", "pretrained_model"),
    "no head": (
        lambda x: {name: each for name, each in x.items() if name != "lm_head.weight"},
        "no lm_head.weight, but config.json sets tie_word_embeddings = false",
        "set tie_word_embeddings to true",
    ),
    "fewer layers": (
        _layers(2),
        "has 2 layers of weights, but config.json sets num_hidden_layers = 3",
        "Set num_hidden_layers to 2",
    ),
    "more layers": (
        _another,
        "has 4 layers of weights, but config.json sets num_hidden_layers = 3",
        "Set num_hidden_layers to 4",
    ),
    "biases": (
        lambda x: x | {"model.layers.0.self_attn.q_proj.bias": ROW},
        "has 1 tensor that config.json does not describe",
        "Use the config.json",
    ),
    "another tool": (
        _renamed("mlp.down_proj", "ffn.out"),
        "lacks 3 tensors: 'model.layers.0.mlp.down_proj.weight'",
        "If a tool saved these weights with other names",
    ),
    "both layouts": (
        lambda x: x | {"norm.weight": ROW},
        "'model.norm.weight' and 'norm.weight', which are the same tensor",
        "Save the model again",
    ),
    "more tokens": (
        lambda x: x | {"model.embed_tokens.weight": np.zeros((265, maker.WIDTH), np.float32)},
        "must have the shape 263 x 10",
        "set vocab_size to 265",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_unsupported_layouts_are_identified(name: str, tmp_path: Path) -> None:
    change, reason, action = ODD[name]
    config, tensors = maker.llama("F32")
    folder = maker.write(tmp_path / "hf", config, change(tensors))
    with pytest.raises(ConfigError) as caught:
        open_folder(str(folder))
    (problem,) = caught.value.problems
    assert reason in str(caught.value) and action in str(caught.value)
    assert "Copy" not in str(caught.value)
    if action.startswith(("Set", "set")) and name != "more tokens":  # the suggested action works
        count = maker.LAYERS + {"fewer layers": -1, "more layers": 1}.get(name, 0)
        tied = name == "no head"
        maker.write(
            folder,
            {**config, "num_hidden_layers": count, "tie_word_embeddings": tied},
            change(tensors),
        )
        open_folder(str(folder))
    assert problem


def test_stacked_experts_beyond_tensor_files_are_rejected(tmp_path: Path) -> None:
    config, tensors = maker.qwen3_next("F32", num_experts=10**9)
    change = stacked(GATED, "gate_up_proj", "down_proj")
    folder = maker.write(tmp_path / "hf", config, change(tensors))
    with pytest.raises(ConfigError, match="describes a much larger model"):
        open_folder(str(folder))


def test_peft_adapter_folder_is_rejected_as_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(maker.encoded({"x": ROW}))
    for _ in range(2):
        with pytest.raises(ConfigError, match="is a PEFT adapter") as caught:
            open_folder(str(tmp_path))
        assert f"set adapter.restore_from={tmp_path}" in str(caught.value)
        # Some tools copy the base model's config.json into the adapter folder.
        (tmp_path / "config.json").write_text(json.dumps(maker.llama()[0]))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["model-00001-of-00001.safetensors"], "Rename the file to model.safetensors"),
        (["model-00001-of-00002.safetensors"], "Also download model.safetensors.index.json"),
        (["a.safetensors", "b.safetensors"], "and 1 other file"),
        (["x-Q4_K_M.gguf"], "a llama.cpp (GGUF) file"),
        (["pytorch_model.bin"], "is a pickle file"),
        ([], "Download the model's safetensors files"),
    ],
)
def test_folder_without_weights_reports_other_files(
    files: list[str], reason: str, tmp_path: Path
) -> None:
    config, tensors = maker.llama()
    maker.write(tmp_path, config, tensors)
    for name in files:
        shutil.copy(tmp_path / "model.safetensors", tmp_path / name)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        open_folder(str(tmp_path))
    assert reason in str(caught.value)


def test_names_in_composite_models_with_one_prefix() -> None:
    """Qwen3-VL and Qwen3.5 store the tower and the language model below `model`."""
    names = {
        "model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
        "model.norm.weight": "model.language_model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        "visual.merger.norm.bias": "model.visual.merger.norm.bias",
    }
    for ours, published in names.items():
        assert composite_name(ours, is_nested=True) == published
        assert canonical(published) == ours
