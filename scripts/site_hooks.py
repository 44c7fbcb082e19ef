"""Hooks of the documentation site, which mkdocs calls (mkdocs.yml).

The site has the pages of docs/ and some pages outside this folder, such as CONTRIBUTING.md. Links
in these pages are relative to their place in the repository, where they also work on GitHub. The
hooks adjust each link to the page's place on the site. A link to a file that is not on the site
becomes a link to the repository if `[project.urls]` in pyproject.toml contains its URL, and plain
text otherwise.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES_OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/*.md")
"""Patterns of the pages outside docs/; each page has the same path on the site."""
_HOME = "index.md"
_LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)|`+[^`]+`+")
_FENCE = re.compile(r"^(```+).*?^\1", re.DOTALL | re.MULTILINE)


def site_path(path: Path) -> str | None:
    """Return the path on the site of a file in the repository, or None if the file is not on it."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return _HOME
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if any(path.match(pattern) for pattern in PAGES_OUTSIDE) else None


def pages_outside() -> list[Path]:
    """Return the existing pages outside docs/."""
    return [path for pattern in PAGES_OUTSIDE for path in sorted(ROOT.glob(pattern))]


def existing_pages() -> list[str]:
    """Return the paths on the site of all pages, in alphabetical order."""
    pages = [*(ROOT / "docs").rglob("*.md"), *pages_outside()]
    return sorted(filter(None, map(site_path, pages)))


def expand(nav: list[Any]) -> list[Any]:
    """Return the navigation with folders replaced by their pages, and without missing pages."""
    pages = existing_pages()
    listed = {*pages_of(nav)}

    def visit(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            inner = visit(value) if isinstance(value, str) else [e for v in value for e in visit(v)]
            if isinstance(value, str):
                return [{title: page} for page in inner]
            return [{title: inner}] if inner else []
        if entry.endswith("/"):
            inside = [page for page in pages if page.startswith(entry) and page not in listed]
            return sorted(inside, key=lambda page: (not page.endswith("README.md"), page[:-3]))
        return [entry] if entry in pages else []

    return [each for entry in nav for each in visit(entry)]


def pages_of(nav: Any) -> list[str]:
    """Return the entries of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [entry for value in values for entry in pages_of(value)]


def adjust_links(text: str, source: Path, repository: str) -> str:
    """Return a page's text with its relative links adjusted to the site."""
    here = site_path(source)
    assert here is not None

    def adjusted(match: re.Match[str]) -> str:
        target, hash_, anchor = (match["target"] or "").partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = Path(os.path.normpath(source.parent / target))
        if not path.is_relative_to(ROOT):
            return match[0]  # mkdocs reports the broken link
        if name := site_path(path):
            return f"{match['text']}({os.path.relpath(name, Path(here).parent)}{hash_}{anchor})"
        if not repository:
            return match["text"][1:-1]
        return f"{match['text']}({repository}/blob/main/{path.relative_to(ROOT).as_posix()})"

    return _map_outside(_FENCE, text, lambda part: _LINK.sub(adjusted, part))


def add_blank_lines(text: str) -> str:
    """Return a page's text with a blank line before each list and table, and after each code block.

    Python-Markdown requires these blank lines, unlike GitHub.
    """

    def separated(part: str) -> str:
        part = re.sub(r"\A\n(?=\S)", "\n\n", part)
        return re.sub(r"(?m)^(?![-*|\s]|\d+\. )(.+)\n(?=[-*] |1\. |\|)", r"\1\n\n", part)

    return _map_outside(_FENCE, text, separated)


def _map_outside(pattern: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied to the parts between the matches of a pattern."""
    parts, position = [], 0
    for match in pattern.finditer(text):
        parts += [change(text[position : match.start()]), match[0]]
        position = match.end()
    return "".join([*parts, change(text[position:])])


def repository() -> str:
    """Return the URL of the repository from pyproject.toml, as in hatch_build.py, or ""."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Source", "").rstrip("/")


# Events of mkdocs.


def on_config(config: Any) -> Any:
    """Complete the navigation, and give headings the anchors that GitHub gives them.

    Pages request the list of versions only in a build by mike, which writes this list.
    """
    from pymdownx.slugs import slugify

    config.nav = expand(config.nav)
    if "MIKE_DOCS_VERSION" not in os.environ:
        config.extra.pop("version", None)
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for path in pages_outside():
        name = site_path(path)
        assert name is not None
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adjust the links and blank lines of a page, and boost the config reference in searches."""
    if page.file.src_uri.startswith("reference/config/"):
        page.meta["search"] = {"boost": 2}
    return add_blank_lines(adjust_links(markdown, Path(page.file.abs_src_path), repository()))
