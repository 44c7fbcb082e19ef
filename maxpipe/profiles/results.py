"""Results of a profile: the report by operation, the measured timeline and the bubble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.io import files
from maxpipe.profiles import draw
from maxpipe.profiles.bubble import Bubble, explain, timeline_json
from maxpipe.profiles.capture import (
    PERFETTO_FILE,
    PICTURE_FILE,
    Capture,
    write_report,
    write_results,
)
from maxpipe.profiles.memory import memory_lines
from maxpipe.profiles.report import ProfileReport, summarize
from maxpipe.profiles.timeline import NoTicksError, Timeline, measure
from maxpipe.schedule.canvas import Canvas


@dataclass(frozen=True)
class Results:
    """Results of a profile. A trace without ticks has no timeline."""

    capture: Capture
    report: ProfileReport
    timeline: Timeline | None
    bubble: Bubble | None
    reason: str = ""
    """Reason why the trace has no timeline."""

    def write(self) -> None:
        """Write the report as JSON, and the timeline as JSON, image and trace for Perfetto.

        Raises:
            OSError: a file cannot be written.
        """
        folder, timeline, bubble = self.capture.folder, self.timeline, self.bubble
        write_report(folder, self.to_json())
        if timeline is None or bubble is None:
            return
        write_results(folder, timeline_json(timeline, bubble, self.capture.metadata))
        files.write(folder / PICTURE_FILE, draw.draw_timeline(timeline, bubble).svg())
        files.write(folder / PERFETTO_FILE, draw.perfetto(timeline, bubble))

    def draw_overview(self) -> Canvas:
        """Draw the timelines at the width of a TensorBoard image."""
        assert self.timeline is not None and self.bubble is not None
        return draw.draw_overview(self.timeline, self.bubble)

    def to_json(self, most: int = 10) -> dict[str, Any]:
        """Return the report and the bubble as JSON values."""
        bubble: Mapping[str, Any] | None = self.bubble and self.bubble.to_json()
        return self.report.to_json(most) | {
            "shares_cores": self.capture.metadata.shares_cores,
            "memory_bytes": self.capture.memory,
            "bubble": bubble,
        }

    def lines(self, most: int = 10) -> list[str]:
        """Return the report and the bubble as text lines."""
        bubble = self.bubble
        lines = [*self.report.lines(most), "", *memory_lines(self.capture.memory), ""]
        if bubble is None:
            return [*lines, f"no timeline: {self.reason}"]
        lines.append(bubble.summary())
        lines += [f"  {cause}" for cause in bubble.causes]
        text = f"wall time without operations in the tick loop: {bubble.wall_idle:.1%}"
        if self.capture.metadata.shares_cores:
            text += " (virtual devices share cores, so this includes waits for a core)"
        return [*lines, text]


def analyze(capture: Capture) -> Results:
    """Measure the operations, the timeline and the bubble of a profile."""
    report = summarize(capture)
    try:
        timeline = measure(capture)
    except NoTicksError as error:
        return Results(capture, report, None, None, str(error))
    return Results(capture, report, timeline, explain(timeline, capture.metadata))
