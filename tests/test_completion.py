"""Completion of command lines, by the command and in real shells."""

from __future__ import annotations

import itertools
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from maxpipe.cli import main

ROOT = Path(__file__).parents[1]
Ask = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with a config, a run with two checkpoints, and `maxpipe` on the PATH."""
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
        assert main(["completion", "--complete", "zsh", *words]) == 0
        return capsys.readouterr().out.split("\0")[:-1]

    return answers


# --- candidates -----------------------------------------------------------------------------


def test_completes_commands_and_options(ask: Ask):
    assert {"train ", "eval ", "checkpoints ", "goodput "} <= set(ask(""))
    assert ask() == ask("") and ask("tr") == ["train "]
    assert ask("checkpoints", "d") == ["delete ", "diff "]
    assert ask("launch", "") == ["local ", "slurm ", "gcloud ", "gke "]
    assert ask("checkpoints", "prune", "--keep-e") == ["--keep-every-steps ", "--keep-every-hours "]
    assert ask("eval", "quick", "--split", "") == ["validation ", "train ", "all "]
    assert ask("completion", "") == ["bash ", "fish ", "zsh "]
    assert "--complete" not in " ".join(ask("completion", "--"))
    assert ask("nonsense", "x") == []


def test_completes_error_codes_in_any_case(ask: Ask):
    assert ask("explain", "MP-MEM-00") == ["MP-MEM-001 ", "MP-MEM-002 ", "MP-MEM-003 "]
    assert ask("explain", "mp-gen") == ["mp-gen-001 "]


def test_data_commands_complete_runs_and_configs(ask: Ask):
    """Commands that accept the config of a run accept a run or a config."""
    assert ask("data", "sh") == ["show "]
    for command in ("show", "stats", "find"):
        found = ask("data", command, "quick")
        assert {"quick ", "quick.yml ", "quickstart "} <= set(found), found
        # Two of the commands accept data files, which may have any suffix.
        assert ("quick.txt " in found) == (command != "find")


def test_completes_config_keys_and_values(ask: Ask):
    assert ask("train", "quick.yml", "pipel") == ["pipeline."]
    assert ask("train", "pipeline.re") == ["pipeline.remat=", "pipeline.repeats="]
    assert ask("train", "pipeline.remat=n") == ["pipeline.remat=names ", "pipeline.remat=none "]
    options = ["mesh.sequence_parallel=false ", "mesh.sequence_parallel=true "]
    assert ask("train", "mesh.sequence_parallel=") == options
    assert ask("train", "data.path=qui") == ["data.path=quick.txt ", "data.path=quick.yml "]
    assert ask("train", "train.steps=") == [] == ask("train", "no.key=")
    assert ask("config", "explain", "mesh.ici_f") == ["mesh.ici_fsdp "]
    assert "optim " in ask("config", "explain", "o")


def test_completes_files_runs_and_steps(ask: Ask):
    assert ask("train", "quick.") == ["quick.yml "] == ask("train", "a.yml", "quick.")
    assert ask("train", "qui") == ["quick.yml ", "quickstart "]  # quickstart is a bundled config
    assert ask("train", "llama3-4") == ["llama3-405b "] == ask("configs", "copy", "llama3-4")
    assert ask("checkpoints", "list", "") == ["bin/", "quick ", "runs/"]
    assert ask("checkpoints", "list", "runs/") == ["runs/quick/"]
    steps = [f"quick@{step} " for step in ("120", "8", "best", "newest")]
    assert ask("checkpoints", "show", "quick@") == steps
    assert ask("checkpoints", "diff", "quick", "runs/quick@1") == ["runs/quick@120 "]
    assert ask("checkpoints", "list", "quick@") == []  # accepts only a run, not a step
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
def test_malformed_words_do_not_fail(word: str, ask: Ask):
    for before in ([], ["train"], ["eval"], ["checkpoints", "show"], ["config", "explain"]):
        ask(*before, word)


def test_completion_requires_supported_shell(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["tcsh"]):
        assert main(["completion", *arguments]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_completion_imports_no_heavy_modules():
    code = (
        "import sys; from maxpipe.cli import main\n"
        "main(['completion', '--complete', 'zsh', 'train', 'pipeline.remat='])\n"
        "main(['completion', '--complete', 'zsh', 'checkpoints', 'show', 'quick@'])\n"
        "print([m for m in ('jax', 'omegaconf', 'yaml', 'numpy') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert ran.stderr == "" and ran.stdout.split("\0")[-1] == "[]\n"


# --- shells ------------------------------------------------------------------------------

LINES = {
    "maxpipe checkp": ["checkpoints "],
    "maxpipe train quick.yml pipeline.remat=na": ["pipeline.remat=names "],
    "maxpipe checkpoints show runs/quick@": [
        f"runs/quick@{step} " for step in ("120", "8", "best", "newest")
    ],
    "maxpipe completion ": ["bash ", "fish ", "zsh "],
}
"""Command lines and the candidates for their last word."""


def shell(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stderr == "", ran.stderr
    return ran.stdout.splitlines()


def test_bash_completes_lines():
    """The function is called as readline does: text after the last `=` or `@` is replaced."""
    script = "source <(maxpipe completion bash)\ncompopt() { ended=' '; }\n"
    expected = []
    for line, answers in LINES.items():
        replaced = re.split("[ =@]", line)[-1]
        kept = line.split(" ")[-1].removesuffix(replaced)
        script += (
            f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=() COMP_CWORD=0 ended=''\n"
            f"_maxpipe maxpipe '{replaced}' ''\n"
            'printf "%s$ended|" "${COMPREPLY[@]}"; echo\n'
        )
        space = " " if len(answers) == 1 else ""
        expected.append([each[:-1].removeprefix(kept) + space for each in answers])
    assert [line.split("|")[:-1] for line in shell("bash", "--norc", "-c", script)] == expected


def test_zsh_completes_lines():
    """`compadd` and `compdef` exist only while a line is edited, so the test defines them."""
    script = "compdef() { :; }\nsource <(maxpipe completion zsh)\n"
    script += 'compadd() { [ "$1" = -S ] && print -rn -- "$4|" || print -rn -- "$2 |"; }\n'
    for line in LINES:
        parts = line.split(" ")
        words = " ".join(f"'{word}'" for word in parts)
        script += f"words=({words}) CURRENT={len(parts)} PREFIX='{parts[-1]}'; _maxpipe; echo\n"
    found = [line.split("|")[:-1] for line in shell("zsh", "-f", "-c", script)]
    assert found == [*LINES.values()]


def test_fish_completes_line():
    (line,) = shell(
        "fish",
        "--no-config",
        "-c",
        "maxpipe completion fish | source; complete -C 'maxpipe train pipeline.remat=na'",
    )
    assert line == "pipeline.remat=names"


# --- names with special characters -----------------------------------------------------

HARMFUL = ("$(touch harm)", "`touch harm`;touch harm", "new\nline", 'it\'s "a" !')
NAMES = (
    *(*HARMFUL, "st*r", "-dash", "a!b", "b\\c", "{a,b}", "~tilde", "käse", "$'x'", "end ", "#hash"),
    *("q?", "\x1b]0;title\x07", "x'", 'x"', "a&b|c>d", "\udcff"),
)
QUOTES = ("", "'", '"')


@pytest.mark.parametrize("quote", [*QUOTES, "$'"])
def test_bash_completion_evaluates_to_name(
    quote: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    """Evaluating the completed line yields the exact name and has no side effects."""
    script = ""
    shutil.rmtree(here / "runs" / "quick")
    for name in NAMES:
        run = here / "runs" / name
        (run / "checkpoints").mkdir(parents=True)
        line = f"maxpipe eval {quote}runs/"
        replaced = "runs/" if quote else line.split(" ")[-1]
        main(["completion", "--complete", "bash", line, replaced])
        space, *found = capsys.readouterr().out.split("\0")[:-1]
        assert space == "no space" and len(found) == 1, (name, found)
        whole = line.removesuffix(replaced) + found[0]
        if quote and not whole.endswith(quote[-1]):
            whole += quote[-1]  # as readline does
        script += f"set -- {whole}; printf '%s\\0' \"$3\" \n"
        shutil.rmtree(run)
    ran = subprocess.run(["bash", "--norc"], input=os.fsencode(script), capture_output=True)
    assert ran.stderr == b"" and not (here / "harm").exists()
    found = os.fsdecode(ran.stdout).split("\0")[:-1]
    assert found == [f"runs/{name}/" for name in NAMES]


def test_bash_completes_partially_quoted_names(here: Path, capsys: pytest.CaptureFixture[str]):
    """Only the end of a partially typed name is replaced, with its quoting preserved."""
    for name in ("two words", "it's;", "a=b@c"):
        (here / "runs" / name / "checkpoints" / "5").mkdir(parents=True)
    for line, replaced, expected in (
        ("maxpipe eval two\\ wo", "two\\ wo", ["two\\ words"]),
        ("maxpipe eval 'two wo", "two wo", ["two words"]),
        ('maxpipe eval "two wo', "two wo", ["two words"]),
        ('maxpipe eval "two"\\ wo', '"two"\\ wo', ["two\\ words"]),
        ("maxpipe eval 'two words'@", "", ["5", "best", "newest"]),
        ("maxpipe eval $'it\\047s", "it\\047s", ["it\\047s;"]),
        ("maxpipe eval a=b@c", "c", ["c"]),
        ("maxpipe eval a=", "", ["b@c"]),
        ("maxpipe eval two\\", "two\\", ["two\\ words"]),  # the common prefix of all candidates
        ('echo "$(maxpipe eval two', "$(maxpipe eval two", []),
        ("maxpipe eval two", '"$(maxpipe eval two', []),
    ):
        main(["completion", "--complete", "bash", line, replaced])
        assert capsys.readouterr().out.split("\0")[1:-1] == expected, line


SHELLS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "-i"),
}
SET_UP = {
    "bash": "source <(maxpipe completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(maxpipe completion zsh)",
    "fish": "maxpipe completion fish | source",
}


class Terminal:
    """An interactive shell in a pseudo-terminal."""

    def __init__(self, name: str, here: Path):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        self.name, self.received, self.asked = name, here / "received", here / "asked"
        program = here / "bin" / "maxpipe"
        program.write_text(
            f'#!/bin/sh\nif [ "$1" = completion ]; then PYTHONPATH={ROOT} {sys.executable} -m '
            f'maxpipe "$@"; touch {self.asked}; exit; fi\n'
            f"printf '%s\\0' \"$@\" >{here}/partial; mv {here}/partial {self.received}\n"
        )
        command = SHELLS[name]
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            environment = os.environ | {"TERM": "xterm", "HOME": str(here), "PS1": "$ "}
            os.execvpe(command[0], command, environment)
        self.quiet(1.0)
        os.write(self.terminal, f"{SET_UP[name]}\n".encode())
        self.awaited(self.asked)
        self.quiet(0.3)

    def quiet(self, seconds: float) -> None:
        """Read output of the shell until there is none for `seconds`."""
        while select.select([self.terminal], [], [], seconds)[0]:
            os.read(self.terminal, 1 << 16)

    def awaited(self, path: Path) -> None:
        until = time.monotonic() + 20
        while not path.exists() and time.monotonic() < until:
            self.quiet(0.05)

    def words(self, line: str, end: str) -> list[str]:
        """Return the arguments that the program receives after typing `line`, TAB and Enter."""
        for path in (self.asked, self.received):
            path.unlink(missing_ok=True)
        os.write(self.terminal, f"{line}\t".encode())
        self.awaited(self.asked)
        self.quiet(0.2)
        os.write(self.terminal, f"{end if self.name != 'bash' else ''}\n".encode())
        self.awaited(self.received)
        assert self.received.exists(), line
        return os.fsdecode(self.received.read_bytes()).split("\0")[:-1]

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


def check_in_terminal(name: str, here: Path, runs: Sequence[str], quotes: Sequence[str]) -> None:
    terminal = Terminal(name, here)
    try:
        for run, quote in itertools.product(runs, quotes):
            shutil.rmtree(here / "runs")
            (here / "runs" / run / "checkpoints" / "5").mkdir(parents=True)
            found = terminal.words(f"maxpipe checkpoints list {quote}runs/", quote)
            assert found == ["checkpoints", "list", f"runs/{run}/"], (run, quote)
    finally:
        terminal.close()
    assert not (here / "harm").exists()


@pytest.mark.parametrize("name", SHELLS)
def test_harmful_names_are_quoted_in_terminal(name: str, here: Path):
    check_in_terminal(name, here, HARMFUL, [""])
    check_in_terminal(name, here, HARMFUL[:1], ['"'])


@pytest.mark.long
@pytest.mark.parametrize("name", SHELLS)
def test_all_names_are_quoted_in_terminal(name: str, here: Path):
    check_in_terminal(name, here, NAMES[:-1], QUOTES)
