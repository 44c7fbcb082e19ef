"""Hardware specifications in configs/hardware."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from maxpipe.hardware import hardware_of_device, peak_flops, published_hardware

FOLDER = Path(__file__).parents[1] / "configs" / "hardware"


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v3", 61.5e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("cpu", None),
        ("TPU v4 lite", None),
        ("TPU v9", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_flops_of_known_and_unknown_devices(kind: str, peak: float | None):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.stem)
def test_every_hardware_file_names_its_source(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^# Sources?: ", text, re.MULTILINE)
    found = published_hardware()[yaml.safe_load(text)["topology"]]
    assert found.flops > 0 and found.memory_bytes > 0


def test_hardware_is_identified_by_jax_device_kind() -> None:
    found = hardware_of_device("TPU v5 lite")
    assert found is not None and found.topology == "v5e"
    assert hardware_of_device("cpu") is not None and peak_flops("cpu") is None
