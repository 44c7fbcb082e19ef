"""Validation rules for preference training."""

from __future__ import annotations

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError

GIVEN = [
    *("quickstart", "train.objective=preference", "data.source=jsonl", "data.path=a.jsonl"),
    *("data.chat=pairs", "data.packing=best_fit"),
]


def test_preference_config_defaults() -> None:
    config = load(GIVEN).config
    assert config.preference.loss == "dpo" and config.preference.beta == 0.1
    assert config.data.max_pairs_per_sequence == 16


@pytest.mark.parametrize(
    ("changes", "key", "action"),
    [
        (["data.chat=prompt"], "data.chat", "data.chat=pairs"),
        (["train.objective=pretrain"], "data.chat", "data.chat=prompt"),
        (["data.packing=concatenate"], "data.packing", "data.packing=best_fit"),
        (["data.rejected_field=chosen"], "data.rejected_field", "data.rejected_field=rejected"),
        (["data.source=text"], "data.chat", "data.source=jsonl"),
        (
            ["data.max_pairs_per_sequence=0"],
            "data.max_pairs_per_sequence",
            "data.max_pairs_per_sequence=16",
        ),
        (["model.mtp_heads=1"], "model.mtp_heads", "model.mtp_heads=0"),
        (["preference.beta=0"], "preference.beta", "preference.beta=0.1"),
        (["preference.label_smoothing=0.5"], "preference.label_smoothing", "0.1"),
        (
            ["preference.label_smoothing=0.1", "preference.loss=ipo"],
            "preference.label_smoothing",
            "preference.loss=dpo",
        ),
        (
            ["preference.loss=orpo", "preference.length_normalised=off"],
            "preference.length_normalised",
            "preference.length_normalised=auto",
        ),
        (
            ["data.validation.held.source=jsonl", "data.validation.held.path=b.jsonl"],
            "data.validation.held.chat",
            "data.validation.held.packing=best_fit",
        ),
    ],
    ids=str,
)
def test_invalid_preference_settings_are_rejected(
    changes: list[str], key: str, action: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load([*GIVEN, *changes])
    found = [each for each in error.value.problems if each.where.endswith(f": {key}")]
    assert found and any(action in each.action for each in found), error.value
