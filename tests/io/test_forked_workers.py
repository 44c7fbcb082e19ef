"""Calls in forked processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from maxpipe.errors import Code, ConfigError
from maxpipe.io.forked_workers import ForkedWorkers
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class ForeignError(Exception):
    def __init__(self, first: str, second: str):
        super().__init__(f"{first} {second}")


def answer(argument: Any) -> Any:
    if argument == "config":
        raise ConfigError.one(Code.IO_PATH, "here", "x", "must be y.", "Use y.")
    if argument == "foreign":
        raise ForeignError("one", "two")
    if argument == "exit":
        os._exit(3)
    if argument == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    return argument, os.getpid()


def test_calls_run_in_other_processes() -> None:
    workers = ForkedWorkers(answer, 2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(workers.call, range(50)))
    assert [argument for argument, _ in found] == [*range(50)]
    assert os.getpid() not in {process for _, process in found}
    assert workers.call("interrupt")[0] == "interrupt"  # Ctrl-C does not end a worker
    workers.close()
    assert not multiprocessing.active_children()


def test_errors_are_raised_in_the_caller() -> None:
    workers = ForkedWorkers(answer, 1)
    with pytest.raises(ConfigError) as caught:
        workers.call("config")
    assert caught.value.problems[0].code is Code.IO_PATH
    with pytest.raises(RuntimeError, match="ForeignError: one two"):
        workers.call("foreign")
    for _ in range(2):
        with pytest.raises(OSError, match="exit code 3"):
            workers.call("exit")
    workers.close()


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "from maxpipe.io.forked_workers import ForkedWorkers\n"
        "workers = ForkedWorkers(lambda argument: os.getpid(), 3)\n"
        "print(*{process.pid for process in workers._processes}, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    ) as parent:
        assert parent.stdout is not None
        processes = [int(each) for each in parent.stdout.readline().split()]
        assert len(processes) == 3
        parent.kill()
    wait_until(lambda: not any(is_running(each) for each in processes))
    assert not any(is_running(each) for each in processes)


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
