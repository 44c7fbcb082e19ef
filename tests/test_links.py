"""Links and anchors in README.md, CONTRIBUTING.md, CHANGELOG.md, docs/ and benchmarks/ exist."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

LINKED = [
    *PAGES,
    *(path for path in sorted(ROOT.glob("*.md")) if path not in PAGES),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
_CODE = re.compile(r"^(```+).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)


@cache
def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give the headings of a page."""
    text = re.sub(r"^(```+).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    slugs: Counter[str] = Counter()
    anchors = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{slugs[slug]}" if slugs[slug] else slug)
        slugs[slug] += 1
    return anchors


def broken_links(page: Path) -> list[str]:
    """Return the targets of links on a page that do not exist in the repository."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", _CODE.sub("C", text))
    links += re.findall(r'(?:src|srcset|href)="([^"]+)"', _CODE.sub("C", text))
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in anchors_of(path)
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_point_to_existing_files_and_headings(page: Path) -> None:
    assert not broken_links(page)


def test_link_to_missing_file_or_heading_is_broken(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b` [c](d.md), e\n\n## Same\n\n## Same\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n[1](other.md) [2](other.md#a-b-c-e) [3](other.md#same-1) [4](#title)\n"
        "[5](missing.md) [6](other.md#missing) [7](#missing) `[8](no.md)` [9](https://arxiv.org)\n"
        '```\n[10](no.md)\n# Comment\n```\n<img src="no.svg"> [11](#comment)\n'
    )
    assert broken_links(page) == [
        *("missing.md", "other.md#missing", "#missing", "#comment"),
        "no.svg",
    ]
