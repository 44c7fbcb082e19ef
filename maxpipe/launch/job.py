"""Define cluster jobs, the hosts of a topology, and the restart policy.

A job is a set of files and the command that submits them. The restart policy uses the exit code
and the newest checkpoint of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, run_folder
from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.config.load import to_yaml
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError, ExitCode, StorageError
from maxpipe.io import files
from maxpipe.io.files import read_json_lines
from maxpipe.plan.topology import Topology

KEY = "launch.topology"
_CHIPS_PER_HOST = 4
_SINGLE_HOST_CHIPS = {"v5e": (1, 4, 8), "v6e": (1, 4, 8)}
"""Sizes of single-host slices in chips. All other TPU hosts have four chips."""
_GPUS_PER_HOST = {"gb200": 4}
"""Number of GPUs per host, for GPU types whose slices span several hosts."""


@dataclass(frozen=True)
class Tpu:
    """Google Cloud names of a TPU type, or empty if the type is not available."""

    runtime_version: str
    """Runtime image of a TPU VM."""
    node_label: str
    """Accelerator label of GKE nodes."""


_TPUS = {
    "v2": Tpu("tpu-ubuntu2204-base", ""),
    "v3": Tpu("tpu-ubuntu2204-base", "tpu-v3-slice"),
    "v4": Tpu("tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Tpu("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Tpu("v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Tpu("v2-alpha-tpuv6e", "tpu-v6e-slice"),
    "tpu7x": Tpu("", "tpu7x"),
}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a topology."""

    topology: Topology
    hosts_per_slice: int
    chips_per_host: int
    """Number of TPU chips, GPUs or virtual CPU devices per host."""

    @property
    def num_hosts(self) -> int:
        """Total number of hosts across all slices."""
        return self.hosts_per_slice * self.topology.num_slices

    @property
    def num_processes(self) -> int:
        """Number of processes: one per GPU, or one per host without GPUs."""
        return self.num_hosts * (self.chips_per_host if self.topology.platform == "cuda" else 1)

    def __str__(self) -> str:
        return f"{self.num_hosts} hosts" if self.num_hosts > 1 else "one host"


def hosts_of(topology: Topology) -> Hosts:
    """Return the hosts of a topology.

    Raises:
        ConfigError: a slice is not a multiple of a host.
    """
    kind, chips = topology.hardware.topology, math.prod(topology.dims)
    if topology.platform == "cpu":
        return Hosts(topology, 1, chips)
    if topology.platform == "cuda":
        per_host = min(_GPUS_PER_HOST.get(kind, chips), chips)
    else:
        per_host = chips if chips in _SINGLE_HOST_CHIPS.get(kind, ()) else _CHIPS_PER_HOST
    if chips % per_host:
        rule = (
            f"has {chips} chips per slice, but a host of {topology.hardware.name} has {per_host}."
        )
        action = f"Set {KEY} to a size that is a multiple of {per_host}."
        raise ConfigError.one(KEY, topology.name, rule, action)
    return Hosts(topology, chips // per_host, per_host)


def tpu_of(topology: Topology) -> Tpu:
    """Return the Google Cloud names of a TPU topology.

    Raises:
        ConfigError: the topology is not a TPU.
    """
    if topology.hardware.topology not in _TPUS:
        rule = f"must be TPUs: {', '.join(_TPUS)}."
        action = f"Set {KEY}=v5p:2x4x4, or use `maxpipe launch slurm`."
        raise ConfigError.one(KEY, topology.name, rule, action)
    return _TPUS[topology.hardware.topology]


CONFIG_FILE = "config.yml"


@dataclass(frozen=True)
class Job:
    """A run with a resolved mesh, its hosts, and the folder of the job files."""

    config: Config
    hosts: Hosts
    folder: Path
    workdir: Path
    """Working folder on the hosts."""

    @property
    def name(self) -> str:
        """Run name as a valid resource name, with lower-case letters, digits and hyphens."""
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")[:40]
        return name.strip("-") if name[:1].isalpha() else f"run-{name}".strip("-")

    @property
    def run_dir(self) -> Path:
        """Run folder on the hosts."""
        return self.workdir / run_folder(self.config.run)

    def host_config(self, **mesh: int) -> str:
        """Return the config of every process; processes discover each other through the cluster."""
        config = self.config
        runtime = dataclasses.replace(config.runtime, num_processes=0, process_id=0, coordinator="")
        resolved = dataclasses.replace(config.mesh, **mesh)
        return to_yaml(dataclasses.replace(config, runtime=runtime, mesh=resolved))


@dataclass(frozen=True)
class Submission:
    """Job files keyed by name, and the command that submits them."""

    files: Mapping[str, str]
    submit_command: Sequence[str]
    tool: str
    """Program that must be installed on this machine to submit the job."""

    def render(self, folder: Path) -> str:
        """Return the text of all files, each preceded by its path."""
        return "\n".join(f"# --- {folder / name}\n{text}" for name, text in self.files.items())

    def write(self, folder: Path) -> None:
        """Write the files, and make scripts executable.

        Raises:
            StorageError: the files cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                path = folder / name
                files.write(path, text)
                if text.startswith("#!"):
                    path.chmod(0o755)
        except OSError as error:
            action = "Set --write to a folder that can be written."
            raise StorageError.unwritable(folder, error, action) from error

    def run(self) -> int:
        """Submit the files, and return the exit code of the submission tool.

        Raises:
            ConfigError: the tool is not installed.
        """
        if shutil.which(self.tool) is None:
            raise ConfigError.one(
                "command line: --submit",
                None,
                f"needs {self.tool}, which is not on the PATH of this machine.",
                f"Run `{' '.join(self.submit_command)}` where {self.tool} is installed.",
            )
        return subprocess.run(self.submit_command, check=False).returncode


def required_variables(names: Sequence[str]) -> str:
    """Return shell lines that exit with an error if a variable is not set."""
    return "".join(f': "${{{name}:?must be set: launch.environment names it}}"\n' for name in names)


FINAL_EXIT_CODES = (ExitCode.CONFIG, ExitCode.BUG, ExitCode.STORAGE, ExitCode.INTERRUPTED)
"""Exit codes that cause no restart: failures that a restart would repeat, and Ctrl-C."""

_MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.CONFIG: "an error in the config or command line",
    ExitCode.BUG: "a bug in maxpipe",
    ExitCode.HANG: "a hang or a lost process",
    ExitCode.STORAGE: "a storage or checkpoint error",
    ExitCode.PREEMPTED: "stopped and saved",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
}


def newest_step(run_dir: Path, elsewhere: str = "") -> int | None:
    """Return the step of the newest complete checkpoint. Incomplete checkpoints have no numeric
    name.

    If checkpoints are `elsewhere`, in `checkpoint.dir` or `checkpoint.local_dir`, the step is read
    from the event records of the run, because the launcher does not read buckets.
    """
    if elsewhere:
        newest = None
        with contextlib.suppress(OSError):
            for record in read_json_lines(run_dir / EVENTS_FILE, _StepEvent):
                # The run may start from an older checkpoint.
                if record["event"] in ("start", "checkpoint"):
                    newest = record["step"] or None
        return newest
    try:
        names = [path.name for path in (run_dir / CHECKPOINTS_FOLDER).iterdir()]
    except OSError:
        return None
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


class _StepEvent(TypedDict):
    """A line of `events.jsonl` that has a step. Other lines are skipped."""

    event: str
    step: int


def is_killed(code: int) -> bool:
    """Return whether a signal other than Ctrl-C ended the process.

    Such codes are negative in Python and above 128 in a shell.
    """
    return (code < 0 or code > 128) and not is_interrupted(code)


def is_interrupted(code: int) -> bool:
    """Return whether Ctrl-C stopped the process."""
    return code in (ExitCode.INTERRUPTED, -signal.SIGINT)


def is_final(code: int) -> bool:
    """Return whether a restart is useless: true for any exit except a stop, hang or kill."""
    return code not in (ExitCode.PREEMPTED, ExitCode.HANG) and not is_killed(code)


def describe_exit_code(code: int) -> str:
    """Return a description of an exit code."""
    if is_killed(code):
        number = -code if code < 0 else code - 128
        known = {name.value for name in signal.Signals}
        return f"killed by {signal.Signals(number).name if number in known else number}"
    if is_interrupted(code):
        code = int(ExitCode.INTERRUPTED)
    meaning = _MEANINGS.get(ExitCode(code)) if code in set(ExitCode) else None
    return f"exit code {code}{f' ({meaning})' if meaning else ''}"


class RestartPolicy:
    """Counts consecutive failures without a newer checkpoint, and decides on restarts."""

    def __init__(self, limit: int, run_dir: Path, elsewhere: str = ""):
        self._limit, self._run_dir, self._elsewhere = limit, run_dir, elsewhere
        self._newest = self.newest_step()
        self.failures_without_progress = 0

    def newest_step(self) -> int | None:
        """Return the newest step from which a restart could resume."""
        return newest_step(self._run_dir, self._elsewhere)

    def should_restart(self, code: int) -> bool:
        """Return whether to restart after the run exited with `code`."""
        newest = self.newest_step()
        progress = newest is not None and (self._newest is None or newest > self._newest)
        self._newest = newest
        if progress:
            self.failures_without_progress = 0
        if code == ExitCode.PREEMPTED:
            return True
        if is_final(code):
            return False
        self.failures_without_progress += not progress
        return self.failures_without_progress <= self._limit
