"""Planted faults: a slow stage and a slow link are named in random places."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.profiles.planted import Fault, PlantedStep, planted_step

STAGES = 4
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb_v": 2}
PLACEMENTS = 20


@pytest.fixture(scope="module")
def compiled() -> Iterator[object]:
    @cache
    def compile_step(schedule: str) -> PlantedStep:
        repeats = SCHEDULES[schedule]
        return planted_step(patch, schedule=schedule, stages=STAGES, repeats=repeats)

    with pytest.MonkeyPatch.context() as patch:
        yield compile_step


def places(kind: str) -> list[tuple[str, Fault]]:
    """Return random faults, with enough work for 25% of a layer's time or more."""
    numbers = random.Random(kind)
    schedules = [list(SCHEDULES)[number % len(SCHEDULES)] for number in range(PLACEMENTS)]
    faults = []
    for _ in range(PLACEMENTS):
        stage, matmuls = numbers.randrange(STAGES), numbers.randrange(10, 24)
        direction = numbers.choice((-1, 1)) if kind == "link" else 0
        faults.append(Fault(stage, matmuls if kind == "stage" else 2 * matmuls, direction))
    return list(zip(schedules, faults, strict=True))


@pytest.mark.parametrize(("schedule", "fault"), places("stage"), ids=str)
def test_slow_stage_is_named(schedule: str, fault: Fault, compiled, tmp_path: Path) -> None:
    bubble = compiled(schedule).profile(tmp_path, fault).bubble
    assert bubble is not None and bubble.fault is not None, bubble
    assert (bubble.fault.kind, bubble.fault.stage) == ("slow stage", fault.stage), bubble
    assert f"slow stage {fault.stage}" in bubble.summary()


@pytest.mark.parametrize(("schedule", "fault"), places("link"), ids=str)
def test_slow_link_is_named(schedule: str, fault: Fault, compiled, tmp_path: Path) -> None:
    bubble = compiled(schedule).profile(tmp_path, fault).bubble
    assert bubble is not None and bubble.fault is not None, bubble
    receiver = (fault.stage + fault.direction) % STAGES
    assert bubble.fault.kind == "exposed message", bubble
    assert (bubble.fault.stage, bubble.fault.receiver) == (fault.stage, receiver), bubble


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_step_without_fault_names_none(schedule: str, compiled, tmp_path: Path) -> None:
    # Other programs on this machine can delay a stage during one profile. A fault is in all.
    step = compiled(schedule)
    bubbles = []
    for number in range(3):
        bubbles.append(step.profile(tmp_path / str(number)).bubble)
        assert bubbles[-1] is not None
        if bubbles[-1].fault is None:
            return
    places = {(bubble.fault.kind, bubble.fault.stage) for bubble in bubbles}
    assert len(places) > 1, bubbles
