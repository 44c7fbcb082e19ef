"""A plan as a picture: a device's memory as a stacked bar, and the timeline of the step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from maxpipe.hardware import Hardware
from maxpipe.plan.advice import TERMS, gib, verdict
from maxpipe.plan.cost_model import CostModel
from maxpipe.plan.search import Candidate, short_schedules
from maxpipe.plan.sizes import Sizes
from maxpipe.schedule import pictures
from maxpipe.schedule.canvas import Box, Canvas, Label, text_width
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
_INK, _GREY, _PALE, _LIMIT = "#1d2633", "#667085", "#eff1f5", "#c4314b"
_LEFT, _BAR, _BAR_WIDTH, _LINE = 68.0, 34.0, 880.0, 22.0
_MOST_TICKS = 160
"""Ticks of a timeline; of a longer step the first groups are drawn."""


def write(candidate: Candidate, hardware: Hardware, path: Path) -> None:
    """Draws a plan to a file, by its name PNG or SVG."""
    canvas = picture(candidate, hardware)
    if path.suffix == ".png":
        canvas.png(path)
    else:
        path.write_text(canvas.svg(), encoding="utf-8")


def picture(candidate: Candidate, hardware: Hardware) -> Canvas:
    """The memory bar above the timeline."""
    canvas = _memory(candidate, hardware)
    canvas.put(_timeline(candidate, hardware), canvas.height)
    return canvas


def _memory(candidate: Candidate, hardware: Hardware) -> Canvas:
    total, limit = candidate.memory.total, hardware.memory_bytes
    unit = _BAR_WIDTH / max(total, limit)
    fits = verdict(total, limit)
    title = f"memory of one {hardware.name}: {gib(total)} of {gib(limit)}, {fits}"
    canvas = Canvas(labels=[Label(_LEFT, 27, title, 15, _INK, "l", bold=True)])
    top = 44.0
    canvas.boxes.append(Box(_LEFT, top, limit * unit, _BAR, _PALE))
    x = _LEFT
    for name, size in candidate.memory.largest:
        about = f"{TERMS[name].about}: {gib(size)}"
        canvas.boxes.append(Box(x, top, size * unit, _BAR, COLOURS[name], title=about))
        x += size * unit
    canvas.boxes.append(Box(_LEFT + limit * unit - 1, top - 5, 2, _BAR + 10, _LIMIT))
    y = top + _BAR + 26
    width = _LEFT + _BAR_WIDTH
    for name, size in candidate.memory.largest:
        about = f"{gib(size)}  {TERMS[name].about}"
        canvas.boxes.append(Box(_LEFT, y - 11, 14, 14, COLOURS[name], radius=3))
        canvas.labels.append(Label(_LEFT + 22, y, about, 12, _INK, "l"))
        width = max(width, _LEFT + 22 + text_width(about, 12))
        y += _LINE
    canvas.width, canvas.height = round(width + 44), round(y + 10)
    return canvas


def _timeline(candidate: Candidate, hardware: Hardware) -> Canvas:
    sizes = Sizes(candidate.config).on(hardware.platform)
    slots = partial(CostModel(sizes, hardware).slots, layers=sizes.ring)
    schedule = candidate.schedule
    if schedule.num_ticks > _MOST_TICKS:
        schedule = short_schedules(candidate.config)[0]
    forward = slots("F")
    if schedule.mixed:
        later = [slots("I") / forward, max(slots("W") / forward, 0.01)]
    else:
        later = [slots("B") / forward / 2] * 2
    costs = Costs(1.0, *(round(cost, 2) for cost in later))
    canvas = pictures.drawing(schedule, costs)
    parts = sorted(candidate.cost.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {part / candidate.cost.seconds:.1%}" for name, part in parts[:5])
    text = f"step: {candidate.cost.seconds:.3g} s, MFU {candidate.cost.mfu:.1%} ({shares})"
    below = Canvas(canvas.width, 40, labels=[Label(_LEFT, 24, text, 13, _INK, "l", bold=True)])
    if schedule.num_microbatches < candidate.config.pipeline.microbatches:
        note = f"drawn with {schedule.num_microbatches} of its microbatches"
        below.labels.append(Label(_LEFT, 40, note, 12, _GREY, "l"))
        below.height = 50
    below.put(canvas, below.height)
    return below
