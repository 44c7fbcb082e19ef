"""Control channel between real processes, without jax, that stop, fail, hang and are killed."""

from __future__ import annotations

import contextlib
import fcntl
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.distributed import protocol
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.coordinator import (
    Coordinator,
    CoordinatorMessage,
    Member,
    Timeouts,
    free_port,
)
from maxpipe.distributed.phases import Phases
from maxpipe.distributed.protocol import AuthenticatedConnection, connect
from tests.errors import contains

ROOT = Path(__file__).parents[2]

TEN = ("10",) * 4
SECRET = "0123456789" * 4
ENVIRONMENT = {"PYTHONPATH": str(ROOT), protocol.VARIABLE: SECRET}
MEMBER = """
import sys, time
from maxpipe.distributed import protocol
from maxpipe.errors import Preemption
from maxpipe.distributed.coordinator import Timeouts
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.phases import COMPILE, DATA, DATA_SET_UP, EVAL, LOOP, SAVE, STEP, Phases

index, count, port, facts = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
phases = Phases()
limits = Timeouts({limits})
{before}

def steps(link, number, each=lambda step: None):
    # Like a run: read data, then wait for other processes in a step.
    with phases.enter(LOOP):
        for step in range(1, number + 1):
            phases.progress(step)
            with phases.enter(DATA):
                each(step)
            with phases.enter(STEP):
                time.sleep(0.02)
            if step == 3:
                print("running", flush=True)
            if link.should_stop():
                print("stopped at", step, flush=True)
                raise link.stop_error("stopped")

try:
    with ControlChannel(phases, limits, index=index, count=count) as link:
        print("linked", flush=True)
        if count > 1:
            address, own = ("127.0.0.1", port), {{"train.steps": facts}}
            trouble = link.connect(address, own, protocol.secret_from_environment)
            if trouble:
                print(trouble.text, file=sys.stderr)
                sys.exit(71 if trouble.late else 2)
        print("together", flush=True)
        with link.propagate_failure():
            {body}
except Preemption as stopped:
    sys.exit(int(stopped.exit_code))
"""


@contextlib.contextmanager
def members(
    body: str,
    *,
    count: int = 3,
    started: int | None = None,
    limits: str = "init_seconds=20, heartbeat_seconds=5",
    facts: tuple[str, ...] = (),
    before: str = "",
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that run `before`, then `body`: `started` of `count`, or all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = body.strip().replace("\n", "\n            ")
    code = MEMBER.format(limits=limits, before=before, body=body)
    found = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (index, count, port)), (facts or TEN)[index]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for index in range(count if started is None else started)
    ]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return
    raise AssertionError(f"{text!r} was never printed")


def wait_for_exit(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], list[str]]:
    """Wait for processes, and return their exit codes, stdout and stderr."""
    printed = [process.communicate(timeout=60) for process in processes]
    return [p.returncode for p in processes], [o for o, _ in printed], [e for _, e in printed]


def test_signal_to_one_process_stops_all_at_same_step() -> None:
    with members("steps(link, 1000)") as processes:
        for process in processes:
            wait_for(process, "running")
        processes[1].send_signal(signal.SIGTERM)
        codes, printed, errors = wait_for_exit(processes)
    assert codes == [75, 75, 75], errors
    (step,) = {re.search(r"stopped at (\d+)", text)[1] for text in printed}  # type: ignore[index]
    assert 3 < int(step) < 1000


def test_single_process_stops_on_signal() -> None:
    with members("steps(link, 1000)", count=1) as (process,):
        wait_for(process, "running")
        process.send_signal(signal.SIGTERM)
        codes, printed, _ = wait_for_exit([process])
    assert codes == [75] and "stopped at" in printed[0]


def test_all_processes_exit_when_run_ends() -> None:
    with members("steps(link, 5)") as processes:
        assert wait_for_exit(processes)[0] == [0, 0, 0]


def test_signal_before_first_step_exits_immediately() -> None:
    body = "with phases.enter(COMPILE):\n    print('running', flush=True)\n    time.sleep(60)"
    with members(body, count=2) as processes:
        for process in processes:
            wait_for(process, "running")
        processes[0].send_signal(signal.SIGTERM)
        codes, _, errors = wait_for_exit(processes)
    assert codes == [75, 75]
    assert all("before the first step" in text for text in errors)


@pytest.mark.parametrize("asked", [0, pytest.param(1, marks=pytest.mark.long)])
def test_signal_before_all_processes_connect(asked: int) -> None:
    with members("pass", count=4, started=3) as processes:
        for process in processes:
            wait_for(process, "linked")
        time.sleep(1)  # all three connect to process 0
        processes[asked].send_signal(signal.SIGTERM)
        codes, _, errors = wait_for_exit(processes)
    assert codes == [75, 75, 75], errors
    assert all("before the first step" in text for text in errors)


@pytest.mark.parametrize("comes", [True, pytest.param(False, marks=pytest.mark.long)])
def test_signal_before_process_0_listens(comes: bool) -> None:
    late = "if index == 0:\n    print('late', flush=True)\n    time.sleep(2)"
    with members("time.sleep(60)", count=2, before=late) as processes:
        wait_for(processes[0], "late")
        if not comes:
            processes[0].kill()
        wait_for(processes[1], "linked")
        processes[1].send_signal(signal.SIGTERM)
        codes, _, errors = wait_for_exit(processes)
    assert codes == [75 if comes else -signal.SIGKILL, 75], errors
    assert all("before the first step" in text for text in errors[not comes :])


HANGS = """
def read(step):
    if step == 4:
        print("hangs", flush=True)
        time.sleep(60)
steps(link, 1000, read)
"""


@pytest.mark.fault("F8")
def test_second_signal_exits_immediately() -> None:
    body = HANGS
    with members(body, count=1, limits="stall_seconds=0") as (process,):
        wait_for(process, "hangs")
        process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        codes, _, errors = wait_for_exit([process])
    assert codes == [75] and "second stop request" in errors[0]


@pytest.mark.fault("H5")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_ctrl_c_or_closed_terminal_stops_all_with_same_code(number: int, code: int) -> None:
    """One process receives the signal and reports it immediately; all stop at the same step."""
    with members("steps(link, 1000)", count=2) as processes:
        for process in processes:
            wait_for(process, "running")
        processes[1].send_signal(number)
        codes, printed, errors = wait_for_exit(processes)
    assert codes == [code, code], errors
    assert len({re.search(r"stopped at (\d+)", text)[1] for text in printed}) == 1  # type: ignore[index]
    assert errors[1].startswith("stopping after this step and saving; ")
    assert ("Ctrl-C again" in errors[1]) == (code == 130)


@pytest.mark.fault("H5")
def test_second_ctrl_c_exits_immediately() -> None:
    with members(HANGS, count=1, limits="stall_seconds=0") as (process,):
        wait_for(process, "hangs")
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
        assert process.poll() is None
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        codes, _, errors = wait_for_exit([process])
    assert codes == [130] and time.monotonic() - begin < 5
    assert "second stop request" in errors[0] and "Traceback" not in errors[0]


@pytest.mark.fault("H5")
def test_ctrl_c_before_first_step_exits_immediately() -> None:
    body = "with phases.enter(COMPILE):\n    print('running', flush=True)\n    time.sleep(60)"
    with members(body, count=2) as processes:
        for process in processes:
            wait_for(process, "running")
        processes[1].send_signal(signal.SIGINT)
        codes, _, errors = wait_for_exit(processes)
    assert codes == [130, 130]
    assert all("before the first step" in text for text in errors)


@pytest.mark.fault("H5")
def test_signals_ignored_at_startup_stay_ignored() -> None:
    """`nohup maxpipe train` ignores SIGHUP when the terminal is closed."""
    before = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with members("steps(link, 1000)", count=1, before=before) as (process,):
        wait_for(process, "running")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit([process])[0] == [75]


@pytest.mark.fault("F8")
def test_signals_in_quick_succession_are_one_request() -> None:
    """A launcher signals the process and then its process group."""
    body = HANGS.replace("60", "1")
    with members(body, count=1) as (process,):
        wait_for(process, "hangs")
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        codes, printed, errors = wait_for_exit([process])
    assert codes == [75], errors
    assert "stopped at" in printed[0] and "second stop request" not in errors[0]


@pytest.mark.fault("F8")
def test_process_exits_after_grace_period() -> None:
    body = HANGS
    with members(body, count=1, limits="heartbeat_seconds=1, grace_seconds=1") as (process,):
        wait_for(process, "hangs")
        process.send_signal(signal.SIGTERM)
        codes, _, errors = wait_for_exit([process])
    assert codes == [75] and "time limit for saving" in errors[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_is_reported_immediately(victim: int) -> None:
    with members("steps(link, 1000)") as processes:
        for process in processes:
            wait_for(process, "running")
        begin = time.monotonic()
        processes[victim].kill()
        codes, _, errors = wait_for_exit(processes)
        assert time.monotonic() - begin < 5
    del codes[victim], errors[victim]
    assert codes == [71, 71]
    assert all(re.search(rf"process {victim}\b.* disconnected", text) for text in errors)
    if victim:
        assert all("It was in" in text and f"pid {processes[1].pid}" in text for text in errors)


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_disconnect_is_reported_before_thread_aborts(killed: bool) -> None:
    """jax aborts if it loses process 0; a process that aborts for another reason is reported."""
    body = """
def abort():
    ctypes.CDLL(None).abort()
def step_of(step):
    if step == 5 and index == 1:
        threading.Thread(target=abort).start()
        print("aborts", flush=True)
steps(link, 1000, step_of)
"""
    with members(body, count=2, before="import ctypes, threading") as processes:
        wait_for(processes[1], "aborts")
        if killed:
            processes[0].kill()
        codes, _, errors = wait_for_exit(processes)
    if killed:
        assert codes == [-signal.SIGKILL, 71] and "process 0 disconnected" in errors[1]
    else:
        assert codes == [71, -signal.SIGABRT] and "process 1 " in errors[0]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_unresponsive_process_ends_run_after_timeout(victim: int) -> None:
    limits = "init_seconds=20, heartbeat_seconds=2"
    with members("steps(link, 1000)", limits=limits) as processes:
        for process in processes:
            wait_for(process, "running")
        processes[victim].send_signal(signal.SIGSTOP)
        codes, _, errors = wait_for_exit(processes[:victim] + processes[victim + 1 :])
    assert codes == [71, 71]
    assert all(f"process {victim}" in text and "did not respond for 2 s" in text for text in errors)


@pytest.mark.fault("F10")
def test_first_failure_is_printed_last_by_all_processes() -> None:
    body = "steps(link, 1000, lambda step: 1 / (step - 5) if index == 2 else None)"
    with members(body) as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [70, 70, 70]
    for text in errors:
        assert text.rstrip().endswith("ZeroDivisionError: division by zero")
    assert all(re.search(r"^process 2 .* failed first:$", text, re.M) for text in errors[:2])


@pytest.mark.fault("F9")
def test_stall_prints_all_stacks_and_names_stalled_process() -> None:
    body = """
def read(step):
    if index == 1 and step == 5:
        time.sleep(60)  # the data reader hangs
def step_of_all(step):
    if step == 6:
        with phases.enter(STEP):
            time.sleep(60)  # in a collective
steps(link, 1000, read if index == 1 else step_of_all)
"""
    limits = "init_seconds=20, heartbeat_seconds=2, stall_seconds=2"
    with members(body, limits=limits) as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [71, 71, 71]
    for index, text in enumerate(errors):
        assert f"process {index} on " in text and "most recent call first" in text
        what, who, _ = text.splitlines()[-3:]
        assert "no progress for 2 s" in what and "has been in data for" in who
        assert f"process 1 ({socket.gethostname()}, pid {processes[1].pid})" in who
        assert "process 2" not in who


def test_stall_requires_repeated_reports_from_all_processes() -> None:
    """Heartbeats may be outdated if a host was suspended."""
    told: list[CoordinatorMessage] = []
    with selectors.DefaultSelector() as selector:
        hub = Coordinator(2, Timeouts(stall_seconds=1), told.append, print, selector)
        hub.join(Member(0))
        hub.join(Member(1))

        def beat(index: int, step: int, seconds: float) -> None:
            of: Any = {
                "phase": "start",
                "step": step,
                "seconds": seconds,
                "own": 0.0,
                "waits": True,
            }
            hub.handle(index, {"beat": of})

        def verdict() -> bool:
            hub.check_timeouts()
            return any("leave" in message for message in told)

        beat(0, 0, 3.0)
        beat(1, 0, 3.0)
        assert not verdict()
        beat(0, 0, 4.0)
        assert not verdict()  # the other process has sent no heartbeat since
        beat(1, 5, 0.5)
        assert not verdict()
        beat(1, 5, 1.5)
        assert not verdict()  # the stall is suspected again
        beat(1, 5, 2.5)
        assert not verdict()
        beat(0, 0, 6.0)
        assert verdict()


@pytest.mark.parametrize("phase", ["DATA_SET_UP", pytest.param("COMPILE", marks=pytest.mark.long)])
def test_set_up_with_progress_or_compilation_is_not_a_stall(phase: str) -> None:
    """Processes that wait, before or in the first step, are not reported as stalled either."""
    body = f"""
if index == 1:
    with phases.enter({phase}):
        for _ in range(12):
            time.sleep(0.25)
            if {phase} == DATA_SET_UP:
                phases.progress()
if {phase} == DATA_SET_UP:
    link.compare_across_processes("data", "x")
elif index != 1:
    with phases.enter(STEP):
        time.sleep(3)
steps(link, 5)
"""
    with members(body, limits="heartbeat_seconds=5, stall_seconds=1") as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [0, 0, 0], errors


def test_stalled_set_up_is_reported_without_waiting_processes() -> None:
    body = """
if index == 1:
    with phases.enter(DATA_SET_UP):
        time.sleep(60)
link.compare_across_processes("data", "x")
"""
    with members(body, limits="heartbeat_seconds=5, stall_seconds=1") as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [71, 71, 71]
    for text in errors:
        what, who, _ = text.splitlines()[-3:]
        assert "no progress for 1 s" in what and "has been in data set-up for" in who
        assert "process 1 (" in who and ";" not in who


@pytest.mark.long
def test_stall_report_names_record_being_read() -> None:
    """The record is reported even in an evaluation, for which all other processes wait."""
    body = """
def read(step):
    if step == 4:
        if index == 1:
            phases.detail = "reading data.mixture.web, a.jsonl: record 7"
        with phases.enter(EVAL):
            time.sleep(60)
steps(link, 1000, read)
"""
    limits = "init_seconds=20, heartbeat_seconds=5, stall_seconds=2"
    with members(body, limits=limits) as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [71, 71, 71]
    for text in errors:
        who = text.splitlines()[-2]
        assert "has been in eval for" in who and ";" not in who
        assert f"pid {processes[1].pid}" in who
        assert who.endswith("at step 4 (reading data.mixture.web, a.jsonl: record 7).")


@pytest.mark.long
@pytest.mark.fault("S1")
def test_straggler_is_reported() -> None:
    body = """
def wait(step):
    with phases.enter(STEP):
        time.sleep(0.05)  # for process 2, in a collective
steps(link, 60, wait if index != 2 else lambda step: time.sleep(0.05))
"""
    with members(body) as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [0, 0, 0]
    found = re.search(r"^process 2 \(.*\) delays the other processes: (\d+) ms", errors[0], re.M)
    assert found and 35 <= int(found[1]) <= 90


@pytest.mark.fault("F10")
def test_early_exit_of_one_process_ends_run() -> None:
    body = """
def wait(step):
    if step == 6:
        with phases.enter(STEP):
            time.sleep(60)  # for process 1, in a collective
steps(link, 5 if index == 1 else 1000, wait)
"""
    with members(body, limits="heartbeat_seconds=2") as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [71, 0, 71]
    for text in (errors[0], errors[2]):
        assert re.search(r"process 1 exited \d s ago, but processes 0, 2 did not", text)


@pytest.mark.parametrize(
    "rest",
    [
        "with phases.enter(SAVE):\n        time.sleep(3)",
        pytest.param("steps(link, 150)", marks=pytest.mark.long),
    ],
)
def test_process_that_saves_or_trains_on_is_not_terminated(rest: str) -> None:
    """After the last save, only process 0 verifies the files, which may take minutes."""
    body = f"steps(link, 5)\nif index == 0:\n    {rest}\n    print('complete', flush=True)"
    with members(body, limits="heartbeat_seconds=1") as processes:
        codes, printed, errors = wait_for_exit(processes)
    assert codes == [0, 0, 0], errors
    assert "complete" in printed[0]


def test_wait_for_disconnects_supports_high_descriptors() -> None:
    """File descriptors above 1023 are not supported by `select`."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, before[1]))
    here, there = socket.socketpair()
    try:
        with (
            here,
            socket.socket(fileno=fcntl.fcntl(here, fcntl.F_DUPFD, 2000)) as far,
            selectors.DefaultSelector() as selector,
        ):
            wire = AuthenticatedConnection(far, SECRET.encode(), b"nonces", is_hub=True)
            hub = Coordinator(2, Timeouts(), lambda message: None, print, selector)
            hub._members = {0: Member(0), 1: Member(1, connection=wire)}
            begin = time.monotonic()
            hub.wait_for_disconnects(0.2)
            assert time.monotonic() - begin >= 0.2
            there.close()
            hub.wait_for_disconnects(60)
            assert time.monotonic() - begin < 10
    finally:
        there.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("link._coordinator.wait_for_goodbyes", "1 / 0"),
        ("link.on_leave", "1 / 0"),
        ("link.on_leave", "time.sleep(60)"),
    ],
)
def test_process_exits_even_if_shutdown_fails(what: str, fault: str) -> None:
    body = f"""
sys.modules["maxpipe.distributed.control_channel"]._GOODBYE_SECONDS = 0.5
{what} = lambda *_: {fault}
link._coordinator._end(71, "nothing moves")
"""
    with members(body, count=1) as processes:
        begin = time.monotonic()
        codes, _, errors = wait_for_exit(processes)
        assert time.monotonic() - begin < 30
    assert codes == [71] and errors == ["nothing moves\n"]


@pytest.mark.fault("F10")
def test_missing_processes_are_reported() -> None:
    limits = "init_seconds=2"
    with members("pass", count=4, started=2, limits=limits) as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [71, 71]  # a restart may succeed if hosts were late
    assert all("processes 2, 3 of 4 did not join within 2 s" in text for text in errors)


def test_unreachable_process_0_is_reported() -> None:
    with members("pass", count=2, limits="init_seconds=1") as processes:
        processes[0].kill()
        codes, _, errors = wait_for_exit(processes)
    assert codes[1] == 71 and "process 0 was not reachable at 127.0.0.1:" in errors[1]


def test_unresolved_host_name_is_not_blamed_on_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The secret may be removed before the timeout, because process 0 has exited."""

    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    found = iter([b"s" * 32])
    with ControlChannel(Phases(), Timeouts(init_seconds=0.5), index=1, count=2) as link:
        trouble = link.connect(("host0", 1), {}, lambda: next(found, None))
    assert trouble is not None and trouble.late and not trouble.action
    assert "cannot resolve the name: Name or service not known" in trouble.text


def test_different_metadata_is_rejected_with_key() -> None:
    with members("pass", facts=("10", "10", "11")) as processes:
        codes, _, errors = wait_for_exit(processes)
    assert codes == [2, 2, 2]
    assert all("train.steps is 10 in process 0 and 11 in process 2" in text for text in errors)


@pytest.mark.fault("P6")
def test_duplicate_process_id_is_rejected_and_run_continues() -> None:
    with members("steps(link, 5)", started=2) as processes:
        time.sleep(1.5)  # the first process 1 has connected
        second = start_again(processes[1], 1)
        codes, _, errors = wait_for_exit([second])
        assert codes == [2]
        (twice,) = errors
        assert contains(twice, "process 1") and contains(twice, "the same process_id as process 1")
        codes, _, errors = wait_for_exit([*processes, start_again(processes[1], 2)])
    assert codes == [0, 0, 0]
    assert "rejected: process 1 (" in errors[0]


@pytest.mark.long
@pytest.mark.fault("P6")
def test_different_num_processes_is_rejected_and_reported() -> None:
    limits = "init_seconds=4"
    with members("pass", count=2, started=1, limits=limits) as (first,):
        codes, _, errors = wait_for_exit([start_again(first, 1, count=3), first])
    assert codes == [2, 71]
    assert all("has num_processes=3, but process 0 has 2" in text for text in errors)
    assert "process 1 of 2 did not join within 4 s; process 1 (" in errors[1]


@pytest.mark.fault("F10")
@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_disconnected_process_can_reconnect(silent: bool) -> None:
    """A host fails before all processes have connected; its connection may stay open."""
    limits = "init_seconds=20, heartbeat_seconds=3"
    with (
        members("steps(link, 5)", started=1, limits=limits) as (first,),
        joined(first, 1) as wire,
    ):
        if silent:
            time.sleep(3.5)
        else:
            wire.close()
        second = start_again(first, 2)
        time.sleep(1.5)  # process 2 connects first, and must not be grouped with the lost process 1
        codes, _, errors = wait_for_exit([first, start_again(first, 1), second])
    assert codes == [0, 0, 0], errors


def test_process_0_does_not_wait_for_goodbye_of_lost_host() -> None:
    limits = "init_seconds=20, heartbeat_seconds=1"
    with (
        members("steps(link, 5)", count=2, started=1, limits=limits) as (first,),
        joined(first, 1, count=2),
    ):
        begin = time.monotonic()
        codes, _, errors = wait_for_exit([first])
        assert time.monotonic() - begin < 20
    assert codes == [71] and "process 1 (far, pid 1) did not respond for 1 s" in errors[0]


def test_port_is_released_before_welcome() -> None:
    """jax's coordination service listens on the port next."""
    port, told = free_port(), []

    def hear(message: Any) -> None:
        told.extend(message)
        with socket.create_server(("127.0.0.1", port)):
            pass

    here, there = socket.socketpair()
    with here, there, selectors.DefaultSelector() as selector:
        hub = Coordinator(2, Timeouts(), hear, print, selector)
        hub.listen(("127.0.0.1", port), SECRET.encode())
        hub.flush_pending()
        assert len(selector.get_map()) == 1
        hub.join(Member(0))
        hub.join(
            Member(
                1, connection=AuthenticatedConnection(here, SECRET.encode(), b"nonces", is_hub=True)
            )
        )
        assert not selector.get_map()
        hub.close()
    assert told == ["welcome"]


def test_deferred_profile_request_ends_with_the_request_of_another_process() -> None:
    """Otherwise, the same signal to all processes would start several profiles."""
    with ControlChannel(Phases(), Timeouts(init_seconds=5.0)) as link:
        link.connect(("127.0.0.1", free_port()), {}, lambda: b"secret")
        link.request_profile()  # before the first steps
        link._state.profile_at = 9
        link.request_profile()
        link.clear_profile_request()
        assert not link._defers_profile


def test_values_are_compared_across_processes() -> None:
    body = "print(link.compare_across_processes('data', 'b' if index == 1 else 'a'))"
    with members(body) as processes:
        codes, printed, errors = wait_for_exit(processes)
    assert codes == [0, 0, 0], errors
    assert {text.splitlines()[-1] for text in printed} == {"{'a': [0, 2], 'b': [1]}"}


def test_hello_message_may_arrive_in_pieces() -> None:
    """The message contains the complete config, and may be split by the network."""
    with (
        members("link.compare_across_processes('x', 'y')", count=2, started=1) as (process,),
        joined(process, 1, count=2, pause=0.3) as wire,
    ):
        assert received(wire, "welcome")
        wire.send({"same": "x", "value": "y"})
        wire.send({"bye": True})
        assert process.wait(10) == 0


def start_again(
    process: subprocess.Popen[str], index: int, *, count: int | None = None
) -> subprocess.Popen[str]:
    """Start the same command as another process of the run."""
    arguments: list[Any] = list(process.args)  # type: ignore[arg-type]
    arguments[3] = str(index)
    arguments[4] = str(count) if count else arguments[4]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def port_of(hub: subprocess.Popen[str]) -> int:
    return int(list(hub.args)[-2])  # type: ignore[arg-type]


@contextlib.contextmanager
def authenticated(hub: subprocess.Popen[str]) -> Iterator[AuthenticatedConnection]:
    """Open an authenticated connection that sends no messages."""
    deadline = time.monotonic() + 10
    while True:
        try:
            wire = connect(("127.0.0.1", port_of(hub)), SECRET.encode(), lambda: deadline)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    try:
        yield wire
    finally:
        wire.close()


@contextlib.contextmanager
def joined(
    hub: subprocess.Popen[str], index: int, *, count: int = 3, pause: float = 0
) -> Iterator[AuthenticatedConnection]:
    """Open an authenticated connection that sends only the hello message of a process."""
    facts = {"train.steps": "10"}
    hello = {"index": index, "count": count, "host": "far", "pid": 1, "facts": facts}
    with authenticated(hub) as wire:
        sock = wire._socket
        wire._socket = Nowhere()  # type: ignore[assignment]
        wire.send({"hello": hello})
        text, wire._unsent, wire._socket = bytes(wire._unsent), bytearray(), sock
        sock.sendall(text[:20])
        time.sleep(pause)
        sock.sendall(text[20:])
        yield wire


class Nowhere:
    """A socket that always blocks."""

    def send(self, data: bytes) -> int:
        raise BlockingIOError


def received(wire: AuthenticatedConnection, name: str) -> bool:
    """Return whether a message with this name arrives before the connection closes."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        messages = wire.receive(CoordinatorMessage)
        if messages is None:
            return False
        if any(name in message for message in messages):
            return True
        time.sleep(0.01)
    raise AssertionError(f"{name} was never received")
