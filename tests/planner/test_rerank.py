"""Reranking of layouts by compiler reports."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxpipe.errors import Code, ConfigError
from maxpipe.planner import rerank
from maxpipe.planner.compile import CollectiveTraffic, CompileReport
from maxpipe.planner.instruction_costs import ProfileLine
from maxpipe.planner.report import format_ranking, search_values
from maxpipe.planner.search import Candidate, SearchResult, best_layouts, evaluate
from maxpipe.planner.topology import Topology, parse_topology
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


def test_rerank_adds_exposed_communication(
    best: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = iter([FakeReport(1.0, exposed=2.0), FakeReport(2.0, exposed=0.5)])
    monkeypatch.setattr(rerank, "compile_step", lambda *_: next(reports))
    first, second = rerank.rerank_by_compiler(best[:2], TOPOLOGY, lambda _: None)
    assert (first.candidate, first.compiled_seconds) == (best[1], 2.5)
    assert (second.candidate, second.compiled_seconds) == (best[0], 3.0)
    cost = best[1].cost
    assert first.mfu == pytest.approx(cost.model_flops / cost.peak_flops / 2.5)
    text = format_ranking([first, second])
    assert f"MFU {first.mfu:.1%}, 20.0% exposed" in text
    assert f"MFU {cost.mfu:.1%} predicted" in text


def test_rerank_keeps_predicted_order_without_cycle_estimates(
    best: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = iter([FakeReport(0.0, fits=False), FakeReport(0.0), FakeReport(0.0)])
    monkeypatch.setattr(rerank, "compile_step", lambda *_: next(reports))
    found = rerank.rerank_by_compiler(best[:3], TOPOLOGY, lambda _: None)
    assert [best.index(each.candidate) for each in found] == [1, 2, 0]
    assert found[0].seconds == best[1].cost.seconds and found[0].compiled_seconds is None
    assert "has no time estimates" in format_ranking(found)
    values = search_values(SearchResult(4, 0, best, 4), TOPOLOGY.hardware, found[:0])
    assert values["compiled"] == []


def test_rerank_compares_layouts_with_different_batch_sizes(
    best: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = dataclasses.replace(best[0].config.train, batch_size=64)
    pipeline = best[0].config.pipeline
    pipeline = dataclasses.replace(pipeline, microbatches=2 * pipeline.microbatches)
    larger = evaluate(
        dataclasses.replace(best[0].config, train=train, pipeline=pipeline), TOPOLOGY.hardware
    )
    reports = iter([FakeReport(1.0), FakeReport(1.9)])
    monkeypatch.setattr(rerank, "compile_step", lambda *_: next(reports))
    found = rerank.rerank_by_compiler([best[0], larger], TOPOLOGY, lambda _: None)
    assert [each.candidate for each in found] == [larger, best[0]]


def test_rerank_reuses_saved_reports(
    best: list[Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    report = compile_report(1.5)

    def compile_step(loaded: Any, *_: Any) -> CompileReport:
        compiled.append(loaded.config)
        return report

    monkeypatch.setattr(rerank, "compile_step", compile_step)

    def run(topology: Topology = TOPOLOGY) -> list[rerank.RankedCandidate]:
        return rerank.rerank_by_compiler(best[:2], topology, lambda _: None, reports=tmp_path)

    run()
    found = run()
    assert len(compiled) == 2 and len(list(tmp_path.iterdir())) == 2
    assert [each.report for each in found] == [report, report]
    run(parse_topology("v4:2x2x2"))
    assert len(compiled) == 4
    for path in tmp_path.iterdir():
        path.write_text("{}")
    assert [each.report for each in run()] == [report, report] and len(compiled) == 6


def _remove(path: Path) -> None:
    path.unlink()


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_link(path: Path) -> None:
    target = path.parent.parent / "other.txt"
    target.write_text("not a report")
    path.unlink()
    path.symlink_to(target)


def _replace_by_large_file(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(rerank.MAX_REPORT_BYTES + 1)


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _write(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


@pytest.mark.parametrize(
    "damage",
    [
        _remove,
        _replace_by_folder,
        _replace_by_pipe,
        _replace_by_link,
        _replace_by_large_file,
        *map(_write, (b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"[" * 100_000, b"{}")),
        _edit(cycles="1e9"),
        _edit(temp_bytes=1.5),
        _edit(temp_bytes=-1),
        _edit(seconds=float("nan")),
        _edit(seconds=None),
        _edit(pieces={"forward": -1.0}),
        _edit(mesh=[]),
        _edit(entries=[1]),
        _edit(collectives=[{"kind": "all-gather"}]),
        _edit(collectives={"kind": "all-gather"}),
    ],
)
def test_damaged_reports_are_not_used(
    damage: Callable[[Path], None],
    best: list[Candidate],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report, compiled = compile_report(1.5), []

    def compile_step(loaded: Any, *_: Any) -> CompileReport:
        compiled.append(loaded)
        return report

    monkeypatch.setattr(rerank, "compile_step", compile_step)
    folder, lines = tmp_path / "reports", []
    folder.mkdir()

    def run() -> list[rerank.RankedCandidate]:
        return rerank.rerank_by_compiler(best[:1], TOPOLOGY, lines.append, reports=folder)

    run()
    (path,) = folder.iterdir()
    damage(path)
    (found,) = run()
    assert found.report == report and len(compiled) == 2
    is_replaced = path.is_file() and not path.is_symlink()
    assert is_replaced == (not any("was not saved to" in line for line in lines))
    if is_replaced:
        run()
        assert len(compiled) == 2
    elif path.is_symlink():
        assert path.read_text() == "not a report"


def test_reports_of_other_source_code_are_not_used(
    best: list[Candidate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = iter([compile_report(1.0), compile_report(2.0)])
    monkeypatch.setattr(rerank, "compile_step", lambda *_: next(reports))
    for checksum, seconds in (("a", 1.0), ("a", 1.0), ("b", 2.0)):
        monkeypatch.setattr(rerank, "_source_checksum", lambda checksum=checksum: checksum)
        (found,) = rerank.rerank_by_compiler(best[:1], TOPOLOGY, lambda _: None, reports=tmp_path)
        assert found.report is not None and found.report.seconds == seconds


def compile_report(seconds: float) -> CompileReport:
    """Return a report with one synchronous collective that takes a fifth of the step."""
    fields = {field.name: field for field in dataclasses.fields(CompileReport)}
    numbers = {name: 1 for name in fields if fields[name].type in ("int", "float")}
    line = ProfileLine("all-gather, synchronous", "", "", "", "", 1.0, 2.5e8, 0.0, 0.0)
    texts = {"topology": "v5p:2x2x2", "attention": "splash", "mesh": {}, "versions": {}}
    lists: dict[str, Any] = {"collectives": [], "transfers": [], "pieces": {}, "buffers": {}}
    values: dict[str, Any] = numbers | texts | lists
    values |= {"seconds": seconds, "cycles": 1e9, "entries": [line]}
    return CompileReport(**values)


def test_exposed_time_is_the_time_of_collectives() -> None:
    report = compile_report(2.0)
    assert report.exposed_seconds == pytest.approx(0.5)
    assert report.to_json()["exposed_seconds"] == report.exposed_seconds
    assert dataclasses.replace(report, cycles=0.0, entries=[]).exposed_seconds == 0.0
    sent = [
        CollectiveTraffic("all-gather", "fsdp", "ici", asynchronous, 1.0, size, 0.0)
        for asynchronous, size in ((True, 3.0), (False, 1.0))
    ]
    assert dataclasses.replace(report, collectives=sent).asynchronous_share == 0.75
