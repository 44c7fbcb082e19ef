"""Check a run before a launch starts processes or submits a job."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxpipe.checkpoint import address
from maxpipe.checkpoint.storage import checkpoint_home, run_folder
from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.rules import value_of
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import named_sources
from maxpipe.config.sections.source import FILES, paths_of
from maxpipe.errors import ConfigError, Problem
from maxpipe.hardware import known_hardware
from maxpipe.huggingface.folder import folder_of
from maxpipe.io import redact
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.launch.job import KEY, Hosts, hosts_of, newest_step
from maxpipe.parallel.axes import MESH_AXES
from maxpipe.plan.sizes import Sizes
from maxpipe.plan.topology import CPU_DEVICES, Topology, parse_topology, resolve_config


@dataclasses.dataclass
class Preflight:
    """The results of the checks, in order."""

    origins: dict[str, str]
    lines: list[str] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def add_ok(self, text: str) -> None:
        self.lines.append(f"  ok         {text}")

    def add_unchecked(self, text: str) -> None:
        self.lines.append(f"  unchecked  {text}")

    def add_problem(self, key: str, given: object, rule: str, action: str) -> None:
        self.problems.append(Problem(error_location(key, self.origins), str(given), rule, action))

    def report(self) -> str:
        """Return the report, without secrets.

        Raises:
            ConfigError: a check failed.
        """
        if self.problems:
            raise ConfigError(self.problems)
        return redact.redact_text("\n".join(["preflight", *self.lines]))


def add_origins(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """Return the error, with the origin of every config key added."""
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
    """Check a run of `processes` processes on this machine, and return the report.

    Raises:
        ConfigError: the run cannot start. The error lists every reason.
    """
    config, found = loaded.config, Preflight(loaded.origins)
    total = config.mesh.cpu_devices
    if processes < 1:
        rule, action = "must be at least 1.", "Leave out --processes for one process."
        raise ConfigError.one("command line: --processes", processes, rule, action)
    if processes > 1 and config.runtime.platform != "cpu":
        found.add_problem(
            "runtime.platform",
            config.runtime.platform,
            f"must be cpu for {processes} processes: one process drives all TPU chips or GPUs of a "
            "machine.",
            "Set runtime.platform=cpu, or leave out --processes.",
        )
    elif processes > 1 and total % processes:
        found.add_problem(
            "mesh.cpu_devices",
            total,
            f"must be a multiple of --processes ({processes}): processes share devices equally.",
            f"Set mesh.cpu_devices={-(-total // processes) * processes} with a matching mesh, or "
            f"use --processes {math.gcd(total, processes)}.",
        )
    elif config.runtime.platform == "cpu" and config.runtime.num_processes == 1:
        try:
            axes = _axes(resolve_config(loaded, _here(config)))
            found.add_ok(
                f"mesh: {axes} = {pluralize(total, 'device')} of {pluralize(processes, 'process')}"
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
            rule = f"must exist: {os.path.abspath(path)} does not exist."
            found.add_problem(key, path, rule, f"Set {key} to a path that exists.")
    return found.report()


def check_hosts(loaded: LoadedConfig, workdir: Path, *, shared: bool) -> tuple[Config, Hosts, str]:
    """Check a run on other hosts. Return (config with resolved mesh, hosts, report).

    Relative paths on the hosts start at `workdir`. With `shared`, this machine and the hosts share
    a file system.

    Raises:
        ConfigError: the run cannot start. The error lists every reason.
    """
    config, found = loaded.config, Preflight(loaded.origins)
    _refuse_secrets(loaded)
    if not config.launch.topology:
        rule = "must name the device type and the size of one slice."
        action = f"Set {KEY}=v5p:2x4x4, h100:8 or another topology of `maxpipe plan`."
        raise ConfigError.one(error_location(KEY, loaded.origins), "''", rule, action)
    topology = parse_topology(
        config.launch.topology, config.launch.slices, error_location(KEY, loaded.origins)
    )
    hosts = hosts_of(topology)
    if config.runtime.platform not in ("auto", topology.platform):
        found.add_problem(
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
        f"{pluralize(hosts.num_processes, 'process')} of "
        f"{pluralize(devices, 'device')}"
    )
    for path in output_paths(config).values():
        folder = workdir / path
        if is_remote(path) or not shared or not folder.is_absolute():
            shown = path if is_remote(path) else folder
            found.add_unchecked(f"{shown}: all hosts must be able to write there")
        else:
            _check_parent(folder, found)
    for key, path in _paths(config, workdir):
        if shared and not is_remote(path) and _exists(path):
            found.add_ok(f"{key} = {path}: exists")
        else:
            found.add_unchecked(f"{key} = {path}: must exist on all hosts")
    found.add_unchecked(
        f"{config.launch.image or config.launch.program}: all hosts must have this version"
    )
    return config, hosts, found.report()


def _refuse_secrets(loaded: LoadedConfig) -> None:
    """Raise an error if the config contains secrets, because job files include the config."""
    rule = "must not contain a secret: the job files would include it."
    action = "Remove it, and name an environment variable of the hosts in launch.environment."
    problems = [
        Problem(error_location(f"{section}.{key}", loaded.origins), str(shown), rule, action)
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
    """Return a topology of this machine's CPU devices, divided into virtual slices."""
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
            found.add_unchecked(f"{path}: the run writes here when it starts")
            continue
        try:
            os.makedirs(path, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            rule = f"must be a folder that can be written: {error.strerror or error}."
            found.add_problem(
                key, value_of(config, key), rule, f"Set {key} to a folder that you can write."
            )
        else:
            found.add_ok(f"{path}: can be written")


def _check_parent(folder: Path, found: Preflight) -> None:
    """Check that this machine can create an output folder."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(parent, os.W_OK | os.X_OK) and parent.is_dir():
        found.add_ok(f"{folder}: can be written here; all hosts must see it")
    else:
        found.add_unchecked(f"{folder}: {parent} cannot be written here; all hosts must be able to")


def _paths(config: Config, workdir: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for every input of the run. Relative paths start at `workdir`."""
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
    """Return the path of the run or Hugging Face folder of `checkpoint.restore_from`.

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
