"""Times of tests: which tests are slow, and how `make test-times` records them.

A pytest plugin, registered by conftest.py. Fixtures and results that several tests share count for
each test that uses them, even if an earlier test computed them: a share of their time in the
test's cost, and all of it in the test's time alone.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import pytest

TIMES = Path(__file__).with_name("times.json")
"""[cost, time alone] of each test in seconds, measured in one run on two cores, or a number if both
are equal. `make test-times` updates them."""
SLOW_SECONDS = 2.0
"""Tests with at least this cost are in `make test-slow`, and not in `make test`."""
MEDIUM_SECONDS = 0.05
"""Tests that take at least this time alone are not in `make test-fast`."""
ENGINE = ("tests/nn/", "tests/parallel/", "tests/pipeline/", "tests/schedule/", "tests/step/")
"""Folders in which the fastest case of each test function is never slow, and of which
`--whole-engine` leaves out no test."""

PID = os.getpid()
Key = tuple[str, int]
"""Identifies a shared fixture or result: its name, and the process that computed it."""

_computed: list[float] = []
"""Seconds to compute each shared fixture and result that was computed since the last report."""
_used: dict[Key, float] = {}
"""Seconds to compute each shared result that was used since the last report."""
_fixtures: dict[tuple[str, str], float] = {}
"""Seconds to set up each shared fixture, keyed by its place and name."""
_own: defaultdict[str, float] = defaultdict(float)
"""Seconds of each test of this run without what it shares, keyed by node ID."""
_shared: defaultdict[str, dict[Key, float]] = defaultdict(dict)
"""Seconds to compute what each test shares, keyed by node ID."""


P = ParamSpec("P")
T = TypeVar("T")


class shared(Generic[P, T]):
    """A decorator like `functools.cache` that records which tests use the results."""

    def __init__(self, function: Callable[P, T]) -> None:
        @functools.cache
        def compute(*args: P.args, **kwargs: P.kwargs) -> tuple[T, Key, float]:
            start, others = time.perf_counter(), sum(_computed)
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - start
            _computed.append(seconds - (sum(_computed) - others))
            number = compute.cache_info().misses
            return result, (f"{function.__module__}.{function.__name__} {number}", PID), seconds

        self._compute = compute
        self.cache_clear = compute.cache_clear

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        result, key, seconds = self._compute(*args, **kwargs)
        _used[key] = seconds
        return result


def recorded_times() -> dict[str, tuple[float, float]]:
    """Return (cost, time alone) in seconds of each test in `times.json`, keyed by node ID."""
    return {
        f"{path}::{name}": tuple(value) if isinstance(value, list) else (value, value)
        for path, tests in json.loads(TIMES.read_text(encoding="utf-8")).items()
        for name, value in tests.items()
    }


# Marks are added before pytest selects by them; every Nth test is taken afterwards.
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    times = recorded_times()
    fastest: dict[str, tuple[float, str]] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        case = times.get(item.nodeid, (0.0, 0.0))[0], item.nodeid
        fastest[function] = min(fastest.get(function, case), case)
    for item in items:
        cost, alone = times.get(item.nodeid, (0.0, 0.0))
        function = item.nodeid.partition("[")[0]
        is_kept = function.startswith(ENGINE) and fastest[function][1] == item.nodeid
        if cost >= SLOW_SECONDS and not is_kept:
            item.add_marker("slow")
        elif alone >= MEDIUM_SECONDS:
            item.add_marker("medium")
    yield
    _computed.clear()  # results that modules computed for their parameters count for no test
    _used.clear()
    every, part = int(config.getoption("--every") or 1), int(config.getoption("--part") or 0)
    whole = ENGINE if config.getoption("--whole-engine") else ()
    others = [item for item in items if not item.nodeid.startswith(whole)]
    chosen = set(others[part % every :: every])
    kept = [item for item in items if item.nodeid.startswith(whole) or item in chosen]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    start = time.perf_counter()
    result = yield
    if fixturedef.scope != "function":
        seconds = time.perf_counter() - start
        _fixtures[fixturedef.baseid, fixturedef.argname] = seconds
        _computed.append(seconds)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add to the report the seconds of a test and of each shared fixture and result it uses."""
    report = yield
    seconds = call.duration - sum(_computed)
    if call.when == "setup":
        names = set(getattr(item, "fixturenames", ()))
        for (base, name), t in _fixtures.items():
            if name in names and item.nodeid.startswith(base):
                _used[f"{base}::{name}", PID] = t
    report.user_properties += [("seconds", seconds), ("shared", [*_used.items()])]
    _computed.clear()
    _used.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties: dict[str, Any] = dict(report.user_properties)
    _own[report.nodeid] += properties.get("seconds", 0.0)
    _shared[report.nodeid] |= {tuple(key): t for key, t in properties.get("shared", ())}


def _measured() -> dict[str, tuple[float, float]]:
    """Return (cost, time alone) in seconds of each test of this run, keyed by node ID."""
    users = Counter(key for keys in _shared.values() for key in keys)
    return {
        test: (
            own + sum(t / users[key] for key, t in _shared[test].items()),
            own + sum(_shared[test].values()),
        )
        for test, own in _own.items()
    }


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the files of this run in `times.json`, in the process that starts the workers."""
    if not session.config.getoption("--record-times") or hasattr(session.config, "workerinput"):
        return
    measured = _measured()
    run = {test.partition("::")[0] for test in measured}  # renamed tests are dropped
    times = {test: t for test, t in recorded_times().items() if test.partition("::")[0] not in run}
    times |= {test: (a, b) for test, (a, b) in measured.items() if b >= MEDIUM_SECONDS}
    files: dict[str, dict[str, Any]] = {}
    for test, pair in sorted(times.items()):
        path, _, name = test.partition("::")
        cost, alone = (round(seconds, 1 if seconds > 1 else 2) for seconds in pair)
        files.setdefault(path, {})[name] = alone if cost == alone else [cost, alone]
    text = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", json.dumps(files, indent=1))
    TIMES.write_text(text + "\n", encoding="utf-8")
