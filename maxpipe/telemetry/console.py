"""Console output of a run, and progress displays of long commands.

A closed terminal never stops a run: output is lost, but the run continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from maxpipe.io import redact

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable, RenderableType
    from rich.live import Live
import threading
from typing import Any, Self

from maxpipe.errors import StorageError

_log = logging.getLogger("maxpipe")

# Number of logged steps over which the step rate is averaged: enough for a stable rate, but few
# enough to reveal a slowdown quickly.
_RATE_WINDOW = 20


class Console:
    """Prints a run's output for the user.

    `live` draws a view that is updated in place, `plain` prints lines, and `auto` selects `live` on
    a terminal and `plain` otherwise. Process 0 prints everything; other processes print only
    warnings, with their process index. While the console is open, it also prints the log records of
    maxpipe (level INFO and above) and of libraries (level WARNING and above).
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
        """Print the properties of the run, one `(name, value)` per line."""
        width = max((len(name) for name, _ in rows), default=0)
        self._print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show `name`, e.g. "compiling train step", while the body runs, then print the elapsed
        time.
        """
        start, name = time.monotonic(), redact.redact_text(name)
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
        """Start the progress bar after compilation, with `step` of `total_steps` completed."""
        self._progress = _Progress(step, total_steps)
        if self._view is not None:
            self._view.progress = self._progress
            self._view.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one logged step, keyed by the metric tags used in `metrics.jsonl`."""
        self._progress.advance(step)
        if self._view is not None:
            # Create a new dict, because another thread may be drawing the old one.
            latest = {tag: float(value) for tag, value in metrics.items()}
            self._view.metrics = self._view.metrics | latest
        else:
            self._print(self._progress.line(metrics))

    def note(self, text: str) -> None:
        """Print a message if this is process 0."""
        self._print(text)

    def tell(self, text: str) -> None:
        """Print a message from any process, prefixed with the process index unless that is 0."""
        named = f"[process {self._process_index}] " if self._process_index else ""
        self._print(f"{named}{text}", every_process=True)

    def warn(self, text: str) -> None:
        """Print a warning, no matter which process calls this method."""
        self.tell(f"warning: {text}")

    def close(self) -> None:
        """Stop updating the live view, leaving its last state on the screen."""
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
        text = redact.redact_for_terminal(text)
        # A closed terminal (EIO, EPIPE or a closed stream) must not end the run.
        with contextlib.suppress(OSError, ValueError):
            if self._view is not None:
                self._view.print(text)
            else:
                # Use one write call, so that lines from several threads are not interleaved.
                print(f"{text}\n", end="", file=self._stream, flush=True)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _show_logs(console: Console) -> Callable[[], None]:
    """Send log records to `console`, and return a function that restores the previous handlers."""
    # Import absl first: if jax or orbax imported it later, absl would add its handler again.
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
    """Progress of a run: step, rate and remaining time."""

    def __init__(self, first_step: int = 0, total_steps: int = 0):
        self.step = first_step
        self.total_steps = total_steps
        self._marks = deque([(first_step, time.monotonic())], maxlen=_RATE_WINDOW)

    def advance(self, step: int) -> None:
        self.step = step
        self._marks.append((step, time.monotonic()))

    def eta_seconds(self) -> float | None:
        """Return the estimated time in seconds until the last step, or None if it is unknown."""
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
    """Yield (tag, formatted value) for each key metric in `metrics`."""
    forms = {
        "train/loss": lambda value: f"loss {value:.4f}",
        "rollout/reward": lambda value: f"reward {value:.3f}",
        "eval/loss": lambda value: f"eval loss {value:.4f}",
        "train/epochs": lambda value: f"epochs {value:.2f}",
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
    """Format a duration, for example as `1m05s`."""
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
    """The terminal area that is redrawn in place: latest metrics, stage and progress bar."""

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
            # Every redraw reads `stage`, `progress` and `metrics`, so setting them is sufficient.
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
        """Draw a table with one column per tag prefix: train, perf, pipe, eval."""
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


# --- progress of long commands ------------------------------------------------

_LINE_SECONDS = 5.0
_PHASE_SECONDS = 10.0


def print_line(text: str) -> None:
    """Print a line. If the program reading the output has exited, the command continues.

    Raises:
        StorageError: standard output cannot be written to, for example because the disk is full.
    """
    try:
        print(redact.redact_for_terminal(text), flush=True)
    except BrokenPipeError:
        pass  # the command must finish even if the reader, e.g. `head`, has exited
    except OSError as error:
        action = "Free up space on the output's disk, or redirect the output."
        raise StorageError.unwritable("standard output", error, action) from error


class ProgressBar:
    """Progress display on standard error: a bar on a terminal, otherwise a line every few
    seconds.
    """

    def __init__(self, unit: str = "") -> None:
        self._unit = unit
        self._bar: Any = None
        self._task: Any = None
        self._name = self._of = ""
        self._next = time.monotonic() + _LINE_SECONDS
        self._start = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import TextColumn

            columns = (*Bar.get_default_columns(), TextColumn("{task.fields[remark]}"))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()

    def report(self, task: str, done: int, total: int, remark: str = "") -> None:
        """Show a task's progress, with a note such as the rate.

        If `task` is empty, the previous task continues. If `total` is 0, the total is unknown.
        """
        if task:
            self._name, self._of = task, f"{done} of {total}{self._unit}, " if total else ""
            self._of += f"{remark}, " if remark else ""
        if self._bar is not None:
            if task and (self._task is None or task != self._bar.tasks[-1].description):
                self._task = self._bar.add_task(task, total=total or None, remark="")
            if task:
                self._bar.update(self._task, completed=done, remark=remark)
        elif self._name and (now := time.monotonic()) >= self._next:
            self._next = now + _LINE_SECONDS
            line = f"{self._name}: {self._of}{now - self._start:.0f} s"
            with contextlib.suppress(OSError):  # stderr is closed
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the progress bar."""
        if self._bar is not None:
            self._bar.stop()


class PhaseProgress:
    """Show the current phase and elapsed time of a command whose total work is unknown.

    On a terminal, one line is updated in place; otherwise, a line is printed every ten seconds. A
    thread prints the lines, because each phase is one long, blocking call.
    """

    def __init__(self, command: str) -> None:
        self._command, self._phase = command, "starting"
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, phase: str) -> None:
        """Start a phase with this name."""
        self._phase = phase

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        is_terminal = sys.stderr.isatty()
        while not self._ended.wait(1.0 if is_terminal else _PHASE_SECONDS):
            self._write(f"\r\x1b[K{self._line()}" if is_terminal else f"{self._line()}\n")
        if is_terminal:
            self._write("\r\x1b[K")

    def _line(self) -> str:
        return f"{self._command}: {self._phase}, {time.monotonic() - self._start:.0f} s"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(text)
            sys.stderr.flush()
