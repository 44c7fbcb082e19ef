"""The real train step, compiled for devices that need not be there, and what the compiler says.

Memory, operations, collectives and what they hide behind are read from the compiled program;
nothing is run. How often loops over layers turn follows from the schedule's table.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.hardware import Hardware
from maxpipe.models.count import train_flops_per_token
from maxpipe.models.layers.attention import AUTO
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model, Scores
from maxpipe.parallel import scopes
from maxpipe.parallel.mesh import AXES, BATCH_AXES, build_mesh
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.plan import memory
from maxpipe.plan.hlo_parser import parse_hlo
from maxpipe.plan.hlo_profile import Collective, HostTransfer, Profile, profile_program
from maxpipe.plan.instruction_costs import ProfileLine, profile_lines
from maxpipe.plan.memory_terms import (
    describe_largest,
    explain_out_of_memory,
    gib,
    parse_out_of_memory,
)
from maxpipe.plan.search import evaluate
from maxpipe.plan.sizes import Sizes
from maxpipe.plan.suggestions import suggest_changes
from maxpipe.plan.topology import (
    CUDNN,
    INSTALL,
    PLUGINS,
    TOPOLOGY_OPTION,
    UNTUNED_GPU_OPTIONS,
    Topology,
    are_local,
    compiler_version_error,
    resolve_config,
    topology_devices,
)
from maxpipe.schedule.table import Schedule, SlotColumns
from maxpipe.step import executable
from maxpipe.step.build import steps_from_config
from maxpipe.step.step import Steps

SLOTS = {
    "F": scopes.FORWARD,
    "B": scopes.BACKWARD,
    "I": scopes.INPUT_GRAD,
    "W": scopes.WEIGHT_GRAD,
}
"""Kind of slot -> scope of its layers in the program."""
SCOPES = (
    scopes.RECOMPUTE,
    *SLOTS.values(),
    *(scopes.HEAD, scopes.EMBED, scopes.EMBED_GRAD, scopes.SEND, scopes.GATHER, scopes.REDUCE),
    scopes.UPDATE,
)


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind over the same axes."""

    kind: str
    axes: str
    """Mesh axes that the group spans, e.g. `data+fsdp`."""
    link: str
    """`ici`, or `dcn` where the group spans slices; `host` to and from its memory."""
    asynchronous: bool
    count: float
    """Executions on one device in one step."""
    total_bytes: float
    """Sent by one device in one step."""
    cycles_behind: float
    """Estimated cycles of what is scheduled between their starts and dones."""
    flops_behind: float = 0.0
    """Operations of the matmuls and kernels there."""


@dataclass(frozen=True)
class CompileReport:
    """What the compiler says of a train step; bytes and operations are of one device."""

    topology: str
    num_devices: int
    num_slices: int
    mesh: dict[str, int]
    attention: str
    """The backend."""
    versions: dict[str, str]
    lower_seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of outputs that take the place of arguments."""
    temp_bytes: int
    """As the compiler states it: on TPUs more than is ever there at once."""
    peak_bytes: int
    """What the fullest moment of a TPU needs, arguments and outputs included, and what is in host
    memory not, all of which is taken to be there then; 0 on other devices, whose temporaries are
    one allocation. See decision 16."""
    program_bytes: int
    host_bytes: int
    """Arguments and temporaries in host memory."""
    memory_bytes: float
    """What one device has."""
    flops: float
    """Of all matmuls that run, recomputed ones included."""
    model_flops: float
    """What the model needs: forward and backward."""
    cycles: float
    """The compiler's estimate, synchronous collectives left out, and what kernels take at
    `kernel_efficiency`; 0 where it gives none."""
    pieces: dict[str, float]
    """Of `cycles` those of each piece of the program, by its name in `pipeline.scopes`."""
    kernel_flops: float
    """Of `flops`, those of kernels, for which the compiler has no estimate."""
    kernel_efficiency: float
    """Share of the peak at which these are counted."""
    seconds: float
    """The same as time."""
    collectives: list[CollectiveTraffic]
    transfers: list[CollectiveTraffic]
    """To host memory, and from there."""
    copies: int
    """Buffers copied inside loops."""
    buffers: dict[str, int]
    """Bytes of what the loop over ticks carries, part of `working_bytes`."""
    beside_bytes: int = 0
    """What a device has while the step runs that is no argument of it: the reference of rollouts,
    by arithmetic."""
    entries: list[ProfileLine] = field(default_factory=list)
    """What the busiest stages' cycles are spent on, most first; none without estimates."""
    unknown_loops: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """What the compiler leaves open, in words."""

    @property
    def total_bytes(self) -> int:
        """Needed on one device."""
        held = self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes
        return (self.peak_bytes or held) + self.program_bytes

    @property
    def working_bytes(self) -> int:
        """Of `total_bytes`, what is there neither before nor after the step."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes + self.program_bytes
        return self.total_bytes - held

    @property
    def fits(self) -> bool:
        """Whether one device has room for it."""
        return self.total_bytes + self.beside_bytes <= self.memory_bytes

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompileReport:
        """From `to_json`'s values; others among them are left alone."""
        own = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        for name in ("collectives", "transfers"):
            own[name] = [CollectiveTraffic(**each) for each in values[name]]
        own["entries"] = [ProfileLine(**each) for each in values["entries"]]
        return cls(**own)

    def to_json(self) -> dict[str, Any]:
        """Plain values, sums included."""
        found = dataclasses.asdict(self)
        moved = sum(each.total_bytes for each in self.collectives)
        return found | {
            "working_bytes": self.working_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "collective_bytes": moved,
        }


def build_steps(config: Config, present: Sequence[Any]) -> Steps:
    """The steps of a config on these devices.

    Raises:
        ConfigError: the config does not fit them.
    """
    # Only evaluation reads lengths of tokens, and it is not compiled here.
    lengths = np.ones(config.model.vocab_size, np.int32)
    return steps_from_config(config, build_mesh(config.mesh, present), lengths)


def ignore_phase(phase: str) -> None:
    """Report no phase."""


def compile_step(
    loaded: LoadedConfig,
    topology: Topology,
    save: Path | None = None,
    given: Mapping[str, str] | None = None,
    begin: Callable[[str], None] = ignore_phase,
) -> CompileReport:
    """Compiles the train step of a config for a topology; `save` is a folder to keep it in.

    `given` are options of the compiler in place of those of a run, which are left out where the
    value is empty. `begin` is called with the name of each phase.

    Raises:
        ConfigError: the config does not fit the topology, this machine cannot describe it, the
            step needs more memory than a device has, or the devices could not load what is saved.
        StorageError: the program cannot be kept there.
    """
    if save is not None:
        count, where = topology.num_devices, "command line: --save"
        action = "Leave out --save; of steps for CPUs only that of one device can be kept, cpu:1."
        executable.check_devices(topology.platform, count, where, save, action)
    present = topology_devices(topology)
    config = resolve_config(loaded, topology)
    steps = build_steps(config, present)
    untuned = topology.platform == "cuda" and not are_local(present)
    if untuned and save is not None:
        raise _save_error(save)
    start = time.monotonic()
    begin("tracing the train step")
    lowered = _lower(steps, config, topology)
    lowered_at = time.monotonic()
    options = steps.compiler_options | (dict(UNTUNED_GPU_OPTIONS) if untuned else {})
    options |= given or {}
    options = {name: value for name, value in options.items() if value != ""}
    begin("compiling the train step")
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise _out_of_memory_error(str(error), config, steps, topology) from error
        refused = _option_error(str(error), given or {}) or compiler_version_error(topology, error)
        raise refused or error from error
    done = time.monotonic()
    begin("reading the compiled program")
    if save is not None:
        facts = executable.program_metadata(to_dict(config), lowered, present)
        executable.save(compiled, save, facts)
    report = build_report(config, topology, steps, compiled)
    seconds = {"lower_seconds": lowered_at - start, "compile_seconds": done - lowered_at}
    if untuned:
        report = dataclasses.replace(
            report, unknown=_unknown_figures(report.attention, config, topology)
        )
    return dataclasses.replace(report, **seconds)


def _lower(steps: Steps, config: Config, topology: Topology) -> Any:
    try:
        return steps.lower_train()
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        given = f"attention cudnn on {topology.name}"
        rule = f"is compiled with cuDNN, which is not here: {str(error).splitlines()[0]}"
        if config.model.attention == AUTO:
            rule += " model.attention=auto chose it, as a run on such GPUs does."
        action = f"Run: {INSTALL}, which brings it; or set model.attention=blockwise."
        raise ConfigError.one("model.attention", given, rule, action) from error


def _save_error(save: Path) -> ConfigError:
    rule = "cannot keep a step for GPUs that are not here: XLA chooses a run's kernels by timing "
    rule += "them, and this one would be slower."
    action = "Leave out --save, or compile on a machine with these GPUs."
    return ConfigError.one("command line: --save", save, rule, action)


def _unknown_figures(attention: str, config: Config, topology: Topology) -> list[str]:
    """What a compiler without a GPU leaves open."""
    found = [
        "time: it estimates no cycles for GPUs",
        "kernels: none were timed (no autotuning, no Triton matmuls), so that a run's may differ, "
        "and the memory that they work in",
        "memory outside of the program: CUDA's, NCCL's",
    ]
    if attention == "cudnn":
        most = gib(memory.attention_workspace_bytes(Sizes(config).on_platform(topology.platform)))
        found.append(
            f"memory that cuDNN's attention works in: by arithmetic {most}, less where it takes "
            "the room of other temporaries"
        )
    return found


def _option_error(message: str, given: Mapping[str, str]) -> ConfigError | None:
    """What to say where the compiler does not know an option that is given, or its value."""
    name = next((name for name in given if name in message), None)
    if name is None or not message.startswith("INVALID_ARGUMENT"):
        return None
    rule = f"is not what this compiler takes: {message.partition(': ')[2].splitlines()[0]}"
    action = (
        "Leave it out, or give an option and a value of its kind, true and false for yes or no."
    )
    return ConfigError.one("command line: --xla", f"{name}={given[name]}", rule, action)


def _out_of_memory_error(
    message: str, config: Config, steps: Steps, topology: Topology
) -> ConfigError:
    shapes = {
        name: tuple(leaf.shape for leaf in leaves) for name, leaves in steps.buffer_shapes().items()
    }
    predicted = evaluate(config, topology.hardware)
    held = parse_out_of_memory(message)
    needed = f"needs {gib(held[0])}" if held else "does not fit"
    there = held[1] if held else topology.hardware.memory_bytes
    listed = explain_out_of_memory(message, shapes, steps.param_layout.mesh.shape["tensor"])
    terms = f"The compiler's largest allocations:\n{listed}"
    if not listed:
        terms = f"Largest, by arithmetic:\n{describe_largest(predicted.memory.terms)}"
    changes = suggest_changes(predicted, topology)
    action = "Name more devices, or a shorter train.sequence_length."
    if changes:
        action = f"Set {changes[0].partition(':')[0]}, or see `maxpipe plan` for other changes."
    rule = f"has {gib(there)} on a device, and the step {needed}. {terms}"
    return ConfigError.one(TOPOLOGY_OPTION, topology.name, rule, action)


def build_report(config: Config, topology: Topology, steps: Steps, compiled: Any) -> CompileReport:
    """What the compiler says of a compiled train step; how long that took is left at 0."""
    mesh, stated = steps.param_layout.mesh, compiled.memory_analysis()
    on_host = stated.host_temp_size_in_bytes + stated.host_argument_size_in_bytes
    found, busiest = profile_step(compiled.as_text(), steps, config.pipeline.weight_gather)
    rows, tokens = steps.shape
    clock = topology.hardware.clock_ghz * 1e9
    needed = train_flops_per_token(describe(config.model), tokens) * rows * tokens / mesh.size
    cycles = busiest.cycles + kernel_cycles(busiest, topology.hardware)
    sizes = Sizes(config).on_platform(topology.platform)
    return CompileReport(
        topology=topology.name,
        num_devices=topology.num_devices,
        num_slices=topology.num_slices,
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        attention=steps.param_layout.decoder.config.attention,
        versions=versions(),
        lower_seconds=0.0,
        compile_seconds=0.0,
        argument_bytes=stated.argument_size_in_bytes,
        output_bytes=stated.output_size_in_bytes,
        alias_bytes=stated.alias_size_in_bytes,
        temp_bytes=stated.temp_size_in_bytes,
        # XLA's peak is that of all memories together.
        peak_bytes=stated.peak_memory_in_bytes - on_host if topology.platform == "tpu" else 0,
        program_bytes=stated.generated_code_size_in_bytes,
        host_bytes=on_host,
        memory_bytes=topology.hardware.memory_bytes,
        flops=found.flops,
        model_flops=needed,
        cycles=cycles,
        pieces=_cycles_by_region(busiest, topology.hardware),
        kernel_flops=found.kernel_flops,
        kernel_efficiency=topology.hardware.kernel_efficiency,
        seconds=cycles / clock if clock else 0.0,
        collectives=collective_traffic(found.collectives, mesh),
        transfers=host_traffic(found.transfers),
        copies=len(found.copies),
        buffers={
            name: round(held) for name, held in memory.buffers(sizes, steps.train_schedule).items()
        },
        beside_bytes=round(memory.reference(sizes)),
        entries=profile_lines(busiest, topology.hardware),
        unknown_loops=found.unknown_loops,
    )


def kernel_cycles(found: Profile, hardware: Hardware) -> float:
    """What kernels take, which have no estimate, at the share of the peak that is assumed."""
    seconds = found.kernel_flops / (hardware.flops * hardware.kernel_efficiency)
    return seconds * hardware.clock_ghz * 1e9


def _cycles_by_region(found: Profile, hardware: Hardware) -> dict[str, float]:
    """Cycles by region, kernels' as above."""
    cycles: dict[str, float] = {}
    for name in sorted({each.region for each in found.entries if each.region}):
        mine = Profile([each for each in found.entries if each.region == name])
        cycles[name] = mine.cycles + kernel_cycles(mine, hardware)
    return cycles


def versions() -> dict[str, str]:
    """Of everything that decides what a program is compiled to."""
    found = {}
    for name in ("maxpipe", "jax", "jaxlib", "libtpu", *PLUGINS, *CUDNN):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def profile_step(text: str, steps: Steps, weight_gather: str) -> tuple[Profile, Profile]:
    """Costs of a compiled train step: of the average stage, and along the busiest ones.

    Work and traffic are the first's; time is the second's, because stages wait for each other.
    """
    module = parse_hlo(text)

    windows = window_shares(steps.param_layout.decoder.model)

    def costs(average: bool) -> Profile:
        trips, shares = executions(steps, weight_gather, average=average)
        return profile_program(
            module,
            trips=trips,
            shares=shares,
            windows=windows,
            regions={scope: f"/{scope}/" for scope in SCOPES},
            copy_bytes=2 * _activation_bytes(steps),
        )

    return costs(average=True), costs(average=False)


def window_shares(model: Model) -> dict[int, float]:
    """Size of a window, 0 for none -> share of the layers with it, of those that score pairs."""
    found: Counter[int] = Counter()
    for layer, kind in enumerate(model.all_layers):
        for part in model.layer_types[kind].parts.values():
            for each in part.operations:
                if isinstance(each, Scores):
                    size = model.values[each.window][layer] if each.window else 0
                    found[int(size)] += 1
    return {size: count / found.total() for size, count in found.items()}


def _activation_bytes(steps: Steps) -> int:
    """Of what a stage hands to the next."""
    rows, tokens = steps.shape
    mesh, width = steps.param_layout.mesh, steps.param_layout.decoder.config.d_model
    mine = rows // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    size = steps.engine.network.compute_dtype.itemsize
    return (
        mine
        // steps.train_schedule.num_microbatches
        * tokens
        // mesh.shape["context"]
        * width
        * size
    )


def executions(
    steps: Steps, weight_gather: str, *, average: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """(mean trips of each loop whose trips are data, share of each conditional that works).

    Layers of a tick are those of the average stage, or of the busiest one.
    """
    schedule, layout = steps.train_schedule, steps.engine.layout
    trips: dict[str, float] = {}
    outside, embed, embed_grad = f"/{scopes.PROLOGUE}", scopes.EMBED, scopes.EMBED_GRAD
    if layout.num_prologue_layers:
        front, rounds = layout.prologue, schedule.prologue
        for scope, column in (
            (scopes.FORWARD, rounds.forward),
            (scopes.BACKWARD, rounds.backward),
        ):
            share = float((np.asarray(column) >= 0).mean())
            trips |= _layer_type_trips(f"{outside}/{scope}/", front)
            trips[_layer_loop(f"{outside}/{scope}/")] = layout.num_prologue_layers * share
    per_tick = _layers_per_tick(schedule, layout.chunk_sizes, average)
    for action, turns in per_tick.items():
        trips |= _layer_type_trips(f"/{SLOTS[action]}/", layout)
        trips[_layer_loop(f"/{SLOTS[action]}/")] = turns
    if (heads := steps.param_layout.decoder.model.ends.mtp_layers) is not None:
        trips[rf"/{scopes.MTP}/while$"] = heads.num_heads
    visits = schedule.weight_window
    if weight_gather == "visit" and visits.num_chunk_slots:
        turns = len(visits.gather_tick) + 1
        last = visits.gather_tick[-1]
        reduced = int(np.count_nonzero(visits.reduce_tick <= last))
        trips[rf"/{scopes.TICKS}/while$"] = schedule.num_ticks / turns
        for kind in layout.ring_layer_types:
            layers, loop = (
                layout.stacks[kind].max_layers_per_chunk,
                f"{scopes.REDUCE}/{scopes.layer_type(kind)}",
            )
            trips[rf"/body/.*{loop}/while$"] = layers * reduced / turns
            trips[rf"/{loop}/while$"] = layers * (len(visits.reduce_tick) - reduced)
    shares = {
        rf"/{scopes.HEAD}/cond$": schedule.loss_microbatch,
        rf"/{embed}/cond$": schedule.embed_microbatch,
        rf"/{embed_grad}/cond$": schedule.embed_grad_microbatch,
    }
    if layout.num_prologue_layers:
        shares = {
            rf"{outside}/{embed}/cond$": schedule.prologue.forward,
            rf"{outside}/{embed_grad}/cond$": schedule.prologue.backward,
            # To the ring and back: as many microbatches leave as enter.
            rf"{outside}/{scopes.SEND}/cond$": schedule.embed_microbatch,
        } | shares
    return trips, {name: float((np.asarray(column) >= 0).mean()) for name, column in shares.items()}


def _layer_loop(scope: str) -> str:
    """Pattern of the loop over a chunk's layers in a scope."""
    return rf"{scope}({scopes.RECOMPUTE}/)?while$"


def _layer_type_trips(scope: str, layout: LayerLayout) -> dict[str, float]:
    """Mean trips of the loops inside it that run a layer, or none, of one kind."""
    kinds = layout.layer_type_at[layout.layer_at >= 0]
    if len(layout.ring_layer_types) == 1:
        return {}
    return {
        rf"{scope}.*/{scopes.layer_type(name)}/while$": float((kinds == number).mean())
        for number, name in enumerate(layout.ring_layer_types)
    }


def _layers_per_tick(schedule: Schedule, sizes: np.ndarray, average: bool) -> dict[str, float]:
    """Mean turns of the loop over layers in each kind of slot."""
    stages = np.arange(schedule.num_stages)

    def layers(slots: SlotColumns) -> np.ndarray:
        found = np.where(slots.active, sizes[np.maximum(slots.repeat, 0), stages], 0)
        return found.mean(axis=1) if average else found.max(axis=1)

    turns = {kind: layers(slots) for kind, slots in schedule.kinds}
    if schedule.mixed and not average:
        # Stages do different kinds of work in a tick: the longest counts, the others run beside it.
        longest = np.argmax([turns[kind] * weight for kind, weight in _LENGTH.items()], axis=0)
        for place, kind in enumerate(_LENGTH):
            turns[kind] = np.where(longest == place, turns[kind], 0)
    return {kind: float(column.mean()) for kind, column in turns.items()}


_LENGTH = {"F": 1.0, "I": 1.3, "W": 1.0}
"""How long a layer takes in the kinds of slots of a mixed tick, roughly: only the order counts."""


def collective_traffic(found: Sequence[Collective], mesh: Any) -> list[CollectiveTraffic]:
    """Collectives by kind, axes and link, most bytes first."""
    placed = list(mesh.devices.flat)
    place_of = {device.id: place for place, device in enumerate(placed)}
    slices = np.array([_slice_index(device) for device in placed])
    grouped: dict[tuple[str, str, str, bool], list[Collective]] = {}
    for each in found:
        group = [place_of[member] for member in each.group] if each.between_slices else each.group
        members = np.array([member for member in group if member < len(placed)])
        if len(members) < 2:
            continue
        places = np.array(np.unravel_index(members, mesh.devices.shape))
        axes = [axis for axis, row in zip(AXES, places, strict=True) if len(set(row)) > 1]
        link = "dcn" if len(set(slices[members])) > 1 else "ici"
        grouped.setdefault((each.kind, "+".join(axes), link, each.is_async), []).append(each)
    result = [
        CollectiveTraffic(
            *key,
            count=sum(each.count for each in group),
            total_bytes=sum(each.total_bytes for each in group),
            cycles_behind=sum(each.cycles_between * each.count for each in group),
            flops_behind=sum(each.flops_between * each.count for each in group),
        )
        for key, group in grouped.items()
    ]
    return sorted(result, key=lambda each: -each.total_bytes)


def host_traffic(found: Sequence[HostTransfer]) -> list[CollectiveTraffic]:
    """What goes to host memory and what comes from there; cycles that several share count once."""
    result = []
    for kind in dict.fromkeys(each.kind for each in found):
        group = [each for each in found if each.kind == kind]
        behind = {
            name: cycles * each.count
            for each in group
            for name, cycles in each.cycles_by_instruction.items()
        }
        result.append(
            CollectiveTraffic(
                kind,
                axes="",
                link="host",
                asynchronous=True,
                count=sum(each.count for each in group),
                total_bytes=sum(each.num_bytes * each.count for each in group),
                cycles_behind=sum(behind.values()),
            )
        )
    return result


def _slice_index(device: Any) -> int:
    """Of GPUs that are not here each slice is a process of its own."""
    if getattr(device, "platform", "") == "gpu":
        return device.process_index
    return getattr(device, "slice_index", 0) or 0
