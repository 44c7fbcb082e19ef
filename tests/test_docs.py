"""Pages in docs/: their pictures, tables and code are what the project makes today."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.plan.advice import TERMS
from maxpipe.telemetry import metrics

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PICTURES = [
    picture
    for page in ("engine.md", "plan.md")
    for picture in re.findall(
        r"<!-- maxpipe (.*?) -->\n!\[\w+\]\((.*?)\)", (DOCS / page).read_text(encoding="utf-8")
    )
]


def printed(arguments: list[str]) -> str:
    """What the command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    return out.getvalue()


def replace_block(page: Path, name: str, text: str, update: bool) -> None:
    """The text between the page's markers of this name is `text`."""
    content = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert pattern.search(content), f"{page.name} has no block {name}"
    fresh = pattern.sub(lambda found: f"{found[1]}{text}{found[2]}", content)
    if update:
        page.write_text(fresh, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == fresh, (
        "run: pytest tests/test_docs.py --update-golden"
    )


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("command", "picture"), PICTURES, ids=[name for _, name in PICTURES])
def test_pictures_are_what_their_command_draws(
    command: str, picture: str, tmp_path: Path, update_golden: bool
) -> None:
    drawn = tmp_path / "drawn.svg"
    option = "--draw" if command.startswith("plan") else "--svg"
    printed([*command.split(), option, str(drawn)])
    file = DOCS / picture
    if update_golden:
        file.parent.mkdir(exist_ok=True)
        file.write_text(drawn.read_text(encoding="utf-8"), encoding="utf-8")
    assert file.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


def test_every_picture_is_shown() -> None:
    assert {DOCS / name for _, name in PICTURES} == set((DOCS / "pictures").iterdir())


def test_the_comparison_is_what_its_command_prints(update_golden: bool) -> None:
    page = DOCS / "engine.md"
    command = re.search(r"<!-- compare -->\n```\nmaxpipe (.*?)\n", page.read_text(encoding="utf-8"))
    assert command
    text = f"```\nmaxpipe {command[1]}\n{printed(command[1].split())}```\n"
    replace_block(page, "compare", text, update_golden)


@pytest.mark.usefixtures("home")
def test_the_forecast_is_what_its_command_prints(update_golden: bool) -> None:
    page = DOCS / "plan.md"
    arguments = next(command for command, picture in PICTURES if picture.endswith("plan.svg"))
    text = f"```\nmaxpipe {arguments}\n{printed(arguments.split())}```\n"
    replace_block(page, "forecast", text, update_golden)


def test_the_terms_are_those_of_plans(update_golden: bool) -> None:
    rows = [f"| {term.about} | {term.keys} |" for term in TERMS.values()]
    text = "\n".join(["| what takes memory | smaller with |", "|---|---|", *rows, ""])
    replace_block(DOCS / "plan.md", "terms", text, update_golden)


def test_every_fault_is_shown_by_a_test(update_golden: bool) -> None:
    page = DOCS / "faults.md"
    rows = re.findall(r"^\| (\w\d+) \| (.*?) \| (.*?) \|", page.read_text(encoding="utf-8"), re.M)
    shown: dict[str, list[str]] = {fault: [] for fault, _, _ in rows}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    name = f"{path.relative_to(TESTS)}::{node.name}"
                    for argument in mark.args:
                        shown[ast.literal_eval(argument)].append(f"`{name}`")
    assert all(shown.values()), [fault for fault, names in shown.items() if not names]
    lines = ["| id | what happens | what comes of it | shown by |", "|---|---|---|---|"]
    lines += [f"| {fault} | {a} | {b} | {'<br>'.join(shown[fault])} |" for fault, a, b in rows]
    replace_block(page, "faults", "\n".join([*lines, ""]), update_golden)


def test_every_metric_is_explained(update_golden: bool) -> None:
    replace_block(DOCS / "metrics.md", "metrics", metrics.table(), update_golden)


def test_every_metric_that_is_written_is_declared() -> None:
    """By the tags in the code: `train/`, `eval/`, `perf/`, `pipe/` and `memory/`."""
    declared = [metric.tag for metric in metrics.METRICS]
    assert len(declared) == len(set(declared))
    written: set[str] = set()
    for name in ("train/step.py", "train/loop.py", "train/evaluate.py"):
        code = (TESTS.parent / "maxpipe" / name).read_text(encoding="utf-8")
        written |= set(re.findall(r'"((?:train|eval|perf|pipe|memory)/\w+)"', code))
    assert written == set(declared)
    assert {tag for _, tags in metrics.CHARTS for tag in tags} <= set(declared)


@pytest.mark.parametrize("page", ["data.md", "first_run.md"])
def test_the_commands_of_a_page_work(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- run -->\n```\n(.*?)```", text, re.DOTALL)
    assert blocks
    if "maxpipe init" in text and "init" not in printed_help():
        pytest.skip("this version has no `maxpipe init`")
    (tmp_path / "configs").symlink_to(TESTS.parent / "configs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks:
        ran = subprocess.run(
            ["bash", "-euc", block],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "FAILED" not in ran.stdout


def printed_help() -> str:
    """The commands that there are."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["--help"])
    return out.getvalue()


def test_the_schedule_in_the_guide_runs(update_golden: bool) -> None:
    page = DOCS / "write_a_schedule.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(code), {})
    replace_block(page, "drawing", f"```\n{out.getvalue()}```\n", update_golden)
    generator = code[0].split("def ")[1]
    assert len(generator.splitlines()) <= 30


def test_the_files_of_the_guide_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "write_a_schedule.md").read_text(encoding="utf-8")
    commands = re.findall(r"^maxpipe (schedule .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert printed(command.split())


def test_links_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name}: {target}"
