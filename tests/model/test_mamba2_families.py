"""Families with Mamba-2 layers: layer types, costs and rules of their keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models import count
from maxpipe.models.config import ModelConfig
from maxpipe.models.falcon_h1 import FalconH1Config
from maxpipe.models.granite4 import Granite4Config
from maxpipe.models.layers.experts import Experts
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.nemotron_h import NemotronHConfig
from maxpipe.models.registry import describe
from maxpipe.models.spec import Products

GRANITE4 = ModelConfig(
    family="granite4",
    num_layers=5,
    d_model=18,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    d_mlp=28,
    vocab_size=37,
    own=Granite4Config(
        attention_layers=[1, 4],
        mamba_num_heads=6,
        mamba_head_dim=7,
        mamba_num_groups=2,
        mamba_state_dim=5,
        mamba_chunk_size=4,
    ),
)
NEMOTRON = replace(
    GRANITE4,
    family="nemotron_h",
    own=NemotronHConfig(hybrid_override_pattern="ME*-", mamba_num_heads=6, mamba_num_groups=2),
)
FALCON = replace(
    GRANITE4,
    family="falcon_h1",
    own=FalconH1Config(mamba_num_heads=6, mamba_head_dim=7, mamba_num_groups=2, mamba_state_dim=5),
)
ARGUMENTS = ["train.steps=1", "tokenizer.kind=huggingface", "tokenizer.path=x"]


@pytest.mark.parametrize(
    ("attention", "layers"), [([1, 4], "mamma"), ([], "mmmmm"), ([0, 1, 2, 3, 4], "aaaaa")]
)
def test_granite4_layers_are_mamba_except_listed_ones(attention: list[int], layers: str) -> None:
    own = replace(GRANITE4.own, attention_layers=attention)
    model = describe(replace(GRANITE4, own=own))
    assert "".join(name[0] for name in model.layers) == layers
    assert {*model.layer_types} == {*model.layers}


@pytest.mark.parametrize(("num_experts", "part"), [(0, "mlp"), (3, "experts")])
def test_granite4_experts_share_the_mlp(num_experts: int, part: str) -> None:
    own = replace(GRANITE4.own, num_experts=num_experts)
    for layer_type in describe(replace(GRANITE4, own=own)).layer_types.values():
        last = layer_type.branches[-1]
        shared = last.part.shared if isinstance(last.part, Experts) else last.part
        assert last.name == part
        assert isinstance(shared, MLP) and shared.d_mlp == GRANITE4.d_mlp


def test_cost_of_mamba_layer_does_not_depend_on_length() -> None:
    model = describe(GRANITE4)
    short, long = (count.layer_costs(model, tokens) for tokens in (256, 4096))
    for layer, name in enumerate(model.layers):
        assert (short[layer] == long[layer]) == (name == "mamba")
    # For each head and token, the recurrence writes and reads the state.
    part = model.layer_types["mamba"].parts["mamba"]
    (products,) = (each for each in part.operations if isinstance(each, Products))
    assert 2 * products.heads * products.needed == 2 * 2 * 6 * 5 * 7
    assert products.computed > products.needed


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "attention_layers=[5,40]",
            "must contain layer indices from 0 to 39, each once, but contains 40.",
        ),
        ("attention_layers=[5,40]", "Set model.granite4.attention_layers=[5]."),
        ("mamba_num_groups=9", "must divide model.granite4.mamba_num_heads (48)."),
        ("mamba_num_groups=9", "Set model.granite4.mamba_num_groups=3."),
        ("mamba_chunk_size=48", "Set model.granite4.mamba_chunk_size=32."),
        ("mamba_conv_kernel_dim=1", "must be from 2 to 64."),
        ("num_experts=-1", "must be at least 0"),
        ("top_k=65", "must be at most model.granite4.num_experts (64)"),
        ("mamba_d_state=64", "Write model.granite4.mamba_state_dim=64."),
        ("mamba_n_heads=24", "Write model.granite4.mamba_num_heads=24."),
    ],
)
def test_invalid_granite4_keys_are_rejected(setting: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["granite4-h-tiny", *ARGUMENTS, f"model.granite4.{setting}"])
    assert text in str(caught.value)


def test_top_k_may_exceed_experts_of_model_without_experts() -> None:
    load(["granite4-h-micro", *ARGUMENTS, "model.granite4.top_k=5"])


def test_mamba_heads_must_be_divisible_by_tensor_size() -> None:
    mesh = ["mesh.ici_tensor=2", "mesh.cpu_devices=2"]
    load(["granite4-h-tiny", *ARGUMENTS, *mesh])
    with pytest.raises(ConfigError, match="must be a multiple of the tensor size"):
        load(["granite4-h-tiny", *ARGUMENTS, *mesh, "model.granite4.mamba_num_heads=27"])


@pytest.mark.parametrize(
    ("pattern", "layers"), [("ME*-", "mamba experts attention mlp mamba"), ("M", "mamba " * 5)]
)
def test_nemotron_h_pattern_is_repeated(pattern: str, layers: str) -> None:
    own = replace(NEMOTRON.own, hybrid_override_pattern=pattern)
    model = describe(replace(NEMOTRON, own=own))
    assert model.layers == tuple(layers.split())
    assert all(len(each.branches) == 1 for each in model.layer_types.values())


def test_nemotron_h_experts_and_mlp_have_no_gate() -> None:
    types = describe(NEMOTRON).layer_types
    assert {*types["mlp"].parts["mlp"].params} == {"up", "down"}
    assert {*types["experts"].parts["experts"].params} == {"router", "up", "down"}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("hybrid_override_pattern=MXE", "must consist of the letters M (Mamba-2)"),
        ("hybrid_override_pattern=MXE", "Set model.nemotron_h.hybrid_override_pattern='ME'."),
        ("hybrid_override_pattern=''", "Set model.nemotron_h.hybrid_override_pattern='M-M*-'."),
        (f"hybrid_override_pattern={'M' * 53}", "must have at most model.num_layers (52) letters"),
        (f"hybrid_override_pattern={'M' * 53}", "Set model.num_layers=53."),
        ("mamba_num_groups=7", "must divide model.nemotron_h.mamba_num_heads (64)."),
        ("top_k=129", "must be at most model.nemotron_h.num_experts (128)"),
        ("num_expert_groups=3", "must divide model.nemotron_h.num_experts (128)"),
        ("mamba_min_time_step=2.0", "must be from 0 to 1"),
    ],
)
def test_invalid_nemotron_h_keys_are_rejected(setting: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["nemotron3-nano-30b-a3b", *ARGUMENTS, f"model.nemotron_h.{setting}"])
    assert text in str(caught.value)


def test_falcon_h1_attention_shares_the_input_of_mamba() -> None:
    (layer_type,) = describe(FALCON).layer_types.values()
    assert [*layer_type.parts] == ["mamba_norm", "mamba", "attention", "mlp_norm", "mlp"]
    assert [branch.shares_input for branch in layer_type.branches] == [False, True, False]
    # The layer's input, the cotangent of its output, and the residual sum before the MLP.
    assert layer_type.num_residual_arrays == 3


@pytest.mark.parametrize("normed", [False, True])
def test_falcon_h1_norm_of_mamba_is_optional(normed: bool) -> None:
    model = describe(replace(FALCON, own=replace(FALCON.own, mamba_rms_norm=normed)))
    assert ("norm" in model.layer_types["layer"].parts["mamba"].params) == normed


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("ssm_multipliers=[1.0,2.0]", "must contain 5 positive numbers"),
        ("ssm_multipliers=[1.0,2.0]", "Set model.falcon_h1.ssm_multipliers=[1.0,1.0,1.0,1.0,1.0]."),
        ("mlp_multipliers=[1.0,0.0]", "must contain 2 positive numbers"),
        ("mlp_multipliers=[1.0]", "must contain 2 positive numbers"),
        ("mamba_d_state=64", "Write model.falcon_h1.mamba_state_dim=64."),
        ("mamba_n_heads=12", "Write model.falcon_h1.mamba_num_heads=12."),
        ("key_multiplier=0", "must be greater than 0"),
        ("mamba_num_groups=5", "must divide model.falcon_h1.mamba_num_heads (24)."),
        ("mamba_chunk_size=48", "Set model.falcon_h1.mamba_chunk_size=32."),
    ],
)
def test_invalid_falcon_h1_keys_are_rejected(setting: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["falcon-h1-0.5b", *ARGUMENTS, f"model.falcon_h1.{setting}"])
    assert text in str(caught.value)
