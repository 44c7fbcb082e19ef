"""Memory of one device during a train step by kind: state, batch, saved activations, gradients.

The sizes of the arguments are those of the arrays. The temporary memory is divided by the buffer
assignment of the compiled program: each buffer belongs to the scope in which it was created. A
region that several buffers use at different times is counted for the one that lives longest, which
is a buffer of the tick loop.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.parallel import scopes
from maxpipe.planner.instruction_costs import align_columns
from maxpipe.planner.memory_terms import gib

_BUFFER_NAMES = {
    scopes.SAVED: "saved activations",
    scopes.DEFERRED: "deferred weight gradients",
    scopes.GRADIENTS: "gradients",
    scopes.WINDOW: "weight prefetch window",
    scopes.INBOX: "messages between stages",
}
_BUFFER = re.compile(rf"/({'|'.join(_BUFFER_NAMES)})/")
_WRITTEN = {
    scopes.FORWARD: scopes.SAVED,
    scopes.INPUT_GRAD: scopes.DEFERRED,
    scopes.BACKWARD: scopes.GRADIENTS,
    scopes.WEIGHT_GRAD: scopes.GRADIENTS,
}
"""Buffer that the layers of each slot type write."""
_WRITE = re.compile(
    rf"/({'|'.join(_WRITTEN)})/while/body/(?:.*/)?(?:jit\(dynamic_update_index_in_dim\)/)?"
    r"dynamic_update_slice$"
)
_REGION = re.compile(rf"/({'|'.join((scopes.PROLOGUE, *scopes.REGIONS))})/")
_OTHER = "other"


@dataclass(frozen=True)
class _Buffer:
    """A buffer in the temporary memory."""

    kind: str
    offset: int
    size: int

    @property
    def is_long_lived(self) -> bool:
        return self.kind in _BUFFER_NAMES.values()


def memory_by_kind(arguments: Mapping[str, Iterable[Any]], program: Any) -> dict[str, float]:
    """Return the memory of one device by kind in bytes, largest first.

    Args:
        arguments: arrays of the train step, such as parameters and optimizer state, by kind.
        program: compiled train step.
    """
    sizes = {kind: float(sum(map(_shard_bytes, arrays))) for kind, arrays in arguments.items()}
    stats = program.memory_analysis()
    if stats is not None:
        known = _temporaries(program, stats)
        for kind, size in known.items():
            sizes[kind] = sizes.get(kind, 0.0) + size
        sizes[f"{_OTHER} temporary memory"] = stats.temp_size_in_bytes - sum(known.values())
        sizes["outputs"] = stats.output_size_in_bytes - stats.alias_size_in_bytes
        sizes["program"] = stats.generated_code_size_in_bytes
    return {
        kind: size for kind, size in sorted(sizes.items(), key=lambda item: -item[1]) if size > 0
    }


def memory_lines(sizes: Mapping[str, float]) -> list[str]:
    """Return a table of the memory of one device by kind."""
    whole = sum(sizes.values()) or 1.0
    rows = [(kind, gib(size), f"{size / whole:.1%}") for kind, size in sizes.items()]
    return align_columns((f"memory of one device: {gib(whole)}", "", ""), rows)


def _shard_bytes(array: Any) -> int:
    shape = array.sharding.shard_shape(array.shape)
    size = array.dtype.itemsize
    for dim in shape:
        size *= dim
    return size


def _temporaries(program: Any, stats: Any) -> dict[str, float]:
    """Return the temporary memory by kind, as far as the buffer assignment is known."""
    assignment = getattr(stats, "serialized_buffer_assignment_proto", b"")
    if not assignment:
        return {}
    module = program.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    origins = dict(_origins(module))
    buffers = {}
    for number, value in _fields(assignment):
        if number == 1:  # logical_buffers
            entry = dict(_fields(value))
            instruction = dict(_fields(entry[3])).get(4, 0)
            buffers[entry.get(1, 0)] = _kind(origins.get(instruction, ""))
    sizes: dict[str, float] = defaultdict(float)
    for number, value in _fields(assignment):
        if number == 3 and not _is_argument(value):  # buffer_allocations
            for kind, size in _divide(list(_assigned(value, buffers))).items():
                sizes[kind] += size
    whole, limit = sum(sizes.values()), stats.temp_size_in_bytes
    scale = min(1.0, limit / whole) if whole else 0.0
    return {kind: size * scale for kind, size in sizes.items()}


def _is_argument(allocation: bytes) -> bool:
    """Return whether an allocation is an argument, an output or a constant."""
    flags = {number for number, value in _fields(allocation) if number in (3, 5, 7, 12) and value}
    return bool(flags)


def _assigned(allocation: bytes, kinds: Mapping[int, str]) -> Iterator[_Buffer]:
    for number, value in _fields(allocation):
        if number == 9:
            entry = dict(_fields(value))
            yield _Buffer(kinds.get(entry.get(1, 0), _OTHER), entry.get(2, 0), entry.get(3, 0))


def _divide(buffers: list[_Buffer]) -> dict[str, float]:
    """Return the bytes of each kind; overlapping regions belong to the longest-lived buffer."""
    buffers.sort(key=lambda buffer: (not buffer.is_long_lived, -buffer.size))
    edges = sorted({edge for each in buffers for edge in (each.offset, each.offset + each.size)})
    sizes: dict[str, float] = defaultdict(float)
    place = {edge: number for number, edge in enumerate(edges)}
    free = [True] * len(edges)
    for each in buffers:
        for number in range(place[each.offset], place[each.offset + each.size]):
            if free[number]:
                free[number] = False
                sizes[each.kind] += edges[number + 1] - edges[number]
    return sizes


def _kind(op_name: str) -> str:
    """Return the kind of a buffer that an operation with this origin creates.

    XLA merges equal empty buffers, and copies them before the loop. A loop over layers that writes
    to such a copy identifies it.
    """
    if found := _BUFFER.search(op_name):
        return _BUFFER_NAMES[found.group(1)]
    if found := _WRITE.search(op_name):
        return _BUFFER_NAMES[_WRITTEN[found.group(1)]]
    place = scopes.parse_part(op_name)
    found = _REGION.search(op_name)
    place = place or (found.group(1) if found else "")
    return f"temporary arrays, {place or _OTHER}"


def _origins(module: bytes) -> Iterator[tuple[int, str]]:
    """Yield the ID and the op_name of each instruction of a serialized HloModuleProto."""
    for number, computation in _fields(module):
        if number != 3:
            continue
        for inner, instruction in _fields(computation):
            if inner == 2:
                entry = dict(_fields(instruction))
                metadata = dict(_fields(entry[7])) if 7 in entry else {}
                yield entry.get(35, 0), metadata.get(2, b"").decode(errors="replace")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a serialized protocol buffer."""
    place, end = 0, len(data)

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < end:
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
        elif wire == 2:
            size = varint()
            yield number, data[place : place + size]
            place += size
        else:
            size = 8 if wire == 1 else 4
            yield number, struct.unpack_from("<d" if wire == 1 else "<f", data, place)[0]
            place += size
