"""Compute the costs of a compiled program from its optimized HLO text.

The profiler starts at the entry computation of `compiled.as_text()` and multiplies the costs of
loop bodies by their trip counts. TPU programs contain a cycle estimate for every compute
instruction but not for synchronous collectives, so cycles and bytes are reported separately. Trip
counts of layer loops are dynamic, so the caller passes their means, as well as the fraction of
ticks in which each conditional branch runs.

    compiled = steps.compile_train()
    profile = profile_program(parse_hlo(compiled.as_text()), trips={r"/forward/while$": 10 / 3})
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from maxpipe.parallel import scopes
from maxpipe.planner.hlo_parser import (
    Computation,
    Instruction,
    Module,
    array_bytes,
    array_dims,
    group_between_slices,
    group_of,
    split_operands,
)

COLLECTIVE_KINDS = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all"),
    "collective-permute",
)
BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""Names that XLA for TPU uses for collectives over the host network."""
_COMPUTE = {"fusion", "while", "conditional", "call", "dot", "convolution", "custom-call"}
_UNESTIMATED = {"fusion", "gather", "reshape", "scatter", "sort"}
"""Instructions for which the TPU compiler may have no cycle estimate. Such an instruction moves
data: a gather or scatter of rows, a sort, or a change of the memory layout."""
_FEW_BYTES = 2**16
"""Results up to this size are ignored."""
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_ON_HOST = "S(5)"
_MOVES = ("copy-start", "dynamic-slice-start", "dynamic-update-slice-start")
TO_HOST, FROM_HOST = "to host", "from host"


@dataclass(frozen=True)
class InstructionCost:
    """An instruction, its number of executions and its FLOPs."""

    instruction: Instruction
    region: str
    count: float
    """Number of executions per run of the program."""
    flops: float = 0.0
    """FLOPs of the matmuls in one execution; a multiply-add counts as 2. For a kernel, the count is
    read from its scope name or its cost estimate."""
    fused: Computation = field(default_factory=dict)
    """Instructions in a fusion; empty for other instructions."""
    unestimated_bytes: int = 0
    """Bytes that one execution reads and writes, if the compiler has no cycle estimate."""

    @property
    def is_kernel(self) -> bool:
        """Return whether the instruction is a custom kernel without a cycle estimate."""
        return self.instruction.opcode == "custom-call" and not _is_gemm(self.instruction)

    @property
    def cycles(self) -> float:
        """Return the total estimated cycles across all executions."""
        return self.instruction.cycles * self.count

    @property
    def num_bytes(self) -> float:
        """Return the size in bytes of the largest result, times the execution count."""
        return max(array_bytes(self.instruction.shape), default=0) * self.count


@dataclass(frozen=True)
class Collective:
    """A collective operation and its costs."""

    kind: str
    """Type of the collective, a member of `COLLECTIVE_KINDS`."""
    name: str
    op_name: str
    region: str
    count: float
    group: tuple[int, ...]
    """Positions of the first group's devices in the program's mesh; see `between_slices`."""
    num_bytes: float
    """Bytes sent by each device in one execution, assuming a ring algorithm. Ragged collectives are
    assumed to send their full capacity, spread evenly over all devices."""
    is_async: bool
    """Whether separate instructions start and end the collective."""
    between: tuple[str, ...] = ()
    """Compute instructions between the start and the end of the collective, in scheduled order."""
    work: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Estimated cycles and FLOPs of each instruction in `between`, including those in loops. An
    instruction that overlaps with several collectives can be counted once by its name."""
    between_slices: bool = False
    """Whether the hosts transfer the data between slices. If so, `group` contains device IDs."""

    @property
    def cycles_between(self) -> float:
        """Return the total estimated cycles of the instructions in `between`."""
        return sum(cycles for cycles, _ in self.work.values())

    @property
    def flops_between(self) -> float:
        """Return the FLOPs of the matmuls and kernels among the instructions in `between`."""
        return sum(flops for _, flops in self.work.values())

    @property
    def total_bytes(self) -> float:
        """Return the bytes sent by each device in one run of the program."""
        return self.num_bytes * self.count

    @property
    def stride(self) -> int:
        """Return the distance between neighbors in the group, which distinguishes mesh axes of
        equal size.
        """
        return min((b - a for a, b in itertools.pairwise(sorted(self.group))), default=0)


@dataclass(frozen=True)
class HostTransfer:
    """An asynchronous transfer to or from host memory."""

    kind: str
    """Direction of the transfer: `TO_HOST` or `FROM_HOST`."""
    name: str
    region: str
    count: float
    num_bytes: float
    """Bytes transferred in one execution."""
    cycles_by_instruction: Mapping[str, float]
    """Estimated cycles of each instruction between the transfer's start and end, including those in
    loops."""


@dataclass
class Profile:
    """Costs of one run of a program on one device."""

    entries: list[InstructionCost] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    copies: list[InstructionCost] = field(default_factory=list)
    """Copies and transposes of buffers inside loops."""
    transfers: list[HostTransfer] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)
    """`op_name` of each loop whose trip count is unknown. The bodies of these loops are counted
    once."""

    @property
    def cycles(self) -> float:
        """Return the total estimated cycles, excluding synchronous collectives and kernels."""
        return sum(entry.cycles for entry in self.entries)

    @property
    def flops(self) -> float:
        """Return the total FLOPs of matmuls and kernels."""
        return sum(entry.flops * entry.count for entry in self.entries)

    @property
    def kernel_flops(self) -> float:
        """Return the total FLOPs of kernels."""
        return sum(entry.flops * entry.count for entry in self.entries if entry.is_kernel)

    def largest(self, number: int) -> list[InstructionCost]:
        """Return the entries with the most cycles across all executions."""
        return sorted(self.entries, key=lambda entry: -entry.cycles)[:number]

    def bytes_moved(self, *kinds: str, group_size: int | None = None) -> float:
        """Return the bytes sent by collectives of the given types and group size (default: all)."""
        return sum(
            collective.total_bytes
            for collective in self.collectives
            if collective.kind in (kinds or COLLECTIVE_KINDS)
            and group_size in (None, len(collective.group))
        )


def profile_program(
    module: Module,
    *,
    trips: Mapping[str, float] | None = None,
    shares: Mapping[str, float] | None = None,
    windows: Mapping[int, float] | None = None,
    regions: Mapping[str, str] | None = None,
    copy_bytes: int = 2**20,
) -> Profile:
    """Profile a program, starting at its entry computation.

    Args:
        module: a parsed HLO module.
        trips: mean trip counts, keyed by patterns for a loop's `op_name`. The given means override
            the trip counts in the HLO text; the first match applies.
        shares: fraction of executions that run the most expensive branch, keyed by patterns for a
            conditional's `op_name` (default: 1). All other executions run the cheapest branch.
        windows: fraction of attention layers that use each window size, if windows differ between
            layers.
        regions: patterns for `op_name`, keyed by region name. Called computations belong to the
            region of their caller.
        copy_bytes: copies inside loops are listed only if they are at least this many bytes.
    """
    walk = _Walk(module, trips or {}, shares or {}, windows or {}, regions or {}, copy_bytes)
    walk.visit(module.entry, 1.0, "", 0)
    return walk.profile


class PlacedInstruction(NamedTuple):
    """An instruction that a device executes, and its place in the program."""

    cost: InstructionCost
    collective: Collective | None
    op_name: str
    """Origin of the instruction. An instruction without metadata has the origin of its caller."""
    loops: tuple[Instruction, ...]
    """Loops that contain the instruction, outermost first."""
    computation: str
    """Name of the computation that contains the instruction."""


def list_instructions(module: Module, regions: Mapping[str, str]) -> Iterator[PlacedInstruction]:
    """Yield each instruction of each computation that the program can execute, callers first.

    Costs are per execution. The instructions in a fusion are not executed on their own.
    """
    walk = _Walk(module, {}, {}, {}, regions, copy_bytes=0)
    pending: list[tuple[str, str, str, tuple[Instruction, ...]]] = [(module.entry, "", "", ())]
    visited = set()
    while pending:
        name, region, caller, loops = pending.pop()
        if name in visited or name not in module.computations:
            continue
        visited.add(name)
        computation = module.computations[name]
        for op in computation.values():
            own_region = region or walk.region(op)
            origin = op.op_name or caller
            inside = loops
            if op.opcode == "while":
                inside = (*loops, op)
                called = (op.computation("body"), op.computation("condition"))
            elif op.opcode in ("conditional", "call"):
                called = (*op.branches, op.computation("to_apply"))
            else:
                called = ()
            pending += [(each, own_region, origin, inside) for each in called if each]
            yield PlacedInstruction(
                *walk.describe(op, computation, own_region), origin, loops, name
            )


@dataclass
class _Walk:
    module: Module
    trips: Mapping[str, float]
    shares: Mapping[str, float]
    windows: Mapping[int, float]
    regions: Mapping[str, str]
    copy_bytes: int
    costs: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)

    def visit(self, name: str, count: float, region: str, depth: int) -> None:
        """Record a computation that runs `count` times inside `depth` nested loops."""
        computation = self.module.computations[name]
        for op in computation.values():
            self._record(op, computation, count, region or self.region(op), depth)

    def _record(
        self, op: Instruction, computation: Computation, count: float, region: str, depth: int
    ) -> None:
        if op.opcode in ("while", "conditional", "call"):
            if op.opcode == "while" and self._known_trips(op) is None:
                self.profile.unknown_loops.append(op.op_name or op.name)
            for name, times in self._called(op):
                self.visit(name, count * times, region, depth + (op.opcode == "while"))
            return
        flops = self._flops(op, computation)
        moved = 0 if op.cycles or flops else self._unestimated_bytes(op)
        # A kernel without matmuls can declare its cycles.
        declared = op.opcode == "custom-call" and scopes.parse_cycles(op.op_name)
        if op.cycles or flops or moved or declared:
            inside = self._inside(op) if op.opcode == "fusion" else {}
            self.profile.entries.append(InstructionCost(op, region, count, flops, inside, moved))
        if collective := self._collective(op, computation):
            self.profile.collectives.append(replace(collective, region=region, count=count))
        if transfer := self._transfer(op, computation):
            self.profile.transfers.append(replace(transfer, region=region, count=count))
        if depth and self._is_copy(op) and max(array_bytes(op.shape)) >= self.copy_bytes:
            self.profile.copies.append(InstructionCost(op, region, count))

    def describe(
        self, op: Instruction, computation: Computation, region: str
    ) -> tuple[InstructionCost, Collective | None]:
        """Return the cost of one execution, and the collective that the instruction starts."""
        inside = self._inside(op) if op.opcode == "fusion" else {}
        cost = InstructionCost(op, region, 1.0, self._flops(op, computation), inside)
        return cost, self._collective(op, computation)

    def region(self, op: Instruction) -> str:
        """Return the region of an instruction, or an empty string."""
        return next((k for k, v in self.regions.items() if re.search(v, op.op_name)), "")

    # Control flow.

    def _called(self, op: Instruction) -> Iterator[tuple[str, float]]:
        """Yield each called computation (for a loop, the body) and its number of executions per
        call.
        """
        if op.opcode == "while":
            trips = self._known_trips(op)
            yield op.computation("body") or "", 1.0 if trips is None else trips
        elif op.opcode == "conditional" and scopes.is_window_switch(op.op_name):
            # The compiler may have reordered the branches.
            sizes = [self._window(name) for name in op.branches]
            known = {size: self.windows.get(size or 0, 0.0) for size in sizes}
            whole = sum(known.values())
            for name, size in zip(op.branches, sizes, strict=True):
                yield name, known[size] / whole if whole else 1 / len(sizes)
        elif op.opcode == "conditional":
            ordered = sorted(op.branches, key=self.cost)
            share = _first_match(self.shares, op.op_name, 1.0)
            yield ordered[-1], share
            if share < 1:
                yield ordered[0], 1 - share
        elif name := op.computation("to_apply"):
            yield name, 1.0

    def _window(self, branch: str) -> int | None:
        """Return the window size encoded in a branch's scope names, or None if no scope name
        contains one.
        """
        found = (
            scopes.parse_window(op.op_name) for op in self.module.computations[branch].values()
        )
        return next((size for size in found if size is not None), None)

    def _known_trips(self, loop: Instruction) -> float | None:
        if (trips := _first_match(self.trips, loop.op_name, -1.0)) >= 0:
            return trips
        if (named := scopes.parse_trips(loop.op_name)) is not None:
            return named
        if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes):
            return float(known.group(1))
        # The counter of a counted loop starts at 0, and the loop ends when the counter reaches a
        # constant.
        condition = self.module.computations.get(loop.computation("condition") or "", {})
        root = next(reversed(condition.values()), None)
        if root is None or root.opcode not in ("compare", "fusion"):
            return None
        inside = self._inside(root)
        known = [condition[name] for name in root.operands if name in condition]
        constants = [c for c in (*known, *inside.values()) if c.opcode == "constant"]
        values = [c.operands[0] for c in constants if re.match(r"[su]\d+\[\]", c.shape)]
        return float(values[0]) if len(values) == 1 else None

    def cost(self, name: str) -> tuple[float, float, int]:
        """Return the cycles, FLOPs and number of instructions of one execution, as a sort key."""
        if name not in self.costs:
            computation = self.module.computations[name]
            self.costs[name] = self._cost_of(computation.values(), computation)
        return self.costs[name]

    def _cost_of(
        self, instructions: Iterable[Instruction], computation: Computation
    ) -> tuple[float, float, int]:
        cycles, flops, size = 0.0, 0.0, 0
        for op in instructions:
            own = self._instruction_cost(op, computation)
            cycles, flops, size = cycles + own[0], flops + own[1], size + own[2]
        return cycles, flops, size

    def _work_of(
        self, instructions: Iterable[Instruction], computation: Computation
    ) -> dict[str, tuple[float, float]]:
        """Return the cycles and FLOPs of each instruction."""
        return {op.name: self._instruction_cost(op, computation)[:2] for op in instructions}

    def _instruction_cost(
        self, op: Instruction, computation: Computation
    ) -> tuple[float, float, int]:
        if op.opcode not in ("while", "conditional", "call"):
            return op.cycles, self._flops(op, computation), 1
        parts = [(self.cost(name), times) for name, times in self._called(op)]
        return (
            sum(cycles * times for (cycles, _, _), times in parts),
            sum(flops * times for (_, flops, _), times in parts),
            1 + sum(size for (_, _, size), _ in parts),
        )

    # Work.

    def _flops(self, op: Instruction, computation: Computation) -> float:
        """Return the FLOPs of one execution, including the matmuls in a fusion."""
        if op.opcode == "fusion":
            # Kernels are not inside fusions. The custom calls in a fusion that prepares a kernel
            # contain the kernel's FLOPs in their names. These FLOPs are already counted for the
            # kernel.
            inside = self._inside(op)
            own = [other for other in inside.values() if other.opcode != "custom-call"]
            return sum(self._flops(other, inside) for other in own)
        if op.opcode == "custom-call":
            if (named := scopes.parse_flops(op.op_name)) is not None:
                return named
            if _is_gemm(op):
                return 2.0 * _products(op, array_dims(computation[op.operands[0]].shape)[0])
            own = re.search(r'"cost_estimate":\{"flops":"(\d+)"', op.attributes)
            return float(own.group(1)) if own else 0.0
        if op.opcode not in ("dot", "convolution"):
            return 0.0
        left, right = (array_dims(computation[name].shape)[0] for name in op.operands[:2])
        return 2.0 * _products(op, left, right)

    # Data movement.

    @cached_property
    def _has_estimates(self) -> bool:
        computations = self.module.computations.values()
        return any(op.cycles for computation in computations for op in computation.values())

    def _unestimated_bytes(self, op: Instruction) -> int:
        """Return twice the size of the result, since each of its bytes is read and written."""
        is_counted = op.opcode in _UNESTIMATED and op.num_bytes > _FEW_BYTES
        return 2 * op.num_bytes if is_counted and self._has_estimates else 0

    def _collective(self, op: Instruction, computation: Computation) -> Collective | None:
        if op.opcode == "recv":
            return self._cross_slice_collective(op, computation)
        wrapped = self._wrapped_collective(op)
        source = op if wrapped is None else wrapped
        kind = source.opcode.removesuffix("-start")
        if kind not in COLLECTIVE_KINDS:
            return None
        group = group_of(source.attributes, self.module.num_devices)
        operands = [computation[name] for name in op.operands if name in computation]
        if wrapped is not None and op.opcode in ("fusion", "call-start"):
            # Use the operands of the inner collective, because fusions can have additional operands
            # and calls have none.
            operands = [self._inside(op)[name] for name in wrapped.operands]
        if op.opcode == "fusion" and kind == "all-reduce" and self._keeps_a_slice(op):
            kind = "reduce-scatter"  # as emitted by XLA for TPU
        if kind == "ragged-all-to-all":
            operands = operands[:1]  # omit the output, size and offset operands
        size = sum(operand.num_bytes for operand in operands)
        # GPU programs have a `start` and a `done` instruction even for synchronous collectives.
        is_async = self._is_start(op) and '"is_sync":true' not in op.attributes
        between = self._between(op, computation) if is_async else []
        return Collective(
            kind=kind,
            name=op.name,
            op_name=source.op_name or op.op_name,
            region="",
            count=0.0,
            group=group,
            num_bytes=_sent_bytes(kind, size, len(group)),
            is_async=is_async,
            between=tuple(other.name for other in between),
            work=self._work_of(between, computation),
        )

    def _cross_slice_collective(
        self, recv: Instruction, computation: Computation
    ) -> Collective | None:
        """Return a cross-slice collective, which is implemented as a send and a receive via the
        host.
        """
        settings = dict(re.findall(r'_xla_(\w+)="?([^"]*?)"?(?=,_xla_|\}, |\}$)', recv.attributes))
        kind = BETWEEN_SLICES.get(settings.get("megascale_transfer_type", ""))
        if kind is None:
            return None
        same = f'_xla_host_transfer_rendezvous="{settings["host_transfer_rendezvous"]}"'
        send = next(
            other
            for other in computation.values()
            if other.opcode == "send" and same in other.attributes
        )
        group = group_between_slices(settings["megascale_target"])
        between = self._between(recv, computation)
        return Collective(
            kind=kind,
            name=recv.name,
            op_name=settings["host_transfer_rendezvous"],
            region="",
            count=0.0,
            group=group,
            num_bytes=_sent_bytes(kind, computation[send.operands[0]].num_bytes, len(group)),
            is_async=True,
            between=tuple(other.name for other in between),
            work=self._work_of(between, computation),
            between_slices=True,
        )

    def _transfer(self, op: Instruction, computation: Computation) -> HostTransfer | None:
        """Return the host transfer of an array, or of a slice of a buffer in host memory."""
        if op.opcode not in _MOVES:
            return None
        done = next(other for other in computation.values() if op.name in other.operands)
        writes = op.opcode == "dynamic-update-slice-start"
        to_host = _ON_HOST in done.shape
        if not writes and to_host == (_ON_HOST in computation[op.operands[0]].shape):
            return None
        names = list(computation)
        between = names[names.index(op.name) + 1 : names.index(done.name)]
        work = [computation[name] for name in between if computation[name].opcode in _COMPUTE]
        return HostTransfer(
            kind=TO_HOST if to_host else FROM_HOST,
            name=op.name,
            region="",
            count=0.0,
            num_bytes=(computation[op.operands[1]] if writes else done).num_bytes,
            cycles_by_instruction={
                name: cycles for name, (cycles, _) in self._work_of(work, computation).items()
            },
        )

    def _wrapped_collective(self, op: Instruction) -> Instruction | None:
        """Return the collective inside a fusion, an asynchronous call or a sparse-core call."""
        if op.opcode not in ("fusion", "async-start", "call-start"):
            return None
        inside = self._inside(op).values()
        # A TPU can run one collective inside several fusions. The first fusion starts the
        # collective, later fusions continue the collective during their own work, and the last
        # fusion ends it. The collective appears in all these fusions.
        for other in inside:
            if other.opcode.removesuffix("-start") in COLLECTIVE_KINDS:
                continues = "chain_id=" in other.attributes and not self._is_start(op)
                return None if continues else other
        return None

    def _keeps_a_slice(self, op: Instruction) -> bool:
        *_, root = self._inside(op).values()
        return root.opcode == "dynamic-slice"

    def _inside(self, op: Instruction) -> Computation:
        role = "to_apply" if op.opcode == "call-start" else "calls"
        return self.module.computations.get(op.computation(role) or "", {})

    def _is_start(self, op: Instruction) -> bool:
        return op.opcode.endswith("-start") or self._has(op, "AsyncCollectiveStart")

    def _is_done(self, op: Instruction) -> bool:
        if op.opcode == "copy-done":  # copies a buffer that is still in flight
            return False
        return op.opcode.endswith("-done") or self._has(op, "AsyncCollectiveDone")

    def _has(self, op: Instruction, target: str) -> bool:
        """Return whether the instruction is a fusion that contains this custom call."""
        inside = self._inside(op).values() if op.opcode == "fusion" else ()
        return any(f'custom_call_target="{target}"' in other.attributes for other in inside)

    def _between(self, start: Instruction, computation: Computation) -> list[Instruction]:
        """Return the compute instructions between a `start` and its `done` instruction."""
        names = list(computation)
        first = names.index(start.name)
        carriers, work = {start.name}, []
        for name in names[first + 1 :]:
            other = computation[name]
            if carriers.intersection(other.operands):
                if self._is_done(other):
                    return work
                carriers.add(name)  # only forwards the collective's state
            if other.opcode in _COMPUTE:
                work.append(other)
        # If the `done` instruction is in the next loop iteration, include the remainder of this
        # iteration.
        return work

    def _is_copy(self, op: Instruction) -> bool:
        if op.opcode == "copy-start":
            # A copy between memory spaces is a prefetch, whose cycles are not counted.
            spaces = {
                tuple(_MEMORY_SPACE.findall(part)) for part in split_operands(op.shape[1:-1])[:2]
            }
            return len(spaces) == 1
        kinds = {op.opcode} | {other.opcode for other in self._inside(op).values()}
        moves = {"copy", "transpose"}
        return bool(kinds & moves) and kinds <= moves | {"fusion", "parameter", "bitcast"}


def mesh_axes_of(members: Sequence[int] | np.ndarray, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which a device group extends.

    Args:
        members: positions of the group's devices in the flattened mesh.
        sizes: size of each mesh axis, outermost first.
    """
    places = np.array(np.unravel_index(np.asarray(members), tuple(sizes.values())))
    return tuple(axis for axis, row in zip(sizes, places, strict=True) if len(set(row)) > 1)


def _is_gemm(op: Instruction) -> bool:
    """Return whether the instruction is a cuBLAS matmul."""
    return op.opcode == "custom-call" and '"gemm_backend_config"' in op.attributes


_CONTRACTED = re.compile(
    r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([\d",]*)\]'
)


def _products(op: Instruction, left: tuple[int, ...], right: tuple[int, ...] = ()) -> int:
    """Return the number of multiplications in a matmul."""
    out = array_dims(op.shape)[0]
    if op.opcode != "convolution":
        listed = _CONTRACTED.search(op.attributes)
        dims = re.findall(r"\d+", "".join(filter(None, listed.groups()))) if listed else []
        return math.prod(out) * math.prod(left[int(dim)] for dim in dims)
    # XLA for TPU lowers matmuls to convolutions, with other dimensions as spatial dimensions.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    window = re.search(r"window=\{([^}]*)\}", op.attributes)
    assert labels is not None
    settings = dict(part.split("=") for part in window.group(1).split()) if window else {}
    dims = {
        dim: (left[labels[1].index(dim)], right[labels[2].index(dim)], size)
        for dim, size in zip(labels[3], out, strict=True)
        if dim.isdigit()
    }
    count = right[labels[2].index("i")]
    count *= math.prod(size for dim, size in zip(labels[3], out, strict=True) if dim in "bf")
    for dim, sizes in dims.items():
        count *= _pairings(*sizes, settings, int(dim))
    return count


def _pairings(length: int, kernel: int, out: int, settings: Mapping[str, str], dim: int) -> int:
    """Return the number of (input, kernel) products along one spatial dimension."""

    def setting(name: str, default: int) -> int:
        parts = settings.get(name, "").split("x")
        return int(parts[dim].partition("_")[0]) if parts != [""] else default

    stride, spread, pad = setting("stride", 1), setting("lhs_dilate", 1), setting("pad", 0)
    taps = np.arange(kernel) * setting("rhs_dilate", 1)
    where = np.arange(out)[:, None] * stride + taps - pad
    return int(((where >= 0) & (where <= (length - 1) * spread) & (where % spread == 0)).sum())


def _first_match(table: Mapping[str, float], text: str, default: float) -> float:
    return next((value for key, value in table.items() if re.search(key, text)), default)


def _sent_bytes(kind: str, operand_bytes: int, size: int) -> float:
    """Return the number of bytes that each device sends, assuming a ring algorithm."""
    around = (size - 1) / size
    match kind:
        case "all-gather":
            return operand_bytes * (size - 1)
        case "all-reduce":
            return 2 * operand_bytes * around
        case "collective-permute":
            return operand_bytes
        case _:
            return operand_bytes * around
