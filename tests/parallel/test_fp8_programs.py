"""fp8 matmuls compiled ahead of time for devices with 8-bit matrix units."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.topology import INSTALL, missing_compiler

PROGRAM = """
import sys
from maxpipe.planner import topology

target = topology.parse_topology(sys.argv[1])
topology.prepare(target)
import jax
import jax.numpy as jnp
from maxpipe.parallel.matmul_quantizer import MatmulQuantizer
from maxpipe.parallel.quantized_matmul import matmul

device = jax.sharding.SingleDeviceSharding(topology.topology_devices(target)[0])
shapes = (2, 256, 512), (512, 1024), (2, 256, 1024)  # x, weight, cotangent
arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for shape in shapes]
how = MatmulQuantizer("fp8", sys.argv[2], weight_gradients=True)

def step(x, weight, cotangent):
    result, pull = jax.vjp(lambda x, weight: matmul(x, weight, 1, how, True), x, weight)
    return result, pull(cotangent)

options = dict(topology.UNTUNED_GPU_OPTIONS) if target.platform == "cuda" else {}
print(jax.jit(step).lower(*arrays).compile(options).as_text())
"""
NEEDS_GPU_COMPILER = pytest.mark.skipif(missing_compiler() is not None, reason=f"needs {INSTALL}")
NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install 'maxpipe[tpu]'"
)


@pytest.mark.parametrize(
    ("topology", "scales"),
    [
        pytest.param("h100:1", "channel", marks=NEEDS_GPU_COMPILER),
        pytest.param("h100:1", "tensor", marks=NEEDS_GPU_COMPILER),
        pytest.param("b200:1", "channel", marks=NEEDS_GPU_COMPILER),
        pytest.param("tpu7x:2x2x1", "channel", marks=NEEDS_LIBTPU),
    ],
)
def test_matrix_units_multiply_8_bit_operands(topology: str, scales: str) -> None:
    command = [sys.executable, "-c", PROGRAM, topology, scales]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    operands, converted = [], []
    for computation in parse_hlo(run.stdout).computations.values():
        for op in computation.values():
            if op.opcode in ("dot", "convolution") or "__cublas" in op.attributes:
                operands += [computation[name].shape[:5] for name in op.operands[:2]]
            if op.opcode == "convert":
                converted += [computation[name].shape[:2] for name in op.operands]
    # Forward, input gradient, and one weight gradient for each of two sequences.
    assert sorted(operands) == ["f8e4m"] * 5 + ["f8e5m"] * 3
    assert converted and "f8" not in converted  # no operand is dequantized
