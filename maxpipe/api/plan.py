"""Predict the memory use and the step time of a config, without devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maxpipe.api.arguments import check_instance, check_integer, locate_errors
from maxpipe.api.config import ConfigSource, load_config
from maxpipe.config.schema import Config
from maxpipe.planner import draw, report
from maxpipe.planner import topology as topologies
from maxpipe.planner.search import Candidate, forecast_layout
from maxpipe.planner.topology import Topology


@dataclass(frozen=True)
class Plan:
    """Predicted memory use and time of one training step. All values are estimates."""

    config: Config
    """Config with the resolved mesh."""
    topology: str
    """Devices that the plan assumes, such as `h100:8`."""
    num_devices: int
    """Number of devices in all slices."""
    parameters: int
    """Number of parameters of the model."""
    tokens_per_step: int
    """Tokens of a global batch, including padding."""
    flops_per_step: float
    """Floating-point operations of the model, without recomputation."""
    memory_bytes: float
    """Memory of one device."""
    total_bytes: float
    """Predicted memory use of one device."""
    terms: dict[str, float]
    """Bytes of the largest categories on one device, such as `state` or `gradients`."""
    fits: bool
    """Whether the prediction fits in the memory of a device."""
    changes: tuple[str, ...]
    """Smallest config changes that would make the plan fit; empty if it fits."""
    bubble: float
    """Fraction of a step during which a stage is idle."""
    seconds: float
    """Predicted time of a step."""
    parts: dict[str, float]
    """Seconds of a step by category, as in the last lines of `text`."""
    mfu: float
    """Model FLOP/s divided by the peak FLOP/s of the devices."""
    tokens_per_second: float
    """Predicted throughput of all devices."""
    values: dict[str, Any] = field(repr=False)
    """All values, as printed by `maxpipe plan --json`."""
    _candidate: Candidate = field(repr=False)
    _target: Topology = field(repr=False)

    def text(self) -> str:
        """Return the plan as printed by `maxpipe plan`."""
        return report.format_plan(self.values, self.changes)

    def svg(self, *, timeline: bool = False) -> str:
        """Return a drawing of the memory of one device, or of the timeline of a step, as SVG."""
        drawing = draw.draw_timeline if timeline else draw.draw_memory
        return drawing(self._candidate, self._target.hardware).svg()

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()


@locate_errors
def plan(
    *sources: ConfigSource,
    topology: str | None = None,
    slices: int = 1,
    devices: int | None = None,
) -> Plan:
    """Predict the memory use and the step time of a config.

    With a topology, or with `runtime.platform=cpu`, neither jax nor a device is used.

    Args:
        sources: config and overrides, as in `load_config`.
        topology: device type and size of one slice, such as `v5p:4x4x4` or `h100:8`. The default is
            the devices of this machine.
        slices: number of slices, connected by the data-center network.
        devices: number of devices like those of this machine, if no topology is set (default: the
            devices of this machine).

    Raises:
        ConfigError: the config is not valid, or does not match the topology.
    """
    if topology is not None:
        rule = "must be a string."
        check_instance("plan: topology", topology, str, rule, "Write h100:8, for example.")
    slices = check_integer("plan: slices", slices)
    if devices is not None:
        devices = check_integer("plan: devices", devices)
    loaded = load_config(*sources)
    target = find_topology(loaded.config, topology, slices, devices)
    return make_plan(forecast_layout(loaded, target), target)


def find_topology(
    config: Config, topology: str | None, slices: int, devices: int | None
) -> Topology:
    """Return the topology for the arguments of `plan`.

    Raises:
        ConfigError: the topology is unknown, or this machine has no devices for the config.
    """
    if topology is not None:
        return topologies.parse_topology(topology, slices)
    cpu_devices = devices or config.mesh.cpu_devices
    if config.runtime.platform == "cpu":
        return topologies.cpu_topology(cpu_devices, is_given=devices is not None)
    return topologies.local_topology(config.runtime, cpu_devices, devices or 0)


def make_plan(candidate: Candidate, target: Topology) -> Plan:
    """Return the plan of a layout on a topology."""
    values, changes = report.forecast_values(candidate, target)
    same = ("num_devices", "parameters", "tokens_per_step", "flops_per_step", "memory_bytes")
    same += ("total_bytes", "terms", "fits", "bubble", "seconds", "parts", "mfu")
    return Plan(
        config=candidate.config,
        topology=str(target),
        changes=tuple(changes),
        tokens_per_second=values["tokens_per_second"],
        values=values,
        _candidate=candidate,
        _target=target,
        **{name: values[name] for name in same},
    )
