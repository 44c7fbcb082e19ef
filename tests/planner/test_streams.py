"""Predicted memory of hyper-connections against traced layers and the compiler."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import pytest

from maxpipe.models.count import forward_flops_per_token, num_params
from maxpipe.models.registry import describe
from maxpipe.nn import decoder as decoder_module
from maxpipe.planner import sizes as sizes_module
from maxpipe.planner.compile import build_steps, profile_step
from maxpipe.planner.memory import predict_memory
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.traffic import count_collectives
from tests.planner.test_memory import check_saved_bytes, config_of, steps_of
from tests.planner.test_traffic import check_bytes
from tests.planner.test_traffic import config_of as traffic_config
from tests.streams import with_streams


def patch_models(monkeypatch: pytest.MonkeyPatch, num_streams: int = 4) -> None:
    """Add hyper-connections to all models, unless `num_streams` is 1."""

    def described(config: Any) -> Any:
        model = describe(config)
        return _with_streams(model, num_streams) if num_streams > 1 else model

    for module in (decoder_module, sizes_module):
        monkeypatch.setattr(module, "describe", described)


_with_streams = cache(with_streams)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_models(monkeypatch)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("changes", [{}, {"compute_dtype": "float32"}])
def test_layers_save_declared_activations(changes: dict[str, Any], remat: str) -> None:
    check_saved_bytes(changes, remat, 7)


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ({"ici_stage": 2, "ici_fsdp": 2}, {"remat": "names"}),
        ({"ici_stage": 4}, {"prologue_layers": 2, "schedule": "1f1b"}),
    ],
    ids=str,
)
def test_predicted_traffic_matches_compiled_program(
    mesh: dict[str, int], pipeline: dict[str, Any]
) -> None:
    counts, run = check_bytes(traffic_config({"num_layers": 6}, mesh, pipeline))
    assert counts == count_collectives(*run)


def collectives(schedule: str, num_streams: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the bytes and the number of collectives of each kind in a step on four stages."""
    patch_models(monkeypatch, num_streams)
    pipeline = {"schedule": schedule, "microbatches": 4}
    config = traffic_config({"num_layers": 4}, {"ici_stage": 4}, pipeline)
    steps = build_steps(config, jax.devices()[:4])
    text = steps.compile_train().as_text()
    profile, _ = profile_step(text, steps, config.pipeline.weight_gather)
    num_bytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for each in profile.collectives:
        num_bytes[each.kind] += round(each.total_bytes)
        counts[each.kind] += round(each.count)
    return num_bytes, counts


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_messages_are_as_large_as_all_streams(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages contain four streams instead of one, and no other collective is added."""
    one, one_counts = collectives(schedule, 1, monkeypatch)
    four, four_counts = collectives(schedule, 4, monkeypatch)
    assert four["collective-permute"] == 4 * one["collective-permute"] > 0
    assert {*four_counts} == {*one_counts}
    permutes = four_counts["collective-permute"], one_counts["collective-permute"]
    assert permutes[0] == permutes[1]


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ({"ici_fsdp": 2}, {"microbatches": 2, "remat": "none"}),
        ({"ici_stage": 2}, {"microbatches": 4, "schedule": "zb_h1", "remat": "names"}),
    ],
    ids=str,
)
def test_cpu_memory_is_close_to_compiler(mesh: dict[str, int], pipeline: dict[str, Any]) -> None:
    model = {"compute_dtype": "float32", "attention": "xla"}
    sizes = {"num_layers": 4, "d_model": 128, "d_mlp": 256}
    config = config_of(model | sizes, mesh, pipeline, tokens=256)
    compiled = steps_of(config).compile_train().memory_analysis()
    predicted = predict_memory(Sizes(config), build_schedule(config), platform="cpu")
    assert predicted.arguments == pytest.approx(compiled.argument_size_in_bytes, rel=0.01)
    assert predicted.temporary == pytest.approx(compiled.temp_size_in_bytes, rel=0.1)


def test_parameters_and_flops() -> None:
    config = config_of({"num_layers": 3, "d_model": 20}, {}, {"microbatches": 1})
    plain, model = describe(config.model), with_streams(describe(config.model))
    coefficients, branches = 4 * (4 + 2), 6
    maps = branches * (80 * coefficients + coefficients + 3) + 80 * 4 + 4 + 1
    assert num_params(model) - num_params(plain) == maps
    products = branches * (80 * coefficients + 20 * coefficients)
    added = forward_flops_per_token(model, 7) - forward_flops_per_token(plain, 7)
    assert added == 2 * products
