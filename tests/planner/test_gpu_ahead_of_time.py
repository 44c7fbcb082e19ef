"""Train steps compiled ahead of time for NVIDIA GPUs by jax's CUDA plugin."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxpipe.planner.topology import INSTALL, has_cudnn, missing_compiler

pytestmark = [
    pytest.mark.skipif(missing_compiler() is not None, reason=f"needs {INSTALL}"),
]
MODEL = ("runtime.platform=auto", "train.batch_size=32")
SLOW = r"^(compile: .*, \d+ s|E.* slow_operation_alarm.cc.*|\*+|\[Compiling module .*|)\n"
"""Progress of maxpipe after 10 s, and XLA's warning after two minutes."""


def compiled(*arguments: str, dump: Path | None = None) -> dict[str, Any]:
    """Return the compile report of quickstart from a subprocess that prints no messages except on
    slow machines.

    XLA writes the compiled programs to the folder `dump`, if it is given.
    """
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text" if dump else ""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    command = [sys.executable, "-m", "maxpipe", "compile", "quickstart", *MODEL, *arguments]
    found = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=500, env=environment
    )
    messages = re.sub(SLOW, "", found.stderr, flags=re.MULTILINE)
    assert found.returncode == 0 and not messages, found.stderr
    return json.loads(found.stdout)


def traffic(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return {(kind, axes): collective}, the one with the most bytes if there are several."""
    found = reversed(report["collectives"])
    return {(each["kind"], each["axes"]): each for each in found}


def test_compile_report_for_eight_gpus() -> None:
    found = compiled("--topology", "h100:8", "pipeline.weight_gather=iteration")
    assert (found["num_devices"], found["attention"]) == (8, "xla")
    assert found["peak_bytes"] == found["cycles"] == 0 and found["fits"]
    assert found["total_bytes"] > found["argument_bytes"] > 2 * 2**20
    assert 1 < found["flops"] / found["model_flops"] < 2
    assert not found["unknown_loops"]
    assert any("autotune" in each for each in found["unknown"])
    moved = traffic(found)
    assert moved["collective-permute", "stage"]["link"] == "ici"
    assert moved["all-gather", "fsdp"]["asynchronous"]
    assert moved["reduce-scatter", "fsdp"]["flops_behind"] > 0


def test_traffic_between_gpu_hosts_is_labeled_dcn() -> None:
    sizes = ("mesh.ici_stage=1", "mesh.dcn_stage=2", "mesh.ici_fsdp=4")
    found = compiled("--topology", "b200:4", "--slices", "2", *sizes)
    moved = traffic(found)
    assert moved["collective-permute", "stage"]["link"] == "dcn"
    assert moved["reduce-scatter", "fsdp"]["link"] == "ici"


def test_mxfp8_matmuls_compile_to_kernels_with_sharded_weights() -> None:
    sizes = ("mesh.ici_stage=1", "mesh.ici_fsdp=2", "mesh.ici_tensor=2")
    same = ("model.matmul=mxfp8", "model.matmul_weight_gradients=same")
    found = compiled("--topology", "b200:4", *sizes, *same)
    # Forward, input gradient, weight gradient, and the recomputed forward without the last matmul.
    layer, down = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384, 128 * 384
    tokens = 32 * 128 / 4
    assert found["kernel_flops"] == pytest.approx(2 * tokens * 8 * (4 * layer - down))


def test_nvfp4_matmuls_compile_to_kernels_with_4_bit_weights(tmp_path: Path) -> None:
    sizes = ("mesh.ici_stage=1", "mesh.ici_fsdp=2", "mesh.ici_tensor=2")
    same = ("model.matmul=nvfp4", "model.matmul_weight_gradients=same")
    found = compiled("--topology", "b200:4", *sizes, *same, dump=tmp_path)
    layer, down = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384, 128 * 384
    tokens = 32 * 128 / 4
    # The last two of eight layers are not quantized.
    assert found["kernel_flops"] == pytest.approx(2 * tokens * 6 * (4 * layer - down))
    (path,) = tmp_path.glob("*train_step*after_optimizations.txt")
    program = path.read_text()
    # No operand is dequantized.
    operands = set(re.findall(r"%?([\w.-]+) = f4e2m1fn\[", program))
    converted = re.findall(r"= (?:f32|bf16|f16)\[\S* convert\(%?([\w.-]+)\)", program)
    assert operands and not operands.intersection(converted)


@pytest.mark.skipif(not has_cudnn(), reason=f"needs cuDNN: {INSTALL}")
def test_cudnn_attention_compiles_with_sharded_heads() -> None:
    """jax's own partitioning rule for the kernel fails in this case, at the first step of a run."""
    sizes = ("mesh.ici_stage=2", "mesh.ici_fsdp=2", "mesh.ici_tensor=2")
    found = compiled("--topology", "h100:8", *sizes, "model.compute_dtype=bfloat16")
    assert found["attention"] == "cudnn"
    # Forward, recomputation, and a backward kernel with 2.5 times the FLOPs of the forward.
    model = {"pairs": 128 * 128 / 2, "width": 4 * 32, "rows": 32, "layers": 8}
    forward = 4 * math.prod(model.values()) / 8
    assert found["kernel_flops"] == pytest.approx(4.5 * forward)
    assert any("cuDNN" in each for each in found["unknown"])
