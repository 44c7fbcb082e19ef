"""React to bad steps: record, skip, roll back or stop.

The compiled step has already skipped the bad update (`optim.guard`). The host reads the metrics of
a step while the next step runs, so that the devices are not blocked. All processes read the same
metrics in the same order, so they make the same decision. The counts of bad steps are saved with
the data position, so a resumed run makes the same decisions as an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from maxpipe.config.sections.guard import GuardConfig
from maxpipe.data.loader import Loader
from maxpipe.errors import Code, DivergenceError
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.writers import EventLog


class Rollback(Exception):
    """Request to roll back to the newest checkpoint and skip all batches up to and including the
    one at `step`.
    """

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


class BadStepMonitor:
    """Reads the metrics of each step, and decides how the run continues."""

    def __init__(
        self,
        config: GuardConfig,
        *,
        run_dir: str,
        loader: Loader,
        events: EventLog,
        console: Console,
        offset: int = 0,
        counts: Mapping[str, Any] | None = None,
    ):
        """Initialize the monitor. `counts` are from a checkpoint and include the guard's counts."""
        self.offset = offset
        """Number of batches skipped by rollbacks. Step s uses batch s + offset, both zero-based."""
        self.num_rollbacks: int = (counts or {}).get("roll_backs", 0)
        self.skipped_sequences: int = self._skipped_sequences(loader, offset, counts)
        self._pending: tuple[int, Mapping[str, Any]] | None = None
        self._load_counts(counts)
        self._config = config
        self._run_dir = run_dir
        self._loader = loader
        self._events = events
        self._console = console

    def _load_counts(self, counts: Mapping[str, Any] | None) -> None:
        counts = counts or {}
        self._num_consecutive: int = counts.get("in_row", 0)
        self._skipped: int = counts.get("skipped", 0)
        self._spikes: int = counts.get("spikes", 0)

    def state_dict(self) -> dict[str, int]:
        """Return the JSON-compatible counts to save in a checkpoint."""
        found = {"roll_backs": self.num_rollbacks, "in_row": self._num_consecutive}
        # If the batch size is constant, the number of skipped sequences can be computed from the
        # offset.
        more = {"rows_left_out": self.skipped_sequences} if self._loader.ramp.stages else {}
        return found | more

    @staticmethod
    def _skipped_sequences(loader: Loader, offset: int, counts: Mapping[str, Any] | None) -> int:
        """Return the number of skipped sequences recorded in a checkpoint.

        A checkpoint without this count comes from a run with a constant batch size. Adding a
        batch-size ramp later does not change how many sequences the run consumed before.
        """
        _, rows = loader.ramp.position_of(0)
        return (counts or {}).get("rows_left_out", offset * rows)

    def sequences_done(self, step: int) -> int:
        """Return the total number of sequences in all steps up to and including `step`."""
        return self._loader.ramp.sequences_before(step + self.offset) - self.skipped_sequences

    def record_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record that a step was started, and react to the previous step.

        Raises:
            DivergenceError: the config requires the run to stop.
            Rollback: the run must roll back.
        """
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Wait for the latest step and react to its metrics; raises the errors of `record_step`."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        skipped, spikes = int(metrics["train/skipped"]), int(metrics.get("train/spikes", 0))
        was_skipped, is_spike = skipped > self._skipped, spikes > self._spikes
        self._skipped, self._spikes = skipped, spikes
        self._num_consecutive = self._num_consecutive + 1 if was_skipped else 0
        if was_skipped or is_spike:
            names = ("train/loss", "train/grad_norm", "train/lr")
            self._decide(step, is_spike, *(float(metrics[name]) for name in names))

    def record_rollback(
        self, bad_step: int, step: int, offset: int, counts: Mapping[str, Any] | None
    ) -> None:
        """Record a rollback to `step`, which skips all batches up to that of `bad_step`.

        `offset` and `counts` come from the checkpoint.
        """
        rows_before = self._loader.ramp.sequences_before
        done = rows_before(step + offset) - self._skipped_sequences(self._loader, offset, counts)
        self.offset += bad_step - step
        self.skipped_sequences = rows_before(step + self.offset) - done
        self.num_rollbacks += 1
        self._load_counts(counts)
        self._events.write("rollback", step=bad_step, to=step, number=self.num_rollbacks)
        self._console.warn(
            f"rolled back from step {bad_step} to {step}; the batches in between are skipped"
        )

    def _decide(
        self, step: int, is_spike: bool, loss: float, grad_norm: float, rate: float
    ) -> None:
        config = self._config
        action = config.on_spike if is_spike else config.bad_steps
        refusal = self._stop_reason(action)
        batch = step - 1 + self.offset
        self._events.write(
            "spike" if is_spike else "bad_step",
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            rate=rate,
            action="stop" if refusal else action,
            batch=batch,
            **self._loader.batch_contents(batch),
        )
        numbers = f"loss {loss:.4g}, gradient norm {grad_norm:.4g}"
        if not is_spike and math.isfinite(loss) and math.isfinite(grad_norm):
            numbers += f", learning rate {rate:.4g}: the update is not finite"
        if refusal:
            rule, remedy = refusal
            raise DivergenceError(
                Code.RUN_DIVERGED, f"{self._run_dir}: step {step}: {numbers}\n  {rule}\n  {remedy}"
            )
        if action == "rollback":
            raise Rollback(step)
        done = (
            f"update skipped, {self._num_consecutive} in a row" if action == "skip" else "a spike"
        )
        self._console.warn(f"step {step}: {numbers}: {done}")

    def _stop_reason(self, action: str) -> tuple[str, str] | None:
        """If the run must stop, return the rule and the suggested action for the error; otherwise,
        return None.
        """
        config = self._config
        lower = "lower optim.learning_rate"
        if action == "stop":
            return (
                "loss, gradient norm and update must be finite with guard.bad_steps=stop. The "
                "update was skipped, and events.jsonl names the batch.",
                f"Set guard.bad_steps=skip to skip such batches and continue, or {lower}.",
            )
        if action == "skip" and self._num_consecutive > config.max_bad_steps:
            return (
                f"is the last of {self._num_consecutive} consecutive bad steps; "
                f"guard.max_bad_steps allows {config.max_bad_steps}. Updates were skipped; "
                "events.jsonl names the batches.",
                f"Set guard.max_bad_steps={2 * config.max_bad_steps} if the data is the cause, or "
                f"{lower}.",
            )
        if action == "rollback" and self.num_rollbacks >= config.max_rollbacks:
            return (
                f"requires rollback number {self.num_rollbacks + 1}; guard.max_rollbacks allows "
                f"{config.max_rollbacks}. events.jsonl names the batches.",
                f"Set guard.max_rollbacks={config.max_rollbacks + 3} if the data is the cause, "
                f"or {lower}.",
            )
        return None
