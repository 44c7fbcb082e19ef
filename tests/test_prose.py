"""The prose linter works, and every checked file passes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("prose", ROOT / "scripts" / "prose.py")
assert _SPEC is not None and _SPEC.loader is not None
prose = importlib.util.module_from_spec(_SPEC)
sys.modules["prose"] = prose
_SPEC.loader.exec_module(prose)

WRONG = {
    "Stores what a teacher computes for all sequences.": 'a clause with "what" in place of a noun',
    "Of several processes each has one device here.": (
        'a sentence that begins with "Of"; "of which", "of those"'
    ),
    "The compiler says that the step fits.": 'software that "says" or "tells"',
    "The option takes a number of tokens.": '"take" for use, accept or require',
    "The whole batch is read at once.": '"whole" for full, complete or unsharded',
    "A process asks for the next batch.": '"ask" and "answer" for request and response',
    "The file must be there before the run.": '"stand" or "is there" for exist',
    "It runs in a process of its own here.": '"of its own"',
    "Evaluation runs beside training on the device.": '"beside"',
    "The gather is hidden behind the matmul.": '"behind"',
    "The report of the compiler makes of it little.": 'a verb with "of" ("makes of", "says of")',
    "The folder is left as it is by the command.": '"as it is"',
    "The run goes on from the checkpoint.": '"go on" for resume or continue',
    "The path is no folder that exists.": '"is no X" for "is not an X"',
    "Masks are applied in evaluations, too.": '", too"',
}
RIGHT = [
    "Store teacher logits for every sequence.",
    'Report that the log contains "what the compiler says of it".',
    "A step takes about 20 seconds on one device.",
    "There is no limit on the number of files.",
    "What does the command do with a full disk?",
    "The flag `whole` selects the unsharded array.",
]


def _patterns(tmp_path: Path, source: str, name: str = "module.py") -> list[str]:
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")
    return [
        match.pattern
        for sentence in prose.sentences_of(path)
        for match in prose.matches_of(sentence)
    ]


def test_each_pattern_has_example():
    assert set(WRONG.values()) == set(prose.PATTERNS)


@pytest.mark.parametrize("sentence", WRONG)
def test_pattern_matches_in_comments_messages_and_pages(tmp_path: Path, sentence: str):
    for name, source in {
        "a.py": f"# {sentence}\n",
        "b.py": f"raise ValueError({sentence!r})\n",
        "c.md": f"{sentence}\n",
        "d.md": f"| key | {sentence} |\n",
    }.items():
        assert _patterns(tmp_path, source, name) == [WRONG[sentence]]


@pytest.mark.parametrize("sentence", RIGHT)
def test_plain_and_quoted_sentences_match_no_pattern(tmp_path: Path, sentence: str):
    assert _patterns(tmp_path, f"{sentence}\n", "page.md") == []


@pytest.mark.parametrize("docstring", ["For each layer, its size.", "The same.", "It is a size."])
def test_docstring_opening_is_checked_only_in_docstrings(tmp_path: Path, docstring: str):
    source = f'def f():\n    """{docstring}"""\n'
    assert _patterns(tmp_path, source) == [prose.OPENING]
    assert _patterns(tmp_path, f"# {docstring}\n") == []


def test_code_blocks_and_inline_code_are_ignored(tmp_path: Path):
    page = "Run this command on one host:\n\n```\nsay what it takes of the whole\n```\n"
    assert _patterns(tmp_path, page, "page.md") == []


def test_match_has_line_number_of_its_sentence(tmp_path: Path):
    path = tmp_path / "page.md"
    path.write_text("# Title\n\nA first sentence.\nThe run goes on from the checkpoint.\n")
    matched = [each for each in prose.sentences_of(path) if prose.matches_of(each)]
    assert [each.line for each in matched] == [4]


def test_project_passes_prose_linter(capsys: pytest.CaptureFixture[str]):
    code = prose.main([])
    assert code == 0, capsys.readouterr().out
