"""Check that a run fits in the memory of its devices, before any memory is allocated.

A prediction far above the available memory raises an error; a prediction close to the available
memory prints a warning. After compilation, the compiler's memory analysis is checked in the same
way. If an allocation still fails, the error message lists the memory use.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from maxpipe.config.schema import Config
from maxpipe.errors import Code, ConfigError
from maxpipe.hardware import USABLE_MEMORY_FRACTION, hardware_of_device
from maxpipe.planner.instruction_costs import align_columns
from maxpipe.planner.memory import Memory, predict_memory
from maxpipe.planner.memory_terms import describe_largest, gib, is_out_of_device_memory
from maxpipe.planner.sizes import Sizes, build_schedule

CERTAIN_FACTOR = 1.2
"""Ratio of predicted to available memory above which the run definitely does not fit."""
_MAX_LIVE_GROUPS = 5
"""Number of groups of equal live arrays that the error of a failed allocation lists."""
_KEY = "runtime.memory_check"
_OVERRIDE = f"set {_KEY}=warn to start the run anyway"
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def check_forecast(config: Config, warn: Callable[[str], None]) -> None:
    """Compare the predicted memory of the train step with the memory available on the local
    devices.

    Raises:
        ConfigError: the step definitely does not fit in memory.
    """
    predicted = _predict_memory(config)
    words = "the train step is predicted to need"
    _check(config, predicted.total, predicted, words, CERTAIN_FACTOR, warn)


def check_program(config: Config, compiled: Any, warn: Callable[[str], None]) -> None:
    """Compare the compiler's memory analysis of the train step with the free memory.

    The state is already allocated. The check runs after compilation and again before the first
    step, because other programs may have allocated memory in the meantime.

    Raises:
        ConfigError: the step does not fit in memory.
    """
    analysis = compiled.memory_analysis()
    if analysis is None or jax.local_devices()[0].platform == "tpu":
        return  # the TPU compiler has already rejected programs that do not fit
    predicted = _predict_memory(config)
    needed = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    needed += analysis.temp_size_in_bytes
    # On accelerators, the total memory is known, but not the free memory.
    if jax.local_devices()[0].platform != "cpu":
        needed += analysis.argument_size_in_bytes + predicted.reference
        _check(config, needed, predicted, "the compiled train step needs", 1.0, warn)
        return
    words = "the compiled train step needs, in addition to the state,"
    # If an allocation fails on only some virtual devices, the other devices wait in a collective
    # until XLA aborts the process after 40 s. Therefore, the run must not exceed
    # USABLE_MEMORY_FRACTION.
    _check(config, needed, predicted, words, USABLE_MEMORY_FRACTION, warn)
    if not _can_map(needed * len(jax.local_devices())):
        words = f"the operating system refuses to allocate the memory that {words.rstrip(',')}:"
        _check(config, needed, predicted, words, 0.0, warn, refused=True)


def _can_map(num_bytes: int) -> bool:
    """Return whether the operating system would grant an allocation of this many bytes."""
    if num_bytes <= 0 or not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return True
    try:
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def explain_allocation_errors(config: Config) -> Iterator[None]:
    """Convert a failed allocation inside the context into a ConfigError."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise _allocation_error(config, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is a failed allocation on the host or on a device."""
    return isinstance(error, MemoryError) or is_out_of_device_memory(error)


def device_memory(device: Any) -> float | None:
    """Return the memory in bytes that is available to programs on a device, or None if unknown.

    Virtual CPU devices share the available memory of the host.
    """
    if device.platform == "cpu":
        left = host_memory()
        return None if left is None else left / len(jax.local_devices())
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        # The limit of the GPU allocator does not include the reserved memory.
        return limit / USABLE_MEMORY_FRACTION if device.platform == "gpu" else float(limit)
    known = hardware_of_device(device.device_kind)
    return known and known.memory_bytes


def host_memory(
    meminfo: str = "/proc/meminfo", groups: tuple[tuple[str, str], ...] = _CONTROL_GROUPS
) -> float | None:
    """Return the number of bytes that this process can allocate under host, cgroup and ulimit
    limits.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(meminfo).read_text(), re.MULTILINE))
        limits.append(1024.0 * (int(lines["MemAvailable"]) + int(lines.get("SwapFree", 0))))
    for limit, used in groups:
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            limits.append(float(int(Path(limit).read_text()) - int(Path(used).read_text())))
    if (address_space := _free_address_space()) is not None:
        limits.append(address_space)
    return max(0.0, min(limits)) if limits else None


def _free_address_space() -> float | None:
    """Return the remaining address space in bytes under `ulimit -v`, or None without a
    limit.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return float(limit - pages * resource.getpagesize())
    return None


def _check(
    config: Config,
    needed: float,
    predicted: Memory,
    words: str,
    certain_factor: float,
    warn: Callable[[str], None],
    *,
    refused: bool = False,
) -> None:
    device = jax.local_devices()[0]
    available = device_memory(device)
    if available is None or (needed <= USABLE_MEMORY_FRACTION * available and not refused):
        return
    rule = f"{words} {gib(needed)} on each device, which has {gib(available)}"
    if device.platform == "cpu":
        count = len(jax.local_devices())
        rule += f": an equal share of {gib(count * available)} for {count} CPU devices"
    terms = f"Largest predicted terms:\n{describe_largest(predicted.terms)}"
    if needed <= certain_factor * available or config.runtime.memory_check == "warn":
        warn(f"memory: {rule}. The step may not fit. {terms}")
        return
    raise ConfigError.one(
        Code.MEM_PREDICTED,
        "memory",
        None,
        f"{rule}. {terms}",
        f"Change one of these keys (`maxpipe plan` lists all memory terms), or {_OVERRIDE}.",
    )


def _predict_memory(config: Config) -> Memory:
    platform = jax.local_devices()[0].platform
    return predict_memory(Sizes(config), build_schedule(config), platform=platform)


def _describe_live_arrays() -> str:
    """Return lines with the live arrays on the first local device, largest groups first."""
    device = jax.local_devices()[0]
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == device:
                key = (str(array.dtype), shard.data.shape)
                sizes[key] += shard.data.nbytes
                counts[key] += 1
    if not sizes:
        return ""
    rows = [
        (gib(size), f"{counts[key]} x {key[0]}[{','.join(map(str, key[1]))}]")
        for key, size in sizes.most_common(_MAX_LIVE_GROUPS)
    ]
    lines = align_columns((gib(sizes.total()), "all live arrays"), rows)
    return "\nLive arrays on one device:\n" + "\n".join(f"    {line}" for line in lines)


def _allocation_error(config: Config, error: BaseException) -> ConfigError:
    """Return the error for a failed allocation; its message lists the keys that reduce memory."""
    reason = (str(error).splitlines() or [""])[0][:300] or "no more memory"
    device = jax.local_devices()[0]
    of_host = isinstance(error, MemoryError) or device.platform == "cpu"
    available = host_memory() if of_host else device_memory(device)
    whose = "this host has" if of_host else f"a device ({device.device_kind}) has"
    has = (
        "" if available is None else f"; {whose} {gib(available)}{' available' if of_host else ''}"
    )
    listed = describe_largest(_predict_memory(config).terms)
    return ConfigError.one(
        Code.MEM_HOST if of_host else Code.MEM_DEVICE,
        "memory",
        None,
        f"ran out: {reason}{has}. Predicted memory of the train step per device:\n{listed}"
        f"{_describe_live_arrays()}",
        "Change one of the config keys above, or use a machine with more memory.",
    )
