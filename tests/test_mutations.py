"""The mutation harness detects planted faults and finds none in the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PLANTED = """
import os
import signal
import sys
from pathlib import Path
import maxpipe.__main__
from tests.mutations import runner

def raises():
    raise KeyError("planted")

def prints():
    print("Traceback (most recent call last):")
    return 2

def prints_escapes():
    print("\\x1b]0;title\\x07")
    return 2

PLANTED = {
    "exit code 70": lambda: 70,
    "exit code 3": lambda: 3,
    "exit code -11": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "": lambda: 2,
    "exit code 70 raised": raises, "traceback": prints, "control characters": prints_escapes,
    "bytes of output": lambda: print("x" * 300_000) or 0,
}
home = Path(sys.argv[1])
(home / "case").mkdir()
for expected, function in PLANTED.items():
    maxpipe.__main__.main = function
    found = runner.run(home / "case", ["config", "print"]).fault
    wanted = expected.removesuffix(" raised")
    assert found == wanted or (wanted and wanted in found), (expected, found)
print("caught")
"""


def test_planted_faults_are_detected(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PLANTED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "caught\n", done.stderr


@pytest.mark.faults
@pytest.mark.parametrize("seed", [37])
def test_mutations_cause_no_faults(seed: int) -> None:
    command = [sys.executable, "-m", "tests.mutations", "--seed", str(seed), "--cases", "150"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if "passed" in line]
    assert sum(counts) == 150
