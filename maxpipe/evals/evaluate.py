"""Evaluate a model during training, or evaluate a checkpoint or folder with any layout.

`Evaluator` computes the token-weighted validation loss and the metrics of multiple-choice tasks
during training. The module also computes the training loss of every source of a mixture.

`evaluate_model` evaluates a checkpoint or a Hugging Face folder. Only parameters are restored.
It writes no files and acquires no locks, so the run may still be training, or may belong to another
user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import jax
import numpy as np

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.storage import run_folder, runs_folder
from maxpipe.config.check import check, find_unused_path
from maxpipe.config.rules import batch_shards
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import SPLITS, check_split
from maxpipe.config.sections.eval import EvalConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.data.corpus import compare_fingerprints
from maxpipe.data.loader import Datasets, Loader, build_single_pass
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.distributed import runtime
from maxpipe.distributed.phases import COMPILE, DATA_SET_UP, EVAL, RESTORE, Phases
from maxpipe.errors import Code, ConfigError, DivergenceError, Preemption
from maxpipe.evals.generative import GenerativeTask, SameOnAll, ScoredCompletion
from maxpipe.evals.harness_tasks import HarnessTasks
from maxpipe.evals.multiple_choice import Task, task_metrics
from maxpipe.io.formatting import pluralize
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh, describe_mesh
from maxpipe.posttrain import reference_logprobs
from maxpipe.restore.open_model import (
    OpenedModel,
    defer_interrupt,
    detect_interrupt,
    open_address_or_folder,
)
from maxpipe.step.build import load_batches, resolve_mesh, shared_metadata, steps_from_config
from maxpipe.step.step import BY_SOURCE, Steps
from maxpipe.telemetry.metrics import source_tag


@dataclass(frozen=True, slots=True)
class EvalTotals:
    """Sums over batches: `loss` in nats, the number of target tokens, and the size of the target
    text in bytes.
    """

    loss: float
    targets: float
    bytes: float
    by_source: Mapping[str, EvalTotals] = field(default_factory=dict)
    """Totals of each source of a mixture, keyed by source name."""
    reports: Mapping[str, float] = field(default_factory=dict)
    """Sums of additional metrics of the objective, keyed by name."""
    has_bytes: bool = True
    """Whether the targets are tokens, whose text has a size in bytes, rather than preference
    pairs."""

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/loss` in nats per target token, and `eval/nats_per_byte` of the text.

        Without targets, the metrics are NaN, because 0 would be the best loss.
        """
        found = {"eval/loss": self.loss / self.targets if self.targets else math.nan}
        if self.has_bytes:
            per_byte = self.loss / max(self.bytes, 1.0) if self.targets else math.nan
            found["eval/nats_per_byte"] = per_byte
        for name, report in self.reports.items():
            found[f"eval/{name}"] = report / self.targets if self.targets else math.nan
        for name, each in self.by_source.items():
            if each.targets:
                found[source_tag(name, "eval_loss")] = each.loss / each.targets
                if self.has_bytes:
                    found[source_tag(name, "eval_nats_per_byte")] = each.loss / max(each.bytes, 1.0)
        return found

    @property
    def summary(self) -> str:
        """Metrics formatted as one line of text."""
        found = self.metrics
        if self.has_bytes:
            return (
                f"{found['eval/loss']:.4f} nats per token, "
                f"{found['eval/nats_per_byte']:.4f} nats per byte"
            )
        reports = (f", {name} {found[f'eval/{name}']:.4f}" for name in self.reports)
        return f"loss {found['eval/loss']:.4f}{''.join(reports)}"

    def metrics_for(self, name: str) -> dict[str, float]:
        """Return the metrics of a validation set. Tags include `name` unless it is empty."""
        inner = f"eval/{name}/" if name else "eval/"
        return {tag.replace("eval/", inner): value for tag, value in self.metrics.items()}

    def __add__(self, other: EvalTotals) -> EvalTotals:
        names = dict.fromkeys([*self.reports, *other.reports])
        return EvalTotals(
            self.loss + other.loss,
            self.targets + other.targets,
            self.bytes + other.bytes,
            reports={
                name: self.reports.get(name, 0.0) + other.reports.get(name, 0.0) for name in names
            },
            has_bytes=self.has_bytes and other.has_bytes,
        )


def evaluate(
    step: Callable[[Any, Any], Mapping[str, jax.Array]],
    params: Any,
    batches: Iterable[Any],
    stops: Callable[[], bool] = lambda: False,
    sources: Sequence[str] = (),
) -> EvalTotals | None:
    """Evaluate batches and return the loss totals; None if `stops` returned true after a batch.

    `sources` are the names of the sources of a mixture. The step returns separate sums for each
    source. On return, no device is busy, because Python may crash if it exits during a computation.
    """
    total = {name: np.zeros(()) for name in ("loss", "targets")}

    def add(sums: Mapping[str, jax.Array]) -> None:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + np.asarray(value, np.float64)

    # Read results one batch late, so that at most two batches are in flight.
    before: Mapping[str, jax.Array] | None = None
    try:
        for batch in batches:
            started, before = before, step(params, batch)
            if started is not None:
                add(started)
            if stops():
                return None
        if before is not None:
            add(before)
    finally:
        jax.block_until_ready(before)
    loss, targets, of_text = total.pop("loss"), total.pop("targets"), "bytes" in total or not total
    num_bytes = total.pop("bytes", np.zeros_like(loss))
    of_sources = {
        name: EvalTotals(float(loss[number]), float(targets[number]), float(num_bytes[number]))
        for number, name in enumerate(sources)
    }
    reports = {name: float(value.sum()) for name, value in total.items()}
    return EvalTotals(
        float(loss.sum()),
        float(targets.sum()),
        float(num_bytes.sum()),
        of_sources,
        reports,
        of_text,
    )


class SourceSums:
    """Sums the loss of each source between two log records. A training step need not contain
    sequences from all sources.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._sums = np.zeros((2, len(names)))
        self._pending: Mapping[str, Any] = {}

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Add the sums of the previous step, and store the sums of the step that was just
        started.
        """
        self._add()
        self._pending = metrics

    def take_metrics(self) -> dict[str, float]:
        """Wait for the newest step, and return the metrics of all steps since the last call."""
        self._add()
        (nats, targets), self._sums = self._sums, np.zeros_like(self._sums)
        found = {}
        for name, lost, count in zip(self._names, nats, targets, strict=True):
            found[source_tag(name, "targets")] = float(count)
            if count:
                found[source_tag(name, "loss")] = float(lost / count)
        return found

    def _add(self) -> None:
        metrics, self._pending = self._pending, {}
        if not self._names or not metrics:
            return
        sums = np.stack([np.asarray(metrics[tag], np.float64) for tag in BY_SOURCE])
        # Skip steps whose sums are NaN or infinite; `train/loss` shows these steps.
        self._sums += np.where(np.isfinite(sums).all(axis=0), sums, 0.0)


class StageReporter(Protocol):
    """Interface for progress messages; implemented by the run's console."""

    def note(self, text: str) -> None: ...

    def stage(self, name: str) -> AbstractContextManager[None]: ...


@dataclass
class Evaluator:
    """Runs the evaluations of a training run."""

    config: EvalConfig
    datasets: Datasets
    tasks: Sequence[Task]
    console: StageReporter
    should_stop: Callable[[], bool]
    """Function that returns whether all processes should stop."""
    heartbeat: Callable[[], object]
    """Function that is called to report progress."""
    generative_tasks: Sequence[GenerativeTask] = ()
    same: SameOnAll = lambda name, value: {value: [0]}
    write_completions: Callable[[int, str, Sequence[ScoredCompletion]], object] = (
        lambda step, name, scored: None
    )
    """Function that records the completions of a generative task, called with step, task name and
    completions."""
    harness: HarnessTasks | None = None
    is_first_process: bool = True
    step: Any = None
    """The compiled evaluation step; None without validation documents."""

    def compile(self, steps: Steps) -> None:
        """Compile the evaluation programs for parameters sharded as in training (`steps`)."""
        if self._loaders:
            with self.console.stage("compiling eval step"):
                self.step = steps.compile_eval(self.config.batch_size)
        for task in self.tasks:
            with self.console.stage(f"compiling task {task.name}"):
                task.compile(steps)
        for task in self.generative_tasks:
            task.compile(steps)

    @property
    def _loaders(self) -> Mapping[str, Loader]:
        return self.datasets.eval_loaders() if self.config.batches else {}

    def metrics(
        self,
        number: int,
        params: Any,
        read: Callable[[Loader, int, int], AbstractContextManager[Any]],
    ) -> dict[str, float]:
        """Return the metrics after step `number`; empty if nothing was evaluated or a stop was
        requested.

        `read(loader, begin, end)` returns the batches [begin, end) of a loader.
        """
        if (found := self._losses(params, read)) is None:
            return {}
        metrics = {
            tag: value for name in found for tag, value in found[name].metrics_for(name).items()
        }
        for name, totals in found.items():
            of = f" on {name}" if name else ""
            self.console.note(f"validation{of} after step {number}: {totals.summary}")
        for task in self.tasks:
            if (answered := task.evaluate(params, self.should_stop, self.heartbeat)) is None:
                return {}
            metrics |= task_metrics(task.name, answered)
            self.console.note(
                f"task {task.name} after step {number}: accuracy {answered['accuracy']:.4f}, "
                f"by bytes {answered['accuracy_by_bytes']:.4f}, chance {answered['chance']:.4f}, "
                f"{pluralize(answered['questions'], 'question')}"
            )
        for task in self.generative_tasks:
            completed = task.evaluate(params, self.should_stop, self.heartbeat, self.same)
            if completed is None:
                return {}
            summary, scored = completed
            metrics |= summary.metrics(task.name)
            self.write_completions(number, task.name, scored)
            self.console.note(f"task {task.name} after step {number}: {summary.text()}")
            if summary.failures:
                self.console.note(
                    f"task {task.name}: the scorer failed for {summary.failures} of {len(scored)} "
                    f"completions, which have score 0. Last failure: {task.last_failure}"
                )
        if self.harness is not None and self.harness.is_due(number):
            measured = self.harness.evaluate(params, self.same, first=self.is_first_process)
            if measured is None:
                return {}
            metrics |= measured
            for tag, value in measured.items():
                self.console.note(f"{tag} after step {number}: {value:.4f}")
        return metrics

    def _losses(
        self, params: Any, read: Callable[[Loader, int, int], AbstractContextManager[Any]]
    ) -> dict[str, EvalTotals] | None:
        """Return totals keyed by the name of the validation set. The empty name denotes the
        held-out set or the sum of all sets.
        """
        found: dict[str, EvalTotals] = {}
        for name, loader in self._loaders.items():
            count = min(self.config.batches, loader.num_batches)
            with read(loader, 0, count) as batches:
                totals = evaluate(self.step, params, batches, self.should_stop, loader.sources)
            if totals is None:
                return None
            found[name] = totals
        if not found:
            return {}
        # Without held-out documents, the empty name contains the sum of all sets.
        return {"": sum(found.values(), start=EvalTotals(0.0, 0.0, 0.0)), **found}


# --- evaluation of a checkpoint -----------------------------------------------

MessageCallback = Callable[[str], None]

# Settings of the run that do not affect the loss.
_EXCLUDED_SECTIONS = ("checkpoint", "guard", "launch", "log")
_SOURCE_KEYS = (
    *(
        "data.source",
        "data.path",
        "data.paths",
        "data.tfds_dir",
        "data.text_field",
        "data.template",
    ),
    "data.mixture.",
)
_ORDER_FIELDS = (
    "order_version",
    "source",
    "documents",
    "source_digest",
    "seed",
    "validation_fraction",
)
"""Entries of a data fingerprint that determine the validation documents."""
_REPORT_SECONDS = 10.0


class _ReportHeader(TypedDict):
    """Description of the model, data and layout that were evaluated."""

    checkpoint: str
    step: int | None
    source: str
    split: str
    batches: int
    all_batches: int
    sources: dict[str, float]
    """Loss on each source of a mixture, keyed by source name."""
    sequence_length: int
    mesh: str


class TextReport(_ReportHeader):
    """Result of an evaluation; losses are means over target `tokens` or over their `bytes`."""

    tokens: int
    bytes: int
    nats_per_token: float
    nats_per_byte: float
    bits_per_byte: float
    perplexity: float


class PairReport(_ReportHeader):
    """Result of an evaluation with `train.objective=preference`."""

    pairs: int
    preference: dict[str, float]
    """Mean loss and other metrics of the objective over pairs."""


EvalReport = TextReport | PairReport


def evaluate_model(
    named: Address | Path,
    inputs: Sequence[str | Mapping[str, Any]],
    split: str | None,
    say: MessageCallback,
) -> EvalReport | None:
    """Compute the loss of a model. Process 0 returns the report; other processes return None.

    `inputs` are config files and overrides that change the config of the model. `split` selects the
    documents. The default is the validation split, or all documents and batches if `inputs` name
    another data source. Weights that do not belong to a run require a data source. `say` is called
    with progress messages.

    Raises:
        ConfigError: the model does not exist, or the config does not fit the model or the devices.
        StorageError: the checkpoint is damaged.
        DivergenceError: the loss is not finite.
        Preemption: the processes received a stop request.
    """
    chosen = open_address_or_folder(
        named, inputs, _folder if isinstance(named, Path) else _checkpoint_config
    )
    _check_documents(chosen)
    is_other = chosen.is_overridden(*_SOURCE_KEYS)
    phases = Phases()
    keep = not chosen.is_overridden("mesh.cpu_devices")
    with _start_processes(chosen.loaded.config, phases, keep_devices=keep) as stops:
        if jax.process_index():
            say = _ignore_progress
        for each in chosen.loaded.warnings:
            say(f"warning: {each.line}")
        config = _fit_mesh(chosen, say)
        split = split or ("all" if is_other else "validation")
        with phases.enter(DATA_SET_UP):
            loader, tokenizer = _documents(chosen, config, split, phases)
        with contextlib.closing(loader):
            if not is_other:
                _warn_changed_documents(chosen, loader, say)
            steps = steps_from_config(config, build_mesh(config.mesh), tokenizer.byte_lengths)
            with phases.enter(RESTORE):
                say(f"restoring the parameters of {chosen.name}")
                params = steps.stack_params(chosen.params(steps))
            if reference_logprobs.needs_references(steps):
                run_dir = Path(named.run_dir) if isinstance(named, Address) else named
                reference_logprobs.attach_stored_references(run_dir, loader)
            with phases.enter(COMPILE):
                say("compiling")
                step = steps.compile_eval(config.eval.batch_size)
            count = loader.num_batches
            if not is_other or chosen.is_overridden("eval.batches"):
                count = min(config.eval.batches or count, count)
            ready = load_batches(steps.batch_sharding, loader, 0, count)
            with phases.enter(EVAL), ready as source, _deferred_stop(config, stops) as stops:
                reported = _with_progress(source, count, phases, say)
                totals = evaluate(step, params, reported, stops, loader.sources)
    if totals is None:
        raise _stop_error(chosen)
    mesh = describe_mesh(steps.param_layout.mesh)
    found = _report(chosen, totals, loader, split, count, mesh)
    return None if jax.process_index() else found


def _check_documents(chosen: OpenedModel) -> None:
    """Check that a data source is set and that every path in the config is used.

    Raises:
        ConfigError: the data source is missing, or a path is unused.
    """
    loaded = chosen.loaded
    if not chosen.is_overridden(*_SOURCE_KEYS) and not chosen.is_trained:
        raise ConfigError.one(
            Code.CFG_MISSING,
            "data",
            None,
            f"must be given: {chosen.name} contains only weights and no validation documents.",
            "Specify documents with --data FILE_OR_FOLDER, or with data.source and data.path.",
        )
    if chosen.is_overridden("data.path") and (
        found := find_unused_path(loaded.config, loaded.origins)
    ):
        raise ConfigError(found)


def _stop_error(chosen: OpenedModel) -> BaseException:
    """Return the exception to raise after a stop request."""
    if chosen.loaded.config.runtime.num_processes == 1:
        return KeyboardInterrupt()
    return Preemption(
        f"{chosen.name}: evaluation was stopped on request\n"
        "  No files were changed.\n"
        "  Run the same command again."
    )


def _checkpoint_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a checkpoint's config that apply to evaluation."""
    found = {section: keys for section, keys in config.items() if section not in _EXCLUDED_SECTIONS}
    if isinstance(train := found.get("train"), Mapping):
        # The smaller batches of a batch-size ramp do not limit the microbatches of evaluation.
        found["train"] = {key: value for key, value in train.items() if key != "batch_ramp"}
    return found


def _folder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a Hugging Face folder, with an upper limit on the sequence length."""
    length = min(config["train"]["sequence_length"], TrainConfig().sequence_length)
    return {**config, "train": {**config["train"], "sequence_length": length}}


@contextlib.contextmanager
def _deferred_stop(config: Config, stops: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yield a stop check that defers Ctrl-C, because Python must not exit while devices compute."""
    if config.runtime.num_processes > 1:
        yield stops
    else:
        with defer_interrupt() as asked:
            yield lambda: asked() or stops()


@contextlib.contextmanager
def _start_processes(
    config: Config, phases: Phases, *, keep_devices: bool
) -> Iterator[Callable[[], bool]]:
    """Start the devices, connect to the other processes, and yield a check for stop requests."""
    if config.runtime.num_processes == 1:
        with detect_interrupt() as asked:
            devices = config.mesh.cpu_devices
            runtime.start(config.runtime, devices, keep_devices=keep_devices)
            yield asked
    else:
        facts = shared_metadata(config)
        where = run_folder(config.run)
        joined = runtime.join_processes(
            config.runtime, config.mesh.cpu_devices, phases, facts, where
        )
        with joined as link:
            yield link.should_stop


def _ignore_progress(text: str) -> None:
    """Ignore progress messages of processes other than process 0."""


def _fit_mesh(chosen: OpenedModel, say: MessageCallback) -> Config:
    """Return a config whose mesh fits the devices: the run's mesh, or a mesh with one axis."""
    try:
        return resolve_mesh(chosen.loaded).config
    except ConfigError:
        if chosen.is_overridden("mesh.ici_", "mesh.dcn_", "pipeline."):
            raise
    config, count = chosen.loaded.config, jax.device_count()
    if not chosen.is_trained and not chosen.is_overridden("train.batch_size", "eval.batch_size"):
        rows = math.ceil(config.train.batch_size / count) * count
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, batch_size=rows)
        )
    own = " x ".join(f"{axis} {size}" for axis, size in _sizes(config.mesh).items() if size != 1)
    simple = [_single_axis_config(config, axis, count) for axis in ("fsdp", "data")]
    problems = [check(each, chosen.loaded.origins) for each in simple]
    axis = next((axis for axis, found in enumerate(problems) if not found), None)
    if axis is None:
        first = problems[0][0]
        raise ConfigError.one(
            Code.MESH_DEVICES,
            "mesh",
            own or "one device",
            f"must fit the {pluralize(count, 'device')} of this machine; neither the run's mesh "
            f"nor fsdp {count} fits: {first.where.rpartition(': ')[2]} {first.rule}",
            "Set a mesh for these devices and a matching pipeline: mesh.ici_fsdp=..., "
            "pipeline.microbatches=1, eval.batch_size=...",
        )
    if chosen.is_trained:
        say(
            f"the run's mesh ({own or 'one device'}) does not fit the {pluralize(count, 'device')} "
            f"here; evaluating with {('fsdp', 'data')[axis]} {count}, without a pipeline"
        )
    return simple[axis]


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    """Return the axis sizes of a mesh config, keyed by config key."""
    values = dataclasses.asdict(mesh)
    return {key: size for key, size in values.items() if key.startswith(("ici_", "dcn_"))}


def _single_axis_config(config: Config, axis: str, count: int) -> Config:
    """Return a config with one stage and one mesh axis. Microbatches are not larger than in the
    given config.
    """
    shards, _ = batch_shards(config.mesh)
    largest = max(1, config.train.batch_size // (shards * config.pipeline.microbatches))
    mine = max(1, config.train.batch_size // count)
    microbatches = next(
        each for each in range(1, mine + 1) if mine % each == 0 and mine // each <= largest
    )
    kept = {"cpu_devices": config.mesh.cpu_devices, "axis_rules": config.mesh.axis_rules}
    mesh = MeshConfig(**{f"ici_{axis}": count}, **kept)
    pipeline = PipelineConfig(
        microbatches=microbatches, weight_gather=config.pipeline.weight_gather
    )
    return dataclasses.replace(config, mesh=mesh, pipeline=pipeline)


def _documents(
    chosen: OpenedModel, config: Config, split: str, phases: Phases
) -> tuple[Loader, Tokenizer]:
    check_split(split, (*SPLITS, *config.data.validation))
    return build_single_pass(
        config.data,
        config.tokenizer,
        split,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        sequence_length=config.train.sequence_length,
        eval_batch_size=config.eval.batch_size,
        cache_dir=str(runs_folder(config.run) / ".index"),
        moved=phases.progress,
        fit=chosen.fit_tokenizer,
    )


def _warn_changed_documents(chosen: OpenedModel, loader: Loader, say: MessageCallback) -> None:
    for name, before, now in compare_fingerprints(chosen.fingerprint, loader.fingerprint()):
        if name in _ORDER_FIELDS:
            say(
                f"warning: data: {name} was {before!r} when step {chosen.step} was saved and "
                f"is {now!r} now: validation documents may include training documents"
            )


def _with_progress(
    source: Iterator[Any], count: int, phases: Phases, say: MessageCallback
) -> Iterator[Any]:
    """Yield the batches and report progress."""
    begin = last = time.monotonic()
    for number, batch in enumerate(source):
        phases.progress(number)
        yield batch
        now = time.monotonic()
        if now - last > _REPORT_SECONDS:
            last, left = now, (now - begin) / (number + 1) * (count - number - 1)
            say(f"batch {number + 1} of {count}, {left:.0f} s left")


def _report(
    chosen: OpenedModel, totals: EvalTotals, loader: Loader, split: str, count: int, mesh: str
) -> EvalReport:
    metrics = totals.metrics
    loss = metrics["eval/loss"]
    if not totals.targets:
        raise ConfigError.one(
            Code.DATA_EMPTY,
            "data",
            loader.fingerprint()["source"],
            "must contain target tokens: a document needs at least two tokens in one sequence.",
            "Use documents that contain text, or set a larger train.sequence_length.",
        )
    if not math.isfinite(loss):
        raise DivergenceError(
            Code.RUN_NOT_FINITE,
            f"{chosen.name}: the loss is {loss}\n"
            "  the outputs of the model are not finite.\n"
            "  Evaluate an earlier step, or set model.compute_dtype=float32.",
        )
    found: _ReportHeader = {
        "checkpoint": chosen.name,
        "step": chosen.step,
        "source": loader.fingerprint()["source"],
        "split": split,
        "batches": count,
        "all_batches": loader.num_batches,
        "sources": {
            name: each.loss / each.targets
            for name, each in totals.by_source.items()
            if each.targets
        },
        "sequence_length": loader.sequences.sequence_length,
        "mesh": mesh,
    }
    if not totals.has_bytes:
        of_pairs = {name: metrics[f"eval/{name}"] for name in ("loss", *totals.reports)}
        return {**found, "pairs": int(totals.targets), "preference": of_pairs}
    return {
        **found,
        "tokens": int(totals.targets),
        "bytes": int(totals.bytes),
        "nats_per_token": loss,
        "nats_per_byte": metrics["eval/nats_per_byte"],
        "bits_per_byte": metrics["eval/nats_per_byte"] / math.log(2),
        "perplexity": math.exp(min(loss, 700.0)),
    }
