"""Commands in a fork server exit as in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import environment_of_command
from tests.fork_server import HASH_SEEDS, ForkServer, ServerError, running_servers
from tests.waiting import wait_until

ENDINGS = {
    "returns": "print('done')",
    "exits with nothing": "sys.exit()",
    "exits with a number": "sys.exit(3)",
    "exits with a large number": "sys.exit(259)",
    "exits with a boolean": "sys.exit(True)",
    "exits with a text": "print('out'); sys.exit('text')",
    "exits with a tuple": "sys.exit((1, 2))",
    "uncaught exception": "def fails():\n    raise ValueError('text')\nfails()",
    "interrupt": "atexit.register(print, 'atexit'); raise KeyboardInterrupt",
    "signal": "atexit.register(print, 'atexit'); os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "functions of atexit": "atexit.register(print, 'first'); atexit.register(print, 'second')",
    "failing function of atexit": (
        "sys.unraisablehook = lambda error: print(repr(error.exc_value))\n"
        "atexit.register(int, 'text'); atexit.register(print, 'last')"
    ),
    "exit in atexit": "atexit.register(os._exit, 5); print('lost')",
    "thread": (
        "atexit.register(print, 'atexit')\n"
        "def later():\n    time.sleep(0.1); print('thread')\n"
        "threading.Thread(target=later).start()\nprint('main'); sys.exit(4)"
    ),
    "thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(lambda: (time.sleep(0.1), print('pool', flush=True)))"
    ),
    "errors line by line": (
        "print('out'); print('error \\udc80', file=sys.stderr)\n"
        "sys.stderr.write('lost'); os._exit(0)"
    ),
    "streams": (
        "print(sys.stdin.read(), sys.argv[1:], __name__, __file__)\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print(stream.encoding, stream.errors, stream.line_buffering, stream.isatty())"
    ),
    "closed output": "print('lost'); os.close(1)",
    "files": "print(sorted(int(name) for name in os.listdir('/dev/fd'))[:4])",
}
IMPORTS = "import atexit, os, signal, sys, threading, time\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A server without imported modules."""
    server = ForkServer.start(environment_of_command(), modules=())
    yield server
    server.close()


def has_ended(pid: int) -> bool:
    """Return whether the process has ended; init may not yet have collected its exit code."""
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, check=False)
    return state.stdout.strip() in (b"", b"Z")


@pytest.mark.parametrize("name", ENDINGS)
def test_command_ends_like_separate_process(
    name: str, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "command.py").write_text(IMPORTS + ENDINGS[name])
    output, environment = tmp_path / "output.txt", environment_of_command()
    code = server.run(["a", "b"], environment, output, seconds=60, module="command")
    with open(tmp_path / "expected.txt", "w") as file:
        process = subprocess.run(
            [sys.executable, "-m", "command", "a", "b"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            check=False,
        )
    assert output.read_text() == (tmp_path / "expected.txt").read_text()
    assert code == process.returncode


def test_time_limit_kills_command_and_its_processes(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
    (tmp_path / "command.py").write_text(text + "time.sleep(60)")
    output = tmp_path / "output.txt"
    code = server.run([], environment_of_command(), output, seconds=1, module="command")
    assert code == -signal.SIGALRM
    pid, *_, reason = output.read_text().splitlines()
    assert "after 1 seconds" in reason
    wait_until(lambda: has_ended(int(pid)))
    # The server runs the next command.
    (tmp_path / "other.py").write_text("print('next')")
    assert server.run([], environment_of_command(), output, seconds=60, module="other") == 0
    assert output.read_text() == "next\n"


def test_ended_server_is_reported(tmp_path: Path) -> None:
    server = ForkServer.start(environment_of_command(), modules=())
    server.process.kill()
    for _ in range(2):
        with pytest.raises(ServerError, match="exit code -9.*maxpipe train file.yml"):
            server.run(["train", "file.yml"], {}, tmp_path / "output.txt", seconds=60)
    server.close()


def test_failed_import_ends_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer.start(environment_of_command(), modules=["maxpipe.missing"])
    with pytest.raises(ServerError, match="exit code 1"):
        server.run(["train"], {}, tmp_path / "output.txt", seconds=60)
    server.close()
    assert "maxpipe.missing" in capfd.readouterr().err


def test_servers_have_different_hash_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "command.py").write_text("print([*{*map(str, range(20))}])")
    output, orders = tmp_path / "output.txt", []
    with running_servers(environment_of_command(), modules=()) as next_server:
        for _ in range(2 * len(HASH_SEEDS)):
            next_server().run([], dict(os.environ), output, seconds=60, module="command")
            orders.append(output.read_text())
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
