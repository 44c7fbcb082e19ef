"""Forecast the layouts of a config on a topology, or search for the best; without jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxpipe.config.load import LoadedConfig, parse_setting
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.plan.report import plan_values
from maxpipe.plan.search import (
    NUM_RESULTS,
    Candidate,
    ProgressCallback,
    SearchResult,
    evaluate,
    ignore_progress,
    search,
    suggest_changes,
)
from maxpipe.plan.topology import Topology, resolve_config


def forecast_layout(loaded: LoadedConfig, topology: Topology) -> Candidate:
    """Forecast the memory and step time of a config on a topology.

    Raises:
        ConfigError: the config does not fit the topology.
    """
    return evaluate(resolve_config(loaded, topology), topology.hardware)


def forecast_values(candidate: Candidate, topology: Topology) -> tuple[dict[str, Any], list[str]]:
    """Return the plan as JSON values, and the smallest changes with which it would fit, if any."""
    values = plan_values(candidate, topology.hardware)
    return values, [] if values["fits"] else suggest_changes(candidate, topology)


def parse_fixed_keys(loaded: LoadedConfig, texts: Sequence[str]) -> dict[str, Any]:
    """Parse the `section.key=value` settings that a search does not change.

    Raises:
        ConfigError: a key is not in mesh or pipeline, or its value is not valid.
    """
    from maxpipe.config.keys import KEYS

    fixed = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in KEYS or key.partition(".")[0] not in ("mesh", "pipeline") or not value:
            raise ConfigError.one(
                "command line: --fix",
                text,
                "must be a key of mesh or pipeline with its value.",
                "Write --fix mesh.ici_stage=4.",
            )
        _, fixed[key] = parse_setting(text)
        size_of_axis = key.startswith(("mesh.ici_", "mesh.dcn_"))
        if size_of_axis and fixed[key] < 1:
            raise ConfigError.one(
                f"command line: --fix {key}",
                value,
                "must be a number of devices of at least 1.",
                f"Write --fix {key}=2, or remove it to search over all values.",
            )
    return fixed


def best_layouts(
    config: Config,
    topology: Topology,
    fixed: Mapping[str, Any],
    keep: int = NUM_RESULTS,
    report: ProgressCallback = ignore_progress,
) -> SearchResult:
    """Return the `keep` fastest layouts of a config on a topology. For `report`, see `search`."""
    return search(
        config,
        topology.hardware,
        num_devices=topology.num_devices,
        num_slices=topology.num_slices,
        fixed=fixed,
        keep=keep,
        report=report,
    )
