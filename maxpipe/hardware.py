"""Performance figures of one device of each type, from `configs/hardware/*.yml`.

Does not import jax. A device type without a file is unknown; figures are never guessed.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from maxpipe.config.bundled_configs import folder
from maxpipe.errors import ConfigError, StorageError
from maxpipe.io import files, plain_yaml
from maxpipe.io.typed_json import check_type

MIB, GIB = 2**20, 2**30
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Figures of one device and its links. Rates are decimal and memory is binary, as vendors state
    them.
    """

    name: str
    topology: str
    """Prefix of topology names, e.g. `v5p` in `v5p:2x4x4`."""
    device_kind: str
    """Regular expression that matches jax's device kind."""
    bf16_tflops: float
    """Dense bf16 peak in TFLOP/s."""
    memory_gib: float
    memory_gb_per_second: float
    links: int
    """Number of links to neighbors in the slice."""
    link_gb_per_second: float
    """Bandwidth of one link, in one direction."""
    torus_dims: int
    """Number of dimensions of the torus; 0 for a switch."""
    network_gb_per_second: float
    """Bandwidth per device between slices, in one direction."""
    largest_slice: int
    """Maximum number of devices that the links connect."""
    clock_ghz: float
    """Clock of the matrix units; 0 if cycles are not estimated."""
    matmul_efficiency: float = 0.75
    """Fraction of the peak that the forward of a layer reaches."""
    kernel_efficiency: float = 0.5
    """Assumed fraction of the peak in custom kernels such as fused attention, for which compilers
    provide no estimates."""
    input_grad_cost: float = 1.0
    """Time of a layer's input gradient in units of its forward, without recomputation."""
    weight_grad_cost: float = 1.0
    """Time of a layer's weight gradients in units of its forward."""
    deferred_cost: float = 0.0
    """Extra time of a split backward compared with an unsplit one, in units of a forward. Only
    measured figures set this value, and their gradient costs include the extra time. In published
    figures, the memory bandwidth determines the extra time."""
    names_recomputed: float = 0.02
    """Recomputation in a backward with `pipeline.remat=names`, in units of a forward: norms and
    other operations that the TPU compiler fuses with the matmuls that read them."""
    none_recomputed: float = 0.0
    """Time to write and read saved activations with `pipeline.remat=none`, in units of a forward.
    Only measured figures set this value, and their `names_recomputed` includes the same time. In
    published figures, the memory bandwidth determines the time."""
    fastest_mib: float = 0.0
    """Memory traffic in MiB of a layer's forward at the microbatch size with the lowest time per
    token; 0 if only one size was measured."""
    growth_above: float = 0.0
    """Relative increase of the time per token with each doubling of that traffic, due to cache
    misses."""
    growth_below: float = 0.0
    """Relative increase of the time per token with each halving of that traffic, due to
    overheads."""
    split_cost: float = 0.0
    """Relative increase of the time of a layer with each doubling of the tensor axis: matmuls are
    narrower, and devices that share cores wait for each other at every reduction."""
    ring_cost: float = 0.05
    """Relative increase of the time of collective matmuls for each additional shard of the tokens,
    from the TPU compiler's cycles with 8 shards (`benchmarks/collective_matmul.py`)."""
    copy_efficiency: float = 0.43
    """Fraction of the memory bandwidth at which slices of a buffer are copied, for reads and writes
    together: the TPU compiler's estimate."""
    exchange_rate: float = 1.0
    """Bandwidth of an all-to-all relative to an all-gather, for the same bytes per device."""
    tokens_rate: float = 1.0
    """Bandwidth of gathers and reductions of sharded tokens relative to other traffic."""
    latency_us: float = 2.0
    """Latency of a collective or message inside a slice."""
    network_latency_us: float = 100.0
    """Additional latency across slices."""
    tick_us: float = 5.0
    """Overhead of one iteration of the loop over ticks."""
    shared_by: float = 0.0
    """Number of devices that can compute at the same time if they share the cores of the machine; 0
    if each device has separate cores."""
    fresh_gb_per_second: float = 0.0
    """Rate at which the temporary memory of a step is allocated and cleared; 0 if devices keep this
    memory between steps, as accelerators do."""
    fresh_from_mib: float = 0.0
    """Temporary memory in MiB up to which the process keeps its allocation between steps. From
    twice this size on, all of it is allocated again in every step; in between, the fraction grows
    quadratically."""
    measured: str = ""
    """Date and place of the measurement; empty for published figures."""

    @property
    def is_tpu(self) -> bool:
        """Whether the links form a torus."""
        return self.torus_dims > 0

    @property
    def platform(self) -> str:
        """Name of the jax backend."""
        if self.topology == "cpu":
            return "cpu"
        return "tpu" if self.is_tpu else "cuda"

    @property
    def ways(self) -> int:
        """Number of directions in which a ring of devices sends at the same time."""
        return 2 if self.is_tpu else 1

    def hops(self, count: int) -> float:
        """Return the traffic of a link in an all-to-all over `count` devices, relative to an
        all-gather.

        In a ring of N devices, bytes travel N / 4 hops on average (jax-ml.github.io/scaling-book,
        chapter 3). The devices are assumed to form a block of the torus with equal sides.
        """
        return max(1.0, count ** (1 / self.torus_dims) / 4) if self.torus_dims else 1.0

    @property
    def flops(self) -> float:
        """Peak bf16 FLOP/s."""
        return self.bf16_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """Memory of one device in bytes."""
        return self.memory_gib * GIB


@cache
def published_hardware() -> Mapping[str, Hardware]:
    """Return published figures of all device types, by the prefix of their topologies."""
    found = {}
    for path in sorted((folder() / "hardware").glob("*.yml")):
        each = Hardware(**plain_yaml.load(path.read_text(encoding="utf-8")))
        found[each.topology] = each
    return found


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """Return figures of all device types, by the prefix of their topologies.

    Figures measured on this machine replace published ones.

    Raises:
        ConfigError: a file of measured figures cannot be read.
    """
    found = dict(published_hardware())
    paths = sorted(measured_folder().glob("*.yml")) if files.has_home() else ()
    for path in paths:
        each = _read_measured(path)
        found[each.topology] = each
    return found


def measured_folder() -> Path:
    """Return the folder of figures measured on this machine."""
    return Path(_MEASURED).expanduser()


def measured_file(topology: str) -> Path:
    """Return the file of measured figures for this device type; its folder is created if necessary.

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
_WRITE_ACTION = "Free space there, or set HOME to a writable folder."


def save_measured(hardware: Hardware) -> Path:
    """Write figures measured on this machine, which `known_hardware` then returns.

    Raises:
        StorageError: the file cannot be written.
    """
    path = measured_file(hardware.topology)
    text = "# Written by `maxpipe plan --calibrate`. Delete this file to use published figures\n"
    text += "# again.\n" + yaml.safe_dump(dataclasses.asdict(hardware), sort_keys=False)
    try:
        files.write(path, text)
    except OSError as error:
        raise StorageError.unwritable(path, error, _WRITE_ACTION) from error
    known_hardware.cache_clear()
    return path


_FORMER_NAMES = {"names_replay": "names_recomputed"}
"""Current names of figures by their names in earlier releases."""
_PARSE_ERRORS = (OSError, KeyError, TypeError, ValueError, RecursionError, re.error, yaml.YAMLError)
"""Errors raised when an invalid file is parsed."""


_NONZERO_FIELDS = {
    *("bf16_tflops", "memory_gib", "memory_gb_per_second", "link_gb_per_second"),
    *("network_gb_per_second", "largest_slice", "matmul_efficiency", "kernel_efficiency"),
    *("copy_efficiency", "exchange_rate", "tokens_rate"),
}
"""Figures that must not be 0."""
_TORUS_DIMS = {0, 2, 3}
_MIN_FIGURE, _MAX_FIGURE = 1e-9, 1e12
"""Limits of all figures in their units, beyond those of any device."""


def _check_figures(figures: Mapping[str, object]) -> None:
    """Raise ValueError if a figure is outside its range."""
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
        content = plain_yaml.load(files.read(path, _MAX_BYTES))
        kinds = typing.get_type_hints(Hardware)
        figures = {
            _FORMER_NAMES.get(str(name), str(name)): each for name, each in dict(content).items()
        }
        found = {name: check_type(each, kinds[name]) for name, each in figures.items()}
        _check_figures(found)
        if found["topology"] != path.stem:
            raise ValueError(f"topology {found['topology']!r} does not match the file name")
        re.compile(found["device_kind"])
        return Hardware(**found)
    except _PARSE_ERRORS as error:
        raise ConfigError.one(
            str(path),
            None,
            f"is not a valid file of `maxpipe plan --calibrate`: {str(error).splitlines()[0]}",
            "Delete the file, or measure again.",
        ) from error


def hardware_of_device(device_kind: str) -> Hardware | None:
    """Return the hardware of a jax device kind; None if it is unknown or a MIG
    partition of a GPU.
    """
    if "MIG" in device_kind:
        return None
    for each in known_hardware().values():
        if re.fullmatch(each.device_kind, device_kind, re.IGNORECASE):
            return each
    return None


def peak_flops(device_kind: str) -> float | None:
    """Return the bf16 FLOP/s of one device, or None if it is unknown."""
    found = None if device_kind == "cpu" else hardware_of_device(device_kind)
    return found and found.flops
