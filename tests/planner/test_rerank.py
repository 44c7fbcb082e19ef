"""Reranking of layouts by compiler reports."""

from __future__ import annotations

from typing import Any

import pytest

from maxpipe.errors import Code, ConfigError
from maxpipe.planner import rerank
from maxpipe.planner.report import format_ranking
from maxpipe.planner.search import Candidate, best_layouts
from maxpipe.planner.topology import parse_topology
from tests.planner.test_search import config_of

TOPOLOGY = parse_topology("v5p:2x2x2")


@pytest.fixture(scope="module")
def best() -> list[Candidate]:
    fixed = {"mesh.ici_stage": 4, "mesh.ici_tensor": 1, "pipeline.weight_gather": "iteration"}
    return best_layouts(config_of(rows=32), TOPOLOGY, fixed, keep=4).best


class FakeReport:
    """Attributes read from a compile report."""

    total_bytes = 2**30
    flops, model_flops, asynchronous_share = 1.1e12, 1e12, 0.25
    collectives: tuple[Any, ...] = ()

    def __init__(self, seconds: float, fits: bool = True, exposed: float = 0.0):
        self.seconds, self.fits, self.exposed_seconds = seconds, fits, exposed


def test_rerank_puts_fitting_layouts_first_by_speed(
    best: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = [each.cost.seconds for each in best]
    reports = iter([FakeReport(9.0, fits=False), FakeReport(2.0), None, FakeReport(1.0)])

    def compile_step(*_: Any) -> FakeReport:
        report = next(reports)
        if report is None:
            raise ConfigError.one(
                Code.MEM_PREDICTED, "command line", "v5p", "the step needs more", "Shrink it."
            )
        return report

    monkeypatch.setattr(rerank, "compile_step", compile_step)
    lines: list[str] = []
    checked = rerank.rerank_by_compiler(best, TOPOLOGY, lines.append)
    assert [best.index(each.candidate) for each in checked] == [3, 1, 2, 0]
    assert [each.fits for each in checked] == [True, True, False, False]
    assert checked[0].seconds >= 1.0 and checked[2].seconds == predicted[2]
    assert len(lines) == 5 and "the step needs more" in "\n".join(lines)
    assert format_ranking(checked).count("does not fit") == 2


def test_rerank_uses_prediction_without_cycle_estimates(
    best: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerank, "compile_step", lambda *_: FakeReport(0.0))
    found = rerank.rerank_by_compiler(best[:1], TOPOLOGY, lambda _: None)[0]
    assert found.seconds == best[0].cost.seconds
