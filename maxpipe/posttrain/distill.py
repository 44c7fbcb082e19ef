"""Distillation teachers, and batches with online or stored teacher logits.

A teacher is a model that runs only forward passes, on a separate mesh. The teacher has a separate
model section, mesh and pipeline. A teacher has no state except its parameters, so teacher logits
depend only on the batch.

`maxpipe distill prepare` precomputes the teacher's top-k logits for a dataset. Sequences are
processed in batches of `train.batch_size`. Batches always start at multiples of that size, so that
an interrupted and resumed command writes bitwise the same files as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxpipe.config.check import check, error_location
from maxpipe.config.load import LoadedConfig, to_dict
from maxpipe.config.schema import Config
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.datasets import build_datasets
from maxpipe.data.loader import Batch, Datasets, Loader
from maxpipe.data.mixture import Arrays
from maxpipe.data.prepared.logits import (
    MANIFEST,
    LogitsBatch,
    LogitsManifest,
    LogitsReader,
    LogitsSpec,
    LogitsWriter,
    TeacherEntry,
    check_same,
    num_sequences,
    open_logits,
    read_manifest,
    sequence_digest,
    spec_of,
)
from maxpipe.data.prepared.manifest import check_folder, convert_signals, lock_journal
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.distributed import runtime
from maxpipe.distributed.phases import STEP, Phases
from maxpipe.errors import Code, ConfigError, Problem, StorageError
from maxpipe.huggingface.folder import folder_of, resolve_model
from maxpipe.io.files import expand_path, url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.objectives import TEACHER_IDS, TEACHER_LOGPROBS
from maxpipe.parallel.mesh import Device, build_mesh, describe_mesh, resolve_mesh_config
from maxpipe.parallel.sharding import (
    local_sequences,
    make_global_batch,
    reshard_batch,
    sequences_by_process,
)
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.restore.open_model import OpenedModel, open_address_or_folder
from maxpipe.step.build import split_devices, steps_from_config
from maxpipe.step.step import Steps

KEY, _LAYOUT_KEY = "distill.teacher", "distill.teacher_layout"
_PROBE = "The sea is wide; 1234.5 = x_i + {y}?\n\tNaïve façade, größer, 東京, Привет 🙂"
"""Text that tokenizers with different vocabularies encode as different ids."""
_LAYOUT_SECTIONS = ("mesh.", "pipeline.", "train.")

TeacherLogits = dict[str, jax.Array]
"""Teacher logits of one batch, keyed by the array names in `Distill.batch_arrays`."""


@dataclass(frozen=True)
class Teacher:
    """A teacher model on its mesh, and the settings of its top-k logits."""

    name: str
    steps: Steps
    params: Any
    digest: str
    """Checksum of the parameters, independent of the layout."""
    top_k: int
    temperature: float
    _programs: dict[int, Any] = field(default_factory=dict)

    @property
    def entry(self) -> TeacherEntry:
        """Identity of the teacher, as recorded in checkpoints."""
        return {"name": self.name, "digest": self.digest}

    @property
    def mesh(self) -> str:
        """Description of the teacher's mesh, as printed for the user."""
        return describe_mesh(self.steps.param_layout.mesh)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the batches on the teacher's mesh."""
        return self.steps.batch_sharding

    @cached_property
    def _input_names(self) -> list[str]:
        return list(self.steps.abstract_batch())

    def compile(self, count: int, wanted: NamedSharding | None = None) -> None:
        """Compile the forward pass for batches of `count` sequences.

        `wanted` is the sharding of the batch on the student's mesh. If a process needs sequences
        that its teacher devices do not hold, the outputs are replicated on all teacher devices.
        """
        if count not in self._programs:
            ask = partial(LossHead.top_log_probs, count=self.top_k, temperature=self.temperature)
            everywhere = wanted is not None and self._misses_rows(wanted, count)
            self._programs[count] = self.steps.compile_reader(ask, count, everywhere=everywhere)

    def _misses_rows(self, wanted: NamedSharding, count: int) -> bool:
        """Whether any process needs sequences that its teacher devices do not hold."""
        held = sequences_by_process(self.sharding, count)
        needed = sequences_by_process(wanted, count)
        return any(not np.isin(rows, held[process]).all() for process, rows in needed.items())

    def place_batch(self, host: Batch, rows: np.ndarray, count: int) -> dict[str, jax.Array]:
        """Return the teacher's inputs for a batch of `count` sequences.

        `host` holds the sequences with the indices `rows`.
        """
        given = {name: host[name] for name in self._input_names}
        return make_global_batch(given, rows, count, self.sharding)

    def compute_logits(self, batch: Mapping[str, jax.Array]) -> TeacherLogits:
        """Start computing the teacher logits of a batch on the teacher's mesh."""
        count = len(batch["tokens"])
        logprobs, ids = self._programs[count](self.params, batch)
        return {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}


# Opening a teacher.


def open_teacher(loaded: LoadedConfig, tokenizer: Tokenizer) -> Teacher:
    """Open the configured teacher, and load its parameters onto its devices.

    Raises:
        ConfigError: the model does not exist, or its vocabulary or layout does not match.
        StorageError: the teacher's checkpoint is damaged.
    """
    config = loaded.config
    key = error_location(KEY, loaded.origins)
    students, devices = split_devices(config)
    chosen = _resolve_teacher(loaded, key, same=len(devices) == len(students))
    _check_vocabulary(loaded, chosen, tokenizer)
    with_mesh = _fit_mesh(chosen.loaded, devices)
    steps = steps_from_config(
        with_mesh, build_mesh(with_mesh.mesh, devices), tokenizer.byte_lengths
    )
    params = jax.block_until_ready(steps.stack_params(chosen.params(steps)))
    own, digest = config.distill, steps.digest(params)
    return Teacher(chosen.name, steps, params, digest, own.top_k, own.temperature)


def _resolve_teacher(loaded: LoadedConfig, key: str, *, same: bool) -> OpenedModel:
    """Open the model with the student's batch shape and the layout in `distill.teacher_layout`."""
    config = loaded.config

    def section(saved: Mapping[str, Any]) -> dict[str, Any]:
        rows = {"batch_size": config.train.batch_size}
        rows["sequence_length"] = config.train.sequence_length
        found = {name: saved[name] for name in ("model", "adapter") if name in saved}
        found["train"] = {"steps": 1, **rows}
        found["tokenizer"] = to_dict(config)["tokenizer"]
        return {**found, **_layout(config, same=same)}

    model = resolve_model(config.distill.teacher, where=key, runs=config.run.dir)
    try:
        return open_address_or_folder(model, config.distill.teacher_layout, section)
    except ConfigError as error:
        raise _layout_error(error) from error


def _layout(config: Config, *, same: bool) -> dict[str, Any]:
    """Return default `mesh` and `pipeline` sections; `distill.teacher_layout` overrides them."""
    mesh: dict[str, Any] = {"cpu_devices": config.mesh.cpu_devices}
    if config.distill.teacher_layout:
        return {"mesh": mesh}
    if not same:
        return {"mesh": {**mesh, "ici_fsdp": -1}}
    sizes = dataclasses.asdict(config.mesh)
    mesh |= {key: size for key, size in sizes.items() if key.startswith(("ici_", "dcn_"))}
    return {"mesh": mesh, "pipeline": {"microbatches": config.pipeline.microbatches}}


def _fit_mesh(loaded: LoadedConfig, devices: Sequence[Device]) -> Config:
    """Return the config with the mesh resolved for these devices.

    Raises:
        ConfigError: the devices do not match the mesh, or violate a rule that depends on the mesh.
    """
    try:
        mesh = resolve_mesh_config(loaded.config.mesh, devices)
        config = dataclasses.replace(loaded.config, mesh=mesh)
        if problems := check(config, loaded.origins):
            raise ConfigError(problems)
    except ConfigError as error:
        raise _layout_error(error) from error
    return config


def _layout_error(error: ConfigError) -> ConfigError:
    """Report config errors in the teacher's layout under the key `distill.teacher_layout`."""

    def placed(problem: Problem) -> Problem:
        key = problem.where.rpartition(": ")[2]
        if not f"{key}.".startswith(_LAYOUT_SECTIONS):
            return problem
        _, given, rule, action = problem.texts
        return Problem(
            problem.code, f"{_LAYOUT_KEY}: {key}", given, rule, f"For the teacher only: {action}"
        )

    return ConfigError([placed(problem) for problem in error.problems])


def _check_vocabulary(loaded: LoadedConfig, chosen: OpenedModel, own: Tokenizer) -> None:
    """Raise ConfigError unless teacher and student have the same vocabulary and tokenizer."""
    mine, its = (each.config.model.vocab_size for each in (loaded, chosen.loaded))
    key = error_location(KEY, loaded.origins)
    if mine != its:
        raise ConfigError.one(
            Code.POST_TEACHER,
            key,
            chosen.name,
            f"must have the same vocabulary as the student: the teacher has {its} ids, but "
            f"model.vocab_size is {mine}.",
            f"Set model.vocab_size={its} with the teacher's tokenizer, or choose another teacher.",
        )
    chosen.check_tokenizer(own)
    if (folder := folder_of(loaded.config.distill.teacher)) is None:
        return
    try:
        other = open_tokenizer(TokenizerConfig(kind="auto", path=folder))
    except ConfigError:  # the teacher's folder has no tokenizer to compare with
        return
    if not np.array_equal(other.encode(_PROBE), own.encode(_PROBE)):
        raise ConfigError.one(
            Code.POST_TEACHER,
            key,
            chosen.name,
            "must use the same tokenizer as the student: the teacher's tokenizer encodes "
            "the same text to different ids.",
            f"Set tokenizer.kind=auto and tokenizer.path={folder}, or choose another teacher.",
        )


ProgressStage = Callable[[str], contextlib.AbstractContextManager[object]]
"""Function that displays a description while a slow operation runs."""


class TeacherLoader:
    """Run the teacher one batch ahead, so that the teacher and the student compute concurrently.

    Token batches are sent to the teacher's devices, and logits `[B, T, K]` to the student's
    devices.
    """

    def __init__(self, teacher: Teacher, sharding: NamedSharding, phases: Phases):
        """Initialize the loader; `sharding` is the sharding of the student's batches."""
        self.teacher, self._sharding, self._phases = teacher, sharding, phases
        self._waited, self._bytes, self._count = 0.0, 0, 0

    def compile(self, count: int) -> None:
        """Compile the teacher for batches of `count` sequences."""
        self.teacher.compile(count, self._sharding)

    def batches(self, loader: Loader, start: int, stop: int) -> contextlib.closing[Generator[Any]]:
        """Return prefetched global batches with teacher logits for steps `start` to `stop - 1`."""
        held = self._sharding, self.teacher.sharding
        rows = {
            count: reduce(np.union1d, (local_sequences(each, count) for each in held))
            for count in loader.ramp.sizes(start)
        }

        def placed(host: Batch, count: int) -> tuple[Any, Any]:
            mine = rows[count]
            teachers = self.teacher.place_batch(host, mine, count)
            return make_global_batch(host, mine, count, self._sharding), teachers

        source = loader.batches(start, rows.__getitem__, stop_step=stop, made=placed)

        def taught() -> Generator[Any]:
            asked: tuple[Any, TeacherLogits, int] | None = None
            try:
                with source:
                    for batch, read in source:
                        sent = sum(array.nbytes for array in read.values())
                        before, asked = asked, (batch, self.teacher.compute_logits(read), sent)
                        if before is not None:
                            yield self._with_logits(*before)
                if asked is not None:
                    yield self._with_logits(*asked)
            finally:  # Python may crash on exit while devices are computing
                jax.block_until_ready(asked and asked[1])

        return contextlib.closing(taught())

    def _with_logits(self, batch: Any, answer: TeacherLogits, sent: int) -> Any:
        """Add teacher logits to the batch; `sent` is the number of bytes sent to the teacher."""
        begin = time.perf_counter()
        with self._phases.enter(STEP):
            jax.block_until_ready(answer)
        self._waited += time.perf_counter() - begin
        self._count += 1
        self._bytes += sent + sum(each.nbytes for each in answer.values())
        return batch | reshard_batch(answer, self._sharding)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics per step, averaged since the last call."""
        count = max(self._count, 1)
        found = {
            "distill/teacher_wait_s": self._waited / count,
            "distill/transfer_bytes": self._bytes / count,
        }
        self._waited, self._bytes, self._count = 0.0, 0, 0
        return found


@dataclass(frozen=True)
class TeacherSource:
    """Source of teacher logits: an online teacher, stored logits, or neither."""

    teacher: TeacherEntry | None = None
    teacher_loader: TeacherLoader | None = None
    """Loader that runs an online teacher. Stored logits are loaded with the sequences instead."""
    banner_lines: Sequence[tuple[str, str]] = ()
    """Banner lines that describe the teacher."""

    @property
    def state_dict(self) -> dict[str, Any]:
        """Metadata of the teacher for checkpoints."""
        return {} if self.teacher is None else {"teacher": self.teacher}

    def compile(self, sizes: Iterable[int], stage: ProgressStage) -> None:
        """Compile the teacher for batches of the given sizes."""
        if self.teacher_loader is not None:
            with stage("compiling the teacher"):
                for rows in sizes:
                    self.teacher_loader.compile(rows)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics per step, averaged since the last call."""
        return {} if self.teacher_loader is None else self.teacher_loader.take_metrics()


def open_teacher_source(
    loaded: LoadedConfig,
    datasets: Datasets,
    steps: Steps,
    phases: Phases,
    stage: ProgressStage,
) -> TeacherSource:
    """Return the configured source of teacher logits.

    Raises:
        ConfigError: the teacher does not exist, or does not match the run.
        StorageError: the teacher's files are damaged or cannot be read.
    """
    config = loaded.config
    if config.train.objective != "distill":
        return TeacherSource()
    told = f"{config.distill.top_k} most likely tokens per position"
    if config.distill.teacher_logits:
        stored = attach_stored_logits(config, datasets.train)
        words = f"{stored.teacher['name']}, its {told}, stored in {config.distill.teacher_logits}"
        return TeacherSource(stored.teacher, banner_lines=[("teacher", words)])
    with stage(f"opening the teacher {config.distill.teacher}"):
        teacher = open_teacher(loaded, datasets.tokenizer)
    words = f"{teacher.name}, its {told}, on {teacher.mesh}"
    lessons = TeacherLoader(teacher, steps.batch_sharding, phases)
    return TeacherSource(teacher.entry, lessons, [("teacher", words)])


def attach_stored_logits(config: Config, loader: Loader) -> LogitsReader:
    """Attach stored teacher logits to the training sequences.

    Raises:
        ConfigError: the folder was written for other sequences or other settings.
        StorageError: the folder is damaged or cannot be read.
    """
    own = config.distill
    folder = (
        own.teacher_logits
        if url_scheme(own.teacher_logits)
        else str(expand_path(own.teacher_logits, "distill.teacher_logits"))
    )
    stored = open_logits(
        folder,
        loader.sequence_metadata(),
        vocab_size=config.model.vocab_size,
        temperature=own.temperature,
        top_k=own.top_k,
        row_tokens=config.train.sequence_length,
    )
    shape = (config.train.sequence_length, own.top_k)

    def beside(source: str, sequence: int, arrays: Arrays) -> Mapping[str, np.ndarray]:
        if sequence < 0:
            ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        else:
            ids, logprobs = stored.read(source, sequence, arrays)
        return {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}

    loader.stream.extra_arrays = beside
    return stored


ProgressCallback = Callable[[str, int, int, str], object]
"""Function that receives the name of the task, the finished amount, the total amount and the rate
as a string."""


def prepare_teacher_logits(
    loaded: LoadedConfig, folder: Path, report: ProgressCallback, *, shard_bytes: int
) -> str:
    """Compute and write the missing teacher-logit files, and return a one-line summary.

    Raises:
        ConfigError: the teacher or the documents cannot be used, or the folder contains other
            files.
        StorageError: the folder cannot be written.
        Preemption: the process received a stop request; UserInterrupt after Ctrl-C.
    """
    config = loaded.config
    if config.runtime.num_processes != 1:
        rule = "must be 1: a single process computes all teacher logits on its local devices."
        raise ConfigError.one(
            Code.MESH_UNSUPPORTED,
            "runtime.num_processes",
            config.runtime.num_processes,
            rule,
            "Omit the key.",
        )
    with convert_signals(folder):
        check_folder(folder, MANIFEST)
        report("opening documents and teacher", 0, 0, "")
        runtime.start(config.runtime, config.mesh.cpu_devices)
        datasets = build_datasets(config, lambda: report("", 0, 0, ""))
        with contextlib.closing(datasets):
            teacher = open_teacher(loaded, datasets.tokenizer)
            spec = spec_of(
                teacher.entry,
                datasets.train.sequence_metadata(),
                vocab_size=config.model.vocab_size,
                temperature=config.distill.temperature,
                top_k=config.distill.top_k,
                row_tokens=config.train.sequence_length,
                shard_bytes=shard_bytes,
            )
            try:
                return _describe_if_complete(folder, spec) or _write_missing(
                    folder, spec, teacher, datasets.train, config.train.batch_size, report
                )
            except OSError as error:
                action = "Free up disk space, or specify a writable folder with --out."
                raise StorageError.unwritable(error.filename or folder, error, action) from error


def _describe_if_complete(folder: Path, spec: LogitsSpec) -> str:
    """Return a one-line summary if the folder is complete, else an empty string."""
    if not (folder / MANIFEST).exists():
        return ""
    found = read_manifest(str(folder))
    check_same(folder, found, spec)
    return f"{folder} is complete: {_describe_counts(found)}"


def _describe_counts(found: LogitsManifest) -> str:
    size = sum(file["bytes"] for shard in found["shards"] for file in shard["files"].values())
    rows, tokens = pluralize(num_sequences(found), "sequence"), found["row_tokens"]
    shards = pluralize(len(found["shards"]), "shard")
    return f"{rows} of {tokens} tokens, with the top {found['top_k']} logits of each token, " + (
        f"{shards} of {size / 1e6:.1f} MB"
    )


def _write_missing(
    folder: Path,
    spec: LogitsSpec,
    teacher: Teacher,
    loader: Loader,
    batch_size: int,
    report: ProgressCallback,
) -> str:
    """Write the missing files; see `prepare_teacher_logits`."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_journal(folder) as journal:
        if found := _describe_if_complete(folder, spec):  # completed by the previous lock holder
            return found
        writer, start = LogitsWriter(folder, journal, spec), time.monotonic()
        teacher.compile(batch_size)
        begun, total = writer.done, num_sequences(spec)
        try:
            with _deferred_signals() as asked:
                for answers, done in _compute_logits(spec, teacher, loader, batch_size, begun):
                    writer.add(answers)
                    rate = (done - begun) / max(time.monotonic() - start, 1e-9)
                    words = f"{rate * spec['row_tokens'] / 1e3:.2f} k tokens/s"
                    report("computing teacher logits", done, total, words)
                    if asked():
                        break
            if number := asked():
                signal.raise_signal(number)
            manifest = writer.finish()
        finally:
            writer.abandon()
    seconds = time.monotonic() - start
    return f"wrote {folder}: {_describe_counts(manifest)}, in {seconds:.1f} s"


class _SequenceIndex(NamedTuple):
    source: int
    sequence: int


def _compute_logits(
    spec: LogitsSpec, teacher: Teacher, loader: Loader, size: int, begun: int
) -> Iterator[tuple[LogitsBatch, int]]:
    """Yield teacher logits of the sequences from index `begun`, and the number of finished
    sequences.

    The teacher computes the logits of one batch while the next batch is read. Closing the generator
    waits for the devices, because Python may crash on exit while devices are computing.
    """
    parts = {part.name: number for number, part in enumerate(loader.stream.parts)}
    counts = [(parts[name], facts["sequences"]) for name, facts in spec["sources"].items()]
    ends = np.cumsum([count for _, count in counts])

    def place(row: int) -> _SequenceIndex:
        at = int(np.searchsorted(ends, row, side="right"))
        number, count = counts[at]
        return _SequenceIndex(number, row - int(ends[at]) + count)

    total = int(ends[-1])
    asked: tuple[range, list[int], TeacherLogits] | None = None
    try:
        for first in range(begun - begun % size, total, size):
            rows = range(first, min(first + size, total))
            digests, batch = _read_batch(loader, [place(row) for row in rows], size)
            answer = teacher.compute_logits(teacher.place_batch(batch, np.arange(size), size))
            before, asked = asked, (rows, digests, answer)
            if before is not None:
                yield _select_missing(*before, begun)
        if asked is not None:
            yield _select_missing(*asked, begun)
    finally:
        jax.block_until_ready(asked and asked[-1])


def _read_batch(loader: Loader, places: list[_SequenceIndex], size: int) -> tuple[list[int], Batch]:
    """Return sequence checksums, and a batch padded with copies of the last sequence."""
    rows = [loader.stream.read(*place) for place in places]
    digests = [sequence_digest(row) for row in rows]
    rows += rows[-1:] * (size - len(rows))
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return digests, {**batch, "example_ids": np.arange(size, dtype=np.int32)}


def _select_missing(
    rows: range, digests: list[int], answer: TeacherLogits, begun: int
) -> tuple[LogitsBatch, int]:
    """Return the logits of the batch's sequences from index `begun`.

    Also return the number of sequences that are finished after this batch.
    """
    mine = slice(max(begun - rows.start, 0), len(rows))
    ids, logprobs = (np.asarray(answer[name])[mine] for name in (TEACHER_IDS, TEACHER_LOGPROBS))
    return LogitsBatch(digests[mine], ids, logprobs), rows.stop


@contextlib.contextmanager
def _deferred_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of the stop signal that was received, or 0 if there
    was none. Inside the context, stop signals do not interrupt the process.
    """
    found = 0

    def note(number: int, frame: Any) -> None:
        nonlocal found
        found = number

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
