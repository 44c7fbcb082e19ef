# ruff: noqa: E501  (lines of HLO are as long as XLA prints them)
"""Cost tables of the largest instructions in a handwritten HLO program."""

from __future__ import annotations

import pytest

from maxpipe.hardware import published_hardware
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.hlo_profile import FROM_HOST, TO_HOST, Profile, profile_program
from maxpipe.planner.instruction_costs import (
    ProfileLine,
    all_cycles,
    instruction_kind,
    profile_lines,
    sum_by_kind,
    table,
)

PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%multiplied (a: bf16[256,512], b: bf16[512,128]) -> bf16[256,128] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,128]{1,0} parameter(1)
  ROOT %dot.1 = bf16[256,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sliced (buffer: bf16[4,256,512], i: s32[]) -> bf16[256,512] {
  %buffer = bf16[4,256,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = s32[] constant(1)
  %place = s32[] add(%i, %one)
  %zero = s32[] constant(0)
  %slice = bf16[1,256,512]{2,1,0} dynamic-slice(%buffer, %place, %zero, %zero), dynamic_slice_sizes={1,256,512}
  ROOT %squeezed = bf16[256,512]{1,0} bitcast(%slice)
}

%scaled (x: bf16[256,512], s: bf16[256,512]) -> bf16[256,512] {
  %x = bf16[256,512]{1,0} parameter(0)
  %s = bf16[256,512]{1,0} parameter(1)
  ROOT %product = bf16[256,512]{1,0} multiply(%x, %s)
}

%summed (x: bf16[256,512]) -> bf16[512] {
  %x = bf16[256,512]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  ROOT %sum = bf16[512]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add
}

%turned (x: bf16[256,512]) -> bf16[512,256] {
  %x = bf16[256,512]{1,0} parameter(0)
  ROOT %transposed = bf16[512,256]{1,0} transpose(%x), dimensions={1,0}
}

%prepared (x: s32[64]) -> s32[64] {
  %x = s32[64]{0} parameter(0)
  ROOT %found = s32[64]{0} custom-call(%x), custom_call_target="Gather", metadata={op_name="jit(f)/jvp(part_attention)/flops_229500000/gather"}
}

%gathered (x: bf16[256,512], i: s32[256]) -> bf16[256,512] {
  %x = bf16[256,512]{1,0} parameter(0)
  %i = s32[256]{0} parameter(1)
  ROOT %rows = bf16[256,512]{1,0} gather(%x, %i), offset_dims={1}
}

%layer (p: (s32[], bf16[4,256,512])) -> (s32[], bf16[4,256,512]) {
  %p = (s32[], bf16[4,256,512]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %buffer = bf16[4,256,512]{2,1,0} get-tuple-element(%p), index=1
  %slice.1 = bf16[256,512]{1,0} fusion(%buffer, %i), kind=kLoop, calls=%sliced, backend_config={"estimated_cycles":"50"}
  %host = bf16[8,256,512]{2,1,0:T(8,128)S(5)} parameter(1)
  %out.1 = ((bf16[8,256,512]{2,1,0:T(8,128)S(5)}, bf16[1,256,512]{2,1,0}, s32[]), bf16[8,256,512]{2,1,0:T(8,128)S(5)}, u32[]) dynamic-update-slice-start(%host, %slice.1, %i)
  %norm.1 = bf16[256,512]{1,0} fusion(%slice.1, %slice.1), kind=kLoop, calls=%scaled, metadata={op_name="jit(f)/while/body/forward/while/body/jvp(part_mlp_norm)/mul"}, backend_config={"estimated_cycles":"20"}
  %matmul.1 = bf16[256,128]{1,0} fusion(%norm.1, %slice.1), kind=kOutput, calls=%multiplied, metadata={op_name="jit(f)/while/body/forward/while/body/jvp(part_mlp)/dot_general"}, backend_config={"estimated_cycles":"400"}
  %out.2 = bf16[8,256,512]{2,1,0:T(8,128)S(5)} dynamic-update-slice-done(%out.1)
  %in.1 = (bf16[256,512]{1,0}, bf16[256,512]{1,0:S(5)}, u32[]) copy-start(%far)
  %sum.1 = bf16[512]{0} fusion(%norm.1), kind=kLoop, calls=%summed, metadata={op_name="jit(f)/while/body/forward/while/body/jvp(part_attention/part_rotary)/sum"}, backend_config={"estimated_cycles":"10"}
  %in.2 = bf16[256,512]{1,0} copy-done(%in.1)
  %far = bf16[256,512]{1,0:S(5)} parameter(2)
  %near.1 = (bf16[256,512]{1,0:S(1)}, bf16[256,512]{1,0}, u32[]) copy-start(%norm.1)
  %near.2 = bf16[256,512]{1,0:S(1)} copy-done(%near.1)
  %turned.1 = bf16[512,256]{1,0} fusion(%norm.1), kind=kLoop, calls=%turned, backend_config={"estimated_cycles":"30"}
  %gather.1 = bf16[1024,512]{1,0} all-gather(%norm.1), replica_groups={{0,1,2,3}}, dimensions={0}
  %kernel.1 = bf16[256,512]{1,0} custom-call(%norm.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/while/body/forward/while/body/jvp(part_attention)/flops_229500000/kernel"}
  %prepared.1 = s32[64]{0} fusion(%i), kind=kCustom, calls=%prepared, metadata={op_name="jit(f)/jvp(part_attention)/flops_229500000/gather"}
  %rows.1 = bf16[256,512]{1,0} fusion(%norm.1, %prepared.1), kind=kCustom, calls=%gathered, metadata={op_name="jit(f)/while/body/forward/while/body/jvp(part_experts)/gather"}
  %layout.1 = bf16[256,2,256]{2,1,0:T(2,128)} reshape(%rows.1)
  ROOT %out = (s32[], bf16[4,256,512]{2,1,0}) tuple(%i, %buffer)
}

%until (p: (s32[], bf16[4,256,512])) -> pred[] {
  %limit = s32[] constant(10)
  %p = (s32[], bf16[4,256,512]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: (s32[], bf16[4,256,512])) -> (s32[], bf16[4,256,512]) {
  %x = (s32[], bf16[4,256,512]{2,1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[4,256,512]{2,1,0}) while(%x), condition=%until, body=%layer, metadata={op_name="jit(f)/while/body/forward/while"}
}
"""
V5P = published_hardware()["v5p"]
PER_CYCLE = V5P.flops / (V5P.clock_ghz * 1e9)


@pytest.fixture(scope="module")
def found() -> Profile:
    return profile_program(parse_hlo(PROGRAM), regions={"forward": "/forward/"})


def test_instruction_kind_of_entries(found: Profile) -> None:
    kinds = {each.instruction.name: instruction_kind(each) for each in found.entries}
    assert kinds == {
        "slice.1": "slice of a buffer",  # whose index is computed
        "norm.1": "elementwise",
        "matmul.1": "matmul",
        "sum.1": "reduction",
        "turned.1": "copy",
        "kernel.1": "kernel",
        "rows.1": "gather, scatter",
        "layout.1": "copy",
    }


def test_profile_lines_have_total_cycles_and_location(found: Profile) -> None:
    listed = {each.name: each for each in profile_lines(found, V5P)}
    matmul, kernel = listed["matmul.1"], listed["kernel.1"]
    assert (matmul.location, matmul.count, matmul.cycles) == ("forward mlp", 10, 4000)
    assert matmul.flops == 10 * 2 * 256 * 512 * 128
    assert matmul.of_peak == pytest.approx(matmul.flops / PER_CYCLE / 4000)
    # Kernels have no cycle estimate, so their FLOPs run at the expected rate.
    assert kernel.cycles == pytest.approx(10 * 229_500_000 / PER_CYCLE / V5P.kernel_efficiency)
    assert kernel.of_peak == pytest.approx(V5P.kernel_efficiency)
    assert listed["norm.1"].location == "forward mlp_norm"
    assert listed["sum.1"].location == "forward rotary"
    gather = listed["gather.1"]
    sent = 3 * 256 * 512 * 2 / (2 * V5P.link_gb_per_second * 1e9) + V5P.latency_us * 1e-6
    assert gather.kind == "all-gather, synchronous"
    assert gather.cycles == pytest.approx(10 * sent * V5P.clock_ghz * 1e9)
    assert list(listed) == sorted(listed, key=lambda name: -listed[name].cycles)


def test_instructions_without_estimate_run_at_the_memory_bandwidth(found: Profile) -> None:
    """The compiler estimates neither gathers of rows nor reshapes to another memory layout."""
    listed = {each.name: each for each in profile_lines(found, V5P)}
    cycles = 10 * 2 * 256 * 512 * 2 / (V5P.memory_gb_per_second / V5P.clock_ghz)
    assert listed["rows.1"].cycles == listed["layout.1"].cycles == pytest.approx(cycles)
    kernel = listed["kernel.1"].cycles
    assert all_cycles(found, V5P) == pytest.approx(found.cycles + kernel + 2 * cycles)


def test_declared_cycles_of_a_kernel_replace_the_expected_rate() -> None:
    scope = "cycles_1250/flops_229500000/kernel"
    program = PROGRAM.replace("flops_229500000/kernel", scope)
    declared = profile_program(parse_hlo(program), regions={"forward": "/forward/"})
    listed = {each.name: each for each in profile_lines(declared, V5P)}
    assert listed["kernel.1"].cycles == 10 * 1250
    assert listed["kernel.1"].flops == 10 * 229_500_000


def test_kernels_without_flops_are_listed_if_they_declare_cycles() -> None:
    for scope, cycles in (("cycles_1250/kernel", [12_500]), ("kernel", [])):
        program = PROGRAM.replace("flops_229500000/kernel", scope)
        lines = profile_lines(profile_program(parse_hlo(program)), V5P)
        assert [line.cycles for line in lines if line.name == "kernel.1"] == cycles


def test_sum_by_kind_preserves_totals(found: Profile) -> None:
    listed = profile_lines(found, V5P)
    sums = sum_by_kind([*listed, *listed])
    assert sum(each.cycles for each in sums) == pytest.approx(2 * sum(e.cycles for e in listed))
    (matmul,) = (each for each in sums if each.kind == "matmul")
    (one,) = (each for each in listed if each.kind == "matmul")
    assert (matmul.count, matmul.of_peak) == (20, pytest.approx(one.of_peak))


def test_table_lists_requested_number_of_entries(found: Profile) -> None:
    text = "\n".join(table(profile_lines(found, V5P), 2))
    sums, largest = text.split("largest entries:")
    assert "all-gather, synchronous" in sums and "forward attention" in sums and "mlp" not in sums
    assert "kernel.1" in largest and "slice.1" not in largest
    assert len(largest.strip().splitlines()) == 1 + 2


def test_profile_lines_are_empty_without_cycle_estimates(found: Profile) -> None:
    without = parse_hlo(PROGRAM.replace("estimated_cycles", "no_cycles"))
    assert profile_lines(profile_program(without), V5P) == []
    assert "no cycle estimates" in table([], 5)[0]
    line = profile_lines(found, V5P)[0]
    assert isinstance(line, ProfileLine)


def test_host_transfers_list_overlapped_instructions(found: Profile) -> None:
    moved = {each.name: each for each in found.transfers}
    assert set(moved) == {"out.1", "in.1"}  # copies to on-chip memory are not host transfers
    out, back = moved["out.1"], moved["in.1"]
    assert (out.kind, back.kind) == (TO_HOST, FROM_HOST)
    assert out.num_bytes == back.num_bytes == 256 * 512 * 2
    assert (out.count, sum(out.cycles_by_instruction.values())) == (10, 420)
    assert (out.region, back.cycles_by_instruction) == ("forward", {"sum.1": 10})
