"""Compare the forecast of a run with its measurements, term by term.

`maxpipe train` records the forecast, the size of every buffer of the compiled step and the
compiler's memory analysis in `forecast.json`. Times are read from `metrics.jsonl` and, if the run
was profiled, from its newest profile.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from maxpipe.config.config_files import (
    CONFIG_FILE,
    FORECAST_FILE,
    METRICS_FILE,
)
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.hardware import Hardware, known_hardware
from maxpipe.io.files import expand_path, read, read_json_lines
from maxpipe.io.formatting import format_duration, pluralize
from maxpipe.io.typed_json import parse_json
from maxpipe.planner.memory_terms import TERMS, gib
from maxpipe.planner.search import Candidate, evaluate
from maxpipe.profiles.capture import profiled_steps, read_report, step_folder

MAX_FORECAST_BYTES = 1 << 22
_MIN_RECORDS = 3
"""Number of records from which the first one, which includes warm-up, is ignored."""
_LARGE_DIFFERENCE = 0.1
"""Relative difference between prediction and measurement that is marked in the table."""
_CALIBRATION_ERROR = 0.05
"""Maximum relative error of the step time after a calibration."""
_STEP, _DATA_WAIT = "perf/step_s", "perf/data_wait_s"
_DEVICE_PEAK = "memory/device_peak_bytes"


class CompiledMemory(TypedDict):
    """Memory of the compiled train step on one device, in bytes."""

    arguments: int
    """Parameters, optimizer state and batch."""
    temporary: int
    outputs: int
    """Outputs that do not reuse an argument's memory."""
    program: int
    buffers: dict[str, int]
    """Exact sizes of the terms in `TERMS` that are buffers of the step."""


class ForecastFile(TypedDict):
    """Content of `forecast.json`."""

    step: int
    """Number of completed steps when the attempt started."""
    hardware: str
    """Prefix of the topology name of the devices, such as `v5p`; empty for unknown devices."""
    plan: dict[str, Any] | None
    """Values of `maxpipe plan --json`, or null for unknown devices."""
    compiled: NotRequired[CompiledMemory | None]


@dataclass(frozen=True)
class Term:
    """Predicted and measured value of one term of a time or of a memory size."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Return measured / predicted, or None if either is unknown or zero, or it overflows."""
        if not self.predicted or not self.measured:
            return None
        ratio = self.measured / self.predicted
        return ratio if math.isfinite(ratio) else None


@dataclass(frozen=True)
class Comparison:
    """Forecast and measurements of one run."""

    run: str
    config: Config
    hardware: Hardware
    candidate: Candidate
    first_step: int
    num_records: int
    """Number of records of the newest attempt whose step times are used."""
    step: Term
    """Time of a step in seconds; the measured value is the median over records."""
    times: Sequence[Term]
    """Parts of the step in seconds. Parts without a measurement require a profile."""
    memory: Sequence[Term]
    """Memory of one device in bytes: total first, then its terms."""
    data_wait: float | None
    """Median time per step spent waiting for data, in seconds."""


def read_forecast(run_dir: Path) -> ForecastFile | None:
    """Return the forecast of the newest attempt of a run that has trained, or None.

    Raises:
        ConfigError: the file is damaged.
        OSError: the file cannot be read.
    """
    path = run_dir / FORECAST_FILE
    try:
        return parse_json(read(path, MAX_FORECAST_BYTES), ForecastFile)
    except FileNotFoundError:
        return None
    except ValueError as error:
        rule = f"is damaged: {error}."
        action = "Continue the run for some steps, which writes the file again."
        raise ConfigError.one(Code.RUN_RECORDS, str(path), None, rule, action) from error


def compare_run(run_dir: str | Path) -> Comparison:
    """Compare the forecast of a run, with the current hardware specifications, with its
    measurements.

    Raises:
        ConfigError: the run has no forecast, or no measured steps.
        StorageError: the records cannot be read.
    """
    folder = expand_path(run_dir)
    try:
        recorded = read_forecast(folder)
        metrics = _read_metrics(folder, recorded["step"] if recorded else 0)
    except OSError as error:
        raise StorageError(
            Code.RUN_RECORDS,
            f"{folder}: cannot be read\n  {error.strerror or error}.\n"
            "  Give the folder of a run (default: runs/<run.name>) with its original files.",
        ) from error
    hardware = known_hardware().get(recorded["hardware"]) if recorded else None
    if recorded is None or hardware is None:
        rule = f"must contain {FORECAST_FILE}, which `maxpipe train` writes on devices with a file "
        rule += "in configs/hardware."
        action = "Continue the run for some steps with this release, which records the forecast."
        raise ConfigError.one(Code.RUN_RECORDS, f"run folder {run_dir}", None, rule, action)
    times = metrics.get(_STEP, [])
    used = times[1:] if len(times) >= _MIN_RECORDS else times
    if not used:
        rule = f"must contain a record of {_STEP} in {METRICS_FILE} after step {recorded['step']}."
        action = "Run at least log.every steps, and try again."
        raise ConfigError.one(Code.RUN_RECORDS, f"run folder {run_dir}", None, rule, action)
    config = load([str(folder / CONFIG_FILE)]).config
    candidate = evaluate(config, hardware)
    measured = statistics.median(used)
    waits = metrics.get(_DATA_WAIT, [])
    return Comparison(
        run=str(run_dir),
        config=config,
        hardware=hardware,
        candidate=candidate,
        first_step=recorded["step"],
        num_records=len(used),
        step=Term("step", candidate.cost.seconds, measured),
        times=_time_terms(candidate, _profiled_parts(folder, recorded["step"])),
        memory=_memory_terms(candidate, recorded.get("compiled"), metrics.get(_DEVICE_PEAK, [])),
        data_wait=statistics.median(waits) if waits else None,
    )


def _read_metrics(folder: Path, first: int) -> dict[str, list[float]]:
    """Return the values recorded after step `first`, keyed by tag.

    `first` is the step of the forecast: a later attempt without a step to train has none.
    """
    found: dict[str, list[float]] = {}
    try:
        for record in read_json_lines(folder / METRICS_FILE, dict[str, Any]):
            step = record.get("step")
            if type(step) is not int or step <= first:
                continue
            for tag in (_STEP, _DATA_WAIT, _DEVICE_PEAK):
                value = record.get(tag)
                if type(value) is float and math.isfinite(value) and value >= 0:
                    found.setdefault(tag, []).append(value)
    except FileNotFoundError:
        pass
    return found


def _profiled_parts(folder: Path, first_step: int) -> dict[str, float]:
    """Return the measured parts of a step from the newest profile after a step, in seconds; empty
    without a profile.
    """
    steps = [step for step in profiled_steps(folder) if step > first_step]
    report = read_report(step_folder(folder, steps[-1])) if steps else None
    try:
        return measured_parts(report) if report else {}
    except (KeyError, TypeError, ValueError):  # a damaged file
        return {}


def measured_parts(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a profiled step, keyed by the names of the forecast, in seconds.

    `report` is the content of a profile's `report.json`. Virtual CPU devices wait for messages
    inside the collectives, so that the time of messages includes the bubble.
    """
    parts: dict[str, float] = {}
    for row in report["by_place"]:
        place, seconds = str(row["name"]), float(row["seconds"])
        name = _PARTS.get(place) or _part_of_collective(place) or "layers"
        parts[name] = parts.get(name, 0.0) + seconds
    if report["shares_cores"]:
        parts[_MESSAGES_AND_BUBBLE] = parts.pop("messages", 0.0)
    elif bubble := report["bubble"]:
        parts["bubble"] = bubble["measured"] * bubble["tick_loop_seconds"]
    parts["idle"] = float(report["idle_seconds"])
    return parts


_MESSAGES_AND_BUBBLE = "messages and waits for other stages"
_PARTS = {
    "messages between stages": "messages",
    "head": "head",
    "embed": "embedding",
    "optimizer update": "update",
    "other": "other",
}
"""Parts of the forecast, by place in the profile. All places that are not listed are in layers."""
_COLLECTIVES = {
    "all-gather": "gathers",
    "reduce-scatter": "reductions",
    "all-reduce": "reductions",
    "all-to-all": "exchange",
}


def _part_of_collective(place: str) -> str | None:
    """Return the part of a collective such as `all-gather over fsdp`; collectives over stages
    belong to the head and the embedding.
    """
    kind, over, axes = place.partition(" over ")
    if not over:
        return None
    if axes == "stage":
        return "head"
    return "layers" if axes == "tensor" else _COLLECTIVES.get(kind, "other")


def _time_terms(candidate: Candidate, measured: Mapping[str, float]) -> list[Term]:
    """Return the parts of the step, largest prediction first."""
    parts = candidate.cost.parts
    names = sorted({*parts, *measured}, key=lambda name: -parts.get(name, 0.0))
    return [Term(name, parts.get(name), measured.get(name)) for name in names]


def _memory_terms(
    candidate: Candidate, compiled: CompiledMemory | None, peaks: Sequence[float]
) -> list[Term]:
    """Return the memory of one device: total, arguments, temporary memory, and their terms."""
    memory = candidate.memory
    if compiled is None:
        compiled_total = arguments = temporary = None
    else:
        arguments, temporary = compiled["arguments"], compiled["temporary"] + compiled["outputs"]
        compiled_total = arguments + temporary + compiled["program"]
    terms = [
        Term("total of the compiled step", memory.total, compiled_total),
        Term("arguments", memory.arguments, arguments),
        Term("temporary memory and outputs", memory.temporary, temporary),
    ]
    if peaks:
        terms.append(Term("peak memory in use on a device", memory.total, max(peaks)))
    exact = compiled["buffers"] if compiled else {}
    for name, size in sorted(memory.terms.items(), key=lambda item: -item[1]):
        if size or exact.get(name):
            terms.append(Term(TERMS[name].about, size, exact.get(name)))
    return terms


def calibrated(found: Comparison) -> Hardware:
    """Return the hardware specifications with which the forecast equals the measured step time.

    The fraction of peak FLOP/s in layers is changed; all other specifications are kept. The
    published and the calibrated value are between 0.1% and 1000% of the peak.

    Raises:
        ConfigError: no such fraction reproduces the measured time.
    """
    target = found.step.measured
    assert target is not None

    def seconds(efficiency: float) -> float:
        changed = dataclasses.replace(found.hardware, matmul_efficiency=efficiency)
        return evaluate(found.config, changed).cost.seconds

    low, high = 1e-3, 10.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > target else (low, middle)
    if not math.isclose(seconds(high), target, rel_tol=_CALIBRATION_ERROR):
        rule = f"has a measured step time of {format_duration(target)}, which no fraction of the "
        rule += "peak FLOP/s between 0.1% and 1000% explains."
        action = "Run `maxpipe plan FILE --calibrate`, which measures all figures separately."
        raise ConfigError.one(Code.RUN_RECORDS, f"run folder {found.run}", None, rule, action)
    name = Path(found.run).name
    return dataclasses.replace(
        found.hardware,
        matmul_efficiency=math.sqrt(low * high),
        measured=f"{date.today().isoformat()}, run {name}",
    )


def comparison_values(found: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON-compatible data."""

    def values(term: Term) -> dict[str, Any]:
        return dataclasses.asdict(term) | {"ratio": term.ratio}

    return {
        "run": found.run,
        "hardware": found.hardware.name,
        "first_step": found.first_step,
        "records": found.num_records,
        "step_seconds": values(found.step),
        "time": [values(term) for term in found.times],
        "memory_bytes": [values(term) for term in found.memory],
        "data_wait_seconds": found.data_wait,
    }


def format_comparison(found: Comparison) -> str:
    """Format a comparison for a terminal."""
    count, start = found.num_records, found.first_step
    lines = [
        f"{found.run}: {found.hardware.name}, {pluralize(count, 'record')} after step {start}",
        "",
        *_table("time of a step", [found.step, *found.times], format_duration),
    ]
    if found.data_wait is not None and found.step.measured:
        share = found.data_wait / found.step.measured
        lines.append(f"waiting for data: {format_duration(found.data_wait)} per step ({share:.1%})")
    if all(term.measured is None for term in found.times):
        lines.append("parts of the step are measured in profiles: set profile.at=[100]")
    elif found.hardware.platform == "cpu":
        lines.append("virtual devices share cores: measured parts include waits for a core")
    lines += ["", *_table("memory of one device", found.memory, gib)]
    return "\n".join(lines)


def _table(title: str, terms: Sequence[Term], show: Any) -> list[str]:
    width = max(len(title), *(len(term.name) for term in terms))
    lines = [f"{title:{width}}  {'predicted':>11}  {'measured':>11}  measured / predicted"]
    for term in terms:
        predicted, measured = (
            "-" if value is None else show(value) for value in (term.predicted, term.measured)
        )
        ratio = "" if term.ratio is None else f"{term.ratio:.3f}"
        if term.ratio is not None and abs(term.ratio - 1) > _LARGE_DIFFERENCE:
            ratio += "  differs by more than 10%"
        lines.append(f"{term.name:{width}}  {predicted:>11}  {measured:>11}  {ratio}".rstrip())
    return lines
