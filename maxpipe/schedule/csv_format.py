"""CSV format of schedules in the usual action notation: one line per stage, one action per cell.

`2F0` is the forward pass of chunk 2 for microbatch 0. `B` is a full backward pass; `I` and `W` are
the gradients of the chunk's input and weights. Empty cells are idle slots. Chunks are numbered in
model order. The format is also used by torch.distributed.pipelining, so schedules can be exchanged.
A file defines only the order of the actions on each stage; the ticks follow from the order.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

from maxpipe.errors import ConfigError
from maxpipe.io import files
from maxpipe.io.formatting import pluralize
from maxpipe.schedule.table import Action, ActionKind, Orders, Ring, Schedule

_MAX_BYTES = 1 << 26
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


def to_csv(schedule: Schedule) -> str:
    """Return the table as CSV; idle slots are empty cells."""
    ring = schedule.ring
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for stage in range(ring.num_stages):
        cells: list[str] = []
        for tick in range(schedule.num_ticks):
            actions = [
                f"{ring.chunk(stage, int(slots.repeat[tick, stage]))}{kind}"
                f"{slots.microbatch[tick, stage]}"
                if slots.active[tick, stage]
                else ""
                for kind, slots in schedule.kinds
            ]
            cells += ["".join(actions)] if schedule.mixed else actions
        writer.writerow(cells)
    return out.getvalue()


def read_orders(
    path: Path,
    stages: int | None = None,
    repeats: int | None = None,
    microbatches: int | None = None,
) -> tuple[Ring, Orders]:
    """Read the ring and the orders from a file. The sizes in the file must match the given sizes.

    Raises:
        ConfigError: the file cannot be read, a cell is not an action, an action is missing or
            repeated, a chunk is on the wrong line, or a size does not match.
    """
    lines = _parse(_read(path), path)
    ring = _ring_of(lines, path)
    count = 1 + max(cell.microbatch for line in lines for cell in line.cells)
    for line in lines:
        _check_line(line, ring, count, path)
    for key, wanted, found in (
        ("mesh.ici_stage", stages, ring.num_stages),
        ("pipeline.repeats", repeats, ring.num_repeats),
        ("pipeline.microbatches", microbatches, count),
    ):
        if wanted is not None and wanted != found:
            rule = f"must be {found}, as in {path}."
            raise ConfigError.one(key, wanted, rule, f"Set {key}={found}.")
    return ring, _orders(lines, ring)


class _CsvCell(NamedTuple):
    """An action in the file and its column."""

    chunk: int
    kind: ActionKind
    microbatch: int
    column: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> tuple[ActionKind, ...]:
        """Parts of the action; a full backward pass consists of I and W."""
        return ("I", "W") if self.kind == "B" else (self.kind,)


class _CsvLine(NamedTuple):
    """The actions of a stage and the line number in the file."""

    number: int
    cells: list[_CsvCell]


def _read(path: Path) -> str:
    try:
        content = files.read(path, _MAX_BYTES)
        return content.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        reason = error.strerror or "it is not a file"
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except ValueError:
        reason = "it is not a path"
    rule = f"cannot be read: {reason}."
    action = "Write a file with `maxpipe schedule interleaved --csv FILE`."
    raise ConfigError.one("pipeline.schedule", f"file:{path}", rule, action)


def _parse(text: str, path: Path) -> list[_CsvLine]:
    lines: list[_CsvLine] = []
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        for row in reader:
            cells = [
                _parse_cell(cell.strip(), f"{path}: line {reader.line_num}, cell {column}", column)
                for column, cell in enumerate(row, 1)
                if cell.strip()
            ]
            if cells:
                lines.append(_CsvLine(reader.line_num, cells))
    except csv.Error as error:
        where = f"{path}: line {reader.line_num}"
        action = "Write one line per stage, such as 0F0,0B0."
        raise ConfigError.one(where, None, f"is not CSV: {error}.", action) from error
    if not lines:
        action = "Write one line per stage, such as 0F0,0B0."
        raise ConfigError.one(f"{path}", None, "contains no actions.", action)
    return lines


def _parse_cell(text: str, where: str, column: int) -> _CsvCell:
    match = _ACTION.fullmatch(text)
    if match is None:
        shown = ascii(text)[1:-1]
        raise ConfigError.one(
            where,
            shown if len(shown) <= 40 else f"{shown[:40]}...",
            "must be an action: chunk number, one of F B I W, microbatch number, each number "
            "of at most 9 digits.",
            "Write 2F0 for the forward of chunk 2 and microbatch 0, or leave the cell empty.",
        )
    return _CsvCell(int(match[1]), match[2], int(match[3]), column)  # type: ignore[arg-type]


def _ring_of(lines: list[_CsvLine], path: Path) -> Ring:
    """Return the ring that assigns each chunk to the stage on whose line it appears."""
    num_chunks = 1 + max(cell.chunk for line in lines for cell in line.cells)
    repeats, remainder = divmod(num_chunks, len(lines))
    if remainder:
        raise ConfigError.one(
            f"{path}",
            f"{pluralize(num_chunks, 'chunk')} on {pluralize(len(lines), 'line')}",
            "the number of chunks must be a multiple of the number of lines. A line is a stage, "
            "and every stage runs the same number of chunks.",
            "Add the missing lines or chunks.",
        )
    rings = [Ring(len(lines), repeats, shape) for shape in ("loop", "v")]
    misplaced = [
        [
            (line, cell)
            for stage, line in enumerate(lines)
            for cell in line.cells
            if ring.locate_chunk(cell.chunk)[0] != stage
        ]
        for ring in rings
    ]
    # Assume the ring shape with the fewest misplaced actions.
    ring, wrong = min(zip(rings, misplaced, strict=True), key=lambda pair: len(pair[1]))
    if wrong:
        line, cell = wrong[0]
        home = lines[ring.locate_chunk(cell.chunk)[0]].number
        shape = "loop" if ring.shape == "loop" else "V"
        raise ConfigError.one(
            f"{path}: line {line.number}, cell {cell.column}",
            cell,
            f"chunk {cell.chunk} of {num_chunks} belongs to line {home} in a {shape} over "
            f"{pluralize(len(lines), 'stage')}, the shape closest to this file.",
            f"Move this action to line {home}.",
        )
    return ring


def _check_line(line: _CsvLine, ring: Ring, count: int, path: Path) -> None:
    """Check that each chunk and microbatch has one F, and either one B or one I and one W."""
    done: dict[tuple[int, int, ActionKind], _CsvCell] = {}
    for cell in line.cells:
        for part in cell.parts:
            other = done.setdefault((cell.chunk, cell.microbatch, part), cell)
            if other is not cell:
                raise ConfigError.one(
                    f"{path}: line {line.number}, cell {cell.column}",
                    cell,
                    f"repeats {other} in cell {other.column}: each action must appear once.",
                    "Remove one of the two cells.",
                )
    stage = ring.locate_chunk(line.cells[0].chunk)[0]
    # Use a generator, because a very large microbatch number would require billions of actions.
    wanted = (
        (ring.chunk(stage, repeat), microbatch, part)
        for microbatch in range(count)
        for repeat in range(ring.num_repeats)
        for part in ("F", "I", "W")
    )
    missing = next((item for item in wanted if item not in done), None)
    if missing is None:
        return
    chunk, microbatch, part = missing
    backward = part != "F" and (chunk, microbatch, "W" if part == "I" else "I") not in done
    name = f"{chunk}{'B' if backward else part}{microbatch}"
    raise ConfigError.one(
        f"{path}: line {line.number}",
        f"no {name}",
        f"each of {pluralize(count, 'microbatch')} (0 to {count - 1}) needs F and B, or F, I "
        "and W, "
        f"for each of the line's {pluralize(ring.num_repeats, 'chunk')}.",
        f"Add {name} to the line" + (", or its I and W." if backward else "."),
    )


def _orders(lines: list[_CsvLine], ring: Ring) -> Orders:
    """Return the orders; if any backward pass is split, every B is replaced by I and W."""
    split = any(cell.kind in "IW" for line in lines for cell in line.cells)
    return [
        [
            Action(part, cell.microbatch, ring.locate_chunk(cell.chunk)[1])
            for cell in line.cells
            for part in (cell.parts if split else (cell.kind,))
        ]
        for line in lines
    ]
