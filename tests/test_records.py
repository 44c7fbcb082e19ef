"""The records of the project are complete: changelog, decisions, benchmarks, citation, agents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
BENCHMARKS = ROOT / "benchmarks"
DATE = r"\d{4}-\d{2}-\d{2}"


def table_rows(page: Path) -> list[list[str]]:
    """Return the cells of every table row on a page, without the rows of dashes."""
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return [row for row in rows if set("".join(row)) != {"-"}]


# --- changelog -----------------------------------------------------------------------------


def test_changelog_is_short_and_follows_keep_a_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog"
    assert len(lines) <= 60
    releases = [line for line in lines if line.startswith("## ")]
    assert releases and all(
        re.fullmatch(rf"## \[\d+\.\d+\.\d+\] - (unreleased|{DATE})", line) for line in releases
    )
    headings = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_changelog_entry_has_one_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(next(line for line in lines if line.startswith("## ")))
    for line in lines[start:]:
        assert not line or line.startswith(("## ", "### ", "- ")), line
        assert len(line) <= 140, line


# --- decisions -----------------------------------------------------------------------------

PAGES = sorted(DECISIONS.glob("[0-9]*.md"))
INDEX = {row[0]: row for row in table_rows(DECISIONS / "README.md")[1:]}


def test_decision_numbers_have_no_gap() -> None:
    numbers = [int(page.name[:4]) for page in PAGES]
    assert numbers == list(range(1, len(PAGES) + 1))
    assert list(INDEX) == [str(number) for number in numbers]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_decision_index_agrees_with_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    head = re.match(rf"# (\d+)\. (.+)\n\n\*\*Status\.\*\* ({DATE})\. ([^.:]+?)[.:]", text)
    assert head, f"{page.name} must begin with its number, title, date and status"
    number, title, date, status = head.groups()
    status = re.sub(r"\[decision\s(\d+)\]\([^)]*\)?", r"\1", " ".join(status.split()))
    shown = INDEX[str(int(page.name[:4]))]
    assert shown[:4] == [number, f"[{title}]({page.name})", status, date]
    assert 3 <= len(shown[4].split()) <= 25


def test_superseded_decision_names_existing_page() -> None:
    superseded = [row for row in INDEX.values() if row[2].startswith("Superseded")]
    assert {row[0] for row in superseded} >= {"2", "11"}
    for row in superseded:
        assert row[2].rpartition(" ")[2] in INDEX, row


def test_decision_status_is_one_of_four() -> None:
    for row in INDEX.values():
        assert re.fullmatch(
            r"Accepted|Engineering note|Unused|Superseded( in part)? by \d+", row[2]
        ), row


# --- benchmarks ----------------------------------------------------------------------------

RESULTS = {
    found[1]: row
    for row in table_rows(BENCHMARKS / "README.md")
    if (found := re.fullmatch(r"\[(\w+)\]\(\1\.md\)", row[0]))
}
KINDS = {"measured", "estimated", "losses measured, cycles estimated"}
BADGES = ("> **Compiler estimate.**", "> **Compiler report.**", "> **Losses are measured")


def test_every_benchmark_page_has_row() -> None:
    pages = {page.stem for page in BENCHMARKS.glob("*.md")} - {"README"}
    assert set(RESULTS) == pages


@pytest.mark.parametrize("name", RESULTS)
def test_benchmark_row_is_complete(name: str) -> None:
    _, question, answer, kind, date, hardware, command = RESULTS[name]
    assert question.endswith("?") and answer and hardware
    assert kind in KINDS
    assert re.fullmatch(rf"{DATE} \([0-9a-f]{{8}}\)", date), date
    script = re.fullmatch(r"`python (benchmarks/\w+\.py)`", command)
    assert script and (ROOT / script[1]).is_file(), command


@pytest.mark.parametrize("name", RESULTS)
def test_page_of_compiler_estimates_begins_with_badge(name: str) -> None:
    page = (BENCHMARKS / f"{name}.md").read_text(encoding="utf-8")
    third = page.splitlines()[2]
    assert third.startswith(BADGES) == (RESULTS[name][3] != "measured"), third
    script = (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
    assert third.startswith("> ") <= (third in script), f"{name}.py must write the badge"


NUMBERS = [
    ("gpu_step", ["62,343", "51.8%", "61,923"], ["62,343", "51.8%", "61,923"]),
    ("predicted_memory", ["66 of 66"], ["66 of 66 predictions are within 10%"]),
    ("reliability", ["0.092%", "0.0001%", "3.6%"], ["0.092%", "0.0001%", "3.6%"]),
    ("ahead_of_time_ranking", ["0.931"], ["0.931"]),
    ("adapters", ["3.92", "12.23"], ["3.92", "12.23"]),
    ("exchange", ["0.96", "0.95", "1.49"], ["0.96", "0.95", "1.49"]),
    ("gpu_checklist", ["54.7%", "1.02", "0.13"], ["54.7%", "1.02 x PyTorch", "0.13 x PyTorch"]),
]
"""Numbers of a row, and the texts that the page must contain."""


@pytest.mark.parametrize(("name", "shown", "stated"), NUMBERS, ids=lambda value: str(value)[:20])
def test_numbers_of_row_are_on_page(name: str, shown: list[str], stated: list[str]) -> None:
    page = (BENCHMARKS / f"{name}.md").read_text(encoding="utf-8")
    for number in shown:
        assert number in RESULTS[name][2]
    for text in stated:
        assert text in page
