"""Tracker for Weights & Biases.

W&B numbers the rows of a run itself and rejects smaller numbers. Each row therefore contains the
step of the run in the column `step`, which is the axis of all charts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker


class WandbTracker(Tracker):
    """Writes the records to a W&B run. The client stores rows in `wandb/` in the run folder before
    it uploads them.
    """

    # The client writes its buffers a few seconds after a row (measured with version 0.31).
    settle_seconds: ClassVar[float] = 20.0

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def open(self, run: TrackedRun, run_id: str) -> str:
        tracker_config = run.tracker_config
        project = run.project
        if project == "maxpipe":
            project = os.environ.get("WANDB_PROJECT", project)
        self._run = self._wandb.init(
            project=project,
            entity=tracker_config.wandb_entity or None,
            id=run_id or os.environ.get("WANDB_RUN_ID") or run.key,
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", run.folder),
            config={**run.config, **{f"maxpipe/{key}": text for key, text in run.tags.items()}},
            resume="allow",
            reinit="finish_previous",  # a previous call may have failed after its first half
            settings=self._wandb.Settings(
                console="off",
                disable_git=True,  # W&B would upload uncommitted changes, which may hold secrets
                disable_code=True,
                silent=True,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({**record.values, "step": record.step})

    def log_artifact(self, name: str, text: str) -> None:
        stem = name.partition(".")[0]
        artifact = self._wandb.Artifact(f"{stem}-{self._run.id}", type=stem)
        with artifact.new_file(name, mode="w", encoding="utf-8") as file:
            file.write(text)
        self._run.log_artifact(artifact)

    def log_checkpoint(self, step: int, folder: str, num_bytes: int) -> None:
        # `Artifact.add_reference` requires the path on this machine, or the store's client.
        content = {"step": step, "bytes": num_bytes, "path": f"{folder}/{step}"}
        artifact = self._wandb.Artifact(
            f"checkpoint-{self._run.id}", type="model", metadata=content
        )
        with artifact.new_file("checkpoint.json", mode="w", encoding="utf-8") as file:
            json.dump(content, file)
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def close(self, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)

    @property
    def address(self) -> str:
        return self._run.url or self._run.dir
