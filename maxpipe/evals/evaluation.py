"""Evaluation of a checkpoint or of a Hugging Face folder: parameters alone, under any layout.

Nothing is written, neither into the run's folder nor beside it, and no lock is taken: the run may
go on meanwhile, or belong to another user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.storage import run_folder
from maxpipe.config.check import check
from maxpipe.config.data import SPLITS, check_split
from maxpipe.config.rules import batch_shards
from maxpipe.config.schema import Config, PipelineConfig, TrainConfig
from maxpipe.config.training import unread_path
from maxpipe.data.corpus import compare
from maxpipe.data.loader import Loader, build_once_through
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.distributed import runtime
from maxpipe.distributed.phases import COMPILE, DATA_SET_UP, EVAL, RESTORE, Phases
from maxpipe.errors import ConfigError, NumbersError, Preempted
from maxpipe.evals.evaluate import Totals, evaluate
from maxpipe.io.files import full
from maxpipe.io.text import counted
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh, describe
from maxpipe.posttrain import pair_references
from maxpipe.restore.open_model import Chosen, choose, deferred, interrupts
from maxpipe.step.build import batches, fit_to_devices, shared_facts, steps_of

Say = Callable[[str], None]

# Settings of the run that do not change the loss of its parameters.
_LEFT_OUT = ("checkpoint", "guard", "launch", "log")
_SOURCE = (
    *("data.source", "data.path", "data.paths", "data.tfds_dir", "data.field", "data.template"),
    "data.mixture.",
)
_ORDER = ("order_version", "source", "documents", "source_digest", "seed", "validation_fraction")
"""Entries of a fingerprint that decide which documents are for validation."""
_REPORT_SECONDS = 10.0


class _Evaluated(TypedDict):
    """What was evaluated."""

    checkpoint: str
    step: int | None
    source: str
    split: str
    batches: int
    all_batches: int
    sources: dict[str, float]
    """Loss of each source of a mixture that was read."""
    sequence_length: int
    mesh: str


class TextReport(_Evaluated):
    """The result. Losses are means over target `tokens`, or over `bytes` of their text."""

    tokens: int
    bytes: int
    nats_per_token: float
    nats_per_byte: float
    bits_per_byte: float
    perplexity: float


class PairReport(_Evaluated):
    """The result with `train.objective=preference`."""

    pairs: int
    preference: dict[str, float]
    """Mean loss over pairs, and what the objective reports."""


Report = TextReport | PairReport


def evaluate_model(
    named: Address | Path, inputs: Sequence[str], split: str | None, say: Say
) -> Report | None:
    """Loss of a model, by default of its run's own evaluation; None in all processes but one.

    `inputs` are files and overrides that change the model's own config. `split` says which
    documents count: by default those for validation. Of a source that `inputs` name it is all, and
    of these all batches. Weights without a run need one.
    `say` is called with progress messages.

    Raises:
        ConfigError: there is no such model, or the config does not fit it or the devices.
        StorageError: the checkpoint is damaged.
        NumbersError: the loss is not finite.
        Preempted: the processes were asked to stop.
    """
    chosen = choose(named, inputs, _folder if isinstance(named, Path) else _saved)
    _check_documents(chosen)
    is_other = chosen.is_given(*_SOURCE)
    phases = Phases()
    with _processes(chosen.loaded.config, phases) as stops:
        if jax.process_index():
            say = _silent
        for each in chosen.loaded.cautions:
            say(f"warning: {each.line}")
        config = _fitted(chosen, say)
        split = split or ("all" if is_other else "validation")
        with phases.enter(DATA_SET_UP):
            loader, tokenizer = _documents(chosen, config, split, phases)
        with contextlib.closing(loader):
            if not is_other:
                _tell_other_documents(chosen, loader, say)
            steps = steps_of(config, build_mesh(config.mesh), tokenizer.byte_lengths)
            with phases.enter(RESTORE):
                say(f"restoring the parameters of {chosen.name}")
                params = steps.stack_params(chosen.params(steps))
            if pair_references.are_needed(steps):
                run_dir = Path(named.run_dir) if isinstance(named, Address) else named
                pair_references.attach_stored(run_dir, loader)
            with phases.enter(COMPILE):
                say("compiling")
                step = steps.compile_eval(config.eval.batch_size)
            count = loader.num_batches
            if not is_other or chosen.is_given("eval.batches"):
                count = min(config.eval.batches or count, count)
            ready = batches(steps.batch_sharding, loader, 0, count)
            with phases.enter(EVAL), ready as source, _in_batches(config, stops) as stops:
                reported = _reported(source, count, phases, say)
                totals = evaluate(step, params, reported, stops, loader.sources)
    if totals is None:
        raise _stopped(chosen)
    mesh = describe(steps.partition.mesh)
    found = _report(chosen, totals, loader, split, count, mesh)
    return None if jax.process_index() else found


def _check_documents(chosen: Chosen) -> None:
    """Raises ConfigError where no documents are named, or such as are not read."""
    loaded = chosen.loaded
    if not chosen.is_given(*_SOURCE) and not chosen.is_trained:
        raise ConfigError.one(
            "data",
            None,
            f"must be named: {chosen.name} has weights alone, and no documents for validation.",
            "Give text with --data FILE_OR_FOLDER, or with data.source and data.path.",
        )
    if chosen.is_given("data.path") and (found := unread_path(loaded.config, loaded.origins)):
        raise ConfigError(found)


def _stopped(chosen: Chosen) -> BaseException:
    """What to raise when the processes were asked to stop."""
    if chosen.loaded.config.runtime.num_processes == 1:
        return KeyboardInterrupt()
    return Preempted(
        f"{chosen.name}: evaluation was asked to stop\n"
        "  Nothing was changed.\n"
        "  Start the same command again."
    )


def _saved(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint's config says how it is evaluated."""
    found = {section: keys for section, keys in config.items() if section not in _LEFT_OUT}
    if isinstance(train := found.get("train"), Mapping):
        # Smaller batches of the training do not bind the microbatches that evaluation has here.
        found["train"] = {key: value for key, value in train.items() if key != "batch_ramp"}
    return found


def _folder(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a Hugging Face folder, which may be made for very long rows."""
    length = min(config["train"]["sequence_length"], TrainConfig().sequence_length)
    return {**config, "train": {**config["train"], "sequence_length": length}}


@contextlib.contextmanager
def _in_batches(config: Config, stops: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """How to know whether to stop while devices compute: Python must not end then."""
    if config.runtime.num_processes > 1:
        yield stops
    else:
        with deferred() as asked:
            yield lambda: asked() or stops()


@contextlib.contextmanager
def _processes(config: Config, phases: Phases) -> Iterator[Callable[[], bool]]:
    """Devices, and other processes if there are any; tells whether all were asked to stop."""
    if config.runtime.num_processes == 1:
        with interrupts() as asked:
            runtime.start(config.runtime, config.mesh.cpu_devices)
            yield asked
    else:
        facts = shared_facts(config)
        where = run_folder(config.run)
        joined = runtime.joined(config.runtime, config.mesh.cpu_devices, phases, facts, where)
        with joined as link:
            yield link.stops_here


def _silent(text: str) -> None:
    """Progress messages of processes other than the first are dropped."""


def _fitted(chosen: Chosen, say: Say) -> Config:
    """The config with a mesh that the devices here allow: the run's own, or all on one axis."""
    try:
        return fit_to_devices(chosen.loaded).config
    except ConfigError:
        if chosen.is_given("mesh.ici_", "mesh.dcn_", "pipeline."):
            raise
    config, count = chosen.loaded.config, jax.device_count()
    if not chosen.is_trained and not chosen.is_given("train.batch_size", "eval.batch_size"):
        rows = math.ceil(config.train.batch_size / count) * count
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, batch_size=rows)
        )
    own = " x ".join(f"{axis} {size}" for axis, size in _sizes(config.mesh).items() if size != 1)
    simple = [_on_one_axis(config, axis, count) for axis in ("fsdp", "data")]
    problems = [check(each, chosen.loaded.origins) for each in simple]
    axis = next((axis for axis, found in enumerate(problems) if not found), None)
    if axis is None:
        first = problems[0][0]
        raise ConfigError.one(
            "mesh",
            own or "one device",
            f"is the run's and does not fit the {counted(count, 'device')} here, nor does fsdp "
            f"{count}: {first.where.rpartition(': ')[2]} {first.rule}",
            "Give a mesh for these devices, and a pipeline that fits it: mesh.ici_fsdp=..., "
            "pipeline.microbatches=1, eval.batch_size=...",
        )
    if chosen.is_trained:
        say(
            f"the run's mesh ({own or 'one device'}) does not fit the {counted(count, 'device')} "
            f"here: evaluating with {('fsdp', 'data')[axis]} {count}, without a pipeline"
        )
    return simple[axis]


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    """Sizes of axes by the names of their keys."""
    values = dataclasses.asdict(mesh)
    return {key: size for key, size in values.items() if key.startswith(("ici_", "dcn_"))}


def _on_one_axis(config: Config, axis: str, count: int) -> Config:
    """The config on one stage, with microbatches no larger than before."""
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
    chosen: Chosen, config: Config, split: str, phases: Phases
) -> tuple[Loader, Tokenizer]:
    check_split(split, (*SPLITS, *config.data.validation))
    return build_once_through(
        config.data,
        config.tokenizer,
        split,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        sequence_length=config.train.sequence_length,
        eval_batch_size=config.eval.batch_size,
        cache_dir=str(full(config.run.dir, "run.dir") / ".index"),
        moved=phases.progress,
        fit=chosen.fitted,
    )


def _tell_other_documents(chosen: Chosen, loader: Loader, say: Say) -> None:
    for name, before, now in compare(chosen.fingerprint, loader.fingerprint()):
        if name in _ORDER:
            say(
                f"warning: data: {name} was {before!r} when step {chosen.step} was saved and "
                f"is {now!r}: documents of the training may be among those for validation"
            )


def _reported(source: Iterator[Any], count: int, phases: Phases, say: Say) -> Iterator[Any]:
    """The same batches, with progress messages."""
    begin = last = time.monotonic()
    for number, batch in enumerate(source):
        phases.progress(number)
        yield batch
        now = time.monotonic()
        if now - last > _REPORT_SECONDS:
            last, left = now, (now - begin) / (number + 1) * (count - number - 1)
            say(f"batch {number + 1} of {count}, {left:.0f} s left")


def _report(
    chosen: Chosen, totals: Totals, loader: Loader, split: str, count: int, mesh: str
) -> Report:
    metrics = totals.metrics
    loss = metrics["eval/loss"]
    if not totals.targets:
        raise ConfigError.one(
            "data",
            loader.fingerprint()["source"],
            "has no token whose loss counts: each document needs two tokens in one sequence.",
            "Give documents with text, or a larger train.sequence_length.",
        )
    if not math.isfinite(loss):
        raise NumbersError(
            f"{chosen.name}: the loss is {loss}\n"
            "  its parameters give numbers that are not finite.\n"
            "  Evaluate an earlier step, or with model.compute_dtype=float32."
        )
    found: _Evaluated = {
        "checkpoint": chosen.name,
        "step": chosen.step,
        "source": loader.fingerprint()["source"],
        "split": split,
        "batches": count,
        "all_batches": loader.num_batches,
        "sources": {
            name: each.loss / each.targets
            for name, each in totals.of_sources.items()
            if each.targets
        },
        "sequence_length": loader.sequences.sequence_length,
        "mesh": mesh,
    }
    if not totals.of_text:
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
