"""Error codes: every code has an entry and a raise site, and its ways out name existing things."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxpipe.cli import command_line_parser
from maxpipe.commands.explain import AREAS, CodeEntry, code_entries
from maxpipe.config.config_files import bundled_configs
from maxpipe.config.load import load
from maxpipe.config.schema import KEYS, SECTIONS
from maxpipe.errors import EXIT_CODES, Code, ConfigError, ExitCode

PACKAGE = Path(__file__).parents[1] / "maxpipe"
ENTRIES = list(code_entries().values())
IDS = [entry.code for entry in ENTRIES]
EXITS = {
    "StorageError": ExitCode.STORAGE,
    "ReplicaError": ExitCode.STORAGE,
    "UnreachableError": ExitCode.HANG,
    "with_code": ExitCode.HANG,  # messages of a run that hangs or has lost a process
    "ScheduleError": ExitCode.BUG,
}
"""Exit codes of the calls that receive a code. All other calls are config errors and warnings."""
NAMES = [code.name for code in Code]


def calls_with_codes() -> Iterator[tuple[str, ast.Call, str]]:
    """Yield (code name, call, name of the called function) for every code that is passed."""
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "Code." not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function = ast.unparse(node.func).replace("super().__init__", "ScheduleError")
            first = node.args[0]
            for part in [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "Code":
                    yield part.attr, node, function


def test_every_code_has_an_entry_in_the_order_of_its_area() -> None:
    assert list(Code) == IDS
    assert list(AREAS) == list(dict.fromkeys(entry.area for entry in ENTRIES))


def test_codes_of_each_area_are_numbered_in_order() -> None:
    numbers: Counter[str] = Counter()
    for code in Code:
        area = code.split("-")[1]
        numbers[area] += 1
        assert code == f"MP-{area}-{numbers[area]:03}" and code.name.startswith(f"{area}_")


def test_released_codes_are_unchanged(update_golden: bool) -> None:
    golden = Path(__file__).parent / "golden" / "error_codes.txt"
    released = golden.read_text(encoding="utf-8").splitlines()
    lines = [f"{code} {code.name}" for code in Code]
    assert not set(released) - set(lines), "a code was renamed or removed"
    if update_golden:
        golden.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        released = lines
    assert released == lines, "run: pytest tests/test_error_codes.py --update-golden"


def test_every_code_is_raised_with_the_exit_codes_of_its_entry() -> None:
    exits: dict[str, set[int]] = {name: set() for name in NAMES}
    for name, _, function in calls_with_codes():
        exits[name].add(int(EXITS.get(function, ExitCode.CONFIG)))
    exits["IO_UNWRITABLE"].add(int(ExitCode.STORAGE))  # `StorageError.unwritable`
    assert exits == {entry.code.name: set(entry.exit_codes) for entry in ENTRIES}


def test_no_code_stands_for_too_many_calls() -> None:
    names = [name for name, _, _ in calls_with_codes()]
    assert all(names.count(name) <= 40 for name in NAMES)


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_entry_is_complete(entry: CodeEntry) -> None:
    assert len(entry.ways) == 2 and len(set(entry.ways)) == 2
    for text in (entry.cause, *entry.ways):
        assert re.fullmatch(r"[A-Z`].*\.", text) and len(text.split()) <= 25, text
    assert len(entry.title) <= 60 and not entry.title.endswith(".")


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_commands_and_keys_of_ways_out_exist(entry: CodeEntry) -> None:
    parser = command_line_parser()
    for quoted in re.findall(r"`(.*?)`", " ".join([entry.cause, *entry.ways])):
        if quoted.startswith("maxpipe "):
            words = shlex.split(quoted)[1:]
            if "--help" in words:
                words = words[:-1]
                assert words[0] in parser.command_names
                continue
            options, rest = parser.parse_known_args(words)
            assert not [word for word in rest if word.startswith("-")], quoted
            assert callable(options.command)
            for config in set(words) & {"quickstart", "tiny"}:
                assert config in bundled_configs()
            continue
        key, sign, value = quoted.partition("=")
        assert key in KEYS or key in SECTIONS or key.startswith("mesh.axis_rules."), quoted
        if sign and not value.startswith("file:"):
            wrong: set[str] = set()
            try:
                load(["tiny", "train.steps=1", quoted])
            except ConfigError as error:  # other keys of the config may not fit the value
                wrong = {problem.code for problem in error.problems}
            assert not wrong & {Code.CFG_TYPE, Code.CFG_UNKNOWN_KEY}, quoted


def test_exit_code_table_has_every_exit_code() -> None:
    assert [entry.code for entry in EXIT_CODES] == list(ExitCode)
    text = " ".join(f"{entry.meaning} {entry.restart}" for entry in EXIT_CODES)
    assert "saved" not in text  # a second signal ends a run without a save
