"""What TensorBoard shows of a run beside its numbers: settings, charts and pictures."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import jax

from maxpipe.boundary import redact
from maxpipe.config.keys import flat
from maxpipe.config.load import to_dict, to_yaml
from maxpipe.config.schema import Config
from maxpipe.schedule.pictures import drawing as timeline
from maxpipe.schedule.table import Schedule
from maxpipe.telemetry import board
from maxpipe.telemetry.records import MetricWriter
from maxpipe.train import pictures
from maxpipe.train.state import TrainState
from maxpipe.train.step import Steps
from maxpipe.words import counted

_log = logging.getLogger("maxpipe")
_MOST_TICKS = 160
"""Of the timeline that TensorBoard shows."""
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
) -> None:
    """Starts writing TensorBoard's charts, settings and pictures of a run, once per start.

    In a thread of its own: the first pictures take a second.
    """
    writer.text("config", f"```yaml\n{to_yaml(redact.within(config))}```")
    if jax.process_index() == 0 and config.log.tensorboard:
        shapes = jax.tree.map(_shape, state.params)
        arguments = (writer, config, steps.train_schedule, shapes, program)
        drawing = threading.Thread(target=_draw, args=arguments, name="drawing")
        drawing.start()
        stack.callback(drawing.join)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _draw(
    writer: MetricWriter, config: Config, schedule: Schedule, params: Any, program: Any
) -> None:
    """Charts, settings and pictures."""
    values = flat(to_dict(redact.within(config)))
    chosen = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in values.items()
        if key.partition(".")[0] in _HYPERPARAMETERS
    }
    try:
        writer.show(board.charts)
        writer.show(lambda: board.hyperparameters(chosen, config.run.name))
        if schedule.num_ticks <= _MOST_TICKS:
            writer.show(lambda: board.image("run/timeline", timeline(schedule)))
        else:
            words = f"The step has {counted(schedule.num_ticks, 'tick')}, too many to draw here: "
            words += "`maxpipe schedule CONFIG --perfetto FILE` writes all of them."
            writer.text("run/timeline", words)
        if program is not None:
            writer.show(lambda: board.image("run/memory", pictures.memory(program)))
        writer.show(lambda: board.image("run/sharding", pictures.sharding(params)))
    except Exception as error:  # a failed picture must not stop the run
        _log.warning("TensorBoard lacks a picture of this run: %s", error)
