"""A teacher: a model that says of each token which ones are likely next, on a mesh of its own.

It has its own model section, mesh and pipeline, and no state but weights: what it says of a batch
follows from the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxpipe.config.check import check, where
from maxpipe.config.load import Loaded, to_dict
from maxpipe.config.schema import Config, TokenizerConfig
from maxpipe.data.loader import Batch
from maxpipe.data.prepared.logits import TeacherEntry
from maxpipe.data.tokenizer import Tokenizer, open_tokenizer
from maxpipe.errors import ConfigError, Problem
from maxpipe.huggingface.named import named
from maxpipe.huggingface.source import folder_of
from maxpipe.objectives.distill import TEACHER_IDS, TEACHER_LOGPROBS
from maxpipe.parallel.mesh import Device, build_mesh, describe, resolve
from maxpipe.parallel.sharding import place_rows, rows_by_process
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.restore.open_model import Chosen, choose
from maxpipe.step.build import devices_of, steps_of
from maxpipe.step.step import Steps

KEY, _LAYOUT = "distill.teacher", "distill.layout"
_PROBE = "The sea is wide; 1234.5 = x_i + {y}?\n\tNaïve façade, größer, 東京, Привет 🙂"
"""Text of which tokenizers with other tokens make other ids."""
_OF_LAYOUT = ("mesh.", "pipeline.", "train.")

Answer = dict[str, jax.Array]
"""Arrays of `Distill.arrays` for a batch."""


@dataclass(frozen=True)
class Teacher:
    """A model on its mesh, and how many tokens it is asked for."""

    name: str
    steps: Steps
    params: Any
    digest: str
    """Of its parameters, wherever they are."""
    top_k: int
    temperature: float
    _programs: dict[int, Any] = field(default_factory=dict)

    @property
    def entry(self) -> TeacherEntry:
        """By which it is known again."""
        return {"name": self.name, "digest": self.digest}

    @property
    def mesh(self) -> str:
        """In words."""
        return describe(self.steps.partition.mesh)

    @property
    def sharding(self) -> NamedSharding:
        """Of its batches."""
        return self.steps.batch_sharding

    @cached_property
    def _reads(self) -> list[str]:
        return list(self.steps.abstract_batch())

    def compile(self, count: int, wanted: NamedSharding | None = None) -> None:
        """Compiles it for batches of this number of rows.

        A process whose devices need rows in `wanted` that its teacher's devices lack finds them
        there all the same: then every device has all answers.
        """
        if count not in self._programs:
            ask = partial(LossHead.top, count=self.top_k, temperature=self.temperature)
            everywhere = wanted is not None and self._lacks(wanted, count)
            self._programs[count] = self.steps.compile_rows(ask, count, everywhere=everywhere)

    def _lacks(self, wanted: NamedSharding, count: int) -> bool:
        """Whether any process has other rows here than it needs."""
        held = rows_by_process(self.sharding, count)
        needed = rows_by_process(wanted, count)
        return any(not np.isin(rows, held[process]).all() for process, rows in needed.items())

    def place(self, host: Batch, rows: np.ndarray, count: int) -> dict[str, jax.Array]:
        """What it reads of a batch of `count` rows, of which these are in `host`."""
        given = {name: host[name] for name in self._reads}
        return place_rows(given, rows, count, self.sharding)

    def ask(self, batch: Mapping[str, jax.Array]) -> Answer:
        """Begins to compute what it says of a batch; that is on its own mesh."""
        count = len(batch["tokens"])
        logprobs, ids = self._programs[count](self.params, batch)
        return {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}


# Opening one.


def open_teacher(loaded: Loaded, tokenizer: Tokenizer) -> Teacher:
    """The teacher that the config names, with its parameters on its devices.

    Raises:
        ConfigError: there is no such model, it has another vocabulary, or its layout does not fit.
        StorageError: it is damaged.
    """
    config = loaded.config
    key = where(KEY, loaded.origins)
    students, devices = devices_of(config)
    chosen = _chosen(loaded, key, same=len(devices) == len(students))
    _check_vocabulary(loaded, chosen, tokenizer)
    with_mesh = _fitted(chosen.loaded, devices)
    steps = steps_of(with_mesh, build_mesh(with_mesh.mesh, devices), tokenizer.byte_lengths)
    params = jax.block_until_ready(steps.stack_params(chosen.params(steps)))
    own, digest = config.distill, steps.digest(params)
    return Teacher(chosen.name, steps, params, digest, own.top_k, own.temperature)


def _chosen(loaded: Loaded, key: str, *, same: bool) -> Chosen:
    """The model, with rows as the student's, and mesh and pipeline as `distill.layout` says."""
    config = loaded.config

    def section(saved: Mapping[str, Any]) -> dict[str, Any]:
        rows = {"batch_size": config.train.batch_size}
        rows["sequence_length"] = config.train.sequence_length
        found = {name: saved[name] for name in ("model", "adapter") if name in saved}
        found["train"] = {"steps": 1, **rows}
        found["tokenizer"] = to_dict(config)["tokenizer"]
        return {**found, **_layout(config, same=same)}

    model = named(config.distill.teacher, where=key, runs=config.run.dir)
    try:
        return choose(model, config.distill.layout, section)
    except ConfigError as error:
        raise _in_layout(error) from error


def _layout(config: Config, *, same: bool) -> dict[str, Any]:
    """Sections `mesh` and `pipeline` before `distill.layout`."""
    mesh: dict[str, Any] = {"cpu_devices": config.mesh.cpu_devices}
    if config.distill.layout:
        return {"mesh": mesh}
    if not same:
        return {"mesh": {**mesh, "ici_fsdp": -1}}
    sizes = dataclasses.asdict(config.mesh)
    mesh |= {key: size for key, size in sizes.items() if key.startswith(("ici_", "dcn_"))}
    return {"mesh": mesh, "pipeline": {"microbatches": config.pipeline.microbatches}}


def _fitted(loaded: Loaded, devices: Sequence[Device]) -> Config:
    """The config on these devices.

    Raises:
        ConfigError: the mesh does not fit them, or a rule that depends on it.
    """
    try:
        mesh = resolve(loaded.config.mesh, devices)
        config = dataclasses.replace(loaded.config, mesh=mesh)
        if problems := check(config, loaded.origins):
            raise ConfigError(problems)
    except ConfigError as error:
        raise _in_layout(error) from error
    return config


def _in_layout(error: ConfigError) -> ConfigError:
    """The same where it is about the teacher's layout: its keys are those of other sections."""

    def placed(problem: Problem) -> Problem:
        key = problem.where.rpartition(": ")[2]
        if not f"{key}.".startswith(_OF_LAYOUT):
            return problem
        _, given, rule, action = astuple(problem)
        return Problem(f"{_LAYOUT}: {key}", given, rule, f"For the teacher alone: {action}")

    return ConfigError([placed(problem) for problem in error.problems])


def _check_vocabulary(loaded: Loaded, chosen: Chosen, own: Tokenizer) -> None:
    """Raises ConfigError unless both have the same ids for the same tokens."""
    mine, its = (each.config.model.vocab_size for each in (loaded, chosen.loaded))
    key = where(KEY, loaded.origins)
    if mine != its:
        raise ConfigError.one(
            key,
            chosen.name,
            f"must have the vocabulary of the student: it has {its} ids, and model.vocab_size is "
            f"{mine}.",
            f"Set model.vocab_size={its} with the tokenizer of the teacher, or name another one.",
        )
    chosen.must_have(own)
    if (folder := folder_of(loaded.config.distill.teacher)) is None:
        return
    try:
        other = open_tokenizer(TokenizerConfig(kind="auto", path=folder))
    except ConfigError:  # a folder without a tokenizer says nothing
        return
    if not np.array_equal(other.encode(_PROBE), own.encode(_PROBE)):
        raise ConfigError.one(
            key,
            chosen.name,
            "must have the tokenizer of the student: the one in its folder gives other ids.",
            f"Set tokenizer.kind=auto and tokenizer.path={folder}, or name another teacher.",
        )
