"""Run and check the code blocks of README.md, CONTRIBUTING.md, AGENTS.md and docs/.

A code block without a language, or with `bash` or `sh`, contains commands. A comment on the line
before the block defines how it is tested:

- `<!-- run -->`: a test runs the block. The block after `<!-- output -->` shows the last lines of
  its output, or all of them.
- `<!-- not run: REASON -->`: the block is not run. Commands of maxpipe, make and pip in it are
  checked without running them.
- no comment: the same, and the block must not contain commands of other programs.

In expected output, `...` matches any text, and on a line by itself any number of lines. A number
with a decimal point matches numbers that differ by at most 1%; `0.58...` matches all numbers that
begin with these digits.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from maxpipe.cli import parse
from maxpipe.config.config_files import bundled_configs
from maxpipe.config.load import load
from maxpipe.config.schema import SECTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted(DOCS.rglob("*.md")),
]
TOLERANCE = 0.01
"""Maximum relative difference of numbers with a decimal point."""
STAND_INS = ("my-run.yml", "run.yml", "first/run.yml")
"""Config files of the reader that pages name without showing their content."""
_COMMANDS = ("", "bash", "sh")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_HEREDOC = re.compile(r"<<'(\w+)'.*\n((?:.*\n)*?)\1$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    mark: str
    """Text of the comment before the block."""
    language: str
    text: str
    output: str | None = None
    """Expected last lines of the output; None if the page shows no output."""

    @property
    def has_commands(self) -> bool:
        """Whether the block contains shell commands."""
        return self.language in _COMMANDS

    @property
    def is_run(self) -> bool:
        """Whether a test runs the block."""
        return self.mark == "run"

    @property
    def where(self) -> str:
        """Page and line number."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    for match in _BLOCK.finditer(text):
        mark, language, body = match["mark"] or "", match["language"], match["text"]
        if mark == "output":
            assert blocks and blocks[-1].is_run, f"{page}: output without a block that is run"
            blocks[-1] = Block(**{**vars(blocks[-1]), "output": body})
        else:
            line = text.count("\n", 0, match.start("text"))
            blocks.append(Block(page, line, mark, language, body))
    return blocks


# Blocks that are run.


def run_page(
    page: Path, folder: Path, variables: Mapping[str, str] | None = None, *, update: bool = False
) -> list[str]:
    """Run the marked blocks of a page in a folder, compare their output with the page, and return
    the output of each block.

    Bash runs each block, and stops at the first command that fails. If `update` is set, the
    expected output on the page is replaced.
    """
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    blocks = [block for block in blocks_of(page) if block.is_run]
    assert blocks, f"{page} has no block that is run"
    outputs = []
    for block in blocks:
        outputs.append(_run(block, folder, variables or {}))
        if update and block.output is not None:
            _replace_output(block, outputs[-1])
        else:
            assert_output(block, outputs[-1])
    return outputs


def _run(block: Block, folder: Path, variables: Mapping[str, str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = ["python", "-c"] if block.language == "python" else ["bash", "-euc"]
    ran = subprocess.run(
        [*program, block.text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | dict(variables) | {"PATH": path, "COLUMNS": "100"},
    )
    assert ran.returncode == 0, f"{block.where}:\n{ran.stdout}"
    return ran.stdout


def assert_output(block: Block, output: str) -> None:
    """Assert that the output of a block ends with the lines that the page shows."""
    if block.output is None:
        assert not output.strip(), f"{block.where}: the page does not show the output:\n{output}"
        return
    message = f"{block.where}: the page shows\n{block.output}\nbut the output is\n{output}"
    assert matches_end(block.output, output), message


def matches_end(expected: str, output: str) -> bool:
    """Return whether the last lines of the output match the expected lines."""
    lines = [line.rstrip() for line in expected.strip("\n").splitlines()]
    parts = [".*" if line == "..." else _line_pattern(line) for line in lines]
    # Terminal output may end in blank lines, and its lines in spaces.
    actual = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
    joined = "\n".join(parts).replace(".*\n", "(?:.*\n)?").replace("\n.*", "(?:\n.*)?")
    found = re.search(rf"(?:^|(?<=\n)){joined}\Z", actual, re.DOTALL)
    if found is None:
        return False
    numbers = [float(number) for line in lines for number in _numbers_of(line)]
    return all(
        abs(float(shown) - number) <= TOLERANCE * abs(number)
        for shown, number in zip(found.groups(), numbers, strict=True)
    )


_NUMBER = r"-?\d+\.\d+(?:e[-+]?\d+)?"
_SHOWN_NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w.]*\d|\d*\.\.\.)")
"""A number that is compared by value. In `0.58...`, the shown digits are compared as text."""


def _numbers_of(line: str) -> list[str]:
    return [] if line == "..." else _SHOWN_NUMBER.findall(line)


def _line_pattern(line: str) -> str:
    """Return a pattern for a line, with one group for each number with a decimal point."""
    pattern, position = "", 0
    for match in _SHOWN_NUMBER.finditer(line):
        pattern += re.escape(line[position : match.start()]) + rf"({_NUMBER})"
        position = match.end()
    return (pattern + re.escape(line[position:])).replace(re.escape("..."), "[^\n]*?")


def _replace_output(block: Block, output: str) -> None:
    """Write the last lines of the output to the page; lines with `...` that match are kept."""
    assert block.output is not None
    if matches_end(block.output, output):
        return
    lines = output.strip("\n").splitlines()
    count = len(block.output.splitlines())
    page = block.page.read_text(encoding="utf-8")
    shown = "".join(f"{line.rstrip()}\n" for line in lines[-count:])
    before, after = (
        f"```\n<!-- output -->\n```text\n{block.output}",
        f"```\n<!-- output -->\n```text\n{shown}",
    )
    start = page.index(block.text) + len(block.text)
    assert page[start:].startswith(before), block.where
    block.page.write_text(page[:start] + after + page[start + len(before) :], encoding="utf-8")


# Blocks that are checked without running them.


def problems_of(page: Path, folder: Path) -> list[str]:
    """Return the problems of the commands on a page that no test runs.

    `folder` is an empty folder, which is the working directory. It receives the config files that
    the page writes.
    """
    _write_files(page, folder)
    problems = []
    for block in blocks_of(page):
        if block.mark.startswith("not run") and not re.fullmatch(r"not run: \w.*", block.mark):
            problems.append(f"{block.where}: write <!-- not run: REASON -->")
        if not block.has_commands or block.is_run:
            continue
        is_declared = block.mark.startswith("not run: ")
        for command in commands_of(block.text):
            try:
                _check_command(command, is_declared=is_declared)
            except UndeclaredProgram as error:
                problems.append(f"{block.where}: {' '.join(command)}\n{error}")
                break
            except Exception as error:
                problems.append(f"{block.where}: {' '.join(command)}\n{error}")
    return problems


class UndeclaredProgram(Exception):
    """A block that is not marked contains a command of another program."""


def _write_files(page: Path, folder: Path) -> None:
    """Write the files that the commands on a page would write, and the reader's files."""
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "constraints").symlink_to(ROOT / "constraints")
    stand_in = "model: tiny\ntrain: {steps: 100, batch_size: 128}\n"
    files: dict[str, str] = dict.fromkeys(STAND_INS, stand_in)
    for block in filter(lambda block: block.has_commands, blocks_of(page)):
        for command in commands_of(block.text):
            for option, value in itertools.pairwise(command):
                if option == "--out" and "import" in command:
                    files[f"{value}/config.yml"] = stand_in
                elif option == "--write" and value.endswith(".yml"):
                    files[value] = stand_in
                elif option == "init":
                    files[f"{value}/run.yml"] = stand_in
        for match in _HEREDOC.finditer(block.text):
            start = block.text.rfind("\n", 0, match.start()) + 1
            if name := re.search(r"cat >>? ?(\S+)", block.text[start : match.start()]):
                files[name[1]] = match[2]
    for name, text in files.items():
        if not Path(name).is_absolute():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block, without redirections and here-documents."""
    text = _HEREDOC.sub("", text).replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        skips = False
        for word in lexer:
            if set(word) <= set("|&;"):
                if words:
                    yield words
                words, skips = [], False
            elif set(word) <= set("<>&"):
                skips = True  # the file of a redirection
            elif skips:
                skips = False
            elif words or not re.fullmatch(r"\w+=.*", word):
                words.append(word)
        if words:
            yield words


def _check_command(command: list[str], *, is_declared: bool) -> None:
    program, arguments = Path(command[0]).name, command[1:]
    if program == "python" and arguments[:2] == ["-m", "maxpipe"]:
        program, arguments = "maxpipe", arguments[2:]
    if program == "maxpipe":
        _check_maxpipe(arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    elif program == "pip" and arguments[0] == "install":
        _check_pip(arguments[1:])
    elif program not in ("cd", "export", "source", "mkdir") and not is_declared:
        raise UndeclaredProgram("Write <!-- run --> or <!-- not run: REASON --> before the block.")


def _check_maxpipe(arguments: list[str]) -> None:
    try:
        options = parse(arguments)
    except SystemExit as stopped:  # --help and --version
        assert not stopped.code
        return
    inputs = getattr(options, "inputs", None)
    if inputs is None:
        return
    overrides = [word for word in inputs if re.match(r"[\w.]+=", word)]
    if not _reads_configs(arguments) or overrides == inputs:
        # These commands do not use the batch size of training, which need not fit the mesh.
        fits = ["train.batch_size=4096", "pipeline.microbatches=1"]
        inputs = ["quickstart", *fits, *overrides]
    if arguments[0] == "schedule" and inputs[0] not in bundled_configs():
        inputs = ["quickstart", *inputs[1:]]  # the first argument is a schedule
    load(inputs)


def _reads_configs(arguments: list[str]) -> bool:
    """Return whether the inputs of a command are config files, not data files or runs."""
    name = arguments[0]
    return name in ("train", "launch", "plan", "compile", "doctor", "distill", "schedule") or (
        arguments[:2] == ["config", "print"]
    )


def _check_pip(arguments: list[str]) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for option, value in itertools.pairwise(arguments):
        assert option != "-c" or (ROOT / value).is_file(), f"{value} does not exist"
    for argument in arguments:
        if match := re.fullmatch(r"(?:\.|maxpipe)\[(.*)\]", argument):
            unknown = set(match[1].split(",")) - project["optional-dependencies"].keys()
            assert not unknown, f"unknown extras {unknown}"


def config_examples(page: Path) -> Iterator[Block]:
    """Yield the YAML blocks of a page that are parts of a config."""
    for block in blocks_of(page):
        if block.language == "yaml":
            content = yaml.safe_load(block.text)
            if isinstance(content, dict) and content.keys() <= SECTIONS.keys():
                yield block
