"""What XLA's compiler has to know of NVIDIA GPUs that are not there: a target config, as text.

No jax. The facts are those that NVIDIA's driver reports of a card, as XLA's own target configs
(openxla/xla, `xla/backends/gpu/target_config/specs`), NVIDIA's CUDA programming guide (limits of
each compute capability) and its data sheets have them. Memory and its rate are those of
`configs/hardware`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.hardware import Hardware

OPTIONS: Mapping[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
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
class Card:
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


CARDS: Mapping[str, Card] = {
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 40 << 20, 164 * _KIB, lanes=64),
    "l4": Card("NVIDIA L4", (8, 9), 58, 2.04, 48 << 20, 100 * _KIB, threads=1536),
    "l40s": Card("NVIDIA L40S", (8, 9), 142, 2.52, 96 << 20, 100 * _KIB, threads=1536),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 50 << 20),
    "h100-pcie": Card("NVIDIA H100 PCIe", (9, 0), 114, 1.755, 50 << 20),
    "h200": Card("NVIDIA H200", (9, 0), 132, 1.98, 50 << 20),
    "b200": Card("NVIDIA B200", (10, 0), 148, 1.965, 132_644_864),
    "gb200": Card("NVIDIA GB200", (10, 0), 152, 2.062, 135_528_448),
}
"""By the name that topologies begin with."""


def target_config(hardware: Hardware) -> str:
    """A `stream_executor.GpuTargetConfigProto` in text format; the card must be in `CARDS`."""
    card = CARDS[hardware.topology]
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
    wanted = _wanted(jax)
    for name, version in found.items():
        if wanted and version != wanted:
            plugin = name.replace("-pjrt", "-plugin")
            reason = f"needs a compiler made for jax {jax}, and {name} {version} is installed"
            return reason, f"pip install '{plugin}=={wanted}'"
    return None


def _wanted(jax: str) -> str:
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
