"""Classify the operations of a compiled train step by region, kind and mesh axes.

A trace contains the names and times of operations. The optimized HLO text of the program, which is
saved next to the trace, contains their origins: the named scopes in `maxpipe.parallel.scopes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from maxpipe.parallel import scopes
from maxpipe.planner.hlo_parser import Instruction, parse_hlo
from maxpipe.planner.hlo_profile import (
    Collective,
    PlacedInstruction,
    list_instructions,
    mesh_axes_of,
)
from maxpipe.planner.instruction_costs import instruction_kind

_CONTAINERS = frozenset(("while", "conditional", "call", "async-start", "async-done"))
_REGIONS = {scope: rf"/{scope}/" for scope in (scopes.PROLOGUE, *scopes.REGIONS)}
_SLOT_OF = {scope: kind for kind, scope in scopes.SLOTS.items()}
_SLOT_OF_PATH = re.compile(rf"/({'|'.join(scopes.SLOTS.values())})/")
_NAMES = {
    scopes.UPDATE: "optimizer update",
    scopes.PROLOGUE: "prologue layers",
    scopes.EMBED_GRAD: "embed",
    scopes.SEND: "messages between stages",
}
CONTROL_FLOW = "control flow"
"""Kind of loops, conditionals and calls, whose own time is the time outside their bodies."""


@dataclass(frozen=True)
class Operation:
    """An operation of a compiled program."""

    name: str
    kind: str
    """Category of compute, as in `instruction_costs.instruction_kind`, or type of the
    collective."""
    region: str = ""
    """Region of the program, as in `scopes.REGIONS`."""
    part: str = ""
    """Sublayer, such as `attention`; empty outside layers."""
    slot: str = ""
    """Type of the slot that runs the operation: F, B, I or W; empty outside slots."""
    axes: tuple[str, ...] = ()
    """Mesh axes of a collective."""
    starts: str = ""
    """Name of the operation that started this collective, if this operation completes it."""
    routes: Mapping[int, int] = field(default_factory=dict)
    """Sender of the message that each device receives, as positions in the mesh."""
    in_ticks: bool = False
    """Whether the tick loop contains the operation."""
    delays: str = ""
    """Name of the transfer between stages that waits for this operation, if it does nothing
    else."""
    once_per_tick: bool = False
    """Whether every device runs the operation exactly once in each tick."""
    once_per_step: bool = False
    """Whether every device runs the operation exactly once in each step."""

    @property
    def is_collective(self) -> bool:
        """Return whether the operation communicates with other devices."""
        return bool(self.axes)

    @property
    def is_container(self) -> bool:
        """Return whether the operation consists of other operations in the trace."""
        return self.kind == CONTROL_FLOW

    @property
    def is_send(self) -> bool:
        """Return whether the operation transfers a message between stages."""
        return self.is_collective and self.region == scopes.SEND

    @property
    def place(self) -> str:
        """Return the part of the model or of the program that the operation belongs to."""
        if self.is_collective and self.region != scopes.SEND:
            return f"{self.kind} over {'+'.join(self.axes)}"
        if self.part:
            return self.part
        slot = dict.fromkeys(scopes.SLOTS.values(), "layers, other")
        return _NAMES.get(self.region) or slot.get(self.region) or self.region or "other"


class Program:
    """Operations of a compiled program, keyed by name.

    Args:
        text: optimized HLO text.
        mesh: size of each mesh axis, outermost first.
    """

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self._module, self._mesh = parse_hlo(text), mesh
        found = re.match(r"HloModule (\S+?)[,\s]", text)
        self.name = found.group(1) if found else ""
        """Name of the HLO module."""
        placed = list(list_instructions(self._module, _REGIONS))
        self._tick_loop = _tick_loop(placed)
        self._tick_body = self._tick_loop.computation("body") if self._tick_loop else None
        self.operations: dict[str, Operation] = {}
        for each in placed:
            self._add(each)
        for each in list(self.operations.values()):
            if each.is_send and each.once_per_tick and not each.starts:
                self._mark_delays(self._tick_body or "", each.name, each.name)

    @cached_property
    def has_ticks(self) -> bool:
        """Return whether the program has a tick loop."""
        return any(each.once_per_tick for each in self.operations.values())

    def operation(self, name: str) -> Operation:
        """Return the operation with this name, or a placeholder without a place."""
        found = self.operations.get(name)
        if found is None:
            kind = re.sub(r"[.\d]+$", "", name).removeprefix("wrapped_") or name
            found = self.operations[name] = Operation(name, kind)
        return found

    def _add(self, placed: PlacedInstruction) -> None:
        op, region = placed.cost.instruction, placed.cost.region
        container = op.opcode in _CONTAINERS
        slot = _SLOT_OF_PATH.search(placed.op_name)
        operation = Operation(
            op.name,
            CONTROL_FLOW if container else instruction_kind(placed.cost),
            region,
            self._part(placed),
            _SLOT_OF[slot.group(1)] if slot and region != scopes.PROLOGUE else "",
            in_ticks=self._tick_loop in placed.loops,
            once_per_tick=not container and placed.computation == self._tick_body,
            once_per_step=not container and placed.computation == self._module.entry,
        )
        if placed.collective is not None:
            operation = self._collective(operation, placed.collective, op)
        elif (start := self._start_of(op, placed)) is not None:
            operation = replace(
                operation, kind=start.kind, axes=start.axes, starts=start.name, region=start.region
            )
        self.operations[op.name] = operation

    def _mark_delays(self, computation: str, name: str, transfer: str) -> None:
        """Mark the operations in the scope of the messages that a transfer waits for."""
        for operand in self._module.computations[computation][name].operands:
            operation = self.operations.get(operand)
            if operation is None or operation.is_collective or operation.region != scopes.SEND:
                continue
            self.operations[operand] = replace(operation, delays=transfer)
            op = self._module.computations[computation][operand]
            called = (*op.branches, *map(op.computation, ("to_apply", "body", "condition")))
            for branch in filter(None, called):
                for inner in self._module.computations.get(branch, {}):
                    if (known := self.operations.get(inner)) is not None:
                        self.operations[inner] = replace(known, delays=transfer)
            self._mark_delays(computation, operand, transfer)

    def _part(self, placed: PlacedInstruction) -> str:
        """Return the sublayer of an operation. A compiler that rewrites an operation may drop its
        origin, so the origins of fused operations and of operands are also used.
        """
        op, fused = placed.cost.instruction, placed.cost.fused.values()
        parts = [scopes.parse_part(name) for name in (placed.op_name, *(f.op_name for f in fused))]
        if not op.op_name:
            known = (self.operations.get(name) for name in op.operands)
            parts += [operand.part for operand in known if operand is not None]
        return next(filter(None, parts), "")

    def _collective(
        self, operation: Operation, collective: Collective, op: Instruction
    ) -> Operation:
        members = [member for member in collective.group if member < self._module.num_devices]
        axes = mesh_axes_of(members, self._mesh) if len(members) > 1 else ()
        return replace(
            operation,
            kind=collective.kind,
            axes=axes,
            part=scopes.parse_part(collective.op_name),
            routes=self._routes(op),
        )

    def _routes(self, op: Instruction) -> dict[int, int]:
        text = op.attributes
        if "source_target_pairs" not in text and (inner := op.computation("calls")):
            text = "".join(each.attributes for each in self._module.computations[inner].values())
        listed = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
        pairs = re.findall(r"\{(\d+),(\d+)\}", listed.group(1)) if listed else []
        return {int(target): int(source) for source, target in pairs}

    def _start_of(self, op: Instruction, placed: PlacedInstruction) -> Operation | None:
        """Return the collective that an operation completes, or None."""
        ends = op.opcode.endswith("-done") or any(
            'custom_call_target="AsyncCollectiveDone"' in inner.attributes
            for inner in placed.cost.fused.values()
        )
        starts = (self.operations.get(name) for name in op.operands if ends)
        return next((each for each in starts if each is not None and each.is_collective), None)


def _tick_loop(placed: list[PlacedInstruction]) -> Instruction | None:
    """Return the innermost loop around the loops over the layers of a slot."""
    slots = frozenset(scopes.SLOTS.values())
    regions = {each.cost.instruction.name: each.cost.region for each in placed}
    for each in placed:
        op = each.cost.instruction
        if op.opcode != "while" or each.cost.region not in slots:
            continue
        outer = [loop for loop in each.loops if regions[loop.name] not in slots]
        if outer:
            return outer[-1]
    return None
