"""The commands in README.md, CONTRIBUTING.md and docs/ work, and print the output that is shown."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from maxpipe.cli import command_line_parser
from maxpipe.config.load import load
from tests import pages
from tests.pages import DOCS, PAGES, ROOT, Block

ELSEWHERE = {
    "docs/tutorials/adapters.md": "tests/restore/test_adapters.py",
    "docs/tutorials/finetune.md": "tests/huggingface/test_finetune.py",
    "docs/tutorials/grpo.md": "tests/train/test_grpo_page.py",
    "docs/tutorials/preferences.md": "tests/huggingface/test_preferences.py",
    "docs/tutorials/sft.md": "tests/huggingface/test_finetune.py",
}
"""Pages whose commands are run by a test that also checks the models that they train."""
QUICK = {
    "docs/guides/fit_in_memory.md",
    "docs/guides/tune_performance.md",
    "docs/guides/write_a_schedule.md",
    "docs/tutorials/gpu_nodes.md",
    "docs/tutorials/tpu_pod.md",
}
"""Pages whose commands run in less than 20 seconds; the others are run by `make test-long`."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUN = [name_of(page) for page in PAGES if any(block.is_run for block in pages.blocks_of(page))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.long)
        for name in RUN
        if name not in ELSEWHERE
    ],
)
def test_commands_on_page_print_shown_output(
    name: str, tmp_path: Path, update_golden: bool
) -> None:
    pages.run_page(ROOT / name, tmp_path, update=update_golden)


def test_pages_with_other_tests_are_run_by_them() -> None:
    for name, test in ELSEWHERE.items():
        assert name in RUN, name
        text = (ROOT / test).read_text(encoding="utf-8")
        assert "run_page(" in text and Path(name).name in text, test


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_not_run_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = pages.problems_of(page, tmp_path)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_prose_are_valid(page: Path) -> None:
    """Subcommands and options in inline code exist; arguments may be placeholders."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    wrong = []
    for code in re.findall(r"(?<!`)`(maxpipe [^`]+)`(?!`)", text):
        parser = command_line_parser()
        for word in " ".join(code.split()).split(" ")[1:]:
            subcommands = next((a.choices for a in parser._actions if a.dest == "command_name"), {})
            if word in (subcommands or {}):
                parser = subcommands[word]  # type: ignore[index]
            elif subcommands and re.fullmatch(r"[a-z]+", word):
                wrong.append(f"{code}: {word} is not a command of {parser.prog}")
            option = re.match(r"--[a-z][a-z-]*", word)
            if option and option[0] not in parser._option_string_actions:
                wrong.append(f"{code}: {parser.prog} has no option {option[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_config_examples_are_valid(page: Path, tmp_path: Path) -> None:
    files: list[str] = []
    for number, block in enumerate(pages.config_examples(page)):
        file = tmp_path / f"example-{number}.yml"
        file.write_text(block.text, encoding="utf-8")
        files.append(str(file))  # an example may refer to sources of an earlier example
        load(["quickstart", *files, "run.name=example"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_import_existing_names(page: Path) -> None:
    for block in pages.blocks_of(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("maxpipe"):
                try:
                    module = importlib.import_module(node.module or "")
                except ModuleNotFoundError as error:  # the module needs an optional package
                    assert not (error.name or "").startswith("maxpipe"), block.where
                    continue
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{block.where}: {alias.name}"


# --- the checks themselves ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "output", "matches"),
    [
        ("done\n", "a\ndone\n", True),
        ("done\n", "done\nmore\n", False),
        ("done\n", "not done\n", False),
        ("loss 1.234\n", "loss 1.239\n", True),
        ("loss 1.234\n", "loss 1.264\n", False),
        ("loss 1.2... nats\n", "loss 1.29 nats\n", True),
        ("loss 1.2... nats\n", "loss 1.31 nats\n", False),
        ("step 10\n", "step 11\n", False),
        ("1.5 s and 2.25\n", "1.5 s and 2.26\n", True),
        ("1.5 s and 2.25\n", "1.6 s and 2.25\n", False),
        ("wrote ... in ... s\n", "wrote /tmp/a in 3.2 s\n", True),
        ("wrote ...\ndone\n", "wrote a\nb\ndone\n", False),
        ("wrote\n...\ndone\n", "wrote\na\nb\ndone\n", True),
        ("wrote\n...\ndone\n", "wrote\ndone\n", True),
        ("...\ndone\n", "a\nb\ndone\n", True),
        ("version 0.1.0\n", "version 0.1.1\n", False),
        ("a (b) [c]* \n", "a (b) [c]*\n", True),
    ],
)
def test_expected_output_matches_last_lines(expected: str, output: str, matches: bool) -> None:
    assert pages.matches_end(expected, output) == matches


def block(text: str, output: str | None = None) -> Block:
    return Block(DOCS / "page.md", 1, "run", "", text, output)


def test_output_that_page_does_not_show_is_an_error() -> None:
    pages.assert_output(block("true"), "\n")
    with pytest.raises(AssertionError, match="does not show the output"):
        pages.assert_output(block("echo a"), "a\n")
    with pytest.raises(AssertionError, match="but the output is"):
        pages.assert_output(block("echo a", "b\n"), "a\n")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("maxpipe train quickstart train.steps=5", ""),
        ("maxpipe trian quickstart", "is not a command"),
        ("maxpipe train quickstart train.stepz=5", "train.stepz"),
        ("maxpipe train quickstart train.steps=five", "train.steps"),
        ("maxpipe train missing.yml", "missing.yml"),
        ("maxpipe train my-run.yml  # a comment", ""),
        ("maxpipe plan quickstart --topologee v5p:2x2x1", "--topologee"),
        ("cd a && maxpipe eval quickstart@best eval.batches=x", "eval.batches"),
        ("maxpipe schedule gpipe --stages 4 | head", "head"),
        ("make test", ""),
        ("make tests", "no target tests"),
        ("pip install '.[gcs]'", ""),
        ("pip install '.[gcss]'", "unknown extras"),
        ("gcloud auth login", "or <!-- not run: REASON -->"),
        ("cat > a.yml <<'END'\ntrain: {steps: 1}\nEND\nmaxpipe train quickstart a.yml", "cat"),
    ],
)
def test_invalid_command_is_a_problem(
    command: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(pages, "ROOT", ROOT)
    page = tmp_path / "page.md"
    page.write_text(f"Text:\n```\n{command}\n```\n")
    monkeypatch.setattr(Block, "where", "page")
    problems = pages.problems_of(page, folder)
    assert bool(problems) == bool(problem) and problem in "".join(problems)


def test_declared_block_may_contain_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Block, "where", "page")
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: needs a cluster -->\n```\nsbatch job.sh\nmaxpipe trian\n```\n")
    [problem] = pages.problems_of(page, folder)
    assert "maxpipe trian" in problem
