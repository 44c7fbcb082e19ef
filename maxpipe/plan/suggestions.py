"""Suggest the smallest config changes that make a run fit in memory; does not import jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from maxpipe.config.check import check
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.plan.memory_terms import USABLE_MEMORY_FRACTION
from maxpipe.plan.search import Candidate, evaluate
from maxpipe.plan.topology import Topology
from maxpipe.schedule.catalog import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD


def suggest_changes(candidate: Candidate, topology: Topology) -> list[str]:
    """Return single changes, or otherwise pairs, that make the run fit in memory, fastest first."""
    limit, hits = USABLE_MEMORY_FRACTION * topology.hardware.memory_bytes, []
    singles = list(_changes(candidate.config))
    for changes in (*([one] for one in singles), *_pairs(singles)):
        if hits and len(changes) > 1:
            break
        config = candidate.config
        for section, values in changes:
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **values)}
            )
        if check(config, {}):
            continue
        try:
            other = evaluate(config, topology.hardware)
        except ConfigError:
            continue
        if other.memory.total <= min(limit, candidate.memory.total):
            text = " ".join(
                f"{section}.{key}={value}"
                for section, values in changes
                for key, value in values.items()
                if value != getattr(getattr(candidate.config, section), key)
            )
            hits.append(
                (
                    other.cost.seconds,
                    f"{text}: {other.memory.total / 2**30:.1f} GiB, "
                    f"{other.cost.seconds:.3g} s per step",
                )
            )
    return [text for _, text in sorted(hits)[:3]]


Change = tuple[str, dict[str, Any]]


def _changes(config: Config) -> Iterator[Change]:
    pipeline, mesh = config.pipeline, config.mesh
    for remat in ("names", "full", "chunk"):
        if remat != pipeline.remat:
            yield "pipeline", {"remat": remat, "offloaded_names": []}
    for gather in ("visit", "iteration"):
        if gather != pipeline.weight_gather:
            yield "pipeline", {"weight_gather": gather}
    for factor in (2, 4, 8):
        yield "pipeline", {"microbatches": pipeline.microbatches * factor}
    if pipeline.schedule not in (INTERLEAVED, ONE_FORWARD_ONE_BACKWARD) and pipeline.repeats == 1:
        yield "pipeline", {"schedule": ONE_FORWARD_ONE_BACKWARD}
    if pipeline.group:
        yield "pipeline", {"group": 0}
    for taker in ("fsdp", "stage", "context", "expert"):
        for factor in (2, 4, 8):
            size = mesh.ici_data
            if size % factor == 0 and size >= factor:
                more = getattr(mesh, f"ici_{taker}") * factor
                yield "mesh", {"ici_data": size // factor, f"ici_{taker}": more}


def _pairs(singles: Sequence[Change]) -> Iterator[list[Change]]:
    for index, one in enumerate(singles):
        for other in singles[index + 1 :]:
            if one[0] != other[0] or not one[1].keys() & other[1].keys():
                yield [one, other]
