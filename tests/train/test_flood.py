"""A run of two processes whose coordinator port is flooded by unauthenticated peers."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from maxpipe.distributed.coordinator import free_port
from tests.strangers import Flood, measured
from tests.train.runs import Run, Start, losses, saved_digest, wait_for_outputs

pytestmark = pytest.mark.faults

BEFORE, DURING, CONNECTIONS = 9000, 1000, 500
SHARE = 0.05
JAX_SERVICE = "event_engine"
"""gRPC threads of the JAX service, which uses the port once all processes have connected."""
KEYS = (
    "runtime.cpu_collectives=gloo",  # the same bits in any number of processes
    "train.steps=300",
    "checkpoint.every=100",
    "eval.batches=0",
    "log.every=1",
)


@pytest.mark.fault("P1")
def test_coordinator_survives_flood_of_unauthenticated_messages(
    tiny: Path, start: Start, run: Run, tmp_path: Path
) -> None:
    run("train", tiny, f"run.dir={tmp_path / 'alone'}", *KEYS)
    port = free_port()
    shared = ("train", tiny, f"run.dir={tmp_path}", *KEYS, "mesh.cpu_devices=2")
    shared += ("runtime.num_processes=2", f"runtime.coordinator=127.0.0.1:{port}")
    processes = [start(*shared, "runtime.process_id=0")]
    try:
        wait_for_listener(port)
        with Flood(port, 1, CONNECTIONS) as flood, measured(processes[0].pid) as before:
            flood.send(BEFORE, 120)
        assert flood.num_messages >= BEFORE
        processes.append(start(*shared, "runtime.process_id=1"))
        during: list[float] = []
        with Flood(port, 2, CONNECTIONS) as flood:
            # Flood for the lifetime of process 1; if steps are fast, most of it is joining and
            # compiling.
            while all(process.poll() is None for process in processes):
                with contextlib.suppress(OSError), measured(processes[0].pid, JAX_SERVICE) as part:
                    flood.send(300, 2, a_second=150)
                during += part
        assert flood.num_messages >= DURING
        outputs = wait_for_outputs(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert losses(tmp_path / "run") == losses(tmp_path / "alone/run")
    assert saved_digest(tmp_path / "run") == saved_digest(tmp_path / "alone/run")
    assert "\x1b" not in outputs[0]
    share = sum(during) / len(during)  # all intervals but the last are equal
    print(f"of a core: {before[0]:.1%} before and {share:.1%} during the run")
    assert before[0] < SHARE and share < SHARE


def wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            time.sleep(0.5)
            return
    raise AssertionError("no process listens on the port")
