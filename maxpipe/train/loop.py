"""The training loop and the end of a run.

Step, parameters, optimizer state and data position are saved in one checkpoint, and all randomness
depends only on the seed and the step. A run that was killed and resumed is therefore bitwise equal
to an uninterrupted run.

Before devices are initialized, the module checks that the files and folders in a config exist.
Missing files and a mesh that does not fit the devices are therefore reported together.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from maxpipe.checkpoint.storage import (
    CHECKPOINTS_FOLDER,
    checkpoint_home,
    entries,
    run_folder,
    to_epath,
)
from maxpipe.config import bundled_configs
from maxpipe.config.check import error_location
from maxpipe.config.load import LoadedConfig
from maxpipe.config.schema import Config
from maxpipe.config.sections.data import named_sources
from maxpipe.config.sections.source import FILES, paths_of
from maxpipe.distributed import runtime
from maxpipe.distributed.phases import DATA, EVAL, LOOP, ROLLOUT, SAVE, STEP, Phases
from maxpipe.errors import ConfigError, ExitCode, Problem
from maxpipe.evals.evaluate import SourceSums
from maxpipe.hardware import peak_flops
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.models.count import train_flops_per_token
from maxpipe.models.registry import describe
from maxpipe.step.build import resolve_mesh, shared_metadata
from maxpipe.step.step import BY_SOURCE
from maxpipe.telemetry.console import Console
from maxpipe.telemetry.metrics import source_tag
from maxpipe.train.bad_steps import RollBack
from maxpipe.train.memory_check import check_forecast, explain_allocation_errors
from maxpipe.train.run import Run
from maxpipe.train.set_up import set_up

_MODEL = "hf:"
_RESTORE, _TEACHER, _TOKENIZER = "checkpoint.restore_from", "distill.teacher", "tokenizer.path"
_PREPARED = ("tokens", "megatron")


def missing_files(loaded: LoadedConfig) -> list[Problem]:
    """Return a problem for each local file or folder in the config that does not exist."""
    config, origins = loaded.config, loaded.origins
    folders = _model_folders(config)
    problems = [
        _model_problem(key, folder, folders, config, origins) for key, folder in folders.items()
    ]
    in_folder = any(_is_inside(config.tokenizer.path, each) for each in folders.values())
    if config.tokenizer.kind != "bytes" and not in_folder:
        problems += _problem(_TOKENIZER, config.tokenizer.path, origins)
    for section, source in named_sources(config):
        if source.source in (*FILES, *_PREPARED):
            key = f"{section}.path" if source.path else f"{section}.paths"
            for path in paths_of(source):
                problems += _problem(key, path, origins)
        if source.chat != "off":
            problems += _problem(f"{section}.chat_template", source.chat_template, origins)
    for key, path in _other_files(config):
        problems += _problem(key, path, origins)
    return problems


@contextlib.contextmanager
def merge_problems(problems: Sequence[Problem]) -> Iterator[None]:
    """Raise these problems, followed by the problems of a ConfigError raised inside the context."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)


def _model_folders(config: Config) -> dict[str, str]:
    """Return the missing Hugging Face folders, keyed by the config key that names the folder."""
    named = {}
    if config.train.objective == "distill":
        named[_TEACHER] = config.distill.teacher
    if config.checkpoint.restore_from.startswith(_MODEL) and not _has_checkpoint(config):
        named[_RESTORE] = config.checkpoint.restore_from
    folders = {k: v.removeprefix(_MODEL) for k, v in named.items() if v.startswith(_MODEL)}
    return {key: each for key, each in folders.items() if each and not _exists(each)}


def _has_checkpoint(config: Config) -> bool:
    """Return whether the run resumes, so that `checkpoint.restore_from` is not read."""
    place = os.path.join(
        checkpoint_home(run_folder(config.run), config.checkpoint), CHECKPOINTS_FOLDER
    )
    try:
        return any(entry.name.isdecimal() for entry in entries(to_epath(place)))
    except OSError:
        return True  # the storage backend reports the error later


def _model_problem(
    key: str,
    folder: str,
    folders: Mapping[str, str],
    config: Config,
    origins: Mapping[str, str],
) -> Problem:
    rule = "must name a folder with config.json, *.safetensors and a tokenizer: "
    rule += f"{os.path.abspath(os.path.expanduser(folder))} does not exist."
    settings = f"{key}={_MODEL}DIR"
    if config.tokenizer.kind != "bytes" and _is_inside(config.tokenizer.path, folder):
        rule += f" {_TOKENIZER}={config.tokenizer.path} is also read from that folder."
        settings += f" and {_TOKENIZER}=DIR"
    action = f"Download the model to this folder (`hf download NAME --local-dir {folder}`), or set "
    action += f"{settings} to the folder of a local model."
    return Problem(error_location(key, origins), f"{_MODEL}{folder}", rule, action)


def _is_inside(path: str, folder: str) -> bool:
    if not path:
        return False
    whole, outer = (os.path.abspath(os.path.expanduser(each)) for each in (path, folder))
    return os.path.commonpath([whole, outer]) == outer


def _other_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, path) for every other file that a run reads."""
    for name, task in config.eval.tasks.items():
        yield f"eval.tasks.{name}.path", task.path
    if config.eval.sample_every:
        yield "eval.sample_prompts_file", config.eval.sample_prompts_file
    if config.train.objective == "grpo":
        yield "grpo.prompts", config.grpo.prompts
        yield "grpo.reward_file", config.grpo.reward_file.rpartition(":")[0]
    if config.train.objective == "distill":
        yield "distill.teacher_logits", config.distill.teacher_logits


def _problem(key: str, path: str, origins: Mapping[str, str]) -> Iterator[Problem]:
    if path and not _exists(path):
        rule = f"must name an existing file or folder; none was found relative to {os.getcwd()}."
        action = f"Set {key} to an existing path."
        if key == "tokenizer.path" and bundled_configs.is_hub_id(path):
            rule += " Nothing is downloaded."
            action = f"{bundled_configs.hub_download_action(path).removesuffix('.')} as {key}."
        yield Problem(error_location(key, origins), path, rule, action)


def _exists(path: str) -> bool:
    """Return whether a local path or glob pattern exists; always true for buckets."""
    expanded = os.path.expanduser(path)
    if url_scheme(path) or os.path.lexists(expanded):
        return True  # the code that reads the file reports broken links
    return next(glob.iglob(expanded, recursive=True), None) is not None


def train(loaded: LoadedConfig) -> int:
    """Train or resume the run, and return the exit code of the process.

    Raises:
        ConfigError: the config does not match the machine, the data or the run's checkpoint.
        StorageError: checkpoints cannot be read or written.
        Preemption: the run received a stop request and saved its state.
        UserInterrupt: the run was interrupted by Ctrl-C and saved its state.
        DivergenceError: the config does not allow the run to continue after a bad step.
        ReplicaError: replicas on different devices differ.
    """
    config = loaded.config
    with contextlib.ExitStack() as stack:
        phases = Phases()
        link = stack.enter_context(
            runtime.join_processes(
                config.runtime,
                config.mesh.cpu_devices,
                phases,
                shared_metadata(config),
                run_folder(config.run),
            )
        )
        with merge_problems(missing_files(loaded)):
            loaded = resolve_mesh(loaded)
            console = stack.enter_context(Console(config.log.progress, process_index=link.index))
            link.say, link.tell = console.warn, console.tell
            check_forecast(loaded.config, console.warn)
        with explain_allocation_errors(loaded.config):
            run = set_up(loaded, console, link, phases, stack)
            with phases.enter(LOOP):
                _run_loop(run)
    return ExitCode.DONE


def _run_loop(run: Run) -> None:
    """Train to the last step, restarting the loop after every rollback."""
    while True:
        try:
            return _train_steps(run)
        except RollBack as bad:
            step = bad.step
        run.roll_back(step)


def _train_steps(run: Run) -> None:
    """Run the training loop once, from the current step to the last step."""
    config, first = run.config, run.steps_done
    meter = ThroughputMeter(run)
    evaluated: dict[str, float] = {}
    if (
        run.early_stopping.needs_evaluation(first) and first
    ):  # the run was stopped before this evaluation
        with meter.paused(EVAL):
            evaluated = run.evaluate(first)
    last = run.total_steps
    checked = config.guard.replica_check_every
    run.console.begin(first, last)
    if run.link.should_stop() and first < last:
        _save_and_stop(run, first)
    position = run.bad_step_monitor.offset
    with run.train_batches(first + position, last + position) as batches:
        for step in range(first + 1, last + 1):
            if not meter.run_rollout(step):
                _save_and_stop(run, step - 1)
            batch = meter.next_batch(batches)
            run.phases.progress(step)
            with run.phases.enter(STEP):
                metrics = run.train_step(batch)
                meter.record_step(metrics, len(batch["tokens"]))
            run.bad_step_monitor.record_step(step, metrics)
            if step % config.log.every == 0 or step == last:
                meter.report(step)
            if config.eval.every and step % config.eval.every == 0:
                with meter.paused(EVAL):
                    evaluated = run.evaluate(step)
                last = step if run.early_stopping.should_stop else last
            if config.eval.sample_every and step % config.eval.sample_every == 0:
                with meter.paused(EVAL):
                    run.sample(step)
            if checked and step % checked == 0:
                with meter.paused(LOOP):
                    run.compare_replicas(step)
            run.checkpoints.poll()
            if step < last and run.can_stop_after(step):  # the last step is saved after evaluation
                if run.checkpoints.should_save(step):
                    with meter.paused(SAVE):
                        run.save(step)
                if run.link.should_stop():
                    _save_and_stop(run, step)
            if step == last:
                break
    run.bad_step_monitor.flush()
    if not (config.eval.every and last % config.eval.every == 0 and evaluated):
        with meter.paused(EVAL):
            evaluated = run.evaluate(last)
    if run.link.should_stop():
        _save_and_stop(run, last)
    _save_and_wait(run, last)
    run.events.write("done", step=last)
    run.console.note(_closing_message(run, evaluated))


def _save_and_stop(run: Run, step: int) -> None:
    run.console.note(f"stop requested: saving step {step}")
    _save_and_wait(run, step)
    run.events.write("preempted", step=step)
    raise run.link.stop_error(
        f"{run_folder(run.config.run)}: stopped after step {step} of {run.total_steps}\n"
        "  The state is saved.\n"
        "  Run the same command again to resume."
    )


def _save_and_wait(run: Run, step: int) -> None:
    with run.phases.enter(SAVE):
        run.save(step, last=True)
    run.events.write("time", step=step, seconds=run.phases.take_seconds())


def _closing_message(run: Run, evaluated: dict[str, float]) -> str:
    lines = [f"done: {pluralize(run.total_steps, 'step')}, files in {run_folder(run.config.run)}"]
    if run.early_stopping.should_stop:
        lines.append(run.early_stopping.message())
    elif run.total_steps < run.length:
        lines.append(f"all documents were read: the run ended before step {run.length}")
    if "eval/nats_per_byte" in evaluated:
        lines.append(f"final validation loss {evaluated['eval/nats_per_byte']:.4f} nats per byte")
        if (entropy := run.datasets.unigram_entropy) is not None:
            lines[-1] += f" (unigram byte entropy of the text: {entropy:.4f})"
    return "\n".join(lines)


def memory_in_use() -> dict[str, float]:
    """Return the memory in use, keyed by metric tag. CPU devices do not report their memory."""
    found = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        found["memory/device_peak_bytes"] = float(max(peaks))
    with contextlib.suppress(OSError):  # not Linux
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["memory/host_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    return found


def _read(run: Run, step: int, row_tokens: int) -> dict[str, float]:
    """Return the number of epochs and tokens read from each source up to a step."""
    stream = run.datasets.train.stream
    counts = stream.samples_before(
        run.datasets.train.ramp.sequences_before(step + run.bad_step_monitor.offset)
    )
    found = {}
    for name, count in counts.items():
        epochs = count / len(stream.part(name).sequences)
        if not name:
            return {"train/epochs": epochs}
        found[source_tag(name, "epochs")] = epochs
        found[source_tag(name, "tokens")] = float(count * row_tokens)
    return found


class ThroughputMeter:
    """Measure time and throughput between reports."""

    def __init__(self, run: Run):
        self._run = run
        self._latest: dict[str, jax.Array] = {}
        self._sources = SourceSums(run.datasets.train.sources)
        mesh, config = run.steps.param_layout.mesh, run.config
        self._sequence_length = run.steps.shape[1]
        per_token = train_flops_per_token(describe(config.model), self._sequence_length)
        self._flops_per_token = per_token / mesh.size  # per device
        self._batch_size = run.steps.shape[0]
        self._idle = functools.cache(
            lambda rows: run.steps.with_batch_size(rows).train_schedule.idle_fraction()
        )
        self._peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._restart()

    def _restart(self) -> None:
        self._start, self._steps, self._data_wait_seconds = time.perf_counter(), 0, 0.0
        self._num_sequences, self._rollout_seconds = 0, 0.0

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and record the time spent waiting for data."""
        start = time.perf_counter()
        with self._run.phases.enter(DATA):
            batch = next(batches)
        self._data_wait_seconds += time.perf_counter() - start
        return batch

    def run_rollout(self, step: int) -> bool:
        """Generate the rollouts for a step if needed; return False if the run must stop."""
        run, position = self._run, step - 1 + self._run.bad_step_monitor.offset
        if run.rollouts is None or not run.rollouts.is_rollout_start(position):
            return True
        start = time.perf_counter()
        with self.paused(ROLLOUT):
            found = run.rollouts.generate(run.state.params, position, run.link.should_stop)
        self._rollout_seconds += time.perf_counter() - start
        return found

    def record_step(self, metrics: dict[str, jax.Array], rows: int) -> None:
        """Record a started step, and wait for the previous one to limit the steps in flight."""
        if self._latest:
            jax.block_until_ready(self._latest)
        self._sources.add_step(metrics)
        self._latest = metrics
        self._steps += 1
        self._num_sequences, self._batch_size = self._num_sequences + rows, rows

    @contextlib.contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Attribute the time inside the context to `phase` instead of to steps."""
        with self._run.phases.enter(STEP):
            jax.block_until_ready(self._latest)
        start = time.perf_counter()
        with self._run.phases.enter(phase):
            yield
        self._start += time.perf_counter() - start

    def report(self, step: int) -> None:
        """Write and print the metrics of the latest step, and the rates since the last report."""
        with self._run.phases.enter(STEP):
            metrics = {
                tag: float(value) for tag, value in self._latest.items() if tag not in BY_SOURCE
            }
            metrics |= self._sources.take_metrics()
        seconds = time.perf_counter() - self._start
        rate, run = (
            self._num_sequences * self._sequence_length / seconds,
            self._run,
        )  # tokens per second
        run.slow_data.record_steps(self._data_wait_seconds, seconds)
        seconds /= self._steps
        metrics |= {
            "train/tokens": float(
                run.bad_step_monitor.sequences_done(step) * self._sequence_length
            ),
            "perf/step_s": seconds,
            "perf/data_wait_s": self._data_wait_seconds / self._steps,
            "perf/tokens_per_s": rate,
            "perf/tflops_per_device": self._flops_per_token * rate / 1e12,
            "pipe/bubble_pct": 100 * self._idle(self._batch_size),
        }
        if run.datasets.train.ramp.stages:
            metrics["train/batch_size"] = float(self._batch_size)
        if run.rollouts is not None:
            metrics |= run.rollouts.metrics(step - 1 + run.bad_step_monitor.offset)
            metrics["perf/rollout_s"] = self._rollout_seconds / self._steps
        metrics |= _read(run, step, self._sequence_length)
        metrics |= run.teacher_source.take_metrics()
        metrics |= memory_in_use()
        if self._peak is not None:
            metrics["perf/mfu"] = self._flops_per_token * rate / self._peak
        self._run.events.write("time", step=step, seconds=self._run.phases.take_seconds())
        self._run.writer.write(step, metrics)
        self._run.console.step(step, metrics)
        self._restart()
