"""Config section `run`: name, output folder and random seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maxpipe.config.rules import (
    add_folder_or_bucket_rule,
    add_nonempty_rule,
    add_ranges,
    folder_name,
    rule,
)
from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Name, output folder and seed of the run."""

    name: str = "run"
    """Name of the run, which is also the name of its folder inside `run.dir`. It may contain
    letters, digits, `.`, `_` and `-`. The default is the name of the last config file: `my-run` for
    `my-run.yml`."""
    dir: str = "runs"
    """Folder that contains the run folders. If a run's folder contains a checkpoint, the run
    resumes from that checkpoint. For object stores, such as `gs://BUCKET/PATH`, `s3://BUCKET/PATH`
    and `az://CONTAINER/PATH`, checkpoints are saved in the bucket, and all other files are copied
    to it during the run."""
    seed: int = 0
    """Random seed for parameter initialization, data order and dropout. The same seed produces the
    same loss curve for every mesh, schedule and number of processes."""


add_ranges(
    Bound("run.seed", 0, 0, 2**32 - 1, "the seed must fit in 32 bits"),
)


MAX_NAME = 200
"""Maximum length of a run name. File systems allow 255 characters, and the run name is part of
longer file names."""


@rule("run.name")
def _name_is_a_folder(config: Config) -> Iterator[RuleViolation]:
    name = config.run.name
    if name in (".", "..") or not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}", name):
        yield RuleViolation(
            Code.CFG_VALUE,
            "run.name",
            f"must be a folder name of at most {MAX_NAME} letters, digits, `.`, `_` and `-`.",
            f"Set run.name={folder_name(name)}.",
        )


add_nonempty_rule("run.dir")
add_folder_or_bucket_rule("run.dir")
