from __future__ import annotations

import threading
import time

from maxpipe.telemetry.background import BackgroundWorker, RateLimiter


def test_items_are_handled_in_order_and_the_end_waits_for_them():
    found: list[int | None] = []
    worker = BackgroundWorker[int]("test", found.append, capacity=10)
    worker.start()
    assert all(worker.put(number) for number in range(5))
    worker.end()
    assert worker.join(5.0)
    assert [each for each in found if each is not None] == [*range(5)]


def test_put_never_blocks_and_counts_dropped_items():
    release = threading.Event()

    def handle(item: int | None) -> None:
        release.wait()

    worker = BackgroundWorker[int]("test", handle, capacity=2)
    worker.start()
    time.sleep(0.05)  # the thread waits in its first call
    start = time.perf_counter()
    accepted = [worker.put(number) for number in range(1000)]
    assert time.perf_counter() - start < 0.1
    assert accepted.count(True) == 2 and worker.dropped == 998
    assert not worker.join(0.05)
    release.set()
    worker.end()
    assert worker.join(5.0)


def test_calls_without_items_after_a_delay():
    calls: list[int | None] = []

    def handle(item: int | None) -> float | None:
        calls.append(item)
        return 0.01 if len(calls) < 4 else None

    worker = BackgroundWorker[int]("test", handle, capacity=2)
    worker.start()
    worker.end()
    assert worker.join(5.0)
    assert len(calls) >= 4


def test_an_exception_is_logged_once_and_the_thread_continues(caplog):
    handled: list[int] = []

    def handle(item: int | None) -> None:
        if item is not None:
            handled.append(item)
            raise ValueError("broken")

    worker = BackgroundWorker[int]("test", handle, capacity=10)
    worker.start()
    for number in range(3):
        worker.put(number)
    worker.end()
    assert worker.join(5.0) and handled == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == ["test: ValueError: broken"]


def test_rate_limiter_allows_one_warning_per_period():
    limiter = RateLimiter(seconds=0.05)
    assert limiter.allows() and not limiter.allows()
    time.sleep(0.06)
    assert limiter.allows()
