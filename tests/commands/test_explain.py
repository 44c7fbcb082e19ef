"""`maxpipe explain`: the entry of an error code, as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from maxpipe.cli import main
from maxpipe.commands.explain import code_entries
from maxpipe.errors import Code
from tests.errors import assert_error

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("text", ["MP-MEM-001", "mp-mem-001", "mem-001", "[MP-MEM-001]"])
def test_code_in_any_form_prints_its_entry(text: str, capsys: Capture) -> None:
    assert main(["explain", text]) == 0
    out = capsys.readouterr().out
    entry = code_entries()[Code.MEM_PREDICTED]
    assert out.startswith(f"MP-MEM-001: {entry.title}\ncause     ")
    assert out.rstrip().endswith("exit code 2")
    words = " ".join(out.split())
    assert all(way in words for way in (entry.cause, *entry.ways))
    assert max(map(len, out.splitlines())) <= 100


def test_without_code_every_code_is_listed_once(capsys: Capture) -> None:
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(code) == 1 for code in Code)


def test_json_output_has_all_fields(capsys: Capture) -> None:
    assert main(["explain", "io-001", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert (entry["code"], entry["area"], entry["exit_codes"]) == ("MP-IO-001", "IO", [2, 74])
    assert len(entry["ways"]) == 2 and entry["title"] and entry["cause"]
    assert main(["explain", "--json"]) == 0
    assert [entry["code"] for entry in json.loads(capsys.readouterr().out)] == list(Code)


@pytest.mark.parametrize(("text", "suggestion"), [("MP-MEM-01", "MP-MEM-001"), ("", "explain`")])
def test_unknown_code_is_rejected_with_suggestion(
    text: str, suggestion: str, capsys: Capture
) -> None:
    assert main(["explain", text]) == 2
    assert_error(capsys.readouterr().err, code=Code.CLI_VALUE)
    assert main(["explain", text]) == 2
    assert suggestion in capsys.readouterr().err


@pytest.mark.parametrize("text", ["003", "3"])
def test_number_without_area_lists_the_codes(text: str, capsys: Capture) -> None:
    assert main(["explain", text]) == 2
    err = capsys.readouterr().err
    assert_error(err, code=Code.CLI_VALUE)
    assert all((code in err) == code.endswith("-003") for code in Code if code != "MP-CLI-002")


def test_explain_loads_no_heavy_modules() -> None:
    code = (
        "import sys; from maxpipe.cli import main; main(['explain', 'MP-MEM-001']); "
        "assert not {'jax', 'numpy', 'omegaconf'} & set(sys.modules), 'heavy'"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
