"""Device files of TPUs and GPUs: whether a machine has accelerators, without jax."""

from __future__ import annotations

from pathlib import Path

_GPUS = ("nvidia[0-9]*",)
_ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", *_GPUS)


def accelerators() -> list[Path]:
    """The device files of this machine's TPUs and GPUs."""
    return _files(_ACCELERATORS)


def gpus() -> list[Path]:
    """The device files of this machine's NVIDIA GPUs."""
    return _files(_GPUS)


def _files(patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(Path("/dev").glob(pattern))]
