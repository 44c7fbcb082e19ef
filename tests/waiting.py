"""Wait for other threads or processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(seen: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return when `seen()` is true, or after `seconds`: the caller's assertions then fail."""
    deadline = time.monotonic() + seconds
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.02)
