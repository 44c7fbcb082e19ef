"""The hosts of a topology: their number and their names in clouds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maxpipe.errors import ConfigError
from maxpipe.plan.topology import Topology

KEY = "launch.topology"
_CHIPS_PER_HOST = 4
_SINGLE_HOST_CHIPS = {"v5e": (1, 4, 8), "v6e": (1, 4, 8)}
"""Slices of these that are one host; all other TPU hosts have four chips."""
_GPUS_PER_HOST = {"gb200": 4}
"""Where a slice is more than one host."""


@dataclass(frozen=True)
class Tpu:
    """Google Cloud's names of a kind of TPU; empty where it is not offered."""

    runtime_version: str
    """Image of a TPU VM."""
    node_label: str
    """Of the nodes of GKE."""


_TPUS = {
    "v2": Tpu("tpu-ubuntu2204-base", ""),
    "v3": Tpu("tpu-ubuntu2204-base", "tpu-v3-slice"),
    "v4": Tpu("tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Tpu("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Tpu("v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Tpu("v2-alpha-tpuv6e", "tpu-v6e-slice"),
    "tpu7x": Tpu("", "tpu7x"),
}


@dataclass(frozen=True)
class Hosts:
    """The hosts of every slice."""

    topology: Topology
    per_slice: int
    chips: int
    """TPU chips, GPUs or virtual devices of one host."""

    @property
    def count(self) -> int:
        """Of all slices."""
        return self.per_slice * self.topology.num_slices

    @property
    def processes(self) -> int:
        """Of the run: one for each GPU, else one for each host."""
        return self.count * (self.chips if self.topology.platform == "cuda" else 1)

    def __str__(self) -> str:
        return f"{self.count} hosts" if self.count > 1 else "one host"


def hosts_of(topology: Topology) -> Hosts:
    """The hosts that a topology stands for.

    Raises:
        ConfigError: hosts cannot be divided.
    """
    kind, chips = topology.hardware.topology, math.prod(topology.dims)
    if topology.platform == "cpu":
        return Hosts(topology, 1, chips)
    if topology.platform == "cuda":
        each = min(_GPUS_PER_HOST.get(kind, chips), chips)
    else:
        each = chips if chips in _SINGLE_HOST_CHIPS.get(kind, ()) else _CHIPS_PER_HOST
    if chips % each:
        rule = f"is {chips} chips a slice, and a host of {topology.hardware.name} has {each}."
        action = f"Set {KEY} to a size that is a multiple of {each}."
        raise ConfigError.one(KEY, topology.name, rule, action)
    return Hosts(topology, chips // each, each)


def tpu_of(topology: Topology) -> Tpu:
    """Google Cloud's names of a TPU topology.

    Raises:
        ConfigError: it is something else.
    """
    if topology.hardware.topology not in _TPUS:
        rule = f"must be TPUs: {', '.join(_TPUS)}."
        action = f"Set {KEY}=v5p:2x4x4, or use `maxpipe launch slurm`."
        raise ConfigError.one(KEY, topology.name, rule, action)
    return _TPUS[topology.hardware.topology]
