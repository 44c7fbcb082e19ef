"""The probe compares results of collectives, and reports those with wrong results."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from maxpipe.diagnosis import probe
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def mesh(devices: list[Any]) -> jax.sharding.Mesh:
    return build_mesh(MeshConfig(ici_stage=4, ici_tensor=2), devices)


def printed_records(capsys: Capture) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("axis", ["stage", "tensor"])
def test_correct_collectives_pass(mesh: jax.sharding.Mesh, axis: str, capsys: Capture):
    probe._collectives(mesh, axis)
    (record,) = printed_records(capsys)
    assert record["name"] == f"collectives over {axis}" and record["status"] == "ok"


@pytest.mark.parametrize("name", probe.COLLECTIVES)
def test_wrong_collective_is_reported_by_name(
    name: str, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    right = getattr(lax, name)

    def wrong(row: jax.Array, axis: str, *args: Any, **options: Any) -> jax.Array:
        # Change one value on one of the eight devices.
        result = right(row, axis, *args, **options)
        return result.at[(0,) * result.ndim].add(lax.axis_index("stage") == 2)

    monkeypatch.setattr(lax, name, wrong)
    probe._collectives(mesh, "stage")
    (record,) = printed_records(capsys)
    assert record["status"] == "FAILED" and record["text"] == f"wrong results from {name}."
    assert record["action"]


def test_ppermute_from_wrong_neighbor_is_detected(
    mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
):
    """The sums are correct, but come from the wrong neighbors."""
    right = lax.ppermute
    backwards = [(i, (i - 1) % 4) for i in range(4)]
    monkeypatch.setattr(lax, "ppermute", lambda row, axis, pairs: right(row, axis, backwards))
    assert probe._wrong_collectives(mesh, "stage") == ["ppermute"]


def test_clock_difference_is_reported_as_warning(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setattr(probe.multihost_utils, "sync_global_devices", lambda name: None)
    for apart, status in ((0, "ok"), (5, "warning")):

        def gather(mine: np.ndarray, apart: int = apart) -> np.ndarray:
            return np.stack([mine, mine + np.array([0, apart * 10**6], np.int32)])

        monkeypatch.setattr(probe.multihost_utils, "process_allgather", gather)
        probe._clocks()
        (record,) = printed_records(capsys)
        assert record["status"] == status and f"at most {apart}.00 s" in record["text"]
