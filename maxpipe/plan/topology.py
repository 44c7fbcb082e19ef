"""Names of groups of devices, such as `v5p:4x4x4`, and their devices.

Parsing needs no jax. TPU devices come from libtpu, which describes chips that this machine does
not have, and GPUs that are not here from jax's CUDA plugin; CPU devices are virtual.

What XLA's compiler has to know of NVIDIA GPUs that are not there: a target config, as text.

No jax. The facts are those that NVIDIA's driver reports of a card, as XLA's own target configs
(openxla/xla, `xla/backends/gpu/target_config/specs`), NVIDIA's CUDA programming guide (limits of
each compute capability) and its data sheets have them. Memory and its rate are those of
`configs/hardware`.
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
from maxpipe.config.schema import Config, RuntimeConfig
from maxpipe.errors import ConfigError
from maxpipe.hardware import Hardware, hardware_of_device, known_hardware
from maxpipe.io.files import gpus
from maxpipe.io.formatting import pluralize
from maxpipe.parallel.axes import MeshConfig, infer_axis_sizes
from maxpipe.plan.sizes import Sizes

UNTUNED_GPU_OPTIONS: Mapping[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}
"""For XLA: kernels are chosen without running any. Matmuls are cuBLAS' then, as a run's large ones
mostly are; Triton's need a tiling that only measurements give."""
PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
"""Packages that hold the compiler."""
CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
INSTALL = "pip install 'maxpipe[gpu-aot]'"
_CUDA, _CUDNN = (12, 8), (9, 10)
"""Versions that a run is taken to have."""
_KIB = 1024
_PER_BLOCK = 48 * _KIB


@dataclass(frozen=True)
class GpuSpec:
    """One kind of GPU."""

    name: str
    """As the driver has it."""
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    clock_ghz: float
    """Highest."""
    l2_bytes: int
    shared_bytes: int = 228 * _KIB
    """Of a core."""
    lanes: int = 128
    """Float32 units of a core."""
    threads: int = 2048
    """Of a core."""


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
"""By the name that topologies begin with."""


def target_config(hardware: Hardware) -> str:
    """A `stream_executor.GpuTargetConfigProto` in text format; the card must be in `CARDS`."""
    card = GPU_SPECS[hardware.topology]
    major, minor = card.capability
    capability: dict[str, Any] = {"major": major, "minor": minor}
    if major >= 9:  # instructions that only this generation has, as on the card itself
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
        "device_memory_size": round(hardware.memory_bytes),
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
    """Protocol buffers' text format."""
    parts = (
        f"{name} {{ {_text(value)} }}" if isinstance(value, Mapping) else f"{name}: {value}"
        for name, value in fields.items()
    )
    return " ".join(parts)


def missing_compiler() -> tuple[str, str] | None:
    """(what is wrong, the action) where XLA's compiler for GPUs cannot be used here.

    A compiler of another version than jaxlib's must not be called: it would end the process.
    """
    jax = importlib.metadata.version("jax")
    found = {name: version for name in PLUGINS if (version := _version(name))}
    if not found:
        return "needs XLA's compiler for GPUs, which is not installed (no GPU is needed)", INSTALL
    wanted = _required_plugin_version(jax)
    for name, version in found.items():
        if wanted and version != wanted:
            plugin = name.replace("-pjrt", "-plugin")
            reason = f"needs a compiler made for jax {jax}, and {name} {version} is installed"
            return reason, f"pip install '{plugin}=={wanted}'"
    return None


def _required_plugin_version(jax: str) -> str:
    """The version of the compiler that this jax names, its own if it names none."""
    needed = importlib.metadata.requires("jax") or ()
    found = (re.match(r"jax-cuda\d+-plugin\S*?<=([\w.]+)", each) for each in needed)
    return next((each[1] for each in found if each), jax)


def has_cudnn() -> bool:
    """Whether the library is installed that fused attention is compiled with."""
    return any(_version(name) for name in CUDNN)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


TOPOLOGY_OPTION = "command line: --topology"
CPU_DEVICES = "mesh.cpu_devices"
_CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
"""Accelerator types of these count cores; of later ones, chips."""
_DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "tpu7x": 2}
_ACCELERATORS = {"v5e": "v5litepod"}
_GENERIC_NAMES = {"gpu": "h100", "cuda": "h100", "nvidia": "h100", "tpu": "v5p"}
"""Generic names, and a kind for each."""
_CHIP_OPTIONS = {"v4": {"chip_config_name": "megacore"}}
"""Both cores of a chip are one jax device unless one asks otherwise; libtpu's default is two."""


@dataclass(frozen=True)
class Topology:
    """Slices of like devices."""

    hardware: Hardware
    dims: tuple[int, ...]
    """Chips of one slice along each dim of its torus; of CPUs and GPUs, one number."""
    num_slices: int = 1
    option: str = "--topology"
    """What of a command or config says how many there are."""

    @property
    def name(self) -> str:
        """Of one slice, as given: `v5p:2x4x4`."""
        return f"{self.hardware.topology}:{'x'.join(map(str, self.dims))}"

    @property
    def platform(self) -> str:
        """jax's name of the backend."""
        return self.hardware.platform

    @property
    def devices_per_slice(self) -> int:
        """jax devices of one slice."""
        return math.prod(self.dims) * _DEVICES_PER_CHIP.get(self.hardware.topology, 1)

    @property
    def num_devices(self) -> int:
        """jax devices of all slices."""
        return self.devices_per_slice * self.num_slices

    @property
    def accelerator(self) -> str:
        """Google Cloud's name of a TPU slice: `v5p-64`."""
        kind = self.hardware.topology
        count = math.prod(self.dims) * _CORES_PER_CHIP.get(kind, 1)
        return f"{_ACCELERATORS.get(kind, kind)}-{count}"

    def __str__(self) -> str:
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        return f"{slices}{self.name}, {pluralize(self.num_devices, 'device')}"


def parse_topology(text: str, num_slices: int = 1, where: str = TOPOLOGY_OPTION) -> Topology:
    """The topology that `KIND:AxBxC` names; `where` is what gave the name.

    Raises:
        ConfigError: no such kind, or not a size that it can have.
    """
    kind, _, sizes = text.partition(":")
    kinds = known_hardware()
    if kind not in kinds:
        rule = f"is not a kind of device: the kinds are {', '.join(kinds)}."
        raise ConfigError.one(where, text, rule, f"Did you mean {_suggest_topology(text, kinds)}?")
    hardware = kinds[kind]
    example = {0: "8", 2: "4x4", 3: "2x4x4"}[hardware.torus_dims]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        rule = "must be a kind of device, a colon and its size."
        raise ConfigError.one(where, text, rule, f"Write {kind}:{example}.")
    dims = tuple(int(size) for size in sizes.split("x"))
    if len(dims) != max(1, hardware.torus_dims):
        shape = f"{hardware.torus_dims} numbers" if hardware.torus_dims else "one number"
        rule = f"must have {shape}, as {hardware.name} devices are joined."
        raise ConfigError.one(
            where, text, rule, f"Write {_topology_name(hardware, math.prod(dims))}."
        )
    found = Topology(hardware, dims, num_slices)
    if found.devices_per_slice > hardware.largest_slice:
        rule = f"is {pluralize(found.devices_per_slice, 'device')}; the links of {hardware.name} "
        rule += f"join at most {hardware.largest_slice}."
        action = f"Name a smaller slice, such as {kind}:{example}, and more than one of them."
        raise ConfigError.one(where, text, rule, action)
    return found


def _suggest_topology(text: str, kinds: Mapping[str, Hardware]) -> str:
    """The topology that is meant: `h100x8`, `8xH100` and `v5p-64` are ways to write one."""
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
    # Google Cloud's names of accelerators, such as v5p-64, count cores.
    cores = _CORES_PER_CHIP.get(kind, 1) if name.startswith(f"{kind}-") else 1
    return _topology_name(kinds[kind], math.prod(sizes) // cores if sizes else 8)


def _topology_name(hardware: Hardware, count: int) -> str:
    """`count` devices in the shape of their torus, at most the largest slice."""
    count = max(1, min(count, _most(hardware)))
    return f"{hardware.topology}:{'x'.join(map(str, _cube(count, max(1, hardware.torus_dims))))}"


def _most(hardware: Hardware) -> int:
    """Chips of the largest slice."""
    return hardware.largest_slice // _DEVICES_PER_CHIP.get(hardware.topology, 1)


def local_topology(runtime: RuntimeConfig, cpu_devices: int, count: int = 0) -> Topology:
    """`count` devices like those of this machine, or all that it has, in one slice. Starts jax.

    Args:
        runtime: of the process.
        cpu_devices: virtual ones, where this machine has no others.
        count: of devices.

    Raises:
        ConfigError: there are none, or no figures for their kind.
    """
    from maxpipe.distributed import runtime as process

    process.start(runtime, cpu_devices)
    import jax

    present = jax.devices()
    kind = present[0].device_kind
    hardware = hardware_of_device(kind)
    if hardware is None:
        rule = "has no file in configs/hardware, and plans need its peak, memory and links."
        raise ConfigError.one("command line", kind, rule, "Name a kind with --topology.")
    dims = _cube(count or len(present), max(1, hardware.torus_dims))
    return Topology(hardware, dims, option="--devices" if count else CPU_DEVICES)


def local_devices(topology: Topology) -> Sequence[Any]:
    """jax's devices of this machine, as many as the topology has.

    Raises:
        ConfigError: there are more or fewer.
    """
    import jax

    present = jax.devices()
    if len(present) != topology.num_devices or jax.process_count() > 1:
        rule = f"must be the {len(present)} of this machine to be run on."
        raise ConfigError.one(
            "command line: --devices", topology.num_devices, rule, "Leave --measure out."
        )
    return present


def _cube(count: int, num_dims: int) -> tuple[int, ...]:
    """The sides, as equal as possible, of a block of `count` devices; the smallest first."""
    if num_dims == 1:
        return (count,)
    root = round(count ** (1 / num_dims))
    side = next(side for side in range(root, 0, -1) if count % side == 0)
    return (side, *_cube(count // side, num_dims - 1))


def _mesh_advice(mesh: MeshConfig, sizes: Sizes, topology: Topology) -> str:
    """The action for a mesh that does not use all devices of a topology."""
    others = sizes.num_devices // sizes.axes["data"] * mesh.dcn_data  # without ici_data
    if others and topology.num_devices % others == 0 and sizes.num_slices == topology.num_slices:
        return "Set mesh.ici_data=-1 to use what is left, or another size for an axis."
    here = f"they multiply to {topology.num_devices}"
    if topology.num_slices > 1:
        here += f", the product of mesh.dcn_* being {topology.num_slices}"
    wanted, kind = sizes.num_devices, topology.hardware.topology
    if topology.option != "--topology":
        is_asked = topology.platform == "cpu" or topology.option != CPU_DEVICES
        other = f", or {topology.option} to {wanted}" if is_asked else ""
    elif wanted % topology.num_slices:
        other = ""
    else:
        each = wanted // topology.num_slices
        other = f"cpu:{each}" if kind == "cpu" else f"a topology of {pluralize(each, 'device')}"
        other = f", or name {other}"
    return f"Set sizes of axes so that {here}{other}."


def resolve_config(loaded: LoadedConfig, topology: Topology) -> Config:
    """The config with its mesh resolved for a topology."""
    mesh = infer_axis_sizes(loaded.config.mesh, topology.num_devices, topology.num_slices)
    config = dataclasses.replace(loaded.config, mesh=mesh)
    sizes = Sizes(config)
    # On other devices than TPUs ici sizes may ignore where slices end.
    slices = {topology.num_slices} if topology.platform == "tpu" else {1, topology.num_slices}
    if sizes.num_devices != topology.num_devices or sizes.num_slices not in slices:
        wanted = " x ".join(f"{axis} {size}" for axis, size in sizes.axes.items() if size > 1)
        raise ConfigError.one(
            "mesh",
            wanted or "one device",
            f"must multiply to the devices of the topology: it is {sizes.num_devices} in "
            f"{pluralize(sizes.num_slices, 'slice')}, and there are {topology}.",
            _mesh_advice(mesh, sizes, topology),
        )
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    return config


def prepare(topology: Topology) -> None:
    """Settings before jax is imported or initialises devices.

    Raises:
        ConfigError: this machine has neither such GPUs nor a compiler for them.
    """
    if topology.platform == "cuda":
        # Else the compiler reports what it tries.
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
    # Other processes may be compiling for TPUs, too: none is held.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Its messages about missing hosts matter only for runs on TPUs.
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")


def topology_devices(topology: Topology) -> Sequence[Any]:
    """jax's devices of the topology; those that are not here can be compiled for, not run on.

    Raises:
        ConfigError: this machine cannot describe them.
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
    """Whether programs can be run on these devices."""
    import jax

    return found[0].client is jax.devices()[0].client


def _local_gpus(topology: Topology) -> Sequence[Any]:
    """As many of this machine's GPUs, if they are of the kind; none otherwise."""
    import jax

    if not gpus():
        return ()
    jax.config.update("jax_platforms", "cuda")
    try:
        present = jax.devices()
    except (RuntimeError, AssertionError):  # AssertionError: no plugin
        return ()
    kind = hardware_of_device(present[0].device_kind)
    same = kind is not None and kind.topology == topology.hardware.topology
    return present[: topology.num_devices] if same and len(present) >= topology.num_devices else ()


def _compile_only_devices(topology: Topology) -> Sequence[Any]:
    """Devices that a compiler describes, which need not be there."""
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
        # Slices, processes of each, and devices of a process: slices are told apart by processes.
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
        rule = "is not a kind of GPU whose compiler settings are known: these are "
        action = "Name one of them, or compile where such GPUs are."
        raise ConfigError.one(TOPOLOGY_OPTION, topology.name, rule + ", ".join(GPU_SPECS), action)
    if missing := missing_compiler():
        reason, command = missing
        raise ConfigError.one(TOPOLOGY_OPTION, topology.name, f"{reason}.", f"Run: {command}.")


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Keeps off stderr that there is no driver, as the CUDA plugin reports whenever it is loaded.

    It does so before any level of messages applies.
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
    """What to say of a failed compilation if the compiler is not one that this jax was made for."""
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
        TOPOLOGY_OPTION,
        topology.name,
        f"cannot be compiled for: jax {importlib.metadata.version('jax')} was made for libtpu "
        f"{pattern}, and this is {version}. It said: {reason}",
        f"Install the one that fits: pip install 'libtpu=={pattern}'.",
    )


def _topology_error(topology: Topology, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    extra = {"tpu": "tpu", "cuda": "gpu-aot"}[topology.platform]
    return ConfigError.one(
        TOPOLOGY_OPTION,
        topology.name,
        f"cannot be compiled for on this machine: {reason}",
        f"Install the compiler, pip install 'maxpipe[{extra}]', or name a size that exists.",
    )
