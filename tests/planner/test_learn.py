"""Choice of the next layout to measure, given earlier measurements."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest

from maxpipe.planner import rerank
from maxpipe.planner.rerank import NOISE, choose_next, posterior_seconds
from maxpipe.planner.search import Candidate, best_layouts
from maxpipe.planner.topology import parse_topology
from tests.planner.test_search import config_of

SEARCHES = [
    ("v5p:2x2x2", {"mesh.ici_tensor": 1, "pipeline.remat": "names"}),
    pytest.param(("v5p:2x4x4", {}), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=SEARCHES, ids=["8 devices", "32 devices"])
def candidates(request: pytest.FixtureRequest) -> list[Candidate]:
    devices, fixed = request.param
    found = best_layouts(config_of(rows=32), parse_topology(devices), fixed, keep=60).best
    assert len(found) == 60
    return sorted(found, key=lambda each: each.cost.seconds)  # the search orders ties differently


def slow(key: str, values: Container[Any], factor: float) -> Callable[[Candidate], float]:
    """Return true step times of a machine that is slow for layouts with this setting."""
    return lambda found: (
        found.cost.seconds * (factor if found.layout_keys.get(key) in values else 1.0)
    )


def test_best_predicted_layout_runs_first(candidates: list[Candidate]) -> None:
    assert choose_next(candidates, {}) == 0
    mean, error = posterior_seconds(candidates, {})
    assert mean == pytest.approx([each.cost.seconds for each in candidates])
    assert (
        error == pytest.approx(error[0]) and error[0] > 1
    )  # of absolute times, not of their order


def test_measurements_correct_predictions_of_similar_layouts(candidates: list[Candidate]) -> None:
    gather = candidates[0].config.pipeline.weight_gather
    takes = slow("pipeline.weight_gather", {gather}, 1.2)
    ran = {index: takes(candidates[index]) for index in range(0, 60, 3)}
    assert len({candidates[index].config.pipeline.weight_gather for index in ran}) > 1
    mean, error = posterior_seconds(candidates, ran)
    for index, seconds in ran.items():
        assert mean[index] == pytest.approx(seconds, rel=2 * NOISE) and error[index] < 2 * NOISE
    others = [index for index in range(60) if index not in ran]
    off = np.log([mean[index] / takes(candidates[index]) for index in others])
    before = np.log([each.cost.seconds / takes(each) for each in candidates])[others]
    assert np.square(off - off.mean()).sum() < 0.25 * np.square(before - before.mean()).sum()


def test_uniform_slowdown_keeps_ranking(candidates: list[Candidate]) -> None:
    mean, _ = posterior_seconds(candidates, {0: 3.0 * candidates[0].cost.seconds})
    assert mean[0] == pytest.approx(mean.min(), rel=1e-3)
    assert mean == pytest.approx([3.0 * each.cost.seconds for each in candidates], rel=0.01)


def test_search_avoids_layouts_measured_slow(
    candidates: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast layout is found in fewer runs than its predicted rank."""
    key = "pipeline.microbatches"
    of_the_first = {each.layout_keys.get(key) for each in candidates[:8]}
    assert any(each.layout_keys.get(key) not in of_the_first for each in candidates)
    takes = slow(key, of_the_first, 1.2)
    truth = sorted(takes(each) for each in candidates)
    monkeypatch.setattr(rerank, "_measure_step", lambda found, *_: takes(found))
    lines: list[str] = []
    ran = rerank.rerank_by_measurement(candidates, 8, [], lines.append)
    in_order = min(takes(each) for each in candidates[:8])
    assert len(ran) == len({id(each.candidate) for each in ran}) == len(lines) == 8
    assert ran[0].measured is not None and ran[0].measured < in_order
    assert ran[0].measured <= truth[2]
    assert [each.seconds for each in ran] == sorted(each.seconds for each in ran)


def test_layout_that_does_not_fit_runs_once_and_ranks_last(
    candidates: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Candidate] = []

    def measured(found: Candidate, *_: Any) -> float | None:
        tries.append(found)
        return None if len(tries) == 2 else found.cost.seconds

    monkeypatch.setattr(rerank, "_measure_step", measured)
    # All four layouts are tried, although one of them fails.
    ran = rerank.rerank_by_measurement(candidates[:4], 9, [], lambda _: None)
    assert len(ran) == len({id(each) for each in tries}) == 4
    assert [each.fits for each in ran] == [True, True, True, False] and ran[3].candidate is tries[1]
