"""Numbers of hosts and processes of topologies, and names of TPU slices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from maxpipe.config.load import load, to_dict
from maxpipe.errors import ConfigError
from maxpipe.hardware import known_hardware
from maxpipe.launch.job import hosts_of, tpu_of
from maxpipe.planner.topology import parse_topology
from tests.launch.conftest import QUICKSTART


@pytest.mark.parametrize(
    ("text", "slices", "hosts", "chips", "processes"),
    [
        ("v5p:2x4x4", 1, 8, 4, 8),
        ("v5p:2x2x1", 2, 2, 4, 2),
        ("v5e:2x4", 1, 1, 8, 1),
        ("v5e:4x4", 2, 8, 4, 8),
        ("v6e:1x1", 1, 1, 1, 1),
        ("v3:2x2", 1, 1, 4, 1),  # eight devices
        ("tpu7x:2x2x2", 1, 2, 4, 2),
        ("h100:8", 4, 4, 8, 32),
        ("a100:2", 1, 1, 2, 2),
        ("gb200:72", 1, 18, 4, 72),
        ("cpu:4", 2, 2, 4, 2),
    ],
)
def test_number_of_hosts_and_processes(
    text: str, slices: int, hosts: int, chips: int, processes: int
):
    topology = parse_topology(text, slices)
    found = hosts_of(topology)
    assert (found.num_hosts, found.chips_per_host, found.num_processes) == (hosts, chips, processes)
    assert topology.num_devices % found.num_processes == 0


@pytest.mark.parametrize("text", ["v5e:2x3", "v5p:1x1x2", "gb200:6"])
def test_partial_hosts_are_rejected(text: str):
    with pytest.raises(ConfigError, match="chips per slice, but each .* host has"):
        hosts_of(parse_topology(text))


@pytest.mark.parametrize(
    ("text", "accelerator"),
    [
        ("v5p:2x4x4", "v5p-64"),
        ("v4:2x2x4", "v4-32"),
        ("v5e:4x4", "v5litepod-16"),
        ("v6e:16x16", "v6e-256"),
    ],
)
def test_accelerator_type_counts_cores_or_chips(text: str, accelerator: str):
    assert parse_topology(text).accelerator == accelerator


def test_every_tpu_type_has_google_cloud_names():
    for hardware in known_hardware().values():
        if hardware.is_tpu:
            dims = "x".join(["2"] * hardware.torus_dims)
            names = tpu_of(parse_topology(f"{hardware.topology}:{dims}"))
            assert names.runtime_version or names.node_label


def test_launch_keys_do_not_change_program_metadata():
    from maxpipe.step.executable import program_metadata

    lowered = SimpleNamespace(as_text=lambda: "program")
    devices = [SimpleNamespace(device_kind="cpu")]
    here = to_dict(load([QUICKSTART]).config)
    there = to_dict(load([QUICKSTART, "launch.topology=cpu:8", "launch.restarts=9"]).config)
    assert here != there
    assert program_metadata(here, lowered, devices) == program_metadata(there, lowered, devices)
