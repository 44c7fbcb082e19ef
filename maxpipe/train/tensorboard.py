"""Settings, texts and pictures of a run for TensorBoard."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import maxpipe
from maxpipe.config.keys import flat
from maxpipe.config.load import to_dict, to_yaml
from maxpipe.config.schema import Config
from maxpipe.io import redact
from maxpipe.io.text import counted
from maxpipe.schedule.draw import summary
from maxpipe.schedule.pictures import overview
from maxpipe.schedule.table import Schedule
from maxpipe.step.state import TrainState
from maxpipe.step.step import Steps
from maxpipe.telemetry import board
from maxpipe.telemetry.records import MetricWriter
from maxpipe.train import pictures

_log = logging.getLogger("maxpipe")
_HYPERPARAMETERS = (
    "model",
    "mesh",
    "pipeline",
    "train",
    "optim",
    "data",
    "tokenizer",
    "distill",
    "grpo",
)


def show(
    writer: MetricWriter,
    config: Config,
    steps: Steps,
    state: TrainState,
    program: Any,
    stack: contextlib.ExitStack,
    facts: Mapping[str, str],
) -> None:
    """Start writing TensorBoard's texts, settings and pictures of a run, once per start.

    A thread of its own writes pictures: the first take a second. `facts` are those of the banner.
    """
    writer.text("about", _table([("run", config.run.name), *essentials(config, facts)]))
    writer.text("config", f"```yaml\n{to_yaml(redact.within(config))}```")
    if jax.process_index() == 0 and config.log.tensorboard:
        shapes = jax.tree.map(_shape, state.params)
        arguments = (writer, config, steps.train_schedule, shapes, program)
        drawing = threading.Thread(target=_draw, args=arguments, name="drawing")
        drawing.start()
        stack.callback(drawing.join)


def essentials(config: Config, facts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the ten settings that tell runs apart: names and values.

    TensorBoard sorts texts by tag: `about` is before `config`.
    """
    train, optim = config.train, config.optim
    tokens = train.batch_size * train.sequence_length
    ramp = ", smaller in the first steps (train.batch_ramp)" if train.batch_ramp else ""
    rate = f"{optim.learning_rate:g}, {optim.schedule}, {counted(optim.warmup_steps, 'step')}"
    trained = f"{train.objective}, adapters of rank {config.adapter.rank}"
    return [
        ("model", f"{config.model.family}, {facts['model']}"),
        ("objective", trained if config.adapter.rank else train.objective),
        ("training", facts["training"]),
        ("tokens per step", f"{train.batch_size} x {train.sequence_length} = {tokens:,}{ramp}"),
        ("data", facts["data"]),
        ("optimizer", optim.name),
        ("learning rate", f"{rate} of warm-up"),
        ("mesh", f"{facts['mesh']}; {facts['devices']}"),
        ("pipeline", facts["pipeline"]),
        ("version", f"maxpipe {maxpipe.__version__}, jax {jax.__version__}"),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _draw(
    writer: MetricWriter, config: Config, schedule: Schedule, params: Any, program: Any
) -> None:
    """Settings, the table of shardings, and pictures."""
    values = flat(to_dict(redact.within(config)))
    chosen = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in values.items()
        if key.partition(".")[0] in _HYPERPARAMETERS
    }
    try:
        writer.show(lambda: board.hyperparameters(chosen, config.run.name))
        writer.text("run/sharding", _table(pictures.sharding(params)))
        timeline, about = overview(schedule), summary(schedule)
        writer.show(lambda: board.image("run/timeline", timeline, about))
        if program is not None:
            bars = pictures.memory(program)
            writer.show(lambda: board.image("run/memory", bars, pictures.MEMORY))
    except Exception as error:  # a failed picture must not stop the run
        _log.warning("TensorBoard lacks a picture of this run: %s", error)
