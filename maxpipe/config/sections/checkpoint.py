"""Config section `checkpoint`: when and where to save checkpoints, and which ones to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import (
    add_folder_or_bucket_rule,
    add_local_folder_rule,
    add_ranges,
    rule,
)
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving, retaining and restoring checkpoints."""

    every: int = 1000
    """Number of steps between checkpoints. The last step is always saved. 0 saves only the last
    step."""
    keep: int = 3
    """Number of checkpoints to keep, counted from the newest. The keys `keep_every_steps`,
    `keep_every_hours` and `keep_best` keep additional checkpoints."""
    keep_every_steps: int = 0
    """Also keep every checkpoint whose step is a multiple of this number. 0 keeps no additional
    checkpoints."""
    keep_every_hours: float = 0.0
    """Also keep the first checkpoint in each interval of this many hours. 0 keeps no additional
    checkpoints."""
    keep_best: int = 0
    """Number of best checkpoints, ranked by `checkpoint.best_metric`, to keep in addition to the
    most recent ones. Only checkpoints from steps with an evaluation are ranked. If two values are
    equal, the newer checkpoint ranks higher."""
    best_metric: str = "eval/loss"
    """Evaluation metric that `RUN@best`, `checkpoint.keep_best` and `eval.patience` use to compare
    checkpoints. Examples are `eval/loss`, `eval/nats_per_byte`, `eval/NAME/loss` of a validation
    set, and `eval/NAME/accuracy` of a task."""
    best_mode: Literal["min", "max"] = field(
        default="min",
        metadata=renamed_from("best_is", values={"smallest": "min", "largest": "max"}),
    )
    """Whether the smallest (`min`) or the largest (`max`) value of `checkpoint.best_metric` is
    best. Use `min` for losses and `max` for accuracies."""
    retries: int = 3
    """Number of retries after a failed save, with pauses of 1, 2, 4, ... seconds. Training
    continues during these pauses, so a retry saves the state of a later step. A save is not retried
    if the disk is full or read-only."""
    on_failure: Literal["stop", "continue"] = field(
        default="stop", metadata=renamed_from(values={"go_on": "continue"})
    )
    """Behavior after all attempts to save a checkpoint have failed. `stop` ends the run. `continue`
    continues training until the next checkpoint is due. The save at the end of the run must
    succeed. Multi-process runs always use `stop`."""
    dir: str = ""
    """Folder or URL, such as `gs://BUCKET/PATH`, `s3://BUCKET/PATH` or `az://CONTAINER/PATH`, for
    the durable checkpoints of all runs. Each run saves its checkpoints in
    `<checkpoint.dir>/<run.name>/checkpoints`. Buckets require an extra, such as
    `pip install 'maxpipe[azure]'`. If empty, checkpoints are saved in the run folder."""
    local_dir: str = ""
    """Folder on a fast disk for additional checkpoints between the durable ones. Only the newest
    local checkpoint is kept, and all processes must share the folder. A run resumes from its newest
    checkpoint, local or durable. To start from scratch, delete the local and the durable
    checkpoints. If empty, no local checkpoints are saved."""
    local_every: int = 0
    """Number of steps between checkpoints in `checkpoint.local_dir`."""
    restore_from: str = ""
    """Checkpoint of another run from which this run starts: `RUN@STEP`, `RUN@newest`, `RUN@best`
    (according to that run's `checkpoint.best_metric`), or the path of a checkpoint folder. `RUN`
    without a step selects the newest checkpoint. `RUN` is a run folder, the name of a run in
    `run.dir`, or a URL such as `s3://BUCKET/PATH/NAME`. `hf:DIR` loads the weights in a
    Hugging Face folder. Ignored if this run already has a checkpoint, because it then resumes from
    that checkpoint."""
    restore: Literal["all", "weights"] = "all"
    """State that is restored from `checkpoint.restore_from`. `all` restores parameters, optimizer
    state, step and data position. `weights` restores only parameters and starts at step 0; the data
    and tokenizer may be different, and the vocabulary may be larger. If the source contains only
    weights, such as `hf:DIR`, the run always starts at step 0."""


add_ranges(
    Bound("checkpoint.every", 1000, 0, why="0 saves only the last step"),
    Bound("checkpoint.keep", 3, 1, why="the newest checkpoint is always kept"),
    Bound("checkpoint.keep_every_steps", 0, 0, why="0 keeps no additional checkpoints"),
    Bound("checkpoint.keep_every_hours", 0.0, 0, why="0 keeps no additional checkpoints"),
    Bound("checkpoint.keep_best", 0, 0, why="0 keeps no additional checkpoints"),
    Bound("checkpoint.retries", 3, 0, why="0 disables retries"),
    Bound("checkpoint.local_every", 0, 0),
)


add_folder_or_bucket_rule("checkpoint.dir")


add_folder_or_bucket_rule("checkpoint.restore_from")


@rule("checkpoint.keep_best", "eval.every", "eval.batches")
def _best_is_evaluated(config: Config) -> Iterator[RuleViolation]:
    if config.checkpoint.keep_best and not (config.eval.every and config.eval.batches):
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "checkpoint.keep_best",
            "requires evaluations: eval.every and eval.batches must be more than 0.",
            f"Set eval.every={config.checkpoint.every or 1000}, or checkpoint.keep_best=0.",
        )


@rule("checkpoint.local_dir", "checkpoint.local_every")
def _local_has_folder_and_period(config: Config) -> Iterator[RuleViolation]:
    local_dir, every = config.checkpoint.local_dir, config.checkpoint.local_every
    if local_dir and not every:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "checkpoint.local_every",
            "must be more than 0 with checkpoint.local_dir.",
            "Set checkpoint.local_every=100, or checkpoint.local_dir='' to save only in the run "
            "folder.",
        )
    elif every and not local_dir:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "checkpoint.local_dir",
            f"must be set to a folder with checkpoint.local_every={every}.",
            "Set checkpoint.local_dir to a folder on a fast disk, or checkpoint.local_every=0.",
        )


add_local_folder_rule(
    "checkpoint.local_dir", "Set checkpoint.local_dir=/tmp/runs, or another folder on a fast disk."
)
