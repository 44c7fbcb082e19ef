"""A schedule as text: one row of forward and one of backward slots per stage.

A cell is the microbatch number followed by the repeat as a letter, `3b` being
microbatch 3 in the second repeat; `.` is an empty slot.
"""

from __future__ import annotations

import numpy as np

from maxpipe.pipeline.schedule import IDLE, Schedule

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def summary(schedule: Schedule) -> str:
    """Two lines: what the schedule is, and what it costs in time and memory."""
    depth = int(schedule.stash_depth().max()) if schedule.backward.active.any() else 0
    return (
        f"{schedule.name}: {schedule.num_stages} stages x {schedule.num_repeats} repeats, "
        f"{schedule.num_microbatches} microbatches in groups of {schedule.group}\n"
        f"{schedule.num_ticks} ticks, idle {100 * schedule.idle_fraction():.1f}%, "
        f"at most {depth} saved chunks on a stage, inboxes "
        f"{schedule.num_forward_inbox} forward and {schedule.num_backward_inbox} backward"
    )


def text(schedule: Schedule, *, width: int = 0, mark: tuple[int, int, str] | None = None) -> str:
    """The whole timeline, cut into blocks of at most `width` columns (0: one block).

    `mark` = (tick, stage, kind) puts brackets around one cell and shows only its block.
    """
    size = max(
        len(_cell(int(m), int(r), schedule))
        for slots in (schedule.forward, schedule.backward)
        for m, r in zip(slots.microbatch.flat, slots.repeat.flat, strict=True)
    )
    size = max(size, len(str(schedule.num_ticks - 1))) + (2 if mark else 0)
    per_block = max(1, (width - _MARGIN) // (size + 1)) if width else schedule.num_ticks
    if mark:
        per_block = 16
    blocks = []
    for start in range(0, schedule.num_ticks, per_block):
        ticks = range(start, min(start + per_block, schedule.num_ticks))
        if mark is None or mark[0] in ticks:
            blocks.append(_block(schedule, ticks, size, mark))
    return "\n\n".join([summary(schedule), *blocks])


_MARGIN = len("stage 00 F ")


def _cell(microbatch: int, repeat: int, schedule: Schedule) -> str:
    if microbatch == IDLE:
        return "."
    if schedule.num_repeats == 1:
        return str(microbatch)
    letter = _LETTERS[repeat] if repeat < len(_LETTERS) else f"/{repeat}"
    return f"{microbatch}{letter}"


def _block(schedule: Schedule, ticks: range, size: int, mark: tuple[int, int, str] | None) -> str:
    def row(title: str, cells: list[str]) -> str:
        return (title.ljust(_MARGIN) + " ".join(cell.rjust(size) for cell in cells)).rstrip()

    lines = [row("tick", [str(tick) for tick in ticks])]
    kinds = [("F", schedule.forward), ("B", schedule.backward)]
    marked_kind = mark[2] if mark else "F"
    if not schedule.backward.active.any() and marked_kind != "B":
        kinds.pop()
    depth = schedule.stash_depth()
    for stage in range(schedule.num_stages):
        for kind, slots in kinds:
            cells = [
                _cell(int(slots.microbatch[tick, stage]), int(slots.repeat[tick, stage]), schedule)
                for tick in ticks
            ]
            if mark and mark[1:] == (stage, kind):
                cells = [
                    f"[{cell}]" if tick == mark[0] else cell
                    for tick, cell in zip(ticks, cells, strict=True)
                ]
            title = f"stage {stage:2d} {kind}" if kind == "F" else f"         {kind}"
            lines.append(row(title, cells))
    if len(kinds) == 2:
        deepest = np.asarray(depth).max(axis=1)
        lines.append(row("kept", [str(int(deepest[tick])) for tick in ticks]))
    return "\n".join(lines)
