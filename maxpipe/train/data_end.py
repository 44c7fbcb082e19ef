"""Determine where a run's data ends and how many steps can be trained.

`SlowDataMonitor` reports the source and the file if a run waits for data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig
from maxpipe.config.sections.train import total_steps
from maxpipe.data.formats.source import longest_active_read, take_read_times
from maxpipe.data.loader import Loader
from maxpipe.data.sources import section_of
from maxpipe.distributed.phases import DATA, Phases
from maxpipe.errors import Code, ConfigError
from maxpipe.io.formatting import pluralize
from maxpipe.telemetry.console import Console


def last_step(train: Loader, length: int, offset: int, first: int) -> int:
    """Return the last step for which data exists, between `first` and `length`.

    `offset` is the number of skipped batches, and `first` is the last completed step.
    """
    return int(max(first, min(length, train.last_batch - offset)))


def check_enough_data(train: Loader, length: int, offset: int) -> None:
    """Raise ConfigError if `data.end` is `fail` and the data ends before the run."""
    if train.ending is None or train.ending.policy != "fail":
        return
    number, name = train.first_exhausted()
    if train.ramp.sequences_before(length + offset) <= number:
        return
    steps = train.ramp.num_batches(number + 1) - 1 - offset
    raise ConfigError.one(
        Code.DATA_END,
        "data.end",
        "fail",
        f"must be repeat or stop for a run of {pluralize(length, 'step')}: {section_of(name)} has "
        f"documents for {max(0, steps)}.",
        f"Set train.steps={max(1, steps)}, data.end=stop to end there, or data.end=repeat.",
    )


def resolve_last_step(
    loaded: LoadedConfig, train: Loader, offset: int, first: int, console: Console
) -> int:
    """Return the last step of a run that resumes after step `first`, and report if the data ends
    early.

    Raises:
        ConfigError: `first` exceeds the configured number of steps, or the data ends before the run
            and `data.end` is `fail`.
    """
    config = loaded.config
    length = total_steps(config.train)
    if first > length:
        raise ConfigError.one(
            Code.RUN_FINISHED,
            error_location("train.steps" if config.train.steps else "train.tokens", loaded.origins),
            config.train.steps or config.train.tokens,
            f"is {pluralize(length, 'step')}; must be at least {first}, the step that this "
            "run starts from.",
            f"Set train.steps={first} or more, or run.name to a new name.",
        )
    check_enough_data(train, length, offset)
    last = last_step(train, length, offset, first)
    if last < length:
        console.note(
            f"data: ends at step {last} of {length}, and the run stops there (data.end=stop), but "
            f"the learning-rate schedule spans {pluralize(length, 'step')}"
        )
    return last


_PERIOD_SECONDS = 1.0
_SLOW_SECONDS = 10.0
"""Time after which a slow document is reported. The report is repeated each time the wait
doubles."""
_WINDOW_SECONDS, _WAIT_SHARE = 10.0, 0.5
"""Minimum duration of a window of steps, and fraction of that duration spent waiting for data above
which a warning is printed."""
_QUIET_SECONDS = 600.0
"""Minimum time between two warnings that steps spend most of their time waiting for data."""


class SlowDataMonitor:
    """Warns about documents that are slow to read, and about steps that spend most of their time
    waiting for data.

    When used as a context manager, the monitor runs in a background thread, which also passes the
    current document to `phases` for stall reports.
    """

    def __init__(self, phases: Phases, warn: Callable[[str], object], threads: int):
        """Initialize the monitor; `threads` is the number of reading threads."""
        self._phases, self._warn, self._threads = phases, warn, threads
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slow data", daemon=True)
        self._slow_read, self._next_warning = (0.0, ""), 0.0
        self._waited = self._seconds = 0.0
        self._has_begun = False
        self._quiet_until = 0.0

    def __enter__(self) -> SlowDataMonitor:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_PERIOD_SECONDS):
            self._poll(time.monotonic())

    def _poll(self, now: float) -> None:
        read = longest_active_read()
        seconds = 0.0 if read is None else now - read.begun
        if read is None or seconds < _SLOW_SECONDS:
            self._phases.detail = ""
            return
        if self._slow_read[0] != read.begun:
            self._slow_read, self._next_warning = (read.begun, str(read)), 0.0
        self._phases.detail = self._slow_read[1]
        if read.verb != "reading" or seconds < self._next_warning:
            return
        self._next_warning = 2 * seconds
        waits = ", and the run waits for it" if self._phases.status().phase == DATA else ""
        self._warn(
            f"{self._slow_read[1]}, has lasted {seconds:.0f} s so far{waits}: the disk, bucket or "
            "host is slow or unavailable, or the document is too long and should be split"
        )

    def record_steps(self, waited: float, seconds: float) -> None:
        """Record that steps lasted `seconds`, including `waited` seconds spent waiting for data."""
        if not self._has_begun:  # reading the first batches takes longer
            self._has_begun = True
            take_read_times()
            return
        self._waited, self._seconds = self._waited + waited, self._seconds + seconds
        if self._seconds < _WINDOW_SECONDS:
            return
        share, window_seconds = self._waited / self._seconds, self._seconds
        spent = take_read_times()
        self._waited = self._seconds = 0.0
        now = time.monotonic()
        if share < _WAIT_SHARE or now < self._quiet_until or spent.slowest is None:
            return
        self._quiet_until = now + _QUIET_SECONDS
        source = max(spent.sources, key=lambda name: spent.sources[name], default="data")
        self._warn(
            f"steps waited for data for {share:.0%} of the last {window_seconds:.0f} s: reading "
            f"{source} used {spent.sources.get(source, 0.0):.1f} s across {self._threads} threads, "
            f"including {spent.seconds:.2f} s for {spent.slowest}.  Prepare the documents with "
            "`maxpipe data prepare`, or increase data.threads."
        )
