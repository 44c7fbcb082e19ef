"""TensorBoard summaries of a run: hyperparameters, text, and images such as a memory chart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import maxpipe
from maxpipe.config.load import to_dict, to_yaml
from maxpipe.config.schema import Config, flatten
from maxpipe.config.sections.log import TENSORBOARD
from maxpipe.io import redact
from maxpipe.io.formatting import pluralize
from maxpipe.schedule.canvas import INK, OVERVIEW_WIDTH, PALE, Box, Canvas, Label
from maxpipe.schedule.draw import summary
from maxpipe.schedule.pictures import draw_overview
from maxpipe.schedule.table import Schedule
from maxpipe.telemetry import writers
from maxpipe.telemetry.writers import MetricWriter
from maxpipe.train.run import Run

_COLOUR = "#4f7cac"
_MARGIN, _LINE, _TITLE, _TEXT = 16.0, 46.0, 20, 18
_MAX_ROWS = 200

MEMORY = (
    "Compiled memory of the train step on one device. arguments: parameters, optimizer state "
    "and batch; temporary: activations, gradients and gathered weights; results: outputs that do "
    "not reuse an argument's memory."
)
"""Caption of the image that `draw_memory` returns."""


def draw_memory(program: Any) -> Canvas:
    """Draw a bar chart of the compiled step's memory on one device.

    The labels are legible at TensorBoard's image width of 300 pixels.
    """
    stats = program.memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "results": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "program": stats.generated_code_size_in_bytes,
    }
    longest = max(1, *sizes.values())
    width = OVERVIEW_WIDTH - 2 * _MARGIN
    title = f"memory per device: {sum(sizes.values()) / 2**20:,.1f} MiB"
    canvas = Canvas(labels=[Label(_MARGIN, 30, title, _TITLE, INK, "l", bold=True)])
    y = 42.0
    for name, size in sizes.items():
        about = f"{name} {size / 2**20:,.1f} MiB"
        canvas.labels.append(Label(_MARGIN, y + _TEXT, about, _TEXT, INK, "l"))
        canvas.boxes.append(Box(_MARGIN, y + 25, width, 13, PALE))
        canvas.boxes.append(Box(_MARGIN, y + 25, width * max(0, size) / longest, 13, _COLOUR))
        y += _LINE
    canvas.width, canvas.height = OVERVIEW_WIDTH, y + 8
    return canvas


def sharding_table(params: Any) -> list[tuple[str, str, str, str]]:
    """Return the name, shape, per-device shape and sharding axes of each parameter.

    The first row contains the column titles.
    """
    rows = [("parameter", "shape", "shape per device", "sharded over")]
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        mesh = array.sharding.mesh.shape
        axes = [_describe_axes(axis, mesh) for axis in array.sharding.spec]
        part = array.sharding.shard_shape(array.shape)
        rows.append((name, _image_shape(array.shape), _image_shape(part), ", ".join(axes)))
    if len(rows) > _MAX_ROWS:
        rows = [*rows[:_MAX_ROWS], (f"and {len(rows) - _MAX_ROWS} more", "", "", "")]
    return rows


def _describe_axes(axis: str | Sequence[str] | None, mesh: Mapping[str, int]) -> str:
    """Return the mesh axes that shard a dim and have more than one device, each with its size."""
    axes = (axis,) if isinstance(axis, str) else axis or ()
    return " x ".join(f"{each} {mesh[each]}" for each in axes if mesh[each] > 1) or "-"


def _image_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


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


def write_run_summary(run: Run, banner: Mapping[str, str]) -> None:
    """Write text, hyperparameters and images to TensorBoard each time a run starts.

    A background thread writes the images, because drawing the first ones takes a second.
    """
    config, writer, steps = run.config, run.writer, run.steps
    writer.text("about", _table([("run", config.run.name), *key_settings(config, banner)]))
    writer.text("config", f"```yaml\n{to_yaml(redact.redact_value(config))}```")
    if jax.process_index() == 0 and TENSORBOARD in config.log.trackers:
        shapes = jax.tree.map(_shape, run.state.params)
        program = run.train_steps.get(steps.shape[0])
        arguments = (writer, config, steps.train_schedule, shapes, program)
        drawing = threading.Thread(target=_draw, args=arguments, name="drawing")
        drawing.start()
        run.session.stack.callback(drawing.join)


def key_settings(config: Config, banner: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names and values of the ten settings that best distinguish runs.

    TensorBoard sorts text summaries by tag, so `about` precedes `config`.
    """
    train, optim = config.train, config.optim
    tokens = train.batch_size * train.sequence_length
    ramp = ", smaller in the first steps (train.batch_ramp)" if train.batch_ramp else ""
    rate = f"{optim.learning_rate:g}, {optim.schedule}, {pluralize(optim.warmup_steps, 'step')}"
    trained = f"{train.objective}, adapters of rank {config.adapter.rank}"
    return [
        ("model", f"{config.model.family}, {banner['model']}"),
        ("objective", trained if config.adapter.rank else train.objective),
        ("training", banner["training"]),
        ("tokens per step", f"{train.batch_size} x {train.sequence_length} = {tokens:,}{ramp}"),
        ("data", banner["data"]),
        ("optimizer", optim.name),
        ("learning rate", f"{rate} of warm-up"),
        ("mesh", f"{banner['mesh']}; {banner['devices']}"),
        ("pipeline", banner["pipeline"]),
        ("version", f"maxpipe {maxpipe.__version__}, jax {jax.__version__}"),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its header."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _draw(
    writer: MetricWriter, config: Config, schedule: Schedule, params: Any, program: Any
) -> None:
    """Write the hyperparameters, the sharding table and the images."""
    values = flatten(to_dict(redact.redact_value(config)))
    chosen = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in values.items()
        if key.partition(".")[0] in _HYPERPARAMETERS
    }
    try:
        writer.show(lambda: writers.hyperparameters(chosen, config.run.name))
        writer.text("run/sharding", _table(sharding_table(params)))
        timeline, about = draw_overview(schedule), summary(schedule)
        writer.show(lambda: writers.image("run/timeline", timeline, about))
        if program is not None:
            bars = draw_memory(program)
            writer.show(lambda: writers.image("run/memory", bars, MEMORY))
    except Exception as error:  # a failure to draw an image must not stop the run
        _log.warning("TensorBoard: cannot write a summary of this run: %s", error)
