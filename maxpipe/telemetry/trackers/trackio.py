"""Tracker for trackio, which stores runs on this machine or in a Hugging Face Space."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker

_KEY_CHARS = 6
_POLL_SECONDS = 0.05


class TrackioTracker(Tracker):
    """Writes the records to a trackio run. trackio identifies a run by its name, which therefore
    ends with a part of the key.
    """

    def __init__(self) -> None:
        import trackio

        self._trackio: Any = trackio
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
        stem = name.partition(".")[0]
        self._log_file(f"{stem}-{self._run.name}", stem, name, text)

    def log_checkpoint(self, step: int, folder: str, num_bytes: int) -> None:
        content = {"step": step, "bytes": num_bytes, "path": f"{folder}/{step}"}
        text, name = json.dumps(content), f"checkpoint-{self._run.name}"
        self._log_file(name, "model", "checkpoint.json", text, [f"step-{step}"])

    def _log_file(
        self, name: str, kind: str, file: str, text: str, aliases: Sequence[str] = ()
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            path.write_text(text, encoding="utf-8")
            self._run.log_artifact(path, name=name, type=kind, aliases=[*aliases])

    def close(self, is_complete: bool) -> None:
        self._run.finish()

    @property
    def address(self) -> str:
        return f"trackio show --project {self._run.project}"
