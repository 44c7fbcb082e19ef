"""List the most expensive operations of a compiled step, by cycles.

An entry contains the costs of one instruction of the compiled program, summed over its executions.
Cycles are the compiler's estimate. The compiler has no estimate for kernels, so their cycles are
computed from their FLOPs at an assumed efficiency. The cycles of a collective are computed from its
bytes at the published link bandwidth, minus the cycles of the instructions scheduled between its
start and end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from maxpipe.hardware import Hardware
from maxpipe.parallel import scopes
from maxpipe.planner.hlo_parser import array_dims
from maxpipe.planner.hlo_profile import Collective, InstructionCost, Profile

_KINDS = (
    ("sort", {"sort"}),
    ("gather, scatter", {"gather", "scatter"}),
    ("reduction", {"reduce", "reduce-window"}),
)
_MOVES = (
    ("write to a buffer", {"dynamic-update-slice"}),
    ("slice of a buffer", {"dynamic-slice", "slice"}),
    ("copy", {"copy", "transpose", "copy-start", "concatenate", "pad", "convert"}),
    ("fill", {"broadcast", "iota"}),
)
"""Categories of instructions without arithmetic. The first matching category applies."""
_EXPOSED, _SYNCHRONOUS = "exposed", "synchronous"
_MOVING = frozenset().union(*(opcodes for _, opcodes in _MOVES)) | {
    *("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"),
}


_EXPERT_KERNELS = ("grouped_matmul", "grouped_outer")
"""Prefixes of the names of kernels in `maxpipe.nn.expert_backends`."""
_RECURRENCE_KERNELS = "recurrence_"
"""Prefix of the names of kernels in `maxpipe.nn.recurrent_kernels`."""
RECURRENCE_EFFICIENCY = 0.4
"""Fraction of peak FLOP/s in the kernels of recurrent layers, from their instruction schedules on
v5p. The rate is that of the gated delta rule (`benchmarks/kernel_schedules.py`)."""


@dataclass(frozen=True)
class ProfileLine:
    """Profile entry, or sum of several entries."""

    kind: str
    """Category, such as `matmul`, `kernel` or `copy`; see `instruction_kind`."""
    region: str
    """Region of the program, such as `forward`, `backward`, `head` or `update`."""
    part: str
    """Name of the sublayer, or `rotary`; empty outside layers."""
    name: str
    """Name of the instruction; empty for a sum."""
    shape: str
    """Shape of the result."""
    count: float
    """Number of executions per step."""
    cycles: float
    """Cycles per step."""
    flops: float
    """FLOPs of matmuls and kernels per step."""
    of_peak: float
    """Fraction of peak FLOP/s that matmuls and kernels achieve. For kernels, the fraction is
    assumed."""

    @property
    def is_exposed(self) -> bool:
        """Return whether the cycles are exposed communication, which `CompileReport.cycles`
        excludes.
        """
        return self.kind.endswith((_EXPOSED, _SYNCHRONOUS))

    @property
    def location(self) -> str:
        """Return the program region and the sublayer of the operation."""
        return " ".join(filter(None, (self.region, self.part))) or "-"


def profile_lines(found: Profile, hardware: Hardware) -> list[ProfileLine]:
    """Return all entries sorted by cycles, or an empty list without cycle estimates."""
    clock = hardware.clock_ghz * 1e9
    if not found.cycles or not clock:
        return []
    peak = hardware.flops / clock
    listed = [_work_line(entry, peak, hardware) for entry in found.entries]
    listed += [
        ProfileLine(
            f"{collective.kind}, {_EXPOSED if collective.is_async else _SYNCHRONOUS}",
            collective.region,
            scopes.parse_part(collective.op_name),
            collective.name,
            f"{collective.num_bytes / 2**20:.1f} MiB in a group of {len(collective.group)}",
            collective.count,
            cycles=seconds * clock,
            flops=0.0,
            of_peak=0.0,
        )
        for collective, seconds in exposed_collectives(found, hardware)
        if seconds
    ]
    return sorted(listed, key=lambda line: -line.cycles)


def kernel_cycles(found: Profile, hardware: Hardware) -> float:
    """Return the number of cycles of all custom kernels at their expected FLOP rates."""
    return sum(_unestimated_cycles(entry, hardware) for entry in found.entries if entry.is_kernel)


def all_cycles(found: Profile, hardware: Hardware) -> float:
    """Return the number of cycles, including instructions for which the compiler has no estimate.

    Kernels run at their expected FLOP rates, and other instructions at the memory bandwidth.
    """
    return found.cycles + sum(
        _unestimated_cycles(entry, hardware) for entry in found.entries if not entry.cycles
    )


def _unestimated_cycles(entry: InstructionCost, hardware: Hardware) -> float:
    """Return the cycles of all executions of an instruction without an estimate."""
    declared = scopes.parse_cycles(entry.instruction.op_name)
    if entry.is_kernel and declared is not None:
        return declared * entry.count
    if entry.is_kernel:
        rate = hardware.flops * _kernel_efficiency(entry, hardware)
        seconds = entry.flops * entry.count / rate
    else:
        moved = entry.unestimated_bytes * entry.count
        seconds = moved / (hardware.memory_gb_per_second * 1e9)
    return seconds * hardware.clock_ghz * 1e9


def _kernel_efficiency(entry: InstructionCost, hardware: Hardware) -> float:
    """Return the fraction of the peak FLOP rate that a kernel is expected to reach."""
    if entry.instruction.name.startswith(_EXPERT_KERNELS):
        return hardware.expert_kernel_efficiency
    if entry.instruction.name.startswith(_RECURRENCE_KERNELS):
        return RECURRENCE_EFFICIENCY
    # Attention kernels return arrays with dims for sequences, heads, tokens and the elements of a
    # head.
    widths = [dims[3] for dims in array_dims(entry.instruction.shape) if len(dims) == 4]
    return hardware.attention_efficiency(*widths[:1])


def _work_line(entry: InstructionCost, peak: float, hardware: Hardware) -> ProfileLine:
    """Convert an entry to a `ProfileLine`, given the peak FLOPs per cycle."""
    flops = entry.flops * entry.count
    cycles = entry.cycles or _unestimated_cycles(entry, hardware)
    return ProfileLine(
        instruction_kind(entry),
        entry.region,
        scopes.parse_part(entry.instruction.op_name),
        entry.instruction.name,
        _short(entry.instruction.shape),
        entry.count,
        cycles,
        flops,
        of_peak=flops / peak / cycles if cycles else 0.0,
    )


def sum_by_kind(listed: Iterable[ProfileLine]) -> list[ProfileLine]:
    """Sum the entries by category and location, sorted by cycles."""
    grouped: dict[tuple[str, str, str], list[ProfileLine]] = defaultdict(list)
    for line in listed:
        grouped[line.kind, line.region, line.part].append(line)
    sums = [
        ProfileLine(
            *key,
            name="",
            shape="",
            count=sum(line.count for line in group),
            cycles=(cycles := sum(line.cycles for line in group)),
            flops=sum(line.flops for line in group),
            of_peak=sum(line.of_peak * line.cycles for line in group) / (cycles or 1.0),
        )
        for key, group in grouped.items()
    ]
    return sorted(sums, key=lambda line: -line.cycles)


def instruction_kind(entry: InstructionCost) -> str:
    """Return the category of an instruction or fusion.

    A fusion that contains a matmul is always a `matmul`. A fusion without arithmetic gets a
    data-movement category. All other fusions are `elementwise`.
    """
    if entry.is_kernel:
        return "kernel"
    if entry.flops:
        return "matmul"
    if entry.instruction.opcode == "reshape":  # changes the memory layout
        return "copy"
    inside = list(entry.fused.values()) or [entry.instruction]
    opcodes = {instruction.opcode for instruction in inside}
    for kind, own in _KINDS:
        if opcodes & own:
            return kind
    # Scalar arithmetic only computes offsets, so it is ignored.
    if all(
        instruction.opcode in _MOVING or instruction.shape.split("{")[0].endswith("[]")
        for instruction in inside
    ):
        return next((kind for kind, own in _MOVES if opcodes & own), "elementwise")
    return "elementwise"


def exposed_collectives(
    found: Profile, hardware: Hardware, slices: Sequence[int] = ()
) -> Iterator[tuple[Collective, float]]:
    """Yield each collective with its total exposed time in seconds.

    Two collectives of the same group cannot both overlap with the same work. Without cycle
    estimates, as on GPUs, only matmuls and kernels count as work. Kernels, for which no compiler
    has an estimate, run at their expected FLOP rates. `slices` contains the slice of
    each device in the program's mesh, if groups of device positions can span several slices.
    """
    clock = hardware.clock_ghz * 1e9
    left: dict[tuple[int, ...], dict[str, float]] = defaultdict(dict)
    for collective in found.collectives:
        if len(collective.group) < 2:
            continue
        spans = len({slices[place] for place in collective.group}) > 1 if slices else False
        seconds = collective_seconds(collective, hardware, between_slices=spans)
        hidden, free = 0.0, left[collective.group]
        for name, (cycles, flops) in collective.work.items():
            rate = hardware.flops * _efficiency_of(name, hardware)
            unused = free.get(name, cycles / clock if cycles and clock else flops / rate)
            taken = min(unused, seconds - hidden)
            free[name], hidden = unused - taken, hidden + taken
        yield collective, collective.count * (seconds - hidden)


def collective_seconds(
    collective: Collective, hardware: Hardware, *, between_slices: bool = False
) -> float:
    """Return the time in seconds of one collective at the published bandwidth of links or, between
    slices, of the network.
    """
    if between_slices or collective.between_slices:
        rate, latency = hardware.network_gb_per_second * 1e9, hardware.network_latency_us
        return collective.num_bytes / rate + latency * 1e-6
    rate = hardware.ways * hardware.link_gb_per_second * 1e9
    hops = hardware.hops(len(collective.group)) if "all-to-all" in collective.kind else 1.0
    return collective.num_bytes * hops / rate + hardware.latency_us * 1e-6


def _efficiency_of(name: str, hardware: Hardware) -> float:
    """Return the fraction of the peak FLOP rate of an instruction without a cycle estimate."""
    if name.startswith(_EXPERT_KERNELS):
        return hardware.expert_kernel_efficiency
    if name.startswith(_RECURRENCE_KERNELS):
        return RECURRENCE_EFFICIENCY
    return hardware.kernel_efficiency if hardware.is_tpu else hardware.matmul_efficiency


def _short(shape: str) -> str:
    """Format a shape without layouts. For a tuple, format only the first three members."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\]", shape)
    return " ".join(dict.fromkeys(arrays[:3])) + (" ..." if len(set(arrays)) > 3 else "")


def table(listed: Sequence[ProfileLine], number: int) -> list[str]:
    """Format the sums by category and location, and the largest entries, as report lines."""
    if not listed:
        return ["no entries, because the compiler provides no cycle estimates for these devices"]
    whole = sum(line.cycles for line in listed)

    def row(line: ProfileLine) -> tuple[str, ...]:
        rate = f"{line.of_peak:.0%}" if line.flops else ""
        cycles = (f"{line.cycles / 1e6:.1f}", f"{line.cycles / whole:.1%}")
        return line.kind, line.location, *cycles, f"{line.count:.0f}", rate

    head = ("kind", "place", "Mcycles", "share", "times", "of peak")
    sums = sum_by_kind(listed)
    lines = [
        f"cycles per step by category and location, {whole / 1e9:.3g} G including exposed "
        "communication:"
    ]
    lines += align_columns(head, [row(line) for line in sums[:number]])
    lines += ["", "largest entries:"]
    rows = [(*row(line), line.name, line.shape) for line in listed[:number]]
    return lines + align_columns((*head, "instruction", "result"), rows)


def align_columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Align the columns of a table."""
    every = [head, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]
