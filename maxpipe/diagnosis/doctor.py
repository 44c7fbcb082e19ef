"""Checks before a run starts: versions, folders, data, clocks, devices and processes.

Every check is one `Check`. `probe` tests devices in processes of its own, so
that a device that hangs is a finding and does not hang the doctor.
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

from maxpipe.checkpoint.address import parse
from maxpipe.checkpoint.storage import (
    FOLDER,
    entries,
    first_line,
    home,
    in_bucket,
    located,
    remedy,
    run_folder,
    try_out,
)
from maxpipe.config.check import cautions
from maxpipe.config.data import all_sources, section_of
from maxpipe.config.data_schema import SourceConfig
from maxpipe.config.load import Loaded, load, to_dict
from maxpipe.config.rules import axis_size
from maxpipe.config.schema import Config, RunConfig, RuntimeConfig
from maxpipe.config.training import asks_teacher, check_training
from maxpipe.data.chat import answers_of
from maxpipe.data.corpus import chat_records
from maxpipe.data.prepared.megatron import IDS, open_documents
from maxpipe.data.sources import in_section, open_source
from maxpipe.data.tokenizer import Tokenizer, fitted, open_tokenizer
from maxpipe.diagnosis import environment
from maxpipe.distributed.hub import free_port
from maxpipe.errors import ConfigError, StorageError
from maxpipe.huggingface.source import folder_of, opened
from maxpipe.io import redact
from maxpipe.io.files import full, has_home
from maxpipe.io.text import counted
from maxpipe.models.choice import Divided, words
from maxpipe.models.count import total
from maxpipe.models.registry import describe
from maxpipe.optim.kept import saved_bytes
from maxpipe.parallel.axes import MESH_AXES, MeshConfig
from maxpipe.plan import topology

DEVICE_SECONDS = 300.0
"""Seconds for devices to start, and for one small program per mesh axis."""
LOOPBACK_SECONDS = 60.0

_WRITTEN_BYTES = 1 << 20
_CLOCK_SECONDS = 2.0
_FIRST_YEAR = 2025
"""A clock before this date was never set."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `action` says what to do when it is not ok."""

    name: str
    status: Literal["ok", "warning", "FAILED"]
    text: str
    action: str = ""

    def __str__(self) -> str:
        return redact.text(f"{self.status:8} {self.name:24} {self.text} {self.action}".rstrip())


@dataclass(frozen=True, slots=True)
class Target:
    """The config under test, or its defaults without one."""

    config: Config | None = None
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    teacher_devices: int = 0
    """Devices that are not the mesh's."""

    @classmethod
    def of(cls, loaded: Loaded) -> Target:
        """The target of a loaded config."""
        config = loaded.config
        others = config.distill.devices if asks_teacher(config) else 0
        return cls(config, config.run, config.mesh, config.runtime, others)


def examine(inputs: Sequence[str]) -> Iterator[Check]:
    """Every check, as soon as it is done. Without inputs, those that need no config."""
    yield versions()
    target = Target()
    if inputs:
        try:
            loaded = load(inputs)
            target = Target.of(loaded)
            yield from (
                Check("config", "warning", f"{each.where} = {each.given} {each.rule}", each.action)
                for each in (*loaded.cautions, *cautions(loaded.config))
            )
            yield Check("config", "ok", f"read from {counted(len(inputs), 'argument')}")
            if unsaid := check_training(loaded.config, loaded.origins):
                yield from _explained("training", ConfigError(unsaid))
        except ConfigError as error:
            yield from _explained("config", error)
    yield from folders(target)
    if target.config is not None:
        yield from source(target.config)
        yield from data(target.config)
    yield clock()
    yield from devices(target)
    yield loopback()


def report(inputs: Sequence[str], checks: Sequence[Check]) -> dict[str, Any]:
    """Checks, environment and config as JSON values, without secrets."""
    try:
        config = to_dict(load(inputs).config) if inputs else None
    except ConfigError:
        config = None  # a check says why
    found = {
        "well": is_well(checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "environment": environment.report(),
        "config": config,
    }
    return redact.within(found)


def is_well(checks: Sequence[Check]) -> bool:
    """Whether no check failed."""
    return all(check.status != "FAILED" for check in checks)


def versions() -> Check:
    """Python and packages against the ranges in pyproject.toml."""
    wrong = []
    for package, lowest, is_needed in environment.requirements():
        present = environment.versions()["python"] if package == "python" else None
        present = present or environment.installed(package)
        if present is None and is_needed:
            wrong.append(f"{package} is missing (at least {lowest})")
        elif present is not None and _numbers(present) < _numbers(lowest):
            wrong.append(f"{package} {present} is older than {lowest}")
    if wrong:
        action = "Run: pip install -c constraints/py311.txt . (py312.txt for later Pythons)"
        return Check("versions", "FAILED", f"{'; '.join(wrong)}.", action)
    if any(map(environment.installed, topology.PLUGINS)) and (unfit := topology.missing_compiler()):
        return Check("versions", "FAILED", f"jax for GPUs {unfit[0]}.", f"Run: {unfit[1]}.")
    shown = {name: version for name, version in environment.versions().items() if version}
    return Check("versions", "ok", ", ".join(f"{name} {v}" for name, v in shown.items()))


def _numbers(version: str) -> tuple[int, ...]:
    """Release numbers: 0.10.2rc1 counts as 0.10.2."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _explained(name: str, error: ConfigError) -> Iterator[Check]:
    for problem in error.problems:
        given = f" = {problem.given}" if problem.given else ""
        yield Check(name, "FAILED", f"{problem.where}{given} {problem.rule}", problem.action)


# Folders.


def folders(target: Target) -> Iterator[Check]:
    """Whether the folders of a run can be written and have space."""
    run_dir, config = run_folder(target.run), target.config
    if config is None or not config.checkpoint.dir:
        yield _folder("run folder", run_dir, config)
    else:
        yield _folder("run folder", run_dir)
        yield _checkpoints(home(run_dir, config.checkpoint), config)
    if target.runtime.compilation_cache:
        yield _cache(target.runtime.compilation_cache)


def _cache(folder: str) -> Check:
    name = "compilation cache"
    action = "Set runtime.compilation_cache to a folder that can be written."
    if folder == RuntimeConfig().compilation_cache and not has_home():
        return Check(name, "warning", f"{folder} cannot be used: HOME is not set.", action)
    found = _folder(name, full(folder, "runtime.compilation_cache"))
    if found.status == "FAILED":  # a run can do without it
        return dataclasses.replace(found, status="warning", action=action)
    return found


def source(config: Config) -> Iterator[Check]:
    """Whether the checkpoint exists from which a new run starts."""
    name, given = "restore from", config.checkpoint.restore_from
    if not given:
        return
    try:
        if _steps(home(run_folder(config.run), config.checkpoint)):
            text = f"{given} is not read: the run has checkpoints of its own"
            yield Check(name, "ok", text)
            return
        if (folder := folder_of(given)) is not None:
            model = opened(folder, "checkpoint.restore_from").described.table.architecture
            yield Check(name, "ok", f"{folder}, {model}, weights of it")
            return
        found = parse(given, "checkpoint.restore_from", config.run.dir)
        steps = _steps(found.home)
    except ConfigError as error:
        yield from _explained(name, error)
        return
    except (StorageError, OSError) as error:
        reason = first_line(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        action = "Check the storage, and this account's rights there."
        yield Check(name, "FAILED", f"{given} cannot be read: {reason}.", action)
        return
    if not steps or (isinstance(found.step, int) and found.step not in steps):
        has = f"has steps {', '.join(map(str, steps))}" if steps else "has no checkpoint"
        action = "Set checkpoint.restore_from to one that is there, such as RUN@newest."
        yield Check(name, "FAILED", f"{given} is not there: {found.home} {has}.", action)
        return
    which = found.step if found.step is not None else "newest"
    yield Check(name, "ok", f"{found.home}, step {which}, {config.checkpoint.restore} of it")


def _steps(path: str) -> list[int]:
    names = [entry.name for entry in entries(located(os.path.join(path, FOLDER)))]
    return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,18}", name))


def _checkpoints(path: str, config: Config) -> Check:
    """The folder or bucket of `checkpoint.dir`."""
    name = "checkpoint folder"
    if not in_bucket(path):
        return _folder(name, Path(path), config, key="checkpoint.dir")
    try:
        try_out(located(path))
    except StorageError as error:
        where, rule, action = (line.strip() for line in str(error).splitlines())
        return Check(name, "FAILED", f"{where}: {rule}", action)
    except OSError as error:
        text = f"{path} cannot be written: {first_line(error)}."
        return Check(name, "FAILED", text, remedy(path, "checkpoint.dir"))
    return Check(name, "ok", f"{path} can be written")


def _folder(name: str, path: Path, config: Config | None = None, *, key: str = "run.dir") -> Check:
    there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    try:
        late = _write_into(there)
        free = shutil.disk_usage(there).free
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror or error}."
        return Check(name, "FAILED", text, f"Set {key} to a folder that can be written.")
    words = f"{path} can be written, {_size(free)} free"
    if config is not None:
        model, keep = config.model, config.checkpoint.keep
        trained_only, dtype = model.adapter is not None, model.param_dtype
        saved = partial(saved_bytes, config.optim, param_dtype=dtype, trained_only=trained_only)
        one = int(total(describe(model), saved))
        words += f", a checkpoint takes {_size(one)}"
        if free < one * (keep + 1):
            status = "FAILED" if free < one else "warning"
            action = f"Free {_size(one * (keep + 1) - free)}, or set {key} to another disk."
            text = f"{words}, {keep} are kept while one more is written."
            return Check(name, status, text, action)
    if abs(late) > _CLOCK_SECONDS:
        text = f"{words}; its file server's clock differs from this machine's by {late:.1f} s."
        return Check(name, "warning", text, "Start NTP (chrony, systemd-timesyncd) on both.")
    return Check(name, "ok", words)


def _write_into(folder: Path) -> float:
    """Writes and deletes a file; returns the seconds by which its time is late."""
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


def data(config: Config) -> Iterator[Check]:
    """Whether documents can be read and turned into tokens that the model has."""
    document, found = "text", all_sources(config.data)
    kept = str(full(config.run.dir, "run.dir") / ".index")
    for name, each in found.items():
        if each.source in IDS or each.chat != "off":
            continue  # these need the tokenizer
        try:
            with in_section(name):
                source = open_source(each, config.run.seed, cache_dir=kept)
                document = source[0]
        except ConfigError as error:
            yield from _explained(section_of(name), error)
            continue
        except StorageError as error:  # there is no room to unpack a file, say
            yield _stored(section_of(name), error)
            continue
        text = f"{source.name}, {counted(len(source), 'document')}, the first of "
        text += counted(len(document), "character")
        yield Check(section_of(name), "ok", text)
    try:
        tokenizer = fitted(open_tokenizer(config.tokenizer), config.model.vocab_size)
    except ConfigError as error:
        yield from _explained("tokenizer", error)
        return
    tokens = tokenizer.encode(document)
    text = f"{config.tokenizer.kind}, {tokenizer.vocab_size} ids, {len(tokens)} for {len(document)}"
    yield Check("tokenizer", "ok", f"{text} characters")
    for name, each in found.items():
        if each.source in IDS:
            yield from _prepared(name, each, tokenizer)
        elif each.chat != "off":
            yield from _conversations(name, each, tokenizer, kept, config.train.sequence_length)


def _stored(name: str, error: StorageError) -> Check:
    where, *words = str(error).splitlines()
    text = " ".join([where, *map(str.strip, words[:-1])])
    return Check(name, "FAILED", text, words[-1].strip())


def _conversations(
    name: str, config: SourceConfig, tokenizer: Tokenizer, kept: str, row_tokens: int
) -> Iterator[Check]:
    """Whether records can be read as conversations, or pairs."""
    section = section_of(name)
    try:
        with in_section(name):
            source = open_source(config, 0, cache_dir=kept)
            source = answers_of(source, config, kept)
            records = chat_records(source, tokenizer, config, row_tokens)
            assert records is not None
            first = records.encode(0)
    except ConfigError as error:
        yield from _explained(section, error)
        return
    assert first.trained is not None
    what = "pair" if config.chat == "pairs" else "conversation"
    text = f"{source.name}, {counted(len(source), what)}, the first of "
    text += f"{counted(len(first.ids), 'token')}, {int(first.trained.sum())} of them trained"
    yield Check(section, "ok", text)


def _prepared(name: str, config: SourceConfig, tokenizer: Tokenizer) -> Iterator[Check]:
    """Whether ids of documents can be read, and are those of the tokenizer."""
    section = section_of(name)
    try:
        with in_section(name):
            documents = open_documents(config, tokenizer)
            first = counted(len(documents[0].ids), "token")
    except ConfigError as error:
        yield from _explained(section, error)
        return
    except StorageError as error:
        yield _stored(section, error)
        return
    text = f"{config.source}, {counted(documents.num_documents, 'document')}, "
    text += f"{counted(documents.num_tokens, 'token')}, the first document has {first}"
    yield Check(section, "ok", f"{text}; {documents.remark}")


# Clocks.


def clock() -> Check:
    """Whether this machine's clock is set and advances."""
    zone = os.environ.get("TZ", "").lstrip(":")
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    wall, steady = time.time() - wall, time.monotonic() - steady
    now = datetime.now().astimezone()
    words = f"{now:%Y-%m-%d %H:%M:%S}, time zone {now:%Z (UTC%z)}"
    if steady <= 0 or abs(wall - steady) > 0.5:
        text = f"in {steady:.2f} s the time of day moved by {wall:.2f} s."
        return Check("clock", "FAILED", text, "Let NTP correct the clock slowly, without jumps.")
    if now.astimezone(UTC).year < _FIRST_YEAR:
        return Check("clock", "warning", f"{words}: it was never set.", "Set it, with NTP.")
    if zone and not _is_zone(zone):
        text = f"{words}: TZ={zone} is no time zone, so that UTC is used."
        return Check(
            "clock", "warning", text, "Set TZ to a name such as Europe/Zurich, or unset it."
        )
    return Check("clock", "ok", words)


def _is_zone(name: str) -> bool:
    if re.match(r"[A-Za-z]{3,}[+-]?\d|<|/", name):  # POSIX rules, or a file
        return True
    try:
        zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return False
    return True


# Devices.


def devices(target: Target) -> Iterator[Check]:
    """The devices of the run, its mesh, and every collective along every axis."""
    seconds = DEVICE_SECONDS
    if target.runtime.num_processes != 1:
        seconds += target.runtime.init_timeout_seconds
    # The doctor's programs are of no use to a run.
    runtime = dataclasses.replace(target.runtime, compilation_cache="")
    folder = os.path.join(target.run.dir, target.run.name)
    (records,) = environment.probe(
        [_spec(runtime, target.mesh, folder, target.teacher_devices)], seconds
    )
    for record in records:
        found = Check(**{name: record.get(name, "") for name in Check.__slots__})
        if found.status == "FAILED" and not found.action:
            action = "End other programs that hold the devices, or set runtime.platform=cpu."
            found = dataclasses.replace(found, action=action)
        yield found
        if target.config is not None and (platform := record.get("platform")):
            yield from _attention(target.config, platform)


def _attention(config: Config, platform: str) -> Iterator[Check]:
    """The backend that `auto` is on such devices."""
    sizes = {axis: axis_size(config.mesh, axis) or 1 for axis in MESH_AXES}
    divided = Divided.by(config.mesh, sizes)
    if chosen := words(config.model, platform, config.train.sequence_length, divided):
        yield Check("attention", "ok", chosen)


def kinds() -> dict[str, int] | str:
    """Number of devices of each kind, or why they cannot be used."""
    (records,) = environment.probe([_spec(RuntimeConfig(), MeshConfig())], LOOPBACK_SECONDS)
    for record in records:
        if "kinds" in record:
            return record["kinds"]
    return records[-1]["text"]


def loopback() -> Check:
    """Two processes of this machine that find each other and compute together, on CPU."""
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
        found = environment.probe(specs, LOOPBACK_SECONDS, inherit=False)
    seconds = time.monotonic() - begin
    for rank, records in enumerate(found):
        for record in records:
            if record["status"] == "FAILED":
                action = "Allow connections to 127.0.0.1; with a proxy set no_proxy=127.0.0.1."
                return Check(name, "FAILED", f"process {rank}: {record['text']}", action)
    words = f"found each other on 127.0.0.1 and computed together, in {seconds:.0f} s"
    return Check(name, "ok", words)


def _spec(
    runtime: RuntimeConfig, mesh: MeshConfig, folder: str = ".", teacher_devices: int = 0
) -> dict[str, Any]:
    """`folder` is the run's, in which several processes find their secret."""
    found = {"runtime": dataclasses.asdict(runtime), "mesh": dataclasses.asdict(mesh)}
    return found | {"folder": folder, "teacher_devices": teacher_devices}
