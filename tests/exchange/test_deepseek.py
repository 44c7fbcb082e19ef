"""config.json of DeepSeek models: what is refused, and what is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.exchange.mapping import mapped
from maxpipe.exchange.sections import described, values
from maxpipe.model.families.registry import describe
from tests.exchange import maker

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
        ({"qk_nope_head_dim": 0}, "less than model.head_size (4)"),
        ({"qk_nope_head_dim": "6"}, "qk_nope_head_dim"),
        ({"head_dim": 6}, "must be 4, as other keys say"),
        ({"topk_method": "noaux"}, "noaux_tc"),
        ({"architectures": V2, "topk_method": "noaux_tc"}, "topk_method"),
        (
            {"architectures": V2, "topk_method": "group_limited_greedy", "n_group": None},
            "must be there, and topk_group",
        ),
        ({"n_group": 4}, "must divide model.deepseek.num_experts (6)"),
        ({"topk_group": 4}, "is more than model.deepseek.num_groups (3)"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "leaves a token 2 of the 6 experts"),
        ({"n_group": 6, "topk_group": 3}, "asks for two experts in a group"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_latent_attention_and_groups_are_checked(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = values(described(tmp_path).config)
    assert (found["head_size"], found["deepseek.rope_size"]) == (10, 4)
    path.write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        described(tmp_path)
    assert str(caught.value).startswith(str(path))


def test_layers_that_predict_further_ahead_are_left_out_and_biases_stay_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = maker.write(tmp_path / "x", CONFIG, {})
    said = described(folder)
    tensors = {
        name: np.random.default_rng(3).normal(size=shape).astype(np.float32)
        for name, shape in mapped(describe(said.config), said.table).tensors.items()
    }
    ahead = {"model.layers.3.eh_proj.weight": np.ones((12, 24), np.float32)}
    maker.write(folder, CONFIG, tensors | ahead)
    imported, out = tmp_path / "imported", tmp_path / "out"
    assert main(["import", str(folder), "--out", str(imported)]) == 0
    told = "".join(capsys.readouterr())
    assert "left out, as this model does not use them: model.layers.3.eh_proj" in told
    assert main(["export", str(imported), str(out), "--dtype", "bfloat16"]) == 0
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    found = maker.read(out)
    assert found.keys() == tensors.keys()
    exact = {name for name, array in found.items() if array.dtype == np.float32}
    assert exact == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)}
    for name in exact:
        np.testing.assert_array_equal(found[name], tensors[name])
