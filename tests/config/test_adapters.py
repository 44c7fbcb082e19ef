"""Validation rules for adapters."""

from __future__ import annotations

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.models.param_names import trained
from maxpipe.models.registry import describe

RANK = "adapter.rank=4"
WRONG = [
    ((RANK, "adapter.targets=[q_proj]"), "adapter.targets", "matches no parameter"),
    ((RANK, "adapter.targets=[layers.mlp.gat]"), "adapter.targets", "[layers.mlp.gate]."),
    ((RANK, "adapter.targets=[embedding]"), "adapter.targets", "does not support adapters"),
    (("adapter.rank=1000",), "adapter.rank", "the smaller dimension of layers.attention."),
    (("adapter.targets=[layers.*]",), "adapter.targets", "is ignored with adapter.rank = 0"),
    (
        ("adapter.base_quantization=nf4",),
        "adapter.base_quantization",
        "is ignored with adapter.rank = 0",
    ),
    (
        (RANK, "adapter.double_quantization=true"),
        "adapter.double_quantization",
        "requires adapter.base_quantization=nf4",
    ),
    (
        (RANK, "mixtral-8x7b", "adapter.targets=['*.experts.gate']", "adapter.dropout=0.1"),
        "adapter.dropout",
        "must be 0 with adapters on routed experts (layers.experts.gate)",
    ),
    (
        (RANK, "mixtral-8x7b", "adapter.targets=['*.experts.up']", "adapter.kind=dora"),
        "adapter.kind",
        "must be lora with adapters on routed experts",
    ),
    (
        (RANK, "mixtral-8x7b", "adapter.targets=['*.router']"),
        "adapter.targets",
        "Set adapter.targets=[] for the default: all of these except routed experts.",
    ),
    ((RANK, "model.mtp_heads=1"), "model.mtp_heads", "must be 0 with adapters"),
    ((RANK, "adapter.kind=dora", "model.matmul=int8"), "adapter.kind", "Set adapter.kind=lora"),
    (
        (RANK, "adapter.base_quantization=nf4", "model.matmul=nvfp4", "model.d_mlp=200"),
        "model.matmul",
        "mlp.gate (200) must be a multiple of 16",
    ),
    ((RANK, "model.frozen=[layers.*]"), "model.frozen", "freezes all adapters"),
    (
        (RANK, "adapter.base_quantization=nf4", "model.d_mlp=96", "mesh.ici_tensor=2"),
        "adapter.base_quantization",
        "blocks of 32",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "words"), WRONG)
def test_invalid_adapter_settings_are_rejected(
    overrides: tuple[str, ...], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["tiny", "train.steps=1", *overrides])
    problems = {each.where.partition(": ")[2]: str(each) for each in caught.value.problems}
    assert words in problems[key] + "".join(each.action for each in caught.value.problems)


def test_adapter_training_requires_base_checkpoint() -> None:
    load(["tiny", "train.steps=1", RANK])  # a prediction needs no base
    with pytest.raises(ConfigError, match="adapter.rank"):
        load(["tiny", "train.steps=1", RANK], to_train=True)
    load(["tiny", "train.steps=1", RANK, "checkpoint.restore_from=hf:base"], to_train=True)


def test_targets_and_frozen_factors() -> None:
    def names(*overrides: str) -> set[str]:
        return set(
            trained(describe(load(["tiny", "train.steps=1", RANK, *overrides]).config.model))
        )

    both = {f"layers.mlp.up_lora_{end}" for end in "ab"}
    assert names("adapter.targets=[layers.mlp.up]") == both
    assert names("adapter.targets=[layers.mlp.up]", "model.frozen=['*_lora_a']") == {max(both)}
    assert names("adapter.targets=[layers.mlp.up]", "adapter.base_quantization=int8") == both
    dora = names("adapter.targets=[layers.mlp.up]", "adapter.kind=dora")
    assert dora == {*both, "layers.mlp.up_lora_length"}
    assert len(names()) == 14
