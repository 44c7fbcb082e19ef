"""How a process starts and stops: devices, other processes, caches, signals.

The only module that touches jax's global settings and the process environment. It
runs before the first device is used.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import FrameType

import jax
from jax.experimental import multihost_utils

from maxpipe.config.schema import RuntimeConfig
from maxpipe.errors import ConfigError

_LOG = logging.getLogger(__name__)


def start(config: RuntimeConfig, cpu_devices: int) -> None:
    """Choose the platform, join the other processes, open the compilation cache.

    Raises:
        ConfigError: the chosen platform has no devices here, or the others cannot be reached.
    """
    # XLA's C++ side logs through its own channel; warnings there are for its developers.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if config.platform != "auto":
        jax.config.update("jax_platforms", config.platform)
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    _open_cache(config.compilation_cache)
    _join(config)
    try:
        jax.devices()
    except RuntimeError as error:
        raise ConfigError.one(
            "runtime.platform",
            config.platform,
            f"has no devices on this machine: {str(error).splitlines()[0]}",
            "Set runtime.platform=cpu, or install the extra for your device: "
            "pip install 'maxpipe[tpu]' or 'maxpipe[cuda]'.",
        ) from error


def _open_cache(folder: str) -> None:
    if not folder:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOG.warning("runtime.compilation_cache: %s cannot be used: %s", path, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _join(config: RuntimeConfig) -> None:
    if config.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeouts = {
        "initialization_timeout": config.init_timeout_seconds,
        "heartbeat_timeout_seconds": config.heartbeat_timeout_seconds,
    }
    try:
        if config.num_processes == 0:
            jax.distributed.initialize(**timeouts)
        else:
            jax.distributed.initialize(
                config.coordinator, config.num_processes, config.process_id, **timeouts
            )
    except (RuntimeError, ValueError) as error:
        raise ConfigError.one(
            "runtime.coordinator",
            config.coordinator or "found by jax",
            f"could not bring {config.num_processes or 'the'} processes together within "
            f"{config.init_timeout_seconds} s: {str(error).splitlines()[0]}",
            "Start every process with the same runtime.coordinator and num_processes, each "
            "with its own process_id; or set runtime.num_processes=1.",
        ) from error


class StopRequest:
    """Whether the run was asked to stop (SIGTERM), agreed by all processes.

    Between `__enter__` and `__exit__` the signal does not end the process; the loop asks
    after each step, saves, and leaves with the exit code for "start me again".
    """

    def __init__(self) -> None:
        self._received = False
        self._before: signal.Handlers | int | object = signal.SIG_DFL

    def __enter__(self) -> StopRequest:
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; every process gets the same answer."""
        if jax.process_count() == 1:
            return self._received
        return multihost_utils.reached_preemption_sync_point(step)
