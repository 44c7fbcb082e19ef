"""Process of one tracker, which reads JSON requests from stdin and writes responses to stdout.

Each request and each response is one line. The first request creates the tracker. If stdin ends
without a request to close the tracker, the run was killed: the process closes the tracker and ends
after a few seconds at most, even if the client hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from maxpipe.config.plugins import load_plugins
from maxpipe.config.sections.log import TRACKERS
from maxpipe.config.sections.tracker import TrackerConfig
from maxpipe.telemetry.trackers.interface import Record, TrackedRun, Tracker
from maxpipe.telemetry.trackers.mlflow import MlflowTracker
from maxpipe.telemetry.trackers.otlp import OtlpTracker
from maxpipe.telemetry.trackers.prometheus import PrometheusTracker
from maxpipe.telemetry.trackers.trackio import TrackioTracker
from maxpipe.telemetry.trackers.wandb import WandbTracker

_TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "prometheus": PrometheusTracker,
    "otlp": OtlpTracker,
}
"""Built-in trackers. A client is imported when its tracker is created."""
_NICENESS = 5
_CLOSE_SECONDS = 5.0
_MAX_SHOWN = 300


def main() -> None:
    """Process requests until the end of stdin."""
    # Clients print to stdout, which must contain only responses.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_exit_after_run, args=[requests.fileno()], daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    tracker: Tracker | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if tracker is None:
                tracker = _create(request)
                reply: dict[str, Any] = {
                    "keeps_history": tracker.keeps_history,
                    "settle_seconds": tracker.settle_seconds,
                }
            else:
                reply = _handle(tracker, request) | {"warning": tracker.warning}
        except BaseException as error:  # a client may call sys.exit
            reply = {"error": _describe(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if request.get("close") is not None and "error" not in reply:
            break
    else:
        _close_after_kill(tracker)
    os._exit(0)  # exit handlers of clients may wait for their server without a limit


def _exit_after_run(requests: int) -> None:
    """End this process if the run has ended, and the pending request does not."""
    closed = select.poll()
    closed.register(requests, 0)  # reports only that the other end was closed
    closed.poll()
    time.sleep(2.0 * _CLOSE_SECONDS)
    os._exit(1)


def _close_after_kill(tracker: Tracker | None) -> None:
    """Let the service show that the run has stopped, and the client write its buffers."""
    limit = threading.Timer(_CLOSE_SECONDS, lambda: os._exit(1))
    limit.daemon = True
    limit.start()
    with contextlib.suppress(BaseException):
        if tracker is not None:
            tracker.close(False)


def _create(request: Mapping[str, Any]) -> Tracker:
    plugins, name = request["plugins"], request["tracker"]
    load_plugins(plugins, "plugins.modules", allowed=bool(plugins))
    return (_TRACKERS.get(name) or TRACKERS[name])()


def _handle(tracker: Tracker, request: Mapping[str, Any]) -> dict[str, Any]:
    if "open" in request:
        fields = request["open"]
        run = TrackedRun(**{**fields, "tracker_config": TrackerConfig(**fields["tracker_config"])})
        run_id = tracker.open(run, request["run_id"])
        return {"run_id": run_id, "address": tracker.address}
    if "records" in request:
        tracker.log([Record(*each) for each in request["records"]])
    elif "artifact" in request:
        tracker.log_artifact(*request["artifact"])
    elif "checkpoint" in request:
        tracker.log_checkpoint(*request["checkpoint"])
    elif "close" in request:
        tracker.close(request["close"])
    return {}


def _describe(error: BaseException) -> str:
    if os.environ.get("MAXPIPE_DEBUG"):
        traceback.print_exception(error, file=sys.stderr)
    text = " ".join(str(error).split())
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return f"{type(error).__name__}: {text}".rstrip(": ")


if __name__ == "__main__":
    main()
