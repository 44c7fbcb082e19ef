"""Output shown on a page equals the output of the command above it.

A page shows a command and its output in this form; `pytest --update-golden` writes the output. The
optional number limits the shown lines.

    ```sh
    maxpipe plan llama3-8b --topology h100:8 mesh.ici_fsdp=8
    ```
    <!-- output 12 -->
    ```text
    ...
    ```
    <!-- /output -->
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from maxpipe.cli import main

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"(?P<head>```sh\nmaxpipe (?P<command>[^\n]*)\n```\n<!-- output(?: (?P<lines>\d+))? -->\n)"
    r"(?P<shown>```text\n.*?```\n)<!-- /output -->",
    re.DOTALL,
)


def _pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _cases() -> list[object]:
    """Return a page and a command for each shown output; searches are long tests."""
    return [
        pytest.param(
            page,
            block["command"],
            id=f"{page.stem}-{number}",
            marks=[pytest.mark.long] if "--search" in block["command"] else [],
        )
        for page in _pages()
        for number, block in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")))
    ]


def _render(output: str, lines: str | None) -> str:
    """Return the code block that shows the output, or its first lines and an ellipsis."""
    rows = output.rstrip("\n").split("\n")
    if lines and int(lines) < len(rows):
        rows = [*rows[: int(lines)], "..."]
    return "\n".join(["```text", *(row.rstrip() for row in rows), "```", ""])


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("page", "command"), _cases())
def test_shown_output_is_that_of_command(page: Path, command: str, update_golden: bool) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(shlex.split(command)) == 0
    text = page.read_text(encoding="utf-8")
    block = next(each for each in _BLOCK.finditer(text) if each["command"] == command)
    fresh = _render(out.getvalue(), block["lines"])
    if update_golden:
        page.write_text(
            text[: block.start("shown")] + fresh + text[block.end("shown") :], encoding="utf-8"
        )
        return
    assert block["shown"] == fresh, "run: pytest tests/test_shown_output.py --update-golden"


def test_every_shown_output_has_valid_form() -> None:
    for page in _pages():
        text = page.read_text(encoding="utf-8")
        assert len(_BLOCK.findall(text)) == len(re.findall(r"^<!-- output", text, re.M)), page


def test_changed_output_is_detected() -> None:
    text = "```sh\nmaxpipe x\n```\n<!-- output 2 -->\n```text\na\nb\n...\n```\n<!-- /output -->"
    block = _BLOCK.search(text)
    assert block is not None
    assert _render("a\nb\nc\n", block["lines"]) == block["shown"]
    assert _render("a\nc\nc\n", block["lines"]) != block["shown"]
    assert _render("a\nb\n", block["lines"]) != block["shown"]
