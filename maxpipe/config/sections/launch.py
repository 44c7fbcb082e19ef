"""Config section `launch`: the cluster on which `maxpipe launch` starts a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maxpipe.config.rules import add_ranges, rule, value_of
from maxpipe.errors import Code, RuleViolation
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Cluster on which `maxpipe launch` starts the run. Training ignores this section."""

    topology: str = ""
    """Device type and topology of one slice, as in `maxpipe plan`: `v5p:2x4x4`, `h100:8`. For GPUs
    and CPUs, a slice is a group of devices connected by fast links, usually one node. Optional for
    `launch local`."""
    slices: int = 1
    """Number of slices, connected by the data-center network."""
    project: str = ""
    """Google Cloud project. If empty, the default project of `gcloud config` is used."""
    zone: str = ""
    """Google Cloud zone or region of the devices or the cluster."""
    cluster: str = ""
    """GKE cluster. If empty, the current cluster of `kubectl` is used."""
    queue: str = ""
    """SLURM partition, or Kueue queue in a GKE cluster. In clusters created with XPK, the queue is
    `multislice-queue`."""
    image: str = ""
    """Container image with maxpipe installed, for GKE."""
    volume: str = ""
    """Shared storage of the GKE hosts: `gs://BUCKET`, or the name of a persistent volume claim. The
    storage is mounted at `launch.workdir`."""
    workdir: str = ""
    """Working directory of the run on the hosts. Relative paths are resolved against this
    directory. If empty, the run starts in the current folder (SLURM), the home folder (`gcloud`) or
    /workdir (GKE)."""
    program: str = "maxpipe"
    """Command that runs maxpipe on the hosts. Must be a full path if `maxpipe` is not on the hosts'
    PATH."""
    environment: list[str] = field(default_factory=list)
    """Names of environment variables that the run needs on the hosts. The values of these variables
    are never written to files. SLURM copies the values from the shell that submits the job, and GKE
    reads the values from a secret with the same name as the job. With `gcloud`, the variables must
    already be defined on the hosts."""
    spot: bool = False
    """Use spot capacity on Google Cloud, which Google can preempt."""
    restarts: int = 3
    """Maximum number of consecutive restarts without a new checkpoint, after the run is killed or
    hangs. A run that saved a checkpoint before it stopped is always restarted. GKE cannot count
    consecutive restarts: on GKE, the total number of restarts is limited to ten times this
    value."""
    grace_seconds: int = 120
    """Time in seconds between the stop signal and the end of the job, during which the run saves a
    checkpoint. The stop signal is sent before SLURM's time limit is reached, or when GKE evicts the
    node."""
    time_limit_minutes: int = 0
    """Time limit of one SLURM job in minutes. The run resumes in the next job. 0 selects the time
    limit of the partition."""


add_ranges(
    Bound("launch.slices", 1, 1),
    Bound("launch.restarts", 3, 0),
    Bound("launch.grace_seconds", 120, 1),
    Bound("launch.time_limit_minutes", 0, 0, why="0 uses the partition's limit"),
)


def _add_word_rule(key: str, pattern: str, words: str, example: str) -> None:
    """Add a rule that restricts a value to characters without special meaning in shell scripts and
    manifests.
    """

    @rule(key)
    def find(config: Config) -> Iterator[RuleViolation]:
        text = value_of(config, key)
        if len(text) > _LONGEST_WORD:
            rule = f"must have at most {_LONGEST_WORD} characters; this value has {len(text)}."
            yield RuleViolation(Code.CFG_VALUE, key, rule, f"Set {key}={example}.")
        elif not re.fullmatch(pattern, text):
            yield RuleViolation(Code.CFG_VALUE, key, f"must be {words}.", f"Set {key}={example}.")
        elif any(len(name) > _LONGEST_NAME for name in text.split("/")):
            rule = f"must have at most {_LONGEST_NAME} characters in each path component."
            yield RuleViolation(Code.CFG_VALUE, key, rule, f"Set {key}={example}.")


_LONGEST_WORD, _LONGEST_NAME = 1024, 255
"""Maximum lengths of a launch value and of one path component (the file-system limit)."""


_MOST_VARIABLES = 1000


_NAME, _NAME_WORDS = (
    r"([A-Za-z0-9][A-Za-z0-9._:-]*)?",
    "a name consisting of letters, digits and the characters `._:-`",
)


_PATH, _PATH_WORDS = (
    r"[A-Za-z0-9_/.][A-Za-z0-9_/.,+@:-]*",
    "a path consisting of letters, digits and the characters `/._,+@:-`",
)


_add_word_rule("launch.project", _NAME, _NAME_WORDS, "my-project")


_add_word_rule("launch.zone", _NAME, _NAME_WORDS, "us-east5-a")


_add_word_rule("launch.cluster", _NAME, _NAME_WORDS, "my-cluster")


_add_word_rule("launch.queue", _NAME, _NAME_WORDS, "multislice-queue")


_add_word_rule("launch.image", f"({_PATH})?", _PATH_WORDS, "us-docker.pkg.dev/mine/maxpipe:0.1")


_add_word_rule("launch.volume", f"({_PATH})?", _PATH_WORDS, "gs://my-bucket")


_add_word_rule("launch.workdir", f"({_PATH})?", _PATH_WORDS, "/shared/runs")


_add_word_rule("launch.program", _PATH, _PATH_WORDS, "/shared/venv/bin/maxpipe")


@rule("launch.environment")
def _environment_has_names(config: Config) -> Iterator[RuleViolation]:
    names = config.launch.environment
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names):
        yield RuleViolation(
            Code.CFG_VALUE,
            "launch.environment",
            "must contain names of environment variables, without values.",
            "Write only the names, such as launch.environment=[MY_TOKEN].",
        )
    elif len(names) > _MOST_VARIABLES or any(len(name) > _LONGEST_NAME for name in names):
        yield RuleViolation(
            Code.CFG_VALUE,
            "launch.environment",
            f"must contain at most {_MOST_VARIABLES} names of at most {_LONGEST_NAME} characters.",
            "List fewer or shorter names, such as launch.environment=[MY_TOKEN].",
        )
