"""Performance specifications of each device type, from `configs/hardware/*.yml`.

This module does not import jax. Device types without a file are unsupported, because specifications
are never guessed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from maxpipe.config import yaml_values
from maxpipe.config.config_files import bundled_folder
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.io import files
from maxpipe.io.typed_json import check_type

MIB, GIB = 2**20, 2**30
USABLE_MEMORY_FRACTION = 0.92
"""Maximum fraction of device memory that a plan may be predicted to use and still be reported to
fit. The remainder is reserved for the program, allocator fragmentation and forecast errors."""
_ALLOCATOR_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables for the fraction of GPU memory that jax allocates."""
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Performance specifications of one device and its links. Rates use decimal units (GB) and
    memory sizes use binary units (GiB), as in vendor specifications.
    """

    name: str
    topology: str
    """Prefix of topology names, e.g. `v5p` in `v5p:2x4x4`."""
    device_kind: str
    """Regular expression that matches jax's `device_kind`."""
    bf16_tflops: float
    """Peak rate of dense bf16 matmuls, in TFLOP/s."""
    fp8_tflops: float = 0.0
    """Peak rate of dense fp8 matmuls with `channel` or `tensor` scales, in TFLOP/s. 0 if they run
    at the rate of bf16 matmuls."""
    mxfp8_tflops: float = 0.0
    """Peak rate of dense mxfp8 matmuls, in TFLOP/s. 0 if they run at the rate of bf16 matmuls."""
    nvfp4_tflops: float = 0.0
    """Peak rate of dense nvfp4 matmuls, in TFLOP/s. 0 if they run at the rate of bf16 matmuls."""
    memory_gib: float
    memory_gb_per_second: float
    links: int
    """Number of links from one device to its neighbors in the slice."""
    link_gb_per_second: float
    """Bandwidth of one link in one direction, in GB/s."""
    torus_dims: int
    """Number of dimensions of the torus; 0 for devices connected by a switch."""
    network_gb_per_second: float
    """Bandwidth between slices per device, in one direction, in GB/s."""
    host_gb_per_second: float = 0.0
    """Bandwidth between a device and host memory, in each direction, in GB/s. 0 if no rate is
    published; the copies are then not part of predicted times."""
    largest_slice: int
    """Maximum number of devices in a slice."""
    clock_ghz: float
    """Clock rate of the matrix units in GHz; 0 disables cycle estimates."""
    matmul_efficiency: float = 0.75
    """Fraction of peak FLOP/s reached in the forward pass of a layer."""
    kernel_efficiency: float = 0.5
    """Fraction of peak FLOP/s in attention kernels, for which compilers provide no estimates. For
    TPUs, it follows from the instruction schedules of the kernels for a head dim of 128
    (`benchmarks/kernel_schedules.md`)."""
    expert_kernel_efficiency: float = 0.5
    """Fraction of peak FLOP/s in the kernels of experts (`benchmarks/experts.md`)."""
    input_grad_cost: float = 1.0
    """Time to compute a layer's input gradient without recomputation, relative to the layer's
    forward time."""
    weight_grad_cost: float = 1.0
    """Time to compute a layer's weight gradients, relative to the layer's forward time."""
    deferred_cost: float = 0.0
    """Additional time of a split backward pass compared with an unsplit one, relative to the
    forward time. Only a calibration sets this value, and the calibrated gradient costs include this
    time. Without a calibration, this time is derived from the memory bandwidth."""
    names_recomputed: float = 0.02
    """Time to recompute activations in a backward pass with `pipeline.remat=names`, relative to the
    forward time. Only operations such as norms are recomputed. The TPU compiler fuses these
    operations into the matmuls that use their results."""
    none_recomputed: float = 0.0
    """Time to write saved activations and read them back with `pipeline.remat=none`, relative to
    the forward time. Only a calibration sets this value, and the calibrated `names_recomputed`
    includes the same time. Without a calibration, this time is derived from the memory
    bandwidth."""
    fastest_mib: float = 0.0
    """Memory traffic in MiB of a layer's forward pass at the measured microbatch size with the
    lowest time per token. 0 if only one size was measured."""
    growth_above: float = 0.0
    """Relative increase in the time per token for each doubling of the memory traffic above
    `fastest_mib`, due to cache misses."""
    growth_below: float = 0.0
    """Relative increase in the time per token for each halving of the memory traffic below
    `fastest_mib`, due to fixed overheads."""
    split_cost: float = 0.0
    """Relative increase in a layer's time for each doubling of the tensor axis. The matmuls become
    narrower, and devices that share CPU cores wait for each other in every reduction."""
    ring_cost: float = 0.05
    """Relative increase in the time of collective matmuls for each additional token shard. The
    default is derived from the TPU compiler's cycle estimate for 8 shards
    (`benchmarks/collective_matmul.py`)."""
    copy_efficiency: float = 0.43
    """Fraction of the memory bandwidth that copies of buffer slices reach, counting both reads and
    writes. The default is the TPU compiler's estimate."""
    exchange_rate: float = 1.0
    """Bandwidth of an all-to-all, relative to the bandwidth of an all-gather with the same number
    of bytes per device."""
    tokens_rate: float = 1.0
    """Bandwidth of all-gathers and reduce-scatters of sharded tokens, relative to the bandwidth of
    other collectives."""
    latency_us: float = 2.0
    """Latency in microseconds of a collective or message within a slice."""
    network_latency_us: float = 100.0
    """Additional latency in microseconds of collectives and messages between slices."""
    tick_us: float = 5.0
    """Overhead in microseconds of one iteration of the loop over pipeline ticks."""
    shared_by: float = 0.0
    """Number of devices that can compute at the same time, if all devices share the machine's CPU
    cores. 0 if each device has its own cores."""
    fresh_gb_per_second: float = 0.0
    """Rate in GB/s at which a step's temporary memory is allocated and cleared. 0 if devices keep
    this memory allocated between steps, as accelerators do."""
    fresh_from_mib: float = 0.0
    """Maximum amount of temporary memory, in MiB, that the process keeps allocated between steps.
    At twice this amount and above, all temporary memory is reallocated in every step. Between these
    two amounts, the fraction that is reallocated grows quadratically."""
    measured: str = ""
    """Date and machine of the calibration; empty for published specifications."""

    @property
    def is_tpu(self) -> bool:
        """Return True if the device is a TPU: only TPU links form a torus."""
        return self.torus_dims > 0

    @property
    def platform(self) -> str:
        """Return the name of the jax backend."""
        if self.topology == "cpu":
            return "cpu"
        return "tpu" if self.is_tpu else "cuda"

    @property
    def ways(self) -> int:
        """Return the number of directions in which devices in a ring send at the same time."""
        return 2 if self.is_tpu else 1

    def hops(self, count: int) -> float:
        """Return the traffic per link of an all-to-all over `count` devices, relative to an
        all-gather.

        In a ring of N devices, data travels N / 4 hops on average (jax-ml.github.io/scaling-book,
        chapter 3). The devices are assumed to form a block of the torus with equal sides.
        """
        return max(1.0, count ** (1 / self.torus_dims) / 4) if self.torus_dims else 1.0

    @property
    def flops(self) -> float:
        """Return the peak bf16 FLOP/s."""
        return self.bf16_tflops * 1e12

    def attention_efficiency(self, head_dim: float = 128) -> float:
        """Return the fraction of peak FLOP/s in attention kernels. On TPUs, a smaller head dim than
        128 leaves a part of the matrix units unused.
        """
        return self.kernel_efficiency * (min(1.0, head_dim / 128) if self.is_tpu else 1.0)

    def matmul_speedup(self, number_format: str) -> float:
        """Return the peak matmul rate in a format of `model.matmul`, relative to bf16."""
        rates = {
            "fp8": self.fp8_tflops,
            "mxfp8": self.mxfp8_tflops,
            "nvfp4": self.nvfp4_tflops,
        }
        return (rates.get(number_format) or self.bf16_tflops) / self.bf16_tflops

    @property
    def memory_bytes(self) -> float:
        """Return the memory of one device in bytes."""
        return self.memory_gib * GIB


@cache
def published_hardware() -> Mapping[str, Hardware]:
    """Return the published specifications of all device types, keyed by topology prefix."""
    by_topology = {}
    for path in sorted((bundled_folder() / "hardware").glob("*.yml")):
        each = Hardware(**yaml_values.load_yaml(path.read_text(encoding="utf-8")))
        by_topology[each.topology] = each
    return by_topology


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """Return the specifications of all device types, keyed by topology prefix.

    Values calibrated on this machine replace published ones.

    Raises:
        ConfigError: a calibration file cannot be read.
    """
    by_topology = dict(published_hardware())
    paths = sorted(measured_folder().glob("*.yml")) if files.has_home() else ()
    for path in paths:
        hardware = _read_measured(path)
        by_topology[hardware.topology] = hardware
    return by_topology


def measured_folder() -> Path:
    """Return the folder that stores the calibrations of this machine."""
    return Path(_MEASURED).expanduser()


def measured_file(topology: str) -> Path:
    """Return the path of this machine's calibration file for a device type. The folder is created
    if necessary.

    Raises:
        StorageError: the file cannot be written.
    """
    if not files.has_home():
        missing = OSError("HOME is not set")
        raise StorageError.unwritable(f"{_MEASURED}/{topology}.yml", missing, _WRITE_ACTION)
    path = measured_folder() / f"{topology}.yml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.check_can_write(path)
    except OSError as error:
        raise StorageError.unwritable(path, error, _WRITE_ACTION) from error
    return path


_MEASURED = "~/.cache/maxpipe/hardware"
_WRITE_ACTION = "Free up disk space there, or set HOME to a writable folder."


def save_measured(hardware: Hardware) -> Path:
    """Write specifications calibrated on this machine. From then on, `known_hardware` returns these
    specifications.

    Raises:
        StorageError: the file cannot be written.
    """
    path = measured_file(hardware.topology)
    text = "# Written by `maxpipe plan --calibrate`. Delete this file to use published values\n"
    text += "# again.\n" + yaml.safe_dump(dataclasses.asdict(hardware), sort_keys=False)
    try:
        files.write(path, text)
    except OSError as error:
        raise StorageError.unwritable(path, error, _WRITE_ACTION) from error
    known_hardware.cache_clear()
    return path


_FORMER_NAMES = {"names_replay": "names_recomputed"}
"""Maps field names from earlier releases to the current names."""
_PARSE_ERRORS = (OSError, KeyError, TypeError, ValueError, RecursionError, re.error, yaml.YAMLError)
"""Exceptions that can be raised when an invalid file is parsed."""


_NONZERO_FIELDS = {
    *("bf16_tflops", "memory_gib", "memory_gb_per_second", "link_gb_per_second"),
    *("network_gb_per_second", "largest_slice", "matmul_efficiency", "kernel_efficiency"),
    "expert_kernel_efficiency",
    *("copy_efficiency", "exchange_rate", "tokens_rate"),
}
"""Names of the fields whose value must not be 0."""
_TORUS_DIMS = {0, 2, 3}
_MIN_FIGURE, _MAX_FIGURE = 1e-9, 1e12
"""Minimum and maximum of all numeric fields, each in the unit of the field. No real device exceeds
these limits."""


def _check_figures(figures: Mapping[str, object]) -> None:
    """Raise ValueError if a field is out of range."""
    for name, value in figures.items():
        if not isinstance(value, int | float):
            continue
        if not (
            _MIN_FIGURE <= value <= _MAX_FIGURE or (value == 0 and name not in _NONZERO_FIELDS)
        ):
            raise ValueError(f"{name} is {value}")
    if figures.get("torus_dims") not in _TORUS_DIMS:
        raise ValueError(f"torus_dims must be 0, 2 or 3, but is {figures.get('torus_dims')}")


def _read_measured(path: Path) -> Hardware:
    try:
        content = yaml_values.load_yaml(files.read(path, _MAX_BYTES))
        kinds = typing.get_type_hints(Hardware)
        figures = {
            _FORMER_NAMES.get(str(name), str(name)): value for name, value in dict(content).items()
        }
        checked = {name: check_type(value, kinds[name]) for name, value in figures.items()}
        _check_figures(checked)
        if checked["topology"] != path.stem:
            raise ValueError(f"topology {checked['topology']!r} does not match the file name")
        re.compile(checked["device_kind"])
        return Hardware(**checked)
    except _PARSE_ERRORS as error:
        raise ConfigError.one(
            Code.PLAN_CALIBRATION,
            str(path),
            None,
            f"is not a valid calibration file from `maxpipe plan --calibrate`: "
            f"{str(error).splitlines()[0]}",
            "Delete the file, or run the calibration again.",
        ) from error


def hardware_of_device(device_kind: str) -> Hardware | None:
    """Return the hardware that matches a jax device kind. Return None if the device kind is unknown
    or is a MIG partition of a GPU.
    """
    if "MIG" in device_kind:
        return None
    for each in known_hardware().values():
        if re.fullmatch(each.device_kind, device_kind, re.IGNORECASE):
            return each
    return None


def allocate_usable_gpu_memory() -> None:
    """Let jax allocate the usable fraction of a GPU's memory, unless the environment sets another
    fraction. Must be called before jax opens the devices.

    jax would allocate 75%. A layout that fits according to `maxpipe plan` would then fail, or XLA
    would execute its collectives synchronously to save memory.
    """
    if not any(map(os.environ.get, _ALLOCATOR_FRACTIONS)):
        os.environ[_ALLOCATOR_FRACTIONS[0]] = str(USABLE_MEMORY_FRACTION)


def peak_flops(device_kind: str) -> float | None:
    """Return the peak bf16 FLOP/s of one device, or None if the device kind is unknown."""
    hardware = None if device_kind == "cpu" else hardware_of_device(device_kind)
    return hardware and hardware.flops
