"""A run: what its loop works with, and how that is set up, from the run's folder and config.

Everything that a process has for itself is checked to be the same in all of them, and what is read
from a checkpoint to fit the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import maxpipe
from maxpipe import redact
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.manager import Checkpoints, open_run
from maxpipe.checkpoint.place import FOLDER, home, home_of, run_folder
from maxpipe.config.check import check, total_steps, where
from maxpipe.config.load import Loaded, to_dict, to_yaml
from maxpipe.config.schema import Config
from maxpipe.data.loader import Datasets, Loader, build, compare
from maxpipe.data.tokenizer import check_vocab
from maxpipe.errors import ConfigError, ExitCode, Preempted, Problem, ReplicaError, StorageError
from maxpipe.evaluate import evaluate
from maxpipe.files import full, refuse_links
from maxpipe.link import Link
from maxpipe.mesh import build_mesh, describe, resolve
from maxpipe.model.count import num_params
from maxpipe.phases import COMPILE, DATA_SET_UP, RESTORE, Phases
from maxpipe.sharding import local_rows, place_rows
from maxpipe.telemetry import Console, EventLog, MetricWriter
from maxpipe.train.build import steps_of
from maxpipe.train.guard import initial
from maxpipe.train.replicas import explain
from maxpipe.train.room import check_forecast, check_program
from maxpipe.train.state import TrainState
from maxpipe.train.step import Steps
from maxpipe.train.watch import Watch

# What each process may have for itself.
_OWN_SECTIONS = frozenset({"runtime", "log", "launch"})
_OWN_KEYS = frozenset(
    {"run.dir", "data.path", "data.tfds_dir", "data.threads", "data.prefetch_batches"}
    | {"tokenizer.path"}
)

# Model keys that may change between a checkpoint and the run that resumes it.
_FREE_MODEL_KEYS = frozenset({"dropout", "attention", "compute_dtype"})


WRITTEN_FILES = ("config.yml", "metrics.jsonl", "metrics.jsonl.new", "events.jsonl")


class Start(NamedTuple):
    """Where a run begins, or begins again."""

    state: TrainState
    words: str
    offset: int = 0
    """See `Watch.offset`."""
    facts: Mapping[str, Any] | None = None
    """What the guard had counted."""


@dataclass
class Run:
    """What the loop works with."""

    config: Config
    total_steps: int
    console: Console
    link: Link
    phases: Phases
    events: EventLog
    writer: MetricWriter
    checkpoints: Checkpoints
    datasets: Datasets
    steps: Steps
    state: TrainState
    train_step: Any
    eval_step: Any
    watch: Watch
    restore: Callable[[], Start]
    compared: int = -1
    """The last step after which replicas were compared."""
    evaluated: tuple[int, dict[str, float]] = (0, {})
    """Step and metrics of the newest evaluation."""

    @property
    def first(self) -> int:
        """Steps already done."""
        return int(self.state.step)

    def batches(self, loader: Loader, start: int, stop: int) -> contextlib.closing[Generator[Any]]:
        """Global batches of the steps from `start` to before `stop`, read ahead."""
        sharding, num_rows = self.steps.batch_sharding, loader.batch_size
        rows = local_rows(sharding, num_rows)
        source = loader.batches(start, rows.tolist(), stop_step=stop)

        def placed() -> Generator[Any]:
            with source:
                for host in source:
                    yield place_rows(host, rows, num_rows, sharding)

        return contextlib.closing(placed())

    def save(self, step: int, *, last: bool = False) -> None:
        """Start saving the state after `step`, unless that was done; `last` waits for the end."""
        self.watch.settle()
        if self.config.guard.replica_check_every:
            self.compare_replicas(step)
        data = self.datasets.train.state(step + self.watch.offset)
        data["guard"] = self.state.guard.facts() | self.watch.facts()
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
        loader, count = self.datasets.validation, self.config.eval.batches
        if loader is None or count == 0:
            return {}
        with self.batches(loader, 0, min(count, loader.num_batches)) as batches:
            stops = self.link.stops_here
            metrics = evaluate(self.eval_step, self.state.params, batches, stops)
        if metrics is None:
            return {}
        self.evaluated = (step, metrics)
        self.writer.write(step, metrics)
        self.console.note(
            f"validation after step {step}: {metrics['eval/loss']:.4f} nats per token, "
            f"{metrics['eval/nats_per_byte']:.4f} nats per byte"
        )
        return metrics

    def compare_replicas(self, step: int) -> None:
        """Look whether devices that should hold the same do.

        Raises:
            ReplicaError: some do not.
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
            del self.state  # two would not fit
            start = self.restore()
        self.state, first = start.state, int(start.state.step)
        self.watch.went_back(bad_step, first, start.facts)
        self.compared = -1
        self.writer.close()
        self.writer = _writer(self.config, first)


def fit_to_devices(loaded: Loaded) -> Loaded:
    """The config with the mesh's -1 resolved, and the rules that depend on it checked."""
    mesh = resolve(loaded.config.mesh, jax.devices())
    config = dataclasses.replace(loaded.config, mesh=mesh)
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    return Loaded(config, loaded.origins)


def set_up(
    loaded: Loaded, console: Console, link: Link, phases: Phases, stack: contextlib.ExitStack
) -> Run:
    """Everything that the loop needs; `stack` closes it.

    Raises:
        ConfigError: the config does not fit the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
    """
    config = loaded.config
    run_dir, process = run_folder(config.run), link.index
    length = total_steps(config.train)
    check_forecast(config, console.warn)
    refuse_links(run_dir, WRITTEN_FILES)
    locks = _locks(config, stack) if process == 0 else []
    for lock in locks:
        if lock.note:
            console.warn(lock.note)
    events = _ledger(config, link, phases, stack)
    checkpoints = stack.enter_context(
        Checkpoints(run_dir, config.checkpoint, record=events.write, locks=locks)
    )
    with phases.enter(DATA_SET_UP), console.stage("reading data"):
        datasets = _datasets(config, phases.progress)
    stack.callback(datasets.close)
    steps = steps_of(config, build_mesh(config.mesh), datasets.tokenizer.byte_lengths)
    console.banner(_facts(config, steps, datasets, length))
    _check_same_data(link, datasets)
    restore = partial(_restore_or_init, loaded, steps, checkpoints, datasets, console)
    with phases.enter(RESTORE):
        begin = restore()
    first = int(begin.state.step)
    phases.progress(first)
    if first > length:
        raise ConfigError.one(
            where("train.steps" if config.train.steps else "train.tokens", loaded.origins),
            config.train.steps or config.train.tokens,
            f"is {length} steps; must be at least {first}, the step that this run starts from.",
            f"Set train.steps={first} or more, or run.name to a new name.",
        )
    console.note(begin.words)
    with phases.enter(COMPILE):
        train_step, eval_step = _programs(config, steps, datasets, console, length - first)
    events.write("start", step=first, devices=jax.device_count(), seconds=phases.take())
    writer = _writer(config, first)
    writer.text("config", f"```yaml\n{to_yaml(redact.within(config))}```")
    if process == 0:
        _write_config(run_dir / "config.yml", config)
    run = Run(
        config=config,
        total_steps=length,
        console=console,
        link=link,
        phases=phases,
        events=events,
        writer=writer,
        checkpoints=checkpoints,
        datasets=datasets,
        steps=steps,
        state=begin.state,
        train_step=train_step,
        eval_step=eval_step,
        watch=Watch(
            config.guard,
            run_dir=str(run_dir),
            loader=datasets.train,
            events=events,
            console=console,
            offset=begin.offset,
            facts=begin.facts,
        ),
        restore=restore,
    )
    stack.callback(lambda: run.writer.close())  # going back opens another one
    return run


def _locks(config: Config, stack: contextlib.ExitStack) -> list[RunLock]:
    """Of the run's folder, and of what holds its checkpoints if that is elsewhere."""
    run_dir = run_folder(config.run)
    locks = [RunLock(run_dir)]
    other = RunLock(home(run_dir, config.checkpoint), key="checkpoint.dir")
    if other.path != locks[0].path:
        locks.append(other)
    return [stack.enter_context(lock) for lock in locks]


def _datasets(config: Config, moved: Callable[[], None]) -> Datasets:
    datasets = build(
        config.data,
        config.tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        sequence_length=config.train.sequence_length,
        eval_batch_size=config.eval.batch_size,
        cache_dir=str(full(config.run.dir, "run.dir") / ".index"),
        moved=moved,
    )
    check_vocab(datasets.tokenizer, config.model.vocab_size)
    return datasets


def _programs(
    config: Config, steps: Steps, datasets: Datasets, console: Console, num_left: int
) -> tuple[Any, Any]:
    """The compiled train and eval steps; None for what the run does not need."""
    train_step = eval_step = None
    if num_left == 0:
        console.note(f"all {total_steps(config.train)} steps are done: nothing is left to train")
    elif config.runtime.executable:
        folder = full(config.runtime.executable, "runtime.executable")
        with console.stage(f"loading train step from {folder}"):
            train_step = steps.load_train(folder, to_dict(config))
    else:
        with console.stage("compiling train step"):
            train_step = steps.compile_train()
        check_program(config, train_step, console.warn)
    if config.eval.batches and datasets.validation is not None:
        with console.stage("compiling eval step"):
            eval_step = steps.compile_eval(config.eval.batch_size)
    return train_step, eval_step


def _ledger(config: Config, link: Link, phases: Phases, stack: contextlib.ExitStack) -> EventLog:
    """The run's ledger, in which this attempt begins, and which will say how it ends."""
    events = EventLog(run_folder(config.run), link.index, phases.begun)
    host, pid = platform.node(), os.getpid()
    version = maxpipe.__version__
    events.write("begin", host=host, pid=pid, processes=link.count, version=version)

    def ends(kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Preempted):
            events.write("failed", error=type(error).__name__, text=str(error)[:1000])

    stack.push(ends)

    def told_to_leave(code: int, text: str) -> None:
        if code == ExitCode.PREEMPTED:
            events.write("preempted", step=phases.step, saved=False)
        else:
            events.write("failed", code=code, text=text[:1000])

    link.on_leave = told_to_leave
    return events


def shared_facts(config: Config) -> dict[str, Any]:
    """What must be the same in all processes, by name."""
    facts = {"maxpipe": maxpipe.__version__, "jax": jax.__version__}
    for section, keys in to_dict(redact.within(config)).items():
        if section not in _OWN_SECTIONS:
            facts |= {f"{section}.{key}": json.dumps(value) for key, value in keys.items()}
    return {name: value for name, value in facts.items() if name not in _OWN_KEYS}


def _check_same_data(link: Link, datasets: Datasets) -> None:
    """All processes cut their rows from the same documents."""
    fingerprint = json.dumps(datasets.train.fingerprint(), sort_keys=True)
    seen = link.same("data", hashlib.sha256(fingerprint.encode()).hexdigest())
    if len(seen) > 1:
        groups = " and ".join(f"processes {', '.join(map(str, each))}" for each in seen.values())
        raise ConfigError.one(
            "data.path",
            None,
            f"must hold the same documents for every process; {groups} see different ones.",
            "Copy the same files to every host, or name a folder that all share.",
        )


def _writer(config: Config, first: int) -> MetricWriter:
    return MetricWriter(run_folder(config.run), config.log.tensorboard, first, jax.process_index())


def _write_config(path: Path, config: Config) -> None:
    try:
        path.write_text(to_yaml(redact.within(config)), encoding="utf-8")
    except OSError as error:
        raise StorageError.unwritable(path, error) from error


def _restore_or_init(
    loaded: Loaded, steps: Steps, checkpoints: Checkpoints, datasets: Datasets, console: Console
) -> Start:
    """Where to go on from."""
    config = loaded.config

    def accept(facts: Facts, *, own: bool = True) -> None:
        _check_model(facts.config["model"], to_dict(config)["model"], loaded.origins)
        others = compare(facts.data["fingerprint"], datasets.train.fingerprint())
        if others and own and not config.data.allow_change:
            raise _other_data(others, facts.step)
        words = f"when step {facts.step} was saved"
        for name, before, now in others:
            console.warn(f"data: {name} was {before} {words} and is {now}")
        if own:
            for name, before, now in _changed_keys(facts.config, config):
                console.note(f"config: {name} was {before} {words} and is {now}")

    if (found := checkpoints.restore_newest(steps.abstract_saved, accept)) is not None:
        words = f"resuming {run_folder(config.run)} after step {found.step}"
        if found.folder.parent != checkpoints.durable.path:
            words += f", from {found.folder}"
    elif source := config.checkpoint.restore_from:
        with open_run(source, where("checkpoint.restore_from", loaded.origins)) as other:
            found = other.restore_newest(steps.abstract_saved, partial(accept, own=False))
        assert found is not None
        words = f"starting from {source} after step {found.step}"
    else:
        _must_be_new(loaded, checkpoints)
        return Start(steps.init(), f"starting a new run in {run_folder(config.run)}")
    guarded = found.facts.data.get("guard")
    state = steps.from_saved(found.state, initial(config.guard, guarded))
    return Start(state, words, found.facts.data["step"] - found.step, guarded)


def _must_be_new(loaded: Loaded, checkpoints: Checkpoints) -> None:
    """A run whose checkpoints are where `checkpoint.dir` led before does not start anew."""
    run_dir = run_folder(loaded.config.run)
    homes = [str(run_dir)]
    with contextlib.suppress(ConfigError):
        homes.append(home_of(run_dir))
    for each in homes:
        folder = Folder(os.path.join(each, FOLDER))
        if folder.path != checkpoints.durable.path and (saved := folder.steps()):
            raise ConfigError.one(
                where("checkpoint.dir", loaded.origins),
                loaded.config.checkpoint.dir or "''",
                f"leads to {checkpoints.durable.path}, which is empty; this run has checkpoints "
                f"up to step {saved[-1]} in {folder.path}.",
                "Copy them there, or set run.name to a new name.",
            )


def _check_model(saved: dict[str, Any], wanted: dict[str, Any], origins: Mapping[str, str]) -> None:
    problems = [
        Problem(
            where(f"model.{key}", origins),
            str(wanted.get(key)),
            f"must be {saved.get(key)}, the value of the checkpoint's model.",
            f"Set model.{key}={saved.get(key)}, or run.name to a new name.",
        )
        for key in sorted(saved.keys() | wanted.keys())
        if key not in _FREE_MODEL_KEYS and saved.get(key) != wanted.get(key)
    ]
    if problems:
        raise ConfigError(problems)


def _other_data(differences: Sequence[tuple[str, Any, Any]], step: int) -> ConfigError:
    listed = "; ".join(f"{name} was {before} and is {now}" for name, before, now in differences)
    return ConfigError.one(
        "data",
        None,
        f"must be what it was when step {step} was saved: {listed}.",
        "Put it back, or set data.allow_change=true to go on with other samples.",
    )


def _changed_keys(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, saved, now) of settings that a run may change while it is stopped."""
    for section, keys in to_dict(redact.within(config)).items():
        if section in (*_OWN_SECTIONS, "model"):
            continue
        for key, now in keys.items():
            before = saved.get(section, {}).get(key, now)
            if before != now and f"{section}.{key}" not in _OWN_KEYS:
                yield f"{section}.{key}", before, now


def _facts(config: Config, steps: Steps, datasets: Datasets, length: int) -> list[tuple[str, str]]:
    mesh, schedule = steps.partition.mesh, steps.train_schedule
    tokens = config.train.batch_size * config.train.sequence_length
    device = mesh.devices.flat[0]
    model = config.model
    saved_in = home(run_folder(config.run), config.checkpoint)
    return [
        ("run", str(run_folder(config.run))),
        *([("saved in", saved_in)] if config.checkpoint.dir else []),
        ("devices", f"{mesh.size} x {device.device_kind} in {jax.process_count()} process(es)"),
        ("mesh", describe(mesh)),
        (
            "model",
            f"{num_params(model) / 1e6:.2f} M parameters, {model.num_layers} layers, "
            f"{model.compute_dtype} compute, {model.param_dtype} parameters",
        ),
        (
            "pipeline",
            f"{schedule.name}, {schedule.num_stages} stages x {schedule.num_repeats} repeats, "
            f"{schedule.num_microbatches} microbatches, bubble "
            f"{100 * schedule.idle_fraction():.1f}%, {schedule.num_stash} saved chunks",
        ),
        (
            "data",
            f"{config.data.source}, {datasets.train.fingerprint()['documents']} documents, "
            f"{datasets.train.steps_per_epoch:.1f} steps per epoch",
        ),
        ("training", f"{length} steps of {tokens:,} tokens, {length * tokens / 1e6:.2f} M tokens"),
    ]
