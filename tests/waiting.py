"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(seen: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return when it is seen, or after that time: the test goes on, and fails by itself."""
    deadline = time.monotonic() + seconds
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.02)
