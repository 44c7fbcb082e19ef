"""Performance figures of one device of each kind, from `configs/hardware/*.yml`.

No jax, and no guesses: a device without a file is unknown.
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
    """One device and its links. Rates are decimal, memory is binary, as vendors write them."""

    name: str
    topology: str
    """Prefix of its topologies' names, e.g. `v5p` of `v5p:2x4x4`."""
    device_kind: str
    """Pattern of jax's device kind."""
    bf16_tflops: float
    """Dense peak."""
    memory_gib: float
    memory_gb_per_second: float
    links: int
    """Links to neighbours in its slice."""
    link_gb_per_second: float
    """Of one link, one way."""
    torus_dims: int
    """Dims of the torus that the links form, 0 for a switch."""
    network_gb_per_second: float
    """Between slices, one device's share, one way."""
    largest_slice: int
    """Devices that the links can join."""
    clock_ghz: float
    """Of the matrix units, 0 where cycles are not estimated."""
    matmul_efficiency: float = 0.75
    """Share of the peak that a layer's forward reaches."""
    kernel_efficiency: float = 0.5
    """Share of the peak at which kernels count that are programs of their own, as those of fused
    attention: an assumption, as no compiler estimates them."""
    input_grad_cost: float = 1.0
    """Time of a layer's input gradient, in forwards, without recomputation."""
    weight_grad_cost: float = 1.0
    """The same of its weights' gradients."""
    deferred_cost: float = 0.0
    """Forwards that a backward takes longer in two slots, for inputs and for weights, than in one:
    of measured figures, which have that in both gradients. Else the memory's rate says what writing
    and reading takes."""
    names_recomputed: float = 0.02
    """Forwards that a backward recomputes with `pipeline.remat=names`: norms and the like, which
    the TPU compiler joins to the matmuls that read them."""
    none_recomputed: float = 0.0
    """Forwards that it takes with `pipeline.remat=none` to write and read what is kept: of measured
    figures, which have that in `names_recomputed`, too. Else the memory's rate says it."""
    fastest_mib: float = 0.0
    """What a forward moves through memory with the microbatch whose tokens take a layer the least
    time, 0 where one size was measured."""
    growth_above: float = 0.0
    """By how much a token takes longer with each doubling of that: caches hold less of it."""
    growth_below: float = 0.0
    """The same with each halving: overheads count more."""
    split_cost: float = 0.0
    """By how much a layer takes longer with each doubling of the devices that its width is split
    over: matmuls are narrower, and devices that share cores wait for each other at every sum."""
    ring_cost: float = 0.05
    """By how much the matmuls of a layer take longer in rings, for each further part in which their
    tokens come: by the TPU compiler's cycles with 8 parts (`benchmarks/collective_matmul.py`)."""
    copy_efficiency: float = 0.43
    """Share of the memory's rate at which a buffer's slice is copied, read and written: the TPU
    compiler's estimate."""
    exchange_rate: float = 1.0
    """Rate of an all-to-all beside that of a gather, both by what a device sends over its links."""
    tokens_rate: float = 1.0
    """Of gathers and sums of split tokens, beside that of other traffic."""
    latency_us: float = 2.0
    """Of a collective or message inside a slice."""
    network_latency_us: float = 100.0
    """The same across slices, on top."""
    tick_us: float = 5.0
    """Of a turn of the loop over ticks, whatever it does."""
    shared_by: float = 0.0
    """Number of devices that can work at a time when they share this machine's cores; 0 when each
    device has its own."""
    fresh_gb_per_second: float = 0.0
    """Rate at which a device is given, and clears, the temporary memory of a step; 0 where it keeps
    that memory between steps, as accelerators do."""
    fresh_from_mib: float = 0.0
    """Temporary memory up to which it stays with the process after all; from twice that on all of
    it is new, in between the square of the share of the way."""
    measured: str = ""
    """When and where figures of this kind were measured; empty for published ones."""

    @property
    def is_tpu(self) -> bool:
        """Whether its links form a torus."""
        return self.torus_dims > 0

    @property
    def platform(self) -> str:
        """jax's name of the backend."""
        if self.topology == "cpu":
            return "cpu"
        return "tpu" if self.is_tpu else "cuda"

    @property
    def ways(self) -> int:
        """Directions in which a ring of its devices sends at once."""
        return 2 if self.is_tpu else 1

    def hops(self, count: int) -> float:
        """How often a link carries a byte of an all-to-all of this many devices, beside a gather's.

        In a ring of N bytes go N / 4 devices far (jax-ml.github.io/scaling-book, chapter 3). The
        devices are taken for a block of the torus with equal sides.
        """
        return max(1.0, count ** (1 / self.torus_dims) / 4) if self.torus_dims else 1.0

    @property
    def flops(self) -> float:
        """Peak bf16 operations per second."""
        return self.bf16_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """Memory of one device, bytes."""
        return self.memory_gib * GIB


@cache
def published_hardware() -> Mapping[str, Hardware]:
    """Published figures of every kind, by the name that its topologies begin with."""
    found = {}
    for path in sorted((folder() / "hardware").glob("*.yml")):
        each = Hardware(**plain_yaml.load(path.read_text(encoding="utf-8")))
        found[each.topology] = each
    return found


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """Every kind that has a file, by the name that its topologies begin with.

    Figures that were measured on this machine stand in for published ones.

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
    """The folder of figures that were measured on this machine."""
    return Path(_MEASURED).expanduser()


def measured_file(topology: str) -> Path:
    """Where figures of this kind are kept; the folder is made if need be.

    Raises:
        StorageError: no file can be written there.
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
_WRITE_ACTION = "Free space there, or set HOME to a folder that can be written."


def save_measured(hardware: Hardware) -> Path:
    """Writes figures that were measured here; `known` gives them from then on.

    Raises:
        StorageError: the file cannot be written.
    """
    path = measured_file(hardware.topology)
    text = "# Written by `maxpipe plan --calibrate`. Delete this file to plan with published\n"
    text += "# figures again.\n" + yaml.safe_dump(dataclasses.asdict(hardware), sort_keys=False)
    try:
        files.write(path, text)
    except OSError as error:
        raise StorageError.unwritable(path, error, _WRITE_ACTION) from error
    known_hardware.cache_clear()
    return path


_FORMER_NAMES = {"names_replay": "names_recomputed"}
"""Figures that an earlier release wrote under another name."""
_PARSE_ERRORS = (OSError, KeyError, TypeError, ValueError, RecursionError, re.error, yaml.YAMLError)
"""Raised by text of another kind."""


_NONZERO_FIELDS = {
    *("bf16_tflops", "memory_gib", "memory_gb_per_second", "link_gb_per_second"),
    *("network_gb_per_second", "largest_slice", "matmul_efficiency", "kernel_efficiency"),
    *("copy_efficiency", "exchange_rate", "tokens_rate"),
}
"""Figures that are not 0."""
_TORUS_DIMS = {0, 2, 3}
_MIN_FIGURE, _MAX_FIGURE = 1e-9, 1e12
"""Beyond what any device has, in the units of all figures."""


def _check_figures(figures: Mapping[str, object]) -> None:
    """Raises ValueError unless plans can be made with them."""
    for name, value in figures.items():
        if not isinstance(value, int | float):
            continue
        if not (
            _MIN_FIGURE <= value <= _MAX_FIGURE or (value == 0 and name not in _NONZERO_FIELDS)
        ):
            raise ValueError(f"{name} is {value}")
    if figures.get("torus_dims") not in _TORUS_DIMS:
        raise ValueError(f"torus_dims is {figures.get('torus_dims')}, and not 0, 2 or 3")


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
            raise ValueError(f"topology is {found['topology']!r}, and not the file's name")
        re.compile(found["device_kind"])
        return Hardware(**found)
    except _PARSE_ERRORS as error:
        raise ConfigError.one(
            str(path),
            None,
            f"is not a file that `maxpipe plan --calibrate` wrote: {str(error).splitlines()[0]}",
            "Delete it, or measure again.",
        ) from error


def hardware_of_device(device_kind: str) -> Hardware | None:
    """The hardware of jax's device kind; None without a file, and for a part of a GPU."""
    if "MIG" in device_kind:
        return None
    for each in known_hardware().values():
        if re.fullmatch(each.device_kind, device_kind, re.IGNORECASE):
            return each
    return None


def peak_flops(device_kind: str) -> float | None:
    """The bf16 FLOP/s one device can do; None where no figure is known."""
    found = None if device_kind == "cpu" else hardware_of_device(device_kind)
    return found and found.flops
