"""Hardware values that calibration fits to step times."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from maxpipe.config.load import from_dict
from maxpipe.config.schema import Config
from maxpipe.hardware import published_hardware
from maxpipe.planner import rerank
from maxpipe.planner.cost import predict_cost
from maxpipe.planner.sizes import Sizes, build_schedule

NUM_DEVICES = 4


def config_of() -> Config:
    model = {"num_layers": 4, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    return from_dict(
        {
            "model": {**model, "d_mlp": 64, "vocab_size": 512},
            "mesh": {"ici_fsdp": NUM_DEVICES},
            "train": {"batch_size": 8, "sequence_length": 32, "steps": 1},
        }
    )


def test_fit_split_costs_recovers_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are predicted with a split cost of 0.2 per doubling and a ring cost of 0.3 per
    additional ring step."""
    config, devices = config_of(), jax.devices()[:NUM_DEVICES]
    costly = dataclasses.replace(
        published_hardware()["cpu"], split_cost=0.2, ring_cost=0.3, tick_us=0.0
    )
    monkeypatch.setattr(rerank, "build_steps", lambda run, _: run)
    monkeypatch.setattr(rerank, "build_synthetic_step", lambda run: run)
    built: list[Config] = []

    def predicted_seconds(runs: list[Config], seconds: float) -> list[float]:
        built.extend(runs)
        return [predict_cost(Sizes(run), build_schedule(run), costly).seconds for run in runs]

    monkeypatch.setattr(rerank, "median_seconds", predicted_seconds)
    cheap = dataclasses.replace(costly, split_cost=0.0, ring_cost=0.0)
    found = rerank.fit_split_costs(config, cheap, devices)
    assert (found.split_cost, found.ring_cost) == pytest.approx((0.2, 0.3))
    # Two heads can be split over two devices, but not over four.
    assert {run.mesh.ici_tensor for run in built} == {2}
    assert [run.model.num_layers for run in built] == [2, 6] * 2
    assert [run.mesh.collective_matmul for run in built] == [False] * 2 + [True] * 2
    # A model that cannot be split leaves the costs unchanged.
    one = dataclasses.replace(config.model, num_heads=1, num_kv_heads=1)
    alone = dataclasses.replace(config, model=one)
    assert rerank.fit_split_costs(alone, costly, devices) == costly


def test_ring_cost_is_unchanged_if_communication_dominates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model on devices whose links are slow compared with their matrix units."""
    config, devices = config_of(), jax.devices()[:NUM_DEVICES]
    slow = dataclasses.replace(published_hardware()["h100"], link_gb_per_second=1e-6)
    monkeypatch.setattr(rerank, "build_steps", lambda run, _: run)
    monkeypatch.setattr(rerank, "build_synthetic_step", lambda run: run)

    def predicted_seconds(runs: list[Config], seconds: float) -> list[float]:
        del seconds
        return [predict_cost(Sizes(run), build_schedule(run), slow).seconds for run in runs]

    monkeypatch.setattr(rerank, "median_seconds", predicted_seconds)
    assert rerank.fit_split_costs(config, slow, devices).ring_cost == pytest.approx(slow.ring_cost)


def test_measure_tick_recovers_tick_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    config, devices = config_of(), jax.devices()[:NUM_DEVICES]
    slow = dataclasses.replace(published_hardware()["cpu"], tick_us=700.0)
    monkeypatch.setattr(rerank, "build_steps", lambda run, _: run)
    monkeypatch.setattr(rerank, "build_synthetic_step", lambda run: run)

    def predicted_seconds(runs: list[Config], seconds: float) -> list[float]:
        del seconds
        return [predict_cost(Sizes(run), build_schedule(run), slow).seconds for run in runs]

    monkeypatch.setattr(rerank, "median_seconds", predicted_seconds)
    assert rerank.measure_tick(config, published_hardware()["cpu"], devices) == pytest.approx(
        700e-6
    )
    fast = dataclasses.replace(slow, tick_us=0.0, memory_gb_per_second=1e-6)
    assert rerank.measure_tick(config, fast, devices) == 0.0
