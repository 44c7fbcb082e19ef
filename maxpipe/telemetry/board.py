"""Summaries for TensorBoard beyond scalars, made without TensorFlow.

Each function returns `Summary` protocol buffers, which `telemetry.MetricWriter` puts into the
run's event file. tensorboard is imported inside: it takes half a second.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

from maxpipe.schedule.canvas import Canvas
from maxpipe.telemetry.metrics import CHARTS

_SCALE = 3
"""Pixels of a PNG for each pixel of its drawing: sharp at full size."""


def chart_titles(tags: Iterable[str]) -> tuple[str, ...]:
    """Titles of the charts of `CHARTS` that have data in a run with these tags."""
    tags = set(tags)
    return tuple(
        title
        for title, shown in CHARTS
        if any(re.fullmatch(_pattern(each), tag) for each in shown for tag in tags)
    )


def charts(chosen: Collection[str]) -> Any:
    """The charts of `CHARTS` with these titles, for the tab "Custom Scalars".

    TensorBoard uses the newest layout of a run, and joins those of several runs. A chart keeps
    tags that have no data yet, so that it is the same chart in every run.
    """
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout: Any = layout_pb2
    category = layout.Category(title="training")
    for title, tags in CHARTS:
        if title in chosen:
            content = layout.MultilineChartContent(tag=[f"^{_pattern(tag)}$" for tag in tags])
            category.chart.append(layout.Chart(title=title, multiline=content))
    text = layout.Layout(category=[category]).SerializeToString()
    return _tensor(metadata.CONFIG_SUMMARY_TAG, metadata.create_summary_metadata(), [text])


def _pattern(tag: str) -> str:
    """The regular expression of a tag, in which NAME is any name."""
    return tag.replace("NAME", "[^/]+")


def hyperparameters(values: Mapping[str, bool | float | str], run: str) -> Any:
    """The session of a run for the tab "HParams"."""
    from tensorboard.plugins.hparams import summary_v2

    return summary_v2.hparams_pb(dict(values), trial_id=run)


def image(tag: str, drawing: Canvas, description: str = "") -> Any:
    """A picture for the tab "Images"; TensorBoard shows its description next to the tag."""
    from tensorboard.plugins.image import metadata

    file = BytesIO()
    drawing.png(file, _SCALE)
    size = [str(round(_SCALE * each)).encode() for each in (drawing.width, drawing.height)]
    about = metadata.create_summary_metadata(display_name=tag, description=description)
    return _tensor(tag, about, [*size, file.getvalue()])


def _tensor(tag: str, metadata: Any, values: Sequence[bytes]) -> Any:
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

    modules: Any = (summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2)
    summaries, tensors, shapes, types = modules
    shape = shapes.TensorShapeProto()
    if len(values) > 1:
        shape.dim.add(size=len(values))
    tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=list(values), tensor_shape=shape)
    summary = summaries.Summary()
    summary.value.add(tag=tag, metadata=metadata, tensor=tensor)
    return summary
