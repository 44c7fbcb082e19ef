"""Local launcher: monitors, stops and restarts processes on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from maxpipe.cli import main
from maxpipe.launch import local
from maxpipe.launch.local import ProcessLog
from tests.launch.conftest import QUICKSTART
from tests.train.runs import Start

Capture = pytest.CaptureFixture[str]

# --- with fake training processes ----------------------------------------------


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`launch(*programs)`: run the launcher with a Python program for each process."""
    monkeypatch.setattr(local, "GRACE_SECONDS", 1.0)

    def run_launch(*programs: str, restarts: int = 1) -> int:
        commands = [[sys.executable, "-c", program] for program in programs]
        monkeypatch.setattr(local, "_commands", lambda *_: commands)
        count = str(len(programs))
        sizes = (f"mesh.cpu_devices={8 * len(programs)}", f"mesh.ici_data={len(programs)}")
        arguments = (f"run.dir={tmp_path}", f"launch.restarts={restarts}", "run.name=run", *sizes)
        arguments += ("train.batch_size=32",)
        return main(["launch", "local", QUICKSTART, *arguments, "--processes", count])

    return run_launch


def test_successful_run_prints_output_of_process_0(launch: Callable[..., int], capsys: Capture):
    assert launch("print('first')", "print('second')") == 0
    out, err = capsys.readouterr()
    assert out == "first\n"
    assert err.startswith("preflight\n") and "launch:" not in err


def test_first_failed_process_is_printed_last(
    launch: Callable[..., int], capsys: Capture, tmp_path: Path
):
    waits = "import time; print('waiting', flush=True); time.sleep(60)"
    first = "Traceback (most recent call last):\n  File\nValueError: the reason\n"
    second = "\nDuring handling another occurred:\n\n" + first.replace("the reason", "later")
    fails = f"import sys; sys.stderr.write({first + second!r}); sys.exit(70)"
    begin = time.monotonic()
    assert launch(waits, fails) == 70
    assert time.monotonic() - begin < 20  # without waiting for the other process
    err = capsys.readouterr().err
    assert f"launch: this process failed first; log: {tmp_path}/run/logs/process-1.log\n" in err
    assert "process 1 of 2: exit code 70 (bug in maxpipe)" in err
    assert err.endswith(f"process-1.log\n{first}")


def test_config_errors_are_printed_completely(launch: Callable[..., int], capsys: Capture):
    mistake = (
        "data.path = /nowhere\n  must be there.\n  Set it.\n"
        "eval.every = x\n  must be a number.\n  Set it, too.\n"
    )
    said = f"import sys; print('step 1'); print({mistake!r} + 'process 1 gives up'); sys.exit(2)"
    assert launch(said, said) == 2
    assert capsys.readouterr().err.endswith(mistake)


def test_number_of_restarts_after_kills_is_limited(
    launch: Callable[..., int], capsys: Capture, tmp_path: Path
):
    dies = "import os, signal; print('again'); os.kill(os.getpid(), signal.SIGKILL)"
    assert launch(dies, restarts=2) == 137
    out, err = capsys.readouterr()
    assert out.count("again") == 3
    assert "3 times in a row without a newer checkpoint than the beginning" in err
    text = (tmp_path / "run/logs/process-0.log").read_text()
    assert [line.split()[3:5] for line in text.splitlines() if line.startswith("===")] == [
        ["attempt", f"{number}:"] for number in (1, 2, 3)
    ]


def test_restarts_with_progress_are_not_limited(launch: Callable[..., int], tmp_path: Path):
    """The run hangs five times, each time after a newer checkpoint, with one restart allowed."""
    saves = (
        "import pathlib, sys\n"
        f"folder = pathlib.Path({str(tmp_path / 'run/checkpoints')!r})\n"
        "folder.mkdir(exist_ok=True)\n"
        "done = len(list(folder.iterdir()))\n"
        "(folder / str(done)).mkdir()\n"
        "sys.exit(71 if done < 5 else 0)"
    )
    assert launch(saves) == 0


STOPS = """
import signal, sys, time
def stop(number, _):
    print("saved", flush=True)
    sys.exit(130 if number == signal.SIGINT else 75)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.fault("H5")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_signal_is_forwarded_without_restart(
    launch: Callable[..., int], capsys: Capture, tmp_path: Path, number: signal.Signals, code: int
):
    logs = [tmp_path / f"run/logs/process-{rank}.log" for rank in (0, 1)]
    signal_when(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), number)
    assert launch(STOPS, STOPS) == code
    said = capsys.readouterr().err
    assert "launch: stopping after this step, and saving" in said
    assert "launch: stopped: no checkpoint is saved; run the same" in said
    for log in logs:
        assert log.read_text().count("ready") == log.read_text().count("saved") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 137), (signal.SIGINT, 130)])
def test_second_signal_kills_processes(
    launch: Callable[..., int], capsys: Capture, tmp_path: Path, number: signal.Signals, code: int
):
    deaf = "import signal, time\nsignal.signal(15, lambda *_: print('no', flush=True))\n"
    deaf += "print('ready', flush=True)\nwhile True: time.sleep(1)"
    log = tmp_path / "run/logs/process-0.log"
    signal_when(lambda: log.exists() and "ready" in log.read_text(), signal.SIGTERM)
    signal_when(lambda: log.exists() and "no" in log.read_text().partition("ready")[2], number)
    assert launch(deaf) == code
    assert "launch: killed: no checkpoint is saved" in capsys.readouterr().err


def test_profile_signal_is_forwarded(launch: Callable[..., int], tmp_path: Path):
    program = "import signal, sys, time\n"
    program += "assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN\n"
    program += "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    program += "print('ready', flush=True)\ntime.sleep(60)\nsys.exit(3)"
    logs = [tmp_path / f"run/logs/process-{rank}.log" for rank in (0, 1)]
    ready = lambda: all(log.exists() and "ready" in log.read_text() for log in logs)  # noqa: E731
    signal_when(ready, signal.SIGUSR1)
    assert launch(program, program) == 0


def signal_when(ready: Callable[[], bool], number: signal.Signals) -> None:
    def wait() -> None:
        deadline = time.monotonic() + 30
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal exists only on Linux")
def test_killed_launcher_stops_its_processes(start: Start, tmp_path: Path):
    program = (
        "import sys\n"
        "from maxpipe.launch import local\n"
        f"local._commands = lambda *_: [[sys.executable, '-c', {STOPS!r}]]\n"
        "from maxpipe.cli import main\n"
        f"main(['launch', 'local', {QUICKSTART!r}, 'run.dir={tmp_path}'])"
    )
    log = tmp_path / "quickstart/logs/process-0.log"
    root = str(Path(QUICKSTART).parents[1])
    with subprocess.Popen([sys.executable, "-c", program], env={"PYTHONPATH": root}) as process:
        until(lambda: log.exists() and "ready" in log.read_text())
        process.kill()
    until(lambda: log.read_text().endswith("saved\n"))


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- commands and errors --------------------------------------------------------------------


def test_processes_share_loopback_port_and_split_devices():
    commands = local._commands(["run.yml", "mesh.cpu_devices=8"], 2, 8)
    assert [command[3:6] for command in commands] == [
        ["train", "run.yml", "mesh.cpu_devices=8"]
    ] * 2
    for rank, command in enumerate(commands):
        assert command[6:8] == ["mesh.cpu_devices=4", "runtime.num_processes=2"]
        assert re.fullmatch(r"runtime.coordinator=127\.0\.0\.1:\d+", command[8])
        assert command[9:] == [f"runtime.process_id={rank}"]
    assert commands[0][8] == commands[1][8]
    assert local._commands(["run.yml"], 1, 8) == [
        [sys.executable, "-m", "maxpipe", "train", "run.yml"]
    ]


def test_processes_share_new_secret_that_is_not_written(
    launch: Callable[..., int], capsys: Capture, tmp_path: Path
):
    """Each launch creates a new secret, unless the environment contains one."""
    folder = tmp_path / "told"
    folder.mkdir()
    tells = (
        "import os, pathlib, sys\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "name = f'{len(list(folder.iterdir()))}-{os.getpid()}'\n"
        "(folder / name).write_text(os.environ.get('MAXPIPE_RUN_SECRET', ''))\n"
    )
    assert launch(tells, tells) == launch(tells, tells) == 0
    told = [path.read_text() for path in sorted(folder.iterdir())]
    assert told[0] == told[1] != told[2] == told[3] and all(len(text) == 64 for text in told)
    output = capsys.readouterr()
    logs = [path.read_text() for path in (tmp_path / "run/logs").iterdir()]
    assert not any(text in line for text in told for line in (*output, *logs))


def test_existing_secret_is_passed_on(
    launch: Callable[..., int], capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    """A single process, which may be one of several hosts, is started without a new secret."""
    says = "import os; print(len(os.environ.get('MAXPIPE_RUN_SECRET', '')))"
    assert launch(says) == 0 and capsys.readouterr().out == "0\n"
    monkeypatch.setenv("MAXPIPE_RUN_SECRET", "s" * 40)
    assert launch(says, says) == 0 and capsys.readouterr().out == "40\n"
    monkeypatch.setenv("MAXPIPE_RUN_SECRET", "short")
    assert launch(says, says) == 2
    assert "32 to 1024" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        ("--processes 0", "command line: --processes = 0", "Leave out --processes"),
        ("--processes 3", "mesh.cpu_devices = 8", "must be a multiple of --processes (3)"),
        ("--processes 2 runtime.platform=auto", "runtime.platform = auto", "must be cpu for 2"),
        (
            "mesh.ici_data=2 train.batch_size=32",
            "mesh = stage 4 x data 2 x fsdp 2",
            "must multiply",
        ),
        ("data.source=text data.path=/nowhere", "data.path = /nowhere", "/nowhere does not exist."),
        ("run.dir=gs://bucket", "run.dir = gs://bucket", "Set run.dir=runs, and checkpoint.dir="),
        ("checkpoint.dir=/proc/x", "checkpoint.dir = /proc/x", "must be a writable folder"),
        ("run.dir=/proc/runs", "run.dir = /proc/runs", "must be a writable folder"),
        ("launch.restarts=-1", "launch.restarts = -1", "must be at least 0"),
    ],
)
def test_invalid_arguments_are_rejected_before_start(
    arguments: str, where: str, says: str, capsys: Capture, tmp_path: Path
):
    code = main(["launch", "local", QUICKSTART, f"run.dir={tmp_path}", *arguments.split()])
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert where in err and says in err
    assert len(err.splitlines()) == 3 and not (tmp_path / "quickstart/logs").exists()


def test_buckets_are_reported_as_unchecked(launch: Callable[..., int], capsys: Capture):
    from maxpipe.config.load import load
    from maxpipe.launch.job import check_local

    keys = ("data.source=jsonl", "data.path=gs://bucket/*.jsonl", "run.dir=/tmp")
    loaded = load([QUICKSTART, *keys, "checkpoint.dir=gs://bucket/runs"])
    report = check_local(loaded, 1)
    assert "unchecked  data.path = gs://bucket/*.jsonl" in report
    assert "unchecked  gs://bucket/runs/quickstart: the run writes" in report


def test_first_error_ignores_log_of_earlier_attempt(tmp_path: Path):
    log = ProcessLog(tmp_path / "process-0.log")
    with log.open_attempt(1, "maxpipe train") as file:
        file.write(b"Traceback (most recent call last):\n  File\nValueError: of another attempt\n")
    with log.open_attempt(2, "maxpipe train") as file:
        file.write(b"mesh      stage 4\n" + b"step 1\n" * 50)
    assert log.first_error() == "\n".join(["step 1"] * 10)
