from __future__ import annotations

import errno
import io
import logging
import re

import pytest

from maxpipe.telemetry import console as module
from maxpipe.telemetry.console import Console

METRICS = {
    "train/loss": 2.34561,
    "train/lr": 3e-4,
    "perf/step_s": 0.5,
    "perf/data_wait_s": 0.005,
    "perf/tokens_per_s": 12_345.0,
    "perf/tflops_per_device": 3.21,
}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_lines(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with Console("auto", stream=stream) as console:
        console.banner([("run", "runs/tiny"), ("parameters", "1.2M [float32]")])
        with console.stage("compiling train step"):
            now += 12.3
        console.begin(110, 600)
        now += 1.3
        console.step(120, METRICS)
        console.note("saved step 120")
        now += 1.1
        console.step(130, {"eval/loss": 2.5, "perf/mfu": 0.4123})
    assert stream.getvalue().splitlines() == [
        "run         runs/tiny",
        "parameters  1.2M [float32]",
        "compiling train step ...",
        "compiling train step: 12.3s",
        "step   120/600  loss 2.3456  12.3k tokens/s  3.2 TFLOP/s/device  data wait 1%  eta 1m02s",
        "saved step 120",
        "step   130/600  eval loss 2.5000  MFU 41.2%  eta 56.4s",
    ]


def test_each_message_is_one_write():
    """Otherwise, output of another thread could be printed in the middle of a line."""

    class Writes(io.StringIO):
        def __init__(self):
            super().__init__()
            self.texts: list[str] = []

        def write(self, text: str, /) -> int:
            self.texts.append(text)
            return super().write(text)

    stream = Writes()
    with Console("plain", stream=stream) as console:
        console.banner([("run", "runs/tiny"), ("parameters", "1.2M [float32]")])
        console.tell("saved step 120")
    assert all(text.endswith("\n") for text in stream.texts if text)
    assert len(list(filter(None, stream.texts))) == 2


def test_failed_stage_is_reported():
    stream = io.StringIO()
    with (
        pytest.raises(RuntimeError, match="boom"),
        Console("plain", stream=stream) as console,
        console.stage("restoring"),
    ):
        raise RuntimeError("boom")
    assert stream.getvalue().splitlines()[1].startswith("restoring: failed after 0.")


def test_live_view_shows_metrics_stage_and_progress(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = _Terminal()
    with Console("auto", stream=stream) as console:
        console.banner([("run", "runs/tiny [1]")])
        with console.stage("compiling train step"):
            assert console._view is not None and console._view._live is not None
            console._view._live.refresh()
        console.begin(0, 600)
        console.step(120, METRICS)
        logging.getLogger("orbax").warning("slow disk")
    shown = stream.getvalue()
    for text in (
        r"runs/tiny \[1\]",
        r"compiling train step \.\.\. 00:0\d",
        r"compiling train step: \d+\.\ds",
        r"loss 2\.3456",
        r"12\.3k tokens/s",
        r"step 120/600",
        r"warning: orbax: slow disk",
    ):
        assert re.search(text, shown)


def test_dumb_terminal_uses_plain_output(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = _Terminal()
    with Console("auto", stream=stream) as console:
        console.note("hello")
    assert stream.getvalue() == "hello\n"


def test_only_warnings_of_other_processes_are_shown():
    stream = io.StringIO()
    with Console("live", process_index=3, stream=stream) as console:
        console.banner([("run", "x")])
        console.begin(0, 10)
        console.step(1, METRICS)
        with console.stage("saving"):
            logging.getLogger("maxpipe").warning("disk is slow")
    assert stream.getvalue() == "[process 3] warning: disk is slow\n"


def test_library_info_messages_are_not_printed():
    from absl import logging as absl_logging

    stream = io.StringIO()
    root = logging.getLogger()
    handlers = list(root.handlers)
    with Console("plain", stream=stream):
        absl_logging.info("saving checkpoint")
        logging.getLogger("jax._src.dispatch").info("compiling")
        absl_logging.warning("slow %s", "store")
        logging.getLogger("maxpipe.data.sources").info("indexing: %d %%", 40)
    assert stream.getvalue() == "warning: absl: slow store\nindexing: 40 %\n"
    assert root.handlers == handlers


def test_closed_terminal_does_not_end_run():
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    for stream in (Gone(), io.StringIO()):
        console = Console("plain", stream=stream)
        if type(stream) is io.StringIO:
            stream.close()
        console.begin(0, 10)
        console.step(1, METRICS)
        console.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.96, "1m00s"), (62, "1m02s"), (3600, "1h00m"), (90_000, "1d01h")],
)
def test_duration_format(seconds: float, text: str):
    assert module.duration(seconds) == text
