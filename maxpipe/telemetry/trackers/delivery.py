"""Deliver the records of `metrics.jsonl` to experiment trackers without slowing training.

`metrics.jsonl` is the queue: the training thread only wakes one daemon thread per tracker, which
reads the records after its cursor and sends them to the process of the client. The cursors are in
`trackers.json` in the run folder. After an outage, a resume or a rollback, a thread therefore
continues at the first record that was not delivered, and holds no records in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from maxpipe.config.config_files import METRICS_FILE, TRACKERS_FILE
from maxpipe.config.sections.tracker import TrackerConfig
from maxpipe.io import files
from maxpipe.io.formatting import pluralize
from maxpipe.io.typed_json import parse_json
from maxpipe.io.worker_process import WorkerProcess
from maxpipe.telemetry.background import BackgroundWorker, RateLimiter
from maxpipe.telemetry.trackers import worker
from maxpipe.telemetry.trackers.interface import TrackedRun
from maxpipe.telemetry.writers import EventLog, OwnershipCheck

_log = logging.getLogger("maxpipe")

START_SECONDS = 120.0
"""Time limit for importing a client and opening a run."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 60.0
"""Pauses between attempts, which double after each failure."""
_CLOSING_RETRY_SECONDS = 0.5
_FAILURES_BEFORE_RESTART = 5
_BATCH = 200
"""Maximum number of records in one request."""
_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
"""Bytes of `metrics.jsonl` that are sent to a tracker without history after a restart."""
_MAX_REPLY_BYTES = 1 << 16
_MAX_CURSOR_BYTES = 1 << 20
_MAX_ARTIFACTS = 64
_MAX_STEP = 1 << 53
_STEP = re.compile(rb'\{"step": (\d{1,18}),')
"""Start of a line of `metrics.jsonl`."""


class Cursor(TypedDict):
    """Position of one tracker in `trackers.json`."""

    key: str
    """Random identifier of the run."""
    run_id: str
    """Identifier of the run in the service; empty if the run was not opened."""
    step: int
    """Step of the last delivered record, or -1."""
    tags: list[str] | None
    """Delivered tags of that record, to which tags may be added; None for all tags."""


class Cursors:
    """The file `trackers.json`, which is shared by the threads of all trackers."""

    def __init__(self, run_dir: Path, ours: OwnershipCheck):
        self._path, self._is_owned, self._lock = run_dir / TRACKERS_FILE, ours, threading.Lock()
        self._cursors: dict[str, Cursor] = {}
        self._limiter = RateLimiter()
        try:
            self._cursors = parse_json(files.read(self._path, _MAX_CURSOR_BYTES), dict[str, Cursor])
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning(
                "cannot read %s: %s. Each tracker starts another run, and receives all records.",
                self._path,
                error,
            )

    def get(self, name: str) -> Cursor:
        """Return the cursor of a tracker; a new one if the tracker has none."""
        new = Cursor(key=secrets.token_hex(8), run_id="", step=-1, tags=None)
        return self._cursors.get(name, new)

    def save(self, name: str, cursor: Cursor) -> None:
        """Write the cursor of a tracker, unless this process has lost the lock of the run."""
        if not self._is_owned():
            return
        with self._lock:
            self._cursors[name] = cursor
            try:
                files.write(self._path, json.dumps(self._cursors, indent=1))
            except OSError as error:
                if self._limiter.allows():
                    _log.warning(
                        "cannot write %s: %s. Training continues, but if the run restarts now, "
                        "records are sent again, or another run is started in the tracker.",
                        self._path,
                        error.strerror or error,
                    )


class _Line(NamedTuple):
    """Undelivered part of a line of `metrics.jsonl`."""

    offset: int
    step: int
    time: float
    values: dict[str, float]
    tags: list[str]
    """All tags of the line."""


class RecordReader:
    """Reads the records of `metrics.jsonl` after a step, while the run appends to the file."""

    def __init__(self, path: Path, step: int, tags: Sequence[str] | None):
        self._path = path
        self.move(step, tags)

    def move(self, step: int, tags: Sequence[str] | None) -> None:
        """Continue after a step whose `tags` were delivered, or all its tags if None."""
        self.step = step
        self.tags: frozenset[str] | None = None if tags is None else frozenset(tags)
        self._offset = 0

    def skip_to_tail(self) -> None:
        """Continue with the last records of the file, as if none had been read."""
        self.step, self.tags = -1, None
        with contextlib.suppress(OSError):
            self._offset = max(0, os.path.getsize(self._path) - _TAIL_BYTES)

    def rewind(self, step: int) -> None:
        """Continue after `step`, unless the position is at an earlier step."""
        if self.step > step:
            self.step, self.tags = step, None
        self._offset = 0

    def read(self, most: int = _BATCH) -> list[_Line]:
        """Return the next records, or the added tags of the last one. The position does not change.

        Raises:
            OSError: the file cannot be read.
        """
        lines: list[_Line] = []
        offset = self._offset
        while len(lines) < most:
            offset, block = self._read_block(offset)
            if not block:
                break
            for text in block.splitlines(keepends=True):
                if len(lines) < most and (line := self._parse(offset, text)):
                    lines.append(line)
                offset += len(text)
        return lines

    def advance(self, line: _Line) -> None:
        """Set the position to a delivered record."""
        self.step, self.tags, self._offset = line.step, frozenset(line.tags), line.offset

    def count(self) -> int:
        """Return the number of records that were not delivered."""
        saved, total = (self.step, self.tags, self._offset), 0
        with contextlib.suppress(OSError):
            while lines := self.read():
                total += len(lines)
                self.advance(lines[-1])
        self.step, self.tags, self._offset = saved
        return total

    def _read_block(self, offset: int) -> tuple[int, bytes]:
        """Return complete lines from `offset`, and their offset. A line that exceeds the size of a
        block is damaged, such as a hole after a crash, and is skipped.
        """
        try:
            with open(files.open_regular(self._path), "rb") as file:
                file.seek(offset)
                block = file.read(_READ_BYTES)
                while len(block) == _READ_BYTES and b"\n" not in block:
                    while block and b"\n" not in block:
                        offset += len(block)
                        block = file.read(_READ_BYTES)
                    offset += block.find(b"\n") + 1
                    file.seek(offset)
                    block = file.read(_READ_BYTES)
        except FileNotFoundError:
            return offset, b""
        return offset, block[: block.rfind(b"\n") + 1]

    def _parse(self, offset: int, text: bytes) -> _Line | None:
        if (begin := _STEP.match(text)) and int(begin[1]) < self.step:
            return None  # delivered records need not be parsed
        try:
            record = parse_json(text, dict[str, Any])
            step, seconds = record.pop("step"), _seconds(record.pop("time", ""))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None  # incomplete, or the start of the tail of the file
        if type(step) is not int or not 0 <= step < _MAX_STEP:
            return None
        if step < self.step or (step == self.step and self.tags is None):
            return None
        delivered = self.tags if step == self.step and self.tags else frozenset()
        values = {
            tag: math.nan if value is None else float(value)
            for tag, value in record.items()
            if tag not in delivered and (value is None or isinstance(value, int | float))
        }
        return _Line(offset, step, seconds, values, list(record)) if values else None


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else time.time()


class _DeliveryError(Exception):
    """A tracker did not accept a request. The message is shown to the user."""


@dataclass(frozen=True)
class TrackingContext:
    """Objects that the deliveries of a run share."""

    run_dir: Path
    config: TrackerConfig
    plugins: Sequence[str]
    """Plug-ins that define trackers."""
    describe: Callable[[], TrackedRun]
    """Return the description of the run. The call may take seconds."""
    events: EventLog
    warn: Callable[[str], None]
    note: Callable[[str], None]
    ours: OwnershipCheck


class Delivery:
    """Delivers records to one tracker from a daemon thread."""

    def __init__(self, name: str, context: TrackingContext, cursors: Cursors):
        self.name, self._context, self._cursors = name, context, cursors
        self._cursor = cursors.get(name)
        path = context.run_dir / METRICS_FILE
        self._reader = RecordReader(path, self._cursor["step"], self._cursor["tags"])
        self._lock, self._generation = threading.Lock(), 0
        self._pending: deque[dict[str, Any]] = deque(maxlen=_MAX_ARTIFACTS)
        self._process: WorkerProcess | None = None
        self._keeps_history, self._settle_seconds = True, 0.0
        self._settling: deque[tuple[float, int, frozenset[str] | None]] = deque()
        """Positions that become the cursor at a time, which the client needs to store records."""
        self._failures, self._retry_at, self._failing_since = 0, 0.0, 0.0
        self._limiter, self._is_reported = RateLimiter(), False
        self._warning = ""
        """Last warning of the tracker."""
        self._artifact_limiter, self._artifacts_at = RateLimiter(), 0.0
        self._closing: bool | None = None
        """Whether the run is complete; None before the end of the run."""
        self._is_abandoned = self._is_closed = False
        self._thread = BackgroundWorker[bool](f"tracker {name}", self._run, capacity=1)

    def start(self) -> None:
        """Start the thread, which opens the run in the service."""
        self._thread.start()

    def wake(self) -> None:
        """Deliver the records that were added to `metrics.jsonl`; returns immediately."""
        self._thread.put(True)  # if a call is pending already, it also reads the new records

    def send(self, request: dict[str, Any]) -> None:
        """Send an artifact or a checkpoint; returns immediately."""
        self._pending.append(request)
        self.wake()

    def rewind(self, step: int) -> None:
        """Deliver records after `step` again, because the run repeats these steps."""
        with self._lock:
            self._reader.rewind(step)
            self._generation += 1
            self._settling = deque(each for each in self._settling if each[1] <= step)
            if self._cursor["step"] > step:
                self._cursor["step"], self._cursor["tags"] = step, None

    def end(self, is_complete: bool) -> None:
        """Make the thread deliver all records and close the run; returns immediately."""
        self._closing = is_complete
        self._thread.end()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread. Report records that were not delivered in time."""
        if not self._thread.join(seconds):
            self._is_abandoned = True
            if (process := self._process) is not None:
                process.kill()
            self._thread.join(1.0)
        if left := self._reader.count():
            self._context.events.write("tracker_undelivered", tracker=self.name, records=left)
            self._context.warn(
                f"tracker {self.name}: {pluralize(left, 'record')} of {METRICS_FILE} not "
                "delivered. The same command sends them when it runs again."
            )
        elif not self._is_closed:
            limit = self._context.config.exit_timeout_seconds
            self._context.warn(
                f"tracker {self.name}: all records were sent, but the client did not finish "
                f"within tracker.exit_timeout_seconds={limit:g}"
            )

    def _run(self, item: bool | None) -> float | None:
        if self._is_abandoned or self._is_closed:
            return None
        wait = self._retry_at - time.monotonic()
        if wait > 0 and self._closing is None:
            return wait
        try:
            self._deliver()
        except (_DeliveryError, OSError) as error:
            return self._fail(str(error))
        self._recover()
        return None

    def _deliver(self) -> None:
        closing = self._closing  # read first: later records cause another call
        if self._process is None:
            self._connect()
        while True:
            with self._lock:
                generation, lines = self._generation, self._reader.read()
            if not lines:
                break
            self._request({"records": [[each.step, each.time, each.values] for each in lines]})
            with self._lock:
                if generation == self._generation:  # else the run has removed these records
                    self._reader.advance(lines[-1])
                    self._add_settling(self._settle_seconds)
                    self._save()
        self._send_artifacts(is_last=closing is not None)
        if closing is not None:
            self._request({"close": closing})
            self._is_closed = True
            with self._lock:
                self._settling.clear()
                self._add_settling(0.0)
                self._save()
            self._stop()

    def _send_artifacts(self, *, is_last: bool) -> None:
        """Send pending artifacts. An artifact that the tracker does not accept delays no records,
        and is sent again later.
        """
        now = time.monotonic()
        if now < self._artifacts_at and not is_last:
            return
        for request in [*self._pending]:
            try:
                self._request(request)
            except _DeliveryError as error:
                if self._process is None:
                    raise
                self._artifacts_at = now + LAST_RETRY_SECONDS
                if self._artifact_limiter.allows():
                    kind = next(iter(request))
                    self._context.warn(f"tracker {self.name}: {kind} not accepted: {error}")
            else:
                self._pending.remove(request)

    def _add_settling(self, seconds: float) -> None:
        """Move the cursor to the current position in `seconds`."""
        if self._keeps_history:
            due = time.monotonic() + seconds
            self._settling.append((due, self._reader.step, self._reader.tags))

    def _save(self) -> None:
        """Write the position of the last record that the client has stored durably."""
        now = time.monotonic()
        while self._settling and now >= self._settling[0][0]:
            _, step, tags = self._settling.popleft()
            self._cursor["step"] = step
            self._cursor["tags"] = None if tags is None else sorted(tags)
        self._cursors.save(self.name, self._cursor)

    def _connect(self) -> None:
        """Start the process of the client, and open the run in the service."""
        described = dataclasses.replace(self._context.describe(), key=self._cursor["key"])
        with self._lock:
            self._save()  # if this process is killed, the next one uses the same key
            # Records that a previous process of the client did not store are sent again.
            self._settling.clear()
            self._reader.move(self._cursor["step"], self._cursor["tags"])
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = WorkerProcess(
            [sys.executable, "-P", "-m", worker.__name__],
            os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
            most_answer_bytes=_MAX_REPLY_BYTES,
            shows_errors=bool(os.environ.get("MAXPIPE_DEBUG")),
            own_session=True,  # Ctrl-C reaches only the run
        )
        try:
            create = {"tracker": self.name, "plugins": [*self._context.plugins]}
            reply = self._request(create, START_SECONDS)
            self._keeps_history = bool(reply["keeps_history"])
            self._settle_seconds = float(reply["settle_seconds"])
            if not self._keeps_history:
                with self._lock:
                    self._reader.skip_to_tail()
            opening = {"open": dataclasses.asdict(described), "run_id": self._cursor["run_id"]}
            reply = self._request(opening, START_SECONDS)
        except _DeliveryError:
            self._stop()
            raise
        if not self._cursor["run_id"]:
            address = f": {reply['address']}" if reply["address"] else ""
            self._context.note(f"tracker {self.name}: run {reply['run_id']}{address}")
        with self._lock:
            self._cursor["run_id"] = reply["run_id"]
            self._save()

    def _request(
        self, request: Mapping[str, Any], seconds: float | None = None
    ) -> Mapping[str, Any]:
        """Send a request to the process of the client, and return its response."""
        process, config = self._process, self._context.config
        if process is None or self._is_abandoned:
            raise _DeliveryError("the run has ended")
        seconds = config.request_timeout_seconds if seconds is None else seconds
        try:
            line = process.request(json.dumps(request).encode() + b"\n", seconds)
            reply = json.loads(line)
        except TimeoutError:
            self._stop()
            raise _DeliveryError(f"no response within {seconds:g} s") from None
        except (OSError, ValueError):
            self._stop()
            raise _DeliveryError("the process of the client ended") from None
        if "error" in reply:
            raise _DeliveryError(reply["error"])
        if (warning := reply.get("warning", self._warning)) != self._warning:
            self._warning = warning
            if warning:
                self._context.warn(f"tracker {self.name}: {warning}")
        return reply

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _fail(self, reason: str) -> float | None:
        """Record a failure, and return the pause in seconds before the next attempt."""
        if self._is_abandoned:
            return None
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._failures += 1
        if self._failures % _FAILURES_BEFORE_RESTART == 0:
            self._stop()
        pause = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(self._failures - 1, 10))
        self._retry_at = now + pause
        if self._limiter.allows():
            self._is_reported = True
            self._context.events.write(
                "tracker_failed", tracker=self.name, reason=reason, failures=self._failures
            )
            self._context.warn(
                f"tracker {self.name}: {reason}. Training continues, and all records are sent "
                "when the tracker works again."
            )
        return pause if self._closing is None else _CLOSING_RETRY_SECONDS

    def _recover(self) -> None:
        if self._is_reported:
            seconds = round(time.monotonic() - self._failing_since, 1)
            self._context.events.write(
                "tracker_recovered", tracker=self.name, failures=self._failures, seconds=seconds
            )
            self._context.note(f"tracker {self.name}: works again after {seconds:g} s")
        self._failures, self._retry_at, self._failing_since = 0, 0.0, 0.0
        self._is_reported = False


class Trackers:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], context: TrackingContext):
        cursors = Cursors(context.run_dir, context.ours)
        self._seconds = context.config.exit_timeout_seconds
        self._deliveries = [Delivery(name, context, cursors) for name in names]
        self._is_started = False

    def restart(self, step: int) -> None:
        """Begin or continue after `step`; records of later steps will be repeated."""
        for each in self._deliveries:
            each.rewind(step)
            each.wake() if self._is_started else each.start()
        self._is_started = True

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Deliver a record that was added to `metrics.jsonl`; returns immediately."""
        for each in self._deliveries:
            each.wake()

    def log_artifact(self, name: str, text: str) -> None:
        """Store a text file; returns immediately."""
        for each in self._deliveries:
            each.send({"artifact": [name, text]})

    def log_checkpoint(self, step: int, folder: str, num_bytes: int) -> None:
        """Store a reference to a checkpoint; returns immediately."""
        for each in self._deliveries:
            each.send({"checkpoint": [step, folder, num_bytes]})

    def close(self, is_complete: bool) -> None:
        """Wait until all records are delivered, at most `tracker.exit_timeout_seconds`."""
        if not self._is_started:
            return
        deadline = time.monotonic() + self._seconds
        for each in self._deliveries:
            each.end(is_complete)
        for each in self._deliveries:
            each.join(deadline - time.monotonic())
