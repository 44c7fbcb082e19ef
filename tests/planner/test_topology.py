"""Topology names: parsing and error messages."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.errors import ConfigError
from maxpipe.planner.topology import compiler_version_error, parse_topology


@pytest.mark.parametrize(
    ("text", "slices", "devices", "platform"),
    [
        ("v5p:2x4x4", 1, 32, "tpu"),
        ("v5p:8x8x8", 2, 1024, "tpu"),
        ("v5e:4x4", 1, 16, "tpu"),
        ("v3:2x2", 1, 8, "tpu"),
        ("cpu:8", 1, 8, "cpu"),
        ("h100:8", 4, 32, "cuda"),
    ],
)
def test_parse_topology_sizes(text: str, slices: int, devices: int, platform: str) -> None:
    found = parse_topology(text, slices)
    assert (found.num_devices, found.platform, found.name) == (devices, platform, text)


@pytest.mark.parametrize(
    ("text", "slices", "says"),
    [
        ("v9:4", 1, "must name a device type"),
        ("v5:2x2x2", 1, "Did you mean v5"),
        ("v5p", 1, "Write v5p:2x4x4."),
        ("v5p:4x4", 1, "slice as 3 numbers"),
        ("v5e:2x2x2", 1, "slice as 2 numbers"),
        ("v5e:32x32", 1, "at most 256"),
        ("h100:4x2", 1, "slice as one number"),
        ("cpu:0", 1, "Write cpu:8."),
    ],
)
def test_parse_topology_rejects_invalid_names(text: str, slices: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, slices)
    assert says in str(caught.value)
    where, rule, action = str(caught.value).splitlines()
    assert where.startswith("command line: --") and rule.startswith("  ")
    assert action.startswith("  ")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("h100x8", "h100:8"),
        ("8xH100", "h100:8"),
        ("H100:8", "h100:8"),
        ("h100-pciex4", "h100-pcie:4"),
        ("v5p-64", "v5p:2x4x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("TPU-v5p:2x2x4", "v5p:2x2x4"),
        ("v5p:8", "v5p:2x2x2"),
        ("gpu:4", "h100:4"),
        ("nothing", "v5p:2x2x2"),
        ("b200x99999", "b200:8"),
    ],
)
def test_parse_topology_suggests_intended_topology(text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text)
    assert re.search(rf" {meant}[.?]$", str(caught.value))
    assert str(parse_topology(meant)).startswith(f"{meant}, ")


@given(st.text(alphabet="vhbtpu0123456789x:-*_ ", max_size=12))
def test_suggested_topology_is_valid_for_any_input(text: str) -> None:
    try:
        parse_topology(text)
    except ConfigError as error:
        named = re.search(r"([a-z0-9-]+:[0-9x]+)[.?]$", str(error))
        assert named, error
        parse_topology(named[1])


@pytest.mark.parametrize(("libtpu", "fits"), [("0.0.42.1", True), ("0.0.52", False)])
def test_incompatible_libtpu_version_is_reported(
    libtpu: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"libtpu": libtpu, "jax": "0.10.2"}
    needed = ["scipy>=1.14", 'libtpu==0.0.42.*; extra == "tpu"']
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", {"jax": needed}.__getitem__)
    error = RuntimeError("INTERNAL: Continuation fusion is not supported\nstack")
    found = compiler_version_error(parse_topology("v5p:2x2x1"), error)
    assert (found is None) == fits
    if found is not None:
        told = str(found)
        assert (
            "0.0.52 is installed. libtpu reported: INTERNAL: Continuation fusion is not supported"
            in told
        )
        assert told.endswith("pip install 'libtpu==0.0.42.*'.")
    assert compiler_version_error(parse_topology("cpu:8"), error) is None
