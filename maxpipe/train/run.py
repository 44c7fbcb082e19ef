"""A run: the objects of its loop, and their set-up from the run's folder and config.

What each process loads for itself is checked to be the same in all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import maxpipe
from maxpipe.boundary import files, redact
from maxpipe.boundary.files import check_writable, full
from maxpipe.checkpoint.folder import BASE, Base
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import Checkpoints, local_folder
from maxpipe.checkpoint.storage import home, run_folder
from maxpipe.config.check import cautions, check, total_steps
from maxpipe.config.keys import flat
from maxpipe.config.load import Loaded, to_dict, to_yaml
from maxpipe.config.mixture import sources
from maxpipe.config.paths import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    REFERENCE_FILE,
    SAMPLES_FILE,
)
from maxpipe.config.schema import Config, DataConfig
from maxpipe.data.chat import spoken
from maxpipe.data.loader import Datasets, Loader
from maxpipe.data.packing import efficiency_of
from maxpipe.data.prompts import PromptRows
from maxpipe.data.stream import Part
from maxpipe.data.turns import held_out
from maxpipe.errors import ConfigError, ExitCode, Preempted, ReplicaError, StorageError
from maxpipe.model import choice
from maxpipe.model.count import active_params, num_params, num_trained
from maxpipe.model.families import registry
from maxpipe.model.spec import Model
from maxpipe.parallel.mesh import build_mesh, describe, resolve
from maxpipe.processes import secret
from maxpipe.processes.link import Link
from maxpipe.processes.phases import COMPILE, DATA_SET_UP, RESTORE, Phases
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.records import EventLog, MetricWriter
from maxpipe.train import attention_check, data_end, pair_references
from maxpipe.train.build import batches, steps_of
from maxpipe.train.datasets import check_overlap, datasets_of
from maxpipe.train.distill import Taught, taught_by
from maxpipe.train.evaluations import Evaluations
from maxpipe.train.patience import Patience
from maxpipe.train.reference import Reference
from maxpipe.train.replicas import explain
from maxpipe.train.resume import Start, may_differ, reference_of, restore_or_init
from maxpipe.train.rollouts import Rollouts
from maxpipe.train.room import check_forecast, check_program
from maxpipe.train.samples import Samples
from maxpipe.train.shown import show
from maxpipe.train.slow_data import SlowData
from maxpipe.train.state import TrainState
from maxpipe.train.step import Steps
from maxpipe.train.tasks import Task, tasks_of
from maxpipe.train.teacher import devices_of
from maxpipe.train.watch import Watch
from maxpipe.words import counted

_log = logging.getLogger("maxpipe")

_RECORDS = (METRICS_FILE, f"{METRICS_FILE}.new", SAMPLES_FILE, f"{SAMPLES_FILE}.new", EVENTS_FILE)
WRITTEN_FILES = (CONFIG_FILE, REFERENCE_FILE, *_RECORDS)


@dataclass
class Run:
    """The objects of the loop."""

    config: Config
    length: int
    """Steps that the config wants."""
    console: Console
    link: Link
    phases: Phases
    events: EventLog
    writer: MetricWriter
    open_writer: Callable[..., MetricWriter]
    """The same from another `resume_step` on."""
    checkpoints: Checkpoints
    datasets: Datasets
    steps: Steps
    state: TrainState
    train_steps: Mapping[int, Any]
    """Compiled, by the rows of a batch."""
    evaluations: Evaluations
    watch: Watch
    patience: Patience
    restore: Callable[[], Start]
    samples: Samples | None
    taught: Taught
    """What a teacher says of batches, if there is one."""
    rollouts: Rollouts | None
    """What steps train on, with prompts in place of documents."""
    reference: Reference | None
    base: Base | None
    """Of adapters."""
    slow_data: SlowData
    compared: int = -1
    """The last step after which replicas were compared."""
    evaluated: tuple[int, dict[str, float]] = (0, {})
    """Step and metrics of the newest evaluation."""

    @property
    def total_steps(self) -> int:
        """The last step: where the data or the patience with the run ends if that comes first."""
        if self.patience.is_over:
            return self.first
        train, offset = self.datasets.train, self.watch.offset
        return data_end.last_step(train, self.length, offset, self.first)

    @property
    def first(self) -> int:
        """Steps already done."""
        return int(self.state.step)

    def train_step(self, batch: Any) -> dict[str, jax.Array]:
        """Trains on a batch; its metrics."""
        run = self.train_steps[len(batch["tokens"])]
        self.state, metrics = run(self.state, batch)
        return metrics

    def train_batches(self, start: int, stop: int) -> contextlib.closing[Generator[Any]]:
        """Those of training from `start` to before `stop`: of documents, read ahead, with what a
        teacher says of them; of rollouts, once they are there.
        """
        if self.rollouts is not None:
            rollouts = self.rollouts
            return contextlib.closing(rollouts.batch(each) for each in range(start, stop))
        lessons = self.taught.lessons
        if lessons is None:
            return self.batches(self.datasets.train, start, stop)
        return lessons.batches(self.datasets.train, start, stop)

    def batches(self, loader: Loader, start: int, stop: int) -> contextlib.closing[Generator[Any]]:
        return batches(self.steps.batch_sharding, loader, start, stop)

    def can_stop_behind(self, step: int) -> bool:
        """Whether the run can be saved after `step`: what it goes on with is not half used."""
        return self.rollouts is None or self.rollouts.begins(step + self.watch.offset)

    def save(self, step: int, *, last: bool = False) -> None:
        """Start saving the state after `step`, unless that was done; `last` waits for the end."""
        self.watch.settle()
        if self.config.guard.replica_check_every:
            self.compare_replicas(step)
        data = self.datasets.train.state(step + self.watch.offset)
        data["guard"] = self.state.guard.facts() | self.watch.facts()
        data |= self.taught.facts
        if self.reference is not None:
            data["reference"] = self.reference.digest
        if self.base is not None:
            data[BASE] = self.base
        data |= self.patience.facts()
        self.checkpoints.save(
            step,
            lambda: self.steps.to_saved(self.state),
            to_dict(redact.within(self.config)),
            data,
            self.evaluated[1] if self.evaluated[0] == step else {},
            last=last,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation metrics after `step`; empty when evaluation is off."""
        metrics = self.evaluations.metrics(step, self.state.params, self.batches)
        if metrics:
            self.evaluated = (step, metrics)
            self.writer.write(step, metrics)
            if self.patience.is_over_with(step, metrics):
                self.events.write("early_stop", step=step, **self.patience.event())
        return metrics

    def sample(self, step: int) -> None:
        """Shows and records what the model makes of the prompts after `step`; of rollouts, what
        the step was trained on.
        """
        if self.rollouts is not None:
            found = self.rollouts.samples(step - 1 + self.watch.offset)
        else:
            assert self.samples is not None
            found = self.samples.take(self.state.params)
        self.writer.samples(step, found)
        for each in found:
            worth = f" (reward {each['reward']:g})" if "reward" in each else ""
            self.console.note(f"sample after step {step}: {each['prompt']}{each['text']}{worth}")

    def compare_replicas(self, step: int) -> None:
        """Check that copies on several devices are the same.

        Raises:
            ReplicaError: some differ.
        """
        if self.compared == step:
            return
        self.compared = step
        if found := self.steps.replica_check.differences(self.state):
            self.events.write("replicas_differ", step=step, arrays=list(map(str, found)))
            raise ReplicaError(explain(found, f"{run_folder(self.config.run)}: step {step}"))

    def roll_back(self, bad_step: int) -> None:
        """Return to the newest checkpoint; the batches from there to the bad step are left out."""
        self.events.write("time", step=bad_step, seconds=self.phases.take())
        with self.phases.enter(RESTORE):
            self.checkpoints.wait()
            del self.state  # there is no memory for two
            start = self.restore()
        self.state, first = start.state, int(start.state.step)
        self.watch.went_back(bad_step, first, start.offset, start.facts)
        self.patience = Patience(self.config.eval, self.config.checkpoint, start.waited)
        data_end.must_suffice(self.datasets.train, self.length, self.watch.offset)
        self.compared = -1
        self.writer.close()
        self.writer = self.open_writer(resume_step=first)


def fit_to_devices(loaded: Loaded) -> Loaded:
    """The config with the mesh's -1 resolved, and the rules that depend on it checked."""
    mesh = resolve(loaded.config.mesh, devices_of(loaded.config)[0])
    config = dataclasses.replace(loaded.config, mesh=mesh)
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    before = dataclasses.asdict(loaded.config.mesh)
    filled = frozenset(f"mesh.{name}" for name, size in before.items() if size == -1)
    return dataclasses.replace(loaded, config=config, filled=filled)


def set_up(
    loaded: Loaded, console: Console, link: Link, phases: Phases, stack: contextlib.ExitStack
) -> Run:
    """Everything that the loop needs; `stack` closes it.

    Raises:
        ConfigError: the config does not fit the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
    """
    config = loaded.config
    run_dir, process, length = run_folder(config.run), link.index, total_steps(config.train)
    check_forecast(config, console.warn)
    check_writable(run_dir, WRITTEN_FILES)
    locks = _locks(config, stack, console) if process == 0 else []
    ours = locks[0].held if locks else lambda: False  # process 0 alone writes records
    events = _ledger(config, link, phases, stack, ours)
    checkpoints = stack.enter_context(
        Checkpoints(run_dir, config.checkpoint, record=events.write, locks=locks)
    )
    datasets, slow_data = _datasets(config, console, phases, stack)
    steps = _steps(config, datasets)
    with phases.enter(RESTORE):
        taught = taught_by(loaded, datasets, steps, phases, console.stage)
    console.banner([*_facts(config, steps, datasets, length), *taught.words])
    if process == 0:
        _warn(loaded, datasets, console, phases)
    evaluations = _evaluations(config, datasets, console, link, phases)
    samples = _samples(config, steps, datasets)
    restore = partial(
        restore_or_init, loaded, steps, checkpoints, datasets, console, taught.teacher
    )
    with phases.enter(RESTORE):
        begin = restore()
    # All leaves: on CPUs, waiting for one array of a state that failed to allocate never ends.
    jax.block_until_ready(begin.state)
    phases.progress(first := int(begin.state.step))
    patience = Patience(config.eval, config.checkpoint, begin.waited)
    last = _last_step(loaded, datasets, begin, patience, console)
    reference = reference_of(loaded, steps, datasets, console, begin)
    rollouts = None
    if config.train.objective == "grpo":
        rollouts = Rollouts(config.grpo, steps, datasets, reference=reference, same=link.same)
        stack.callback(rollouts.close)
    if first < last:
        attention_check.check(run_dir, steps, link, console, events)
    if pair_references.are_needed(steps) and first < last:
        loaders = datasets.all_once(config.eval.batch_size or config.train.batch_size)
        found = pair_references.PairReferences(run_dir, steps, loaders, console, link, phases)
        found.attach(begin.state.params, is_new=not begin.goes_on)
    with phases.enter(COMPILE):
        train_steps = _programs(config, steps, datasets, console, begin, last)
        taught.compile(train_steps, console.stage)
        evaluations.compile(steps)
    events.write("start", step=first, **_begun(datasets, phases))
    open_writer = partial(
        MetricWriter, run_dir, config.log.tensorboard, process_index=process, ours=ours
    )
    writer = open_writer(resume_step=first)
    show(writer, config, steps, begin.state, train_steps.get(steps.shape[0]), stack)
    if process == 0:
        _write_config(run_dir / CONFIG_FILE, config, locks)
    run = Run(
        config=config,
        length=length,
        console=console,
        link=link,
        phases=phases,
        events=events,
        writer=writer,
        open_writer=open_writer,
        checkpoints=checkpoints,
        datasets=datasets,
        steps=steps,
        state=begin.state,
        train_steps=train_steps,
        evaluations=evaluations,
        watch=_watch(config, datasets, events, console, begin),
        patience=patience,
        restore=restore,
        samples=samples,
        taught=taught,
        rollouts=rollouts,
        reference=reference,
        base=begin.base,
        slow_data=slow_data,
    )
    stack.callback(lambda: run.writer.close())  # a roll back opens another one
    return run


def _steps(config: Config, datasets: Datasets) -> Steps:
    """On the devices that are not a teacher's."""
    mesh = build_mesh(config.mesh, devices_of(config)[0])
    return steps_of(config, mesh, datasets.tokenizer.byte_lengths)


def _watch(
    config: Config, datasets: Datasets, events: EventLog, console: Console, begin: Start
) -> Watch:
    return Watch(
        config.guard,
        run_dir=str(run_folder(config.run)),
        loader=datasets.train,
        events=events,
        console=console,
        offset=begin.offset,
        facts=begin.facts,
    )


def _datasets(
    config: Config, console: Console, phases: Phases, stack: contextlib.ExitStack
) -> tuple[Datasets, SlowData]:
    """What is read, and what says so if that is slow."""
    slow_data = stack.enter_context(SlowData(phases, console.warn, config.data.threads))
    with phases.enter(DATA_SET_UP), console.stage("reading data"):
        datasets = datasets_of(config, phases.progress)
    stack.callback(datasets.close)
    return datasets, slow_data


def _last_step(
    loaded: Loaded, datasets: Datasets, begin: Start, patience: Patience, console: Console
) -> int:
    """Of a run that begins so; says how it begins, and whether it has ended already."""
    first = int(begin.state.step)
    last = data_end.checked(loaded, datasets.train, begin.offset, first, console)
    console.note(begin.words)
    if not patience.is_over:
        return last
    console.note(f"{patience.words()}. Set eval.patience to more, or to 0, to go on")
    return first


def _warn(loaded: Loaded, datasets: Datasets, console: Console, phases: Phases) -> None:
    for each in (*loaded.cautions, *cautions(loaded.config)):
        console.warn(each.line)
    for remark in datasets.remarks:
        console.warn(remark)
    with phases.enter(DATA_SET_UP):
        check_overlap(loaded.config, datasets, console.warn, phases.progress)


def _begun(datasets: Datasets, phases: Phases) -> dict[str, Any]:
    """What the event of a start says; of a mixture also how samples are dealt out."""
    return {"devices": jax.device_count(), "seconds": phases.take(), **datasets.train.mixed()}


def _evaluations(
    config: Config, datasets: Datasets, console: Console, link: Link, phases: Phases
) -> Evaluations:
    """What an evaluation does, of documents and questions that all processes have."""
    tasks = tasks_of(config, datasets.tokenizer)
    _check_same_data(link, datasets, tasks)
    return Evaluations(config.eval, datasets, tasks, console, link.stops_here, phases.progress)


def _samples(config: Config, steps: Steps, datasets: Datasets) -> Samples | None:
    """What samples are taken with, if any are."""
    if not config.eval.sample_every or config.train.objective == "grpo":
        return None
    room, tokenizer = config.train.sequence_length, datasets.tokenizer
    turns = held_out(datasets, config.data.validation_fraction, config.eval.sample_documents, room)
    chat = spoken(config.data, tokenizer)
    given = config.eval, steps.partition, tokenizer, turns, chat
    return Samples(*given, room=room, seed=config.run.seed)


def _locks(config: Config, stack: contextlib.ExitStack, console: Console) -> list[RunLock]:
    """Locks of the run's folder, and of the folder of its checkpoints if that is elsewhere."""
    run_dir = run_folder(config.run)
    locks = [RunLock(run_dir)]
    other = RunLock(home(run_dir, config.checkpoint), key="checkpoint.dir")
    if other.path != locks[0].path:
        locks.append(other)
    if local_dir := config.checkpoint.local_dir:
        locks.append(RunLock(local_folder(local_dir, run_dir), key="checkpoint.local_dir"))
    held = [stack.enter_context(lock) for lock in locks]
    secret.sweep(run_dir)
    for note in filter(None, (lock.note for lock in held)):
        console.warn(note)
    return held


def _programs(
    config: Config, steps: Steps, datasets: Datasets, console: Console, begin: Start, last: int
) -> dict[int, Any]:
    """The compiled train steps by rows; none that the run does not need.

    Those of all sizes that are still to come: none of them fails or waits in the middle of a run.
    """
    train_steps = {}
    first = int(begin.state.step)
    if first >= last:
        console.note(f"all {last} steps are done: nothing is left to train")
    elif config.runtime.executable:
        folder = full(config.runtime.executable, "runtime.executable")
        with console.stage(f"loading train step from {folder}"):
            train_steps[steps.shape[0]] = steps.load_train(folder, to_dict(config))
    else:
        sizes = datasets.train.ramp.sizes(first + begin.offset)
        for rows in sizes:
            words = f" for batches of {rows} rows" if len(sizes) > 1 else ""
            with console.stage(f"compiling train step{words}"):
                train_steps[rows] = steps.of_rows(rows).compile_train()
            check_program(config, train_steps[rows], console.warn)
    return train_steps


def _ledger(
    config: Config,
    link: Link,
    phases: Phases,
    stack: contextlib.ExitStack,
    ours: Callable[[], bool],
) -> EventLog:
    """The run's event log, with the begin of this attempt; its end is written on exit."""
    events = EventLog(run_folder(config.run), link.index, phases.begun, ours)
    host, pid = platform.node(), os.getpid()
    version = maxpipe.__version__
    events.write("begin", host=host, pid=pid, processes=link.count, version=version)

    def ends(kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Preempted):
            events.write("failed", error=type(error).__name__, text=str(error)[:1000])

    stack.push(ends)

    def told_to_leave(code: int, text: str) -> None:
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            events.write("preempted", step=phases.step, saved=False)
        else:
            events.write("failed", code=code, text=text[:1000])

    link.on_leave = told_to_leave
    return events


def shared_facts(config: Config) -> dict[str, str]:
    """Values that must be the same in all processes, by name."""
    facts = {"maxpipe": maxpipe.__version__, "jax": jax.__version__}
    for key, value in flat(to_dict(redact.within(config))).items():
        if not may_differ(key):
            facts[key] = json.dumps(value)
    return facts


def _check_same_data(link: Link, datasets: Datasets, tasks: Sequence[Task]) -> None:
    """Checks that all processes have the same documents and questions."""
    facts = datasets.fingerprint() | {each.name: each.digest() for each in tasks}
    fingerprint = json.dumps(facts, sort_keys=True)
    seen = link.same("data", hashlib.sha256(fingerprint.encode()).hexdigest())
    if len(seen) > 1:
        groups = " and ".join(f"processes {', '.join(map(str, each))}" for each in seen.values())
        raise ConfigError.one(
            "data.path",
            None,
            f"must hold the same documents for every process; {groups} see different ones.",
            "Copy the same files to every host, or name a folder that all share.",
        )


def _parameters(model: Model) -> str:
    """All of them; those that one token uses, and those that are trained, where they are fewer."""
    count = num_params(model)
    parts = ((active_params(model), "for each token"), (num_trained(model), "trained"))
    fewer = ", ".join(f"{some / 1e6:.2f} M {words}" for some, words in parts if some < count)
    return f"{count / 1e6:.2f} M parameters" + (f" ({fewer})" if fewer else "")


def _write_config(path: Path, config: Config, locks: Sequence[RunLock]) -> None:
    for lock in locks:
        lock.check()
    try:
        files.write(path, to_yaml(redact.within(config)))
    except OSError as error:
        raise StorageError.unwritable(path, error) from error


def _sources(data: DataConfig, train: Loader, length: int) -> Iterator[tuple[str, str]]:
    """How each source fills its sequences; of a mixture its share of the run, too."""
    if isinstance(train.sequences, PromptRows):
        return
    if train.stream.mixture is None:
        yield "packing", _packed(data, train.stream.parts[0])
        return
    rows = train.ramp.before(length)
    counts = train.stream.counts(rows)
    width = max(map(len, counts))
    for part in train.stream.parts:
        count, size = counts[part.name], len(part.sequences)
        share, epochs = 100 * count / max(rows, 1), count / size
        yield (
            "",
            f"{part.name:{width}}  {share:.1f}%, {epochs:.2f} epochs of "
            f"{counted(size, 'sequence')}, {_packed(data, part)}",
        )


def _packed(data: DataConfig, part: Part) -> str:
    packing = sources(data)[part.name].packing
    return f"{packing}, {efficiency_of(part.sequences):.2%} of positions with a target"


def _facts(config: Config, steps: Steps, datasets: Datasets, length: int) -> list[tuple[str, str]]:
    mesh, schedule = steps.partition.mesh, steps.train_schedule
    tokens = config.train.sequence_length
    ramp = datasets.train.ramp
    sizes = [f"{rows * tokens:,} for {counted(each, 'step')}" for rows, each in ramp.stages]
    sizes.append(f"{ramp.rows * tokens:,}")
    device, processes = mesh.devices.flat[0], counted(jax.process_count(), "process")
    documents = counted(datasets.train.fingerprint()["documents"], "document")
    if datasets.unreadable:
        documents += f" of which {datasets.unreadable} cannot be read and are empty"
    model, described = config.model, registry.describe(config.model)
    saved_in = home(run_folder(config.run), config.checkpoint)
    divided = choice.Divided.by(config.mesh, mesh.shape)
    chosen = choice.words(model, device.platform, config.train.sequence_length, divided)
    return [
        ("run", str(run_folder(config.run))),
        *([("saved in", saved_in)] if config.checkpoint.dir else []),
        (
            "devices",
            f"{mesh.size} x {device.device_kind} in {processes}",
        ),
        ("mesh", describe(mesh)),
        (
            "model",
            f"{_parameters(described)}, "
            f"{counted(model.num_layers, 'layer')}, "
            f"{model.compute_dtype} compute, {model.param_dtype} parameters",
        ),
        *(("layers", note) for note in described.notes),
        *([("attention", chosen)] if chosen else []),
        (
            "pipeline",
            f"{schedule.name}, {schedule.sizes()}, "
            f"{counted(schedule.num_microbatches, 'microbatch')}, bubble "
            f"{100 * schedule.idle_fraction():.1f}%, {counted(schedule.num_stash, 'saved chunk')}",
        ),
        (
            "data",
            f"{datasets.train.fingerprint()['source']}, {documents}, "
            f"{datasets.train.steps_per_epoch:.1f} steps per epoch",
        ),
        *_sources(config.data, datasets.train, length),
        (
            "training",
            f"{counted(length, 'step')} of {', '.join(sizes)} tokens, "
            f"{ramp.before(length) * tokens / 1e6:.2f} M tokens",
        ),
    ]
