"""Parse topologies such as `v5p:4x4x4`, and create their devices for ahead-of-time compilation.

Parsing does not import jax. libtpu describes absent TPU chips, and jax's CUDA plugin describes
absent GPUs; CPU devices are virtual.

For absent GPUs, XLA requires a target config, which contains the values that NVIDIA's driver
reports for a card. Sources: XLA's target configs (openxla/xla,
`xla/backends/gpu/target_config/specs`), NVIDIA's CUDA programming guide (limits by compute
capability) and data sheets. Memory size and bandwidth come from `configs/hardware`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxpipe.config.check import check
from maxpipe.config.load import LoadedConfig
from maxpipe.config.rules import did_you_mean
from maxpipe.config.schema import Config
from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.config.sections.train import OBJECTIVES
from maxpipe.errors import Code, ConfigError
from maxpipe.hardware import (
    USABLE_MEMORY_FRACTION,
    Hardware,
    allocate_usable_gpu_memory,
    hardware_of_device,
    known_hardware,
)
from maxpipe.io.files import gpus
from maxpipe.io.formatting import pluralize
from maxpipe.parallel.axes import infer_axis_sizes
from maxpipe.planner.shards import MeshShards

UNTUNED_GPU_OPTIONS: Mapping[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}
"""XLA options that select kernels without timing them. All matmuls then use cuBLAS, which most
large matmuls also use in a run. Triton matmuls are disabled, because their tiling can be chosen
only by autotuning."""
PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
"""Packages that contain XLA's GPU compiler."""
CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
INSTALL = "pip install 'maxpipe[gpu-aot]'"
_CUDA, _CUDNN = (12, 8), (9, 10)
"""CUDA and cuDNN versions that runs are assumed to use."""
_COUNTED_FRACTION = 0.8
"""Fraction of a GPU's memory that XLA assumes to be usable if the GPU is not present."""
_KIB = 1024
_PER_BLOCK = 48 * _KIB


@dataclass(frozen=True)
class GpuSpec:
    """Specification of a GPU model."""

    name: str
    """GPU name reported by the driver."""
    capability: tuple[int, int]
    cores: int
    """Number of streaming multiprocessors."""
    clock_ghz: float
    """Clock rate in GHz."""
    l2_bytes: int
    shared_bytes: int = 228 * _KIB
    """Shared memory in bytes per streaming multiprocessor."""
    lanes: int = 128
    """Number of float32 units per streaming multiprocessor."""
    threads: int = 2048
    """Maximum number of threads per streaming multiprocessor."""


GPU_SPECS: Mapping[str, GpuSpec] = {
    "a100": GpuSpec("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 40 << 20, 164 * _KIB, lanes=64),
    "l4": GpuSpec("NVIDIA L4", (8, 9), 58, 2.04, 48 << 20, 100 * _KIB, threads=1536),
    "l40s": GpuSpec("NVIDIA L40S", (8, 9), 142, 2.52, 96 << 20, 100 * _KIB, threads=1536),
    "h100": GpuSpec("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 50 << 20),
    "h100-pcie": GpuSpec("NVIDIA H100 PCIe", (9, 0), 114, 1.755, 50 << 20),
    "h200": GpuSpec("NVIDIA H200", (9, 0), 132, 1.98, 50 << 20),
    "b200": GpuSpec("NVIDIA B200", (10, 0), 148, 1.965, 132_644_864),
    "gb200": GpuSpec("NVIDIA GB200", (10, 0), 152, 2.062, 135_528_448),
}
"""GPU specifications, keyed by the device names used in topologies."""


def target_config(hardware: Hardware) -> str:
    """Return the `stream_executor.GpuTargetConfigProto` of a GPU in `GPU_SPECS`, in text format."""
    card = GPU_SPECS[hardware.topology]
    major, minor = card.capability
    capability: dict[str, Any] = {"major": major, "minor": minor}
    if major >= 9:  # enables the card's architecture-specific instructions
        capability["feature_extension"] = "ACCELERATED_FEATURES"
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": _PER_BLOCK,
        "shared_memory_per_block_optin": card.shared_bytes - _KIB,
        "shared_memory_per_core": card.shared_bytes,
        "threads_per_core_limit": card.threads,
        "core_count": card.cores,
        "fpus_per_core": card.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": round(hardware.memory_gb_per_second * 1e9),
        "l2_cache_size": card.l2_bytes,
        "clock_rate_ghz": card.clock_ghz,
        "device_memory_size": round(
            hardware.memory_bytes * USABLE_MEMORY_FRACTION / _COUNTED_FRACTION
        ),
        "cuda_compute_capability": capability,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    return _text(
        {
            "gpu_device_info": info,
            "platform_name": '"CUDA"',
            "dnn_version_info": dict(zip(("major", "minor"), _CUDNN, strict=True)),
            "runtime_version": dict(zip(("major", "minor"), _CUDA, strict=True)),
            "device_description_str": f'"{card.name}"',
        }
    )


def _text(fields: Mapping[str, Any]) -> str:
    """Format fields as Protocol Buffers text."""
    parts = (
        f"{name} {{ {_text(value)} }}" if isinstance(value, Mapping) else f"{name}: {value}"
        for name, value in fields.items()
    )
    return " ".join(parts)


def missing_compiler() -> tuple[str, str] | None:
    """If XLA's GPU compiler cannot be used, return (problem, action); otherwise, return None.

    A compiler whose version differs from jaxlib's must not be called, because the process would
    abort.
    """
    jax = importlib.metadata.version("jax")
    found = {name: version for name in PLUGINS if (version := _version(name))}
    if not found:
        reason = "requires XLA's GPU compiler, which is not installed (no GPU is required)"
        return reason, INSTALL
    wanted = _required_plugin_version(jax)
    for name, version in found.items():
        if wanted and version != wanted:
            plugin = name.replace("-pjrt", "-plugin")
            reason = f"requires the compiler for jax {jax}, but {name} {version} is installed"
            return reason, f"pip install '{plugin}=={wanted}'"
    return None


def _required_plugin_version(jax: str) -> str:
    """Return the compiler version required by the installed jax (default: the jax version)."""
    needed = importlib.metadata.requires("jax") or ()
    matches = (re.match(r"jax-cuda\d+-plugin\S*?<=([\w.]+)", package) for package in needed)
    return next((match[1] for match in matches if match), jax)


def has_cudnn() -> bool:
    """Return whether cuDNN, which fused attention requires, is installed."""
    return any(_version(name) for name in CUDNN)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


TOPOLOGY_OPTION = "command line: --topology"
CPU_DEVICES = "mesh.cpu_devices"
_CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
"""TPU types whose accelerator names contain the number of cores. The names of newer types contain
the number of chips."""
_DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "tpu7x": 2}
_ACCELERATORS = {"v5e": "v5litepod"}
_GENERIC_NAMES = {"gpu": "h100", "cuda": "h100", "nvidia": "h100", "tpu": "v5p"}
"""Device types that errors suggest in place of generic names."""
_CHIP_OPTIONS = {"v4": {"chip_config_name": "megacore"}}
"""libtpu options. jax uses both cores of a v4 chip as one device, but libtpu treats them as two
devices by default."""


@dataclass(frozen=True)
class Topology:
    """Slices of identical devices."""

    hardware: Hardware
    dims: tuple[int, ...]
    """Number of chips in a slice along each torus dimension. For CPUs and GPUs, the number of
    devices in a slice."""
    num_slices: int = 1
    option: str = "--topology"
    """Option or config key that specifies the number of devices."""

    @property
    def name(self) -> str:
        """Return the name of one slice, such as `v5p:2x4x4`."""
        return f"{self.hardware.topology}:{'x'.join(map(str, self.dims))}"

    @property
    def platform(self) -> str:
        """Return JAX's name for the platform."""
        return self.hardware.platform

    @property
    def devices_per_slice(self) -> int:
        """Return the number of JAX devices in one slice."""
        return math.prod(self.dims) * _DEVICES_PER_CHIP.get(self.hardware.topology, 1)

    @property
    def num_devices(self) -> int:
        """Return the number of JAX devices across all slices."""
        return self.devices_per_slice * self.num_slices

    @property
    def accelerator(self) -> str:
        """Return the Google Cloud accelerator name of a TPU slice, such as `v5p-64`."""
        kind = self.hardware.topology
        count = math.prod(self.dims) * _CORES_PER_CHIP.get(kind, 1)
        return f"{_ACCELERATORS.get(kind, kind)}-{count}"

    def __str__(self) -> str:
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        return f"{slices}{self.name}, {pluralize(self.num_devices, 'device')}"


def parse_topology(text: str, num_slices: int = 1, where: str = TOPOLOGY_OPTION) -> Topology:
    """Parse a topology `KIND:AxBxC`. `where` names the option that contains this string.

    Raises:
        ConfigError: the device type is unknown, or the size is invalid.
    """
    kind, _, sizes = text.partition(":")
    kinds = known_hardware()
    if kind not in kinds:
        rule = f"must name a device type: {', '.join(kinds)}."
        raise ConfigError.one(
            Code.PLAN_TOPOLOGY, where, text, rule, f"Did you mean {_suggest_topology(text, kinds)}?"
        )
    hardware = kinds[kind]
    example = {0: "8", 2: "4x4", 3: "2x4x4"}[hardware.torus_dims]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        rule = "must be a device type, a colon and a size."
        raise ConfigError.one(Code.PLAN_TOPOLOGY, where, text, rule, f"Write {kind}:{example}.")
    dims = tuple(int(size) for size in sizes.split("x"))
    if len(dims) != max(1, hardware.torus_dims):
        shape = f"{hardware.torus_dims} numbers" if hardware.torus_dims else "one number"
        rule = f"must give the size of a {hardware.name} slice as {shape}."
        raise ConfigError.one(
            Code.PLAN_TOPOLOGY,
            where,
            text,
            rule,
            f"Write {_topology_name(hardware, math.prod(dims))}.",
        )
    topology = Topology(hardware, dims, num_slices)
    if topology.devices_per_slice > hardware.largest_slice:
        rule = f"has {pluralize(topology.devices_per_slice, 'device')}; a slice of {hardware.name} "
        rule += f"has at most {hardware.largest_slice}."
        action = f"Use several smaller slices, such as {kind}:{example}."
        raise ConfigError.one(Code.PLAN_TOPOLOGY, where, text, rule, action)
    return topology


def _suggest_topology(text: str, kinds: Mapping[str, Hardware]) -> str:
    """Guess the intended topology from other notations, such as `h100x8`, `8xH100` or `v5p-64`."""
    name = text.lower().replace("v5litepod", "v5e").removeprefix("tpu-")
    if first := re.fullmatch(r"(\d+)[ x*-]*(\D.*)", name):
        name = f"{first[2]}:{first[1]}"
    same = [kind for kind in kinds if re.match(rf"{re.escape(kind)}(?![a-z0-9])|{kind}x\d", name)]
    kind = max(same, key=len, default="")
    if not kind:
        kind = name.partition(":")[0]
        kind = _GENERIC_NAMES.get(kind) or did_you_mean(kind, kinds) or "v5p"
        name = kind + name[name.find(":") :] if ":" in name else kind
    sizes = [int(size) for size in re.findall(r"\d+", name.removeprefix(kind))]
    sizes = [size for size in sizes if size]
    if sizes and len(sizes) == kinds[kind].torus_dims and math.prod(sizes) <= _most(kinds[kind]):
        return f"{kind}:{'x'.join(map(str, sizes))}"
    # Google Cloud accelerator names such as v5p-64 contain the number of cores.
    cores = _CORES_PER_CHIP.get(kind, 1) if name.startswith(f"{kind}-") else 1
    return _topology_name(kinds[kind], math.prod(sizes) // cores if sizes else 8)


def _topology_name(hardware: Hardware, count: int) -> str:
    """Return the name of a topology with `count` devices, or of the largest slice if `count`
    exceeds its size.
    """
    count = max(1, min(count, _most(hardware)))
    return f"{hardware.topology}:{'x'.join(map(str, _cube(count, max(1, hardware.torus_dims))))}"


def _most(hardware: Hardware) -> int:
    """Return the number of chips in the largest slice."""
    return hardware.largest_slice // _DEVICES_PER_CHIP.get(hardware.topology, 1)


def local_topology(runtime: RuntimeConfig, cpu_devices: int, count: int = 0) -> Topology:
    """Initialize jax, and return a topology with one slice of `count` devices of the local type.

    Args:
        runtime: runtime settings of the process.
        cpu_devices: number of virtual CPU devices, if the machine has no accelerators.
        count: number of devices (default: all local devices).

    Raises:
        ConfigError: jax finds no devices, or no hardware parameters are known for their type.
    """
    from maxpipe.distributed import runtime as process

    process.start(runtime, cpu_devices)
    import jax

    present = jax.devices()
    kind = present[0].device_kind
    hardware = hardware_of_device(kind)
    if hardware is None:
        rule = "must have a file in configs/hardware with its peak FLOP/s, memory and link speeds."
        raise ConfigError.one(
            Code.PLAN_TOPOLOGY, "command line", kind, rule, "Name a device type with --topology."
        )
    dims = _cube(count or len(present), max(1, hardware.torus_dims))
    return Topology(hardware, dims, option="--devices" if count else CPU_DEVICES)


def cpu_topology(count: int, *, is_given: bool = False) -> Topology:
    """Return a topology of `count` CPU devices without importing jax. `is_given` means that an
    option sets the number instead of `mesh.cpu_devices`.
    """
    hardware = hardware_of_device("cpu")
    assert hardware is not None
    return Topology(hardware, (count,), option="--devices" if is_given else CPU_DEVICES)


def local_devices(topology: Topology) -> Sequence[Any]:
    """Return the local JAX devices.

    Raises:
        ConfigError: the number of local devices differs from that of the topology.
    """
    import jax

    present = jax.devices()
    if len(present) != topology.num_devices or jax.process_count() > 1:
        rule = f"must be {len(present)}, the number of devices on this machine, with --measure."
        raise ConfigError.one(
            Code.PLAN_TOPOLOGY,
            "command line: --devices",
            topology.num_devices,
            rule,
            "Remove --measure.",
        )
    return present


def _cube(count: int, num_dims: int) -> tuple[int, ...]:
    """Factor `count` into side lengths that are as nearly equal as possible, in ascending order."""
    if num_dims == 1:
        return (count,)
    root = round(count ** (1 / num_dims))
    side = next(side for side in range(root, 0, -1) if count % side == 0)
    return (side, *_cube(count // side, num_dims - 1))


def _mesh_advice(mesh: MeshShards, topology: Topology) -> str:
    """Return the suggested action for a mesh that does not match the topology's devices."""
    others = mesh.num_devices // mesh.axes["data"] * mesh.config.dcn_data  # without ici_data
    if others and topology.num_devices % others == 0 and mesh.num_slices == topology.num_slices:
        return "Set mesh.ici_data=-1 to use the remaining devices, or change an axis size."
    here = f"their product is {topology.num_devices}"
    if topology.num_slices > 1:
        here += f" and the product of mesh.dcn_* is {topology.num_slices}"
    wanted, kind = mesh.num_devices, topology.hardware.topology
    if topology.option != "--topology":
        is_asked = topology.platform == "cpu" or topology.option != CPU_DEVICES
        other = f", or {topology.option} to {wanted}" if is_asked else ""
    elif wanted % topology.num_slices:
        other = ""
    else:
        each = wanted // topology.num_slices
        other = f"cpu:{each}" if kind == "cpu" else f"a topology of {pluralize(each, 'device')}"
        other = f", or use {other}"
    return f"Set axis sizes so that {here}{other}."


def resolve_config(loaded: LoadedConfig, topology: Topology) -> Config:
    """Return the config with its mesh resolved for a topology.

    Raises:
        ConfigError: the mesh does not match the topology.
    """
    resolved = infer_axis_sizes(loaded.config.mesh, topology.num_devices, topology.num_slices)
    config, mesh = dataclasses.replace(loaded.config, mesh=resolved), MeshShards(resolved)
    # On GPUs and CPUs, ici sizes can span several slices.
    slices = {topology.num_slices} if topology.platform == "tpu" else {1, topology.num_slices}
    if mesh.num_devices != topology.num_devices or mesh.num_slices not in slices:
        wanted = " x ".join(f"{axis} {size}" for axis, size in mesh.axes.items() if size > 1)
        raise ConfigError.one(
            Code.MESH_DEVICES,
            "mesh",
            wanted or "one device",
            "axis sizes must multiply to the number of devices in the topology: the mesh has "
            f"{mesh.num_devices} in {pluralize(mesh.num_slices, 'slice')}, but the topology is "
            f"{topology}.",
            _mesh_advice(mesh, topology),
        )
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    if config.train.objective in OBJECTIVES:
        from maxpipe.step.build import check_plugin_objective  # imports jax

        check_plugin_objective(config)
    return config


def prepare(topology: Topology) -> None:
    """Set the environment variables that are needed before jax is imported.

    Raises:
        ConfigError: this machine has neither the GPUs of the topology nor a compiler for them.
    """
    if topology.platform == "cuda":
        # Without this setting, XLA logs every alternative that the compiler tries.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if not gpus():
            _check_compiler(topology)
            with _suppress_stderr():
                import jax  # noqa: F401 - loads the plugin
    if topology.platform != "tpu":
        return
    os.environ["TPU_ACCELERATOR_TYPE"] = topology.accelerator
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Allow several processes to compile for TPUs at the same time, because no TPU is in use.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # libtpu messages about missing hosts are relevant only for runs on TPUs.
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")


def topology_devices(topology: Topology) -> Sequence[Any]:
    """Return the JAX devices of the topology. Absent devices support only compilation.

    Raises:
        ConfigError: no compiler for the devices is installed.
    """
    import jax

    if topology.platform == "cuda":
        return _local_gpus(topology) or _compile_only_devices(topology)
    if topology.platform == "tpu":
        return _compile_only_devices(topology)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", topology.num_devices)
    return jax.devices()[: topology.num_devices]


def are_local(found: Sequence[Any]) -> bool:
    """Return whether the devices are local and can run programs."""
    import jax

    return found[0].client is jax.devices()[0].client


def _local_gpus(topology: Topology) -> Sequence[Any]:
    """Return the local GPUs, or an empty list if their type or number differs from the topology."""
    import jax

    if not gpus():
        return ()
    allocate_usable_gpu_memory()
    jax.config.update("jax_platforms", "cuda")
    try:
        present = jax.devices()
    except (RuntimeError, AssertionError):  # AssertionError: no CUDA plugin
        return ()
    kind = hardware_of_device(present[0].device_kind)
    same = kind is not None and kind.topology == topology.hardware.topology
    return present[: topology.num_devices] if same and len(present) >= topology.num_devices else ()


def _compile_only_devices(topology: Topology) -> Sequence[Any]:
    """Return compile-only devices, which need not be present."""
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    hardware = topology.hardware
    options: dict[str, Any] = {}
    if topology.platform == "tpu":
        options |= {"topology_name": topology.name} | _CHIP_OPTIONS.get(hardware.topology, {})
        if topology.num_slices > 1:
            options["num_slices"] = topology.num_slices
    else:
        _check_compiler(topology)
        # The topology string has the format slices x processes per slice x devices per process.
        # With one process per slice, the compiler can distinguish the slices.
        options["topology"] = f"{topology.num_slices}x1x{topology.devices_per_slice}"
        options["target_config"] = target_config(hardware)
    try:
        with _suppress_stderr() if topology.platform == "cuda" else contextlib.nullcontext():
            found = topologies.get_topology_desc(platform=topology.platform, **options)
    except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
        raise _topology_error(topology, error) from error
    return found.devices


def _check_compiler(topology: Topology) -> None:
    kind = topology.hardware.topology
    if kind not in GPU_SPECS:
        rule = f"must be a GPU type whose compiler settings are known: {', '.join(GPU_SPECS)}."
        action = "Use one of these types, or compile on a machine with these GPUs."
        raise ConfigError.one(Code.PLAN_COMPILER, TOPOLOGY_OPTION, topology.name, rule, action)
    if missing := missing_compiler():
        reason, command = missing
        raise ConfigError.one(
            Code.PLAN_COMPILER, TOPOLOGY_OPTION, topology.name, f"{reason}.", f"Run: {command}."
        )


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Suppress the message about a missing driver that the CUDA plugin prints while loading.

    The plugin prints the message before log levels take effect.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def compiler_version_error(topology: Topology, error: Exception) -> ConfigError | None:
    """Return the error for a compilation that failed due to the libtpu version, or None."""
    if topology.platform != "tpu":
        return None
    needed = [each.partition(";")[0].strip() for each in importlib.metadata.requires("jax") or ()]
    pattern = next((each for each in needed if each.startswith("libtpu==")), "").partition("==")[2]
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    if not pattern or fnmatch.fnmatch(version, pattern):
        return None
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    return ConfigError.one(
        Code.PLAN_COMPILER,
        TOPOLOGY_OPTION,
        topology.name,
        f"requires another libtpu: jax {importlib.metadata.version('jax')} requires libtpu "
        f"{pattern}, but {version} is installed. libtpu reported: {reason}",
        f"Run: pip install 'libtpu=={pattern}'.",
    )


def _topology_error(topology: Topology, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    extra = {"tpu": "tpu", "cuda": "gpu-aot"}[topology.platform]
    return ConfigError.one(
        Code.PLAN_COMPILER,
        TOPOLOGY_OPTION,
        topology.name,
        f"cannot be used for compilation on this machine: {reason}",
        f"Install the compiler with pip install 'maxpipe[{extra}]', or use an existing size.",
    )
