"""Interface of experiment trackers.

A tracker receives the records of `metrics.jsonl`. It runs in a separate process, which maxpipe
restarts if a call hangs. A tracker therefore needs no threads, queues or retries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from maxpipe.config.sections.tracker import TrackerConfig


class Record(NamedTuple):
    """Metrics of one step."""

    step: int
    time: float
    """Time of the record, in seconds since 1970."""
    values: Mapping[str, float]
    """Values keyed by metric tag. A value that is not finite is NaN, because `metrics.jsonl`
    contains null for it. If metrics are added to a step later, such as those of an evaluation,
    another record with the same step contains only the added metrics."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of the run that a tracker receives. It contains no secrets."""

    name: str
    project: str
    key: str
    """Random identifier of the run, which is the same after a resume."""
    folder: str
    """Absolute path of the run folder."""
    config: Mapping[str, Any]
    """Config values, keyed by full key."""
    tags: Mapping[str, str]
    """Versions, and the git commit of the working directory."""
    tracker_config: TrackerConfig


class Tracker(ABC):
    """Adapter for an experiment-tracking service.

    All methods may block and may raise exceptions. After an exception, the same call is repeated
    later. Records are delivered in the order of their steps. After a resume or a rollback, steps
    are repeated: the newest record of a step is valid.
    """

    keeps_history: ClassVar[bool] = True
    """Whether the service stores all records. If False, only recent records are sent after a
    restart."""
    settle_seconds: ClassVar[float] = 0.0
    """Time after which the client has stored a record durably, if `log` returns earlier. The cursor
    in `trackers.json` lags by this time, so that a killed run sends the newest records again."""

    @abstractmethod
    def open(self, run: TrackedRun, run_id: str) -> str:
        """Create a run in the service, or continue the run `run_id` unless it is empty.

        Returns:
            The identifier of the run in the service.
        """

    @abstractmethod
    def log(self, records: Sequence[Record]) -> None:
        """Store records, and return when the client or the service has stored them."""

    def log_artifact(self, name: str, text: str) -> None:  # noqa: B027
        """Store a text file."""

    def log_checkpoint(self, step: int, folder: str, num_bytes: int) -> None:  # noqa: B027
        """Store a reference to a checkpoint, without its content."""

    def close(self, is_complete: bool) -> None:  # noqa: B027
        """Mark the run as complete or stopped, and wait until all records are stored."""

    @property
    def warning(self) -> str:
        """Problem that delays no records, or an empty string. It is printed once."""
        return ""

    @property
    def address(self) -> str:
        """URL or path where the run can be viewed, or an empty string."""
        return ""
