"""Config section `runtime`: devices, processes and timeouts."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import add_ranges, rule
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Devices, processes and timeouts."""

    platform: Literal["auto", "cpu", "tpu", "cuda"] = "auto"
    """Device platform. `auto` uses jax's default platform, which prefers accelerators."""
    num_processes: int = 1
    """Number of processes of the run. If 0, the number of processes, the process ids and the
    coordinator address are detected from the cluster environment (Cloud TPU, SLURM, Open MPI)."""
    process_id: int = 0
    """Rank of this process, from 0 to `runtime.num_processes` - 1."""
    coordinator: str = ""
    """Address of process 0, as `host:port`. Ignored unless `runtime.num_processes` is more than
    1."""
    cpu_collectives: Literal["auto", "gloo"] = "auto"
    """Implementation of collectives between CPU devices. `auto` uses shared memory within a single
    process and gloo between processes. `gloo` reduces in the same order for any number of
    processes, so that results are bitwise identical, but it is slower in a single process."""
    init_timeout_seconds: int = 300
    """Time in seconds that a process waits at startup for all other processes to connect."""
    heartbeat_timeout_seconds: int = 100
    """Heartbeat timeout in seconds. If a process sends no heartbeat for this long, all other
    processes exit with code 71."""
    stall_timeout_seconds: int = 1800
    """Stall timeout in seconds. If no process makes progress for this long, all processes print
    their stack traces and exit with code 71. A step, batch, evaluation or save counts as progress.
    During setup, reading a checkpoint or a portion of the documents also counts. The timeout is
    suspended while a process compiles. 0 disables the timeout."""
    stop_grace_seconds: int = 0
    """Maximum time in seconds between SIGTERM, SIGHUP or Ctrl-C and the exit of the process. After
    the signal, the process finishes the current step and saves a checkpoint. If the step and the
    save exceed this limit, the process exits without saving, and the run can resume from its newest
    checkpoint. 0 means no limit."""
    compilation_cache: str = "~/.cache/maxpipe/compiled"
    """Folder in which compiled programs are cached between runs. If empty, the cache is disabled.
    Ignored with several CPU devices, because cached CPU programs do not preserve the order of
    collectives."""
    memory_check: Literal["stop", "warn"] = "stop"
    """Behavior when the memory forecast or the compiler reports that a step needs more memory than
    is available. For CPU devices, the limit is the host's available memory. `stop` ends the run
    before training starts, and `warn` prints a warning. A forecast of less than 1.2 times the
    available memory causes only a warning."""
    compiled_step: str = field(default="", metadata=renamed_from("executable"))
    """Folder that contains a train step compiled ahead of time by `maxpipe compile --save`. The
    config, the devices and the jax version must be the same as at compilation. Compiled steps are
    not supported with several CPU devices."""


add_ranges(
    Bound("runtime.num_processes", 1, 0, why="0 detects the number of processes from the cluster"),
    Bound("runtime.process_id", 0, 0),
    Bound("runtime.init_timeout_seconds", 300, 1),
    Bound("runtime.heartbeat_timeout_seconds", 100, 1),
    Bound("runtime.stall_timeout_seconds", 1800, 0, why="0 disables the timeout"),
    Bound("runtime.stop_grace_seconds", 120, 0, why="0 means no limit"),
)


@rule("train.batch_ramp", "runtime.compiled_step")
def _ramp_needs_no_executable(config: Config) -> Iterator[RuleViolation]:
    if config.train.batch_ramp and config.runtime.compiled_step:
        yield RuleViolation(
            Code.RUN_COMPILED_STEP,
            "runtime.compiled_step",
            "contains one compiled train step, but train.batch_ramp needs one per batch size.",
            "Set runtime.compiled_step='' to compile the steps in this run, or "
            "train.batch_ramp=[].",
        )


@rule("runtime.process_id", "runtime.num_processes")
def _process_id_is_in_range(config: Config) -> Iterator[RuleViolation]:
    process, processes = config.runtime.process_id, config.runtime.num_processes
    if processes and process >= processes:
        yield RuleViolation(
            Code.CFG_VALUE,
            "runtime.process_id",
            f"must be less than runtime.num_processes ({processes}): ranks start at 0.",
            f"Set runtime.process_id={processes - 1} or less, or "
            f"runtime.num_processes={process + 1}.",
        )


def _is_host(text: str) -> bool:
    """Return True for an IPv4 address, an IPv6 address in brackets, or a valid host name."""
    with contextlib.suppress(ValueError):
        if in_brackets := re.fullmatch(r"\[([0-9A-Fa-f:.]+)\]", text):
            return ipaddress.ip_address(in_brackets[1]).version == 6
        return ipaddress.ip_address(text).version == 4
    # For longer or empty labels, Python's host lookup raises an error other than OSError.
    label = r"[A-Za-z0-9_-]{1,63}"
    is_name = re.fullmatch(rf"(?![0-9.]+$){label}(\.{label})*\.?", text)
    return len(text) <= 253 and is_name is not None


@rule("runtime.coordinator", "runtime.num_processes")
def _coordinator_is_an_address(config: Config) -> Iterator[RuleViolation]:
    processes, address = config.runtime.num_processes, config.runtime.coordinator
    if processes <= 1:
        return
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        yield RuleViolation(
            Code.CFG_MISSING,
            "runtime.coordinator",
            f"must be the host:port of process 0 if runtime.num_processes is {processes}.",
            "Set runtime.coordinator=localhost:12345 on one machine, or the address of process 0.",
        )
