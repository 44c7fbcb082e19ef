"""Evaluation of a checkpoint: restored without its optimizer, under any layout.

Nothing is written, neither into the run's folder nor beside it, and no lock is taken: the run may
go on meanwhile, or belong to another user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax

from maxpipe.boundary.files import full
from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.storage import run_folder
from maxpipe.config.check import check
from maxpipe.config.schema import Config, MeshConfig, PipelineConfig
from maxpipe.data.loader import Loader, Split, build_once_through, compare
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError, NumbersError, Preempted
from maxpipe.parallel.mesh import build_mesh, describe
from maxpipe.processes import runtime
from maxpipe.processes.phases import COMPILE, DATA_SET_UP, EVAL, RESTORE, Phases
from maxpipe.train.build import batches, steps_of
from maxpipe.train.chosen import Chosen, choose, interrupts
from maxpipe.train.evaluate import Totals, evaluate
from maxpipe.train.run import fit_to_devices, shared_facts
from maxpipe.words import counted

Say = Callable[[str], None]

# Settings of the run that do not change the loss of its parameters.
_LEFT_OUT = ("checkpoint", "guard", "launch", "log")
_SOURCE = ("data.source", "data.path", "data.tfds_dir", "data.field")
_ORDER = ("order_version", "source", "documents", "source_digest", "seed", "validation_fraction")
"""Entries of a fingerprint that decide which documents are for validation."""
_REPORT_SECONDS = 10.0


class Report(TypedDict):
    """The result. Losses are means over target `tokens`, or over `bytes` of their text."""

    checkpoint: str
    step: int
    source: str
    split: Split
    batches: int
    all_batches: int
    tokens: int
    bytes: int
    nats_per_token: float
    nats_per_byte: float
    perplexity: float
    mesh: str


def evaluate_checkpoint(
    address: Address, inputs: Sequence[str], split: Split | None, say: Say
) -> Report | None:
    """Loss of a checkpoint, by default of its run's own evaluation; None in all processes but one.

    `inputs` are files and overrides that change the checkpoint's own config. `split` says which
    documents count: by default those for validation. Of a source that `inputs` name it is all, and
    of these all batches.
    `say` is called with progress messages.

    Raises:
        ConfigError: there is no such checkpoint, or the config does not fit it or the devices.
        StorageError: the checkpoint is damaged.
        NumbersError: the loss is not finite.
        Preempted: the processes were asked to stop.
    """
    chosen = choose(address, inputs, _saved)
    phases = Phases()
    with _processes(chosen.loaded.config, phases) as stops:
        if jax.process_index():
            say = _silent
        for each in chosen.loaded.cautions:
            say(f"warning: {each.line}")
        config = _fitted(chosen, say)
        is_other = chosen.is_given(*_SOURCE)
        split = split or ("all" if is_other else "validation")
        with phases.enter(DATA_SET_UP):
            loader, tokenizer = _documents(config, split, phases)
        with contextlib.closing(loader):
            chosen.must_have(tokenizer)
            if not is_other:
                _tell_other_documents(chosen, loader, say)
            steps = steps_of(config, build_mesh(config.mesh), tokenizer.byte_lengths)
            with phases.enter(RESTORE):
                say(f"restoring the parameters of {chosen.name}")
                params = steps.stack_params(chosen.params(steps))
            with phases.enter(COMPILE):
                say("compiling")
                step = steps.compile_eval(config.eval.batch_size)
            count = loader.num_batches
            if not is_other or chosen.is_given("eval.batches"):
                count = min(config.eval.batches or count, count)
            with phases.enter(EVAL), batches(steps.batch_sharding, loader, 0, count) as source:
                reported = _reported(source, count, phases, say)
                totals = evaluate(step, params, reported, stops)
    if totals is None and chosen.loaded.config.runtime.num_processes == 1:
        raise KeyboardInterrupt
    if totals is None:
        raise Preempted(
            f"{chosen.name}: evaluation was asked to stop\n"
            "  Nothing was changed.\n"
            "  Start the same command again."
        )
    mesh = describe(steps.partition.mesh)
    found = _report(chosen, totals, loader, split, count, mesh)
    return None if jax.process_index() else found


def _saved(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a checkpoint's config says how it is evaluated."""
    return {section: keys for section, keys in config.items() if section not in _LEFT_OUT}


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
    """The config with a mesh that the devices here allow: the run's own, or fsdp over all."""
    try:
        return fit_to_devices(chosen.loaded).config
    except ConfigError:
        if chosen.is_given("mesh.ici_", "mesh.dcn_", "pipeline."):
            raise
    config, count = chosen.loaded.config, jax.device_count()
    simple = _on_fsdp(config, count)
    problems = check(simple, chosen.loaded.origins)
    own = " x ".join(f"{axis} {size}" for axis, size in _sizes(config.mesh).items() if size != 1)
    if problems:
        raise ConfigError.one(
            "mesh",
            own or "one device",
            f"is the run's and does not fit the {counted(count, 'device')} here, nor does fsdp "
            f"{count}: {problems[0].where.rpartition(': ')[2]} {problems[0].rule}",
            "Give a mesh for these devices, and a pipeline that fits it: mesh.ici_fsdp=..., "
            "pipeline.microbatches=1, eval.batch_size=...",
        )
    say(
        f"the run's mesh ({own or 'one device'}) does not fit the {counted(count, 'device')} here: "
        f"evaluating with fsdp {count}, without a pipeline"
    )
    return simple


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    """Sizes of axes by the names of their keys."""
    values = dataclasses.asdict(mesh)
    return {key: size for key, size in values.items() if key.startswith(("ici_", "dcn_"))}


def _on_fsdp(config: Config, count: int) -> Config:
    """The config on one stage, with microbatches no larger than before."""
    shards = math.prod(
        size for key, size in _sizes(config.mesh).items() if key.endswith(("_data", "_fsdp"))
    )
    largest = max(1, config.train.batch_size // (shards * config.pipeline.microbatches))
    mine = max(1, config.train.batch_size // count)
    microbatches = next(
        each for each in range(1, mine + 1) if mine % each == 0 and mine // each <= largest
    )
    mesh = MeshConfig(
        ici_fsdp=count, cpu_devices=config.mesh.cpu_devices, axis_rules=config.mesh.axis_rules
    )
    pipeline = PipelineConfig(
        microbatches=microbatches, weight_gather=config.pipeline.weight_gather
    )
    return dataclasses.replace(config, mesh=mesh, pipeline=pipeline)


def _documents(config: Config, split: Split, phases: Phases) -> tuple[Loader, Tokenizer]:
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
    )


def _tell_other_documents(chosen: Chosen, loader: Loader, say: Say) -> None:
    saved = chosen.facts.data.get("fingerprint", {})
    for name, before, now in compare(saved, loader.fingerprint()):
        if name in _ORDER:
            say(
                f"warning: data: {name} was {before!r} when step {chosen.facts.step} was saved and "
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
    chosen: Chosen, totals: Totals, loader: Loader, split: Split, count: int, mesh: str
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
    return {
        "checkpoint": chosen.name,
        "step": chosen.facts.step,
        "source": loader.fingerprint()["source"],
        "split": split,
        "batches": count,
        "all_batches": loader.num_batches,
        "tokens": int(totals.targets),
        "bytes": int(totals.bytes),
        "nats_per_token": loss,
        "nats_per_byte": metrics["eval/nats_per_byte"],
        "perplexity": math.exp(min(loss, 700.0)),
        "mesh": mesh,
    }
