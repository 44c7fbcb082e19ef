"""Tracker for trackio, which stores runs on this machine or in a Hugging Face Space."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker

_KEY_CHARS = 6
_POLL_SECONDS = 0.05


class TrackioTracker(Tracker):
    """Writes the records to a trackio run. trackio identifies a run by its name, which therefore
    ends with a part of the key.
    """

    def __init__(self) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run: Any = None

    def open(self, run: TrackedRun, run_id: str) -> str:
        self._run = self._trackio.init(
            project=run.project,
            name=run_id or f"{run.name}-{run.key[:_KEY_CHARS]}",
            space_id=run.tracker_config.trackio_space or None,
            config={**run.config, **{f"maxpipe.{key}": text for key, text in run.tags.items()}},
            resume="allow",
            embed=False,
        )
        return str(self._run.name)

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(dict(record.values), step=record.step)
        # trackio writes records in a thread and has no call that waits for it, except the end of
        # the run. The caller limits the time.
        while getattr(self._run, "_queued_logs", ()) or getattr(self._run, "_sending_batch", None):
            time.sleep(_POLL_SECONDS)

    def log_artifact(self, name: str, text: str) -> None:
        content = self._trackio.Markdown(f"```\n{text}\n```")
        self._run.log({f"artifacts/{name}": content})

    def close(self, is_complete: bool) -> None:
        self._run.finish()

    @property
    def address(self) -> str:
        return f"trackio show --project {self._run.project}"
