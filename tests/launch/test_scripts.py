"""Commands in scripts/ and in the documentation are valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.config.load import load
from maxpipe.launch.job import check_local
from tests.launch.conftest import ROOT

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
PAGE = (ROOT / "docs/guides/launch.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^maxpipe (launch \w+ .*)$", PAGE, re.MULTILINE)


def test_scripts_pass_shellcheck():
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", *SCRIPTS], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert all(os.access(path, os.X_OK) for path in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_run_valid_commands(script: Path, tmp_path: Path):
    """`maxpipe` is replaced by a script that prints its arguments."""
    tool = tmp_path / "maxpipe"
    tool.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    tool.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", script], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    assert_valid(ran.stdout.splitlines(), tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda text: text.split()[1])
def test_commands_on_launch_page_are_valid(command: str, tmp_path: Path):
    assert_valid(shlex.split(command), tmp_path)


def test_launch_page_shows_every_launcher():
    assert [command.split()[1] for command in COMMANDS] == ["local", "slurm", "gcloud", "gke"]
    assert len(SCRIPTS) == 4


def assert_valid(arguments: list[str], folder: Path) -> None:
    launch, way, *rest = arguments
    given = [str(ROOT / word) if word.endswith(".yml") else word for word in rest]
    assert launch == "launch"
    if way == "local":
        option, number, *inputs = given
        assert option == "--processes"
        assert "ok         mesh" in check_local(load([*inputs, f"run.dir={folder}"]), int(number))
    else:
        assert main([launch, way, *given, "--write", str(folder / "job")]) == 0
        assert (folder / "job/config.yml").exists()
