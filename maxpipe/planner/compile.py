"""Compile the train step ahead of time for absent devices, and report its costs.

Memory, operations, collectives and their overlap with compute are read from the compiled program.
The program is not executed. The trip counts of loops over layers are computed from the schedule
table.
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
from maxpipe.errors import Code, ConfigError
from maxpipe.hardware import Hardware
from maxpipe.io.typed_json import to_dataclass
from maxpipe.models.count import train_flops_per_token
from maxpipe.models.layers.attention import AUTO
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model, Scores
from maxpipe.parallel import scopes
from maxpipe.parallel.mesh import AXES, BATCH_AXES, build_mesh
from maxpipe.pipeline.layout import LayerLayout
from maxpipe.planner import memory
from maxpipe.planner.hlo_parser import parse_hlo
from maxpipe.planner.hlo_profile import (
    Collective,
    HostTransfer,
    Profile,
    mesh_axes_of,
    profile_program,
)
from maxpipe.planner.instruction_costs import ProfileLine, all_cycles, kernel_cycles, profile_lines
from maxpipe.planner.memory_terms import (
    describe_largest,
    explain_out_of_memory,
    gib,
    is_out_of_device_memory,
    parse_out_of_memory,
)
from maxpipe.planner.search import evaluate, suggest_changes
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.topology import (
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


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one type over the same mesh axes."""

    kind: str
    axes: str
    """Mesh axes that the group spans, e.g. `data+fsdp`."""
    link: str
    """Link type: `ici` within a slice, `dcn` if the group spans slices, or `host` for transfers to
    and from host memory."""
    asynchronous: bool
    count: float
    """Number of executions per device and step."""
    total_bytes: float
    """Bytes sent per device and step."""
    cycles_behind: float
    """Estimated cycles of the instructions scheduled between the start and the end of the
    collectives."""
    flops_behind: float = 0.0
    """FLOPs of the matmuls and kernels scheduled between the start and the end of the
    collectives."""


@dataclass(frozen=True)
class CompileReport:
    """Compiler report for a train step. Bytes and FLOPs are per device."""

    topology: str
    num_devices: int
    num_slices: int
    mesh: dict[str, int]
    attention: str
    """Attention backend of the compiled step."""
    versions: dict[str, str]
    lower_seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Size in bytes of the outputs that alias arguments."""
    temp_bytes: int
    """Temporary memory in bytes, as reported by the compiler. On TPUs, this size exceeds the actual
    peak."""
    peak_bytes: int
    """Peak memory in bytes on a TPU, including arguments and outputs. Host memory is excluded,
    because all host allocations are assumed to be live at the peak. On other devices the value is
    0, because all temporaries form a single allocation. See decision 16."""
    program_bytes: int
    host_bytes: int
    """Bytes of arguments and temporaries in host memory."""
    memory_bytes: float
    """Memory capacity of one device."""
    flops: float
    """Total FLOPs of all executed matmuls, including recomputation."""
    model_flops: float
    """FLOPs that the model requires for the forward and backward passes."""
    cycles: float
    """Cycles estimated by the compiler, excluding synchronous collectives, plus the cycles of
    custom kernels at their expected rates. The value is 0 if the compiler provides no cycle
    estimate."""
    pieces: dict[str, float]
    """Cycles of each program region; included in `cycles`. The region names are defined in
    `parallel.scopes`."""
    kernel_flops: float
    """FLOPs of custom kernels; included in `flops`. The compiler has no cycle estimate for
    kernels."""
    kernel_efficiency: float
    """Fraction of peak FLOP/s that custom kernels are expected to reach."""
    seconds: float
    """`cycles` converted to seconds."""
    collectives: list[CollectiveTraffic]
    transfers: list[CollectiveTraffic]
    """Transfers to and from host memory."""
    copies: int
    """Number of buffer copies inside loops."""
    buffers: dict[str, int]
    """Size in bytes of the buffers carried by the tick loop; included in `working_bytes`."""
    beside_bytes: int = 0
    """Calculated bytes of device memory held during the step but not passed as arguments: GRPO's
    reference parameters."""
    entries: list[ProfileLine] = field(default_factory=list)
    """Operations on the busiest stages in descending order of cycles; empty without cycle
    estimates."""
    unknown_loops: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Descriptions of the costs that the compiler cannot determine."""

    @property
    def total_bytes(self) -> int:
        """Return the memory in bytes that the step needs on one device."""
        held = self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes
        return (self.peak_bytes or held) + self.program_bytes

    @property
    def working_bytes(self) -> int:
        """Return the bytes allocated only while the step runs; included in `total_bytes`."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes + self.program_bytes
        return self.total_bytes - held

    @property
    def exposed_seconds(self) -> float:
        """Return the time in seconds of the communication that does not overlap with compute, at
        the published link bandwidth. The value is 0 without cycle estimates.
        """
        exposed = sum(line.cycles for line in self.entries if line.is_exposed)
        return self.seconds * exposed / self.cycles if self.cycles else 0.0

    @property
    def asynchronous_share(self) -> float:
        """Return the fraction of the sent bytes whose collectives the compiler overlaps with other
        instructions.
        """
        sent = sum(traffic.total_bytes for traffic in self.collectives)
        overlapped = sum(each.total_bytes for each in self.collectives if each.asynchronous)
        return overlapped / sent if sent else 0.0

    @property
    def fits(self) -> bool:
        """Return whether the step fits in the memory of one device."""
        return self.total_bytes + self.beside_bytes <= self.memory_bytes

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompileReport:
        """Create a report from the result of `to_json`. Unknown keys are ignored.

        Raises:
            ValueError: a value is missing or negative, or has a wrong type.
        """
        report = to_dataclass(values, cls)
        numbers = {**dataclasses.asdict(report), **report.pieces, **report.buffers}
        if any(isinstance(number, int | float) and number < 0 for number in numbers.values()):
            raise ValueError("it contains a negative number")
        return report

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data, including totals."""
        fields = dataclasses.asdict(self)
        moved = sum(each.total_bytes for each in self.collectives)
        return fields | {
            "working_bytes": self.working_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "exposed_seconds": self.exposed_seconds,
            "collective_bytes": moved,
        }


def build_steps(config: Config, present: Sequence[Any]) -> Steps:
    """Build a config's train and evaluation steps for these devices.

    Raises:
        ConfigError: the config does not match the devices.
    """
    # Token byte lengths are needed only for evaluation, which is not compiled here.
    lengths = np.ones(config.model.vocab_size, np.int32)
    return steps_from_config(config, build_mesh(config.mesh, present), lengths)


def ignore_phase(phase: str) -> None:
    """Do nothing; this is the default phase callback."""


@dataclass(frozen=True)
class LoweredStep:
    """A train step that was traced for the devices of a topology but not yet compiled."""

    config: Config
    topology: Topology
    steps: Steps
    devices: Sequence[Any]
    program: Any
    """Lowered program of jax."""
    seconds: float
    """Duration of tracing."""

    @property
    def is_untuned(self) -> bool:
        """Return whether the compiler selects kernels for absent GPUs, without timing them."""
        return self.topology.platform == "cuda" and not are_local(self.devices)

    def compile(self, given: Mapping[str, str] | None = None) -> Any:
        """Compile the step. `given` overrides the run's compiler options; see `compile_step`.

        Raises:
            ConfigError: the compiler rejects an option, or the step does not fit in memory.
        """
        options = dict(self.steps.compiler_options)
        options |= UNTUNED_GPU_OPTIONS if self.is_untuned else {}
        options |= given or {}
        try:
            return self.program.compile(
                {name: value for name, value in options.items() if value != ""}
            )
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_device_memory(error):
                raise _out_of_memory_error(
                    str(error), self.config, self.steps, self.topology
                ) from error
            refused = _option_error(str(error), given or {})
            raise refused or compiler_version_error(self.topology, error) or error from error


def lower_step(
    loaded: LoadedConfig, topology: Topology, begin: Callable[[str], None] = ignore_phase
) -> LoweredStep:
    """Trace a config's train step for the devices of a topology.

    Raises:
        ConfigError: the config does not match the topology, or no compiler for the topology is
            installed.
    """
    present = topology_devices(topology)
    config = resolve_config(loaded, topology)
    steps = build_steps(config, present)
    start = time.monotonic()
    begin("tracing the train step")
    program = _lower(steps, config, topology)
    return LoweredStep(config, topology, steps, present, program, time.monotonic() - start)


def compile_step(
    loaded: LoadedConfig,
    topology: Topology,
    save: Path | None = None,
    given: Mapping[str, str] | None = None,
    begin: Callable[[str], None] = ignore_phase,
) -> CompileReport:
    """Compile a config's train step for a topology. If `save` is set, save the program to that
    folder.

    `given` overrides the run's compiler options. An empty value removes an option. `begin` is
    called with the name of each phase.

    Raises:
        ConfigError: the config does not match the topology, no compiler for the topology is
            installed, the step does not fit in memory, or the compiled program could not be loaded
            later.
        StorageError: the program cannot be saved.
    """
    if save is not None:
        count, where = topology.num_devices, "command line: --save"
        action = "Remove --save, or use cpu:1: CPU steps can be saved only for a single device."
        executable.check_devices(topology.platform, count, where, save, action)
    lowered = lower_step(loaded, topology, begin)
    if lowered.is_untuned and save is not None:
        raise _save_error(save)
    begin("compiling the train step")
    start = time.monotonic()
    compiled = lowered.compile(given)
    seconds = time.monotonic() - start
    begin("reading the compiled program")
    config, steps = lowered.config, lowered.steps
    if save is not None:
        facts = executable.program_metadata(to_dict(config), lowered.program, lowered.devices)
        executable.save(compiled, save, facts)
    report = build_report(config, topology, steps, compiled)
    if lowered.is_untuned:
        report = dataclasses.replace(
            report, unknown=_unknown_figures(report.attention, config, topology)
        )
    return dataclasses.replace(report, lower_seconds=lowered.seconds, compile_seconds=seconds)


def _lower(steps: Steps, config: Config, topology: Topology) -> Any:
    try:
        return steps.lower_train()
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        given = f"attention cudnn on {topology.name}"
        rule = f"requires cuDNN, which is not installed: {str(error).splitlines()[0]}"
        if config.model.attention == AUTO:
            rule += " model.attention=auto selects cuDNN on these GPUs."
        action = f"Run: {INSTALL}, which includes cuDNN; or set model.attention=blockwise."
        raise ConfigError.one(Code.PLAN_COMPILER, "model.attention", given, rule, action) from error


def _save_error(save: Path) -> ConfigError:
    rule = "cannot save a step for absent GPUs: XLA selects kernels by timing them on the GPU, so "
    rule += "this program would be slower."
    action = "Remove --save, or compile on a machine with these GPUs."
    return ConfigError.one(Code.RUN_COMPILED_STEP, "command line: --save", save, rule, action)


def _unknown_figures(attention: str, config: Config, topology: Topology) -> list[str]:
    """Return descriptions of the costs that the compiler cannot determine without a GPU."""
    found = [
        "time: the compiler has no cycle estimates for GPUs",
        "kernels: without a GPU, XLA can neither autotune nor use Triton matmuls, so a run may use "
        "different kernels and workspace sizes",
        "memory that CUDA and NCCL allocate outside the program",
    ]
    if attention == "cudnn":
        most = gib(memory.attention_workspace_bytes(Sizes(config).on_platform(topology.platform)))
        found.append(
            f"cuDNN attention workspace: calculated as {most}, or less if it shares memory with "
            "other temporaries"
        )
    return found


def _option_error(message: str, given: Mapping[str, str]) -> ConfigError | None:
    """Return the error for a compiler option that is unknown or whose value is invalid."""
    name = next((name for name in given if name in message), None)
    if name is None or not message.startswith("INVALID_ARGUMENT"):
        return None
    rule = f"must be an option of this compiler: {message.partition(': ')[2].splitlines()[0]}"
    action = "Remove the option, or set a value of its type, such as true or false."
    return ConfigError.one(
        Code.CLI_VALUE, "command line: --xla", f"{name}={given[name]}", rule, action
    )


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
    terms = f"Largest allocations reported by the compiler:\n{listed}"
    if not listed:
        terms = f"Largest predicted terms:\n{describe_largest(predicted.memory.terms)}"
    changes = suggest_changes(predicted, topology)
    action = "Use more devices, or a shorter train.sequence_length."
    if changes:
        action = f"Set {changes[0].partition(':')[0]}, or see `maxpipe plan` for other changes."
    rule = f"has {gib(there)} per device, but the step {needed}. {terms}"
    return ConfigError.one(Code.MEM_PREDICTED, TOPOLOGY_OPTION, topology.name, rule, action)


def build_report(config: Config, topology: Topology, steps: Steps, compiled: Any) -> CompileReport:
    """Build the report of a compiled train step, with compile times set to 0."""
    mesh, stated = steps.param_layout.mesh, compiled.memory_analysis()
    on_host = stated.host_temp_size_in_bytes + stated.host_argument_size_in_bytes
    found, busiest = profile_step(compiled.as_text(), steps, config.pipeline.weight_gather)
    rows, tokens = steps.shape
    clock = topology.hardware.clock_ghz * 1e9
    needed = train_flops_per_token(describe(config.model), tokens) * rows * tokens / mesh.size
    in_kernels = kernel_cycles(busiest, topology.hardware)
    cycles = all_cycles(busiest, topology.hardware)
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
        # The peak reported by XLA includes host memory.
        peak_bytes=stated.peak_memory_in_bytes - on_host if topology.platform == "tpu" else 0,
        program_bytes=stated.generated_code_size_in_bytes,
        host_bytes=on_host,
        memory_bytes=topology.hardware.memory_bytes,
        flops=found.flops,
        model_flops=needed,
        cycles=cycles,
        pieces=_cycles_by_region(busiest, topology.hardware),
        kernel_flops=found.kernel_flops,
        kernel_efficiency=(
            busiest.kernel_flops / topology.hardware.flops / in_kernels * clock
            if in_kernels
            else topology.hardware.kernel_efficiency
        ),
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


def _cycles_by_region(found: Profile, hardware: Hardware) -> dict[str, float]:
    """Return the cycles of each program region, including custom kernels."""
    cycles: dict[str, float] = {}
    for name in sorted({entry.region for entry in found.entries if entry.region}):
        region = Profile([entry for entry in found.entries if entry.region == name])
        cycles[name] = all_cycles(region, hardware)
    return cycles


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect the compiled program."""
    installed = {}
    for name in ("maxpipe", "jax", "jaxlib", "libtpu", *PLUGINS, *CUDNN):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def profile_step(text: str, steps: Steps, weight_gather: str) -> tuple[Profile, Profile]:
    """Profile a compiled train step, once for the average stage and once for the busiest stages.

    The average stage determines work and communication; the busiest stages determine time, because
    stages wait for each other.
    """
    module, windows = parse_hlo(text), window_shares(steps.param_layout.decoder.model)

    def costs(average: bool) -> Profile:
        trips, shares = executions(steps, weight_gather, average=average)
        return profile_program(
            module,
            trips=trips,
            shares=shares,
            windows=windows,
            regions={scope: f"/{scope}/" for scope in scopes.REGIONS},
            copy_bytes=2 * _activation_bytes(steps),
        )

    return costs(average=True), costs(average=False)


def window_shares(model: Model) -> dict[int, float]:
    """Map each attention window size to the fraction of attention layers that use it. 0 means no
    window.
    """
    counts: Counter[int] = Counter()
    for layer, kind in enumerate(model.all_layers):
        for part in model.layer_types[kind].parts.values():
            for operation in part.operations:
                if isinstance(operation, Scores):
                    size = model.values[operation.window][layer] if operation.window else 0
                    counts[int(size)] += 1
    return {size: count / counts.total() for size, count in counts.items()}


def _activation_bytes(steps: Steps) -> int:
    """Return the size in bytes of an activation sent between two stages."""
    rows, tokens = steps.shape
    mesh, width = steps.param_layout.mesh, steps.param_layout.decoder.model.stream_width
    sequences = rows // math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    tokens *= sequences // steps.train_schedule.num_microbatches
    itemsize = steps.engine.network.compute_dtype.itemsize
    return tokens // mesh.shape["context"] * width * itemsize


def executions(
    steps: Steps, weight_gather: str, *, average: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean trip counts of dynamic loops, and the execution frequency of each conditional
    branch.

    Trip counts are computed from either the average or the busiest stage. The second dictionary
    contains the fraction of ticks in which each conditional branch is executed.
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
        trips |= _layer_type_trips(f"/{scopes.SLOTS[action]}/", layout)
        trips[_layer_loop(f"/{scopes.SLOTS[action]}/")] = turns
    if (heads := steps.param_layout.decoder.model.ends.mtp_layers) is not None:
        trips[rf"/{scopes.MTP}/while$"] = heads.num_heads
    visits = schedule.weight_window
    if weight_gather == "window" and visits.num_chunk_slots:
        turns = len(visits.gather_tick) + 1
        last = visits.gather_tick[-1]
        reduced = int(np.count_nonzero(visits.reduce_tick <= last))
        trips[rf"/{scopes.TICKS}/while$"] = schedule.num_ticks / turns
        for kind in layout.ring_layer_types:
            layers = layout.stacks[kind].max_layers_per_chunk
            loop = f"{scopes.REDUCE}/{scopes.layer_type(kind)}"
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
            # The number of microbatches leaving the pipeline equals the number entering it.
            rf"{outside}/{scopes.SEND}/cond$": schedule.embed_microbatch,
        } | shares
    return trips, {name: float((np.asarray(column) >= 0).mean()) for name, column in shares.items()}


def _layer_loop(scope: str) -> str:
    """Return the pattern that matches the `op_name` of the loop over a chunk's layers in a
    scope.
    """
    return rf"{scope}({scopes.RECOMPUTE}/)?while$"


def _layer_type_trips(scope: str, layout: LayerLayout) -> dict[str, float]:
    """Return the mean trip count of each layer type's inner loop, which runs at most one layer."""
    kinds = layout.layer_type_at[layout.layer_at >= 0]
    if len(layout.ring_layer_types) == 1:
        return {}
    return {
        rf"{scope}.*/{scopes.layer_type(name)}/while$": float((kinds == number).mean())
        for number, name in enumerate(layout.ring_layer_types)
    }


def _layers_per_tick(schedule: Schedule, sizes: np.ndarray, average: bool) -> dict[str, float]:
    """Return the mean trip count of the loop over layers, keyed by slot type."""
    stages = np.arange(schedule.num_stages)

    def layers(slots: SlotColumns) -> np.ndarray:
        run = np.where(slots.active, sizes[np.maximum(slots.repeat, 0), stages], 0)
        return run.mean(axis=1) if average else run.max(axis=1)

    turns = {kind: layers(slots) for kind, slots in schedule.kinds}
    if schedule.mixed and not average:
        # Stages run different slot types in the same tick. The longest slot determines the tick's
        # duration.
        longest = np.argmax([turns[kind] * weight for kind, weight in _LENGTH.items()], axis=0)
        for place, kind in enumerate(_LENGTH):
            turns[kind] = np.where(longest == place, turns[kind], 0)
    return {kind: float(column.mean()) for kind, column in turns.items()}


_LENGTH = {"F": 1.0, "I": 1.3, "W": 1.0}
"""Approximate relative duration of a layer in a mixed tick, keyed by slot type. Only the ratios
between slot types matter."""


def collective_traffic(found: Sequence[Collective], mesh: Any) -> list[CollectiveTraffic]:
    """Group collectives by type, axes and link, sorted by bytes in descending order."""
    placed = list(mesh.devices.flat)
    place_of = {device.id: place for place, device in enumerate(placed)}
    slices = np.array([_slice_index(device) for device in placed])
    sizes: dict[str, int] = dict(zip(AXES, mesh.devices.shape, strict=True))
    grouped: dict[tuple[str, str, str, bool], list[Collective]] = {}
    for each in found:
        group = [place_of[member] for member in each.group] if each.between_slices else each.group
        members = np.array([member for member in group if member < len(placed)])
        if len(members) < 2:
            continue
        axes = mesh_axes_of(members, sizes)
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
    """Sum the transfers to and from host memory. Cycles shared by several transfers are counted
    once.
    """
    result = []
    for kind in dict.fromkeys(transfer.kind for transfer in found):
        group = [transfer for transfer in found if transfer.kind == kind]
        behind = {
            name: cycles * transfer.count
            for transfer in group
            for name, cycles in transfer.cycles_by_instruction.items()
        }
        result.append(
            CollectiveTraffic(
                kind,
                axes="",
                link="host",
                asynchronous=True,
                count=sum(transfer.count for transfer in group),
                total_bytes=sum(transfer.num_bytes * transfer.count for transfer in group),
                cycles_behind=sum(behind.values()),
            )
        )
    return result


def _slice_index(device: Any) -> int:
    """Return the slice index of a device. Every slice of absent GPUs is treated as a separate
    process.
    """
    if getattr(device, "platform", "") == "gpu":
        return device.process_index
    return getattr(device, "slice_index", 0) or 0
