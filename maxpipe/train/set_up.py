"""The set-up of a run from its folder and config.

What each process loads for itself is checked to be the same in all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

import maxpipe
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import Checkpoints, local_folder
from maxpipe.checkpoint.storage import home, run_folder
from maxpipe.config.check import cautions, total_steps
from maxpipe.config.load import Loaded, to_dict
from maxpipe.config.schema import Config
from maxpipe.config.shipped import (
    CONFIG_FILE,
)
from maxpipe.data.datasets import check_overlap, datasets_of, spoken_in_run
from maxpipe.data.loader import Datasets
from maxpipe.data.turns import held_out
from maxpipe.distributed import wire
from maxpipe.distributed.link import Link
from maxpipe.distributed.phases import COMPILE, DATA_SET_UP, RESTORE, Phases
from maxpipe.errors import ConfigError, ExitCode, Preempted
from maxpipe.evals.evaluate import Evaluations
from maxpipe.evals.patience import Patience
from maxpipe.evals.tasks import Task, tasks_of
from maxpipe.io.files import check_writable, full
from maxpipe.parallel.mesh import build_mesh
from maxpipe.posttrain import pair_references
from maxpipe.posttrain.distill import taught_by
from maxpipe.posttrain.rollouts import Reference, Rollouts
from maxpipe.step.build import devices_of, steps_of
from maxpipe.step.step import Steps
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.records import EventLog, MetricWriter
from maxpipe.train import attention_check, data_end
from maxpipe.train.bad_steps import Watch
from maxpipe.train.banner import facts_of, write_config
from maxpipe.train.data_end import SlowData
from maxpipe.train.memory_check import check_program
from maxpipe.train.resume import Start, reference_of, restore_or_init
from maxpipe.train.run import WRITTEN_FILES, Run
from maxpipe.train.samples import Samples
from maxpipe.train.tensorboard import show

_log = logging.getLogger("maxpipe")


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
    console.banner(banner := [*facts_of(config, steps, datasets, length), *taught.words])
    if process == 0:
        _warn(loaded, datasets, console, phases)
    evaluations = _evaluations(config, datasets, console, link, phases)
    samples = _samples(config, steps, datasets)
    parts = loaded, steps, checkpoints, datasets, console
    restore = partial(restore_or_init, *parts, taught.teacher)
    with phases.enter(RESTORE):
        begin = restore()
    # All leaves: on CPUs, waiting for one array of a state that failed to allocate never ends.
    jax.block_until_ready(begin.state)
    phases.progress(first := int(begin.state.step))
    patience = Patience(config.eval, config.checkpoint, begin.waited)
    last = _last_step(loaded, datasets, begin, patience, console)
    reference = reference_of(loaded, steps, datasets, console, begin)
    rollouts = _rollouts(config, steps, datasets, reference, link, stack)
    if first < last:
        attention_check.check(run_dir, steps, link, console, events)
        _refer(config, steps, datasets, begin, console, link, phases)
    with phases.enter(COMPILE):
        train_steps = _programs(config, steps, datasets, console, begin, last)
        taught.compile(train_steps, console.stage)
        evaluations.compile(steps)
    _check_memory(config, train_steps)
    events.write("start", step=first, **_begun(datasets, phases))
    writes = {"process_index": process, "ours": ours}
    open_writer = partial(MetricWriter, run_dir, config.log.tensorboard, **writes)
    writer, program = open_writer(resume_step=first), train_steps.get(steps.shape[0])
    show(writer, config, steps, begin.state, program, stack, dict(banner))
    if process == 0:
        write_config(run_dir / CONFIG_FILE, config, locks)
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


def _rollouts(
    config: Config,
    steps: Steps,
    datasets: Datasets,
    reference: Reference | None,
    link: Link,
    stack: contextlib.ExitStack,
) -> Rollouts | None:
    """What steps train on, if that is drawn and not read."""
    if config.train.objective != "grpo":
        return None
    found = Rollouts(config.grpo, steps, datasets, reference=reference, same=link.same)
    stack.callback(found.close)
    return found


def _refer(
    config: Config,
    steps: Steps,
    datasets: Datasets,
    begin: Start,
    console: Console,
    link: Link,
    phases: Phases,
) -> None:
    """Gives pairs their reference log-probabilities, if steps read these."""
    if pair_references.are_needed(steps):
        loaders = datasets.all_once(config.eval.batch_size or config.train.batch_size)
        given = run_folder(config.run), steps, loaders, console, link, phases
        found = pair_references.PairReferences(*given)
        found.attach(begin.state.params, is_new=not begin.goes_on)


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
    chat = spoken_in_run(config, tokenizer)
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
    wire.sweep(run_dir)
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


def _check_memory(config: Config, train_steps: Mapping[int, Any]) -> None:
    """Check compiled steps again after everything else was compiled; warnings were printed."""
    if not config.runtime.executable:
        for program in train_steps.values():
            check_program(config, program, lambda _: None)


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
