"""Parse optimized HLO text into computations, instructions and device groups.

`maxpipe.planner.hlo_profile` computes costs from the result.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_SLICE_IDS = 100_000
"""Device 4 has ID 100004 in the first slice, and ID 200004 in the second."""


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction in a computation."""

    name: str
    shape: str
    """Shape as printed in the HLO text. For a tuple, the shapes of all its members."""
    opcode: str
    operands: tuple[str, ...]
    """Names of the operands in the same computation; for a constant, its value."""
    attributes: str
    """Attribute string that follows the operands."""

    @cached_property
    def op_name(self) -> str:
        """Return the origin in the traced program, e.g. `jit(f)/while/body/add`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @cached_property
    def cycles(self) -> int:
        """Return the compiler's cycle estimate, or 0 if there is no estimate."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else 0

    @property
    def num_bytes(self) -> int:
        """Return the size of the result in bytes, without padding."""
        return sum(array_bytes(self.shape))

    def computation(self, role: str) -> str | None:
        """Return the name of the computation in the attribute `role`, such as `body`, `condition`
        or `calls`.
        """
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """Return the names of a conditional's branch computations."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(name.strip().lstrip("%") for name in listed.group(1).split(","))
        pair = (self.computation("true_computation"), self.computation("false_computation"))
        return tuple(name for name in pair if name)


Computation = dict[str, Instruction]
"""Instructions keyed by name, in printed order. In a scheduled module, this is the execution
order."""


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int


def array_dims(shape: str) -> list[tuple[int, ...]]:
    """Return the dimensions of each array in a printed shape."""
    return [tuple(int(dim) for dim in dims.split(",") if dim) for _, dims in _ARRAY.findall(shape)]


def array_bytes(shape: str) -> list[int]:
    """Return the size in bytes of each array in a printed shape. Tokens and opaque types are
    skipped.
    """
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        digits = re.search(r"\d+", kind)
        bits = int(digits.group()) if digits else 8 * (kind == "pred")
        count = math.prod(int(dim) for dim in dims.split(",") if dim)
        sizes.append(-(-count * bits // 8))
    return sizes


# --- parsing ---------------------------------------------------------------------

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*|=.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"^\}(?:, execution_thread=.*)?$")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


def parse_hlo(text: str) -> Module:
    """Parse the result of `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    current: list[str] | None = None
    name, entry, num_devices = "", "", 1
    for line in text.splitlines():
        if current is None:
            if line.startswith("HloModule"):
                num_devices = math.prod(int(number) for number in _DEVICES.findall(line))
            elif header := _COMPUTATION.match(line):
                name, current = header.group(2), []
                entry = name if header.group(1) else entry
        elif _END.match(line):
            found = [_instruction(each) for each in current]
            computations[name] = {each.name: each for each in found}
            current = None
        elif _INSTRUCTION.match(line):
            current.append(line)
        elif current:
            # A kernel's metadata contains line breaks. The cycle estimate and the origin are on
            # the last line.
            current[-1] += f"\n{line}"
    if not entry:
        raise ValueError("the text is not an HLO module, because no line starts with ENTRY")
    return Module(computations, entry, num_devices)


def _instruction(text: str) -> Instruction:
    found = _INSTRUCTION.match(text)
    assert found is not None
    name, text = found.group(1), text[found.end() :]
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    pieces = split_operands(rest[len(opcode) + 1 : end - 1])
    # In CPU programs, an operand is printed as `f32[8]{0} %name`. In TPU programs, the same operand
    # is printed as `%name`.
    operands = tuple(piece.split()[-1].lstrip("%") for piece in pieces)
    return Instruction(name, shape, opcode, operands, rest[end:])


def _closing(text: str, start: int) -> int:
    """Return the position after the bracket that closes the bracket at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def split_operands(text: str) -> list[str]:
    """Split operands at commas outside brackets, and drop comments such as `/*index=5*/`."""
    pieces, depth, start = [], 0, 0
    text = re.sub(r"/\*.*?\*/", "", text)
    for position, letter in enumerate(text + ","):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    return [piece for piece in pieces if piece.strip()]


# --- groups of devices -------------------------------------------------------------


_IOTA = r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?"


def group_of(attributes: str, num_devices: int) -> tuple[int, ...]:
    """Return the devices in the instruction's first device group. All other groups repeat its
    pattern with an offset.
    """
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return _ring(re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)))
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return tuple(int(member) for member in listed.group(1).split(",") if member)
    if found := re.search(r"replica_groups=" + _IOTA, attributes):
        return tuple(_iota(*found.groups())[0].tolist())
    if found := re.search(r"replica_groups=mesh\[(.*?)\](.*?)\{(.*?)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
        placed = re.search(r"device_ids=\(" + _IOTA, found.group(2))
        order = _iota(*placed.groups()) if placed else np.arange(math.prod(sizes.values()))
        used = re.findall(r"'(\w+)'", found.group(3))
        index = tuple(slice(None) if name in used else 0 for name in sizes)
        return tuple(np.ravel(order.reshape(tuple(sizes.values()))[index]).tolist())
    return tuple(range(num_devices))


def group_between_slices(target: str) -> tuple[int, ...]:
    """Return the device IDs in the first group of `{1,2}x{0:63}` or `{{100000->200032},...}`."""
    if found := re.match(r"\{([\d,]+)\}x\{(\d+)", target):
        return tuple(
            int(each) * _SLICE_IDS + int(found.group(2)) for each in found.group(1).split(",")
        )
    return _ring(re.findall(r"\{(\d+)->(\d+)\}", target))


def _ring(pairs: list[tuple[str, str]]) -> tuple[int, ...]:
    """Return the devices in the order in which a message from the first source reaches them."""
    after = {int(source): int(target) for source, target in pairs}
    members = [next(iter(after), 0)]
    while (target := after.get(members[-1])) is not None and target not in members:
        members.append(target)
    return tuple(members)


def _iota(shape: str, source: str | None, order: str | None) -> np.ndarray:
    """Return the array for `[4,8]<=[8,4]T(1,0)`: an iota over the source shape, transposed and
    reshaped.
    """
    dims = [int(dim) for dim in shape.split(",")]
    origin = [int(dim) for dim in source.split(",")] if source else dims
    numbers = np.arange(math.prod(origin)).reshape(origin)
    if order:
        numbers = numbers.transpose([int(dim) for dim in order.split(",")])
    # `device_ids=([4,8]T(1,0))` has no source shape, so the shape itself is transposed.
    return numbers.reshape(dims) if source else numbers
