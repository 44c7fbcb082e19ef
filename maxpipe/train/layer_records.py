"""Record layer statistics during training: compiled steps, `layers.jsonl`, and TensorBoard.

TensorBoard shows each statistic as a heat map of layers and steps, because one chart per layer and
statistic would be hundreds of charts. A background thread draws the heat maps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.config.config_files import LAYERS_FILE
from maxpipe.config.sections.layer_stats import LayerStatsConfig
from maxpipe.io import files
from maxpipe.io.typed_json import check_type, parse_json
from maxpipe.models.spec import Model
from maxpipe.step.layer_statistics import LayerStatistics, largest_values, summarize
from maxpipe.telemetry import writers
from maxpipe.telemetry.writers import MAX_LAYERS_LINE_BYTES, MetricWriter

_log = logging.getLogger("maxpipe")

_MAX_COLUMNS = 128
"""Maximum number of records in a heat map; older records are thinned out."""
_COLOURS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Colours from the smallest to the largest value, from the colour map viridis."""
_ABOUT = "One row per layer, first layer at the top, and one column per recorded step."
_MISSING, _PAPER, _INK = "#dddddd", "#ffffff", "#222222"
_CELL, _MARGIN, _LINE = 8, 6, 14
_LOG_RATIO = 30.0
"""Ratio of largest to smallest value above which colours are proportional to the logarithm."""


class LayerRecorder:
    """Train steps that record layer statistics every few steps, and the statistics' records."""

    def __init__(
        self, config: LayerStatsConfig, model: Model, train_steps: Mapping[int, Any], run_dir: Path
    ):
        """Initialize the recorder; `train_steps` are compiled steps, keyed by batch size."""
        self.train_steps = train_steps
        self._every = config.every if train_steps else 0
        self._model, self._run_dir = model, run_dir
        self._pending: tuple[int, LayerStatistics] | None = None
        self._metrics: dict[str, float] = {}
        self._heat_maps: HeatMaps | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step records statistics."""
        return bool(self._every) and step % self._every == 0

    def add(self, step: int, statistics: LayerStatistics) -> None:
        """Add the statistics of a step, which may not have been computed yet."""
        self._pending = step, statistics

    def discard(self) -> None:
        """Discard the statistics that have not been written, before a rollback."""
        self._pending, self._heat_maps, self._metrics = None, None, {}

    def flush(self, writer: MetricWriter) -> None:
        """Write the statistics that have been added, after waiting for their step."""
        if self._pending is None:
            return
        (step, statistics), self._pending = self._pending, None
        record = summarize(self._model, statistics)
        self._metrics = largest_values(record)
        writer.layers(step, record)
        if not writer.shows_tensorboard:
            return
        if self._heat_maps is None:
            self._heat_maps = HeatMaps(self._run_dir / LAYERS_FILE, before=step)
        self._heat_maps.add(step, record, writer)

    def take_metrics(self, writer: MetricWriter) -> dict[str, float]:
        """Return the metrics of a record that was added since the last call; empty without one."""
        self.flush(writer)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self, writer: MetricWriter) -> None:
        """Write the statistics of the last step if they have been computed, and draw the last heat
        maps.
        """
        if self._pending is not None:
            leaves = jax.tree.leaves(self._pending[1])
            if all(leaf.is_ready() for leaf in leaves):  # the step may have failed
                self.flush(writer)
        if self._heat_maps is not None:
            self._heat_maps.close(writer)


class HeatMaps:
    """Images of all statistics, with one row per layer and one column per record."""

    def __init__(self, path: Path, before: int):
        """Initialize the images with the records in `layers.jsonl` of steps before `before`."""
        self._steps: list[int] = []
        self._values: dict[str, list[Sequence[float | None]]] = {}
        self._num_records, self._is_drawn = 0, True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="heat maps")
        self._drawing: Future[None] | None = None
        try:
            lines = partial(files.read_lines, path, longest=MAX_LAYERS_LINE_BYTES)
            count = sum(1 for _ in lines())
            stride = max(1, count // _MAX_COLUMNS)
            for number, (_, line) in enumerate(lines()):
                if (count - 1 - number) % stride:  # parsing all records of a long run is slow
                    continue
                record = parse_json(line, dict[str, Any])
                step = check_type(record["step"], int)
                values = check_type(record["values"], dict[str, list[float | None]])
                if step < before:
                    self._append(step, values)
            self._num_records = max(count - 1, 0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s: heat maps start at step %d: %s", path, before, error)

    def add(self, step: int, record: Mapping[str, Any], writer: MetricWriter) -> None:
        """Add a record, write its histograms, and draw the images at a few of the records."""
        self._append(step, record["values"])
        self._is_drawn = False
        histograms = record.get("histograms", {})
        # The first records are drawn early; later, drawing costs a small share of the steps.
        is_due = self._num_records & (self._num_records - 1) == 0 or self._num_records % 64 == 0
        if is_due:
            self._submit(writer)
        if histograms:
            self._start(lambda: _write_histograms(writer, step, histograms))

    def close(self, writer: MetricWriter) -> None:
        """Draw the newest records, and wait for the thread."""
        if not self._is_drawn:
            self._submit(writer)
        self._thread.shutdown()

    def _append(self, step: int, values: Mapping[str, Sequence[float | None]]) -> None:
        for name in values.keys() - self._values.keys():
            self._values[name] = [()] * len(self._steps)
        self._steps.append(step)
        for name, columns in self._values.items():
            columns.append(values.get(name, ()))
        self._num_records += 1
        if len(self._steps) > _MAX_COLUMNS:  # keep the newest record
            self._steps = self._steps[::-2][::-1]
            self._values = {name: each[::-2][::-1] for name, each in self._values.items()}

    def _submit(self, writer: MetricWriter) -> None:
        steps = list(self._steps)
        values = {name: list(columns) for name, columns in self._values.items()}
        self._is_drawn = True
        self._start(lambda: _write_heat_maps(writer, steps, values))

    def _start(self, run: Callable[[], None]) -> None:
        if self._drawing is not None:
            self._drawing.result()  # limits the number of queued drawings to one
        self._drawing = self._thread.submit(_without_errors, run)


def _without_errors(run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as error:  # a failure to draw an image must not stop the run
        _log.warning("TensorBoard: cannot write layer statistics: %s", error)


def _write_histograms(writer: MetricWriter, step: int, histograms: Mapping[str, Any]) -> None:
    for name, each in histograms.items():
        for layer, counts in enumerate(each["counts"]):
            if counts is not None:
                tag = f"layers/{name}/{layer:03d}"
                writer.show(partial(writers.histogram, tag, each["edges"], counts), step)


def _write_heat_maps(
    writer: MetricWriter, steps: Sequence[int], values: Mapping[str, Sequence[Any]]
) -> None:
    for name, columns in values.items():
        height = max(map(len, columns))
        cells = np.full((height, len(steps)), np.nan)
        for number, column in enumerate(columns):
            for layer, value in enumerate(column):
                cells[layer, number] = np.nan if value is None else value
        png, size = draw_heat_map(name, cells, steps)
        summary = partial(writers.png_image, f"layers/{name}", png, size, _ABOUT)
        writer.show(summary, steps[-1])


def draw_heat_map(
    title: str, cells: np.ndarray, steps: Sequence[int]
) -> tuple[bytes, tuple[int, int]]:
    """Return a PNG of a heat map, float `[layers, steps]`, and its (width, height) in pixels.

    NaN cells are grey. The caption lists the range of values, the scale and the range of steps.
    """
    from PIL import Image, ImageDraw, ImageFont

    shares, low, high, scale = _colour_positions(cells)
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in _COLOURS], float)
    grey = [int(_MISSING[i : i + 2], 16) for i in (1, 3, 5)]
    places = np.nan_to_num(shares) * (len(stops) - 1)
    channels = [np.interp(places, range(len(stops)), stops[:, channel]) for channel in range(3)]
    pixels = np.where(np.isnan(shares)[..., None], grey, np.stack(channels, -1))
    across = max(_CELL, 320 // len(steps))
    enlarged = pixels.astype(np.uint8).repeat(_CELL, 0).repeat(across, 1)
    map_image = Image.fromarray(enlarged)
    width = map_image.width + 2 * _MARGIN
    image = Image.new("RGB", (width, map_image.height + 3 * _LINE + 2 * _MARGIN), _PAPER)
    image.paste(map_image, (_MARGIN, _MARGIN + _LINE))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    below = _MARGIN + _LINE + map_image.height + 2
    pen.text((_MARGIN, 2), f"{title}, layers 0 to {len(cells) - 1}", _INK, font)
    pen.text((_MARGIN, below), f"{low:.3g} to {high:.3g}, {scale} colours", _INK, font)
    pen.text((_MARGIN, below + _LINE), f"steps {steps[0]} to {steps[-1]}", _INK, font)
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue(), image.size


def _colour_positions(cells: np.ndarray) -> tuple[np.ndarray, float, float, str]:
    """Return the position of each cell between the smallest and largest color, 0 to 1, the smallest
    and the largest value, and the name of the scale.
    """
    finite = cells[np.isfinite(cells)]
    if not finite.size:
        return np.full(cells.shape, np.nan), math.nan, math.nan, "linear"
    low, high = float(finite.min()), float(finite.max())
    scaled, ends, scale = cells, (low, high), "linear"
    if low > 0 and high / low > _LOG_RATIO:
        scaled, ends, scale = np.log(cells), (math.log(low), math.log(high)), "logarithmic"
    span = ends[1] - ends[0] or 1.0
    shares = np.where(np.isfinite(cells), np.clip((scaled - ends[0]) / span, 0, 1), np.nan)
    return shares, low, high, scale
