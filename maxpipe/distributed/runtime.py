"""Start and stop of a process: devices, other processes, caches, signals.

The only module that touches jax's global settings and the process environment. It
runs before the first device is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxpipe.config.schema import RuntimeConfig
from maxpipe.distributed import protocol
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.coordinator import JoinFailure, Timeouts, free_port
from maxpipe.distributed.listener import own_addresses
from maxpipe.distributed.phases import Phases
from maxpipe.errors import ConfigError, MaxpipeError, Problem, UnreachableError
from maxpipe.io import redact
from maxpipe.io.files import expand_path, has_home

_LOG = logging.getLogger(__name__)

# jax ends a process with SIGABRT when others do not connect or are lost; our limits come first.
_JAX_LIMIT_SECONDS = 60
_SECRET_BYTES = 32
_UNREACHED = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
"""Prefixes of jax's errors about other processes that are missing or lost."""


def start(config: RuntimeConfig, cpu_devices: int) -> None:
    """Choose the platform and open the compilation cache, for a process on its own.

    Raises:
        ConfigError: the chosen platform has no devices here.
    """
    _prepare(config, cpu_devices)
    _find_devices(config)
    _use_devices(config)


@contextlib.contextmanager
def join_processes(
    config: RuntimeConfig,
    cpu_devices: int,
    phases: Phases,
    facts: Mapping[str, str],
    folder: Path,
) -> Iterator[ControlChannel]:
    """The same as one process of a run, and a link to the others; SIGTERM is caught inside.

    Args:
        config: of the processes.
        cpu_devices: virtual ones of this process.
        phases: this process's progress, reported to the others.
        facts: values that must be the same in all processes, by name.
        folder: of the run, which all processes see. The first leaves a secret in it for the
            others, where neither the environment nor jax gives them one.

    Raises:
        ConfigError: the chosen platform has no devices here, the others were started with other
            facts, or the secret is not private.
        AbsentError: the others did not come in time or cannot be reached.
        StorageError: the folder cannot be written.
    """
    _prepare(config, cpu_devices)
    if config.num_processes == 0:
        _initialize(config)
        _find_devices(config)  # before jax looks for them and fails without an explanation
        index, count = jax.process_index(), jax.process_count()
    else:
        index, count = config.process_id, config.num_processes
    limits = Timeouts(
        config.init_timeout_seconds,
        config.heartbeat_timeout_seconds,
        config.stall_timeout_seconds,
        config.stop_grace_seconds,
    )
    with ControlChannel(phases, limits, index=index, count=count) as link:
        if count > 1:
            _gather(config, link, facts, folder)
            if config.num_processes:
                _initialize(config)
        elif config.cpu_collectives == "gloo":
            _initialize(dataclasses.replace(config, coordinator=f"127.0.0.1:{free_port()}"))
        link.catch_signals()  # jax may have taken them
        with link.propagate_failure():
            _find_devices(config)
            _use_devices(config)
            yield link


def _prepare(config: RuntimeConfig, cpu_devices: int) -> None:
    # XLA's C++ side logs through its own channel; warnings there are for its developers.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _remove_log_printers()
    if config.platform != "auto":
        jax.config.update("jax_platforms", config.platform)
    jax.config.update("jax_num_cpu_devices", cpu_devices)


def _find_devices(config: RuntimeConfig) -> None:
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


def _use_devices(config: RuntimeConfig) -> None:
    on_cpu = jax.default_backend() == "cpu"
    # XLA for CPU loads a program without the order of its collectives: devices that meet in
    # different orders wait for each other forever, or get each other's values.
    if not (on_cpu and jax.device_count() > 1):
        _open_cache(config.compilation_cache)
    if on_cpu and (jax.process_count() > 1 or config.cpu_collectives == "gloo"):
        _keep_stdout_for_python()


_ASYNC_ALL_TO_ALL = {"xla_tpu_enable_async_ragged_all_to_all": "true"}
"""Shared experts, and weights' gradients, are computed while rows of experts travel."""
_BY_FUSIONS = {
    # Both together: a gather that is issued early travels behind a loop, and takes memory there.
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    **_ASYNC_ALL_TO_ALL,
}
"""Gathers travel step by step inside of other work's fusions. libtpu 0.0.50 refuses it anywhere but
on v5e, as it might hang or compute something else there."""
_BY_SPARSE_CORES = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    **_ASYNC_ALL_TO_ALL,
}
"""Sums, and from libtpu 0.0.50 on gathers, are left to the chip's sparse cores meanwhile."""
_ASYNC_OPTIONS = {
    "TPU v5 lite": _BY_FUSIONS,
    "TPU v5": _BY_SPARSE_CORES,
    "TPU v6 lite": _BY_SPARSE_CORES,
    "TPU7x": _BY_SPARSE_CORES,
}
"""By kind of device; others have neither."""
_LOW_MEMORY_OPTIONS = _ASYNC_ALL_TO_ALL | {"xla_jf_bf16_propagation": "false"}
"""Else XLA keeps a bfloat16 copy of every weight's shard throughout the step."""
_FUSED_DOWNCAST = {"xla_tpu_allow_conv_input_fusion_with_downcast_convert": "true"}
"""A product in 8 bits may round its operand itself. Where numbers are for several products,
`parallel.low_precision` says that they are written."""
_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""Working memory of a fusion. A decoder's layers take 3 to 5% fewer cycles with more of it than the
compiler gives, and a third to two thirds longer to compile."""
_LARGE_VMEM_KINDS = ("TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU7x")
_WIDE, _MAX_VMEM_KINDS = 8192, ("TPU v5", "TPU v6 lite")
"""`model.d_model` from which on 32 MiB take 2% fewer cycles than 24 (70B, 405B). On these kinds
they do so with 4096, too: 1 to 2% on v5p, none with experts (`benchmarks/tpu_step.md`), 13% on v6e
(`benchmarks/low_precision.md`)."""


def compiler_options(
    platform: str,
    kind: str,
    *,
    d_model: int,
    spares_memory: bool = False,
    in_8_bits: bool = False,
) -> dict[str, str]:
    """What XLA should do differently for the step on devices of this platform and kind.

    `spares_memory` prefers less memory to fewer cycles; `in_8_bits`: some products are. The gains
    are the compiler's own numbers (`benchmarks/tpu_step.py`; decision 31).
    """
    if platform != "tpu":
        return {}
    options = _LOW_MEMORY_OPTIONS if spares_memory else _ASYNC_OPTIONS.get(kind, _ASYNC_ALL_TO_ALL)
    options = options | (_FUSED_DOWNCAST if in_8_bits else {})
    if kind not in _LARGE_VMEM_KINDS:
        return options
    more = d_model >= _WIDE or kind in _MAX_VMEM_KINDS
    return options | {_VMEM: "32768" if more else "24576"}


def use_cpu_only() -> None:
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
    unusable = "runtime.compilation_cache = %s: cannot be used (%s). Programs are compiled again."
    if folder == RuntimeConfig().compilation_cache and not has_home():
        _LOG.warning(unusable, folder, "HOME is not set")
        return
    path = expand_path(folder, "runtime.compilation_cache")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOG.warning(unusable, redact.redact_text(folder), error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _gather(
    config: RuntimeConfig, link: ControlChannel, facts: Mapping[str, str], folder: Path
) -> None:
    """Waits for the other processes, each of which has its own link."""
    given = protocol.secret_from_environment()
    with contextlib.ExitStack() as stack:
        if not config.num_processes:
            address, shared = _broadcast_address(link.index)
            key = hmac.digest(given or b"", shared, "sha256")
        else:
            address = _address(config)
            key = given
            if key is None and link.index == 0:
                key = stack.enter_context(protocol.publish_secret(folder, address[1]))
                stack.callback(setattr, link, "on_leave", link.on_leave)
                link.on_leave = lambda code, text: protocol.remove_secret(folder, address[1])
        try:
            trouble = link.connect(
                address, facts, lambda: key or protocol.read_published_secret(folder, address[1])
            )
        except OSError as error:
            text = f"port {address[1]} cannot be used here: {error.strerror or error}"
            action = (
                "End what listens there, perhaps an earlier start of this run; or name another "
            )
            action += "port in runtime.coordinator of every process."
            trouble = JoinFailure(text, action=action)
    if trouble:
        raise _join_error(config, trouble)


def _address(config: RuntimeConfig) -> tuple[str, int]:
    host, _, port = config.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _broadcast_address(index: int) -> tuple[tuple[str, int], bytes]:
    """Host and a free port of process 0, and a new secret, broadcast over the devices."""
    word = np.zeros(_SECRET_BYTES + 300, np.uint8)  # a name has at most 253
    if index == 0:
        text = secrets.token_bytes(_SECRET_BYTES)
        text += f"{_own_address()}:{free_port()}".encode()
        word[: len(text)] = np.frombuffer(text, np.uint8)
    sent = bytes(np.asarray(multihost_utils.broadcast_one_to_all(word), np.uint8))
    host, _, port = sent[_SECRET_BYTES:].rstrip(b"\0").decode().rpartition(":")
    return (host, int(port)), sent[:_SECRET_BYTES]


def _own_address() -> str:
    """The address of this host, which is that of process 0, for the others."""
    # The interface of the default route. A host's own name often stands for loopback.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
        return probe.getsockname()[0]
    # jax has met the others at process 0 already; only its private part says where.
    from jax._src.distributed import global_state

    host = (global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
    return host or _name_of_host() or "127.0.0.1"


def _name_of_host() -> str:
    """Empty when it is unknown, or stands for loopback."""
    with contextlib.suppress(OSError, ValueError):
        name = socket.gethostname()
        for *_, address in socket.getaddrinfo(name, None):
            if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
                return name
    return ""


def _initialize(config: RuntimeConfig) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    from_cluster = config.num_processes == 0
    limit = config.init_timeout_seconds
    late = _join_error(config, JoinFailure(f"the others did not come within {limit} s.", late=True))
    try:
        with _deadline(limit, late.exit_code, str(late)):
            jax.distributed.initialize(
                coordinator_address=None if from_cluster else config.coordinator,
                num_processes=None if from_cluster else config.num_processes,
                process_id=None if from_cluster else config.process_id,
                coordinator_bind_address=None if from_cluster else _bind_address(config),
                initialization_timeout=limit + _JAX_LIMIT_SECONDS,
                heartbeat_timeout_seconds=config.heartbeat_timeout_seconds + _JAX_LIMIT_SECONDS,
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        trouble = JoinFailure(reason, late=reason.startswith(_UNREACHED))
        raise _join_error(config, trouble) from error


def _bind_address(config: RuntimeConfig) -> str | None:
    """The address of jax's own service, by default every address of this host."""
    if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return None
    return config.coordinator if own_addresses(_address(config)[0]) else None


def _join_error(config: RuntimeConfig, trouble: JoinFailure) -> MaxpipeError:
    rank = f"process {config.process_id} of {config.num_processes}"
    if trouble.action:
        action = trouble.action
    elif trouble.late:
        action = (
            "Start all again where they can reach this address; for hosts that take longer to "
            "come, set a larger runtime.init_timeout_seconds."
        )
    else:
        action = (
            "Start every process with the same config, runtime.coordinator and num_processes, each "
            "with its own process_id; or set runtime.num_processes=1."
        )
    problem = Problem(
        "runtime.coordinator",
        config.coordinator or "found by jax",
        f"must bring all processes together; {rank if config.num_processes else 'jax'}: "
        f"{trouble.text}",
        action,
    )
    return UnreachableError(str(problem)) if trouble.late else ConfigError([problem])


@contextlib.contextmanager
def _deadline(seconds: float, code: int, message: str) -> Iterator[None]:
    """Ends the process when the body, perhaps a call that nothing interrupts, takes longer."""

    def leave() -> None:
        print(f"{redact.redact_text(message)}\n", end="", file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
