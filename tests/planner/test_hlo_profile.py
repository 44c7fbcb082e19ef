# ruff: noqa: E501  (lines of HLO are as long as XLA prints them)
"""Profiles of optimized HLO, handwritten or compiled: costs, collectives and overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maxpipe.hardware import known_hardware
from maxpipe.planner.hlo_parser import array_bytes, parse_hlo
from maxpipe.planner.hlo_profile import Profile, profile_program
from maxpipe.planner.instruction_costs import collective_seconds, exposed_collectives

SMALL = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%moved (param_0: f32[512,1024]) -> f32[1024,512] {
  %param_0 = f32[512,1024]{1,0} parameter(0)
  ROOT %transpose.1 = f32[1024,512]{1,0} transpose(%param_0), dimensions={1,0}
}

%layer (p: (s32[], f32[512,1024], s32[])) -> (s32[], f32[512,1024], s32[]) {
  %p = (s32[], f32[512,1024]{1,0:T(8,128)}, /*index=2*/s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[512,1024]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %gather = f32[2048,1024]{1,0} all-gather(%w), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %dot.1 = f32[512,1024]{1,0} fusion(%gather), kind=kOutput, calls=%f, backend_config={"estimated_cycles":"100"}
  %scatter = f32[512,1024]{1,0} reduce-scatter(%gather), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
  %turned = f32[1024,512]{1,0} fusion(%dot.1), kind=kLoop, calls=%moved, backend_config={"estimated_cycles":"7"}
  ROOT %out = (s32[], f32[512,1024]{1,0}, s32[]) tuple(%i, %scatter, %n)
}

%more (p: (s32[], f32[512,1024], s32[])) -> pred[] {
  %p = (s32[], f32[512,1024]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%rest (x: f32[512,1024]) -> f32[512,1024] {
  ROOT %x = f32[512,1024]{1,0} parameter(0)
}

%head (x: f32[512,1024]) -> f32[512,1024] {
  %x = f32[512,1024]{1,0} parameter(0)
  ROOT %all = f32[512,1024]{1,0} all-reduce(%work), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
  %work = f32[512,1024]{1,0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1000"}
}

%tick (p: (s32[], f32[512,1024], s32[])) -> (s32[], f32[512,1024], s32[]) {
  %p = (s32[], f32[512,1024]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[512,1024]{1,0} get-tuple-element(%p), index=1
  %send = (f32[512,1024]{1,0}, f32[512,1024]{1,0}) collective-permute-start(%w), source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}
  %loop = (s32[], f32[512,1024]{1,0}, s32[]) while(%p), condition=%more, body=%layer, metadata={op_name="jit(f)/while/body/forward/while" stack_frame_id=3}
  %arrived = f32[512,1024]{1,0} collective-permute-done(%send)
  %late = (f32[512,1024]{1,0}, f32[512,1024]{1,0}) collective-permute-start(%arrived), source_target_pairs={{0,4},{4,0}}
  %late.done = f32[512,1024]{1,0} collective-permute-done(%late)
  %choice = f32[512,1024]{1,0} conditional(%i, %w, %w), branch_computations={%rest, %head}, metadata={op_name="jit(f)/while/body/head/cond"}
  ROOT %out = (s32[], f32[512,1024]{1,0}, s32[]) tuple(%i, %choice, %i)
}

%until (p: (s32[], f32[512,1024], s32[])) -> pred[] {
  %limit = s32[] constant(10)
  %p = (s32[], f32[512,1024]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: (s32[], f32[512,1024], s32[])) -> (s32[], f32[512,1024], s32[]) {
  %x = (s32[], f32[512,1024]{1,0}, s32[]) parameter(0)
  ROOT %ticks = (s32[], f32[512,1024]{1,0}, s32[]) while(%x), condition=%until, body=%tick, metadata={op_name="jit(f)/while"}
}
"""
MIB = 2**20
WEIGHT = 2 * MIB


@pytest.fixture(scope="module")
def small() -> Profile:
    return profile_program(
        parse_hlo(SMALL),
        trips={r"/forward/while$": 3},
        shares={r"/head/cond$": 0.4},
        regions={"forward": "/forward/", "head": "/head/"},
    )


def test_cycles_are_weighted_by_trips_and_shares(small: Profile):
    regions = {
        name: sum(entry.cycles for entry in small.entries if entry.region == name)
        for name in {entry.region for entry in small.entries}
    }
    assert regions == {"head": 10 * 0.4 * 1000, "forward": 10 * 3 * 107}
    assert small.cycles == 4000 + 3210
    assert [entry.instruction.name for entry in small.largest(2)] == ["work", "dot.1"]
    assert not small.unknown_loops


def test_loop_with_unknown_trip_count_counts_once():
    found = profile_program(parse_hlo(SMALL))
    assert found.unknown_loops == ["jit(f)/while/body/forward/while"]
    assert found.cycles == 10 * (1000 + 107)


def test_trip_counts_of_caller_override_hlo():
    found = profile_program(parse_hlo(SMALL), trips={"forward/while$": 1, "^jit.f./while$": 2})
    assert found.cycles == 2 * (1000 + 107)


def test_collective_bytes_follow_ring_algorithm(small: Profile):
    moved = {
        each.name: (each.kind, each.group, each.count, each.num_bytes) for each in small.collectives
    }
    assert moved == {
        "gather": ("all-gather", (0, 1, 2, 3), 30, 3 * WEIGHT),
        "scatter": ("reduce-scatter", (0, 1, 2, 3), 30, 4 * WEIGHT * 3 / 4),
        "all": ("all-reduce", (0, 4), 4, 2 * WEIGHT / 2),
        "send": ("collective-permute", (0, 4), 10, WEIGHT),
        "late": ("collective-permute", (0, 4), 10, WEIGHT),
    }
    assert small.bytes_moved("all-gather") == 30 * 3 * WEIGHT
    assert small.bytes_moved(group_size=2) == (4 + 10 + 10) * WEIGHT
    assert {each.stride for each in small.collectives} == {1, 4}


def test_async_collectives_list_overlapped_instructions(small: Profile):
    found = {each.name: each for each in small.collectives}
    assert (found["send"].is_async, found["send"].between) == (True, ("loop",))
    assert found["send"].cycles_between == 3 * 107
    assert (found["late"].is_async, found["late"].between) == (True, ())
    assert not found["gather"].is_async


def test_profile_lists_copies_in_loops(small: Profile):
    assert [(each.instruction.name, each.num_bytes) for each in small.copies] == [
        ("turned", 30 * WEIGHT)
    ]
    assert not profile_program(parse_hlo(SMALL), copy_bytes=WEIGHT + 1).copies


FUSED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%start (w: bf16[8,128]) -> (bf16[8,128], bf16[32,128], u32[]) {
  %w = bf16[8,128]{1,0} parameter(0)
  %gather.1 = bf16[32,128]{1,0} all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %call.1 = (bf16[8,128]{1,0}, bf16[32,128]{1,0}, u32[]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%step (w: bf16[8,128], state: u32[], x: bf16[8,8]) -> (bf16[8,8], u32[]) {
  %w = bf16[8,128]{1,0} parameter(0)
  %state = u32[] parameter(1)
  %x = bf16[8,8]{1,0} parameter(2)
  %gather.2 = bf16[32,128]{1,0} all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %out = (bf16[8,8]{1,0}, u32[]) tuple(%x, %state)
}

%done (w: bf16[8,128], state: u32[]) -> bf16[32,128] {
  %w = bf16[8,128]{1,0} parameter(0)
  %state = u32[] parameter(1)
  %gather.3 = bf16[32,128]{1,0} all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %call.2 = bf16[32,128]{1,0} custom-call(%w, %gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: bf16[8,128], x: bf16[8,8]) -> bf16[32,128] {
  %w = bf16[8,128]{1,0} parameter(0)
  %x = bf16[8,8]{1,0} parameter(1)
  %begin = (bf16[8,128]{1,0}, bf16[32,128]{1,0}, u32[]) fusion(%w), kind=kCustom, calls=%start
  %w.1 = bf16[8,128]{1,0} get-tuple-element(%begin), index=0
  %state.1 = u32[] get-tuple-element(%begin), index=2
  %work = (bf16[8,8]{1,0}, u32[]) fusion(%w.1, %state.1, %x), kind=kOutput, calls=%step, backend_config={"estimated_cycles":"50"}
  %state.2 = u32[] get-tuple-element(%work), index=1
  ROOT %end = bf16[32,128]{1,0} fusion(%w.1, %state.2), kind=kCustom, calls=%done
}
"""


def test_collective_in_several_tpu_fusions_counts_once():
    (found,) = profile_program(parse_hlo(FUSED)).collectives
    assert (found.kind, found.name, found.count) == ("all-gather", "begin", 1)
    assert found.num_bytes == 3 * 8 * 128 * 2
    assert (found.is_async, found.between, found.cycles_between) == (True, ("work",), 50)


SCATTERED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%scatter (x: f32[32,128]) -> f32[8,128] {
  %x = f32[32,128]{1,0} parameter(0)
  %sum.1 = f32[32,128]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %place = s32[] constant(0)
  ROOT %mine = f32[8,128]{1,0} dynamic-slice(%sum.1, %place, %place), dynamic_slice_sizes={8,128}
}

ENTRY %main (x: f32[32,128]) -> f32[8,128] {
  %x = f32[32,128]{1,0} parameter(0)
  ROOT %reduced = f32[8,128]{1,0} fusion(%x), kind=kCustom, calls=%scatter
}
"""


ACROSS = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[16,8]) -> bf16[16,8] {
  %x = bf16[16,8]{1,0} parameter(0)
  %after-all = token[] after-all()
  %send = (bf16[16,8]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.3_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}, backend_config={"flag_configs":[]}
  %recv = (bf16[16,8]{1,0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.3_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}, backend_config={"flag_configs":[]}
  %send.1 = (bf16[16,8]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="ppermute.20_0",_xla_megascale_target={{100001->200000},{200001->300000},{300001->400000},{400001->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  %recv.1 = (bf16[16,8]{1,0}, u32[], token[]) recv(%after-all), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="ppermute.20_0",_xla_megascale_target={{100001->200000},{200001->300000},{300001->400000},{400001->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  %work = bf16[16,8]{1,0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1000"}
  %recv-done.1 = (bf16[16,8]{1,0}, token[]) recv-done(%recv.1), channel_id=3, is_host_transfer=true
  %recv-done = (bf16[16,8]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %out = bf16[16,8]{1,0} get-tuple-element(%recv-done), index=0
}
"""


def test_collectives_between_slices():
    whole, message = profile_program(parse_hlo(ACROSS)).collectives
    assert whole.between_slices and message.between_slices
    assert (whole.kind, whole.group) == ("all-reduce", (100000, 200000, 300000, 400000))
    assert whole.total_bytes == 2 * 3 / 4 * 256
    assert (message.kind, message.group) == ("collective-permute", (100001, 200000))
    assert message.total_bytes == 256
    assert message.between == ("work",) and message.cycles_between == 1000


def test_all_reduce_followed_by_slice_is_reduce_scatter():
    (found,) = profile_program(parse_hlo(SCATTERED)).collectives
    assert (found.kind, found.num_bytes) == ("reduce-scatter", 32 * 128 * 4 * 3 / 4)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
    ],
)
def test_replica_group_notations(groups: str, expected: tuple[int, ...]):
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[4]) -> f32[4] {\n"
        "  %x = f32[4]{0} parameter(0)\n"
        f"  ROOT %r = f32[4]{{0}} all-reduce(%x), {groups}, to_apply=%sum\n}}\n"
    )
    (found,) = profile_program(parse_hlo(text)).collectives
    assert found.group == expected


def test_array_bytes_of_hlo_shapes():
    assert array_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[5], f32[])") == [
        12,
        5,
        4,
    ]
    assert array_bytes("f8e4m3fn[7]") == [7]
    assert array_bytes("s4[3]") == [2]
    assert array_bytes("token[]") == [0]


def test_parse_hlo_rejects_text_without_entry():
    with pytest.raises(ValueError, match="ENTRY"):
        parse_hlo("HloModule nothing")


def test_profile_of_program_compiled_for_cpu(devices: list[Any]):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.asarray(devices).reshape(4, 2), ("stage", "fsdp"))

    def program(w: jax.Array, trips: jax.Array) -> jax.Array:
        def layer(_: int, x: jax.Array) -> jax.Array:
            whole = lax.all_gather(x, "fsdp", tiled=True)
            return lax.psum_scatter(jnp.tanh(whole), "fsdp", tiled=True)

        def tick(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("forward"):
                x = lax.fori_loop(0, trips[0], layer, x)
            return lax.ppermute(x, "stage", [(i, (i + 1) % 4) for i in range(4)]), None

        return lax.scan(tick, w, length=5)[0]

    spec = PartitionSpec(("stage", "fsdp"))
    run = jax.shard_map(
        program, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
    )
    weight, trips = jnp.zeros((8 * 16, 4)), jnp.ones(1, jnp.int32)
    text = jax.jit(run).lower(weight, trips).compile().as_text()
    assert text is not None
    found = profile_program(parse_hlo(text), trips={r"/forward/while$": 3}, copy_bytes=1)
    assert not found.unknown_loops
    shard = 16 * 4 * 4
    assert found.bytes_moved("all-gather", group_size=2) == 5 * 3 * shard
    assert found.bytes_moved("collective-permute", group_size=4) == 5 * shard
    # XLA for CPU may use an all-reduce, which moves twice the bytes of a reduce-scatter.
    reduced = found.bytes_moved("reduce-scatter", "all-reduce", group_size=2)
    assert reduced in (5 * 3 * shard, 5 * 3 * 2 * shard)


def test_kernel_flops_come_from_cost_estimate() -> None:
    text = SMALL.replace(
        "%more (p",
        """%kernel (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %gmm = f32[8,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzvUg=","cost_estimate":{"flops":"68719476736","transcendentals":"0","bytes_accessed":"9"}}}
}

%more (p""",
        1,
    )
    module = replace(parse_hlo(text), entry="kernel")
    found = profile_program(module)
    assert found.flops == found.kernel_flops == 68719476736 and found.cycles == 0
    assert profile_program(parse_hlo(text)).kernel_flops == 0


KERNELS = """\
HloModule jit_prog, is_scheduled=true, num_partitions=4

%layer (p: (s32[], bf16[4,512,128], s32[])) -> (s32[], bf16[4,512,128], s32[]) {
  %p = (s32[]{:T(128)}, bf16[4,512,128]{2,1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %q = bf16[4,512,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %splash_mha_fwd_segmented_residuals.1 = (f32[256,128]{1,0:T(8,128)}, bf16[4,512,128]{2,1,0:T(8,128)(2,1)}) custom-call(%q, %q, /*index=2*/%q), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[4,512,128]{2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256, \\"block_kv\\": 256, \\"use_fused_bwd_kernel\\": false}"
}}, metadata={op_name="jit(prog)/shard_map/forward/while/body/flops_1000/vmap(static_sparsity_splash)/splash_mha_fwd_segmented_residuals/pallas_call" stack_frame_id=15}, backend_config={"flag_configs":[],"custom_call_config":{"body":"TUzvUg=="}}
  %out = bf16[4,512,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%splash_mha_fwd_segmented_residuals.1), index=1, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(prog)/shard_map/forward/while/body/flops_1000/pallas_call" stack_frame_id=15}
  %scaled = bf16[4,512,128]{2,1,0:T(8,128)(2,1)} fusion(%out), kind=kLoop, calls=%f, metadata={op_name="jit(prog)/shard_map/forward/while/body/mul"}, backend_config={"window_config":{"estimated_cycles":"3415"}}
  %sent = ((bf16[4,512,128]{2,1,0}, bf16[8,512,128]{2,1,0}, s32[4]{0}, s32[4]{0}, s32[4]{0}, /*index=5*/s32[4]{0}), bf16[8,512,128]{2,1,0}, u32[]{:S(2)}) ragged-all-to-all-start(%scaled, %room, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3}}, metadata={op_name="jit(prog)/shard_map/ragged_all_to_all"}
  %got = bf16[8,512,128]{2,1,0} ragged-all-to-all-done(%sent), metadata={op_name="jit(prog)/shard_map/ragged_all_to_all"}
  ROOT %tuple = (s32[]{:T(128)}, bf16[4,512,128]{2,1,0}, s32[]{:T(128)}) tuple(%i, %scaled, %n)
}

%async (x: s32[]) -> s32[] {
  ROOT %x = s32[] parameter(0)
}, execution_thread="sparsecore"

%more (p: (s32[], bf16[4,512,128], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[4,512,128]{2,1,0}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} get-tuple-element(%p), index=2
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (x: (s32[], bf16[4,512,128], s32[])) -> (s32[], bf16[4,512,128], s32[]) {
  %x = (s32[]{:T(128)}, bf16[4,512,128]{2,1,0}, s32[]{:T(128)}) parameter(0)
  ROOT %while.34 = (s32[]{:T(128)}, bf16[4,512,128]{2,1,0}, s32[]{:T(128)}) while(%x), condition=%more, body=%layer, metadata={op_name="jit(prog)/shard_map/transpose(jvp(trips_2.5000))/while" stack_frame_id=3}
}
"""


def test_instructions_after_kernel_metadata_are_parsed() -> None:
    """Line breaks in kernel metadata do not end the instruction (shortened TPU program)."""
    module = parse_hlo(KERNELS)
    assert len(module.computations["layer"]) == 8
    kernel = module.computations["layer"]["splash_mha_fwd_segmented_residuals.1"]
    assert kernel.operands == ("q", "q", "q")
    assert kernel.op_name.endswith("splash_mha_fwd_segmented_residuals/pallas_call")
    assert set(module.computations) == {"layer", "async", "more", "main"}
    found = profile_program(module)
    assert found.cycles == 2.5 * 3415 and not found.unknown_loops  # trip count from the loop's name
    assert found.flops == found.kernel_flops == 2.5 * 1000  # from the kernel's name
    assert profile_program(module, trips={"/while$": 2}).flops == 2000


CHOICE = """\
HloModule jit_prog, is_scheduled=true

%all (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %far = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/windows/cond/branch_0_fun/window_0/flops_100/pallas_call"}
}

%some (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %near = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/windows/cond/branch_1_fun/window_512/flops_10/pallas_call"}
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %choice = f32[8]{0} conditional(%i, %x, %x), branch_computations={%some, %all}, metadata={op_name="jit(f)/transpose(jvp(windows))/cond"}
}
"""


def test_window_branches_are_weighted_by_layer_share() -> None:
    """The order of the branches does not matter."""
    module = parse_hlo(CHOICE)
    assert profile_program(module, windows={0: 0.25, 512: 0.75}).flops == 0.25 * 100 + 0.75 * 10
    assert profile_program(module, windows={512: 1.0}).flops == 10
    assert profile_program(module).flops == 55  # unknown shares: equal weights


def test_ragged_all_to_all_sends_first_operand() -> None:
    (found,) = profile_program(parse_hlo(KERNELS)).collectives
    assert (found.kind, found.is_async) == ("ragged-all-to-all", True)
    assert found.num_bytes == 4 * 512 * 128 * 2 * 3 / 4


GPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[128,64], w: f32[32,64]) -> f32[128,256] {
  %x = f32[128,64]{1,0} parameter(0)
  %w = f32[32,64]{1,0} parameter(1)
  %all-gather-start = (f32[32,64]{1,0}, f32[256,64]{1,0}) all-gather-start(%w), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %first = (f32[128,128]{1,0}, s8[33554432]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %all-gather-done = f32[256,64]{1,0} all-gather-done(%all-gather-start)
  %all-reduce-start = f32[128,64]{1,0} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%sum, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-reduce-done = f32[128,64]{1,0} all-reduce-done(%all-reduce-start)
  %second = (f32[128,256]{1,0}, s8[33554432]{0}) custom-call(%all-reduce-done, %all-gather-done), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %out = f32[128,256]{1,0} get-tuple-element(%second), index=0
}
"""


def test_gpu_program_cublas_flops_and_synchronous_collectives() -> None:
    found = profile_program(parse_hlo(GPU))
    assert found.flops == 2 * 128 * 64 * (128 + 256)
    assert found.kernel_flops == 0 and found.cycles == 0
    gather, reduce = found.collectives
    assert (gather.kind, gather.is_async, gather.between) == ("all-gather", True, ("first",))
    assert (gather.num_bytes, gather.flops_between) == (32 * 64 * 4 * 7, 2 * 128 * 64 * 128)
    assert (reduce.kind, reduce.is_async, reduce.between) == ("all-reduce", False, ())


def test_matmuls_hide_collectives_on_gpus() -> None:
    found, h100 = profile_program(parse_hlo(GPU)), known_hardware()["h100"]
    gather, reduce = found.collectives
    rate = h100.flops * h100.matmul_efficiency
    link, network = (
        (collective_seconds(gather, h100, between_slices=spans), collective_seconds(reduce, h100))
        for spans in (False, True)
    )
    exposed = [seconds for _, seconds in exposed_collectives(found, h100)]
    assert exposed == pytest.approx([link[0] - gather.flops_between / rate, link[1]])
    # With two slices, both groups span the network.
    (_, first), _ = exposed_collectives(found, h100, slices=[0] * 4 + [1] * 4)
    assert first == pytest.approx(network[0] - gather.flops_between / rate)
    assert network[0] > link[0]


SPARSE = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%called (shard: bf16[256,1024]) -> bf16[1024,1024] {
  %shard = bf16[256,1024]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[1024,1024]{1,0} all-gather(%shard), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[256,1024]) -> bf16[1024,1024] {
  %x = bf16[256,1024]{1,0} parameter(0)
  %before = bf16[256,1024]{1,0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"5"}
  %start = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%called, metadata={op_name="jit(f)/gather/all_gather"}
  %update = ((bf16[256,1024]{1,0}), bf16[1024,1024]{1,0}, (s32[1]{0:T(128)S(2)})) call-update(%start, %x)
  %beside = bf16[256,1024]{1,0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"70"}
  ROOT %done = bf16[1024,1024]{1,0} call-done(%update)
}
"""


def test_sparsecore_collective_overlaps_with_other_work() -> None:
    (found,) = profile_program(parse_hlo(SPARSE)).collectives
    assert (found.kind, found.group, found.is_async) == ("all-gather", (0, 1, 2, 3), True)
    assert found.num_bytes == 3 * 256 * 1024 * 2
    assert (found.between, found.cycles_between) == (("beside",), 70)
    assert found.op_name == "jit(f)/gather/all_gather"
