"""Predicted step times from the bytes of a step, without compiled programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from maxpipe.config.load import from_dict
from maxpipe.hardware import published_hardware
from maxpipe.planner.cost import Cost, predict_cost
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.traffic import host_traffic, update_host_copies

MODEL = {
    "num_layers": 8,
    "d_model": 512,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
    "d_mlp": 2048,
    "vocab_size": 512,
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "weights": {"pipeline": {"offload_weights": True}},
    "state": {"optim": {"offload_state": True}},
    "activations": {
        "pipeline": {
            "remat": "names",
            "saved_names": ["attention"],
            "offloaded_names": ["gate", "up"],
        }
    },
}


def predicted(
    sections: dict[str, dict[str, Any]], host_rate: float | None = None, stages: int = 2
) -> tuple[Sizes, Cost]:
    """Return the cost on v5p, whose bandwidth to host memory can be replaced."""
    pipeline = {"microbatches": 4, "weight_gather": "iteration"} | sections.get("pipeline", {})
    config = from_dict(
        {
            "model": MODEL,
            "mesh": {"ici_stage": stages, "ici_fsdp": 2},
            "train": {"batch_size": 8, "sequence_length": 256, "steps": 1},
            "optim": sections.get("optim", {}),
            "pipeline": pipeline,
        }
    )
    hardware = published_hardware()["v5p"]
    if host_rate is not None:
        hardware = dataclasses.replace(hardware, host_gb_per_second=host_rate)
    sizes = Sizes(config).on_platform("tpu")
    return sizes, predict_cost(sizes, build_schedule(config), hardware)


@pytest.mark.parametrize("name", OFFLOADED)
def test_copies_from_and_to_host_memory_have_a_part_of_the_step_time(name: str) -> None:
    _, cost = predicted(OFFLOADED[name])
    _, without = predicted(OFFLOADED[name], host_rate=0.0)
    assert cost.parts["host"] > 0.0 and "host" not in without.parts
    assert cost.seconds > without.seconds
    assert cost.parts["layers"] == pytest.approx(without.parts["layers"])


def test_no_step_time_is_spent_on_host_memory_without_offloading() -> None:
    _, cost = predicted({})
    assert "host" not in cost.parts


def test_slow_copies_of_a_layer_are_exposed_except_for_its_work() -> None:
    rate = 1e-3
    sizes, cost = predicted(OFFLOADED["weights"], host_rate=rate, stages=1)
    updated = sum(update_host_copies(sizes))
    copied = host_traffic(sizes)["from host"] - updated / 2
    exposed = copied / (rate * 1e9) - cost.parts["layers"]
    assert cost.parts["host"] == pytest.approx(exposed + updated / (rate * 1e9))


def test_fast_copies_of_a_layer_overlap_with_its_work() -> None:
    rate = 1e6
    sizes, cost = predicted(OFFLOADED["weights"], host_rate=rate)
    assert cost.parts["host"] == pytest.approx(sum(update_host_copies(sizes)) / (rate * 1e9))
