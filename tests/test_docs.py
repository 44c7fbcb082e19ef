"""Images, tables and code in docs/ match the current output of the project."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from maxpipe.cli import main
from maxpipe.commands.explain import AREAS, CodeEntry, code_entries
from maxpipe.config.migration.peer_files import published
from maxpipe.config.schema import Config
from maxpipe.errors import EXIT_CODES
from maxpipe.evals.evaluate import EvalTotals
from maxpipe.evals.generative import GenerativeSummary
from maxpipe.evals.multiple_choice import task_metrics
from maxpipe.models.registry import summaries
from maxpipe.models.spec import Ahead
from maxpipe.objectives import Distill, KlPolicyGradient, Preference
from maxpipe.planner.memory_terms import TERMS
from maxpipe.step.step import BY_SOURCE
from maxpipe.telemetry import metrics
from tests.pages import DOCS, PAGES, ROOT

TESTS = Path(__file__).parent
PICTURES = [
    picture
    for page in sorted(DOCS.rglob("*.md"))
    for picture in re.findall(
        r"<!-- maxpipe (.*?) -->\n!\[[^\]]*\]\(\.\./(.*?)\)", page.read_text(encoding="utf-8")
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
    option += "-timeline" if picture.endswith("_timeline.svg") else ""
    printed([*command.split(), option, str(drawn)])
    file = DOCS / picture
    if update_golden:
        file.parent.mkdir(exist_ok=True)
        file.write_text(drawn.read_text(encoding="utf-8"), encoding="utf-8")
    assert file.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


def test_every_image_is_drawn_and_used() -> None:
    # tests/test_pictures.py compares the images of scripts/pictures.py.
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    script = (ROOT / "scripts" / "pictures.py").read_text(encoding="utf-8")
    for path in (DOCS / "pictures").iterdir():
        drawn = any(picture == f"pictures/{path.name}" for _, picture in PICTURES)
        by_script = re.search(rf"^        (diagrams\.)?{path.stem},$", script, re.MULTILINE)
        assert drawn != bool(by_script), f"{path.name}: drawn by no command, or by two"
        assert re.search(rf"!\[[^\]]*\]\(\S*pictures/{path.name}\)", text), f"{path.name}: unused"


def test_schedule_comparison_matches_command_output(update_golden: bool) -> None:
    page = DOCS / "concepts" / "schedules.md"
    command = re.search(
        r"<!-- compare -->\n```text\nmaxpipe (.*?)\n", page.read_text(encoding="utf-8")
    )
    assert command
    text = f"```text\nmaxpipe {command[1]}\n{printed(command[1].split())}```\n"
    replace_block(page, "compare", text, update_golden)


@pytest.mark.usefixtures("home")
def test_plan_forecast_matches_command_output(update_golden: bool) -> None:
    page = DOCS / "guides" / "plan.md"
    arguments = next(command for command, picture in PICTURES if picture.endswith("plan.svg"))
    text = f"```text\nmaxpipe {arguments}\n{printed(arguments.split())}```\n"
    replace_block(page, "forecast", text, update_golden)


def test_memory_terms_table_is_current(update_golden: bool) -> None:
    rows = [f"| {term.about} | {term.keys} |" for term in TERMS.values()]
    text = "\n".join(["| memory term | keys that reduce the term |", "|---|---|", *rows, ""])
    replace_block(DOCS / "guides" / "plan.md", "terms", text, update_golden)


def format_code_section(entry: CodeEntry) -> list[str]:
    """Format the section of an error code, whose heading is its anchor."""
    codes = " or ".join(map(str, entry.exit_codes))
    text = f"**{entry.title}.** {entry.cause} Exit code: {codes}."
    lines = [f"#### {entry.code}", "", textwrap.fill(text, 100), ""]
    for way in entry.ways:
        lines += textwrap.wrap(way, 100, initial_indent="- ", subsequent_indent="  ")
    return [*lines, ""]


def test_code_sections_of_troubleshooting_are_current(update_golden: bool) -> None:
    lines = []
    for area, name in AREAS.items():
        lines += [f"### Errors: {name}", ""]
        for entry in code_entries().values():
            lines += format_code_section(entry) if entry.area == area else []
    text = "\n".join(["", *lines])
    replace_block(DOCS / "guides" / "troubleshooting.md", "codes", text, update_golden)


@pytest.mark.parametrize("page", ["reference/exit_codes.md", "guides/launch.md"])
def test_exit_code_tables_are_current(page: str, update_golden: bool) -> None:
    rows = [f"| {int(code)} | {meaning} | {restart} |" for code, meaning, restart in EXIT_CODES]
    text = "\n".join(["| exit code | meaning | restart rule |", "|---|---|---|", *rows, ""])
    replace_block(DOCS / page, "exit codes", text, update_golden)


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
        groups = "train|eval|perf|pipe|memory|distill|rollout|layers"
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
    scores = GenerativeSummary(1, 2, 0.5, 0.1, {2: 0.5}, 0.0, 0).metrics("NAME")
    written |= {tag.replace("pass_at_2", "pass_at_K") for tag in scores}
    written.add("harness/TASK/METRIC")
    assert written | {tag for tag, *_ in summaries()} == set(declared)
    assert {tag for _, tags in metrics.CHARTS for tag in tags} <= set(declared)


def test_schedule_code_in_guide_runs(update_golden: bool) -> None:
    page = DOCS / "guides" / "write_a_schedule.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(code), {})
    replace_block(page, "drawing", f"```text\n{out.getvalue()}```\n", update_golden)
    generator = code[0].split("def ")[1]
    assert len(generator.splitlines()) <= 30


# --- names on pages ------------------------------------------------------------------

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
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                names |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                }
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
    modules |= published("torchtitan").known  # `metrics.log_freq` is not a name of maxpipe.metrics
    wrong = []
    for page in PAGES:
        for name in quoted(page, r"([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?"):
            owner, _, last = name.rpartition(".")
            is_file = last in ("py", "md", "yml", "sh", "json", "jsonl", "svg")
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


def test_names_of_other_trainers_are_those_of_the_tables(update_golden: bool) -> None:
    script = ROOT / "scripts" / "migration_table.py"
    command = [sys.executable, str(script), "--names"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    replace_block(DOCS / "guides" / "migrate.md", "names", done.stdout, update_golden)
