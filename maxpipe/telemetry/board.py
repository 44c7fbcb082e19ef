"""Summaries for TensorBoard beyond scalars, made without TensorFlow.

Each function returns `Summary` protocol buffers, which `telemetry.MetricWriter` puts into the
run's event file. tensorboard is imported inside: it takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from maxpipe.schedule.canvas import Canvas
from maxpipe.telemetry.metrics import CHARTS


def charts() -> Any:
    """Groups of charts in the order of `CHARTS`, for the tab "Custom Scalars"."""
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout: Any = layout_pb2
    category = layout.Category(title="training")
    for title, tags in CHARTS:
        # A tag is a regular expression there.
        patterns = [f"^{tag.replace('NAME', '[^/]+')}$" for tag in tags]
        content = layout.MultilineChartContent(tag=patterns)
        category.chart.append(layout.Chart(title=title, multiline=content))
    text = layout.Layout(category=[category]).SerializeToString()
    return _tensor(metadata.CONFIG_SUMMARY_TAG, metadata.create_summary_metadata(), [text])


def hyperparameters(values: Mapping[str, bool | float | str], run: str) -> Any:
    """The session of a run for the tab "HParams"."""
    from tensorboard.plugins.hparams import summary_v2

    return summary_v2.hparams_pb(dict(values), trial_id=run)


def image(tag: str, drawing: Canvas) -> Any:
    """A picture for the tab "Images"."""
    from tensorboard.plugins.image import metadata

    file = BytesIO()
    drawing.png(file)
    size = [str(round(each)).encode() for each in (drawing.width, drawing.height)]
    about = metadata.create_summary_metadata(display_name=tag, description="")
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
