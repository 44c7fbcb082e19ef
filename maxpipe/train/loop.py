"""The training run: set-up, the loop, and the way out.

Step, parameters, optimizer and data position belong together: they are saved in one
checkpoint, and everything random follows from seed and step. So a run that was
killed and resumed computes, bit for bit, what an unbroken one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

import maxpipe
from maxpipe import redact, runtime
from maxpipe.checkpoint import Checkpoints, open_run
from maxpipe.config.check import check, total_steps, where
from maxpipe.config.load import Loaded, to_dict, to_yaml
from maxpipe.config.schema import Config
from maxpipe.data.loader import Datasets, Loader, build, compare
from maxpipe.data.tokenizer import check_vocab
from maxpipe.errors import ConfigError, ExitCode, Preempted, Problem, ReplicaError, StorageError
from maxpipe.evaluate import evaluate
from maxpipe.files import refuse_links
from maxpipe.hardware import peak_flops
from maxpipe.link import Link
from maxpipe.mesh import build_mesh, describe, resolve
from maxpipe.model.count import num_params, train_flops_per_token
from maxpipe.phases import COMPILE, DATA, DATA_SET_UP, EVAL, LOOP, RESTORE, SAVE, STEP, Phases
from maxpipe.sharding import local_rows, place_rows
from maxpipe.telemetry import Console, EventLog, MetricWriter
from maxpipe.train.build import steps_of
from maxpipe.train.guard import initial
from maxpipe.train.replicas import explain
from maxpipe.train.state import TrainState
from maxpipe.train.step import Steps
from maxpipe.train.watch import RollBack, Watch

# What each process may have for itself.
_OWN_SECTIONS = frozenset({"runtime", "log"})
_OWN_KEYS = frozenset(
    {"run.dir", "data.path", "data.tfds_dir", "data.threads", "data.prefetch_batches"}
    | {"tokenizer.path"}
)

# Model keys that may change between a checkpoint and the run that resumes it.
_FREE_MODEL_KEYS = frozenset({"dropout", "attention", "compute_dtype"})


WRITTEN_FILES = ("config.yml", "metrics.jsonl", "metrics.jsonl.new", "events.jsonl")


def train(loaded: Loaded) -> int:
    """Train or resume the run; returns the process' exit code.

    Raises:
        ConfigError: the config does not fit the machine, the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
        Preempted: the run was asked to stop, and has saved.
        NumbersError: loss or gradients are such that the config does not let the run go on.
        ReplicaError: devices that should hold the same hold something else.
    """
    config = loaded.config
    with contextlib.ExitStack() as stack:
        phases = Phases()
        link = stack.enter_context(
            runtime.joined(config.runtime, config.mesh.cpu_devices, phases, _shared_facts(config))
        )
        loaded = _fit_to_devices(loaded)
        console = stack.enter_context(Console(config.log.progress, process_index=link.index))
        link.say = console.warn
        run = _set_up(loaded, console, link, phases, stack)
        with phases.enter(LOOP):
            _run_loop(run)
    return ExitCode.DONE


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

    def save(self, step: int) -> None:
        """Start saving the state after `step`, unless that was done."""
        self.watch.settle()
        if self.checkpoints.latest() != step:
            if self.config.guard.replica_check_every:
                self.compare_replicas(step)
            saved = self.steps.to_saved(self.state)
            data = self.datasets.train.state(step + self.watch.offset)
            data["guard"] = self.state.guard.facts() | self.watch.facts()
            self.checkpoints.save(step, saved, to_dict(redact.within(self.config)), data)
            self.events.write("checkpoint", step=step)

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
            raise ReplicaError(explain(found, f"{_run_dir(self.config)}: step {step}"))

    def roll_back(self, bad_step: int) -> None:
        """Return to the newest checkpoint; the batches from there to the bad step are left out."""
        self.checkpoints.wait()
        del self.state  # two would not fit
        start = self.restore()
        self.state, first = start.state, int(start.state.step)
        self.watch.went_back(bad_step, first, start.facts)
        self.compared = -1
        self.writer = _writer(self.config, first)


def _run_loop(run: Run) -> None:
    """Trains to the end, however often the guard goes back."""
    while True:
        try:
            return _train_on(run)
        except RollBack as bad:
            step = bad.step
        run.roll_back(step)


def _train_on(run: Run) -> None:
    """The loop. Each line is a thing that happens, in this order."""
    config, first, last = run.config, run.first, run.total_steps
    meter = Meter(run)
    evaluated: dict[str, float] = {}
    checked = config.guard.replica_check_every
    run.console.begin(first, last)
    if run.link.stops_here() and first < last:
        _leave(run, first)
    position = run.watch.offset
    with run.batches(run.datasets.train, first + position, last + position) as batches:
        for step in range(first + 1, last + 1):
            batch = meter.wait_for(batches)
            run.phases.progress(step)
            with run.phases.enter(STEP):
                run.state, metrics = run.train_step(run.state, batch)
                meter.done(metrics)
            run.watch.started(step, metrics)
            if step % config.log.every == 0 or step == last:
                meter.report(step)
            if config.eval.every and step % config.eval.every == 0:
                with meter.paused(EVAL):
                    evaluated = run.evaluate(step)
            if checked and step % checked == 0:
                with meter.paused(LOOP):
                    run.compare_replicas(step)
            if run.checkpoints.due(step):
                with meter.paused(SAVE):
                    run.save(step)
            if run.link.stops_here() and step < last:
                _leave(run, step)
    run.watch.settle()
    if not (config.eval.every and last % config.eval.every == 0 and evaluated):
        with meter.paused(EVAL):
            evaluated = run.evaluate(last)
    if run.link.stops_here():
        _leave(run, last)
    _save_and_wait(run, last)
    run.events.write("done", step=last)
    run.console.note(_closing_words(run, evaluated))


def _leave(run: Run, step: int) -> None:
    run.console.note(f"asked to stop: saving step {step}")
    _save_and_wait(run, step)
    run.events.write("preempted", step=step)
    raise Preempted(
        f"{_run_dir(run.config)}: stopped after step {step} of {run.total_steps}\n"
        "  The state is saved.\n"
        "  Start the same command again to go on."
    )


def _save_and_wait(run: Run, step: int) -> None:
    with run.phases.enter(SAVE):
        run.save(step)
        run.checkpoints.wait()
    run.events.write("time", step=step, seconds=run.phases.take())


def _closing_words(run: Run, evaluated: dict[str, float]) -> str:
    lines = [f"done: {run.total_steps} steps, files in {_run_dir(run.config)}"]
    if evaluated:
        lines.append(
            f"final validation loss {evaluated['eval/nats_per_byte']:.4f} nats per byte "
            f"(unigram byte entropy of the text: {run.datasets.unigram_entropy:.4f})"
        )
    return "\n".join(lines)


class Meter:
    """Time and throughput between reports."""

    def __init__(self, run: Run):
        self._run = run
        self._latest: dict[str, jax.Array] = {}
        mesh, config = run.steps.partition.mesh, run.config
        rows, tokens = run.steps.shape
        self._tokens_per_step = rows * tokens
        self._flops_per_device = (
            train_flops_per_token(config.model, tokens) * self._tokens_per_step / mesh.size
        )
        self._peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._restart()

    def _restart(self) -> None:
        self._start, self._steps, self._waited = time.perf_counter(), 0, 0.0

    def wait_for(self, batches: Iterator[Any]) -> Any:
        """The next batch."""
        start = time.perf_counter()
        with self._run.phases.enter(DATA):
            batch = next(batches)
        self._waited += time.perf_counter() - start
        return batch

    def done(self, metrics: dict[str, jax.Array]) -> None:
        """A step was started; waits for the one before it, so that at most two are under way."""
        if self._latest:
            jax.block_until_ready(self._latest)
        self._latest = metrics
        self._steps += 1

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Time inside belongs to `phase`, not to steps."""
        with self._run.phases.enter(STEP):
            jax.block_until_ready(self._latest)
        start = time.perf_counter()
        with self._run.phases.enter(phase):
            yield
        self._start += time.perf_counter() - start

    def report(self, step: int) -> None:
        """Write and show the metrics of the newest step and the rates since the last report."""
        metrics = {tag: float(value) for tag, value in self._latest.items()}
        seconds = (time.perf_counter() - self._start) / self._steps
        metrics |= {
            "train/tokens": float(step * self._tokens_per_step),
            "perf/step_s": seconds,
            "perf/data_wait_s": self._waited / self._steps,
            "perf/tokens_per_s": self._tokens_per_step / seconds,
            "perf/tflops_per_device": self._flops_per_device / seconds / 1e12,
            "pipe/bubble_pct": 100 * self._run.steps.train_schedule.idle_fraction(),
        }
        if self._peak is not None:
            metrics["perf/mfu"] = self._flops_per_device / seconds / self._peak
        self._run.events.write("time", step=step, seconds=self._run.phases.take())
        self._run.writer.write(step, metrics)
        self._run.console.step(step, metrics)
        self._restart()


# Set-up.


def _run_dir(config: Config) -> Path:
    return Path(config.run.dir).expanduser() / config.run.name


def _fit_to_devices(loaded: Loaded) -> Loaded:
    """The config with the mesh's -1 resolved, and the rules that depend on it checked."""
    mesh = resolve(loaded.config.mesh, jax.devices())
    config = dataclasses.replace(loaded.config, mesh=mesh)
    problems = check(config, loaded.origins)
    if problems:
        raise ConfigError(problems)
    return Loaded(config, loaded.origins)


def _set_up(
    loaded: Loaded, console: Console, link: Link, phases: Phases, stack: contextlib.ExitStack
) -> Run:
    config = loaded.config
    run_dir, process = _run_dir(config), link.index
    length = total_steps(config.train)
    refuse_links(run_dir, WRITTEN_FILES)
    checkpoints = stack.enter_context(
        Checkpoints(run_dir, every=config.checkpoint.every, keep=config.checkpoint.keep)
    )
    events = _ledger(config, link, phases, stack)
    with phases.enter(DATA_SET_UP), console.stage("reading data"):
        datasets = build(
            config.data,
            config.tokenizer,
            seed=config.run.seed,
            batch_size=config.train.batch_size,
            sequence_length=config.train.sequence_length,
            eval_batch_size=config.eval.batch_size,
            cache_dir=str(Path(config.run.dir).expanduser() / ".index"),
        )
    stack.callback(datasets.close)
    check_vocab(datasets.tokenizer, config.model.vocab_size)
    steps = steps_of(config, build_mesh(config.mesh), datasets.tokenizer.byte_lengths)
    console.banner(_facts(config, steps, datasets, length))
    _check_same_data(link, datasets)
    restore = partial(_restore_or_init, loaded, steps, checkpoints, datasets, console)
    with phases.enter(RESTORE):
        begin = restore()
    first, train_step = int(begin.state.step), None
    phases.progress(first)
    if first > length:
        raise ConfigError.one(
            where("train.steps" if config.train.steps else "train.tokens", loaded.origins),
            config.train.steps or config.train.tokens,
            f"is {length} steps; must be at least {first}, the step that this run starts from.",
            f"Set train.steps={first} or more, or run.name to a new name.",
        )
    console.note(begin.words)
    if first == length:
        console.note(f"all {length} steps are done: nothing is left to train")
    elif config.runtime.executable:
        folder = Path(config.runtime.executable).expanduser()
        with console.stage(f"loading train step from {folder}"):
            train_step = steps.load_train(folder, to_dict(config))
    else:
        with phases.enter(COMPILE), console.stage("compiling train step"):
            train_step = steps.compile_train()
    eval_step = None
    if config.eval.batches and datasets.validation is not None:
        with phases.enter(COMPILE), console.stage("compiling eval step"):
            eval_step = steps.compile_eval(config.eval.batch_size)
    events.write("start", step=first, devices=jax.device_count(), seconds=phases.take())
    writer = _writer(config, first)
    stack.callback(writer.close)
    writer.text("config", f"```yaml\n{to_yaml(redact.within(config))}```")
    if process == 0:
        _write_config(run_dir / "config.yml", config)
    return Run(
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


def _ledger(config: Config, link: Link, phases: Phases, stack: contextlib.ExitStack) -> EventLog:
    """The run's ledger, in which this attempt begins, and which will say how it ends."""
    events = EventLog(_run_dir(config), link.index, phases.begun)
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


def _shared_facts(config: Config) -> dict[str, Any]:
    """What must be the same in all processes, by name."""
    facts = {"maxpipe": maxpipe.__version__, "jax": jax.__version__}
    for section, keys in to_dict(config).items():
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
    return MetricWriter(_run_dir(config), config.log.tensorboard, first, jax.process_index())


def _write_config(path: Path, config: Config) -> None:
    try:
        path.write_text(to_yaml(redact.within(config)), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written\n"
            f"  {error.strerror}\n"
            "  Free space, or set run.dir to a folder that can be written."
        ) from error


def _restore_or_init(
    loaded: Loaded, steps: Steps, checkpoints: Checkpoints, datasets: Datasets, console: Console
) -> Start:
    """Where to go on from."""
    config = loaded.config
    if (step := checkpoints.latest()) is not None:
        source, words = checkpoints, f"resuming {_run_dir(config)} after step {step}"
    elif config.checkpoint.restore_from:
        key = "checkpoint.restore_from"
        source = open_run(config.checkpoint.restore_from, where(key, loaded.origins))
        step = source.latest()
        words = f"starting from {config.checkpoint.restore_from} after step {step}"
    else:
        return Start(steps.init(), f"starting a new run in {_run_dir(config)}")
    assert step is not None
    facts = source.facts(step)
    _check_model(facts["config"]["model"], to_dict(config)["model"], loaded.origins)
    for name, before, now in compare(facts["data"]["fingerprint"], datasets.train.fingerprint()):
        console.warn(f"data: {name} was {before} when step {step} was saved and is {now}")
    found = source.restore(step, steps.abstract_saved)
    if int(found.state["step"]) != step:
        raise StorageError(
            f"{source.directory / str(step)}: holds step {int(found.state['step'])}\n"
            "  the folder's name must be the step inside it.\n"
            "  Give the folder its own name back, or move it away."
        )
    guarded = found.data.get("guard")
    state = steps.from_saved(found.state, initial(config.guard, guarded))
    return Start(state, words, found.data["step"] - step, guarded)


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


def _facts(config: Config, steps: Steps, datasets: Datasets, length: int) -> list[tuple[str, str]]:
    mesh, schedule = steps.partition.mesh, steps.train_schedule
    tokens = config.train.batch_size * config.train.sequence_length
    device = mesh.devices.flat[0]
    model = config.model
    return [
        ("run", str(_run_dir(config))),
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
