"""Config section `guard`: response to bad steps, loss spikes and corrupted replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maxpipe.config.rules import add_ranges
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Response to non-finite values, loss spikes and corrupted replicas.

    A step whose loss or gradient norm is not finite never changes parameters or optimizer state,
    regardless of the settings in this section.
    """

    bad_steps: Literal["stop", "skip", "rollback"] = field(
        default="stop", metadata=renamed_from(values={"roll_back": "rollback"})
    )
    """Response to a bad step, which is a step whose loss or gradient norm is NaN or infinite.
    `stop` ends the run. `skip` continues with the next batch. `rollback` restores the newest
    checkpoint and skips the batch that caused the bad step. `events.jsonl` lists the sequences and
    documents of that batch."""
    max_bad_steps: int = 5
    """Maximum number of consecutive bad steps with `guard.bad_steps=skip`. The next consecutive bad
    step stops the run."""
    spike_sigmas: float = 0.0
    """Threshold of the spike detector, in standard deviations above the mean of recent steps. A
    step counts as a spike if its loss or gradient norm exceeds the threshold. A common value is 6.
    0 disables detection."""
    spike_window: int = 128
    """Number of recent updates over which the spike detector computes the mean and standard
    deviation. Detection starts after half this number of updates."""
    on_spike: Literal["warn", "skip", "rollback"] = field(
        default="warn", metadata=renamed_from(values={"note": "warn", "roll_back": "rollback"})
    )
    """Response to a spike. `warn` applies the update, records an event and prints a warning. `skip`
    discards the update. `rollback` restores the newest checkpoint, as in `guard.bad_steps`. Ignored
    if `guard.spike_sigmas` is 0."""
    max_rollbacks: int = field(default=3, metadata=renamed_from("max_roll_backs"))
    """Maximum number of rollbacks in a run. Once this limit is reached, the run stops instead of
    rolling back."""
    replica_check_every: int = 0
    """Number of steps between bitwise comparisons of replicated parameters and optimizer state
    across devices. If replicas differ, the run stops. Replicas are also compared before each
    checkpoint. 0 disables both comparisons."""


add_ranges(
    Bound("guard.max_bad_steps", 5, 1),
    Bound(
        "guard.spike_sigmas",
        6.0,
        0,
        LARGEST,
        "0 disables detection; the value must fit in float32",
    ),
    Bound("guard.spike_window", 128, 2, why="a standard deviation requires at least two steps"),
    Bound("guard.max_rollbacks", 3, 0),
    Bound("guard.replica_check_every", 100, 0, why="0 disables the comparison"),
)
