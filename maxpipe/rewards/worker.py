"""Worker process for rewards, which reads JSON requests from stdin and writes responses to stdout.

Each request and each response is one line. The first request selects the function; each later
request contains a completion and its prompt record. This module imports only `builtin` from
maxpipe, so that the process starts quickly.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from maxpipe.rewards import builtin

_MAX_SHOWN = 80
_LARGEST = 3.4e38
_MARGIN_SECONDS = 10.0
"""Number of seconds beyond the time limit after which this process terminates itself, in case its
parent process has not terminated it."""


def main() -> None:
    """Process requests until the end of stdin."""
    # Redirect the function's output to stderr, and prevent the function from reading requests.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    settings = json.loads(requests.readline())
    seconds = float(settings["seconds"])

    def reply(content: dict[str, Any]) -> None:
        try:
            replies.write(json.dumps(content) + "\n")
            replies.flush()
        except BrokenPipeError:  # the parent process was killed
            os._exit(1)

    try:
        with _time_limit(float(settings["start_seconds"])):
            reward = _function(settings)
    except BaseException as error:
        reply({"error": _describe_error(error)})
        return
    reply({})
    for line in requests:
        request = json.loads(line)
        try:
            with _time_limit(seconds):
                value = reward(request["completion"], request["record"])
            reply({"reward": _number(value)})
        except BaseException as error:
            reply({"error": _describe_error(error)})


def _function(settings: dict[str, Any]) -> Any:
    if not settings.get("file"):
        return builtin.builtin_reward(settings["kind"], settings["field"])
    path, name = settings["file"], settings["function"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("reward_file", path)
    if spec is None or spec.loader is None:
        raise ImportError("the file name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"the file has no function {name}")
    return function


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the function returned {_shorten(repr(value))}, which is not a number")
    number = float(value)
    if not abs(number) <= _LARGEST:
        raise ValueError(f"the function returned {number:g}, which is not finite in float32")
    return number


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Let the operating system terminate this process after the time limit, regardless of the code
    that is running.
    """
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds + _MARGIN_SECONDS)
    try:
        yield
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _describe_error(error: BaseException) -> str:
    if isinstance(error, TypeError | ValueError) and str(error).startswith("the function returned"):
        return str(error)
    return f"the code raised {type(error).__name__}: {_shorten(str(error))}".rstrip(": ")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."


if __name__ == "__main__":
    main()
