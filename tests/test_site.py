"""The documentation site builds without warnings, and reading it needs no other host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[1]
_SPEC = util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
assert _SPEC is not None and _SPEC.loader is not None
hooks = util.module_from_spec(_SPEC)
sys.modules["site_hooks"] = hooks
_SPEC.loader.exec_module(hooks)

MKDOCS = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The build fails on a broken link or anchor, and on a page that is not in the
    navigation."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_on_site(site: Path) -> None:
    for page in hooks.existing_pages():
        name = page.removesuffix(".md")
        folder = Path(name).parent if Path(name).name in ("index", "README") else Path(name)
        assert (site / folder / "index.html").is_file(), page


def test_reading_site_sends_no_request_to_another_host(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source|link(?! rel=\"?(?:canonical|prev|next))|audio|video)\b[^>]*"
        r"(?:src|href|srcset)=\"?(?:https?:)?//[^\" >]+"
    )
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", text), sheet


def test_only_build_by_mike_requests_list_of_versions(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert '"mike"' not in (site / "index.html").read_text(encoding="utf-8")

    def extra() -> dict[str, object]:
        config = SimpleNamespace(nav=[], mdx_configs={"toc": {}}, extra={**MKDOCS["extra"]})
        return hooks.on_config(config).extra

    assert "version" not in extra()
    monkeypatch.setenv("MIKE_DOCS_VERSION", "0.1")
    assert extra()["version"] == {"provider": "mike"}


def test_search_finds_config_key_on_page_of_its_section(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    separator = index["config"]["separator"]
    assert re.split(separator, "train.batch_size=2.5") == ["train", "batch_size", "2.5"]
    boosts = {doc["location"]: doc.get("boost", 1) for doc in index["docs"]}
    assert boosts["reference/config/train/"] > boosts["reference/python_api/"]


def test_site_has_search_and_follows_color_scheme(site: Path) -> None:
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'data-md-color-media="(prefers-color-scheme: dark)"' in home
    assert "md-search__input" in home


def test_every_page_is_in_navigation_once() -> None:
    pages = hooks.pages_of(hooks.expand(MKDOCS["nav"]))
    assert sorted(pages) == hooks.existing_pages()


def test_link_is_adjusted_to_place_of_its_page_on_site() -> None:
    page = ROOT / "docs" / "guides" / "data" / "prepare.md"
    text = "See [a](../../../benchmarks/data.md#x), [b](sources.md) and `[c](x.md)`.\n"
    assert hooks.adjust_links(text, page, "") == text.replace("../../../bench", "../../bench")
    contributing = ROOT / "CONTRIBUTING.md"
    text = (
        "[a](docs/guides/plan.md) [b](README.md) [c](https://arxiv.org)\n```\n[d](docs/e.md)\n```\n"
    )
    assert hooks.adjust_links(text, contributing, "") == text.replace(
        "(docs/guides/plan.md) [b](README.md)", "(guides/plan.md) [b](index.md)"
    )


def test_link_to_file_that_is_not_on_site_is_link_to_repository() -> None:
    page = ROOT / "docs" / "concepts" / "model.md"
    text = "[`llama.py`](../../maxpipe/models/llama.py)"
    assert hooks.adjust_links(text, page, "") == "`llama.py`"
    linked = hooks.adjust_links(text, page, "https://host/maxpipe")
    assert linked == "[`llama.py`](https://host/maxpipe/blob/main/maxpipe/models/llama.py)"


def test_lists_tables_and_code_blocks_are_separated_by_blank_lines() -> None:
    text = (
        "Text:\n- a\n  more\n- b\n\nText\n1. c\n2. d\n```\n- code\n| x |\n```\nText\n| e |\n|---|\n"
    )
    assert hooks.add_blank_lines(text) == (
        "Text:\n\n- a\n  more\n- b\n\nText\n\n1. c\n2. d\n```\n- code\n| x |\n```\n\nText\n\n"
        "| e |\n|---|\n"
    )
