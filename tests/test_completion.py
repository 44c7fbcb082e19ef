"""TAB in real shells, and what the command answers them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maxpipe.cli import main

ROOT = Path(__file__).parents[1]
Ask = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config, a run with two checkpoints, and `maxpipe` on the PATH."""
    for step in (8, 120):
        (tmp_path / "runs" / "quick" / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "quick.yml").write_text("")
    (tmp_path / "quick.txt").write_text("")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "maxpipe"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m maxpipe "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def answers(*words: str) -> list[str]:
        assert main(["completion", "--words", *words]) == 0
        return capsys.readouterr().out.splitlines()

    return answers


# --- answers -----------------------------------------------------------------------------


def test_commands_and_options(ask: Ask):
    assert {"train ", "eval ", "checkpoints ", "goodput "} <= set(ask(""))
    assert ask() == ask("") and ask("tr") == ["train "]
    assert ask("checkpoints", "d") == ["delete ", "diff "]
    assert ask("launch", "") == ["local ", "slurm ", "gcloud ", "gke "]
    assert ask("checkpoints", "prune", "--keep-e") == ["--keep-every-steps ", "--keep-every-hours "]
    assert ask("eval", "quick", "--split", "") == ["validation ", "train ", "all "]
    assert ask("completion", "") == ["bash ", "fish ", "zsh "]
    assert "--words" not in " ".join(ask("completion", "--"))
    assert ask("nonsense", "x") == []


def test_runs_and_configs_to_look_at(ask: Ask):
    """A command that takes the config of a run takes both."""
    assert ask("data", "sh") == ["show "]
    for command in ("show", "stats", "find"):
        found = ask("data", command, "quick")
        assert {"quick ", "quick.yml ", "quickstart "} <= set(found), found
        assert "quick.txt " not in found


def test_keys_and_their_values(ask: Ask):
    assert ask("train", "quick.yml", "pipel") == ["pipeline."]
    assert ask("train", "pipeline.re") == ["pipeline.remat=", "pipeline.repeats="]
    assert ask("train", "pipeline.remat=n") == ["pipeline.remat=names ", "pipeline.remat=none "]
    assert ask("train", "log.tensorboard=") == ["log.tensorboard=false ", "log.tensorboard=true "]
    assert ask("train", "data.path=qui") == ["data.path=quick.txt ", "data.path=quick.yml "]
    assert ask("train", "train.steps=") == [] == ask("train", "no.key=")
    assert ask("config", "explain", "mesh.ici_f") == ["mesh.ici_fsdp "]
    assert "optim " in ask("config", "explain", "o")


def test_files_runs_and_steps(ask: Ask):
    assert ask("train", "quick.") == ["quick.yml "] == ask("train", "a.yml", "quick.")
    assert ask("train", "qui") == ["quick.yml ", "quickstart "]  # the second is shipped
    assert ask("train", "llama3-4") == ["llama3-405b "] == ask("configs", "copy", "llama3-4")
    assert ask("checkpoints", "list", "") == ["bin/", "quick ", "runs/"]
    assert ask("checkpoints", "list", "runs/") == ["runs/quick/"]
    steps = [f"quick@{step} " for step in ("120", "8", "best", "newest")]
    assert ask("checkpoints", "show", "quick@") == steps
    assert ask("checkpoints", "diff", "quick", "runs/quick@1") == ["runs/quick@120 "]
    assert ask("checkpoints", "list", "quick@") == []  # takes a whole run
    assert ask("eval", "qu") == ["quick "] and ask("eval", "quick", "quick.") == ["quick.yml "]
    assert ask("eval", "--json", "qu") == ["quick "]
    assert ask("generate", "quick@b") == ["quick@best "]
    assert ask("generate", "--top-k", "5", "quick", "--prompts", "quick.t") == ["quick.txt "]
    assert ask("train", "checkpoint.restore_from=quick@b") == [
        "checkpoint.restore_from=quick@best "
    ]
    assert ask("train", "checkpoint.restore_from=hf:ru") == ["checkpoint.restore_from=hf:runs/"]
    assert ask("import", "ru") == ["runs/"] and ask("export", "qu") == ["quick "]
    assert ask("export", "quick", "x", "--dtype", "b") == ["bfloat16 "]


@pytest.mark.parametrize("word", ["~nobody/", "\0", "[", "x" * 5000, "=", ".", "@", "a=b=c", "--="])
def test_odd_words_have_no_answer(word: str, ask: Ask):
    for before in ([], ["train"], ["eval"], ["checkpoints", "show"], ["config", "explain"]):
        ask(*before, word)


def test_a_shell_must_be_named(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["tcsh"]):
        assert main(["completion", *arguments]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_answers_load_nothing_heavy():
    code = (
        "import sys; from maxpipe.cli import main\n"
        "main(['completion', '--words', 'train', 'pipeline.remat='])\n"
        "main(['completion', '--words', 'checkpoints', 'show', 'quick@'])\n"
        "print([m for m in ('jax', 'omegaconf', 'yaml', 'numpy') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert ran.stderr == "" and ran.stdout.splitlines()[-1] == "[]"


# --- shells ------------------------------------------------------------------------------

LINES = {
    "maxpipe checkp": ("", ["checkpoints "]),
    "maxpipe train quick": ("", ["quick.yml ", "quickstart "]),
    "maxpipe train quick.yml pipeline.remat=na": ("pipeline.remat=", ["names "]),
    "maxpipe eval quick@12": ("quick@", ["120 "]),
    "maxpipe checkpoints show runs/quick@": (
        "runs/quick@",
        ["120 ", "8 ", "best ", "newest "],
    ),
    "maxpipe completion ": ("", ["bash ", "fish ", "zsh "]),
}
"""A line, the part of its last word that bash keeps to itself, and what may follow."""


def shell(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stderr == "", ran.stderr
    return ran.stdout.splitlines()


def test_bash():
    """As readline calls it, which splits words at `=` and `@` for itself."""
    script = "source <(maxpipe completion bash)\n"
    for line in LINES:
        script += (
            f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=() COMP_CWORD=0\n"
            "$(complete -p maxpipe | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
            "printf '%s|' \"${COMPREPLY[@]}\"; echo\n"
        )
    found = [line.split("|")[:-1] for line in shell("bash", "--norc", "-c", script)]
    assert found == [answers for _, answers in LINES.values()]


def test_zsh():
    """`compadd` and `compdef` are there only while a line is edited: they are played."""
    script = "compdef() { :; }\nsource <(maxpipe completion zsh)\n"
    script += 'compadd() { [ "$1" = -S ] && print -rn -- "$4|" || print -rn -- "$2 |"; }\n'
    for line in LINES:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        script += f"words=({words}) CURRENT={len(line.split(' '))}; _maxpipe; echo\n"
    found = [line.split("|")[:-1] for line in shell("zsh", "-f", "-c", script)]
    assert found == [[kept + each for each in answers] for kept, answers in LINES.values()]


def test_fish():
    (line,) = shell(
        "fish",
        "--no-config",
        "-c",
        "maxpipe completion fish | source; complete -C 'maxpipe train pipeline.remat=na'",
    )
    assert line == "pipeline.remat=names"
