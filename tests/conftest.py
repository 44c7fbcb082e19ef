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
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import jaxtyping
import pytest

import tests.signatures
import tests.times
from tests.bucket import Bucket, served, variables
from tests.fork_server import ForkServer, running_servers
from tests.s3 import Store, served_s3
from tests.s3 import variables as s3_variables

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
"""Compiled Python modules, including those that pytest rewrites; later runs start much faster."""
sys.pycache_prefix, sys.dont_write_bytecode = str(CACHE), False


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
        "--whole-engine", action="store_true", help="--every leaves out no test of the engine"
    )
    parser.addoption(
        "--record-times", action="store_true", help="write the times of this run to times.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Hooks of a conftest are not called for fixtures of the whole session; those of a plugin are.
    config.pluginmanager.register(tests.times)


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


@pytest.fixture
def folder_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the buckets of `folder://`, a store that tensorstore has no driver for."""
    from maxpipe.io import stores
    from tests import folder_store

    folder_store.register()
    monkeypatch.setattr(stores, "CREATE_SECONDS", 0.01)
    monkeypatch.setenv(folder_store.ROOT, str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="session")
def s3_session() -> Iterator[Store]:
    """S3 server for `s3://` in this process and in processes that are started later."""
    for package in ("s3fs", "moto", "flask"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("S3 needs the extra s3, and the tests need moto")
    with served_s3() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_variables(store).items():
            patch.setenv(name, value)
        from maxpipe.io.stores import store_filesystem

        store.filesystem = store_filesystem("s3://bucket")
        store.filesystem.mkdir("bucket")
        yield store


@pytest.fixture
def s3(s3_session: Store) -> Iterator[Store]:
    """S3 server with an empty bucket `bucket`."""
    s3_session.requests.clear()
    yield s3_session
    s3_session.fault = s3_session.lost = lambda handler: False
    if found := s3_session.filesystem.find("bucket"):
        s3_session.filesystem.rm(found)
