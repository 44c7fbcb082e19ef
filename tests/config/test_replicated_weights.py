"""Errors and warnings for large weights that are replicated on several devices."""

from __future__ import annotations

import pytest

from maxpipe.cli import main
from maxpipe.config.check import find_warnings
from maxpipe.config.config_files import bundled_configs
from maxpipe.config.load import load
from maxpipe.config.sections.mesh import find_replicated_weights
from maxpipe.errors import ConfigError

SMALL = [
    *("train.steps=1", "train.batch_size=16", "eval.batch_size=16", "model.num_heads=4"),
    *("model.num_kv_heads=4", "model.d_model=48", "model.num_layers=4", "model.d_mlp=64"),
    *("model.head_dim=12", "model.vocab_size=259", "train.sequence_length=64"),
]
EXPERTS = ["model.family=moe", "model.moe.num_experts=4", "model.moe.d_expert=32"]
TINY = "mesh.max_replicated_bytes=1000"


def warning_keys(*given: str) -> list[str]:
    """Return the keys of the warnings for a valid config."""
    return [each.where for each in find_warnings(load([*SMALL, *given]).config)]


def test_weight_replicated_along_sharding_axis_is_rejected() -> None:
    wrong = ["mesh.ici_expert=4", *EXPERTS, "mesh.axis_rules.embed=[fsdp]", TINY]
    with pytest.raises(ConfigError) as caught:
        load([*SMALL, *wrong])
    message = str(caught.value)
    assert "mesh.axis_rules.embed = [fsdp]" in message
    assert "all 4 devices along expert 4" in message
    # The message names only the largest of the replicated weights.
    assert "49,728" in message
    assert "mesh.axis_rules.embed=[fsdp,expert,context]" in message
    load([*SMALL, *wrong, "mesh.axis_rules.embed=[fsdp,expert,context]"])


def test_unsharded_weights_above_size_limit_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*SMALL, "mesh.ici_fsdp=4", "mesh.max_replicated_bytes=700"])
    message = str(caught.value)
    assert "mesh.max_replicated_bytes = 700" in message and "_norm.scale (768" in message
    assert "mesh.max_replicated_bytes=768" in message
    load([*SMALL, "mesh.ici_fsdp=4", "mesh.max_replicated_bytes=768"])
    load([*SMALL, "mesh.ici_fsdp=4", "mesh.max_replicated_bytes=0"])


def test_weights_replicated_by_axis_rule_give_a_warning() -> None:
    whole = ["mesh.ici_fsdp=4", "mesh.axis_rules.embed=[]"]
    assert warning_keys(*whole, TINY) == ["mesh.axis_rules.embed"]
    assert warning_keys(*whole) == [] == warning_keys(*whole, "mesh.max_replicated_bytes=0")
    # The axis rule divides the weight along some of the axes only.
    partly = ["mesh.ici_fsdp=2", "mesh.ici_context=2", "mesh.axis_rules.embed=[fsdp]", TINY]
    assert warning_keys(*partly) == ["mesh.axis_rules.embed"]
    # Replication along the data axis is intended.
    assert warning_keys("mesh.ici_data=4", TINY) == []


def test_plan_warns_about_replicated_weights(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", *SMALL, "mesh.ici_fsdp=4", "mesh.axis_rules.embed=[]", TINY]
    for options in ([], ["--shardings"]):
        assert main([*given, "--topology", "cpu:4", *options]) == 0
        output = capsys.readouterr().err
        assert "mesh.axis_rules.embed = []" in output and "along fsdp 4" in output


@pytest.mark.parametrize(
    "name", [name for name, each in bundled_configs().items() if each.kind == "model"]
)
def test_shipped_models_have_no_replicated_weights(name: str) -> None:
    config = load([name, "train.steps=1", "mesh.ici_fsdp=2", "train.batch_size=2"]).config
    assert list(find_replicated_weights(config)) == []
