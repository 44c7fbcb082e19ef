"""The generated pages of docs/ are current, and the page of the run folder matches the code."""

from __future__ import annotations

import ast
import re
import sys
from importlib import util
from pathlib import Path

import pytest

from maxpipe.config.schema import SECTIONS
from maxpipe.train.session import WRITTEN_FILES

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
_SPEC = util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference_pages.py")
assert _SPEC is not None and _SPEC.loader is not None
reference_pages = util.module_from_spec(_SPEC)
sys.modules["reference_pages"] = reference_pages
_SPEC.loader.exec_module(reference_pages)


def test_generated_pages_are_current(update_golden: bool) -> None:
    if update_golden:
        reference_pages.write_pages()
    stale = [path.relative_to(ROOT) for path in reference_pages.stale_pages()]
    assert not stale, f"run `make docs`: {', '.join(map(str, stale))}"


def test_changed_missing_and_unknown_pages_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = {tmp_path / name: name for name in ("same.md", "changed.md", "missing.md")}
    monkeypatch.setattr(reference_pages, "pages", lambda: current)
    monkeypatch.setattr(reference_pages, "CONFIG_FOLDER", tmp_path)
    (tmp_path / "same.md").write_text("same.md")
    (tmp_path / "changed.md").write_text("edited")
    (tmp_path / "unknown.md").write_text("")
    stale = {path.name for path in reference_pages.stale_pages()}
    assert stale == {"changed.md", "missing.md", "unknown.md"}
    reference_pages.write_pages()
    assert not reference_pages.stale_pages()
    assert (tmp_path / "changed.md").read_text() == "changed.md"


def test_every_config_section_has_page_with_valid_tables() -> None:
    for section in SECTIONS:
        page = (REFERENCE / "config" / f"{section}.md").read_text(encoding="utf-8")
        tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
        assert tables
        for rows in map(str.splitlines, tables):
            bars = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            assert len(bars) == 1 and bars <= {4, 5}, rows  # as many cells as the header
            assert len(rows) >= 3
        assert "## See also" in page
    # Named sections and items of lists are on the page of their section.
    assert "## optim.lr_phases[]" in (REFERENCE / "config" / "optim.md").read_text("utf-8")
    assert "## data.mixture.NAME" in (REFERENCE / "config" / "data.md").read_text("utf-8")


def written_events() -> dict[str, set[str]]:
    """Return the names of the fields of each event that the package writes, keyed by event."""
    events: dict[str, set[str]] = {}
    for path in (ROOT / "maxpipe").rglob("*.py"):
        constants: dict[str, str] = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Assign([ast.Name(name)], ast.Constant(str(value))):
                    constants[name] = value
                case ast.Call(function, [kind, *_]) if re.search(
                    r"\b_?events\.write$|^self\._record$", ast.unparse(function)
                ):
                    choices = [kind.body, kind.orelse] if isinstance(kind, ast.IfExp) else [kind]
                    fields = {field.arg for field in node.keywords if field.arg}
                    for choice in choices:
                        if isinstance(choice, ast.Name) and choice.id in constants:
                            choice = ast.Constant(constants[choice.id])
                        if isinstance(choice, ast.Constant):
                            events.setdefault(str(choice.value), set()).update(fields)
    return events


def test_page_lists_every_event_with_its_fields() -> None:
    page = (REFERENCE / "run_folder.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", page.partition("## Events")[2], re.M)
    described = dict(rows[1:])  # the first row is the header
    assert described.keys() == written_events().keys()
    for event, fields in written_events().items():
        text = described["bad_step"] if "same as for `bad_step`" in described[event] else ""
        for field in fields:
            assert f"`{field}`" in described[event] + text, f"{event}: {field}"


def test_page_lists_every_file_of_run_folder() -> None:
    page = (REFERENCE / "run_folder.md").read_text(encoding="utf-8")
    for name in WRITTEN_FILES:
        assert f"`{name.removesuffix('.new')}`" in page
