"""Metrics computed from layer losses and statistics, as declared by the model parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.models.layer_reports import Summary
from maxpipe.models.layers.mlp import MLP
from maxpipe.models.registry import FAMILIES, describe, summaries
from maxpipe.models.spec import LayerType, Model
from maxpipe.step.step import compute_layer_metrics
from tests.cases import MODEL


@dataclass(frozen=True)
class Reporting(MLP):
    """An MLP that declares a loss and a statistic."""

    metrics: ClassVar[Mapping[str, Summary]] = {
        "group/size": Summary("size", "mean", "", "Size."),
        "group/most": Summary("load", "largest", "", "Most."),
        "group/least": Summary("load", "smallest", "", "Least."),
    }

    @property
    def losses(self) -> dict[str, float]:
        return {"size": 0.3}


@pytest.fixture
def model() -> Model:
    """A model of five layers, of which three report metrics."""
    plain = describe(MODEL)
    attention, mlp = plain.layer_types["layer"].branches
    part = Reporting(MODEL.d_model, MODEL.d_mlp, 1.0)
    kinds = {"plain": plain.layer_types["layer"]} | {
        name: LayerType((attention, replace(mlp, part=part))) for name in ("wide", "narrow")
    }
    return Model(kinds, ("plain", "wide", "wide", "plain", "narrow"), plain.ends)


def test_layer_metrics_follow_declared_summaries(model: Model) -> None:
    wide = np.array([[1.0, 2.0, 3.0], [4.0, 4.0, 1.0]])
    narrow = np.array([[5.0, 10.0]])
    statistics = {"wide": {"load": jnp.asarray(wide)}, "narrow": {"load": jnp.asarray(narrow)}}
    found = jax.jit(compute_layer_metrics, static_argnums=0)(
        model, {"size": jnp.float32(7.5)}, statistics
    )
    assert {tag: float(value) for tag, value in found.items()} == pytest.approx(
        {"group/size": 7.5 / 3, "group/most": 3.0 / 2.0, "group/least": 1.0 / 3.0}
    )


def test_layer_without_tokens_contributes_zero(model: Model) -> None:
    statistics = {"wide": {"load": jnp.zeros((2, 3))}, "narrow": {"load": jnp.ones((1, 4))}}
    found = compute_layer_metrics(model, {"size": jnp.float32(0)}, statistics)
    assert (float(found["group/most"]), float(found["group/least"])) == (1.0, 0.0)


def test_model_without_layer_statistics_has_no_metrics() -> None:
    assert compute_layer_metrics(describe(MODEL), {}, {}) == {}


def test_summaries_list_families_of_each_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(summaries())
    for name in ("gemma3", "llama"):
        family = replace(FAMILIES[name], metric_parts=(Reporting,))
        monkeypatch.setitem(FAMILIES, name, family)  # type: ignore[arg-type]
    wanted = [(tag, each, ["llama", "gemma3"]) for tag, each in Reporting.metrics.items()]
    assert [each for each in summaries() if each not in plain] == wanted
