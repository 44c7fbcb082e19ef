"""Execution orders of the actions on each stage: generators of schedules, and CSV files.

`generate(ring, num_microbatches, group)` returns the list of actions of each stage. `placement`
derives ticks, messages and buffers from these lists. To add a schedule, add a function here and an
entry to `catalog.SCHEDULES`.

`read_orders` and `to_csv` read and write CSV in the usual notation: one line per stage, one action
per cell. `2F0` is the forward pass of chunk 2 for microbatch 0. `B` is a full backward pass; `I`
and `W` compute the gradients of the chunk's input and weights. Empty cells are idle slots. Chunks
are numbered in model order. torch.distributed.pipelining also uses this format, so schedules can be
exchanged. A file defines only the execution order of the actions on each stage; the ticks follow
from this order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maxpipe.errors import Code, ConfigError
from maxpipe.io import files
from maxpipe.io.formatting import pluralize
from maxpipe.schedule.table import Action, ActionKind, Orders, Ring, Schedule


def group_sizes(num_microbatches: int, num_stages: int, group: int) -> list[int]:
    """Return the sizes of the microbatch groups: as even as possible, with larger groups first.

    A group smaller than the number of stages would stall the ring, so a remainder is spread over
    the groups. Groups exceed `group` only if a group would otherwise be smaller than the number of
    stages.
    """
    count = -(-num_microbatches // group)
    if num_microbatches // count < num_stages:
        count = max(1, num_microbatches // group)
    short, longer = divmod(num_microbatches, count)
    return [short + 1] * longer + [short] * (count - longer)


def _ring_sequence(sizes: Sequence[int], num_repeats: int, kind: ActionKind) -> list[Action]:
    """Return the ordered forward or backward actions of a loop, which are the same on all
    stages.
    """
    repeats = range(num_repeats)
    sequence: list[Action] = []
    start = 0
    for size in sizes:
        for repeat in repeats if kind == "F" else reversed(repeats):
            sequence += [Action(kind, start + j, repeat) for j in range(size)]
        start += size
    return sequence


def forward_then_backward(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Run all forward passes, then all backward passes; memory grows with the number of
    microbatches.

    Source: GPipe (arXiv:1811.06965). If there are several repeats, this is the circular schedule of
        praxis and MaxText.
    """
    sizes = group_sizes(num_microbatches, ring.num_stages, group)
    both = [_ring_sequence(sizes, ring.num_repeats, kind) for kind in ("F", "B")]
    return [both[0] + both[1] for _ in range(ring.num_stages)]


def forward_sweep(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Run only forward passes, in the same order on every stage."""
    sizes = group_sizes(num_microbatches, ring.num_stages, group)
    return [_ring_sequence(sizes, ring.num_repeats, "F") for _ in range(ring.num_stages)]


def one_forward_one_backward(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Run warm-up forward passes, then alternate one forward and one backward pass, then run the
    remaining backward passes.

    The warm-up is the shortest one that keeps every slot busy if a message needs one tick. It
    consists of (R-1) * N forward passes, until the first microbatch leaves the network, plus two
    for each stage that follows. Memory does not depend on the number of microbatches.

    Source: PipeDream-flush and Megatron-LM's interleaved order (arXiv:2104.04473). If there is a
    single group, this is the breadth-first order (arXiv:2211.05953).
    """
    stages, repeats = ring.num_stages, ring.num_repeats
    sizes = group_sizes(num_microbatches, stages, group)
    forward = _ring_sequence(sizes, repeats, "F")
    backward = _ring_sequence(sizes, repeats, "B")
    until_loss = (repeats - 1) * max(*sizes, stages if repeats > 1 else 0)
    orders: Orders = []
    for stage in range(stages):
        warmup = min(len(forward), until_loss + 2 * (stages - 1 - stage))
        order = forward[:warmup]
        for index, action in enumerate(backward):
            order += [*forward[warmup + index : warmup + index + 1], action]
        orders.append(order)
    return orders


def zero_bubble_h1(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Split the backward passes of 1F1B, so that weight gradients fill the bubble without
    additional memory.

    Source: ZB-H1 (arXiv:2401.10241).
    """
    stages = ring.num_stages
    return _greedy_orders(ring, num_microbatches, live=stages, pending=max(1, stages - 1))


def zero_bubble_h2(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Use almost twice the memory of ZB-H1, so that stages are idle only while the pipeline fills.

    Source: ZB-H2 (arXiv:2401.10241).
    """
    stages = ring.num_stages
    return _greedy_orders(ring, num_microbatches, live=2 * stages - 1, pending=stages)


def zero_bubble_v(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Run two chunks per stage in a V shape: almost no bubble, with the same memory as 1F1B.

    Source: ZB-V (arXiv:2401.10241, arXiv:2405.15362).
    """
    live = 2 * ring.num_stages
    return _greedy_orders(ring, num_microbatches, live=live, pending=live)


def v_half(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Run two chunks per stage in a V shape, with about half the saved activations and half the
    bubble of the published 1F1B.

    Source: V-Half (arXiv:2405.15362).
    """
    return _repeated_block(ring, num_microbatches, (1, 2, 1, 2))


def v_min(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Run two chunks per stage in a V shape, with about a third of the saved activations and two
    thirds of the bubble of the published 1F1B.

    Source: V-Min (arXiv:2405.15362).
    """
    return _repeated_block(ring, num_microbatches, (1, 1, 1, 1))


def dualpipe_v(ring: Ring, num_microbatches: int, group: int) -> Orders:
    """Pair forward passes of one chunk with backward passes of the other, as in DualPipe's phases.

    Source: DualPipe's V-shaped half (DeepSeek, github.com/deepseek-ai/DualPipe).
    """
    stages, orders = ring.num_stages, []
    # The phases require two microbatches per stage, so the actions of surplus microbatches are then
    # removed.
    available = max(num_microbatches, 2 * stages)
    for stage in range(stages):
        up = stages - 1 - stage
        last = stage + 1
        phases = [
            *[["F0"]] * (2 * up),
            *[["F0", "F1"]] * last,
            *[["I1", "W1", "F1"]] * up,
            *[["F0", "B1", "F1", "B0"]] * (available - 2 * stages + last),
            *[["B1", "F1", "B0"]] * up,
            *[["B1", "B0"]] * (last // 2),
            *[["I1", "B0"] if last % 2 == 0 else ["B1", "I0"]] * (last - last // 2),
            *[["I0"]] * up,
        ]
        order: list[Action] = []
        count: dict[tuple[str, int], int] = {}
        for name in (name for phase in phases for name in phase):
            for kind in "IW" if name[0] == "B" else name[0]:
                repeat = int(name[1])
                number = count.setdefault((kind, repeat), 0)
                count[kind, repeat] += 1
                order.append(Action(kind, number, repeat))  # type: ignore[arg-type]
        started = [a._replace(kind="W") for a in order if a.kind == "I"]
        order += [action for action in started if action not in order]
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


# Shared helpers: a greedy scheduler, and schedules that repeat a pattern.


class _GreedyScheduler:
    """Greedy scheduler: every stage prefers I over F over W, and later chunks over earlier ones.

    A stage stores at most `live` chunks between F and W, and at most `pending` of these chunks
    between I and W. An F runs only if capacity remains for the stage's later chunks, because a V
    could otherwise deadlock.
    """

    def __init__(self, ring: Ring, num_microbatches: int, *, live: int, pending: int):
        self.ring, self.live, self.pending = ring, live, pending
        self.num_microbatches = num_microbatches
        stages, repeats = range(ring.num_stages), range(ring.num_repeats)
        self.done = {(k, s, r): [] for k in "FI" for s in stages for r in repeats}
        self.orders: Orders = [[] for _ in stages]
        self.waiting: list[list[Action]] = [[] for _ in stages]
        self.kept = [0 for _ in stages]

    def run(self) -> Orders:
        """Return the execution orders of all stages."""
        tick, total = 0, 3 * self.num_microbatches * self.ring.num_repeats
        while any(len(order) < total for order in self.orders):
            # All stages choose an action before any action is applied, because a message needs one
            # tick.
            chosen = [self._choose(stage, tick) for stage in range(self.ring.num_stages)]
            for stage, action in enumerate(chosen):
                if action is not None:
                    self._commit(stage, action, tick)
            tick += 1
        return self.orders

    def _choose(self, stage: int, tick: int) -> Action | None:
        ring, waiting = self.ring, self.waiting[stage]
        repeats = sorted(range(ring.num_repeats), key=lambda r: ring.chunk(stage, r), reverse=True)
        full = len(waiting) >= self.pending
        for kind in ("I", "F"):
            for later, repeat in enumerate(repeats):
                room = not full if kind == "I" else self.kept[stage] < self.live - later
                action = Action(kind, len(self.done[kind, stage, repeat]), repeat)
                if room and self._is_ready(action, stage, tick):
                    return waiting[0] if full else action
        return waiting[0] if waiting else None

    def _is_ready(self, action: Action, stage: int, tick: int) -> bool:
        kind, microbatch, repeat = action
        needed = [("F", stage, repeat)] if kind == "I" else []
        source = (self.ring.previous_chunk if kind == "F" else self.ring.next_chunk)(stage, repeat)
        if source is not None:
            needed.append((kind, *source))
        return microbatch < self.num_microbatches and all(
            microbatch < len(self.done[key]) and self.done[key][microbatch] < tick for key in needed
        )

    def _commit(self, stage: int, action: Action, tick: int) -> None:
        self.orders[stage].append(action)
        self.kept[stage] += (action.kind == "F") - (action.kind == "W")
        if action.kind == "W":
            self.waiting[stage].pop(0)
            return
        self.done[action.kind, stage, action.repeat].append(tick)
        if action.kind == "I":
            self.waiting[stage].append(action._replace(kind="W"))


def _greedy_orders(ring: Ring, num_microbatches: int, *, live: int, pending: int) -> Orders:
    return _GreedyScheduler(ring, num_microbatches, live=live, pending=pending).run()


_INTERVAL = 6  # number of ticks per microbatch: F, I and W of two chunks


def _repeated_block(
    ring: Ring, num_microbatches: int, offsets: tuple[int, int, int, int]
) -> Orders:
    """Return execution orders for a V shape that repeat the pattern of one microbatch every six
    ticks.

    The pattern has four phases: the forward passes of the first and second chunk, and the input
    gradients of the second and first chunk. `offsets` contains the number of ticks between
    neighboring stages for each phase. The memory of a microbatch is proportional to the sum of the
    offsets times the number of stages. Weight gradients run in the free ticks.

    Source: the building blocks of arXiv:2405.15362.
    """
    stages = ring.num_stages
    starts = _block_starts(stages, offsets)
    slopes = (offsets[0], -offsets[1], offsets[2], -offsets[3])
    parts: tuple[tuple[ActionKind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
    orders: Orders = []
    for stage in range(stages):
        times: dict[int, Action] = {}
        for microbatch in range(num_microbatches):
            for part, (kind, repeat) in enumerate(parts):
                tick = _INTERVAL * microbatch + starts[part] + slopes[part] * stage
                times[tick] = Action(kind, microbatch, repeat)
        order: list[Action] = []
        waiting: list[Action] = []
        for tick in range(max(times) + 1):
            if tick in times:
                order.append(times[tick])
                if times[tick].kind == "I":
                    waiting.append(times[tick]._replace(kind="W"))
            elif waiting:
                order.append(waiting.pop(0))
        orders.append(order + waiting)
    return orders


def _block_starts(stages: int, offsets: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the earliest ticks on stage 0 at which the four phases never collide on any stage."""
    down, up, back, home = (offset * (stages - 1) for offset in offsets)
    for second in range(down + up + 1, down + up + 1 + _INTERVAL):
        for turn in range(second + 1, second + 1 + _INTERVAL):
            for end in range(turn + back + home + 1, turn + back + home + 1 + _INTERVAL):
                parts = (0, second, turn, end)
                slopes = (offsets[0], -offsets[1], offsets[2], -offsets[3])
                if all(
                    len({(a + s * p) % _INTERVAL for a, s in zip(parts, slopes, strict=True)}) == 4
                    for p in range(stages)
                ):
                    return parts
    raise AssertionError(f"offsets {offsets} collide on {stages} stages")


# --- CSV files ----------------------------------------------------------------

_MAX_BYTES = 1 << 26
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


def to_csv(schedule: Schedule) -> str:
    """Return the schedule table as CSV; idle slots are empty cells."""
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
    """Read the ring and the execution orders from a file. The sizes in the file must match the
    given sizes.

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
            raise ConfigError.one(Code.SCHED_FILE, key, wanted, rule, f"Set {key}={found}.")
    return ring, _orders(lines, ring)


class _CsvCell(NamedTuple):
    """A CSV cell that contains an action, and its column."""

    chunk: int
    kind: ActionKind
    microbatch: int
    column: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> tuple[ActionKind, ...]:
        """Split the action into its components; a full backward pass consists of I and W."""
        return ("I", "W") if self.kind == "B" else (self.kind,)


class _CsvLine(NamedTuple):
    """The actions of one stage, and their line number in the file."""

    number: int
    cells: list[_CsvCell]


def _read(path: Path) -> str:
    try:
        content = files.read(path, _MAX_BYTES)
        return content.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        reason = error.strerror or "the path is not a file"
    except UnicodeDecodeError:
        reason = "the file is not UTF-8 text"
    except ValueError:
        reason = "the path is invalid"
    rule = f"cannot be read: {reason}."
    action = "Write a file with `maxpipe schedule interleaved --csv FILE`."
    raise ConfigError.one(Code.SCHED_FILE, "pipeline.schedule", f"file:{path}", rule, action)


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
        raise ConfigError.one(
            Code.SCHED_FILE, where, None, f"is not CSV: {error}.", action
        ) from error
    if not lines:
        action = "Write one line per stage, such as 0F0,0B0."
        raise ConfigError.one(Code.SCHED_FILE, f"{path}", None, "contains no actions.", action)
    return lines


def _parse_cell(text: str, where: str, column: int) -> _CsvCell:
    match = _ACTION.fullmatch(text)
    if match is None:
        shown = ascii(text)[1:-1]
        raise ConfigError.one(
            Code.SCHED_FILE,
            where,
            shown if len(shown) <= 40 else f"{shown[:40]}...",
            "must be an action: chunk number, one of F B I W, microbatch number, each number with "
            "at most 9 digits.",
            "Write 2F0 for the forward pass of chunk 2 and microbatch 0, or leave the cell empty.",
        )
    return _CsvCell(int(match[1]), match[2], int(match[3]), column)  # type: ignore[arg-type]


def _ring_of(lines: list[_CsvLine], path: Path) -> Ring:
    """Return the ring that assigns each chunk to the stage whose line contains it."""
    num_chunks = 1 + max(cell.chunk for line in lines for cell in line.cells)
    repeats, remainder = divmod(num_chunks, len(lines))
    if remainder:
        raise ConfigError.one(
            Code.SCHED_FILE,
            f"{path}",
            f"{pluralize(num_chunks, 'chunk')} on {pluralize(len(lines), 'line')}",
            "the number of chunks must be a multiple of the number of lines. Each line is a "
            "stage, and every stage runs the same number of chunks.",
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
            Code.SCHED_FILE,
            f"{path}: line {line.number}, cell {cell.column}",
            cell,
            f"chunk {cell.chunk} of {num_chunks} belongs to line {home} in a {shape} over "
            f"{pluralize(len(lines), 'stage')}, the shape that best matches this file.",
            f"Move this action to line {home}.",
        )
    return ring


def _check_line(line: _CsvLine, ring: Ring, count: int, path: Path) -> None:
    """Check that each chunk and microbatch has one F, and either one B, or one I and one W."""
    done: dict[tuple[int, int, ActionKind], _CsvCell] = {}
    for cell in line.cells:
        for part in cell.parts:
            other = done.setdefault((cell.chunk, cell.microbatch, part), cell)
            if other is not cell:
                raise ConfigError.one(
                    Code.SCHED_FILE,
                    f"{path}: line {line.number}, cell {cell.column}",
                    cell,
                    f"repeats {other} in cell {other.column}, but each action must appear only "
                    "once.",
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
        Code.SCHED_FILE,
        f"{path}: line {line.number}",
        f"no {name}",
        f"each of {pluralize(count, 'microbatch')} (0 to {count - 1}) needs F and B, or F, I "
        "and W, "
        f"for each of the line's {pluralize(ring.num_repeats, 'chunk')}.",
        f"Add {name} to the line" + (", or its I and W." if backward else "."),
    )


def _orders(lines: list[_CsvLine], ring: Ring) -> Orders:
    """Return the execution orders; if any backward pass is split, every B is replaced with I and
    W.
    """
    split = any(cell.kind in "IW" for line in lines for cell in line.cells)
    return [
        [
            Action(part, cell.microbatch, ring.locate_chunk(cell.chunk)[1])
            for cell in line.cells
            for part in (cell.parts if split else (cell.kind,))
        ]
        for line in lines
    ]
