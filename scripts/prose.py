"""Check the English of the project against the writing rules of CONTRIBUTING.md.

    python scripts/prose.py                     # fail on any match, as `make check` does
    python scripts/prose.py maxpipe/data docs   # only these files and folders
    python scripts/prose.py --counts            # matches by pattern and by file, and their share

Docstrings, comments, messages and Markdown are split into sentences. Inline code, code blocks, link
URLs and text in double quotes are not checked, because they quote programs or other projects.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = (
    "maxpipe",
    "docs",
    "benchmarks",
    "examples",
    "scripts",
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "SECURITY.md",
)
MIN_WORDS = 5
"""Minimum number of words in a sentence; shorter strings are names or labels."""

_NOT_USE = (
    r"(about |around |up to |at most |at least |under |over |less than |more than )?"
    r"(\d|(an? |one |two |half an? )?(second|minute|hour|day)|(as )?long|time|place|effect|part|"
    r"precedence|into account)"
)
"""Words that may follow "take": durations, and the ends of phrases such as "take place"."""
_COMPARATIVE = r"more|less|fewer|longer|shorter|slower|faster|larger|smaller|worse|better|different"
PATTERNS = {
    'a clause with "what" in place of a noun': r"\bwhat\b(?!.*\?$)",
    'a sentence that begins with "Of"; "of which", "of those"': r"^of\b|\bof (which|those)\b",
    'software that "says" or "tells"': r"\b(says?|said|saying|tells?|told)\b",
    '"take" for use, accept or require': rf"\b(takes?|taken|taking|took)\b(?! {_NOT_USE})",
    '"whole" for full, complete or unsharded': r"\bwholes?\b",
    '"ask" and "answer" for request and response': r"\b(ask(s|ed|ing)?|answer(s|ed|ing)?)\b",
    '"stand" or "is there" for exist': (
        r"\b(stands?|stood|standing)\b|\b(is|are|was|were|be) there\b"
    ),
    '"of its own"': r"\bof (its|their|your|our|his) own\b",
    '"beside"': r"\bbesides?\b",
    '"behind"': r"\bbehind\b",
    'a verb with "of" ("makes of", "says of")': (
        r"\b(says?|said|makes?|holds?|held|keeps?|kept|knows?|known|has|have|had|gives?|given|"
        r"takes?|needs?|needed|reads?|does|done|sees?|seen) of\b"
    ),
    '"as it is"': r"\bas (it|they) (is|are|was|were)\b",
    '"go on" for resume or continue': r"\b(goes|go|went|going|gone) on\b",
    '"is no X" for "is not an X"': (rf"(?<!there )\b(is|are|was|were) no\b(?! ({_COMPARATIVE}))"),
    '", too"': r", too\b",
}
_OPENING = (
    r"(of|in|for|with|by|at|on|from|to|as|into|after|before|behind|beside|between|under|over|through|"
    r"per|among|against|within|without|it|its|they|them|their|these|those|that|this|what|which|who|"
    r"the same|one|ones|both|all of|each of)\b"
)
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""|\'{3}(?:[^\\]|\\.)*?\'{3}'''
    r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*""",
    re.DOTALL,
)
"""Matches strings and comments in Python. Strings come first, because they may contain "#"."""
OPENING = "a docstring that begins with a preposition, a pronoun or no noun"
_COMPILED = {name: re.compile(text, re.IGNORECASE) for name, text in PATTERNS.items()}
_COMPILED_OPENING = re.compile(_OPENING, re.IGNORECASE)


class Sentence(NamedTuple):
    path: Path
    line: int
    text: str
    opens_docstring: bool = False


class Match(NamedTuple):
    sentence: Sentence
    pattern: str


def sentences_of(path: Path) -> list[Sentence]:
    """Return the sentences with at least `MIN_WORDS` words in a Python or Markdown file."""
    text = path.read_text(encoding="utf-8")
    parts = _python_texts(text) if path.suffix == ".py" else _markdown_texts(text)
    result = []
    for line, part, is_docstring in parts:
        for number, (offset, sentence) in enumerate(_split(part)):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= MIN_WORDS or (
                is_docstring and not number
            ):
                opens = is_docstring and number == 0
                result.append(Sentence(path, line + offset, sentence, opens))
    return result


def matches_of(sentence: Sentence) -> list[Match]:
    """Return a match for each pattern that occurs in the sentence."""
    text = re.sub(r'"[^"]*"|“[^”]*”|«[^»]*»', "Q", sentence.text)
    names = [name for name, pattern in _COMPILED.items() if pattern.search(text)]
    if sentence.opens_docstring and _COMPILED_OPENING.match(text):
        names.append(OPENING)
    return [Match(sentence, name) for name in names]


def files_of(paths: list[str]) -> list[Path]:
    """Return the Python and Markdown files among the paths and below them, in order."""
    files: list[Path] = []
    for each in paths:
        path = ROOT / each
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.is_file() and file.suffix in (".py", ".md")]


def _python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is docstring) for each docstring, comment and message."""
    nodes = [*ast.walk(ast.parse(source))]
    docstrings = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inside: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield node.lineno, node.value, True
            elif id(node) not in inside and " " in node.value and not _is_regex(node.value):
                yield node.lineno, node.value, False
        elif isinstance(node, ast.JoinedStr):
            inside |= {id(value) for value in node.values}
            values = (v.value if isinstance(v, ast.Constant) else "`x`" for v in node.values)
            yield node.lineno, "".join(map(str, values)), False
    comments: list[tuple[int, str]] = []
    for comment in _STRING_OR_COMMENT.finditer(source):
        if comment[0][0] == "#" and not re.match(r"#\s*(type|noqa|pyright|!)", comment[0]):
            text = comment[0].lstrip("#").strip()
            number = source.count("\n", 0, comment.start()) + 1
            line_start = source.rfind("\n", 0, comment.start()) + 1
            starts_line = not source[line_start : comment.start()].strip()
            if comments and starts_line and comments[-1][0] == number - 1:
                _, before = comments[-1]
                comments[-1] = number, f"{before}\n{text}"
            else:
                comments.append((number, text))
    for line, text in comments:
        yield line - text.count("\n"), text, False


def _is_regex(text: str) -> bool:
    return r"\b" in text or "(?" in text


def _markdown_texts(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, False) for each paragraph, list item, heading and table cell."""
    text = re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    paragraph: list[str] = []
    start, fence = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if match := re.match(r"(```+|~~~+)", stripped):
            fence = "" if fence and stripped.startswith(fence) else fence or match[1]
            stripped = ""
        elif fence or (line.startswith(("    ", ">")) and not paragraph):
            continue
        begins = re.match(r"([-*+]|\d+\.) |#|\|", stripped)
        if (not stripped or begins) and paragraph:
            yield start, "\n".join(paragraph), False
            paragraph = []
        if stripped.startswith("|"):
            for cell in stripped.strip("|").split("|"):
                yield number, cell.strip(), False
        elif stripped:
            start = start if paragraph else number
            paragraph.append(re.sub(r"^([-*+]|\d+\.|#+) ", "", stripped))


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line offset, sentence), with inline code and URLs replaced by placeholders."""
    text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "C", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"https?://\S+", "U", text)
    offset = 0
    for piece in re.split(
        r"(?<=[.!?:;])\s+(?=[A-Z\[(*\d])|\n\s*\n|\n(?=\s*(?:[-*] |\w+(?:, \w+)*: ))", text
    ):
        lead = len(piece) - len(piece.lstrip())
        at = text.find(piece, offset)
        yield text.count("\n", 0, at + lead), " ".join(piece.split())
        offset = at + len(piece)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders (default: all that is checked)")
    parser.add_argument(
        "--counts", action="store_true", help="print counts and the share; never fail"
    )
    options = parser.parse_args(arguments)
    sentences = [s for file in files_of(options.paths or list(CHECKED)) for s in sentences_of(file)]
    matches = [match for sentence in sentences for match in matches_of(sentence)]
    if options.counts:
        counts = Counter(match.pattern for match in matches)
        files = Counter(str(match.sentence.path.relative_to(ROOT)) for match in matches)
        for name, count in [*counts.most_common(), *files.most_common()]:
            print(f"{count:6} {name}")
        matched = len({match.sentence for match in matches if match.pattern != OPENING})
        share = matched / max(1, len(sentences))
        print(f"{matched} of {len(sentences)} sentences match a pattern ({share:.1%})")
        return 0
    for match in matches:
        path = match.sentence.path.relative_to(ROOT)
        print(f"{path}:{match.sentence.line}: {match.pattern}: {match.sentence.text}")
    return 1 if matches else 0


if __name__ == "__main__":
    sys.exit(main())
