"""Text output for schedules: the timeline of one schedule, or a comparison of several schedules.

If a slot can hold different types of work, the timeline has one line per stage. Otherwise, the
timeline has two lines per stage: one for forward slots and one for backward slots.

Each cell contains the microbatch index and a letter for the repeat: `3b` is microbatch 3 in the
second repeat, and `.` is an empty slot. If there is one line per stage, the type of work comes
first: `F3b`, `I3b`, `W3b`.
"""

from __future__ import annotations

from collections.abc import Sequence

from maxpipe.io.formatting import pluralize
from maxpipe.schedule.table import Costs, Schedule

EQUAL_COSTS = Costs()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def summary(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> str:
    """Return two lines of text: the schedule's sizes, and the time and memory that the schedule
    needs.
    """
    kept = pluralize(schedule.num_stash, "saved chunk") if schedule.trains else "no saved chunks"
    if schedule.mixed:
        kept += f" and {pluralize(schedule.num_deferred, 'deferred weight gradient')}"
    shape = " in a V" if schedule.ring.shape == "v" else ""
    delayed = ", messages delayed" if schedule.delayed else ""
    idle = f"{schedule.idle_fraction():.1%}"
    if costs != EQUAL_COSTS:
        idle += f" ({schedule.idle_fraction(costs):.1%} at {_ratio(costs)})"
    return (
        f"{schedule.name}: {schedule.describe_sizes()}{shape}, "
        f"{pluralize(schedule.num_microbatches, 'microbatch')} in groups of {schedule.group}"
        f"{delayed}\n"
        f"{pluralize(schedule.num_ticks, 'tick')}, idle {idle}, "
        f"at most {kept} on a stage, {pluralize(schedule.num_inbox, 'message')} waiting"
    )


def draw_timeline(
    schedule: Schedule,
    costs: Costs = EQUAL_COSTS,
    *,
    width: int = 0,
    mark: tuple[int, int, str] | None = None,
) -> str:
    """Return the timeline, split into blocks of at most `width` columns (0 for a single block).

    `mark` = (tick, stage, kind) adds brackets around one cell and limits the output to the block
    that contains it.
    """
    rows = _rows(schedule, mark)
    size = max(len(cell) for _, cells in rows for cell in cells)
    size = max(size, len(str(schedule.num_ticks - 1)))
    margin = max(_MARGIN, *(len(title) + 1 for title, _ in rows))
    per_block = max(1, (width - margin) // (size + 1)) if width else schedule.num_ticks
    if mark:
        per_block = 16
    blocks = []
    for start in range(0, schedule.num_ticks, per_block):
        ticks = slice(start, min(start + per_block, schedule.num_ticks))
        if mark is None or ticks.start <= mark[0] < ticks.stop:
            lines = [
                (
                    title.ljust(_MARGIN) + " ".join(cell.rjust(size) for cell in cells[ticks])
                ).rstrip()
                for title, cells in rows
            ]
            blocks.append("\n".join(lines))
    return "\n\n".join([summary(schedule, costs), *blocks])


_MARGIN = len("stage 00 F ")


def _rows(schedule: Schedule, mark: tuple[int, int, str] | None) -> list[tuple[str, list[str]]]:
    """Return, for every line of the timeline, a title and one cell per tick."""
    ticks = range(schedule.num_ticks)
    rows = [("tick", [str(tick) for tick in ticks])]
    for stage in range(schedule.num_stages):
        if schedule.mixed:
            cells = [_mixed_cell(schedule, tick, stage) for tick in ticks]
            rows.append((f"stage {stage:2d}", _mark_cell(cells, mark, stage)))
            continue
        for kind, slots in schedule.kinds:
            cells = [
                _cell(schedule, int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage]))
                for tick in ticks
            ]
            title = f"stage {stage:2d} F" if kind == "F" else f"         {kind}"
            rows.append(
                (title, _mark_cell(cells, mark if mark and mark[2] == kind else None, stage))
            )
    if schedule.trains:
        rows.append(("kept", [str(depth) for depth in schedule.stash_depth().max(axis=1)]))
    return rows


def _cell(schedule: Schedule, microbatch: int, repeat: int) -> str:
    if microbatch < 0:
        return "."
    if schedule.num_repeats == 1:
        return str(microbatch)
    letter = _LETTERS[repeat] if repeat < len(_LETTERS) else f"/{repeat}"
    return f"{microbatch}{letter}"


def _mixed_cell(schedule: Schedule, tick: int, stage: int) -> str:
    for kind, slots in schedule.kinds:
        if slots.active[tick, stage]:
            microbatch, repeat = slots.microbatch[tick, stage], slots.repeat[tick, stage]
            return kind + _cell(schedule, int(microbatch), int(repeat))
    return "."


def _mark_cell(cells: list[str], mark: tuple[int, int, str] | None, stage: int) -> list[str]:
    if mark and mark[1] == stage:
        cells[mark[0]] = f"[{cells[mark[0]]}]"
    return cells


def comparison_table(schedules: Sequence[Schedule], costs: Costs) -> str:
    """Return a table with one line per schedule, which shows the step time and the memory per
    stage.
    """
    rows = [
        ["", "", "", "idle", "idle", "saved", "", "in", "", "", ""],
        ["schedule", "repeats", "ticks", "at 1:1:1", f"at {_ratio(costs)}", "chunks"],
    ]
    rows[1] += ["deferred", "layers", "inbox", "messages", "gathers"]
    for schedule in schedules:
        deferred = schedule.num_deferred if schedule.mixed else 0
        saved = schedule.num_stash if schedule.trains else 0
        visits = len(schedule.weight_window.gather_tick)
        rows.append(
            [
                schedule.name,
                f"{schedule.num_repeats}",
                f"{schedule.num_ticks}",
                f"{schedule.idle_fraction():.1%}",
                f"{schedule.idle_fraction(costs):.1%}",
                f"{saved}",
                f"{deferred}",
                f"{(saved + deferred) / schedule.num_repeats:.4g}",
                f"{schedule.num_inbox}",
                f"{_max_sent_messages(schedule)}",
                f"{visits / schedule.num_repeats:.4g}" if visits else "1",
            ]
        )
    if costs == EQUAL_COSTS:
        rows = [[*row[:4], *row[5:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    first = schedules[0]
    sizes = (
        f"{pluralize(first.num_stages, 'stage')}, {pluralize(first.num_microbatches, 'microbatch')}"
    )
    return "\n".join([sizes, *lines, *_identical_schedules(rows[1:]), "", *_LEGEND])


def _identical_schedules(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines that list the schedules whose results are identical at these sizes."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *numbers in rows:
        names.setdefault(tuple(numbers), []).append(name)
    same = [
        f"{' and '.join(each)} are identical at these sizes."
        for each in names.values()
        if len(each) > 1
    ]
    return ["", *same] if same else []


def _ratio(costs: Costs) -> str:
    return ":".join(f"{cost:g}" for cost in costs)


_LEGEND = (
    "idle: fraction of a step at costs F:I:W. saved chunks, deferred (weight gradients), inbox:",
    "slot counts per stage. in layers: saved chunks plus deferred, in units of a stage's layers.",
    "messages: maximum sent by a stage per step. "
    "gathers: per weight and step with weight_gather=window.",
)


def _max_sent_messages(schedule: Schedule) -> int:
    """Return the largest number of messages that any stage sends to other stages in a step."""
    ring = schedule.ring
    sent = [0] * ring.num_stages
    for stage in range(ring.num_stages):
        for repeat in range(ring.num_repeats):
            targets = [ring.next_chunk(stage, repeat)]
            targets += [ring.previous_chunk(stage, repeat)] if schedule.trains else []
            moves = sum(target is not None and target[0] != stage for target in targets)
            sent[stage] += moves * schedule.num_microbatches
    return max(sent)
