"""Files of a profile: the trace, the compiled program, and the metadata of the run.

A profile is the folder `profiles/step_000100` of a run. XProf and TensorBoard read the traces in
its folder `plugins/profile/TIME`.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import re
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from maxpipe.config.config_files import PROFILES_FOLDER
from maxpipe.errors import Code, ConfigError
from maxpipe.io import files
from maxpipe.io.typed_json import check_type, parse_json
from maxpipe.profiles.program import Program
from maxpipe.profiles.trace import DeviceTrace, Trace, read_trace
from maxpipe.schedule.table import ActionKind, Schedule

METADATA_FILE, PROGRAM_FILE = "profile.json", "train_step.hlo.gz"
TIMELINE_FILE, PICTURE_FILE, PERFETTO_FILE = "timeline.json", "timeline.svg", "perfetto.json"
MEMORY_FILE, REPORT_FILE = "memory.json", "report.json"
_TRACES = "plugins/profile"
_T = TypeVar("_T")
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class SlotTable:
    """Slots of one type in a schedule table: lists `[K][P]`."""

    kind: ActionKind
    microbatch: list[list[int]]
    """Microbatch index, or -1 if idle."""
    repeat: list[list[int]]


@dataclass(frozen=True)
class TableRecord:
    """Schedule table of a profiled step."""

    name: str
    num_stages: int
    num_repeats: int
    num_microbatches: int
    mixed: bool
    """Whether a tick is a single action of any type instead of a sequence of slots."""
    chunks: list[list[int]]
    """Network index of the chunk of each repeat and stage, `[R][P]`."""
    chunk_costs: list[list[float]]
    """Planned cost of each chunk relative to the mean chunk, `[R][P]`."""
    chunk_layers: list[list[int]]
    """Number of layers of each chunk, `[R][P]`."""
    slots: list[SlotTable]
    planned_bubble: float
    """Planned fraction of a step during which stages are idle, if all slots of a type have equal
    durations and F, I and W are equally long."""

    @classmethod
    def from_schedule(
        cls, schedule: Schedule, chunk_costs: np.ndarray, chunk_layers: np.ndarray
    ) -> TableRecord:
        """Return the record of a schedule; costs and layers are arrays `[R, P]`."""
        ring = schedule.ring
        repeats, stages = range(ring.num_repeats), range(ring.num_stages)
        return cls(
            schedule.name,
            ring.num_stages,
            ring.num_repeats,
            schedule.num_microbatches,
            schedule.mixed,
            [[ring.chunk(stage, repeat) for stage in stages] for repeat in repeats],
            (chunk_costs / chunk_costs.mean()).tolist(),
            chunk_layers.tolist(),
            [
                SlotTable(kind, slots.microbatch.tolist(), slots.repeat.tolist())
                for kind, slots in schedule.kinds
            ],
            schedule.idle_fraction(),
        )

    @property
    def num_ticks(self) -> int:
        """Return the number of ticks (K)."""
        return len(self.slots[0].microbatch)

    @cached_property
    def active(self) -> dict[str, np.ndarray]:
        """Return whether each slot contains work, as bool arrays `[K, P]`."""
        return {each.kind: np.array(each.microbatch) >= 0 for each in self.slots}

    @cached_property
    def planned_costs(self) -> dict[str, np.ndarray]:
        """Return the planned relative cost of each slot, as arrays `[K, P]`; 0 if idle."""
        costs, stages = np.array(self.chunk_costs), np.arange(self.num_stages)
        return {
            each.kind: costs[np.maximum(np.array(each.repeat), 0), stages] * self.active[each.kind]
            for each in self.slots
        }


@dataclass(frozen=True)
class Metadata:
    """Metadata of a profile."""

    step: int
    """First profiled step."""
    num_steps: int
    reason: str
    """Reason for the profile: `config`, `signal` or `slow step`."""
    platform: str
    module: str
    mesh: dict[str, int]
    """Size of each mesh axis, outermost first."""
    devices: list[list[int]]
    """Process index and local index of each device, in mesh order."""
    shares_cores: bool
    """Whether the devices are virtual CPU devices, which share the cores of a host."""
    table: TableRecord
    step_seconds: float
    """Mean wall time of the profiled steps, without pauses."""
    wait_seconds: float
    """Mean time for which a profiled step waited for its batch."""
    median_seconds: float = 0.0
    """Median time of earlier steps that were not profiled; 0 if unknown."""
    forecast_seconds: float = 0.0
    """Step time that the planner predicts; 0 without a prediction."""
    paused_seconds: float = 0.0
    """Mean time per step of the pauses between profiled steps, such as evaluations, checkpoints and
    rollouts."""

    def to_json(self) -> dict[str, Any]:
        """Return the metadata as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Capture:
    """A profile that has been written to disk."""

    folder: Path
    metadata: Metadata
    program: Program
    traces: dict[int, Trace]
    """Trace of each process, keyed by process index."""
    memory: dict[str, float]
    """Memory of one device by kind, in bytes."""

    @property
    def platform(self) -> str:
        """Return the platform of the devices: `tpu`, `gpu` or `cpu`."""
        return next((trace.platform for trace in self.traces.values()), self.metadata.platform)

    @cached_property
    def devices(self) -> dict[int, DeviceTrace]:
        """Return the events of each device whose trace exists, keyed by position in the mesh."""
        found = {}
        for position, (process, local) in enumerate(self.metadata.devices):
            trace = self.traces.get(process)
            if trace is not None and local in trace.devices:
                found[position] = trace.devices[local]
        return found

    def stage_of(self, position: int) -> int:
        """Return the stage of a device."""
        axes = list(self.metadata.mesh)
        place = np.unravel_index(position, tuple(self.metadata.mesh.values()))
        return int(place[axes.index("stage")])


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Return the folder of the profile that starts at a step."""
    return Path(run_dir) / PROFILES_FOLDER / f"step_{step:06d}"


def trace_folder(folder: Path, time: str) -> Path:
    """Return the folder for the traces of a profile, where XProf finds them."""
    return folder / _TRACES / time


def trace_folders(folder: Path) -> list[str]:
    """Return the names of the folders of traces in a profile, in ascending order."""
    root = folder / _TRACES
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def trace_name(host: str, process: int) -> str:
    """Return the file name of a process's trace."""
    return f"{host}-{process}.xplane.pb"


def profiled_steps(run_dir: str | Path) -> list[int]:
    """Return the first step of each profile of a run, in ascending order."""
    root = Path(run_dir) / PROFILES_FOLDER
    names = (path.name for path in root.iterdir()) if root.is_dir() else ()
    matched = [match for name in names if (match := _STEP.fullmatch(name))]
    return sorted(int(match[1]) for match in matched if (root / match[0] / METADATA_FILE).is_file())


def num_traces(folder: Path) -> int:
    """Return the number of traces in the newest folder of traces."""
    return len(_newest_traces(folder))


def module_name(text: str) -> str:
    """Return the name of the HLO module with this text."""
    found = re.match(r"HloModule (\S+?)[,\s]", text)
    return found.group(1) if found else ""


def write_program(folder: Path, text: str) -> None:
    """Write the optimized HLO text of the profiled program."""
    files.write(folder / PROGRAM_FILE, gzip.compress(text.encode(), 6))


def write_memory(folder: Path, sizes: Mapping[str, float]) -> None:
    """Write the memory of one device by kind, in bytes."""
    files.write(folder / MEMORY_FILE, json.dumps(sizes, indent=1))


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Write the metadata, which completes the profile."""
    files.write(folder / METADATA_FILE, json.dumps(metadata.to_json(), indent=1))


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a profile.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain the metadata of a profile.
    """
    values = parse_json(files.read(folder / METADATA_FILE, _MAX_JSON_BYTES), dict[str, Any])
    table = values.get("table")
    if not isinstance(table, dict) or not isinstance(table.get("slots"), list):
        raise ValueError(f"{METADATA_FILE} contains no schedule table")
    table |= {"slots": [_from_json(SlotTable, each) for each in table["slots"]]}
    metadata = _from_json(Metadata, values | {"table": _from_json(TableRecord, table)})
    _check_shapes(metadata)
    return metadata


def _check_shapes(metadata: Metadata) -> None:
    """Check that the lists of the metadata match the mesh and the schedule.

    Raises:
        ValueError: they do not match.
    """
    table, mesh, devices = metadata.table, metadata.mesh, metadata.devices
    places = (table.num_repeats, table.num_stages)
    costs = (table.chunks, table.chunk_costs, table.chunk_layers)
    slots = [each for slot in table.slots for each in (slot.microbatch, slot.repeat)]
    ticks = (len(slots[0]) if slots else 0, table.num_stages)
    rules = {
        "num_steps": metadata.num_steps >= 1,
        "mesh": mesh.get("stage") == table.num_stages and min(mesh.values()) >= 1,
        "devices": len(devices) == math.prod(mesh.values()) and all(len(x) == 2 for x in devices),
        "table": min(*places, *ticks, table.num_microbatches) >= 1
        and all(_has_shape(each, places) for each in costs)
        and all(_has_shape(each, ticks) for each in slots),
    }
    for name, is_met in rules.items():
        if not is_met:
            raise ValueError(f"{METADATA_FILE} contains a wrong value of {name}")
    if min(map(min, table.chunk_costs)) <= 0 or not 0 <= table.planned_bubble < 1:
        raise ValueError(f"{METADATA_FILE} contains a cost or a bubble outside its range")
    for slot in table.slots:
        if max(map(max, slot.repeat)) >= table.num_repeats or min(map(min, slot.repeat)) < -1:
            raise ValueError(f"{METADATA_FILE} contains a slot of a repeat that does not exist")


def _has_shape(rows: Sequence[Sequence[Any]], shape: tuple[int, int]) -> bool:
    return len(rows) == shape[0] and all(len(row) == shape[1] for row in rows)


def _from_json(kind: type[_T], values: object) -> _T:
    """Return a dataclass whose fields have the types that the class declares."""
    known = check_type(values, dict[str, Any])
    hints = typing.get_type_hints(kind)
    fields = {
        name: known[name] if _is_nested(known[name]) else check_type(known[name], hints[name])
        for name in hints
        if name in known
    }
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{METADATA_FILE}: {error}") from error


def _is_nested(value: object) -> bool:
    """Return whether a value consists of dataclasses, which have been checked."""
    first = value[0] if isinstance(value, list) and value else value
    return dataclasses.is_dataclass(first)


def read_capture(folder: Path) -> Capture:
    """Read the traces, the program and the metadata of a profile.

    Raises:
        ConfigError: the profile is incomplete, or one of its files cannot be read.
    """
    try:
        metadata = read_metadata(folder)
        program = _read_program(folder, metadata)
        paths = _newest_traces(folder)
        if not paths:
            raise ValueError(f"{folder / _TRACES} contains no trace")
        traces = {process: read_trace(path, metadata.module) for process, path in paths}
        memory = parse_json(files.read(folder / MEMORY_FILE, _MAX_JSON_BYTES), dict[str, float])
    except (OSError, ValueError, EOFError, zlib.error) as error:
        rule = f"cannot be read: {error}."
        action = "Profile the run again: set profile.at to a later step and resume the run."
        raise ConfigError.one(Code.CLI_VALUE, str(folder), None, rule, action) from error
    return Capture(folder, metadata, program, traces, memory)


def _read_program(folder: Path, metadata: Metadata) -> Program:
    """Read the profiled program.

    Raises:
        OSError: the file cannot be read.
        ValueError, EOFError, zlib.error: the file does not contain a program for this mesh.
    """
    compressed = files.read(folder / PROGRAM_FILE, _MAX_PROGRAM_BYTES)
    with gzip.open(io.BytesIO(compressed)) as stream:
        text = stream.read(_MAX_PROGRAM_BYTES + 1)
    if len(text) > _MAX_PROGRAM_BYTES:
        raise ValueError(f"{PROGRAM_FILE} contains more than {_MAX_PROGRAM_BYTES} bytes")
    try:
        return Program(text.decode(), metadata.mesh)
    except (LookupError, RecursionError) as error:  # an instruction that does not exist
        raise ValueError(f"{PROGRAM_FILE} is not a complete program: {error}") from error


def _newest_traces(folder: Path) -> Sequence[tuple[int, Path]]:
    """Return (process, path) of each trace in the newest folder of traces."""
    names = trace_folders(folder)
    return list(_traces_in(trace_folder(folder, names[-1]))) if names else []


def _traces_in(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob("*.xplane.pb")):
        found = re.search(r"-(\d+)\.xplane\.pb$", path.name)
        if found:
            yield int(found.group(1)), path


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Write the measured timeline as JSON."""
    files.write(folder / TIMELINE_FILE, json.dumps(results, indent=1))


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, so that other commands need not read the trace."""
    files.write(folder / REPORT_FILE, json.dumps(report, indent=1))


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report that was written with a profile, or None if it is missing or damaged."""
    try:
        return parse_json(files.read(folder / REPORT_FILE, _MAX_REPORT_BYTES), dict[str, Any])
    except (OSError, ValueError):
        return None


_MAX_REPORT_BYTES = _MAX_JSON_BYTES = 1 << 24
_MAX_PROGRAM_BYTES = 1 << 30
