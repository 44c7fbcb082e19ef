"""Small programs compiled ahead of time for TPUs: overlap, copies and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxpipe.planner.memory_terms import parse_out_of_memory

pytest.importorskip("libtpu")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import numpy as np
from jax.experimental import topologies
from maxpipe.config.schema import MeshConfig, ModelConfig, OptimConfig, PipelineConfig, TrainConfig
from maxpipe.planner.hlo_profile import profile_program
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.parallel.mesh import build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.step.build import build_steps

MICROBATCHES, WIDTH, FSDP = 6, 256, 4
given, mesh, TOKENS = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
TOPOLOGY = sys.argv[4]
sizes = MeshConfig(**mesh)
devices = topologies.get_topology_desc(TOPOLOGY, platform="tpu").devices
steps = build_steps(
    build_mesh(sizes, devices),
    model=ModelConfig(
        num_layers=8, d_model=WIDTH, num_heads=4, num_kv_heads=4, head_dim=128, d_mlp=1024,
        vocab_size=1024,
    ),
    pipeline=PipelineConfig(microbatches=MICROBATCHES, **given),
    optim=OptimConfig(),
    train=TrainConfig(batch_size=MICROBATCHES * mesh.get("ici_fsdp", 1), sequence_length=TOKENS),
    total_steps=10,
    rules=AxisRules.from_config(sizes),
    seed=0,
    byte_lengths=np.ones(256),
)
found = profile_program(
    parse_hlo(steps.compile_train().as_text()),
    trips={"/while$": 2},
    regions={name: f"/{name}/" for name in ("send", "gather", "forward", "backward")},
    copy_bytes=8 * TOKENS * WIDTH,  # four messages; one in float32 is half of that
)
print(json.dumps({
    "collectives": [
        [each.kind, each.region, each.is_async, each.cycles_between, each.stride, each.num_bytes]
        for each in found.collectives
    ],
    "kernels": [
        [each.region, each.instruction.name, each.flops] for each in found.entries if each.is_kernel
    ],
    "cycles": {
        name: sum(each.cycles for each in found.entries if each.region == name)
        for name in ("forward", "backward")
    },
    "transfers": [
        [each.kind, each.region, sum(each.cycles_by_instruction.values())]
        for each in found.transfers
    ],
    "copies": [f"{each.instruction.shape} {each.instruction.op_name}" for each in found.copies],
}))
"""


SIZES = """
import json
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

def summed(weight, start):
    step = lambda carry, _: (jnp.tanh(carry @ weight) @ weight, None)
    return jax.lax.scan(step, start, length=8)[0].astype(jnp.float32).sum()

device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
found = {}
for size in (8192, 17024, 17152):
    shape = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    try:
        memory = jax.jit(jax.grad(summed)).lower(shape, shape).compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        found[size] = str(error)
    else:
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        found[size] = [memory.peak_memory_in_bytes, held + memory.temp_size_in_bytes]
print(json.dumps(found))
"""

STATE = """
import json, sys
from maxpipe.config.load import from_dict
from maxpipe.planner.compile import build_report, build_steps
from maxpipe.planner.memory import predict_memory
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.topology import parse_topology, topology_devices

target = parse_topology("v5p:2x2x1")
sizes = {"num_layers": 8, "d_model": 1024, "d_mlp": 4096, "num_heads": 8, "num_kv_heads": 8}
given = {
    "model": sizes | {"head_dim": 128, "vocab_size": 1024},
    "mesh": {"ici_fsdp": 4},
    "train": {"batch_size": 4, "sequence_length": 256, "steps": 10},
}
found = {}
for name, settings in (
    ("here", {}),
    ("away", {"optim": {"offload_state": True}}),
    ("weights", {"pipeline": {"offload_weights": True}}),
):
    config = from_dict(given | settings)
    steps = build_steps(config, topology_devices(target))
    report = build_report(config, target, steps, steps.compile_train())
    predicted = predict_memory(Sizes(config), build_schedule(config), platform="tpu").host
    found[name] = [report.argument_bytes, report.peak_bytes, report.host_bytes, predicted]
print(json.dumps(found))
"""

RECURRENT = """
import json, sys
import jax, jax.numpy as jnp
from flax import nnx
from maxpipe.models.layers.gated_delta import GatedDelta
from maxpipe.models.layers.kda import KimiDelta
from maxpipe.models.layers.mamba2 import Mamba2
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.nn.block import sublayer_module
from maxpipe.nn.module import LayerContext
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.hlo_profile import profile_program
from maxpipe.planner.topology import parse_topology, topology_devices

norm = RMSNorm(128, 1e-6)
part = {
    "delta": lambda: GatedDelta(128, 1, 2, 128, 128, 4, norm, 1.0),
    "kimi": lambda: KimiDelta(128, 2, 128, 4, norm, 1.0),
    "mamba": lambda: Mamba2(128, 2, 64, 1, 128, 4, False, norm, 1.0, chunk=128),
}[sys.argv[1]]()
mesh = jax.sharding.Mesh(topology_devices(parse_topology("v5p:2x2x1"))[:1], ("data",))
whole = jax.NamedSharding(mesh, jax.P())

def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

def loss(params, x, ids):
    module = sublayer_module(part)(part, AxisRules.from_config(MeshConfig()))
    for key, value in params.items():
        setattr(module, key, nnx.Param(value))
    context = LayerContext({"segment_ids": ids, "positions": ids}, jnp.asarray(0))
    return module(x, context).x.astype(jnp.float32).sum()

params = {key: array(*param.shape) for key, param in part.params.items()}
arguments = params, array(1, 300, 128), array(1, 300, dtype="int32")
with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
entries = profile_program(parse_hlo(compiled.as_text())).entries
print(json.dumps({
    each.instruction.name.partition(".")[0]: each.flops for each in entries if each.is_kernel
}))
"""

SPARSE = """
import json
import jax
import numpy as np
from jax.experimental import topologies
from maxpipe.nn.attention.interface import Mask
from maxpipe.nn.indexer import IndexArrays
from maxpipe.nn.sparse_attention import sparse_attend
from maxpipe.parallel import scopes
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.hlo_profile import profile_program

devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
mesh = jax.sharding.Mesh(np.asarray(devices), ("tensor",))

def array(*shape, dtype="bfloat16", spec=jax.P()):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

def total(query, key, index, segments, loss_mask):
    mask = Mask(segments=segments, scale=0.1)
    mixed, loss = sparse_attend(query, key, index, mask, loss_mask, top_k=64, rope_size=64)
    return mixed.astype("float32").sum() + loss

heads, tokens = jax.P(None, None, "tensor"), 480
index = IndexArrays(
    array(1, tokens, 8, 128, spec=heads), array(1, tokens, 128), array(1, tokens, 8, spec=heads)
)
others = array(1, tokens, dtype="int32"), array(1, tokens, dtype="float32")
with jax.set_mesh(mesh):
    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(
        array(1, tokens, 16, 192, spec=heads), array(1, tokens, 192), index, *others
    )
    found = profile_program(parse_hlo(program.compile().as_text()))
print(json.dumps([
    [each.instruction.name, scopes.parse_cycles(each.instruction.op_name)]
    for each in found.entries if each.is_kernel
]))
"""


STREAMS = """
import json, sys
import jax
from flax import nnx
from maxpipe.models.layers.hyper_connections import HyperConnection
from maxpipe.nn.hyper_connections import HyperConnectionModule
from maxpipe.parallel import scopes
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.hlo_profile import profile_program
from maxpipe.planner.topology import parse_topology, topology_devices

topology, width = sys.argv[1], int(sys.argv[2])
mesh = jax.sharding.Mesh(topology_devices(parse_topology(topology))[:1], ("data",))
whole = jax.NamedSharding(mesh, jax.P())
part = HyperConnection(width, 4, 1e-6, 1e-6, 20)

def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

def total(params, x):
    module = HyperConnectionModule(part, AxisRules.from_config(MeshConfig()))
    for key, value in params.items():
        setattr(module, key, nnx.Param(value))
    h, z = module.read(x)
    return module.write(x, h, z).astype("float32").sum()

params = {key: array(*param.shape, dtype="float32") for key, param in part.params.items()}
with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, array(1, 500, 4 * width))
    found = profile_program(parse_hlo(compiled.compile().as_text()))
print(json.dumps([
    [each.instruction.name, scopes.parse_cycles(each.instruction.op_name)]
    for each in found.entries if each.is_kernel
]))
"""


def run(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program in a subprocess; return the JSON that it prints."""
    environment = os.environ | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-16",
        "JAX_PLATFORMS": "cpu",
        # Another process may be compiling for TPUs too.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": str(ROOT),
    }
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    return json.loads(completed.stdout.splitlines()[-1])


def compiled(
    mesh: dict[str, Any], tokens: int = 256, topology: str = "v5p:2x2x2", **pipeline: Any
) -> dict[str, Any]:
    """Return a profile of a train step compiled for absent TPUs."""
    return run(PROGRAM, json.dumps(pipeline), json.dumps(mesh), str(tokens), topology)


@pytest.fixture(scope="module")
def by_iteration() -> dict[str, Any]:
    # With this group size, every buffer is larger than four messages; the inbox has five slots.
    mesh = {"ici_stage": 2, "ici_fsdp": 4}
    return compiled(mesh, weight_gather="iteration", repeats=2, group=6)


def test_stage_messages_overlap_with_layers(by_iteration: dict[str, Any]) -> None:
    sends = [
        (is_async, cycles)
        for kind, region, is_async, cycles, *_ in by_iteration["collectives"]
        if kind == "collective-permute" and region == "send"
    ]
    assert len(sends) == 2  # outputs of forward and backward passes
    assert all(is_async and cycles > 0 for is_async, cycles in sends), sends


def test_gathers_over_a_plane_are_asynchronous() -> None:
    """XLA does not run gathers on sparse cores for devices in row order. See `_rotate_planes`."""
    mesh = {"ici_stage": 4, "ici_fsdp": 16}
    found = compiled(mesh, topology="v5p:4x4x4", weight_gather="iteration")
    gathers = [
        is_async
        for kind, region, is_async, *_ in found["collectives"]
        if kind == "all-gather" and region in ("forward", "backward")
    ]
    assert gathers and all(gathers)


def test_attention_kernels_have_flop_counts(by_iteration: dict[str, Any]) -> None:
    """`auto` selects splash attention here; instructions after kernels are also parsed."""
    product = (
        2 * 256**2 * 4 * 128
    )  # 256 tokens, 4 heads of 128; one block covers the whole sequence
    each = {"splash_forward": 2 * product, "splash_backward": 5 * product}
    found = sorted(
        (region, kind, flops)
        for region, name, flops in by_iteration["kernels"]
        for kind in each
        if name.startswith(kind)
    )
    wanted = [("backward", "splash_backward"), ("backward", "splash_forward")]
    wanted += [("forward", "splash_forward")]
    assert found == [(region, kind, each[kind]) for region, kind in wanted]
    assert len(found) == len(by_iteration["kernels"])
    assert by_iteration["cycles"]["backward"] > 1.5 * by_iteration["cycles"]["forward"]


def test_buffers_are_not_copied_in_loops(by_iteration: dict[str, Any]) -> None:
    """Except the gradients of two weights, which are scattered along their last dim."""
    shapes = [each.split("{")[0] for each in by_iteration["copies"]]
    assert sorted(shapes) == ["f32[256,1024]", "f32[256,4,128]"]
    assert all(each.endswith("/backward/while/body/transpose") for each in by_iteration["copies"])


def test_offloaded_activations_overlap_with_layers() -> None:
    names = {"remat": "names", "saved_names": ["attention"], "offloaded_names": ["gate", "up"]}
    found = compiled({"ici_stage": 2, "ici_fsdp": 4}, weight_gather="step", **names)["transfers"]
    assert sorted(place for *place, _ in found) == 2 * [["from host", "backward"]] + 2 * [
        ["to host", "forward"]
    ]
    assert all(cycles > 0 for *_, cycles in found)


def test_offloaded_state_is_not_in_peak_memory() -> None:
    found = run(STATE)
    here = found["here"]
    for name in ("away", "weights"):
        away = found[name]
        state = away[2]
        assert here[2] == 0 and state > 20 * 2**20
        assert away[3] == pytest.approx(state, rel=0.05)
        assert here[0] - away[0] == pytest.approx(state, rel=0.05)
        assert here[1] - away[1] > 0.9 * state


@pytest.mark.parametrize("rings", [False, True])
def test_sequence_parallel_collectives_overlap_with_matmuls(rings: bool) -> None:
    tokens, width, tensor = 2048, 256, 4
    mesh = {"ici_stage": 2, "ici_tensor": tensor, "sequence_parallel": True}
    mesh |= {"collective_matmul": rings}
    found = compiled(mesh, tokens, idle="compute")
    layers = [
        (kind, is_async, cycles)
        for kind, region, is_async, cycles, stride, sent in found["collectives"]
        # At least one device's tokens; reductions of norm gradients are smaller.
        if region in ("forward", "backward") and stride == 1 and sent >= 2 * tokens * width / tensor
    ]
    kinds = {kind for kind, *_ in layers}
    assert kinds == ({"collective-permute"} if rings else {"all-gather", "reduce-scatter"})
    if rings:
        # At least seven gathers and reductions per layer, with three hops each.
        assert len(layers) >= 7 * (tensor - 1)
        assert all(is_async for _, is_async, _ in layers)
        assert sum(cycles > 0 for *_, cycles in layers) > 0.8 * len(layers)


def test_compiler_rejects_by_peak_memory() -> None:
    found, there = run(SIZES), 15.75 * 2**30
    peak, total = found["8192"]
    scale = (17152 / 8192) ** 2
    assert (
        found["17024"][0] < there < found["17024"][1]
    )  # total memory exceeds the limit, peak memory does not
    assert peak * scale > there and total > peak
    needed = parse_out_of_memory(found["17152"])
    assert needed == pytest.approx((peak * scale, there), rel=1e-3)


@pytest.mark.parametrize("name", ["delta", "kimi", "mamba"])
def test_recurrent_layers_compile_to_kernels_with_flop_counts(name: str) -> None:
    """The sequence of 300 tokens is not a multiple of the chunk size."""
    flops = run(RECURRENT, name)
    recurrence = {"recurrence_forward", "recurrence_backward"}
    convolution = {"recurrence_convolution_forward", "recurrence_convolution_backward"}
    assert {*flops} == recurrence | convolution
    for backward, forward in map(sorted, (recurrence, convolution)):
        assert flops[backward] == 3 * flops[forward] > 0


def test_kernels_of_sparse_attention_declare_their_cycles() -> None:
    """Index heads are sharded, so that every device selects the keys of a quarter of the blocks."""
    kernels: Any = run(SPARSE)
    cycles = {name.partition(".")[0]: count for name, count in kernels}
    gathered = {f"gathered_{name}" for name in ("forward", "shares", "backward")}
    assert cycles.keys() == {"sparse_selection", "compact_keys", "add_rows"} | gathered
    assert all(count and count > 0 for count in cycles.values())


@pytest.mark.parametrize(("topology", "width"), [("v5p:2x2x1", 7168), ("v6e:2x2", 4096)])
def test_hyper_connections_compile_to_kernels(topology: str, width: int) -> None:
    """The widths are those of DeepSeek-V4-Pro and V4-Flash."""
    kernels: Any = run(STREAMS, topology, str(width))
    names = [name.partition(".")[0] for name, _ in kernels]
    assert sorted(names) == [
        *["stream_coefficients"] * 2,
        "streams_read",
        "streams_read_backward",
        "streams_write_backward",
    ]
    assert all(cycles for name, cycles in kernels if name.startswith("streams_"))
