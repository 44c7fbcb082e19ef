"""DeepSeek folders: invalid config.json values, and multi-token prediction layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.huggingface.config_json import read_description, values
from maxpipe.huggingface.mapping import map_tensors
from maxpipe.models.registry import describe
from tests.errors import without_codes
from tests.huggingface import maker

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"num_hidden_layers": 3, "hidden_size": 12, "num_attention_heads": 2, "vocab_size": 263},
    **{"num_key_value_heads": 2, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2},
    **{"kv_lora_rank": 7, "q_lora_rank": 9, "first_k_dense_replace": 1, "intermediate_size": 11},
    **{"moe_intermediate_size": 8, "num_nextn_predict_layers": 1},
}
V2 = ["DeepseekV2ForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 1}, "must be model.num_heads (2)"),
        ({"qk_rope_head_dim": 3, "qk_nope_head_dim": 5}, "must be even"),
        ({"qk_nope_head_dim": 0}, "less than model.head_dim (4)"),
        ({"qk_nope_head_dim": "6"}, "qk_nope_head_dim"),
        ({"head_dim": 6}, "must be 4"),
        ({"topk_method": "noaux"}, "noaux_tc"),
        ({"architectures": V2, "topk_method": "noaux_tc"}, "topk_method"),
        (
            {"architectures": V2, "topk_method": "group_limited_greedy", "n_group": None},
            "is required with expert groups",
        ),
        ({"n_group": 4}, "must divide model.deepseek.num_experts (6)"),
        ({"topk_group": 4}, "must be at most model.deepseek.num_expert_groups (3)"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "covers only 2 of 6 experts"),
        ({"n_group": 6, "topk_group": 3}, "must be max"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"rope_interleave": False}, "rope_interleave"),
    ],
)
def test_invalid_deepseek_config_is_rejected(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = values(read_description(tmp_path).config)
    assert (found["head_dim"], found["deepseek.qk_rope_head_dim"]) == (10, 4)
    path.write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        read_description(tmp_path)
    assert str(caught.value).startswith(str(path))


COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
OWN = {f"{each}.weight" for each in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
BEHIND = "model.layers.3."


def drawn(folder: Path, config: dict[str, Any]) -> maker.Tensors:
    """Return all tensors of a model with this config, in bfloat16 except for router biases."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    in_words = read_description(folder)
    shapes = map_tensors(describe(in_words.config), in_words.table).tensors
    found: maker.Tensors = {}
    for name, shape in shapes.items():
        type_ = maker.TYPES["F32" if "bias" in name else "BF16"]
        found[name] = np.random.default_rng([*name.encode()]).normal(size=shape).astype(type_)
    for copy, original in COPIES.items():
        original = original if original in found else "model.embed_tokens.weight"
        found |= {name: found[original] for name in found if re.match(rf".*\.\d+\.{copy}", name)}
    return found


def run_command(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == code
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("changes", [{}, {"num_nextn_predict_layers": 2}])
def test_mtp_layers_round_trip_bitwise(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | changes
    tensors = drawn(tmp_path / "x", config)
    behind = {name.removeprefix(BEHIND) for name in tensors if name.startswith(BEHIND)}
    before = {each.removeprefix("model.layers.2.") for each in tensors if ".layers.2." in each}
    assert behind == before | OWN | {*COPIES}
    folder = maker.write(tmp_path / "x", config, tensors, files=3)
    imported, out = tmp_path / "imported", tmp_path / "out"
    assert "omitted" not in run_command(capsys, "import", folder, "--out", imported)
    assert "omitted" not in run_command(capsys, "export", imported, out)
    maker.same_bits(maker.read(out), tensors)
    count = config["num_nextn_predict_layers"]
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == count
    narrow = tmp_path / "narrow"
    run_command(capsys, "export", imported, narrow, "--dtype", "bfloat16")
    wide = {name for name, array in maker.read(narrow).items() if array.dtype == np.float32}
    layers = range(1, 3 + count)
    assert wide == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in layers}


def test_mtp_table_copies_may_be_missing_from_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = drawn(tmp_path / "x", config)
    without = {
        name: array for name, array in tensors.items() if name.removeprefix(BEHIND) not in COPIES
    }
    assert len(tensors) - len(without) == 2
    folder = maker.write(tmp_path / "x", config, without)
    run_command(capsys, "import", folder, "--out", tmp_path / "imported")
    run_command(capsys, "export", tmp_path / "imported", tmp_path / "out")
    maker.same_bits(maker.read(tmp_path / "out"), tensors)


@pytest.mark.parametrize("copy", COPIES)
def test_mtp_table_copy_that_differs_is_rejected(
    copy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = drawn(tmp_path / "x", CONFIG)
    other = tensors[BEHIND + copy].copy()
    other[-1, -1] += 1
    folder = maker.write(tmp_path / "x", CONFIG, tensors | {BEHIND + copy: other})
    out = tmp_path / "imported"
    output = run_command(capsys, "import", folder, "--out", out, code=2)
    assert f"{BEHIND}{copy}\n  must be bitwise equal to {COPIES[copy]}" in without_codes(output)
    assert "num_nextn_predict_layers" in output and not out.exists()
    maker.write(folder, CONFIG | {"num_nextn_predict_layers": 0}, tensors)
    output = run_command(capsys, "import", folder, "--out", out)
    assert f"omitted, because this model does not use them: {BEHIND}" in output


@pytest.mark.parametrize("count", [0, 1])
def test_mtp_layers_beyond_config_are_omitted_but_not_decoder_layers(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = drawn(tmp_path / "x", CONFIG | {"num_nextn_predict_layers": 3})
    config = CONFIG | {"num_nextn_predict_layers": count}
    folder = maker.write(tmp_path / "x", config, tensors)
    imported, out = tmp_path / "imported", tmp_path / "out"
    assert "omitted" in run_command(capsys, "import", folder, "--out", imported)
    run_command(capsys, "export", imported, out)
    layers = [f"model.layers.{layer}." for layer in range(3 + count, 6)]
    kept = {name: each for name, each in tensors.items() if not name.startswith((*layers,))}
    maker.same_bits(maker.read(out), kept)
    maker.write(folder, config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}, tensors)
    output = run_command(capsys, "import", folder, "--out", tmp_path / "other", code=2)
    assert "has 3 layers of weights, but config.json sets num_hidden_layers = 2" in output


def test_declared_mtp_layers_may_be_missing_from_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = drawn(tmp_path / "x", CONFIG)
    less = {name: array for name, array in tensors.items() if not name.startswith(BEHIND)}
    folder = maker.write(tmp_path / "x", CONFIG, less)
    output = run_command(capsys, "import", folder, "--out", tmp_path / "imported")
    assert "declares 1 multi-token prediction layer, but the folder has none" in output
    run_command(capsys, "export", tmp_path / "imported", tmp_path / "out")
    maker.same_bits(maker.read(tmp_path / "out"), less)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    maker.write(folder, CONFIG, less | {f"{BEHIND}eh_proj.weight": np.ones((12, 24), np.float32)})
    output = run_command(capsys, "import", folder, "--out", tmp_path / "other", code=2)
    assert f"lacks {len(tensors) - len(less) - 3} tensors: '{BEHIND}enorm.weight'" in output
