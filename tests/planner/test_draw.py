"""Drawings of plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from maxpipe.hardware import Hardware, published_hardware
from maxpipe.planner.draw import COLOURS, draw_memory, draw_memory_bars, draw_timeline
from maxpipe.planner.memory_terms import TERMS
from maxpipe.planner.report import plan_values
from maxpipe.planner.search import Candidate, evaluate
from maxpipe.schedule.canvas import Canvas
from tests.planner.test_search import STAGED, config_of

V5P = published_hardware()["v5p"]


def candidate(rows: int = 128, **pipeline: object) -> Candidate:
    sections = {"schedule": "interleaved", "repeats": 2, "microbatches": 16, **pipeline}
    return evaluate(config_of(STAGED, rows, **sections), V5P)


def texts(canvas: Canvas) -> str:
    return "\n".join(label.text for label in canvas.labels)


def test_memory_terms_have_distinct_colours() -> None:
    assert COLOURS.keys() == TERMS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_memory_bar_shows_every_term_to_scale() -> None:
    plan = candidate()
    canvas = draw_memory(plan, V5P)
    for name, _ in plan.memory.largest:
        assert TERMS[name].about in texts(canvas)
    assert "fits" in texts(canvas) and "memory of one TPU v5p" in texts(canvas)
    bars = [box for box in canvas.boxes if "GiB" in box.title or "MiB" in box.title]
    limit = next(box for box in canvas.boxes if box.height == bars[0].height)
    share = sum(box.width for box in bars) / limit.width
    assert share == pytest.approx(plan.memory.total / V5P.memory_bytes, rel=0.01)


def test_memory_bars_of_several_plans_share_scale_and_legend() -> None:
    small, large = candidate(128), candidate(256)
    plans = {"small batch": plan_values(small, V5P), "large batch": plan_values(large, V5P)}
    canvas = draw_memory_bars(plans)
    bars = [box for box in canvas.boxes if TERMS["stash"].about in box.title]
    sizes = [dict(plan.memory.largest)["stash"] for plan in (small, large)]
    assert bars[0].width / bars[1].width == pytest.approx(sizes[0] / sizes[1])
    assert texts(canvas).count(TERMS["stash"].about) == 1


def test_timeline_shows_schedule_and_predicted_time() -> None:
    drawn = texts(draw_timeline(candidate(), V5P))
    assert (
        "interleaved: 4 stages x 2 repeats, 16 microbatches" in drawn and "predicted, MFU" in drawn
    )


def test_long_steps_are_drawn_with_fewer_microbatches() -> None:
    canvas = draw_timeline(candidate(2048, microbatches=256), V5P)
    assert "drawn with only 8 microbatches" in texts(canvas).replace("\n", " ")


@pytest.mark.parametrize(("name", "start"), [("plan.svg", b"<svg"), ("plan.png", b"\x89PNG")])
@pytest.mark.parametrize("draw", [draw_memory, draw_timeline])
def test_write_svg_and_png(
    draw: Callable[[Candidate, Hardware], Canvas], name: str, start: bytes, tmp_path: Path
) -> None:
    draw(candidate(schedule="zb_v", remat="names"), V5P).save(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
