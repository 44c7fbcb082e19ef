"""The README is short, and its commands, output, numbers and links are correct."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from maxpipe.cli import command_line_parser
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.schedule.catalog import SCHEDULES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = README.splitlines()
FRONT_PAGES = ("README.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "docs/comparison.md")
COUNTS = {"ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13}


def code_lines(page: str) -> list[str]:
    """Return the lines of all code blocks of a page, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def commands_of(page: str) -> list[str]:
    """Return the arguments of all `maxpipe` commands in the code blocks of a page."""
    pattern = re.compile(r"^maxpipe (?!--)(.*)")
    return [found[1] for line in code_lines(page) if (found := pattern.match(line))]


# --- size and layout -------------------------------------------------------------------------


def test_readme_has_at_most_200_lines_and_12_kilobytes() -> None:
    assert len(LINES) <= 200
    assert len(README.encode()) <= 12 * 1024


def test_lines_outside_tables_have_at_most_120_characters() -> None:
    assert [line for line in LINES if len(line) > 120 and not line.startswith("|")] == []


def test_first_screen_names_purpose_number_and_setup() -> None:
    first = "\n".join(LINES[:30])
    for text in ("trains decoder language models in JAX", "20 MiB", "make quickstart", "make test"):
        assert text in first


# --- commands --------------------------------------------------------------------------------


def quickstart() -> Config:
    return load([str(ROOT / "configs" / "quickstart.yml")]).config


def test_quickstart_loads_with_shown_overrides() -> None:
    (command,) = [each for each in commands_of(README) if "run.name=tensor" in each]
    _, file, *overrides = shlex.split(command)
    config = load([str(ROOT / file), *overrides]).config
    assert (config.mesh.ici_stage, config.mesh.ici_tensor) == (2, 2)


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md", "CONTRIBUTING.md"])
def test_shown_make_targets_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert shown and shown <= targets


@pytest.mark.parametrize("page", FRONT_PAGES)
def test_named_keys_commands_and_scripts_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    sections = {field.name for field in dataclasses.fields(Config)}
    for section, key in re.findall(r"`(\w+)\.(\w+)(?:=[^`]*)?`", text):
        if section in sections:
            assert hasattr(getattr(quickstart(), section), key), f"{section}.{key}"
    names = set(command_line_parser().command_names)
    for name in re.findall(r"`maxpipe ([a-z]+)", text):
        assert name in names, name
    for script in re.findall(r"python\s(\w+/\w+\.py)", text):
        assert (ROOT / script).is_file(), script


def test_number_of_schedules_is_current() -> None:
    (count,) = re.findall(r"\[(\w+) schedules\]", README)
    assert COUNTS[count] == len(SCHEDULES)


def test_reference_links_of_comparison_are_defined_and_used() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    defined = re.findall(r"^\[(\w+)\]: https://", text, re.MULTILINE)
    used = re.findall(r"\]\[(\w+)\]", text)
    assert len(defined) == len(set(defined)) and set(defined) == set(used)


def test_comparison_cells_about_other_projects_have_dated_source() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| maxpipe" not in line]
    assert len(rows) >= 20
    for row in rows:
        _, ours, *others = (cell.strip() for cell in row.strip("|").split("|"))
        assert ours and len(others) == 3, row
        for cell in others:
            dated = re.search(r"\(\[\d{4}-\d{2}(-\d{2})?\]\[\w+\].*\)$", cell)
            assert dated or cell == "does not apply", cell


# --- comparison and numbers ------------------------------------------------------------------


def test_readme_states_that_no_multi_accelerator_run_was_measured() -> None:
    text = " ".join(README.split())
    assert "No multi-accelerator run has been measured; TPU numbers are compiler estimates" in text


# --- quickstart ------------------------------------------------------------------------------

SHOWN = re.findall(r"<!-- quickstart -->\n```text\n(.*?)```", README, re.DOTALL)[0].splitlines()


def train_quickstart(folder: Path, until: str) -> list[str]:
    """Return the output of `maxpipe train quickstart`, stopped after a line that begins so."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-m", "maxpipe", "train", str(ROOT / "configs" / "quickstart.yml")]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line.rstrip())
            if line.startswith(until):
                run.send_signal(signal.SIGINT)
    return lines


def is_printed(shown: str, lines: list[str]) -> bool:
    return any(line == shown or line.startswith(f"{shown}  ") for line in lines)


def test_first_lines_of_quickstart_are_printed(tmp_path: Path) -> None:
    lines = train_quickstart(tmp_path, until="step    10/160")
    first = SHOWN[: 1 + next(i for i, line in enumerate(SHOWN) if line.startswith("step"))]
    assert len(first) == 5
    for shown in first:
        assert is_printed(shown, lines), f"{shown!r} is not in the output:\n" + "\n".join(lines)


@pytest.mark.long
def test_all_shown_lines_of_quickstart_are_printed(tmp_path: Path) -> None:
    lines = train_quickstart(tmp_path, until="never")
    for shown in SHOWN:
        assert is_printed(shown, lines), f"{shown!r} is not in the output:\n" + "\n".join(lines)


# --- package index ---------------------------------------------------------------------------

_SPEC = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
assert _SPEC is not None and _SPEC.loader is not None
hatch_build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hatch_build)


def test_package_description_has_absolute_links_with_source_url() -> None:
    text = hatch_build.description(README, "https://example.org/maxpipe")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    assert "https://example.org/maxpipe/raw/main/docs/pictures/schedules.svg" in targets
    assert "https://example.org/maxpipe/blob/main/docs/comparison.md" in targets


def test_package_description_without_source_url_has_no_relative_link() -> None:
    text = hatch_build.description(README, "")
    assert re.findall(r"\]\((?!https:)", text) == []
    assert "![" not in text and "docs/comparison.md gives the source" in text


def test_project_urls_are_public_addresses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, url in project.get("urls", {}).items():
        assert re.fullmatch(r"https://[\w.-]+\.[a-z]+/[\w./-]+", url), name
        assert "example" not in url and "placeholder" not in url, name
