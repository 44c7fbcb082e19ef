"""Images, tables and code in docs/ match the current output of the project."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.config.schema import Config
from maxpipe.evals.evaluate import EvalTotals
from maxpipe.evals.multiple_choice import task_metrics
from maxpipe.models.registry import summaries
from maxpipe.models.spec import Ahead
from maxpipe.objectives import Distill, KlPolicyGradient, Preference
from maxpipe.planner.memory_terms import TERMS
from maxpipe.step.step import BY_SOURCE
from maxpipe.telemetry import metrics

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PICTURES = [
    picture
    for page in ("concepts/engine.md", "guides/plan.md", "tutorials/adapters.md")
    for picture in re.findall(
        r"<!-- maxpipe (.*?) -->\n!\[\w+\]\(\.\./(.*?)\)", (DOCS / page).read_text(encoding="utf-8")
    )
]


def printed(arguments: list[str]) -> str:
    """Return the output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    return out.getvalue()


def replace_block(page: Path, name: str, text: str, update: bool) -> None:
    """Check or update the text between the markers `name` of a page."""
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
def test_images_match_output_of_their_commands(
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


def test_every_image_is_used() -> None:
    # Images of runs are drawn by commands on their pages, and differ between machines.
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    of_runs = re.findall(r"<!-- drawn by .*? -->\n!\[\w+\]\(\.\./(.*?)\)", text)
    shown = {DOCS / name for name in [*of_runs, *(name for _, name in PICTURES)]}
    assert shown == set((DOCS / "pictures").iterdir())


def test_schedule_comparison_matches_command_output(update_golden: bool) -> None:
    page = DOCS / "concepts" / "engine.md"
    command = re.search(r"<!-- compare -->\n```\nmaxpipe (.*?)\n", page.read_text(encoding="utf-8"))
    assert command
    text = f"```\nmaxpipe {command[1]}\n{printed(command[1].split())}```\n"
    replace_block(page, "compare", text, update_golden)


@pytest.mark.usefixtures("home")
def test_plan_forecast_matches_command_output(update_golden: bool) -> None:
    page = DOCS / "guides" / "plan.md"
    arguments = next(command for command, picture in PICTURES if picture.endswith("plan.svg"))
    text = f"```\nmaxpipe {arguments}\n{printed(arguments.split())}```\n"
    replace_block(page, "forecast", text, update_golden)


def test_memory_terms_table_is_current(update_golden: bool) -> None:
    rows = [f"| {term.about} | {term.keys} |" for term in TERMS.values()]
    text = "\n".join(["| memory term | keys that reduce the term |", "|---|---|", *rows, ""])
    replace_block(DOCS / "guides" / "plan.md", "terms", text, update_golden)


def test_every_fault_has_test(update_golden: bool) -> None:
    page = DOCS / "contributing" / "faults.md"
    rows = re.findall(r"^\| (\w\d+) \| (.*?) \| (.*?) \|", page.read_text(encoding="utf-8"), re.M)
    shown: dict[str, list[str]] = {fault: [] for fault, _, _ in rows}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "pytest.mark.fault(" in source else ():
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    name = f"{path.relative_to(TESTS)}::{node.name}"
                    for argument in mark.args:
                        shown[ast.literal_eval(argument)].append(f"`{name}`")
    assert all(shown.values()), [fault for fault, names in shown.items() if not names]
    lines = ["| id | fault | result | tests |", "|---|---|---|---|"]
    lines += [f"| {fault} | {a} | {b} | {'<br>'.join(shown[fault])} |" for fault, a, b in rows]
    replace_block(page, "faults", "\n".join([*lines, ""]), update_golden)


def test_metrics_table_is_current(update_golden: bool) -> None:
    replace_block(DOCS / "reference" / "metrics.md", "metrics", metrics.table(), update_golden)


def test_every_written_metric_is_declared() -> None:
    """Written metrics are found by their tags in the code: `train/`, `eval/`, `source/` etc."""
    declared = [metric.tag for metric in metrics.METRICS]
    assert len(declared) == len(set(declared))
    written: set[str] = set()
    folders = ("train", "step", "evals", "posttrain")
    for path in (path for folder in folders for path in (ROOT / "maxpipe" / folder).glob("*.py")):
        code = path.read_text(encoding="utf-8")
        groups = "train|eval|perf|pipe|memory|distill|rollout"
        written |= set(re.findall(rf'"((?:{groups})/\w+)"', code))
        of_sources = re.findall(r'source_tag\(name, "(\w+)"\)', code)
        written |= {f"source/NAME/{each}" for each in of_sources}
    written -= set(BY_SOURCE)  # intermediate sums from which losses are computed
    written |= {f"train/{name}" for name in Distill.report_names}
    written |= {f"train/loss_{name}" for name in Ahead(1, 1, 1.0).losses}
    written |= set(EvalTotals(1.0, 1.0, 1.0).metrics_for("NAME"))
    written |= {f"{when}/{name}" for when in ("train", "eval") for name in Preference.report_names}
    written |= {f"train/{name}" for name in KlPolicyGradient.report_names}
    accuracies: Any = {"accuracy": 1.0, "accuracy_by_bytes": 1.0}
    written |= set(task_metrics("NAME", accuracies))
    assert written | {tag for tag, *_ in summaries()} == set(declared)
    assert {tag for _, tags in metrics.CHARTS for tag in tags} <= set(declared)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("guides/data.md", marks=pytest.mark.long),
        pytest.param("tutorials/distill.md", marks=pytest.mark.long),
        "guides/plugins.md",
        "tutorials/first_run.md",
    ],
)
def test_commands_on_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Return the output of `maxpipe --help`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["--help"])
    return out.getvalue()


def test_schedule_code_in_guide_runs(update_golden: bool) -> None:
    page = DOCS / "guides" / "write_a_schedule.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(code), {})
    replace_block(page, "drawing", f"```\n{out.getvalue()}```\n", update_golden)
    generator = code[0].split("def ")[1]
    assert len(generator.splitlines()) <= 30


def test_schedule_commands_in_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "guides" / "write_a_schedule.md").read_text(encoding="utf-8")
    commands = re.findall(r"^maxpipe (schedule .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert printed(command.split())


def test_links_point_to_existing_files() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


# --- names on pages ------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted((ROOT / "maxpipe").rglob("*.py"))


def quoted(page: Path, pattern: str) -> set[str]:
    """Return the inline code of a page that matches a pattern."""
    return set(re.findall(rf"`{pattern}`", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_on_page_exist(page: Path) -> None:
    folders = [ROOT, *(ROOT / name for name in ("maxpipe", "tests", "benchmarks", "docs"))]
    plain = {path.name for path in SOURCES}
    for name in quoted(page, r"((?:\w+/)*\w+\.py)(?:::\w+)?"):
        assert name in plain or any((folder / name).is_file() for folder in folders), name


def defined(path: Path) -> dict[str, set[str]]:
    """Return the names that a file defines: module names under "", members under their class."""
    found: dict[str, set[str]] = {"": set()}
    owners: list[tuple[str, list[ast.stmt]]] = [
        ("", ast.parse(path.read_text(encoding="utf-8")).body)
    ]
    for owner, body in owners:
        names = found.setdefault(owner, set())
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                owners.append((node.name, node.body))
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            names |= {
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
    return found


def test_code_names_on_pages_exist() -> None:
    """`module.name`, `Class.name` and `maxpipe.module.name` are checked, but not config keys."""
    sections = {field.name for field in dataclasses.fields(Config)}
    members: dict[str, set[str]] = {}
    modules: set[str] = set()
    for path in SOURCES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules.add(name.removesuffix(".__init__"))
        for owner, names in defined(path).items():
            for known in (owner,) if owner else (path.stem, name):
                members.setdefault(known, set()).update(names)
    wrong = []
    for page in PAGES:
        for name in quoted(page, r"([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?"):
            owner, _, last = name.rpartition(".")
            is_file = last in ("py", "md", "yml", "sh", "json", "jsonl")
            ours = owner in members and owner.partition(".")[0] not in sections
            if ours and not is_file and name not in modules and last not in members[owner]:
                wrong.append(f"{page.name}: {name}")
    assert not wrong, "\n".join(wrong)


# --- words -----------------------------------------------------------------------------------

QUAINT = re.compile(
    r"""(?<![a-z])(?: foret(?:ell|old)[a-z]* | so[ _]many | anew
    | (?:put|set)(?:s|ting)?[ _](?:[a-z]+[ _])?aside | wave[ _]lengths? | bell[ _]curves?
    | crowd[a-z]* | judg[a-z]+ | sums[ _]of[ _]gradients | who[ _]asks | in[ _]vain
    | for[ _]want[ _]of | whoever | (?<!~)nobody | lies | is[ _]told
    | (?<![-+*/.\w])1[ ](?:stage|repeat|chunk|layer)s
    )(?![a-z])""",
    re.VERBOSE | re.IGNORECASE,
)
"""Archaic words that have a standard technical term; see CONTRIBUTING.md."""
TEXT = {".md", ".py", ".yml", ".toml", ".sh", ".c", ""}
HISTORY = ("CHANGELOG.md", "LICENSE", "tests/golden/", "tests/test_docs.py")


def test_no_archaic_words() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    wrong = []
    for name in listed.stdout.split("\n"):
        path = ROOT / name
        if name.startswith(HISTORY) or path.suffix not in TEXT or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            wrong += [f"{name}:{number}: {found[0]}" for found in QUAINT.finditer(line)]
    assert not wrong, "\n".join(wrong)
