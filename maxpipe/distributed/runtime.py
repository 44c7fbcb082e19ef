"""Set up a process: devices, connections to other processes, compilation cache and signal handlers.

Only this module changes jax's global settings and the process environment. The functions in this
module must be called before any device is used.
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

from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.distributed import protocol
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.coordinator import JoinFailure, Timeouts, free_port
from maxpipe.distributed.phases import Phases
from maxpipe.distributed.protocol import own_addresses
from maxpipe.errors import Code, ConfigError, MaxpipeError, Problem, UnreachableError
from maxpipe.hardware import allocate_usable_gpu_memory
from maxpipe.io import redact
from maxpipe.io.files import expand_path, has_home

_LOG = logging.getLogger(__name__)

# Seconds by which jax's time limits exceed those of the control channel, because jax aborts a
# process with SIGABRT if other processes do not connect or are lost.
_JAX_LIMIT_SECONDS = 60
_SECRET_BYTES = 32
_UNREACHED = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
"""Prefixes of the jax error messages that report missing or lost processes."""


_PLATFORMS = {"gpu": "cuda"}
"""Values of `runtime.platform`, keyed by the name of a jax backend, if the two differ."""


def start(config: RuntimeConfig, cpu_devices: int, *, keep_devices: bool = False) -> None:
    """Select the platform and open the compilation cache of a single-process command.

    With `keep_devices`, `cpu_devices` has no effect if jax already counted its devices.

    Raises:
        ConfigError: the selected platform has no devices on this machine, or jax already runs on
            other devices in this process.
    """
    _prepare(config, cpu_devices, keep_devices=keep_devices)
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
    """Start one process of a run, join the other processes and yield the control channel.

    Stop signals are caught inside the context.

    Args:
        config: runtime settings of the processes.
        cpu_devices: number of virtual CPU devices of this process.
        phases: phases of this process, reported to the coordinator.
        facts: values, keyed by name, that must be equal in all processes.
        folder: run folder, shared by all processes. Process 0 publishes a secret in this folder if
            the processes receive none from the environment or through jax.

    Raises:
        ConfigError: the selected platform has no devices on this machine, the values of `facts`
            differ between processes, or other users can read the secret.
        UnreachableError: other processes did not join in time or are unreachable.
        StorageError: the folder cannot be written.
    """
    _prepare(config, cpu_devices)
    if config.num_processes == 0:
        _initialize(config)
        _find_devices(config)  # report errors clearly before jax uses the devices
        index, count = jax.process_index(), jax.process_count()
    else:
        index, count = config.process_id, config.num_processes
    limits = Timeouts(
        config.init_timeout_seconds,
        config.heartbeat_timeout_seconds,
        config.stall_timeout_seconds,
        config.stop_grace_seconds,
    )
    with ControlChannel(phases, limits, index=index, count=count) as channel:
        if count > 1:
            _gather(config, channel, facts, folder)
            if config.num_processes:
                _initialize(config)
        elif config.cpu_collectives == "gloo":
            _initialize(dataclasses.replace(config, coordinator=f"127.0.0.1:{free_port()}"))
        channel.catch_signals()  # jax may have replaced the handlers
        with channel.propagate_failure():
            _find_devices(config)
            _use_devices(config)
            yield channel


def _prepare(config: RuntimeConfig, cpu_devices: int, *, keep_devices: bool = False) -> None:
    # Suppress warnings from XLA's C++ code, which are intended for XLA developers.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _remove_log_printers()
    allocate_usable_gpu_memory()
    if config.platform != "auto":
        jax.config.update("jax_platforms", config.platform)
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError as error:  # jax has already counted its devices
        present = len(jax.devices("cpu"))
        if present != cpu_devices and not keep_devices:
            raise _initialized_error("mesh.cpu_devices", cpu_devices, present) from error


def _find_devices(config: RuntimeConfig) -> None:
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform
        reason = (str(error).splitlines() or ["jax has no plugin for this platform."])[0]
        raise ConfigError.one(
            Code.ENV_PLATFORM,
            "runtime.platform",
            config.platform,
            f"must have devices on this machine: {reason}",
            "Set runtime.platform=cpu, or install the extra for your device: "
            "pip install 'maxpipe[tpu]' or 'maxpipe[cuda]'.",
        ) from error
    if config.platform == "cpu" and (backend := jax.default_backend()) != "cpu":
        raise _initialized_error("runtime.platform", "cpu", _PLATFORMS.get(backend, backend))


def _initialized_error(key: str, value: object, present: object) -> ConfigError:
    return ConfigError.one(
        Code.API_PROCESS,
        key,
        value,
        f"must be {present}: jax already uses {present} in this process and cannot be restarted.",
        f"Set {key}={present}, or start a new process (restart the kernel of a notebook).",
    )


def _use_devices(config: RuntimeConfig) -> None:
    on_cpu = jax.default_backend() == "cpu"
    # On CPU, XLA does not restore the order of collectives when it loads a cached program. Devices
    # that run collectives in different orders deadlock or exchange the wrong arrays.
    if not (on_cpu and jax.device_count() > 1):
        _open_cache(config.compilation_cache)
    if on_cpu and (jax.process_count() > 1 or config.cpu_collectives == "gloo"):
        _keep_stdout_for_python()


_ASYNC_ALL_TO_ALL = {"xla_tpu_enable_async_ragged_all_to_all": "true"}
"""Overlap expert all-to-alls with shared experts and weight gradients."""
_BY_FUSIONS = {
    # With both options, an all-gather that starts before a loop overlaps with the loop, but its
    # result occupies memory during the loop.
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    **_ASYNC_ALL_TO_ALL,
}
"""Overlap all-gathers with other operations inside fusions. libtpu 0.0.50 allows this only on v5e,
because other devices might hang or compute wrong results."""
_BY_SPARSE_CORES = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    **_ASYNC_ALL_TO_ALL,
}
"""Offload reduce-scatters and, since libtpu 0.0.50, all-gathers to the sparse cores of the chip."""
_ASYNC_OPTIONS = {
    "TPU v5 lite": _BY_FUSIONS,
    "TPU v5": _BY_SPARSE_CORES,
    "TPU v6 lite": _BY_SPARSE_CORES,
    "TPU7x": _BY_SPARSE_CORES,
}
"""Options keyed by device kind. Other device kinds support neither method of overlapping
all-gathers."""
_LOW_MEMORY_OPTIONS = _ASYNC_ALL_TO_ALL | {"xla_jf_bf16_propagation": "false"}
"""Options that save memory: without these options, XLA keeps a bfloat16 copy of all weight
shards."""
_FUSED_DOWNCAST = {"xla_tpu_allow_conv_input_fusion_with_downcast_convert": "true"}
"""Fuse the quantization of operands into 8-bit matmuls. If an operand is used by several matmuls,
`parallel.low_precision` materializes the quantized values."""
_VMEM = "xla_tpu_scoped_vmem_limit_kib"
_VMEM_MIB = {"TPU v5": 48, "TPU v5 lite": 48, "TPU v6 lite": 96, "TPU7x": 56}
"""VMEM limit of a fusion in MiB, for device kinds with a large memory. Higher limits reduce the
cycles of the matmuls of decoder layers, by 40% on TPU7x compared with 24 MiB, but increase compile
time (`benchmarks/device_options.md`). Models with experts gain nothing on v5p
(`benchmarks/tpu_step.md`)."""


_GPU_OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Overlap the exchange of one chunk of tokens with the experts of another. Without this option,
XLA orders a quarter of the transfers so that no computation is left to overlap with. The option
makes a step on one H100 1% slower (`benchmarks/gpu_checklist.md`), and does not change how XLA
overlaps the gathers and reductions of dense models. No other tested option increases this overlap
(`benchmarks/device_options.md`)."""


def compiler_options(
    platform: str,
    kind: str,
    *,
    spares_memory: bool = False,
    in_8_bits: bool = False,
    has_chunks: bool = False,
) -> dict[str, str | bool]:
    """Return the XLA options of the train step for a platform and device kind.

    `spares_memory` reduces memory use at the cost of more cycles. `in_8_bits` indicates that some
    matmuls are 8-bit, and `has_chunks` that tokens are sent to experts in chunks. The gains are
    compiler estimates (`benchmarks/tpu_step.py`; decision 31).
    """
    if platform in ("gpu", "cuda"):
        return dict(_GPU_OVERLAP) if has_chunks else {}
    if platform != "tpu":
        return {}
    options: dict[str, str | bool] = {}
    options |= _LOW_MEMORY_OPTIONS if spares_memory else _ASYNC_OPTIONS.get(kind, _ASYNC_ALL_TO_ALL)
    options = options | (_FUSED_DOWNCAST if in_8_bits else {})
    if kind in _VMEM_MIB:
        options = options | {_VMEM: str(1024 * _VMEM_MIB[kind])}
    return options


def use_cpu_only() -> None:
    """Use only the CPU, for commands that read files while the devices may be in use by a run."""
    _remove_log_printers()
    jax.config.update("jax_platforms", "cpu")


def _remove_log_printers() -> None:
    """Remove the log handler that orbax adds on import, which would print every warning twice."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def _keep_stdout_for_python() -> None:
    """Discard the stdout of C code such as gloo, but keep Python's stdout."""
    sys.stdout.flush()
    try:
        kept = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # not a file, as in some notebooks
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = os.fdopen(kept, "w", buffering=1, encoding=encoding, errors=errors)


def _open_cache(folder: str) -> None:
    if not folder:
        return
    unusable = (
        "runtime.compilation_cache = %s: cannot be used (%s). Compiled programs are not cached."
    )
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
    config: RuntimeConfig, channel: ControlChannel, facts: Mapping[str, str], folder: Path
) -> None:
    """Wait until all processes have joined the control channel."""
    given = protocol.secret_from_environment()
    with contextlib.ExitStack() as stack:
        if not config.num_processes:
            address, shared = _broadcast_address(channel.index)
            key = hmac.digest(given or b"", shared, "sha256")
        else:
            address = _address(config)
            key = given
            if key is None and channel.index == 0:
                key = stack.enter_context(protocol.publish_secret(folder, address[1]))
                stack.callback(setattr, channel, "on_leave", channel.on_leave)
                channel.on_leave = lambda code, text: protocol.remove_secret(folder, address[1])
        try:
            trouble = channel.connect(
                address, facts, lambda: key or protocol.read_published_secret(folder, address[1])
            )
        except OSError as error:
            text = f"port {address[1]} cannot be used here: {error.strerror or error}"
            action = "Stop the program that uses the port, perhaps an earlier attempt of this run; "
            action += "or set the same new port in runtime.coordinator of all processes."
            trouble = JoinFailure(text, action=action)
    if trouble:
        raise _join_error(config, trouble)


def _address(config: RuntimeConfig) -> tuple[str, int]:
    host, _, port = config.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _broadcast_address(index: int) -> tuple[tuple[str, int], bytes]:
    """Broadcast the host, a free port and a new secret from process 0 over the devices."""
    word = np.zeros(_SECRET_BYTES + 300, np.uint8)  # a host name has at most 253 bytes
    if index == 0:
        text = secrets.token_bytes(_SECRET_BYTES)
        text += f"{_own_address()}:{free_port()}".encode()
        word[: len(text)] = np.frombuffer(text, np.uint8)
    sent = bytes(np.asarray(multihost_utils.broadcast_one_to_all(word), np.uint8))
    host, _, port = sent[_SECRET_BYTES:].rstrip(b"\0").decode().rpartition(":")
    return (host, int(port)), sent[:_SECRET_BYTES]


def _own_address() -> str:
    """Return the address at which other hosts can reach this host, which runs process 0."""
    # Use the interface of the default route, because host names often resolve to loopback.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address reserved for documentation; nothing is sent
        return probe.getsockname()[0]
    # jax exposes the coordinator address only in a private module.
    from jax._src.distributed import global_state

    host = (global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
    return host or _name_of_host() or "127.0.0.1"


def _name_of_host() -> str:
    """Return the name of this host, or an empty string if it is unknown or resolves to loopback."""
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
    late = _join_error(
        config, JoinFailure(f"other processes did not join within {limit} s.", late=True)
    )
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
    """Return the bind address of jax's service, or None for the default (all addresses)."""
    if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return None
    return config.coordinator if own_addresses(_address(config)[0]) else None


def _join_error(config: RuntimeConfig, trouble: JoinFailure) -> MaxpipeError:
    rank = f"process {config.process_id} of {config.num_processes}"
    if trouble.action:
        action = trouble.action
    elif trouble.late:
        action = (
            "Start all processes again on hosts that can reach this address. If hosts start "
            "slowly, set a larger runtime.init_timeout_seconds."
        )
    else:
        action = (
            "Start every process with the same config, runtime.coordinator and num_processes, and "
            "with its own process_id; or set runtime.num_processes=1."
        )
    problem = Problem(
        Code.NET_CONNECT,
        "runtime.coordinator",
        config.coordinator or "detected by jax",
        f"must connect all processes; {rank if config.num_processes else 'jax'}: {trouble.text}",
        action,
    )
    if trouble.late:
        return UnreachableError(Code.NET_CONNECT, problem.message)
    return ConfigError([problem])


@contextlib.contextmanager
def _deadline(seconds: float, code: int, message: str) -> Iterator[None]:
    """Exit the process if the body, which may not be interruptible, exceeds the time limit."""

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
