"""Drawings of plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxpipe.hardware import published_hardware
from maxpipe.planner.memory_terms import TERMS
from maxpipe.planner.report import COLOURS, picture, write
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


def test_picture_shows_memory_and_timeline() -> None:
    plan = candidate()
    drawn = texts(picture(plan, V5P))
    for name, _ in plan.memory.largest:
        assert TERMS[name].about in drawn
    assert "fits" in drawn and "interleaved: 4 stages x 2 repeats, 16 microbatches" in drawn
    bars = [box for box in picture(plan, V5P).boxes if "GiB" in box.title or "MiB" in box.title]
    limit = next(box for box in picture(plan, V5P).boxes if box.height == bars[0].height)
    share = sum(box.width for box in bars) / limit.width
    assert share == pytest.approx(plan.memory.total / V5P.memory_bytes, rel=0.01)


def test_long_steps_are_drawn_with_fewer_microbatches() -> None:
    assert "drawn with only 8 microbatches" in texts(
        picture(candidate(2048, microbatches=256), V5P)
    )


@pytest.mark.parametrize(("name", "start"), [("plan.svg", b"<svg"), ("plan.png", b"\x89PNG")])
def test_write_svg_and_png(name: str, start: bytes, tmp_path: Path) -> None:
    write(candidate(schedule="zb_v", remat="names"), V5P, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
