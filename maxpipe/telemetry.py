"""What a run reports: metric files, the event log and the console.

Owns `metrics.jsonl`, `tensorboard/` and `events.jsonl` of a run folder and all
text on the console while a run lasts. Knows nothing about jax, models or
training: it is given numbers. Nothing here may stop a run: a full disk or a
closed terminal costs records, never steps. The run's folder is made by whoever
starts the run, never here. `ours` is asked before each record: where the folder
is not the run's any more, nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypedDict

from maxpipe import files, redact
from maxpipe.typed import parse

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable, RenderableType
    from rich.live import Live

_log = logging.getLogger("maxpipe")

_WARN_EVERY_SECONDS = 60.0
# Rates are averaged over the last logged steps: long enough to be steady, short
# enough that a run which slows down shows it.
_RATE_WINDOW = 20

Ours = Callable[[], bool]


def _always() -> bool:
    return True


# --- files -------------------------------------------------------------------


class _SafeFile:
    """An append-only file whose failures are warnings, one per minute.

    The file is opened for each record, so that a network file system may come
    back. A record that fails half-way is cut off again: what was written before
    and what is written later stays readable. Threads may write one after another.
    """

    def __init__(self, path: Path, ours: Ours = _always):
        self.path, self._ours, self._lock = path, ours, threading.Lock()
        self._warned_at = -math.inf

    def append(self, data: bytes, at: int | None = None) -> int:
        """Write `data` at offset `at`, or at the end; returns the offset, -1 after a failure.

        With `at`, everything behind that offset is replaced.
        """
        if not self._ours():
            return -1
        with self.guard(), self._lock:
            descriptor = files.opened(self.path, os.O_RDWR | os.O_CREAT)
            try:
                return _write_at(descriptor, data, at)
            finally:
                os.close(descriptor)
        return -1

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an OSError of the body into at most one warning per minute."""
        try:
            yield
        except OSError as error:
            now = time.monotonic()
            if now - self._warned_at >= _WARN_EVERY_SECONDS:
                self._warned_at = now
                _log.warning(
                    "cannot write %s: %s. Training goes on without these records.",
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
        with contextlib.suppress(OSError):  # the first error is the one to tell
            os.ftruncate(descriptor, start)
        raise
    return start


def _json_line(record: Mapping[str, object]) -> bytes:
    return (json.dumps(_json_value(record), allow_nan=False, default=str) + "\n").encode()


def _json_value(value: object) -> object:
    # JSON has no NaN; a record that other tools cannot parse is worth less than a null.
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EventLog:
    """`events.jsonl`: what happened to a run, over all its restarts.

    Records are `{"time": UTC in ISO 8601, "uptime": seconds, "event": ..., ...}` and never removed;
    `uptime` is of a clock that nobody sets, from `since`, by default when the log was opened.
    Only process 0 writes.
    """

    def __init__(
        self,
        run_dir: Path,
        process_index: int = 0,
        since: float | None = None,
        ours: Ours = _always,
    ):
        self._file = _SafeFile(run_dir / "events.jsonl", ours) if process_index == 0 else None
        self._since = time.monotonic() if since is None else since
        if self._file is not None and _ends_inside_a_line(self._file.path):
            self._file.append(b"\n")

    def write(self, event: str, **fields: object) -> None:
        """Append one event. Fields that JSON has no form for are written as text."""
        if self._file is not None:
            record: dict[str, object] = {"time": _now()}
            record |= {"uptime": round(time.monotonic() - self._since, 3), "event": event}
            self._file.append(_json_line(redact.within(record | fields)))


def _now() -> str:
    """UTC in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ends_inside_a_line(path: Path) -> bool:
    try:
        with open(files.opened(path), "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # missing or empty
        return False


class MetricWriter:
    """`metrics.jsonl`, one object with its time per logged step, and what TensorBoard shows.

    Records of steps after `resume_step`, the last step in the restored
    checkpoint, are dropped: they are about to be made again. Numbers that are
    not finite are `null` in the JSON file. Only process 0 writes.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        resume_step: int,
        process_index: int = 0,
        ours: Ours = _always,
    ):
        self._file: _SafeFile | None = None
        self._events: _TensorBoardFile | None = None
        self._last: tuple[int, int, dict[str, object]] | None = None  # step, offset, record
        if process_index != 0:
            return
        self._file = _SafeFile(run_dir / "metrics.jsonl", ours)
        with self._file.guard():
            if not ours():
                return
            self._last = _drop_after(self._file.path, resume_step)
        if tensorboard:
            self._events = _TensorBoardFile(run_dir / "tensorboard", resume_step, ours)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`; a second call for the same step adds to its record."""
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

    def text(self, tag: str, markdown: str) -> None:
        """Show a text in TensorBoard, e.g. the resolved config."""
        if self._events is not None:
            self._events.text(tag, redact.text(markdown))

    def show(self, summary: Callable[[], Any]) -> None:
        """Show in TensorBoard what this makes; it is not called without TensorBoard."""
        events = self._events
        if events is not None:
            events.summary(summary())

    def close(self) -> None:
        """Nothing is buffered: safe to skip when a process dies."""
        self._file = self._events = None


class _Record(TypedDict):
    """A line of `metrics.jsonl`; the other keys are tags."""

    step: int


def _drop_after(path: Path, step: int) -> tuple[int, int, dict[str, object]] | None:
    """Replace the file by one without later steps, doubled steps and torn lines.

    Returns step, offset and content of the last record that is left.
    """
    kept: dict[int, tuple[int, int]] = {}
    """Where the newest record of each step begins and ends."""
    size = 0
    try:
        for offset, line in files.lines(path):
            with contextlib.suppress(ValueError):
                recorded = parse(line, _Record)["step"]
                if recorded <= step and line.endswith(b"\n"):
                    kept[recorded] = offset, offset + len(line)
        size = os.path.getsize(path)
    except FileNotFoundError:
        return None
    places = list(kept.values())
    if sorted(places) != places or sum(end - begin for begin, end in places) != size:
        places = _keep(path, places)
    if not kept:
        return None
    with open(files.opened(path), "rb") as file:
        begin, end = places[-1]
        file.seek(begin)
        return list(kept)[-1], begin, json.loads(file.read(end - begin))


def _keep(path: Path, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Replace the file by these parts of it, in this order; returns where they are then."""
    beside, moved, offset = path.with_name(path.name + ".new"), [], 0
    with (
        open(files.opened(path), "rb") as old,
        open(files.opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as new,
    ):
        for begin, end in places:
            old.seek(begin)
            new.write(old.read(end - begin))
            moved.append((offset, offset := offset + end - begin))
    os.replace(beside, path)
    return moved


class _TensorBoardFile:
    """One TensorBoard event file, written without TensorFlow and without a thread.

    TensorBoard's `RecordWriter` frames the records. Its `EventFileWriter` is not
    used: the thread inside dies on a full disk and takes all later records with
    it, and it imports TensorFlow where that is installed.
    """

    def __init__(self, folder: Path, resume_step: int, ours: Ours):
        # 0.4 s to import: paid by a run that writes, not by the command line.
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The generated modules define their names at run time; type checkers see none.
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
            # Tells TensorBoard to forget what earlier files say from this step on.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(step=step, summary=summary)

    def summary(self, summary: Any) -> None:
        self._write(summary=summary)

    def text(self, tag: str, markdown: str) -> None:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text"),
            data_class=self._summary.DATA_CLASS_TENSOR,
        )
        tensor = self._tensor.TensorProto(
            dtype=self._types.DT_STRING, string_val=[markdown.encode()]
        )
        summary = self._summary.Summary()
        summary.value.add(tag=tag, metadata=metadata, tensor=tensor)
        self._write(summary=summary)

    def _write(self, **fields: Any) -> None:
        record = BytesIO()
        event = self._event.Event(wall_time=time.time(), **fields)
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


# --- console -----------------------------------------------------------------


class Console:
    """All text a person sees while a run lasts.

    `live` draws a view that is updated in place, `plain` prints lines, `auto`
    takes `live` on a terminal only. Process 0 speaks; of the others only
    warnings are shown, with the process named. While it is open it also shows log
    records: maxpipe's own from INFO, those of libraries from WARNING.
    """

    def __init__(
        self,
        mode: Literal["auto", "live", "plain"] = "auto",
        *,
        process_index: int = 0,
        stream: TextIO | None = None,
    ):
        self._stream = sys.stdout if stream is None else stream
        self._process_index = process_index
        if mode == "auto":
            mode = "live" if _is_terminal(self._stream) else "plain"
        self._view = _LiveView(self._stream) if mode == "live" and process_index == 0 else None
        self._progress = _Progress()
        self._restore_logs = _show_logs(self)

    def banner(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the facts of the run, one `(name, value)` per line."""
        width = max((len(name) for name, _ in rows), default=0)
        self._print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show that `name`, e.g. "compiling train step", goes on, and how long it took."""
        start, name = time.monotonic(), redact.text(name)
        if self._view is not None:
            self._view.stage = (name, start)
            self._view.start()
        else:
            self._print(f"{name} ...")
        outcome = "failed after "
        try:
            yield
            outcome = ""
        finally:
            if self._view is not None:
                self._view.stage = None
            self._print(f"{name}: {outcome}{duration(time.monotonic() - start)}")

    def begin(self, step: int, total_steps: int) -> None:
        """Start progress: `step` of `total_steps` are done. Call it once compiling is over."""
        self._progress = _Progress(step, total_steps)
        if self._view is not None:
            self._view.progress = self._progress
            self._view.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one logged step, by the tags of `metrics.jsonl`."""
        self._progress.advance(step)
        if self._view is not None:
            # A new dict: another thread may be drawing the old one.
            latest = {tag: float(value) for tag, value in metrics.items()}
            self._view.metrics = self._view.metrics | latest
        else:
            self._print(self._progress.line(metrics))

    def note(self, text: str) -> None:
        """Print a message between steps."""
        self._print(text)

    def tell(self, text: str) -> None:
        """Print a message, on any process."""
        named = f"[process {self._process_index}] " if self._process_index else ""
        self._print(f"{named}{text}", every_process=True)

    def warn(self, text: str) -> None:
        """Print a warning, on any process."""
        self.tell(f"warning: {text}")

    def close(self) -> None:
        """Leave the last state of a live view on the screen and stop updating it."""
        if self._view is not None:
            self._view.stop()
        self._restore_logs()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _print(self, text: str, every_process: bool = False) -> None:
        if self._process_index != 0 and not every_process:
            return
        text = redact.shown(text)
        # A terminal that went away (EIO, EPIPE, a closed stream) must not end the run.
        with contextlib.suppress(OSError, ValueError):
            if self._view is not None:
                self._view.print(text)
            else:
                print(text, file=self._stream, flush=True)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _show_logs(console: Console) -> Callable[[], None]:
    """Make `console` the way of log records to the terminal; returns the undo."""
    # Imported first, or absl would put its own handler back when jax or orbax import it.
    from absl import logging as absl_logging

    handler = _ConsoleHandler(console)
    root, absl_handler = logging.getLogger(), absl_logging.get_absl_handler()
    had_absl_handler, level = absl_handler in root.handlers, _log.level

    def restore() -> None:
        root.removeHandler(handler)
        _log.setLevel(level)
        if had_absl_handler and absl_handler not in root.handlers:
            root.addHandler(absl_handler)

    _log.setLevel(logging.INFO)
    root.removeHandler(absl_handler)
    root.addHandler(handler)
    return restore


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console):
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.partition(".")[0] == _log.name
        try:
            if record.levelno >= logging.WARNING:
                self._console.warn(("" if ours else f"{record.name}: ") + record.getMessage())
            elif ours:
                self._console.note(record.getMessage())
        except Exception:
            self.handleError(record)


class _Progress:
    """Where the run is, how fast it goes, and when it will end."""

    def __init__(self, first_step: int = 0, total_steps: int = 0):
        self.step = first_step
        self.total_steps = total_steps
        self._marks = deque([(first_step, time.monotonic())], maxlen=_RATE_WINDOW)

    def advance(self, step: int) -> None:
        self.step = step
        self._marks.append((step, time.monotonic()))

    def eta_seconds(self) -> float | None:
        """Time to the last step; None before two steps were seen or without a known end."""
        (first, start), (last, end) = self._marks[0], self._marks[-1]
        if last <= first or self.total_steps <= 0:
            return None
        return max(self.total_steps - last, 0) * max(end - start, 0.0) / (last - first)

    def line(self, metrics: Mapping[str, float]) -> str:
        total = str(self.total_steps) if self.total_steps else ""
        count = f"{self.step:>{max(len(total), 5)}}" + (f"/{total}" if total else "")
        parts = [f"step {count}", *(text for _, text in _highlights(metrics))]
        eta = self.eta_seconds()
        if eta is not None:
            parts.append(f"eta {duration(eta)}")
        return "  ".join(parts)


def _highlights(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The few numbers worth a line, as (tag, text), where `metrics` has them."""
    forms = {
        "train/loss": lambda value: f"loss {value:.4f}",
        "eval/loss": lambda value: f"eval loss {value:.4f}",
        "perf/tokens_per_s": lambda value: f"{_si(value)} tokens/s",
        "perf/tflops_per_device": lambda value: f"{_short(value)} TFLOP/s/device",
        "perf/mfu": lambda value: f"MFU {value:.1%}",
    }
    for tag, form in forms.items():
        if tag in metrics:
            yield tag, form(float(metrics[tag]))
    wait, whole = metrics.get("perf/data_wait_s"), metrics.get("perf/step_s")
    if wait is not None and whole:
        yield "perf/data_wait_s", f"data wait {wait / whole:.0%}"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _si(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f}{unit}"
    return f"{value:.0f}"


def _number(value: float) -> str:
    return _si(value) if value >= 10_000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """As people write it: `1m05s`."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


class _LiveView:
    """The part of a terminal that is redrawn: latest metrics, stage, progress bar."""

    def __init__(self, stream: TextIO):
        from rich.console import Console as RichConsole

        self.stage: tuple[str, float] | None = None
        self.progress: _Progress | None = None
        self.metrics: dict[str, float] = {}
        self._console = RichConsole(
            file=stream, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        self._live: Live | None = None

    def start(self) -> None:
        from rich.live import Live

        if self._live is None:
            # Reads the fields above at every redraw, so setting them is enough.
            self._live = Live(console=self._console, get_renderable=self._draw)
            with contextlib.suppress(OSError, ValueError):
                self._live.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.stop()
        self._live = None

    def print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[ConsoleRenderable] = []
        if self.metrics:
            parts.append(self._draw_metrics())
        if self.stage is not None:
            name, start = self.stage
            minutes, seconds = divmod(int(time.monotonic() - start), 60)
            parts.append(Text(f"{name} ... {minutes:02d}:{seconds:02d}", style="yellow"))
        if self.progress is not None:
            parts.append(self._draw_progress(self.progress))
        return Group(*parts)

    def _draw_metrics(self) -> ConsoleRenderable:
        """Every tag of a prefix in one column: train, perf, pipe, eval."""
        from rich import box
        from rich.table import Table

        groups: dict[str, list[str]] = {}
        texts = dict(_highlights(self.metrics))
        for tag, value in self.metrics.items():
            prefix, _, name = tag.partition("/")
            groups.setdefault(prefix, []).append(texts.get(tag, f"{name} {_number(value)}"))
        table = Table(*groups, box=box.SIMPLE_HEAD)
        for row in range(max(map(len, groups.values()))):
            table.add_row(*(rows[row] if row < len(rows) else "" for rows in groups.values()))
        return table

    def _draw_progress(self, progress: _Progress) -> ConsoleRenderable:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        eta = progress.eta_seconds()
        total = progress.total_steps
        line = Table.grid(padding=(0, 1))
        line.add_row(
            f"step {progress.step}/{total}" if total else f"step {progress.step}",
            ProgressBar(total=total or None, completed=progress.step, width=40),
            "" if eta is None else f"eta {duration(eta)}",
        )
        return line
