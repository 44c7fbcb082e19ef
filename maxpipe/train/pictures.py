"""The memory and the sharding of a run, for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxpipe.schedule.canvas import OVERVIEW_WIDTH, Box, Canvas, Label

_INK, _PALE, _COLOUR = "#1d2633", "#e8ecf1", "#4f7cac"
_MARGIN, _LINE, _TITLE, _TEXT = 16.0, 46.0, 20, 18
_MOST_ROWS = 200

MEMORY = (
    "Memory of the train step on one device, as compiled. arguments: parameters, optimizer state "
    "and batch; temporary: activations, gradients and gathered weights; results: those that do not "
    "replace an argument."
)
"""The description of the picture of `memory`."""


def memory(program: Any) -> Canvas:
    """Draw the compiled memory of one device's part of the step, a bar for each use.

    Its text is legible where TensorBoard shows it 300 pixels wide.
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
    title = f"memory of a device: {sum(sizes.values()) / 2**20:,.1f} MiB"
    canvas = Canvas(labels=[Label(_MARGIN, 30, title, _TITLE, _INK, "l", bold=True)])
    y = 42.0
    for name, size in sizes.items():
        about = f"{name} {size / 2**20:,.1f} MiB"
        canvas.labels.append(Label(_MARGIN, y + _TEXT, about, _TEXT, _INK, "l"))
        canvas.boxes.append(Box(_MARGIN, y + 25, width, 13, _PALE))
        canvas.boxes.append(Box(_MARGIN, y + 25, width * max(0, size) / longest, 13, _COLOUR))
        y += _LINE
    canvas.width, canvas.height = OVERVIEW_WIDTH, y + 8
    return canvas


def sharding(params: Any) -> list[tuple[str, str, str, str]]:
    """Return name, shape, shape on one device and splitting axes of each parameter.

    The first row has the titles.
    """
    rows = [("parameter", "shape", "on a device", "split over")]
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        mesh = array.sharding.mesh.shape
        axes = [_words(axis, mesh) for axis in array.sharding.spec]
        part = array.sharding.shard_shape(array.shape)
        rows.append((name, _shape(array.shape), _shape(part), ", ".join(axes)))
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], (f"and {len(rows) - _MOST_ROWS} more", "", "", "")]
    return rows


def _words(axis: str | Sequence[str] | None, mesh: Mapping[str, int]) -> str:
    """The axes that really split this dim."""
    axes = (axis,) if isinstance(axis, str) else axis or ()
    return " x ".join(f"{each} {mesh[each]}" for each in axes if mesh[each] > 1) or "-"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
