"""Compile reports of train steps on the local CPU devices."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe.models.count import scored_pairs
from maxpipe.models.registry import describe
from maxpipe.parallel.mesh import AXES, FSDP, STAGE
from maxpipe.planner.compile import (
    CompileReport,
    _layers_per_tick,
    _out_of_memory_error,
    build_report,
    build_steps,
    collective_traffic,
    host_traffic,
    window_shares,
)
from maxpipe.planner.hlo_profile import TO_HOST, Collective, HostTransfer
from maxpipe.planner.memory_terms import (
    TERMS,
    explain_out_of_memory,
    gib,
    parse_out_of_memory,
    verdict,
)
from maxpipe.planner.report import format_compile_report
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.topology import parse_topology
from maxpipe.schedule.catalog import make_schedule
from tests.planner.test_memory import config_of
from tests.planner.test_search import config_of as wide

MESH = {"ici_stage": 2, "ici_fsdp": 2, "ici_data": 2}
PIPELINE = {"schedule": "interleaved", "repeats": 2, "microbatches": 4}
CONFIG = config_of({"compute_dtype": "float32"}, MESH, PIPELINE)


@pytest.fixture(scope="module")
def report() -> CompileReport:
    steps = build_steps(CONFIG, jax.devices()[:8])
    return build_report(CONFIG, parse_topology("cpu:8"), steps, steps.compile_train())


def test_flops_are_sum_of_layers_and_head(report: CompileReport) -> None:
    sizes, model = Sizes(CONFIG), CONFIG.model
    matrices = sizes.params.layer_elements(sizes.layers.most_common, whole=True) - 2 * model.d_model
    matmuls = 2 * sizes.batch.tokens * matrices
    pairs = scored_pairs(CONFIG.train.sequence_length)
    forward = matmuls + 4 * sizes.batch.microbatch_size * pairs * model.num_heads * model.head_dim
    head = 2 * sizes.batch.tokens * sizes.params.head_elements(whole=True)
    # Forward, recomputation without its last matmul, and a backward pass of twice the FLOPs.
    layers = 4 * forward - 2 * sizes.batch.tokens * model.d_mlp * model.d_model
    per_stage = sum(sizes.layers.partition) / sizes.mesh.stages
    wanted = sizes.batch.microbatches * (per_stage * layers + 3 * head)
    assert report.flops == pytest.approx(wanted, rel=0.02)
    assert 1 < report.flops / report.model_flops < 1.7


def test_collectives_are_labeled_by_mesh_axis(report: CompileReport) -> None:
    found = {(each.kind, each.axes) for each in report.collectives}
    assert ("collective-permute", "stage") in found
    assert ("all-gather", "fsdp") in found and ("reduce-scatter", "fsdp") in found
    assert any(kind == "all-reduce" and "data" in axes for kind, axes in found)
    assert all(each.link == "ici" and each.total_bytes > 0 for each in report.collectives)
    sizes = Sizes(CONFIG)
    (gathers,) = [
        each for each in report.collectives if (each.kind, each.axes) == ("all-gather", "fsdp")
    ]
    # Each layer and microbatch, forward and backward; a device sends its half of the weights.
    whole = sizes.params.layer_elements(sizes.layers.most_common, whole=True) * 4 / 2
    layers = sizes.batch.microbatches * sum(sizes.layers.partition) / sizes.mesh.stages
    assert gathers.total_bytes == pytest.approx(2 * layers * whole, rel=0.05)


def test_traffic_between_slices_is_labeled_dcn() -> None:
    """Two slices of four devices, whose mesh order differs from their IDs."""
    order = [100000, 100002, 100001, 100003, 200000, 200002, 200001, 200003]
    placed = [SimpleNamespace(id=each, slice_index=each // 100000 - 1) for each in order]
    devices = np.array(placed).reshape(tuple({STAGE: 4, FSDP: 2}.get(axis, 1) for axis in AXES))
    common: dict[str, Any] = {"region": "", "count": 3.0, "num_bytes": 8.0, "is_async": True}
    found = [
        # From stage 1, the last of the first slice, to stage 2, the first of the second slice.
        Collective("collective-permute", "a", "", group=(100001, 200000), **common),
        Collective("all-gather", "b", "", group=(0, 1), **common),
    ]
    found[0] = replace(found[0], between_slices=True)
    message, gather = collective_traffic(found, SimpleNamespace(devices=devices))
    assert (message.axes, message.link, message.total_bytes) == ("stage", "dcn", 24)
    assert (gather.axes, gather.link) == ("fsdp", "ici")


def test_weight_gathers_keep_tensor_shards() -> None:
    mesh = {"ici_stage": 2, "ici_fsdp": 2, "ici_tensor": 2}
    config = config_of({"compute_dtype": "float32"}, mesh, PIPELINE)
    steps = build_steps(config, jax.devices()[:8])
    found = build_report(config, parse_topology("cpu:8"), steps, steps.compile_train()).collectives
    sizes = Sizes(config)
    sent = {
        kind: sum(each.total_bytes for each in found if (each.kind, each.axes) == (kind, "fsdp"))
        for kind in ("all-gather", "reduce-scatter")
    }
    # Half of each weight's tensor shard in float32, gathered twice and reduced once.
    layers = sizes.batch.microbatches * sum(sizes.layers.partition) / sizes.mesh.stages
    part = 4 * layers * sizes.params.layer_elements(sizes.layers.most_common, whole=True) / 2
    assert sent["all-gather"] == pytest.approx(2 * part, rel=0.1)
    assert sent["reduce-scatter"] == pytest.approx(part, rel=0.1)
    assert not any(each.kind == "all-gather" and each.axes == "tensor" for each in found)


def test_report_as_text_and_json(report: CompileReport) -> None:
    values = json.loads(json.dumps(report.to_json()))
    for name in ("temp_bytes", "argument_bytes", "output_bytes", "flops", "collectives"):
        assert values[name]
    assert values["total_bytes"] == report.total_bytes and values["fits"]
    assert CompileReport.from_json(values) == report
    text = format_compile_report(report)
    assert "compiled for cpu:8: 8 devices, stage 2 x data 2 x fsdp 2" in text
    assert "fits" in text and "reduce-scatter" in text
    assert "no entries" not in text and "no entries" in format_compile_report(
        report, 5
    )  # as on a CPU


def test_report_states_bandwidth_that_hides_host_transfers(
    report: CompileReport,
) -> None:
    common: dict[str, Any] = {"region": "forward", "count": 10.0, "num_bytes": 2**30 / 20}
    found = [  # both overlap with the same loop
        HostTransfer(TO_HOST, "a", cycles_by_instruction={"loop": 3e6}, **common),
        HostTransfer(TO_HOST, "b", cycles_by_instruction={"loop": 3e6, "norm": 1e6}, **common),
    ]
    (moved,) = host_traffic(found)
    assert (moved.link, moved.total_bytes, moved.cycles_behind) == ("host", 2**30, 40e6)
    text = format_compile_report(replace(report, transfers=[moved], cycles=4e9, seconds=2.0))
    assert "to host" in text
    # 1 GiB in 0.02 s.
    assert "to host: 1.00 GiB overlapped with 0.02 s of compute, fully hidden at 53.7 GB/s" in text
    assert not report.unknown_loops


def test_blockwise_attention_loops_have_known_trip_counts() -> None:
    """On average, a query block computes 3 of 5 key blocks, including its diagonal block."""
    tokens, found = 5 * 128, {}
    for name in ("blockwise", "xla"):
        model = {"compute_dtype": "float32", "attention": name}
        config = config_of(model, {}, {"microbatches": 4}, tokens)
        steps = build_steps(config, jax.devices()[:1])
        read = build_report(config, parse_topology("cpu:1"), steps, steps.compile_train())
        assert not read.unknown_loops
        found[name] = read.flops
    sizes = Sizes(config)
    turns = sizes.batch.microbatches * sum(sizes.layers.partition) / sizes.mesh.stages
    product = (
        2 * sizes.batch.microbatch_size * turns * config.model.num_heads * config.model.head_dim
    )
    pairs = {"blockwise": tokens**2 * 3 / 5, "xla": scored_pairs(tokens)}
    # Forward, recomputation and backward; blockwise attention recomputes scores once more.
    products = {"blockwise": 2 + 2 + 5, "xla": 2 + 2 + 4}
    more = sum(
        sign * products[name] * pairs[name] for name, sign in (("blockwise", 1), ("xla", -1))
    )
    assert found["blockwise"] - found["xla"] == pytest.approx(product * more, rel=0.02)


def test_report_states_assumed_kernel_efficiency(report: CompileReport) -> None:
    text = format_compile_report(
        replace(report, cycles=3e9, kernel_flops=2e12, kernel_efficiency=0.5)
    )
    assert "kernels without an estimate: 2 TFLOP, expected to run at 50% of the peak" in text


def test_window_shares_count_layers_per_window() -> None:
    config = config_of(
        {"family": "gemma3", "num_layers": 13, "tied_embeddings": True}, {}, PIPELINE
    )
    assert window_shares(describe(config.model)) == {1024: 11 / 13, 0: 2 / 13}


def test_reported_peak_memory_determines_fit(report: CompileReport) -> None:
    held = report.argument_bytes + report.output_bytes - report.alias_bytes
    assert not report.peak_bytes and report.working_bytes == report.temp_bytes  # as on CPUs
    stated = replace(report, peak_bytes=held + 1000, program_bytes=10)
    assert stated.total_bytes == held + 1010 and stated.working_bytes == 1000
    assert "temporary 0.00 MiB" in format_compile_report(stated)
    tight = replace(stated, memory_bytes=held + 1010)
    assert tight.fits and not replace(tight, memory_bytes=held + 1009).fits


def test_memory_outside_step_counts_toward_fit(report: CompileReport) -> None:
    room = report.memory_bytes - report.total_bytes
    fits, too_much = (replace(report, beside_bytes=int(room) + more) for more in (0, 1))
    assert fits.fits and not too_much.fits
    assert f"outside the step (calculated): {gib(room)}" in format_compile_report(fits)


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [(92, "fits"), (93, "may not fit"), (100, "may not fit"), (101, "does not fit")],
)
def test_verdict_has_safety_margin(predicted: float, expected: str) -> None:
    assert verdict(predicted, 100) == expected


MESSAGE = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used \
120.50G of 95.74G hbm. Exceeded hbm capacity by 24.76G.

Largest program allocations in hbm:

  1. Size: 40.00G
     Operator: op_name="jit(_train_step)/shard_map/while"
     Shape: bf16[44,8,2048,4096]{3,2,1,0}
     Unpadded size: 40.00G

  2. Size: 512.0M
     Operator: op_name="jit(_train_step)/shard_map/while/body/closed_call/head/cond"
     Shape: f32[8,2048,32064]{2,1,0}

"""


SHORT_MESSAGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(57.86G) exceeds available HBM (15.75G)."
)
"""From libtpu, for ahead-of-time compilation."""


def test_out_of_memory_without_allocation_list_uses_prediction() -> None:
    assert parse_out_of_memory(SHORT_MESSAGE) == (57.86 * 2**30, 15.75 * 2**30)
    assert explain_out_of_memory(SHORT_MESSAGE, {}) == ""
    topology = parse_topology("v5e:4x4")
    pipeline = {"microbatches": 4, "repeats": 2, "remat": "names"}
    config = wide({"ici_stage": 4, "ici_fsdp": 4}, **pipeline)
    told = str(_out_of_memory_error(SHORT_MESSAGE, config, FakeSteps(), topology))  # type: ignore[arg-type]
    assert "has 15.75 GiB per device, but the step needs 57.86 GiB" in told
    assert TERMS["stash"].about in told
    action = told.splitlines()[-1]
    assert action.startswith("  Set ") and "pipeline." in action


class FakeSteps:
    """Stands in for steps of a model too large to be traced in a test."""

    param_layout = SimpleNamespace(mesh=SimpleNamespace(shape={"tensor": 1}))

    def buffer_shapes(self) -> dict[str, Any]:
        return {}


def test_out_of_memory_report_names_config_keys() -> None:
    needed, there = parse_out_of_memory(MESSAGE) or (0.0, 0.0)
    assert (needed, there) == (120.5 * 2**30, 95.74 * 2**30)
    buffers: dict[str, Any] = {"stash": ((44, 8, 2048, 4096),), "inbox": ((3, 8, 2048, 4096),)}
    first, second = explain_out_of_memory(MESSAGE, buffers).splitlines()
    assert "40.00 GiB" in first and TERMS["stash"].about in first and "pipeline.remat" in first
    assert "0.50 GiB" in second and TERMS["logits"].about in second


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_mixed_tick_runs_one_action_per_stage(name: str) -> None:
    schedule = make_schedule(name, stages=4, repeats=2 if name == "zb_v" else 1, microbatches=8)
    sizes = np.full((schedule.num_repeats, 4), 3)
    average = _layers_per_tick(schedule, sizes, average=True)
    busiest = _layers_per_tick(schedule, sizes, average=False)
    assert sum(average.values()) <= sum(busiest.values()) <= 3
    # Each microbatch runs each chunk once per action kind.
    for turns in average.values():
        assert turns * schedule.num_ticks == pytest.approx(8 * 3 * schedule.num_repeats)
