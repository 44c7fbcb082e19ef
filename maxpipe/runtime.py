"""How a process starts and stops: devices, other processes, caches, signals.

The only module that touches jax's global settings and the process environment. It
runs before the first device is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax
from jax.experimental import multihost_utils

from maxpipe import redact
from maxpipe.config.schema import RuntimeConfig
from maxpipe.errors import ConfigError, ExitCode, MaxpipeError, Preempted

_LOG = logging.getLogger(__name__)

# jax ends the process with SIGABRT when the others do not come; ours must be the first limit.
_JAX_LIMIT_SECONDS = 60


def start(config: RuntimeConfig, cpu_devices: int) -> None:
    """Choose the platform, join the other processes, open the compilation cache.

    Raises:
        ConfigError: the chosen platform has no devices here, or the others cannot be reached.
    """
    # XLA's C++ side logs through its own channel; warnings there are for its developers.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _remove_log_printers()
    if config.platform != "auto":
        jax.config.update("jax_platforms", config.platform)
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    _join(config)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform
        reason = (str(error).splitlines() or ["jax has no plugin for it."])[0]
        raise ConfigError.one(
            "runtime.platform",
            config.platform,
            f"has no devices on this machine: {reason}",
            "Set runtime.platform=cpu, or install the extra for your device: "
            "pip install 'maxpipe[tpu]' or 'maxpipe[cuda]'.",
        ) from error
    on_cpu = jax.default_backend() == "cpu"
    # XLA for CPU loads a program without the order of its collectives: devices that meet in
    # different orders wait for each other forever, or get each other's values.
    if not (on_cpu and jax.device_count() > 1):
        _open_cache(config.compilation_cache)
    if on_cpu and jax.process_count() > 1:
        _keep_stdout_for_python()


_ASYNCHRONOUS = {
    # Both together: a gather that is issued early travels behind a loop, and takes memory there.
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}
_SPARING = {"xla_jf_bf16_propagation": "false"}
"""Else XLA keeps a bfloat16 copy of every weight's shard throughout the step."""
_LARGE_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
"""Twice the default working memory of a fusion: 5% fewer cycles in a decoder's layers."""
_LARGE_VMEM_KINDS = ("TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU7x")


def compiler_options(platform: str, kind: str, *, spares_memory: bool = False) -> dict[str, str]:
    """What XLA should do differently for the step on devices of this platform and kind.

    `spares_memory` prefers less memory to fewer cycles. The gains are the compiler's own numbers
    (`benchmarks/tpu_ahead_of_time.py`).
    """
    if platform != "tpu":
        return {}
    large = _LARGE_VMEM if kind in _LARGE_VMEM_KINDS else {}
    return (_SPARING if spares_memory else _ASYNCHRONOUS) | large


def use_no_devices() -> None:
    """For commands that read files only, perhaps beside a run that holds the devices."""
    _remove_log_printers()
    jax.config.update("jax_platforms", "cpu")


def _remove_log_printers() -> None:
    """Without this every warning is printed twice: importing orbax adds a printer."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def _keep_stdout_for_python() -> None:
    """gloo, which joins CPU processes, reports each connection on the C library's stdout."""
    sys.stdout.flush()
    kept = os.dup(sys.stdout.fileno())
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(kept, "w", buffering=1, encoding=encoding, errors=errors)


def _open_cache(folder: str) -> None:
    if not folder:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOG.warning(
            "runtime.compilation_cache = %s: cannot be used (%s). Programs are compiled anew.",
            redact.text(folder),
            error.strerror,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _join(config: RuntimeConfig) -> None:
    if config.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limit = config.init_timeout_seconds
    from_cluster = config.num_processes == 0
    too_late = _not_together(config, f"the others did not come within {limit} s.")
    try:
        with _deadline(limit, too_late.exit_code, str(too_late)):
            jax.distributed.initialize(
                coordinator_address=None if from_cluster else config.coordinator,
                num_processes=None if from_cluster else config.num_processes,
                process_id=None if from_cluster else config.process_id,
                initialization_timeout=limit + _JAX_LIMIT_SECONDS,
                heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
            )
    except (RuntimeError, ValueError) as error:
        raise _not_together(config, str(error).splitlines()[0]) from error


def _not_together(config: RuntimeConfig, reason: str) -> ConfigError:
    rank = f"process {config.process_id} of {config.num_processes}"
    return ConfigError.one(
        "runtime.coordinator",
        config.coordinator or "found by jax",
        f"must bring all processes together; {rank if config.num_processes else 'jax'}: {reason}",
        "Start every process with the same runtime.coordinator and num_processes, each "
        "with its own process_id; or set runtime.num_processes=1.",
    )


@contextlib.contextmanager
def _deadline(seconds: float, code: int, message: str) -> Iterator[None]:
    """Ends the process when the body, perhaps a call that nothing interrupts, takes longer."""
    timer = _exit_later(seconds, code, message)
    try:
        yield
    finally:
        timer.cancel()


def _exit_later(seconds: float, code: int, message: str) -> threading.Timer:
    def leave() -> None:
        print(redact.text(message), file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def bounded_exit(grace_seconds: float) -> Iterator[None]:
    """When the body fails in one process of many, that process ends within `grace_seconds`.

    Processes leave together, at a barrier. One that fails alone would wait there for the
    others, which wait in a collective for it.
    """
    try:
        yield
    except Preempted:  # agreed by all
        raise
    except BaseException as error:
        if jax.process_count() > 1:
            code = error.exit_code if isinstance(error, MaxpipeError) else ExitCode.BUG
            message = f"process {jax.process_index()} does not wait for the others: {error}"
            _exit_later(grace_seconds, code, message)
        raise


class StopRequest:
    """Whether the run was asked to stop (SIGTERM), agreed by all processes.

    Between `__enter__` and `__exit__` the signal does not end the process; the loop asks
    after each step, saves, and leaves with the exit code for "start me again". In a run of
    several processes jax catches the signal, from the moment that they have joined.
    """

    def __init__(self, config: RuntimeConfig):
        self._alone = config.num_processes == 1
        self._received = False
        self._asked = 0
        self._before: signal.Handlers | int | object = signal.SIG_DFL

    def __enter__(self) -> StopRequest:
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def now(self) -> bool:
        """Whether to stop here. All processes ask equally often and get the same answers."""
        if self._alone:
            return self._received
        # After a signal jax picks one more than the highest number that any process has asked
        # with, and answers yes to just that one. Counting from 1 makes sure that a signal which
        # comes before the first question is not lost; step numbers of a resumed run would not.
        self._asked += 1
        return multihost_utils.reached_preemption_sync_point(self._asked)
