"""Forecasts for a config on a topology: one run's, or the best layouts'. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxpipe.config.check import check, resolved
from maxpipe.config.load import Loaded
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.plan.nearest import nearest
from maxpipe.plan.report import facts
from maxpipe.plan.search import Found, Search, evaluate, search
from maxpipe.plan.sizes import Sizes
from maxpipe.plan.topology import Topology


def layout(loaded: Loaded, topology: Topology) -> Found:
    """What is foretold of a config on a topology.

    Raises:
        ConfigError: the config does not fit the topology.
    """
    return evaluate(placed(loaded, topology), topology.hardware)


def forecast(found: Found, topology: Topology) -> tuple[dict[str, Any], list[str]]:
    """(facts, the nearest changes that fit if this does not)."""
    values = facts(found, topology.hardware)
    return values, [] if values["fits"] else nearest(found, topology)


def placed(loaded: Loaded, topology: Topology) -> Config:
    """The config with its mesh resolved for a topology."""
    mesh = resolved(loaded.config.mesh, topology.num_devices, topology.num_slices)
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
            f"{sizes.num_slices} slices, and there are {topology}.",
            "Set mesh.ici_data=-1 to use what is left, or another size for an axis.",
        )
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    return config


def fixed_keys(loaded: Loaded, texts: Sequence[str]) -> dict[str, Any]:
    """The values of `section.key=value` that a search keeps.

    Raises:
        ConfigError: a key that no layout has.
    """
    from maxpipe.config.load import KEYS

    found = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in KEYS or key.partition(".")[0] not in ("mesh", "pipeline") or not value:
            raise ConfigError.one(
                "command line: --fix",
                text,
                "must be a key of mesh or pipeline with its value.",
                "Write --fix mesh.ici_stage=4.",
            )
        found[key] = int(value) if value.lstrip("-").isdigit() else value
    return found


def best_layouts(config: Config, topology: Topology, fixed: Mapping[str, Any]) -> Search:
    """The fastest layouts of a config on a topology."""
    return search(
        config,
        topology.hardware,
        num_devices=topology.num_devices,
        num_slices=topology.num_slices,
        fixed=fixed,
    )
