"""Write the records of a run: metrics, events, samples and TensorBoard files.

A failed write never stops a run: if the disk is full, records are lost, but the run continues. The
caller creates the run folder. `ours` is called before every write; if it returns False, the run has
lost the lock on its folder and nothing is written.

The module also creates TensorBoard summaries without TensorFlow, as `Summary` protocol buffers that
`MetricWriter` adds to the event file. tensorboard is imported on first use, because its import
takes half a second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from maxpipe.config.config_files import (
    EVENTS_FILE,
    LAYERS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    TENSORBOARD_FOLDER,
)
from maxpipe.io import files, redact
from maxpipe.io.typed_json import parse_json
from maxpipe.telemetry.metrics import CHARTS, tag_pattern

if TYPE_CHECKING:
    from maxpipe.schedule.canvas import Canvas

MAX_LAYERS_LINE_BYTES = 1 << 28
"""Maximum length of a record in `layers.jsonl`; histograms of large models need many megabytes."""
_SCALE = 3
"""Number of PNG pixels per drawing unit, chosen so that images are sharp at full size."""


def chart_titles(tags: Iterable[str]) -> tuple[str, ...]:
    """Return the titles of the charts in `CHARTS` that have data in a run with the given tags."""
    tags = set(tags)
    return tuple(
        title
        for title, shown in CHARTS
        if any(re.fullmatch(tag_pattern(each), tag) for each in shown for tag in tags)
    )


def charts(chosen: Collection[str]) -> Any:
    """Return the layout of the charts with the given titles, for the "Custom Scalars" tab.

    TensorBoard uses the newest layout of a run and merges the layouts of several runs. Charts also
    list tags without data, so that the layout of each chart is the same in every run.
    """
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout: Any = layout_pb2
    category = layout.Category(title="training")
    for title, tags in CHARTS:
        if title in chosen:
            content = layout.MultilineChartContent(tag=[f"^{tag_pattern(tag)}$" for tag in tags])
            category.chart.append(layout.Chart(title=title, multiline=content))
    text = layout.Layout(category=[category]).SerializeToString()
    return _tensor(metadata.CONFIG_SUMMARY_TAG, metadata.create_summary_metadata(), [text])


def hyperparameters(values: Mapping[str, bool | float | str], run: str) -> Any:
    """Return the summary of a run's hyperparameters for the "HParams" tab."""
    from tensorboard.plugins.hparams import summary_v2

    return summary_v2.hparams_pb(dict(values), trial_id=run)


def image(tag: str, drawing: Canvas, description: str = "") -> Any:
    """Return an image summary for the "Images" tab, which shows the description next to the tag."""
    file = BytesIO()
    drawing.png(file, _SCALE)
    size = round(_SCALE * drawing.width), round(_SCALE * drawing.height)
    return png_image(tag, file.getvalue(), size, description)


def png_image(tag: str, png: bytes, size: tuple[int, int], description: str = "") -> Any:
    """Return an image summary of a PNG file, whose size is (width, height) in pixels."""
    from tensorboard.plugins.image import metadata

    about = metadata.create_summary_metadata(display_name=tag, description=description)
    return _tensor(tag, about, [*(str(each).encode() for each in size), png])


def histogram(tag: str, edges: Sequence[float], counts: Sequence[float]) -> Any:
    """Return a histogram summary for the "Histograms" tab; there is one more edge than counts."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorboard.plugins.histogram import metadata

    modules: Any = (summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2)
    summaries, tensors, shapes, types = modules
    shape = shapes.TensorShapeProto()
    shape.dim.add(size=len(counts))
    shape.dim.add(size=3)
    rows = zip(edges[:-1], edges[1:], counts, strict=True)
    tensor = tensors.TensorProto(dtype=types.DT_DOUBLE, tensor_shape=shape)
    tensor.double_val.extend(value for row in rows for value in row)
    about = metadata.create_summary_metadata(display_name=tag, description="")
    summary = summaries.Summary()
    summary.value.add(tag=tag, metadata=about, tensor=tensor)
    return summary


def _tensor(tag: str, metadata: Any, values: Sequence[bytes]) -> Any:
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

    modules: Any = (summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2)
    summaries, tensors, shapes, types = modules
    shape = shapes.TensorShapeProto()
    if len(values) > 1:
        shape.dim.add(size=len(values))
    tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=list(values), tensor_shape=shape)
    summary = summaries.Summary()
    summary.value.add(tag=tag, metadata=metadata, tensor=tensor)
    return summary


_log = logging.getLogger("maxpipe")

_WARN_EVERY_SECONDS = 60.0
OwnershipCheck = Callable[[], bool]


def _always() -> bool:
    return True


class _SafeFile:
    """An append-only file that reports failures as warnings, at most one per minute.

    The file is reopened for every record, so that writing resumes after a network file system
    outage. Partially written records are removed, so that the other records stay readable. Writes
    are thread-safe.
    """

    def __init__(self, path: Path, ours: OwnershipCheck = _always):
        self.path, self._is_owned, self._lock = path, ours, threading.Lock()
        self._warned_at = -math.inf

    def append(self, data: bytes, at: int | None = None) -> int:
        """Write `data` at offset `at` (default: the end). Return the offset, or -1 on failure.

        If `at` is given, all content after that offset is replaced.
        """
        if not self._is_owned():
            return -1
        with self.guard(), self._lock:
            descriptor = files.open_regular(self.path, os.O_RDWR | os.O_CREAT)
            try:
                return _write_at(descriptor, data, at)
            finally:
                os.close(descriptor)
        return -1

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Convert any OSError inside the context to a warning, at most one per minute."""
        try:
            yield
        except OSError as error:
            now = time.monotonic()
            if now - self._warned_at >= _WARN_EVERY_SECONDS:
                self._warned_at = now
                _log.warning(
                    "cannot write %s: %s. Training continues without these records.",
                    self.path,
                    error.strerror or error,
                )


def _write_at(descriptor: int, data: bytes, at: int | None) -> int:
    end = os.lseek(descriptor, 0, os.SEEK_END)
    start = end if at is None else at
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], start + written)
        if start + written < end:
            os.ftruncate(descriptor, start + written)
    except OSError:
        with contextlib.suppress(OSError):  # report only the first error
            os.ftruncate(descriptor, start)
        raise
    return start


def _json_line(record: Mapping[str, object]) -> bytes:
    return (json.dumps(_json_value(record), allow_nan=False, default=str) + "\n").encode()


def _json_value(value: object) -> object:
    # JSON has no NaN or infinity, and other tools cannot parse them. Write null instead.
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RecordObserver(Protocol):
    """Receives the records of `metrics.jsonl` after they are written. Calls must not block."""

    def restart(self, step: int) -> None:
        """Begin or continue after `step`, because records of later steps were removed."""
        ...

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Receive metrics of a step, which were added to its record."""
        ...


class EventLog:
    """Writes `events.jsonl`, which contains the events of a run across all its restarts.

    Records have the form `{"time": UTC in ISO 8601, "uptime": seconds, "event": ..., ...}` and are
    never removed. `uptime` is the monotonic time since `since` (default: when the log was opened).
    Only process 0 writes.
    """

    def __init__(
        self,
        run_dir: Path,
        process_index: int = 0,
        since: float | None = None,
        ours: OwnershipCheck = _always,
    ):
        self._file = _SafeFile(run_dir / EVENTS_FILE, ours) if process_index == 0 else None
        self._since = time.monotonic() if since is None else since
        self.observers: list[Callable[[str, Mapping[str, Any]], None]] = []
        """Functions that receive the name and the fields of each event. They must not block."""
        if self._file is not None and _ends_inside_a_line(self._file.path):
            self._file.append(b"\n")

    def write(self, event: str, **fields: object) -> None:
        """Append one event. Values that JSON cannot represent are written as strings."""
        if self._file is not None:
            record: dict[str, object] = {"time": _now()}
            record |= {"uptime": round(time.monotonic() - self._since, 3), "event": event}
            self._file.append(_json_line(redact.redact_value(record | fields)))
            for observer in self.observers:
                observer(event, fields)


def _now() -> str:
    """Return the current UTC time in ISO 8601 format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ends_inside_a_line(path: Path) -> bool:
    try:
        with open(files.open_regular(path), "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # missing or empty
        return False


class MetricWriter:
    """Writes `metrics.jsonl`, `samples.jsonl`, `layers.jsonl` and TensorBoard files, and notifies
    observers.

    The JSON files have one object per logged step. Records of steps after `resume_step`, the step
    of the restored checkpoint, are removed because these steps are repeated. Non-finite values are
    written as `null` in JSON. Only process 0 writes.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        resume_step: int,
        process_index: int = 0,
        ours: OwnershipCheck = _always,
        observers: Sequence[RecordObserver] = (),
    ):
        self._file: _SafeFile | None = None
        self.observers = observers
        self._events: _TensorBoardFile | None = None
        self._samples = _SafeFile(run_dir / SAMPLES_FILE, ours)
        self._layers = _SafeFile(run_dir / LAYERS_FILE, ours)
        self._last: tuple[int, int, dict[str, object]] | None = None  # (step, offset, record)
        if process_index != 0:
            return
        self._tags: set[str] = set()
        self._charts: tuple[str, ...] = ()
        """Titles of the charts in the current TensorBoard layout."""
        self._file = _SafeFile(run_dir / METRICS_FILE, ours)
        with self._file.guard():
            if not ours():
                return
            self._last = _truncate_after_step(self._file.path, resume_step, self._tags)
            _truncate_after_step(self._samples.path, resume_step)
            _truncate_after_step(self._layers.path, resume_step, longest=MAX_LAYERS_LINE_BYTES)
        for observer in observers:
            observer.restart(resume_step)
        if tensorboard:
            self._events = _TensorBoardFile(run_dir / TENSORBOARD_FOLDER, resume_step, ours)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` for `step`. Another call for the same step extends the record."""
        if self._file is None:
            return
        values = {tag: float(value) for tag, value in metrics.items()}
        record: dict[str, object] = {"step": step}
        at = None
        if self._last is not None and self._last[0] == step:
            _, at, record = self._last
        record["time"] = _now()
        record |= values
        offset = self._file.append(_json_line(record), at)
        self._last = None if offset < 0 else (step, offset, record)
        if self._events is not None:
            self._events.scalars(step, values)
            self._update_charts(step, values)
        for observer in self.observers:
            observer.record(step, values)

    def _update_charts(self, step: int, values: Mapping[str, float]) -> None:
        """Write the TensorBoard layout again when a chart receives its first value."""
        if self._events is None or (self._charts and self._tags.issuperset(values)):
            return
        self._tags.update(values)
        titles = chart_titles(self._tags)
        if titles != self._charts:
            self._charts = titles
            self._events.summary(charts(titles), step)

    def samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        """Record sampled completions after `step`, as objects with `prompt` and `text`."""
        if self._file is None:
            return
        record = {"step": step, "time": _now(), "samples": [*samples]}
        self._samples.append(_json_line(redact.redact_value(record)))
        for number, each in enumerate(samples):
            both = f"{each['prompt']}{each['text']}"
            # TensorBoard shows indented text without Markdown formatting.
            shown = "\n".join(f"    {line}" for line in both.splitlines())
            self.text(f"samples/{number}", shown, step)

    def layers(self, step: int, record: Mapping[str, object]) -> None:
        """Record the layer statistics of a step."""
        if self._file is not None:
            self._layers.append(_json_line({"step": step, "time": _now(), **record}))

    @property
    def shows_tensorboard(self) -> bool:
        """Return whether this process writes TensorBoard files."""
        return self._events is not None

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        """Add Markdown text, e.g. the resolved config, to TensorBoard."""
        if self._events is not None:
            self._events.text(tag, redact.redact_text(markdown), step)

    def show(self, summary: Callable[[], Any], step: int = 0) -> None:
        """Add the result of `summary` to TensorBoard, or do nothing without TensorBoard."""
        events = self._events
        if events is not None:
            events.summary(summary(), step)

    def close(self) -> None:
        """Close the writer. Nothing is buffered, so a process that dies may skip this call."""
        self._file = self._events = None


class _MetricRecord(TypedDict):
    """A line of `metrics.jsonl`. All other keys are metric tags."""

    step: int


def _truncate_after_step(
    path: Path, step: int, tags: set[str] | None = None, longest: int = 1 << 20
) -> tuple[int, int, dict[str, object]] | None:
    """Remove records of steps after `step`, older duplicates and incomplete lines from a file.

    Lines longer than `longest` bytes are also removed. The tags of the remaining records are added
    to `tags`. Return the last record's step, offset and
    content, or None if no record remains.
    """
    kept: dict[int, tuple[int, int]] = {}
    """Start and end offsets of each step's newest record."""
    size = 0
    try:
        for offset, line in files.read_lines(path, longest=longest):
            with contextlib.suppress(ValueError):
                record = parse_json(line, _MetricRecord)
                if (recorded := record["step"]) <= step and line.endswith(b"\n"):
                    kept[recorded] = offset, offset + len(line)
                    if tags is not None:
                        tags.update(record.keys() - {"step", "time"})
        size = os.path.getsize(path)
    except FileNotFoundError:
        return None
    spans = list(kept.values())
    if sorted(spans) != spans or sum(end - begin for begin, end in spans) != size:
        spans = _rewrite_spans(path, spans)
    if not kept:
        return None
    with open(files.open_regular(path), "rb") as file:
        begin, end = spans[-1]
        file.seek(begin)
        return list(kept)[-1], begin, json.loads(file.read(end - begin))


def _rewrite_spans(path: Path, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Keep only the given byte ranges of a file, and return their new offsets."""
    beside, moved, offset = path.with_name(path.name + ".new"), [], 0
    with (
        open(files.open_regular(path), "rb") as old,
        open(files.open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as new,
    ):
        for begin, end in spans:
            old.seek(begin)
            new.write(old.read(end - begin))
            moved.append((offset, offset := offset + end - begin))
    os.replace(beside, path)
    return moved


class _TensorBoardFile:
    """A TensorBoard event file that is written without TensorFlow and without a background thread.

    The records are framed by TensorBoard's `RecordWriter`. TensorBoard's `EventFileWriter` is not
    used: if the disk is full, its thread dies and all later records are lost. `EventFileWriter`
    also imports TensorFlow if TensorFlow is installed.
    """

    def __init__(self, folder: Path, resume_step: int, ours: OwnershipCheck):
        # The import takes 0.4 s, so commands that write no events do not import tensorboard.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The generated modules define their members at run time, so type checkers cannot resolve
        # them.
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2
        self._types: Any = types_pb2
        self._record_writer = RecordWriter
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{os.getpid()}"
        self._file = _SafeFile(folder / name, ours)
        with self._file.guard():
            folder.mkdir(exist_ok=True)
        self._write(file_version="brain.Event:2")
        if resume_step > 0:
            # This record makes TensorBoard discard later steps from earlier event files.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(step=step, summary=summary)

    def summary(self, summary: Any, step: int = 0) -> None:
        self._write(step=step, summary=summary)

    def text(self, tag: str, markdown: str, step: int) -> None:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"),
            data_class=self._summary.DATA_CLASS_TENSOR,
        )
        tensor = self._tensor.TensorProto(
            dtype=self._types.DT_STRING, string_val=[markdown.encode()]
        )
        summary = self._summary.Summary()
        summary.value.add(tag=tag, metadata=metadata, tensor=tensor)
        self._write(step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        record = BytesIO()
        event = self._event.Event(wall_time=time.time(), **fields)
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
