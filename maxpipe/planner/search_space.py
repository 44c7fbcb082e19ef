"""Enumerate the valid layouts of a run: meshes, batch sizes and pipeline options.

Sequences are sharded over the context axis only if the caller requests it. This module does not
import jax.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from maxpipe.config.schema import Config
from maxpipe.config.sections.model import (
    has_experts,
    layer_parts,
    uses_ring,
)
from maxpipe.models.layers.experts import Experts
from maxpipe.models.moe_base import MixtureConfig
from maxpipe.models.registry import describe
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.planner.memory_terms import gathers_weights
from maxpipe.planner.sizes import Sizes
from maxpipe.schedule.catalog import INTERLEAVED, SCHEDULES

TOKEN_SPLIT_KEYS = ("sequence_parallel", "collective_matmul")
"""Keys of `mesh` that select how tokens are sharded over the tensor axis."""
REPEATS, MAX_REPEATS = (1, 2, 3, 4, 6, 8), 16
"""Numbers of repeats to search on any number of stages, and the maximum number of repeats that
divides the layers of a stage evenly."""
GATHERS = ("iteration", "window", "step")
REMATS = ("none", "names", "full", "chunk")
CHUNKS = (1, 2, 4)
"""Searched values of `all_to_all_chunks`."""


@dataclass(frozen=True)
class MeshLayouts:
    """All layouts that use the same mesh."""

    config: Config
    pipelines: Sequence[Mapping[str, Any]]

    def layout(self, place: int) -> Config:
        """Return the layout at the given index."""
        section = dataclasses.replace(self.config.pipeline, **self.pipelines[place])
        return dataclasses.replace(self.config, pipeline=section)


def layouts(
    config: Config,
    num_devices: int,
    num_slices: int,
    fixed: Mapping[str, Any],
    contexts: Sequence[int] = (1,),
    platform: str = "cpu",
) -> Iterator[Config]:
    """Yield layouts with valid axis sizes whose context-axis size is in `contexts`.

    `config.check.check` checks all other rules.
    """
    for space in mesh_layouts(config, num_devices, num_slices, fixed, contexts, platform):
        yield from map(space.layout, range(len(space.pipelines)))


def mesh_layouts(
    config: Config,
    num_devices: int,
    num_slices: int,
    fixed: Mapping[str, Any],
    contexts: Sequence[int],
    platform: str,
) -> Iterator[MeshLayouts]:
    """Yield layouts with valid axis sizes, grouped by mesh."""
    across = [axis for axis in MESH_AXES if fixed.get(f"mesh.dcn_{axis}", 1) > 1]
    whole = {f"{link}_{axis}": 1 for link in ("ici", "dcn") for axis in MESH_AXES}
    kept = {
        key.removeprefix("pipeline."): value
        for key, value in fixed.items()
        if key.startswith("pipeline.")
    }
    for sizes in _meshes(config, num_devices, num_slices, contexts, across):
        mesh = whole | sizes  # 1 is the default size
        if any(
            mesh[name] != value
            for key, value in fixed.items()
            if key.startswith("mesh.") and (name := key.removeprefix("mesh.")) in mesh
        ):
            continue
        resolved = dataclasses.replace(config.mesh, **mesh)
        on_mesh = dataclasses.replace(config, mesh=resolved)
        pipelines = _pipelines(on_mesh)
        if kept:
            pipelines = [
                pipeline
                for pipeline in pipelines
                if all(pipeline.get(name, value) == value for name, value in kept.items())
            ]
        if pipelines:
            for chunked in _chunkings(on_mesh, platform):
                yield MeshLayouts(chunked, pipelines)


def batch_sizes(config: Config, max_batch_size: int) -> list[int]:
    """Return the batch sizes to search: `train.batch_size` and its doublings up to the limit."""
    smallest = config.train.batch_size
    return [smallest << doublings for doublings in range((max_batch_size // smallest).bit_length())]


def chunks_key(config: Config) -> str | None:
    """Return the key for the number of chunks of an all-to-all, or None if its value has no effect
    or changes the result.
    """
    experts = [part for part in layer_parts(config) if isinstance(part, Experts)]
    own = config.model.own
    if not isinstance(own, MixtureConfig) or not experts or any(e.drops_tokens for e in experts):
        return None
    return f"model.{config.model.family}.all_to_all_chunks"


def _chunkings(config: Config, platform: str) -> Iterator[Config]:
    """Yield configs with different values of `all_to_all_chunks`, which matters only on GPUs: on
    other devices, chunks do not overlap with experts.
    """
    yield config
    axes, own = Sizes(config).mesh.axes, config.model.own
    if platform != "cuda" or axes["expert"] == 1 or chunks_key(config) is None:
        return
    tokens = config.train.sequence_length // axes["context"]
    for count in CHUNKS:
        if count != own.all_to_all_chunks and tokens % count == 0:
            model = dataclasses.replace(
                config.model, own=dataclasses.replace(own, all_to_all_chunks=count)
            )
            yield dataclasses.replace(config, model=model)


def context_sizes(config: Config, inside: int) -> list[int]:
    """Return the context-axis sizes that divide sequences evenly."""
    if config.model.mtp_heads:
        return [1]
    tokens = config.train.sequence_length
    return [1, *(size for size in _divisors(inside)[1:] if tokens % (2 * size) == 0)]


def _meshes(
    config: Config,
    num_devices: int,
    num_slices: int,
    contexts: Sequence[int],
    across: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield meshes. `across` names the axes that span slices (default: derived from the config)."""
    inside = num_devices // num_slices
    if num_slices == 1:
        across = ("data",)
    elif not across:
        across = ["data", "fsdp", "stage", *(["expert"] if has_experts(config) else [])]
        if config.train.batch_size < num_devices and not config.model.mtp_heads:
            across.append("context")
    tokens, described = config.train.sequence_length, Sizes(config)
    for sizes, axis in itertools.product(_slice_meshes(config, inside, contexts), across):
        total = sizes | {axis: sizes[axis] * num_slices}
        shards = total["data"] * total["fsdp"] * total["expert"]
        if total["stage"] > config.model.num_layers or config.train.batch_size % shards:
            continue
        if total["context"] > 1 and tokens % (2 * total["context"]):
            continue
        if not described.mesh.divides(described.model, total):
            continue
        mesh = {f"ici_{name}": size for name, size in sizes.items()}
        mesh |= {f"dcn_{axis}": num_slices} if num_slices > 1 else {}
        for split, rings in _token_splits(config, sizes):
            yield mesh | dict(zip(TOKEN_SPLIT_KEYS, (split, rings), strict=True))


def _slice_meshes(config: Config, inside: int, contexts: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield the axis sizes within a slice."""
    described, experts = Sizes(config), has_experts(config)
    for tensor in _divisors(inside):
        if tensor > 8 or not described.mesh.divides(described.model, {"tensor": tensor}):
            continue
        for context in contexts:
            if (inside // tensor) % context:
                continue
            remaining = inside // tensor // context
            for expert in _divisors(remaining) if experts else (1,):
                if not described.mesh.divides(described.model, {"expert": expert}):
                    continue
                for stage in _divisors(remaining // expert):
                    for fsdp in _divisors(remaining // expert // stage):
                        data = remaining // expert // stage // fsdp
                        yield {
                            "stage": stage,
                            "data": data,
                            "fsdp": fsdp,
                            "expert": expert,
                            "context": context,
                            "tensor": tensor,
                        }


def _token_splits(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[bool, bool]]:
    """Yield candidate values of `TOKEN_SPLIT_KEYS`: sequence parallelism and collective matmuls,
    each on or off.
    """
    yield False, False
    tensor, context = sizes["tensor"], sizes["context"]
    if tensor > 1 and config.train.sequence_length % (tensor * context) == 0:
        yield True, False
        yield True, True


def _pipelines(config: Config) -> tuple[Mapping[str, Any], ...]:
    """Return the pipeline options for a mesh. Cached, because many meshes share the same
    options.
    """
    sizes = Sizes(config)
    return _pipeline_options(
        sizes.mesh.stages,
        config.model.num_layers - config.pipeline.prologue_layers,
        sizes.batch.per_device,
        gathers=gathers_weights(sizes),
        rings=config.mesh.collective_matmul or uses_ring(config),
        saved_names=_saved_names(config),
    )


def _saved_names(config: Config) -> tuple[tuple[str, ...], ...]:
    """Return the values of `pipeline.saved_names` to search.

    In addition to the value in the config, the activations of MLPs and experts can be recomputed:
    either all of them, or only the outputs of the up projections. Keys and queries can be
    recomputed from their latents.
    """
    known = describe(config.model).activations
    presets = {name: names for name, names in known.items() if len(names) > 1 and name != "matmuls"}
    wide = {name for name, names in presets.items() if any(each.endswith("up") for each in names)}
    narrow = tuple(name for name in presets if name not in wide)
    gates = (each for name in presets if name in wide for each in presets[name])
    gated = (*narrow, *(each for each in gates if not each.endswith("up")))
    variants = [tuple(config.pipeline.saved_names), gated, narrow]
    if latents := tuple(name for name in known if name.endswith("latent")):
        variants.append((*latents, "context", "attention_out"))
    return tuple(dict.fromkeys(variants))


@cache
def _pipeline_options(
    stages: int,
    layers: int,
    rows: int,
    *,
    gathers: bool,
    rings: bool,
    saved_names: tuple[tuple[str, ...], ...],
) -> tuple[Mapping[str, Any], ...]:
    options: list[Mapping[str, Any]] = []
    # All stages must take part in ring attention, so idle stages must not skip their slots.
    base = {"idle": "compute"} if stages > 1 and rings else {}
    for name, repeats, group_factor in _schedules(stages, layers):
        if stages * repeats > layers:
            continue
        spec = SCHEDULES[name]
        for count in _divisors(rows):
            group = group_factor * stages
            if stages > 1 and (count < stages or group > count):
                continue
            for gather in GATHERS if gathers else ("iteration",):
                # A weight prefetch window helps only if a stage has several chunks and microbatches
                # share a gather.
                if gather == "window" and (repeats == 1 or not spec.uses_group):
                    continue
                if gather != "window" and group_factor > 1:
                    continue
                for remat, names in _remats(saved_names):
                    # A split backward pass recomputes in both I and W slots, which makes full remat
                    # too expensive.
                    if spec.split and remat in ("full", "chunk"):
                        continue
                    options.append(
                        base
                        | {
                            "schedule": name,
                            "repeats": repeats,
                            "group": group if group_factor > 1 else 0,
                            "microbatches": count,
                            "weight_gather": gather,
                            "remat": remat,
                        }
                        | ({"saved_names": list(names)} if names else {})
                    )
    return tuple(options)


def _remats(
    saved_names: tuple[tuple[str, ...], ...],
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield values of `pipeline.remat` and, for `names`, of `pipeline.saved_names`."""
    for remat in REMATS:
        if remat == "names":
            yield from ((remat, names) for names in saved_names)
        else:
            yield remat, ()


def _schedules(stages: int, layers: int) -> Iterator[tuple[str, int, int]]:
    """Yield (schedule name, repeats, group size as a multiple of the number of stages)."""
    if stages == 1:
        yield INTERLEAVED, 1, 1
        return
    even = () if layers % stages else _divisors(layers // stages)
    searched = sorted({*REPEATS, *(repeats for repeats in even if repeats <= MAX_REPEATS)})
    for name, spec in SCHEDULES.items():
        if spec.dominated:
            continue
        for repeats in (spec.repeats,) if spec.repeats else searched:
            if spec.uses_group and repeats == 1:
                continue  # same schedule table as 1F1B
            yield name, repeats, 1
            if spec.uses_group:
                yield name, repeats, 2
                yield name, repeats, 4


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(dict.fromkeys((*small, *(number // divisor for divisor in reversed(small)))))
