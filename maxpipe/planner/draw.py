"""Draw plans: the memory of one device as a stacked bar, and the timeline of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from maxpipe.hardware import Hardware
from maxpipe.io.formatting import format_duration
from maxpipe.planner.cost_model import CostModel
from maxpipe.planner.memory_terms import TERMS, gib, verdict
from maxpipe.planner.report import plan_values
from maxpipe.planner.search import Candidate, short_schedules
from maxpipe.planner.sizes import Sizes
from maxpipe.schedule import pictures
from maxpipe.schedule.canvas import (
    BOX_INK,
    DEFERRED,
    GREY,
    INK,
    LIMIT,
    PAGE_WIDTH,
    PALE,
    Box,
    Canvas,
    text_width,
)
from maxpipe.schedule.chart import SMALL, TEXT, WIDTH, round_ticks
from maxpipe.schedule.table import Costs

COLOURS = {
    "state": "#2456a6",
    "copies": "#8fb8f4",
    "gradients": "#a8530a",
    "partial": "#f6b26b",
    "held": "#1f6f4c",
    "window": "#86cfae",
    "turned": "#5f86c9",
    "widened": "#d98ca8",
    "stash": "#5a3aa6",
    "deferred": "#bba6ef",
    "outside": "#a12e56",
    "vision": "#8fae5d",
    "layer": "#166c79",
    "logits": "#7fcbd6",
    "inbox": "#6b6510",
    "sent": "#cfc865",
    "reports": "#9c6b4f",
    "ahead": "#b58863",
    "batch": "#a9b3c4",
    "reference": "#6f93d8",
    "update": "#d9a441",
}
_DARK_COLOURS = frozenset(
    ("#2456a6", "#a8530a", "#1f6f4c", "#5a3aa6", "#a12e56", "#166c79", "#6b6510", "#9c6b4f")
)
"""Colors on which text is white."""
_LEFT, _BAR, _BAR_WIDTH, _LINE = 16.0, 40.0, WIDTH - 32.0, 23.0
_MAX_TICKS = 160
"""Maximum number of ticks in a timeline. Longer steps are drawn with fewer microbatches."""


def draw_memory(candidate: Candidate, hardware: Hardware) -> Canvas:
    """Draw the memory of one device as a stacked bar."""
    return draw_memory_bars({"": plan_values(candidate, hardware)})


def draw_memory_bars(plans: Mapping[str, Mapping[str, Any]]) -> Canvas:
    """Draw the memory of one device for several plans, as stacked bars with the same scale.

    Args:
        plans: results of `plan_values`, by the title of the bar.
    """
    limit = max(plan["memory_bytes"] for plan in plans.values())
    unit = _BAR_WIDTH / max(limit, *(plan["total_bytes"] for plan in plans.values()))
    canvas = Canvas(width=WIDTH)
    y = 27.0
    for name, plan in plans.items():
        total, capacity = plan["total_bytes"], plan["memory_bytes"]
        title = name or f"memory of one {plan['hardware']}"
        text = (
            f"{title}: {gib(total)} of {gib(capacity)} ({total / capacity:.0%}), "
            f"{verdict(total, capacity)}"
        )
        canvas.write(_LEFT, y, text, TEXT, bold=True)
        _bar(canvas, y + 11, plan, unit)
        canvas.description += f"{text}. "
        y += _BAR + 44
    _scale(canvas, y - 33, unit, limit)
    y += 24
    if len(plans) > 1:
        for number, name in enumerate(plans):
            canvas.write(_LEFT + 94 + 84 * number, y, name.split()[0].strip(","), SMALL, GREY, "r")
        y += _LINE
    terms: dict[str, list[str]] = {}
    for plan in plans.values():
        for name in plan["terms"]:
            terms.setdefault(name, [])
    for name, sizes in terms.items():
        held = [plan["terms"].get(name) for plan in plans.values()]
        sizes += [gib(size) if size else "-" for size in held]
        canvas.boxes.append(Box(_LEFT, y - 12, 14, 14, COLOURS[name], radius=3))
        x = _LEFT + 22
        for size in sizes:
            canvas.write(x + 72, y, size, SMALL, INK, "r")
            x += 84
        y = canvas.write_lines(x, y, TERMS[name].about, SMALL, width=WIDTH - x - 12)
        y += _LINE - round(1.4 * SMALL)
    canvas.height = round(y + 2)
    canvas.title = "Predicted memory of one device by term"
    canvas.description = canvas.description.strip()
    return canvas


def _bar(canvas: Canvas, top: float, plan: Mapping[str, Any], unit: float) -> None:
    """Draw the terms of one plan, with the size of each term that is wide enough."""
    limit = plan["memory_bytes"] * unit
    canvas.boxes.append(Box(_LEFT, top, limit, _BAR, PALE))
    x = _LEFT
    for name, size in plan["terms"].items():
        about = f"{TERMS[name].about}: {gib(size)}"
        canvas.boxes.append(Box(x, top, size * unit, _BAR, COLOURS[name], title=about))
        if text_width(text := gib(size), SMALL) + 6 < size * unit:
            colour = "#ffffff" if COLOURS[name] in _DARK_COLOURS else BOX_INK
            canvas.write(x + size * unit / 2, top + _BAR / 2 + 5, text, SMALL, colour, "m")
        x += size * unit
    canvas.boxes.append(Box(_LEFT + limit - 2, top - 4, 2, _BAR + 8, LIMIT))


def _scale(canvas: Canvas, y: float, unit: float, limit: float) -> None:
    """Draw the axis below the bars."""
    ticks: Sequence[float] = round_ticks(0, limit / 2**30)
    for tick in ticks:
        x = _LEFT + tick * 2**30 * unit
        canvas.boxes.append(Box(x - 0.5, y, 1, 5, DEFERRED))
        text = f"{tick:g} GiB" if tick == ticks[-1] else f"{tick:g}"
        end = x + text_width(text, SMALL) / 2 > WIDTH - 12
        canvas.write(
            x if tick else x - 2, y + 19, text, SMALL, GREY, "r" if end else "m" if tick else "l"
        )


def draw_timeline(candidate: Candidate, hardware: Hardware) -> Canvas:
    """Draw the timeline of one step, with slots as wide as their predicted times."""
    sizes = Sizes(candidate.config).on_platform(hardware.platform)
    slots = partial(CostModel(sizes, hardware).slots, layers=sizes.layers.pipelined)
    schedule = candidate.schedule
    if schedule.num_ticks > _MAX_TICKS:
        schedule = short_schedules(candidate.config)[0]
    forward = slots("F")
    if schedule.mixed:
        later = [slots("I") / forward, max(slots("W") / forward, 0.01)]
    else:
        later = [slots("B") / forward / 2] * 2
    costs = Costs(1.0, *(round(cost, 2) for cost in later))
    canvas = pictures.draw_schedule(schedule, costs)
    parts = sorted(candidate.cost.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {part / candidate.cost.seconds:.1%}" for name, part in parts[:5])
    seconds = format_duration(candidate.cost.seconds)
    text = f"step: {seconds} predicted, MFU {candidate.cost.mfu:.1%} ({shares})"
    if schedule.num_microbatches < candidate.config.pipeline.microbatches:
        text += f"; drawn with only {schedule.num_microbatches} microbatches"
    above = Canvas(PAGE_WIDTH)
    y = above.write_lines(_LEFT, 26, text, TEXT, width=PAGE_WIDTH - 2 * _LEFT)
    above.append_canvas(canvas, y - 14)
    above.title = f"Timeline of one step with the {schedule.name} schedule"
    return above
