"""The largest entries of a compiled step: what the cycles are spent on, and where.

An entry is an instruction of the compiled program, times its executions. Its cycles are the
compiler's estimate; those of kernels, for which it has none, are their operations at the rate that
is assumed of them, and those of a collective its bytes at the links' published rate, as far as no
work is scheduled between its start and its done.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from maxpipe.hardware import Hardware
from maxpipe.parallel import scopes
from maxpipe.plan.hlo_profile import Collective, InstructionCost, Profile

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
"""What an instruction does that computes nothing, by the first that it has."""
_MOVING = frozenset().union(*(opcodes for _, opcodes in _MOVES)) | {
    *("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"),
}


@dataclass(frozen=True)
class ProfileLine:
    """An entry, or the sum of several."""

    kind: str
    """`matmul`, `kernel`, `copy` ...; see `kind_of`."""
    region: str
    """Scope of the program: `forward`, `backward`, `head`, `update` ..."""
    part: str
    """Of a layer: the name of a part, `rotary`; else empty."""
    name: str
    """Of the instruction; of a sum, empty."""
    shape: str
    """Of its result."""
    count: float
    """Executions in a step."""
    cycles: float
    """In a step."""
    flops: float
    """Of matmuls and kernels in a step."""
    of_peak: float
    """Share of the peak at which these run; of kernels it is assumed."""

    @property
    def location(self) -> str:
        """Scope and part."""
        return " ".join(filter(None, (self.region, self.part))) or "-"


def profile_lines(found: Profile, hardware: Hardware) -> list[ProfileLine]:
    """Every entry, most cycles first; none where the compiler estimates no cycles."""
    clock = hardware.clock_ghz * 1e9
    if not found.cycles or not clock:
        return []
    peak = hardware.flops / clock
    listed = [_work_line(each, peak, hardware.kernel_efficiency) for each in found.entries]
    listed += [
        ProfileLine(
            f"{each.kind}, {'left over' if each.is_async else 'waited for'}",
            each.region,
            scopes.parse_part(each.op_name),
            each.name,
            f"{each.num_bytes / 2**20:.1f} MiB in a group of {len(each.group)}",
            each.count,
            cycles=seconds * clock,
            flops=0.0,
            of_peak=0.0,
        )
        for each, seconds in exposed_collectives(found, hardware)
        if seconds
    ]
    return sorted(listed, key=lambda each: -each.cycles)


def _work_line(entry: InstructionCost, peak: float, kernels: float) -> ProfileLine:
    """`peak` operations in a cycle, of which kernels reach a share."""
    flops = entry.flops * entry.count
    cycles = entry.cycles or flops / (peak * kernels)
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
    """Sums over kind and place, most cycles first."""
    grouped: dict[tuple[str, str, str], list[ProfileLine]] = defaultdict(list)
    for each in listed:
        grouped[each.kind, each.region, each.part].append(each)
    sums = [
        ProfileLine(
            *key,
            name="",
            shape="",
            count=sum(each.count for each in group),
            cycles=(cycles := sum(each.cycles for each in group)),
            flops=sum(each.flops for each in group),
            of_peak=sum(each.of_peak * each.cycles for each in group) / (cycles or 1.0),
        )
        for key, group in grouped.items()
    ]
    return sorted(sums, key=lambda each: -each.cycles)


def instruction_kind(entry: InstructionCost) -> str:
    """What an instruction does; of a fusion, the most that is in it.

    A fusion with a product is a `matmul`, whatever it computes besides. Without arithmetic it is
    named after what it moves; else `elementwise`.
    """
    if entry.is_kernel:
        return "kernel"
    if entry.flops:
        return "matmul"
    inside = list(entry.fused.values()) or [entry.instruction]
    opcodes = {each.opcode for each in inside}
    for kind, own in _KINDS:
        if opcodes & own:
            return kind
    # Numbers that say where it reads or writes may be computed, too.
    if all(each.opcode in _MOVING or each.shape.split("{")[0].endswith("[]") for each in inside):
        return next((kind for kind, own in _MOVES if opcodes & own), "elementwise")
    return "elementwise"


def exposed_collectives(found: Profile, hardware: Hardware) -> Iterator[tuple[Collective, float]]:
    """Each collective, with the seconds of all its executions that nothing hides.

    No two collectives of one group hide behind the same cycles.
    """
    clock = hardware.clock_ghz * 1e9
    left: dict[tuple[int, ...], dict[str, float]] = defaultdict(dict)
    for each in found.collectives:
        if len(each.group) < 2:
            continue
        seconds = collective_seconds(each, hardware)
        hidden, free = 0.0, left[each.group]
        for name, cycles in each.cycles_of.items():
            unused = free.get(name, cycles / clock)
            taken = min(unused, seconds - hidden)
            free[name], hidden = unused - taken, hidden + taken
        yield each, each.count * (seconds - hidden)


def collective_seconds(each: Collective, hardware: Hardware) -> float:
    """Seconds of one collective at the links' rate, which is published."""
    if each.between_slices:
        rate, latency = hardware.network_gb_per_second * 1e9, hardware.network_latency_us
        return each.num_bytes / rate + latency * 1e-6
    rate = hardware.ways * hardware.link_gb_per_second * 1e9
    hops = hardware.hops(len(each.group)) if "all-to-all" in each.kind else 1.0
    return each.num_bytes * hops / rate + hardware.latency_us * 1e-6


def _short(shape: str) -> str:
    """Types and dims, without layouts; of a tuple the first three."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\]", shape)
    return " ".join(dict.fromkeys(arrays[:3])) + (" ..." if len(set(arrays)) > 3 else "")


def table(listed: Sequence[ProfileLine], number: int) -> list[str]:
    """Sums by kind and place, and the largest entries, as lines of a report."""
    if not listed:
        return ["no entries: the compiler estimates no cycles for these devices"]
    whole = sum(each.cycles for each in listed)

    def row(each: ProfileLine) -> tuple[str, ...]:
        rate = f"{each.of_peak:.0%}" if each.flops else ""
        cycles = (f"{each.cycles / 1e6:.1f}", f"{each.cycles / whole:.1%}")
        return each.kind, each.location, *cycles, f"{each.count:.0f}", rate

    head = ("kind", "place", "Mcycles", "share", "times", "of the peak")
    sums = sum_by_kind(listed)
    found = [f"cycles of a step by kind and place, {whole / 1e9:.3g} G with traffic in the open:"]
    found += align_columns(head, [row(each) for each in sums[:number]])
    found += ["", "largest entries:"]
    rows = [(*row(each), each.name, each.shape) for each in listed[:number]]
    return found + align_columns((*head, "instruction", "result"), rows)


def align_columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell."""
    every = [head, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]
