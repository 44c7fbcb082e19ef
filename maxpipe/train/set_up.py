"""Set up a run's data, model, state and compiled programs in an open session."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from maxpipe.checkpoint.manager import CheckpointManager
from maxpipe.checkpoint.storage import checkpoint_home, run_folder
from maxpipe.config.check import find_warnings
from maxpipe.config.config_files import EVALUATIONS_FOLDER, FORECAST_FILE
from maxpipe.config.load import to_dict
from maxpipe.config.schema import Config
from maxpipe.config.sections.train import total_steps
from maxpipe.data.datasets import build_datasets, check_overlap, load_run_chat_template
from maxpipe.data.loader import Datasets, Loader
from maxpipe.data.mixture import SourceSequences
from maxpipe.data.packing import packing_efficiency
from maxpipe.data.prompts import PromptSequences
from maxpipe.distributed.phases import COMPILE, DATA_SET_UP, RESTORE
from maxpipe.errors import Code, ConfigError, StorageError
from maxpipe.evals.early_stopping import EarlyStopping
from maxpipe.evals.evaluate import Evaluator
from maxpipe.evals.generative import GenerativeTask, ScoredCompletion
from maxpipe.evals.harness_tasks import HarnessTasks
from maxpipe.evals.multiple_choice import Task, build_scoring_steps, open_tasks
from maxpipe.hardware import hardware_of_device
from maxpipe.io import files, redact
from maxpipe.io.files import expand_path
from maxpipe.io.formatting import format_count, pluralize
from maxpipe.models import registry, resolve_auto
from maxpipe.models.count import active_params, num_params, num_trained
from maxpipe.models.spec import Model
from maxpipe.parallel.axes import ContextAttention
from maxpipe.parallel.mesh import BATCH_AXES, describe_mesh
from maxpipe.planner.memory_terms import TERMS
from maxpipe.planner.report import plan_values
from maxpipe.planner.search import evaluate
from maxpipe.planner.shards import with_shards
from maxpipe.posttrain.distill import TeacherSource, open_teacher_source
from maxpipe.posttrain.reference_logprobs import PairReferences, needs_references
from maxpipe.posttrain.rollouts import Rollouts
from maxpipe.profiles.run_comparison import CompiledMemory, ForecastFile
from maxpipe.step.build import steps_on_all_devices
from maxpipe.step.step import Steps
from maxpipe.train import data_end
from maxpipe.train.attention_check import attention_check
from maxpipe.train.bad_steps import BadStepMonitor
from maxpipe.train.data_end import SlowDataMonitor
from maxpipe.train.expert_check import exchange_check, expert_check
from maxpipe.train.kernel_check import check_kernels
from maxpipe.train.layer_records import LayerRecorder
from maxpipe.train.memory_check import check_program
from maxpipe.train.profiler import Outputs, StepProfiler
from maxpipe.train.resume import RunStart, build_reference, restore_or_init
from maxpipe.train.run import PostTraining, Run, Validation
from maxpipe.train.samples import SampleGenerator, load_validation_prompts
from maxpipe.train.session import Session
from maxpipe.train.tensorboard import write_run_summary
from maxpipe.train.tracking import open_tracking


def set_up(session: Session) -> Run:
    """Create and return the run and its objects, which are closed at the end of the session.

    Raises:
        ConfigError: the config does not match the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
    """
    config, console, phases, stack = session.config, session.console, session.phases, session.stack
    checkpoints = stack.enter_context(
        CheckpointManager(
            session.run_dir, config.checkpoint, record=session.events.write, locks=session.locks
        )
    )
    slow_data = stack.enter_context(SlowDataMonitor(phases, console.warn, config.data.threads))
    with phases.enter(DATA_SET_UP), console.stage("reading data"):
        datasets = build_datasets(config, phases.progress)
    stack.callback(datasets.close)
    steps = steps_on_all_devices(config, datasets.tokenizer.byte_lengths)
    with phases.enter(RESTORE):
        teacher = open_teacher_source(session.loaded, datasets, steps, phases, console.stage)
    banner = [*banner_lines(config, steps, datasets), *teacher.banner_lines]
    console.banner(banner)
    if session.is_first_process:
        _print_warnings(session, datasets)
    evaluator = _build_evaluator(session, datasets)
    sample_generator = _build_sample_generator(config, steps, datasets)
    with phases.enter(RESTORE):
        start = restore_or_init(
            session.loaded, steps, checkpoints, datasets, console, teacher.teacher
        )
    # Wait for all leaves: on CPU, waiting for a single array never returns if an allocation failed.
    jax.block_until_ready(start.state)
    first = int(start.state.step)
    phases.progress(first)
    early_stopping = EarlyStopping(config.eval, config.checkpoint, start.early_stopping)
    last = _last_step(session, datasets, start, early_stopping)
    post_training = _set_up_post_training(session, steps, datasets, start, teacher)
    if first < last:
        _check_kernels(session, steps)
        _attach_references(session, steps, datasets, start)
    with phases.enter(COMPILE):
        train_steps = _compile_train_steps(session, steps, datasets, start, last)
        recording_steps = _compile_recording_steps(session, steps, train_steps)
        teacher.compile(train_steps, console.stage)
        _compile_evaluator(session, evaluator, steps)
    if not config.runtime.compiled_step:
        # Compilation may have changed how much memory is free.
        for program in (*train_steps.values(), *recording_steps.values()):
            check_program(config, program, lambda _: None)
    session.events.write(
        "start",
        step=first,
        devices=jax.device_count(),
        seconds=phases.take_seconds(),
        **datasets.train.mixture_metadata(),
    )
    _record_forecast(session, steps, train_steps, first)  # a tracker may store it
    profiler = StepProfiler(
        config.profile,
        steps,
        session.channel,
        Outputs(session.run_dir, console, session.events, lambda summary: run.writer.show(summary)),
        train_steps,
        lambda: _forecast_seconds(config),
    )
    stack.callback(profiler.discard)
    run = Run(
        session=session,
        steps=steps,
        train_steps=train_steps,
        state=start.state,
        datasets=datasets,
        slow_data=slow_data,
        checkpoints=checkpoints,
        writer=session.open_writer(first, open_tracking(session, steps.train_schedule)),
        bad_step_monitor=BadStepMonitor(
            config.guard,
            run_dir=str(session.run_dir),
            loader=datasets.train,
            events=session.events,
            console=console,
            offset=start.offset,
            counts=start.guard_counts,
        ),
        validation=Validation(evaluator, early_stopping, sample_generator),
        post_training=post_training,
        layer_recorder=LayerRecorder(
            config.layer_stats,
            steps.param_layout.decoder.model,
            recording_steps,
            session.run_dir,
        ),
        profiler=profiler,
    )
    write_run_summary(run, dict(banner))
    session.write_config()
    stack.callback(lambda: run.writer.close())  # a rollback opens another writer
    stack.callback(lambda: run.layer_recorder.close(run.writer))
    return run


def _check_kernels(session: Session, steps: Steps) -> None:
    """Compare the kernels of the model with plain operations on this hardware.

    Raises:
        ConfigError: a kernel fails, or its errors are too large.
    """
    model, mesh = steps.param_layout.decoder.model, steps.param_layout.mesh
    dtype, family = session.config.model.compute_dtype, session.config.model.family
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    rows = steps.shape[0] // shards // steps.train_schedule.num_microbatches
    tokens = steps.shape[1] // mesh.shape["context"]
    sharded = with_shards(model, mesh.shape["expert"], rows, tokens, steps.shape[1])
    checks = [
        attention_check(model, dtype, steps.shape[1]),
        expert_check(sharded, dtype, mesh.shape["tensor"], family, rows * tokens),
        exchange_check(model, mesh, dtype, family),
    ]
    check_kernels(session, checks)


def _forecast_seconds(config: Config) -> float:
    """Return the predicted step time in seconds; 0 for devices without published figures."""
    device = jax.local_devices()[0]
    hardware = None if device.platform == "cpu" else hardware_of_device(device.device_kind)
    return evaluate(config, hardware).cost.seconds if hardware else 0.0


def _print_warnings(session: Session, datasets: Datasets) -> None:
    for warning in (*session.loaded.warnings, *find_warnings(session.config)):
        session.console.warn(warning.line)
    for remark in datasets.remarks:
        session.console.warn(remark)
    with session.phases.enter(DATA_SET_UP):
        check_overlap(session.config, datasets, session.console.warn, session.phases.progress)


def _build_evaluator(session: Session, datasets: Datasets) -> Evaluator:
    """Open the tasks, and return the evaluator of the run."""
    config = session.config
    tasks = open_tasks(config, datasets.tokenizer)
    generative_tasks = _open_generative_tasks(session, datasets)
    harness = HarnessTasks(config.eval) if config.eval.harness_tasks else None
    _check_same_data(session, datasets, (*tasks, *generative_tasks))
    return Evaluator(
        config.eval,
        datasets,
        tasks,
        session.console,
        session.channel.should_stop,
        session.phases.progress,
        generative_tasks,
        session.channel.compare_across_processes,
        partial(_write_completions, session),
        harness,
        session.is_first_process,
    )


def _compile_evaluator(session: Session, evaluator: Evaluator, steps: Steps) -> None:
    evaluator.compile(steps)
    if evaluator.harness is not None:
        tokenizer, stops = evaluator.datasets.tokenizer, session.channel.should_stop
        scoring = partial(build_scoring_steps, session.config, steps, tokenizer.byte_lengths)
        evaluator.harness.compile(steps, scoring, tokenizer, stops, session.phases.progress)


def _open_generative_tasks(session: Session, datasets: Datasets) -> list[GenerativeTask]:
    """Open the tasks of `eval.generative_tasks`, sorted by name."""
    config, tasks = session.config, []
    for name, task in sorted(config.eval.generative_tasks.items()):
        tasks.append(
            GenerativeTask(
                name,
                task,
                datasets.tokenizer,
                load_run_chat_template(config, datasets.tokenizer),
                sequence_length=config.train.sequence_length,
                batch_size=config.eval.batch_size or config.train.batch_size,
                is_first_process=session.is_first_process,
                is_stop_requested=session.channel.is_stop_requested,
            )
        )
        session.stack.callback(tasks[-1].close)
    return tasks


def _write_completions(
    session: Session, step: int, name: str, scored: Sequence[ScoredCompletion]
) -> None:
    """Write the completions of a generative task. A failure is a warning."""
    if not session.is_first_process:
        return
    folder = session.run_dir / EVALUATIONS_FOLDER
    lines = [f"{json.dumps(redact.redact_value(each))}\n" for each in scored]
    try:
        for lock in session.locks:
            lock.check()
        folder.mkdir(exist_ok=True)
        files.write(folder / f"{name}-{step:08d}.jsonl", "".join(lines))
    except (OSError, StorageError) as error:
        session.console.warn(f"the completions of task {name} cannot be written: {error}")


def _check_same_data(
    session: Session, datasets: Datasets, tasks: Sequence[Task | GenerativeTask]
) -> None:
    """Check that all processes read the same documents and tasks."""
    digests = datasets.fingerprint() | {task.name: task.digest() for task in tasks}
    digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    processes_by_digest = session.channel.compare_across_processes("data", digest)
    if len(processes_by_digest) > 1:
        groups = " and ".join(
            f"processes {', '.join(map(str, group))}" for group in processes_by_digest.values()
        )
        raise ConfigError.one(
            Code.NET_FOLDERS,
            "data.path",
            None,
            f"must contain the same documents for every process; those of {groups} differ.",
            "Copy the same files to every host, or use a folder that all hosts share.",
        )


def _build_sample_generator(
    config: Config, steps: Steps, datasets: Datasets
) -> SampleGenerator | None:
    """Return the sample generator, or None if no samples are generated."""
    if not config.eval.sample_every or config.train.objective == "grpo":
        return None
    sequence_length, tokenizer = config.train.sequence_length, datasets.tokenizer
    held_out = load_validation_prompts(
        datasets, config.data.validation_fraction, config.eval.sample_conversations, sequence_length
    )
    return SampleGenerator(
        config.eval,
        steps.param_layout,
        tokenizer,
        held_out,
        load_run_chat_template(config, tokenizer),
        sequence_length=sequence_length,
        seed=config.run.seed,
    )


def _last_step(
    session: Session, datasets: Datasets, start: RunStart, early_stopping: EarlyStopping
) -> int:
    """Return the last step of the run. Print how the run starts, and whether it was stopped
    early.
    """
    first = int(start.state.step)
    last = data_end.resolve_last_step(
        session.loaded, datasets.train, start.offset, first, session.console
    )
    session.console.note(start.message)
    if not early_stopping.should_stop:
        return last
    advice = "Set eval.patience to a larger value, or to 0, to continue"
    session.console.note(f"{early_stopping.message()}. {advice}")
    return first


def _set_up_post_training(
    session: Session, steps: Steps, datasets: Datasets, start: RunStart, teacher: TeacherSource
) -> PostTraining:
    """Return the post-training objects: rollouts, and the teacher, reference and base models."""
    reference = build_reference(session.loaded, steps, datasets, session.console, start)
    if session.config.train.objective != "grpo":
        return PostTraining(teacher, None, reference, start.base)
    rollouts = Rollouts(
        session.config.grpo,
        steps,
        datasets,
        reference=reference,
        same=session.channel.compare_across_processes,
    )
    session.stack.callback(rollouts.close)
    return PostTraining(teacher, rollouts, reference, start.base)


def _attach_references(session: Session, steps: Steps, datasets: Datasets, start: RunStart) -> None:
    """Attach reference log-probabilities to the preference pairs, if the objective needs them."""
    if not needs_references(steps):
        return
    batch_size = session.config.eval.batch_size or session.config.train.batch_size
    references = PairReferences(
        session.run_dir,
        steps,
        datasets.single_pass_loaders(batch_size),
        session.console,
        session.channel,
        session.phases,
    )
    references.attach(start.state.params, is_new=not start.is_resumed)


def _compile_train_steps(
    session: Session, steps: Steps, datasets: Datasets, start: RunStart, last: int
) -> dict[int, Any]:
    """Return the compiled train steps that the run needs, keyed by batch size.

    All remaining batch sizes are compiled now, so that compilation cannot fail or delay the run
    later.
    """
    config, console, first = session.config, session.console, int(start.state.step)
    if first >= last:
        console.note(f"all {last} steps are done: nothing is left to train")
        return {}
    if config.runtime.compiled_step:
        folder = expand_path(config.runtime.compiled_step, "runtime.compiled_step")
        with console.stage(f"loading train step from {folder}"):
            return {steps.shape[0]: steps.load_train(folder, to_dict(config))}
    train_steps = {}
    sizes = datasets.train.ramp.sizes(first + start.offset)
    for rows in sizes:
        suffix = f" for batches of {rows} sequences" if len(sizes) > 1 else ""
        with console.stage(f"compiling train step{suffix}"):
            train_steps[rows] = steps.with_batch_size(rows).compile_train()
        check_program(config, train_steps[rows], console.warn)
    return train_steps


def _record_forecast(
    session: Session, steps: Steps, train_steps: Mapping[int, Any], first: int
) -> None:
    """Write the forecast of the run and the memory of its compiled step to `forecast.json`.

    A failure is a warning, because a run does not need its forecast.
    """
    program = train_steps.get(steps.shape[0])
    if not session.is_first_process or program is None:
        return
    try:
        hardware = hardware_of_device(jax.devices()[0].device_kind)
        plan = hardware and plan_values(evaluate(session.config, hardware), hardware)
        forecast = ForecastFile(
            step=first,
            hardware=hardware.topology if hardware else "",
            plan=plan,
            compiled=_compiled_memory(steps, program),
        )
        files.write(session.run_dir / FORECAST_FILE, json.dumps(forecast, indent=1))
    except Exception as error:
        session.console.warn(f"the forecast of this run cannot be recorded: {error}")


def _compiled_memory(steps: Steps, program: Any) -> CompiledMemory | None:
    """Return the memory of a compiled train step on one device, or None if it is unknown."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    exact = steps.buffer_shapes() | {
        "state": jax.tree.leaves(steps.abstract_state),
        "batch": jax.tree.leaves(steps.abstract_batch()),
    }
    return CompiledMemory(
        arguments=analysis.argument_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        program=analysis.generated_code_size_in_bytes,
        buffers={
            name: sum(map(_device_bytes, arrays)) for name, arrays in exact.items() if name in TERMS
        },
    )


def _device_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Return the size of one device's shard in bytes."""
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _compile_recording_steps(
    session: Session, steps: Steps, train_steps: Mapping[int, Any]
) -> dict[int, Any]:
    """Return compiled train steps that record layer statistics, for the same batch sizes."""
    config, console = session.config, session.console
    recording_steps = {}
    for rows in train_steps if config.layer_stats.every else ():
        suffix = f" for batches of {rows} sequences" if len(train_steps) > 1 else ""
        with console.stage(f"compiling train step with layer statistics{suffix}"):
            recording = steps.with_batch_size(rows).with_layer_statistics(config.layer_stats)
            recording_steps[rows] = recording.compile_train()
        check_program(config, recording_steps[rows], console.warn)
    return recording_steps


def banner_lines(config: Config, steps: Steps, datasets: Datasets) -> list[tuple[str, str]]:
    """Return (name, text) for each line of the banner printed at the start of a run."""
    mesh, schedule, model = steps.param_layout.mesh, steps.train_schedule, config.model
    device, described = mesh.devices.flat[0], registry.describe(config.model)
    run_dir, length = run_folder(config.run), total_steps(config.train)
    tokens, ramp = config.train.sequence_length, datasets.train.ramp
    sizes = [f"{rows * tokens:,} for {pluralize(count, 'step')}" for rows, count in ramp.stages]
    sizes.append(f"{ramp.batch_size * tokens:,}")
    fingerprint = datasets.train.fingerprint()
    documents = pluralize(fingerprint["documents"], "document")
    if datasets.unreadable:
        documents += f", {datasets.unreadable} of them unreadable and treated as empty"
    lines = [("run", str(run_dir))]
    if config.checkpoint.dir:
        lines.append(("saved in", checkpoint_home(run_dir, config.checkpoint)))
    processes = pluralize(jax.process_count(), "process")
    lines += [
        ("devices", f"{mesh.size} x {device.device_kind} in {processes}"),
        ("mesh", describe_mesh(mesh)),
        (
            "model",
            f"{_describe_size(described)}, {pluralize(model.num_layers, 'layer')}, "
            f"{model.compute_dtype} compute, {model.param_dtype} parameters",
        ),
        *(("layers", note) for note in described.notes),
    ]
    method = ContextAttention.from_config(config.mesh, mesh.shape)
    if attention := resolve_auto.words(model, device.platform, tokens, method):
        lines.append(("attention", attention))
    return [
        *lines,
        (
            "pipeline",
            f"{schedule.name}, {schedule.describe_sizes()}, "
            f"{pluralize(schedule.num_microbatches, 'microbatch')}, bubble "
            f"{100 * schedule.idle_fraction():.1f}%, "
            f"{pluralize(schedule.num_stash, 'saved chunk')}",
        ),
        (
            "data",
            f"{fingerprint['source']}, {documents}, "
            f"{datasets.train.steps_per_epoch:.1f} steps per epoch",
        ),
        *_packing_lines(datasets.train, length),
        (
            "training",
            f"{pluralize(length, 'step')} of {', '.join(sizes)} tokens, "
            f"{format_count(ramp.sequences_before(length) * tokens)} tokens",
        ),
    ]


def _describe_size(model: Model) -> str:
    """Format the parameter count, followed by the counts of active and of trained parameters if
    these are smaller.
    """
    count = num_params(model)
    parts = ((active_params(model), "per token"), (num_trained(model), "trained"))
    fewer = ", ".join(f"{format_count(part)} {words}" for part, words in parts if part < count)
    return f"{format_count(count)} parameters" + (f" ({fewer})" if fewer else "")


def _packing_lines(train: Loader, length: int) -> Iterator[tuple[str, str]]:
    """Yield a banner line for each data source, with its packing and, in a mixture, its share of
    the sequences.
    """
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
