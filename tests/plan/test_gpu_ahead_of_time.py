"""Train steps compiled for absent NVIDIA GPUs by jax's CUDA plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from maxpipe.plan.gpu_target import INSTALL, missing_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_compiler() is not None, reason=f"needs {INSTALL}"),
]
MODEL = ("runtime.platform=auto", "train.batch_size=32")


def compiled(*arguments: str) -> dict[str, Any]:
    """Reported of quickstart in a process of its own, which writes nothing but the report."""
    command = [sys.executable, "-m", "maxpipe", "compile", "quickstart", *MODEL, *arguments]
    found = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=500, env=dict(os.environ)
    )
    assert found.returncode == 0 and not found.stderr, found.stderr
    return json.loads(found.stdout)


def traffic(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and axes; of some that wait and some that do not, those with the most bytes."""
    found = reversed(report["collectives"])
    return {(each["kind"], each["axes"]): each for each in found}


def test_a_step_for_eight_gpus_is_reported() -> None:
    found = compiled("--topology", "h100:8", "pipeline.weight_gather=iteration")
    assert (found["num_devices"], found["attention"]) == (8, "xla")
    assert found["peak_bytes"] == found["cycles"] == 0 and found["fits"]
    assert found["total_bytes"] > found["argument_bytes"] > 2 * 2**20
    assert 1 < found["flops"] / found["model_flops"] < 2
    assert not found["unknown_loops"]
    assert any("autotuning" in each for each in found["unknown"])
    moved = traffic(found)
    assert moved["collective-permute", "stage"]["link"] == "ici"
    assert moved["all-gather", "fsdp"]["asynchronous"]
    assert moved["reduce-scatter", "fsdp"]["flops_behind"] > 0


def test_slices_are_joined_by_the_network() -> None:
    sizes = ("mesh.ici_stage=1", "mesh.dcn_stage=2", "mesh.ici_fsdp=4")
    found = compiled("--topology", "b200:4", "--slices", "2", *sizes)
    moved = traffic(found)
    assert moved["collective-permute", "stage"]["link"] == "dcn"
    assert moved["reduce-scatter", "fsdp"]["link"] == "ici"
