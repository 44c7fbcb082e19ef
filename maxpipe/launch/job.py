"""Cluster jobs, hosts of a topology, pre-launch checks, and the restart policy.

A job is a set of files and the command that submits them. `Preflight` collects the results of
checks that run before processes start or a job is submitted. The restart policy depends on a run's
exit code and its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from maxpipe.checkpoint import address
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, checkpoint_home, run_folder
from maxpipe.config.check import error_location
from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.config.load import LoadedConfig, to_dict, to_yaml
from maxpipe.config.rules import value_of
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import named_sources
from maxpipe.config.sections.source import FILES, paths_of
from maxpipe.errors import EXIT_CODES, Code, ConfigError, ExitCode, Problem, StorageError
from maxpipe.hardware import known_hardware
from maxpipe.huggingface.folder import folder_of
from maxpipe.io import files, redact
from maxpipe.io.files import read_json_lines, url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.topology import CPU_DEVICES, Topology, parse_topology, resolve_config

KEY = "launch.topology"
_CHIPS_PER_HOST = 4
_SINGLE_HOST_CHIPS = {"v5e": (1, 4, 8), "v6e": (1, 4, 8)}
"""Sizes of single-host slices, in chips. In all other TPU slices, each host has four chips."""
_GPUS_PER_HOST = {"gb200": 4}
"""Number of GPUs per host, for GPU types whose slices can span several hosts."""


@dataclass(frozen=True)
class Tpu:
    """Google Cloud names for a TPU type. A name is empty if the type is not available."""

    runtime_version: str
    """Runtime version (software image) of a TPU VM."""
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
        ConfigError: the chips of a slice cannot be divided equally among hosts.
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
            f"has {chips} chips per slice, but each {topology.hardware.name} host has {per_host}."
        )
        action = f"Set {KEY} to a size that is a multiple of {per_host}."
        raise ConfigError.one(Code.LAUNCH_HOSTS, KEY, topology.name, rule, action)
    return Hosts(topology, chips // per_host, per_host)


def tpu_of(topology: Topology) -> Tpu:
    """Return the Google Cloud names of a TPU topology.

    Raises:
        ConfigError: the devices of the topology are not TPUs.
    """
    if topology.hardware.topology not in _TPUS:
        rule = f"must be a TPU topology: {', '.join(_TPUS)}."
        action = f"Set {KEY}=v5p:2x4x4, or use `maxpipe launch slurm`."
        raise ConfigError.one(Code.LAUNCH_HOSTS, KEY, topology.name, rule, action)
    return _TPUS[topology.hardware.topology]


CONFIG_FILE = "config.yml"


@dataclass(frozen=True)
class Job:
    """A run with a resolved mesh, its hosts, and the folder for its job files."""

    config: Config
    hosts: Hosts
    folder: Path
    workdir: Path
    """Working directory on the hosts."""

    @property
    def name(self) -> str:
        """Run name, converted to a resource name with only lower-case letters, digits and
        hyphens.
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")[:40]
        return name.strip("-") if name[:1].isalpha() else f"run-{name}".strip("-")

    @property
    def run_dir(self) -> Path:
        """Run folder on the hosts."""
        return self.workdir / run_folder(self.config.run)

    def host_config(self, **mesh: int) -> str:
        """Return the config for all processes, which discover each other through the cluster."""
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
    follow_command: str = ""
    """Command that follows the output of a submitted job; empty if the submission prints it."""

    def render(self, folder: Path) -> str:
        """Return the contents of all files, each preceded by its path."""
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
            action = "Set --write to a writable folder."
            raise StorageError.unwritable(folder, error, action) from error

    def run(self) -> int:
        """Submit the job, and return the exit code of the submission tool.

        Raises:
            ConfigError: the tool is not installed.
        """
        if shutil.which(self.tool) is None:
            raise ConfigError.one(
                Code.LAUNCH_TOOL,
                "command line: --submit",
                None,
                f"requires {self.tool}, which is not on the PATH of this machine.",
                f"Run `{' '.join(self.submit_command)}` on a machine with {self.tool}.",
            )
        return subprocess.run(self.submit_command, check=False).returncode


def required_variables(names: Sequence[str]) -> str:
    """Return shell code that exits with an error if a variable is not set."""
    return "".join(
        f': "${{{name}:?must be set, because launch.environment lists it}}"\n' for name in names
    )


FINAL_EXIT_CODES = (ExitCode.CONFIG, ExitCode.BUG, ExitCode.STORAGE, ExitCode.INTERRUPTED)
"""Exit codes after which a run is not restarted: failures that would recur, and Ctrl-C."""


def newest_step(run_dir: Path, elsewhere: str = "") -> int | None:
    """Return the step of the newest complete checkpoint, or None.

    Only complete checkpoints have a numeric name. If checkpoints are stored `elsewhere`, in
    `checkpoint.dir` or `checkpoint.local_dir`, the step is read from the event records of the run,
    because the launcher does not read buckets.
    """
    if elsewhere:
        newest = None
        with contextlib.suppress(OSError):
            for record in read_json_lines(run_dir / EVENTS_FILE, _StepEvent):
                # A restarted run may resume from an older checkpoint.
                if record["event"] in ("start", "checkpoint"):
                    newest = record["step"] or None
        return newest
    try:
        names = [path.name for path in (run_dir / CHECKPOINTS_FOLDER).iterdir()]
    except OSError:
        return None
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


class _StepEvent(TypedDict):
    """A record in `events.jsonl` that has a step. Other lines are skipped."""

    event: str
    step: int


def is_killed(code: int) -> bool:
    """Return whether a signal other than Ctrl-C ended the process.

    Exit codes of killed processes are negative in Python and above 128 in a shell.
    """
    return (code < 0 or code > 128) and not is_interrupted(code)


def is_interrupted(code: int) -> bool:
    """Return whether Ctrl-C stopped the process."""
    return code in (ExitCode.INTERRUPTED, -signal.SIGINT)


def is_final(code: int) -> bool:
    """Return whether the exit code rules out a restart: true unless the process was stopped, hung
    or killed.
    """
    return code not in (ExitCode.PREEMPTED, ExitCode.HANG) and not is_killed(code)


def describe_exit_code(code: int) -> str:
    """Return a description of an exit code."""
    if is_killed(code):
        number = -code if code < 0 else code - 128
        known = {name.value for name in signal.Signals}
        return f"killed by {signal.Signals(number).name if number in known else number}"
    if is_interrupted(code):
        code = int(ExitCode.INTERRUPTED)
    meaning = next((entry.meaning for entry in EXIT_CODES if entry.code == code), None)
    return f"exit code {code}{f' ({meaning})' if meaning else ''}"


class RestartPolicy:
    """Restart policy that counts consecutive failures without a newer checkpoint."""

    def __init__(self, limit: int, run_dir: Path, elsewhere: str = ""):
        self._limit, self._run_dir, self._elsewhere = limit, run_dir, elsewhere
        self._newest = self.newest_step()
        self.failures_without_progress = 0

    def newest_step(self) -> int | None:
        """Return the newest step from which a restart could resume."""
        return newest_step(self._run_dir, self._elsewhere)

    def should_restart(self, code: int) -> bool:
        """Return whether to restart a run that exited with `code`."""
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


# --- checks before a launch ---------------------------------------------------


@dataclasses.dataclass
class Preflight:
    """Results of pre-launch checks, in order."""

    origins: dict[str, str]
    lines: list[str] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def add_ok(self, text: str) -> None:
        self.lines.append(f"  ok         {text}")

    def add_unchecked(self, text: str) -> None:
        self.lines.append(f"  unchecked  {text}")

    def add_problem(self, code: Code, key: str, given: object, rule: str, action: str) -> None:
        self.problems.append(
            Problem(code, error_location(key, self.origins), str(given), rule, action)
        )

    def report(self) -> str:
        """Return the report, with secrets redacted.

        Raises:
            ConfigError: a check failed.
        """
        if self.problems:
            raise ConfigError(self.problems)
        return redact.redact_text("\n".join(["preflight", *self.lines]))


def add_origins(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """Return the error, extended by the origin (file or override) of each config key."""
    known_keys = (
        dataclasses.replace(each, where=error_location(each.where, origins))
        if each.where in origins
        else each
        for each in error.problems
    )
    return ConfigError(list(known_keys))


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of a bucket or another remote store."""
    return url_scheme(path) != ""


def check_local(loaded: LoadedConfig, processes: int) -> str:
    """Check whether a run with `processes` processes can start on this machine, and return the
    report.

    Raises:
        ConfigError: the run cannot start. The error lists every reason.
    """
    config, found = loaded.config, Preflight(loaded.origins)
    check_run_folder(loaded)
    total = config.mesh.cpu_devices
    if processes < 1:
        rule, action = "must be at least 1.", "Leave out --processes to use one process."
        raise ConfigError.one(Code.CLI_VALUE, "command line: --processes", processes, rule, action)
    if processes > 1 and config.runtime.platform != "cpu":
        found.add_problem(
            Code.CFG_CONFLICT,
            "runtime.platform",
            config.runtime.platform,
            f"must be cpu for {processes} processes: one process drives all TPU chips or GPUs in a "
            "machine.",
            "Set runtime.platform=cpu, or leave out --processes.",
        )
    elif processes > 1 and total % processes:
        found.add_problem(
            Code.CFG_SIZES,
            "mesh.cpu_devices",
            total,
            f"must be a multiple of --processes ({processes}), because devices are divided "
            "equally.",
            f"Set mesh.cpu_devices={-(-total // processes) * processes} with a matching mesh, or "
            f"use --processes {math.gcd(total, processes)}.",
        )
    elif config.runtime.platform == "cpu" and config.runtime.num_processes == 1:
        try:
            axes = _axes(resolve_config(loaded, _here(config)))
            found.add_ok(
                f"mesh: {axes} = {pluralize(total, 'device')} in {pluralize(processes, 'process')}"
            )
        except ConfigError as error:
            found.problems += error.problems
    else:
        found.add_unchecked(f"mesh: must match the {config.runtime.platform} devices of the run")
    _check_output_paths(config, found)
    for key, path in _paths(config, Path()):
        if is_remote(path):
            found.add_unchecked(f"{key} = {path}: the run reads this path when it starts")
        elif _exists(path):
            found.add_ok(f"{key} = {path}: exists")
        else:
            rule = f"must be an existing path: {os.path.abspath(path)} does not exist."
            found.add_problem(Code.DATA_MISSING, key, path, rule, f"Set {key} to an existing path.")
    return found.report()


def check_hosts(loaded: LoadedConfig, workdir: Path, *, shared: bool) -> tuple[Config, Hosts, str]:
    """Check whether a run can start on other hosts. Return (config with resolved mesh, hosts,
    report).

    Relative paths on the hosts are relative to `workdir`. If `shared` is set, this machine and the
    hosts share a file system.

    Raises:
        ConfigError: the run cannot start. The error lists every reason.
    """
    config, found = loaded.config, Preflight(loaded.origins)
    check_run_folder(loaded)
    _refuse_secrets(loaded)
    if not config.launch.topology:
        rule = "must name the device type and the size of one slice."
        action = f"Set {KEY}=v5p:2x4x4, h100:8 or another topology that `maxpipe plan` accepts."
        raise ConfigError.one(
            Code.LAUNCH_SETTING, error_location(KEY, loaded.origins), "''", rule, action
        )
    topology = parse_topology(
        config.launch.topology, config.launch.slices, error_location(KEY, loaded.origins)
    )
    hosts = hosts_of(topology)
    if config.runtime.platform not in ("auto", topology.platform):
        found.add_problem(
            Code.CFG_CONFLICT,
            "runtime.platform",
            config.runtime.platform,
            f"must be {topology.platform}, the platform of {topology.name}, or auto.",
            f"Set runtime.platform={topology.platform}.",
        )
        found.report()
    config = resolve_config(loaded, topology)
    devices = topology.num_devices // hosts.num_processes
    found.add_ok(
        f"mesh: {_axes(config)} = {topology}, {hosts}, "
        f"{pluralize(hosts.num_processes, 'process')} with "
        f"{pluralize(devices, 'device')} each"
    )
    for path in output_paths(config).values():
        folder = workdir / path
        if is_remote(path) or not shared or not folder.is_absolute():
            shown = path if is_remote(path) else folder
            found.add_unchecked(f"{shown}: must be writable from all hosts")
        else:
            _check_parent(folder, found)
    for key, path in _paths(config, workdir):
        if shared and not is_remote(path) and _exists(path):
            found.add_ok(f"{key} = {path}: exists")
        else:
            found.add_unchecked(f"{key} = {path}: must exist on all hosts")
    found.add_unchecked(
        f"{config.launch.image or config.launch.program}: all hosts must use this version"
    )
    return config, hosts, found.report()


def check_run_folder(loaded: LoadedConfig) -> None:
    """Check that `run.dir` is a folder. A launcher writes the logs of all processes to it.

    Raises:
        ConfigError: `run.dir` is in a bucket.
    """
    if is_remote(loaded.config.run.dir):
        where = error_location("run.dir", loaded.origins)
        rule = "must be a folder for `maxpipe launch`, which writes logs to it."
        action = f"Set run.dir=runs, and checkpoint.dir={loaded.config.run.dir} for checkpoints."
        raise ConfigError.one(Code.LAUNCH_SETTING, where, loaded.config.run.dir, rule, action)


def _refuse_secrets(loaded: LoadedConfig) -> None:
    """Raise an error if the config contains secrets, because the job files include the config."""
    rule = "must not contain a secret: the job files would include it."
    action = (
        "Remove the secret, set it as an environment variable on the hosts, and add the name of "
        "the variable to launch.environment."
    )
    problems = [
        Problem(
            Code.LAUNCH_SECRET,
            error_location(f"{section}.{key}", loaded.origins),
            str(shown),
            rule,
            action,
        )
        for section, values in to_dict(loaded.config).items()
        for key, value in values.items()
        if (shown := redact.redact_value(value, key)) != value
    ]
    if problems:
        raise ConfigError(problems)


def _axes(config: Config) -> str:
    axes = Sizes(config).mesh.axes.items()
    return " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "one device"


def _here(config: Config) -> Topology:
    """Return a topology with this machine's CPU devices, divided into virtual slices."""
    total = config.mesh.cpu_devices
    across = (getattr(config.mesh, f"dcn_{axis}") for axis in MESH_AXES)
    slices = math.prod(size for size in across if size > 1)
    if total % slices:
        slices = 1
    return Topology(known_hardware()["cpu"], (total // slices,), slices, option=CPU_DEVICES)


def output_paths(config: Config) -> dict[str, str]:
    """Return the output folders of a run, keyed by the config key that sets each folder."""
    paths = {"run.dir": str(run_folder(config.run))}
    if config.checkpoint.dir:
        paths["checkpoint.dir"] = checkpoint_home(run_folder(config.run), config.checkpoint)
    return paths


def _check_output_paths(config: Config, found: Preflight) -> None:
    """Create the output folders and check that they are writable."""
    for key, path in output_paths(config).items():
        if is_remote(path):
            found.add_unchecked(f"{path}: the run writes to this path when it starts")
            continue
        try:
            os.makedirs(path, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            rule = f"must be a writable folder: {error.strerror or error}."
            found.add_problem(
                Code.IO_UNWRITABLE,
                key,
                value_of(config, key),
                rule,
                f"Set {key} to a writable folder.",
            )
        else:
            found.add_ok(f"{path}: is writable")


def _check_parent(folder: Path, found: Preflight) -> None:
    """Check that this machine can create an output folder."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(parent, os.W_OK | os.X_OK) and parent.is_dir():
        found.add_ok(f"{folder} is writable from this host; all other hosts must also have access")
    else:
        found.add_unchecked(
            f"{folder}: must be writable from all hosts; this host cannot write to {parent}"
        )


def _paths(config: Config, workdir: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for every input of the run. Relative paths are relative to `workdir`."""
    tokenizer = config.tokenizer
    named = {
        "tokenizer.path": tokenizer.path if tokenizer.kind != "bytes" else "",
        "runtime.compiled_step": config.runtime.compiled_step,
    }
    folder, restore_from = workdir / run_folder(config.run), config.checkpoint.restore_from
    # A run that resumes from its own checkpoint does not read this path.
    if restore_from and newest_step(folder, config.checkpoint.dir) is None:
        named["checkpoint.restore_from"] = _restore_run_path(restore_from, config.run.dir, workdir)
    paths: list[tuple[str, str]] = []
    for section, source in named_sources(config):
        if source.source in FILES:
            key = f"{section}.path" if source.path else f"{section}.paths"
            paths += ((key, path) for path in paths_of(source))
        elif source.source == "tfds":
            paths.append((f"{section}.tfds_dir", source.tfds_dir))
    for key, path in [*paths, *named.items()]:
        if path:
            yield key, path if is_remote(path) else str(workdir / os.path.expanduser(path))


def _restore_run_path(source: str, runs: str, workdir: Path) -> str:
    """Return the path of the run or Hugging Face folder that `checkpoint.restore_from` names.

    A value that cannot be parsed is returned unchanged.
    """
    if (folder := folder_of(source)) is not None:
        return os.path.abspath(workdir / os.path.expanduser(folder))
    try:
        run = address.parse_address(source, "checkpoint.restore_from", runs, workdir)
    except ConfigError:
        return source
    path = run.parent or run.run_dir
    return path if is_remote(path) else os.path.abspath(path)


def _exists(path: str) -> bool:
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))
