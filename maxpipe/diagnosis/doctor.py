"""Check versions, folders, data, clocks, devices and processes before a run starts.

Every check returns a `CheckResult`. `probe` tests the devices in separate processes, so a hung
device is reported and does not block `maxpipe doctor`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
import time
import zoneinfo
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from maxpipe.checkpoint.address import parse_address
from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    checkpoint_home,
    entries,
    in_bucket,
    probe_writable,
    remedy,
    root_cause_text,
    run_folder,
    runs_folder,
    to_epath,
)
from maxpipe.config.check import check_training, find_warnings
from maxpipe.config.image_format import image_format
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.config.rules import axis_size
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import all_sources, section_of
from maxpipe.config.sections.distill import runs_teacher
from maxpipe.config.sections.run import RunConfig
from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.config.sections.source import SourceConfig
from maxpipe.data.chat import expand_trained_messages
from maxpipe.data.corpus import build_chat_encoder
from maxpipe.data.prepared.megatron import IDS, open_documents
from maxpipe.data.sources import open_source, wrap_section_errors
from maxpipe.data.tokenizer import Tokenizer, fit_tokenizer, open_tokenizer
from maxpipe.diagnosis import environment
from maxpipe.distributed.coordinator import free_port
from maxpipe.errors import ConfigError, StorageError
from maxpipe.huggingface.folder import folder_of, open_folder
from maxpipe.io import redact
from maxpipe.io.files import expand_path, has_home
from maxpipe.io.formatting import pluralize
from maxpipe.models.count import total
from maxpipe.models.registry import describe
from maxpipe.models.resolve_auto import words
from maxpipe.optim.state_spec import saved_bytes
from maxpipe.parallel.axes import MESH_AXES, ContextAttention, MeshConfig
from maxpipe.planner import topology

DEVICE_SECONDS = 300.0
"""Time limit for device startup and one small program per mesh axis, in seconds."""
LOOPBACK_SECONDS = 60.0

_WRITTEN_BYTES = 1 << 20
_CLOCK_SECONDS = 2.0
_FIRST_YEAR = 2025
"""First plausible year of the system clock; an earlier date means that the clock was never set."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `action` describes the fix if `status` is not `ok`."""

    name: str
    status: Literal["ok", "warning", "FAILED"]
    text: str
    action: str = ""
    code: str = ""
    """Error code, if the check failed with an error."""

    def __str__(self) -> str:
        text = f"{self.status:8} {self.name:24} {self.text} {self.action}".rstrip()
        return redact.redact_text(f"{text} [{self.code}]" if self.code else text)


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """Config sections used by the checks; defaults apply if no config is given."""

    config: Config | None = None
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    teacher_devices: int = 0
    """Number of devices used by the distillation teacher, in addition to those in the mesh."""

    @classmethod
    def of(cls, loaded: LoadedConfig) -> CheckTarget:
        """Return the sections of a loaded config that the checks use."""
        config = loaded.config
        others = config.distill.teacher_devices if runs_teacher(config) else 0
        return cls(config, config.run, config.mesh, config.runtime, others)


def examine(inputs: Sequence[str]) -> Iterator[CheckResult]:
    """Run the checks and yield their results. If `inputs` is empty, skip the config checks."""
    yield check_versions()
    target = CheckTarget()
    if inputs:
        try:
            loaded = load(inputs)
            target = CheckTarget.of(loaded)
            yield from (
                CheckResult(
                    "config",
                    "warning",
                    f"{each.where} = {each.value} {each.rule}",
                    each.action,
                    each.code,
                )
                for each in (*loaded.warnings, *find_warnings(loaded.config))
            )
            yield CheckResult("config", "ok", f"read from {pluralize(len(inputs), 'argument')}")
            if unsaid := check_training(loaded.config, loaded.origins):
                yield from _config_error_checks("training", ConfigError(unsaid))
        except ConfigError as error:
            yield from _config_error_checks("config", error)
    yield from check_folders(target)
    if target.config is not None:
        yield from check_restore_source(target.config)
        yield from check_data(target.config)
    yield check_clock()
    yield from check_devices(target)
    yield check_loopback()


def report(inputs: Sequence[str], checks: Sequence[CheckResult]) -> dict[str, Any]:
    """Return check results, environment and config as JSON-compatible data, with secrets
    redacted.
    """
    try:
        config = to_dict(load(inputs).config) if inputs else None
    except ConfigError:
        config = None  # a check reports the error
    found = {
        "well": all_passed(checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "environment": environment.report(),
        "config": config,
    }
    return redact.redact_value(found)


def all_passed(checks: Sequence[CheckResult]) -> bool:
    """Return True if no check failed."""
    return all(check.status != "FAILED" for check in checks)


def check_versions() -> CheckResult:
    """Compare the installed Python and package versions with the minimums in pyproject.toml."""
    wrong = []
    for package, lowest, is_needed in environment.requirements():
        present = environment.versions()["python"] if package == "python" else None
        present = present or environment.installed_version(package)
        if present is None and is_needed:
            wrong.append(f"{package} is not installed (at least {lowest} is required)")
        elif present is not None and _numbers(present) < _numbers(lowest):
            wrong.append(f"{package} {present} is older than {lowest}")
    if wrong:
        action = "Run: pip install -c constraints/py311.txt . (py312.txt for Python 3.12 and newer)"
        return CheckResult("versions", "FAILED", f"{'; '.join(wrong)}.", action)
    if any(map(environment.installed_version, topology.PLUGINS)) and (
        unfit := topology.missing_compiler()
    ):
        return CheckResult("versions", "FAILED", f"jax for GPUs {unfit[0]}.", f"Run: {unfit[1]}.")
    shown = {name: version for name, version in environment.versions().items() if version}
    return CheckResult("versions", "ok", ", ".join(f"{name} {v}" for name, v in shown.items()))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release components of a version. A suffix is ignored: 0.10.2rc1 gives 0.10.2."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _config_error_checks(name: str, error: ConfigError) -> Iterator[CheckResult]:
    for problem in error.problems:
        given = f" = {problem.value}" if problem.value else ""
        text = f"{problem.where}{given} {problem.rule}"
        yield CheckResult(name, "FAILED", text, problem.action, problem.code)


# Folders.


def check_folders(target: CheckTarget) -> Iterator[CheckResult]:
    """Check that the folders of a run are writable and have free space."""
    run_dir, config = run_folder(target.run), target.config
    if config is None or not (config.checkpoint.dir or in_bucket(config.run.dir)):
        yield _folder("run folder", run_dir, config)
    else:
        yield _folder("run folder", run_dir)
        yield _checkpoints(checkpoint_home(run_dir, config.checkpoint), config)
    if target.runtime.compilation_cache:
        yield _cache(target.runtime.compilation_cache)


def _cache(folder: str) -> CheckResult:
    name = "compilation cache"
    action = "Set runtime.compilation_cache to a writable folder."
    if folder == RuntimeConfig().compilation_cache and not has_home():
        return CheckResult(name, "warning", f"{folder} cannot be used: HOME is not set.", action)
    result = _folder(name, expand_path(folder, "runtime.compilation_cache"))
    if result.status == "FAILED":  # a run works without a compilation cache
        return dataclasses.replace(result, status="warning", action=action)
    return result


def check_restore_source(config: Config) -> Iterator[CheckResult]:
    """Check that the checkpoint named in `checkpoint.restore_from` exists."""
    name, restore_from = "restore from", config.checkpoint.restore_from
    if not restore_from:
        return
    try:
        if _steps(checkpoint_home(run_folder(config.run), config.checkpoint)):
            text = f"{restore_from} is ignored: the run resumes from its own newest checkpoint"
            yield CheckResult(name, "ok", text)
            return
        if (folder := folder_of(restore_from)) is not None:
            model = open_folder(folder, "checkpoint.restore_from").description.table.architecture
            yield CheckResult(name, "ok", f"{folder}, {model}, weights only")
            return
        address = parse_address(restore_from, "checkpoint.restore_from", config.run.dir)
        steps = _steps(address.home)
    except ConfigError as error:
        yield from _config_error_checks(name, error)
        return
    except (StorageError, OSError) as error:
        is_coded = isinstance(error, StorageError)
        reason = error.message.splitlines()[0] if is_coded else root_cause_text(error)
        action = "Check the storage and this account's permissions."
        text = f"{restore_from} cannot be read: {reason}."
        yield CheckResult(name, "FAILED", text, action, error.code or "" if is_coded else "")
        return
    if not steps or (isinstance(address.step, int) and address.step not in steps):
        has = f"has steps {', '.join(map(str, steps))}" if steps else "has no checkpoint"
        action = "Set checkpoint.restore_from to an existing checkpoint, such as RUN@newest."
        yield CheckResult(
            name, "FAILED", f"{restore_from} does not exist: {address.home} {has}.", action
        )
        return
    which = address.step if address.step is not None else "newest"
    yield CheckResult(
        name, "ok", f"{address.home}, step {which}, restores {config.checkpoint.restore}"
    )


def _steps(path: str) -> list[int]:
    names = [entry.name for entry in entries(to_epath(os.path.join(path, CHECKPOINTS_FOLDER)))]
    return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,18}", name))


def _checkpoints(path: str, config: Config) -> CheckResult:
    """Check the folder or bucket that `checkpoint.dir` names."""
    name = "checkpoint folder"
    if not in_bucket(path):
        return _folder(name, Path(path), config, key="checkpoint.dir")
    try:
        probe_writable(to_epath(path))
    except StorageError as error:
        where, rule, action = (line.strip() for line in error.message.splitlines())
        return CheckResult(name, "FAILED", f"{where}: {rule}", action, error.code or "")
    except OSError as error:
        text = f"{path} cannot be written: {root_cause_text(error)}."
        return CheckResult(name, "FAILED", text, remedy(path, "checkpoint.dir"))
    return CheckResult(name, "ok", f"{path} can be written")


def _folder(
    name: str, path: Path, config: Config | None = None, *, key: str = "run.dir"
) -> CheckResult:
    existing = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    try:
        late = _measure_clock_skew(existing)
        free = shutil.disk_usage(existing).free
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror or error}."
        return CheckResult(name, "FAILED", text, f"Set {key} to a writable folder.")
    words = f"{path} can be written, {_size(free)} free"
    if config is not None:
        model, keep = config.model, config.checkpoint.keep
        trained_only, dtype = model.adapter is not None, model.param_dtype
        saved = partial(saved_bytes, config.optim, param_dtype=dtype, trained_only=trained_only)
        needed = int(total(describe(model), saved))
        words += f", a checkpoint needs {_size(needed)}"
        if free < needed * (keep + 1):
            status = "FAILED" if free < needed else "warning"
            action = f"Free {_size(needed * (keep + 1) - free)}, or set {key} to another disk."
            text = f"{words}, and {keep} checkpoints are kept while the next one is written."
            return CheckResult(name, status, text, action)
    if abs(late) > _CLOCK_SECONDS:
        text = f"{words}; its file server's clock differs from this machine's by {late:.1f} s."
        return CheckResult(
            name, "warning", text, "Start NTP (chrony, systemd-timesyncd) on both machines."
        )
    return CheckResult(name, "ok", words)


def _measure_clock_skew(folder: Path) -> float:
    """Return the modification time of a new file minus the local time, in seconds."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_WRITTEN_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime - time.time()


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# Data.


def check_data(config: Config) -> Iterator[CheckResult]:
    """Check that documents can be read and that all token IDs are within the model's vocabulary."""
    document, sources = "text", all_sources(config.data)
    kept = str(runs_folder(config.run) / ".index")
    for name, source_config in sources.items():
        if source_config.source in IDS or source_config.chat != "off":
            continue  # checked below, together with the tokenizer
        try:
            with wrap_section_errors(name):
                source = open_source(source_config, config.run.seed, cache_dir=kept)
                document = source[0]
        except ConfigError as error:
            yield from _config_error_checks(section_of(name), error)
            continue
        except StorageError as error:  # for example, the disk fills up during unpacking
            yield _storage_error_check(section_of(name), error)
            continue
        text = f"{source.name}, {pluralize(len(source), 'document')}, the first has "
        text += pluralize(len(document), "character")
        yield CheckResult(section_of(name), "ok", text)
    try:
        tokenizer = fit_tokenizer(open_tokenizer(config.tokenizer), config.model.vocab_size)
        tokenizer = tokenizer.with_images(image_format(config))
    except ConfigError as error:
        yield from _config_error_checks("tokenizer", error)
        return
    tokens = tokenizer.encode(document)
    text = (
        f"{config.tokenizer.kind}, {tokenizer.vocab_size} ids, {len(tokens)} tokens for "
        f"{len(document)}"
    )
    yield CheckResult("tokenizer", "ok", f"{text} characters")
    for name, source_config in sources.items():
        if source_config.source in IDS:
            yield from _check_prepared_tokens(name, source_config, tokenizer)
        elif source_config.chat != "off":
            yield from _conversations(
                name, source_config, tokenizer, kept, config.train.sequence_length
            )


def _storage_error_check(name: str, error: StorageError) -> CheckResult:
    where, *words = error.message.splitlines()
    text = " ".join([where, *map(str.strip, words[:-1])])
    return CheckResult(name, "FAILED", text, words[-1].strip(), error.code or "")


def _conversations(
    name: str, config: SourceConfig, tokenizer: Tokenizer, kept: str, row_tokens: int
) -> Iterator[CheckResult]:
    """Check that the records of a source can be read as conversations or preference pairs."""
    section = section_of(name)
    try:
        with wrap_section_errors(name):
            source = open_source(config, 0, cache_dir=kept)
            source = expand_trained_messages(source, config, kept)
            records = build_chat_encoder(source, tokenizer, config, row_tokens)
            assert records is not None
            first = records.encode(0)
    except ConfigError as error:
        yield from _config_error_checks(section, error)
        return
    assert first.trained is not None
    noun = "pair" if config.chat == "pairs" else "conversation"
    text = f"{source.name}, {pluralize(len(source), noun)}, the first has "
    text += f"{pluralize(len(first.ids), 'token')}, {int(first.trained.sum())} of them trained on"
    yield CheckResult(section, "ok", text)


def _check_prepared_tokens(
    name: str, config: SourceConfig, tokenizer: Tokenizer
) -> Iterator[CheckResult]:
    """Check that the documents of a prepared dataset can be read and match the tokenizer."""
    section = section_of(name)
    try:
        with wrap_section_errors(name):
            documents = open_documents(config, tokenizer)
            first = pluralize(len(documents[0].ids), "token")
    except ConfigError as error:
        yield from _config_error_checks(section, error)
        return
    except StorageError as error:
        yield _storage_error_check(section, error)
        return
    text = f"{config.source}, {pluralize(documents.num_documents, 'document')}, "
    text += f"{pluralize(documents.num_tokens, 'token')}, the first document has {first}"
    yield CheckResult(section, "ok", f"{text}; {documents.remark}")


# Clocks.


def check_clock() -> CheckResult:
    """Check that the clock of this machine is set and advances without jumps."""
    zone = os.environ.get("TZ", "").lstrip(":")
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    wall, steady = time.time() - wall, time.monotonic() - steady
    now = datetime.now().astimezone()
    words = f"{now:%Y-%m-%d %H:%M:%S}, time zone {now:%Z (UTC%z)}"
    if steady <= 0 or abs(wall - steady) > 0.5:
        text = f"the wall clock advanced by {wall:.2f} s, the monotonic clock by {steady:.2f} s."
        return CheckResult(
            "clock", "FAILED", text, "Configure NTP to slew the clock rather than step it."
        )
    if now.astimezone(UTC).year < _FIRST_YEAR:
        return CheckResult(
            "clock", "warning", f"{words}: the clock was never set.", "Set the clock with NTP."
        )
    if zone and not _is_zone(zone):
        text = f"{words}: TZ={zone} is not a time zone, so UTC is used."
        return CheckResult(
            "clock", "warning", text, "Set TZ to a name such as Europe/Zurich, or unset TZ."
        )
    return CheckResult("clock", "ok", words)


def _is_zone(name: str) -> bool:
    if re.match(r"[A-Za-z]{3,}[+-]?\d|<|/", name):  # a POSIX rule or a file
        return True
    try:
        zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return False
    return True


# Devices.


def check_devices(target: CheckTarget) -> Iterator[CheckResult]:
    """Check the run's devices, its mesh, and every collective along every mesh axis."""
    seconds = DEVICE_SECONDS
    if target.runtime.num_processes != 1:
        seconds += target.runtime.init_timeout_seconds
    # Disable the compilation cache, because runs cannot reuse programs compiled by doctor.
    runtime = dataclasses.replace(target.runtime, compilation_cache="")
    folder = os.path.join(target.run.dir, target.run.name)
    (records,) = environment.probe(
        [_spec(runtime, target.mesh, folder, target.teacher_devices)], seconds
    )
    for record in records:
        result = CheckResult(**{name: record.get(name, "") for name in CheckResult.__slots__})
        if result.status == "FAILED" and not result.action:
            action = "Stop other programs that use the devices, or set runtime.platform=cpu."
            result = dataclasses.replace(result, action=action)
        yield result
        if target.config is not None and (platform := record.get("platform")):
            yield from _attention(target.config, platform)


def _attention(config: Config, platform: str) -> Iterator[CheckResult]:
    """Report the attention backend that `auto` selects on the platform."""
    sizes = {axis: axis_size(config.mesh, axis) or 1 for axis in MESH_AXES}
    method = ContextAttention.from_config(config.mesh, sizes)
    if chosen := words(config.model, platform, config.train.sequence_length, method):
        yield CheckResult("attention", "ok", chosen)


def count_device_kinds() -> dict[str, int] | str:
    """Return the number of devices of each type, or an error message."""
    (records,) = environment.probe([_spec(RuntimeConfig(), MeshConfig())], LOOPBACK_SECONDS)
    for record in records:
        if "kinds" in record:
            return record["kinds"]
    return records[-1]["text"]


def check_loopback() -> CheckResult:
    """Check that two local CPU processes can connect and run collectives."""
    name = "two processes"
    begin = time.monotonic()
    runtime = RuntimeConfig(
        platform="cpu",
        num_processes=2,
        coordinator=f"127.0.0.1:{free_port()}",
        init_timeout_seconds=int(LOOPBACK_SECONDS) - 10,
        compilation_cache="",
    )
    with tempfile.TemporaryDirectory() as folder:
        specs = [
            _spec(dataclasses.replace(runtime, process_id=rank), MeshConfig(ici_data=2), folder)
            for rank in (0, 1)
        ]
        records_of_ranks = environment.probe(specs, LOOPBACK_SECONDS, inherit=False)
    seconds = time.monotonic() - begin
    for rank, records in enumerate(records_of_ranks):
        for record in records:
            if record["status"] == "FAILED":
                action = (
                    "Allow connections to 127.0.0.1; if a proxy is used, set no_proxy=127.0.0.1."
                )
                return CheckResult(name, "FAILED", f"process {rank}: {record['text']}", action)
    words = f"connected on 127.0.0.1 and ran collectives in {seconds:.0f} s"
    return CheckResult(name, "ok", words)


def _spec(
    runtime: RuntimeConfig, mesh: MeshConfig, folder: str = ".", teacher_devices: int = 0
) -> dict[str, Any]:
    """Return the input of `probe`. `folder` is the run folder, which contains the shared secret."""
    sections = {"runtime": dataclasses.asdict(runtime), "mesh": dataclasses.asdict(mesh)}
    return sections | {"folder": folder, "teacher_devices": teacher_devices}
