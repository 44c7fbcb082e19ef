"""Read the peak memory of a compiled program from the text files that XLA dumps for it.

XLA writes these files before it generates code, which dominates the compile time for TPUs. The peak
is within 0.2 MiB of `peak_memory_in_bytes` in the program's memory analysis.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

PREFIX = "after_optimizations"
LAST = f"*.{PREFIX}_after_buffer_assignment.txt"
"""File that XLA writes after the files that this module reads."""
_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(\w+\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_RANGE = re.compile(r"^\s+([\w.\-]+)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)


def read_sizes(folder: Path) -> tuple[int, int, int]:
    """Return the (argument, peak, allocated) bytes in device memory of the program dumped to a
    folder.

    The allocated bytes also include the gaps between temporaries. Values that share memory at the
    same time, such as the operand and the result of an in-place update, are counted once.
    """
    arguments, allocated, placed = _placed_values(_read(folder, "buffer-assignment"))
    ranges = _read(folder, "live-range").partition("BufferLiveRange")[2]
    ranges = ranges.partition("Live ranges at")[0]
    starts, ends = defaultdict(list), defaultdict(list)
    for name, index, first, last in _RANGE.findall(ranges):
        if value := placed.get((name, index)):
            starts[int(first)].append(value)
            ends[int(last) + 1].append(value)
    live: list[tuple[int, int]] = []
    most = 0
    for time in sorted({*starts, *ends}):
        for value in ends[time]:
            live.remove(value)
        live += starts[time]
        if starts[time]:
            most = max(most, _covered_bytes(live))
    return arguments, arguments + most, allocated


def _read(folder: Path, kind: str) -> str:
    (path,) = folder.glob(f"*{PREFIX}-{kind}.txt")
    return path.read_text(encoding="utf-8")


def _placed_values(text: str) -> tuple[int, int, dict[tuple[str, str], tuple[int, int]]]:
    """Return the sizes of the arguments and of all allocations, and a dict from (instruction, tuple
    index) to the first and last byte of each temporary in device memory.
    """
    arguments, allocated, values, is_temporary = 0, 0, {}, False
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            _, size, kind = match.groups()
            is_on_device = "color" not in kind  # other memory spaces have a color
            allocated += int(size) * is_on_device
            arguments += int(size) * (is_on_device and "parameter" in kind)
            is_temporary = is_on_device and "preallocated-temp" in kind
        elif is_temporary and (match := _VALUE.match(line)):
            name, index, size, offset = match.groups()
            values[name, index or "{}"] = int(offset), int(offset) + int(size)
    return arguments, allocated, values


def _covered_bytes(intervals: list[tuple[int, int]]) -> int:
    covered, end = 0, 0
    for first, last in sorted(intervals):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered
