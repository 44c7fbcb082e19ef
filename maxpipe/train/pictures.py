"""Pictures for TensorBoard: a run's timeline, memory and sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxpipe.schedule.canvas import Box, Canvas, Label, text_width

_INK, _PALE, _COLOUR = "#1d2633", "#e8ecf1", "#4f7cac"
_LEFT, _BAR_WIDTH, _LINE = 44.0, 480.0, 24.0
_MOST_ROWS = 200


def memory(program: Any) -> Canvas:
    """The compiler's bytes for one device's part of the step, one bar for each use."""
    found = program.memory_analysis()
    sizes = {
        "arguments: parameters, optimizer state, batch": found.argument_size_in_bytes,
        "temporary: activations, gradients, gathered weights": found.temp_size_in_bytes,
        "results that take no argument's place": found.output_size_in_bytes
        - found.alias_size_in_bytes,
        "program": found.generated_code_size_in_bytes,
    }
    longest = max(1, *sizes.values())
    title = f"memory of the train step on one device: {sum(sizes.values()) / 2**20:,.1f} MiB"
    canvas = Canvas(labels=[Label(_LEFT, 27, title, 15, _INK, "l", bold=True)])
    y = 44.0
    for name, size in sizes.items():
        canvas.boxes.append(Box(_LEFT, y, _BAR_WIDTH, 14, _PALE))
        canvas.boxes.append(Box(_LEFT, y, _BAR_WIDTH * max(0, size) / longest, 14, _COLOUR))
        about = f"{size / 2**20:,.1f} MiB  {name}"
        canvas.labels.append(Label(_LEFT + _BAR_WIDTH + 12, y + 12, about, 12, _INK, "l"))
        y += _LINE
    return _sized(canvas, y)


def sharding(params: Any) -> Canvas:
    """Shape of each parameter, shape of one device's part, and the mesh axes that split it."""
    rows = [("parameter", "shape", "on a device", "split over")]
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        mesh = array.sharding.mesh.shape
        axes = [_words(axis, mesh) for axis in array.sharding.spec]
        part = array.sharding.shard_shape(array.shape)
        rows.append((name, _shape(array.shape), _shape(part), ", ".join(axes)))
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], (f"and {len(rows) - _MOST_ROWS} more", "", "", "")]
    widths = [max(text_width(row[column], 12) for row in rows) + 24 for column in range(4)]
    canvas = Canvas()
    y = 32.0
    for number, row in enumerate(rows):
        x = _LEFT
        for text, width in zip(row, widths, strict=True):
            canvas.labels.append(Label(x, y, text, 12, _INK, "l", bold=number == 0))
            x += width
        y += _LINE
    return _sized(canvas, y)


def _words(axis: str | Sequence[str] | None, mesh: Mapping[str, int]) -> str:
    """The axes that really split this dim."""
    axes = (axis,) if isinstance(axis, str) else axis or ()
    return " x ".join(f"{each} {mesh[each]}" for each in axes if mesh[each] > 1) or "-"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _sized(canvas: Canvas, y: float) -> Canvas:
    rights = [each.x + text_width(each.text, each.size) for each in canvas.labels]
    rights += [box.x + box.width for box in canvas.boxes]
    canvas.width, canvas.height = round(max(rights) + 44), round(y + 10)
    return canvas
