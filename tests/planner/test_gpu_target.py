"""Target configs and errors for absent GPUs; does not need the CUDA plugin."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.load import load
from maxpipe.errors import ConfigError
from maxpipe.hardware import published_hardware
from maxpipe.planner import compile as compiling
from maxpipe.planner import topology
from maxpipe.planner.topology import GPU_SPECS, missing_compiler, parse_topology, target_config

GPUS = [kind for kind, hardware in published_hardware().items() if hardware.platform == "cuda"]


@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_type_has_spec_matching_device_kind(kind: str) -> None:
    hardware, card = published_hardware()[kind], GPU_SPECS[kind]
    assert re.fullmatch(hardware.device_kind, card.name, re.IGNORECASE)
    text = target_config(hardware)
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{card.name}"' in text
    # Two FLOPs per float32 unit and cycle are far below the peak of the matrix units.
    assert 2 * card.cores * card.lanes * card.clock_ghz / 1e3 < hardware.bf16_tflops


def test_target_config_has_fields_read_by_xla() -> None:
    text = target_config(published_hardware()["h100"])
    assert text.startswith("gpu_device_info { threads_per_block_limit: 1024 ")
    assert "core_count: 132 " in text and "shared_memory_per_block_optin: 232448 " in text
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED" in text
    # XLA uses 80% of this size, and runs use 92% of the memory.
    assert f"device_memory_size: {round(79.2 * 2**30 * 0.92 / 0.8)} " in text
    assert 'platform_name: "CUDA" dnn_version_info { major: 9 ' in text
    assert "feature_extension" not in target_config(published_hardware()["a100"])


PINNED = 'jax-cuda12-plugin<=0.10.2,>=0.10.2; extra == "cuda12-local"'


@pytest.mark.parametrize(
    ("present", "says"),
    [
        ({}, ("not installed", "pip install 'maxpipe[gpu-aot]'")),
        ({"jax-cuda12-pjrt": "0.10.2"}, None),
        ({"jax-cuda13-pjrt": "0.10.2"}, None),
        (
            {"jax-cuda12-pjrt": "0.9.0"},
            ("jax-cuda12-pjrt 0.9.0 is installed", "pip install 'jax-cuda12-plugin==0.10.2'"),
        ),
    ],
)
def test_gpu_compiler_version_must_match_jax(
    present: Mapping[str, str], says: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if found := {"jax": "0.10.2", **present}.get(name):
            return found
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy", PINNED])
    found = missing_compiler()
    if says is None:
        assert found is None
    else:
        assert found is not None and says[0] in found[0] and found[1] == says[1]


ONE_DEVICE = ["quickstart", "mesh.ici_stage=1", "mesh.ici_fsdp=1"]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without GPUs and without their compiler."""
    monkeypatch.setattr(topology, "gpus", list)
    monkeypatch.setattr(topology, "missing_compiler", lambda: ("needs it", "pip install it"))
    return monkeypatch


def test_missing_gpu_compiler_error_has_install_command(absent: pytest.MonkeyPatch) -> None:
    for of_it in (topology.prepare, topology.topology_devices):
        with pytest.raises(ConfigError) as caught:
            of_it(parse_topology("h100:8"))
        told = (
            "command line: --topology = h100:8  [MP-PLAN-002]\n  needs it.\n  Run: pip install it."
        )
        assert str(caught.value) == told


def test_gpu_type_without_spec_is_rejected(absent: pytest.MonkeyPatch) -> None:
    wanted = parse_topology("h100:8")
    wanted = replace(wanted, hardware=replace(wanted.hardware, topology="x100"))
    with pytest.raises(ConfigError, match="x100:8 .*\n  must be a GPU type") as caught:
        topology.topology_devices(wanted)
    assert "Use one of these types" in str(caught.value)


def test_step_for_absent_gpus_cannot_be_saved(
    absent: pytest.MonkeyPatch, tmp_path: Path, devices: list[Any]
) -> None:
    absent.setattr(compiling, "topology_devices", lambda topology: devices[:1])
    absent.setattr(compiling, "are_local", lambda found: False)
    with pytest.raises(ConfigError) as caught:
        compiling.compile_step(load(ONE_DEVICE), parse_topology("h100:1"), tmp_path / "step")
    assert "--save" in str(caught.value) and "timing" in str(caught.value)
    assert not (tmp_path / "step").exists()
