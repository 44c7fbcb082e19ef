"""Figures in README.md and docs/ equal those in the results pages of benchmarks/.

A figure in prose is written `<!-- claim: NAME -->0.092%<!-- /claim -->`; `CLAIMS` defines how its
value is computed from the tables of a results page. `<!-- data: PAGE -->` and `<!-- /data -->`
enclose a table with figures from a results page of benchmarks/: each of its numbers with a decimal
point or a thousands separator must be a rounded number of that page.

`pytest --update-golden tests/test_claims.py` rewrites the claims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

RESULTS = ROOT / "benchmarks"
_CLAIM = re.compile(r"(?<!`)(<!-- claim: ([\w.]+) -->)(.*?)(<!-- /claim -->)", re.DOTALL)
_DATA = re.compile(r"<!-- data: (\w+) -->(.*?)<!-- /data -->", re.DOTALL)
_DATA_NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+\.\d+)(?![\w,]*\.?\d)")

Row = Mapping[str, str]


@cache
def rows_of(page: str) -> tuple[Row, ...]:
    """Return the rows of all tables on a results page, keyed by column."""
    rows: list[Row] = []
    header: list[str] = []
    for line in (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if not header:
            header = cells
        elif set(line) - set("|- :"):
            rows.append(dict(zip(header, cells, strict=True)))
    return tuple(rows)


def cell(page: str, column: str, *first: str) -> str:
    """Return the cell in the first row that begins with these cells and has this column."""
    for row in rows_of(page):
        if column in row and tuple(row.values())[: len(first)] == first:
            return row[column]
    raise AssertionError(f"benchmarks/{page}.md has no column {column} in a row {first}")


def number(page: str, column: str, *first: str) -> float:
    """Return the number at the start of a cell."""
    return leading_number(cell(page, column, *first))


def leading_number(text: str) -> float:
    match = re.match(r"-?[\d,]*\.?\d+", text)
    assert match, text
    return float(match[0].replace(",", ""))


def column_of(page: str, column: str) -> list[float]:
    """Return all numbers in a column."""
    return [leading_number(row[column]) for row in rows_of(page) if row.get(column)]


def _largest_error(ratios: Iterable[float]) -> str:
    """Return the limit that contains all predictions, from the ratios to the actual values."""
    return f"{math.ceil(max(abs(ratio - 1) for ratio in ratios) * 100)}%"


def _ratios_within_ten_percent() -> str:
    ratios = column_of("predicted_memory", "ratio")
    return f"{sum(abs(ratio - 1) <= 0.1 for ratio in ratios)} of {len(ratios)}"


def _gpu_step_error(predicted: str, actual: str) -> str:
    rows = [row for row in rows_of("gpu_step") if row.get(predicted) and row.get(actual)]
    return _largest_error(
        leading_number(row[predicted]) / leading_number(row[actual]) for row in rows
    )


_AUTODIFF = "circular, autodiff through the scan"
_INTERLEAVED = "interleaved, gather per iteration"

CLAIMS: Mapping[str, Callable[[], str]] = {
    "adapters.full": lambda: f"{number('adapters', 'peak', 'all parameters'):.1f} GiB",
    "adapters.lora": lambda: f"{number('adapters', 'peak', 'LoRA'):.1f} GiB",
    "decode.speedup": lambda: "{:.1f} to {:.1f} times".format(
        *sorted(column_of("decode", "ratio"))
    ),
    "decode.70b": lambda: f"{number('decode_ahead_of_time', 'peak', 'stage 4 x tensor 8')} GiB",
    "exchange.import": lambda: cell("exchange", "relative to a copy", "maxpipe import"),
    "gpu_checklist.mfu": lambda: cell("gpu_checklist", "MFU", "maxpipe, T 4096, names"),
    "exchange.quantized": lambda: cell("exchange", "relative to a copy", "maxpipe import` (MXFP4)"),
    "gpu_checklist.plan": lambda: cell("gpu_checklist", "result", "memory, `maxpipe plan").split(
        " above"
    )[0],
    "gpu_plan.error": lambda: _largest_error(column_of("gpu_ahead_of_time", "ratio")),
    "gpu_step.memory_error": lambda: _gpu_step_error("predicted", "GiB used"),
    "gpu_step.time_error": lambda: _gpu_step_error("predicted ms", "ms"),
    "packing.best_fit_seconds": lambda: f"{number('packing', 'seconds', 'best_fit'):.0f} s",
    "packing.first_fit_seconds": lambda: f"{number('packing', 'seconds', 'first_fit'):.0f} s",
    "predicted_memory.within_10": _ratios_within_ten_percent,
    "reliability.guard": lambda: cell(
        "reliability", "relative to a step", "guard against non-finite values, per step"
    ),
    "reliability.monitoring": lambda: cell(
        "reliability", "relative to a step", "monitoring and event log, per step"
    ),
    "schedules.autodiff_8": lambda: f"{number('schedules', 'M = 8', _AUTODIFF):.0f} MiB",
    "schedules.autodiff_64": lambda: f"{number('schedules', 'M = 64', _AUTODIFF) / 1024:.1f} GiB",
    "schedules.cpu_time": lambda: f"{number('schedules', 'CPU time', _INTERLEAVED):.0%}",
    "schedules.interleaved_8": lambda: f"{number('schedules', 'M = 8', _INTERLEAVED):.0f} MiB",
    "schedules.interleaved_64": lambda: f"{number('schedules', 'M = 64', _INTERLEAVED):.0f} MiB",
}
"""Maps each claim to a function that returns its text."""


def claims_on(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each claim on a page."""
    for match in _CLAIM.finditer(page.read_text(encoding="utf-8")):
        yield match[2], " ".join(match[3].split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_claims_equal_results(page: Path, update_golden: bool) -> None:
    if update_golden:
        text = page.read_text(encoding="utf-8")
        page.write_text(
            _CLAIM.sub(lambda match: f"{match[1]}{CLAIMS[match[2]]()}{match[4]}", text),
            encoding="utf-8",
        )
    for name, text in claims_on(page):
        assert text == CLAIMS[name](), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_claim_does_not_begin_line(page: Path) -> None:
    """A comment at the start of a line would end the paragraph."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^\s*<!-- /?claim.*", text, re.MULTILINE)


def unknown_numbers(text: str, data: str) -> list[str]:
    """Return the numbers in a text that are not rounded numbers of the data."""
    known = {float(found.replace(",", "")) for found in _DATA_NUMBER.findall(data)}
    unknown = []
    for shown in _DATA_NUMBER.findall(text):
        digits = len(shown.partition(".")[2])
        value = float(shown.replace(",", ""))
        if not any(abs(each - value) <= 0.5 * 10**-digits + 1e-9 for each in known):
            unknown.append(shown)
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_numbers_in_tables_of_results_are_results(page: Path) -> None:
    for source, text in _DATA.findall(page.read_text(encoding="utf-8")):
        data = (RESULTS / f"{source}.md").read_text(encoding="utf-8")
        assert not unknown_numbers(text, data), f"not in benchmarks/{source}.md"


def test_every_claim_is_made_on_a_page() -> None:
    made = {name for page in PAGES for name, _ in claims_on(page)}
    assert made == set(CLAIMS)


def test_numbers_are_compared_after_rounding() -> None:
    data = "| 62,343 | 48.34 GiB | 51.8% | 2.041 x |"
    assert not unknown_numbers("62,343 tokens/s, 48.3 GiB, 51.8%, 2.04, 8 devices, 0.10.2", data)
    assert unknown_numbers("62,344 or 48.4 or 51.9%", data) == ["62,344", "48.4", "51.9"]
