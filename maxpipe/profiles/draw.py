"""Draw the planned and the measured timeline of a profiled step, also as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxpipe.io.formatting import format_duration
from maxpipe.profiles.bubble import Bubble, balanced_work, idle_cause, slot_spans, unplanned_idle
from maxpipe.profiles.timeline import Timeline
from maxpipe.schedule.canvas import (
    GREY,
    INK,
    LIMIT,
    OVERVIEW_WIDTH,
    PAGE_WIDTH,
    PALE,
    RULE,
    Box,
    Canvas,
    text_width,
)
from maxpipe.schedule.pictures import shade_of

_LEFT, _RIGHT, _TOP = 84.0, 16.0, 18.0
_LANE, _GAP = 22.0, 6.0
_TITLE, _TEXT, _SMALL = 15, 12, 11
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True)
class _Track:
    """Start and duration of each slot in one version of the timeline, in seconds."""

    title: str
    begin: Mapping[str, np.ndarray]
    work: Mapping[str, np.ndarray]
    ticks: np.ndarray


def tracks(timeline: Timeline) -> tuple[_Track, _Track]:
    """Return the planned and the measured track, which have the same time scale."""
    balanced = balanced_work(timeline)
    shared = timeline.shared.mean(axis=1)
    ticks = np.concatenate([[0.0], np.cumsum(slot_spans(timeline.table, balanced) + shared)])
    begin, offset = {}, np.zeros((timeline.table.num_ticks, 1))
    for kind, spent in balanced.items():
        begin[kind] = ticks[:-1, None] + offset + np.zeros_like(spent)
        if not timeline.table.mixed:
            offset = offset + spent.max(axis=1, keepdims=True)
    planned = _Track("planned", begin, balanced, ticks)
    if timeline.shares_cores:
        return planned, _Track("measured", timeline.begin, timeline.work, timeline.ticks)
    wall = (timeline.wall_begin, timeline.wall_work, timeline.wall_ticks)
    return planned, _Track("measured", *wall)


def draw_timeline(timeline: Timeline, bubble: Bubble, *, width: float = PAGE_WIDTH) -> Canvas:
    """Draw both timelines below each other, with one lane for each stage.

    The measured lanes mark idle time that the table does not plan, in red.
    """
    canvas = Canvas(width=round(width))
    y = _TOP + 8
    y = canvas.write_lines(16, y, bubble.summary(), _TEXT, width=width - 32) + 12
    both = tracks(timeline)
    scale = (width - _LEFT - _RIGHT) / max(float(track.ticks[-1]) for track in both)
    for track in both:
        text = f"{track.title}: {format_duration(float(track.ticks[-1]))}"
        canvas.write(16, y + 4, text, _TITLE, INK, bold=True)
        y += 16
        y = _draw_lanes(canvas, timeline, track, scale, y) + 20
    note = "Same time scale. Box: a slot with its microbatch; red: idle time that was not planned."
    if timeline.shares_cores:
        note += " Virtual devices share cores, so slots have their typical durations."
    y = canvas.write_lines(16, y, note, _SMALL, GREY, width=width - 32)
    canvas.height = round(y + 8)
    canvas.title = f"Planned and measured timeline of the {timeline.table.name} schedule"
    canvas.description = bubble.summary()
    return canvas


def draw_overview(timeline: Timeline, bubble: Bubble) -> Canvas:
    """Draw both timelines at the width of a TensorBoard image."""
    return draw_timeline(timeline, bubble, width=OVERVIEW_WIDTH)


def _draw_lanes(
    canvas: Canvas, timeline: Timeline, track: _Track, scale: float, top: float
) -> float:
    """Draw one lane for each stage, and return the y coordinate below them."""
    table = timeline.table
    width = float(track.ticks[-1]) * scale
    for stage in range(table.num_stages):
        y = top + stage * (_LANE + _GAP)
        canvas.write(_LEFT - 8, y + 15, f"stage {stage}", _TEXT, INK, "r")
        canvas.boxes.append(Box(_LEFT, y, width, _LANE, PALE))
    if track.title == "measured":
        for tick, stage, begin, seconds, cause in _unplanned_idle(timeline, track):
            y = top + stage * (_LANE + _GAP)
            title = f"tick {tick}: {format_duration(seconds)} idle, {cause}"
            canvas.boxes.append(
                Box(_LEFT + begin * scale, y + _LANE - 4, seconds * scale, 4, LIMIT, title=title)
            )
    for slots in table.slots:
        for tick, stage in np.argwhere(table.active[slots.kind]).tolist():
            begin, seconds = track.begin[slots.kind], track.work[slots.kind]
            x = _LEFT + float(begin[tick, stage]) * scale
            box = float(seconds[tick, stage]) * scale
            repeat, microbatch = slots.repeat[tick][stage], slots.microbatch[tick][stage]
            shade, y = shade_of(slots.kind, repeat), top + stage * (_LANE + _GAP)
            gap = min(0.5, box / 8)
            title = (
                f"{_NAMES[slots.kind]} of microbatch {microbatch}, "
                f"chunk {table.chunks[repeat][stage]}, stage {stage}, tick {tick}: "
                f"{format_duration(float(seconds[tick, stage]))}"
            )
            canvas.boxes.append(
                Box(
                    x + gap,
                    y,
                    max(0.2, box - 2 * gap),
                    _LANE - 4,
                    shade.fill,
                    shade.line,
                    min(2.0, box / 4),
                    title,
                )
            )
            if text_width(str(microbatch), _SMALL) + 2 <= box:
                canvas.write(x + box / 2, y + 13, str(microbatch), _SMALL, shade.text, "m")
    bottom = top + table.num_stages * (_LANE + _GAP)
    _draw_axis(canvas, track.ticks, scale, bottom)
    return bottom + 14


def _draw_axis(canvas: Canvas, ticks: np.ndarray, scale: float, y: float) -> None:
    free = 0.0
    for tick, time in enumerate(ticks[:-1].tolist()):
        x = _LEFT + time * scale
        if x >= free:
            canvas.boxes.append(Box(x - 0.5, y - _GAP, 1, 5, RULE))
            canvas.write(x, y + 10, f"{tick}", _SMALL, GREY, "m")
            free = x + text_width(f"{tick}", _SMALL) + 9
    canvas.write(_LEFT - 14, y + 10, "tick", _SMALL, GREY, "r")


def _unplanned_idle(
    timeline: Timeline, track: _Track
) -> Iterator[tuple[int, int, float, float, str]]:
    """Yield (tick, stage, start, seconds, cause) of idle time that the table does not plan."""
    for tick in range(timeline.table.num_ticks):
        for stage in range(timeline.table.num_stages):
            cause = idle_cause(timeline, tick, stage)
            if cause:
                end = float(track.ticks[tick + 1])
                length = end - float(track.ticks[tick])
                seconds = min(length, float(unplanned_idle(timeline)[tick, stage]))
                yield tick, stage, end - seconds, seconds, cause


def perfetto(timeline: Timeline, bubble: Bubble) -> str:
    """Return a trace in JSON format for Perfetto, with one process for the planned timeline and
    one for the measured timeline.
    """
    table, events = timeline.table, []
    for process, track in enumerate(tracks(timeline)):
        name = f"{track.title}: {table.name}, bubble " + (
            f"{bubble.measured:.1%}" if process else f"{bubble.planned_with_costs:.1%}"
        )
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for stage in range(table.num_stages):
            events.append(
                {
                    "ph": "M",
                    "pid": process,
                    "tid": stage,
                    "name": "thread_name",
                    "args": {"name": f"stage {stage}"},
                }
            )
        for slots in table.slots:
            for tick, stage in np.argwhere(table.active[slots.kind]).tolist():
                repeat = slots.repeat[tick][stage]
                args: dict[str, Any] = {
                    "microbatch": slots.microbatch[tick][stage],
                    "chunk": table.chunks[repeat][stage],
                    "tick": tick,
                }
                events.append(
                    _span(
                        process,
                        stage,
                        f"{slots.kind}{slots.microbatch[tick][stage]}",
                        track.begin[slots.kind][tick, stage],
                        track.work[slots.kind][tick, stage],
                        args,
                    )
                )
        if process:
            for tick, stage, begin, seconds, cause in _unplanned_idle(timeline, track):
                args = {"tick": tick}
                events.append(_span(process, stage, f"idle: {cause}", begin, seconds, args))
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _span(
    process: int, stage: int, name: str, begin: Any, seconds: Any, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": stage,
        "name": name,
        "ts": round(float(begin) * 1e6, 3),
        "dur": round(float(seconds) * 1e6, 3),
        "args": args,
    }
