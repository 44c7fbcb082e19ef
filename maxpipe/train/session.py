"""State of one process in a run: console, control channel, events, locks and clean-up.

Opening a session joins the processes of the run, checks the config against the machine, and locks
the folders. Missing files and a mesh that does not match the devices are reported together, before
the devices are initialized.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maxpipe
from maxpipe.checkpoint.folder import BASE, AdapterBase
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import local_folder
from maxpipe.checkpoint.run_copy import RunCopy
from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    checkpoint_home,
    entries,
    run_folder,
    to_epath,
    url_of_copy,
)
from maxpipe.config import config_files
from maxpipe.config.check import error_location
from maxpipe.config.config_files import (
    CONFIG_FILE,
    EVENTS_FILE,
    FORECAST_FILE,
    LAYERS_FILE,
    METRICS_FILE,
    REFERENCE_FILE,
    SAMPLES_FILE,
    TRACKERS_FILE,
)
from maxpipe.config.load import LoadedConfig, to_dict, to_yaml
from maxpipe.config.plugins import PLUGINS, loaded_plugins, plugin_digests
from maxpipe.config.schema import Config, without_permissions
from maxpipe.config.sections.data import named_sources
from maxpipe.config.sections.log import TENSORBOARD, TRACKER_PACKAGES, TRACKERS
from maxpipe.config.sections.source import FILES, SOURCES, paths_of
from maxpipe.data.chat_spec import KEY as CONVERSATION
from maxpipe.data.chat_spec import ChatSpec
from maxpipe.distributed import protocol, runtime
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.phases import Phases
from maxpipe.errors import (
    Code,
    ConfigError,
    ExitCode,
    MaxpipeError,
    Preemption,
    Problem,
    StorageError,
)
from maxpipe.io import files, redact
from maxpipe.io.files import url_scheme
from maxpipe.io.stores import corrected_url
from maxpipe.step.build import resolve_mesh, shared_metadata
from maxpipe.telemetry.alerts import find_unknown_metrics
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.writers import EventLog, MetricWriter, RecordObserver
from maxpipe.train.memory_check import check_forecast

_MODEL = "hf:"
_RESTORE, _TEACHER, _TOKENIZER = "checkpoint.restore_from", "distill.teacher", "tokenizer.path"
_PREPARED = ("tokens", "megatron")


def missing_files(loaded: LoadedConfig) -> list[Problem]:
    """Return a `Problem` for each missing local file or folder that the config names."""
    config, origins = loaded.config, loaded.origins
    folders = _model_folders(config)
    problems = [_model_problem(key, folder, config, origins) for key, folder in folders.items()]
    in_folder = any(_is_inside(config.tokenizer.path, folder) for folder in folders.values())
    if config.tokenizer.kind != "bytes" and not in_folder:
        problems += _problem(_TOKENIZER, config.tokenizer.path, origins)
    for section, source in named_sources(config):
        if source.source in (*FILES, *_PREPARED, *SOURCES):
            key = f"{section}.path" if source.path else f"{section}.paths"
            for path in paths_of(source):
                problems += _problem(key, path, origins)
        if source.chat != "off":
            problems += _problem(f"{section}.chat_template", source.chat_template, origins)
    for key, path in _other_files(config):
        problems += _problem(key, path, origins)
    return problems


def find_tracking_problems(loaded: LoadedConfig) -> list[Problem]:
    """Return a `Problem` for each tracker that cannot run, and for each alert on a metric that does
    not exist.
    """
    config, origins = loaded.config, loaded.origins
    where = error_location("log.trackers", origins)
    problems = []
    for name in config.log.trackers:
        packages = TRACKER_PACKAGES.get(name)
        if packages and not any(map(_is_installed, packages)):
            rule = f"requires the package {packages[0]}, which is not installed."
            action = f"Run: pip install 'maxpipe[{name}]'"
            problems.append(Problem(Code.ENV_PACKAGE, where, name, rule, action))
        elif name in TRACKERS and not _is_in_plugin(name, config):
            rule = "was registered by the running program, but trackers run in another process."
            action = "Move register_tracker to a file, and set plugins.modules=[FILE.py]."
            problems.append(Problem(Code.PLUG_REGISTER, where, name, rule, action))
    objective_is_built_in = config.train.objective not in _plugin_objectives(config)
    for key, metric, rule, action in find_unknown_metrics(config.alerts):
        if objective_is_built_in or not metric.startswith(("train/", "eval/")):
            problems.append(
                Problem(Code.CFG_VALUE, error_location(key, origins), metric, rule, action)
            )
    return problems


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _is_in_plugin(name: str, config: Config) -> bool:
    loaded = loaded_plugins(config.plugins.modules)
    return any(f"log.trackers={name}" in each.undo for each in loaded)


def _plugin_objectives(config: Config) -> set[str]:
    settings = {key for each in loaded_plugins(config.plugins.modules) for key in each.undo}
    return {key.partition("=")[2] for key in settings if key.startswith("train.objective=")}


@contextlib.contextmanager
def merge_problems(problems: Sequence[Problem]) -> Iterator[None]:
    """Raise a single ConfigError that reports `problems` along with the problems of any ConfigError
    raised inside the context.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)


def _model_folders(config: Config) -> dict[str, str]:
    """Return the missing Hugging Face folders, keyed by the config key that names each folder."""
    named = {}
    if config.train.objective == "distill":
        named[_TEACHER] = config.distill.teacher
    if config.checkpoint.restore_from.startswith(_MODEL) and not _has_checkpoint(config):
        named[_RESTORE] = config.checkpoint.restore_from
    folders = {k: v.removeprefix(_MODEL) for k, v in named.items() if v.startswith(_MODEL)}
    return {key: folder for key, folder in folders.items() if folder and not _exists(folder)}


def _has_checkpoint(config: Config) -> bool:
    """Return whether the run resumes, in which case `checkpoint.restore_from` is not read."""
    home = checkpoint_home(run_folder(config.run), config.checkpoint)
    try:
        steps = entries(to_epath(os.path.join(home, CHECKPOINTS_FOLDER)))
        return any(entry.name.isdecimal() for entry in steps)
    except OSError:
        return True  # the storage backend will report the error


def _model_problem(key: str, folder: str, config: Config, origins: Mapping[str, str]) -> Problem:
    rule = "must name a folder with config.json, *.safetensors and a tokenizer: "
    rule += f"{os.path.abspath(os.path.expanduser(folder))} does not exist."
    settings = f"{key}={_MODEL}DIR"
    if config.tokenizer.kind != "bytes" and _is_inside(config.tokenizer.path, folder):
        rule += f" {_TOKENIZER}={config.tokenizer.path} is also read from that folder."
        settings += f" and {_TOKENIZER}=DIR"
    name = folder if config_files.is_hub_id(folder) else "NAME"
    out = folder.rpartition("/")[2] if name == folder else folder
    action = f"Download the model: run `maxpipe fetch hf:{name} --out {out}`, and set "
    action += f"{settings}, where DIR is {out} or the folder of another model."
    return Problem(Code.HF_FOLDER, error_location(key, origins), f"{_MODEL}{folder}", rule, action)


def _is_inside(path: str, folder: str) -> bool:
    if not path:
        return False
    inner, outer = (os.path.abspath(os.path.expanduser(name)) for name in (path, folder))
    return os.path.commonpath([inner, outer]) == outer


def _other_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (config key, path) for the task, prompt, reward and teacher-logits files that a run
    reads.
    """
    for name, task in config.eval.tasks.items():
        yield f"eval.tasks.{name}.path", task.path
    if config.eval.harness_tasks:
        yield "eval.harness_path", config.eval.harness_path
    for name, task in config.eval.generative_tasks.items():
        yield f"eval.generative_tasks.{name}.path", task.path
        yield f"eval.generative_tasks.{name}.scorer_file", task.scorer_file.rpartition(":")[0]
    if config.eval.sample_every:
        yield "eval.sample_prompts_file", config.eval.sample_prompts_file
    if config.train.objective == "grpo":
        yield "grpo.prompts", config.grpo.prompts
        yield "grpo.reward_file", config.grpo.reward_file.rpartition(":")[0]
    if config.train.objective == "distill":
        yield "distill.teacher_logits", config.distill.teacher_logits


def _problem(key: str, path: str, origins: Mapping[str, str]) -> Iterator[Problem]:
    if path and not _exists(path):
        rule = f"must name an existing file or folder; none exists relative to {os.getcwd()}."
        action = f"Set {key} to an existing path."
        if url := corrected_url(path):
            action = f"Set {key}={url}, with a scheme in lowercase and two slashes."
        if key == "tokenizer.path" and config_files.is_hub_id(path):
            rule += " Only `maxpipe fetch` downloads files."
            action = f"{config_files.hub_download_action(path).removesuffix('.')} as {key}."
        yield Problem(Code.DATA_MISSING, error_location(key, origins), path, rule, action)


def _exists(path: str) -> bool:
    """Return whether a local path or glob pattern exists; always true for buckets."""
    expanded = os.path.expanduser(path)
    if url_scheme(path) or os.path.lexists(expanded):
        return True  # broken links are reported when the file is read
    return next(glob.iglob(expanded, recursive=True), None) is not None


_TRUNCATED_FILES = (METRICS_FILE, SAMPLES_FILE, LAYERS_FILE)
_RECORDS = (*_TRUNCATED_FILES, *(f"{name}.new" for name in _TRUNCATED_FILES), EVENTS_FILE)
WRITTEN_FILES = (CONFIG_FILE, FORECAST_FILE, REFERENCE_FILE, TRACKERS_FILE, *_RECORDS)


@dataclass(frozen=True)
class Session:
    """All resources used by one process of a run, except the model and the data."""

    loaded: LoadedConfig
    """Config with a resolved mesh."""
    console: Console
    channel: ControlChannel
    phases: Phases
    events: EventLog
    locks: Sequence[RunLock]
    """Locks of the run folder and the checkpoint folders. Only process 0 holds locks."""
    stack: contextlib.ExitStack
    """Callbacks and contexts to close at the end of the session."""

    @property
    def config(self) -> Config:
        """Config of the run."""
        return self.loaded.config

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return run_folder(self.config.run)

    @property
    def is_first_process(self) -> bool:
        """Whether this process is process 0, which writes the records of the run."""
        return self.channel.index == 0

    def record_time(self, step: int) -> None:
        """Record the time spent in each phase since the last record."""
        self.events.write("time", step=step, seconds=self.phases.take_seconds())

    def open_writer(
        self, resume_step: int, observers: Sequence[RecordObserver] = ()
    ) -> MetricWriter:
        """Open the run's metrics file, and remove records of steps after `resume_step`."""
        return MetricWriter(
            self.run_dir,
            TENSORBOARD in self.config.log.trackers,
            resume_step,
            process_index=self.channel.index,
            ours=ownership_check(self.locks),
            observers=observers,
        )

    def write_config(self) -> None:
        """Write the config to the run folder if this process is process 0."""
        if self.is_first_process:
            write_config(self.config, self.locks)


def write_config(config: Config, locks: Sequence[RunLock]) -> None:
    """Write the config to the run folder, which is locked by `locks`.

    Raises:
        StorageError: the file cannot be written, or a lock was lost.
    """
    for lock in locks:
        lock.check()
    path = run_folder(config.run) / CONFIG_FILE
    try:
        files.write(path, to_yaml(_shareable(config)))
    except OSError as error:
        raise StorageError.unwritable(path, error) from error


def saved_config(config: Config) -> dict[str, dict[str, Any]]:
    """Return the config that a checkpoint contains, without secrets and without permissions."""
    return to_dict(_shareable(config))


def saved_data(
    config: Config,
    position: Mapping[str, Any],
    guard: Mapping[str, Any],
    base: AdapterBase | None,
    conversation: ChatSpec | None,
) -> dict[str, Any]:
    """Return the entries that the data section of every checkpoint contains.

    Args:
        config: config of the run.
        position: position and fingerprint of the data.
        guard: counts of the guard.
        base: base model of the adapters, if any.
        conversation: chat format of the data, if the data contains conversations.
    """
    data = {**position, "guard": guard}
    optional = {
        PLUGINS: plugin_digests(config.plugins.modules) or None,
        BASE: base,
        CONVERSATION: conversation,
    }
    return data | {key: value for key, value in optional.items() if value is not None}


def _shareable(config: Config) -> Config:
    return redact.redact_value(without_permissions(config))


@contextlib.contextmanager
def open_session(loaded: LoadedConfig) -> Iterator[Session]:
    """Join the processes of the run, and yield this process's session.

    Raises:
        ConfigError: the config does not match the machine.
        StorageError: another process uses the run folder, or the folder cannot be written.
    """
    config = loaded.config
    run_dir = run_folder(config.run)
    with contextlib.ExitStack() as stack:
        phases = Phases()
        channel = stack.enter_context(
            runtime.join_processes(
                config.runtime, config.mesh.cpu_devices, phases, shared_metadata(config), run_dir
            )
        )
        problems = missing_files(loaded)
        if channel.index == 0:  # only this process uses trackers
            problems += find_tracking_problems(loaded)
        with merge_problems(problems):
            loaded = resolve_mesh(loaded)
            console = stack.enter_context(Console(config.log.progress, process_index=channel.index))
            channel.say, channel.tell = console.warn, console.tell
            check_forecast(loaded.config, console.warn)
        files.check_regular_files(run_dir, WRITTEN_FILES)
        locks = lock_folders(config, stack, console.warn) if channel.index == 0 else []
        if locks and url_of_copy(run_dir):
            stack.enter_context(RunCopy(run_dir, lambda: all(lock.check_held() for lock in locks)))
        events = EventLog(run_dir, channel.index, phases.begun, ownership_check(locks))
        _record_attempt(config, events, channel, phases, stack)
        yield Session(loaded, console, channel, phases, events, locks, stack)


def ownership_check(locks: Sequence[RunLock]) -> Callable[[], bool]:
    """Return a function that returns whether this process holds the lock of the run folder."""
    return locks[0].check_held if locks else lambda: False


def lock_folders(
    config: Config, stack: contextlib.ExitStack, warn: Callable[[str], None]
) -> list[RunLock]:
    """Lock the run folder, and the checkpoint folders that are outside it.

    Raises:
        StorageError: another process uses a folder, or the folder cannot be written.
    """
    run_dir = run_folder(config.run)
    locks = [RunLock(run_dir)]
    durable = RunLock(checkpoint_home(run_dir, config.checkpoint), key="checkpoint.dir")
    if durable.path != locks[0].path:
        locks.append(durable)
    if local_dir := config.checkpoint.local_dir:
        locks.append(RunLock(local_folder(local_dir, run_dir), key="checkpoint.local_dir"))
    held = [stack.enter_context(lock) for lock in locks]
    protocol.remove_stale_secrets(run_dir)
    for note in filter(None, (lock.note for lock in held)):
        warn(note)
    return held


def _record_attempt(
    config: Config,
    events: EventLog,
    channel: ControlChannel,
    phases: Phases,
    stack: contextlib.ExitStack,
) -> None:
    """Record in the run's events the start of this attempt and, if it fails, the failure."""
    digests = plugin_digests(config.plugins.modules)
    events.write(
        "begin",
        host=platform.node(),
        pid=os.getpid(),
        processes=channel.count,
        version=maxpipe.__version__,
        **({PLUGINS: digests} if digests else {}),
    )

    def record_failure(error_type: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Preemption):
            code = error.code if isinstance(error, MaxpipeError) else None
            coded = {"error_code": code} if code else {}
            events.write("failed", error=type(error).__name__, text=str(error)[:1000], **coded)

    def record_exit(code: int, text: str) -> None:
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            events.write("preempted", step=phases.step, saved=False)
        else:
            events.write("failed", code=code, text=text[:1000])

    stack.push(record_failure)
    channel.on_leave = record_exit
