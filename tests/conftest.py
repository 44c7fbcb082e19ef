"""Test set-up: eight virtual CPU devices and golden files.

jax is configured when a test module or the tested code first imports it: early enough for all uses
of a backend, and at no cost for tests that do not import jax. No environment variable stays set, so
a subprocess of a test starts with the environment of a user.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import jaxtyping
import pytest

import tests.signatures  # noqa: F401  called by the import hook below
from tests.bucket import Bucket, served, variables
from tests.fork_server import ForkServer, running_servers

# A shell starts background jobs with SIGINT ignored; tests of Ctrl-C would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

NUM_DEVICES = 8
# Modules whose calls are checked against the shapes and types in their signatures.
CHECKED = (
    "maxpipe.nn.attention",
    "maxpipe.nn.decoder",
    "maxpipe.nn",
    "maxpipe.pipeline.loss_head",
    "maxpipe.pipeline.prologue",
    "maxpipe.optim.guard",
    "maxpipe.optim",
    "maxpipe.step.step",
)
GOLDEN = Path(__file__).parent / "golden"
TIMES = Path(__file__).parent / "times.json"
"""Test times of one run on two cores, updated by `make test-times`."""
SLOW_SECONDS, MEDIUM_SECONDS = 2.0, 0.1
"""Slower tests run only in `make test-slow`, or are left out of `make test-fast`, respectively."""
ENGINE = ("tests/nn/", "tests/parallel/", "tests/pipeline/", "tests/schedule/", "tests/step/")
"""Folders in which the fastest case of each test function is never marked slow."""

# On a busy machine, any single example may be slow.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

# Tracing creates many short-lived objects, and compiled programs stay in memory: less frequent
# garbage collection saves about 10% of the time.
gc.set_threshold(200_000, 50, 50)

# Machine code is half as fast and compiles in half the time; partitioning, fusion and memory do not
# change. There is no compilation cache: see `maxpipe.distributed.runtime.start`.
# Each core runs one test process, so parallel compilation of one program gains nothing.
FAST_COMPILE = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
}
"""Environment variables of a subprocess that compiles a step whose speed does not matter."""
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Fusions are lowered directly to LLVM instead of through MLIR, in a third of the compile time.
    # XLA aborts the process at an unknown flag, and newer versions do not have this flag.
    FAST_COMPILE["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

CACHE = Path.home() / ".cache" / "maxpipe" / "test"
"""Python bytecode cache that is kept between sessions."""


def environment_of_command() -> dict[str, str]:
    """Return variables with which a maxpipe process loads modules and compiles steps faster."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    root = str(Path(__file__).parents[1])
    return environment | {"PYTHONPATH": root, "PYTHONPYCACHEPREFIX": str(CACHE)} | FAST_COMPILE


def _configure_jax(jax: Any) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)
    _read_by_xla(FAST_COMPILE["XLA_FLAGS"])


def _read_by_xla(flags: str) -> None:
    """Make XLA read `flags`, which it does once, when compile options are first created."""
    from jaxlib import xla_client

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip())
        xla_client.CompileOptions()


class _JaxLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _configure_jax(module)


class _JaxFinder:
    """Run `_configure_jax` after the first `import jax` of the process."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "jax":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _JaxLoader(name, spec.origin)
        return spec


if "jax" in sys.modules:  # a pytest plugin has imported jax
    _configure_jax(sys.modules["jax"])
else:
    sys.meta_path.insert(0, _JaxFinder)
jaxtyping.install_import_hook(CHECKED, "tests.signatures.checked")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files from this run"
    )
    parser.addoption("--every", type=int, default=1, help="run every Nth of the selected tests")
    parser.addoption("--part", type=int, default=0, help="index of the first test for --every")
    parser.addoption(
        "--record-times", action="store_true", help="write the times of this run to times.json"
    )


def recorded_times() -> dict[str, float]:
    """Return the time in seconds of each test in `times.json`, keyed by node ID."""
    files = json.loads(TIMES.read_text(encoding="utf-8"))
    return {f"{path}::{name}": t for path, tests in files.items() for name, t in tests.items()}


# Marks are added before pytest selects tests by mark; every Nth test is selected afterwards.
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    times = recorded_times()
    fastest: dict[str, tuple[float, str]] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        case = times.get(item.nodeid, 0.0), item.nodeid
        fastest[function] = min(fastest.get(function, case), case)
    for item in items:
        seconds = times.get(item.nodeid, 0.0)
        function = item.nodeid.partition("[")[0]
        is_kept = function.startswith(ENGINE) and fastest[function][1] == item.nodeid
        if seconds >= SLOW_SECONDS and not is_kept:
            item.add_marker("slow")
        elif seconds >= MEDIUM_SECONDS:
            item.add_marker("medium")
    yield
    every, part = int(config.getoption("--every") or 1), int(config.getoption("--part") or 0)
    kept = items[part % every :: every]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


_SETUP = pytest.StashKey[list[tuple[str, str]]]()
"""Shared fixtures that were set up since the last report."""
_shared: dict[tuple[str, str], float] = {}
"""Set-up time in seconds of each shared fixture, keyed by its base ID and name."""
_measured: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
    start = time.perf_counter()
    result = yield
    if fixturedef.scope != "function":
        key = fixturedef.baseid, fixturedef.argname
        _shared[key] = time.perf_counter() - start
        request.node.session.stash.setdefault(_SETUP, []).append(key)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record the time of a test, including the set-up of every shared fixture that it uses.

    Otherwise only the first test that uses a fixture would count as slow; without this test, the
    next one would.
    """
    report = yield
    names = set(getattr(item, "fixturenames", ()))
    seconds = call.duration
    if call.when == "setup":
        seconds -= sum(_shared[key] for key in item.session.stash.get(_SETUP, []))
        item.session.stash[_SETUP] = []
        seconds += sum(
            t
            for (base, name), t in _shared.items()
            if name in names and item.nodeid.startswith(base)
        )
    report.user_properties += [("seconds", seconds)]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds = dict(report.user_properties).get("seconds", 0.0)
    _measured[report.nodeid] = _measured.get(report.nodeid, 0.0) + float(str(seconds))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the files of this run in `times.json`, in the process that starts the workers."""
    if not session.config.getoption("--record-times") or hasattr(session.config, "workerinput"):
        return
    run = {test.partition("::")[0] for test in _measured}  # renamed tests are dropped
    times = {test: t for test, t in recorded_times().items() if test.partition("::")[0] not in run}
    times |= {test: t for test, t in _measured.items() if t >= MEDIUM_SECONDS}
    files: dict[str, dict[str, float]] = {}
    for test, seconds in sorted(times.items()):
        path, _, name = test.partition("::")
        files.setdefault(path, {})[name] = round(seconds, 1)
    TIMES.write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True if golden files should be rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def golden(update_golden: bool) -> Callable[[str, str], None]:
    """`golden(name, text)`: assert that `text` equals the file tests/golden/`name`."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest with --update-golden"
        expected = path.read_text(encoding="utf-8")
        assert text == expected, f"{path} differs: run pytest with --update-golden, then review"

    return check


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty home folder, without hardware measurements."""
    from maxpipe.hardware import known_hardware

    monkeypatch.setenv("HOME", str(tmp_path))
    known_hardware.cache_clear()
    yield tmp_path
    known_hardware.cache_clear()


@pytest.fixture(scope="session")
def next_server() -> Iterator[Callable[[], ForkServer]]:
    """`next_server()`: return the two fork servers of this session in turn."""
    with running_servers(environment_of_command()) as servers:
        yield servers


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    """The virtual CPU devices."""
    import jax

    found = jax.devices()
    assert len(found) == NUM_DEVICES, "the backend was started before conftest configured it"
    return found


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """Fake bucket for `gs://` in this process and in processes that are started later."""
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("buckets need the extra gcs")
    from fsspec.config import conf

    with served() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in variables(bucket).items():
            patch.setenv(name, value)
        patch.setitem(conf, "gcs", {"token": "anon"})
        yield bucket
