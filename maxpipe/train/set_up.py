"""Set up a run, given its folder and config.

Data that each process loads separately must be identical in all processes. The module also prints
the banner of a run and writes the config file of the run folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

import maxpipe
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import CheckpointManager, local_folder
from maxpipe.checkpoint.storage import checkpoint_home, run_folder
from maxpipe.config.bundled_configs import CONFIG_FILE
from maxpipe.config.check import find_warnings
from maxpipe.config.load import LoadedConfig, to_dict, to_yaml
from maxpipe.config.schema import Config
from maxpipe.config.sections.train import total_steps
from maxpipe.data.datasets import build_datasets, check_overlap, load_run_chat_template
from maxpipe.data.loader import Datasets, Loader
from maxpipe.data.mixture import SourceSequences
from maxpipe.data.packing import packing_efficiency
from maxpipe.data.prompts import PromptSequences
from maxpipe.distributed import protocol
from maxpipe.distributed.control_channel import ControlChannel
from maxpipe.distributed.phases import COMPILE, DATA_SET_UP, RESTORE, Phases
from maxpipe.errors import ConfigError, ExitCode, Preemption, StorageError
from maxpipe.evals.early_stopping import EarlyStopping
from maxpipe.evals.evaluate import Evaluator
from maxpipe.evals.multiple_choice import Task, open_tasks
from maxpipe.io import files, redact
from maxpipe.io.files import check_regular_files, expand_path
from maxpipe.io.formatting import format_count, pluralize
from maxpipe.models import registry, resolve_auto
from maxpipe.models.count import active_params, num_params, num_trained
from maxpipe.models.spec import Model
from maxpipe.parallel.mesh import build_mesh, describe_mesh
from maxpipe.posttrain import reference_logprobs
from maxpipe.posttrain.distill import open_teacher_source
from maxpipe.posttrain.rollouts import ReferenceParams, Rollouts
from maxpipe.step.build import split_devices, steps_from_config
from maxpipe.step.step import Steps
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.writers import EventLog, MetricWriter
from maxpipe.train import attention_check, data_end
from maxpipe.train.bad_steps import BadStepMonitor
from maxpipe.train.data_end import SlowDataMonitor
from maxpipe.train.memory_check import check_program
from maxpipe.train.resume import RunStart, build_reference, restore_or_init
from maxpipe.train.run import WRITTEN_FILES, Run
from maxpipe.train.samples import SampleGenerator, load_validation_prompts
from maxpipe.train.tensorboard import write_run_summary


def _parameters(model: Model) -> str:
    """Return the number of parameters as text, plus active and trained parameters if fewer."""
    count = num_params(model)
    parts = ((active_params(model), "per token"), (num_trained(model), "trained"))
    fewer = ", ".join(f"{format_count(some)} {words}" for some, words in parts if some < count)
    return f"{format_count(count)} parameters" + (f" ({fewer})" if fewer else "")


def write_config(path: Path, config: Config, locks: Sequence[RunLock]) -> None:
    """Write the config of the run to a file."""
    for lock in locks:
        lock.check()
    try:
        files.write(path, to_yaml(redact.redact_value(config)))
    except OSError as error:
        raise StorageError.unwritable(path, error) from error


def _sources(train: Loader, length: int) -> Iterator[tuple[str, str]]:
    """Yield a banner line on the packing of each source, and its share of the run in a mixture."""
    if isinstance(train.sequences, PromptSequences):
        return
    if train.stream.mixture is None:
        yield "packing", _describe_packing(train.stream.parts[0])
        return
    rows = train.ramp.sequences_before(length)
    counts = train.stream.samples_before(rows)
    width = max(map(len, counts))
    for part in train.stream.parts:
        count, size = counts[part.name], len(part.sequences)
        share, epochs = 100 * count / max(rows, 1), count / size
        yield (
            "",
            f"{part.name:{width}}  {share:.1f}%, {epochs:.2f} epochs of "
            f"{pluralize(size, 'sequence')}, {_describe_packing(part)}",
        )


def _describe_packing(part: SourceSequences) -> str:
    return f"{part.packing}, efficiency {packing_efficiency(part.sequences):.2%}"


def banner_lines(
    config: Config, steps: Steps, datasets: Datasets, length: int
) -> list[tuple[str, str]]:
    """Return the names and values of the banner lines."""
    mesh, schedule = steps.param_layout.mesh, steps.train_schedule
    tokens = config.train.sequence_length
    ramp = datasets.train.ramp
    sizes = [f"{rows * tokens:,} for {pluralize(each, 'step')}" for rows, each in ramp.stages]
    sizes.append(f"{ramp.batch_size * tokens:,}")
    device, processes = mesh.devices.flat[0], pluralize(jax.process_count(), "process")
    documents = pluralize(datasets.train.fingerprint()["documents"], "document")
    if datasets.unreadable:
        documents += f", {datasets.unreadable} of them unreadable and treated as empty"
    model, described = config.model, registry.describe(config.model)
    saved_in = checkpoint_home(run_folder(config.run), config.checkpoint)
    divided = resolve_auto.Divided.from_mesh(config.mesh, mesh.shape)
    chosen = resolve_auto.words(model, device.platform, config.train.sequence_length, divided)
    return [
        ("run", str(run_folder(config.run))),
        *([("saved in", saved_in)] if config.checkpoint.dir else []),
        (
            "devices",
            f"{mesh.size} x {device.device_kind} in {processes}",
        ),
        ("mesh", describe_mesh(mesh)),
        (
            "model",
            f"{_parameters(described)}, "
            f"{pluralize(model.num_layers, 'layer')}, "
            f"{model.compute_dtype} compute, {model.param_dtype} parameters",
        ),
        *(("layers", note) for note in described.notes),
        *([("attention", chosen)] if chosen else []),
        (
            "pipeline",
            f"{schedule.name}, {schedule.describe_sizes()}, "
            f"{pluralize(schedule.num_microbatches, 'microbatch')}, bubble "
            f"{100 * schedule.idle_fraction():.1f}%, "
            f"{pluralize(schedule.num_stash, 'saved chunk')}",
        ),
        (
            "data",
            f"{datasets.train.fingerprint()['source']}, {documents}, "
            f"{datasets.train.steps_per_epoch:.1f} steps per epoch",
        ),
        *_sources(datasets.train, length),
        (
            "training",
            f"{pluralize(length, 'step')} of {', '.join(sizes)} tokens, "
            f"{format_count(ramp.sequences_before(length) * tokens)} tokens",
        ),
    ]


_log = logging.getLogger("maxpipe")


def set_up(
    loaded: LoadedConfig,
    console: Console,
    link: ControlChannel,
    phases: Phases,
    stack: contextlib.ExitStack,
) -> Run:
    """Return the run with all its objects, which `stack` closes on exit.

    Raises:
        ConfigError: the config does not fit the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
    """
    config = loaded.config
    run_dir, process, length = run_folder(config.run), link.index, total_steps(config.train)
    check_regular_files(run_dir, WRITTEN_FILES)
    locks = _locks(config, stack, console) if process == 0 else []
    ours = locks[0].check_held if locks else lambda: False  # only process 0 writes records
    events = _open_event_log(config, link, phases, stack, ours)
    checkpoints = stack.enter_context(
        CheckpointManager(run_dir, config.checkpoint, record=events.write, locks=locks)
    )
    datasets, slow_data = _datasets(config, console, phases, stack)
    steps = _steps(config, datasets)
    with phases.enter(RESTORE):
        taught = open_teacher_source(loaded, datasets, steps, phases, console.stage)
    console.banner(banner := [*banner_lines(config, steps, datasets, length), *taught.banner_lines])
    if process == 0:
        _print_warnings(loaded, datasets, console, phases)
    evaluations = _evaluations(config, datasets, console, link, phases)
    samples = _samples(config, steps, datasets)
    parts = loaded, steps, checkpoints, datasets, console
    restore = partial(restore_or_init, *parts, taught.teacher)
    with phases.enter(RESTORE):
        begin = restore()
    # Wait for all leaves: on CPU, waiting for a single array never returns if an allocation failed.
    jax.block_until_ready(begin.state)
    phases.progress(first := int(begin.state.step))
    patience = EarlyStopping(config.eval, config.checkpoint, begin.early_stopping)
    last = _last_step(loaded, datasets, begin, patience, console)
    reference = build_reference(loaded, steps, datasets, console, begin)
    rollouts = _rollouts(config, steps, datasets, reference, link, stack)
    if first < last:
        attention_check.check_run_attention(run_dir, steps, link, console, events)
        _attach_references(config, steps, datasets, begin, console, link, phases)
    with phases.enter(COMPILE):
        train_steps = _compile_train_steps(config, steps, datasets, console, begin, last)
        taught.compile(train_steps, console.stage)
        evaluations.compile(steps)
    _check_memory(config, train_steps)
    events.write("start", step=first, **_start_event(datasets, phases))
    writes = {"process_index": process, "ours": ours}
    open_writer = partial(MetricWriter, run_dir, config.log.tensorboard, **writes)
    writer, program = open_writer(resume_step=first), train_steps.get(steps.shape[0])
    write_run_summary(writer, config, steps, begin.state, program, stack, dict(banner))
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
        evaluator=evaluations,
        bad_step_monitor=_build_bad_step_monitor(config, datasets, events, console, begin),
        early_stopping=patience,
        restore=restore,
        sample_generator=samples,
        teacher_source=taught,
        rollouts=rollouts,
        reference=reference,
        base=begin.base,
        slow_data=slow_data,
    )
    stack.callback(lambda: run.writer.close())  # a rollback opens another writer
    return run


def _steps(config: Config, datasets: Datasets) -> Steps:
    """Return the steps, on the devices that are not reserved for a teacher."""
    mesh = build_mesh(config.mesh, split_devices(config)[0])
    return steps_from_config(config, mesh, datasets.tokenizer.byte_lengths)


def _rollouts(
    config: Config,
    steps: Steps,
    datasets: Datasets,
    reference: ReferenceParams | None,
    link: ControlChannel,
    stack: contextlib.ExitStack,
) -> Rollouts | None:
    """Return the rollouts that the run trains on, or None if the objective is not `grpo`."""
    if config.train.objective != "grpo":
        return None
    found = Rollouts(
        config.grpo, steps, datasets, reference=reference, same=link.compare_across_processes
    )
    stack.callback(found.close)
    return found


def _attach_references(
    config: Config,
    steps: Steps,
    datasets: Datasets,
    begin: RunStart,
    console: Console,
    link: ControlChannel,
    phases: Phases,
) -> None:
    """Attach reference log-probabilities to the pairs, if the objective needs them."""
    if reference_logprobs.needs_references(steps):
        loaders = datasets.single_pass_loaders(config.eval.batch_size or config.train.batch_size)
        given = run_folder(config.run), steps, loaders, console, link, phases
        found = reference_logprobs.PairReferences(*given)
        found.attach(begin.state.params, is_new=not begin.is_resumed)


def _build_bad_step_monitor(
    config: Config, datasets: Datasets, events: EventLog, console: Console, begin: RunStart
) -> BadStepMonitor:
    return BadStepMonitor(
        config.guard,
        run_dir=str(run_folder(config.run)),
        loader=datasets.train,
        events=events,
        console=console,
        offset=begin.offset,
        facts=begin.guard_counts,
    )


def _datasets(
    config: Config, console: Console, phases: Phases, stack: contextlib.ExitStack
) -> tuple[Datasets, SlowDataMonitor]:
    """Return the datasets and the monitor that warns if reading is slow."""
    slow_data = stack.enter_context(SlowDataMonitor(phases, console.warn, config.data.threads))
    with phases.enter(DATA_SET_UP), console.stage("reading data"):
        datasets = build_datasets(config, phases.progress)
    stack.callback(datasets.close)
    return datasets, slow_data


def _last_step(
    loaded: LoadedConfig,
    datasets: Datasets,
    begin: RunStart,
    patience: EarlyStopping,
    console: Console,
) -> int:
    """Return the last step of the run; print how the run starts, and whether it has ended early."""
    first = int(begin.state.step)
    last = data_end.resolve_last_step(loaded, datasets.train, begin.offset, first, console)
    console.note(begin.message)
    if not patience.should_stop:
        return last
    console.note(f"{patience.message()}. Set eval.patience to more, or to 0, to continue")
    return first


def _print_warnings(
    loaded: LoadedConfig, datasets: Datasets, console: Console, phases: Phases
) -> None:
    for each in (*loaded.warnings, *find_warnings(loaded.config)):
        console.warn(each.line)
    for remark in datasets.remarks:
        console.warn(remark)
    with phases.enter(DATA_SET_UP):
        check_overlap(loaded.config, datasets, console.warn, phases.progress)


def _start_event(datasets: Datasets, phases: Phases) -> dict[str, Any]:
    """Return the fields of the start event, including the mixture metadata."""
    return {
        "devices": jax.device_count(),
        "seconds": phases.take_seconds(),
        **datasets.train.mixture_metadata(),
    }


def _evaluations(
    config: Config, datasets: Datasets, console: Console, link: ControlChannel, phases: Phases
) -> Evaluator:
    """Return the evaluator, after checking that all processes have the same data."""
    tasks = open_tasks(config, datasets.tokenizer)
    _check_same_data(link, datasets, tasks)
    return Evaluator(config.eval, datasets, tasks, console, link.should_stop, phases.progress)


def _samples(config: Config, steps: Steps, datasets: Datasets) -> SampleGenerator | None:
    """Return the sample generator, or None if no samples are generated."""
    if not config.eval.sample_every or config.train.objective == "grpo":
        return None
    room, tokenizer = config.train.sequence_length, datasets.tokenizer
    turns = load_validation_prompts(
        datasets, config.data.validation_fraction, config.eval.sample_conversations, room
    )
    chat = load_run_chat_template(config, tokenizer)
    given = config.eval, steps.param_layout, tokenizer, turns, chat
    return SampleGenerator(*given, room=room, seed=config.run.seed)


def _locks(config: Config, stack: contextlib.ExitStack, console: Console) -> list[RunLock]:
    """Lock the run folder, and the checkpoint folders that are outside it."""
    run_dir = run_folder(config.run)
    locks = [RunLock(run_dir)]
    other = RunLock(checkpoint_home(run_dir, config.checkpoint), key="checkpoint.dir")
    if other.path != locks[0].path:
        locks.append(other)
    if local_dir := config.checkpoint.local_dir:
        locks.append(RunLock(local_folder(local_dir, run_dir), key="checkpoint.local_dir"))
    held = [stack.enter_context(lock) for lock in locks]
    protocol.remove_stale_secrets(run_dir)
    for note in filter(None, (lock.note for lock in held)):
        console.warn(note)
    return held


def _compile_train_steps(
    config: Config, steps: Steps, datasets: Datasets, console: Console, begin: RunStart, last: int
) -> dict[int, Any]:
    """Return the compiled train steps that the run needs, keyed by batch size.

    All remaining batch sizes are compiled now, so that compilation cannot fail or delay the run
    later.
    """
    train_steps = {}
    first = int(begin.state.step)
    if first >= last:
        console.note(f"all {last} steps are done: nothing is left to train")
    elif config.runtime.compiled_step:
        folder = expand_path(config.runtime.compiled_step, "runtime.compiled_step")
        with console.stage(f"loading train step from {folder}"):
            train_steps[steps.shape[0]] = steps.load_train(folder, to_dict(config))
    else:
        sizes = datasets.train.ramp.sizes(first + begin.offset)
        for rows in sizes:
            words = f" for batches of {rows} sequences" if len(sizes) > 1 else ""
            with console.stage(f"compiling train step{words}"):
                train_steps[rows] = steps.with_batch_size(rows).compile_train()
            check_program(config, train_steps[rows], console.warn)
    return train_steps


def _check_memory(config: Config, train_steps: Mapping[int, Any]) -> None:
    """Check the memory of compiled steps again after all compilation, without warnings."""
    if not config.runtime.compiled_step:
        for program in train_steps.values():
            check_program(config, program, lambda _: None)


def _open_event_log(
    config: Config,
    link: ControlChannel,
    phases: Phases,
    stack: contextlib.ExitStack,
    ours: Callable[[], bool],
) -> EventLog:
    """Return the run's event log; record the start and the failure of this attempt."""
    events = EventLog(run_folder(config.run), link.index, phases.begun, ours)
    host, pid = platform.node(), os.getpid()
    version = maxpipe.__version__
    events.write("begin", host=host, pid=pid, processes=link.count, version=version)

    def ends(kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Preemption):
            events.write("failed", error=type(error).__name__, text=str(error)[:1000])

    stack.push(ends)

    def told_to_leave(code: int, text: str) -> None:
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            events.write("preempted", step=phases.step, saved=False)
        else:
            events.write("failed", code=code, text=text[:1000])

    link.on_leave = told_to_leave
    return events


def _check_same_data(link: ControlChannel, datasets: Datasets, tasks: Sequence[Task]) -> None:
    """Check that all processes have the same documents and multiple-choice tasks."""
    facts = datasets.fingerprint() | {each.name: each.digest() for each in tasks}
    fingerprint = json.dumps(facts, sort_keys=True)
    seen = link.compare_across_processes("data", hashlib.sha256(fingerprint.encode()).hexdigest())
    if len(seen) > 1:
        groups = " and ".join(f"processes {', '.join(map(str, each))}" for each in seen.values())
        raise ConfigError.one(
            "data.path",
            None,
            f"must contain the same documents for every process; {groups} read different ones.",
            "Copy the same files to every host, or use a folder that all hosts share.",
        )
